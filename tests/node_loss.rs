//! Sessions in which a server is killed, or stands still, while processes on other nodes read. No read on these nodes fails, none
//! waits longer than promised, and every byte is right.

use std::fs;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::harness::samples::{assert_accounts_are_settled, content, dataset, path};
use crate::harness::{Cluster, Ground, output_of, pack, signal, wait_until};
use dayfly_client::{Delivery, OnMissing, View};
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{BlockId, NodeId, SampleId};
use dayfly_meta::limits::ARENA_LEN_MIN;
use nix::sys::signal::Signal;

const FILES: usize = 1200;
/// The node that is killed, or stands still.
const LOST: u16 = 3;
/// Samples in each batch.
const BATCH: usize = 64;
/// A read that meets a killed server takes at most a second. A busy machine takes longer, but less than a second failed connection
/// attempt would.
const KILLED_LIMIT: Duration = Duration::from_secs(3);
/// A read waits for a silent node once: at most the deadline of a request, and a second for everything else. Three more seconds are
/// for a busy machine. A read that waited for a second deadline would take longer.
const SILENT_LIMIT: Duration = Duration::from_secs(9);

const _: () = assert!(SILENT_LIMIT.as_secs() < 2 * Deadlines::DEFAULT.request.as_secs());

/// Most files are small, and a few have several chunks.
fn len(number: usize) -> usize {
    if number % 200 == 7 { 6 << 20 } else { number * 37 % 50_000 }
}

fn write_tree(ground: &Ground, name: &str, numbers: std::ops::Range<usize>) {
    fs::create_dir(ground.at(name)).unwrap();
    numbers.for_each(|number| fs::write(ground.at(format!("{name}/{number}")), content(number, len(number))).unwrap());
}

/// Starts four nodes, and stages in a tree or a plain tar.
fn session(source: &str, options: &[&str]) -> Cluster {
    let ground = Ground::new();
    write_tree(&ground, "tree", 0..FILES);
    pack(&ground.at("a.tar"), &ground.at("tree"), &[]);
    let cluster = ground.up_with(4, options);
    cluster.stage(&[&cluster.at(source)], "/dayfly/d");
    let view = cluster.view(0);
    let catalog = dataset(&view);
    let is_of_lost = |number: &usize| {
        let (_, blocks) = catalog.catalog().sample(view.open(&path(*number)).unwrap().sample()).unwrap();
        catalog.catalog().owner(BlockId(blocks.start)) == Some(NodeId(LOST))
    };
    let (large, small): (Vec<usize>, Vec<usize>) =
        (0..FILES).filter(|number| len(*number) > 0).filter(is_of_lost).partition(|number| len(*number) > 4 << 20);
    assert!(!large.is_empty() && small.len() > FILES / 8, "{large:?} and {} small files", small.len());
    cluster
}

/// How a process reads.
#[derive(Clone, Copy, Debug)]
enum Interface {
    /// File by file.
    Files,
    /// Many files at once.
    Batches,
    /// File by file, along an order that the server reads ahead.
    Order,
}

/// What each of the other nodes reads with.
const INTERFACES: [Interface; 3] = [Interface::Files, Interface::Batches, Interface::Order];

fn read_file(view: &View, number: usize, context: &str) {
    let file = view.open(&path(number)).unwrap();
    let mut bytes = vec![0; len(number)];
    view.read_at(&file, 0, &mut bytes).unwrap_or_else(|error| panic!("file {number} {context}: {error}"));
    assert!(bytes == content(number, len(number)), "file {number} {context}");
}

fn read_batch(view: &View, numbers: &[usize], context: &str) {
    let paths: Vec<Vec<u8>> = numbers.iter().map(|&number| path(number)).collect();
    let paths: Vec<&[u8]> = paths.iter().map(Vec::as_slice).collect();
    let mut batch = view.read_many(&paths, Delivery::AsAvailable, OnMissing::Fail).unwrap();
    batch.wait().unwrap_or_else(|error| panic!("a batch {context}: {error}"));
    for (index, &number) in numbers.iter().enumerate() {
        assert!(batch.get(index) == Some(&content(number, len(number))[..]), "file {number} {context}");
    }
}

/// Reads all files on a node, and returns how long the longest read took. Calls `at_quarter` after the first quarter of the files.
fn read_all(cluster: &Cluster, node: u16, interface: Interface, at_quarter: impl FnOnce()) -> Duration {
    let view = cluster.view(node);
    let context = format!("on node {node}, {interface:?}");
    // Neighbors in this order have different owners.
    let numbers: Vec<usize> = (0..FILES).map(|number| number * 7 % FILES).collect();
    let order = matches!(interface, Interface::Order).then(|| {
        let samples: Vec<SampleId> = numbers.iter().map(|&number| view.open(&path(number)).unwrap().sample()).collect();
        view.session().submit(&dataset(&view), samples).unwrap()
    });
    let mut longest = Duration::ZERO;
    let mut at_quarter = Some(at_quarter);
    for (number, batch) in numbers.chunks(BATCH).enumerate() {
        if number * BATCH >= FILES / 4
            && let Some(at_quarter) = at_quarter.take()
        {
            at_quarter();
        }
        let mut start = Instant::now();
        match interface {
            Interface::Batches => read_batch(&view, batch, &context),
            Interface::Files | Interface::Order => batch.iter().for_each(|&number| {
                read_file(&view, number, &context);
                longest = longest.max(start.elapsed());
                start = Instant::now();
            }),
        }
        longest = longest.max(start.elapsed());
    }
    drop(order);
    longest
}

/// Reads all files on the other nodes while `fault` happens. Returns the longest read of each node.
fn read_during(cluster: &Cluster, fault: impl FnOnce()) -> Vec<Duration> {
    let barrier = Barrier::new(INTERFACES.len() + 1);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..)
            .zip(INTERFACES)
            .map(|(node, interface)| {
                let barrier = &barrier;
                let at_quarter = move || {
                    barrier.wait();
                };
                scope.spawn(move || read_all(cluster, node, interface, at_quarter))
            })
            .collect();
        barrier.wait();
        fault();
        readers.into_iter().map(|reader| reader.join().unwrap()).collect()
    })
}

/// Reads all files on the other nodes. Returns the longest read.
fn read_everywhere(cluster: &Cluster) -> Duration {
    (0..).zip(INTERFACES).map(|(node, interface)| read_all(cluster, node, interface, || {})).max().unwrap()
}

/// Adds up a number of all nodes that answer.
fn sum(cluster: &Cluster, number: impl Fn(&serde_json::Value) -> Option<u64>) -> u64 {
    // The command fails while a node does not answer.
    let output = cluster.output(&["status", "--json"]);
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    status["nodes"].as_array().unwrap().iter().filter_map(number).sum()
}

fn origin_reads(cluster: &Cluster) -> u64 {
    sum(cluster, |node| node["origins"]["reads"].as_u64())
}

/// Returns how many requests for blocks the lost node has not answered.
fn failures(cluster: &Cluster) -> u64 {
    sum(cluster, |node| node["owners"][usize::from(LOST)]["failures"].as_u64())
}

/// SEMANTICS: "If a node does not answer, the next candidates of its blocks read them from their sources, once for all readers. No
/// read on another node fails."
/// SEMANTICS: "A read waits at most 5 s for a node that falls silent, and not at all for a node whose server was killed. Later reads
/// do not wait for that node."
#[test]
fn readers_on_other_nodes_see_no_error_and_do_not_wait_when_a_server_is_killed() {
    for source in ["tree", "a.tar"] {
        let cluster = session(source, &[]);
        let longest = read_during(&cluster, || cluster.kill(LOST));
        println!("killed, {source}: the longest reads took {longest:?}");
        assert!(longest.iter().all(|longest| *longest < KILLED_LIMIT), "{longest:?}");
        assert!(origin_reads(&cluster) > 0, "nothing was read in place of the killed node");
        // All of it once more, now that the node is known to be lost.
        assert!(read_everywhere(&cluster) < KILLED_LIMIT);
        cluster.down();
    }
}

/// SEMANTICS: "A read waits at most 5 s for a node that falls silent, and not at all for a node whose server was killed. Later reads
/// do not wait for that node."
/// SEMANTICS: "When the node answers again, its blocks are read from it again."
#[test]
fn readers_on_other_nodes_see_no_error_and_wait_once_when_a_server_stands_still() {
    read_while_a_server_stands_still("a.tar", &[]);
}

/// Requests that a silent node does not answer hold room in the arena. What is left must suffice for the second attempts.
#[test]
fn readers_with_small_arenas_wait_once_when_a_server_stands_still() {
    read_while_a_server_stands_still("tree", &["--memory", &ARENA_LEN_MIN.to_string()]);
}

fn read_while_a_server_stands_still(source: &str, options: &[&str]) {
    let cluster = session(source, options);
    cluster.ok(&["tune", "--cache", "off"]);
    let pid = cluster.pids()[&LOST];
    let longest = read_during(&cluster, || signal(pid, Signal::SIGSTOP));
    println!("stopped, {options:?}: the longest reads took {longest:?}");
    assert!(longest.iter().all(|longest| *longest < SILENT_LIMIT), "{longest:?}");
    assert!(origin_reads(&cluster) > 0, "nothing was read in place of the stopped node");
    // The other nodes know now that this node does not answer.
    // Requests that were sent before have failed by then.
    std::thread::sleep(Deadlines::DEFAULT.request);
    let before = failures(&cluster);
    assert!(before > 0, "the node has been asked");
    let again = read_everywhere(&cluster);
    println!("stopped, later: the longest read took {again:?}");
    // A time would not tell whether a read has waited for the node, or for a busy drive.
    assert_eq!(failures(&cluster), before, "a read has asked the node again");
    signal(pid, Signal::SIGCONT);
    read_everywhere(&cluster);
    wait_until("the node's blocks come from the node again", || {
        let before = origin_reads(&cluster);
        read_everywhere(&cluster);
        origin_reads(&cluster) == before
    });
    assert_accounts_are_settled(&cluster);
    cluster.down();
}

/// A request for blocks of a dead node may name some that others can read, and some that nobody can.
///
/// SEMANTICS: "Blocks of archives within archives cannot be read from their sources. While their owner does not answer, reads of them
/// wait, and once it is lost, they fail with `EIO`. If a request names other blocks too, those are read."
/// SEMANTICS: "Samples of archives within archives that a lost node owned cannot be read until the node returns, unless the reader's
/// own node has cached them: such reads fail with `EIO`."
/// SEMANTICS: "With `--recovery-timeout 0` they fail at once."
#[test]
fn blocks_without_origins_do_not_fail_the_others_in_one_request() {
    let ground = Ground::new();
    write_tree(&ground, "tree", 0..FILES / 2);
    write_tree(&ground, "more", FILES / 2..FILES);
    let packed = ground.at("more.tar.gz");
    pack(&packed, &ground.at("more"), &[]);
    let cluster = ground.up_with(4, &["--deadlines-divisor", "5"]);
    cluster.stage(&[&cluster.at("tree"), &packed], "/dayfly/d");
    cluster.kill(LOST);
    let view = cluster.view(0);
    let folder = |number: usize| if number < FILES / 2 { "tree/" } else { "" };
    let paths: Vec<Vec<u8>> = (0..FILES).map(|number| format!("/dayfly/d/{}{number}", folder(number)).into_bytes()).collect();
    let paths: Vec<&[u8]> = paths.iter().map(Vec::as_slice).collect();
    let mut batch = view.read_many(&paths, Delivery::InOrder, OnMissing::Report).unwrap();
    let mut failed = Vec::new();
    while let Some(delivered) = batch.next() {
        let delivered = delivered.unwrap();
        let number = delivered.index;
        match delivered.bytes {
            Ok(bytes) => assert!(bytes == content(number, len(number)), "file {number}"),
            Err(error) if number >= FILES / 2 => {
                assert!(error.to_string().contains("node 3"), "{error}");
                failed.push(number);
            }
            Err(error) => panic!("file {number} of the tree: {error}"),
        }
    }
    assert!(failed.len() > FILES / 16, "only {failed:?} of the tar failed");
    drop(batch);
    let file = view.open(paths[failed[0]]).unwrap();
    assert_eq!(view.read_at(&file, 0, &mut [0; 10]).unwrap_err().errno(), nix::libc::EIO);
    wait_until("the status counts what cannot be read", || {
        let status = output_of(cluster.dayfly().args(["status", "--json"])).stdout;
        let status: serde_json::Value = serde_json::from_slice(&status).unwrap();
        let count = |node: &serde_json::Value| node["recovery"]["unrecoverable"]["blocks"].as_u64();
        status["nodes"].as_array().unwrap().iter().filter_map(count).sum::<u64>() >= failed.len() as u64
    });
    cluster.down();
}
