//! Maps a segment window by window as it is read. A copy from mapped memory takes a quarter of the
//! time of a `pread`. Mapping is only an optimization: a range that cannot be mapped, or that this
//! process has not read before, is read with `pread`.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use dayfly_meta::limits::{PAGE_BLOCK_SIZE_MIN, PAGE_SIZE, SEGMENT_MAP_BYTES_MAX, SEGMENT_WINDOW_LEN};
use memmap2::{MmapOptions, MmapRaw};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::libc;

use crate::cancellation;
use crate::fault;
use crate::reserved_fd::ReservedFd;

/// Length of a granule. The first read of each granule of a segment uses `pread`. Cold bytes then
/// arrive through the kernel's read-ahead. Page faults would wait for them one after another.
const GRANULE_LEN: u64 = PAGE_BLOCK_SIZE_MIN;
/// The maximum number of bytes to prefetch. The processor cannot wait for more cache lines at once,
/// and fetches the bytes that follow by itself.
const PREFETCH_LEN: u64 = 1024;
const GRANULES: usize = (SEGMENT_WINDOW_LEN / GRANULE_LEN) as usize;

/// Number of bytes that this process has mapped, over all segments.
static MAPPED_BYTES: AtomicU64 = AtomicU64::new(0);

/// The windows of one segment. A null pointer stands for a window that is not mapped yet.
pub(crate) struct SegmentMap {
    windows: Box<[AtomicPtr<Window>]>,
}

struct Window {
    /// Comes first, because it must be dropped before the mapping.
    mapped: fault::Mapped,
    map: MmapRaw,
    /// One bit for each granule, set when the granule is first read.
    touched: [AtomicU64; GRANULES / 64],
}

/// The result of a copy.
pub(crate) enum Copied {
    /// All bytes were copied.
    Yes,
    /// The range is not mapped or was not read before, or this thread blocks SIGBUS: use `pread`.
    No,
    /// The copy met memory without bytes, either in the segment, because the file system failed or the segment was discarded, or in
    /// the program's buffer.
    Fault(fault::Fault),
}

impl SegmentMap {
    /// Creates the windows of a segment. There are none if SIGBUS is not handled.
    pub(crate) fn new(segment: &File) -> Self {
        let len = segment.metadata().map_or(0, |metadata| metadata.len());
        let windows = if fault::is_available() { len.div_ceil(SEGMENT_WINDOW_LEN) } else { 0 };
        Self { windows: (0..windows).map(|_| AtomicPtr::new(null_mut())).collect() }
    }

    /// Copies a range of the segment that lies in one block.
    pub(crate) fn copy(&self, segment: &ReservedFd, offset: u64, buffer: &mut [u8]) -> Copied {
        let within = offset % SEGMENT_WINDOW_LEN;
        if within + buffer.len() as u64 > SEGMENT_WINDOW_LEN || buffer.is_empty() {
            return Copied::No;
        }
        let Some(window) = self.window(segment, offset) else { return Copied::No };
        if !window.touch(within, buffer.len() as u64) || fault::is_blocked_here() {
            return Copied::No;
        }
        let copied = fault::copy(window.map.as_ptr().wrapping_add(within as usize), buffer);
        match copied {
            Err(fault) => Copied::Fault(fault),
            // A page may have been replaced by zeros in the meantime. `pread` asks the kernel for
            // the real bytes.
            Ok(()) if window.mapped.is_poisoned() => Copied::No,
            Ok(()) => Copied::Yes,
        }
    }

    /// Returns the bytes of a range in place, if the range lies in one window that is not poisoned.
    /// If the segment is discarded later, or the drive fails, these bytes turn into zeros.
    pub(crate) fn view(&self, segment: &ReservedFd, offset: u64, len: u64) -> Option<&[u8]> {
        let within = offset % SEGMENT_WINDOW_LEN;
        if within + len > SEGMENT_WINDOW_LEN || len == 0 || fault::is_blocked_here() {
            return None;
        }
        let window = self.window(segment, offset).filter(|window| !window.mapped.is_poisoned())?;
        window.touch(within, len);
        // SAFETY: the range lies within the window, which lives as long as `self`. The bytes of a
        // block do not change while the block is where it was found. If the file is cut short, the
        // handler of SIGBUS puts zeros in place of its pages, and the holder of the view checks
        // whether pages were zeroed or the dataset is gone before it trusts what it read.
        Some(unsafe { std::slice::from_raw_parts(window.map.as_ptr().add(within as usize), len as usize) })
    }

    /// Returns whether the first page of a range is in memory.
    pub(crate) fn is_resident(&self, segment: &ReservedFd, offset: u64, len: u64) -> bool {
        if len == 0 {
            return false;
        }
        let Some(window) = self.window(segment, offset) else { return is_readable_at_once(segment, offset) };
        let page = (offset % SEGMENT_WINDOW_LEN) / PAGE_SIZE * PAGE_SIZE;
        let mut resident = 0_u8;
        let start = window.map.as_mut_ptr().wrapping_add(page as usize);
        // SAFETY: one page of a live mapping, and one byte for the result. The page is not
        // accessed.
        let asked = unsafe { libc::mincore(start.cast(), PAGE_SIZE as usize, &raw mut resident) };
        asked == 0 && resident & 1 != 0
    }

    /// Makes the processor fetch the start of a range that will be copied, if the range is mapped.
    pub(crate) fn prefetch(&self, offset: u64, len: u64) {
        let Some(window) = self.mapped(offset) else { return };
        let start = window.map.as_ptr().wrapping_add((offset % SEGMENT_WINDOW_LEN) as usize);
        fault::prefetch(start, len.min(PREFETCH_LEN));
    }

    /// Returns the window that contains an offset, if it is mapped.
    fn mapped(&self, offset: u64) -> Option<&Window> {
        let mapped = self.windows.get((offset / SEGMENT_WINDOW_LEN) as usize)?.load(Ordering::Acquire);
        // SAFETY: the pointer was made by `Box::into_raw` in `map`, and is freed only with the
        // segment map.
        (!mapped.is_null()).then(|| unsafe { &*mapped })
    }

    fn window(&self, segment: &ReservedFd, offset: u64) -> Option<&Window> {
        let slot = self.windows.get((offset / SEGMENT_WINDOW_LEN) as usize)?;
        let mapped = slot.load(Ordering::Acquire);
        let mapped = if mapped.is_null() { Self::map(slot, segment, offset - offset % SEGMENT_WINDOW_LEN)? } else { mapped };
        // SAFETY: the pointer was made by `Box::into_raw` in `map`, and is freed only with the
        // segment map.
        Some(unsafe { &*mapped })
    }

    #[cold]
    fn map(slot: &AtomicPtr<Window>, segment: &ReservedFd, start: u64) -> Option<*mut Window> {
        let _deferral = cancellation::uninterrupted();
        let segment = segment.get().ok()?;
        if MAPPED_BYTES.fetch_add(SEGMENT_WINDOW_LEN, Ordering::Relaxed) + SEGMENT_WINDOW_LEN > SEGMENT_MAP_BYTES_MAX {
            MAPPED_BYTES.fetch_sub(SEGMENT_WINDOW_LEN, Ordering::Relaxed);
            return None;
        }
        let map = MmapOptions::new().offset(start).len(SEGMENT_WINDOW_LEN as usize).map_raw_read_only(segment.as_raw_fd());
        let Ok(map) = map else {
            MAPPED_BYTES.fetch_sub(SEGMENT_WINDOW_LEN, Ordering::Relaxed);
            return None;
        };
        let Some(mapped) = fault::Mapped::register(map.as_ptr(), SEGMENT_WINDOW_LEN as usize) else {
            MAPPED_BYTES.fetch_sub(SEGMENT_WINDOW_LEN, Ordering::Relaxed);
            return None;
        };
        let touched = [const { AtomicU64::new(0) }; GRANULES / 64];
        let window = Box::into_raw(Box::new(Window { mapped, map, touched }));
        match slot.compare_exchange(null_mut(), window, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Some(window),
            Err(other) => {
                // SAFETY: another thread was faster. The pointer was made by `Box::into_raw` just
                // above, and was not published.
                drop(unsafe { Box::from_raw(window) });
                Some(other)
            }
        }
    }
}

/// Returns whether a byte of a segment can be read without waiting for the drive.
fn is_readable_at_once(segment: &ReservedFd, offset: u64) -> bool {
    let _deferral = cancellation::uninterrupted();
    let Ok(segment) = segment.get() else { return false };
    let mut byte = 0_u8;
    let part = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // SAFETY: one part, which has room for one byte.
    unsafe { libc::preadv2(segment.as_raw_fd(), &raw const part, 1, offset as i64, libc::RWF_NOWAIT) == 1 }
}

/// Makes the drive begin to read a range that is not in memory, without waiting for it.
pub(crate) fn read_ahead(segment: &File, offset: u64, len: u64) {
    // This is a hint. Without it, the reads that follow wait one after another.
    let _ = posix_fadvise(segment, offset as i64, len as i64, PosixFadviseAdvice::POSIX_FADV_WILLNEED);
}

impl Window {
    /// Records that a range is being read, and returns whether all of it was read before.
    fn touch(&self, within: u64, len: u64) -> bool {
        let granules = within / GRANULE_LEN..=(within + len - 1) / GRANULE_LEN;
        let mut known = true;
        for granule in granules {
            let (word, bit) = (&self.touched[granule as usize / 64], 1 << (granule % 64));
            if word.load(Ordering::Relaxed) & bit == 0 {
                word.fetch_or(bit, Ordering::Relaxed);
                known = false;
            }
        }
        known
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        MAPPED_BYTES.fetch_sub(SEGMENT_WINDOW_LEN, Ordering::Relaxed);
    }
}

impl Drop for SegmentMap {
    fn drop(&mut self) {
        for slot in &mut self.windows {
            let window = *slot.get_mut();
            if !window.is_null() {
                // SAFETY: the pointer was made by `Box::into_raw` in `map`; nothing else can reach
                // it anymore.
                drop(unsafe { Box::from_raw(window) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    /// SEMANTICS: "If a drive fails while a view shows bytes on it, the 64 MiB window of the segment around the failure is read
    /// by pread from then on, so that no later reader mistakes the view's zeros for data."
    #[test]
    fn a_window_with_a_missing_page_is_never_lent_again() {
        let _alone = crate::reserved_fd::tests::alone();
        fault::install(libc::sigaction).unwrap();
        let file = tempfile::tempfile().unwrap();
        let content = vec![7; 3 * PAGE_SIZE as usize];
        file.set_len(SEGMENT_WINDOW_LEN + PAGE_SIZE).unwrap();
        file.write_all_at(&content, 0).unwrap();
        file.write_all_at(&content[..PAGE_SIZE as usize], SEGMENT_WINDOW_LEN).unwrap();
        let map = SegmentMap::new(&file);
        let reserved = ReservedFd::new(file.try_clone().unwrap());
        let len = content.len() as u64;
        assert_eq!(map.view(&reserved, 0, len).unwrap(), content);
        let other = map.view(&reserved, SEGMENT_WINDOW_LEN, PAGE_SIZE).unwrap();
        assert_eq!(other[0], 7);
        // The drive fails for a moment. A reader sees zeros in the meantime, and can notice it.
        let before = fault::zeroed();
        file.set_len(PAGE_SIZE).unwrap();
        let view = map.view(&reserved, 0, len).unwrap();
        assert_eq!(view[PAGE_SIZE as usize], 0);
        assert!(fault::zeroed() > before);
        file.set_len(SEGMENT_WINDOW_LEN + PAGE_SIZE).unwrap();
        file.write_all_at(&content, 0).unwrap();
        file.write_all_at(&content[..PAGE_SIZE as usize], SEGMENT_WINDOW_LEN).unwrap();
        // From then on, the zeros are still mapped, but no thread is shown them.
        assert_eq!(view[PAGE_SIZE as usize], 0, "the zeros are still mapped");
        let mut buffer = vec![0; content.len()];
        std::thread::scope(|scope| {
            let looked = scope
                .spawn(|| (map.view(&reserved, 0, len).is_none(), matches!(map.copy(&reserved, 0, &mut buffer), Copied::No)));
            assert_eq!(looked.join().unwrap(), (true, true), "the next reader must not get the zeros");
        });
        assert_eq!(map.view(&reserved, SEGMENT_WINDOW_LEN, PAGE_SIZE).unwrap()[0], 7, "other windows are not affected");
    }
}
