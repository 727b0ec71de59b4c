//! Taking what stage-in ships to this node: blocks are packed into the segments, and found again by their keys until the
//! catalog gives them numbers.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use dayfly_meta::catalog::MemberKey;
use dayfly_meta::limits::{BATCH_BLOCKS_MAX, BLOCK_SIZE_MAX};
use dayfly_meta::segment::Place;
use dayfly_meta::wire::peer::ShippedBlock;

use crate::store::Segments;

/// What was shipped here in one stage-in.
pub(crate) struct Ingest {
    segments: Arc<Segments>,
    places: Mutex<HashMap<(MemberKey, u32), Place>>,
}

/// Why a batch cannot be taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum IngestError {
    #[error("the batch's table contradicts its bytes")]
    Malformed,
    #[error("a piece came of a block for which no room was asked")]
    NotReserved,
    #[error("cannot write a segment: {0}")]
    Write(#[from] io::Error),
}

impl Ingest {
    pub(crate) fn new(segments: Arc<Segments>) -> Self {
        Self { segments, places: Mutex::default() }
    }

    pub(crate) fn segments(&self) -> &Arc<Segments> {
        &self.segments
    }

    /// Where a block lies.
    pub(crate) fn find(&self, key: MemberKey, part: u32) -> Option<Place> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner).get(&(key, part)).copied()
    }

    /// Takes room for a block that comes in pieces; `false` if there is none.
    pub(crate) fn reserve(&self, key: MemberKey, part: u32, block_len: u64) -> Result<bool, IngestError> {
        if block_len > BLOCK_SIZE_MAX {
            return Err(IngestError::Malformed);
        }
        let Some(places) = self.segments.allocate(&[block_len]) else { return Ok(false) };
        // Now, while the whole block can still go elsewhere; its pieces cannot.
        for place in &places {
            if !self.segments.fill_room(*place, block_len)? {
                return Ok(false);
            }
        }
        let mut table = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        table.extend(places.into_iter().map(|place| ((key, part), place)));
        Ok(true)
    }

    /// Stores a batch, or nothing of it: `false` if there is no room. Blocks; call it where that does no harm.
    pub(crate) fn store(&self, blocks: &[ShippedBlock], bytes: &[u8]) -> Result<bool, IngestError> {
        let total = blocks.iter().try_fold(0_usize, |total, block| total.checked_add(block.len as usize));
        let is_sound = |block: &ShippedBlock| {
            let end = block.offset.checked_add(u64::from(block.len));
            block.block_len <= BLOCK_SIZE_MAX && end.is_some_and(|end| end <= block.block_len)
        };
        if total != Some(bytes.len()) || blocks.len() > BATCH_BLOCKS_MAX || !blocks.iter().all(is_sound) {
            return Err(IngestError::Malformed);
        }
        match blocks {
            [piece] if u64::from(piece.len) < piece.block_len => self.store_piece(piece, bytes),
            _ if blocks.iter().any(|block| u64::from(block.len) != block.block_len) => Err(IngestError::Malformed),
            _ => self.store_whole(blocks, bytes),
        }
    }

    fn store_piece(&self, piece: &ShippedBlock, bytes: &[u8]) -> Result<bool, IngestError> {
        let place = self.find(piece.key, piece.part).ok_or(IngestError::NotReserved)?;
        match self.segments.write(Place { offset: place.offset + piece.offset, ..place }, bytes)? {
            true => Ok(true),
            // The rest of the block is here, so this piece cannot be anywhere else.
            false => Err(io::Error::from(io::ErrorKind::StorageFull).into()),
        }
    }

    fn store_whole(&self, blocks: &[ShippedBlock], bytes: &[u8]) -> Result<bool, IngestError> {
        let lens: Vec<u64> = blocks.iter().map(|block| block.block_len).collect();
        let Some(places) = self.segments.allocate(&lens) else { return Ok(false) };
        // Blocks that are packed tight go out in one write.
        let mut start = 0;
        while start < blocks.len() {
            let (mut end, mut len) = (start, 0);
            while end < blocks.len() && places[end].offset == places[start].offset + len {
                len += lens[end];
                end += 1;
            }
            let skip: u64 = lens[..start].iter().sum();
            if !self.segments.write(places[start], &bytes[skip as usize..(skip + len) as usize])? {
                return Ok(false);
            }
            start = end;
        }
        let mut table = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        table.extend(blocks.iter().map(|block| (block.key, block.part)).zip(places));
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use dayfly_meta::id::DatasetId;

    use super::*;
    use crate::store::Drive;

    fn ingest(capacity: u64) -> (Ingest, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let drives = Drive::open_all(&[folder.path().to_owned()], capacity).unwrap();
        (Ingest::new(Arc::new(Segments::create(&drives, DatasetId(1)).unwrap())), folder)
    }

    fn block(number: u64, block_len: u64, offset: u64, len: u32) -> ShippedBlock {
        ShippedBlock { key: MemberKey { source: 0, offset: number }, part: 0, block_len, offset, len }
    }

    fn read(ingest: &Ingest, number: u64, len: usize) -> Vec<u8> {
        let place = ingest.find(MemberKey { source: 0, offset: number }, 0).unwrap();
        let mut bytes = vec![0; len];
        ingest.segments.file(place.drive).unwrap().read_exact_at(&mut bytes, place.offset).unwrap();
        bytes
    }

    #[test]
    fn batches_are_stored_whole_and_found() {
        let (ingest, _folder) = ingest(1 << 20);
        let bytes: Vec<u8> = (0..200_030_u32).map(|at| at as u8).collect();
        let blocks = [block(1, 10, 0, 10), block(2, 20, 0, 20), block(3, 200_000, 0, 200_000)];
        assert!(ingest.store(&blocks, &bytes).unwrap());
        assert!(read(&ingest, 2, 20) == bytes[10..30] && read(&ingest, 3, 200_000) == bytes[30..]);
        assert!(ingest.reserve(blocks[0].key, 7, 100).unwrap());
        let piece = ShippedBlock { part: 7, ..block(1, 100, 60, 40) };
        assert!(ingest.store(&[piece], &[9; 40]).unwrap());
    }

    #[test]
    fn malformed_batches_and_full_drives() {
        let (ingest, _folder) = ingest(20_000);
        assert!(matches!(ingest.store(&[block(1, 10, 0, 10)], &[0; 11]), Err(IngestError::Malformed)));
        assert!(matches!(ingest.store(&[block(1, 10, u64::MAX, 10)], &[0; 10]), Err(IngestError::Malformed)));
        assert!(matches!(ingest.store(&[block(1, 20, 0, 10), block(2, 1, 0, 1)], &[0; 11]), Err(IngestError::Malformed)));
        assert!(matches!(ingest.store(&[block(1, 20, 0, 10)], &[0; 10]), Err(IngestError::NotReserved)));
        assert!(matches!(ingest.reserve(block(1, 1, 0, 1).key, 0, BLOCK_SIZE_MAX + 1), Err(IngestError::Malformed)));
        assert!(!ingest.store(&[block(1, 30_000, 0, 30_000)], &[0; 30_000]).unwrap());
        assert!(ingest.store(&[block(1, 10_000, 0, 10_000)], &[0; 10_000]).unwrap());
        assert!(!ingest.reserve(block(2, 1, 0, 1).key, 0, 10_000).unwrap());
    }
}
