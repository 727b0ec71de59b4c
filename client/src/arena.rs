//! The server's arena, mapped read-only: bytes are copied out of leased slots and nowhere else.

use std::fs::File;
use std::io;

use memmap2::{MmapOptions, MmapRaw};

/// A mapped arena.
pub(crate) struct Arena {
    map: MmapRaw,
}

impl Arena {
    pub(crate) fn map(file: &File, len: u64) -> io::Result<Self> {
        if file.metadata()?.len() < len {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the arena is smaller than was said"));
        }
        let map = MmapOptions::new().len(len as usize).map_raw_read_only(file)?;
        Ok(Self { map })
    }

    /// Copies from `offset`; `false`, and nothing copied, where that is not within the arena.
    pub(crate) fn copy_to(&self, offset: u64, buffer: &mut [u8]) -> bool {
        let end = offset.checked_add(buffer.len() as u64);
        if end.is_none_or(|end| end > self.map.len() as u64) {
            return false;
        }
        // SAFETY: the range lies within the mapping, as just checked; the memfd is sealed against shrinking, so no access
        // faults. The server does not write to a slot while we hold its lease, and should it do so all the same, bytes are
        // bytes: no reference to them is ever made, and what is read is checked by whoever asked for that.
        unsafe { std::ptr::copy_nonoverlapping(self.map.as_ptr().add(offset as usize), buffer.as_mut_ptr(), buffer.len()) };
        true
    }
}
