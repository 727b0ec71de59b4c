//! Memory shared between processes: a mapping of a file whose words are read and written atomically.
//!
//! All unsafe code of this crate is here. Plain bytes of an immutable file come as a slice; words that change under
//! their readers come only as atomics, so no `&[u8]` ever covers bytes that another process writes.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{Mmap, MmapMut, MmapOptions, MmapRaw};

/// A read-only mapping of a whole file that nobody changes any more.
///
/// The caller vouches that the file has no name by which a stranger could shorten it, and that its writer is done: Dayfly
/// maps only unlinked files, whose descriptors stay within processes of one user.
pub fn map_immutable(file: &File) -> io::Result<Mmap> {
    // SAFETY: as said above, the file is neither written nor truncated while mapped; its only names are descriptors
    // of this user's Dayfly processes, which never do so.
    unsafe { Mmap::map(file) }
}

/// A writable mapping of a file that only the caller knows.
pub fn map_private_file(file: &File) -> io::Result<MmapMut> {
    // SAFETY: the caller made the file without a name and has given its descriptor to nobody yet, so no one else
    // reads, writes or truncates it while this mapping lives.
    unsafe { MmapMut::map_mut(file) }
}

/// Words in a file shared with other processes.
pub struct SharedWords {
    map: MmapRaw,
    words: usize,
    writable: bool,
}

impl SharedWords {
    /// Maps `words` words of `file` from its start. A file too short for that is refused.
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

    /// The number of words.
    pub fn len(&self) -> usize {
        self.words
    }

    /// Whether there is no word at all.
    pub fn is_empty(&self) -> bool {
        self.words == 0
    }

    /// Reads a word; what was written before the `store` of its value is visible after. Out of range reads 0.
    pub fn load(&self, index: usize) -> u64 {
        self.word(index).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Writes a word. Ignored where the mapping is read-only or the index out of range.
    pub fn store(&self, index: usize, value: u64) {
        if let Some(word) = self.writable_word(index) {
            word.store(value, Ordering::Release);
        }
    }

    /// Adds to a counter. Ignored where the mapping is read-only or the index out of range.
    pub fn add(&self, index: usize, value: u64) {
        if let Some(word) = self.writable_word(index) {
            word.fetch_add(value, Ordering::Relaxed);
        }
    }

    fn writable_word(&self, index: usize) -> Option<&AtomicU64> {
        if self.writable { self.word(index) } else { None }
    }

    fn word(&self, index: usize) -> Option<&AtomicU64> {
        if index >= self.words {
            return None;
        }
        // SAFETY: the mapping holds `words` words (checked when mapped), lives as long as `self`, and starts on a page,
        // so the pointer is in bounds and aligned. All processes access these words only atomically; on a read-only
        // mapping only loads are made (`store` and `add` check `writable`), which are plain loads for 64-bit words.
        Some(unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().cast::<u64>().add(index)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_seen_by_other_mappings_and_bounds_hold() {
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
    }
}
