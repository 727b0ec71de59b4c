//! The arena: memory into which blocks of other nodes land, and from which this node's processes read them.
//!
//! A block is in one of three states here: loading (others who want it wait for the one who loads it), leased, or idle.
//! Idle blocks stay until their room is needed; the one idle longest goes first.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dayfly_meta::id::{BlockId, DatasetId};
use dayfly_transport::{Region, Slot};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout_at};

/// A block's name on this node.
pub(crate) type Key = (DatasetId, BlockId);

/// The arena; clones share it.
#[derive(Clone)]
pub(crate) struct Arena {
    inner: Arc<Inner>,
}

struct Inner {
    region: Region,
    reader: File,
    state: Mutex<State>,
    idled: Notify,
}

#[derive(Default)]
struct State {
    blocks: HashMap<Key, Block>,
    /// Idle blocks, by when they became so.
    idle: BTreeMap<u64, Key>,
    tick: u64,
    leases: u64,
}

enum Block {
    Loading(Loading),
    Held { slot: Arc<Slot>, leases: usize, idle_since: u64 },
}

/// Tells those who wait for a load that it ended: closed without a word it succeeded or was given up, else it failed so.
pub(crate) type Loading = watch::Receiver<Option<Arc<str>>>;

/// What becomes of a wish for a block.
pub(crate) enum Claim {
    /// It is here.
    Held(Lease),
    /// Somebody loads it; when the channel closes without a failure, claim again.
    Wait(Loading),
    /// It is for the claimer to load.
    Load(Ticket),
}

/// The right, and the duty, to load a block. Dropped unfilled, it passes to the next who claims.
pub(crate) struct Ticket {
    arena: Arena,
    key: Key,
    loaded: watch::Sender<Option<Arc<str>>>,
    is_filled: bool,
}

/// The right to read a block; dropping it ends it.
pub(crate) struct Lease {
    arena: Arena,
    key: Key,
    slot: Arc<Slot>,
}

impl Arena {
    /// `region` is mapped by clients through a descriptor that cannot write.
    pub(crate) fn new(region: Region) -> io::Result<Self> {
        let reader = crate::store::read_only(region.file())?;
        let inner = Inner { region, reader, state: Mutex::default(), idled: Notify::new() };
        Ok(Self { inner: Arc::new(inner) })
    }

    pub(crate) fn file(&self) -> &File {
        &self.inner.reader
    }

    pub(crate) fn len(&self) -> u64 {
        self.inner.region.len()
    }

    /// Bytes of blocks in it, and leases out.
    pub(crate) fn usage(&self) -> (u64, u64) {
        let state = self.lock();
        let held = state.blocks.values().map(|block| match block {
            Block::Held { slot, .. } => slot.len() as u64,
            Block::Loading(_) => 0,
        });
        (held.sum(), state.leases)
    }

    pub(crate) fn claim(&self, key: Key) -> Claim {
        let mut state = self.lock();
        let State { blocks, idle, leases: all, .. } = &mut *state;
        match blocks.get_mut(&key) {
            Some(Block::Loading(loaded)) => Claim::Wait(loaded.clone()),
            Some(Block::Held { slot, leases, idle_since }) => {
                if *leases == 0 {
                    idle.remove(idle_since);
                }
                *leases += 1;
                *all += 1;
                Claim::Held(Lease { arena: self.clone(), key, slot: slot.clone() })
            }
            None => {
                let (loaded, loading) = watch::channel(None);
                blocks.insert(key, Block::Loading(loading));
                Claim::Load(Ticket { arena: self.clone(), key, loaded, is_filled: false })
            }
        }
    }

    /// A slot, if there is room or an idle block makes some.
    pub(crate) fn room(&self, len: u64) -> Option<Slot> {
        loop {
            if let Some(slot) = self.inner.region.slot(len) {
                return Some(slot);
            }
            let evicted = {
                let mut state = self.lock();
                let (_, key) = state.idle.pop_first()?;
                state.blocks.remove(&key)
            };
            drop(evicted);
        }
    }

    /// A slot, as soon as there is room.
    pub(crate) async fn room_within(&self, len: u64, wait: Duration) -> Option<Slot> {
        let deadline = Instant::now() + wait;
        loop {
            let idled = self.inner.idled.notified();
            tokio::pin!(idled);
            idled.as_mut().enable();
            if let Some(slot) = self.room(len) {
                return Some(slot);
            }
            // Slots also come free when a late answer lands; a look now and then finds those.
            let look_again = Instant::now() + Duration::from_millis(100);
            let woken = timeout_at(deadline.min(look_again), idled).await;
            if woken.is_err() && Instant::now() >= deadline {
                return None;
            }
        }
    }

    /// Forgets a dataset's idle blocks.
    pub(crate) fn forget(&self, dataset: DatasetId) {
        let mut state = self.lock();
        let State { blocks, idle, .. } = &mut *state;
        idle.retain(|_, key| {
            let keep = key.0 != dataset;
            if !keep {
                blocks.remove(key);
            }
            keep
        });
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ticket {
    /// The block has landed.
    pub(crate) fn fill(mut self, slot: Slot) -> Lease {
        self.is_filled = true;
        let slot = Arc::new(slot);
        let mut state = self.arena.lock();
        state.blocks.insert(self.key, Block::Held { slot: slot.clone(), leases: 1, idle_since: 0 });
        state.leases += 1;
        drop(state);
        Lease { arena: self.arena.clone(), key: self.key, slot }
    }
}

impl Ticket {
    /// The block cannot be had: those who wait for it hear the same.
    pub(crate) fn fail(self, reason: &str) {
        self.loaded.send_replace(Some(reason.into()));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if !self.is_filled {
            self.arena.lock().blocks.remove(&self.key);
        }
    }
}

impl Lease {
    /// Where the block lies in the arena.
    pub(crate) fn offset(&self) -> u64 {
        self.slot.offset()
    }

    /// Its length.
    pub(crate) fn len(&self) -> u64 {
        self.slot.len() as u64
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.arena.lock();
        state.leases -= 1;
        state.tick += 1;
        let State { blocks, idle, tick, .. } = &mut *state;
        if let Some(Block::Held { leases, idle_since, .. }) = blocks.get_mut(&self.key) {
            *leases -= 1;
            if *leases == 0 {
                *idle_since = *tick;
                idle.insert(*tick, self.key);
                self.arena.inner.idled.notify_waiters();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arena() -> Arena {
        Arena::new(Region::new(4096).unwrap()).unwrap()
    }

    fn key(block: u32) -> Key {
        (DatasetId(1), BlockId(block))
    }

    fn load(arena: &Arena, block: u32, len: u64) -> Lease {
        let Claim::Load(ticket) = arena.claim(key(block)) else { panic!("block {block} is there") };
        ticket.fill(arena.room(len).unwrap())
    }

    fn is_held(arena: &Arena, block: u32) -> bool {
        matches!(arena.claim(key(block)), Claim::Held(_))
    }

    #[tokio::test]
    async fn equal_wishes_wait_for_one_load() {
        let arena = arena();
        let Claim::Load(ticket) = arena.claim(key(1)) else { panic!() };
        let Claim::Wait(mut loaded) = arena.claim(key(1)) else { panic!() };
        drop(ticket);
        assert!(loaded.changed().await.is_err());
        let Claim::Load(ticket) = arena.claim(key(1)) else { panic!("a failed load passes on") };
        let Claim::Wait(mut loaded) = arena.claim(key(1)) else { panic!() };
        let lease = ticket.fill(arena.room(10).unwrap());
        assert!(loaded.changed().await.is_err() && is_held(&arena, 1));
        let Claim::Load(failing) = arena.claim(key(2)) else { panic!() };
        let Claim::Wait(mut loading) = arena.claim(key(2)) else { panic!() };
        failing.fail("lost");
        assert!(loading.wait_for(Option::is_some).await.is_ok_and(|reason| reason.as_deref() == Some("lost")));
        assert!(matches!(arena.claim(key(2)), Claim::Load(_)));
        assert_eq!(arena.usage(), (10, 1));
        drop(lease);
        assert_eq!(arena.usage(), (10, 0));
    }

    #[tokio::test]
    async fn idle_blocks_make_room_longest_idle_first_and_leased_ones_stay() {
        let arena = arena();
        let (first, second, third) = (load(&arena, 1, 2000), load(&arena, 2, 1000), load(&arena, 3, 1000));
        assert!(arena.room(2000).is_none());
        drop(second);
        drop(first);
        assert!(is_held(&arena, 2), "used again, so idle later than 1");
        drop(arena.room(2000).unwrap());
        assert!(!is_held(&arena, 1) && is_held(&arena, 2) && is_held(&arena, 3));
        let waiting = arena.room_within(4096, Duration::from_secs(5));
        let (slot, ()) = tokio::join!(waiting, async { drop(third) });
        assert!(slot.is_some() && arena.room_within(64, Duration::from_millis(10)).await.is_none());
    }

    #[test]
    fn a_forgotten_dataset_is_gone_but_for_its_leases() {
        let arena = arena();
        let lease = load(&arena, 1, 100);
        drop(load(&arena, 2, 100));
        arena.forget(DatasetId(1));
        assert!(is_held(&arena, 1) && !is_held(&arena, 2));
        drop(lease);
        assert_eq!(arena.usage().1, 0);
    }
}
