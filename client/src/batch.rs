//! Reads many samples at once: `read_many` and `read_many_into`.
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

mod remote;

use std::collections::VecDeque;
use std::sync::Arc;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, SampleId};
use dayfly_meta::limits::CHUNK_LEN;
use dayfly_meta::segment::{DrivePosition, Location};
use dayfly_meta::wire::status::{Reads, SOURCES, Source};

use crate::attach::Views;
use crate::fetch::LeasedChunk;
use crate::{ClientError, Dataset, Session, fault};
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
pub struct Batch<'a> {
    session: &'a Session,
    items: Vec<Option<SampleRef>>,
    states: Vec<ItemState>,
    delivery: Delivery,
    on_missing: OnMissing,
    /// The first item that has not been delivered yet.
    next: usize,
    /// Remote items that have arrived and were not delivered yet, for [`Delivery::AsAvailable`].
    arrived: VecDeque<usize>,
    remote: RemoteChunks,
    leases: Vec<u64>,
    /// Whether [`Self::next`] has returned the end or an error.
    is_over: bool,
    /// Whether the connection failed. The leases then ended with the connection.
    is_broken: bool,
    /// The value of [`fault::zeroed`] when the batch began.
    zeroed: usize,
    /// Keeps cached blocks of this node in place while the batch lives. `None` if the server could not be reached; in that case
    /// there is no server that could evict a block either.
    views: Option<Views<'a>>,
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
    ) -> Result<Batch<'_>, ClientError> {
        self.begin_batch(requested(dataset, samples), delivery, on_missing)
    }

    /// Reads samples into buffers, each sample up to the length of its buffer. Returns the samples' sizes, in the order of the
    /// request.
    ///
    /// # Errors
    /// If the session has ended or the connection fails. With [`OnMissing::Fail`], also if a sample cannot be read.
    pub fn read_many_into(
        &self,
        dataset: &Arc<Dataset>,
        samples: &[SampleId],
        buffers: &mut [&mut [u8]],
        on_missing: OnMissing,
    ) -> Result<Vec<Result<u64, ClientError>>, ClientError> {
        self.fill_buffers(requested(dataset, samples), buffers, on_missing)
    }

    pub(crate) fn begin_batch(
        &self,
        requested: Vec<RequestedSample>,
        delivery: Delivery,
        on_missing: OnMissing,
    ) -> Result<Batch<'_>, ClientError> {
        // The views must begin before any location is looked up. The batch keeps its connection until the batch ends, because the
        // server identifies the owner of the views by the connection.
        let socket = self.take_socket().ok();
        let views = socket.as_ref().map(|socket| self.begin_views(socket.slot()));
        let mut batch = Batch {
            session: self,
            items: Vec::with_capacity(requested.len()),
            states: Vec::with_capacity(requested.len()),
            delivery,
            on_missing,
            next: 0,
            arrived: VecDeque::new(),
            remote: RemoteChunks { socket, ..RemoteChunks::default() },
            leases: Vec::new(),
            is_over: false,
            is_broken: false,
            zeroed: fault::zeroed(),
            views,
            process: std::process::id(),
        };
        batch.look_up(requested);
        batch.send_request()?;
        batch.read_ahead();
        Ok(batch)
    }

    pub(crate) fn fill_buffers(
        &self,
        requested: Vec<RequestedSample>,
        buffers: &mut [&mut [u8]],
        on_missing: OnMissing,
    ) -> Result<Vec<Result<u64, ClientError>>, ClientError> {
        let mut sizes = Vec::with_capacity(requested.len());
        // Samples of several chunks, and samples that are longer than their buffers, are read straight into the buffers.
        let (mut whole, mut whole_at, mut others) = (Vec::new(), Vec::new(), Vec::new());
        for (at, item) in requested.into_iter().enumerate() {
            let size = item.as_ref().map_or(0, SampleRef::size);
            sizes.push(Ok(size));
            if size <= CHUNK_LEN && size <= buffers.get(at).map_or(0, |buffer| buffer.len() as u64) {
                whole.push(item);
                whole_at.push(at);
            } else {
                others.extend(item.ok().map(|item| (at, item)));
            }
        }
        let zeroed = fault::zeroed();
        let mut batch = self.begin_batch(whole, Delivery::AsAvailable, OnMissing::Report)?;
        while let Some(index) = batch.advance()? {
            let at = whole_at[index];
            match (batch.bytes(index), buffers.get_mut(at)) {
                (Ok(bytes), Some(buffer)) => {
                    buffer[..bytes.len()].copy_from_slice(bytes);
                    if let ItemState::Leased(leased) = &batch.states[index] {
                        // If the lease was revoked, the bytes just copied may be another chunk's.
                        if !batch.holds(leased)
                            && let Err(error) = batch.read_into(index, &mut buffer[..bytes.len()])
                        {
                            sizes[at] = Err(error);
                        }
                        // Nobody looks at the leased bytes again.
                        batch.states[index] = ItemState::Empty;
                    }
                }
                // The caller passed no buffer for this sample.
                (Ok(_), None) => {}
                (Err(_), _) => sizes[at] = Err(batch.take_error(index)),
            }
        }
        if fault::zeroed() != zeroed {
            // A page of some file was missing. This is rare enough to simply read all samples again.
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

fn requested(dataset: &Arc<Dataset>, samples: &[SampleId]) -> Vec<RequestedSample> {
    samples.iter().map(|&sample| Ok(SampleRef { dataset: dataset.clone(), sample })).collect()
}

impl SampleRef {
    fn size(&self) -> u64 {
        self.dataset.catalog().sample(self.sample).map_or(0, |(size, _)| size)
    }
}

impl<'a> Batch<'a> {
    /// Returns the number of samples that were requested.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Returns whether no sample was requested.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Waits for the next sample and delivers it; `None` after the last.
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
        let is_there = match self.states.get(index) {
            None | Some(ItemState::Pending | ItemState::Deferred) => false,
            Some(ItemState::Leased(leased)) => self.holds(leased),
            Some(_) => true,
        };
        if is_there { self.bytes(index).ok() } else { None }
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

    /// Finds the location of each item. Before that, two passes let the processor fetch the records of all items at the same time.
    fn look_up(&mut self, requested: Vec<RequestedSample>) {
        for item in requested.iter().flatten() {
            item.dataset.catalog().prefetch_sample(item.sample);
        }
        for item in requested.iter().flatten() {
            if let Some((_, blocks)) = item.dataset.catalog().sample(item.sample) {
                item.dataset.prefetch_location(BlockId(blocks.start));
            }
        }
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
        for source in [Source::Segment, Source::Cached] {
            let Reads { count, bytes } = local[source as usize];
            if count > 0 {
                self.session.count(source, count, bytes);
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
            Some(Location::Cached(position)) if self.views.is_some() => (position, Source::Cached),
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
        let in_segments = || {
            let items = self.items.iter().zip(&self.states);
            items.filter_map(|(item, state)| match (item, state) {
                (Some(item), &ItemState::InSegment(position, len)) => Some((&item.dataset, position, len)),
                _ => None,
            })
        };
        let step = (self.items.len() / PROBES).max(1);
        let is_cold = in_segments().step_by(step).any(|(dataset, position, len)| !dataset.is_resident(position, len));
        if !self.session.is_cold(is_cold.then_some(COLD_BATCHES)) {
            return;
        }
        let mut positions: Vec<(&Arc<Dataset>, DrivePosition, u64)> = in_segments().collect();
        positions.sort_unstable_by_key(|(dataset, position, _)| (dataset.id().0, position.drive, position.offset));
        positions.into_iter().for_each(|(dataset, position, len)| dataset.read_ahead(position, len));
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
                self.next += 1;
                while matches!(self.states[index], ItemState::Pending) {
                    self.receive()?;
                }
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
            self.states[index] = self.read_whole(index).map_or_else(ItemState::Failed, ItemState::Copied);
        }
        if let ItemState::Leased(leased) = &mut self.states[index] {
            leased.is_delivered = true;
        }
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
            self.states[index] = self.read_whole(index).map_or_else(ItemState::Failed, ItemState::Copied);
        }
    }

    fn bytes(&self, index: usize) -> Result<&[u8], &ClientError> {
        static UNAVAILABLE: ClientError = ClientError::Protocol("a sample without bytes");
        match &self.states[index] {
            ItemState::Empty => Ok(&[]),
            ItemState::InSegment(position, len) => {
                self.items[index].as_ref().and_then(|item| item.dataset.view(*position, *len)).ok_or(&UNAVAILABLE)
            }
            ItemState::Leased(leased) => leased.chunk.bytes(self.session, leased.len).map_err(|_| &UNAVAILABLE),
            ItemState::Copied(bytes) => Ok(bytes),
            ItemState::Failed(error) => Err(error),
            ItemState::Deferred | ItemState::Pending => Err(&UNAVAILABLE),
        }
    }
}

impl Drop for Batch<'_> {
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
        if let Some(socket) = self.remote.socket.take().filter(|_| is_released && !self.remote.is_in_flight) {
            self.session.put_socket(socket);
        }
    }
}
