//! A dataset on this node: its catalog, of which every node has a copy, and the dataset's blocks that are on this node.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockWriteGuard};

use dayfly_meta::catalog::{Catalog, CatalogError, NOT_STORED, NOT_STORED_MIN, block_len};
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, DatasetId, NodeId, SampleId};
use dayfly_meta::limits::CHUNK_LEN;
use dayfly_meta::locations::Locations;
use dayfly_meta::placement::{Member, NodeSet, Placement};
use dayfly_meta::segment::{DrivePosition, Location};
use dayfly_meta::wire::control::Counts;
use dayfly_stagein::origin::is_streamable;
use dayfly_transport::Piece;

use super::cached_blocks::CachedBlocks;
use super::copies::CopiesHere;
use super::drive::{Drive, Reservation, read_only};
use super::segment::Segments;
use super::shared_file;
use super::taken_over::TakenOver;
use crate::blocking::assert_may_wait;

/// Dead blocks (blocks that the catalog does not contain) are freed only if they take more than this many bytes. Otherwise,
/// looking for them costs more than their room is worth.
const DEAD_BYTES_MAX: u64 = 1 << 20;

/// Why a dataset cannot be prepared on this node.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PrepareError {
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    #[error("this node's copy of the catalog is damaged: its checksum differs from the coordinator's")]
    Checksum,
    #[error("the catalog says that block {part} of sample {} is on this node, but it was not stored here", sample.0)]
    Missing { sample: SampleId, part: u32 },
    #[error("cannot prepare the dataset: {0}")]
    Write(#[from] io::Error),
}

/// The part of a dataset that this node owns and has stored.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Owned {
    pub(crate) samples: u64,
    pub(crate) blocks: u64,
    pub(crate) bytes: u64,
    /// Bytes of the blocks that this node owns but did not store, for lack of room.
    pub(crate) unstored_bytes: u64,
}

/// The catalog's facts about a chunk.
#[derive(Clone)]
pub(crate) struct ChunkInfo {
    pub(crate) len: u64,
    pub(crate) owner: NodeId,
    /// Whether the chunk is its whole block.
    pub(crate) is_block: bool,
}

/// A dataset, visible or about to become visible.
pub(crate) struct Dataset {
    id: DatasetId,
    request: u64,
    counts: Counts,
    target: Vec<u8>,
    catalog: Catalog,
    catalog_file: Arc<File>,
    catalog_checksum: u32,
    locations: Arc<Locations>,
    locations_file: File,
    segments: Arc<Segments>,
    /// The node that this part of the dataset is on.
    me: NodeId,
    owned: Owned,
    pub(super) is_without_blocks: bool,
    /// Whether the stage-in left out copies that are to be on this node.
    pub(super) lacks_copies: AtomicBool,
    /// All blocks below this one that are to come back to this node are here.
    pub(super) come_back: AtomicU32,
    cached_blocks: CachedBlocks,
    copies: CopiesHere,
    taken_over: RwLock<Arc<TakenOver>>,
    /// The placement of the stage-in. Nobody needs it until a node is lost.
    placement: OnceLock<Placement>,
    /// Set before the blocks' room is freed. Pieces that are being sent to peers share this flag.
    gone: Arc<AtomicBool>,
    /// The room of the catalog.
    _room: Reservation,
}

/// The parts of a dataset that is about to be prepared.
pub(crate) struct NewDataset<'a> {
    pub(crate) id: DatasetId,
    /// The number of the user's request that made the dataset.
    pub(crate) request: u64,
    /// What the stage-in has encountered.
    pub(crate) counts: Counts,
    /// The path of the dataset's root below the namespace's prefix.
    pub(crate) target: Vec<u8>,
    /// The file of the catalog, and the drive that it is on.
    pub(crate) catalog: &'a File,
    pub(crate) drive: &'a Drive,
    /// The CRC32C of the catalog, as the coordinator wrote it.
    pub(crate) checksum: u32,
    /// The room of the catalog.
    pub(crate) room: Reservation,
    /// The blocks that were shipped to this node.
    pub(crate) segments: Arc<Segments>,
    /// The total length of these blocks, including those that do not end up in the catalog.
    pub(crate) stored_bytes: u64,
}

impl NewDataset<'_> {
    /// Syncs the catalog to its drive, checks all of it, and fills in the locations of the blocks
    /// that this node, `me`, owns. `find` returns where a block lies, given its arrival number. Without `find`, this node has none
    /// of its blocks.
    pub(crate) fn prepare(
        self,
        me: NodeId,
        nodes: usize,
        find: Option<&dyn Fn(u32) -> Option<DrivePosition>>,
    ) -> Result<Dataset, PrepareError> {
        let Self { id, request, counts, target, catalog: file, drive, checksum, room, segments, stored_bytes } = self;
        let catalog_file = Arc::new(read_only(file)?);
        // The catalog is synced before it is checked: a page that the drive lost is then read again from the drive, and fails the
        // check.
        drive.sync(file)?;
        let catalog = Catalog::open(&catalog_file)?;
        if catalog.file_checksum() != checksum {
            return Err(PrepareError::Checksum);
        }
        catalog.check(nodes)?;
        // The table is in memory, not on a drive: a drive that lost a page of it could return old words, which point to other
        // blocks.
        let table = shared_file("dayfly-locations", Locations::file_len(catalog.header().blocks))?;
        let locations = Locations::create(&table, catalog.header().blocks)?;
        let owned = fill(&catalog, &locations, me, find)?;
        if stored_bytes > owned.bytes + DEAD_BYTES_MAX {
            let freed = segments.free_unused(|see| each_owned(&catalog, &locations, see))?;
            tracing::debug!(dataset = id.0, freed, "freed the pages of blocks that the catalog does not contain");
        }
        let locations_file = read_only(&table)?;
        let gone = Arc::new(AtomicBool::new(false));
        let (locations, cached_blocks) = (Arc::new(locations), CachedBlocks::new());
        Ok(Dataset {
            id,
            request,
            counts,
            target,
            catalog,
            catalog_file,
            catalog_checksum: checksum,
            locations,
            locations_file,
            segments,
            me,
            owned,
            is_without_blocks: find.is_none(),
            lacks_copies: AtomicBool::new(false),
            come_back: AtomicU32::new(0),
            cached_blocks,
            copies: CopiesHere::default(),
            taken_over: RwLock::default(),
            placement: OnceLock::new(),
            gone,
            _room: room,
        })
    }
}

impl Dataset {
    pub(crate) fn id(&self) -> DatasetId {
        self.id
    }

    /// Returns the number of the user's request that made the dataset.
    pub(crate) fn request(&self) -> u64 {
        self.request
    }

    /// Returns what the stage-in encountered.
    pub(crate) fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Returns the path of the dataset's root below the namespace's prefix.
    pub(crate) fn target(&self) -> &[u8] {
        &self.target
    }

    pub(crate) fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    pub(crate) fn owned(&self) -> Owned {
        self.owned
    }

    /// Returns the node that this part of the dataset is on.
    pub(super) fn me(&self) -> NodeId {
        self.me
    }

    pub(super) fn copies_counters(&self) -> &CopiesHere {
        &self.copies
    }

    /// Returns what this node holds in place of lost owners.
    pub(super) fn taken_over(&self) -> Arc<TakenOver> {
        self.taken_over.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn taken_over_slot(&self) -> RwLockWriteGuard<'_, Arc<TakenOver>> {
        self.taken_over.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether this node owns a block, whether the block is stored or not.
    pub(crate) fn is_mine(&self, block: BlockId) -> bool {
        self.catalog.owner(block) == Some(self.me)
    }

    /// Returns the files that a client gets, all read-only: the catalog, the locations, and the segments by drive.
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

    /// Returns the CRC32C of the whole catalog.
    pub(crate) fn catalog_checksum(&self) -> u32 {
        self.catalog_checksum
    }

    /// Returns whether the whole block is in this node's segments.
    pub(crate) fn is_local(&self, block: BlockId) -> bool {
        self.locations.find(block).is_some_and(|location| location.position().is_some())
    }

    pub(crate) fn locations(&self) -> &Arc<Locations> {
        &self.locations
    }

    pub(crate) fn segments(&self) -> &Segments {
        &self.segments
    }

    /// Returns the blocks of other nodes that are cached on this node.
    pub(crate) fn cached_blocks(&self) -> &CachedBlocks {
        &self.cached_blocks
    }

    /// Prefetches, into the processor's cache, the entries of these chunks' blocks in the catalog and in the locations table.
    pub(crate) fn prefetch(&self, chunks: &[Chunk]) {
        for chunk in chunks {
            self.catalog.prefetch_block(chunk.block);
            self.locations.prefetch(chunk.block);
        }
    }

    /// Returns what the catalog says about a chunk, or `None` if the dataset has no such chunk.
    pub(crate) fn chunk(&self, chunk: Chunk) -> Option<ChunkInfo> {
        let (_, block_len) = self.catalog.block(chunk.block)?;
        Some(ChunkInfo {
            len: chunk.len_in(block_len)?,
            owner: self.catalog.owner(chunk.block)?,
            is_block: block_len <= CHUNK_LEN,
        })
    }

    /// Returns the first of a block's candidates that is not skipped; `None` if all are. A compressed tar is read again by one node,
    /// so all its blocks have the candidates of the tar's path. With copies, the other candidates of a block may have one.
    pub(crate) fn candidate(&self, block: BlockId, skipped: &NodeSet) -> Option<NodeId> {
        if self.copies() == 1 && self.is_streamed(block) {
            let source = self.catalog.source(self.source_of_block(block)?)?;
            return self.placement().owner(&source.path, 0, skipped);
        }
        let (path, part) = self.placed(block)?;
        self.placement().owner(self.catalog.header().group.of(&path), part, skipped)
    }

    /// Returns whether a block lies in a compressed tar, which can be read again only as a whole.
    pub(crate) fn is_streamed(&self, block: BlockId) -> bool {
        self.catalog.block(block).is_some_and(|(sample, _)| is_streamable(&self.catalog, sample))
    }

    /// Returns the number of the source that a block comes from.
    pub(crate) fn source_of_block(&self, block: BlockId) -> Option<u32> {
        let (sample, _) = self.catalog.block(block)?;
        Some(self.catalog.origin(sample)?.source)
    }

    /// Returns the path that placement hashes for a block, and the block's number in its sample.
    pub(super) fn placed(&self, block: BlockId) -> Option<(Vec<u8>, u32)> {
        let (sample, _) = self.catalog.block(block)?;
        let (_, blocks) = self.catalog.sample(sample)?;
        Some((self.catalog.placed_path(sample)?, block.0 - blocks.start))
    }

    /// Returns the placement of the stage-in.
    pub(super) fn placement(&self) -> &Placement {
        self.placement.get_or_init(|| {
            let members = (0..).map(NodeId).zip(self.catalog.capacities());
            let members: Vec<Member> = members.map(|(node, capacity)| Member { node, capacity }).collect();
            Placement::new(self.catalog.header().seed, &members)
        })
    }

    /// Publishes a block's location in the arena, unless processes can already find the block on this node. Returns whether the
    /// location was published.
    pub(crate) fn publish_in_arena(&self, block: BlockId, location: Location) -> bool {
        self.locations.publish_absent(block, location)
    }

    /// Returns a chunk to be sent to a peer; `None` unless a stage-in stored its block on this node.
    pub(crate) fn piece(&self, chunk: Chunk) -> Option<Piece> {
        // A cached copy is not sent, because it may be freed while it is being sent.
        let Location::Owned(position) = self.locations.find(chunk.block)? else { return None };
        let (_, block_len) = self.catalog.block(chunk.block)?;
        let len = chunk.len_in(block_len)?;
        let file = self.segments.file(position.drive)?.clone();
        Some(Piece::File { file, offset: position.offset + chunk.start(), len, revoked: self.gone.clone() })
    }

    /// Reads a chunk from the drive on which this node caches the chunk's block. Returns `None` if it is not cached, if the copy
    /// was withdrawn meanwhile, or if it cannot be read. May wait for the drive. The caller verifies the bytes.
    pub(crate) fn read_cached(&self, chunk: Chunk) -> Option<Vec<u8>> {
        assert_may_wait();
        let location = self.locations.find(chunk.block)?;
        let Location::Cached(position) = location else { return None };
        let mut bytes = vec![0; self.chunk(chunk)?.len as usize];
        self.segments.file(position.drive)?.read_exact_at(&mut bytes, position.offset + chunk.start()).ok()?;
        (self.locations.find(chunk.block) == Some(location) && !self.is_gone()).then_some(bytes)
    }

    /// Declares the blocks invalid: bytes that are copied afterward must not be used, either here or on peers.
    pub(crate) fn set_gone(&self, gone: bool) {
        self.gone.store(gone, Ordering::Release);
        self.locations.set_gone(gone);
    }

    /// Stops this node's processes from reading the dataset. Peers that still show the dataset can still read its blocks from
    /// this node.
    pub(crate) fn hide(&self) {
        self.locations.set_gone(true);
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Calls `see` with the arrival number and the id of each block that this node has kept in memory during the stage-in.
    pub(crate) fn each_kept(&self, see: &mut dyn FnMut(u32, BlockId)) {
        if self.owned.unstored_bytes == 0 {
            return;
        }
        for block in (0..self.catalog.header().blocks).map(BlockId) {
            if self.is_mine(block)
                && let Some(arrival) = self.catalog.arrival(block)
                && (NOT_STORED_MIN..NOT_STORED).contains(&arrival)
            {
                see(arrival, block);
            }
        }
    }

    /// Frees the dataset's room at once. Call [`Self::set_gone`] first.
    pub(crate) fn free(&self) {
        debug_assert!(self.is_gone());
        // The lock waits for a block that is being cached at this moment; after that, nothing more is cached.
        let _writing = self.cached_blocks.lock();
        self.segments.free();
    }
}

/// Calls `see` with the position and length of every block on this node.
fn each_owned(catalog: &Catalog, locations: &Locations, see: &mut dyn FnMut(DrivePosition, u64)) {
    for sample in (0..catalog.header().samples).map(SampleId) {
        let Some((size, blocks)) = catalog.sample(sample) else { continue };
        for (part, block) in (0..).zip(blocks.map(BlockId)) {
            if let Some(position) = locations.find(block).and_then(Location::position) {
                see(position, block_len(size, part));
            }
        }
    }
}

/// Publishes the locations of the blocks that this node owns, and counts them.
fn fill(
    catalog: &Catalog,
    locations: &Locations,
    me: NodeId,
    find: Option<&dyn Fn(u32) -> Option<DrivePosition>>,
) -> Result<Owned, PrepareError> {
    let mut owned = Owned::default();
    for sample in (0..catalog.header().samples).map(SampleId) {
        let damaged = CatalogError::Damaged("a sample");
        let Some((size, blocks)) = catalog.sample(sample) else { return Err(damaged.into()) };
        for (part, block) in (0..).zip(blocks.map(BlockId)) {
            if catalog.owner(block) != Some(me) {
                continue;
            }
            let Some(find) = find.filter(|_| catalog.is_stored(block)) else {
                owned.unstored_bytes += block_len(size, part);
                continue;
            };
            let position = catalog.arrival(block).and_then(find).ok_or(PrepareError::Missing { sample, part })?;
            locations.publish(block, Location::Owned(position));
            owned.samples += u64::from(part == 0);
            owned.blocks += 1;
            owned.bytes += block_len(size, part);
        }
    }
    Ok(owned)
}
