//! A dataset as a client has it: the catalog and this node's locations, mapped, and its segments' descriptors.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use dayfly_meta::catalog::Catalog;
use dayfly_meta::id::{BlockId, DatasetId, SampleId};
use dayfly_meta::locations::Locations;

use crate::ClientError;
use crate::kept::Kept;
use crate::segment_map::{Copied, SegmentMap};

/// A dataset of the session.
pub struct Dataset {
    id: DatasetId,
    target: Vec<u8>,
    catalog: Catalog,
    locations: Locations,
    segments: Vec<(Kept, SegmentMap)>,
}

impl Dataset {
    /// From what the server sent: catalog, locations, segments by drive.
    pub(crate) fn new(id: DatasetId, target: Vec<u8>, files: Vec<File>) -> Result<Self, ClientError> {
        let mut files = files.into_iter();
        let (Some(catalog), Some(locations)) = (files.next(), files.next()) else {
            return Err(ClientError::Protocol("a dataset came without its files"));
        };
        let catalog = Catalog::open(&catalog)?;
        let locations = Locations::open(&locations, catalog.header().blocks)?;
        let with_map = |file: File| {
            let map = SegmentMap::new(&file);
            (Kept::new(file), map)
        };
        Ok(Self { id, target, catalog, locations, segments: files.map(with_map).collect() })
    }

    /// Its number in the session.
    pub fn id(&self) -> DatasetId {
        self.id
    }

    /// Its root, below the prefix.
    pub fn target(&self) -> &[u8] {
        &self.target
    }

    /// Its index.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// Whether this node holds the block.
    pub fn is_here(&self, block: BlockId) -> bool {
        self.locations.find(block).is_some()
    }

    /// Whether its bytes have been given up; what was copied before this is asked may be zeros.
    pub(crate) fn is_gone(&self) -> bool {
        self.locations.is_gone()
    }

    /// Where the bytes of a block lie that this node holds: its segment, and the offset there.
    pub fn place(&self, block: BlockId) -> Option<(&File, u64)> {
        let place = self.locations.find(block)?;
        let (segment, _) = self.segments.get(usize::from(place.drive))?;
        Some((segment, place.offset))
    }

    /// Where a block lies among all that this node holds: by drive, then front to back.
    pub(crate) fn position(&self, block: BlockId) -> Option<u64> {
        self.locations.find(block).map(|place| place.pack())
    }

    /// Says that a sample is about to be read.
    pub(crate) fn prefetch(&self, sample: SampleId) {
        let Some((size, blocks)) = self.catalog.sample(sample) else { return };
        let place = if size > 0 { self.locations.find(BlockId(blocks.start)) } else { None };
        if let Some(place) = place
            && let Some((_, map)) = self.segments.get(usize::from(place.drive))
        {
            map.prefetch(place.offset, size);
        }
    }

    /// Reads from a block that this node holds, at most one system call; `false` where it does not hold it.
    pub(crate) fn read_here(&self, block: BlockId, offset: u64, buffer: &mut [u8]) -> Result<bool, ClientError> {
        let Some(place) = self.locations.find(block) else { return Ok(false) };
        let (segment, map) =
            self.segments.get(usize::from(place.drive)).ok_or(ClientError::Protocol("a place on an unknown drive"))?;
        let offset = place.offset + offset;
        match map.copy(segment, offset, buffer) {
            Copied::Yes => {}
            Copied::No => segment.read_exact_at(buffer, offset).map_err(|error| self.segment_error(error))?,
            Copied::Fault => return Err(self.segment_error(io::Error::from(io::ErrorKind::UnexpectedEof))),
        }
        Ok(true)
    }

    /// A segment that was given up is shorter than it was.
    fn segment_error(&self, error: io::Error) -> ClientError {
        if self.is_gone() { ClientError::Gone } else { ClientError::Segment(error) }
    }
}
