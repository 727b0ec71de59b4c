//! What this node holds: datasets, each with its catalog, its locations and its segments, all in nameless files.

mod cached_blocks;
mod dataset;
mod drive;
mod pages;
mod segment;
pub(crate) mod write_back;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use dayfly_meta::id::DatasetId;
use dayfly_meta::path::{display, is_below, join};
use dayfly_meta::status_page::{self, Counters, StatusPage};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

pub(crate) use cached_blocks::{lowered_threshold, threshold_for};
pub(crate) use dataset::{ChunkInfo, Dataset};
pub(crate) use drive::{Drive, Reservation, read_only, unnamed_file};
pub(crate) use segment::{Segments, room_for};

/// Memory to be shared with processes, which cannot make it shorter under our feet.
pub(crate) fn shared_file(name: &str, len: u64) -> io::Result<File> {
    let file = File::from(memfd_create(name, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?);
    file.set_len(len)?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(file)
}

/// Why a dataset cannot be where it is wanted.
pub(crate) enum Conflict {
    /// Another is.
    Taken,
    /// Another is above or below it.
    Overlap(Vec<u8>),
}

impl Conflict {
    /// For the user, who knows paths by the namespace's prefix.
    pub(crate) fn message(&self, prefix: &[u8]) -> String {
        match self {
            Self::Taken => "a dataset is there already; --replace puts the new one in its place".to_owned(),
            Self::Overlap(there) => format!("it would overlap with the dataset at '{}'", display(&join(prefix, there))),
        }
    }
}

/// The node's drives and datasets.
pub(crate) struct Store {
    drives: Vec<Arc<Drive>>,
    datasets: RwLock<BTreeMap<DatasetId, Arc<Dataset>>>,
    status_page: Arc<StatusPage>,
    counters: Arc<Counters>,
    board_file: File,
    counters_file: File,
}

impl Store {
    /// `capacity` is for all data dirs together; it is parted among them by their free room.
    pub(crate) fn open(data_dirs: &[PathBuf], capacity: u64) -> io::Result<Self> {
        let board_file = shared_file("dayfly-status_page", status_page::FILE_LEN)?;
        let counters_file = shared_file("dayfly-counters", status_page::COUNTERS_LEN)?;
        Ok(Self {
            drives: Drive::open_all(data_dirs, capacity)?,
            datasets: RwLock::default(),
            status_page: Arc::new(StatusPage::map(&board_file, true)?),
            counters: Arc::new(Counters::map(&counters_file)?),
            board_file: read_only(&board_file)?,
            counters_file,
        })
    }

    pub(crate) fn drives(&self) -> &[Arc<Drive>] {
        &self.drives
    }

    /// The drive with the most room left, for what is not a segment.
    pub(crate) fn roomiest_drive(&self) -> Arc<Drive> {
        // `Drive::open_all` refuses an empty list.
        let roomiest = self.drives.iter().max_by_key(|drive| drive.free().min(drive.free_on_file_system()));
        roomiest.unwrap_or_else(|| unreachable!("a store has a drive")).clone()
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.drives.iter().map(|drive| drive.capacity()).sum()
    }

    /// What stage-ins may take: our share, or what is left of the drives if others have taken from it. What is only kept makes way.
    pub(crate) fn free(&self) -> u64 {
        let mut ours = BTreeMap::new();
        for drive in &self.drives {
            let free: &mut (u64, u64) = ours.entry(drive.device()).or_default();
            *free = (free.0 + drive.free(), drive.free_on_file_system());
        }
        ours.values().map(|&(ours, all)| ours.min(all)).sum::<u64>() + self.cached_room()
    }

    /// The most that a drive's file system lacks of the room for what a stage-in writes beside blocks.
    pub(crate) fn headroom_missing(&self, bytes: u64) -> u64 {
        self.drives.iter().map(|drive| drive.headroom_missing(bytes)).max().unwrap_or(0)
    }

    /// Whether segments leave that room free. They do while copies can make way for them instead.
    pub(crate) fn protect_headroom(&self, is_spared: bool) {
        self.drives.iter().for_each(|drive| drive.protect_headroom(is_spared));
    }

    /// Whether `bytes` for blocks fit on a drive, by what we may take and by what its file system has.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        let has =
            |drive: &Arc<Drive>| drive.free() >= bytes && drive.free_on_file_system() >= bytes.saturating_add(drive.spared());
        self.drives.iter().any(has)
    }

    /// Whether segments left room free, which they need not from now on.
    pub(crate) fn release_headroom(&self) -> bool {
        let was_spared = self.drives.iter().any(|drive| drive.spared() > 0);
        self.protect_headroom(false);
        if was_spared {
            self.drives.iter().for_each(|drive| drive.set_not_full());
        }
        was_spared
    }

    /// What blocks take that are only kept.
    pub(crate) fn cached_room(&self) -> u64 {
        self.datasets().iter().map(|dataset| dataset.segments().cached_room()).sum()
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

    /// The status page to read, and the counters to write.
    pub(crate) fn shared_files(&self) -> (&File, &File) {
        (&self.board_file, &self.counters_file)
    }

    pub(crate) fn generation(&self) -> u64 {
        self.status_page.generation()
    }

    pub(crate) fn dataset(&self, id: DatasetId) -> Option<Arc<Dataset>> {
        self.datasets.read().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    pub(crate) fn datasets(&self) -> Vec<Arc<Dataset>> {
        self.datasets.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// The dataset that one at `target` would replace, or why none may be there.
    pub(crate) fn conflict(&self, target: &[u8], replace: bool) -> Result<Option<DatasetId>, Conflict> {
        for dataset in self.datasets() {
            let there = dataset.target();
            if there == target {
                return if replace { Ok(Some(dataset.id())) } else { Err(Conflict::Taken) };
            }
            if is_below(target, there) || is_below(there, target) {
                return Err(Conflict::Overlap(there.to_vec()));
            }
        }
        Ok(None)
    }

    /// Shows a dataset in place of another. From here on clients see it; copies out of the other give EIO.
    pub(crate) fn show(&self, dataset: Arc<Dataset>, instead_of: Option<DatasetId>) -> Option<Arc<Dataset>> {
        let mut datasets = self.datasets.write().unwrap_or_else(PoisonError::into_inner);
        let replaced = instead_of.and_then(|id| datasets.remove(&id));
        if let Some(replaced) = &replaced {
            replaced.hide();
        }
        dataset.set_gone(false);
        datasets.insert(dataset.id(), dataset);
        self.status_page.bump_generation();
        replaced
    }

    /// Takes a dataset out of sight.
    pub(crate) fn hide(&self, id: DatasetId) {
        let hidden = self.datasets.write().unwrap_or_else(PoisonError::into_inner).remove(&id);
        if let Some(dataset) = hidden {
            dataset.set_gone(true);
            self.status_page.bump_generation();
        }
    }

    /// Gives everything up, whoever still has it open; returns the bytes freed.
    pub(crate) fn free_all(&self) -> u64 {
        let freed = self.used();
        self.status_page.set_gone();
        let datasets = std::mem::take(&mut *self.datasets.write().unwrap_or_else(PoisonError::into_inner));
        datasets.values().for_each(|dataset| dataset.set_gone(true));
        datasets.values().for_each(|dataset| dataset.free());
        freed
    }
}
