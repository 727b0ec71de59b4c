//! Tests of drives that lose data after they have accepted it. Reads never return wrong bytes, and errors name the node, the drive
//! and the remedy.

use std::cell::Cell;
use std::fs;
use std::process::Stdio;
use std::time::Duration;

use crate::harness::drive::{Injected, SmallDrive, ThinDrive, evict, taken_by};
use crate::harness::samples::{content, count, node, numbers, path, read_epoch, session};
use crate::harness::{self, Cluster, Ground, wait_for, wait_until};
use nix::sys::statvfs::statvfs;

/// More than enough time for cached blocks to be written and synced.
const CACHE_TIME: Duration = Duration::from_secs(3);

fn files(ground: &Ground, count: usize, len: usize) {
    fs::create_dir(ground.at("d")).unwrap();
    (0..count).for_each(|number| fs::write(ground.at(format!("d/{number}")), content(number, len)).unwrap());
}

/// Reads all files on a node through a new session, checks their bytes, and returns how many could not be read.
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

/// SEMANTICS: "A stage-in finishes only when the drives have its data. Bytes are written out while more arrive, and a node reports
/// that it is done after an `fdatasync` of its segments. An error from any of these calls ends the stage-in; the message names the
/// node, the data dir and the remedy, and all space is free again."
#[test]
fn a_drive_that_loses_data_fails_the_stage_in() {
    let ground = Ground::new();
    let Some(drive) = ThinDrive::new(&ground.at("thin"), 24) else { return };
    files(&ground, 300, 200_000);
    let cluster = ground.up_with(2, &["--data-dir", drive.path().to_str().unwrap()]);
    let staged = cluster.output(&["stage-in", "d", "/dayfly/d"]);
    if staged.status.success() {
        // Find out what a reader would get.
        drive.sync();
        cluster.pids().values().for_each(|&pid| evict(pid, drive.path()));
        let lost = check_all(&cluster, 0, 300, 200_000);
        panic!("the drive lost data, the stage-in succeeded, and {lost} of 300 files cannot be read");
    }
    let message = harness::text(&staged.stderr);
    let drive_name = drive.path().to_str().unwrap();
    assert!(message.contains("node ") && message.contains(drive_name) && message.contains("--data-dir"), "{message}");
    assert_eq!(cluster.ok(&["ls"]), "", "no dataset is visible");
    wait_until("its space is free again", || cluster.used_bytes() == 0);
    cluster.down();
}

/// SEMANTICS: "A stage-in finishes only when the drives have its data. Bytes are written out while more arrive, and a node reports
/// that it is done after an `fdatasync` of its segments. An error from any of these calls ends the stage-in; the message names the
/// node, the data dir and the remedy, and all space is free again."
#[test]
fn a_failed_sync_ends_the_stage_in_and_names_node_and_drive() {
    for (nodes, call) in [(1, "fdatasync"), (2, "sync_file_range"), (4, "fdatasync"), (4, "sync_file_range")] {
        let ground = Ground::new();
        files(&ground, 400, 100_000);
        let cluster = ground.up(nodes);
        let last = nodes - 1;
        // The kernel reports an error once: a second sync succeeds.
        let Some(injected) = Injected::into(cluster.pids()[&last], &format!("{call}:error=EIO:when=1")) else { return };
        let message = cluster.fails(1, &["stage-in", "d", "/dayfly/d"]);
        let data_dir = node(&cluster, last.into())["data_dirs"][0].as_str().unwrap().to_owned();
        assert!(message.contains(&data_dir) && message.contains("dmesg") && message.contains("--data-dir"), "{call}: {message}");
        assert!(nodes == 1 || message.contains(&format!("node {last}")), "{call}: {message}");
        assert_eq!(cluster.ok(&["ls"]), "", "no dataset is visible");
        wait_until("its space is free again", || cluster.used_bytes() == 0);
        drop(injected);
        cluster.stage(&[&cluster.at("d")], "/dayfly/d");
        cluster.ok(&["verify"]);
        cluster.down();
    }
}

/// SEMANTICS: "A stage-in finishes only when the drives have its data. Bytes are written out while more arrive, and a node reports
/// that it is done after an `fdatasync` of its segments. An error from any of these calls ends the stage-in; the message names the
/// node, the data dir and the remedy, and all space is free again."
#[test]
fn every_failed_write_of_a_stage_in_names_node_and_drive() {
    // At first `pwrite64` writes the header of a segment, and later the table of arrivals. `pwritev` writes blocks.
    for (call, begins_late) in [("pwrite64", false), ("pwrite64", true), ("pwritev", false), ("fallocate", false)] {
        let ground = Ground::new();
        files(&ground, 400, 100_000);
        let cluster = ground.up(2);
        let inject = || Injected::into(cluster.pids()[&1], &format!("{call}:error=EIO"));
        let mut stage_in = cluster.dayfly();
        stage_in.args(["stage-in", "d", "/dayfly/d"]).env("DAYFLY_SESSION", &cluster.id);
        stage_in.current_dir(cluster.work.path()).stderr(Stdio::piped());
        let injected = if begins_late { None } else { inject() };
        if begins_late {
            stage_in.args(["--max-rate", "10MB"]);
        }
        let running = stage_in.spawn().unwrap();
        let injected = injected.or_else(|| {
            wait_until("blocks arrive", || count(&node(&cluster, 1)["used_bytes"]) > 0);
            inject()
        });
        let failed = running.wait_with_output().unwrap();
        let message = harness::text(&failed.stderr);
        let Some(injected) = injected else { return };
        assert!(!failed.status.success(), "{call}, late: {begins_late}: {message}");
        let data_dir = node(&cluster, 1)["data_dirs"][0].as_str().unwrap().to_owned();
        for part in ["node 1", &data_dir, "dmesg", "--data-dir"] {
            assert!(message.contains(part), "{call}, late: {begins_late}: no {part} in: {message}");
        }
        wait_until("its space is free again", || cluster.used_bytes() == 0);
        drop(injected);
        cluster.stage(&[&cluster.at("d")], "/dayfly/d");
        cluster.down();
    }
}

/// SEMANTICS: "A source that its file system cannot read is not called damaged: the message names the
/// file, the system's error and the remedy."
#[test]
fn a_source_that_cannot_be_read_is_not_called_damaged() {
    for (name, pack) in [
        ("plain.tar", "tar cf"),
        ("packed.tar.gz", "tar czf"),
        ("packed.tar.xz", "tar cJf"),
        ("packed.tar.zst", "tar --zstd -cf"),
        ("a.zip", "zip -qr"),
    ] {
        let ground = Ground::new();
        files(&ground, 40, 100_000);
        harness::tool("sh", &["-c".as_ref(), format!("cd {} && {pack} {name} d", ground.at("").display()).as_ref()]);
        let cluster = ground.up(1);
        let server = cluster.pids()[&0];
        let Some(injected) = Injected::into(server, "pread64,read:error=EIO:when=1+") else { return };
        let message = cluster.fails(1, &["stage-in", name, "/dayfly/d"]);
        for part in ["cannot read", name, "Input/output error", "--keep-going"] {
            assert!(message.contains(part), "no {part} in: {message}");
        }
        assert!(!message.contains("damaged"), "{message}");
        drop(injected);
        cluster.down();
    }
}

/// SEMANTICS: "After an error, all cached blocks that were written since the last good sync are
/// dropped, and the drive gets no more cached blocks of that dataset."
#[test]
fn cached_blocks_that_a_drive_lost_are_never_read() {
    let ground = Ground::new();
    let Some(drive) = ThinDrive::new(&ground.at("thin"), 48) else { return };
    files(&ground, 300, 70_000);
    let cluster = ground.up_with(2, &["--data-dir", drive.path().to_str().unwrap()]);
    cluster.stage(&[&cluster.at("d")], "/dayfly/d");
    drive.fill();
    read_epoch(&cluster.view(0), 0);
    std::thread::sleep(CACHE_TIME);
    drive.sync();
    evict(cluster.pids()[&0], drive.path());
    assert_eq!(check_all(&cluster, 0, 300, 70_000), 0);
    assert_eq!(count(&node(&cluster, 0)["cached_bytes"]), 0);
    cluster.down();
}

/// SEMANTICS: "After an error, all cached blocks that were written since the last good sync are
/// dropped, and the drive gets no more cached blocks of that dataset."
#[test]
fn cached_blocks_whose_sync_failed_are_dropped() {
    for call in ["fdatasync", "sync_file_range"] {
        let cluster = session(2, &[], &[50_000; 200]);
        let Some(injected) = Injected::into(cluster.pids()[&0], &format!("{call}:error=EIO:when=1")) else { return };
        read_epoch(&cluster.view(0), 0);
        std::thread::sleep(CACHE_TIME);
        drop(injected);
        assert_eq!(count(&node(&cluster, 0)["cached_bytes"]), 0, "{call}");
        // The cached blocks of another dataset are in another file.
        cluster.stage(&[&cluster.at("d")], "/dayfly/e");
        let view = cluster.view(0);
        for number in 0..100 {
            let mut bytes = vec![0; 50_000];
            view.read_at(&view.open(format!("/dayfly/e/{number}").as_bytes()).unwrap(), 0, &mut bytes).unwrap();
            assert!(bytes == content(number, 50_000));
        }
        wait_until("they are cached", || count(&node(&cluster, 0)["cached_bytes"]) > 1_000_000);
        assert_eq!(check_all(&cluster, 0, 200, 50_000), 0, "{call}");
        cluster.down();
    }
}

/// SEMANTICS: "If a block is dropped while a process reads it, the read notices this and starts over."
#[test]
fn a_read_overtaken_by_two_cache_changes_returns_the_right_bytes() {
    let len = 300_000;
    let lens: Vec<usize> = [len; 8].into_iter().chain([8 << 20; 24]).collect();
    let cluster = session(2, &["--memory", "32MiB"], &lens);
    let view = cluster.view(0);
    let far = numbers(&view, lens.len(), false);
    let read = |number: usize| {
        let file = view.open(&path(number)).unwrap();
        view.read_at(&file, 0, &mut vec![0; lens[number]]).unwrap();
    };
    let is_cached = || count(&node(&cluster, 0)["cached_blocks"]) == 1;
    // Use only one cached block, so that its previous space is free when it is cached again.
    read(far[0]);
    wait_until("it is cached", is_cached);
    let source = format!("/dayfly/d/{}", far[0]);
    if !harness::is_installed("strace") {
        return;
    }
    let copy = |inject: &[&str]| {
        let mut strace = harness::program("strace");
        strace.args(["-f", "-o", "trace", "-e", "trace=pread64"]).args(inject);
        strace.args([env!("CARGO_BIN_EXE_dayfly"), "cp", &source, "copied"]);
        strace.env("DAYFLY_RUNTIME_DIR", cluster.runtime.path()).current_dir(cluster.work.path()).stdin(Stdio::null());
        strace.spawn().unwrap()
    };
    assert!(copy(&[]).wait().unwrap().success());
    fs::remove_file(cluster.at("copied")).unwrap();
    // The dynamic loader uses this system call too. Find the call that reads the cached block.
    let trace = fs::read_to_string(cluster.at("trace")).unwrap();
    let got = |line: &str| line.rsplit_once(" = ").and_then(|(_, got)| got.trim().parse::<usize>().ok());
    let calls = trace.lines().filter(|line| line.contains("pread64("));
    let first = 1 + calls.map(|line| got(line).unwrap_or(0)).position(|got| got > 50_000).expect("a call reads the cached block");
    // A reader that has found the cached block is delayed before it reads, and again before it checks that the block is still there.
    let delay = Duration::from_secs(5).as_micros();
    let mut copying = copy(&["-e", &format!("inject=pread64:delay_enter={delay}:delay_exit={delay}:when={first}")]);
    std::thread::sleep(Duration::from_secs(2));
    cluster.ok(&["tune", "--cache", "off"]);
    // These reads evict the block from the arena.
    far[1..].iter().for_each(|&number| read(number));
    std::thread::sleep(Duration::from_secs(4));
    cluster.ok(&["tune", "--cache", "all"]);
    read(far[0]);
    wait_until("it is cached again", is_cached);
    let status = wait_for(&mut copying, Duration::from_secs(120)).expect("`cp` never hangs");
    assert!(status.success());
    assert!(fs::read(cluster.at("copied")).unwrap() == content(far[0], len), "wrong bytes");
    drop(view);
    cluster.down();
}

/// Creates a folder of files of 100,000 bytes each for another stage-in.
fn more(ground: &Ground, name: &str, count: usize) {
    fs::create_dir(ground.at(name)).unwrap();
    (0..count).for_each(|number| fs::write(ground.at(format!("{name}/{number}")), content(number, 100_000)).unwrap());
}

/// SEMANTICS: "Cached blocks make way where other users fill the drive's file system. Before and during a stage-in, each node
/// drops cached blocks until a sixteenth of what the node may take on the drive, at most 256 MiB, is free there for files other
/// than segments (plan, sorted runs, catalog). As long as there are cached blocks, the stage-in's blocks leave that much free."
#[test]
fn cached_blocks_make_way_if_other_programs_fill_the_drive() {
    for nodes in [2, 3] {
        let ground = Ground::new();
        let Some(drive) = SmallDrive::mount(ground.at("small"), "150m") else { return };
        files(&ground, 300, 200_000);
        more(&ground, "more", 30);
        let cluster = ground.up_with(nodes, &["--data-dir", drive.path().to_str().unwrap()]);
        cluster.stage(&[&cluster.at("d")], "/dayfly/d");
        cluster.ok(&["verify"]);
        let cached = || (0..nodes).map(|number| count(&node(&cluster, usize::from(number))["cached_bytes"])).sum::<u64>();
        // Blocks count as cached only after a sync has covered them, so wait until the count stops growing.
        let last = Cell::new(0);
        wait_until("all blocks that fit are cached", || {
            std::thread::sleep(CACHE_TIME);
            last.replace(cached()) == cached() && cached() > 30_000_000
        });
        drive.fill(0);
        let before = cached();
        for target in ["x", "y", "z"] {
            cluster.stage(&[&cluster.at("more")], &format!("/dayfly/{target}"));
            let free = statvfs(drive.path()).map(|stat| stat.blocks_available() * stat.fragment_size()).unwrap();
            eprintln!("{nodes} nodes: {} of {before} bytes are still cached, {free} are free", cached());
        }
        assert!(cached() < before, "cached blocks made room for the stage-ins");
        cluster.ok(&["verify"]);
        assert_eq!(check_all(&cluster, 0, 300, 200_000), 0);
        cluster.down();
        drop(drive);
    }
}

/// SEMANTICS: "If a node has no cached blocks to drop, or its readers hold views of cached blocks for longer than 2 s, the node
/// reports that the drive is full: the error names the data dir and the remedy."
#[test]
fn a_drive_that_other_programs_filled_is_named_with_the_remedy() {
    let ground = Ground::new();
    let Some(drive) = SmallDrive::mount(ground.at("small"), "60m") else { return };
    files(&ground, 10, 200_000);
    more(&ground, "more", 30);
    let cluster = ground.up_with(1, &["--data-dir", drive.path().to_str().unwrap()]);
    cluster.stage(&[&cluster.at("d")], "/dayfly/d");
    drive.fill(0);
    let message = cluster.fails(1, &["stage-in", "more", "/dayfly/more"]);
    eprintln!("{message}");
    assert!(message.contains(drive.path().to_str().unwrap()) && message.contains("make room there"), "{message}");
    cluster.ok(&["verify"]);
    drive.make_room();
    cluster.stage(&[&cluster.at("more")], "/dayfly/more");
    cluster.down();
    drop(drive);
}

/// OPERATIONS.md: `status` shows the space that files take, including cached blocks.
#[test]
fn status_shows_the_space_that_files_take() {
    let cluster = session(2, &[], &[100_000; 300]);
    let data_dir = fs::canonicalize(cluster.data.path()).unwrap();
    let check = |what: &str| {
        for (number, &pid) in &cluster.pids() {
            let status = node(&cluster, (*number).into());
            let (taken, files) = (count(&status["taken_bytes"]), taken_by(pid, &data_dir));
            // Small tables are not counted.
            assert!(taken.abs_diff(files) < 1 << 20, "{what}, node {number}: {taken} reported, {files} taken: {status}");
            let owned = count(&status["used_bytes"]) + count(&status["cached_room_bytes"]);
            assert!(owned <= files + (1 << 20), "{what}, node {number}: {owned} counted, {files} taken: {status}");
        }
    };
    check("staged in");
    let before = node(&cluster, 0);
    read_epoch(&cluster.view(0), 0);
    wait_until("all is cached", || {
        count(&node(&cluster, 0)["cached_bytes"]) + count(&node(&cluster, 0)["held_bytes"]) == 30_000_000
    });
    check("cached");
    let after = node(&cluster, 0);
    assert!(count(&after["taken_bytes"]) >= count(&before["taken_bytes"]) + count(&after["cached_bytes"]), "{after}");
    assert_eq!(before["used_bytes"], after["used_bytes"], "cached blocks make way, so they are counted separately");
    assert!(count(&after["cached_room_bytes"]) >= count(&after["cached_bytes"]));
    cluster.ok(&["tune", "--cache", "off"]);
    check("dropped from the cache");
    assert!(count(&node(&cluster, 0)["taken_bytes"]) < count(&before["taken_bytes"]) + (1 << 20));
    cluster.down();
}

/// A forgotten unit, or a full drive, is noticed before the first stage-in fails.
#[test]
fn a_capacity_that_is_of_no_use_is_reported() {
    let ground = Ground::new();
    let up = ground.output(&["up", "--local", "1", "--capacity", "10"]);
    let message = harness::text(&up.stderr);
    assert!(up.status.success() && message.contains("may use only 10B in its data dirs"), "{message}");
    let cluster = Cluster { ground, id: harness::text(&up.stdout).trim().to_owned() };
    cluster.down();
}

/// OPERATIONS.md: a capacity that is larger than the drives is reduced to the drives' size.
#[test]
fn a_capacity_beyond_the_drives_is_reported_and_reduced() {
    let ground = Ground::new();
    let up = ground.output(&["up", "--local", "2", "--capacity", "100T"]);
    let stat = statvfs(ground.data.path()).unwrap();
    let free = stat.blocks_available() * stat.fragment_size();
    let message = harness::text(&up.stderr);
    assert!(up.status.success() && message.contains("--capacity 100.0TiB is more than the data dirs have"), "{message}");
    let cluster = Cluster { ground, id: harness::text(&up.stdout).trim().to_owned() };
    let capacity: u64 = (0..2).map(|number| count(&node(&cluster, number)["capacity_bytes"])).sum();
    // Other programs write to these drives too, so the free space changes.
    assert!(capacity <= free + (8 << 30), "{capacity} of {free}");
    assert!(count(&node(&cluster, 0)["free_bytes"]) <= capacity);
    cluster.down();
}

/// Servers of one machine may share a drive, and other programs fill it.
#[test]
fn servers_that_share_a_drive_count_its_free_space_once() {
    let ground = Ground::new();
    let Some(drive) = SmallDrive::mount(ground.at("small"), "64m") else { return };
    let cluster = ground.up_with(4, &["--data-dir", drive.path().to_str().unwrap()]);
    drive.fill(14 << 20);
    let all: u64 = (0..4).map(|number| count(&node(&cluster, number)["free_bytes"])).sum();
    assert!((12 << 20..=14 << 20).contains(&all), "{all}");
    fs::create_dir(cluster.at("d")).unwrap();
    (0..20).for_each(|number| fs::write(cluster.at(format!("d/{number}")), vec![number; 1 << 20]).unwrap());
    let source = cluster.at("d").to_str().unwrap().to_owned();
    let message = cluster.fails(1, &["stage-in", "--require-fit", &source, "/dayfly/x"]);
    assert!(message.contains("all nodes together have"), "{message}");
    // What is promised is kept.
    cluster.ok(&["stage-in", &source, "/dayfly/d"]);
    cluster.ok(&["verify", "--from-every-node"]);
    cluster.down();
}
