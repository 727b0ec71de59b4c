//! Maps the server's arena read-only. A client copies bytes from the arena or reads leased bytes in
//! place, and marks the chunks that it read.

use std::fs::File;
use std::io;

use dayfly_meta::limits::ARENA_UNIT;
use dayfly_meta::shared::SharedMarks;
use memmap2::{MmapOptions, MmapRaw};

/// A mapped arena and its marks.
pub(crate) struct Arena {
    map: MmapRaw,
    marks: SharedMarks,
}

impl Arena {
    pub(crate) fn map(file: &File, marks: &File, len: u64) -> io::Result<Self> {
        if file.metadata()?.len() < len {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the arena is smaller than the server said"));
        }
        let map = MmapOptions::new().len(len as usize).map_raw_read_only(file)?;
        Ok(Self { map, marks: SharedMarks::map(marks, (len / ARENA_UNIT) as usize)? })
    }

    /// Copies from `offset`. Returns `false`, with nothing copied, if the range is not within the
    /// arena.
    pub(crate) fn copy_to(&self, offset: u64, buffer: &mut [u8]) -> bool {
        if !self.has(offset, buffer.len() as u64) {
            return false;
        }
        // SAFETY: the range lies within the mapping (checked above), and the memfd is sealed
        // against shrinking, so no access faults. While we hold the lease of a slot the server does
        // not write to it. Without a lease, the caller checks after the copy that the block is
        // still there. No reference to the bytes is made here.
        unsafe { std::ptr::copy_nonoverlapping(self.map.as_ptr().add(offset as usize), buffer.as_mut_ptr(), buffer.len()) };
        true
    }

    /// Returns the bytes of a leased chunk; `None` if the range is not within the arena.
    pub(crate) fn leased(&self, offset: u64, len: u64) -> Option<&[u8]> {
        // SAFETY: the range lies within the mapping, which lives as long as `self` and never
        // faults, as above. While the caller holds the lease the server writes nothing there, and
        // only the server maps the arena writable. Before callers trust what they saw, they check
        // that the lease still held after they looked.
        self.has(offset, len).then(|| unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(offset as usize), len as usize) })
    }

    /// Records that the chunk at `offset` was read.
    pub(crate) fn mark(&self, offset: u64) {
        self.marks.add((offset / ARENA_UNIT) as usize);
    }

    pub(crate) fn len(&self) -> u64 {
        self.map.len() as u64
    }

    fn has(&self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.map.len() as u64)
    }
}
