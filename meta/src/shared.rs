//! Memory shared between processes: mappings of files whose words are read and written atomically.
//!
//! All unsafe code of this crate is in this file. An immutable file is mapped as a slice of plain
//! bytes. Words that change while others read them are available only as atomics, so no `&[u8]`
//! ever covers bytes that another process writes.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use memmap2::{Mmap, MmapMut, MmapOptions, MmapRaw};

/// Maps a whole file for reading. Nobody may change the file anymore.
///
/// The caller guarantees that the file has no name through which anyone else could open and
/// truncate it, and that its writer is done. Dayfly maps only unlinked files, whose descriptors
/// stay within processes of one user.
///
/// # Errors
///
/// If the kernel refuses the mapping.
pub fn map_immutable(file: &File) -> io::Result<Mmap> {
    // SAFETY: the file is neither written nor truncated while it is mapped. It has no name, and the
    // Dayfly processes of this user, which hold its descriptors, never write or truncate it.
    unsafe { Mmap::map(file) }
}

/// Maps, for writing, a file that nobody but the caller can access.
///
/// # Errors
///
/// If the kernel refuses the mapping.
pub fn map_private_file(file: &File) -> io::Result<MmapMut> {
    // SAFETY: the caller created the file without a name and has passed its descriptor to nobody
    // yet, so nobody else reads, writes or truncates it while this mapping lives.
    unsafe { MmapMut::map_mut(file) }
}

/// Prefetches a value into the processor's cache. Several such fetches wait for memory
/// together instead of one after another.
pub fn prefetch<T>(soon: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint and never faults; the pointer comes from a live reference.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(std::ptr::from_ref(soon).cast());
    }
}

/// 64-bit words in a file that is shared with other processes.
pub struct SharedWords {
    map: MmapRaw,
    words: usize,
    writable: bool,
}

impl SharedWords {
    /// Maps the first `words` words of `file`.
    ///
    /// # Errors
    ///
    /// If the file is shorter than that, or the kernel refuses the mapping.
    pub fn map(file: &File, words: usize, writable: bool) -> io::Result<Self> {
        let len = words.checked_mul(8).ok_or(io::ErrorKind::InvalidInput)?;
        if file.metadata()?.len() < len as u64 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the shared file is shorter than its table"));
        }
        let mut options = MmapOptions::new();
        options.len(len);
        let map = if writable { options.map_raw(file)? } else { options.map_raw_read_only(file)? };
        Ok(Self { map, words, writable })
    }

    /// Returns the number of words.
    pub fn len(&self) -> usize {
        self.words
    }

    /// Returns whether there are no words.
    pub fn is_empty(&self) -> bool {
        self.words == 0
    }

    /// Reads a word. Writes that came before the `store` of the returned value are visible
    /// afterward. Returns 0 if the index is out of range.
    pub fn load(&self, index: usize) -> u64 {
        self.word(index).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Writes a word. Does nothing if the mapping is read-only or the index is out of range.
    pub fn store(&self, index: usize, value: u64) {
        if let Some(word) = self.writable_word(index) {
            word.store(value, Ordering::Release);
        }
    }

    /// Adds to a counter. Does nothing if the mapping is read-only or the index is out of range.
    pub fn add(&self, index: usize, value: u64) {
        if let Some(word) = self.writable_word(index) {
            word.fetch_add(value, Ordering::Relaxed);
        }
    }

    /// Replaces a word's value with `to` if the value is `from`. Returns whether it was replaced.
    pub fn replace(&self, index: usize, from: u64, to: u64) -> bool {
        let exchange = |word: &AtomicU64| word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok();
        self.writable_word(index).is_some_and(exchange)
    }

    /// Prefetches a word into the processor's cache.
    pub fn prefetch(&self, index: usize) {
        if let Some(word) = self.word(index) {
            prefetch(word);
        }
    }

    fn writable_word(&self, index: usize) -> Option<&AtomicU64> {
        if self.writable { self.word(index) } else { None }
    }

    fn word(&self, index: usize) -> Option<&AtomicU64> {
        if index >= self.words {
            return None;
        }
        // SAFETY: the mapping holds `words` words (checked in `map`), lives as long as `self`, and
        // starts on a page, so the pointer is in bounds and aligned. All processes access these
        // words only atomically. On a read-only mapping only loads are made, because the writing
        // functions check `writable`; for 64-bit words these are plain loads.
        Some(unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().cast::<u64>().add(index)) })
    }
}

/// One-byte counters in a file that is shared with other processes. An increment may be lost, but a
/// counter never holds a value that nobody stored.
pub struct SharedMarks {
    map: MmapRaw,
}

impl SharedMarks {
    /// Maps the first `len` marks of `file`, for reading and writing.
    ///
    /// # Errors
    ///
    /// If the file is shorter than that, or the kernel refuses the mapping.
    pub fn map(file: &File, len: usize) -> io::Result<Self> {
        if file.metadata()?.len() < len as u64 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the shared file is shorter than its marks"));
        }
        Ok(Self { map: MmapOptions::new().len(len).map_raw(file)? })
    }

    /// Adds one to a mark, up to 255. If two processes do so at once, one increment may be lost.
    pub fn add(&self, index: usize) {
        if let Some(mark) = self.mark(index) {
            mark.store(mark.load(Ordering::Relaxed).saturating_add(1), Ordering::Relaxed);
        }
    }

    /// Returns the value of a mark; 0 if the index is out of range.
    pub fn get(&self, index: usize) -> u8 {
        self.mark(index).map_or(0, |mark| mark.load(Ordering::Relaxed))
    }

    /// Sets a mark.
    pub fn set(&self, index: usize, value: u8) {
        if let Some(mark) = self.mark(index) {
            mark.store(value, Ordering::Relaxed);
        }
    }

    fn mark(&self, index: usize) -> Option<&AtomicU8> {
        if index >= self.map.len() {
            return None;
        }
        // SAFETY: the index is in bounds of the mapping (checked above), which lives as long as
        // `self`. A byte needs no alignment, and all processes access it only atomically.
        Some(unsafe { AtomicU8::from_ptr(self.map.as_mut_ptr().add(index)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_shared_between_mappings_and_bounds_are_checked() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(64).unwrap();
        let writer = SharedWords::map(&file, 8, true).unwrap();
        let reader = SharedWords::map(&file, 8, false).unwrap();
        writer.store(7, 41);
        writer.add(7, 1);
        writer.store(8, 9);
        reader.store(7, 0);
        assert_eq!((reader.load(7), reader.load(8)), (42, 0));
        assert!(SharedWords::map(&file, 9, false).is_err());
        assert!(!writer.replace(7, 1, 2) && writer.replace(7, 42, 43) && !reader.replace(7, 43, 1));
        assert_eq!(reader.load(7), 43);
    }

    #[test]
    fn marks_stop_counting_at_255() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8).unwrap();
        let (one, other) = (SharedMarks::map(&file, 8).unwrap(), SharedMarks::map(&file, 8).unwrap());
        (0..300).for_each(|_| one.add(7));
        one.add(8);
        assert_eq!((other.get(7), other.get(6), other.get(8)), (255, 0, 0));
        other.set(7, 1);
        assert_eq!(one.get(7), 1);
        assert!(SharedMarks::map(&file, 9).is_err());
    }
}
