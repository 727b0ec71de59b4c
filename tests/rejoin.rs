//! Sessions in which a new server takes the place of one that has died.

mod copies;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use crate::harness::alone::runs_alone_with_views;
use crate::harness::drive::SmallDrive;
use crate::harness::samples::{content, path};
use crate::harness::{self, Cluster, Ground, output_of, pack, signal, text, wait_for, wait_until};
use dayfly_client::{Batch, Delivery, OnMissing, Session, View};
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::REPLACEMENTS_MAX;
use nix::sys::signal::Signal;

const FILES: usize = 300;
const NODES: u16 = 4;
/// A fifth of all deadlines: a server that is silent for 6 s is lost.
const QUICK: [&str; 2] = ["--deadlines-divisor", "5"];

fn len(number: usize) -> usize {
    if number == 7 { 6 << 20 } else { number * 37 % 50_000 }
}

fn ground() -> Ground {
    let ground = Ground::new();
    fs::create_dir(ground.at("tree")).unwrap();
    (0..FILES).for_each(|number| fs::write(ground.at(format!("tree/{number}")), content(number, len(number))).unwrap());
    pack(&ground.at("a.tar"), &ground.at("tree"), &[]);
    ground
}

/// Starts four nodes that replace dead servers, and stages in a tar.
fn session() -> Cluster {
    let cluster = ground().up_rejoining(NODES, &QUICK);
    cluster.stage(&[&cluster.at("a.tar")], "/dayfly/d");
    cluster
}

fn read(view: &View, number: usize, dataset: &str, context: &str) {
    let path = format!("/dayfly/{dataset}/{number}");
    let file = view.open(path.as_bytes()).unwrap_or_else(|error| panic!("{path} {context}: {error:?}"));
    let mut bytes = vec![0; len(number)];
    view.read_at(&file, 0, &mut bytes).unwrap_or_else(|error| panic!("{path} {context}: {error}"));
    assert!(bytes == content(number, len(number)), "{path} {context}");
}

fn read_all(view: &View, dataset: &str, context: &str) {
    (0..FILES).for_each(|number| read(view, number, dataset, context));
}

fn read_batch(view: &View, context: &str) {
    let paths: Vec<Vec<u8>> = (0..FILES).map(path).collect();
    let paths: Vec<&[u8]> = paths.iter().map(Vec::as_slice).collect();
    let mut batch = view.read_many(&paths, Delivery::AsAvailable, OnMissing::Fail).unwrap();
    batch.wait().unwrap_or_else(|error| panic!("a batch {context}: {error}"));
    (0..FILES).for_each(|number| assert!(batch.get(number) == Some(&content(number, len(number))[..]), "{number} {context}"));
}

/// Returns the state of a node as `status` reports it on another node.
fn node_status(cluster: &Cluster, node: u16) -> serde_json::Value {
    state_on(cluster, (node + 1) % NODES, node)
}

fn state_on(cluster: &Cluster, asked: u16, node: u16) -> serde_json::Value {
    cluster.status_on(asked)["nodes"][usize::from(node)].take()
}

fn is_lost(cluster: &Cluster, node: u16) -> bool {
    node_status(cluster, node)["lost_for_ms"].is_u64()
}

/// Waits until another process serves as a node, and the node is a member.
fn wait_until_replaced(cluster: &Cluster, node: u16, old: i32) {
    wait_until("a new server is a member", || {
        cluster.pids().get(&node).is_some_and(|pid| *pid != old) && !is_lost(cluster, node) && {
            let address = node_status(cluster, node);
            address["pid"].as_i64().is_some_and(|pid| pid != i64::from(old))
        }
    });
}

/// Kills a server, and waits until a new one has taken its place.
fn replace(cluster: &Cluster, node: u16) {
    let old = cluster.pids()[&node];
    signal(old, Signal::SIGKILL);
    wait_until_replaced(cluster, node, old);
}

/// SEMANTICS: "When a server has died, the supervisor starts a new one on its node. It is the same member of the session, without
/// blocks; they come back to it in the background, from the nodes that have held them meanwhile, or from their sources."
#[test]
fn a_new_server_takes_the_place_of_one_that_has_died_and_its_blocks_come_back() {
    for node in [2, 0] {
        let cluster = session();
        let owned = node_status(&cluster, node)["held_bytes"].as_u64().unwrap();
        assert!(owned > 0);
        replace(&cluster, node);
        wait_until("its blocks have come back", || node_status(&cluster, node)["cached_bytes"].as_u64() >= Some(owned));
        for node in 0..NODES {
            read_all(&cluster.view(node), "d", &format!("on node {node}"));
        }
        // The new server takes part in stage-ins.
        cluster.stage(&[&cluster.at("a.tar")], "/dayfly/e");
        assert!(node_status(&cluster, node)["samples"].as_u64().unwrap() > 0);
        (0..NODES).for_each(|node| read_all(&cluster.view(node), "e", &format!("on node {node}")));
        cluster.down();
    }
}

/// SEMANTICS: "Processes of the node attach to the new server by themselves, also those that have files open."
#[test]
fn processes_of_the_node_attach_to_the_new_server_by_themselves() {
    let cluster = session();
    let view = cluster.view(2);
    let open: Vec<_> = (0..FILES).map(|number| (number, view.open(&path(number)).unwrap())).collect();
    read_batch(&view, "before");
    let old = cluster.pids()[&2];
    cluster.kill(2);
    // Blocks of the node itself are still read, and those that came over the network before, as far as they are in its memory.
    let read_again = |(number, file): &(usize, dayfly_client::OpenFile)| {
        let mut bytes = vec![0; len(*number)];
        view.read_at(file, 0, &mut bytes).map(|_| assert!(bytes == content(*number, len(*number)), "file {number}"))
    };
    assert!(open.iter().filter(|file| read_again(file).is_ok()).count() > FILES / NODES as usize / 2);
    wait_until_replaced(&cluster, 2, old);
    for file in &open {
        read_again(file).unwrap_or_else(|error| panic!("file {}: {error}", file.0));
    }
    read_batch(&view, "after");
    read_all(&view, "d", "after");
    // New datasets appear, and those that are replaced go away.
    cluster.stage(&[&cluster.at("a.tar")], "/dayfly/e");
    read_all(&view, "e", "staged in later");
    // An order, too, goes to the new server.
    let samples: Vec<_> = open.iter().map(|(_, file)| file.sample()).collect();
    let dataset = view.dataset_of(b"/dayfly/d").unwrap();
    drop(view.session().submit(&dataset, samples).unwrap());
    drop(open);
    cluster.down();
    assert!(view.session().is_gone());
}

/// SEMANTICS: "Processes of the node attach to the new server by themselves, also those that have files open."
#[test]
fn processes_of_the_node_attach_to_the_new_server_of_one_that_has_ended_in_order() {
    if !runs_alone_with_views("rejoin::processes_of_the_node_attach_to_the_new_server_of_one_that_has_ended_in_order") {
        return;
    }
    let cluster = session();
    let view = cluster.view(2);
    let open: Vec<_> = (0..FILES).map(|number| (number, view.open(&path(number)).unwrap())).collect();
    let dataset = view.dataset_of(b"/dayfly/d").unwrap();
    cluster.stage(&[&cluster.at("a.tar")], "/dayfly/e");
    let replaced = view.dataset_of(b"/dayfly/e").unwrap();
    assert!(!view.session().is_dataset_gone(&replaced));
    cluster.ok(&["stage-in", "--replace", cluster.at("a.tar").to_str().unwrap(), "/dayfly/e"]);
    assert!(view.session().is_dataset_gone(&replaced) && !view.session().is_dataset_gone(&dataset));
    read_batch(&view, "before");
    let (old, owned) = (cluster.pids()[&2], node_status(&cluster, 2)["held_bytes"].as_u64().unwrap());
    // The heart beats after this process has looked last, so its next look finds no silence.
    std::thread::sleep(Duration::from_millis(500));
    signal(old, Signal::SIGTERM);
    wait_until("node 2 is lost", || is_lost(&cluster, 2));
    let (succeeded, message) = rejoin(&cluster, &["2"]);
    assert!(succeeded, "{message}");
    wait_until_replaced(&cluster, 2, old);
    wait_until("its blocks have come back", || node_status(&cluster, 2)["cached_bytes"].as_u64() >= Some(owned));
    // The first call is a batch, which lends bytes of cached blocks. They stay where they are, though the cache is turned off.
    let samples: Vec<_> = open.iter().map(|(_, file)| file.sample()).collect();
    let mut batch = Batch::of(view.session(), &dataset, &samples, Delivery::AsAvailable, OnMissing::Fail).unwrap();
    cluster.ok(&["tune", "--cache", "off"]);
    batch.wait().unwrap();
    let is_right = |number: usize| batch.get(number) == Some(&content(number, len(number))[..]);
    assert!(!batch.is_good() || (0..FILES).all(is_right), "wrong bytes");
    assert!(batch.is_good(), "the views were not counted");
    drop(batch);
    cluster.ok(&["tune", "--cache", "all"]);
    for (number, file) in &open {
        let mut bytes = vec![0; len(*number)];
        view.read_at(file, 0, &mut bytes).unwrap_or_else(|error| panic!("file {number}: {error}"));
        assert!(bytes == content(*number, len(*number)), "file {number}");
    }
    assert!(!view.session().is_gone() && !view.session().is_dataset_gone(&dataset));
    assert!(view.session().is_dataset_gone(&replaced));
    read_batch(&view, "after");
    read_all(&view, "d", "after");
    drop(open);
    cluster.down();
    assert!(view.session().is_gone() && view.session().is_dataset_gone(&dataset));
}

/// SEMANTICS: "Until a new server is there, programs of such a node read on what is on the node, and mappings stay as they are."
#[test]
fn programs_keep_the_blocks_of_a_server_that_was_told_to_exit() {
    let ground = Ground::new();
    fs::create_dir_all(ground.at("t")).unwrap();
    fs::create_dir_all(ground.at("plain")).unwrap();
    for folder in ["t", "plain"] {
        (0..40).for_each(|number| fs::write(ground.at(format!("{folder}/{number}")), content(number, 100_000)).unwrap());
    }
    let cluster = ground.up_rejoining(3, &QUICK);
    cluster.stage(&[&cluster.at("t")], "/dayfly/t");
    let program = "
import mmap, os, sys
plain = [open(f'{sys.argv[1]}/{number}', 'rb').read() for number in range(40)]
files = [open(f'/dayfly/t/{number}', 'rb', buffering=0) for number in range(40)]
maps = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) for file in files]
def compare_maps(): assert all(maps[number][:] == plain[number] for number in range(40))
def count_reads():
    count = 0
    for number, file in enumerate(files):
        try: found = os.pread(file.fileno(), 200000, 0)
        except OSError as error: assert error.errno == 5, error
        else: count += 1; assert found == plain[number], number
    return count
compare_maps()
print('mapped', flush=True)
input()
compare_maps()
print(count_reads(), flush=True)
input()
compare_maps()
print(count_reads(), flush=True)
";
    let mut command = cluster.dayfly();
    command.args(["exec", "--node", "1", "--", "python3", "-c", program]).arg(cluster.at("plain"));
    let mut python = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut input, mut output) = (python.stdin.take().unwrap(), BufReader::new(python.stdout.take().unwrap()));
    let mut line = || {
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    };
    assert_eq!(line(), "mapped");
    signal(cluster.pids()[&1], Signal::SIGTERM);
    wait_until("node 1 is lost", || is_lost(&cluster, 1));
    input.write_all(b"\n").unwrap();
    let count: usize = line().parse().unwrap();
    assert!(count > 0, "no file could be read without a server");
    assert_eq!(rejoin(&cluster, &["1"]), (true, "node 1 is a member again\n".to_owned()));
    input.write_all(b"\n").unwrap();
    assert_eq!(line(), "40");
    drop(input);
    assert!(wait_for(&mut python, Duration::from_secs(20)).unwrap().success());
    cluster.down();
}

/// SEMANTICS: "Programs that start while the new server learns which datasets exist wait for it: they never miss one."
#[test]
fn programs_never_find_a_new_server_without_datasets() {
    let cluster = session();
    let (old, coordinator) = (cluster.pids()[&2], cluster.pids()[&0]);
    // The new server learns nothing before another node is the coordinator.
    signal(coordinator, Signal::SIGSTOP);
    signal(old, Signal::SIGKILL);
    wait_until("a program attaches to the new server", || {
        let Ok(session) = Session::attach_to(&cluster.location(), NodeId(2)) else { return false };
        read(&View::new(session), 7, "d", "on a new server");
        cluster.pids().get(&2).is_some_and(|pid| *pid != old)
    });
    signal(coordinator, Signal::SIGCONT);
    wait_until("the coordinator has returned", || !is_lost(&cluster, 0));
    cluster.down();
}

/// A shell that reads files of the namespace itself, with its builtin `read`, and then waits for a line.
struct Shell(Child, BufReader<ChildStdout>);

impl Shell {
    fn start(cluster: &Cluster, node: u16) -> Self {
        let script = "exec 3< /dayfly/t/first; while read -r file; do read -r word < /dayfly/t/$file || word=failed; echo $word; done; \
                      read -r word <&3; echo $word";
        let mut command = cluster.dayfly();
        command.args(["exec", "--", "bash", "-c", script]).env("DAYFLY_NODE", node.to_string());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self(child, output)
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.1.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn read(&mut self, file: &str) -> String {
        writeln!(self.0.stdin.as_mut().unwrap(), "{file}").unwrap();
        self.line()
    }
}

/// SEMANTICS: "Processes of the node attach to the new server by themselves, also those that have files open."
#[test]
fn a_program_under_the_library_goes_on_after_its_server_was_replaced() {
    let ground = Ground::new();
    fs::create_dir(ground.at("t")).unwrap();
    let names: Vec<String> = (0..40).map(|number| format!("word{number}")).collect();
    names
        .iter()
        .chain(["first".to_owned()].iter())
        .for_each(|name| fs::write(ground.at(format!("t/{name}")), format!("{name}\n")).unwrap());
    let cluster = ground.up_rejoining(3, &QUICK);
    cluster.stage(&[&cluster.at("t")], "/dayfly/t");
    let mut shells: Vec<Shell> = (0..2).map(|_| Shell::start(&cluster, 1)).collect();
    shells.iter_mut().for_each(|shell| assert_eq!(shell.read("word0"), "word0"));
    let old = cluster.pids()[&1];
    signal(old, Signal::SIGKILL);
    wait_until_replaced(&cluster, 1, old);
    for shell in &mut shells {
        names.iter().for_each(|name| assert_eq!(shell.read(name), *name));
        drop(shell.0.stdin.take());
        assert_eq!(shell.line(), "first");
        assert!(wait_for(&mut shell.0, Duration::from_secs(20)).unwrap().success());
    }
    cluster.down();
}

fn rejoin(cluster: &Cluster, arguments: &[&str]) -> (bool, String) {
    let output = output_of(cluster.dayfly().arg("rejoin").args(arguments).env("DAYFLY_NODE", "0"));
    (output.status.success(), text(&output.stdout) + &text(&output.stderr))
}

/// SEMANTICS: "`dayfly rejoin` starts a new server in the place of a lost one at any time. A server that only stands still keeps its
/// place."
#[test]
fn rejoin_starts_servers_in_the_place_of_lost_ones() {
    let cluster = ground().up_with(NODES, &QUICK);
    cluster.stage(&[&cluster.at("a.tar")], "/dayfly/d");
    for (arguments, expected) in [(&["2"][..], "node 2 is not lost"), (&["9"], "node 9 is not a node of this session")] {
        let (succeeded, message) = rejoin(&cluster, arguments);
        assert!(!succeeded && message.contains(expected), "{message}");
    }
    assert_eq!(rejoin(&cluster, &[]), (true, "no node is lost\n".to_owned()));
    cluster.kill(1);
    cluster.kill(3);
    wait_until("both are lost", || is_lost(&cluster, 1) && is_lost(&cluster, 3));
    let (succeeded, message) = rejoin(&cluster, &[]);
    assert!(succeeded, "{message}");
    assert_eq!(message, "node 1 is a member again\nnode 3 is a member again\n");
    (0..NODES).for_each(|node| read_all(&cluster.view(node), "d", &format!("on node {node}")));
    // The lock of a server that stands still is taken.
    let pid = cluster.pids()[&2];
    signal(pid, Signal::SIGSTOP);
    wait_until("node 2 is lost", || is_lost(&cluster, 2));
    let (succeeded, message) = rejoin(&cluster, &["2"]);
    signal(pid, Signal::SIGCONT);
    assert!(!succeeded && message.contains("if that stands still, end its process first"), "{message}");
    wait_until("node 2 has returned", || !is_lost(&cluster, 2));
    assert_eq!(cluster.pids()[&2], pid);
    read_all(&cluster.view(2), "d", "after it stood still");
    cluster.down();
}

/// SEMANTICS: "A new server that cannot catch up with the session for 10 s, for example because its drive has no room for the
/// catalogs, ends. Its node stays lost, and `dayfly rejoin` says why."
#[test]
fn a_new_server_without_room_for_the_catalogs_ends_and_rejoin_says_why() {
    let ground = ground();
    let Some(drive) = SmallDrive::mount(ground.at("small"), "64m") else { return };
    let cluster = ground.up_rejoining(NODES, &[&QUICK[..], &["--data-dir", drive.path().to_str().unwrap()]].concat());
    cluster.stage(&[&cluster.at("a.tar")], "/dayfly/d");
    let supervisor = cluster.location().supervisor().unwrap();
    let log = || fs::read_to_string(cluster.location().folder.join("supervisor.log")).unwrap();
    let given_up = "cannot start a new server in the place of node 3: its new server cannot catch up with the session: there is no \
                    room for the catalog of 'd' (";
    // The new server must not start before the drive is full.
    signal(supervisor, Signal::SIGSTOP);
    cluster.kill(3);
    drive.fill(0);
    signal(supervisor, Signal::SIGCONT);
    wait_until("the supervisor gives up", || log().contains(given_up));
    assert!(is_lost(&cluster, 3));
    let start = Instant::now();
    for is_late in [false, true] {
        // The supervisor may learn what the server says, and that its process has ended, at the same time.
        let (succeeded, message) = std::thread::scope(|scope| {
            let tries =
                || fs::read_to_string(cluster.location().folder.join("node-3.log")).unwrap().matches("trying again").count();
            let before = tries();
            let rejoined = scope.spawn(|| rejoin(&cluster, &["3"]));
            if is_late {
                wait_until("the new server cannot catch up", || tries() > before);
                signal(supervisor, Signal::SIGSTOP);
                wait_until("it has ended", || !cluster.pids().contains_key(&3));
                // Its locks are free before its process has ended.
                std::thread::sleep(Duration::from_millis(500));
                signal(supervisor, Signal::SIGCONT);
            }
            rejoined.join().unwrap()
        });
        let reason = "cannot start a server for node 3: its new server cannot catch up with the session: there is no room for the \
                      catalog of 'd' (";
        let is_clear = message.contains(reason) && message.contains(drive.path().to_str().unwrap());
        assert!(!succeeded && is_clear && message.ends_with("; 'dayfly rejoin 3' tries again\n"), "{message}");
        assert!(is_lost(&cluster, 3));
    }
    harness::assert_no_hang(start);
    assert_eq!(log().matches(given_up).count(), 1, "{}", log());
    wait_until("no server is left on the node", || !cluster.pids().contains_key(&3));
    drive.make_room();
    assert_eq!(rejoin(&cluster, &["3"]), (true, "node 3 is a member again\n".to_owned()));
    (0..NODES).for_each(|node| read_all(&cluster.view(node), "d", &format!("on node {node}")));
    cluster.down();
}

/// SEMANTICS: "A server that was told to exit (SIGTERM, SIGINT) is not replaced; `dayfly rejoin` starts a new one."
#[test]
fn a_server_that_was_told_to_exit_is_not_replaced() {
    let cluster = session();
    for (node, told) in [(1, Signal::SIGTERM), (2, Signal::SIGINT)] {
        signal(cluster.pids()[&node], told);
        wait_until("it is lost", || is_lost(&cluster, node));
        // Far longer than it takes to replace a server that has died.
        std::thread::sleep(Duration::from_secs(2));
        assert!(is_lost(&cluster, node) && !cluster.pids().contains_key(&node));
        assert_eq!(rejoin(&cluster, &[&node.to_string()]), (true, format!("node {node} is a member again\n")));
        read_all(&cluster.view(node), "d", "on the new server");
    }
    cluster.down();
}

/// SEMANTICS: "The last server that is left ends the session instead."
#[test]
fn the_last_server_that_is_told_to_exit_ends_the_session() {
    let cluster = session();
    for node in 1..NODES {
        signal(cluster.pids()[&node], Signal::SIGTERM);
        wait_until("it is lost", || state_on(&cluster, 0, node)["lost_for_ms"].is_u64());
    }
    signal(cluster.pids()[&0], Signal::SIGTERM);
    cluster.wait_until_clean("the session has ended");
}

/// The supervisor may notice that a server has died because the server takes no message anymore.
#[test]
fn servers_that_die_while_their_supervisor_stands_still_are_replaced() {
    let cluster = session();
    let supervisor = cluster.location().supervisor().unwrap();
    for node in 1..NODES {
        let old = cluster.pids()[&node];
        // A server that has not read everything resets its connections when it dies.
        signal(old, Signal::SIGSTOP);
        std::thread::sleep(Duration::from_millis(300));
        signal(supervisor, Signal::SIGSTOP);
        std::thread::sleep(Duration::from_millis(300));
        signal(old, Signal::SIGKILL);
        signal(supervisor, Signal::SIGCONT);
        wait_until_replaced(&cluster, node, old);
    }
    cluster.down();
}

#[test]
fn a_server_that_was_lost_for_its_silence_and_then_dies_is_replaced() {
    let cluster = session();
    let old = cluster.pids()[&2];
    signal(old, Signal::SIGSTOP);
    wait_until("it is lost", || is_lost(&cluster, 2));
    signal(old, Signal::SIGKILL);
    wait_until_replaced(&cluster, 2, old);
    read_all(&cluster.view(2), "d", "on the new server");
    cluster.down();
}

/// SEMANTICS: "A server that dies again and again is started three times, at growing intervals."
#[test]
fn a_server_that_dies_again_and_again_is_given_up() {
    let cluster = session();
    for _ in 0..REPLACEMENTS_MAX {
        replace(&cluster, 1);
    }
    cluster.kill(1);
    wait_until("node 1 is lost", || is_lost(&cluster, 1));
    // The longest pause before a new server is started.
    std::thread::sleep(Duration::from_millis(200) * (4_u32.pow(REPLACEMENTS_MAX) - 1) / 4);
    assert!(is_lost(&cluster, 1) && !cluster.pids().contains_key(&1));
    let log = fs::read_to_string(cluster.location().folder.join("supervisor.log")).unwrap();
    assert!(log.contains("the server of node 1 has died again, after 3 new ones; no more are started"), "{log}");
    assert_eq!(rejoin(&cluster, &["1"]), (true, "node 1 is a member again\n".to_owned()));
    read_all(&cluster.view(1), "d", "on the last server");
    cluster.down();
}

/// SEMANTICS: "It prefetches and caches as `tune` has set."
#[test]
fn a_new_server_has_the_settings_of_the_session() {
    let cluster = session();
    let settings = |node: u16| text(&output_of(cluster.dayfly().arg("tune").env("DAYFLY_NODE", node.to_string())).stdout);
    let before = settings(3);
    cluster.ok(&["tune", "--cache", "off", "--prefetch", "off", "--prefetch-memory", "10MiB"]);
    for node in [3, 0] {
        replace(&cluster, node);
        assert!(settings(node) == settings(1) && settings(node) != before, "{}", settings(node));
    }
    cluster.down();
}

/// SEMANTICS: "What a node holds in place of a lost node, and what comes back to a new server, is not limited by `--cache`."
#[test]
fn what_comes_back_to_a_new_server_is_stored_although_nothing_is_to_be_cached() {
    let cluster = session();
    pack(&cluster.at("a.tar.gz"), &cluster.at("tree"), &[]);
    cluster.stage(&[&cluster.at("a.tar.gz")], "/dayfly/e");
    let owned = node_status(&cluster, 1)["held_bytes"].as_u64().unwrap();
    cluster.ok(&["tune", "--cache", "off"]);
    replace(&cluster, 1);
    wait_until("all has come back", || node_status(&cluster, 1)["cached_bytes"].as_u64() == Some(owned));
    for node in 0..NODES {
        ["d", "e"].into_iter().for_each(|dataset| read_all(&cluster.view(node), dataset, &format!("on node {node}")));
    }
    cluster.ok(&["verify", "--from-every-node"]);
    // A limit that is set later does not drop it either.
    cluster.ok(&["tune", "--cache", "all"]);
    cluster.ok(&["tune", "--cache", "off"]);
    wait_until("nothing else is cached", || {
        let cached = |node: u16| node_status(&cluster, node)["cached_bytes"].as_u64();
        (0..NODES).map(cached).sum::<Option<u64>>() == Some(owned)
    });
    cluster.ok(&["verify", "--from-every-node"]);
    cluster.down();
}

/// The other servers of a machine have their shares of a drive already.
#[test]
fn a_new_server_takes_as_much_of_a_drive_as_the_one_before_it() {
    let ground = ground();
    let Some(drive) = SmallDrive::mount(ground.at("small"), "100m") else { return };
    let cluster = ground.up_rejoining(3, &[&QUICK[..], &["--data-dir", drive.path().to_str().unwrap()]].concat());
    cluster.ok(&["stage-in", "--copies", "3", cluster.at("a.tar").to_str().unwrap(), "/dayfly/d"]);
    let capacity = || state_on(&cluster, 0, 1)["capacity_bytes"].as_u64();
    let before = capacity();
    assert!(before.is_some());
    let old = cluster.pids()[&1];
    signal(old, Signal::SIGKILL);
    wait_until("a new server is a member", || cluster.pids().get(&1).is_some_and(|pid| *pid != old));
    wait_until("it has as much room as the one before", || capacity() == before);
    cluster.down();
    drop(drive);
}

/// SEMANTICS: "If other programs fill the drives when a new server starts, it grows when they make room."
#[test]
fn blocks_come_back_to_a_new_server_on_a_full_drive_once_there_is_room() {
    let ground = ground();
    let Some(drive) = SmallDrive::mount(ground.at("small"), "100m") else { return };
    let cluster = ground.up_with(NODES, &[&QUICK[..], &["--data-dir", drive.path().to_str().unwrap()]].concat());
    cluster.stage(&[&cluster.at("a.tar")], "/dayfly/d");
    let owned = node_status(&cluster, 1)["held_bytes"].as_u64().unwrap();
    cluster.kill(1);
    wait_until("the node is lost", || is_lost(&cluster, 1));
    // Room for the catalog, but not for all blocks.
    drive.fill(512 << 10);
    let (is_done, message) = rejoin(&cluster, &["1"]);
    assert!(is_done, "{message}");
    wait_until("it has looked for its blocks", || node_status(&cluster, 1)["recovery"]["is_scanned"] == true);
    std::thread::sleep(Duration::from_secs(1));
    let stored = || node_status(&cluster, 1)["cached_bytes"].as_u64().unwrap();
    assert!(stored() < owned, "there is room for all blocks");
    drive.make_room();
    wait_until("all has come back", || stored() == owned);
    cluster.down();
    drop(drive);
}
