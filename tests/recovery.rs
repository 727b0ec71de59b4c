//! What the other nodes do with the blocks of a lost node.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod harness;

use std::fs;

use dayfly_meta::id::{BlockId, NodeId};
use dayfly_meta::limits::ARENA_LEN_MIN;
use harness::inside::Inside;
use harness::samples::{content, dataset, path};
use harness::wait_until;

const FILES: usize = 900;

/// Lengths of files, about 90 MiB in all. A large file has several chunks.
fn lens() -> Vec<usize> {
    (0..FILES).map(|number| 60_000 + number * 37 % 80_000).chain([5 << 20, 9_000_000]).collect()
}

/// Starts a session of four nodes, in which a node has room for its own blocks, a part of those of a lost node, and little else. Its
/// arena is too small for the rest.
fn session(lens: &[usize]) -> Inside {
    let room = lens.iter().sum::<usize>() as u64 / 4 * 3 / 2;
    let session = Inside::with_config(4, |config| (config.capacity, config.memory) = (room, config.memory - ARENA_LEN_MIN));
    let tree = session.write(lens);
    session.stage(&tree).unwrap();
    session
}

fn read_all(session: &Inside, node: u16, lens: &[usize]) {
    let view = session.view(node);
    for (number, &len) in lens.iter().enumerate() {
        let file = view.open(&path(number)).unwrap();
        let mut bytes = vec![0; len];
        view.read_at(&file, 0, &mut bytes).unwrap_or_else(|error| panic!("file {number} on node {node}: {error}"));
        assert!(bytes == content(number, len), "file {number} on node {node}");
    }
}

/// Returns the blocks that `owner` owns.
fn owned_by(session: &Inside, owner: u16) -> Vec<BlockId> {
    let view = session.view(0);
    let dataset = dataset(&view);
    let catalog = dataset.catalog();
    (0..catalog.header().blocks).map(BlockId).filter(|&block| catalog.owner(block) == Some(NodeId(owner))).collect()
}

/// Returns how many of these blocks are on each node's drives.
fn places(session: &Inside, blocks: &[BlockId], nodes: u16) -> Vec<usize> {
    let count = |node| {
        let dataset = dataset(&session.view(node));
        blocks.iter().filter(|&&block| dataset.is_here(block)).count()
    };
    (0..nodes).map(count).collect()
}

fn origin_bytes(session: &Inside) -> u64 {
    (0..3).map(|node| session.status_of(node).origins.reads.bytes).sum()
}

/// SEMANTICS: "What a node reads in place of a lost node is stored on its drives where there is room, so it is read from its source
/// once."
#[test]
fn what_is_read_in_place_of_a_lost_owner_is_stored_and_read_from_its_source_once() {
    let lens = lens();
    let mut session = session(&lens);
    let lost = owned_by(&session, 3);
    session.lose(3);
    read_all(&session, 0, &lens);
    let read = origin_bytes(&session);
    let view = session.view(0);
    let dataset = dataset(&view);
    let lost_bytes: u64 = lost.iter().map(|&block| dataset.catalog().block(block).unwrap().1).sum();
    assert!(read >= lost_bytes / 10 * 9, "{read} of {lost_bytes}");
    wait_until("most of the lost node's blocks are on drives", || {
        places(&session, &lost, 3).iter().sum::<usize>() >= lost.len() / 100 * 95
    });
    // All nodes read everything twice. Only what found no room may come from the source again.
    let before = origin_bytes(&session);
    (0..3).for_each(|node| read_all(&session, node, &lens));
    (0..3).for_each(|node| read_all(&session, node, &lens));
    let again = origin_bytes(&session) - before;
    assert!(again < lost_bytes / 4, "{again} of {lost_bytes} bytes were read from the source again");
    // With the source gone, the copies still serve all nodes.
    fs::rename(session.work.path().join("d"), session.work.path().join("away")).unwrap();
    let view = session.view(1);
    let mut served = 0;
    for (number, &len) in lens.iter().enumerate() {
        let file = view.open(&path(number)).unwrap();
        let mut bytes = vec![0; len];
        if view.read_at(&file, 0, &mut bytes).is_ok() {
            assert!(bytes == content(number, len), "file {number}");
            served += 1;
        }
    }
    assert!(served * 100 > lens.len() * 97, "{served} of {} files", lens.len());
}
