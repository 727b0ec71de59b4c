//! What the other nodes do with the blocks of a lost node.

use std::fs;
use std::time::Duration;

use crate::harness::inside::Inside;
use crate::harness::samples::{content, dataset, path};
use crate::harness::{pack, wait_until};
use dayfly_meta::id::{BlockId, NodeId};
use dayfly_meta::limits::ARENA_LEN_MIN;
use dayfly_meta::wire::status::RecoveryStatus;

const FILES: usize = 900;

/// Lengths of files, about 90 MiB in all. A large file has several chunks.
fn lens() -> Vec<usize> {
    (0..FILES).map(|number| 60_000 + number * 37 % 80_000).chain([5 << 20, 9_000_000]).collect()
}

/// Starts a session of four nodes, in which a node has room for its own blocks, its part of those of a lost node, and little else. Its
/// arena is too small for the rest.
fn session(lens: &[usize], recovery_rate: u64) -> Inside {
    session_with_room(lens, recovery_rate, 200)
}

/// Like [`session`]. The room of a node is given in percent of its share of the bytes.
fn session_with_room(lens: &[usize], recovery_rate: u64, percent: u64) -> Inside {
    let room = lens.iter().sum::<usize>() as u64 / 4 * percent / 100;
    let session = Inside::with_config(4, |config| {
        config.capacity = room;
        config.memory -= ARENA_LEN_MIN;
        config.recovery_rate = recovery_rate;
    });
    let tree = session.write(lens);
    let tar = session.work.path().join("d.tar");
    pack(&tar, &tree, &[]);
    session.stage(if recovery_rate.is_multiple_of(2) { &tree } else { &tar }).unwrap();
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

fn bytes_of(session: &Inside, blocks: &[BlockId]) -> u64 {
    let dataset = dataset(&session.view(0));
    blocks.iter().map(|&block| dataset.catalog().block(block).unwrap().1).sum()
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
    let mut session = session(&lens, 0);
    let lost = owned_by(&session, 3);
    session.lose(3);
    read_all(&session, 0, &lens);
    let read = origin_bytes(&session);
    let lost_bytes = bytes_of(&session, &lost);
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

/// Waits until all live nodes have recovered what they want to.
fn wait_until_recovered(session: &Inside, nodes: u16) {
    wait_until("all nodes have recovered the lost blocks", || {
        (0..nodes).map(|node| session.status_of(node).recovery).all(|recovery| {
            assert_eq!(recovery.failed.count, 0);
            recovery.wanted.count > 0 && recovery.wanted == recovery.recovered
        })
    });
}

/// SEMANTICS: "While a node is lost, the other nodes read its blocks from their sources in the background, in the order of the
/// sources, and store them where there is room."
#[test]
fn the_blocks_of_a_lost_node_are_recovered_in_the_background_and_read_once() {
    let lens = lens();
    // From a directory and from a tar.
    for rate in [1 << 30, (1 << 30) + 1] {
        let mut session = session(&lens, rate);
        let lost = owned_by(&session, 3);
        let lost_bytes = bytes_of(&session, &lost);
        session.lose(3);
        wait_until_recovered(&session, 3);
        assert_eq!(places(&session, &lost, 3).iter().sum::<usize>(), lost.len());
        assert_eq!(origin_bytes(&session), lost_bytes, "each block is read once");
        let recovered: u64 = (0..3).map(|node| session.status_of(node).recovery.recovered.bytes).sum();
        assert_eq!(recovered, lost_bytes);
        // The sources are no longer needed.
        fs::rename(session.work.path().join("d"), session.work.path().join("away")).unwrap();
        fs::rename(session.work.path().join("d.tar"), session.work.path().join("away.tar")).unwrap();
        (0..3).for_each(|node| read_all(&session, node, &lens));
    }
}

/// SEMANTICS: "What a node holds in place of a lost node, and what comes back to a new server, is not limited by `--cache`."
#[test]
fn blocks_of_a_lost_node_are_stored_although_nothing_is_to_be_cached() {
    let lens = lens();
    let mut session = session(&lens, 1 << 30);
    session.tune_cache(0);
    let lost = owned_by(&session, 3);
    session.lose(3);
    wait_until_recovered(&session, 3);
    assert_eq!(places(&session, &lost, 3).iter().sum::<usize>(), lost.len());
    let read = origin_bytes(&session);
    (0..3).for_each(|node| read_all(&session, node, &lens));
    assert_eq!(origin_bytes(&session), read, "nothing is read again");
    let live: Vec<BlockId> = (0..3).flat_map(|owner| owned_by(&session, owner)).collect();
    assert_eq!(places(&session, &live, 3).iter().sum::<usize>(), live.len(), "blocks of live nodes are not cached");
}

/// SEMANTICS: "A reader that wants a block while it is being recovered shares its read."
#[test]
fn readers_and_recovery_together_read_each_block_once() {
    let lens = lens();
    let mut session = session(&lens, 64 << 20);
    let lost = owned_by(&session, 3);
    let lost_bytes = bytes_of(&session, &lost);
    session.lose(3);
    std::thread::scope(|scope| {
        (0..3).for_each(|node| {
            let (session, lens) = (&session, &lens);
            drop(scope.spawn(move || read_all(session, node, lens)));
        });
    });
    wait_until_recovered(&session, 3);
    let read = origin_bytes(&session);
    assert!(read >= lost_bytes && read <= lost_bytes + lost_bytes / 50, "{read} of {lost_bytes}");
    // Copies that others cached count, too.
    assert!(places(&session, &lost, 3).iter().sum::<usize>() >= lost.len());
}

/// SEMANTICS: "Recovery stops when the node returns; its blocks are read from it again."
#[test]
fn recovery_stops_when_the_node_returns() {
    let lens = lens();
    let mut session = session(&lens, 1 << 20);
    // The node's server runs all the time.
    session.announce(3, true);
    wait_until("recovery has begun", || session.status_of(0).recovery.recovered.count > 0);
    session.announce(3, false);
    wait_until("recovery has stopped", || (0..3).all(|node| session.status_of(node).recovery.wanted.count == 0));
    let before = origin_bytes(&session);
    (0..3).for_each(|node| read_all(&session, node, &lens));
    assert_eq!(origin_bytes(&session), before, "no node reads from the sources any more");
}

/// SEMANTICS: "What cannot be read is tried again later."
#[test]
fn a_source_that_is_away_for_a_while_is_recovered_later() {
    let lens: Vec<usize> = vec![50_000; 200];
    let mut session = session(&lens, 1 << 30);
    let lost = owned_by(&session, 3);
    let (tree, away) = (session.work.path().join("d"), session.work.path().join("away"));
    fs::rename(&tree, &away).unwrap();
    session.lose(3);
    wait_until("nothing can be read", || {
        (0..3)
            .map(|node| session.status_of(node).recovery)
            .all(|recovery| recovery.wanted.count > 0 && recovery.wanted == recovery.failed && recovery.recovered.count == 0)
    });
    fs::rename(&away, &tree).unwrap();
    wait_until("all is recovered", || places(&session, &lost, 3).iter().sum::<usize>() == lost.len());
    wait_until_recovered(&session, 3);
}

/// SEMANTICS: "`status` shows how many of these blocks each node has recovered, and of how many."
#[test]
fn a_node_says_whether_it_has_counted_the_lost_blocks_of_all_datasets() {
    let lens = lens();
    // At the low rate, a node has recovered the lost blocks of the first dataset after a minute or more, and looks at the second
    // one only then.
    for (rate, is_slow) in [(64 << 10, true), (1 << 30, false)] {
        let mut session = session_with_room(&lens, rate, 500);
        session.stage_at(b"e", &session.write_in("e", &lens, FILES), false).unwrap();
        let all: usize = session.view(0).session().datasets().unwrap().iter().map(|dataset| lost_blocks(dataset, 3)).sum();
        session.lose(3);
        let progress = || {
            let all: Vec<_> = (0..3).map(|node| session.status_of(node).recovery).collect();
            let wanted: u64 = all.iter().map(|recovery| recovery.wanted.count).sum();
            let recovered: u64 = all.iter().map(|recovery| recovery.recovered.count).sum();
            (wanted as usize, recovered as usize, all.iter().filter(|recovery| recovery.is_scanned).count())
        };
        match is_slow {
            true => {
                wait_until("all nodes recover blocks of the first dataset", || {
                    (0..3).all(|node| session.status_of(node).recovery.recovered.count > 0)
                });
                let (wanted, _, scanned) = progress();
                assert!(wanted < all && scanned == 0, "{wanted} of {all} blocks are counted, and {scanned} nodes call that all");
            }
            false => wait_until("all is counted and recovered", || progress() == (all, all, 3)),
        }
    }
}

fn lost_blocks(dataset: &dayfly_client::Dataset, owner: u16) -> usize {
    let catalog = dataset.catalog();
    (0..catalog.header().blocks).filter(|&block| catalog.owner(BlockId(block)) == Some(NodeId(owner))).count()
}

/// SEMANTICS: "If there is not room for everything, a node caches the blocks that it holds in place of a lost node before those of
/// live nodes."
///
/// SEMANTICS: "It also shows for how many blocks the node has no room, and how many cannot be read again."
#[test]
fn recovery_takes_what_fits_and_then_rests() {
    let lens = lens();
    let mut session = session_with_room(&lens, 1 << 30, 120);
    let lost = owned_by(&session, 3);
    let lost_bytes = bytes_of(&session, &lost);
    session.lose(3);
    let (found, read) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    let is_at_rest = || {
        // Longer than recovery rests between two looks.
        std::thread::sleep(Duration::from_millis(1200));
        let now = (places(&session, &lost, 3).iter().sum::<usize>(), origin_bytes(&session));
        let is_same = now == (found.get(), read.get());
        found.set(now.0);
        read.set(now.1);
        let is_done = |of: RecoveryStatus| of.is_scanned && of.wanted.count == of.recovered.count;
        is_same && now.0 > 0 && (0..3).all(|node| is_done(session.status_of(node).recovery))
    };
    wait_until("recovery rests", is_at_rest);
    assert!(found.get() > lost.len() / 10 && found.get() < lost.len(), "{} of {}", found.get(), lost.len());
    assert!(read.get() < lost_bytes, "{} of {lost_bytes} bytes were read", read.get());
    let all: Vec<_> = (0..3).map(|node| session.status_of(node).recovery).collect();
    let sum = |count: fn(&RecoveryStatus) -> u64| all.iter().map(count).sum::<u64>() as usize;
    assert_eq!(sum(|of| of.recovered.count), found.get());
    assert_eq!(sum(|of| of.wanted.count + of.without_room.count), lost.len(), "{all:?}");
    (0..3).for_each(|node| read_all(&session, node, &lens));
}
