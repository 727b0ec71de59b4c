//! Many samples at once: `read_many`. What this node has is looked at where it lies; the rest is asked of the server in one message,
//! leased where it lands, and can be used as it comes.
//!
//! A lease may be revoked under a batch that stands still for long: because its process takes nothing from its socket, or because
//! others wait for the room. What had not been delivered by then is read again; of what was delivered [`Batch::is_good`] says that
//! it is not.

mod far;

use std::collections::VecDeque;
use std::sync::Arc;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, SampleId};
use dayfly_meta::limits::CHUNK_LEN;
use dayfly_meta::segment::{DrivePosition, Location};
use dayfly_meta::wire::status::{Reads, SOURCES, Source};

use crate::attach::Views;
use crate::{ClientError, Dataset, Session, fault};
use far::{Far, Leased};

/// In which order samples of a batch are delivered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Delivery {
    /// As they were asked for.
    #[default]
    Given,
    /// As they come: those of this node first.
    Arrival,
}

/// What is done about a sample that cannot be had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnMissing {
    /// The first one is the end of the batch.
    #[default]
    Fail,
    /// It is delivered as its error, and the others are read.
    Tell,
}

/// A sample that was asked for.
#[derive(Clone)]
pub(crate) struct Item {
    pub(crate) dataset: Arc<Dataset>,
    pub(crate) sample: SampleId,
}

/// A sample of a batch.
#[derive(Debug)]
pub struct Delivered<'a> {
    /// Its place in what was asked for.
    pub index: usize,
    /// All its bytes, or why they cannot be had.
    pub bytes: Result<&'a [u8], &'a ClientError>,
}

/// Samples that are being read, and lie where they are until this is dropped. What it delivers may be looked at until then, by
/// [`Self::get`]; a program that has looked asks [`Self::is_good`] before it believes what it saw.
pub struct Batch<'a> {
    session: &'a Session,
    items: Vec<Option<Item>>,
    states: Vec<State>,
    delivery: Delivery,
    on_missing: OnMissing,
    /// Not delivered yet, in order; with those that come from afar behind, if the order is theirs.
    next: usize,
    arrived: VecDeque<usize>,
    far: Far,
    leases: Vec<u64>,
    is_over: bool,
    /// The connection failed, and with it ended the leases.
    is_broken: bool,
    /// See [`fault::zeroed`].
    zeroed: usize,
    /// What is kept here stays while this lives; without a server nobody gives it up.
    views: Option<Views<'a>>,
    /// The process whose connection and views these are.
    home: u32,
}

/// Where an item's bytes are.
enum State {
    /// Empty.
    Empty,
    /// In a segment.
    Segment(DrivePosition, u64),
    /// In the arena, leased.
    Leased(Leased),
    /// In memory of our own.
    Owned(Vec<u8>),
    /// To be read when it is its turn: what is cut into pieces is copied together.
    Later,
    /// Under way.
    Far,
    Failed(ClientError),
}

/// Ranges of a batch that are looked at, whether they are in memory.
const SAMPLED: usize = 4;
/// When one is not, so many batches are taken to be cold, this one included.
const COLD_BATCHES: u32 = 16;

/// What is wanted: a sample, or why it is known that it cannot be had.
pub(crate) type Wish = Result<Item, ClientError>;

impl Session {
    /// Begins to read samples whole. Nothing fails here but a connection; what becomes of each sample is told when it is delivered.
    pub fn read_many(
        &self,
        dataset: &Arc<Dataset>,
        samples: &[SampleId],
        delivery: Delivery,
        on_missing: OnMissing,
    ) -> Result<Batch<'_>, ClientError> {
        self.begin_batch(wishes(dataset, samples), delivery, on_missing)
    }

    /// Reads samples whole into buffers, each as far as its buffer reaches; their sizes, in order.
    pub fn read_many_into(
        &self,
        dataset: &Arc<Dataset>,
        samples: &[SampleId],
        buffers: &mut [&mut [u8]],
        on_missing: OnMissing,
    ) -> Result<Vec<Result<u64, ClientError>>, ClientError> {
        self.fill_buffers(wishes(dataset, samples), buffers, on_missing)
    }

    pub(crate) fn begin_batch(
        &self,
        wishes: Vec<Wish>,
        delivery: Delivery,
        on_missing: OnMissing,
    ) -> Result<Batch<'_>, ClientError> {
        // Before any location is looked at. Its connection is ours until the end: by it the server knows whose views these are.
        let socket = self.take_socket().ok();
        let views = socket.as_ref().map(|socket| self.begin_views(socket.slot()));
        let mut batch = Batch {
            session: self,
            items: Vec::with_capacity(wishes.len()),
            states: Vec::with_capacity(wishes.len()),
            delivery,
            on_missing,
            next: 0,
            arrived: VecDeque::new(),
            far: Far { socket, ..Far::default() },
            leases: Vec::new(),
            is_over: false,
            is_broken: false,
            zeroed: fault::zeroed(),
            views,
            home: std::process::id(),
        };
        batch.look_up(wishes);
        batch.ask()?;
        batch.read_ahead();
        Ok(batch)
    }

    pub(crate) fn fill_buffers(
        &self,
        wishes: Vec<Wish>,
        buffers: &mut [&mut [u8]],
        on_missing: OnMissing,
    ) -> Result<Vec<Result<u64, ClientError>>, ClientError> {
        let mut sizes = Vec::with_capacity(wishes.len());
        // Large ones, and those that are cut off, go straight to where they are wanted.
        let (mut whole, mut whole_at, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for (at, wish) in wishes.into_iter().enumerate() {
            let size = wish.as_ref().map_or(0, Item::size);
            sizes.push(Ok(size));
            if size <= CHUNK_LEN && size <= buffers.get(at).map_or(0, |buffer| buffer.len() as u64) {
                whole.push(wish);
                whole_at.push(at);
            } else {
                others.extend(wish.ok().map(|item| (at, item)));
            }
        }
        let zeroed = fault::zeroed();
        let mut batch = self.begin_batch(whole, Delivery::Arrival, OnMissing::Tell)?;
        while let Some(index) = batch.advance()? {
            let at = whole_at[index];
            match (batch.bytes(index), buffers.get_mut(at)) {
                (Ok(bytes), Some(buffer)) => {
                    buffer[..bytes.len()].copy_from_slice(bytes);
                    if let State::Leased(leased) = &batch.states[index] {
                        // What was copied may not be what was meant.
                        if !batch.holds(leased)
                            && let Err(error) = batch.read_into(index, &mut buffer[..bytes.len()])
                        {
                            sizes[at] = Err(error);
                        }
                        // It is not looked at again.
                        batch.states[index] = State::Empty;
                    }
                }
                // Nothing was wanted of it.
                (Ok(_), None) => {}
                (Err(_), _) => sizes[at] = Err(batch.take_error(index)),
            }
        }
        if fault::zeroed() != zeroed {
            // Some page was missing, of whatever file: that is so rare that all is read again.
            for (index, &at) in whole_at.iter().enumerate() {
                let Some(buffer) = buffers.get_mut(at) else { continue };
                if let Ok(len) = sizes[at]
                    && let Err(error) = batch.read_into(index, &mut buffer[..len as usize])
                {
                    sizes[at] = Err(error);
                }
            }
        }
        if batch.is_gone() {
            return Err(ClientError::Gone);
        }
        drop(batch);
        for (at, item) in others {
            let Some(buffer) = buffers.get_mut(at) else { continue };
            if let Err(error) = self.read_at(&item.dataset, item.sample, 0, buffer, &mut None) {
                sizes[at] = Err(error);
            }
        }
        match sizes.iter().position(Result::is_err) {
            Some(first) if on_missing == OnMissing::Fail => Err(sizes.swap_remove(first).err().unwrap_or(ClientError::Gone)),
            _ => Ok(sizes),
        }
    }
}

fn wishes(dataset: &Arc<Dataset>, samples: &[SampleId]) -> Vec<Wish> {
    samples.iter().map(|&sample| Ok(Item { dataset: dataset.clone(), sample })).collect()
}

impl Item {
    fn size(&self) -> u64 {
        self.dataset.catalog().sample(self.sample).map_or(0, |(size, _)| size)
    }
}

impl<'a> Batch<'a> {
    /// Number of samples that were asked for.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether none were.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// The next sample; waits for it. `None` at the end.
    #[expect(clippy::should_implement_trait, reason = "what it delivers borrows from the batch")]
    pub fn next(&mut self) -> Option<Result<Delivered<'_>, ClientError>> {
        if self.is_over {
            return None;
        }
        let index = match self.advance() {
            Ok(Some(index)) => index,
            Ok(None) => {
                self.is_over = true;
                return None;
            }
            Err(error) => {
                (self.is_over, self.is_broken) = (true, true);
                return Some(Err(error));
            }
        };
        if self.on_missing == OnMissing::Fail && matches!(self.states[index], State::Failed(_)) {
            self.is_over = true;
            return Some(Err(self.take_error(index)));
        }
        Some(Ok(Delivered { index, bytes: self.bytes(index) }))
    }

    /// Waits until all have come.
    pub fn wait(&mut self) -> Result<(), ClientError> {
        if self.is_broken {
            return Err(ClientError::Protocol("the batch has failed before"));
        }
        while let Some(delivered) = self.next() {
            delivered?;
        }
        Ok(())
    }

    /// A sample that has been delivered, by its place in what was asked for.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        let is_there = match self.states.get(index) {
            None | Some(State::Far | State::Later) => false,
            Some(State::Leased(leased)) => self.holds(leased),
            Some(_) => true,
        };
        if is_there { self.bytes(index).ok() } else { None }
    }

    /// Whether what was looked at was real until now: the session goes on, no dataset of the batch was replaced, and no lease on what
    /// was delivered was revoked.
    pub fn is_good(&self) -> bool {
        let is_whole = !self.is_broken && self.zeroed == fault::zeroed() && !self.is_gone();
        let is_lost = |state: &State| matches!(state, State::Leased(leased) if leased.is_delivered && !self.holds(leased));
        is_whole && !self.states.iter().any(is_lost)
    }

    /// Whether the session has ended, or a dataset of the batch was replaced.
    fn is_gone(&self) -> bool {
        let mut last: *const Dataset = std::ptr::null();
        let is_gone = |item: &Item| {
            let is_other = !std::ptr::eq(std::mem::replace(&mut last, Arc::as_ptr(&item.dataset)), Arc::as_ptr(&item.dataset));
            is_other && item.dataset.is_gone()
        };
        self.session.is_gone() || self.items.iter().flatten().any(is_gone)
    }

    fn take_error(&mut self, index: usize) -> ClientError {
        match std::mem::replace(&mut self.states[index], State::Failed(ClientError::Gone)) {
            State::Failed(error) => error,
            _ => ClientError::Gone,
        }
    }

    /// Finds where each item is.
    fn look_up(&mut self, wishes: Vec<Wish>) {
        for item in wishes.iter().flatten() {
            item.dataset.catalog().prefetch_sample(item.sample);
        }
        for item in wishes.iter().flatten() {
            if let Some((_, blocks)) = item.dataset.catalog().sample(item.sample) {
                item.dataset.prefetch_location(BlockId(blocks.start));
            }
        }
        let mut local = [Reads::default(); SOURCES];
        for (index, wish) in wishes.into_iter().enumerate() {
            let (item, state) = match wish {
                Ok(item) => {
                    let state = self.find(&item, index, &mut local);
                    (Some(item), state)
                }
                Err(error) => (None, State::Failed(error)),
            };
            self.items.push(item);
            self.states.push(state);
        }
        for source in [Source::Segment, Source::Cached] {
            let Reads { count, bytes } = local[source as usize];
            if count > 0 {
                self.session.count(source, count, bytes);
            }
        }
    }

    fn find(&mut self, item: &Item, index: usize, local: &mut [Reads; SOURCES]) -> State {
        let Some((size, blocks)) = item.dataset.catalog().sample(item.sample) else {
            return State::Failed(ClientError::Protocol("an unknown sample"));
        };
        let block = BlockId(blocks.start);
        let (place, source) = match item.dataset.find(block) {
            _ if size == 0 => return State::Empty,
            _ if size > CHUNK_LEN => return State::Later,
            Some(Location::Owned(place)) => (place, Source::Segment),
            Some(Location::Cached(place)) if self.views.is_some() => (place, Source::Cached),
            Some(Location::Cached(_)) => return State::Later,
            // What lies in the arena has to be leased before it is looked at.
            Some(Location::Arena { .. }) | None => {
                let chunk = Chunk { block, index: 0 };
                self.far.waiting.entry(item.dataset.id()).or_default().push((index, chunk));
                return State::Far;
            }
        };
        if item.dataset.view(place, size).is_none() {
            return State::Later;
        }
        local[source as usize].add(Reads { count: 1, bytes: size });
        State::Segment(place, size)
    }

    /// Has the drives begin to read all of the batch at once, if some of it is not in memory.
    fn read_ahead(&self) {
        let in_segments = || {
            let items = self.items.iter().zip(&self.states);
            items.filter_map(|(item, state)| match (item, state) {
                (Some(item), &State::Segment(place, len)) => Some((&item.dataset, place, len)),
                _ => None,
            })
        };
        let step = (self.items.len() / SAMPLED).max(1);
        let is_cold = in_segments().step_by(step).any(|(dataset, place, len)| !dataset.is_resident(place, len));
        if !self.session.is_cold(is_cold.then_some(COLD_BATCHES)) {
            return;
        }
        let mut places: Vec<(&Arc<Dataset>, DrivePosition, u64)> = in_segments().collect();
        places.sort_unstable_by_key(|(dataset, place, _)| (dataset.id().0, place.drive, place.offset));
        places.into_iter().for_each(|(dataset, place, len)| dataset.read_ahead(place, len));
    }

    /// The next item to be delivered, which is there then.
    fn advance(&mut self) -> Result<Option<usize>, ClientError> {
        self.let_go_if_asked()?;
        let index = match self.delivery {
            Delivery::Given => {
                let index = self.next;
                if index == self.items.len() {
                    return Ok(None);
                }
                self.next += 1;
                while matches!(self.states[index], State::Far) {
                    self.receive()?;
                }
                index
            }
            Delivery::Arrival => {
                while self.next < self.items.len() && matches!(self.states[self.next], State::Far) {
                    self.next += 1;
                }
                if self.next < self.items.len() {
                    self.next += 1;
                    self.next - 1
                } else {
                    loop {
                        if let Some(index) = self.arrived.pop_front() {
                            break index;
                        }
                        if !self.far.is_under_way && self.far.is_done() {
                            return Ok(None);
                        }
                        self.receive()?;
                    }
                }
            }
        };
        if self.session.verifies_reads() {
            self.verify(index);
        }
        // Asked after the bytes were compared: what was revoked meanwhile says nothing.
        if matches!(self.states[index], State::Later) || self.is_lost(index) {
            self.states[index] = self.read_whole(index).map_or_else(State::Failed, State::Owned);
        }
        if let State::Leased(leased) = &mut self.states[index] {
            leased.is_delivered = true;
        }
        Ok(Some(index))
    }

    /// Whether an item is not where it was any more: its lease was revoked, or its drive failed where others looked.
    fn is_lost(&self, index: usize) -> bool {
        match &self.states[index] {
            State::Leased(leased) => !self.holds(leased),
            State::Segment(..) => self.bytes(index).is_err(),
            _ => false,
        }
    }

    fn read_whole(&self, index: usize) -> Result<Vec<u8>, ClientError> {
        let item = self.items[index].as_ref().ok_or(ClientError::Gone)?;
        let (size, _) = item.dataset.catalog().sample(item.sample).ok_or(ClientError::Protocol("an unknown sample"))?;
        let mut bytes = vec![0; size as usize];
        self.read_into(index, &mut bytes)?;
        Ok(bytes)
    }

    fn read_into(&self, index: usize, buffer: &mut [u8]) -> Result<(), ClientError> {
        let item = self.items[index].as_ref().ok_or(ClientError::Gone)?;
        self.session.read_at(&item.dataset, item.sample, 0, buffer, &mut None).map(|_| ())
    }

    fn verify(&mut self, index: usize) {
        let Some(item) = &self.items[index] else { return };
        let Some((_, blocks)) = item.dataset.catalog().sample(item.sample) else { return };
        let chunk = Chunk { block: BlockId(blocks.start), index: 0 };
        if let (Ok(bytes), false) = (self.bytes(index), blocks.is_empty())
            && self.session.verify(&item.dataset, chunk, bytes).is_err()
        {
            // The copy that was looked at is bad; reading it by itself has it replaced, if there is another.
            self.states[index] = self.read_whole(index).map_or_else(State::Failed, State::Owned);
        }
    }

    fn bytes(&self, index: usize) -> Result<&[u8], &ClientError> {
        static NOWHERE: ClientError = ClientError::Protocol("a sample that is nowhere");
        match &self.states[index] {
            State::Empty => Ok(&[]),
            State::Segment(place, len) => {
                self.items[index].as_ref().and_then(|item| item.dataset.view(*place, *len)).ok_or(&NOWHERE)
            }
            State::Leased(leased) => self.session.arena.leased(leased.offset, leased.len).ok_or(&NOWHERE),
            State::Owned(bytes) => Ok(bytes),
            State::Failed(error) => Err(error),
            State::Later | State::Far => Err(&NOWHERE),
        }
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        if self.home != std::process::id() {
            // Its parent's, who ends them.
            std::mem::forget(self.views.take());
            return;
        }
        // Before the connection is another's.
        drop(self.views.take());
        // Where the connection fails, its end is the leases' end.
        let is_released = self.release().is_ok();
        if let Some(socket) = self.far.socket.take().filter(|_| is_released && !self.far.is_under_way) {
            self.session.put_socket(socket);
        }
    }
}
