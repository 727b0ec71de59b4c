//! Reads blocks that are on no drive from their origins on the parallel file system.
//!
//! # Invariants
//!
//! - All bytes are verified before anyone gets them.
//! - A bounded number of reads is under way at a time, those included that nobody waits for any more: a file system that hangs
//!   must not take all threads. One source cannot have all of them, so that a source that hangs does not stop the reads of others.
//! - Every wait ends at the deadline. A buffer comes back only when nothing writes to it any more.
//! - A read that the file system fails is repeated a few times, each time after a longer pause. During a pause it counts as
//!   under way no longer.

use std::collections::HashMap;
use std::ops::DerefMut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dayfly_meta::checksum::{Mismatch, check};
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{DatasetId, SampleId};
use dayfly_meta::limits::{
    BLOCK_SIZE_MAX, ORIGIN_ATTEMPTS_MAX, ORIGIN_FAILING, ORIGIN_FILES_MAX, ORIGIN_PAUSE, ORIGIN_PAUSE_GROWTH, ORIGIN_SOURCES_MAX,
    RECOVERY_STREAMS_SHARE,
};
use dayfly_meta::path::display;
use dayfly_meta::wire::status::OriginStatus;
use dayfly_stagein::origin::{OriginError, OriginReader, SamplePart, SharedFiles, WantedBytes, is_readable, neighbors};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout_at};

use crate::blocking::{Blocking, JobLost};
use crate::stats::ReadCounter;
use crate::store::Dataset;

/// Why a chunk cannot be read from its origin.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum OriginFailure {
    #[error(transparent)]
    Source(Arc<OriginError>),
    #[error(
        "'{path}' has other bytes than those that were staged in ({mismatch}), although its size and times are the same; stage the \
         dataset in again"
    )]
    Damaged { path: String, mismatch: Mismatch },
    #[error("'{path}' did not answer within {seconds} s; check the file system that it lies on, and try again")]
    Late { path: String, seconds: u64 },
    #[error(transparent)]
    Job(#[from] JobLost),
    #[error("the catalog does not say where it came from")]
    Unknown,
}

impl OriginFailure {
    /// Returns the failure of a chunk whose source did not answer in time.
    pub(crate) fn late(dataset: &Dataset, chunk: Chunk, timeout: Duration) -> Self {
        Self::Late { path: source_path(dataset, chunk), seconds: timeout.as_secs() }
    }

    /// Returns whether the file system may succeed a moment later.
    fn is_transient(&self) -> bool {
        matches!(self, Self::Source(error) if error.is_transient())
    }
}

/// Chunks that one read brings, each with its index in the request and its buffer.
type Group<B> = Vec<(usize, Chunk, B)>;
/// What became of chunks, each with its index in the request.
pub(crate) type ReadChunks<B> = Vec<(usize, Result<B, OriginFailure>)>;

/// What is known about one source.
struct SourceState {
    /// The reads of this source that may be under way.
    streams: Arc<Semaphore>,
    /// Until then, reads are not repeated: the source has just failed several times in a row.
    failing_until: Mutex<Option<Instant>>,
}

impl SourceState {
    fn is_failing(&self) -> bool {
        self.failing_until.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|until| Instant::now() < until)
    }

    fn set_failing(&self, until: Option<Instant>) {
        *self.failing_until.lock().unwrap_or_else(PoisonError::into_inner) = until;
    }
}

/// Reads chunks from their origins.
pub(crate) struct Origins {
    reader: Arc<OriginReader<SharedFiles>>,
    streams: Arc<Semaphore>,
    /// How many of them work in the background may have.
    background_streams: usize,
    /// How many of them one source may have.
    streams_per_source: usize,
    sources: Mutex<HashMap<(DatasetId, u32), Arc<SourceState>>>,
    blocking: Arc<dyn Blocking>,
    timeout: Duration,
    reads: ReadCounter,
    operations: AtomicU64,
    failures: AtomicU64,
}

impl Origins {
    /// Reads sources through `files`. At most `streams` reads are under way at a time, and each may take as long as `timeout`.
    pub(crate) fn new(files: SharedFiles, blocking: Arc<dyn Blocking>, streams: usize, timeout: Duration) -> Self {
        Self {
            reader: Arc::new(OriginReader::with_files(files, ORIGIN_FILES_MAX)),
            streams: Arc::new(Semaphore::new(streams)),
            background_streams: (streams / RECOVERY_STREAMS_SHARE).max(1),
            streams_per_source: (streams - streams / 8).min(streams.saturating_sub(1)).max(1),
            sources: Mutex::default(),
            blocking,
            timeout,
            reads: ReadCounter::default(),
            operations: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        }
    }

    pub(crate) fn status(&self) -> OriginStatus {
        OriginStatus {
            reads: self.reads.get(),
            operations: self.operations.load(Ordering::Relaxed),
            failures: self.failures.load(Ordering::Relaxed),
        }
    }

    /// Returns a reader of sources for a source that is read as a whole, which counts as one operation.
    pub(crate) fn stream_reader(&self) -> Arc<OriginReader<SharedFiles>> {
        self.operations.fetch_add(1, Ordering::Relaxed);
        self.reader.clone()
    }

    /// Returns whether all streams are in use, so that another read would wait.
    pub(crate) fn is_busy(&self) -> bool {
        self.streams.available_permits() == 0
    }

    /// Returns how many reads may be under way for work in the background.
    pub(crate) fn background_streams(&self) -> usize {
        self.background_streams
    }

    /// Returns a future for each read that is worth making for these chunks. Each future fills the buffers of its chunks, which
    /// must have the chunks' lengths, and verifies them.
    pub(crate) fn read<B>(
        self: &Arc<Self>,
        dataset: &Arc<Dataset>,
        chunks: &[Chunk],
        buffers: Vec<B>,
    ) -> Vec<impl Future<Output = ReadChunks<B>> + Send + use<B>>
    where
        B: DerefMut<Target = [u8]> + Send + 'static,
    {
        let deadline = Instant::now() + self.timeout;
        let mut buffers: Vec<Option<B>> = buffers.into_iter().map(Some).collect();
        let parts: Vec<SamplePart> = chunks.iter().map(|&chunk| part(dataset, chunk).unwrap_or(NOTHING)).collect();
        let mut take = |index: usize| Some((index, *chunks.get(index)?, buffers.get_mut(index)?.take()?));
        let groups = neighbors(dataset.catalog(), &parts).into_iter();
        let groups: Vec<Group<B>> = groups.map(|group| group.into_iter().filter_map(&mut take).collect()).collect();
        let read = |group| self.clone().read_group(dataset.clone(), group, deadline);
        groups.into_iter().map(read).collect()
    }

    async fn read_group<B>(self: Arc<Self>, dataset: Arc<Dataset>, mut group: Group<B>, deadline: Instant) -> ReadChunks<B>
    where
        B: DerefMut<Target = [u8]> + Send + 'static,
    {
        let mut done = ReadChunks::with_capacity(group.len());
        let mut pause = ORIGIN_PAUSE;
        let Some(source) = group.first().map(|(_, chunk, _)| self.source(&dataset, *chunk)) else { return done };
        let attempts = if source.is_failing() { 1 } else { ORIGIN_ATTEMPTS_MAX };
        for attempts_left in (0..attempts).rev() {
            let indexes: Vec<(usize, Chunk)> = group.iter().map(|(index, chunk, _)| (*index, *chunk)).collect();
            let attempt = timeout_at(deadline, self.attempt(&dataset, &source, std::mem::take(&mut group))).await;
            let read = match attempt {
                Ok(Ok(read)) => read,
                Ok(Err(lost)) => return self.fail_all(&dataset, done, indexes, |_| lost.clone().into()),
                Err(_) => {
                    let late = |chunk| OriginFailure::late(&dataset, chunk, self.timeout);
                    return self.fail_all(&dataset, done, indexes, late);
                }
            };
            for (index, chunk, buffer, result) in read {
                match result {
                    Ok(()) => {
                        self.reads.add(1, buffer.len() as u64);
                        source.set_failing(None);
                        done.push((index, Ok(buffer)));
                    }
                    Err(error) if error.is_transient() && attempts_left > 0 && Instant::now() + pause < deadline => {
                        group.push((index, chunk, buffer));
                    }
                    Err(error) => {
                        if error.is_transient() {
                            source.set_failing(Some(Instant::now() + ORIGIN_FAILING));
                        }
                        self.note_failure(&dataset, chunk, &error);
                        done.push((index, Err(error)));
                    }
                }
            }
            if group.is_empty() {
                break;
            }
            sleep(pause).await;
            pause *= ORIGIN_PAUSE_GROWTH;
        }
        done
    }

    /// Returns the state of a chunk's source.
    fn source(&self, dataset: &Dataset, chunk: Chunk) -> Arc<SourceState> {
        let catalog = dataset.catalog();
        let origin = catalog.block(chunk.block).and_then(|(sample, _)| catalog.origin(sample));
        let key = (dataset.id(), origin.map_or(u32::MAX, |origin| origin.source));
        let mut sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        if sources.len() >= ORIGIN_SOURCES_MAX {
            sources.retain(|_, source| Arc::strong_count(source) > 1);
        }
        let new = || {
            let streams = Arc::new(Semaphore::new(self.streams_per_source));
            Arc::new(SourceState { streams, failing_until: Mutex::default() })
        };
        sources.entry(key).or_insert_with(new).clone()
    }

    /// Reads a group once. Returns each chunk with its buffer and result.
    async fn attempt<B>(
        &self,
        dataset: &Arc<Dataset>,
        source: &Arc<SourceState>,
        mut group: Group<B>,
    ) -> Result<Vec<(usize, Chunk, B, Result<(), OriginFailure>)>, JobLost>
    where
        B: DerefMut<Target = [u8]> + Send + 'static,
    {
        // Nothing closes the semaphores. The state must not be forgotten while a read of its source is under way.
        let of_source = (source.streams.clone().acquire_owned().await.map_err(|_| JobLost)?, source.clone());
        let permit = self.streams.clone().acquire_owned().await.map_err(|_| JobLost)?;
        self.operations.fetch_add(1, Ordering::Relaxed);
        let (reader, dataset) = (self.reader.clone(), dataset.clone());
        let reading = self.blocking.run(move || {
            let results = read(&reader, &dataset, &mut group);
            drop((permit, of_source));
            let with_result = |((index, chunk, buffer), result)| (index, chunk, buffer, result);
            group.into_iter().zip(results).map(with_result).collect()
        });
        reading.await
    }

    fn fail_all<B>(
        &self,
        dataset: &Dataset,
        mut done: ReadChunks<B>,
        chunks: Vec<(usize, Chunk)>,
        failure: impl Fn(Chunk) -> OriginFailure,
    ) -> ReadChunks<B> {
        for (index, chunk) in chunks {
            let error = failure(chunk);
            self.note_failure(dataset, chunk, &error);
            done.push((index, Err(error)));
        }
        done
    }

    /// Counts a failure. Every reader gets the error; the log has only the first, second, fourth, eighth one and so on.
    fn note_failure(&self, dataset: &Dataset, chunk: Chunk, error: &OriginFailure) {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
        if failures.is_power_of_two() {
            let (dataset, block) = (dataset.id().0, chunk.block.0);
            tracing::warn!(dataset, block, %error, failures, "cannot read a block from its origin");
        }
    }
}

/// Stands for a chunk that the catalog does not have.
const NOTHING: SamplePart = SamplePart { sample: SampleId(u32::MAX), start: 0, len: 0 };

/// Returns which part of which sample a chunk is.
fn part(dataset: &Dataset, chunk: Chunk) -> Option<SamplePart> {
    let catalog = dataset.catalog();
    let (sample, block_len) = catalog.block(chunk.block)?;
    let (_, blocks) = catalog.sample(sample)?;
    let number = u64::from(chunk.block.0.checked_sub(blocks.start)?);
    Some(SamplePart { sample, start: number * BLOCK_SIZE_MAX + chunk.start(), len: chunk.len_in(block_len)? })
}

/// Returns the path of a chunk's source, for messages.
fn source_path(dataset: &Dataset, chunk: Chunk) -> String {
    let catalog = dataset.catalog();
    let origin = catalog.block(chunk.block).and_then(|(sample, _)| catalog.origin(sample));
    let source = origin.and_then(|origin| catalog.source(origin.source));
    source.map_or_else(|| "its source".to_owned(), |source| display(&source.path))
}

fn read<B>(reader: &OriginReader<SharedFiles>, dataset: &Dataset, group: &mut Group<B>) -> Vec<Result<(), OriginFailure>>
where
    B: DerefMut<Target = [u8]>,
{
    let mut wanted = Vec::with_capacity(group.len());
    for (_, chunk, buffer) in group.iter_mut() {
        let SamplePart { sample, start, .. } = part(dataset, *chunk).unwrap_or(NOTHING);
        wanted.push(WantedBytes { sample, start, bytes: buffer });
    }
    let results = reader.read_many(dataset.catalog(), &mut wanted);
    let verify = |(result, (_, chunk, buffer)): (Result<(), OriginError>, &(usize, Chunk, B))| {
        result.map_err(|error| OriginFailure::Source(Arc::new(error)))?;
        let expected = dataset.catalog().chunk_checksum(*chunk).ok_or(OriginFailure::Unknown)?;
        check(buffer, expected).map_err(|mismatch| OriginFailure::Damaged { path: source_path(dataset, *chunk), mismatch })
    };
    results.into_iter().zip(group.iter()).map(verify).collect()
}

/// Returns whether a block's sample can be read from its origin by itself.
pub(crate) fn has_origin(dataset: &Dataset, chunk: Chunk) -> bool {
    dataset.catalog().block(chunk.block).is_some_and(|(sample, _)| is_readable_alone(dataset, sample))
}

/// Returns whether a sample can be read from its origin by itself.
pub(crate) fn is_readable_alone(dataset: &Dataset, sample: SampleId) -> bool {
    is_readable(dataset.catalog(), sample)
}

#[cfg(test)]
mod tests;
