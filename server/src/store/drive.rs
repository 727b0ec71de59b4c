//! A data dir: nameless files in it, and how much of it is taken.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dayfly_meta::limits::{DRIVES_MAX, HEADROOM_MAX, HEADROOM_SHARE};
use nix::fcntl::OFlag;
use nix::sys::statvfs::statvfs;

use super::write_back::{Kernel, WriteBack};

/// A drive did not do what was asked of it.
#[derive(Debug, thiserror::Error)]
enum DriveError {
    #[error(
        "cannot write to the data dir '{}': {error}; make room there (`dayfly tune --cache off` gives up copies of other \
         nodes' blocks), or name another drive with --data-dir",
        path.display()
    )]
    Write { path: PathBuf, error: io::Error },
    #[error(
        "the drive of the data dir '{}' has lost what was written to it: {error}; look into the kernel's log (dmesg), make room on \
         the drive, or name another one with --data-dir",
        path.display()
    )]
    Lost { path: PathBuf, error: io::Error },
}

/// A data dir with a share of the node's capacity.
pub(crate) struct Drive {
    path: PathBuf,
    write_back: Arc<dyn WriteBack>,
    /// Of its file system: two data dirs may share one.
    device: u64,
    /// What it was given, and what it has at present: less after the file system was full.
    given: u64,
    capacity: AtomicU64,
    used: AtomicU64,
    /// What segments leave free on the file system, for what else a stage-in writes there.
    spared: AtomicU64,
}

impl Drive {
    /// Parts `capacity` among the data dirs by the room that is free there.
    pub(crate) fn open_all(paths: &[PathBuf], capacity: u64) -> io::Result<Vec<Arc<Self>>> {
        Self::open_all_with(paths, capacity, &(Arc::new(Kernel) as Arc<dyn WriteBack>))
    }

    /// As [`Self::open_all`], with calls of the caller's own.
    pub(crate) fn open_all_with(paths: &[PathBuf], capacity: u64, write_back: &Arc<dyn WriteBack>) -> io::Result<Vec<Arc<Self>>> {
        if paths.is_empty() || paths.len() > DRIVES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("1 to {DRIVES_MAX} data dirs are needed")));
        }
        let free = paths.iter().map(|path| free_bytes(path)).collect::<io::Result<Vec<u64>>>()?;
        let total: u128 = free.iter().map(|&free| u128::from(free)).sum();
        let share = |free: u64| (u128::from(capacity) * u128::from(free)).checked_div(total).map_or(0, |share| share as u64);
        let drive = |(path, free): (&PathBuf, u64)| {
            let device = std::fs::metadata(path)?.dev();
            // No more than there is, whatever the user says.
            let given = share(free).min(free);
            let (path, write_back, capacity) = (path.clone(), write_back.clone(), AtomicU64::new(given));
            Ok(Arc::new(Self { path, write_back, device, given, capacity, used: AtomicU64::new(0), spared: AtomicU64::new(0) }))
        };
        paths.iter().zip(free).map(drive).collect()
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn write_back(&self) -> &Arc<dyn WriteBack> {
        &self.write_back
    }

    /// Waits until the drive has all of one of its files.
    pub(super) fn sync(&self, file: &File) -> io::Result<()> {
        self.write_back.sync(file).map_err(|error| self.loss_error(error))
    }

    /// Names the drive in the error of a write.
    pub(crate) fn write_error(&self, error: io::Error) -> io::Error {
        io::Error::new(error.kind(), DriveError::Write { path: self.path.clone(), error })
    }

    /// Names the drive in the error of a sync: the kernel had taken the bytes, and the drive has not.
    pub(super) fn loss_error(&self, error: io::Error) -> io::Error {
        io::Error::new(error.kind(), DriveError::Lost { path: self.path.clone(), error })
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed)
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn free(&self) -> u64 {
        self.capacity().saturating_sub(self.used())
    }

    pub(super) fn device(&self) -> u64 {
        self.device
    }

    /// What anyone may still write there; what we may, where the file system does not tell.
    pub(super) fn free_on_file_system(&self) -> u64 {
        free_bytes(&self.path).unwrap_or_else(|_| self.free())
    }

    /// How much its file system lacks of the room for what a stage-in writes beside blocks: `bytes`, and at least what is always
    /// left for that.
    pub(super) fn headroom_missing(&self, bytes: u64) -> u64 {
        self.headroom().max(bytes).saturating_sub(self.free_on_file_system())
    }

    /// From now on segments leave that room free, or do not.
    pub(super) fn protect_headroom(&self, is_spared: bool) {
        self.spared.store(if is_spared { self.headroom() } else { 0 }, Ordering::Relaxed);
    }

    /// What segments leave free.
    pub(super) fn spared(&self) -> u64 {
        self.spared.load(Ordering::Relaxed)
    }

    fn headroom(&self) -> u64 {
        (self.given / HEADROOM_SHARE).min(HEADROOM_MAX)
    }

    /// Takes room, if it is there.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: u64) -> Option<Reservation> {
        let mut reservation = Reservation { drive: self.clone(), bytes: 0 };
        reservation.grow(bytes).then_some(reservation)
    }

    /// The file system was full before our capacity was: take no more until something is given back.
    pub(crate) fn set_full(&self) {
        self.capacity.store(self.used(), Ordering::Relaxed);
    }

    /// Something was given back.
    pub(crate) fn set_not_full(&self) {
        self.capacity.store(self.given, Ordering::Relaxed);
    }
}

/// Room taken on a drive; dropping it gives it back.
pub(crate) struct Reservation {
    drive: Arc<Drive>,
    bytes: u64,
}

impl Reservation {
    /// Of nothing yet.
    pub(crate) fn empty(drive: &Arc<Drive>) -> Self {
        Self { drive: drive.clone(), bytes: 0 }
    }

    /// Takes more room; `false`, and nothing taken, if it is not there.
    pub(crate) fn grow(&mut self, bytes: u64) -> bool {
        let capacity = self.drive.capacity();
        let fits = |used: u64| used.checked_add(bytes).filter(|&used| used <= capacity);
        let taken = self.drive.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok();
        self.bytes += if taken { bytes } else { 0 };
        taken
    }
}

impl Reservation {
    /// How much it is.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Gives back what is more than `bytes`.
    pub(crate) fn shrink_to(&mut self, bytes: u64) {
        self.shrink(self.bytes.saturating_sub(bytes));
    }

    /// Gives some of it back.
    pub(crate) fn shrink(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.drive.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.drive.used.fetch_sub(self.bytes, Ordering::Relaxed);
        self.drive.set_not_full();
    }
}

/// A file that no path leads to: when its last descriptor is closed, its room is free.
pub(crate) fn unnamed_file(folder: &Path) -> io::Result<File> {
    let open =
        |flags: OFlag, path: &Path| OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(flags.bits()).open(path);
    match open(OFlag::O_TMPFILE, folder) {
        // Not every file system can; then it has a name for a moment.
        Err(error) if matches!(error.raw_os_error(), Some(nix::libc::EOPNOTSUPP | nix::libc::EISDIR | nix::libc::ENOENT)) => {
            static NUMBER: AtomicU64 = AtomicU64::new(0);
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let path = folder.join(format!(".dayfly-{}-{number}", std::process::id()));
            let file = open(OFlag::O_CREAT | OFlag::O_EXCL, &path)?;
            std::fs::remove_file(&path)?;
            Ok(file)
        }
        other => other,
    }
}

/// A second descriptor of a file, by which it cannot be written.
pub(crate) fn read_only(file: &File) -> io::Result<File> {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn free_bytes(path: &Path) -> io::Result<u64> {
    let stat =
        statvfs(path).map_err(|error| io::Error::other(format!("cannot use the data dir '{}': {error}", path.display())))?;
    Ok(stat.blocks_available() * stat.fragment_size())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_taken_and_given_back() {
        let folder = tempfile::tempdir().unwrap();
        let drives = Drive::open_all(&[folder.path().to_owned()], 1000).unwrap();
        let first = drives[0].reserve(700).unwrap();
        assert!(drives[0].reserve(301).is_none());
        drop(drives[0].reserve(300).unwrap());
        assert_eq!((drives[0].used(), drives[0].free()), (700, 300));
        drop(first);
        assert_eq!(drives[0].used(), 0);
        assert!(Drive::open_all(&[], 1000).is_err());
        assert!(Drive::open_all(&["/nowhere".into()], 1000).is_err());
    }

    #[test]
    fn a_nameless_file_leaves_its_folder_empty() {
        let folder = tempfile::tempdir().unwrap();
        let file = unnamed_file(folder.path()).unwrap();
        file.set_len(100).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let reader = read_only(&file).unwrap();
        assert!(reader.set_len(0).is_err() && reader.metadata().unwrap().len() == 100);
    }
}
