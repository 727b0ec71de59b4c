//! How path conflicts are found while sources are read.
//!
//! There is a path conflict if several archives that match one pattern contain different samples with the same path. No node sees
//! all samples, so the search is divided. Owners compare hashes of paths, and report a *suspect path* when the same hash has come
//! from two sources. The coordinator sends the suspect paths to all nodes. Workers report *sightings*, which name the path.

use rkyv::{Archive, Deserialize, Serialize};

/// Says which sources must not contain the same path. Sources with the same `pattern` and different `match_number`s
/// are rivals.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rivalry {
    /// Number of the pattern or list, from 1; 0 for a source that has no rivals.
    pub pattern: u32,
    /// Number of the file or directory that matched the pattern.
    pub match_number: u32,
}

/// The values that an owner compares to find path conflicts: the hash of a sample's path, and the
/// [`Rivalry`] of the sample's source.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rival {
    /// Hash of the path, seeded by the pattern.
    pub hash: u64,
    /// See [`Rivalry::pattern`].
    pub pattern: u32,
    /// See [`Rivalry::match_number`].
    pub match_number: u32,
}

/// The hash of a path that samples of two rival sources may share.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub struct SuspectPath {
    /// Hash of the path.
    pub hash: u64,
    /// The pattern that seeds the hash.
    pub pattern: u32,
}

/// A sample that a worker found, and whose path has the hash of a suspect path.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// The hash of the suspect path.
    pub hash: u64,
    /// The sample's path.
    pub path: Vec<u8>,
    /// Number of the sample's source.
    pub source: u32,
    /// The ticket of the assignment in which the worker found the sample. The sighting counts only if that assignment is not
    /// rejected later.
    pub ticket: u32,
    /// A hash of the sample's size and checksums: equal samples are no conflict.
    pub content: u64,
}
