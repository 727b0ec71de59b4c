//! Making drives take what was written, and hearing of what they did not take.
//!
//! A write only reaches the page cache. When the kernel later fails to bring a page to the drive, it reports the error once per open
//! file, to whoever syncs next, and may then drop the page: a later read finds zeros. So a file is synced before anyone relies on it,
//! an error is remembered for as long as the file is, and a sync that is tried again proves nothing.

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

/// The calls by which written bytes get to a drive. Tests put others in their place.
pub(crate) trait WriteBack: Send + Sync {
    /// Starts to write a range out, without waiting for it.
    fn start(&self, file: &File, range: &Range<u64>) -> io::Result<()>;

    /// Waits until a range is written out.
    fn wait(&self, file: &File, range: &Range<u64>) -> io::Result<()>;

    /// Waits until the drive has all of a file, and all that is needed to find it.
    fn sync(&self, file: &File) -> io::Result<()>;
}

/// The kernel's own calls.
pub(crate) struct Kernel;

impl Kernel {
    fn sync_range(file: &File, range: &Range<u64>, flags: libc::c_uint) -> io::Result<()> {
        let (start, len) = (range.start as libc::off64_t, (range.end - range.start) as libc::off64_t);
        // SAFETY: the call takes numbers only, and the descriptor is open for as long as `file` is borrowed.
        let synced = Errno::result(unsafe { libc::sync_file_range(file.as_raw_fd(), start, len, flags) });
        match synced {
            // Where a file system does not know the call, `sync` alone has to do.
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

/// What was written to one file and may not be on the drive yet.
pub(super) struct Unsynced {
    write_back: Arc<dyn WriteBack>,
    ranges: Mutex<Ranges>,
    /// The number of the first error; 0 without one.
    failure: AtomicI32,
}

#[derive(Default)]
struct Ranges {
    started: VecDeque<Range<u64>>,
    bytes: u64,
}

impl Unsynced {
    pub(super) fn new(write_back: Arc<dyn WriteBack>) -> Self {
        Self { write_back, ranges: Mutex::default(), failure: AtomicI32::new(0) }
    }

    /// Starts to write out what was just written. The error of any call counts: the kernel will not report it again.
    pub(super) fn start(&self, file: &File, range: &Range<u64>) -> io::Result<()> {
        self.note(self.write_back.start(file, range))
    }

    /// As [`Self::start`], and waits for older ranges while more than [`UNSYNCED_LEN_MAX`] bytes are on their way: so the last sync
    /// takes no longer than these bytes do.
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

    /// Waits until the drive has all that was written before. Fails for ever after one failure.
    pub(super) fn sync(&self, file: &File) -> io::Result<()> {
        self.check()?;
        self.note(self.write_back.sync(file))?;
        // Another thread may have been told what this sync was then not told.
        self.check()
    }

    /// Whether any call has failed: then what was written since the last good sync may be lost.
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
            // The first one tells the cause.
            let _ = self.failure.compare_exchange(0, number, Ordering::AcqRel, Ordering::Acquire);
        }
        result
    }
}

/// A drive on which each call fails when it is told to.
#[cfg(test)]
pub(crate) mod failing {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU64};

    /// Which calls fail, and how many bytes are started but not waited for.
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
        /// As the kernel: each error is reported once.
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

    #[test]
    fn a_sync_error_is_remembered_and_a_second_sync_is_not_believed() {
        let file = tempfile::tempfile().unwrap();
        for call in 0..3 {
            let drive = Arc::new(Failing::default());
            let unsynced = Unsynced::new(drive.clone());
            assert!(unsynced.start_and_bound(&file, 0..4096).is_ok() && unsynced.sync(&file).is_ok());
            let failing = [&drive.start, &drive.wait, &drive.sync][call];
            failing.store(true, Ordering::Relaxed);
            // The oldest range is waited for only when too much is under way.
            let written = unsynced.start_and_bound(&file, 4096..4096 + UNSYNCED_LEN_MAX + 1);
            assert_eq!(written.is_err(), call < 2);
            assert_eq!(unsynced.sync(&file).unwrap_err().raw_os_error(), Some(libc::EIO));
            assert_eq!(unsynced.sync(&file).unwrap_err().raw_os_error(), Some(libc::EIO), "the kernel reports it once");
            assert!(unsynced.has_failed());
        }
    }

    #[test]
    fn bytes_on_their_way_to_the_drive_are_bounded() {
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
