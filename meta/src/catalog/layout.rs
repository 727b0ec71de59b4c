//! The byte layout of a catalog: a fixed start, a small rkyv header, then page-aligned columns of
//! fixed-width little-endian records. The path index is one of the columns; the last one contains
//! all names.

use rkyv::{Archive, Deserialize, Serialize};

use crate::path::group;

/// The first eight bytes of a catalog.
pub(crate) const MAGIC: [u8; 8] = *b"DAYFLYCT";
/// Version of the layout. Any change to the layout below must increment the version.
pub(crate) const VERSION: u32 = 5;
/// Length of the start: magic, version, the header's length and checksum, the file's length.
pub(crate) const START_LEN: usize = 32;
/// Upper bound on the length of the rkyv header. No part of it grows with the dataset.
pub(crate) const HEADER_LEN_MAX: usize = 4096 - START_LEN;

/// The columns, in their order in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Column {
    /// [`EntryRecord`]s in the order of a walk. Entry 0 is the root of the dataset.
    Entries,
    /// [`NodeRecord`]s of samples.
    Samples,
    /// [`OriginRecord`]s of samples.
    Origins,
    /// [`NodeRecord`]s of directories and symlinks.
    Others,
    /// The node that owns each block, as `u16`.
    Owners,
    /// The CRC32C of each chunk, taken at stage-in, as `u32`, in the order of blocks.
    Checksums,
    /// [`LargeRecord`]s of the blocks with more than one chunk, in the order of blocks. Such blocks
    /// are few. The other blocks have no row here.
    Larges,
    /// The arrival number of each block at its owner, as `u32`. The owner uses it to find the block.
    Arrivals,
    /// Buckets of eight `u64` slots, one cache line each. The XXH3-64 of a path selects the bucket;
    /// a full bucket overflows into the next. The upper half of a slot is a fingerprint, the lower
    /// half the entry plus one, or 0 if the slot is free.
    Index,
    /// [`SourceRecord`]s, in the order in which the user gave the sources.
    Sources,
    /// [`PlacedPathRecord`]s of the few samples that were placed under a path other than their first
    /// name, in the order of samples.
    PlacedPaths,
    /// The capacity of each node as used for placement, in bytes, as `u64`. The row is the node's number.
    Capacities,
    /// Names, symlink targets, source paths and placed paths, back to back.
    Names,
}

/// The number of columns.
pub(crate) const COLUMNS: usize = 13;
/// Length of one record of each column, in bytes.
pub(crate) const WIDTHS: [u64; COLUMNS] = [20, 32, 22, 32, 2, 4, 8, 4, BUCKET_LEN as u64, 56, 12, 8, 1];
/// Slots of an index bucket.
pub(crate) const BUCKET_SLOTS: usize = 8;
/// Length of an index bucket in bytes.
pub(crate) const BUCKET_LEN: usize = 8 * BUCKET_SLOTS;

/// Where a column lies in the file.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Offset in bytes, a multiple of the page size.
    pub(crate) offset: u64,
    /// Number of records.
    pub(crate) count: u64,
}

/// The rkyv header.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeaderRecord {
    pub(crate) seed: u64,
    pub(crate) created_s: i64,
    pub(crate) bytes: u64,
    pub(crate) group: Grouping,
    pub(crate) copies: u16,
    pub(crate) columns: [Extent; COLUMNS],
}

/// Which files make one sample for the user. The files of one sample are placed, stored and listed
/// together.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Grouping {
    /// Each file is a sample of its own.
    #[default]
    None,
    /// Files of one directory whose names differ only after their last dot, such as `7.jpg` and `7.txt`.
    Stem,
}

impl Grouping {
    /// Returns the part of a path that the placement hashes. It is the same for all files of one sample.
    pub fn of(self, path: &[u8]) -> &[u8] {
        match self {
            Self::None => path,
            Self::Stem => group(path),
        }
    }
}

/// The kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EntryKind {
    /// A sample, whose row is in `Samples`.
    File,
    /// A directory, whose row is in `Others`.
    Directory,
    /// A symbolic link.
    Symlink,
}

/// A row of `Entries`: one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryRecord {
    pub(crate) name_offset: u64,
    pub(crate) name_len: u8,
    pub(crate) kind: EntryKind,
    pub(crate) parent: u32,
    /// The first entry after this entry's subtree.
    pub(crate) next: u32,
    /// The sample's number, or the row in `Others`.
    pub(crate) node: u32,
}

impl EntryRecord {
    pub(crate) fn encode(self) -> [u8; 20] {
        let kind = match self.kind {
            EntryKind::File => 0_u64,
            EntryKind::Directory => 1,
            EntryKind::Symlink => 2,
        };
        let name = self.name_offset << 16 | kind << 8 | u64::from(self.name_len);
        let mut bytes = [0; 20];
        bytes[..8].copy_from_slice(&name.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.parent.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.next.to_le_bytes());
        bytes[16..].copy_from_slice(&self.node.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; 20]) -> Option<Self> {
        let name = u64_at(bytes, 0);
        let kind = match name >> 8 & 0xff {
            0 => EntryKind::File,
            1 => EntryKind::Directory,
            2 => EntryKind::Symlink,
            _ => return None,
        };
        Some(Self {
            name_offset: name >> 16,
            name_len: name as u8,
            kind,
            parent: u32_at(bytes, 8),
            next: u32_at(bytes, 12),
            node: u32_at(bytes, 16),
        })
    }
}

/// A row of `Samples` or `Others`: the attributes that `stat` returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeRecord {
    /// A sample's size in bytes, or the offset of a symlink's target in `Names`.
    pub(crate) data: u64,
    pub(crate) mtime_s: i64,
    pub(crate) mtime_ns: u32,
    pub(crate) mode: u32,
    /// A sample's number of names, or a directory's number of subdirectories plus two.
    pub(crate) links: u32,
    /// A sample's first block, or the length of a symlink's target.
    pub(crate) extra: u32,
}

impl NodeRecord {
    pub(crate) fn encode(self) -> [u8; 32] {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&self.data.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.mtime_s.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.mtime_ns.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.mode.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.links.to_le_bytes());
        bytes[28..].copy_from_slice(&self.extra.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; 32]) -> Self {
        Self {
            data: u64_at(bytes, 0),
            mtime_s: u64_at(bytes, 8) as i64,
            mtime_ns: u32_at(bytes, 16),
            mode: u32_at(bytes, 20),
            links: u32_at(bytes, 24),
            extra: u32_at(bytes, 28),
        }
    }
}

/// Where a file's bytes lie in its source.
///
/// In a compressed archive, offsets are counted after decompression.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// The file's bytes, as they are, from this offset of the source.
    Bytes {
        /// Offset of the first byte.
        offset: u64,
    },
    /// A sparse member of a tar: its headers, which contain the map of its pieces, and then the pieces.
    SparseTar {
        /// Offset of the member's first header.
        offset: u64,
        /// Bytes from there to the end of the member's data.
        len: u64,
    },
    /// A member of a zip: its local header, and then its data as the archive stores them.
    ZipRecord {
        /// Offset of the local header.
        offset: u64,
        /// Bytes from there to the end of the member's data.
        len: u64,
    },
    /// A file of a directory tree, or a source that is a single file. The file's path in the dataset tells which.
    Tree,
    /// A member of an archive that must be unpacked first, and that is itself a member of the source.
    Nested {
        /// Offset of the outermost such archive: of its data in a tar, of its local header in a zip.
        offset: u64,
        /// Bytes from there to the end of its data.
        len: u64,
    },
}

/// Offsets in a [`Place`] are below this bound, because three bits of the word tell the kind of place.
const PLACE_OFFSET_END: u64 = 1 << 61;
/// Lengths in a [`Place`] are below this bound, because they are stored in 48 bits.
const PLACE_LEN_END: u64 = 1 << 48;

/// A row of `Origins`: where a sample's bytes lie on the PFS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OriginRecord {
    pub(crate) source: u32,
    /// The sample's first entry.
    pub(crate) entry: u32,
    pub(crate) place: Place,
}

impl OriginRecord {
    /// Returns `None` if an offset or a length is too large for a catalog.
    pub(crate) fn encode(self) -> Option<[u8; 22]> {
        let (kind, offset, len) = match self.place {
            Place::Bytes { offset } => (0_u64, offset, 0),
            Place::SparseTar { offset, len } => (1, offset, len),
            Place::ZipRecord { offset, len } => (2, offset, len),
            Place::Tree => (3, 0, 0),
            Place::Nested { offset, len } => (4, offset, len),
        };
        if offset >= PLACE_OFFSET_END || len >= PLACE_LEN_END {
            return None;
        }
        let mut bytes = [0; 22];
        bytes[..4].copy_from_slice(&self.source.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.entry.to_le_bytes());
        bytes[8..16].copy_from_slice(&(kind << 61 | offset).to_le_bytes());
        bytes[16..].copy_from_slice(&len.to_le_bytes()[..6]);
        Some(bytes)
    }

    pub(crate) fn decode(bytes: &[u8; 22]) -> Option<Self> {
        let word = u64_at(bytes, 8);
        let (kind, offset, len) = (word >> 61, word % PLACE_OFFSET_END, u48_at(bytes, 16));
        let place = match kind {
            0 if len == 0 => Place::Bytes { offset },
            1 => Place::SparseTar { offset, len },
            2 => Place::ZipRecord { offset, len },
            3 if (offset, len) == (0, 0) => Place::Tree,
            4 => Place::Nested { offset, len },
            _ => return None,
        };
        Some(Self { source: u32_at(bytes, 0), entry: u32_at(bytes, 4), place })
    }
}

/// A row of `PlacedPaths`: the path that decided where the blocks of a sample are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlacedPathRecord {
    pub(crate) sample: u32,
    pub(crate) path_len: u16,
    /// Offset of the path in `Names`, in 48 bits.
    pub(crate) path_offset: u64,
}

impl PlacedPathRecord {
    pub(crate) fn encode(self) -> [u8; 12] {
        let mut bytes = [0; 12];
        bytes[..4].copy_from_slice(&self.sample.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.path_len.to_le_bytes());
        bytes[6..].copy_from_slice(&self.path_offset.to_le_bytes()[..6]);
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; 12]) -> Self {
        let path_len = u16::from_le_bytes([bytes[4], bytes[5]]);
        Self { sample: u32_at(bytes, 0), path_len, path_offset: u48_at(bytes, 6) }
    }
}

/// A row of `Larges`: where the checksums of a block with more than one chunk begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LargeRecord {
    pub(crate) block: u32,
    /// The row in `Checksums` of the block's first chunk.
    pub(crate) first: u32,
}

impl LargeRecord {
    pub(crate) fn encode(self) -> [u8; 8] {
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&self.block.to_le_bytes());
        bytes[4..].copy_from_slice(&self.first.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; 8]) -> Self {
        Self { block: u32_at(bytes, 0), first: u32_at(bytes, 4) }
    }
}

/// The kind of a source, detected from its content.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SourceKind {
    /// A tar archive.
    Tar,
    /// A directory tree.
    Directory,
    /// A single file, staged in as it is.
    File,
    /// A zip archive.
    Zip,
    /// A directory tree, in which symlinks are followed.
    FollowedDirectory,
}

/// The compression of an archive, detected from its content.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compression {
    /// The archive is not compressed.
    None,
    /// The gzip format, in one or several members.
    Gzip,
    /// The zstd format.
    Zstd,
    /// The xz format.
    Xz,
    /// The bzip2 format.
    Bzip2,
    /// The frame format of lz4.
    Lz4,
}

/// Identifies the content of a file: a file with another version has changed since the stage-in was planned.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Version {
    /// Length in bytes.
    pub size: u64,
    /// Modification time, whole seconds.
    pub mtime_s: i64,
    /// Modification time, nanoseconds within the second.
    pub mtime_ns: u32,
    /// Time of the inode's last change, whole seconds. A program can set back the modification time, but not this one.
    pub ctime_s: i64,
    /// Time of the inode's last change, nanoseconds within the second.
    pub ctime_ns: u32,
}

/// A source of a dataset, as recorded in the catalog.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// Its absolute path on the PFS.
    pub path: Vec<u8>,
    /// The directory in the dataset below which the source's names lie; empty for the root. For a
    /// single file, its path in the dataset.
    pub prefix: Vec<u8>,
    /// The kind of source.
    pub kind: SourceKind,
    /// The compression of the source.
    pub compression: Compression,
    /// The source's version when the stage-in was planned. The version of a directory says nothing
    /// about the files in it, so it is all zeros.
    pub version: Version,
    /// The source's inode. 0 if it is a directory, or if inode numbers of its file system differ from node to node.
    pub inode: u64,
}

/// A row of `Sources`. The path is in `Names`, followed by the prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SourceRecord {
    pub(crate) path_offset: u64,
    pub(crate) path_len: u32,
    pub(crate) prefix_len: u32,
    pub(crate) kind: SourceKind,
    pub(crate) compression: Compression,
    pub(crate) version: Version,
    pub(crate) inode: u64,
}

const KINDS: [SourceKind; 5] =
    [SourceKind::Tar, SourceKind::Directory, SourceKind::File, SourceKind::Zip, SourceKind::FollowedDirectory];
const COMPRESSIONS: [Compression; 6] =
    [Compression::None, Compression::Gzip, Compression::Zstd, Compression::Xz, Compression::Bzip2, Compression::Lz4];

impl SourceRecord {
    pub(crate) fn encode(self) -> [u8; 56] {
        let Version { size, mtime_s, mtime_ns, ctime_s, ctime_ns } = self.version;
        let mut bytes = [0; 56];
        bytes[..6].copy_from_slice(&self.path_offset.to_le_bytes()[..6]);
        bytes[6] = self.kind as u8;
        bytes[7] = self.compression as u8;
        bytes[8..12].copy_from_slice(&self.path_len.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.prefix_len.to_le_bytes());
        for (at, word) in [(16, size), (24, mtime_s as u64), (32, ctime_s as u64), (40, self.inode)] {
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes[48..52].copy_from_slice(&mtime_ns.to_le_bytes());
        bytes[52..56].copy_from_slice(&ctime_ns.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; 56]) -> Option<Self> {
        let version = Version {
            size: u64_at(bytes, 16),
            mtime_s: u64_at(bytes, 24) as i64,
            mtime_ns: u32_at(bytes, 48),
            ctime_s: u64_at(bytes, 32) as i64,
            ctime_ns: u32_at(bytes, 52),
        };
        Some(Self {
            path_offset: u48_at(bytes, 0),
            path_len: u32_at(bytes, 8),
            prefix_len: u32_at(bytes, 12),
            kind: *KINDS.get(usize::from(bytes[6]))?,
            compression: *COMPRESSIONS.get(usize::from(bytes[7]))?,
            version,
            inode: u64_at(bytes, 40),
        })
    }
}

/// The fixed start of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Start {
    pub(crate) header_len: u32,
    pub(crate) header_checksum: u32,
    pub(crate) file_len: u64,
}

impl Start {
    pub(crate) fn encode(self) -> [u8; START_LEN] {
        let mut bytes = [0; START_LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.header_len.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.header_checksum.to_le_bytes());
        bytes[24..].copy_from_slice(&self.file_len.to_le_bytes());
        bytes
    }

    /// Decodes the start of a catalog of this version.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.first_chunk::<START_LEN>()?;
        if bytes[..8] != MAGIC || u32_at(bytes, 8) != VERSION {
            return None;
        }
        Some(Self { header_len: u32_at(bytes, 12), header_checksum: u32_at(bytes, 16), file_len: u64_at(bytes, 24) })
    }
}

/// Returns the bucket where the search for a hash starts, and the fingerprint to look for in the
/// slots.
pub(crate) fn index_bucket(hash: u64, buckets: u64) -> (u64, u32) {
    (((u128::from(hash) * u128::from(buckets)) >> 64) as u64, hash as u32)
}

/// Returns the number of buckets in an index of this many entries. The index is four fifths full,
/// so few buckets overflow.
pub(crate) fn index_buckets(entries: u64) -> u64 {
    (entries + entries / 4).div_ceil(BUCKET_SLOTS as u64) + 1
}

fn u32_at<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u48_at<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    let mut word = [0; 8];
    word[..6].copy_from_slice(&bytes[at..at + 6]);
    u64::from_le_bytes(word)
}

fn u64_at<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoding_an_encoded_record_gives_the_same_record() {
        let entry = EntryRecord { name_offset: 1 << 40, name_len: 255, kind: EntryKind::Symlink, parent: 7, next: 9, node: 3 };
        assert_eq!(EntryRecord::decode(&entry.encode()), Some(entry));
        let node = NodeRecord { data: 1 << 50, mtime_s: -5, mtime_ns: 999_999_999, mode: 0o4755, links: 2, extra: 8 };
        assert_eq!(NodeRecord::decode(&node.encode()), node);
        let (offset, len) = (PLACE_OFFSET_END - 1, PLACE_LEN_END - 1);
        let places = [
            Place::Bytes { offset },
            Place::SparseTar { offset, len },
            Place::ZipRecord { offset, len },
            Place::Tree,
            Place::Nested { offset, len },
        ];
        for place in places {
            let origin = OriginRecord { source: 5, entry: u32::MAX, place };
            assert_eq!(OriginRecord::decode(&origin.encode().unwrap()), Some(origin));
        }
        for place in [Place::Bytes { offset: offset + 1 }, Place::ZipRecord { offset, len: len + 1 }] {
            assert_eq!(OriginRecord { source: 0, entry: 0, place }.encode(), None);
        }
        let placed = PlacedPathRecord { sample: 9, path_len: 4096, path_offset: (1 << 48) - 1 };
        assert_eq!(PlacedPathRecord::decode(&placed.encode()), placed);
        let large = LargeRecord { block: 7, first: u32::MAX };
        assert_eq!(LargeRecord::decode(&large.encode()), large);
        let start = Start { header_len: 1, header_checksum: 2, file_len: 3 };
        assert_eq!(Start::decode(&start.encode()), Some(start));
        for kind in KINDS {
            for compression in COMPRESSIONS {
                let version = Version { size: 1 << 50, mtime_s: -1, mtime_ns: 999_999_999, ctime_s: 7, ctime_ns: 8 };
                let inode = u64::MAX;
                let source = SourceRecord { path_offset: 4, path_len: 3, prefix_len: 2, kind, compression, version, inode };
                assert_eq!(SourceRecord::decode(&source.encode()), Some(source));
            }
        }
    }

    #[test]
    fn golden_bytes() {
        let entry = EntryRecord { name_offset: 5, name_len: 3, kind: EntryKind::Directory, parent: 1, next: 2, node: 4 };
        assert_eq!(entry.encode(), [3, 1, 5, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0]);
        let place = Place::ZipRecord { offset: 0x0304, len: 0x0506 };
        let origin = OriginRecord { source: 1, entry: 2, place }.encode().unwrap();
        assert_eq!(origin, [1, 0, 0, 0, 2, 0, 0, 0, 4, 3, 0, 0, 0, 0, 0, 0x40, 6, 5, 0, 0, 0, 0]);
        let placed = PlacedPathRecord { sample: 1, path_len: 2, path_offset: 3 };
        assert_eq!(placed.encode(), [1, 0, 0, 0, 2, 0, 3, 0, 0, 0, 0, 0]);
        let version = Version { size: 4, mtime_s: 5, mtime_ns: 6, ctime_s: 7, ctime_ns: 8 };
        let (kind, compression) = (SourceKind::Zip, Compression::None);
        let source = SourceRecord { path_offset: 1, path_len: 2, prefix_len: 3, kind, compression, version, inode: 9 }.encode();
        let words = [1 | 3 << 48, 2 | 3 << 32, 4, 5, 7, 9, 6 | 8 << 32].map(u64::to_le_bytes);
        assert_eq!(source[..], words.concat()[..]);
        assert_eq!(LargeRecord { block: 5, first: 0x0201 }.encode(), [5, 0, 0, 0, 1, 2, 0, 0]);
        let start = Start { header_len: 16, header_checksum: 0x01020304, file_len: 4096 };
        assert_eq!(&start.encode(), b"DAYFLYCT\x05\0\0\0\x10\0\0\0\x04\x03\x02\x01\0\0\0\0\0\x10\0\0\0\0\0\0");
    }
}
