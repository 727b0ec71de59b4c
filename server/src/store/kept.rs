//! What a node keeps of other nodes' blocks: those that a hash chooses, as many as there is room for. The choice is the same in every
//! epoch, so a data set that does not fit all is not pressed out by its own next epoch, as it would be by an LRU.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::BlockId;
use dayfly_meta::segment::{Location, Place};

use super::Dataset;
use super::segment::room_for;

/// All blocks: their hashes are below this.
const ALL: u64 = 1 << 32;
/// Blocks that start on a page waste some of it, and hashes choose a little more or less than their share.
const ROOM_PERMILLE: u64 = 985;

/// What a dataset keeps here.
#[derive(Default)]
pub(crate) struct Kept {
    /// Blocks whose hash is below this are kept.
    threshold: AtomicU64,
    blocks: AtomicU64,
    bytes: AtomicU64,
    /// Held while blocks are placed, written and published, and while they are given up.
    writing: Mutex<HashMap<BlockId, Partial>>,
}

/// A block of which some chunks have come.
pub(super) struct Partial {
    place: Place,
    /// One bit a chunk.
    chunks: u16,
}

impl Kept {
    /// Blocks, and their bytes.
    pub(crate) fn usage(&self) -> (u64, u64) {
        (self.blocks.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    /// Which share of the blocks is meant to be kept, in thousandths.
    pub(crate) fn share_permille(&self) -> u64 {
        self.threshold.load(Ordering::Relaxed) * 1000 / ALL
    }

    fn chooses(&self, block: BlockId, seed: u64) -> bool {
        let threshold = self.threshold.load(Ordering::Relaxed);
        if threshold == 0 {
            return false;
        }
        let hash = xxhash_rust::xxh3::xxh3_64_with_seed(&block.0.to_le_bytes(), seed) >> 32;
        hash < threshold
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<BlockId, Partial>> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Dataset {
    /// Bytes that others own.
    pub(crate) fn others_bytes(&self) -> u64 {
        self.catalog().header().bytes.saturating_sub(self.held().bytes)
    }

    /// Whether anything is kept, or may be, or takes room though it was given up.
    pub(crate) fn has_kept(&self) -> bool {
        self.kept().threshold.load(Ordering::Relaxed) > 0 || self.segments().kept_room() > 0
    }

    /// Whether a block that came from its owner is to be kept.
    pub(crate) fn keeps(&self, block: BlockId) -> bool {
        self.kept().chooses(block, self.catalog().header().seed) && !self.is_here(block)
    }

    /// Keeps as many as fit `room` bytes from now on, of `wanted` bytes that all datasets want to keep.
    pub(crate) fn plan_kept(&self, room: u64, wanted: u64) -> io::Result<()> {
        let _nothing_is_given_up = self.kept().lock();
        if self.is_gone() {
            return Ok(());
        }
        let share = (u128::from(room) * u128::from(ROOM_PERMILLE) / 1000 * u128::from(ALL)).checked_div(wanted.into());
        let threshold = share.map_or(ALL, |share| share.min(ALL.into()) as u64);
        // Processes map what the file is long, when they first see it: so it is long from the start, without taking room.
        let most = u128::from(self.others_bytes()) * u128::from(threshold) / u128::from(ALL);
        self.segments().begin_kept(room_for(most as u64) + most as u64 / 16)?;
        self.kept().threshold.store(threshold, Ordering::Relaxed);
        Ok(())
    }

    /// Writes chunks to this node's drives and lets processes find them there. What there is no room for is not kept.
    pub(crate) fn keep(&self, chunks: &[(Chunk, &[u8])]) -> io::Result<()> {
        let mut partial = self.kept().lock();
        if self.is_gone() {
            return Ok(());
        }
        let (mut whole, mut pieces) = (Vec::with_capacity(chunks.len()), Vec::new());
        for &(chunk, bytes) in chunks.iter().filter(|(chunk, _)| self.keeps(chunk.block)) {
            match self.catalog().block(chunk.block) {
                Some((_, len)) if len == bytes.len() as u64 => whole.push((chunk.block, bytes)),
                Some((_, len)) => pieces.push((chunk, len, bytes)),
                None => {}
            }
        }
        whole.sort_by_key(|(block, _)| block.0);
        whole.dedup_by_key(|(block, _)| block.0);
        self.keep_whole(&whole)?;
        for (chunk, block_len, bytes) in pieces {
            self.keep_piece(&mut partial, chunk, block_len, bytes)?;
        }
        Ok(())
    }

    fn keep_whole(&self, blocks: &[(BlockId, &[u8])]) -> io::Result<()> {
        let lens = || blocks.iter().map(|(_, bytes)| bytes.len() as u64);
        let room = lens().map(room_for).sum();
        let Some(drive) = self.segments().promise_anywhere(room)? else { return Ok(()) };
        let places = self.segments().place(drive, lens(), room)?;
        self.segments().write_placed(&places, blocks.iter().map(|(_, bytes)| *bytes))?;
        for (&(block, bytes), place) in blocks.iter().zip(places) {
            self.publish_kept(block, place, bytes.len() as u64);
        }
        Ok(())
    }

    fn keep_piece(&self, partial: &mut HashMap<BlockId, Partial>, chunk: Chunk, block_len: u64, bytes: &[u8]) -> io::Result<()> {
        if let std::collections::hash_map::Entry::Vacant(vacant) = partial.entry(chunk.block) {
            let room = room_for(block_len);
            let Some(drive) = self.segments().promise_anywhere(room)? else { return Ok(()) };
            let places = self.segments().place(drive, [block_len].into_iter(), room)?;
            let Some(&place) = places.first() else { return Ok(()) };
            vacant.insert(Partial { place, chunks: 0 });
        }
        let Some(known) = partial.get_mut(&chunk.block) else { return Ok(()) };
        let place = known.place;
        self.segments().write(Place { offset: place.offset + chunk.start(), ..place }, bytes)?;
        known.chunks |= 1 << chunk.index;
        if Chunk::all(chunk.block, block_len).count() == known.chunks.count_ones() as usize {
            partial.remove(&chunk.block);
            self.publish_kept(chunk.block, place, block_len);
        }
        Ok(())
    }

    fn publish_kept(&self, block: BlockId, place: Place, len: u64) {
        self.locations().publish(block, Location::Kept(place));
        self.kept().blocks.fetch_add(1, Ordering::Relaxed);
        self.kept().bytes.fetch_add(len, Ordering::Relaxed);
    }

    /// Keeps nothing more, and takes back where everything was kept. Whoever copies just now sees that it was; whoever looks at the
    /// bytes in place is to be waited for before [`Self::free_kept`].
    pub(crate) fn withdraw_kept(&self) {
        let mut partial = self.kept().lock();
        self.kept().threshold.store(0, Ordering::Relaxed);
        partial.clear();
        for block in (0..self.catalog().header().blocks).map(BlockId) {
            if let Some(kept @ Location::Kept(_)) = self.locations().find(block) {
                self.locations().withdraw(block, kept);
            }
        }
        self.kept().blocks.store(0, Ordering::Relaxed);
        self.kept().bytes.store(0, Ordering::Relaxed);
    }

    /// Takes back where one block is kept, for its copy is bad; says whether it was kept there. Its room stays taken until all
    /// that is kept is given up. Whoever looks at the bytes in place goes on to see the same.
    pub(crate) fn withdraw_copy(&self, block: BlockId, place: Place) -> bool {
        let _nothing_is_given_up = self.kept().lock();
        let is_withdrawn = self.locations().withdraw(block, Location::Kept(place));
        if is_withdrawn {
            let len = self.catalog().block(block).map_or(0, |(_, len)| len);
            self.kept().blocks.fetch_sub(1, Ordering::Relaxed);
            self.kept().bytes.fetch_sub(len, Ordering::Relaxed);
        }
        is_withdrawn
    }

    /// Gives back the room of what was withdrawn.
    pub(crate) fn free_kept(&self) -> io::Result<()> {
        let _nothing_is_written = self.kept().lock();
        self.segments().free_kept()
    }
}
