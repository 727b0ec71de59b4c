//! Tests in which one server or all servers die at arbitrary points during a stage-in and during reads. Errors name the node within
//! the deadline, nothing hangs, no read returns wrong bytes or too few, and all space is freed.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::harness::{self, Cluster, Ground, signal, wait_for, wait_until};
use dayfly_client::ViewError;
use dayfly_meta::deadlines::Deadlines;
use nix::sys::signal::Signal;
use nix::sys::statvfs::statvfs;

harness::with_few_and_many_workers! {
    a_node_that_cannot_begin_a_stage_in_is_named_and_the_next_stage_in_works,
}

const FILES: usize = 3000;
fn content(number: usize) -> Vec<u8> {
    vec![number as u8; 1000 + number * 3]
}

/// Returns a folder with the files in `d`. Making them takes seconds.
fn ground() -> Ground {
    let ground = Ground::new();
    fs::create_dir(ground.at("d")).unwrap();
    (0..FILES).for_each(|number| fs::write(ground.at(format!("d/{number}")), content(number)).unwrap());
    ground
}

/// SEMANTICS: "A dataset appears at once and whole on all nodes, or not at all."
/// SEMANTICS: "If the node is lost that coordinates a stage-in, or if samples of compressed tars are lost with a node, the stage-in
/// begins again on the nodes that are left, up to the moment when its dataset appears. The command says so in one line. If the node
/// is lost that was asked for the stage-in, the
/// stage-in is canceled."
#[test]
fn a_server_killed_during_stage_in_ends_it_only_where_it_was_asked_for() {
    let (mut hits, files) = (0, ground());
    for round in 0..9_u64 {
        let cluster = harness::with_workers(round as usize % 2, || Ground::new().up_with(3, &["--deadlines-divisor", "5"]));
        // Each node receives the request in turn, and each node is killed in turn.
        let asked = (round / 3) as u16;
        let mut command = cluster.dayfly();
        command.args(["stage-in", "--max-rate", "8M"]).arg(files.at("d")).arg("/dayfly/d");
        command.env("DAYFLY_NODE", asked.to_string());
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(50 + round * 70));
        let was_done = child.try_wait().unwrap().is_some();
        let killed = (round % 3) as u16;
        cluster.kill(killed);
        let status = wait_for(&mut child, Duration::from_secs(60)).expect("a stage-in never hangs");
        let mut message = String::new();
        std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut message).unwrap();
        hits += usize::from(!was_done);
        let live: Vec<u16> = (0..3).filter(|&node| node != killed).collect();
        let listed = |node: u16| {
            let output = harness::output_of(cluster.dayfly().args(["ls", "/dayfly/d"]).env("DAYFLY_NODE", node.to_string()));
            harness::text(&output.stdout).lines().count()
        };
        if killed != asked {
            assert!(status.success(), "round {round}: {message}");
            live.iter().for_each(|&node| assert_eq!(listed(node), FILES, "round {round}, node {node}: {message}"));
        } else if !status.success() {
            assert!(message.contains(&format!("node {killed}")), "node {killed} is not named in: {message}");
            // Perhaps the other nodes had already made the dataset visible, and only the answer was lost.
            wait_until("nothing is visible and its space is free, or all of it is visible", || {
                let nodes =
                    harness::output_of(cluster.dayfly().args(["status", "--json"]).env("DAYFLY_NODE", live[0].to_string()));
                let status: serde_json::Value = serde_json::from_slice(&nodes.stdout).unwrap();
                let used = status["nodes"].as_array().unwrap().iter().filter_map(|node| node["used_bytes"].as_u64());
                let counts: Vec<usize> = live.iter().map(|&node| listed(node)).collect();
                counts == [FILES; 2] || counts == [0; 2] && used.sum::<u64>() == 0
            });
        }
        let output = harness::output_of(cluster.dayfly().arg("down").env("DAYFLY_NODE", live[0].to_string()));
        assert!(output.status.success(), "{}", harness::text(&output.stderr));
    }
    assert!(hits >= 3, "the kill came too late in nearly every round");
}

/// Reads everything on node 0. Returns how many files were whole, and how many reads failed with an error that names `node`.
fn read_all(cluster: &Cluster, node: &str) -> (usize, usize) {
    let view = cluster.view(0);
    let (mut whole, mut failed) = (0, 0);
    for number in 0..FILES {
        let file = view.open(format!("/dayfly/d/{number}").as_bytes()).unwrap();
        let expected = content(number);
        let mut buffer = vec![0; expected.len() + 10];
        let start = Instant::now();
        match view.read_at(&file, 0, &mut buffer) {
            Ok(count) => {
                assert!(buffer[..count] == expected[..], "wrong or short bytes in {number}");
                whole += 1;
            }
            Err(error) => {
                assert_eq!(error.errno(), nix::libc::EIO);
                assert!(error.to_string().contains(node), "{node} is not named in: {error}");
                failed += 1;
            }
        }
        harness::assert_within(Deadlines::DEFAULT.request + Duration::from_secs(3), start);
    }
    (whole, failed)
}

/// SEMANTICS: "If a block cannot be fetched, the read fails with `EIO` and the message names the node."
/// SEMANTICS: "A node that has died is reported at once."
/// SEMANTICS: "Samples of archives within archives that a lost node owned cannot be read until the node returns, unless the reader's
/// own node has cached them: such reads fail with `EIO`."
/// SEMANTICS: "With `--recovery-timeout 0` they fail at once."
#[test]
fn a_server_killed_during_reads_is_named_and_all_else_is_read() {
    for delay_ms in [0, 30] {
        let cluster = ground().up(3);
        cluster.stage_compressed("d", "/dayfly/d");
        let (whole, failed) = std::thread::scope(|scope| {
            let reading = scope.spawn(|| read_all(&cluster, "node 2"));
            std::thread::sleep(Duration::from_millis(delay_ms));
            cluster.kill(2);
            reading.join().unwrap()
        });
        assert!(whole > FILES / 2 && failed > 0, "{whole} whole, {failed} failed");
        assert!(cluster.output(&["verify"]).status.code() == Some(1));
        // `cp` leaves no partial files behind.
        assert_eq!(cluster.output(&["cp", "-r", "/dayfly/d", "out"]).status.code(), Some(1));
        let copied: Vec<_> = fs::read_dir(cluster.at("out")).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(copied.len() > FILES / 2 && copied.len() < FILES);
        for path in copied {
            let number = path.file_name().unwrap().to_str().unwrap().parse().unwrap();
            assert!(fs::read(&path).unwrap() == content(number), "{} is not whole", path.display());
        }
        wait_until("`status` names the lost node, and does not fail because of it", || {
            let status = cluster.output(&["status"]);
            let has_line = |line: &str| line.starts_with("2 ") && line.contains("has been lost for");
            status.status.success() && harness::text(&status.stdout).lines().any(has_line)
        });
        cluster.down();
    }
}

/// SEMANTICS: "If a block cannot be fetched, the read fails with `EIO` and the message names the node. A node that gives no sign of life
/// is asked until it is lost."
#[test]
fn reads_wait_for_a_stopped_server_until_it_is_lost() {
    let cluster = ground().up_with(2, &["--lost-after", "20"]);
    cluster.stage_compressed("d", "/dayfly/d");
    let pid = cluster.pids()[&1];
    let read_some = |numbers: std::ops::Range<usize>| -> Result<(), ViewError> {
        let view = cluster.view(0);
        for number in numbers {
            let file = view.open(format!("/dayfly/d/{number}").as_bytes()).unwrap();
            let mut buffer = content(number);
            buffer.fill(0);
            view.read_at(&file, 0, &mut buffer)?;
            assert!(buffer == content(number));
        }
        Ok(())
    };
    // A server that continues in time, although its peers have long given up their connections to it.
    signal(pid, Signal::SIGSTOP);
    let read = std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_some(0..50));
        std::thread::sleep(Deadlines::DEFAULT.peer_lost + Duration::from_secs(3));
        assert!(!reader.is_finished(), "half of the samples are on the other node");
        signal(pid, Signal::SIGCONT);
        reader.join().unwrap()
    });
    read.unwrap();
    signal(pid, Signal::SIGSTOP);
    let start = Instant::now();
    let error = read_some(50..100).unwrap_err();
    assert!(error.to_string().contains("node 1"), "{error}");
    harness::assert_within(Duration::from_secs(20) + 2 * Deadlines::DEFAULT.request, start);
    signal(pid, Signal::SIGCONT);
    cluster.down();
}

/// The error names the deadline that expired. This proves, without measuring time, that the session's own deadline was used.
#[test]
fn a_session_uses_the_deadlines_that_its_invitation_sets() {
    let cluster = ground().up_with(2, &["--deadlines-divisor", "10"]);
    let pid = cluster.pids()[&1];
    signal(pid, Signal::SIGSTOP);
    let output = cluster.output(&["tune", "--cache", "off"]);
    let error = harness::text(&output.stderr);
    assert!(error.contains("0.5 s") || error.contains("500 ms"), "{error}");
    signal(pid, Signal::SIGCONT);
    cluster.down();
}

/// SEMANTICS: "Reads of the node's own blocks also work after the server has died."
#[test]
fn after_the_nodes_own_server_dies_local_blocks_can_be_read_and_others_fail() {
    let cluster = ground().up(2);
    cluster.stage(&[&cluster.at("d")], "/dayfly/d");
    let view = cluster.view(0);
    assert!(view.stat(b"/dayfly/d/1").is_ok());
    cluster.kill(0);
    let (mut whole, mut failed) = (0, 0);
    for number in 0..FILES {
        let file = view.open(format!("/dayfly/d/{number}").as_bytes()).unwrap();
        let mut buffer = content(number);
        buffer.fill(0);
        match view.read_at(&file, 0, &mut buffer) {
            Ok(_) => {
                assert!(buffer == content(number));
                whole += 1;
            }
            Err(error) => {
                assert_eq!(error.errno(), nix::libc::EIO);
                failed += 1;
            }
        }
    }
    assert!(whole > FILES / 3 && failed > FILES / 3, "{whole} whole, {failed} failed");
    drop(view);
    cluster.down();
}

/// Returns the bytes in unnamed files that this process itself has open because it is attached to a session.
fn taken_by_nameless_files(ground: &Ground) -> u64 {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().flatten().map(|entry| entry.path());
    let in_data_dir = |path: &PathBuf| fs::read_link(path).is_ok_and(|target| target.starts_with(ground.data.path()));
    descriptors.filter(in_data_dir).map(|path| fs::metadata(path).map_or(0, |metadata| metadata.blocks() * 512)).sum()
}

/// SEMANTICS: "`down` frees all blocks at once, even while processes still have files open: their reads fail with `EIO`. Catalogs
/// and locations (about 90 bytes per sample) are freed when the last process that maps them unmaps them. `down` may be run twice."
#[test]
fn down_frees_everything_while_clients_are_still_attached() {
    let ground = ground();
    fs::write(ground.at("large"), vec![5; 100 << 20]).unwrap();
    let cluster = ground.up(2);
    cluster.stage(&[&cluster.at("large"), &cluster.at("d")], "/dayfly/l");
    let views = [cluster.view(0), cluster.view(1)];
    let files = views.each_ref().map(|view| view.open(b"/dayfly/l/large").unwrap());
    let mut buffer = [0; 100];
    for (view, file) in views.iter().zip(&files) {
        assert_eq!(view.read_at(file, 0, &mut buffer).unwrap(), 100);
    }
    assert!(taken_by_nameless_files(&cluster.ground) > 100 << 20);
    let printed = cluster.ok(&["down"]);
    assert!(printed.contains("2 nodes ended") && printed.contains("MiB freed"), "{printed}");
    // Only the catalogs and locations of 3,001 samples are left, mapped here twice.
    let taken = taken_by_nameless_files(&cluster.ground);
    assert!(taken < 2 << 20, "{taken} bytes are still taken");
    for (view, file) in views.iter().zip(&files) {
        assert_eq!(view.read_at(file, 0, &mut buffer).unwrap_err().errno(), nix::libc::EIO, "never zeros");
        assert!(view.stat(b"/dayfly/l/large").is_err());
    }
    cluster.ground.assert_clean();
}

/// SEMANTICS: "The end of a session never makes a path look absent: a program that attaches meanwhile
/// gets `EIO`, not `ENOENT`."
#[test]
fn no_path_looks_absent_because_the_session_ends() {
    for _ in 0..6 {
        let ground = Ground::new();
        fs::create_dir(ground.at("d")).unwrap();
        fs::write(ground.at("d/f"), "content").unwrap();
        let cluster = ground.up(1);
        cluster.stage(&[&cluster.at("d")], "/dayfly/d");
        let location = cluster.location();
        let looks: usize = std::thread::scope(|scope| {
            let look = || {
                let mut looks = 0;
                // Attach anew each time, like a new process that knows no dataset yet.
                while let Ok(session) = dayfly_client::Session::attach_to(&location, dayfly_meta::id::NodeId(0)) {
                    let found = dayfly_client::View::new(session).stat(b"/dayfly/d/f");
                    assert!(found.as_ref().map_or_else(|error| error.errno() == nix::libc::EIO, |_| true), "{:?}", found.err());
                    looks += 1;
                }
                looks
            };
            let looking: Vec<_> = (0..8).map(|_| scope.spawn(look)).collect();
            std::thread::sleep(Duration::from_millis(50));
            cluster.ok(&["down"]);
            looking.into_iter().map(|looking| looking.join().unwrap()).sum()
        });
        assert!(looks > 0);
        cluster.ground.assert_clean();
    }
}

/// SEMANTICS: "The end of a session never makes a path look absent: a program that attaches meanwhile
/// gets `EIO`, not `ENOENT`."
#[test]
fn a_server_that_exits_while_a_program_attaches_gives_eio_not_enoent() {
    if !harness::is_installed("strace") {
        return;
    }
    let ground = Ground::new();
    fs::create_dir(ground.at("d")).unwrap();
    fs::write(ground.at("d/f"), "content").unwrap();
    let cluster = ground.up(1);
    cluster.stage(&[&cluster.at("d")], "/dayfly/d");
    let socket = cluster.location().socket(dayfly_meta::id::NodeId(0));
    let mut command = cluster.dayfly();
    command.args(["exec", "--", "strace", "-o", "/dev/null", "-P"]).arg(&socket);
    command.args(["-e", "inject=open,openat:error=ENOENT", "cat", "/dayfly/d/f"]).env("LC_ALL", "C");
    let output = harness::output_of(&mut command);
    let message = harness::text(&output.stderr);
    assert!(!output.status.success() && message.contains("Input/output error"), "{message}{}", harness::text(&output.stdout));
    assert!(message.contains("dayfly: ") && message.contains("node 0"), "the cause is not named: {message}");
    cluster.down();
}

/// SEMANTICS: "If every server and client is killed by `kill -9`, the kernel frees the space, because
/// segments and catalogs have no names. Empty folders and sockets remain until the next `up` or `dayfly
/// clean`."
#[test]
fn kill_9_of_everything_frees_all_space_and_the_next_up_removes_the_folder() {
    let ground = ground();
    fs::write(ground.at("large"), vec![5; 100 << 20]).unwrap();
    // Use a separate file system, because other tests use the common one at the same time. Without root, the check is coarser.
    let own = ground.at("own");
    fs::create_dir(&own).unwrap();
    let mounted = harness::program("mount").args(["-t", "tmpfs", "-o", "size=400m", "none"]).arg(&own).output();
    let is_mounted = mounted.is_ok_and(|mounted| mounted.status.success());
    let (data_dir, tolerance) = if is_mounted { (own.clone(), 0) } else { (ground.data.path().to_owned(), 60 << 20) };
    let taken = || {
        let stat = statvfs(&data_dir).unwrap();
        (stat.blocks() - stat.blocks_free()) * stat.fragment_size()
    };
    let before = taken();
    let cluster = ground.up_with(3, &["--data-dir", data_dir.to_str().unwrap()]);
    cluster.stage(&[&cluster.at("large")], "/dayfly/l");
    assert!(taken() > before + (90 << 20) - tolerance);
    // Stop all servers first; otherwise those that are killed last would clean up after those killed first.
    let all: Vec<i32> = cluster.pids().into_values().chain([cluster.location().supervisor().unwrap()]).collect();
    all.iter().for_each(|&pid| signal(pid, Signal::SIGSTOP));
    all.iter().for_each(|&pid| signal(pid, Signal::SIGKILL));
    wait_until("the kernel has freed the space", || taken() <= before + tolerance);
    assert!(cluster.folder().exists(), "a killed session leaves its runtime folder");
    let second = cluster.ok(&["up", "--data-dir", data_dir.to_str().unwrap()]).trim().to_owned();
    assert!(!cluster.folder().exists() && second != cluster.id, "the next up removes it");
    cluster.ok(&["down"]);
    cluster.ground.assert_clean();
    if is_mounted {
        assert_eq!(fs::read_dir(&own).unwrap().count(), 0);
        assert!(harness::program("umount").arg(&own).status().unwrap().success());
    }
}

/// SEMANTICS: "A node whose folder in a data dir is removed continues to serve the blocks it has, and
/// stage-ins fail, with an error that names the node, until the folder exists again."
fn a_node_that_cannot_begin_a_stage_in_is_named_and_the_next_stage_in_works() {
    let cluster = ground().up(3);
    let data_dir = cluster.status()["nodes"][2]["data_dirs"][0].as_str().unwrap().to_owned();
    fs::remove_dir(&data_dir).unwrap();
    for _ in 0..3 {
        let start = Instant::now();
        let message = cluster.fails(1, &["stage-in", "d", "/dayfly/d"]);
        assert!(message.contains("node 2") && message.contains("cannot begin"), "{message}");
        assert!(message.contains("the folder was removed, so create it again"), "{message}");
        harness::assert_no_hang(start);
    }
    fs::create_dir(&data_dir).unwrap();
    cluster.stage(&[&cluster.at("d")], "/dayfly/d");
    cluster.ok(&["verify"]);
    cluster.down();
}
