//! Compressed archives that are read again after the loss of a node, because they contain samples that the node owned.

mod room;

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use crate::harness::drive::SmallDrive;
use crate::harness::samples::content;
use crate::harness::strace::Tracer;
use crate::harness::{self, COMMAND_TIMEOUT, Cluster, Ground, first_rows, output_of, pack, signal, wait_until};
use dayfly_client::{Delivery, OnMissing, View};
use dayfly_meta::id::BlockId;
use nix::sys::signal::Signal;

const FILES: usize = 400;
const NODES: u16 = 4;

fn len(number: usize) -> usize {
    if number == 11 { 9 << 20 } else { number * 37 % 50_000 }
}

/// Starts four nodes. Servers that die stay away, and readers wait for at most a minute, unless the options say otherwise.
fn session(options: &[&str]) -> Cluster {
    session_on(Ground::new(), options)
}

fn session_on(ground: Ground, options: &[&str]) -> Cluster {
    for part in 0..4 {
        let folder = ground.at(format!("tree{part}"));
        fs::create_dir(&folder).unwrap();
        let numbers = (0..FILES).filter(|number| number % 4 == part);
        numbers.for_each(|number| fs::write(folder.join(number.to_string()), content(number, len(number))).unwrap());
    }
    let mut all = vec!["--deadlines-divisor", "5", "--no-rejoin"];
    if !options.contains(&"--lost-after") {
        // A server that is killed is lost at once, and no other one is.
        all.extend(["--lost-after", "60"]);
    }
    if !options.contains(&"--recovery-timeout") {
        all.extend(["--recovery-timeout", "60"]);
    }
    ground.up_rejoining(NODES, &[&all, options].concat())
}

/// Packs four archives with this ending, and stages them in. Returns their number.
fn stage(cluster: &Cluster, ending: &str) -> u64 {
    for part in 0..4 {
        pack(&cluster.at(format!("{part}.{ending}")), &cluster.at(format!("tree{part}")), &["--sparse"]);
    }
    cluster.stage(&[&cluster.at(format!("*.{ending}"))], "/dayfly/d");
    4
}

fn read(view: &View, number: usize) -> Result<(), String> {
    let file = view.open(format!("/dayfly/d/{number}").as_bytes()).map_err(|error| error.to_string())?;
    let mut bytes = vec![0; len(number)];
    view.read_at(&file, 0, &mut bytes).map_err(|error| error.to_string())?;
    assert!(bytes == content(number, len(number)), "file {number}");
    Ok(())
}

fn read_all(cluster: &Cluster, node: u16) {
    let view = cluster.view(node);
    (0..FILES).for_each(|number| read(&view, number).unwrap_or_else(|error| panic!("file {number} on node {node}: {error}")));
}

fn read_batch(cluster: &Cluster, node: u16) {
    let view = cluster.view(node);
    let paths: Vec<Vec<u8>> = (0..FILES).map(|number| format!("/dayfly/d/{number}").into_bytes()).collect();
    let paths: Vec<&[u8]> = paths.iter().map(Vec::as_slice).collect();
    let mut batch = view.read_many(&paths, Delivery::AsAvailable, OnMissing::Fail).unwrap();
    batch.wait().unwrap_or_else(|error| panic!("a batch on node {node}: {error}"));
    (0..FILES).for_each(|number| assert!(batch.get(number) == Some(&content(number, len(number))[..]), "{number} on {node}"));
}

fn status(cluster: &Cluster, asked: u16) -> serde_json::Value {
    cluster.status_on(asked)
}

fn sum(cluster: &Cluster, asked: u16, number: impl Fn(&serde_json::Value) -> Option<u64>) -> u64 {
    status(cluster, asked)["nodes"].as_array().unwrap().iter().filter_map(number).sum()
}

/// Returns how often a source has been opened on all live nodes.
fn operations(cluster: &Cluster, asked: u16) -> u64 {
    sum(cluster, asked, |node| node["origins"]["operations"].as_u64())
}

/// Waits until the other nodes have recovered all samples of the lost ones.
fn wait_until_recovered(cluster: &Cluster, asked: u16) {
    let blocks = |name: &'static str| sum(cluster, asked, move |node| node["recovery"][name]["blocks"].as_u64());
    let is_recovered = || blocks("wanted") > 0 && blocks("wanted") == blocks("recovered");
    // A node counts its wanted blocks while it looks for them, and others may not have begun.
    let mut known = 0;
    let deadline = Instant::now() + COMMAND_TIMEOUT;
    while !(is_recovered() && known == blocks("wanted")) {
        assert!(Instant::now() < deadline, "not all is recovered");
        known = blocks("wanted");
        std::thread::sleep(Duration::from_millis(500));
    }
}

fn wait_until_taken_over(cluster: &Cluster, node: u16) {
    wait_until("the node has taken over what fits", || {
        let recovery = &status(cluster, node)["nodes"][usize::from(node)]["recovery"];
        recovery["is_scanned"] == true && recovery["wanted"] == recovery["recovered"]
    });
}

fn lose(cluster: &Cluster, node: u16, asked: u16) {
    cluster.kill(node);
    wait_until("the node is lost", || status(cluster, asked)["nodes"][usize::from(node)]["lost_for_ms"].is_u64());
}

fn end_from(cluster: &Cluster, node: u16) {
    let output = output_of(cluster.dayfly().arg("down").env("DAYFLY_NODE", node.to_string()));
    assert!(output.status.success());
    cluster.wait_until_clean("after down");
}

/// SEMANTICS: "A compressed tar that contains samples of a lost node is read again from its start, once, by one of the other nodes, which
/// stores these samples. Reads of them wait until they are there."
#[test]
fn archives_that_hold_samples_of_a_lost_node_are_read_again_once_and_readers_wait() {
    for ending in first_rows(1, &["tar.zst", "tar.gz", "tar.xz"]) {
        let cluster = session(&[]);
        let archives = stage(&cluster, ending);
        lose(&cluster, 3, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| read_all(&cluster, 0));
            scope.spawn(|| read_batch(&cluster, 1));
            read_all(&cluster, 2);
        });
        wait_until_recovered(&cluster, 0);
        assert_eq!(operations(&cluster, 0), archives, "{ending}");
        // The archives are no longer needed.
        (0..archives).for_each(|part| fs::remove_file(cluster.at(format!("{part}.{ending}"))).unwrap());
        (0..3).for_each(|node| read_all(&cluster, node));
        end_from(&cluster, 0);
    }
}

/// SEMANTICS: "If the node that reads a compressed tar again is lost, another one does so."
#[test]
fn another_node_reads_an_archive_again_if_the_first_is_lost() {
    // Slow enough that nothing is done in the background.
    let cluster = session(&["--recovery-rate", "65536"]);
    stage(&cluster, "tar.gz");
    lose(&cluster, 3, 0);
    let wanted = |node: &serde_json::Value| node["recovery"]["wanted"]["blocks"].as_u64();
    wait_until("recovery has begun", || sum(&cluster, 0, wanted) > 0);
    let nodes = status(&cluster, 0);
    let streamer = (1..3).max_by_key(|&node| wanted(&nodes["nodes"][usize::from(node)])).unwrap();
    let other = 3 - streamer;
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_all(&cluster, other));
        lose(&cluster, streamer, 0);
        read_all(&cluster, 0);
        reader.join().unwrap();
    });
    end_from(&cluster, 0);
}

/// A node that has just read a tar again for one lost node hears of a second one. Until it has divided its room again, it does not know
/// which blocks of that node it is to hold.
#[test]
fn reads_wait_when_a_second_node_is_lost_just_after_a_tar_was_read_again_for_the_first() {
    if !harness::strace::is_possible() {
        return;
    }
    let cluster = session(&[]);
    stage(&cluster, "tar.gz");
    lose(&cluster, 3, 0);
    wait_until_recovered(&cluster, 0);
    // Each look at a drive takes a second.
    let slow =
        |node| Tracer::inject(cluster.pids()[&node], &[("statfs,fstatfs", "delay_enter=1000000")], cluster.work.path()).unwrap();
    let tracers = [0, 1].map(slow);
    cluster.kill(2);
    std::thread::scope(|scope| {
        for (node, part) in [0, 1].into_iter().flat_map(|node| (0..4).map(move |part| (node, part))) {
            let view = cluster.view(node);
            let read = move |number| read(&view, number).unwrap_or_else(|error| panic!("file {number} on node {node}: {error}"));
            scope.spawn(move || (part..FILES).step_by(4).for_each(read));
        }
        wait_until("node 2 is lost", || status(&cluster, 0)["nodes"][2]["lost_for_ms"].is_u64());
        std::thread::sleep(Duration::from_secs(2));
        drop(tracers);
    });
    end_from(&cluster, 0);
}

/// SEMANTICS: "Tars that readers wait for are read first, and faster than `--recovery-rate` if possible."
#[test]
fn readers_do_not_wait_for_tars_that_are_read_in_the_background() {
    // At this rate, each archive takes minutes.
    let cluster = session(&["--recovery-rate", "16384", "--recovery-timeout", "30"]);
    stage(&cluster, "tar.gz");
    lose(&cluster, 3, 0);
    let recovered = |node: &serde_json::Value| node["recovery"]["recovered"]["blocks"].as_u64();
    wait_until("recovery in the background has begun", || sum(&cluster, 0, recovered) > 0);
    // The last archives of the background come first here.
    let view = cluster.view(0);
    for number in (0..FILES).rev() {
        read(&view, number).unwrap_or_else(|error| panic!("file {number}: {error}"));
    }
    end_from(&cluster, 0);
}

/// SEMANTICS: "With `--recovery-rate 0` a tar is read again when the first of these samples is wanted."
#[test]
fn without_recovery_in_the_background_the_first_reader_makes_a_node_read_the_archive() {
    let cluster = session(&["--recovery-rate", "0"]);
    let archives = stage(&cluster, "tar.gz");
    lose(&cluster, 3, 0);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(operations(&cluster, 0), 0);
    (0..3).for_each(|node| read_all(&cluster, node));
    assert_eq!(operations(&cluster, 0), archives);
    end_from(&cluster, 0);
}

/// SEMANTICS: "If the tar cannot be read again, or it takes longer than `--recovery-timeout` (600 s), these reads fail with `EIO`. With
/// `--recovery-timeout 0` they fail at once."
#[test]
fn reads_fail_if_the_archive_cannot_be_read_again() {
    let cluster = session(&[]);
    stage(&cluster, "tar.gz");
    fs::rename(cluster.at("2.tar.gz"), cluster.at("away")).unwrap();
    // Other bytes under the same name are noticed.
    let other = fs::read(cluster.at("1.tar.gz")).unwrap();
    fs::write(cluster.at("1.tar.gz"), &other[..other.len() / 2]).unwrap();
    lose(&cluster, 3, 0);
    let view = cluster.view(0);
    let start = Instant::now();
    let errors: Vec<(usize, String)> = (0..FILES).filter_map(|number| Some((number, read(&view, number).err()?))).collect();
    harness::assert_no_hang(start);
    assert!(!errors.is_empty() && errors.iter().all(|(number, _)| number % 4 == 1 || number % 4 == 2), "{errors:?}");
    let mentions = |part: &str, words: &[&str]| {
        errors.iter().any(|(_, error)| error.contains(part) && words.iter().all(|word| error.contains(word)))
    };
    assert!(mentions("2.tar.gz", &["does not exist anymore", "--copies 2"]), "{errors:?}");
    assert!(mentions("1.tar.gz", &["no longer what was staged in", "--copies 2"]), "{errors:?}");
    end_from(&cluster, 0);
    let ground = Ground::new();
    fs::create_dir(ground.at("tree")).unwrap();
    (0..FILES).for_each(|number| fs::write(ground.at(format!("tree/{number}")), content(number, len(number))).unwrap());
    let cluster = ground.up_with(NODES, &[]);
    cluster.stage_compressed("tree", "/dayfly/d");
    cluster.kill(3);
    let view = cluster.view(0);
    let start = Instant::now();
    assert!((0..FILES).any(|number| read(&view, number).is_err()));
    harness::assert_no_hang(start);
    end_from(&cluster, 0);
}

/// SEMANTICS: "Reads of samples of a node that is only silent wait, too, until it answers again or is lost."
#[test]
fn reads_wait_for_a_server_that_stands_still_for_a_while() {
    let cluster = session(&["--lost-after", "60"]);
    stage(&cluster, "tar.gz");
    let pid = cluster.pids()[&3];
    signal(pid, Signal::SIGSTOP);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..3)
            .map(|node| {
                scope.spawn({
                    let cluster = &cluster;
                    move || read_all(cluster, node)
                })
            })
            .collect();
        // Longer than the deadline of a request.
        std::thread::sleep(Duration::from_secs(3));
        signal(pid, Signal::SIGCONT);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    });
    assert_eq!(operations(&cluster, 0), 0, "nothing was read again");
    cluster.down();
}

/// SEMANTICS: "A new server in the place of one that has died gets these samples from the node that has stored them, or reads the tar
/// again."
#[test]
fn a_new_server_gets_the_samples_of_compressed_archives_back() {
    for rate in ["128M", "0"] {
        let cluster = session(&["--recovery-rate", rate]);
        stage(&cluster, "tar.gz");
        lose(&cluster, 3, 0);
        if rate != "0" {
            wait_until_recovered(&cluster, 0);
        }
        let output = output_of(cluster.dayfly().args(["rejoin", "3"]).env("DAYFLY_NODE", "0"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        (0..NODES).for_each(|node| read_all(&cluster, node));
        if rate != "0" {
            assert_eq!(operations(&cluster, 0), 4, "the archives were read once");
        }
        cluster.down();
    }
}

/// SEMANTICS: "They also wait while a stage-in runs, and while other programs fill the drives of the node that is to store the samples."
#[test]
fn reads_wait_until_a_stage_in_has_ended() {
    let cluster = session(&["--recovery-rate", "0"]);
    let mut staging = cluster.dayfly();
    staging.args(["stage-in", "--max-rate", "80K", "tree0", "/dayfly/other"]).current_dir(cluster.work.path());
    let mut staging = staging.env("DAYFLY_NODE", "0").spawn().unwrap();
    // This dataset appears while caching stands still, so its room is planned only after that.
    stage(&cluster, "tar.gz");
    lose(&cluster, 3, 0);
    assert!(staging.try_wait().unwrap().is_none(), "the stage-in has ended too soon to test anything");
    read_all(&cluster, 0);
    assert!(staging.wait().unwrap().success());
    end_from(&cluster, 0);
}

/// SEMANTICS: "They also wait while a stage-in runs, and while other programs fill the drives of the node that is to store the samples."
#[test]
fn reads_wait_while_other_programs_fill_the_drive() {
    for is_filled_before in [false, true] {
        let ground = Ground::new();
        let Some(drive) = SmallDrive::mount(ground.at("small"), "100m") else { return };
        let cluster = session_on(ground, &["--recovery-rate", "0", "--data-dir", drive.path().to_str().unwrap()]);
        stage(&cluster, "tar.gz");
        if is_filled_before {
            drive.fill(0);
        }
        lose(&cluster, 3, 0);
        // The lost server has left room.
        drive.fill(0);
        std::thread::scope(|scope| {
            let reading = scope.spawn(|| read_all(&cluster, 0));
            std::thread::sleep(Duration::from_secs(2));
            assert!(!reading.is_finished(), "there is room for all samples");
            drive.make_room();
        });
        // Nothing is read from the archives again.
        let before = operations(&cluster, 0);
        (0..3).for_each(|node| read_all(&cluster, node));
        assert_eq!(operations(&cluster, 0), before);
        end_from(&cluster, 0);
        drop(drive);
    }
}

/// Replaces the server of node 3 by one that has room for the catalogs, but not for all samples.
fn replace_on_full_drive(cluster: &Cluster, drive: &SmallDrive) {
    stage(cluster, "tar.gz");
    lose(cluster, 3, 0);
    drive.fill(512 << 10);
    let rejoined = output_of(cluster.dayfly().args(["rejoin", "3"]).env("DAYFLY_NODE", "0"));
    assert!(rejoined.status.success(), "{}", harness::text(&rejoined.stderr));
}

/// SEMANTICS: "If other programs fill the drives when a new server starts, it grows when they make room."
#[test]
fn a_new_server_on_a_full_drive_takes_its_room_later() {
    let ground = Ground::new();
    let Some(drive) = SmallDrive::mount(ground.at("small"), "100m") else { return };
    let cluster = session_on(ground, &["--recovery-rate", "0", "--data-dir", drive.path().to_str().unwrap()]);
    replace_on_full_drive(&cluster, &drive);
    std::thread::scope(|scope| {
        let cluster = &cluster;
        let reading: Vec<_> = [0, 3].into_iter().map(|node| scope.spawn(move || read_all(cluster, node))).collect();
        std::thread::sleep(Duration::from_secs(2));
        assert!(reading.iter().all(|reading| !reading.is_finished()), "there is room for all samples");
        drive.make_room();
    });
    cluster.down();
    drop(drive);
}

#[test]
fn no_node_waits_forever_for_a_new_server_on_a_full_drive_or_asks_it_without_a_pause() {
    let ground = Ground::new();
    let Some(drive) = SmallDrive::mount(ground.at("small"), "100m") else { return };
    let options = ["--recovery-rate", "0", "--recovery-timeout", "4", "--data-dir", drive.path().to_str().unwrap()];
    let cluster = session_on(ground, &options);
    replace_on_full_drive(&cluster, &drive);
    let requests = || status(&cluster, 0)["nodes"][0]["owners"][3]["requests"].as_u64().unwrap();
    let (before, start, view) = (requests(), Instant::now(), cluster.view(0));
    let errors: Vec<String> = (0..FILES).filter_map(|number| read(&view, number).err()).collect();
    harness::assert_no_hang(start);
    assert!(!errors.is_empty() && errors.iter().all(|error| error.contains("--recovery-timeout")), "{errors:?}");
    let asked = requests() - before;
    assert!(asked < FILES as u64 * 2, "{asked} requests");
    drive.make_room();
    cluster.down();
    drop(drive);
}

/// Destroys all copies of many samples on the servers' drives.
fn damage_all(cluster: &Cluster) {
    let contents = (0..FILES).filter(|&number| len(number) > 64).map(|number| content(number, len(number)));
    let starts: HashSet<[u8; 64]> = contents.filter_map(|content| content.first_chunk().copied()).collect();
    let mut damaged = 0;
    for pid in cluster.pids().into_values() {
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten() {
            if !fs::read_link(entry.path()).is_ok_and(|target| target.starts_with(cluster.data.path())) {
                continue;
            }
            let file = fs::OpenOptions::new().read(true).write(true).open(entry.path());
            let (Ok(file), Ok(bytes)) = (file, fs::read(entry.path())) else { continue };
            // Many blocks begin at multiples of eight.
            let is_start = |at: &usize| bytes[*at..].first_chunk().is_some_and(|start: &[u8; 64]| starts.contains(start));
            for at in (0..bytes.len()).step_by(8).filter(is_start) {
                file.write_all_at(&[0xA5; 64], at as u64).unwrap();
                damaged += 1;
            }
        }
    }
    assert!(damaged > 20, "{damaged} blocks");
}

/// A tar is read again for the loss of a node, not for bad copies. Their reads fail, and do not wait.
#[test]
fn reads_of_samples_whose_copies_are_all_bad_fail_at_once() {
    let cluster = session(&[]);
    for part in 0..4 {
        pack(&cluster.at(format!("{part}.tar.gz")), &cluster.at(format!("tree{part}")), &["--sparse"]);
    }
    cluster.ok(&["stage-in", "--copies", "2", cluster.at("*.tar.gz").to_str().unwrap(), "/dayfly/d"]);
    damage_all(&cluster);
    let start = Instant::now();
    for node in 0..2 {
        let view = cluster.view(node);
        // A process that reads its own node's copy checks it only with `--verify-reads`.
        let remote = |number: &usize| {
            let file = view.open(format!("/dayfly/d/{number}").as_bytes()).unwrap();
            let (_, blocks) = file.dataset().catalog().sample(file.sample()).unwrap();
            len(*number) > 64 && !file.dataset().is_here(BlockId(blocks.start))
        };
        let errors: Vec<String> = (0..FILES).filter(remote).filter_map(|number| read(&view, number).err()).collect();
        assert!(!errors.is_empty());
        assert!(errors.iter().all(|error| !error.contains("out of its compressed archive")), "{errors:?}");
    }
    harness::assert_no_hang(start);
    end_from(&cluster, 0);
}

/// SEMANTICS: "If no holder has a sample of a compressed tar anymore, reads of it wait until a new server has read the tar again."
#[test]
fn new_servers_in_the_place_of_all_holders_read_archives_again() {
    // Nothing comes back in the background.
    for returned in [&["2", "3"][..], &["3"]] {
        let cluster = session(&["--recovery-rate", "0"]);
        for part in 0..4 {
            pack(&cluster.at(format!("{part}.tar.gz")), &cluster.at(format!("tree{part}")), &["--sparse"]);
        }
        cluster.ok(&["stage-in", "--copies", "2", cluster.at("*.tar.gz").to_str().unwrap(), "/dayfly/d"]);
        [3, 2].into_iter().for_each(|node| lose(&cluster, node, 0));
        for node in returned {
            let output = output_of(cluster.dayfly().args(["rejoin", node]).env("DAYFLY_NODE", "0"));
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        read_batch(&cluster, 0);
        (0..NODES).filter(|node| *node != 2 || returned.len() > 1).for_each(|node| read_all(&cluster, node));
        end_from(&cluster, 0);
    }
}
