//! Reads blocks of compressed tars again. Samples of such a tar cannot be read by themselves, so the tar is unpacked from its start,
//! once for all blocks that are wanted.
//!
//! The catalog says where a sample lies in the unpacked tar, so nothing is parsed except the maps of sparse members. Memory is
//! bounded by the decoder's own bound and one chunk.

use std::io::{self, Read};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;

use dayfly_meta::catalog::{Catalog, Compression, Place};
use dayfly_meta::checksum;
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, SampleId};
use dayfly_meta::limits::{BLOCK_SIZE_MAX, DECODER_MEMORY_MAX, ORIGIN_ATTEMPTS_MAX, ORIGIN_PAUSE, ORIGIN_PAUSE_GROWTH};

use super::OriginReader;
use super::error::OriginError;
use super::files::SourceFiles;
use super::record::Extent;
use super::target::Target;
use crate::source::compressed::decoder;
use crate::source::plain::Skip;
use crate::source::tar::{Next, TarKind, TarReader};

/// Unpacked bytes that are passed over before the caller hears of the progress.
const SKIP_STEP: u64 = 4 << 20;

/// What a stream yields.
#[derive(Debug)]
pub enum Streamed {
    /// A chunk that has the bytes that were staged in.
    Chunk(Chunk, Vec<u8>),
    /// The number of bytes of the source that have been read since the last report.
    Progress(u64),
}

/// Returns whether a sample lies in a compressed tar, so that [`OriginReader::stream`] can read it.
pub fn is_streamable(catalog: &Catalog, sample: SampleId) -> bool {
    let Some(origin) = catalog.origin(sample) else { return false };
    let is_compressed = catalog.compression(origin.source).is_some_and(|compression| compression != Compression::None);
    let is_single_block = || catalog.sample(sample).is_some_and(|(size, _)| size <= BLOCK_SIZE_MAX);
    is_compressed
        && match origin.place {
            Place::Bytes { .. } => true,
            // The blocks after the first would need the map again.
            Place::SparseTar { .. } => is_single_block(),
            _ => false,
        }
}

impl<F: SourceFiles> OriginReader<F> {
    /// Unpacks a source and passes the chunks of `blocks` to `take`, as they come. The blocks must be sorted by the places of their
    /// samples, and then by their numbers. Ends early if `take` breaks.
    ///
    /// # Errors
    ///
    /// Any [`OriginError`]. The chunks that were passed before are good.
    pub fn stream(
        &self,
        catalog: &Catalog,
        source: u32,
        blocks: &[BlockId],
        take: &mut dyn FnMut(Streamed) -> ControlFlow<()>,
    ) -> Result<(), OriginError> {
        let target = Target::of_source(catalog, source)?;
        let compression = catalog.compression(source).ok_or(OriginError::NotInCatalog)?;
        let io = |error| OriginError::io(&target.path, 0, error);
        // The descriptor is not kept: a stream is read once.
        let file = patiently(|| self.files.open(&target.path).map_err(io))?;
        let before = patiently(|| self.files.state(&file).map_err(io))?;
        target.check(&before)?;
        let (read, failure) = (AtomicU64::new(0), Mutex::new(None));
        let extent = Extent::new(&self.files, &file, &target.path, 0..before.version.size);
        let input = Input { extent, path: &target.path, read: &read, failure: &failure };
        // As much memory as the stage-in may have allowed: this is the archive that it read.
        let result = decoder(compression, input, DECODER_MEMORY_MAX).map_err(StreamError::Unpack).and_then(|reader| {
            let mut unpacked = Unpacked { reader, position: 0, read: &read, reported: 0, take };
            blocks.iter().try_for_each(|&block| unpacked.pass_block(catalog, block))
        });
        let error = match result {
            Ok(()) | Err(StreamError::Stopped) => return Ok(()),
            Err(StreamError::Origin(error)) => error,
            Err(StreamError::Unpack(error)) => OriginError::Damaged {
                path: target.path.clone(),
                offset: read.load(Ordering::Relaxed),
                reason: format!("it cannot be unpacked: {error}"),
            },
        };
        // A decoder hides why its input failed, and a change explains malformed bytes better than the decoder does.
        if let Some(failure) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(failure);
        }
        match self.files.state(&file).map_err(io)?.has_content_of(&before) {
            true => Err(error),
            false => Err(target.changed("it changed while it was being read")),
        }
    }
}

/// Why a stream ends early.
enum StreamError {
    /// The caller wants no more.
    Stopped,
    Unpack(io::Error),
    Origin(OriginError),
}

/// The packed bytes.
struct Input<'a, F: SourceFiles> {
    extent: Extent<'a, F>,
    path: &'a Path,
    read: &'a AtomicU64,
    failure: &'a Mutex<Option<OriginError>>,
}

impl<F: SourceFiles> Read for Input<'_, F> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = patiently(|| {
            self.extent
                .read(bytes)
                .map_err(|error| self.extent.take_failure().unwrap_or_else(|| OriginError::io(self.path, 0, error)))
        });
        match read {
            Ok(count) => {
                self.read.fetch_add(count as u64, Ordering::Relaxed);
                Ok(count)
            }
            Err(error) => {
                *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                Err(io::Error::other("the source cannot be read"))
            }
        }
    }
}

/// Makes a call again, after growing pauses, if the file system fails it and may succeed a moment later. A stream must not end for
/// a single failure, because the next one would begin at the start of the tar.
fn patiently<T>(mut call: impl FnMut() -> Result<T, OriginError>) -> Result<T, OriginError> {
    let mut pause = ORIGIN_PAUSE;
    for _ in 1..ORIGIN_ATTEMPTS_MAX {
        match call() {
            Err(error) if error.is_transient() => sleep(pause),
            result => return result,
        }
        pause *= ORIGIN_PAUSE_GROWTH;
    }
    call()
}

/// The unpacked bytes.
struct Unpacked<'a> {
    reader: Box<dyn Read + Send + 'a>,
    /// Offset of the next byte.
    position: u64,
    read: &'a AtomicU64,
    /// The part of `read` that the caller has heard of.
    reported: u64,
    take: &'a mut dyn FnMut(Streamed) -> ControlFlow<()>,
}

impl Unpacked<'_> {
    fn pass_block(&mut self, catalog: &Catalog, block: BlockId) -> Result<(), StreamError> {
        let unknown = || StreamError::Origin(OriginError::NotInCatalog);
        let (sample, len) = catalog.block(block).ok_or_else(unknown)?;
        let (size, blocks) = catalog.sample(sample).ok_or_else(unknown)?;
        let start = u64::from(block.0.checked_sub(blocks.start).ok_or_else(unknown)?) * BLOCK_SIZE_MAX;
        let place = catalog.origin(sample).ok_or_else(unknown)?.place;
        match place {
            Place::Bytes { offset } => {
                self.skip_to(offset.saturating_add(start))?;
                Chunk::all(block, len).try_for_each(|chunk| self.pass_chunk(catalog, chunk, len))
            }
            Place::SparseTar { offset, .. } if len == size => {
                self.skip_to(offset)?;
                self.pass_sparse(catalog, block, size)
            }
            _ => Ok(()),
        }
    }

    fn pass_sparse(&mut self, catalog: &Catalog, block: BlockId, size: u64) -> Result<(), StreamError> {
        let mut tar = TarReader::new(Counted(self));
        match tar.next() {
            Ok(Next::Member(member)) if member.kind == TarKind::File && member.size == size => {}
            _ => return Err(StreamError::Unpack(io::Error::other("the sparse member that was staged in is not here"))),
        }
        let mut chunks = Vec::new();
        for chunk in Chunk::all(block, size) {
            let mut bytes = vec![0; chunk.len_in(size).unwrap_or(0) as usize];
            tar.read_exact(&mut bytes).map_err(StreamError::Unpack)?;
            chunks.push((chunk, bytes));
        }
        drop(tar);
        chunks.into_iter().try_for_each(|(chunk, bytes)| self.pass(catalog, chunk, bytes))
    }

    fn pass_chunk(&mut self, catalog: &Catalog, chunk: Chunk, block_len: u64) -> Result<(), StreamError> {
        let mut bytes = vec![0; chunk.len_in(block_len).unwrap_or(0) as usize];
        self.reader.read_exact(&mut bytes).map_err(StreamError::Unpack)?;
        self.position += bytes.len() as u64;
        self.pass(catalog, chunk, bytes)
    }

    /// Verifies a chunk and passes it on.
    fn pass(&mut self, catalog: &Catalog, chunk: Chunk, bytes: Vec<u8>) -> Result<(), StreamError> {
        let expected = catalog.chunk_checksum(chunk).ok_or(StreamError::Origin(OriginError::NotInCatalog))?;
        checksum::check(&bytes, expected).map_err(|mismatch| {
            let reason = format!("its bytes are not those that were staged in: {mismatch}");
            StreamError::Unpack(io::Error::other(reason))
        })?;
        self.yield_now(Streamed::Chunk(chunk, bytes))?;
        self.report()
    }

    fn skip_to(&mut self, offset: u64) -> Result<(), StreamError> {
        let Some(mut left) = offset.checked_sub(self.position) else {
            return Err(StreamError::Origin(OriginError::NotInCatalog));
        };
        while left > 0 {
            let step = left.min(SKIP_STEP);
            let skipped = io::copy(&mut (&mut self.reader).take(step), &mut io::sink()).map_err(StreamError::Unpack)?;
            if skipped < step {
                return Err(StreamError::Unpack(io::ErrorKind::UnexpectedEof.into()));
            }
            self.position += step;
            left -= step;
            self.report()?;
        }
        Ok(())
    }

    fn report(&mut self) -> Result<(), StreamError> {
        let read = self.read.load(Ordering::Relaxed);
        let new = read - std::mem::replace(&mut self.reported, read);
        if new > 0 { self.yield_now(Streamed::Progress(new)) } else { Ok(()) }
    }

    fn yield_now(&mut self, streamed: Streamed) -> Result<(), StreamError> {
        match (self.take)(streamed) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(StreamError::Stopped),
        }
    }
}

/// Reads unpacked bytes, and keeps count of the position.
struct Counted<'a, 'b>(&'a mut Unpacked<'b>);

impl Read for Counted<'_, '_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.0.reader.read(bytes)?;
        self.0.position += count as u64;
        Ok(count)
    }
}

impl Skip for Counted<'_, '_> {}
