//! Blocks of a dataset that does not fit, which are not stored. Such a block is read for its checksums only, and perhaps kept in
//! memory until others need its place. Whoever wants it later gets it from its origin, by way of its owner.

use std::io::{self, Read};

use dayfly_meta::catalog::{NOT_STORED, StoredBlock};
use dayfly_meta::checksum::checksum;
use dayfly_meta::limits::CHUNK_LEN;
use dayfly_meta::placement::NodeSet;

use super::{Sink, Worker};
use crate::StageInError;

impl<S: Sink> Worker<S> {
    /// Returns whether a block belongs to those that are stored as long as nodes have room.
    pub(super) fn is_to_be_stored(&self, index: usize, part: u32) -> bool {
        let Some(share) = self.stored_share.filter(|_| self.can_be_read_again(index)) else { return true };
        share.selects(self.seed, self.group(&self.members[index].path), part)
    }

    /// Returns whether a member's blocks can be read again from their origin.
    pub(super) fn can_be_read_again(&self, index: usize) -> bool {
        self.stored_share.is_some() && self.is_in_source(index)
    }

    /// Reads a block for its checksums, and marks it as not stored. A block of one chunk may be kept in memory.
    pub(super) fn read_unstored(
        &mut self,
        index: usize,
        part: u32,
        block_len: u64,
        data: &mut dyn Read,
        read_error: &dyn Fn(io::Error) -> StageInError,
    ) -> Result<(), StageInError> {
        if block_len <= CHUNK_LEN {
            let mut found = 0;
            let kept = self.sink.keep(block_len, &mut |space| {
                data.read_exact(space).map_err(read_error)?;
                found = checksum(space);
                Ok(())
            })?;
            if let Some(kept) = kept {
                self.add_checksum(index, found);
                self.set_block(index, part, kept);
                return Ok(());
            }
        }
        let mut left = block_len;
        while left > 0 {
            let len = left.min(CHUNK_LEN);
            let checksum = self.read_for_checksum(len as usize, data, read_error)?;
            self.add_checksum(index, checksum);
            left -= len;
        }
        self.mark_unstored(index, part);
        Ok(())
    }

    /// Marks a block that no node had room for as not stored. Its bytes may be kept in memory.
    pub(super) fn keep_or_leave(&mut self, index: usize, part: u32, bytes: &[u8]) -> Result<(), StageInError> {
        let kept = self.sink.keep(bytes.len() as u64, &mut |space| {
            space.copy_from_slice(bytes);
            Ok(())
        });
        match kept? {
            Some(kept) => self.set_block(index, part, kept),
            None => self.mark_unstored(index, part),
        }
        Ok(())
    }

    /// Marks a block as not stored. Its owner is its first candidate, whether that node is full or not.
    pub(super) fn mark_unstored(&mut self, index: usize, part: u32) {
        let owner = self.placement.owner(self.group(&self.members[index].path), part, &NodeSet::new());
        // A session has at least one node.
        let Some(owner) = owner else { return };
        self.set_block(index, part, StoredBlock { owner, arrival: NOT_STORED });
    }
}
