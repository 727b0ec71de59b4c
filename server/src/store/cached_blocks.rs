//! What a node keeps of other nodes' blocks: those that a hash chooses, as many as there is room for. The choice is the same in every
//! epoch, so a data set that does not fit all is not pressed out by its own next epoch, as it would be by an LRU.
//!
//! Blocks are written in groups. Processes find those of a group once a sync has covered all of it; until then they are in the arena, or
//! are asked for again. When room is needed, those with the highest hashes go.

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

/// All blocks: their hashes are below this.
const ALL: u64 = 1 << 32;
/// Blocks that start on a page waste some of it, and hashes choose a little more or less than their share.
const ROOM_PERMILLE: u64 = 985;

/// What a dataset keeps here.
#[derive(Default)]
pub(crate) struct CachedBlocks {
    /// Blocks whose hash is below this are kept.
    threshold: AtomicU64,
    /// While a stage-in runs nothing more is kept.
    is_paused: AtomicBool,
    blocks: AtomicU64,
    bytes: AtomicU64,
    /// Held while blocks are placed, written and published, and while they are given up.
    writing: Mutex<Writing>,
}

/// Blocks that processes cannot find here yet, or not any more.
#[derive(Default)]
pub(super) struct Writing {
    /// Some of their chunks have come.
    partial: HashMap<BlockId, Partial>,
    /// Written whole, and found once a sync has covered their group.
    unsynced: HashMap<BlockId, Unsynced>,
    /// The group that what is written now belongs to.
    group: u64,
    /// Whether the room of some has not been given back yet.
    has_withdrawn: bool,
}

struct Partial {
    place: DrivePosition,
    len: u64,
    /// One bit a chunk.
    chunks: u16,
}

struct Unsynced {
    place: DrivePosition,
    len: u64,
    group: u64,
}

fn hash(block: BlockId, seed: u64) -> u64 {
    xxhash_rust::xxh3::xxh3_64_with_seed(&block.0.to_le_bytes(), seed) >> 32
}

impl CachedBlocks {
    /// Blocks, and their bytes.
    pub(crate) fn usage(&self) -> (u64, u64) {
        (self.blocks.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    /// Which share of the blocks is meant to be kept, in thousandths.
    pub(crate) fn share_permille(&self) -> u64 {
        self.threshold() * 1000 / ALL
    }

    /// Blocks whose hash is below this are kept.
    pub(crate) fn threshold(&self) -> u64 {
        self.threshold.load(Ordering::Relaxed)
    }

    /// Keeps nothing more, or does so again; what is kept already stays.
    pub(crate) fn set_paused(&self, is_paused: bool) {
        self.is_paused.store(is_paused, Ordering::Relaxed);
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Writing> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The threshold by which as many blocks are kept as fit `room` bytes, of `wanted` bytes that all datasets want to keep.
pub(crate) fn threshold_for(room: u64, wanted: u64) -> u64 {
    let share = (u128::from(room) * u128::from(ROOM_PERMILLE) / 1000 * u128::from(ALL)).checked_div(wanted.into());
    share.map_or(ALL, |share| share.min(ALL.into()) as u64)
}

/// The threshold to which one is lowered so that `bytes` of `cached_room` come free.
pub(crate) fn lowered_threshold(threshold: u64, bytes: u64, cached_room: u64) -> u64 {
    let left = u128::from(cached_room.saturating_sub(bytes));
    // A little more goes, for a page is free only when no block is left in it; and something always does.
    let share = (u128::from(threshold) * left).checked_div(cached_room.into()).unwrap_or(0) as u64;
    share.saturating_sub(threshold / 256).min(threshold.saturating_sub(1))
}

impl Dataset {
    /// Bytes that others own.
    pub(crate) fn remote_bytes(&self) -> u64 {
        self.catalog().header().bytes.saturating_sub(self.owned().bytes)
    }

    /// Whether a block that came from its owner is to be kept.
    pub(crate) fn should_cache(&self, block: BlockId) -> bool {
        let threshold = self.cached_blocks().threshold();
        threshold > 0
            && !self.cached_blocks().is_paused.load(Ordering::Relaxed)
            && self.hash(block) < threshold
            && !self.is_local(block)
    }

    fn hash(&self, block: BlockId) -> u64 {
        hash(block, self.catalog().header().seed)
    }

    /// Keeps blocks below a threshold from now on, which is no lower than the one before.
    pub(crate) fn raise_cache_threshold(&self, threshold: u64) -> io::Result<()> {
        let _nothing_is_given_up = self.cached_blocks().lock();
        if self.is_gone() || threshold < self.cached_blocks().threshold() {
            return Ok(());
        }
        // Processes map what the file is long, when they first see it: so it is long from the start, without taking room.
        let most = (u128::from(self.remote_bytes()) * u128::from(threshold) / u128::from(ALL)) as u64;
        let more = most.saturating_sub(self.cached_blocks().usage().1);
        self.segments().begin_kept(room_for(more) + more / 16)?;
        self.cached_blocks().threshold.store(threshold, Ordering::Relaxed);
        Ok(())
    }

    /// Writes chunks to this node's drives, for processes to find there after [`Self::sync_cached`]; returns the bytes written. What there
    /// is no room for is not kept.
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
        // Those that go first when room is needed lie side by side, so that whole pages come free.
        whole.sort_by_cached_key(|(block, _)| (self.hash(*block), block.0));
        whole.dedup_by_key(|(block, _)| block.0);
        let kept = self.write_whole(&mut writing, &whole).and_then(|written| {
            let mut keep = |(chunk, len, bytes)| self.write_piece(&mut writing, chunk, len, bytes);
            pieces.into_iter().try_fold(written, |written, piece| Ok(written + keep(piece)?))
        });
        // The room of what could not be written.
        writing.has_withdrawn |= kept.is_err();
        kept
    }

    fn write_whole(&self, writing: &mut Writing, blocks: &[(BlockId, &[u8])]) -> io::Result<u64> {
        let lens = || blocks.iter().map(|(_, bytes)| bytes.len() as u64);
        let room = lens().map(room_for).sum();
        let Some(drive) = self.segments().promise_kept(room)? else { return Ok(0) };
        let places = self.segments().place(drive, lens(), room)?;
        self.segments().write_placed(&places, blocks.iter().map(|(_, bytes)| *bytes))?;
        let group = writing.group;
        for (&(block, bytes), place) in blocks.iter().zip(places) {
            writing.unsynced.insert(block, Unsynced { place, len: bytes.len() as u64, group });
        }
        Ok(lens().sum())
    }

    fn write_piece(&self, writing: &mut Writing, chunk: Chunk, block_len: u64, bytes: &[u8]) -> io::Result<u64> {
        if let Entry::Vacant(vacant) = writing.partial.entry(chunk.block) {
            let room = room_for(block_len);
            let Some(drive) = self.segments().promise_kept(room)? else { return Ok(0) };
            let places = self.segments().place(drive, [block_len].into_iter(), room)?;
            let Some(&place) = places.first() else { return Ok(0) };
            vacant.insert(Partial { place, len: block_len, chunks: 0 });
        }
        let Some(known) = writing.partial.get_mut(&chunk.block) else { return Ok(0) };
        let place = known.place;
        self.segments().write(DrivePosition { offset: place.offset + chunk.start(), ..place }, bytes)?;
        known.chunks |= 1 << chunk.index;
        if Chunk::all(chunk.block, block_len).count() == known.chunks.count_ones() as usize {
            writing.partial.remove(&chunk.block);
            writing.unsynced.insert(chunk.block, Unsynced { place, len: block_len, group: writing.group });
        }
        Ok(bytes.len() as u64)
    }

    /// Waits until the drives have what was written, and lets processes find it there. What a drive did not take is forgotten, with
    /// all that was written to it since the last time that it took everything; that drive keeps nothing more of this dataset.
    pub(crate) fn sync_cached(&self) -> io::Result<()> {
        let synced = {
            let mut writing = self.cached_blocks().lock();
            if self.is_gone() {
                return Ok(());
            }
            self.segments().begin_kept_group();
            writing.group += 1;
            writing.group
        };
        // Not while the lock is held: the drive may take its time, and more may be written meanwhile.
        let result = self.segments().sync_others();
        let mut writing = self.cached_blocks().lock();
        if self.is_gone() {
            return Ok(());
        }
        // Also by a write in the meantime, which may have heard of an error instead of the sync.
        let is_lost = |place: DrivePosition| self.segments().has_failed(place.drive);
        let (unsynced, partial) = (writing.unsynced.len(), writing.partial.len());
        writing.unsynced.retain(|_, block| !is_lost(block.place));
        writing.partial.retain(|_, block| !is_lost(block.place));
        writing.has_withdrawn |= unsynced + partial > writing.unsynced.len() + writing.partial.len();
        let is_covered = |_: &BlockId, block: &mut Unsynced| block.group < synced;
        for (block, Unsynced { place, len, .. }) in writing.unsynced.extract_if(is_covered) {
            self.locations().publish(block, Location::Cached(place));
            self.cached_blocks().blocks.fetch_add(1, Ordering::Relaxed);
            self.cached_blocks().bytes.fetch_add(len, Ordering::Relaxed);
        }
        result
    }

    /// Keeps only blocks below a threshold from now on, and takes back where the others were kept. Whoever copies just now sees that
    /// it was; whoever looks at the bytes in place is to be waited for before [`Self::free_withdrawn`].
    pub(crate) fn lower_cache_threshold(&self, threshold: u64) {
        let mut writing = self.cached_blocks().lock();
        if threshold >= self.cached_blocks().threshold() {
            return;
        }
        self.cached_blocks().threshold.store(threshold, Ordering::Relaxed);
        writing.has_withdrawn = true;
        let stays = |block: BlockId| self.hash(block) < threshold;
        writing.partial.retain(|&block, _| stays(block));
        writing.unsynced.retain(|&block, _| stays(block));
        for (block, kept, len) in self.all_kept() {
            if !stays(block) && self.locations().withdraw(block, kept) {
                self.cached_blocks().blocks.fetch_sub(1, Ordering::Relaxed);
                self.cached_blocks().bytes.fetch_sub(len, Ordering::Relaxed);
            }
        }
    }

    /// Whether [`Self::free_withdrawn`] would give something back.
    pub(crate) fn has_withdrawn(&self) -> bool {
        self.cached_blocks().lock().has_withdrawn
    }

    /// Gives back the room of what was withdrawn; how much it was.
    pub(crate) fn free_withdrawn(&self) -> io::Result<u64> {
        let mut writing = self.cached_blocks().lock();
        if self.is_gone() || !writing.has_withdrawn {
            return Ok(0);
        }
        let freed = self.segments().free_cached(|see| {
            self.all_kept().filter_map(|(_, kept, len)| Some((kept.position()?, len))).for_each(|(place, len)| see(place, len));
            writing.partial.values().for_each(|block| see(block.place, block.len));
            writing.unsynced.values().for_each(|block| see(block.place, block.len));
        })?;
        writing.has_withdrawn = false;
        Ok(freed)
    }

    /// Blocks that processes find here, where, and how long they are.
    fn all_kept(&self) -> impl Iterator<Item = (BlockId, Location, u64)> {
        (0..self.catalog().header().blocks).map(BlockId).filter_map(|block| match self.locations().find(block) {
            Some(kept @ Location::Cached(_)) => Some((block, kept, self.catalog().block(block)?.1)),
            _ => None,
        })
    }

    /// Takes back where one block is kept, for its copy is bad; says whether it was kept there. Its room is given back the next time
    /// that any is. Whoever looks at the bytes in place goes on to see the same.
    pub(crate) fn withdraw_cached(&self, block: BlockId, place: DrivePosition) -> bool {
        let mut writing = self.cached_blocks().lock();
        let is_withdrawn = self.locations().withdraw(block, Location::Cached(place));
        if is_withdrawn {
            let len = self.catalog().block(block).map_or(0, |(_, len)| len);
            self.cached_blocks().blocks.fetch_sub(1, Ordering::Relaxed);
            self.cached_blocks().bytes.fetch_sub(len, Ordering::Relaxed);
            writing.has_withdrawn = true;
        }
        is_withdrawn
    }
}
