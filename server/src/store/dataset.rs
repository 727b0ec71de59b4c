//! A dataset on this node: its catalog, which every node has, and those of its blocks that are here.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dayfly_meta::catalog::{Catalog, CatalogError, block_len};
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, DatasetId, NodeId, SampleId};
use dayfly_meta::limits::CHUNK_LEN;
use dayfly_meta::locations::Locations;
use dayfly_meta::segment::{DrivePosition, Location};
use dayfly_transport::Piece;

use super::cached_blocks::CachedBlocks;
use super::drive::{Drive, Reservation, read_only};
use super::segment::Segments;
use super::shared_file;

/// Blocks that do not count are not looked for if they are no more than this.
const UNUSED_BYTES_MAX: u64 = 1 << 20;

/// Why a catalog that came from another node cannot be shown.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PrepareError {
    #[error("{0}")]
    Catalog(#[from] CatalogError),
    #[error("the catalog did not arrive as it was sent: its checksum differs")]
    Checksum,
    #[error("block {part} of sample {} is said to be here but was not stored", sample.0)]
    Missing { sample: SampleId, part: u32 },
    #[error("cannot make the dataset ready: {0}")]
    Write(#[from] io::Error),
}

/// What a node holds of a dataset as its owner.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Held {
    pub(crate) samples: u64,
    pub(crate) blocks: u64,
    pub(crate) bytes: u64,
}

/// A chunk.
#[derive(Clone)]
pub(crate) struct ChunkInfo {
    pub(crate) len: u64,
    pub(crate) owner: NodeId,
    /// Whether it is all of its block.
    pub(crate) is_block: bool,
}

/// A dataset.
pub(crate) struct Dataset {
    id: DatasetId,
    target: Vec<u8>,
    catalog: Catalog,
    catalog_file: Arc<File>,
    locations: Arc<Locations>,
    locations_file: File,
    segments: Arc<Segments>,
    held: Held,
    kept: CachedBlocks,
    gone: Arc<AtomicBool>,
    _room: Reservation,
}

impl Dataset {
    /// Sees to it that the drive has a catalog, checks it whole and fills this node's locations. `find` tells by its number where a block that was shipped here lies;
    /// `taken_bytes` is how much was, whether it came to count or not.
    #[expect(clippy::too_many_arguments, reason = "a dataset is put together here and nowhere else")]
    pub(crate) fn prepare(
        id: DatasetId,
        target: Vec<u8>,
        file: &File,
        checksum: u32,
        room: Reservation,
        (me, nodes): (NodeId, usize),
        drive: &Drive,
        segments: Arc<Segments>,
        taken_bytes: u64,
        find: &dyn Fn(u32) -> Option<DrivePosition>,
    ) -> Result<Self, PrepareError> {
        let catalog_file = Arc::new(read_only(file)?);
        // Before it is checked: a page that the drive has lost since is read again now, and differs.
        drive.sync(file)?;
        let catalog = Catalog::open(&catalog_file)?;
        if catalog.file_checksum() != checksum {
            return Err(PrepareError::Checksum);
        }
        catalog.check(nodes)?;
        // In memory: a drive that lost a page of it might give back words of yesterday, which lead to other blocks' bytes today.
        let table = shared_file("dayfly-locations", Locations::file_len(catalog.header().blocks))?;
        let locations = Locations::create(&table, catalog.header().blocks)?;
        let held = fill(&catalog, &locations, me, find)?;
        if taken_bytes > held.bytes + UNUSED_BYTES_MAX {
            let freed = segments.free_unused(|keep| each_held(&catalog, &locations, keep))?;
            tracing::debug!(freed, "bytes that did not come to count");
        }
        let locations_file = read_only(&table)?;
        let gone = Arc::new(AtomicBool::new(false));
        let (locations, kept) = (Arc::new(locations), CachedBlocks::default());
        Ok(Self { id, target, catalog, catalog_file, locations, locations_file, segments, held, kept, gone, _room: room })
    }

    pub(crate) fn id(&self) -> DatasetId {
        self.id
    }

    /// Its root, below the prefix.
    pub(crate) fn target(&self) -> &[u8] {
        &self.target
    }

    pub(crate) fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    pub(crate) fn owned(&self) -> Held {
        self.held
    }

    /// The descriptors that a client gets: catalog, locations, segments by drive.
    pub(crate) fn client_files(&self) -> io::Result<Vec<File>> {
        let mut files = vec![self.catalog_file.try_clone()?, self.locations_file.try_clone()?];
        for segment in self.segments.files() {
            files.push(read_only(segment)?);
        }
        Ok(files)
    }

    pub(crate) fn catalog_file(&self) -> &Arc<File> {
        &self.catalog_file
    }

    /// Whether all of the block is in this node's segments.
    pub(crate) fn is_local(&self, block: BlockId) -> bool {
        self.locations.find(block).is_some_and(|location| location.position().is_some())
    }

    pub(crate) fn locations(&self) -> &Arc<Locations> {
        &self.locations
    }

    pub(crate) fn segments(&self) -> &Segments {
        &self.segments
    }

    /// What is kept here of other nodes' blocks.
    pub(crate) fn cached_blocks(&self) -> &CachedBlocks {
        &self.kept
    }

    /// Says that all about these will be asked.
    pub(crate) fn prefetch(&self, chunks: &[Chunk]) {
        for chunk in chunks {
            self.catalog.prefetch_block(chunk.block);
            self.locations.prefetch(chunk.block);
        }
    }

    /// What is known of a chunk; `None` where there is no such one.
    pub(crate) fn chunk(&self, chunk: Chunk) -> Option<ChunkInfo> {
        let (_, block_len) = self.catalog.block(chunk.block)?;
        Some(ChunkInfo {
            len: chunk.len_in(block_len)?,
            owner: self.catalog.owner(chunk.block)?,
            is_block: block_len <= CHUNK_LEN,
        })
    }

    /// Lets processes find a block in the arena, if they would not find it otherwise. Says whether it did.
    pub(crate) fn publish_in_arena(&self, block: BlockId, location: Location) -> bool {
        self.locations.publish_absent(block, location)
    }

    /// A chunk that this node owns, to be sent.
    pub(crate) fn piece(&self, chunk: Chunk) -> Option<Piece> {
        // What is only kept may be given up while it is sent.
        let Location::Owned(place) = self.locations.find(chunk.block)? else { return None };
        let (_, block_len) = self.catalog.block(chunk.block)?;
        let len = chunk.len_in(block_len)?;
        let file = self.segments.file(place.drive)?.clone();
        Some(Piece::File { file, offset: place.offset + chunk.start(), len, revoked: self.gone.clone() })
    }

    /// From when this is set, nothing that is copied out counts any more.
    pub(crate) fn set_gone(&self, gone: bool) {
        self.gone.store(gone, Ordering::Release);
        self.locations.set_gone(gone);
    }

    /// From here on this node's processes read nothing of it any more. Peers on which it is still shown do.
    pub(crate) fn hide(&self) {
        self.locations.set_gone(true);
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Gives its room back at once. [`Self::set_gone`] must have come before.
    pub(crate) fn free(&self) {
        debug_assert!(self.is_gone());
        // What is being kept at this moment is written before, and nothing is after.
        let _nothing_is_written = self.kept.lock();
        self.segments.free();
    }
}

/// Every block that is here, and its length.
fn each_held(catalog: &Catalog, locations: &Locations, see: &mut dyn FnMut(DrivePosition, u64)) {
    for sample in (0..catalog.header().samples).map(SampleId) {
        let Some((size, blocks)) = catalog.sample(sample) else { continue };
        for (part, block) in (0..).zip(blocks.map(BlockId)) {
            if let Some(place) = locations.find(block).and_then(Location::position) {
                see(place, block_len(size, part));
            }
        }
    }
}

fn fill(
    catalog: &Catalog,
    locations: &Locations,
    me: NodeId,
    find: &dyn Fn(u32) -> Option<DrivePosition>,
) -> Result<Held, PrepareError> {
    let mut held = Held::default();
    for sample in (0..catalog.header().samples).map(SampleId) {
        let damaged = CatalogError::Damaged("a sample");
        let Some((size, blocks)) = catalog.sample(sample) else { return Err(damaged.into()) };
        for (part, block) in (0..).zip(blocks.map(BlockId)) {
            if catalog.owner(block) != Some(me) {
                continue;
            }
            let place = catalog.arrival(block).and_then(find).ok_or(PrepareError::Missing { sample, part })?;
            locations.publish(block, Location::Owned(place));
            held.samples += u64::from(part == 0);
            held.blocks += 1;
            held.bytes += block_len(size, part);
        }
    }
    Ok(held)
}
