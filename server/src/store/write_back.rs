//! Gets written bytes onto the drive, and remembers what the drive lost.
//!
//! A write reaches only the page cache. If the kernel later fails to write a page to the drive, it reports the error once per
//! open file, to the next caller that syncs, and may then drop the page: a later read finds zeros. Therefore a file is synced
//! before anyone relies on it, an error is remembered for as long as the file exists, and repeating a failed sync proves
//! nothing.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use dayfly_meta::limits::UNSYNCED_LEN_MAX;
use nix::errno::Errno;
use nix::libc;

/// The system calls that bring written bytes onto a drive. Tests replace them.
pub(crate) trait WriteBack: Send + Sync {
    /// Starts to write a range to the drive, without waiting.
    fn start(&self, file: &File, range: &Range<u64>) -> io::Result<()>;

    /// Waits until a range has been written to the drive.
    fn wait(&self, file: &File, range: &Range<u64>) -> io::Result<()>;

    /// Waits until all of a file is on the drive, with the metadata that is needed to find it.
    fn sync(&self, file: &File) -> io::Result<()>;
}

/// The kernel's calls.
pub(crate) struct Kernel;

impl Kernel {
    fn sync_range(file: &File, range: &Range<u64>, flags: libc::c_uint) -> io::Result<()> {
        let (start, len) = (range.start as libc::off64_t, (range.end - range.start) as libc::off64_t);
        // SAFETY: the call takes numbers only, and the descriptor is open for as long as `file` is borrowed.
        let synced = Errno::result(unsafe { libc::sync_file_range(file.as_raw_fd(), start, len, flags) });
        match synced {
            // If the file system does not support the call, only `sync` brings the bytes onto the drive.
            Ok(_) | Err(Errno::ENOSYS | Errno::EOPNOTSUPP | Errno::ESPIPE) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

impl WriteBack for Kernel {
    fn start(&self, file: &File, range: &Range<u64>) -> io::Result<()> {
        Self::sync_range(file, range, libc::SYNC_FILE_RANGE_WRITE)
    }

    fn wait(&self, file: &File, range: &Range<u64>) -> io::Result<()> {
        let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        Self::sync_range(file, range, flags)
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_data()
    }
}

/// The written ranges of one file that may not be on the drive yet.
pub(super) struct Unsynced {
    write_back: Arc<dyn WriteBack>,
    ranges: Mutex<Ranges>,
    /// The `errno` of the first error, or 0.
    failure: AtomicI32,
}

/// Ranges whose write-back has been started, oldest first.
#[derive(Default)]
struct Ranges {
    started: VecDeque<Range<u64>>,
    /// Their total length.
    bytes: u64,
}

impl Unsynced {
    pub(super) fn new(write_back: Arc<dyn WriteBack>) -> Self {
        Self { write_back, ranges: Mutex::default(), failure: AtomicI32::new(0) }
    }

    /// Starts to bring a written range onto the drive. Every error is remembered, because the kernel reports it only once.
    pub(super) fn start(&self, file: &File, range: &Range<u64>) -> io::Result<()> {
        self.note(self.write_back.start(file, range))
    }

    /// Like [`Self::start`]; then waits for older ranges while more than [`UNSYNCED_LEN_MAX`] bytes are in flight. This bounds
    /// how long the final sync takes.
    pub(super) fn start_and_bound(&self, file: &File, range: Range<u64>) -> io::Result<()> {
        self.start(file, &range)?;
        let mut ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        ranges.bytes += range.end - range.start;
        ranges.started.push_back(range);
        let mut oldest = Vec::new();
        while ranges.bytes > UNSYNCED_LEN_MAX
            && let Some(range) = ranges.started.pop_front()
        {
            ranges.bytes -= range.end - range.start;
            oldest.push(range);
        }
        drop(ranges);
        oldest.iter().try_for_each(|range| self.note(self.write_back.wait(file, range)))
    }

    /// Waits until everything written so far is on the drive. After one failure, every later call fails too.
    pub(super) fn sync(&self, file: &File) -> io::Result<()> {
        self.check()?;
        self.note(self.write_back.sync(file))?;
        // The kernel may have reported an error to another thread in place of this sync.
        self.check()
    }

    /// Returns whether any call has failed. If so, everything written since the last successful sync may be lost.
    pub(super) fn has_failed(&self) -> bool {
        self.check().is_err()
    }

    fn check(&self) -> io::Result<()> {
        match self.failure.load(Ordering::Acquire) {
            0 => Ok(()),
            number => Err(io::Error::from_raw_os_error(number)),
        }
    }

    fn note(&self, result: io::Result<()>) -> io::Result<()> {
        if let Err(error) = &result {
            let number = error.raw_os_error().unwrap_or(libc::EIO);
            // The first error is the cause of later ones.
            let _ = self.failure.compare_exchange(0, number, Ordering::AcqRel, Ordering::Acquire);
        }
        result
    }
}

/// A drive whose calls fail when a test asks for it.
#[cfg(test)]
pub(crate) mod failing {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU64};

    /// Determines which of the next calls fail, and counts the bytes whose write-back was started but not waited for.
    #[derive(Default)]
    pub(crate) struct Failing {
        pub(crate) start: AtomicBool,
        pub(crate) wait: AtomicBool,
        pub(crate) sync: AtomicBool,
        pub(crate) syncs: AtomicU64,
        pub(crate) outstanding: AtomicU64,
        pub(crate) most_outstanding: AtomicU64,
    }

    impl Failing {
        /// Reports each error once, like the kernel.
        fn result(failing: &AtomicBool) -> io::Result<()> {
            if failing.swap(false, Ordering::Relaxed) { Err(io::Error::from_raw_os_error(libc::EIO)) } else { Ok(()) }
        }
    }

    impl WriteBack for Failing {
        fn start(&self, _: &File, range: &Range<u64>) -> io::Result<()> {
            let bytes = self.outstanding.fetch_add(range.end - range.start, Ordering::Relaxed) + range.end - range.start;
            self.most_outstanding.fetch_max(bytes, Ordering::Relaxed);
            Self::result(&self.start)
        }

        fn wait(&self, _: &File, range: &Range<u64>) -> io::Result<()> {
            self.outstanding.fetch_sub(range.end - range.start, Ordering::Relaxed);
            Self::result(&self.wait)
        }

        fn sync(&self, _: &File) -> io::Result<()> {
            self.syncs.fetch_add(1, Ordering::Relaxed);
            Self::result(&self.sync)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::failing::Failing;
    use super::*;

    /// SEMANTICS: "A failed sync is not retried, because a second sync would succeed and prove nothing."
    #[test]
    fn after_one_failed_call_every_later_sync_fails() {
        let file = tempfile::tempfile().unwrap();
        for call in 0..3 {
            let drive = Arc::new(Failing::default());
            let unsynced = Unsynced::new(drive.clone());
            assert!(unsynced.start_and_bound(&file, 0..4096).is_ok() && unsynced.sync(&file).is_ok());
            let failing = [&drive.start, &drive.wait, &drive.sync][call];
            failing.store(true, Ordering::Relaxed);
            // The oldest range is waited for only when too many bytes are in flight.
            let written = unsynced.start_and_bound(&file, 4096..4096 + UNSYNCED_LEN_MAX + 1);
            assert_eq!(written.is_err(), call < 2);
            assert_eq!(unsynced.sync(&file).unwrap_err().raw_os_error(), Some(libc::EIO));
            assert_eq!(
                unsynced.sync(&file).unwrap_err().raw_os_error(),
                Some(libc::EIO),
                "the kernel reports an error only once, so we remember it"
            );
            assert!(unsynced.has_failed());
        }
    }

    #[test]
    fn bytes_in_flight_to_the_drive_are_bounded() {
        let file = tempfile::tempfile().unwrap();
        let drive = Arc::new(Failing::default());
        let unsynced = Unsynced::new(drive.clone());
        let step = UNSYNCED_LEN_MAX / 8;
        for number in 0..100 {
            unsynced.start_and_bound(&file, number * step..(number + 1) * step).unwrap();
        }
        assert!(drive.most_outstanding.load(Ordering::Relaxed) <= UNSYNCED_LEN_MAX + step);
    }
}
