//! A dataset as a client sees it: its mapped catalog, its mapped locations on this node, and the
//! descriptors of its segments.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use dayfly_meta::catalog::Catalog;
use dayfly_meta::id::{BlockId, DatasetId, SampleId};
use dayfly_meta::limits::ARENA_UNIT;
use dayfly_meta::locations::Locations;
use dayfly_meta::segment::{DrivePosition, Location};
use dayfly_meta::wire::status::Source;
use nix::libc;

use crate::ClientError;
use crate::attachment::Attachment;
use crate::cancellation::{self, Deferral};
use crate::fault::Fault;
use crate::reserved_fd::ReservedFd;
use crate::segment_map::{self, Copied, SegmentMap};

/// A dataset of the session.
pub struct Dataset {
    id: DatasetId,
    target: Vec<u8>,
    catalog: Catalog,
    locations: Locations,
    segments: Vec<(ReservedFd, SegmentMap)>,
    /// The server that the files came from.
    attachment: Arc<Attachment>,
    /// Defers cancellation while the fields above are dropped, because dropping them closes descriptors. Must be the last field,
    /// so that it is dropped last.
    while_dropped: Option<Deferral>,
}

impl Drop for Dataset {
    fn drop(&mut self) {
        self.while_dropped = Some(cancellation::uninterrupted());
    }
}

impl Dataset {
    /// Builds a dataset from the files that the server sent: catalog, locations, then segments by
    /// drive.
    pub(crate) fn new(
        id: DatasetId,
        target: Vec<u8>,
        files: Vec<File>,
        attachment: Arc<Attachment>,
    ) -> Result<Self, ClientError> {
        let mut files = files.into_iter();
        let (Some(catalog), Some(locations)) = (files.next(), files.next()) else {
            return Err(ClientError::Protocol("a dataset came without its files"));
        };
        let catalog = Catalog::open(&catalog)?;
        let locations = Locations::open(&locations, catalog.header().blocks)?;
        let with_map = |file: File| {
            let map = SegmentMap::new(&file);
            (ReservedFd::new(file), map)
        };
        Ok(Self { id, target, catalog, locations, segments: files.map(with_map).collect(), attachment, while_dropped: None })
    }

    /// Returns the dataset's number in the session.
    pub fn id(&self) -> DatasetId {
        self.id
    }

    /// Returns the path of the dataset's root, relative to the prefix.
    pub fn target(&self) -> &[u8] {
        &self.target
    }

    /// Returns the dataset's index.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// Returns the attachment to the server from which this process has the dataset.
    pub(crate) fn attachment(&self) -> &Arc<Attachment> {
        &self.attachment
    }

    /// Returns whether this process has the dataset from this server.
    pub(crate) fn is_of(&self, attachment: &Arc<Attachment>) -> bool {
        Arc::ptr_eq(&self.attachment, attachment)
    }

    /// Returns whether the block is on this node's drives, either because the node owns the block or because it cached the block.
    pub fn is_here(&self, block: BlockId) -> bool {
        self.locations.find(block).is_some_and(|location| location.position().is_some())
    }

    /// Returns whether the dataset's bytes have been discarded. Bytes copied before this call
    /// returned `true` may be zeros.
    pub fn is_gone(&self) -> bool {
        self.locations.is_gone()
    }

    /// Returns the segment and the offset of a block that this node owns. Both are valid for as
    /// long as the dataset exists.
    pub fn segment_position(&self, block: BlockId) -> Option<(&ReservedFd, u64)> {
        let Location::Owned(position) = self.locations.find(block)? else { return None };
        let (segment, _) = self.segments.get(usize::from(position.drive))?;
        Some((segment, position.offset))
    }

    /// Restores the descriptors of segments that the program has closed, from the files that the server sent: catalog,
    /// locations, then segments by drive. Returns whether the descriptors of all segments are there now.
    pub(crate) fn restore(&self, files: Vec<File>) -> bool {
        let mut files = files.into_iter().skip(2);
        self.segments.iter().all(|(segment, _)| files.next().is_some_and(|file| segment.restore(file)))
    }

    /// Returns whether the descriptors of all segments are still there.
    pub(crate) fn is_intact(&self) -> bool {
        self.segments.iter().all(|(segment, _)| segment.is_intact())
    }

    /// Returns a number that sorts the blocks on this node's drives by drive, then front to back.
    pub(crate) fn drive_order(&self, block: BlockId) -> Option<u64> {
        self.locations.find(block)?.position().map(|position| Location::Owned(position).pack())
    }

    /// Returns where a block can be read without a message.
    pub(crate) fn find(&self, block: BlockId) -> Option<Location> {
        self.locations.find(block)
    }

    /// Makes the processor fetch the block's location, which will be looked up soon.
    pub(crate) fn prefetch_location(&self, block: BlockId) {
        self.locations.prefetch(block);
    }

    /// Makes the processor fetch the start of a sample that will be read soon, if that part of the segment is mapped.
    pub(crate) fn prefetch(&self, sample: SampleId) {
        let Some((size, blocks)) = self.catalog.sample(sample) else { return };
        if size > 0 {
            self.prefetch_block(BlockId(blocks.start), size);
        }
    }

    /// Makes the processor fetch the start of the first `len` bytes of a block that will be read soon, if that part of the segment
    /// is mapped.
    pub(crate) fn prefetch_block(&self, block: BlockId, len: u64) {
        if let Some(position) = self.locations.find(block).and_then(Location::position)
            && let Some((_, map)) = self.segments.get(usize::from(position.drive))
        {
            map.prefetch(position.offset, len);
        }
    }

    /// Returns bytes of a segment in place, if they can be mapped. For cached blocks the caller
    /// must hold [`crate::attach::Views`]; otherwise the blocks may be evicted.
    pub(crate) fn view(&self, position: DrivePosition, len: u64) -> Option<&[u8]> {
        let (segment, map) = self.segments.get(usize::from(position.drive))?;
        map.view(segment, position.offset, len)
    }

    /// Makes the drive begin to read a range that may not be in memory, without waiting for it.
    pub(crate) fn read_ahead(&self, position: DrivePosition, len: u64) {
        if let Some((segment, _)) = self.segments.get(usize::from(position.drive)) {
            let _deferral = cancellation::uninterrupted();
            // This is only a hint to the kernel, so nothing is lost if the descriptor is missing.
            if let Ok(segment) = segment.get() {
                segment_map::read_ahead(&segment, position.offset, len);
            }
        }
    }

    /// Returns whether the first page of a range of a segment is in memory.
    pub(crate) fn is_resident(&self, position: DrivePosition, len: u64) -> bool {
        let segment = self.segments.get(usize::from(position.drive));
        segment.is_some_and(|(segment, map)| map.is_resident(segment, position.offset, len))
    }

    /// Reads from a block without a message and with at most one system call. Returns `None` if the
    /// block is neither on this node's drives nor in the arena.
    pub(crate) fn read_here(&self, block: BlockId, offset: u64, buffer: &mut [u8]) -> Result<Option<Source>, ClientError> {
        let arena = &self.attachment.arena;
        while let Some(location) = self.locations.find(block) {
            let (result, source) = match location {
                Location::Owned(position) => return self.read_segment(position, offset, buffer).map(|()| Some(Source::Segment)),
                Location::Cached(position) => (self.read_segment(position, offset, buffer), Source::Cached),
                Location::Arena { unit, .. } => {
                    let start = u64::from(unit) * ARENA_UNIT;
                    if !arena.copy_to(start.saturating_add(offset), buffer) {
                        return Err(ClientError::Protocol("a location outside the arena"));
                    }
                    arena.mark(start);
                    (Ok(()), Source::Arena)
                }
            };
            // The block may have been evicted in the meantime, and fetched again to another place.
            if self.locations.is_still(block, location) {
                return result.map(|()| Some(source));
            }
        }
        Ok(None)
    }

    fn read_segment(&self, position: DrivePosition, offset: u64, buffer: &mut [u8]) -> Result<(), ClientError> {
        let (segment, map) =
            self.segments.get(usize::from(position.drive)).ok_or(ClientError::Protocol("a position on an unknown drive"))?;
        let offset = position.offset + offset;
        match map.copy(segment, offset, buffer) {
            Copied::Yes => Ok(()),
            Copied::No => {
                let _deferral = cancellation::uninterrupted();
                let read = segment.get().and_then(|segment| segment.read_exact_at(buffer, offset));
                read.map_err(|error| self.segment_error(error))
            }
            Copied::Fault(Fault::Source) => Err(self.segment_error(io::Error::from(io::ErrorKind::UnexpectedEof))),
            Copied::Fault(Fault::Target) => Err(ClientError::Buffer),
        }
    }

    /// Returns the error for a failed read of a segment. A discarded segment is shorter than it
    /// was, so the failure may mean that the dataset is gone. The kernel may also have found no
    /// memory at the program's buffer.
    fn segment_error(&self, error: io::Error) -> ClientError {
        if error.raw_os_error() == Some(libc::EFAULT) {
            return ClientError::Buffer;
        }
        if self.is_gone() { ClientError::Gone } else { ClientError::Segment(error) }
    }
}
