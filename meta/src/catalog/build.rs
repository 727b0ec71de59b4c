//! Builds a catalog from resolved members that arrive in walk order. Memory does not grow with the
//! number of members: each column streams into an unnamed file of its own, and
//! [`CatalogBuilder::finish`] joins the columns.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::FileExt;

use xxhash_rust::xxh3::xxh3_64;

use super::layout::{
    BUCKET_LEN, BUCKET_SLOTS, COLUMNS, Column, EntryKind, EntryRecord, Extent, Grouping, HEADER_LEN_MAX, HeaderRecord,
    LargeRecord, NodeRecord, OriginRecord, Place, PlacedPathRecord, START_LEN, Source, SourceRecord, Start, WIDTHS, index_bucket,
    index_buckets,
};
use super::map::{block_count, block_len};
use super::member::{Member, MemberKey, MemberKind, StoredBlock};
use super::scratch::ScratchFile;
use crate::limits::{CHUNK_LEN, ENTRIES_MAX, PAGE_SIZE};
use crate::path::{components, display, is_below, join, split_last, walk_order};
use crate::shared::map_private_file;

/// A function that creates unnamed files to write to.
pub type Scratch<'a> = &'a dyn Fn() -> io::Result<File>;

/// Why a catalog could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// Writing to the data dir failed, perhaps because it is full.
    #[error("cannot write the catalog: {0}")]
    Write(#[from] io::Error),
    /// The dataset has more names than a catalog can number.
    #[error("more than {ENTRIES_MAX} names in one dataset; stage its sources into several datasets")]
    Entries,
    /// The sources have more directories than are allowed for their number of files.
    #[error(
        "the sources have more than {0} directories, and each takes room and memory on every node; pass --max-directories to allow more"
    )]
    Directories(u64),
    /// The dataset has more blocks than a catalog can number.
    #[error("more than {ENTRIES_MAX} blocks in one dataset; stage its sources into several datasets")]
    Blocks,
    /// A file has a number of blocks or checksums that does not match its size. The sorted run that it came from is damaged.
    #[error("'{0}' has a number of blocks or checksums that does not match its size")]
    Shape(String),
    /// A file claims to lie at an offset of its source, or to have a length there, that no file has.
    #[error("'{0}' claims to lie at an impossible offset of its source; check the archive")]
    Place(String),
    /// The members did not arrive in walk order, which is a bug in the merge.
    #[error("'{0}' arrived out of order; this is a bug in Dayfly")]
    Order(String),
    /// A hard link arrived that the resolver should have replaced, which is a bug in the merge.
    #[error("'{0}' arrived as an unresolved hard link; this is a bug in Dayfly")]
    HardLink(String),
}

/// A finished catalog.
#[derive(Debug)]
pub struct Built {
    /// The unnamed file that contains the catalog.
    pub file: File,
    /// Length of the file in bytes.
    pub len: u64,
    /// CRC32C of the whole file.
    pub checksum: u32,
    /// Number of samples.
    pub samples: u64,
    /// Bytes of all samples.
    pub bytes: u64,
    /// Number of directories and symlinks.
    pub others: u64,
    /// Number of symlinks.
    pub symlinks: u64,
}

/// Streams resolved members into a catalog.
pub struct CatalogBuilder<'a> {
    scratch: Scratch<'a>,
    columns: Vec<ScratchFile>,
    hashes: ScratchFile,
    patches: ScratchFile,
    open: Vec<OpenDirectory>,
    directories: u64,
    last_path: Vec<u8>,
    shared: HashMap<MemberKey, u32>,
    bytes: u64,
    symlinks: u64,
    about: About,
}

/// Facts about the dataset as a whole.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// Seed of the placement.
    pub seed: u64,
    /// The capacity of each node as used for the placement, in bytes, in the order of node numbers.
    pub capacities: Vec<u64>,
    /// When the dataset was staged in, in seconds since 1970. Also the modification time of
    /// directories that no source names.
    pub created_s: i64,
    /// Which files count as one sample.
    pub group: Grouping,
    /// How many nodes store each block; 0 stands for 1.
    pub copies: u16,
    /// Upper bound on the number of directories, if there is one.
    pub directories_max: Option<u64>,
}

struct OpenDirectory {
    path: Vec<u8>,
    entry: u32,
    row: u32,
    subdirectories: u32,
}

/// Bytes of a column that are copied at a time.
const COPY_LEN: u64 = 16 << 20;
/// Length of the values that become known only when a directory closes: entry, next entry, row in `Others`, links.
const PATCH_LEN: usize = 16;

impl<'a> CatalogBuilder<'a> {
    /// Starts a catalog of these sources.
    ///
    /// # Errors
    ///
    /// If a scratch file cannot be created or written.
    pub fn new(scratch: Scratch<'a>, about: About, sources: &[Source]) -> Result<Self, BuildError> {
        let new_column = |_| Ok(ScratchFile::new(scratch()?));
        let mut builder = Self {
            scratch,
            columns: (0..COLUMNS).map(new_column).collect::<io::Result<_>>()?,
            hashes: ScratchFile::new(scratch()?),
            patches: ScratchFile::new(scratch()?),
            open: Vec::new(),
            directories: 0,
            last_path: Vec::new(),
            shared: HashMap::new(),
            bytes: 0,
            symlinks: 0,
            about,
        };
        for source in sources {
            let path_offset = builder.write(Column::Names, &source.path)?;
            builder.write(Column::Names, &source.prefix)?;
            let (path_len, prefix_len) = (source.path.len() as u32, source.prefix.len() as u32);
            let Source { kind, compression, version, inode, .. } = *source;
            let record = SourceRecord { path_offset, path_len, prefix_len, kind, compression, version, inode };
            builder.write(Column::Sources, &record.encode())?;
        }
        for capacity in std::mem::take(&mut builder.about.capacities) {
            builder.write(Column::Capacities, &capacity.to_le_bytes())?;
        }
        Ok(builder)
    }

    /// Adds what `path` resolves to. `names` is the number of paths that share the sample; the caller
    /// adds each of them.
    ///
    /// # Errors
    ///
    /// If the catalog is full or cannot be written, or if the merge passed a member that does not belong here.
    pub fn add(&mut self, path: &[u8], member: &Member, names: u32) -> Result<(), BuildError> {
        if !self.open.is_empty() && walk_order(&self.last_path, path).is_ge() {
            return Err(BuildError::Order(display(path)));
        }
        self.open_parents(path)?;
        self.last_path = path.to_vec();
        match &member.kind {
            MemberKind::Directory => self.open_directory(path, member.mode, member.mtime_s, member.mtime_ns),
            MemberKind::File { size, place, blocks, checksums } => {
                self.add_file(path, member, (*size, *place), (blocks, checksums), names)
            }
            MemberKind::Symlink(target) => self.add_symlink(path, member, target),
            MemberKind::HardLink(_) => Err(BuildError::HardLink(display(path))),
        }
    }

    fn add_file(
        &mut self,
        path: &[u8],
        member: &Member,
        (size, place): (u64, Place),
        (blocks, checksums): (&[StoredBlock], &[u32]),
        names: u32,
    ) -> Result<(), BuildError> {
        if let Some(&sample) = self.shared.get(&member.key) {
            return self.add_entry(path, EntryKind::File, sample).map(drop);
        }
        let first_block = self.columns[Column::Owners as usize].len() / WIDTHS[Column::Owners as usize];
        if first_block + blocks.len() as u64 > ENTRIES_MAX {
            return Err(BuildError::Blocks);
        }
        self.add_checksums(path, first_block as u32, size, (blocks.len(), checksums))?;
        let sample = (self.columns[Column::Samples as usize].len() / WIDTHS[Column::Samples as usize]) as u32;
        self.write_node(Column::Samples, member, size, names, first_block as u32)?;
        let origin = OriginRecord { source: member.key.source, entry: self.entries() as u32, place };
        let origin = origin.encode().ok_or_else(|| BuildError::Place(display(path)))?;
        self.write(Column::Origins, &origin)?;
        if path != member.path {
            let path_offset = self.write(Column::Names, &member.path)?;
            let path_len = u16::try_from(member.path.len()).map_err(|_| BuildError::Place(display(path)))?;
            let placed = PlacedPathRecord { sample, path_len, path_offset };
            self.write(Column::PlacedPaths, &placed.encode())?;
        }
        for block in blocks {
            self.write(Column::Owners, &block.owner.0.to_le_bytes())?;
            self.write(Column::Arrivals, &block.arrival.to_le_bytes())?;
        }
        if names > 1 {
            self.shared.insert(member.key, sample);
        }
        self.bytes += size;
        self.add_entry(path, EntryKind::File, sample).map(drop)
    }

    /// Adds the checksums of a file whose blocks begin at `block`.
    fn add_checksums(&mut self, path: &[u8], block: u32, size: u64, shape: (usize, &[u32])) -> Result<(), BuildError> {
        let (blocks, checksums) = shape;
        // Only the last block of a file may be shorter than the others, so the chunks of the blocks
        // are the chunks of the file.
        if blocks as u64 != block_count(size) || checksums.len() as u64 != size.div_ceil(CHUNK_LEN) {
            return Err(BuildError::Shape(display(path)));
        }
        let mut next = self.columns[Column::Checksums as usize].len() / WIDTHS[Column::Checksums as usize];
        if next + checksums.len() as u64 > ENTRIES_MAX {
            return Err(BuildError::Blocks);
        }
        for (block, part) in (block..).zip(0..blocks as u32) {
            let chunks = block_len(size, part).div_ceil(CHUNK_LEN);
            if chunks > 1 {
                self.write(Column::Larges, &LargeRecord { block, first: next as u32 }.encode())?;
            }
            next += chunks;
        }
        checksums.iter().try_for_each(|checksum| self.write(Column::Checksums, &checksum.to_le_bytes()).map(drop))?;
        Ok(())
    }

    fn add_symlink(&mut self, path: &[u8], member: &Member, target: &[u8]) -> Result<(), BuildError> {
        let offset = self.write(Column::Names, target)?;
        let row = self.write_node(Column::Others, member, offset, 1, target.len() as u32)?;
        self.symlinks += 1;
        self.add_entry(path, EntryKind::Symlink, row).map(drop)
    }

    /// Closes the directories that do not contain `path`, and opens the directories above `path` that no member
    /// named.
    fn open_parents(&mut self, path: &[u8]) -> Result<(), BuildError> {
        while self.open.last().is_some_and(|directory| !is_below(path, &directory.path)) {
            self.close_directory()?;
        }
        if self.open.is_empty() && !path.is_empty() {
            self.open_directory(b"", 0o755, self.about.created_s, 0)?;
        }
        let Some((parent, _)) = split_last(path) else { return Ok(()) };
        let opened = self.open.last().map_or(0, |directory| components(&directory.path).count());
        let mut missing: Vec<u8> = self.open.last().map_or_else(Vec::new, |directory| directory.path.clone());
        for name in components(parent).skip(opened) {
            missing = join(&missing, name);
            self.open_directory(&missing, 0o755, self.about.created_s, 0)?;
        }
        Ok(())
    }

    fn open_directory(&mut self, path: &[u8], mode: u32, mtime_s: i64, mtime_ns: u32) -> Result<(), BuildError> {
        self.directories += 1;
        if let Some(max) = self.about.directories_max.filter(|&max| self.directories > max) {
            return Err(BuildError::Directories(max));
        }
        let record = NodeRecord { data: 0, mtime_s, mtime_ns, mode, links: 2, extra: 0 };
        let row = self.write(Column::Others, &record.encode())? / WIDTHS[Column::Others as usize];
        if let Some(parent) = self.open.last_mut() {
            parent.subdirectories += 1;
        }
        let entry = self.add_entry(path, EntryKind::Directory, row as u32)?;
        self.open.push(OpenDirectory { path: path.to_vec(), entry, row: row as u32, subdirectories: 0 });
        Ok(())
    }

    fn close_directory(&mut self) -> Result<(), BuildError> {
        let Some(directory) = self.open.pop() else { return Ok(()) };
        let next = self.entries() as u32;
        let links = directory.subdirectories.saturating_add(2);
        for word in [directory.entry, next, directory.row, links] {
            self.patches.append(&word.to_le_bytes())?;
        }
        Ok(())
    }

    fn add_entry(&mut self, path: &[u8], kind: EntryKind, node: u32) -> Result<u32, BuildError> {
        let entry = self.entries();
        if entry >= ENTRIES_MAX {
            return Err(BuildError::Entries);
        }
        let entry = entry as u32;
        let name = split_last(path).map_or(&b""[..], |(_, name)| name);
        let name_offset = self.write(Column::Names, name)?;
        let parent = self.open.last().map_or(0, |directory| directory.entry);
        let record = EntryRecord { name_offset, name_len: name.len() as u8, kind, parent, next: entry + 1, node };
        self.write(Column::Entries, &record.encode())?;
        self.hashes.append(&xxh3_64(path).to_le_bytes())?;
        Ok(entry)
    }

    fn entries(&self) -> u64 {
        self.columns[Column::Entries as usize].len() / WIDTHS[Column::Entries as usize]
    }

    fn write_node(&mut self, column: Column, member: &Member, data: u64, links: u32, extra: u32) -> Result<u32, BuildError> {
        let mtime_ns = member.mtime_ns.min(999_999_999);
        let record = NodeRecord { data, mtime_s: member.mtime_s, mtime_ns, mode: member.mode & 0o7777, links, extra };
        Ok((self.write(column, &record.encode())? / WIDTHS[column as usize]) as u32)
    }

    /// Appends bytes to a column, and returns the offset in the column at which they start.
    fn write(&mut self, column: Column, bytes: &[u8]) -> io::Result<u64> {
        let writer = &mut self.columns[column as usize];
        let offset = writer.len();
        writer.append(bytes)?;
        Ok(offset)
    }

    /// Joins the columns, fills in the values that are known only now, and builds the path index.
    /// Calls `step` regularly, because this takes minutes for a large dataset and the caller has to
    /// report progress.
    ///
    /// # Errors
    ///
    /// If the catalog cannot be written, or a scratch file lost bytes.
    pub fn finish(mut self, step: &dyn Fn()) -> Result<Built, BuildError> {
        if self.open.is_empty() {
            self.open_directory(b"", 0o755, self.about.created_s, 0)?;
        }
        while !self.open.is_empty() {
            self.close_directory()?;
        }
        let entries = self.entries();
        let mut extents = [Extent::default(); COLUMNS];
        let mut end = PAGE_SIZE;
        for (column, extent) in extents.iter_mut().enumerate() {
            let is_index = column == Column::Index as usize;
            let count = if is_index { index_buckets(entries) } else { self.columns[column].len() / WIDTHS[column] };
            *extent = Extent { offset: end, count };
            end = (end + count * WIDTHS[column]).next_multiple_of(PAGE_SIZE);
        }
        let file = (self.scratch)()?;
        file.set_len(end)?;
        for (column, writer) in std::mem::take(&mut self.columns).into_iter().enumerate() {
            let mut to = &file;
            to.seek(io::SeekFrom::Start(extents[column].offset))?;
            if column == Column::Index as usize {
                // The index is written later, through a mapping, where a full file system would
                // raise SIGBUS. Writing zeros allocates the space now.
                copy(&mut io::repeat(0).take(extents[column].count * WIDTHS[column]), &mut to, step)?;
                continue;
            }
            copy(&mut writer.read_back()?, &mut to, step)?;
        }
        let header = HeaderRecord {
            seed: self.about.seed,
            created_s: self.about.created_s,
            bytes: self.bytes,
            group: self.about.group,
            copies: self.about.copies.max(1),
            columns: extents,
        };
        write_start(&file, &header, end)?;
        let mut map = map_private_file(&file)?;
        apply_patches(&mut map, &extents, self.patches, step)?;
        fill_index(&mut map, &extents, self.hashes, step)?;
        let checksum = crc32c::crc32c(&map);
        drop(map);
        let count = |column: Column| extents[column as usize].count;
        let (samples, others) = (count(Column::Samples), count(Column::Others));
        Ok(Built { file, len: end, checksum, samples, bytes: self.bytes, others, symlinks: self.symlinks })
    }
}

fn write_start(file: &File, header: &HeaderRecord, file_len: u64) -> Result<(), BuildError> {
    let bytes = rkyv::to_bytes::<rkyv::rancor::Error>(header).map_err(io::Error::other)?;
    debug_assert!(bytes.len() <= HEADER_LEN_MAX);
    let start = Start { header_len: bytes.len() as u32, header_checksum: crc32c::crc32c(&bytes), file_len };
    file.write_all_at(&start.encode(), 0)?;
    file.write_all_at(&bytes, START_LEN as u64)?;
    Ok(())
}

/// Copies everything, one piece at a time.
fn copy(from: &mut impl Read, to: &mut impl Write, step: &dyn Fn()) -> io::Result<()> {
    while io::copy(&mut from.take(COPY_LEN), to)? > 0 {
        step();
    }
    Ok(())
}

fn apply_patches(map: &mut [u8], extents: &[Extent; COLUMNS], patches: ScratchFile, step: &dyn Fn()) -> io::Result<()> {
    let mut patches = patches.read_back()?;
    let mut patch = [0; PATCH_LEN];
    while read_whole(&mut patches, &mut patch)? {
        step();
        let [entry, next, row, links] = std::array::from_fn(|word| &patch[word * 4..word * 4 + 4]);
        let number = |word: &[u8]| word.iter().rev().fold(0_usize, |value, &byte| value << 8 | usize::from(byte));
        let entry_at = extents[Column::Entries as usize].offset as usize + number(entry) * 20;
        let row_at = extents[Column::Others as usize].offset as usize + number(row) * 32;
        map[entry_at + 12..entry_at + 16].copy_from_slice(next);
        map[row_at + 24..row_at + 28].copy_from_slice(links);
    }
    Ok(())
}

fn fill_index(map: &mut [u8], extents: &[Extent; COLUMNS], hashes: ScratchFile, step: &dyn Fn()) -> io::Result<()> {
    let mut hashes = hashes.read_back()?;
    let Extent { offset, count: buckets } = extents[Column::Index as usize];
    let mut hash = [0; 8];
    let mut entry = 0_u32;
    while read_whole(&mut hashes, &mut hash)? {
        step();
        let (mut bucket, fingerprint) = index_bucket(u64::from_le_bytes(hash), buckets);
        entry += 1;
        let slot = (u64::from(fingerprint) << 32 | u64::from(entry)).to_le_bytes();
        loop {
            let at = offset as usize + bucket as usize * BUCKET_LEN;
            let free = (0..BUCKET_SLOTS).map(|slot| at + slot * 8).find(|&at| map[at..at + 4] == [0; 4]);
            if let Some(at) = free {
                map[at..at + 8].copy_from_slice(&slot);
                break;
            }
            bucket = (bucket + 1) % buckets;
        }
    }
    Ok(())
}

/// Fills `buffer`. Returns `false` if the file ended before the buffer's first byte.
fn read_whole(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<bool> {
    match from.read(&mut buffer[..1])? {
        0 => Ok(false),
        _ => from.read_exact(&mut buffer[1..]).map(|()| true),
    }
}
