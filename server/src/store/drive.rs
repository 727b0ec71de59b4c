//! A data dir: the unnamed files in it, and how much of its share of the capacity is reserved.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dayfly_meta::limits::{DRIVES_MAX, HEADROOM_MAX, HEADROOM_SHARE, left_for_catalogs};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::statvfs::statvfs;

#[cfg(test)]
use super::write_back::Kernel;
use super::write_back::WriteBack;
use crate::blocking::assert_may_wait;

/// A drive failed. The message names the data dir and what the user can do.
#[derive(Debug, thiserror::Error)]
enum DriveError {
    #[error("cannot use the data dir '{}': {source}; {}", path.display(), advice(source))]
    Use { path: PathBuf, source: io::Error },
    #[error(
        "the drive of the data dir '{}' has lost what was written to it: {source}; check the kernel log (dmesg), make room on the \
         drive, or use another one with --data-dir",
        path.display()
    )]
    Lost { path: PathBuf, source: io::Error },
}

/// Returns what the user can do about the error of a drive.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "make room there (`dayfly tune --cache off` drops cached blocks of other nodes), or use another drive with --data-dir"
        }
        io::ErrorKind::NotFound => {
            "the folder was removed, so create it again (`umask 077; mkdir -p`), or use another drive with --data-dir"
        }
        _ => match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::EMFILE) => "raise the server's limit of open files (`ulimit -n`) before you start the session",
            Some(Errno::ENFILE) => "raise the machine's limit of open files (`sysctl fs.file-max`)",
            _ => "check the drive and the kernel log (dmesg), or use another drive with --data-dir",
        },
    }
}

/// What a server may use of file systems on which other programs make room after its start. A server that takes the place of a lost
/// one has one: it starts in the middle of the session, when other programs may have filled the drives for a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// The part, in millionths, of the bytes that are free or used by the server itself.
    pub millionths: u64,
    /// The most bytes in all data dirs together.
    pub most_bytes: u64,
}

/// A data dir with a share of the node's capacity.
pub(crate) struct Drive {
    path: PathBuf,
    write_back: Arc<dyn WriteBack>,
    /// Identifies the file system, because two data dirs may share one.
    device: u64,
    /// The share of the node's capacity that the drive was given.
    share: AtomicU64,
    /// How the share may grow, as far as this drive is concerned.
    growth: Option<Growth>,
    /// The current capacity, which is less than the share if the file system has been full.
    capacity: AtomicU64,
    /// Bytes that are reserved.
    used: AtomicU64,
    /// Bytes that segments must leave free on the file system, for the catalog and the runs of a stage-in.
    protected_headroom: AtomicU64,
}

impl Drive {
    /// Opens the data dirs. The shares of `capacity` never grow.
    #[cfg(test)]
    pub(crate) fn open_all(paths: &[PathBuf], capacity: u64) -> io::Result<Vec<Arc<Self>>> {
        Self::open_all_with(paths, capacity, &(Arc::new(Kernel) as Arc<dyn WriteBack>))
    }

    /// Like [`Self::open_all`], with another implementation of the write-back calls.
    #[cfg(test)]
    pub(crate) fn open_all_with(paths: &[PathBuf], capacity: u64, write_back: &Arc<dyn WriteBack>) -> io::Result<Vec<Arc<Self>>> {
        Self::open_growing(paths, capacity, None, write_back)
    }

    /// Opens the data dirs and divides `capacity` among them in proportion to the free room of their file systems.
    pub(super) fn open_growing(
        paths: &[PathBuf],
        capacity: u64,
        growth: Option<Growth>,
        write_back: &Arc<dyn WriteBack>,
    ) -> io::Result<Vec<Arc<Self>>> {
        if paths.is_empty() || paths.len() > DRIVES_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("a server needs 1 to {DRIVES_MAX} data dirs, not {}", paths.len()),
            ));
        }
        let free = paths.iter().map(|path| free_bytes(path)).collect::<io::Result<Vec<u64>>>()?;
        let total: u128 = free.iter().map(|&free| u128::from(free)).sum();
        let share = |free: u64| (u128::from(capacity) * u128::from(free)).checked_div(total).map_or(0, |share| share as u64);
        let devices = paths.iter().map(|path| Ok(std::fs::metadata(path)?.dev())).collect::<io::Result<Vec<u64>>>()?;
        let drive = |((path, free), &device): ((&PathBuf, u64), &u64)| {
            // Data dirs on one file system share its space.
            let neighbors = devices.iter().filter(|&&other| other == device).count() as u64;
            let growth = growth
                .map(|all| Growth { millionths: all.millionths / neighbors, most_bytes: all.most_bytes / paths.len() as u64 });
            // The share is never more than the file system has free, even if the user asks for more.
            let share = share(free).min(free);
            Ok(Arc::new(Self {
                path: path.clone(),
                write_back: write_back.clone(),
                device,
                share: AtomicU64::new(share),
                growth,
                capacity: AtomicU64::new(share),
                used: AtomicU64::new(0),
                protected_headroom: AtomicU64::new(0),
            }))
        };
        paths.iter().zip(free).zip(&devices).map(drive).collect()
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn write_back(&self) -> &Arc<dyn WriteBack> {
        &self.write_back
    }

    /// Waits until all bytes of a file are on the drive.
    pub(super) fn sync(&self, file: &File) -> io::Result<()> {
        self.write_back.sync(file).map_err(|error| self.loss_error(error))
    }

    /// Adds the data dir's name, and what the user can do, to the error of a call on a file there. An error that already names
    /// the data dir stays as it is.
    pub(crate) fn failure(&self, error: io::Error) -> io::Error {
        if error.get_ref().is_some_and(|inner| inner.is::<DriveError>()) {
            return error;
        }
        io::Error::new(error.kind(), DriveError::Use { path: self.path.clone(), source: error })
    }

    /// Creates a file without a name in the data dir. Its room is freed when its last descriptor is closed.
    pub(crate) fn unnamed_file(&self) -> io::Result<File> {
        assert_may_wait();
        unnamed_file(&self.path).map_err(|error| self.failure(error))
    }

    /// Logs the error of a sync, and adds the data dir's name to it. Such an error means that the kernel accepted bytes that
    /// did not reach the drive.
    pub(super) fn loss_error(&self, error: io::Error) -> io::Error {
        tracing::warn!(data_dir = %self.path.display(), %error, "a drive has lost what was written to it");
        io::Error::new(error.kind(), DriveError::Lost { path: self.path.clone(), source: error })
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

    fn share(&self) -> u64 {
        self.share.load(Ordering::Relaxed)
    }

    /// Returns the part of our capacity that would be free if other programs had left it free.
    pub(super) fn free_but_for_others(&self) -> u64 {
        assert_may_wait();
        let size = statvfs(&self.path).map_or(0, |stat| stat.blocks() * stat.fragment_size());
        self.share().max(self.grown(size)).saturating_sub(self.used())
    }

    /// Returns the share that the drive may have if so many bytes are free on it or used by this server; 0 if it cannot grow.
    fn grown(&self, bytes: u64) -> u64 {
        let part = |growth: Growth| (u128::from(bytes) * u128::from(growth.millionths) / 1_000_000) as u64;
        self.growth.map_or(0, |growth| part(growth).min(growth.most_bytes))
    }

    /// Looks for room that other programs have made since the drive was full, or since this server started.
    pub(super) fn look_for_room(&self) {
        let grown = self.grown(self.free_on_file_system().saturating_add(self.used()));
        let is_all = self.growth.is_some_and(|growth| grown == growth.most_bytes);
        // Smaller changes are left to others. Otherwise the share would creep while room is reserved, but not written yet.
        if grown / 2 >= self.share() || is_all && grown > self.share() {
            self.share.store(grown, Ordering::Relaxed);
        }
        self.set_not_full();
    }

    pub(super) fn device(&self) -> u64 {
        self.device
    }

    /// Returns the bytes that any program may still write to the file system, or the free part of our capacity if the file system
    /// does not report them.
    pub(super) fn free_on_file_system(&self) -> u64 {
        assert_may_wait();
        free_bytes(&self.path).unwrap_or_else(|_| self.free())
    }

    /// A stage-in needs headroom for its catalog and runs: `bytes`, or the usual headroom if that
    /// is more. Returns how many of these bytes the file system lacks.
    pub(super) fn headroom_missing(&self, bytes: u64) -> u64 {
        self.headroom().max(bytes).saturating_sub(self.free_on_file_system())
    }

    /// Makes segments leave the headroom free, or lets them use it.
    pub(super) fn protect_headroom(&self, is_protected: bool) {
        self.protected_headroom.store(if is_protected { self.headroom() } else { 0 }, Ordering::Relaxed);
    }

    /// Returns the bytes that segments must leave free now.
    pub(super) fn protected_headroom(&self) -> u64 {
        self.protected_headroom.load(Ordering::Relaxed)
    }

    /// Returns the part of the capacity that blocks must leave free now, for catalogs.
    pub(super) fn left_for_catalogs(&self) -> u64 {
        if self.protected_headroom() == 0 { 0 } else { left_for_catalogs(self.share()) }
    }

    fn headroom(&self) -> u64 {
        (self.share() / HEADROOM_SHARE).min(HEADROOM_MAX)
    }

    /// Reserves room; `None` if there is not enough.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: u64) -> Option<Reservation> {
        let mut reservation = Reservation { drive: self.clone(), bytes: 0 };
        reservation.grow(bytes).then_some(reservation)
    }

    /// Records that the file system is full although our capacity is not: nothing more is reserved until room is freed, or is looked
    /// for again.
    pub(crate) fn set_full(&self) {
        self.capacity.store(self.used(), Ordering::Relaxed);
    }

    /// Records that room was freed, or that it is worth looking for it again.
    pub(crate) fn set_not_full(&self) {
        self.capacity.store(self.share(), Ordering::Relaxed);
    }
}

/// Room promised on a drive. Dropping the reservation frees the room.
pub(crate) struct Reservation {
    drive: Arc<Drive>,
    bytes: u64,
}

impl Reservation {
    /// Creates a reservation of 0 bytes.
    pub(crate) fn empty(drive: &Arc<Drive>) -> Self {
        Self { drive: drive.clone(), bytes: 0 }
    }

    /// Reserves more room. If there is not enough, reserves nothing and returns `false`.
    pub(crate) fn grow(&mut self, bytes: u64) -> bool {
        self.grow_leaving(bytes, 0)
    }

    /// Like [`Self::grow`], but leaves `left` bytes of the drive's capacity free.
    pub(super) fn grow_leaving(&mut self, bytes: u64, left: u64) -> bool {
        let capacity = self.drive.capacity().saturating_sub(left);
        let fits = |used: u64| used.checked_add(bytes).filter(|&used| used <= capacity);
        let taken = self.drive.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok();
        self.bytes += if taken { bytes } else { 0 };
        taken
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Frees what exceeds `bytes`.
    pub(crate) fn shrink_to(&mut self, bytes: u64) {
        self.shrink(self.bytes.saturating_sub(bytes));
    }

    /// Frees `bytes` of the room, or all of it if there is less.
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

/// Creates a file without a name. Its room is freed when its last descriptor is closed.
fn unnamed_file(folder: &Path) -> io::Result<File> {
    let open =
        |flags: OFlag, path: &Path| OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(flags.bits()).open(path);
    match open(OFlag::O_TMPFILE, folder) {
        // Not every file system supports unnamed files. On those, the file has a name for a moment.
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

/// Returns a second, read-only descriptor of a file.
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
    fn an_error_says_what_the_user_can_do() {
        let message = |errno: Errno| {
            let source = io::Error::from_raw_os_error(errno as i32);
            DriveError::Use { path: "/scratch".into(), source }.to_string()
        };
        for (errno, remedy) in
            [(Errno::EMFILE, "`ulimit -n`"), (Errno::ENFILE, "fs.file-max"), (Errno::ENOSPC, "make room"), (Errno::EIO, "dmesg")]
        {
            assert!(message(errno).contains(remedy), "{}", message(errno));
        }
        assert!(!message(Errno::EMFILE).contains("drive"), "{}", message(Errno::EMFILE));
    }

    #[test]
    fn a_share_grows_if_others_make_much_room_and_never_creeps() {
        let folder = tempfile::tempdir().unwrap();
        let paths = [folder.path().to_owned()];
        let open = |capacity: u64, growth: Option<Growth>| {
            let drives = Drive::open_growing(&paths, capacity, growth, &(Arc::new(Kernel) as Arc<dyn WriteBack>)).unwrap();
            drives.into_iter().next().unwrap()
        };
        let fixed = open(1000, None);
        fixed.look_for_room();
        assert_eq!((fixed.capacity(), fixed.free_but_for_others()), (1000, 1000));
        let growing = open(1000, Some(Growth { millionths: 900_000, most_bytes: 50_000 }));
        let _reserved = growing.reserve(400).unwrap();
        assert_eq!((growing.capacity(), growing.free_but_for_others()), (1000, 49_600));
        growing.set_full();
        assert_eq!(growing.capacity(), 400);
        growing.look_for_room();
        assert_eq!((growing.capacity(), growing.free_but_for_others()), (50_000, 49_600));
        let whole = open(1000, Some(Growth { millionths: 900_000, most_bytes: 1900 }));
        whole.look_for_room();
        assert_eq!(whole.capacity(), 1900, "all that it may ever have");
        let most = free_bytes(folder.path()).unwrap() / 10 * 6;
        let large = open(most, Some(Growth { millionths: 900_000, most_bytes: u64::MAX }));
        large.look_for_room();
        assert_eq!(large.capacity(), most, "less than twice as much");
    }

    #[test]
    fn dropped_reservations_free_their_room() {
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
    fn the_error_for_a_removed_data_dir_says_to_create_it_again() {
        let folder = tempfile::tempdir().unwrap();
        let drives = Drive::open_all(&[folder.path().to_owned()], 1000).unwrap();
        std::fs::remove_dir(folder.path()).unwrap();
        let message = drives[0].unnamed_file().unwrap_err().to_string();
        assert!(message.contains("No such file") && message.contains("create it again"), "{message}");
        std::fs::create_dir(folder.path()).unwrap();
        drives[0].unnamed_file().unwrap();
    }

    #[test]
    fn an_unnamed_file_leaves_its_folder_empty_and_its_reader_cannot_write() {
        let folder = tempfile::tempdir().unwrap();
        let file = unnamed_file(folder.path()).unwrap();
        file.set_len(100).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let reader = read_only(&file).unwrap();
        assert!(reader.set_len(0).is_err() && reader.metadata().unwrap().len() == 100);
    }
}
