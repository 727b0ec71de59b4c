//! Cached blocks on a drive that fails when a test asks for it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use dayfly_meta::catalog::{About, NOT_STORED, StoredBlock};
use dayfly_meta::id::{DatasetId, NodeId};
use dayfly_meta::placement::NodeSet;

use super::*;
use crate::store::Drive;
use crate::store::testing::{dataset, dataset_of, dataset_with};
use crate::store::write_back::WriteBack;
use crate::store::write_back::failing::Failing;

const FILES: u32 = 64;

fn content(block: BlockId, len: usize) -> Vec<u8> {
    (0..len as u32).map(|at| (block.0 * 31 + at * 7) as u8 | 1).collect()
}

/// A dataset whose blocks all belong to another node, and the drive that caches them.
struct Fixture {
    dataset: Dataset,
    drives: Vec<Arc<Drive>>,
    failing: Arc<Failing>,
    len: usize,
    _folder: tempfile::TempDir,
}

impl Fixture {
    fn new(len: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let failing = Arc::new(Failing::default());
        let write_back: Arc<dyn WriteBack> = failing.clone();
        let drives = Drive::open_all_with(&[folder.path().to_owned()], 1 << 30, &write_back).unwrap();
        let contents: Vec<Vec<u8>> = (0..FILES).map(|number| content(BlockId(number), len)).collect();
        let dataset = dataset(&drives, &contents, |arrival| StoredBlock { owner: NodeId(1), arrival });
        dataset.raise_cache_threshold(ALL).unwrap();
        dataset.cached_blocks().resume();
        Self { dataset, drives, failing, len, _folder: folder }
    }

    fn write(&self, blocks: impl Iterator<Item = u32>) -> io::Result<u64> {
        let all: Vec<(BlockId, Vec<u8>)> = blocks.map(BlockId).map(|block| (block, content(block, self.len))).collect();
        let chunks: Vec<(Chunk, &[u8])> =
            all.iter().map(|(block, bytes)| (Chunk { block: *block, index: 0 }, bytes.as_slice())).collect();
        self.dataset.write_cached(&chunks)
    }

    fn position(&self, block: u32) -> Option<DrivePosition> {
        self.dataset.locations().find(BlockId(block)).and_then(Location::position)
    }

    /// Returns the blocks that processes find.
    fn found(&self) -> Vec<u32> {
        (0..FILES).filter(|&block| self.position(block).is_some()).collect()
    }

    fn assert_found_blocks_are_right(&self) {
        for block in self.found() {
            let position = self.position(block).unwrap();
            let mut bytes = vec![0; self.len];
            self.dataset.segments().file(position.drive).unwrap().read_exact_at(&mut bytes, position.offset).unwrap();
            assert!(bytes == content(BlockId(block), self.len), "block {block}");
        }
        let (blocks, bytes) = self.dataset.cached_blocks().usage();
        assert_eq!((blocks, bytes), (self.found().len() as u64, (self.found().len() * self.len) as u64));
    }
}

/// SEMANTICS: "A cached block can be found on the drives once a sync has covered it. A sync starts when 64 MiB of cached blocks are
/// waiting, or after a second. Until then the block is read from the arena or fetched again."
#[test]
fn copies_are_found_after_the_sync_that_covers_them_and_not_before() {
    let fixture = Fixture::new(5000);
    fixture.write(0..20).unwrap();
    assert!(fixture.found().is_empty());
    fixture.write(10..30).unwrap();
    assert!(fixture.found().is_empty());
    fixture.dataset.sync_cached(&mut |_, _| {}).unwrap();
    assert_eq!(fixture.found(), (0..30).collect::<Vec<_>>());
    fixture.write(0..40).unwrap();
    assert_eq!(fixture.found().len(), 30);
    fixture.dataset.sync_cached(&mut |_, _| {}).unwrap();
    assert_eq!(fixture.found().len(), 40);
    fixture.assert_found_blocks_are_right();
    assert_eq!(fixture.dataset.segments().cached_room() / 5000, 40, "no block is written twice");
}

/// SEMANTICS: "After an error, all cached blocks that were written since the last good sync are
/// dropped, and the drive gets no more cached blocks of that dataset."
#[test]
fn a_failed_write_back_or_sync_drops_everything_since_the_last_good_sync() {
    for call in 0..2 {
        let fixture = Fixture::new(5000);
        fixture.write(0..20).unwrap();
        fixture.dataset.sync_cached(&mut |_, _| {}).unwrap();
        fixture.write(20..30).unwrap();
        let failing = [&fixture.failing.start, &fixture.failing.sync][call];
        failing.store(true, Ordering::Relaxed);
        let (written, synced) = (fixture.write(30..40).map(drop), fixture.dataset.sync_cached(&mut |_, _| {}));
        assert_eq!((written.is_err(), synced.is_err()), (call == 0, call == 1));
        let error = written.and(synced).unwrap_err().to_string();
        assert!(error.contains("has lost what was written to it") && error.contains("--data-dir"), "{error}");
        // A repeated sync would succeed, and would prove nothing.
        fixture.write(0..FILES).unwrap();
        let _ = fixture.dataset.sync_cached(&mut |_, _| {});
        assert_eq!(fixture.found(), (0..20).collect::<Vec<_>>());
        fixture.assert_found_blocks_are_right();
        let before = fixture.dataset.segments().cached_room();
        assert!(fixture.dataset.has_withdrawn());
        assert!(fixture.dataset.free_withdrawn().unwrap() > 0 && fixture.dataset.segments().cached_room() < before);
        fixture.assert_found_blocks_are_right();
    }
}

/// SEMANTICS: "A slow reader never mistakes one block for another. An offset at which a cached block
/// lay is not used again."
#[test]
fn the_offset_of_a_withdrawn_block_is_never_used_again() {
    for len in [3000, 70_000] {
        let fixture = Fixture::new(len);
        let mut used = std::collections::HashSet::new();
        let room = fixture.drives[0].used();
        for _ in 0..5 {
            fixture.dataset.raise_cache_threshold(ALL).unwrap();
            fixture.write(0..FILES).unwrap();
            fixture.dataset.sync_cached(&mut |_, _| {}).unwrap();
            assert_eq!(fixture.found().len(), FILES as usize);
            fixture.assert_found_blocks_are_right();
            assert!((0..FILES).all(|block| used.insert(fixture.position(block).unwrap().offset)), "an offset was used twice");
            fixture.dataset.lower_cache_threshold(0);
            assert!(fixture.found().is_empty());
            fixture.dataset.free_withdrawn().unwrap();
            assert_eq!((fixture.drives[0].used(), fixture.dataset.segments().cached_room()), (room, 0), "all room was freed");
            let blocks = std::os::unix::fs::MetadataExt::blocks(&fixture.dataset.segments().file(0).unwrap().metadata().unwrap());
            assert!(blocks * 512 < 64 << 10, "{blocks} blocks are still taken");
        }
    }
}

/// SEMANTICS: "The cached blocks with the highest hashes are dropped first."
#[test]
fn a_lower_threshold_withdraws_some_blocks_and_frees_their_pages() {
    let fixture = Fixture::new(3000);
    fixture.write(0..FILES).unwrap();
    fixture.dataset.sync_cached(&mut |_, _| {}).unwrap();
    let room = fixture.dataset.segments().cached_room();
    let mut last = FILES as usize;
    while last > 0 {
        let threshold =
            lowered_threshold(fixture.dataset.cached_blocks().threshold(), 8192, fixture.dataset.segments().cached_room());
        fixture.dataset.lower_cache_threshold(threshold);
        let freed = fixture.dataset.free_withdrawn().unwrap();
        let found = fixture.found();
        assert!(found.len() <= last && found.iter().all(|&block| hash(BlockId(block), 0) < threshold));
        assert!(freed > 0 || found.len() + 4 > last, "{} blocks were withdrawn and nothing was freed", last - found.len());
        fixture.assert_found_blocks_are_right();
        last = found.len();
    }
    assert!(room >= u64::from(FILES) * 3000 && fixture.dataset.segments().cached_room() == 0);
}

#[test]
fn blocks_that_are_withdrawn_before_their_sync_are_not_found() {
    let fixture = Fixture::new(5000);
    fixture.write(0..20).unwrap();
    fixture.dataset.lower_cache_threshold(ALL / 2);
    fixture.dataset.sync_cached(&mut |_, _| {}).unwrap();
    let half: Vec<u32> = (0..20).filter(|&block| hash(BlockId(block), 0) < ALL / 2).collect();
    assert_eq!(fixture.found(), half);
    fixture.dataset.free_withdrawn().unwrap();
    fixture.assert_found_blocks_are_right();
}

#[test]
fn the_threshold_falls_with_every_step_and_reaches_zero() {
    let mut threshold = ALL;
    let mut steps = 0;
    while threshold > 0 {
        let lower = lowered_threshold(threshold, 1, 1 << 40);
        assert!(lower < threshold);
        (threshold, steps) = (lower, steps + 1);
    }
    assert!(steps < 10_000, "{steps}");
    assert_eq!(lowered_threshold(ALL, 10, 10), 0);
    assert_eq!(lowered_threshold(ALL, 10, 0), 0);
}

#[test]
fn blocks_that_are_not_stored_are_cached_before_those_of_other_nodes() {
    let folder = tempfile::tempdir().unwrap();
    let drives = Drive::open_all(&[folder.path().to_owned()], 1 << 30).unwrap();
    let contents: Vec<Vec<u8>> = (0..400).map(|number| content(BlockId(number), 1000)).collect();
    // A quarter of the blocks is this node's, and is not stored.
    let is_mine = |number: u32| number.is_multiple_of(4);
    let block = |number| match is_mine(number) {
        true => StoredBlock { owner: NodeId(0), arrival: NOT_STORED },
        false => StoredBlock { owner: NodeId(1), arrival: number },
    };
    let dataset = dataset(&drives, &contents, block);
    assert_eq!((dataset.owned().unstored_bytes, dataset.owned().bytes, dataset.remote_bytes()), (100_000, 0, 400_000));
    for (room, mine, others) in
        [(0, 0, 0), (50_000, 50, 0), (100_000, 98, 0), (102_000, 100, 0), (250_000, 100, 147), (1 << 40, 100, 300)]
    {
        let shares = CacheShares::that_fit(room, u64::MAX, 0, 100_000, 300_000);
        let threshold = dataset.cache_threshold(shares);
        dataset.lower_cache_threshold(0);
        dataset.raise_cache_threshold(threshold).unwrap();
        dataset.cached_blocks().resume();
        let chosen: Vec<u32> = (0..400).filter(|&number| dataset.should_cache(BlockId(number))).collect();
        let count = |wanted: bool| chosen.iter().filter(|&&number| is_mine(number) == wanted).count();
        let is_near = |found: usize, expected: usize| {
            found.abs_diff(expected) <= 20 && (!expected.is_multiple_of(100) || found == expected)
        };
        assert!(is_near(count(true), mine) && is_near(count(false), others), "{room}: {} and {}", count(true), count(false));
    }
    // Another dataset's blocks come before blocks of other nodes, too.
    let others = CacheShares::that_fit(100_000, u64::MAX, 0, 200_000, 300_000);
    assert!(dataset.cache_threshold(others) < ALL / 4);
    // What the user allows does not limit what comes to this node because of losses.
    for (limit, lost, unstored, others) in [
        (0, 100_000, ALL, 0),
        (0, 50_000, ALL / 2, 0),
        (0, 0, 0, 0),
        (102_041, 0, ALL, 0),
        (204_082, 0, ALL, ALL / 3),
        (102_041, 100_000, ALL, ALL / 3),
    ] {
        let found = CacheShares::that_fit(1 << 30, limit, lost, 100_000, 300_000);
        let is_near = |found: u64, expected: u64| found.abs_diff(expected) <= ALL / 100;
        assert!(is_near(found.unstored, unstored) && is_near(found.others, others), "{limit}, {lost}: {found:?}");
    }
}

/// SEMANTICS: "If there is not room for everything, a node caches the blocks that it holds in place of a lost node before those of
/// live nodes. When the lost node returns, they are ordinary cached blocks again."
#[test]
fn blocks_of_a_lost_owner_are_cached_before_those_of_live_nodes_until_the_owner_returns() {
    let folder = tempfile::tempdir().unwrap();
    let drives = Drive::open_all(&[folder.path().to_owned()], 1 << 30).unwrap();
    let contents: Vec<Vec<u8>> = (0..600).map(|number| content(BlockId(number), 1000)).collect();
    let owner = |block: u32| NodeId(1 + (block % 3) as u16);
    let dataset = dataset_of(4, &drives, &contents, |arrival| StoredBlock { owner: owner(arrival), arrival });
    let lost: NodeSet = [NodeId(1)].into_iter().collect();
    let taken: Vec<u32> = (0..600).filter(|&block| dataset.takes_over(BlockId(block), &lost)).collect();
    assert!(taken.iter().all(|&block| owner(block) == NodeId(1)) && (40..95).contains(&taken.len()), "{}", taken.len());
    let plan = |lost: &NodeSet, room: u64| {
        dataset.set_lost(lost);
        let unstored = dataset.unstored_bytes();
        let threshold =
            dataset.cache_threshold(CacheShares::that_fit(room, u64::MAX, 0, unstored, dataset.remote_bytes() - unstored));
        dataset.lower_cache_threshold(threshold);
        dataset.raise_cache_threshold(threshold).unwrap();
        dataset.cached_blocks().resume();
        (0..600).filter(|&block| dataset.rank(BlockId(block)) < threshold).collect::<Vec<u32>>()
    };
    let cache = |blocks: &[u32]| {
        let bytes: Vec<(BlockId, Vec<u8>)> =
            blocks.iter().map(|&block| (BlockId(block), content(BlockId(block), 1000))).collect();
        let chunks: Vec<(Chunk, &[u8])> =
            bytes.iter().map(|(block, bytes)| (Chunk { block: *block, index: 0 }, bytes.as_slice())).collect();
        dataset.write_cached(&chunks).unwrap();
        dataset.sync_cached(&mut |_, _| {}).unwrap();
    };
    let found = || (0..600).filter(|&block| dataset.is_local(BlockId(block))).collect::<Vec<u32>>();
    let ordinary = plan(&NodeSet::new(), 150_000);
    cache(&ordinary);
    assert_eq!(found(), ordinary);

    // The blocks of the lost node take the place of others.
    let with_taken = plan(&lost, 150_000);
    assert_eq!(dataset.unstored_bytes(), 1000 * taken.len() as u64);
    assert!(taken.iter().all(|block| with_taken.contains(block)) && with_taken.len() > taken.len() + 20);
    assert!(found().iter().all(|block| with_taken.contains(block)) && found().len() < ordinary.len());
    cache(&with_taken);
    assert_eq!(found(), with_taken);

    // With less room, only a part of them is cached, and nothing else.
    let few = plan(&lost, 30_000);
    assert!(few.iter().all(|block| taken.contains(block)) && (15..50).contains(&few.len()), "{}", few.len());
    assert_eq!(found(), few);

    assert_eq!(plan(&NodeSet::new(), 150_000), ordinary, "the owner is back");
    assert_eq!(dataset.unstored_bytes(), 0);
    assert!(found().iter().all(|block| ordinary.contains(block)));
}

/// SEMANTICS: "They are made afterwards, also by the lost node if it returns. Cached blocks get only the room that these leave."
/// SEMANTICS: "Copies are never evicted. This also holds for those that a new server has got back, and for those that other nodes make
/// while a node is lost. A minute after that node is a member again with all its copies, these are ordinary cached blocks."
#[test]
fn copies_that_are_made_after_the_stage_in_never_make_way() {
    let folder = tempfile::tempdir().unwrap();
    let drives = Drive::open_all(&[folder.path().to_owned()], 1 << 30).unwrap();
    let contents: Vec<Vec<u8>> = (0..600).map(|number| content(BlockId(number), 1000)).collect();
    let owner = |arrival: u32| StoredBlock { owner: NodeId(1 + (arrival % 3) as u16), arrival };
    let about = About { capacities: vec![1; 4], copies: 2, ..About::default() };
    let dataset = dataset_with(about, (DatasetId(1), b"d"), &drives, &contents, owner);
    // `room` is what is left of the node's room.
    let plan = |room: u64, lost: &[u16]| {
        dataset.set_lost(&lost.iter().copied().map(NodeId).collect());
        let (kept, unstored) = (dataset.kept_bytes(), dataset.unstored_bytes());
        let others = dataset.remote_bytes() - unstored;
        let shares = CacheShares::that_fit(room.saturating_sub(kept), u64::MAX, 0, unstored.saturating_sub(kept), others);
        let threshold = dataset.cache_threshold(shares);
        dataset.lower_cache_threshold(threshold);
        dataset.raise_cache_threshold(threshold).unwrap();
        dataset.cached_blocks().resume();
        (0..600).map(BlockId).filter(|block| dataset.is_selected(*block)).collect::<Vec<_>>()
    };
    plan(300_000, &[]);
    assert_eq!((dataset.unstored_bytes(), dataset.kept_bytes(), dataset.can_cache_less()), (0, 0, true));
    // While another node is lost, this one still has all of its own.
    dataset.set_lost(&[NodeId(3)].into_iter().collect());
    assert!(dataset.has_come_back());
    dataset.set_lost(&NodeSet::new());
    dataset.set_refilled(NodeId(3));
    dataset.set_lacks_copies();
    assert!(!dataset.has_come_back());
    let chosen = plan(300_000, &[]);
    let copies: Vec<BlockId> = (0..600).map(BlockId).filter(|block| dataset.is_to_come_back(*block)).collect();
    assert!((100..300).contains(&copies.len()), "{}", copies.len());
    assert_eq!((dataset.unstored_bytes(), dataset.kept_bytes()), (1000 * copies.len() as u64, 1000 * copies.len() as u64));
    assert!(copies.iter().all(|block| chosen.contains(block)) && (250..330).contains(&chosen.len()), "{}", chosen.len());
    let found = || (0..600).map(BlockId).filter(|block| dataset.is_local(*block)).collect::<Vec<_>>();
    let write = |chosen: &[BlockId]| {
        let bytes: Vec<(BlockId, Vec<u8>)> = chosen.iter().map(|&block| (block, content(block, 1000))).collect();
        let chunks: Vec<(Chunk, &[u8])> =
            bytes.iter().map(|(block, bytes)| (Chunk { block: *block, index: 0 }, bytes.as_slice())).collect();
        dataset.write_cached(&chunks).unwrap();
        dataset.sync_cached(&mut |_, _| {}).unwrap();
    };
    // Nothing makes them give way: no plan with too little room, no stage-in, no `tune --cache off`.
    let only_kept_stay = |lost: &[u16]| {
        let chosen = plan(50_000, lost);
        dataset.lower_cache_threshold(0);
        dataset.free_withdrawn().unwrap();
        assert_eq!((found(), dataset.can_cache_less()), (chosen.clone(), false));
        assert_eq!(dataset.cached_blocks().kept_bytes(), 1000 * chosen.len() as u64);
        chosen
    };
    write(&chosen);
    assert_eq!((found(), dataset.cached_blocks().kept_bytes()), (chosen, 1000 * copies.len() as u64));
    assert_eq!(only_kept_stay(&[]), copies);
    assert!(dataset.has_come_back());

    // The same holds for the copies that are made here while a node is lost, as long as it is.
    let taken: Vec<BlockId> = plan(300_000, &[1]).into_iter().filter(|&block| dataset.is_kept(block)).collect();
    assert!(taken.len() > copies.len() + 50 && copies.iter().all(|block| taken.contains(block)), "{}", taken.len());
    assert_eq!((dataset.unstored_bytes(), dataset.kept_bytes()), (1000 * taken.len() as u64, 1000 * taken.len() as u64));
    // Those that have not come yet have their room, but have none to give up.
    assert_eq!(dataset.cached_blocks().kept_bytes(), 1000 * copies.len() as u64);
    write(&taken);
    assert_eq!(only_kept_stay(&[1]), taken);
    // This node may hear that it has been lost itself, before it is a member or after it stood still.
    assert_eq!(only_kept_stay(&[0, 1]), taken);
    assert_eq!(only_kept_stay(&[1]), taken);
    assert_eq!(dataset.refilling().iter().count(), 0);
    // Node 1 may have returned without its copies.
    assert_eq!(only_kept_stay(&[]), taken);
    dataset.set_refilled(NodeId(1));
    assert_eq!(only_kept_stay(&[]), copies);
}
