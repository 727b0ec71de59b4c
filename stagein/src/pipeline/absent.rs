//! Owners that do not answer. Their blocks go to the next candidates from then on. What was on its way to such an owner is lost: if
//! it can be read again from its source, it is left there, and whoever owns it reads it when it is wanted.

use std::io::{self, Read};

use dayfly_meta::catalog::{MemberKind, Place};
use dayfly_meta::checksum::checksum;
use dayfly_meta::id::NodeId;

use super::{Sink, Worker};
use crate::StageInError;

impl<S: Sink> Worker<S> {
    /// Skips an owner that does not answer, and leaves the blocks that were on their way to it in their sources.
    pub(super) fn leave_to_source(
        &mut self,
        node: NodeId,
        blocks: &[(usize, u32)],
        error: StageInError,
    ) -> Result<(), StageInError> {
        self.skip_absent(node);
        if !blocks.iter().all(|&(index, _)| self.is_in_source(index)) {
            return Err(error);
        }
        blocks.iter().for_each(|&(index, part)| self.mark_unstored(index, part));
        Ok(())
    }

    /// Gives the blocks of a node that does not answer to other nodes.
    pub(super) fn skip_absent(&mut self, node: NodeId) {
        self.full.insert(node);
        self.absent.insert(node);
    }

    /// Returns whether a member's bytes can be read from its source without all that comes before them.
    pub(super) fn is_in_source(&self, index: usize) -> bool {
        let is_nested = |place: Place| matches!(place, Place::Nested { .. });
        let is_readable = |kind: &MemberKind| matches!(kind, MemberKind::File { place, .. } if !is_nested(*place));
        self.unit.is_readable_again && self.members.get(index).is_some_and(|member| is_readable(&member.kind))
    }

    /// Reads a piece of a block only for its checksum.
    pub(super) fn read_for_checksum(
        &mut self,
        len: usize,
        data: &mut dyn Read,
        read_error: &dyn Fn(io::Error) -> StageInError,
    ) -> Result<u32, StageInError> {
        if self.unstored.len() < len {
            self.unstored.resize(len, 0);
        }
        let space = &mut self.unstored[..len];
        data.read_exact(space).map_err(read_error)?;
        Ok(checksum(space))
    }
}
