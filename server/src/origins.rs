//! Reads blocks that are on no drive from their origins on the parallel file system.
//!
//! # Invariants
//!
//! - All bytes are verified before anyone gets them.
//! - At most [`ORIGIN_STREAMS_MAX`] reads are under way at a time, those included that nobody waits for any more: a file system that
//!   hangs must not take all threads.
//! - Every wait ends at the deadline. A buffer comes back only when nothing writes to it any more.

use std::ops::DerefMut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dayfly_meta::checksum::{Mismatch, check};
use dayfly_meta::chunk::Chunk;
use dayfly_meta::limits::{BLOCK_SIZE_MAX, ORIGIN_FILES_MAX, ORIGIN_STREAMS_MAX};
use dayfly_stagein::origin::{OriginError, OriginReader, WantedBytes, is_readable};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::blocking::{Blocking, JobLost};
use crate::stats::ReadCounter;
use crate::store::Dataset;

/// Why a chunk cannot be read from its origin.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum OriginFailure {
    #[error(transparent)]
    Source(Arc<OriginError>),
    #[error(
        "its origin has other bytes than those that were staged in ({0}), although its size and times are the same; stage the dataset in again"
    )]
    Damaged(Mismatch),
    #[error("its origin on the parallel file system did not answer within {seconds} s; try again later")]
    Late { seconds: u64 },
    #[error(transparent)]
    Job(#[from] JobLost),
    #[error("the catalog does not say where it came from")]
    Unknown,
}

/// Reads chunks from their origins.
pub(crate) struct Origins {
    reader: Arc<OriginReader>,
    streams: Arc<Semaphore>,
    blocking: Arc<dyn Blocking>,
    timeout: Duration,
    reads: ReadCounter,
    failures: AtomicU64,
}

impl Origins {
    /// `timeout` is how long one chunk may take.
    pub(crate) fn new(blocking: Arc<dyn Blocking>, timeout: Duration) -> Self {
        Self {
            reader: Arc::new(OriginReader::new(ORIGIN_FILES_MAX)),
            streams: Arc::new(Semaphore::new(ORIGIN_STREAMS_MAX)),
            blocking,
            timeout,
            reads: ReadCounter::default(),
            failures: AtomicU64::new(0),
        }
    }

    /// Fills a buffer of a chunk's length with the chunk, and verifies it.
    pub(crate) async fn fill<B>(&self, dataset: &Arc<Dataset>, chunk: Chunk, buffer: B) -> Result<B, OriginFailure>
    where
        B: DerefMut<Target = [u8]> + Send + 'static,
    {
        let len = buffer.len() as u64;
        let filled = timeout(self.timeout, self.fill_in_time(dataset, chunk, buffer)).await;
        let filled = filled.unwrap_or(Err(OriginFailure::Late { seconds: self.timeout.as_secs() }));
        match &filled {
            Ok(_) => self.reads.add(1, len),
            Err(error) => {
                // Every reader gets the error; the log has only the first ones.
                if self.failures.fetch_add(1, Ordering::Relaxed) < FAILURES_LOGGED_MAX {
                    tracing::warn!(dataset = dataset.id().0, block = chunk.block.0, %error, "cannot read a block from its origin");
                }
            }
        }
        filled
    }

    async fn fill_in_time<B>(&self, dataset: &Arc<Dataset>, chunk: Chunk, mut buffer: B) -> Result<B, OriginFailure>
    where
        B: DerefMut<Target = [u8]> + Send + 'static,
    {
        // Nothing closes the semaphore.
        let permit = self.streams.clone().acquire_owned().await.map_err(|_| JobLost)?;
        let (reader, dataset) = (self.reader.clone(), dataset.clone());
        let reading = self.blocking.run(move || {
            let read = read(&reader, &dataset, chunk, &mut buffer);
            drop(permit);
            read.map(|()| buffer)
        });
        reading.await?
    }
}

/// How many failures are written to the log.
const FAILURES_LOGGED_MAX: u64 = 100;

fn read(reader: &OriginReader, dataset: &Dataset, chunk: Chunk, buffer: &mut [u8]) -> Result<(), OriginFailure> {
    let catalog = dataset.catalog();
    let place = || {
        let (sample, _) = catalog.block(chunk.block)?;
        let (_, blocks) = catalog.sample(sample)?;
        let part = u64::from(chunk.block.0.checked_sub(blocks.start)?);
        Some((sample, part * BLOCK_SIZE_MAX + chunk.start(), catalog.chunk_checksum(chunk)?))
    };
    let (sample, start, expected) = place().ok_or(OriginFailure::Unknown)?;
    let wanted = WantedBytes { sample, start, bytes: &mut *buffer };
    reader.read(catalog, wanted).map_err(|error| OriginFailure::Source(Arc::new(error)))?;
    check(buffer, expected).map_err(OriginFailure::Damaged)
}

/// Returns whether a block's sample can be read from its origin by itself.
pub(crate) fn has_origin(dataset: &Dataset, chunk: Chunk) -> bool {
    dataset.catalog().block(chunk.block).is_some_and(|(sample, _)| is_readable(dataset.catalog(), sample))
}
