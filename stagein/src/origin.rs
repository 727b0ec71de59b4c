//! Random access into sources: reads samples again from where the stage-in found them.
//!
//! The catalog says where the bytes of each sample lie in its source. An [`OriginReader`] reads them with one contiguous
//! read: of the data in a plain tar, of a member's record in a zip, or of a file in a directory tree. Zip members are
//! unpacked and the holes of sparse tar members are filled in on the way, in bounded memory.
//!
//! - `files` opens and reads sources. Tests decorate it with [`fault`].
//! - `open_files` keeps a few descriptors open for the next reads.
//! - `target` says which file to open for a sample, and how to recognize that the file has changed.
//! - `record` turns the bytes of a record into the bytes of a sample.
//! - `stream` unpacks a compressed tar once, for many blocks.
//! - `error` says what went wrong, and what to do.
//!
//! # Invariants
//!
//! - A source is compared with the catalog before each read, by size and modification time, and by its inode if it is no file
//!   in a tree. After the read, they must be the same as before.
//! - The version cannot show every change, so the caller compares the bytes with the catalog's checksums before anyone else
//!   sees them. [`check`] does this for a whole block.
//! - A read of a tree never follows a symlink, and never leaves the tree. Nothing that has taken the place of a file, such as
//!   a FIFO, blocks the thread that opens it.
//!
//! # Named absences
//!
//! There are no threads, no deadlines and no repeated attempts here, except that a descriptor that has become useless is
//! opened again once. Calls block. Members of archives that are themselves members are not supported.

mod error;
pub mod fault;
mod files;
mod open_files;
mod record;
mod stream;
mod target;

use std::ops::Range;

use dayfly_meta::catalog::{Catalog, Place};
use dayfly_meta::checksum;
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, SampleId};
use dayfly_meta::limits::{BLOCK_SIZE_MAX, ORIGIN_GAP_MAX, ORIGIN_MERGED_LEN_MAX};

pub use error::OriginError;
pub use files::{FileState, SharedFiles, SourceFiles, SystemFiles};
pub use stream::{Streamed, is_streamable};

use open_files::{OpenFiles, Opened};
use record::{Extent, SampleRange, unpack_sparse, unpack_zip, unpack_zip_bytes};
use target::Target;

/// A part of a sample to be read.
#[derive(Debug)]
pub struct WantedBytes<'a> {
    /// The sample that the bytes belong to.
    pub sample: SampleId,
    /// Offset in the sample of the first byte.
    pub start: u64,
    /// Where to put the bytes. Its length is the number of bytes wanted.
    pub bytes: &'a mut [u8],
}

impl<'a> WantedBytes<'a> {
    /// Wants the block `block`. `bytes` must have the block's length. Returns `None` if there is no such block, or it has
    /// another length.
    pub fn of_block(catalog: &Catalog, block: BlockId, bytes: &'a mut [u8]) -> Option<Self> {
        let (sample, len) = catalog.block(block)?;
        let (_, blocks) = catalog.sample(sample)?;
        let start = u64::from(block.0.checked_sub(blocks.start)?) * BLOCK_SIZE_MAX;
        (bytes.len() as u64 == len).then_some(Self { sample, start, bytes })
    }

    fn part(&self) -> SamplePart {
        SamplePart { sample: self.sample, start: self.start, len: self.bytes.len() as u64 }
    }
}

/// Names a part of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplePart {
    /// The sample that the part belongs to.
    pub sample: SampleId,
    /// Offset in the sample of the first byte.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
}

impl SamplePart {
    fn range(&self, size: u64) -> SampleRange {
        SampleRange { size, start: self.start, len: self.len }
    }
}

/// Divides parts of samples into groups that are each worth one read: parts of one group lie close together in one source, and
/// at least half of the bytes between the first and the last are wanted. Returns the parts' indexes.
pub fn neighbors(catalog: &Catalog, parts: &[SamplePart]) -> Vec<Vec<usize>> {
    let spans = sorted_spans(catalog, parts.iter().copied());
    let mut found: Vec<Vec<usize>> = groups(&spans).map(|group| group.iter().map(|span| span.index).collect()).collect();
    let mut is_grouped = vec![false; parts.len()];
    found.iter().flatten().for_each(|&index| is_grouped[index] = true);
    found.extend((0..parts.len()).filter(|&index| !is_grouped[index]).map(|index| vec![index]));
    found
}

/// Compares the bytes of a whole block with the catalog's checksums.
///
/// # Errors
///
/// [`OriginError::Damaged`] if a chunk has other bytes than at stage-in.
pub fn check(catalog: &Catalog, block: BlockId, bytes: &[u8]) -> Result<(), OriginError> {
    let (sample, len) = catalog.block(block).ok_or(OriginError::NotInCatalog)?;
    let target = Target::of(catalog, sample)?;
    if bytes.len() as u64 != len {
        return Err(OriginError::NotInCatalog);
    }
    for chunk in Chunk::all(block, len) {
        let expected = catalog.chunk_checksum(chunk).ok_or(OriginError::NotInCatalog)?;
        let start = chunk.start() as usize;
        let end = start + chunk.len_in(len).ok_or(OriginError::NotInCatalog)? as usize;
        checksum::check(&bytes[start..end], expected).map_err(|mismatch| OriginError::Damaged {
            path: target.path.clone(),
            offset: target.offset(),
            reason: format!("its bytes are not those that were staged in: {mismatch}"),
        })?;
    }
    Ok(())
}

/// Returns whether a sample can be read from its source by itself, as far as the catalog tells.
pub fn is_readable(catalog: &Catalog, sample: SampleId) -> bool {
    Target::of(catalog, sample).is_ok_and(|target| !matches!(target.place, Place::Nested { .. }))
}

/// Reads samples from their sources. Threads may share it.
pub struct OriginReader<F: SourceFiles = SystemFiles> {
    files: F,
    open: OpenFiles<F::File>,
}

impl OriginReader {
    /// Creates a reader that keeps at most `open_max` descriptors for the next reads.
    pub fn new(open_max: usize) -> Self {
        Self::with_files(SystemFiles, open_max)
    }
}

impl<F: SourceFiles> OriginReader<F> {
    /// Creates a reader that opens and reads sources by way of `files`.
    pub fn with_files(files: F, open_max: usize) -> Self {
        Self { files, open: OpenFiles::new(open_max) }
    }

    /// Reads a part of a sample from its source. After an error, the buffer may contain anything.
    ///
    /// # Errors
    ///
    /// Any [`OriginError`].
    pub fn read(&self, catalog: &Catalog, wanted: WantedBytes<'_>) -> Result<(), OriginError> {
        let target = Target::of(catalog, wanted.sample)?;
        let range = wanted.part().range(target.size);
        if !range.is_within() {
            return Err(OriginError::NotInCatalog);
        }
        if wanted.bytes.is_empty() {
            return Ok(());
        }
        let bytes = wanted.bytes;
        self.with_file(&target, &mut |file| {
            let mut source = Extent::new(&self.files, file, &target.path, 0..u64::MAX);
            let result = match target.place {
                Place::Tree => source.read_at(range.start, bytes),
                Place::Bytes { offset } => source.read_at(offset.saturating_add(range.start), bytes),
                Place::ZipRecord { offset, len } => {
                    source.limit(offset..offset.saturating_add(len));
                    unpack_zip(&mut source, range, bytes)
                }
                Place::SparseTar { offset, len } => {
                    source.limit(offset..offset.saturating_add(len));
                    unpack_sparse(&mut source, range, bytes)
                }
                Place::Nested { .. } => Err(target.unsupported_nested()),
            };
            // A decoder hides why its input failed.
            source.take_failure().map_or(result, Err)
        })
    }

    /// Reads parts of several samples. Parts that lie close together in one source are read with one contiguous read.
    /// Returns one result for each part, in their order.
    pub fn read_many(&self, catalog: &Catalog, wanted: &mut [WantedBytes<'_>]) -> Vec<Result<(), OriginError>> {
        let mut results: Vec<Result<(), OriginError>> = (0..wanted.len()).map(|_| Ok(())).collect();
        let spans = sorted_spans(catalog, wanted.iter().map(WantedBytes::part));
        let mut is_done = vec![false; wanted.len()];
        for group in groups(&spans).filter(|group| group.len() > 1) {
            let read = self.read_group(catalog, group, wanted);
            for (span, result) in group.iter().zip(read) {
                (is_done[span.index], results[span.index]) = (true, result);
            }
        }
        for (index, part) in wanted.iter_mut().enumerate().filter(|(index, _)| !is_done[*index]) {
            let WantedBytes { sample, start, bytes } = part;
            results[index] = self.read(catalog, WantedBytes { sample: *sample, start: *start, bytes });
        }
        results
    }

    /// Reads parts that lie close together in one source.
    fn read_group(&self, catalog: &Catalog, group: &[Span], wanted: &mut [WantedBytes<'_>]) -> Vec<Result<(), OriginError>> {
        let whole = group.first().map_or(0, |span| span.bytes.start)..group.iter().map(|span| span.bytes.end).max().unwrap_or(0);
        let read = || {
            let target = Target::of(catalog, wanted[group[0].index].sample)?;
            let mut merged = vec![0; (whole.end - whole.start) as usize];
            self.with_file(&target, &mut |file| {
                Extent::new(&self.files, file, &target.path, 0..u64::MAX).read_at(whole.start, &mut merged)
            })?;
            Ok(merged)
        };
        let merged: Vec<u8> = match read() {
            Ok(merged) => merged,
            Err(error) => return group.iter().map(|_| Err(OriginError::clone(&error))).collect(),
        };
        let take = |span: &Span| {
            let part = &mut wanted[span.index];
            let target = Target::of(catalog, part.sample)?;
            let from = &merged[(span.bytes.start - whole.start) as usize..(span.bytes.end - whole.start) as usize];
            match target.place {
                Place::ZipRecord { offset, .. } => {
                    unpack_zip_bytes(from, part.part().range(target.size), part.bytes, &target.path, offset)
                }
                _ => {
                    part.bytes.copy_from_slice(from);
                    Ok(())
                }
            }
        };
        group.iter().map(take).collect()
    }

    /// Calls `read` with the target's file, and compares the file's version before and after. If the descriptor was one that
    /// had been kept, or has become stale, and the file behind it is not the one wanted, opens the file again once.
    fn with_file(&self, target: &Target, read: &mut dyn FnMut(&F::File) -> Result<(), OriginError>) -> Result<(), OriginError> {
        let mut attempt = |is_last: bool| {
            let (opened, was_kept) = self.open.open(&self.files, target);
            let result = opened.and_then(|file| self.read_checked(target, (&file, was_kept), read));
            let error = match result {
                Ok(()) => return Ok(true),
                Err(error) => error,
            };
            self.open.forget(target);
            let may_help =
                error.is_stale() || was_kept && matches!(error, OriginError::Changed { .. } | OriginError::Missing { .. });
            if may_help && !is_last { Ok(false) } else { Err(error) }
        };
        if !attempt(false)? {
            attempt(true)?;
        }
        Ok(())
    }

    fn read_checked(
        &self,
        target: &Target,
        (opened, was_kept): (&Opened<F::File>, bool),
        read: &mut dyn FnMut(&F::File) -> Result<(), OriginError>,
    ) -> Result<(), OriginError> {
        let file = &opened.file;
        let state = || self.files.state(file).map_err(|error| OriginError::io(&target.path, 0, error));
        let before = state()?;
        target.check(&before)?;
        if was_kept && opened.state.is_some_and(|at_first| at_first != before) {
            // Its change time is another one: something else may have taken its place, which the caller finds out.
            return Err(target.changed("it was moved, replaced or removed"));
        }
        let result = read(file);
        // A change explains a short read or malformed bytes better than these do.
        let may_be_due_to_a_change = matches!(result, Ok(()) | Err(OriginError::ShortRead { .. } | OriginError::Damaged { .. }));
        if may_be_due_to_a_change && !state()?.has_content_of(&before) {
            return Err(target.changed("it changed while it was being read"));
        }
        result
    }
}

/// A part that a contiguous read can serve together with its neighbors.
struct Span {
    source: u32,
    /// The range of bytes in the source.
    bytes: Range<u64>,
    /// Index among the wanted parts.
    index: usize,
}

impl Span {
    /// Returns `None` if the part has to be read by itself, or cannot be read at all.
    fn of(catalog: &Catalog, part: SamplePart, index: usize) -> Option<Self> {
        let target = Target::of(catalog, part.sample).ok()?;
        let range = part.range(target.size);
        if !range.is_within() || range.len == 0 {
            return None;
        }
        let (start, len) = match target.place {
            Place::Bytes { offset } => (offset.checked_add(part.start)?, range.len),
            Place::ZipRecord { offset, len } if range.len == target.size => (offset, len),
            _ => return None,
        };
        let bytes = start..start.checked_add(len)?;
        (len <= ORIGIN_MERGED_LEN_MAX).then_some(Self { source: target.source, bytes, index })
    }
}

/// Returns the spans of those parts that have one, in the order in which they lie in their sources.
fn sorted_spans(catalog: &Catalog, parts: impl Iterator<Item = SamplePart>) -> Vec<Span> {
    let mut spans: Vec<Span> = parts.enumerate().filter_map(|(index, part)| Span::of(catalog, part, index)).collect();
    spans.sort_by_key(|span| (span.source, span.bytes.start, span.index));
    spans
}

/// Divides sorted spans into groups that are worth one read each.
fn groups(spans: &[Span]) -> impl Iterator<Item = &[Span]> {
    let mut rest = spans;
    std::iter::from_fn(move || {
        let first = rest.first()?;
        let (mut end, mut wanted) = (first.bytes.end, first.bytes.end - first.bytes.start);
        let joins = |span: &&Span| {
            let is_near = span.source == first.source && span.bytes.start.saturating_sub(end) <= ORIGIN_GAP_MAX;
            let (joined_end, joined_wanted) = (end.max(span.bytes.end), wanted + (span.bytes.end - span.bytes.start));
            let joined_len = joined_end - first.bytes.start;
            let joins = is_near && joined_len <= ORIGIN_MERGED_LEN_MAX && joined_wanted * 2 >= joined_len;
            if joins {
                (end, wanted) = (joined_end, joined_wanted);
            }
            joins
        };
        let len = 1 + rest[1..].iter().take_while(joins).count();
        let (group, after) = rest.split_at(len);
        rest = after;
        Some(group)
    })
}

#[cfg(test)]
mod tests;
