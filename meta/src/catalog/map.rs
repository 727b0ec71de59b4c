//! A mapped catalog. Opening it checks the header and the columns' positions, at a cost that does
//! not grow with the dataset. Each access checks its own bounds, so a damaged catalog returns
//! `None` and never faults.

use std::fs::File;
use std::io;
use std::ops::Range;

use memmap2::Mmap;
use xxhash_rust::xxh3::xxh3_64;

use super::NOT_STORED_MIN;
use super::layout::{
    BUCKET_LEN, COLUMNS, Column, Compression, EntryKind, EntryRecord, Extent, Grouping, HEADER_LEN_MAX, HeaderRecord,
    LargeRecord, NodeRecord, OriginRecord, Place, PlacedPathRecord, START_LEN, Source, SourceKind, SourceRecord, Start, VERSION,
    WIDTHS, index_bucket,
};
use crate::checksum::combine;
use crate::chunk::Chunk;
use crate::id::{BlockId, NodeId, SampleId};
use crate::limits::BLOCK_SIZE_MAX;
use crate::path::join;
use crate::shared::{map_immutable, prefetch};

/// Why a file cannot be used as a catalog.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// The file could not be mapped.
    #[error("cannot map the catalog: {0}")]
    Map(#[from] io::Error),
    /// The file is not a catalog, or has another version.
    #[error("not a catalog of version {VERSION}")]
    Version,
    /// The bytes of the catalog contradict each other.
    #[error("the catalog is damaged: {0}")]
    Damaged(&'static str),
}

/// An entry's number in walk order. The root is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EntryId(pub u32);

/// A name in the dataset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The entry's number.
    pub id: EntryId,
    /// The last component of its path; empty for the root.
    pub name: &'a [u8],
    /// What the name refers to.
    pub kind: EntryKind,
    /// The directory that contains the entry. The root is its own parent.
    pub parent: EntryId,
    /// The first entry after everything below this one.
    pub next: EntryId,
    /// The sample's number, or the entry's number among directories and symlinks.
    pub node: u32,
}

impl Entry<'_> {
    /// Returns the sample, if the entry is a file.
    pub fn sample(&self) -> Option<SampleId> {
        (self.kind == EntryKind::File).then_some(SampleId(self.node))
    }
}

/// The attributes that `stat` returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// Bytes of a file, length of a symlink's target, or 0 for a directory.
    pub size: u64,
    /// Permission bits, without the file type.
    pub mode: u32,
    /// A file's number of names, or a directory's number of subdirectories plus two.
    pub links: u32,
    /// Modification time, in whole seconds since 1970.
    pub mtime_s: i64,
    /// Nanoseconds to be added to [`Self::mtime_s`].
    pub mtime_ns: u32,
}

/// Where a sample's bytes lie on the PFS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Number of the archive, directory or file that contains them; see [`Catalog::source`].
    pub source: u32,
    /// Where they lie in the source.
    pub place: Place,
}

/// Facts about the dataset as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Seed of the placement.
    pub seed: u64,
    /// When the dataset was staged in, in seconds since 1970.
    pub created_s: i64,
    /// Bytes of all samples.
    pub bytes: u64,
    /// Which files count as one sample.
    pub group: Grouping,
    /// How many nodes store each block: its owner, and the next of its candidates.
    pub copies: u16,
    /// Number of names: files, directories and symlinks.
    pub entries: u32,
    /// Number of samples.
    pub samples: u32,
    /// Number of blocks.
    pub blocks: u32,
    /// Number of sources.
    pub sources: u32,
    /// Length of the catalog in bytes.
    pub file_len: u64,
}

/// A mapped catalog.
#[derive(Debug)]
pub struct Catalog {
    map: Mmap,
    header: Header,
    pub(super) columns: [Extent; COLUMNS],
}

impl Catalog {
    /// Maps a catalog and checks its header.
    ///
    /// # Errors
    ///
    /// If the file cannot be mapped, is not a catalog of this version, or has a header that contradicts itself.
    pub fn open(file: &File) -> Result<Self, CatalogError> {
        let map = map_immutable(file)?;
        let start = Start::decode(&map).ok_or(CatalogError::Version)?;
        let len = start.header_len as usize;
        let bytes = map.get(START_LEN..START_LEN + len.min(HEADER_LEN_MAX + 1)).filter(|bytes| bytes.len() == len);
        let bytes = bytes.ok_or(CatalogError::Damaged("the header's length"))?;
        if crc32c::crc32c(bytes) != start.header_checksum || start.file_len != map.len() as u64 {
            return Err(CatalogError::Damaged("the header's checksum or the file's length"));
        }
        let record =
            rkyv::from_bytes::<HeaderRecord, rkyv::rancor::Error>(bytes).map_err(|_| CatalogError::Damaged("the header"))?;
        for (extent, width) in record.columns.iter().zip(WIDTHS) {
            let end = extent.count.checked_mul(width).and_then(|len| len.checked_add(extent.offset));
            if end.is_none_or(|end| end > map.len() as u64) {
                return Err(CatalogError::Damaged("a column's position"));
            }
        }
        let count = |column: Column| {
            u32::try_from(record.columns[column as usize].count).map_err(|_| CatalogError::Damaged("a column's length"))
        };
        let header = Header {
            seed: record.seed,
            created_s: record.created_s,
            bytes: record.bytes,
            group: record.group,
            copies: record.copies,
            entries: count(Column::Entries)?,
            samples: count(Column::Samples)?,
            blocks: count(Column::Owners)?,
            sources: count(Column::Sources)?,
            file_len: start.file_len,
        };
        let is_of_blocks = |column| count(column).map(|count| count == header.blocks);
        if header.entries == 0
            || count(Column::Checksums)? < header.blocks
            || count(Column::Larges)? > header.blocks
            || !is_of_blocks(Column::Arrivals)?
            || count(Column::Origins)? != header.samples
        {
            return Err(CatalogError::Damaged("columns that do not match"));
        }
        Ok(Self { map, header, columns: record.columns })
    }

    /// Returns facts about the dataset as a whole.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns the CRC32C of the whole file. This reads all of it.
    pub fn file_checksum(&self) -> u32 {
        crc32c::crc32c(&self.map)
    }

    /// Returns the entry of a normal path. The empty path names the root.
    pub fn find(&self, path: &[u8]) -> Option<Entry<'_>> {
        self.find_with(path, |_| ()).map(|(entry, ())| entry)
    }

    /// Returns the entry of a normal path, and its attributes.
    ///
    /// The attributes are read before the name is compared. On a large catalog both reads miss the
    /// processor's cache, and in this order the misses overlap.
    pub fn stat(&self, path: &[u8]) -> Option<(Entry<'_>, Attributes)> {
        let (entry, attributes) = self.find_with(path, |entry| self.attributes(entry))?;
        Some((entry, attributes?))
    }

    fn find_with<T>(&self, path: &[u8], early: impl Fn(&Entry<'_>) -> T) -> Option<(Entry<'_>, T)> {
        let buckets = self.columns[Column::Index as usize].count;
        if buckets == 0 {
            return None;
        }
        let (mut bucket, fingerprint) = index_bucket(xxh3_64(path), buckets);
        for _ in 0..buckets {
            let slots = self.record::<BUCKET_LEN>(Column::Index, bucket)?;
            let (mut candidates, mut is_full) = (0_u8, true);
            // The loop has no branches, because the processor could not predict which slot matches.
            for (slot, word) in slots.as_chunks::<8>().0.iter().enumerate() {
                let word = u64::from_le_bytes(*word);
                is_full &= word as u32 != 0;
                candidates |= u8::from((word >> 32) as u32 == fingerprint && word as u32 != 0) << slot;
            }
            while candidates != 0 {
                let word = u64::from_le_bytes(slots.as_chunks::<8>().0[candidates.trailing_zeros() as usize]);
                if let Some(entry) = self.entry(EntryId((word as u32).wrapping_sub(1))) {
                    let early = early(&entry);
                    if self.has_path(&entry, path) {
                        return Some((entry, early));
                    }
                }
                candidates &= candidates - 1;
            }
            if !is_full {
                return None;
            }
            bucket = (bucket + 1) % buckets;
        }
        None
    }

    /// Compares an entry's path from its end, so that the path need not be assembled.
    fn has_path(&self, entry: &Entry<'_>, path: &[u8]) -> bool {
        let mut rest = path;
        let mut at = *entry;
        while at.id.0 != 0 {
            let Some(before) = rest.strip_suffix(at.name) else { return false };
            let parent = match self.entry(at.parent) {
                Some(parent) if parent.id < at.id => parent,
                _ => return false,
            };
            rest = match before.strip_suffix(b"/") {
                Some(directory) if parent.id.0 != 0 => directory,
                None if parent.id.0 == 0 => before,
                _ => return false,
            };
            at = parent;
        }
        rest.is_empty()
    }

    /// Returns an entry by its number.
    pub fn entry(&self, id: EntryId) -> Option<Entry<'_>> {
        let record = EntryRecord::decode(self.record(Column::Entries, u64::from(id.0))?)?;
        let name = self.names(record.name_offset, u64::from(record.name_len))?;
        let (parent, next) = (EntryId(record.parent), EntryId(record.next));
        Some(Entry { id, name, kind: record.kind, parent, next, node: record.node })
    }

    /// Returns the entries of a directory, in the byte order of their names. To resume a listing,
    /// pass the `next` of the last entry seen as `from`.
    pub fn children<'a>(&'a self, directory: &Entry<'a>, from: Option<EntryId>) -> impl Iterator<Item = Entry<'a>> + use<'a> {
        let is_directory = directory.kind == EntryKind::Directory;
        let end = if is_directory { directory.next } else { directory.id };
        let mut at = from.unwrap_or(EntryId(directory.id.0.saturating_add(1)));
        std::iter::from_fn(move || {
            let entry = (at < end).then(|| self.entry(at)).flatten()?;
            // A damaged catalog must not send the walk backwards.
            at = entry.next.max(EntryId(at.0 + 1));
            Some(entry)
        })
    }

    /// Returns the attributes that `stat` returns for an entry.
    pub fn attributes(&self, entry: &Entry<'_>) -> Option<Attributes> {
        let column = if entry.kind == EntryKind::File { Column::Samples } else { Column::Others };
        let record = self.node(column, entry.node)?;
        let size = match entry.kind {
            EntryKind::File => record.data,
            EntryKind::Directory => 0,
            EntryKind::Symlink => u64::from(record.extra),
        };
        let NodeRecord { mode, links, mtime_s, mtime_ns, .. } = record;
        Some(Attributes { size, mode, links, mtime_s, mtime_ns })
    }

    /// Returns the target of a symlink.
    pub fn symlink_target(&self, entry: &Entry<'_>) -> Option<&[u8]> {
        let record = self.node(Column::Others, entry.node).filter(|_| entry.kind == EntryKind::Symlink)?;
        self.names(record.data, u64::from(record.extra))
    }

    /// Returns the full path of an entry.
    pub fn path(&self, entry: &Entry<'_>) -> Vec<u8> {
        let mut names = Vec::new();
        let mut at = *entry;
        while at.id.0 != 0 {
            names.push(at.name);
            match self.entry(at.parent) {
                Some(parent) if parent.id < at.id => at = parent,
                _ => break,
            }
        }
        names.iter().rev().fold(Vec::new(), |path, name| join(&path, name))
    }

    /// Returns a sample's size and its blocks.
    pub fn sample(&self, sample: SampleId) -> Option<(u64, Range<u32>)> {
        let record = self.node(Column::Samples, sample.0)?;
        let count = u32::try_from(block_count(record.data)).ok()?;
        let end = record.extra.checked_add(count).filter(|&end| end <= self.header.blocks)?;
        Some((record.data, record.extra..end))
    }

    /// Returns the sample that a block belongs to, and the block's length in bytes.
    pub fn block(&self, block: BlockId) -> Option<(SampleId, u64)> {
        // The number of the first block never decreases from one sample to the next. The sample
        // wanted is therefore the last one whose first block is not after `block`. A sample without
        // blocks has the same first block as its successor, so it is never the last such sample.
        // The search starts at a guess, which is right if all samples have equally many blocks. It
        // moves away from the guess in steps that double, until the sample lies between `low` and
        // `high`, and then halves this interval.
        let starts_by = |sample: u32| self.node(Column::Samples, sample).map(|node| node.extra <= block.0);
        let guess = self.guess(block)?;
        let (mut low, mut high) = (guess, guess);
        let mut step = 1;
        while high < self.header.samples && starts_by(high)? {
            (low, high) = (high + 1, high.saturating_add(step).min(self.header.samples));
            step *= 2;
        }
        step = 1;
        while low > 0 && !starts_by(low - 1)? {
            (low, high) = (low.saturating_sub(step), low - 1);
            step *= 2;
        }
        while low < high {
            let middle = low + (high - low) / 2;
            if starts_by(middle)? { low = middle + 1 } else { high = middle }
        }
        let sample = SampleId(low.checked_sub(1)?);
        let (size, blocks) = self.sample(sample)?;
        let part = u64::from(block.0.checked_sub(blocks.start)?);
        blocks.contains(&block.0).then(|| (sample, (size - part * BLOCK_SIZE_MAX).min(BLOCK_SIZE_MAX)))
    }

    fn guess(&self, block: BlockId) -> Option<u32> {
        (u64::from(block.0) * u64::from(self.header.samples)).checked_div(self.header.blocks.into()).map(|guess| guess as u32)
    }

    /// Prefetches what [`Self::block`] will read.
    pub fn prefetch_block(&self, block: BlockId) {
        let records = self.guess(block).and_then(|guess| self.record::<32>(Column::Samples, guess.into()));
        if let Some(record) = records {
            prefetch(record);
        }
    }

    /// Prefetches what [`Self::sample`] will read.
    pub fn prefetch_sample(&self, sample: SampleId) {
        if let Some(record) = self.record::<32>(Column::Samples, sample.0.into()) {
            prefetch(record);
        }
    }

    /// Returns the node that owns a block: it stores the block, or reads it from its origin.
    pub fn owner(&self, block: BlockId) -> Option<NodeId> {
        self.record(Column::Owners, u64::from(block.0)).map(|bytes| NodeId(u16::from_le_bytes(*bytes)))
    }

    /// Returns the CRC32C of a block's bytes, combined from those of its chunks.
    pub fn checksum(&self, block: BlockId) -> Option<u32> {
        let (_, len) = self.block(block)?;
        Chunk::all(block, len).try_fold(0, |whole, chunk| Some(combine(whole, self.chunk_checksum(chunk)?, chunk.len_in(len)?)))
    }

    /// Returns the CRC32C of a chunk's bytes, taken while its source was read.
    pub fn chunk_checksum(&self, chunk: Chunk) -> Option<u32> {
        let block = u64::from(chunk.block.0);
        if block >= u64::from(self.header.blocks) {
            return None;
        }
        let (start, end) = (self.first_checksum(block)?, self.first_checksum(block + 1)?);
        let row = start.checked_add(u64::from(chunk.index)).filter(|&row| row < end)?;
        self.record(Column::Checksums, row).map(|bytes| u32::from_le_bytes(*bytes))
    }

    /// Returns the row of a block's first checksum. Blocks without a row in `Larges` have one
    /// checksum each. The row is therefore found by counting back from the next block that has a
    /// row in `Larges`, or from the end of `Checksums`.
    fn first_checksum(&self, block: u64) -> Option<u64> {
        let larges = self.columns[Column::Larges as usize].count;
        let (mut low, mut high) = (0, larges);
        while low < high {
            let middle = low + (high - low) / 2;
            if u64::from(self.large(middle)?.block) < block { low = middle + 1 } else { high = middle }
        }
        let end = (u64::from(self.header.blocks), self.columns[Column::Checksums as usize].count);
        let (named, first) = if low < larges {
            let LargeRecord { block, first } = self.large(low)?;
            (u64::from(block), u64::from(first))
        } else {
            end
        };
        first.checked_sub(named.checked_sub(block)?)
    }

    pub(super) fn large(&self, row: u64) -> Option<LargeRecord> {
        self.record(Column::Larges, row).map(LargeRecord::decode)
    }

    /// Returns where a sample's bytes lie on the PFS.
    pub fn origin(&self, sample: SampleId) -> Option<Origin> {
        let OriginRecord { source, place, .. } = self.origin_record(sample)?;
        Some(Origin { source, place })
    }

    /// Returns the first of a sample's names.
    pub fn entry_of(&self, sample: SampleId) -> Option<Entry<'_>> {
        let entry = self.entry(EntryId(self.origin_record(sample)?.entry))?;
        (entry.sample() == Some(sample)).then_some(entry)
    }

    /// Returns the path that the placement hashed when it chose the nodes for a sample's blocks. It
    /// is the path of the sample in its source. Nearly always it is also the sample's first name.
    /// The two differ if the sample has hard links, or had some in an archive.
    pub fn placed_path(&self, sample: SampleId) -> Option<Vec<u8>> {
        let (mut low, mut high) = (0, self.columns[Column::PlacedPaths as usize].count);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.placed(middle)?.sample < sample.0 { low = middle + 1 } else { high = middle }
        }
        match self.placed(low).filter(|placed| placed.sample == sample.0) {
            Some(placed) => self.names(placed.path_offset, u64::from(placed.path_len)).map(<[u8]>::to_vec),
            None => self.entry_of(sample).map(|entry| self.path(&entry)),
        }
    }

    /// Returns a file's path below the directory that is its source. The path is empty if the
    /// source is a single file. Returns `None` if the sample does not come from a directory or
    /// single file.
    pub fn path_in_source(&self, sample: SampleId) -> Option<Vec<u8>> {
        let Origin { source, place } = self.origin(sample)?;
        let Source { prefix, kind, .. } = self.source(source)?;
        let path = self.placed_path(sample)?;
        match (place, kind) {
            (Place::Tree, SourceKind::File) => (path == prefix).then(Vec::new),
            (Place::Tree, SourceKind::Directory | SourceKind::FollowedDirectory) => match prefix.is_empty() {
                true => Some(path).filter(|path| !path.is_empty()),
                false => path.strip_prefix(&prefix[..])?.strip_prefix(b"/").map(<[u8]>::to_vec),
            },
            _ => None,
        }
    }

    /// Returns the capacity of each node as used for the placement, in the order of node numbers.
    /// With the header's seed and grouping, and with [`Self::placed_path`], it determines all
    /// candidates of a block.
    pub fn capacities(&self) -> impl Iterator<Item = u64> {
        let rows = 0..self.columns[Column::Capacities as usize].count;
        rows.filter_map(|row| self.record(Column::Capacities, row).map(|bytes| u64::from_le_bytes(*bytes)))
    }

    pub(super) fn origin_record(&self, sample: SampleId) -> Option<OriginRecord> {
        OriginRecord::decode(self.record(Column::Origins, u64::from(sample.0))?)
    }

    pub(super) fn placed(&self, row: u64) -> Option<PlacedPathRecord> {
        self.record(Column::PlacedPaths, row).map(PlacedPathRecord::decode)
    }

    /// Returns whether the block's owner stored it during the stage-in. A block for which there was no room is read from
    /// its origin.
    pub fn is_stored(&self, block: BlockId) -> bool {
        self.arrival(block).is_some_and(|arrival| arrival < NOT_STORED_MIN)
    }

    /// Returns a block's number among all blocks that arrived at its owner during the stage-in; from [`NOT_STORED_MIN`] on, the
    /// block is not stored.
    pub fn arrival(&self, block: BlockId) -> Option<u32> {
        self.record(Column::Arrivals, u64::from(block.0)).map(|bytes| u32::from_le_bytes(*bytes))
    }

    /// Returns a source by its number.
    pub fn source(&self, source: u32) -> Option<Source> {
        let record = SourceRecord::decode(self.record(Column::Sources, u64::from(source))?)?;
        let path = self.names(record.path_offset, u64::from(record.path_len))?.to_vec();
        let prefix = self.names(record.path_offset.checked_add(path.len() as u64)?, u64::from(record.prefix_len))?.to_vec();
        let SourceRecord { kind, compression, version, inode, .. } = record;
        Some(Source { path, prefix, kind, compression, version, inode })
    }

    /// Returns the compression of a source.
    pub fn compression(&self, source: u32) -> Option<Compression> {
        Some(SourceRecord::decode(self.record(Column::Sources, u64::from(source))?)?.compression)
    }

    pub(super) fn node(&self, column: Column, row: u32) -> Option<NodeRecord> {
        self.record(column, u64::from(row)).map(NodeRecord::decode)
    }

    pub(super) fn record<const WIDTH: usize>(&self, column: Column, row: u64) -> Option<&[u8; WIDTH]> {
        let Extent { offset, count } = self.columns[column as usize];
        if row >= count {
            return None;
        }
        self.map.get((offset + row * WIDTH as u64) as usize..)?.first_chunk()
    }

    fn names(&self, offset: u64, len: u64) -> Option<&[u8]> {
        let Extent { offset: start, count } = self.columns[Column::Names as usize];
        let end = offset.checked_add(len).filter(|&end| end <= count)?;
        self.map.get((start + offset) as usize..(start + end) as usize)
    }
}

/// Returns the length of block `part` of a sample of `size` bytes.
pub fn block_len(size: u64, part: u32) -> u64 {
    size.saturating_sub(u64::from(part) * BLOCK_SIZE_MAX).min(BLOCK_SIZE_MAX)
}

/// Returns the number of blocks of a sample of `size` bytes.
pub(crate) fn block_count(size: u64) -> u64 {
    size.div_ceil(BLOCK_SIZE_MAX)
}
