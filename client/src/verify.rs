//! Verifies the bytes of each chunk against the checksum taken at stage-in. A reader reports
//! a bad copy to the server, and the server checks the copy, too. If the copy is bad, the server
//! drops it and fetches the chunk from the chunk's owner, and the reader gets the fetched bytes.

use dayfly_meta::checksum::{Mismatch, check};
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::BlockId;
use dayfly_meta::limits::RECHECKS_MAX;
use dayfly_meta::path::display;

use crate::{ClientError, Dataset, Session};

impl Session {
    /// Reads a part of a chunk, starting at `offset` in it, after all of the chunk was verified.
    pub(crate) fn read_verified(
        &self,
        dataset: &Dataset,
        chunk: Chunk,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<(), ClientError> {
        let len = chunk_len(dataset, chunk)?;
        if buffer.len() as u64 == len {
            return self.read_chunk(dataset, chunk, buffer);
        }
        let mut whole = vec![0; len as usize];
        self.read_chunk(dataset, chunk, &mut whole)?;
        buffer.copy_from_slice(&whole[offset as usize..offset as usize + buffer.len()]);
        Ok(())
    }

    /// Reads and verifies a whole chunk.
    fn read_chunk(&self, dataset: &Dataset, chunk: Chunk, buffer: &mut [u8]) -> Result<(), ClientError> {
        self.read_part(dataset, chunk.block, chunk.start(), buffer)?;
        if self.verify(dataset, chunk, buffer).is_ok() { Ok(()) } else { self.read_again(dataset, chunk, buffer) }
    }

    /// Reads a chunk again after this node's copy was found bad.
    fn read_again(&self, dataset: &Dataset, chunk: Chunk, buffer: &mut [u8]) -> Result<(), ClientError> {
        let mut verified = Ok(());
        for _ in 0..RECHECKS_MAX {
            if self.read_remote(dataset, chunk.block, chunk.start(), buffer, true)? == 0 {
                // No chunk arrived, so this node has a copy that the server finds good, perhaps a
                // new one.
                self.read_part(dataset, chunk.block, chunk.start(), buffer)?;
            }
            verified = self.verify(dataset, chunk, buffer);
            if verified.is_ok() {
                break;
            }
        }
        verified
    }

    /// Verifies a block chunk by chunk, and reads bad chunks again. Returns whether any was bad.
    pub(crate) fn repair(&self, dataset: &Dataset, block: BlockId, bytes: &mut [u8]) -> Result<bool, ClientError> {
        let mut was_bad = false;
        for chunk in Chunk::all(block, bytes.len() as u64) {
            let end = chunk.start() + chunk.len_in(bytes.len() as u64).unwrap_or(0);
            let bytes = &mut bytes[chunk.start() as usize..end as usize];
            if self.verify(dataset, chunk, bytes).is_err() {
                self.read_again(dataset, chunk, bytes)?;
                was_bad = true;
            }
        }
        Ok(was_bad)
    }

    /// Compares a chunk with the checksum taken at stage-in.
    pub(crate) fn verify(&self, dataset: &Dataset, chunk: Chunk, bytes: &[u8]) -> Result<(), ClientError> {
        let expected = dataset.catalog().chunk_checksum(chunk).ok_or(ClientError::Protocol("an unknown block"))?;
        check(bytes, expected).map_err(|Mismatch { expected, found }| {
            let path = dataset.path_of_block(chunk.block).map_or_else(String::new, |path| display(&path));
            ClientError::Checksum { block: chunk.block.0, path, node: self.node().0, expected, found }
        })
    }
}

fn chunk_len(dataset: &Dataset, chunk: Chunk) -> Result<u64, ClientError> {
    let len = dataset.catalog().block(chunk.block).and_then(|(_, len)| chunk.len_in(len));
    len.ok_or(ClientError::Protocol("an unknown block"))
}

impl Dataset {
    /// Returns a path of the sample that a block belongs to. This searches the whole catalog, so it
    /// is only for error messages.
    fn path_of_block(&self, block: BlockId) -> Option<Vec<u8>> {
        let (sample, _) = self.catalog().block(block)?;
        let entries =
            (0..self.catalog().header().entries).filter_map(|id| self.catalog().entry(dayfly_meta::catalog::EntryId(id)));
        entries.into_iter().find(|entry| entry.sample() == Some(sample)).map(|entry| self.catalog().path(&entry))
    }
}
