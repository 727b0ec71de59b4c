//! The records of a stage-in: one for each member of a source, and the sorted runs that contain
//! them.

#![allow(missing_docs, reason = "rkyv derives archived twins without documentation")]

use std::cmp::Ordering;
use std::io::{self, Read, Write};

use rkyv::{Archive, Deserialize, Serialize};

use super::layout::Place;
use crate::checksum::{check, checksum};
use crate::id::NodeId;
use crate::limits::{BLOCK_SIZE_MAX, CHUNK_LEN, SAMPLE_SIZE_MAX};
use crate::path::walk_order;

/// A member's position in the order of all members: first by source, in the order in which the user
/// gave the sources, and then by position in the source.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemberKey {
    /// Index of the source.
    pub source: u32,
    /// In a tar, the offset of the data in the uncompressed stream; in a zip, the offset of the
    /// record in the central directory; in a tree, the index in the walk. It orders members; the
    /// place of a file's bytes is in [`MemberKind::File`].
    pub offset: u64,
}

/// Arrival numbers from this one on say that a block is not stored, because there was no room for it. All but [`NOT_STORED`]
/// number the blocks that their owner has kept in memory during the stage-in.
pub const NOT_STORED_MIN: u32 = 1 << 31;
/// The arrival number of a block that is neither stored nor kept in memory.
pub const NOT_STORED: u32 = u32::MAX;

/// A block of a member, and where it is.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// The node that stores the block, or reads it from its origin for all others.
    pub owner: NodeId,
    /// Its number among all blocks that arrived at that node in this stage-in; from [`NOT_STORED_MIN`] on, the block is not
    /// stored.
    pub arrival: u32,
}

/// The kind of a member.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum MemberKind {
    /// A regular file, whose blocks have been stored.
    File {
        /// Size in bytes.
        size: u64,
        /// Where the file's bytes lie in the source.
        place: Place,
        /// The file's blocks, in order.
        blocks: Vec<StoredBlock>,
        /// CRC32C of each chunk as it was read from the source, in order.
        checksums: Vec<u32>,
    },
    /// A directory, which replaces anything else at its path.
    Directory,
    /// A symlink, with its target as written.
    Symlink(Vec<u8>),
    /// Another name for whatever the given target path meant at this point in the order.
    HardLink(Vec<u8>),
}

/// One member of a source.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its normal path in the dataset.
    pub path: Vec<u8>,
    /// Its position in the order.
    pub key: MemberKey,
    /// The ticket of the assignment in which a worker found the member. Members of rejected
    /// assignments are left out of the merge.
    pub ticket: u32,
    /// Permission bits, without the file type.
    pub mode: u32,
    /// Modification time, in whole seconds since 1970.
    pub mtime_s: i64,
    /// Nanoseconds to be added to `mtime_s`, below 10^9.
    pub mtime_ns: u32,
    /// What the member is.
    pub kind: MemberKind,
}

impl Member {
    /// Compares members in the order of a sorted run: by path in walk order, then by position.
    pub fn run_order(&self, other: &Self) -> Ordering {
        walk_order(&self.path, &other.path).then(self.key.cmp(&other.key))
    }

    /// Returns roughly how much memory the member takes, in bytes.
    pub fn memory_len(&self) -> usize {
        let heap = match &self.kind {
            MemberKind::File { blocks, checksums, .. } => {
                blocks.capacity() * size_of::<StoredBlock>() + checksums.capacity() * size_of::<u32>()
            }
            MemberKind::Symlink(target) | MemberKind::HardLink(target) => target.capacity(),
            MemberKind::Directory => 0,
        };
        size_of::<Self>() + self.path.capacity() + heap
    }
}

/// Upper bound on a record in a run: a path, a target, and the blocks and chunks of a sample of 64
/// TiB.
const RECORD_LEN_MAX: usize = 80 << 20;
const _: () = assert!(
    SAMPLE_SIZE_MAX / BLOCK_SIZE_MAX * size_of::<StoredBlock>() as u64 + SAMPLE_SIZE_MAX / CHUNK_LEN * 4 + (1 << 20)
        <= RECORD_LEN_MAX as u64
);

/// Appends a member to a run.
///
/// # Errors
///
/// If the run cannot be written, or the sample has more blocks than a record may list.
pub fn write_member(run: &mut impl Write, member: &Member) -> io::Result<()> {
    let bytes = rkyv::to_bytes::<rkyv::rancor::Error>(member).map_err(io::Error::other)?;
    if bytes.len() > RECORD_LEN_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a sample has too many blocks"));
    }
    run.write_all(&(bytes.len() as u32).to_le_bytes())?;
    run.write_all(&checksum(&bytes).to_le_bytes())?;
    run.write_all(&bytes)
}

/// Reads the next member of a run; `None` at its end.
///
/// # Errors
///
/// If the run cannot be read, is cut short, or is damaged.
pub fn read_member(run: &mut impl Read) -> io::Result<Option<Member>> {
    let mut start = [0; 8];
    let mut got = 0;
    while got < start.len() {
        match run.read(&mut start[got..])? {
            0 if got == 0 => return Ok(None),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => got += count,
        }
    }
    let [len, expected] = [0, 4].map(|at| start[at..at + 4].iter().rev().fold(0, |value, &byte| value << 8 | u32::from(byte)));
    let len = len as usize;
    if len == 0 || len > RECORD_LEN_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a member record has an impossible length"));
    }
    let mut bytes = Vec::new();
    run.take(len as u64).read_to_end(&mut bytes)?;
    if bytes.len() < len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    // Runs are not synced, so the checksum is what detects a part that the drive lost.
    check(&bytes, expected).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    rkyv::from_bytes::<Member, rkyv::rancor::Error>(&bytes)
        .map(Some)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SEMANTICS: "Temporary files of a stage-in are not synced, but they are checked when they are read back: sorted runs and
    /// units record by record, columns of the catalog as a whole."
    #[test]
    fn a_run_is_read_as_written_and_damage_is_an_error() {
        let member = |path: &[u8], kind| Member {
            path: path.to_vec(),
            key: MemberKey { source: 1, offset: 2 },
            ticket: 7,
            mode: 0o644,
            mtime_s: -1,
            mtime_ns: 5,
            kind,
        };
        let blocks = vec![StoredBlock { owner: NodeId(3), arrival: 4 }];
        let members = [
            member(
                b"a",
                MemberKind::File { size: 3, place: Place::ZipRecord { offset: 1, len: 40 }, blocks, checksums: vec![9] },
            ),
            member(b"b\xff", MemberKind::HardLink(b"a".to_vec())),
            member(b"", MemberKind::Directory),
        ];
        let mut run = Vec::new();
        members.iter().for_each(|member| write_member(&mut run, member).unwrap());
        let mut reader = run.as_slice();
        for member in &members {
            assert_eq!(read_member(&mut reader).unwrap().as_ref(), Some(member));
        }
        assert_eq!(read_member(&mut reader).unwrap(), None);
        for cut in 1..run.len() {
            let mut reader = &run[..cut];
            while let Ok(Some(_)) = read_member(&mut reader) {}
        }
        assert!(read_member(&mut [0xff; 8].as_slice()).is_err());
        assert!(read_member(&mut [0; 100].as_slice()).is_err());
        assert!(read_member(&mut run[..3].as_ref()).is_err());
        // A drive that loses a part returns zeros from there on.
        for at in 0..run.len() {
            let mut lost = run.clone();
            lost[at..].fill(0);
            let mut reader = lost.as_slice();
            let mut read = Vec::new();
            let end = loop {
                match read_member(&mut reader) {
                    Ok(Some(member)) => read.push(member),
                    end => break end,
                }
            };
            // A record may itself end in zeros.
            assert!(members.starts_with(&read) && (end.is_err() || lost == run), "{at}");
        }
    }
}
