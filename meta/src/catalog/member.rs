//! What a stage-in found: one record a member of a source, and the runs in which records are kept and sorted.

#![allow(missing_docs, reason = "of the archived twins that rkyv derives")]

use std::cmp::Ordering;
use std::io::{self, Read, Write};

use rkyv::{Archive, Deserialize, Serialize};

use crate::checksum::{check, checksum};
use crate::id::NodeId;
use crate::limits::{BLOCK_SIZE_MAX, CHUNK_LEN, SAMPLE_SIZE_MAX};
use crate::path::walk_order;

/// A member's place in the order of all members, and its sample's origin: sources in the order given, members in the
/// order of their source.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemberKey {
    /// Number of the source.
    pub source: u32,
    /// In a tar, the offset of the data in the unpacked stream; in a zip, that of its record in the central directory; in a
    /// tree, the number in the walk.
    pub offset: u64,
}

/// A block of a member, stored.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// The node that holds it.
    pub owner: NodeId,
    /// Its number among all that arrived at that node in this stage-in.
    pub arrival: u32,
}

/// What a member makes of its path.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub enum MemberKind {
    /// A regular file, with its blocks where they were stored.
    File {
        /// Size in bytes.
        size: u64,
        /// One a block, in order.
        blocks: Vec<StoredBlock>,
        /// CRC32C of each chunk's bytes as they were read from the source, in order.
        checksums: Vec<u32>,
    },
    /// A directory.
    Directory,
    /// A symlink, and its target as it stands.
    Symlink(Vec<u8>),
    /// A further name for what the given path was at this point of the order.
    HardLink(Vec<u8>),
}

/// One member of a source.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its path in the dataset, normal.
    pub path: Vec<u8>,
    /// Its place in the order.
    pub key: MemberKey,
    /// Which handing-out of a unit found it: what a rejected one found is left out of the merge.
    pub ticket: u32,
    /// Permission bits.
    pub mode: u32,
    /// Modification time, whole seconds.
    pub mtime_s: i64,
    /// And nanoseconds below 10^9.
    pub mtime_ns: u32,
    /// What it is.
    pub kind: MemberKind,
}

impl Member {
    /// The order of runs: paths as a walk visits them, and what happened to one path in its order.
    pub fn run_order(&self, other: &Self) -> Ordering {
        walk_order(&self.path, &other.path).then(self.key.cmp(&other.key))
    }

    /// About how much memory it takes.
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

/// A record's bound in a run: a path, a target, and the blocks and chunks of a sample of 64 TiB.
const RECORD_LEN_MAX: usize = 80 << 20;
const _: () = assert!(
    SAMPLE_SIZE_MAX / BLOCK_SIZE_MAX * size_of::<StoredBlock>() as u64 + SAMPLE_SIZE_MAX / CHUNK_LEN * 4 + (1 << 20)
        <= RECORD_LEN_MAX as u64
);

/// Appends a member to a run.
pub fn write_member(run: &mut impl Write, member: &Member) -> io::Result<()> {
    let bytes = rkyv::to_bytes::<rkyv::rancor::Error>(member).map_err(io::Error::other)?;
    if bytes.len() > RECORD_LEN_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a sample has too many blocks"));
    }
    run.write_all(&(bytes.len() as u32).to_le_bytes())?;
    run.write_all(&checksum(&bytes).to_le_bytes())?;
    run.write_all(&bytes)
}

/// Reads a run's next member; `None` at its end.
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
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a member record has no length that one can have"));
    }
    let mut bytes = Vec::new();
    run.take(len as u64).read_to_end(&mut bytes)?;
    if bytes.len() < len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    // Runs are not synced: what the drive has lost of one must not pass for a member.
    check(&bytes, expected).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    rkyv::from_bytes::<Member, rkyv::rancor::Error>(&bytes)
        .map(Some)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_reads_back_and_damage_is_an_error() {
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
            member(b"a", MemberKind::File { size: 3, blocks, checksums: vec![9] }),
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
        // As a drive loses it.
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
            // Zeros at the end of a record may be its own.
            assert!(members.starts_with(&read) && (end.is_err() || lost == run), "{at}");
        }
    }
}
