//! Tests of drives that fail or hang under a server; `strace` makes the server's system calls fail or hang. Data on that drive
//! cannot be read, and the error says so. Everything else continues to work, even on that node.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::harness::{self, Cluster, Ground, signal, wait_for};
use nix::sys::signal::Signal;

/// Makes system calls of a process fail until this value is dropped.
struct Tampering(Child);

impl Tampering {
    /// Returns `None`, with a message on standard error, if there is no strace or it may not trace.
    fn with(pid: i32, inject: &str) -> Option<Self> {
        let (calls, pid) = (inject.split(':').next().unwrap(), pid.to_string());
        let (trace, inject) = (format!("trace={calls}"), format!("inject={inject}"));
        if !harness::is_installed("strace") {
            return None;
        }
        let mut command = harness::program("strace");
        command.args(["-f", "-o", "/dev/null", "-e", &trace, "-e", &inject, "-p", &pid]);
        let started = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut printed = String::new();
        if let Ok(mut child) = started {
            let mut lines = BufReader::new(child.stderr.take().unwrap());
            while lines.read_line(&mut printed).unwrap() > 0 {
                if printed.contains(" attached") {
                    // Drain the pipe, so that strace never blocks on it.
                    std::thread::spawn(move || while lines.read_line(&mut String::new()).is_ok_and(|len| len > 0) {});
                    return Some(Self(child));
                }
            }
            let _ = child.wait();
        }
        harness::skip(&format!("strace cannot trace a server here: {printed}"));
        None
    }
}

impl Drop for Tampering {
    fn drop(&mut self) {
        signal(self.0.id() as i32, Signal::SIGTERM);
        if wait_for(&mut self.0, Duration::from_secs(20)).is_none() {
            let _ = self.0.kill();
        }
    }
}

fn content(number: usize, len: usize) -> Vec<u8> {
    // It repeats after 256 bytes.
    let tile: Vec<u8> = (0..256).map(|at| (at * 7 + number) as u8).collect();
    let mut bytes = tile.repeat(len.div_ceil(tile.len()));
    bytes.truncate(len);
    bytes
}

fn ground(files: usize, len: usize) -> Ground {
    let ground = Ground::new();
    fs::create_dir(ground.at("d")).unwrap();
    (0..files).for_each(|number| fs::write(ground.at(format!("d/{number}")), content(number, len)).unwrap());
    ground
}

/// Returns the unnamed files that a server has open on its drives.
fn files_of(cluster: &Cluster, pid: i32) -> Vec<fs::File> {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|entry| entry.unwrap().path());
    let is_ours = |path: &std::path::PathBuf| fs::read_link(path).is_ok_and(|target| target.starts_with(cluster.data.path()));
    open.filter(is_ours).filter_map(|path| fs::File::open(path).ok()).filter(|file| file.metadata().unwrap().is_file()).collect()
}

/// Drops a file's pages from the page cache.
fn evict(file: &fs::File) {
    file.sync_all().unwrap();
    nix::fcntl::posix_fadvise(file, 0, 0, nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
}

/// Reads a whole file and checks its bytes.
fn read(view: &dayfly_client::View, number: usize, len: usize) -> Result<(), String> {
    let file = view.open(format!("/dayfly/d/{number}").as_bytes()).unwrap();
    let mut buffer = vec![0; len + 1];
    match view.read_at(&file, 0, &mut buffer) {
        Ok(count) => {
            assert!(buffer[..count] == content(number, len)[..], "wrong or short bytes in {number}");
            Ok(())
        }
        Err(error) => {
            assert_eq!(error.errno(), nix::libc::EIO);
            Err(error.to_string())
        }
    }
}

fn read_all(cluster: &Cluster, files: usize, len: usize) -> Vec<(usize, String)> {
    let view = cluster.view(0);
    (0..files).filter_map(|number| Some((number, read(&view, number, len).err()?))).collect()
}

/// SEMANTICS: "A drive that returns I/O errors affects only the data that it does not return. Each chunk that the drive does not
/// return is requested twice. The second time, the chunk's owner examines its copy of the block. If the copy is bad, the owner drops
/// it and reads the chunk from its origin. If that is impossible, only reads of that chunk fail, with EIO and a message that says
/// which node's drive failed. The node does not count as lost, and stage-ins continue."
#[test]
fn a_drive_with_io_errors_loses_only_its_own_data() {
    const LEN: usize = 100_000;
    let cluster = ground(150, LEN).up(2);
    cluster.stage(&[&cluster.at("d")], "/dayfly/d");
    // With occasional errors, each chunk arrives when it is requested again. strace counts the calls of each thread by itself, so by
    // chance both requests for a chunk meet an error. Then the next read succeeds.
    let Some(tampering) = Tampering::with(cluster.pids()[&1], "sendfile:error=EIO:when=5+20") else { return };
    let failed = read_all(&cluster, 50, LEN);
    assert!(failed.len() <= 2, "{failed:?}");
    let view = cluster.view(0);
    failed.iter().for_each(|(number, _)| read(&view, *number, LEN).unwrap());
    drop(tampering);
    // With permanent errors of this call alone, the copies are not bad, but cannot be sent. Reads of blocks on node 1 fail, and the
    // error says so.
    let tampering = Tampering::with(cluster.pids()[&1], "sendfile:error=EIO").unwrap();
    let failed = read_all(&cluster, 150, LEN);
    assert!(failed.len() > 20 && failed.len() < 90, "{} of 150", failed.len());
    for (_, reason) in &failed {
        assert!(reason.contains("node 1") && reason.contains("drive") && reason.contains("Input/output error"), "{reason}");
        assert!(!reason.contains("lost"), "{reason}");
    }
    // Stage-ins still succeed, on all nodes.
    fs::create_dir(cluster.at("e")).unwrap();
    (0..50).for_each(|number| fs::write(cluster.at(format!("e/{number}")), content(number, LEN)).unwrap());
    cluster.stage(&[&cluster.at("e")], "/dayfly/e");
    drop(tampering);
    assert_eq!(read_all(&cluster, 150, LEN), []);
    cluster.down();
}

/// SEMANTICS: "Blocks of healthy nodes are read as before."
#[test]
fn blocks_of_healthy_nodes_are_read_while_a_drive_hangs() {
    const FILES: usize = 90;
    const LEN: usize = 1 << 20;
    let cluster = ground(FILES, LEN).up_with(3, &["--memory", "32M"]);
    // No other node can serve the blocks of the hung drive.
    cluster.stage_compressed("d", "/dayfly/d");
    cluster.ok(&["tune", "--cache", "off"]);
    let pid = cluster.pids()[&1];
    let files = files_of(&cluster, pid);
    let Some(tampering) = Tampering::with(pid, "pread64:delay_enter=60000000") else { return };
    let view = cluster.view(0);
    let (start, hung, reads) = (Instant::now(), Mutex::new(BTreeSet::new()), Mutex::new(0));
    std::thread::scope(|scope| {
        // Keep node 1's blocks out of the page cache, so that node 1 reads its drive.
        scope.spawn(|| {
            while start.elapsed() < Duration::from_secs(20) {
                files.iter().for_each(evict);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        for thread in 0..8 {
            let (view, hung, reads) = (&view, &hung, &reads);
            scope.spawn(move || {
                // Keep reading for longer than a request waits for room in the arena.
                loop {
                    for number in (0..FILES).skip(thread % 4 * 20) {
                        if start.elapsed() > Duration::from_secs(20) {
                            return;
                        }
                        match read(view, number, LEN) {
                            Ok(()) => *reads.lock().unwrap() += 1,
                            Err(reason) => {
                                assert!(reason.contains("node 1"), "{number}: {reason}");
                                assert!(!reason.contains("arena"), "{number}: {reason}");
                                hung.lock().unwrap().insert(number);
                            }
                        }
                        std::thread::sleep(Duration::from_millis(20));
                    }
                }
            });
        }
    });
    let (hung, reads) = (hung.into_inner().unwrap(), reads.into_inner().unwrap());
    let summary =
        format!("{reads} reads from healthy nodes beside {} files of the hung node, {:?}\n", hung.len(), start.elapsed());
    let _ = std::io::stderr().write_all(summary.as_bytes());
    assert!(!hung.is_empty() && hung.len() < FILES / 2 + 10 && reads > FILES / 2, "{summary}");
    drop(tampering);
    harness::wait_until("the drive answers again", || hung.iter().all(|&number| read(&view, number, LEN).is_ok()));
    cluster.down();
}

/// SEMANTICS: "A drive that does not say how much room it has left keeps neither reads nor `dayfly status` waiting: `status` shows what
/// the drive said last, and how long ago."
#[test]
fn a_server_answers_while_its_drive_does_not_say_how_much_room_it_has() {
    const LEN: usize = 3000;
    let cluster = ground(60, LEN).up(2);
    cluster.stage(&[&cluster.at("d")], "/dayfly/d");
    cluster.ok(&["tune", "--cache", "off"]);
    assert_eq!(cluster.status()["nodes"][1]["drives_silent_ms"], 0);
    let Some(tampering) = Tampering::with(cluster.pids()[&1], "statfs:delay_enter=60000000") else { return };
    let silent_ms = cluster.status()["nodes"][1]["drives_silent_ms"].as_u64().unwrap();
    assert!((1000..60_000).contains(&silent_ms), "{silent_ms}");
    assert_eq!(read_all(&cluster, 60, LEN), []);
    let status = cluster.ok(&["status"]);
    assert!(status.contains("node 1: its drives do not answer; what is taken and free is what they said"), "{status}");
    cluster.ok(&["df"]);
    drop(tampering);
    harness::wait_until("the drive answers again", || cluster.status()["nodes"][1]["drives_silent_ms"] == 0);
    cluster.down();
}
