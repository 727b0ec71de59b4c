//! Reads many samples into buffers: `read_many_into`.
//!
//! A sample that lies on this node, or in the arena, is copied straight into its buffer, without a message, a lease or a view.
//! After each copy, the location table says whether the bytes were still there; if not, the sample is read again. All other
//! samples come through a [`Batch`]. Its request is sent first, so that they are on their way while this process copies.
//!
//! Nothing is allocated for each sample, and no reference is counted for one.

use std::sync::Arc;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, SampleId};
use dayfly_meta::limits::CHUNK_LEN;
use dayfly_meta::wire::status::{Reads, SOURCES, Source};

use super::{Batch, Delivery, ItemState, OnMissing, SampleRef, read_ahead};
use crate::{ClientError, Dataset, Session, fault};

/// The samples that a call wants, in the order of the call.
#[derive(Default)]
pub(crate) struct WantedSamples {
    datasets: Vec<Arc<Dataset>>,
    samples: Vec<Result<(usize, SampleId), ClientError>>,
}

/// A sample that is read.
#[derive(Clone, Copy)]
struct Item {
    /// Index of the dataset.
    dataset: usize,
    sample: SampleId,
    /// The sample's first block.
    block: BlockId,
    /// How many bytes are read: the sample's size, or less if its buffer has no room for them.
    len: usize,
    route: Route,
}

/// How the bytes of a sample come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Route {
    /// Nothing is read: the sample is empty, cannot be read, or has no buffer.
    Nowhere,
    /// By a copy from this node's drives or from the arena.
    Copy,
    /// With the batch.
    Batch,
    /// One by one: a sample of several blocks, a large one that is not here, and one that is not read whole.
    Alone,
}

/// How many samples ahead of the copy the processor fetches the start of a sample.
const AHEAD: usize = 2;

impl WantedSamples {
    /// Makes room for a number of samples.
    pub(crate) fn with_capacity(count: usize) -> Self {
        Self { datasets: Vec::new(), samples: Vec::with_capacity(count) }
    }

    /// Adds a sample.
    pub(crate) fn add(&mut self, dataset: &Arc<Dataset>, sample: SampleId) {
        // Almost always the last one.
        let known = self.datasets.iter().rposition(|known| Arc::ptr_eq(known, dataset));
        let at = known.unwrap_or_else(|| {
            self.datasets.push(dataset.clone());
            self.datasets.len() - 1
        });
        self.samples.push(Ok((at, sample)));
    }

    /// Adds the reason why a sample cannot be read.
    pub(crate) fn add_error(&mut self, error: ClientError) {
        self.samples.push(Err(error));
    }
}

impl Session {
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
        let samples = samples.iter().map(|&sample| Ok((0, sample))).collect();
        self.fill_buffers(WantedSamples { datasets: vec![dataset.clone()], samples }, buffers, on_missing)
    }

    pub(crate) fn fill_buffers(
        &self,
        mut wanted: WantedSamples,
        buffers: &mut [&mut [u8]],
        on_missing: OnMissing,
    ) -> Result<Vec<Result<u64, ClientError>>, ClientError> {
        for dataset in &mut wanted.datasets {
            // Another server may have taken the place of the one that this process had the dataset from.
            if self.has_left(dataset) {
                match self.renewed(dataset) {
                    Ok(renewed) => *dataset = renewed,
                    Err(ClientError::Interrupted) => return Err(ClientError::Interrupted),
                    Err(_) => {}
                }
            }
        }
        let mut filling = Filling { session: self, datasets: &wanted.datasets, items: Vec::new(), sizes: Vec::new(), buffers };
        filling.look_up(wanted.samples);
        let absent = filling.along(Route::Batch);
        let batch = filling.begin(&absent)?;
        filling.read_ahead();
        filling.copy_all();
        filling.drain(batch, &absent)?;
        // Samples that were here a moment ago, but not when they were to be copied.
        let lost = filling.along(Route::Copy);
        let batch = filling.begin(&lost)?;
        filling.drain(batch, &lost)?;
        if self.is_gone() || wanted.datasets.iter().any(|dataset| dataset.is_gone()) {
            return Err(ClientError::Gone);
        }
        filling.read_alone();
        let mut sizes = filling.sizes;
        if sizes.iter().any(|size| matches!(size, Err(ClientError::Interrupted))) {
            return Err(ClientError::Interrupted);
        }
        match sizes.iter().position(Result::is_err) {
            Some(first) if on_missing == OnMissing::Fail => Err(sizes.swap_remove(first).err().unwrap_or(ClientError::Gone)),
            _ => Ok(sizes),
        }
    }
}

/// A call of `read_many_into`.
struct Filling<'a, 'b> {
    session: &'a Session,
    datasets: &'a [Arc<Dataset>],
    items: Vec<Item>,
    sizes: Vec<Result<u64, ClientError>>,
    buffers: &'a mut [&'b mut [u8]],
}

impl<'a> Filling<'a, '_> {
    /// Decides how each sample is read. Before that, two passes let the processor fetch the records of all samples at the same
    /// time.
    fn look_up(&mut self, samples: Vec<Result<(usize, SampleId), ClientError>>) {
        for &(dataset, sample) in samples.iter().flatten() {
            self.datasets[dataset].catalog().prefetch_sample(sample);
        }
        self.items.reserve_exact(samples.len());
        self.sizes.reserve_exact(samples.len());
        for (at, wanted) in samples.into_iter().enumerate() {
            let room = self.buffers.get(at).map_or(0, |buffer| buffer.len());
            let found = wanted.and_then(|(dataset, sample)| {
                let found = self.datasets[dataset].catalog().sample(sample);
                let (size, blocks) = found.ok_or(ClientError::Protocol("an unknown sample"))?;
                self.datasets[dataset].prefetch_location(BlockId(blocks.start));
                let len = usize::try_from(size).unwrap_or(usize::MAX).min(room);
                // A sample of several blocks is read block by block.
                let route = match len {
                    0 => Route::Nowhere,
                    _ if blocks.len() > 1 => Route::Alone,
                    _ => Route::Copy,
                };
                Ok((size, Item { dataset, sample, block: BlockId(blocks.start), len, route }))
            });
            let (size, item) = match found {
                Ok((size, item)) => (Ok(size), item),
                Err(error) => {
                    let item = Item { dataset: 0, sample: SampleId(0), block: BlockId(0), len: 0, route: Route::Nowhere };
                    (Err(error), item)
                }
            };
            self.sizes.push(size);
            self.items.push(item);
        }
        for (item, size) in self.items.iter_mut().zip(&self.sizes) {
            if item.route != Route::Copy {
                continue;
            }
            let is_whole = size.as_ref().is_ok_and(|&size| size == item.len as u64 && size <= CHUNK_LEN);
            item.route = match self.datasets[item.dataset].find(item.block) {
                // A checksum is one of a whole chunk.
                _ if self.session.verifies_reads() && !is_whole => Route::Alone,
                Some(_) => Route::Copy,
                None if is_whole => Route::Batch,
                None => Route::Alone,
            };
        }
    }

    /// Returns the indices of the samples that come in one way.
    fn along(&self, route: Route) -> Vec<usize> {
        (0..self.items.len()).filter(|&at| self.items[at].route == route).collect()
    }

    /// Begins to read samples with a batch; `None` if there are none.
    fn begin(&self, indices: &[usize]) -> Result<Option<Batch<&'a Session>>, ClientError> {
        if indices.is_empty() {
            return Ok(None);
        }
        let of = |item: &Item| SampleRef { dataset: self.datasets[item.dataset].clone(), sample: item.sample };
        let requested = indices.iter().map(|&at| Ok(of(&self.items[at]))).collect();
        Batch::begin(self.session, requested, Delivery::AsAvailable, OnMissing::Report).map(Some)
    }

    /// If some of the samples that are here are not in memory, makes the drives begin to read all of them, without waiting.
    fn read_ahead(&self) {
        read_ahead(self.session, self.items.len(), || {
            self.items.iter().filter(|item| item.route == Route::Copy).filter_map(|item| {
                let dataset = &self.datasets[item.dataset];
                Some((dataset, dataset.find(item.block)?.position()?, item.len as u64))
            })
        });
    }

    /// Copies the samples that are here. A sample that was not copied keeps its route, if a batch can bring it, or is read alone.
    fn copy_all(&mut self) {
        let mut counted = Counted { dataset: None, reads: [Reads::default(); SOURCES] };
        for at in 0..self.items.len() {
            if let Some(next) = self.items.get(at + AHEAD).filter(|next| next.route == Route::Copy) {
                self.datasets[next.dataset].prefetch_block(next.block, next.len as u64);
            }
            let Item { dataset, block, len, route, .. } = self.items[at];
            if route != Route::Copy {
                continue;
            }
            let dataset = &self.datasets[dataset];
            let buffer = &mut self.buffers[at][..len];
            let is_good = |bytes: &[u8]| {
                !self.session.verifies_reads() || self.session.verify(dataset, Chunk { block, index: 0 }, bytes).is_ok()
            };
            let is_whole = self.sizes[at].as_ref().is_ok_and(|&size| size == len as u64 && size <= CHUNK_LEN);
            self.items[at].route = match dataset.read_here(block, 0, buffer) {
                Ok(Some(source)) => {
                    counted.of(dataset).reads[source as usize].add(Reads { count: 1, bytes: len as u64 });
                    if is_good(buffer) { Route::Nowhere } else { Route::Alone }
                }
                Ok(None) if is_whole => Route::Copy,
                // An ordinary read finds out what to do about a bad copy or a lost descriptor, and what error to return.
                Ok(None) | Err(_) => Route::Alone,
            };
        }
    }

    /// Copies the samples of a batch as they arrive. `indices` has their indices in the call.
    fn drain(&mut self, batch: Option<Batch<&Session>>, indices: &[usize]) -> Result<(), ClientError> {
        let Some(mut batch) = batch else { return Ok(()) };
        while let Some(index) = batch.advance()? {
            let at = indices[index];
            let buffer = &mut self.buffers[at];
            match batch.bytes(index) {
                Ok(bytes) => {
                    buffer[..bytes.len()].copy_from_slice(bytes);
                    if let ItemState::Leased(leased) = &batch.states[index] {
                        // If the lease was revoked, the bytes just copied may be another chunk's.
                        if !batch.holds(leased)
                            && let Err(error) = batch.read_into(index, &mut buffer[..bytes.len()])
                        {
                            self.sizes[at] = Err(error);
                        }
                        // Nobody looks at the leased bytes again.
                        batch.states[index] = ItemState::Empty;
                    }
                }
                Err(_) => self.sizes[at] = Err(batch.take_error(index)),
            }
        }
        if fault::zeroed() != batch.zeroed {
            // A page of some file was missing. This is rare enough to simply read all samples again.
            for (index, &at) in indices.iter().enumerate() {
                let len = self.items[at].len;
                if self.sizes[at].is_ok()
                    && let Err(error) = batch.read_into(index, &mut self.buffers[at][..len])
                {
                    self.sizes[at] = Err(error);
                }
            }
        }
        Ok(())
    }

    /// Reads the samples that are read one by one.
    fn read_alone(&mut self) {
        for at in self.along(Route::Alone) {
            let Item { dataset, sample, len, .. } = self.items[at];
            if let Err(error) = self.session.read_at(&self.datasets[dataset], sample, 0, &mut self.buffers[at][..len], &mut None)
            {
                self.sizes[at] = Err(error);
            }
        }
    }
}

/// Counts reads of one dataset after another, so that the counters in shared memory change once and not for each sample.
struct Counted<'a> {
    dataset: Option<&'a Dataset>,
    reads: [Reads; SOURCES],
}

impl<'a> Counted<'a> {
    /// Returns the counts for a dataset.
    fn of(&mut self, dataset: &'a Dataset) -> &mut Self {
        if !self.dataset.is_some_and(|counted| std::ptr::eq(counted, dataset)) {
            self.store();
            self.dataset = Some(dataset);
        }
        self
    }

    fn store(&mut self) {
        let Some(dataset) = self.dataset else { return };
        for source in [Source::Segment, Source::Cached, Source::Arena] {
            let Reads { count, bytes } = std::mem::take(&mut self.reads[source as usize]);
            if count > 0 {
                dataset.attachment().count(source, count, bytes);
            }
        }
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.store();
    }
}
