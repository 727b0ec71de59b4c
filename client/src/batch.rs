//! Reads many samples at once: `read_many`, and in [`fill`] `read_many_into`.
//!
//! If a sample is on this node, the batch lends it in place, as a part of a mapped segment. The batch requests all other samples
//! from the server with one message. As they arrive, it lends them in the arena, under a lease.
//!
//! The server may revoke a lease when a batch makes no progress for a long time, because the batch's process reads nothing from
//! the socket, or because other processes wait for room in the arena. The batch then reads a sample again if it was not delivered
//! yet. For samples that were delivered, [`Batch::is_good`] returns `false`.
//!
//! A batch belongs to one process: a forked child may look at samples that its parent's batch has delivered, but cannot get
//! further samples from the batch.

mod fill;
mod remote;

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::Arc;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, SampleId};
use dayfly_meta::limits::CHUNK_LEN;
use dayfly_meta::segment::{DrivePosition, Location};
use dayfly_meta::wire::status::{Reads, SOURCES, Source};

use crate::attachment::{Connection, Views};
use crate::fetch::LeasedChunk;
use crate::{ClientError, Dataset, Session, fault};
pub(crate) use fill::WantedSamples;
use remote::RemoteChunks;

/// The order in which a batch delivers its samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Delivery {
    /// In the order in which they were requested.
    #[default]
    InOrder,
    /// As soon as each is available: samples on this node come first.
    AsAvailable,
}

/// What a batch does about a sample that cannot be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnMissing {
    /// The first such sample ends the batch with its error.
    #[default]
    Fail,
    /// The batch delivers the error in the sample's place and reads the others.
    Report,
}

/// Names a sample of some dataset.
#[derive(Clone)]
pub(crate) struct SampleRef {
    pub(crate) dataset: Arc<Dataset>,
    pub(crate) sample: SampleId,
}

/// A sample that a batch delivers.
#[derive(Debug)]
pub struct Delivered<'a> {
    /// The sample's index in the request.
    pub index: usize,
    /// All bytes of the sample, or the reason why they cannot be read.
    pub bytes: Result<&'a [u8], &'a ClientError>,
}

/// Samples that are being read, and that stay in place until the batch is dropped.
///
/// Until then, a program may look at delivered samples, including through [`Self::get`]. Before it trusts what it saw, it must
/// call [`Self::is_good`].
///
/// `S` refers to the session: a plain reference, or an owner such as an `Arc` for a batch that outlives the caller.
pub struct Batch<S: Deref<Target = Session>> {
    session: S,
    items: Vec<Option<SampleRef>>,
    states: Vec<ItemState>,
    /// Whether each item was delivered. Before that, its bytes may still have to be verified.
    is_delivered: Vec<bool>,
    delivery: Delivery,
    on_missing: OnMissing,
    /// The first item that has not been delivered yet.
    next: usize,
    /// Remote items that have arrived and were not delivered yet, for [`Delivery::AsAvailable`].
    arrived: VecDeque<usize>,
    remote: RemoteChunks,
    leases: Vec<u64>,
    /// How much of the arena these leases cover.
    leased_bytes: u64,
    /// Whether [`Self::next`] has returned the end or an error.
    is_over: bool,
    /// Whether the connection failed. The leases then ended with the connection.
    is_broken: bool,
    /// Whether the call that was interrupted just now can be made again.
    can_go_on: bool,
    /// Whether the batch lends cached blocks, which stay in place only while `views` lives.
    has_cached: bool,
    /// The value of [`fault::zeroed`] when the batch began.
    zeroed: usize,
    /// Keeps cached blocks of this node in place while the batch lives. `None` if the server could not be reached; in that case
    /// there is no server that could evict a block either.
    views: Option<Views>,
    /// The process that owns the connection and the views.
    process: u32,
}

/// The place of an item's bytes.
enum ItemState {
    /// The sample has no bytes, or its bytes are no longer needed.
    Empty,
    /// In a mapped segment: position and length.
    InSegment(DrivePosition, u64),
    /// In the arena, under a lease.
    Leased(LeasedSample),
    /// In memory of this process.
    Copied(Vec<u8>),
    /// To be copied when it is delivered, because the sample has several chunks or cannot be viewed in place.
    Deferred,
    /// Requested from the server, or about to be.
    Pending,
    /// Cannot be read.
    Failed(ClientError),
}

/// A sample of one chunk in the arena.
#[derive(Clone, Copy)]
struct LeasedSample {
    chunk: LeasedChunk,
    len: u64,
    /// Whether the program may have looked at the bytes.
    is_delivered: bool,
}

/// How many items of a batch are probed to find out whether they are in memory.
const PROBES: usize = 4;
/// If a probe finds an item that is not in memory, this many batches, beginning with this one, read ahead without probing.
const COLD_BATCHES: u32 = 16;

/// A requested sample, or the reason why it cannot be read.
pub(crate) type RequestedSample = Result<SampleRef, ClientError>;

impl Session {
    /// Begins to read whole samples. An error that concerns one sample is returned when that sample
    /// is delivered.
    ///
    /// # Errors
    /// Only if the session has ended or the connection to the server fails.
    pub fn read_many(
        &self,
        dataset: &Arc<Dataset>,
        samples: &[SampleId],
        delivery: Delivery,
        on_missing: OnMissing,
    ) -> Result<Batch<&Self>, ClientError> {
        Batch::of(self, dataset, samples, delivery, on_missing)
    }
}

/// Makes the processor fetch the records and the locations of all samples at the same time.
fn prefetch(requested: &[RequestedSample]) {
    for item in requested.iter().flatten() {
        item.dataset.catalog().prefetch_sample(item.sample);
    }
    for item in requested.iter().flatten() {
        if let Some((_, blocks)) = item.dataset.catalog().sample(item.sample) {
            item.dataset.prefetch_location(BlockId(blocks.start));
        }
    }
}

fn requested(dataset: &Arc<Dataset>, samples: &[SampleId]) -> Vec<RequestedSample> {
    samples.iter().map(|&sample| Ok(SampleRef { dataset: dataset.clone(), sample })).collect()
}

/// If some samples are not in memory, makes the drives begin to read all of them, without waiting. `in_segments` iterates over the
/// samples that lie in segments; at most `count` of them.
fn read_ahead<'a, I>(session: &Session, count: usize, in_segments: impl Fn() -> I)
where
    I: Iterator<Item = (&'a Arc<Dataset>, DrivePosition, u64)>,
{
    let step = (count / PROBES).max(1);
    let is_cold = in_segments().step_by(step).any(|(dataset, position, len)| !dataset.is_resident(position, len));
    if !session.is_cold(is_cold.then_some(COLD_BATCHES)) {
        return;
    }
    let mut positions: Vec<(&Arc<Dataset>, DrivePosition, u64)> = in_segments().collect();
    positions.sort_unstable_by_key(|(dataset, position, _)| (dataset.id().0, position.drive, position.offset));
    positions.into_iter().for_each(|(dataset, position, len)| dataset.read_ahead(position, len));
}

impl SampleRef {
    fn size(&self) -> u64 {
        self.dataset.catalog().sample(self.sample).map_or(0, |(size, _)| size)
    }
}

/// Replaces the datasets of items if another server has taken the place of the one that this process had them from. Most items of a
/// batch are of the same dataset.
fn renew(session: &Session, requested: &mut [RequestedSample]) {
    let mut current: *const Dataset = std::ptr::null();
    let mut renewed: Option<(Arc<Dataset>, Arc<Dataset>)> = None;
    for item in requested.iter_mut().flatten() {
        if std::ptr::eq(current, Arc::as_ptr(&item.dataset)) {
            continue;
        }
        if let Some((_, new)) = renewed.as_ref().filter(|(old, _)| Arc::ptr_eq(old, &item.dataset)) {
            item.dataset = new.clone();
            continue;
        }
        match session.has_left(&item.dataset).then(|| session.renewed(&item.dataset)) {
            Some(Ok(new)) => renewed = Some((std::mem::replace(&mut item.dataset, new.clone()), new)),
            _ => current = Arc::as_ptr(&item.dataset),
        }
    }
}

impl<S: Deref<Target = Session>> Batch<S> {
    /// Begins to read whole samples, like [`Session::read_many`].
    ///
    /// # Errors
    /// Those of [`Session::read_many`].
    pub fn of(
        session: S,
        dataset: &Arc<Dataset>,
        samples: &[SampleId],
        delivery: Delivery,
        on_missing: OnMissing,
    ) -> Result<Self, ClientError> {
        Self::begin(session, requested(dataset, samples), delivery, on_missing)
    }

    pub(crate) fn begin(
        session: S,
        mut requested: Vec<RequestedSample>,
        delivery: Delivery,
        on_missing: OnMissing,
    ) -> Result<Self, ClientError> {
        // This may attach to another server, which is then the one that the views begin at.
        renew(&session, &mut requested);
        // The views must begin before any location is looked up. The batch keeps its connection until the batch ends, because the
        // server identifies the owner of the views by the connection.
        let connection = match session.take_connection() {
            Err(ClientError::Interrupted) => return Err(ClientError::Interrupted),
            taken => taken.ok(),
        };
        let begin_views = |Connection { socket, attachment }: &Connection| attachment.begin_views(socket.slot());
        let views = connection.as_ref().map(begin_views);
        let mut batch = Self {
            session,
            items: Vec::with_capacity(requested.len()),
            states: Vec::with_capacity(requested.len()),
            is_delivered: vec![false; requested.len()],
            delivery,
            on_missing,
            next: 0,
            arrived: VecDeque::new(),
            remote: RemoteChunks { connection, ..RemoteChunks::default() },
            leases: Vec::new(),
            leased_bytes: 0,
            is_over: false,
            is_broken: false,
            can_go_on: false,
            has_cached: false,
            zeroed: fault::zeroed(),
            views,
            process: std::process::id(),
        };
        batch.look_up(requested);
        batch.send_request()?;
        batch.read_ahead();
        Ok(batch)
    }

    /// Returns the number of samples that were requested.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Returns whether no sample was requested.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Waits for the next sample and delivers it; `None` after the last. After [`ClientError::Interrupted`], the batch goes on unless
    /// it was sending a request.
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
                let can_go_on = matches!(error, ClientError::Interrupted) && std::mem::take(&mut self.can_go_on);
                (self.is_over, self.is_broken) = (!can_go_on, !can_go_on);
                return Some(Err(error));
            }
        };
        if self.on_missing == OnMissing::Fail && matches!(self.states[index], ItemState::Failed(_)) {
            self.is_over = true;
            return Some(Err(self.take_error(index)));
        }
        Some(Ok(Delivered { index, bytes: self.bytes(index) }))
    }

    /// Waits until all samples have been delivered.
    ///
    /// # Errors
    /// If the connection fails or has failed before. With [`OnMissing::Fail`], also if a sample cannot be read.
    pub fn wait(&mut self) -> Result<(), ClientError> {
        if self.is_broken {
            return Err(ClientError::Protocol("the batch has failed before"));
        }
        while let Some(delivered) = self.next() {
            delivered?;
        }
        Ok(())
    }

    /// Returns the bytes of a sample that was delivered, by its index in the request. `None` if it was not delivered, failed, or
    /// lost its lease.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        self.delivered(index)?.ok()
    }

    /// Like [`Self::get`], but returns the error of a sample that failed or lost its lease. `None` if it was not delivered.
    pub fn delivered(&self, index: usize) -> Option<Result<&[u8], &ClientError>> {
        static REVOKED: ClientError = ClientError::Revoked;
        if !*self.is_delivered.get(index)? {
            return None;
        }
        match self.states.get(index)? {
            ItemState::Pending | ItemState::Deferred => None,
            ItemState::Leased(leased) if !self.holds(leased) => Some(Err(&REVOKED)),
            _ => Some(self.bytes(index)),
        }
    }

    /// Ends the use of the connection if all samples have been delivered and stay where they are without it. With `copies`, samples
    /// that would not stay are copied first. Returns whether the batch still uses the connection.
    ///
    /// # Errors
    /// If the connection fails.
    pub fn settle(&mut self, copies: bool) -> Result<bool, ClientError> {
        let is_done = self.remote.is_done() && !self.remote.is_in_flight && self.process == std::process::id();
        if !is_done || self.is_broken {
            return Ok(self.remote.connection.is_some());
        }
        if copies {
            self.copy_and_release()?;
            self.copy_cached();
        }
        if self.leases.is_empty() && !self.has_cached {
            drop(self.views.take());
            if let Some(connection) = self.remote.connection.take() {
                self.session.put_connection(connection);
            }
        }
        Ok(self.remote.connection.is_some())
    }

    /// Copies the samples that another block may replace when the views end.
    fn copy_cached(&mut self) {
        for index in 0..self.states.len() {
            if self.has_cached
                && let ItemState::InSegment(..) = self.states[index]
                && let Ok(copy) = self.bytes(index).map(<[u8]>::to_vec)
                && self.bytes(index).is_ok()
            {
                self.states[index] = ItemState::Copied(copy);
            }
        }
        self.has_cached = false;
    }

    /// Returns whether everything that the program has seen so far is valid: the session is still running, no dataset of the
    /// batch was replaced, no drive failed, and no lease on a delivered sample was revoked.
    pub fn is_good(&self) -> bool {
        let is_whole = !self.is_broken && self.zeroed == fault::zeroed() && !self.is_gone();
        let is_lost =
            |state: &ItemState| matches!(state, ItemState::Leased(leased) if leased.is_delivered && !self.holds(leased));
        is_whole && !self.states.iter().any(is_lost)
    }

    /// Returns whether the session has ended, or a dataset of the batch was replaced.
    fn is_gone(&self) -> bool {
        let mut last: *const Dataset = std::ptr::null();
        let is_gone = |item: &SampleRef| {
            let is_other = !std::ptr::eq(std::mem::replace(&mut last, Arc::as_ptr(&item.dataset)), Arc::as_ptr(&item.dataset));
            is_other && item.dataset.is_gone()
        };
        self.session.is_gone() || self.items.iter().flatten().any(is_gone)
    }

    fn take_error(&mut self, index: usize) -> ClientError {
        match std::mem::replace(&mut self.states[index], ItemState::Failed(ClientError::Gone)) {
            ItemState::Failed(error) => error,
            _ => ClientError::Gone,
        }
    }

    /// Finds the location of each item.
    fn look_up(&mut self, requested: Vec<RequestedSample>) {
        prefetch(&requested);
        let mut local = [Reads::default(); SOURCES];
        for (index, item) in requested.into_iter().enumerate() {
            let (item, state) = match item {
                Ok(item) => {
                    let state = self.find(&item, index, &mut local);
                    (Some(item), state)
                }
                Err(error) => (None, ItemState::Failed(error)),
            };
            self.items.push(item);
            self.states.push(state);
        }
        self.has_cached = local[Source::Cached as usize].count > 0;
        for source in [Source::Segment, Source::Cached] {
            let Reads { count, bytes } = local[source as usize];
            if count > 0
                && let Some(item) = self.items.iter().flatten().next()
            {
                item.dataset.attachment().count(source, count, bytes);
            }
        }
    }

    fn find(&mut self, item: &SampleRef, index: usize, local: &mut [Reads; SOURCES]) -> ItemState {
        let Some((size, blocks)) = item.dataset.catalog().sample(item.sample) else {
            return ItemState::Failed(ClientError::Protocol("an unknown sample"));
        };
        let block = BlockId(blocks.start);
        let (position, source) = match item.dataset.find(block) {
            _ if size == 0 => return ItemState::Empty,
            _ if size > CHUNK_LEN => return ItemState::Deferred,
            Some(Location::Owned(position)) => (position, Source::Segment),
            Some(Location::Cached(position))
                if self.views.as_ref().is_some_and(|views| views.are_at(item.dataset.attachment())) =>
            {
                (position, Source::Cached)
            }
            Some(Location::Cached(_)) => return ItemState::Deferred,
            // Bytes in the arena may only be lent under a lease.
            Some(Location::Arena { .. }) | None => {
                let chunk = Chunk { block, index: 0 };
                self.remote.waiting.entry(item.dataset.id()).or_default().push((index, chunk));
                return ItemState::Pending;
            }
        };
        if item.dataset.view(position, size).is_none() {
            return ItemState::Deferred;
        }
        local[source as usize].add(Reads { count: 1, bytes: size });
        ItemState::InSegment(position, size)
    }

    /// If some of the batch is not in memory, makes the drives begin to read all of it, without waiting.
    fn read_ahead(&self) {
        read_ahead(&self.session, self.items.len(), || {
            let items = self.items.iter().zip(&self.states);
            items.filter_map(|(item, state)| match (item, state) {
                (Some(item), &ItemState::InSegment(position, len)) => Some((&item.dataset, position, len)),
                _ => None,
            })
        });
    }

    /// Waits until the next item can be delivered, and returns its index. The item's bytes or its error are then available.
    fn advance(&mut self) -> Result<Option<usize>, ClientError> {
        self.release_if_recalled()?;
        let index = match self.delivery {
            Delivery::InOrder => {
                let index = self.next;
                if index == self.items.len() {
                    return Ok(None);
                }
                while matches!(self.states[index], ItemState::Pending) {
                    self.receive()?;
                }
                self.next += 1;
                index
            }
            Delivery::AsAvailable => {
                while self.next < self.items.len() && matches!(self.states[self.next], ItemState::Pending) {
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
                        if !self.remote.is_in_flight && self.remote.is_done() {
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
        // The lease is checked after the bytes were verified, because a checksum of revoked bytes means nothing.
        if matches!(self.states[index], ItemState::Deferred) || self.is_lost(index) {
            self.states[index] = match self.read_whole(index) {
                Ok(bytes) => ItemState::Copied(bytes),
                Err(ClientError::Interrupted) => {
                    self.put_back(index);
                    return Err(ClientError::Interrupted);
                }
                Err(error) => ItemState::Failed(error),
            };
        }
        if let ItemState::Leased(leased) = &mut self.states[index] {
            leased.is_delivered = true;
        }
        self.is_delivered[index] = true;
        Ok(Some(index))
    }

    /// Returns whether an item is no longer where it was found: its lease was revoked, or a drive failed and poisoned the window of
    /// the segment in which the item lies.
    fn is_lost(&self, index: usize) -> bool {
        match &self.states[index] {
            ItemState::Leased(leased) => !self.holds(leased),
            ItemState::InSegment(..) => self.bytes(index).is_err(),
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

    /// Verifies an item's only chunk in place. Samples of several chunks are verified as they are copied.
    fn verify(&mut self, index: usize) {
        let Some(item) = &self.items[index] else { return };
        let Some((_, blocks)) = item.dataset.catalog().sample(item.sample) else { return };
        let chunk = Chunk { block: BlockId(blocks.start), index: 0 };
        if let (Ok(bytes), false) = (self.bytes(index), blocks.is_empty())
            && self.session.verify(&item.dataset, chunk, bytes).is_err()
        {
            // This copy is damaged. An ordinary read makes the server replace it, if another copy exists.
            self.states[index] = ItemState::Deferred;
        }
    }

    fn bytes(&self, index: usize) -> Result<&[u8], &ClientError> {
        static UNAVAILABLE: ClientError = ClientError::Protocol("a sample without bytes");
        match &self.states[index] {
            ItemState::Empty => Ok(&[]),
            ItemState::InSegment(position, len) => {
                self.items[index].as_ref().and_then(|item| item.dataset.view(*position, *len)).ok_or(&UNAVAILABLE)
            }
            ItemState::Leased(leased) => {
                let attachment = self.remote.attachment().ok_or(&UNAVAILABLE)?;
                leased.chunk.bytes(attachment, leased.len).map_err(|_| &UNAVAILABLE)
            }
            ItemState::Copied(bytes) => Ok(bytes),
            ItemState::Failed(error) => Err(error),
            ItemState::Deferred | ItemState::Pending => Err(&UNAVAILABLE),
        }
    }
}

impl<S: Deref<Target = Session>> Drop for Batch<S> {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // A forked child must not end its parent's views.
            std::mem::forget(self.views.take());
            return;
        }
        // The views are counted in the connection's slot, so they must end before another request uses the connection.
        drop(self.views.take());
        // If the connection fails, the server ends the connection's leases.
        let is_released = self.release().is_ok();
        if let Some(connection) = self.remote.connection.take().filter(|_| is_released && !self.remote.is_in_flight) {
            self.session.put_connection(connection);
        }
    }
}
