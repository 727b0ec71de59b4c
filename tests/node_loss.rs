//! Sessions that lose a server while others read: nothing fails on the other nodes.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod harness;

use std::fs;
use std::time::{Duration, Instant};

use harness::samples::{content, path};
use harness::{Cluster, Ground, pack, signal};
use nix::sys::signal::Signal;

const FILES: usize = 1200;

fn len(number: usize) -> usize {
    number * 37 % 50_000
}

fn session(source: &str, options: &[&str]) -> Cluster {
    let ground = Ground::new();
    fs::create_dir(ground.at("tree")).unwrap();
    (0..FILES).for_each(|number| fs::write(ground.at(format!("tree/{number}")), content(number, len(number))).unwrap());
    pack(&ground.at("a.tar"), &ground.at("tree"), &[]);
    let cluster = ground.up_with(4, options);
    cluster.stage(&[&cluster.at(source)], "/dayfly/d");
    cluster
}

/// Reads all files on a node, and returns how long the longest read took.
fn read_all(cluster: &Cluster, node: u16) -> Duration {
    let view = cluster.view(node);
    let mut longest = Duration::ZERO;
    for number in 0..FILES {
        let start = Instant::now();
        let file = view.open(&path(number)).unwrap();
        let mut bytes = vec![0; len(number)];
        if let Err(error) = view.read_at(&file, 0, &mut bytes) {
            panic!("file {number} on node {node}: {error}");
        }
        assert!(bytes == content(number, len(number)), "file {number} on node {node}");
        longest = longest.max(start.elapsed());
    }
    longest
}

/// SEMANTICS: "If a node does not answer, the next candidates of its blocks read them from their sources, once for all readers. No
/// read on another node fails."
#[test]
fn readers_on_other_nodes_see_no_error_when_a_server_is_killed() {
    for source in ["tree", "a.tar"] {
        let cluster = session(source, &["--deadlines-divisor", "5"]);
        std::thread::scope(|scope| {
            let readers: Vec<_> = (0..3)
                .map(|node| {
                    scope.spawn({
                        let cluster = &cluster;
                        move || read_all(cluster, node)
                    })
                })
                .collect();
            std::thread::sleep(Duration::from_millis(100));
            cluster.kill(3);
            readers.into_iter().for_each(|reader| assert!(reader.join().unwrap() < Duration::from_secs(30)));
        });
        // All of it once more, now that the node is known to be lost.
        (0..3).for_each(|node| assert!(read_all(&cluster, node) < Duration::from_secs(30)));
        cluster.down();
    }
}

#[test]
fn readers_on_other_nodes_see_no_error_while_a_server_stands_still() {
    let cluster = session("a.tar", &["--deadlines-divisor", "5"]);
    let pid = cluster.pids()[&3];
    signal(pid, Signal::SIGSTOP);
    std::thread::scope(|scope| {
        (0..3).for_each(|node| {
            drop(scope.spawn({
                let cluster = &cluster;
                move || read_all(cluster, node)
            }))
        });
    });
    signal(pid, Signal::SIGCONT);
    (0..3).for_each(|node| assert!(read_all(&cluster, node) < Duration::from_secs(30)));
    cluster.down();
}
