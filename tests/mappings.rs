//! Tests of mappings of files that lie on other nodes: one copy serves all processes of a node, and mappings keep their bytes.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use crate::harness::drive::SmallDrive;
use crate::harness::samples::{content, dataset, numbers, path, session};
use crate::harness::{self, Cluster, Ground, first_rows, text, wait_until};
use dayfly_client::View;
use dayfly_meta::id::BlockId;

/// Maps a file, or a part of it. Prints a checksum of the bytes, and the inodes of the kernel files behind the mapping. If told to
/// hold the mapping, a child prints the checksum again when a line arrives, after the parent has exited; if told to wait, the process
/// itself does so.
const MAP: &str = r#"
import ctypes, mmap, os, sys, zlib
file, offset, size = os.open(sys.argv[1], os.O_RDONLY), int(sys.argv[3]), int(sys.argv[4])
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
arguments = [ctypes.c_void_p(None), ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, file, ctypes.c_long(offset)]
start = libc.mmap(*arguments)
os.close(file)
end = start + size
def checksum():
    return zlib.crc32(ctypes.string_at(start, size))
def inodes():
    found = set()
    for line in open("/proc/self/maps"):
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first < end and last > start:
            found.add(line.split()[4])
    return sorted(found)
print(checksum(), *inodes(), flush=True)
if sys.argv[2] == "hold" and os.fork() == 0:
    sys.stdin.readline()
    print(checksum(), *inodes(), flush=True)
if sys.argv[2] == "wait":
    sys.stdin.readline()
    print(checksum(), flush=True)
os._exit(0)
"#;

fn map(cluster: &Cluster, node: u16, number: usize, how: &str, offset: usize, len: usize) -> Child {
    let name = String::from_utf8(path(number)).unwrap();
    cluster
        .dayfly()
        .args([
            "exec",
            "--node",
            &node.to_string(),
            "--",
            "python3",
            "-c",
            MAP,
            &name,
            how,
            &offset.to_string(),
            &len.to_string(),
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Returns what a process that does not hold its mapping has printed.
fn printed(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

fn line(output: &mut BufReader<ChildStdout>) -> String {
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    line
}

fn crc32(bytes: &[u8]) -> String {
    let mut child = harness::program("python3")
        .args(["-c", "import sys, zlib; print(zlib.crc32(sys.stdin.buffer.read()))"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    printed(child).trim().to_owned()
}

/// Starts a session of two nodes, and returns it with the node that does not have the first block of file 0.
fn session_of_two(options: &[&str], lens: &[usize]) -> (Cluster, u16) {
    let cluster = session(2, options, lens);
    let node = if numbers(&cluster.view(0), 1, true).is_empty() { 0 } else { 1 };
    (cluster, node)
}

/// Returns the room of the copies that processes share.
fn mapped_bytes(cluster: &Cluster) -> u64 {
    let status = cluster.status();
    status["nodes"].as_array().unwrap().iter().map(|node| node["mapped_bytes"].as_u64().unwrap()).sum()
}

/// Returns how many bytes of a file are not on the view's node.
fn absent_bytes(view: &View, number: usize) -> u64 {
    let dataset = dataset(view);
    let (_, blocks) = dataset.catalog().sample(view.open(&path(number)).unwrap().sample()).unwrap();
    let absent = (blocks.start..blocks.end).map(BlockId).filter(|&block| !dataset.is_here(block));
    absent.map(|block| dataset.catalog().block(block).unwrap().1).sum()
}

/// SEMANTICS: "Of every other block, all processes of the node map one copy, which is a file in the data dir. The first process that maps the block makes the copy, and others wait for it, as long as it grows at least every
/// 10 s."
/// SEMANTICS: "A process makes a copy of its own, in memory or above 64 MiB in a file in the data dir, of what the
/// node has no room to share, and of mappings of less than 1 MiB or a quarter of a block."
#[test]
fn processes_of_a_node_map_one_copy_of_a_block_of_another_node() {
    for options in [&[][..], &["--verify-reads"]] {
        // The first file has two blocks.
        let lens = [(64 << 20) + 3_000_001, 2_500_000, 300_000, 20_000];
        let (cluster, node) = session_of_two(options, &lens);
        cluster.ok(&["tune", "--cache", "off"]);
        let (bytes, before) = (content(0, lens[0]), cluster.used_bytes());
        let all: Vec<Child> = (0..4).map(|_| map(&cluster, node, 0, "look", 0, lens[0])).collect();
        let all: Vec<String> = all.into_iter().map(printed).collect();
        let sum = crc32(&bytes);
        assert!(all.iter().all(|found| found.split_whitespace().next() == Some(&sum)), "{all:?}, but {sum}");
        assert!(all.iter().all(|found| *found == all[0]), "{all:?}");
        let copied = if options.is_empty() { absent_bytes(&cluster.view(node), 0) } else { lens[0] as u64 };
        assert_eq!(cluster.used_bytes(), before + copied);
        // Across the border of the blocks; less than a quarter of a block; less than 1 MiB; in place, on the other node.
        for (on, offset, len) in [(node, 40 << 20, 26 << 20), (node, 4096, 1 << 21), (node, 8192, 5000), (1 - node, 0, lens[0])] {
            let found = printed(map(&cluster, on, 0, "look", offset, len));
            assert_eq!(found.split_whitespace().next().unwrap(), crc32(&bytes[offset..offset + len]), "{offset}");
        }
        for (number, &len) in lens.iter().enumerate().skip(1) {
            let found = printed(map(&cluster, node, number, "look", 0, len));
            assert_eq!(found.split_whitespace().next().unwrap(), crc32(&content(number, len)), "{number}");
        }
        cluster.down();
    }
}

/// SEMANTICS: "A mapping shows the same bytes as long as it lasts, also in forked children, even if the server has
/// died or the block is no longer cached."
#[test]
fn a_mapping_outlives_its_cached_block_its_process_and_its_server() {
    let lens = [2_500_000];
    let (cluster, node) = session_of_two(&[], &lens);
    let view = cluster.view(node);
    harness::samples::read_epoch(&view, 0);
    wait_until("file 0 to be cached", || numbers(&view, 1, false).is_empty());
    let sum = crc32(&content(0, lens[0]));
    let mut child = map(&cluster, node, 0, "hold", 0, lens[0]);
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let first = line(&mut output);
    assert_eq!(first.split_whitespace().next(), Some(&*sum));
    cluster.ok(&["tune", "--cache", "off"]);
    wait_until("the cached blocks to be dropped", || !numbers(&view, 1, false).is_empty());
    cluster.kill(node);
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert_eq!(line(&mut output), first);
    child.wait().unwrap();
}

/// SEMANTICS: "A process makes a copy of its own, in memory or above 64 MiB in a file in the data dir, of what the node has no room to
/// share"
#[test]
fn files_can_be_mapped_while_other_programs_fill_the_drive() {
    let ground = Ground::new();
    let Some(drive) = SmallDrive::mount(ground.at("small"), "100m") else { return };
    std::fs::create_dir(ground.at("d")).unwrap();
    (0..8).for_each(|number| std::fs::write(ground.at(format!("d/{number}")), content(number, 3 << 20)).unwrap());
    let cluster = ground.up_with(2, &["--data-dir", drive.path().to_str().unwrap()]);
    cluster.stage(&[&cluster.at("d")], "/dayfly/d");
    cluster.ok(&["tune", "--cache", "off"]);
    drive.fill(0);
    for (node, number) in (0..2).flat_map(|node| (0..8).map(move |number| (node, number))) {
        let found = printed(map(&cluster, node, number, "go", 0, 3 << 20));
        assert_eq!(found.split_whitespace().next(), Some(&*crc32(&content(number, 3 << 20))), "file {number} on node {node}");
    }
    cluster.down();
    drop(drive);
}

/// SEMANTICS: "Cached blocks make way for all of these files in the data dir."
#[test]
fn large_files_can_be_mapped_and_read_as_standard_input_when_the_drive_is_full_of_cached_blocks() {
    let lens: Vec<usize> = [90 << 20].into_iter().chain([12 << 20; 6]).collect();
    let (large, sum) = (String::from_utf8(path(0)).unwrap(), crc32(&content(0, lens[0])));
    let cluster = session(2, &["--capacity", "230M"], &lens);
    for node in 0..2 {
        let view = cluster.view(node);
        let fill = |message| {
            // A slow drive does not take all at once, and what it does not take then is not cached.
            for number in 0..lens.len() {
                let (file, mut bytes) = (view.open(&path(number)).unwrap(), vec![0; lens[number]]);
                view.read_at(&file, 0, &mut bytes).unwrap();
                let deadline = Instant::now() + Duration::from_secs(5);
                while Instant::now() < deadline && numbers(&view, lens.len(), false).contains(&number) {
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
            wait_until(message, || {
                let absent = numbers(&view, lens.len(), false);
                absent.len() < 2 || {
                    for number in absent {
                        view.read_at(&view.open(&path(number)).unwrap(), 0, &mut vec![0; lens[number]]).unwrap();
                    }
                    false
                }
            });
        };
        let run = |script: &str, large: &str| {
            let mut command = cluster.dayfly();
            command.args(["exec", "--node", &node.to_string(), "--", "python3", "-c", script, large]);
            harness::output_of(command.stdin(Stdio::null()))
        };
        fill("most blocks are cached");
        let found = printed(map(&cluster, node, 0, "look", 0, lens[0]));
        assert_eq!(found.split_whitespace().next(), Some(&*sum));
        let script = "import subprocess, sys; subprocess.run(['cksum'], stdin=open(sys.argv[1]), check=True)";
        let output = run(script, &large);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(text(&output.stdout).ends_with(&format!(" {}\n", lens[0])), "{}", text(&output.stdout));
        if node == 0 {
            // A server looks for them four times a minute.
            wait_until("unused copies are dropped", || mapped_bytes(&cluster) == 0);
            fill("most blocks are cached again when the processes have ended");
        }
    }
    cluster.down();
    // The node that stores more of the file has no room at all.
    let cluster = session(2, &["--capacity", "100M"], &lens[..1]);
    let read = |node: u16| ["exec", "--node", &node.to_string(), "--", "sh", "-c", "cksum < $0", &large].map(str::to_owned);
    let outputs = [0, 1].map(|node| harness::output_of(cluster.dayfly().args(read(node))));
    let failed: Vec<String> =
        outputs.iter().filter(|output| !output.status.success()).map(|output| text(&output.stderr)).collect();
    let is_clear = |message: &String| message.contains("has no room on '") && message.contains("No space left on device");
    assert!(!failed.is_empty() && failed.iter().all(is_clear), "{failed:?}");
    cluster.down();
}

/// Reads a file as standard input, and runs it as a program, which prints where it lies. Prints the checksum, the inode, the mode and
/// the size of the standard input, and the number in the program's place.
const READ_AND_RUN: &str = r##"
import os, re, subprocess, sys
look = "import os, sys, zlib; s = os.fstat(0); print(zlib.crc32(sys.stdin.buffer.read()), s.st_ino, oct(s.st_mode), s.st_size)"
with open(sys.argv[1]) as file:
    subprocess.run([sys.executable, "-c", look], stdin=file, check=True)
place = subprocess.run([sys.argv[1], "/proc/self/exe"], stdout=subprocess.PIPE, text=True, check=True).stdout
print(re.search(r"#(\d+) \(deleted\)", place)[1])
"##;

/// SEMANTICS: "All processes of a node share the copy of a file of more than 64 MiB, whether they read it as standard input or run it,
/// unless the file's owner may not read it."
/// SEMANTICS: "A program with the set-user-ID or set-group-ID bit is copied for each process that runs it."
/// SEMANTICS: "Nobody may write to the shared copy. If root does so all the same, by way of /proc, no further process gets it."
/// SEMANTICS: "The mode of a copy that processes share allows no writing."
/// SEMANTICS: "The copies that processes share count as used room; status and df show how much they take, as mapped."
#[test]
fn a_large_file_is_one_kernel_file_for_all_processes_of_a_node() {
    let mut bytes = fs::read("/usr/bin/readlink").unwrap();
    bytes.extend(content(1, (66 << 20) + 12_345));
    let sum = crc32(&bytes);
    for &(options, mode) in first_rows(2, &[(&["--verify-reads"][..], 0o755), (&[], 0o6755), (&[], 0o055), (&[], 0o750)]) {
        // The server could not give a copy to processes that its owner may not read.
        let is_shared = mode & 0o400 != 0;
        let ground = Ground::new();
        fs::create_dir(ground.at("d")).unwrap();
        fs::write(ground.at("d/0"), &bytes).unwrap();
        fs::set_permissions(ground.at("d/0"), fs::Permissions::from_mode(mode)).unwrap();
        let cluster = ground.up_with(2, options);
        cluster.stage(&[&cluster.at("d")], "/dayfly/d");
        cluster.ok(&["tune", "--cache", "off"]);
        let before = cluster.used_bytes();
        let mut holders = Vec::new();
        for node in ["0", "1"] {
            let mut holder = cluster.dayfly();
            holder.args(["exec", "--node", node, "--", "sh", "-c", "exec sleep 1000 < $0", "/dayfly/d/0"]);
            holders.push(holder.spawn().unwrap());
            let command = || {
                let mut command = cluster.dayfly();
                command.args(["exec", "--node", node, "--", "python3", "-c", READ_AND_RUN, "/dayfly/d/0"]);
                command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
            };
            let all: Vec<String> = (0..3).map(|_| command()).collect::<Vec<_>>().into_iter().map(printed).collect();
            for found in &all {
                let words: Vec<&str> = found.split_whitespace().collect();
                let mode = 0o100_000 | if is_shared { mode & !0o222 } else { mode };
                let expected = [sum.clone(), format!("0o{mode:o}"), bytes.len().to_string()];
                assert_eq!([words[0], words[2], words[3]].map(str::to_owned), expected);
                // Copies that are not shared may have one number after another.
                assert!(!is_shared || (words[1] == words[4]) == (mode & 0o6000 == 0), "{all:?}");
            }
        }
        let mapped = if is_shared { 2 * bytes.len() as u64 } else { 0 };
        assert_eq!(cluster.used_bytes(), before + mapped);
        assert_eq!(mapped_bytes(&cluster), mapped);
        let shown = cluster.ok(&["df"]);
        let last: Vec<&str> = shown.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(last[3], (mapped / 1024).to_string(), "{shown}");
        assert_eq!(cluster.ok(&["status"]).matches("keeps copies of").count(), if mapped > 0 { 2 } else { 0 });
        let shell = |script: &str| {
            let mut command = cluster.dayfly();
            harness::output_of(command.args(["exec", "--node", "0", "--", "sh", "-c", script, "/dayfly/d/0"]))
        };
        // Only root gets through here.
        let run = shell("sh -c 'sleep 3 1<>/dev/stdin' < $0 & sleep 1; $0 /proc/self/exe; wait");
        assert!(text(&run.stdout).contains("(deleted)"), "{}", text(&run.stderr));
        shell("sh -c ': > /dev/stdin' < $0");
        let after = shell("cksum < $0");
        assert!(text(&after.stdout).contains(&format!(" {}", bytes.len())), "{}", text(&after.stderr));
        for holder in &mut holders {
            holder.kill().unwrap();
            holder.wait().unwrap();
        }
        if mode == 0o755 {
            // A server looks for them four times a minute.
            wait_until("unused copies are dropped", || mapped_bytes(&cluster) == 0);
        }
        cluster.down();
    }
}

/// SEMANTICS: "The same holds for the files of a dataset that is replaced."
#[test]
fn mappings_of_a_replaced_dataset_show_its_bytes_or_raise_sigbus() {
    let lens = [2_500_000];
    let (cluster, node) = session_of_two(&[], &lens);
    let mut children = [node, 1 - node].map(|node| map(&cluster, node, 0, "wait", 0, lens[0]));
    let mut outputs = children.each_mut().map(|child| BufReader::new(child.stdout.take().unwrap()));
    let sums = outputs.each_mut().map(|output| line(output).split_whitespace().next().unwrap().to_owned());
    assert_eq!(sums, [(); 2].map(|()| crc32(&content(0, lens[0]))));
    fs::write(cluster.at("d/0"), content(7, lens[0])).unwrap();
    cluster.ok(&["stage-in", "--replace", cluster.at("d").to_str().unwrap(), "/dayfly/d"]);
    for child in &mut children {
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
    }
    let rest = outputs.each_mut().map(line);
    assert_eq!(rest, [format!("{}\n", sums[0]), String::new()], "the copy stays, and what is mapped in place is gone");
    let ends = children.each_mut().map(|child| child.wait().unwrap());
    assert!(ends[0].success() && ends[1].signal() == Some(nix::libc::SIGBUS), "{ends:?}");
    cluster.down();
}
