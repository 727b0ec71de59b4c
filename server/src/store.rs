//! What this node stores: its drives and its visible datasets. Each dataset has a catalog, a locations table and segments. All
//! of these are unnamed files or anonymous memory, so nothing is left behind when the server ends, even when it is killed.
//!
//! # Parts
//!
//! - [`Store`]: the node's drives and visible datasets, and the memory that it shares with all processes of the node.
//! - [`drive`]: a data dir, its share of the node's capacity, and reservations of that share.
//! - [`segment`]: the files in which a dataset packs its blocks, one on each drive.
//! - [`dataset`]: one dataset: its catalog, and which of its blocks are on this node.
//! - [`cached_blocks`]: which blocks a dataset caches here, and how they are written, published and evicted.
//! - [`taken_over`]: which blocks this node holds in place of lost owners.
//! - [`copies`]: which nodes hold copies of a block, and the copies on this node.
//! - [`in_use`]: whether processes use a file without a name.
//! - [`shared_copies`]: copies of blocks and samples that processes map, read as standard input, or run.
//! - [`windows`]: sorts blocks in bounded memory.
//! - [`write_back`]: brings written bytes onto the drive, and remembers what the drive lost.
//! - [`pages`]: a bitmap of used pages, for giving unused ones back to the file system.
//!
//! # Invariants
//!
//! - A block's location on a drive is published only after a sync has covered the block's bytes, and is withdrawn before the
//!   block's room is reused or freed. A reader checks the location after it has copied, so it never accepts bytes of another
//!   block.
//! - Room is reserved before it is written, so a stage-in learns that a drive is full before it takes a batch.
//! - Cached blocks lie after all blocks that the node owns. An offset at which a cached block lay is never used again.
//! - After one write-back call on a file has failed, that file is never trusted again: a later sync that succeeds proves
//!   nothing.
//!
//! The store does not talk to other nodes, and does not decide how much is cached or when copies are evicted (`room` does). Its
//! calls may wait for a drive, so they must not run on a runtime thread unless they only read memory.

mod cached_blocks;
mod copies;
mod dataset;
mod drive;
mod in_use;
mod pages;
mod segment;
mod shared_copies;
mod taken_over;
#[cfg(test)]
pub(crate) mod testing;
mod windows;
pub(crate) mod write_back;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use dayfly_meta::id::DatasetId;
use dayfly_meta::path::{display, is_below, join};
use dayfly_meta::status_page::{self, Counters, StatusPage};
use dayfly_meta::wire::control::Counts;
use dayfly_meta::wire::local::Original;
use dayfly_meta::wire::peer::ListedDataset;
use dayfly_meta::wire::status::FileSystemRoom;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use xxhash_rust::xxh3::xxh3_64_with_seed;

pub(crate) use cached_blocks::{CacheShares, lowered_threshold};
pub(crate) use dataset::{ChunkInfo, Dataset, NewDataset, PrepareError};
pub use drive::Growth;
pub(crate) use drive::{Drive, Reservation, read_only};
pub(crate) use segment::{Segments, room_for};
use shared_copies::SharedCopies;
pub(crate) use shared_copies::{Filling, Share, ShareError};
pub(crate) use windows::{BlockPosition, Window, WindowSelection};
use write_back::{Kernel, WriteBack};

/// Creates memory to be shared with processes. It is sealed, so that no process can shrink it and make the server fault.
pub(crate) fn shared_file(name: &str, len: u64) -> io::Result<File> {
    let file = File::from(memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?);
    file.set_len(len)?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(file)
}

/// Why a dataset cannot be created at a path.
pub(crate) enum Conflict {
    /// Another dataset is at the path.
    Taken,
    /// Another dataset is above or below the path; this is its path.
    Overlap(Vec<u8>),
}

impl Conflict {
    /// Returns the message for the user, with paths below the namespace's `prefix`.
    pub(crate) fn message(&self, prefix: &[u8]) -> String {
        match self {
            Self::Taken => "a dataset is there already; use --replace to replace it".to_owned(),
            Self::Overlap(other) => format!("it would overlap with the dataset at '{}'", display(&join(prefix, other))),
        }
    }
}

/// The node's drives and its visible datasets.
pub(crate) struct Store {
    drives: Vec<Arc<Drive>>,
    datasets: RwLock<BTreeMap<DatasetId, Arc<Dataset>>>,
    status_page: Arc<StatusPage>,
    counters: Arc<Counters>,
    status_page_file: File,
    counters_file: File,
    shared_copies: Arc<SharedCopies>,
}

impl Store {
    /// Opens the data dirs. `capacity` applies to all of them together, and is divided among them in proportion to their free
    /// room.
    pub(crate) fn open(data_dirs: &[PathBuf], capacity: u64, growth: Option<Growth>) -> io::Result<Self> {
        let status_page_file = shared_file("dayfly-status-page", status_page::FILE_LEN)?;
        let counters_file = shared_file("dayfly-counters", status_page::COUNTERS_LEN)?;
        Ok(Self {
            drives: Drive::open_growing(data_dirs, capacity, growth, &(Arc::new(Kernel) as Arc<dyn WriteBack>))?,
            datasets: RwLock::default(),
            status_page: Arc::new(StatusPage::map(&status_page_file, true)?),
            counters: Arc::new(Counters::map(&counters_file)?),
            status_page_file: read_only(&status_page_file)?,
            counters_file,
            shared_copies: Arc::default(),
        })
    }

    pub(crate) fn drives(&self) -> &[Arc<Drive>] {
        &self.drives
    }

    /// Returns the drive with the most room left, for files that are not segments.
    pub(crate) fn roomiest_drive(&self) -> Arc<Drive> {
        // `Drive::open_all` refuses an empty list.
        let roomiest = self.drives.iter().max_by_key(|drive| drive.free().min(drive.free_on_file_system()));
        roomiest.unwrap_or_else(|| unreachable!("a store has at least one drive")).clone()
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.drives.iter().map(|drive| drive.capacity()).sum()
    }

    /// Returns the bytes that a stage-in may still take: the free part of our capacity, or less where other programs have filled
    /// the file systems, plus the room of cached blocks, which can be evicted, without the room of blocks that are kept.
    pub(crate) fn free(&self) -> u64 {
        let free = self.free_by_device().values().map(|&(ours, file_system)| ours.min(file_system)).sum::<u64>();
        (free + self.cached_room()).saturating_sub(room_of(self.kept_bytes()))
    }

    /// Returns the free part of our capacity and the free bytes of each file system. Two data dirs may share one.
    fn free_by_device(&self) -> BTreeMap<u64, (u64, u64)> {
        let mut by_device = BTreeMap::new();
        for drive in &self.drives {
            let free: &mut (u64, u64) = by_device.entry(drive.device()).or_default();
            *free = (free.0 + drive.free(), drive.free_on_file_system());
        }
        by_device
    }

    /// Returns the room on the file systems of the data dirs.
    pub(crate) fn file_systems(&self) -> Vec<FileSystemRoom> {
        // Changes with each start of the machine, and is the same in all of its containers.
        let machine = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let room = |(device, (capacity_bytes, free_bytes)): (u64, (u64, u64))| FileSystemRoom {
            id: xxh3_64_with_seed(&machine, device),
            capacity_bytes,
            free_bytes,
        };
        self.free_by_device().into_iter().map(room).collect()
    }

    /// A stage-in needs headroom for its catalog and runs: `bytes`, or the usual headroom if that is more. Returns how many of
    /// these bytes are missing on the drive that lacks the most.
    pub(crate) fn headroom_missing(&self, bytes: u64) -> u64 {
        self.drives.iter().map(|drive| drive.headroom_missing(bytes)).max().unwrap_or(0)
    }

    /// Makes segments leave the headroom free, or lets them use it. Segments must leave it free as long as cached blocks can be
    /// evicted instead.
    pub(crate) fn protect_headroom(&self, is_protected: bool) {
        self.drives.iter().for_each(|drive| drive.protect_headroom(is_protected));
    }

    /// Returns whether one drive has room for `bytes` of blocks, both in our capacity and in its file system. Blocks leave room for
    /// catalogs.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        let has = |drive: &Arc<Drive>| {
            drive.free() >= bytes.saturating_add(drive.left_for_catalogs())
                && drive.free_on_file_system() >= bytes.saturating_add(drive.protected_headroom())
        };
        self.drives.iter().any(has)
    }

    /// Returns whether all drives together have room for `bytes` of blocks. Several blocks need not fit on one drive.
    pub(crate) fn has_room_for_all(&self, bytes: u64) -> bool {
        let free_on = |drive: &Arc<Drive>| {
            let free = drive.free().saturating_sub(drive.left_for_catalogs());
            free.min(drive.free_on_file_system().saturating_sub(drive.protected_headroom()))
        };
        self.drives.iter().map(free_on).sum::<u64>() >= bytes
    }

    /// Returns what [`Self::free`] would be if other programs had left our capacity on the file systems free.
    pub(crate) fn free_capacity(&self) -> u64 {
        let free = self.drives.iter().map(|drive| drive.free_but_for_others()).sum::<u64>();
        (free + self.cached_room()).saturating_sub(room_of(self.kept_bytes()))
    }

    /// Returns whether our capacity on one drive has room for `bytes` of blocks, whatever other programs have left of its file system.
    pub(crate) fn has_capacity(&self, bytes: u64) -> bool {
        self.drives.iter().any(|drive| drive.free_but_for_others() >= bytes.saturating_add(drive.left_for_catalogs()))
    }

    /// Looks for room that other programs have made on the drives. A drive that is still full is found to be so at the next write.
    pub(crate) fn look_for_room(&self) {
        self.drives.iter().for_each(|drive| drive.look_for_room());
    }

    /// Lets segments use the headroom. Returns whether they had to leave it free
    /// before; if so, a stage-in that found no room should try again.
    pub(crate) fn release_headroom(&self) -> bool {
        let was_protected = self.drives.iter().any(|drive| drive.protected_headroom() > 0);
        self.protect_headroom(false);
        if was_protected {
            self.drives.iter().for_each(|drive| drive.set_not_full());
        }
        was_protected
    }

    /// Returns the bytes of room that cached blocks take, those that are kept included.
    pub(crate) fn cached_room(&self) -> u64 {
        self.datasets().iter().map(|dataset| dataset.segments().cached_room()).sum()
    }

    /// Returns the bytes of room that cached blocks take and can give up.
    pub(crate) fn evictable_room(&self) -> u64 {
        let kept = self.datasets().iter().map(|dataset| dataset.cached_blocks().kept_bytes()).sum();
        self.cached_room().saturating_sub(room_of(kept))
    }

    /// Returns the bytes of the blocks that stay on this node once they have come to it.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.datasets().iter().map(|dataset| dataset.kept_bytes()).sum()
    }

    pub(crate) fn used(&self) -> u64 {
        self.drives.iter().map(|drive| drive.used()).sum()
    }

    pub(crate) fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    pub(crate) fn status_page(&self) -> &Arc<StatusPage> {
        &self.status_page
    }

    /// Returns the files that clients get: the status page, read-only, and the counters, which they write.
    pub(crate) fn shared_files(&self) -> (&File, &File) {
        (&self.status_page_file, &self.counters_file)
    }

    /// Returns a number that changes whenever a dataset becomes visible or invisible.
    pub(crate) fn generation(&self) -> u64 {
        self.status_page.generation()
    }

    pub(crate) fn dataset(&self, id: DatasetId) -> Option<Arc<Dataset>> {
        self.datasets.read().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    /// Returns the dataset at a target.
    pub(crate) fn dataset_at(&self, target: &[u8]) -> Option<Arc<Dataset>> {
        self.datasets().into_iter().find(|dataset| dataset.target() == target)
    }

    pub(crate) fn datasets(&self) -> Vec<Arc<Dataset>> {
        self.datasets.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Returns the dataset that a new one at `target` would replace, if any.
    ///
    /// # Errors
    /// Returns a [`Conflict`] if no dataset may be created at `target`.
    pub(crate) fn conflict(&self, target: &[u8], replace: bool) -> Result<Option<DatasetId>, Conflict> {
        for dataset in self.datasets() {
            let other = dataset.target();
            if other == target {
                return if replace { Ok(Some(dataset.id())) } else { Err(Conflict::Taken) };
            }
            if is_below(target, other) || is_below(other, target) {
                return Err(Conflict::Overlap(other.to_vec()));
            }
        }
        Ok(None)
    }

    /// Returns the visible datasets, as nodes announce them to each other.
    pub(crate) fn listed(&self) -> Vec<ListedDataset> {
        let listed = |dataset: &Arc<Dataset>| ListedDataset {
            dataset: dataset.id(),
            request: dataset.request(),
            target: dataset.target().to_vec(),
            len: dataset.catalog().header().file_len,
            checksum: dataset.catalog_checksum(),
            counts: Counts { notes: Vec::new(), skipped_notes: Vec::new(), ..dataset.counts().clone() },
        };
        self.datasets().iter().map(listed).collect()
    }

    /// Makes a dataset visible. Hides and returns the dataset that it replaces, if any. From then on, clients find the new
    /// dataset. Bytes that they copy out of the old one are not used: such a read fails with `EIO`.
    pub(crate) fn show(&self, dataset: Arc<Dataset>, replaces: Option<DatasetId>) -> Option<Arc<Dataset>> {
        let mut datasets = self.datasets.write().unwrap_or_else(PoisonError::into_inner);
        self.show_in(&mut datasets, dataset, replaces)
    }

    /// Makes a dataset visible in place of the one at its target, if there is one. Hides and returns that one, as [`Self::show`] does.
    ///
    /// # Errors
    /// Changes nothing, and gives the dataset back, if the one at its target `must_stay`.
    pub(crate) fn show_over(
        &self,
        dataset: Arc<Dataset>,
        must_stay: impl Fn(&Dataset) -> bool,
    ) -> Result<Option<Arc<Dataset>>, Arc<Dataset>> {
        let mut datasets = self.datasets.write().unwrap_or_else(PoisonError::into_inner);
        let replaced = match datasets.values().find(|other| other.target() == dataset.target()) {
            Some(other) if must_stay(other) => return Err(dataset),
            other => other.map(|other| other.id()),
        };
        Ok(self.show_in(&mut datasets, dataset, replaced))
    }

    fn show_in(
        &self,
        datasets: &mut BTreeMap<DatasetId, Arc<Dataset>>,
        dataset: Arc<Dataset>,
        replaces: Option<DatasetId>,
    ) -> Option<Arc<Dataset>> {
        let replaced = replaces.and_then(|id| datasets.remove(&id));
        if let Some(replaced) = &replaced {
            replaced.hide();
            self.shared_copies.forget(replaced.id());
        }
        dataset.set_gone(false);
        datasets.insert(dataset.id(), dataset);
        self.status_page.bump_generation();
        replaced
    }

    /// Makes a dataset invisible.
    pub(crate) fn hide(&self, id: DatasetId) {
        let hidden = self.datasets.write().unwrap_or_else(PoisonError::into_inner).remove(&id);
        if let Some(dataset) = hidden {
            dataset.set_gone(true);
            self.shared_copies.forget(id);
            self.status_page.bump_generation();
        }
    }

    /// Returns a copy that all processes of this node share, or begins one. Waits for a drive.
    pub(crate) fn share_copy(&self, dataset: DatasetId, original: Original) -> Result<Share, ShareError> {
        let dataset = self.dataset(dataset).ok_or(ShareError::Unknown)?;
        let share = self.shared_copies.share(&self.roomiest_drive(), &dataset, original)?;
        // The dataset may have been hidden before its copy was recorded.
        if self.dataset(dataset.id()).is_some() { Ok(share) } else { Err(ShareError::Unknown) }
    }

    /// Returns the room of the copies that processes share.
    pub(crate) fn shared_copies_bytes(&self) -> u64 {
        self.shared_copies.bytes()
    }

    /// Returns the room of the shared copies that would make way for a stage-in.
    pub(crate) fn unused_copies_bytes(&self) -> u64 {
        self.shared_copies.unused_bytes()
    }

    /// Drops the shared copies that nobody has used or wanted since the call before the last one. Returns whether there were any.
    pub(crate) fn drop_idle_copies(&self) -> bool {
        self.shared_copies.drop_idle() > 0
    }

    /// Drops the shared copies that no process uses, because their room is needed. Returns the bytes of room that they had.
    pub(crate) fn drop_shared_copies(&self) -> u64 {
        self.shared_copies.make_way()
    }

    /// Frees the room of everything, including files that processes still have open. Returns the bytes freed.
    pub(crate) fn free_all(&self) -> u64 {
        let freed = self.used();
        self.status_page.set_gone();
        let datasets = std::mem::take(&mut *self.datasets.write().unwrap_or_else(PoisonError::into_inner));
        datasets.values().for_each(|dataset| dataset.set_gone(true));
        datasets.values().for_each(|dataset| dataset.free());
        datasets.keys().for_each(|&id| self.shared_copies.forget(id));
        freed
    }
}

/// Returns the room that blocks of this many bytes take at most. Alignment to pages wastes less than what it adds.
fn room_of(bytes: u64) -> u64 {
    bytes + bytes / 64
}
