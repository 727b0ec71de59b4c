//! Compressed archives that are read again by nodes that have room for some of the samples only.

use std::fs;

use super::{lose, wait_until_taken_over};
use crate::harness::samples::{content, dataset};
use crate::harness::{self, Cluster, Ground, output_of, pack, wait_until};
use dayfly_client::View;
use dayfly_meta::id::{BlockId, NodeId};

/// The lengths of samples of which few are large: 26 MB in 100 samples.
fn len_of_few_large(number: usize) -> usize {
    match number {
        _ if number.is_multiple_of(20) => 3_000_000,
        _ if number.is_multiple_of(5) => 600_000,
        _ => 20_000,
    }
}

/// Starts a session of two nodes that have room for three quarters of these samples each, and stages them in.
fn session_of_few_large(more: &[&str]) -> Cluster {
    session_with_room("20MiB", more)
}

/// Like [`session_of_few_large`], but with this capacity of each node.
fn session_with_room(capacity: &str, more: &[&str]) -> Cluster {
    let timeout: &[&str] = if more.contains(&"--recovery-timeout") { &[] } else { &["--recovery-timeout", "20"] };
    let ground = Ground::new();
    fs::create_dir(ground.at("tree")).unwrap();
    let write = |number: usize| fs::write(ground.at("tree").join(number.to_string()), content(number, len_of_few_large(number)));
    (0..100).for_each(|number| write(number).unwrap());
    pack(&ground.at("d.tar.gz"), &ground.at("tree"), &[]);
    let options = ["--deadlines-divisor", "5", "--no-rejoin", "--capacity", capacity];
    let cluster = ground.up_rejoining(2, &[&options[..], timeout, more].concat());
    cluster.stage(&[&cluster.at("d.tar.gz")], "/dayfly/d");
    cluster
}

fn read(view: &View, number: usize) -> Result<(), String> {
    let file = view.open(format!("/dayfly/d/{number}").as_bytes()).unwrap();
    let mut bytes = vec![0; len_of_few_large(number)];
    let read = view.read_at(&file, 0, &mut bytes).map(drop);
    assert!(read.is_err() || bytes == content(number, bytes.len()), "file {number}");
    read.map_err(|error| format!("file {number}: {error}"))
}

/// Reads these samples until three reads have failed, each of which takes a moment.
fn errors_of_few_large(cluster: &Cluster, node: u16) -> Vec<String> {
    let view = cluster.view(node);
    (0..100).filter_map(|number| read(&view, number).err()).take(3).collect()
}

/// Returns whether a node has all samples that it owns.
fn has_own(cluster: &Cluster, node: u16) -> bool {
    let dataset = dataset(&cluster.view(node));
    let is_own = |block: &u32| dataset.catalog().owner(BlockId(*block)) == Some(NodeId(node));
    (0..dataset.catalog().header().blocks).filter(is_own).all(|block| dataset.is_here(BlockId(block)))
}

fn rejoin(cluster: &Cluster, asked: u16) {
    let rejoined = output_of(cluster.dayfly().arg("rejoin").env("DAYFLY_NODE", asked.to_string()));
    assert!(rejoined.status.success(), "{}", harness::text(&rejoined.stderr));
}

/// A new server that has not got all of its own samples back, when another node is lost, has too little room for all samples of both.
///
/// SEMANTICS: "They do not make way for those of a node that is lost later, and cached blocks of live nodes make way for them."
#[test]
fn a_new_server_gets_back_what_it_owns_although_another_node_is_lost_meanwhile() {
    // At this rate, its own samples take seconds.
    let cluster = session_of_few_large(&["--recovery-rate", "4194304"]);
    for (first, second) in [(0, 1), (1, 0)] {
        lose(&cluster, first, second);
        rejoin(&cluster, second);
        lose(&cluster, second, first);
        wait_until_taken_over(&cluster, first);
        assert!(has_own(&cluster, first), "its own samples have no room");
        rejoin(&cluster, first);
        (0..2).for_each(|node| wait_until("each has its own again", || has_own(&cluster, node)));
    }
    cluster.down();
}

/// A new server holds its own samples among the cached blocks. Where few samples are large, the plan of the cache has too little or too
/// much room for the others.
///
/// SEMANTICS: "They do not make way for those of a node that is lost later, and cached blocks of live nodes make way for them."
/// SEMANTICS: "If the node that is to store such a sample has no room for it, reads of the sample fail with `EIO`, until a new server
/// has taken the place of the lost one."
#[test]
fn new_servers_get_back_what_they_own_although_their_drives_are_full_of_cached_blocks() {
    let cluster = session_of_few_large(&[]);
    let errors = |node| errors_of_few_large(&cluster, node);
    let read_all = |node| assert_eq!(errors(node), Vec::<String>::new());
    let mut failed = 0;
    // In the end, the server that is left is new and has read nothing, so it has the other samples neither on its drive nor in memory.
    for (killed, is_read) in [(0, true), (1, true), (0, true), (1, true), (1, true), (0, true), (1, false), (0, false)] {
        let other = 1 - killed;
        if is_read {
            (0..2).for_each(read_all);
        }
        lose(&cluster, killed, other);
        wait_until_taken_over(&cluster, other);
        let errors = errors(other);
        assert!(errors.iter().all(|error| error.contains("no room to keep")), "{errors:?}");
        failed += errors.len();
        assert!(has_own(&cluster, other), "its own samples have made way");
        rejoin(&cluster, other);
    }
    (0..2).for_each(read_all);
    assert!(failed > 0, "there was room for all");
    cluster.down();
}

/// A new server has large samples in memory that its drive has no room for, when the other node is lost. Some of the small ones, which
/// nobody has, have room.
#[test]
fn nobody_waits_in_vain_for_small_samples_although_large_ones_in_memory_have_no_room() {
    let mut failed = 0;
    for capacity in ["18MiB", "21MiB"] {
        let cluster = session_with_room(capacity, &[]);
        lose(&cluster, 0, 1);
        wait_until_taken_over(&cluster, 1);
        rejoin(&cluster, 1);
        wait_until("it has its own again", || has_own(&cluster, 0));
        let view = cluster.view(0);
        for number in (0..100).filter(|&number| len_of_few_large(number) > 20_000) {
            let file = view.open(format!("/dayfly/d/{number}").as_bytes()).unwrap();
            view.read_at(&file, 0, &mut [0; 1]).unwrap();
        }
        lose(&cluster, 1, 0);
        wait_until_taken_over(&cluster, 0);
        let errors = errors_of_few_large(&cluster, 0);
        assert!(errors.iter().all(|error| error.contains("no room to keep")), "with {capacity}: {errors:?}");
        failed += errors.len();
        cluster.down();
    }
    assert!(failed > 0, "there was room for all");
}

#[test]
fn readers_of_samples_without_room_do_not_wait_for_each_other() {
    let cluster = session_of_few_large(&["--recovery-timeout", "5"]);
    lose(&cluster, 1, 0);
    wait_until_taken_over(&cluster, 0);
    let view = cluster.view(0);
    let without_room: Vec<usize> = (0..100).filter(|&number| read(&view, number).is_err()).collect();
    assert!(without_room.len() > 2, "{without_room:?}");
    std::thread::scope(|scope| {
        for reader in 0..100 {
            let (view, without_room) = (&view, &without_room);
            scope.spawn(move || {
                for number in without_room.iter().cycle().skip(reader).take(without_room.len()) {
                    let error = read(view, *number).unwrap_err();
                    assert!(error.contains("no room to keep"), "{error}");
                }
            });
        }
    });
    cluster.down();
}
