//! The blocks that a dataset caches on this node: those whose rank is below a threshold, which is as high as the free room allows.
//! Hashes give the ranks, so the choice is the same in every epoch. If a dataset does not fit entirely, its blocks do not evict
//! each other again and again, as they would with an LRU. Blocks that this node owns but did not store for lack of room come
//! before the blocks of other nodes, because each read of theirs is a read of the parallel file system.
//! So do blocks that this node holds in place of lost owners. Blocks that are kept (see `taken_over`) have the lowest rank, and the
//! threshold never falls so far that they make way.
//!
//! Blocks are written in groups. Processes find the blocks of a group once a sync has covered all of it; until then they read
//! them from the arena, or ask for them again. When room is needed, the threshold is lowered, and the blocks with the highest
//! ranks are *withdrawn* (processes no longer find them) and then *freed* (their room goes back to the file system).

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::BlockId;
use dayfly_meta::segment::{DrivePosition, Location};

use super::Dataset;
use super::segment::room_for;

#[cfg(test)]
mod tests;

/// The threshold that selects all blocks: every rank is below it.
const ALL: u64 = 1 << 32;
/// The part of the room that the selected blocks should fill. The rest covers the bytes that alignment to pages wastes, and the
/// excess if the hashes select slightly more blocks than they should.
const ROOM_PERMILLE: u64 = 985;

/// The cached blocks of one dataset.
pub(crate) struct CachedBlocks {
    /// Blocks whose rank is below this are cached.
    threshold: AtomicU64,
    /// Set while a stage-in runs, and until the first plan: then no further block is cached.
    is_paused: AtomicBool,
    /// The number of times that caching has gone on after a plan.
    plans: AtomicU64,
    blocks: AtomicU64,
    bytes: AtomicU64,
    /// The part of `bytes` that is kept. Changed under the lock.
    kept_bytes: AtomicU64,
    /// Held while blocks are allocated, written and published, and while they are withdrawn and freed.
    writing: Mutex<Writing>,
}

/// Blocks that have been allocated but not published yet.
#[derive(Default)]
pub(super) struct Writing {
    /// Blocks that still lack some of their chunks.
    partial: HashMap<BlockId, Partial>,
    /// Blocks that have been written completely. They are published once a sync has covered their group.
    unsynced: HashMap<BlockId, Unsynced>,
    /// The group that newly written blocks belong to.
    group: u64,
    /// Whether there may be withdrawn blocks whose room has not been freed yet.
    has_withdrawn: bool,
    /// Whether ranks have changed since blocks were last withdrawn.
    have_ranks_changed: bool,
}

struct Partial {
    position: DrivePosition,
    len: u64,
    /// The chunks that were written, one bit each.
    chunks: u16,
}

struct Unsynced {
    position: DrivePosition,
    len: u64,
    group: u64,
}

fn hash(block: BlockId, seed: u64) -> u64 {
    xxhash_rust::xxh3::xxh3_64_with_seed(&block.0.to_le_bytes(), seed) >> 32
}

impl CachedBlocks {
    /// Nothing is cached until a plan has been made.
    pub(super) fn new() -> Self {
        Self {
            threshold: AtomicU64::new(0),
            is_paused: AtomicBool::new(true),
            plans: AtomicU64::new(0),
            blocks: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            kept_bytes: AtomicU64::new(0),
            writing: Mutex::default(),
        }
    }

    /// Returns the number of published blocks, and their bytes.
    pub(crate) fn usage(&self) -> (u64, u64) {
        (self.blocks.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    /// Returns the bytes of the published blocks that are kept.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.kept_bytes.load(Ordering::Relaxed)
    }

    /// Returns the share of blocks that the threshold selects, in thousandths.
    pub(crate) fn share_permille(&self) -> u64 {
        self.threshold() * 1000 / ALL
    }

    /// Returns the threshold. Blocks whose rank is below it are cached; 0 selects no block.
    pub(crate) fn threshold(&self) -> u64 {
        self.threshold.load(Ordering::Relaxed)
    }

    /// Stops the caching of further blocks. Cached blocks stay.
    pub(crate) fn pause(&self) {
        self.is_paused.store(true, Ordering::Release);
    }

    /// Goes on with the caching of blocks, as a new plan has room for them.
    pub(crate) fn resume(&self) {
        self.plans.fetch_add(1, Ordering::Release);
        self.is_paused.store(false, Ordering::Release);
    }

    /// Returns a number that changes whenever caching goes on after a plan.
    pub(crate) fn plan(&self) -> u64 {
        self.plans.load(Ordering::Acquire)
    }

    /// Records that ranks have changed, so that blocks that are cached may have ranks above the threshold.
    pub(super) fn set_ranks_changed(&self) {
        self.lock().have_ranks_changed = true;
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::Acquire)
    }

    fn add(&self, len: u64, is_kept: bool) {
        self.blocks.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(len, Ordering::Relaxed);
        self.kept_bytes.fetch_add(if is_kept { len } else { 0 }, Ordering::Relaxed);
    }

    fn subtract(&self, len: u64) {
        self.blocks.fetch_sub(1, Ordering::Relaxed);
        self.bytes.fetch_sub(len, Ordering::Relaxed);
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Writing> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The shares of blocks that a node caches: of those that it holds, as their owner or in place of a lost one, but
/// did not store; and of all others. [`ALL`] is all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheShares {
    unstored: u64,
    others: u64,
}

impl CacheShares {
    /// Returns the shares that fit into `room` bytes, when all datasets together have this many bytes of either kind. Of them, the user
    /// allows `limit` bytes, apart from `lost_bytes` of the blocks that are not stored, which come to this node because of losses.
    pub(crate) fn that_fit(room: u64, limit: u64, lost_bytes: u64, unstored_bytes: u64, other_bytes: u64) -> Self {
        let usable = |bytes: u64| (u128::from(bytes) * u128::from(ROOM_PERMILLE) / 1000) as u64;
        let (room, limit) = (usable(room), usable(limit));
        let share = |room: u64, wanted: u64| {
            let share = (u128::from(room) * u128::from(ALL)).checked_div(wanted.into());
            share.map_or(ALL, |share| share.min(ALL.into()) as u64)
        };
        let left = limit.saturating_sub(unstored_bytes.saturating_sub(lost_bytes));
        Self {
            unstored: share(room.min(limit.saturating_add(lost_bytes)), unstored_bytes),
            others: share(room.saturating_sub(unstored_bytes).min(left), other_bytes),
        }
    }
}

fn part_of(whole: u64, share: u64) -> u64 {
    (u128::from(whole) * u128::from(share) / u128::from(ALL)) as u64
}

/// Returns a threshold below `threshold` that frees about `bytes` of `cached_room`.
pub(crate) fn lowered_threshold(threshold: u64, bytes: u64, cached_room: u64) -> u64 {
    let left = u128::from(cached_room.saturating_sub(bytes));
    let share = (u128::from(threshold) * left).checked_div(cached_room.into()).unwrap_or(0) as u64;
    // The result is slightly lower than this share, because a page is freed only when no block is left in it. The threshold
    // always falls, so that callers make progress.
    share.saturating_sub(threshold / 256).min(threshold.saturating_sub(1))
}

impl Dataset {
    /// Returns the bytes of the blocks that this node has not stored itself, whoever owns them.
    pub(crate) fn remote_bytes(&self) -> u64 {
        self.catalog().header().bytes.saturating_sub(self.stored_bytes())
    }

    /// Returns whether a block that arrived from its owner is to be cached.
    pub(crate) fn should_cache(&self, block: BlockId) -> bool {
        !self.cached_blocks().is_paused() && self.is_selected(block) && !self.is_local(block)
    }

    /// Returns whether there is room to cache a block, according to the last plan.
    pub(crate) fn is_selected(&self, block: BlockId) -> bool {
        let threshold = self.cached_blocks().threshold();
        threshold > 0 && self.rank(block) < threshold
    }

    /// Returns a block's rank. The blocks with the lowest ranks, up to a share of [`ALL`], have about that share of all bytes.
    fn rank(&self, block: BlockId) -> u64 {
        if self.is_kept(block) {
            return 0;
        }
        let (hash, unstored) = (hash(block, self.catalog().header().seed), self.unstored_share());
        let rank = match self.is_holder(block) || self.is_to_come_back(block) {
            // A new server's own blocks do not make way for those of lost nodes, as if a stage-in had stored them.
            true if self.is_refilled() && self.is_mine(block) => part_of(self.refilled_share(), hash),
            true => self.refilled_share() + part_of(unstored - self.refilled_share(), hash),
            false => unstored + part_of(ALL - unstored, hash),
        };
        rank.max(1)
    }

    /// Returns the lowest threshold, which selects the blocks that are kept, and no others.
    fn lowest_threshold(&self) -> u64 {
        self.has_kept().into()
    }

    /// Returns the share of the blocks to cache that this node holds but did not store. Those that are kept do not count.
    fn unstored_share(&self) -> u64 {
        self.share_of(self.unstored_bytes().saturating_sub(self.kept_bytes()))
    }

    /// Returns the share of the blocks to cache that a new server owns and that are to come back to it. Those that are kept do not count.
    fn refilled_share(&self) -> u64 {
        match self.is_refilled() && self.copies() == 1 {
            true => self.share_of(self.owned().unstored_bytes).min(self.unstored_share()),
            false => 0,
        }
    }

    /// Returns the share of the blocks to cache that so many bytes of them are.
    fn share_of(&self, bytes: u64) -> u64 {
        let among = self.remote_bytes().saturating_sub(self.kept_bytes());
        let share = (u128::from(bytes) * u128::from(ALL)).checked_div(among.into());
        share.map_or(0, |share| share.min(ALL.into()) as u64)
    }

    /// Returns the threshold that selects these shares of the dataset's blocks.
    pub(crate) fn cache_threshold(&self, shares: CacheShares) -> u64 {
        let unstored = self.unstored_share();
        let threshold = match shares.unstored {
            ALL => unstored + part_of(ALL - unstored, shares.others),
            share => part_of(unstored, share),
        };
        threshold.max(self.lowest_threshold())
    }

    /// Returns whether these shares select clearly more blocks than the threshold does now.
    pub(crate) fn can_cache_more(&self, shares: CacheShares) -> bool {
        self.cache_threshold(shares) > self.cached_blocks().threshold() + ALL / 64
    }

    /// Returns whether cached blocks can make way.
    pub(crate) fn can_cache_less(&self) -> bool {
        self.cached_blocks().threshold() > self.lowest_threshold()
    }

    /// Returns the lowest threshold that selects all blocks that this node holds.
    pub(crate) fn threshold_of_held(&self) -> u64 {
        self.unstored_share().max(self.lowest_threshold())
    }

    /// Returns the lowest threshold that selects all blocks that a new server owns. For any other server, that is the one for all blocks
    /// that it holds.
    pub(crate) fn threshold_of_own(&self) -> u64 {
        match self.is_refilled() && self.copies() == 1 {
            true => self.refilled_share().max(self.lowest_threshold()),
            false => self.threshold_of_held(),
        }
    }

    /// Raises the threshold to `threshold`, so that all blocks whose rank is below it are cached. Does nothing if the present
    /// threshold is higher.
    pub(crate) fn raise_cache_threshold(&self, threshold: u64) -> io::Result<()> {
        let _writing = self.cached_blocks().lock();
        if self.is_gone() || threshold < self.cached_blocks().threshold() {
            return Ok(());
        }
        // A process maps a segment with the length that the segment has when the process first sees it. So the segment gets its
        // final length now, without taking room.
        let kept = self.kept_bytes();
        let most = kept + part_of(self.remote_bytes().saturating_sub(kept), threshold);
        let more = most.saturating_sub(self.cached_blocks().usage().1);
        self.segments().begin_cached_region(room_for(more) + more / 16)?;
        self.cached_blocks().threshold.store(threshold, Ordering::Relaxed);
        Ok(())
    }

    /// Lets segments grow by what may still be cached in them, after blocks were freed.
    pub(crate) fn extend_cached_region(&self) -> io::Result<()> {
        self.raise_cache_threshold(self.cached_blocks().threshold())
    }

    /// Writes chunks to this node's drives; processes find them there after [`Self::sync_cached`]. Chunks for which there is no
    /// room are skipped. Returns the bytes written.
    pub(crate) fn write_cached(&self, chunks: &[(Chunk, &[u8])]) -> io::Result<u64> {
        let mut writing = self.cached_blocks().lock();
        if self.is_gone() {
            return Ok(0);
        }
        let (mut whole, mut pieces) = (Vec::with_capacity(chunks.len()), Vec::new());
        let is_new = |chunk: &Chunk| self.should_cache(chunk.block) && !writing.unsynced.contains_key(&chunk.block);
        for &(chunk, bytes) in chunks.iter().filter(|(chunk, _)| is_new(chunk)) {
            match self.catalog().block(chunk.block) {
                Some((_, len)) if len == bytes.len() as u64 => whole.push((chunk.block, bytes)),
                Some((_, len)) => pieces.push((chunk, len, bytes)),
                None => {}
            }
        }
        // Blocks with similar ranks lie next to each other: they are withdrawn together, so whole pages become free.
        whole.sort_by_cached_key(|(block, _)| (self.rank(*block), block.0));
        whole.dedup_by_key(|(block, _)| block.0);
        let written = self.write_whole(&mut writing, &whole).and_then(|written| {
            let mut write = |(chunk, len, bytes)| self.write_piece(&mut writing, chunk, len, bytes);
            pieces.into_iter().try_fold(written, |written, piece| Ok(written + write(piece)?))
        });
        // After an error, some room may be allocated to blocks that were not written.
        writing.has_withdrawn |= written.is_err();
        written
    }

    /// Writes blocks that consist of one chunk.
    fn write_whole(&self, writing: &mut Writing, blocks: &[(BlockId, &[u8])]) -> io::Result<u64> {
        let lens = || blocks.iter().map(|(_, bytes)| bytes.len() as u64);
        let room = lens().map(room_for).sum();
        let Some(drive) = self.segments().reserve_cached(room)? else { return Ok(0) };
        let positions = self.segments().allocate(drive, lens(), room)?;
        self.segments().write_blocks(&positions, blocks.iter().map(|(_, bytes)| *bytes))?;
        let group = writing.group;
        for (&(block, bytes), position) in blocks.iter().zip(positions) {
            writing.unsynced.insert(block, Unsynced { position, len: bytes.len() as u64, group });
        }
        Ok(lens().sum())
    }

    /// Writes one chunk of a larger block. The first chunk to arrive allocates room for the whole block.
    fn write_piece(&self, writing: &mut Writing, chunk: Chunk, block_len: u64, bytes: &[u8]) -> io::Result<u64> {
        if let Entry::Vacant(vacant) = writing.partial.entry(chunk.block) {
            let room = room_for(block_len);
            let Some(drive) = self.segments().reserve_cached(room)? else { return Ok(0) };
            let positions = self.segments().allocate(drive, [block_len].into_iter(), room)?;
            let Some(&position) = positions.first() else { return Ok(0) };
            vacant.insert(Partial { position, len: block_len, chunks: 0 });
        }
        let Some(partial) = writing.partial.get_mut(&chunk.block) else { return Ok(0) };
        let position = partial.position;
        self.segments().write(DrivePosition { offset: position.offset + chunk.start(), ..position }, bytes)?;
        partial.chunks |= 1 << chunk.index;
        if Chunk::all(chunk.block, block_len).count() == partial.chunks.count_ones() as usize {
            writing.partial.remove(&chunk.block);
            writing.unsynced.insert(chunk.block, Unsynced { position, len: block_len, group: writing.group });
        }
        Ok(bytes.len() as u64)
    }

    /// Waits until the written blocks are on the drives, publishes them, and passes each of them with its length to `see`.
    ///
    /// # Errors
    /// If a drive fails, everything that was written to that drive since its last successful sync is dropped, and the drive
    /// gets no further cached block of this dataset. The blocks on the other drives are published.
    pub(crate) fn sync_cached(&self, see: &mut dyn FnMut(BlockId, u64)) -> io::Result<()> {
        let synced_group = {
            let mut writing = self.cached_blocks().lock();
            if self.is_gone() {
                return Ok(());
            }
            self.segments().begin_cached_group();
            writing.group += 1;
            writing.group
        };
        // The lock is not held here: a sync may take long, and more blocks may be written in the meantime.
        let result = self.segments().sync_healthy();
        let mut writing = self.cached_blocks().lock();
        if self.is_gone() {
            return Ok(());
        }
        // A concurrent write may have received the error instead, so we ask the drives rather than look at `result`.
        let is_lost = |position: DrivePosition| self.segments().has_failed(position.drive);
        let (unsynced, partial) = (writing.unsynced.len(), writing.partial.len());
        writing.unsynced.retain(|_, block| !is_lost(block.position));
        writing.partial.retain(|_, block| !is_lost(block.position));
        writing.has_withdrawn |= unsynced + partial > writing.unsynced.len() + writing.partial.len();
        let is_covered = |_: &BlockId, block: &mut Unsynced| block.group < synced_group;
        for (block, Unsynced { position, len, .. }) in writing.unsynced.extract_if(is_covered) {
            self.locations().publish(block, Location::Cached(position));
            self.cached_blocks().add(len, self.is_kept(block));
            see(block, len);
        }
        result
    }

    /// Lowers the threshold to `threshold`, so that only blocks whose rank is below it stay cached, and withdraws the others. If
    /// `threshold` is higher than before, only blocks whose rank has changed are withdrawn. A process that copies a withdrawn block
    /// notices afterward that it was withdrawn. A process that views a block in place does not notice, so the caller waits until there
    /// are no views before it calls [`Self::free_withdrawn`].
    pub(crate) fn lower_cache_threshold(&self, threshold: u64) {
        let mut writing = self.cached_blocks().lock();
        let before = self.cached_blocks().threshold();
        let have_ranks_changed = std::mem::take(&mut writing.have_ranks_changed);
        if threshold >= before && !have_ranks_changed {
            return;
        }
        let threshold = threshold.max(self.lowest_threshold()).min(before);
        self.cached_blocks().threshold.store(threshold, Ordering::Relaxed);
        writing.has_withdrawn = true;
        let stays = |block: BlockId| self.rank(block) < threshold;
        writing.partial.retain(|&block, _| stays(block));
        writing.unsynced.retain(|&block, _| stays(block));
        let mut kept_bytes = 0;
        for (block, location, len) in self.published_cached() {
            if !stays(block) && self.locations().withdraw(block, location) {
                self.cached_blocks().subtract(len);
            } else if self.is_kept(block) {
                kept_bytes += len;
            }
        }
        self.cached_blocks().kept_bytes.store(kept_bytes, Ordering::Relaxed);
    }

    /// Returns whether [`Self::free_withdrawn`] may have something to free.
    pub(crate) fn has_withdrawn(&self) -> bool {
        self.cached_blocks().lock().has_withdrawn
    }

    /// Frees the room of withdrawn blocks. Returns the bytes freed.
    pub(crate) fn free_withdrawn(&self) -> io::Result<u64> {
        let mut writing = self.cached_blocks().lock();
        if self.is_gone() || !writing.has_withdrawn {
            return Ok(0);
        }
        let freed = self.segments().free_cached(|see| {
            let published = self.published_cached().filter_map(|(_, location, len)| Some((location.position()?, len)));
            published.for_each(|(position, len)| see(position, len));
            writing.partial.values().for_each(|block| see(block.position, block.len));
            writing.unsynced.values().for_each(|block| see(block.position, block.len));
        })?;
        writing.has_withdrawn = false;
        Ok(freed)
    }

    /// Returns the cached blocks that processes find, with their locations and lengths.
    fn published_cached(&self) -> impl Iterator<Item = (BlockId, Location, u64)> {
        (0..self.catalog().header().blocks).map(BlockId).filter_map(|block| match self.locations().find(block) {
            Some(location @ Location::Cached(_)) => Some((block, location, self.catalog().block(block)?.1)),
            _ => None,
        })
    }

    /// Withdraws one block whose copy is bad, if it is still cached at `position`; returns whether it was. The block's room is
    /// freed the next time that withdrawn blocks are freed. A process that views the copy in place continues to see the same
    /// bytes.
    pub(crate) fn withdraw_cached(&self, block: BlockId, position: DrivePosition) -> bool {
        let mut writing = self.cached_blocks().lock();
        let is_withdrawn = self.locations().withdraw(block, Location::Cached(position));
        if is_withdrawn {
            let len = self.catalog().block(block).map_or(0, |(_, len)| len);
            self.cached_blocks().subtract(len);
            if self.is_kept(block) {
                let kept_bytes = self.cached_blocks().kept_bytes();
                self.cached_blocks().kept_bytes.store(kept_bytes.saturating_sub(len), Ordering::Relaxed);
            }
            writing.has_withdrawn = true;
        }
        is_withdrawn
    }
}
