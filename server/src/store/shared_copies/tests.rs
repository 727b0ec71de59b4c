//! Copies that are filled, given up, filled with wrong bytes, and dropped for lack of room.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::fd::AsRawFd;

use dayfly_meta::catalog::StoredBlock;
use dayfly_meta::id::NodeId;

use super::*;
use crate::store::testing::dataset;
use crate::store::write_back::WriteBack;
use crate::store::write_back::failing::Failing;

const LEN: usize = 5 << 20;

struct Fixture {
    copies: Arc<SharedCopies>,
    dataset: Arc<Dataset>,
    drive: Arc<Drive>,
    failing: Arc<Failing>,
    contents: Vec<Vec<u8>>,
    _folder: tempfile::TempDir,
}

impl Fixture {
    /// A drive with room for two copies and a half, beside the catalog.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let failing = Arc::new(Failing::default());
        let write_back: Arc<dyn WriteBack> = failing.clone();
        let drives = Drive::open_all_with(&[folder.path().to_owned()], 5 * LEN as u64 / 2 + (1 << 20), &write_back).unwrap();
        let contents: Vec<Vec<u8>> =
            (0..4_u8).map(|number| (0..LEN).map(|at| at as u8 ^ (at >> 9) as u8 ^ number).collect()).collect();
        let dataset = dataset(&drives, &contents, |arrival| StoredBlock { owner: NodeId(1), arrival });
        let drive = drives[0].clone();
        Self { copies: Arc::default(), dataset: Arc::new(dataset), drive, failing, contents, _folder: folder }
    }

    fn share(&self, block: u32) -> Result<Share, ShareError> {
        self.copies.share(&self.drive, &self.dataset, Original::Block(BlockId(block)))
    }

    fn assigned(&self, block: u32) -> Filling {
        match self.share(block) {
            Ok(Share::Assigned(filling)) => filling,
            _ => panic!("block {block} has a copy already"),
        }
    }

    fn is_whole(&self, block: u32) -> bool {
        let Ok(Share::Whole(file)) = self.share(block) else { return false };
        let mut found = vec![0; LEN];
        file.read_exact_at(&mut found, 0).unwrap();
        assert!(found == self.contents[block as usize] && file.metadata().unwrap().len() == LEN as u64);
        assert!(file.write_at(b"x", 0).is_err(), "only the process that fills the copy may write to it");
        true
    }

    fn fill(&self, block: u32) -> Result<File, ShareError> {
        let filling = self.assigned(block);
        filling.file().write_all_at(&self.contents[block as usize], 0).unwrap();
        filling.finish()
    }
}

/// SEMANTICS: "Before another process maps the copy, it is on the drive, and the server has compared it
/// with the block's checksums."
#[test]
fn a_copy_is_shared_once_it_is_whole_and_good() {
    let fixture = Fixture::new();
    let before = fixture.drive.used();
    // While one process fills the copy, others wait; when that process ends early, another one fills it.
    let filling = fixture.assigned(0);
    assert!(matches!(fixture.share(0), Ok(Share::Busy(0))));
    drop(filling);
    assert_eq!(fixture.drive.used(), before);
    // One wrong byte.
    let filling = fixture.assigned(0);
    let mut wrong = fixture.contents[0].clone();
    wrong[LEN - 1] ^= 1;
    filling.file().write_all_at(&wrong, 0).unwrap();
    assert!(matches!(filling.finish(), Err(ShareError::Mismatch(BlockId(0)))));
    // A drive that loses what was written.
    fixture.failing.sync.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(matches!(fixture.fill(0), Err(ShareError::Unreadable(_))));
    assert_eq!(fixture.drive.used(), before);
    assert!(!fixture.is_whole(0));
    fixture.fill(0).unwrap();
    assert!(fixture.is_whole(0));
    assert_eq!(fixture.drive.used(), before + LEN as u64);
    assert!(matches!(fixture.share(99), Err(ShareError::Unknown)));
    // Somebody writes to the copy by its name in /proc. File systems take the time from a clock that advances in steps.
    let Ok(Share::Whole(mine)) = fixture.share(0) else { panic!("block 0 has no copy") };
    let writer = File::options().write(true).open(format!("/proc/self/fd/{}", mine.as_raw_fd())).unwrap();
    let unchanged = change_time(&mine).unwrap();
    while change_time(&mine).unwrap() == unchanged {
        writer.write_all_at(b"other", 0).unwrap();
    }
    drop(writer);
    fixture.fill(0).unwrap();
    assert!(fixture.is_whole(0));
    // A copy of a dataset that is gone is not kept.
    let filling = fixture.assigned(1);
    fixture.copies.forget(fixture.dataset.id());
    filling.file().write_all_at(&fixture.contents[1], 0).unwrap();
    assert!(matches!(filling.finish(), Err(ShareError::Dropped)));
    assert_eq!(fixture.drive.used(), before);
}

/// SEMANTICS: "A copy that no process uses makes way for stage-ins and for newer copies, and goes when no process has asked for it
/// for 15 to 30 s."
#[test]
fn copies_make_way_for_newer_ones_and_for_stage_ins() {
    let fixture = Fixture::new();
    let before = fixture.drive.used();
    let held = fixture.fill(0).unwrap();
    fixture.fill(1).unwrap();
    // Block 1 was wanted after block 0, but nobody uses it.
    fixture.fill(2).unwrap();
    assert!(fixture.is_whole(0) && fixture.is_whole(2));
    drop(held);
    // Now block 2 was not wanted for longer than block 0.
    assert!(fixture.is_whole(0));
    let filling = fixture.assigned(1);
    assert!(fixture.is_whole(0), "a copy that is being filled stays, and so does a newer one");
    assert_eq!((fixture.copies.bytes(), fixture.copies.unused_bytes()), (2 * LEN as u64, LEN as u64));
    let held = fixture.share(0);
    assert_eq!(fixture.copies.unused_bytes(), 0);
    assert_eq!(fixture.copies.make_way(), 0, "one copy is used, and one is being filled");
    assert!(matches!(fixture.share(3), Err(ShareError::NoRoom(_))));
    drop(held);
    assert_eq!(fixture.copies.make_way(), LEN as u64);
    let other = fixture.assigned(3);
    assert!(matches!(fixture.share(2), Err(ShareError::NoRoom(_))), "both copies are being filled");
    drop((filling, other));
    assert_eq!(fixture.drive.used(), before);
    // Without anybody who asks, a copy that is used stays, and another one goes with the second look.
    let held = fixture.fill(0).unwrap();
    fixture.fill(1).unwrap();
    assert_eq!([(); 3].map(|()| fixture.copies.drop_idle()), [0, LEN as u64, 0]);
    drop(held);
    assert_eq!(fixture.copies.drop_idle(), 0);
    assert!(fixture.is_whole(0), "asked for once more");
    assert_eq!([(); 2].map(|()| fixture.copies.drop_idle()), [0, LEN as u64]);
    assert_eq!(fixture.drive.used(), before);
}
