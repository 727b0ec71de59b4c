//! Copies of other nodes' blocks on a drive that fails when it is told to.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use dayfly_meta::catalog::member::{MemberKey, MemberKind, StoredBlock};
use dayfly_meta::catalog::{About, CatalogBuilder, Compression, Member, Source, SourceKind};
use dayfly_meta::checksum::checksum;
use dayfly_meta::id::{DatasetId, NodeId};

use super::*;
use crate::store::write_back::WriteBack;
use crate::store::write_back::failing::Failing;
use crate::store::{Drive, Segments};

const FILES: u32 = 64;

fn content(block: BlockId, len: usize) -> Vec<u8> {
    (0..len as u32).map(|at| (block.0 * 31 + at * 7) as u8 | 1).collect()
}

/// A dataset of which another node owns all.
struct Ground {
    dataset: Dataset,
    drives: Vec<Arc<Drive>>,
    failing: Arc<Failing>,
    len: usize,
    _folder: tempfile::TempDir,
}

impl Ground {
    fn new(len: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let failing = Arc::new(Failing::default());
        let write_back: Arc<dyn WriteBack> = failing.clone();
        let drives = Drive::open_all_with(&[folder.path().to_owned()], 1 << 30, &write_back).unwrap();
        let source =
            Source { path: b"/a.tar".to_vec(), prefix: Vec::new(), kind: SourceKind::Tar, compression: Compression::None };
        let mut builder = CatalogBuilder::new(&tempfile::tempfile, About::default(), &[source]).unwrap();
        for number in 0..FILES {
            let bytes = content(BlockId(number), len);
            let kind = MemberKind::File {
                size: len as u64,
                blocks: vec![StoredBlock { owner: NodeId(1), arrival: number }],
                checksums: bytes.chunks(dayfly_meta::limits::CHUNK_LEN as usize).map(checksum).collect(),
            };
            let (path, key) = (format!("{number:04}").into_bytes(), MemberKey { source: 0, offset: number.into() });
            let member = Member { path, key, ticket: 0, mode: 0o644, mtime_s: 0, mtime_ns: 0, kind };
            builder.add(&member.path, &member, 1).unwrap();
        }
        let built = builder.finish(&|| {}).unwrap();
        let segments = Arc::new(Segments::create(&drives, DatasetId(1)).unwrap());
        let room = drives[0].reserve(built.len).unwrap();
        let (target, roster) = (b"d".to_vec(), (NodeId(0), 2));
        let dataset =
            Dataset::prepare(DatasetId(1), target, &built.file, built.checksum, room, roster, &drives[0], segments, 0, &|_| None);
        let dataset = dataset.unwrap();
        dataset.raise_cache_threshold(ALL).unwrap();
        Self { dataset, drives, failing, len, _folder: folder }
    }

    fn keep(&self, blocks: impl Iterator<Item = u32>) -> io::Result<u64> {
        let all: Vec<(BlockId, Vec<u8>)> = blocks.map(BlockId).map(|block| (block, content(block, self.len))).collect();
        let chunks: Vec<(Chunk, &[u8])> =
            all.iter().map(|(block, bytes)| (Chunk { block: *block, index: 0 }, bytes.as_slice())).collect();
        self.dataset.write_cached(&chunks)
    }

    fn place(&self, block: u32) -> Option<DrivePosition> {
        self.dataset.locations().find(BlockId(block)).and_then(Location::position)
    }

    fn found(&self) -> Vec<u32> {
        (0..FILES).filter(|&block| self.place(block).is_some()).collect()
    }

    fn assert_all_found_are_right(&self) {
        for block in self.found() {
            let place = self.place(block).unwrap();
            let mut bytes = vec![0; self.len];
            self.dataset.segments().file(place.drive).unwrap().read_exact_at(&mut bytes, place.offset).unwrap();
            assert!(bytes == content(BlockId(block), self.len), "block {block}");
        }
        let (blocks, bytes) = self.dataset.cached_blocks().usage();
        assert_eq!((blocks, bytes), (self.found().len() as u64, (self.found().len() * self.len) as u64));
    }
}

/// SEMANTICS: "processes find a copy once the drive has it".
#[test]
fn copies_are_found_after_the_sync_that_covers_them_and_not_before() {
    let ground = Ground::new(5000);
    ground.keep(0..20).unwrap();
    assert!(ground.found().is_empty());
    ground.keep(10..30).unwrap();
    assert!(ground.found().is_empty());
    ground.dataset.sync_cached().unwrap();
    assert_eq!(ground.found(), (0..30).collect::<Vec<_>>());
    ground.keep(0..40).unwrap();
    assert_eq!(ground.found().len(), 30);
    ground.dataset.sync_cached().unwrap();
    assert_eq!(ground.found().len(), 40);
    ground.assert_all_found_are_right();
    assert_eq!(ground.dataset.segments().cached_room() / 5000, 40, "none is written twice");
}

/// SEMANTICS: "after an error nothing that was written since the last good sync is a copy".
#[test]
fn an_error_of_any_call_gives_up_what_was_written_since_the_last_good_sync() {
    for call in 0..2 {
        let ground = Ground::new(5000);
        ground.keep(0..20).unwrap();
        ground.dataset.sync_cached().unwrap();
        ground.keep(20..30).unwrap();
        let failing = [&ground.failing.start, &ground.failing.sync][call];
        failing.store(true, Ordering::Relaxed);
        let (kept, synced) = (ground.keep(30..40).map(drop), ground.dataset.sync_cached());
        assert_eq!((kept.is_err(), synced.is_err()), (call == 0, call == 1));
        let error = kept.and(synced).unwrap_err().to_string();
        assert!(error.contains("has lost what was written to it") && error.contains("--data-dir"), "{error}");
        // The next sync would succeed, and would prove nothing.
        ground.keep(0..FILES).unwrap();
        let _ = ground.dataset.sync_cached();
        assert_eq!(ground.found(), (0..20).collect::<Vec<_>>());
        ground.assert_all_found_are_right();
        let before = ground.dataset.segments().cached_room();
        assert!(ground.dataset.has_withdrawn());
        assert!(ground.dataset.free_withdrawn().unwrap() > 0 && ground.dataset.segments().cached_room() < before);
        ground.assert_all_found_are_right();
    }
}

/// SEMANTICS: "an offset at which a copy lay is never used again".
#[test]
fn an_offset_that_was_given_up_is_never_used_again() {
    for len in [3000, 70_000] {
        let ground = Ground::new(len);
        let mut used = std::collections::HashSet::new();
        let room = ground.drives[0].used();
        for _ in 0..5 {
            ground.dataset.raise_cache_threshold(ALL).unwrap();
            ground.keep(0..FILES).unwrap();
            ground.dataset.sync_cached().unwrap();
            assert_eq!(ground.found().len(), FILES as usize);
            ground.assert_all_found_are_right();
            assert!((0..FILES).all(|block| used.insert(ground.place(block).unwrap().offset)), "an offset came back");
            ground.dataset.lower_cache_threshold(0);
            assert!(ground.found().is_empty());
            ground.dataset.free_withdrawn().unwrap();
            assert_eq!((ground.drives[0].used(), ground.dataset.segments().cached_room()), (room, 0), "all room came back");
            let blocks = std::os::unix::fs::MetadataExt::blocks(&ground.dataset.segments().file(0).unwrap().metadata().unwrap());
            assert!(blocks * 512 < 64 << 10, "{blocks} blocks are still taken");
        }
    }
}

/// SEMANTICS: "those with the highest hashes go first".
#[test]
fn a_lower_threshold_gives_up_a_part_and_its_pages() {
    let ground = Ground::new(3000);
    ground.keep(0..FILES).unwrap();
    ground.dataset.sync_cached().unwrap();
    let room = ground.dataset.segments().cached_room();
    let mut last = FILES as usize;
    while last > 0 {
        let threshold =
            lowered_threshold(ground.dataset.cached_blocks().threshold(), 8192, ground.dataset.segments().cached_room());
        ground.dataset.lower_cache_threshold(threshold);
        let freed = ground.dataset.free_withdrawn().unwrap();
        let found = ground.found();
        assert!(found.len() <= last && found.iter().all(|&block| hash(BlockId(block), 0) < threshold));
        assert!(freed > 0 || found.len() + 4 > last, "{} went and nothing came free", last - found.len());
        ground.assert_all_found_are_right();
        last = found.len();
    }
    assert!(room >= u64::from(FILES) * 3000 && ground.dataset.segments().cached_room() == 0);
}

#[test]
fn what_is_withdrawn_while_it_is_synced_is_not_found() {
    let ground = Ground::new(5000);
    ground.keep(0..20).unwrap();
    ground.dataset.lower_cache_threshold(ALL / 2);
    ground.dataset.sync_cached().unwrap();
    let half: Vec<u32> = (0..20).filter(|&block| hash(BlockId(block), 0) < ALL / 2).collect();
    assert_eq!(ground.found(), half);
    ground.dataset.free_withdrawn().unwrap();
    ground.assert_all_found_are_right();
}

#[test]
fn the_threshold_goes_down_in_every_step_and_ends_at_nothing() {
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
    assert_eq!(threshold_for(1 << 40, 1 << 30), ALL);
    assert_eq!(threshold_for(0, 1 << 30), 0);
    assert_eq!(threshold_for(0, 0), ALL);
}
