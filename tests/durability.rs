//! Drives that lose what was written to them: never wrong bytes, whatever they do, and an error that names node, drive and way out.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod harness;

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use harness::drive::{Injected, ThinDrive, evict, taken_by};
use harness::samples::{content, count, node, numbers, path, read_epoch, session};
use harness::{Cluster, Ground, wait_for, wait_until};
use nix::sys::statvfs::statvfs;

/// Time for copies to be written and synced, with much to spare.
const KEPT_TIME: Duration = Duration::from_secs(3);

fn files(ground: &Ground, count: usize, len: usize) {
    fs::create_dir(ground.at("d")).unwrap();
    (0..count).for_each(|number| fs::write(ground.at(format!("d/{number}")), content(number, len)).unwrap());
}

/// Reads all files by a process of its own on a node, and compares; how many it could not read.
fn check_all(cluster: &Cluster, number: u16, files: usize, len: usize) -> usize {
    let view = cluster.view(number);
    let mut bytes = vec![0; len];
    let is_lost = |&number: &usize| match view.open(&path(number)).and_then(|file| view.read_at(&file, 0, &mut bytes)) {
        Ok(got) => {
            assert!(got == len && bytes == content(number, len), "wrong bytes in {number}");
            false
        }
        Err(_) => true,
    };
    (0..files).filter(is_lost).count()
}

/// SEMANTICS: a drive that loses what was staged in fails the stage-in.
#[test]
fn a_drive_that_loses_what_was_staged_in_fails_the_stage_in() {
    let ground = Ground::new();
    let Some(drive) = ThinDrive::new(&ground.at("thin"), 24) else { return };
    files(&ground, 300, 200_000);
    let cluster = ground.up_with(2, &["--data-dir", drive.path().to_str().unwrap()]);
    let staged = cluster.output(&["stage-in", "d", "/dayfly/d"]);
    if staged.status.success() {
        // What a reader would get.
        drive.sync();
        cluster.pids().values().for_each(|&pid| evict(pid, drive.path()));
        let lost = check_all(&cluster, 0, 300, 200_000);
        panic!("the drive has lost something, the stage-in has succeeded, and {lost} of 300 files cannot be read");
    }
    let message = harness::text(&staged.stderr);
    let drive_name = drive.path().to_str().unwrap();
    assert!(message.contains("node ") && message.contains(drive_name) && message.contains("--data-dir"), "{message}");
    assert_eq!(cluster.ok(&["ls"]), "", "nothing is shown");
    wait_until("its room is free again", || cluster.used_bytes() == 0);
    cluster.down();
}

/// SEMANTICS: an error of a sync, and of the calls before it, ends the stage-in; it is not tried again.
#[test]
fn a_failed_sync_ends_the_stage_in_and_names_node_and_drive() {
    for (nodes, call) in [(1, "fdatasync"), (2, "sync_file_range"), (4, "fdatasync"), (4, "sync_file_range")] {
        let ground = Ground::new();
        files(&ground, 400, 100_000);
        let cluster = ground.up(nodes);
        let last = nodes - 1;
        // The kernel tells an error once: a second sync succeeds.
        let Some(injected) = Injected::into(cluster.pids()[&last], &format!("{call}:error=EIO:when=1")) else { return };
        let message = cluster.fails(1, &["stage-in", "d", "/dayfly/d"]);
        let data_dir = node(&cluster, last.into())["data_dirs"][0].as_str().unwrap().to_owned();
        assert!(message.contains(&data_dir) && message.contains("dmesg") && message.contains("--data-dir"), "{call}: {message}");
        assert!(nodes == 1 || message.contains(&format!("node {last}")), "{call}: {message}");
        assert_eq!(cluster.ok(&["ls"]), "", "nothing is shown");
        wait_until("its room is free again", || cluster.used_bytes() == 0);
        drop(injected);
        cluster.stage(&[&cluster.at("d")], "/dayfly/d");
        cluster.ok(&["verify"]);
        cluster.down();
    }
}

/// SEMANTICS: a copy of another node's block is found once the drive has it, and never if the drive loses it.
#[test]
fn copies_that_a_drive_has_lost_are_never_read() {
    let ground = Ground::new();
    let Some(drive) = ThinDrive::new(&ground.at("thin"), 48) else { return };
    files(&ground, 300, 70_000);
    let cluster = ground.up_with(2, &["--data-dir", drive.path().to_str().unwrap()]);
    cluster.stage(&[&cluster.at("d")], "/dayfly/d");
    drive.fill();
    read_epoch(&cluster.view(0), 0);
    std::thread::sleep(KEPT_TIME);
    drive.sync();
    evict(cluster.pids()[&0], drive.path());
    assert_eq!(check_all(&cluster, 0, 300, 70_000), 0);
    assert_eq!(count(&node(&cluster, 0)["cached_bytes"]), 0);
    cluster.down();
}

/// SEMANTICS: after an error, what was written since the last good sync is no copy, even if the next sync succeeds.
#[test]
fn copies_whose_sync_failed_are_given_up() {
    for call in ["fdatasync", "sync_file_range"] {
        let cluster = session(2, &[], &[50_000; 200]);
        let Some(injected) = Injected::into(cluster.pids()[&0], &format!("{call}:error=EIO:when=1")) else { return };
        read_epoch(&cluster.view(0), 0);
        std::thread::sleep(KEPT_TIME);
        drop(injected);
        assert_eq!(count(&node(&cluster, 0)["cached_bytes"]), 0, "{call}");
        // Another dataset's copies are in another file.
        cluster.stage(&[&cluster.at("d")], "/dayfly/e");
        let view = cluster.view(0);
        for number in 0..100 {
            let mut bytes = vec![0; 50_000];
            view.read_at(&view.open(format!("/dayfly/e/{number}").as_bytes()).unwrap(), 0, &mut bytes).unwrap();
            assert!(bytes == content(number, 50_000));
        }
        wait_until("they are kept", || count(&node(&cluster, 0)["cached_bytes"]) > 1_000_000);
        assert_eq!(check_all(&cluster, 0, 200, 50_000), 0, "{call}");
        cluster.down();
    }
}

/// SEMANTICS: a reader that is slow does not take what lies now where a copy was for what it was.
#[test]
fn a_read_that_is_overtaken_by_two_tunes_gives_what_was_staged_in() {
    let len = 300_000;
    let lens: Vec<usize> = [len; 8].into_iter().chain([8 << 20; 24]).collect();
    let cluster = session(2, &["--memory", "32MiB"], &lens);
    let view = cluster.view(0);
    let far = numbers(&view, lens.len(), false);
    let read = |number: usize| {
        let file = view.open(&path(number)).unwrap();
        view.read_at(&file, 0, &mut vec![0; lens[number]]).unwrap();
    };
    let is_kept = || count(&node(&cluster, 0)["cached_blocks"]) == 1;
    // One copy alone: when it comes again, the room that it had is free.
    read(far[0]);
    wait_until("it is kept", is_kept);
    let source = format!("/dayfly/d/{}", far[0]);
    let copy = |inject: &[&str]| {
        let mut strace = Command::new("strace");
        strace.args(["-f", "-o", "trace", "-e", "trace=pread64"]).args(inject);
        strace.args([env!("CARGO_BIN_EXE_dayfly"), "cp", &source, "copied"]);
        strace.env("DAYFLY_RUNTIME_DIR", cluster.runtime.path()).current_dir(cluster.work.path()).stdin(Stdio::null());
        strace.spawn()
    };
    let Ok(mut copying) = copy(&[]) else {
        eprintln!("not run, for there is no strace");
        return;
    };
    assert!(copying.wait().unwrap().success());
    fs::remove_file(cluster.at("copied")).unwrap();
    // The loader reads by this call too: which one is the copy's?
    let trace = fs::read_to_string(cluster.at("trace")).unwrap();
    let got = |line: &str| line.rsplit_once(" = ").and_then(|(_, got)| got.trim().parse::<usize>().ok());
    let calls = trace.lines().filter(|line| line.contains("pread64("));
    let first = 1 + calls.map(|line| got(line).unwrap_or(0)).position(|got| got > 50_000).expect("it is read out of the copy");
    // A reader that has found the copy stands still before it reads, and again before it looks whether the copy is still there.
    let delay = Duration::from_secs(5).as_micros();
    let mut copying = copy(&["-e", &format!("inject=pread64:delay_enter={delay}:delay_exit={delay}:when={first}")]).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    cluster.ok(&["tune", "--cache", "off"]);
    // These have it evicted from the arena.
    far[1..].iter().for_each(|&number| read(number));
    std::thread::sleep(Duration::from_secs(4));
    cluster.ok(&["tune", "--cache", "all"]);
    read(far[0]);
    wait_until("it is kept again", is_kept);
    let status = wait_for(&mut copying, Duration::from_secs(120)).expect("a copy never hangs");
    assert!(status.success());
    assert!(fs::read(cluster.at("copied")).unwrap() == content(far[0], len), "wrong bytes");
    drop(view);
    cluster.down();
}

/// OPERATIONS: `status` says what the files take, copies among them.
/// A file system in memory with little room, unmounted when dropped.
struct Small(PathBuf);

impl Small {
    /// `None`, and a word on standard error, where this user cannot mount.
    fn new(folder: PathBuf, mib: u32) -> Option<Self> {
        fs::create_dir(&folder).unwrap();
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &format!("size={mib}m"), "none"]).arg(&folder).output();
        if mounted.is_ok_and(|mounted| mounted.status.success()) {
            return Some(Self(folder));
        }
        assert!(std::env::var_os("DAYFLY_TEST_ALL_PROGRAMS").is_none(), "no file system can be mounted here");
        eprintln!("not run, for no file system can be mounted here");
        None
    }

    /// As another program that takes all that is left.
    fn fill(&self) {
        let mut filler = fs::File::create(self.0.join("filler")).unwrap();
        while filler.write_all(&[1; 4096]).is_ok() {}
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Lazily: a server that is ending may have it open.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// Files of 100,000 bytes for a stage-in of their own.
fn more(ground: &Ground, name: &str, count: usize) {
    fs::create_dir(ground.at(name)).unwrap();
    (0..count).for_each(|number| fs::write(ground.at(format!("{name}/{number}")), content(number, 100_000)).unwrap());
}

/// SEMANTICS: copies make way for a stage-in also where others have filled the drive.
#[test]
fn copies_make_way_where_others_have_filled_the_drive() {
    for nodes in [2, 3] {
        let ground = Ground::new();
        let Some(drive) = Small::new(ground.at("small"), 150) else { return };
        files(&ground, 300, 200_000);
        more(&ground, "more", 30);
        let cluster = ground.up_with(nodes, &["--data-dir", drive.0.to_str().unwrap()]);
        cluster.stage(&[&cluster.at("d")], "/dayfly/d");
        cluster.ok(&["verify"]);
        let kept = || (0..nodes).map(|number| count(&node(&cluster, usize::from(number))["cached_bytes"])).sum::<u64>();
        wait_until("much is kept", || kept() > 30_000_000);
        drive.fill();
        let before = kept();
        for target in ["x", "y", "z"] {
            cluster.stage(&[&cluster.at("more")], &format!("/dayfly/{target}"));
            let free = statvfs(&drive.0).map(|stat| stat.blocks_available() * stat.fragment_size()).unwrap();
            eprintln!("{nodes} nodes: {} of {before} bytes are still kept, {free} are free", kept());
        }
        assert!(kept() < before, "the room for blocks was what was kept");
        cluster.ok(&["verify"]);
        assert_eq!(check_all(&cluster, 0, 300, 200_000), 0);
        cluster.down();
        drop(drive);
    }
}

/// SEMANTICS: where no copy can make way, the message names the data dir and the way out.
#[test]
fn a_drive_that_others_have_filled_is_named_with_the_way_out() {
    let ground = Ground::new();
    let Some(drive) = Small::new(ground.at("small"), 60) else { return };
    files(&ground, 10, 200_000);
    more(&ground, "more", 30);
    let cluster = ground.up_with(1, &["--data-dir", drive.0.to_str().unwrap()]);
    cluster.stage(&[&cluster.at("d")], "/dayfly/d");
    drive.fill();
    let message = cluster.fails(1, &["stage-in", "more", "/dayfly/more"]);
    eprintln!("{message}");
    assert!(message.contains(drive.0.to_str().unwrap()) && message.contains("make room there"), "{message}");
    cluster.ok(&["verify"]);
    fs::remove_file(drive.0.join("filler")).unwrap();
    cluster.stage(&[&cluster.at("more")], "/dayfly/more");
    cluster.down();
    drop(drive);
}

#[test]
fn status_says_what_the_files_take() {
    let cluster = session(2, &[], &[100_000; 300]);
    let data_dir = fs::canonicalize(cluster.data.path()).unwrap();
    let check = |what: &str| {
        for (number, &pid) in &cluster.pids() {
            let told = node(&cluster, (*number).into());
            let (taken, files) = (count(&told["taken_bytes"]), taken_by(pid, &data_dir));
            // Small tables aside.
            assert!(taken.abs_diff(files) < 1 << 20, "{what}, node {number}: {taken} told, {files} taken: {told}");
            let owned = count(&told["used_bytes"]) + count(&told["cached_room_bytes"]);
            assert!(owned <= files + (1 << 20), "{what}, node {number}: {owned} counted, {files} taken: {told}");
        }
    };
    check("staged in");
    let before = node(&cluster, 0);
    read_epoch(&cluster.view(0), 0);
    wait_until("all is kept", || {
        count(&node(&cluster, 0)["cached_bytes"]) + count(&node(&cluster, 0)["held_bytes"]) == 30_000_000
    });
    check("kept");
    let after = node(&cluster, 0);
    assert!(count(&after["taken_bytes"]) >= count(&before["taken_bytes"]) + count(&after["cached_bytes"]), "{after}");
    assert_eq!(before["used_bytes"], after["used_bytes"], "what is kept makes way, and is counted apart");
    assert!(count(&after["cached_room_bytes"]) >= count(&after["cached_bytes"]));
    cluster.ok(&["tune", "--cache", "off"]);
    check("given up");
    assert!(count(&node(&cluster, 0)["taken_bytes"]) < count(&before["taken_bytes"]) + (1 << 20));
    cluster.down();
}

/// OPERATIONS: a capacity that the drives do not have is not believed.
#[test]
fn a_capacity_beyond_what_the_drives_have_is_told_and_not_believed() {
    let ground = Ground::new();
    let up = ground.output(&["up", "--local", "2", "--capacity", "100T"]);
    let stat = statvfs(ground.data.path()).unwrap();
    let free = stat.blocks_available() * stat.fragment_size();
    let message = harness::text(&up.stderr);
    assert!(up.status.success() && message.contains("--capacity 100.0TiB is more than the data dirs have"), "{message}");
    let cluster = Cluster { ground, id: harness::text(&up.stdout).trim().to_owned() };
    let capacity: u64 = (0..2).map(|number| count(&node(&cluster, number)["capacity_bytes"])).sum();
    // Others write there too, meanwhile.
    assert!(capacity <= free + (8 << 30), "{capacity} of {free}");
    assert!(count(&node(&cluster, 0)["free_bytes"]) <= capacity);
    cluster.down();
}
