//! Datasets of which several nodes store each block (`stage-in --copies`).

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::harness::inside::{Inside, Rest};
use crate::harness::samples::{content, count, dataset, path};
use crate::harness::{self, Ground, pack, wait_until};
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{BlockId, NodeId};
use dayfly_meta::wire::control::{Command, Copies, Event, Selection, StageInRequest, Summary};
use dayfly_meta::wire::decode_sealed;
use dayfly_meta::wire::peer::{ReadRequest, Request};
use dayfly_meta::wire::status::RecoveryStatus;
use dayfly_transport::fault::Fault;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

const FILES: usize = 500;

/// Lengths of files, about 45 MiB in all: empty ones, small ones, and ones of several chunks and of several blocks.
fn lens() -> Vec<usize> {
    (0..FILES).map(|number| number * 371 % 60_000).chain([0, 1, (4 << 20) + 1, 9_000_000]).collect()
}

/// Starts a session of four nodes with a dataset of two copies. Its source is an archive with this ending, or a directory.
fn session(lens: &[usize], ending: Option<&str>, recovery_rate: u64) -> (Inside, Summary) {
    let mut session = Inside::with_config(4, |config| config.recovery_rate = recovery_rate);
    session.copies = Copies::Number(2);
    let source = source(&session, lens, ending);
    let summary = session.stage(&source).unwrap();
    (session, summary)
}

fn source(session: &Inside, lens: &[usize], ending: Option<&str>) -> PathBuf {
    let tree = session.write(lens);
    let Some(ending) = ending else { return tree };
    let archive = session.work.path().join(format!("d.{ending}"));
    pack(&archive, &tree, &[]);
    archive
}

fn read_all(session: &Inside, node: u16, lens: &[usize]) {
    read_all_at(session, node, lens, path);
}

fn read_all_at(session: &Inside, node: u16, lens: &[usize], path: impl Fn(usize) -> Vec<u8>) {
    let view = session.view(node);
    for (number, &len) in lens.iter().enumerate() {
        let path = path(number);
        let file = view.open(&path).unwrap_or_else(|error| panic!("{}: {error:?}", path.escape_ascii()));
        let mut bytes = vec![0; len];
        view.read_at(&file, 0, &mut bytes).unwrap_or_else(|error| panic!("file {number} on node {node}: {error}"));
        assert!(bytes == content(number, len), "file {number} on node {node}");
    }
}

/// Returns on how many of these nodes each block is.
fn places(session: &Inside, nodes: &[u16]) -> Vec<usize> {
    let all: Vec<_> = nodes.iter().map(|&node| dataset(&session.view(node))).collect();
    let blocks = all[0].catalog().header().blocks;
    (0..blocks).map(BlockId).map(|block| all.iter().filter(|dataset| dataset.is_here(block)).count()).collect()
}

fn origin_reads(session: &Inside, nodes: &[u16]) -> u64 {
    nodes.iter().map(|&node| session.status_of(node).origins.operations).sum()
}

/// SEMANTICS: "With `--copies N`, the owner of each block and the next of its candidates store the block before the dataset becomes
/// visible, N nodes in all. After the loss of a node, nothing is read from the sources: the other holders answer, and the copies that
/// were lost are made again from theirs."
#[test]
fn the_loss_of_a_node_costs_no_read_of_the_sources_and_copies_are_restored() {
    let lens = lens();
    // A compressed archive cannot be read at random places.
    for ending in [None, Some("tar"), Some("tar.gz")] {
        let (mut session, summary) = session(&lens, ending, 1 << 30);
        assert_eq!((summary.copies, summary.copied_bytes, summary.uncopied_bytes), (2, summary.bytes, 0));
        assert!(places(&session, &[0, 1, 2, 3]).iter().all(|&places| places == 2), "{ending:?}");
        let here: u64 = (0..4).map(|node| session.status_of(node).copies.bytes).sum();
        assert_eq!(here, summary.bytes);
        fs::rename(session.work.path(), session.work.path().with_extension("away")).unwrap();
        (0..4).for_each(|node| read_all(&session, node, &lens));
        session.lose(3);
        let left = [0, 1, 2];
        (0..3).for_each(|node| read_all(&session, node, &lens));
        wait_until("all copies are restored", || places(&session, &left).iter().all(|&places| places >= 2));
        // Readers may have brought some blocks before recovery looked for them.
        wait_until("all nodes say so", || {
            left.iter()
                .map(|&node| session.status_of(node).recovery)
                .all(|recovery| recovery.wanted == recovery.recovered && recovery.failed.count == 0)
        });
        // So the session survives the loss of another node.
        session.lose(2);
        (0..2).for_each(|node| read_all(&session, node, &lens));
        assert_eq!(origin_reads(&session, &[0, 1]), 0, "{ending:?}");
        fs::rename(session.work.path().with_extension("away"), session.work.path()).unwrap();
    }
}

/// SEMANTICS: "This holds for one loss after another, down to the last server, if the copies were made again in between."
#[test]
fn copies_are_made_again_after_each_loss_down_to_the_last_server() {
    let lens = lens();
    for (ending, timeout_s) in [(None, 60), (Some("tar"), 60), (Some("tar.gz"), 60), (Some("tar.gz"), 0)] {
        let mut session = Inside::with_config(5, |config| {
            config.recovery_rate = 1 << 30;
            config.recovery_timeout = Duration::from_secs(timeout_s);
        });
        session.copies = Copies::Number(2);
        session.stage(&source(&session, &lens, ending)).unwrap();
        fs::rename(session.work.path(), session.work.path().with_extension("away")).unwrap();
        let mut left: Vec<u16> = (0..5).collect();
        for lost in [0, 3, 1] {
            session.lose(lost);
            left.retain(|&node| node != lost);
            wait_until("all copies are made again", || places(&session, &left).iter().all(|&places| places >= 2));
            wait_until("all nodes say so", || {
                left.iter().map(|&node| session.status_of(node).recovery).all(|of| of.is_scanned && of.wanted == of.recovered)
            });
        }
        session.lose(4);
        read_all(&session, 2, &lens);
        assert_eq!(origin_reads(&session, &[2]), 0, "{ending:?}");
        fs::rename(session.work.path().with_extension("away"), session.work.path()).unwrap();
    }
}

/// SEMANTICS: "Copies are never evicted. This also holds for those that a new server has got back, and for those that other nodes make
/// while a node is lost."
#[test]
fn copies_that_are_made_again_make_way_for_no_stage_in() {
    let lens = lens();
    let bytes = lens.iter().sum::<usize>() as u64;
    let mut session = Inside::with_config(4, |config| {
        config.capacity = bytes * 3 / 2;
        config.recovery_rate = 1 << 30;
    });
    session.copies = Copies::Number(2);
    session.stage(&source(&session, &lens, Some("tar.gz"))).unwrap();
    let free = |node: u16| session.status_of(node).free_bytes;
    let before = free(0);
    (0..3).for_each(|node| read_all(&session, node, &lens));
    assert!(free(0).abs_diff(before) < bytes / 16, "cached blocks take no room from a stage-in");
    session.lose(3);
    let left = [0, 1, 2];
    let all_have_copies = |session: &Inside| places(session, &left).iter().all(|&places| places >= 2);
    wait_until("all copies are restored", || all_have_copies(&session));
    session.copies = Copies::Number(1);
    let tree = session.write_in("more", &vec![100_000; bytes as usize / 400_000], 1000);
    let staged = (0..20).take_while(|number| session.stage_at(format!("t{number}").as_bytes(), &tree, false).is_ok()).count();
    assert!((2..20).contains(&staged), "{staged} stage-ins found room");
    assert!(all_have_copies(&session), "copies made way for {staged} stage-ins");
    session.lose(2);
    (0..2).for_each(|node| read_all(&session, node, &lens));
}

/// The same for a compressed tar that is still there: nobody reads it again, and `status` counts each block once.
#[test]
fn copies_of_a_compressed_tar_are_restored_from_copies_and_counted_once() {
    // Slow enough for all ways to find the blocks before one has recovered them.
    let mut session = Inside::with_config(4, |config| {
        config.recovery_rate = 8 << 20;
        config.recovery_timeout = Duration::from_secs(60);
    });
    session.copies = Copies::Number(2);
    session.stage(&source(&session, &lens(), Some("tar.gz"))).unwrap();
    let held = places(&session, &[3]).iter().sum::<usize>() as u64;
    assert!(held > 0);
    session.lose(3);
    let left = [0, 1, 2];
    wait_until("all copies are restored", || places(&session, &left).iter().all(|&places| places >= 2));
    let recovery = || left.map(|node| session.status_of(node).recovery);
    let is_done = |of: &RecoveryStatus| of.is_scanned && of.wanted == of.recovered && of.failed.count == 0;
    wait_until("all nodes say so", || recovery().iter().all(is_done));
    assert_eq!(recovery().iter().map(|of| of.wanted.count).sum::<u64>(), held);
    assert_eq!(origin_reads(&session, &left), 0);
}

/// SEMANTICS: "If copying fails, the stage-in fails on all nodes."
#[test]
fn copies_that_nearly_fit_are_made_or_fail_at_once() {
    // On drives, blocks of this length take up to two pages more, so there are capacities with room for the bytes only.
    let lens = [70_000; 40];
    let mut succeeded = 0;
    for more in (0..24).map(|step| step * (40 << 10)) {
        let mut session = Inside::with_config(2, |config| config.capacity = 2_800_000 + more);
        session.copies = Copies::Number(2);
        let source = source(&session, &lens, Some("tar.gz"));
        let start = std::time::Instant::now();
        match session.stage(&source) {
            Ok(summary) => {
                succeeded += 1;
                assert_eq!((summary.copied_bytes, summary.uncopied_bytes), (summary.bytes, 0));
            }
            Err(error) => assert!(error.contains("there is no room for a copy"), "{error}"),
        }
        crate::harness::assert_no_hang(start);
    }
    assert!((1..24).contains(&succeeded), "{succeeded}");
}

/// SEMANTICS: "A copy that was made again after the loss of a holder is asked for like the lost one, also by reads that are under way when
/// the next holder dies."
#[test]
fn reads_go_to_the_copies_that_were_made_again_before_a_second_loss_is_declared() {
    let lens = lens();
    // With and without another reading of the archive.
    for recovery_timeout in [Duration::ZERO, Duration::from_secs(60)] {
        let mut session = Inside::with_config(4, |config| {
            config.recovery_rate = 1 << 30;
            config.recovery_timeout = recovery_timeout;
        });
        session.copies = Copies::Number(2);
        session.stage(&source(&session, &lens, Some("tar.gz"))).unwrap();
        session.lose(3);
        wait_until("all copies are restored", || places(&session, &[0, 1, 2]).iter().all(|&places| places >= 2));
        // Nobody is told of this loss, so the first reads go to this node.
        session.stop(2);
        (0..2).for_each(|node| read_all(&session, node, &lens));
    }
}

/// SEMANTICS: "A copy that is damaged, or that a drive does not return, costs nothing but another request: the next holder is asked."
#[test]
fn a_bad_copy_is_read_from_the_next_holder() {
    let lens = vec![50_000; 60];
    let (session, _) = session(&lens, Some("tar.gz"), 0);
    // One of two copies of each block goes bad.
    let mut flipped = 0;
    for (number, &len) in lens.iter().enumerate() {
        let bytes = content(number, len);
        let node = (0..4).find(|&node| {
            let view = session.view(node);
            let (_, blocks) = dataset(&view).catalog().sample(view.open(&path(number)).unwrap().sample()).unwrap();
            dataset(&view).is_here(BlockId(blocks.start))
        });
        flipped += session.flip(Rest::Segments(session.data_dir(node.unwrap())), &bytes);
    }
    assert_eq!(flipped, lens.len());
    for node in 0..4 {
        let view = session.view(node);
        for (number, &len) in lens.iter().enumerate() {
            let file = view.open(&path(number)).unwrap();
            let (_, blocks) = dataset(&view).catalog().sample(file.sample()).unwrap();
            // A node trusts its own drives.
            if dataset(&view).is_here(BlockId(blocks.start)) {
                continue;
            }
            let mut bytes = vec![0; len];
            view.read_at(&file, 0, &mut bytes).unwrap_or_else(|error| panic!("file {number} on node {node}: {error}"));
            assert!(bytes == content(number, len), "file {number} on node {node}");
        }
    }
}

/// SEMANTICS: "If copying fails, the stage-in fails on all nodes."
#[test]
fn a_stage_in_whose_copies_fail_leaves_nothing_behind() {
    let lens = lens();
    let mut session = Inside::with_config(4, |_| {});
    session.copies = Copies::Number(2);
    let tree = source(&session, &lens, None);
    // Whatever node 2 sends arrives damaged.
    session.inject(|seen| match decode_sealed::<Request>(seen.message) {
        Ok(Request::Read(ReadRequest::Chunks { .. })) if seen.peer == NodeId(2) => Some(Fault::FlipOnWire),
        _ => None,
    });
    let error = session.stage(&tree).unwrap_err();
    assert!(error.contains("node 2 has no good copy of a block"), "{error}");
    session.leave_alone();
    assert!(session.view(1).session().datasets().unwrap().is_empty());
    wait_until("the space is free again", || session.status().iter().all(|node| node.used_bytes == 0));
    session.stage(&tree).unwrap();
    read_all(&session, 1, &lens);
}

/// The rate at which all nodes together read the sources, in bytes a second.
const RATE: u64 = 32 << 20;

/// Stages sources in, and lets a node other than node 0 die at the first request to it for which `is_time` holds. Returns the node,
/// and the events of the stage-in.
fn stage_while_a_node_dies(
    session: &mut Inside,
    sources: &[PathBuf],
    copies: Copies,
    is_time: impl Fn(NodeId, &ReadRequest) -> bool + Send + Sync + 'static,
) -> (NodeId, Vec<Event>) {
    let dead = Arc::<OnceLock<NodeId>>::default();
    let dying = dead.clone();
    session.inject(move |seen| match decode_sealed::<Request>(seen.message) {
        Ok(Request::Read(request)) if seen.peer != NodeId(0) && is_time(seen.peer, &request) => {
            (*dying.get_or_init(|| seen.peer) == seen.peer).then_some(Fault::Kill)
        }
        _ => None,
    });
    let request = StageInRequest {
        sources: sources.iter().map(|source| source.as_os_str().as_encoded_bytes().to_vec()).collect(),
        target: b"d".to_vec(),
        selection: Selection::default(),
        seed: 1,
        replace: false,
        // No node can read everything before the others have begun.
        max_rate: Some(RATE),
        require_fit: false,
        copies,
    };
    let view = session.view(0);
    let staging = std::thread::spawn(move || {
        let mut events = Vec::new();
        let end = view.session().control(Command::StageIn(request), &mut |event| events.push(event));
        (end, events)
    });
    wait_until("a node is dead", || dead.get().is_some());
    // The supervisor waits for a node to dial again.
    std::thread::sleep(Deadlines::DEFAULT.reconnect);
    let dead = *dead.get().unwrap();
    session.announce(dead.0, true);
    let (end, events) = staging.join().unwrap();
    end.unwrap_or_else(|error| panic!("{error} after {events:?}"));
    (dead, events)
}

fn begins_again(events: &[Event]) -> bool {
    events.iter().any(|event| matches!(event, Event::Restarted { .. }))
}

/// The parts of a source of some 19 MB.
const PARTS: usize = 16;

/// SEMANTICS: "It also begins again if a node is lost while the sources are listed or while the catalog is built"
#[test]
fn a_stage_in_begins_again_if_a_node_is_lost_while_its_sorted_members_are_read() {
    let lens: Vec<usize> = (0..640).map(|number| number * 371 % 60_000).collect();
    for is_packed in [false, true] {
        let mut session = Inside::new(4, false);
        // Each part is larger than the units of which a worker takes several at once, so all nodes read some.
        let tree = session.write(&lens);
        let names = |number: usize| (tree.join(number.to_string()), session.work.path().join(format!("part{}", number % PARTS)));
        let sources = (0..PARTS).map(|part| {
            let folder = names(part).1;
            fs::create_dir(&folder).unwrap();
            (part..lens.len())
                .step_by(PARTS)
                .for_each(|number| fs::rename(names(number).0, folder.join(number.to_string())).unwrap());
            let archive = folder.with_extension("tar");
            pack(&archive, &folder, &[]);
            if is_packed { archive } else { folder }
        });
        let sources: Vec<PathBuf> = sources.collect();
        let is_reading_a_run = |_, request: &ReadRequest| matches!(request, ReadRequest::Run { .. });
        let (dead, events) = stage_while_a_node_dies(&mut session, &sources, Copies::default(), is_reading_a_run);
        assert!(begins_again(&events), "{events:?}");
        let in_folder = |number| format!("/dayfly/d/part{}/{number}", number % PARTS).into_bytes();
        let path = if is_packed { path } else { in_folder };
        (0..4).filter(|&node| NodeId(node) != dead).for_each(|node| read_all_at(&session, node, &lens, path));
    }
}

/// SEMANTICS: "If a node is lost before its samples of compressed archives have been copied, the stage-in begins again. Otherwise it
/// goes on, and the summary says how many bytes of copies are missing. They are made afterwards, also by the lost node if it returns."
#[test]
fn an_owner_that_is_lost_before_its_blocks_were_copied_costs_no_sample() {
    let lens: Vec<usize> = (0..300).map(|number| number * 371 % 60_000).chain([(4 << 20) + 1]).collect();
    for ending in [None, Some("tar.gz")] {
        let mut session = Inside::with_config(4, |config| config.recovery_rate = 1 << 30);
        let source = source(&session, &lens, ending);
        // Node 2 dies as soon as another node wants to copy its blocks.
        let is_copying = |node, request: &ReadRequest| node == NodeId(2) && matches!(request, ReadRequest::Chunks { .. });
        let (_, events) = stage_while_a_node_dies(&mut session, &[source], Copies::Number(2), is_copying);
        let Some(Event::StagedIn(summary)) = events.last() else { panic!("{events:?}") };
        assert_eq!((begins_again(&events), summary.uncopied_bytes == 0), (ending.is_some(), ending.is_some()), "{ending:?}");
        let left = [0, 1, 3];
        left.into_iter().for_each(|node| read_all(&session, node, &lens));
        wait_until("all copies are made", || places(&session, &left).iter().all(|&places| places >= 2));
    }
}

/// SEMANTICS: "`--copies N` fails before it reads if not all copies fit, or if there are fewer than N nodes. `--copies auto` means two
/// if two copies certainly fit, else one; the summary says which."
#[test]
fn copies_that_do_not_fit_are_refused_and_auto_takes_what_fits() {
    let ground = Ground::new();
    fs::create_dir(ground.at("d")).unwrap();
    (0..300).for_each(|number| fs::write(ground.at(format!("d/{number}")), content(number, 60_000)).unwrap());
    pack(&ground.at("d.tar.gz"), &ground.at("d"), &[]);
    let cluster = ground.up_with(2, &["--capacity", "30MiB"]);
    let tree = cluster.at("d");
    let tree = tree.to_str().unwrap();
    let message = cluster.fails(1, &["stage-in", "--copies", "3", tree, "/dayfly/d"]);
    assert!(message.contains("--copies 3 needs at least 3 nodes, and the session has 2"), "{message}");
    let message = cluster.fails(2, &["stage-in", "--copies", "some", tree, "/dayfly/d"]);
    assert!(message.contains("a number from 1 to 16, or 'auto'"), "{message}");
    let output = cluster.output(&["stage-in", "--copies", "2", tree, "/dayfly/d"]);
    let message = harness::text(&output.stderr);
    assert!(output.status.success() && message.contains("2 nodes store each block; the copies take 17.2MiB"), "{message}");
    // Both nodes read everything from their own drives.
    let before: u64 = cluster.status()["nodes"].as_array().unwrap().iter().map(|node| count(&node["remote_reads"])).sum();
    for node in 0..2 {
        let view = cluster.view(node);
        for number in 0..300 {
            let file = view.open(&path(number)).unwrap();
            let mut bytes = vec![0; 60_000];
            view.read_at(&file, 0, &mut bytes).unwrap();
            assert!(bytes == content(number, 60_000));
        }
    }
    let after: u64 = cluster.status()["nodes"].as_array().unwrap().iter().map(|node| count(&node["remote_reads"])).sum();
    assert_eq!(before, after);
    cluster.ok(&["verify", "--from-every-node"]);
    let message = cluster.fails(1, &["stage-in", "--copies", "2", tree, "/dayfly/again"]);
    assert!(message.contains("2 copies of the samples take at least") && message.contains("fewer --copies"), "{message}");
    // Here there is room for one copy only.
    let summary = |arguments: &[&str]| -> Value {
        let output = cluster.ok(&[&["stage-in", "--json", "--copies", "auto"], arguments].concat());
        output
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .find(|event: &Value| event["event"] == "staged-in")
            .unwrap()
    };
    assert_eq!(count(&summary(&[tree, "/dayfly/again"])["copies"]), 1);
    fs::create_dir(cluster.at("few")).unwrap();
    fs::write(cluster.at("few/0"), content(0, 1000)).unwrap();
    let done = summary(&[cluster.at("few").to_str().unwrap(), "/dayfly/few"]);
    assert_eq!((count(&done["copies"]), count(&done["copied_bytes"])), (2, 1000));
    cluster.down();
}

/// SEMANTICS: "While a holder does not answer, the others are asked, and no read on another node fails, whatever the source is."
#[test]
fn readers_see_no_error_when_a_holder_is_killed_or_stands_still() {
    let ground = Ground::new();
    fs::create_dir(ground.at("d")).unwrap();
    (0..1200).for_each(|number| fs::write(ground.at(format!("d/{number}")), content(number, 20_000)).unwrap());
    pack(&ground.at("d.tar.gz"), &ground.at("d"), &[]);
    let cluster = ground.up_with(4, &["--deadlines-divisor", "5"]);
    cluster.ok(&["stage-in", "--copies", "2", cluster.at("d.tar.gz").to_str().unwrap(), "/dayfly/d"]);
    let read_all = |node| {
        let view = cluster.view(node);
        for number in 0..1200 {
            let file = view.open(&path(number)).unwrap();
            let mut bytes = vec![0; 20_000];
            view.read_at(&file, 0, &mut bytes).unwrap_or_else(|error| panic!("file {number} on node {node}: {error}"));
            assert!(bytes == content(number, 20_000), "file {number} on node {node}");
        }
    };
    let pid = cluster.pids()[&3];
    for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
        std::thread::scope(|scope| {
            let readers: Vec<_> = (0..3).map(|node| scope.spawn(move || read_all(node))).collect();
            std::thread::sleep(Duration::from_millis(20));
            // A server that stands still for long is ended by its supervisor.
            let _ = kill(Pid::from_raw(pid), signal);
            readers.into_iter().for_each(|reader| reader.join().unwrap());
        });
        (0..3).for_each(read_all);
    }
    cluster.down();
}
