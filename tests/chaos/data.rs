//! The datasets of a run. The seed, the dataset's name and its generation determine every byte, so a reader process can check by
//! itself what it reads.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};

/// Each file takes its bytes from a pool of this length, starting at its own offset. The length is prime, so that a chunk or a page
/// at a wrong offset never looks correct.
const POOL_LEN: usize = 1_048_583;

/// One version of one dataset. Its target is `/dayfly/t{tag}`, and all of its files lie in the folder `g{generation}` below the
/// target, so that a path alone determines a file's bytes, even while a dataset is being replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) struct Version {
    pub(crate) tag: u8,
    pub(crate) generation: u32,
}

impl Version {
    pub(crate) fn target(self) -> String {
        format!("/dayfly/t{}", self.tag)
    }

    /// The folder that holds all files of this version.
    pub(crate) fn path_of_all(self) -> String {
        format!("/dayfly/t{}/g{}/", self.tag, self.generation)
    }

    pub(crate) fn path(self, number: usize) -> String {
        format!("/dayfly/t{}/g{}/{number}", self.tag, self.generation)
    }
}

/// The content of one version.
pub(crate) struct Content {
    pub(crate) lens: Vec<usize>,
    pool: Vec<u8>,
}

impl Content {
    pub(crate) fn new(seed: u64, version: Version) -> Self {
        let mut random = StdRng::seed_from_u64(seed << 16 ^ u64::from(version.tag) << 8 ^ u64::from(version.generation));
        let mut pool = vec![0; POOL_LEN];
        random.fill_bytes(&mut pool);
        let mut lens: Vec<usize> = (0..random.random_range(30..90)).map(|_| random.random_range(1..6000)).collect();
        lens.extend([0, 0, 1, 4095, 4096, 65_535, 65_536, 65_537, 1_000_000]);
        lens.extend((0..random.random_range(0..8)).map(|_| random.random_range(60_000..400_000)));
        lens.extend([(4 << 20) - 1, 4 << 20, (4 << 20) + 1].iter().filter(|_| random.random_ratio(1, 2)));
        lens.push(random.random_range((8 << 20)..(13 << 20)));
        if version.generation == 0 && version.tag == 0 && seed.is_multiple_of(8) {
            // A file of more than one block.
            lens.push((64 << 20) + 70_001);
        }
        Self { lens, pool }
    }

    /// Returns the bytes of a file from `offset` on, as an endless sequence of pieces.
    fn pieces(&self, number: usize, offset: usize) -> impl Iterator<Item = &[u8]> {
        let start = number.wrapping_mul(70_003).wrapping_add(offset) % POOL_LEN;
        std::iter::once(&self.pool[start..]).chain(std::iter::repeat(&self.pool[..]))
    }

    /// Returns the first position at which `bytes`, read from a file at `offset`, differ from the file's content.
    pub(crate) fn difference(&self, number: usize, offset: usize, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        for piece in self.pieces(number, offset) {
            let rest = &bytes[at..];
            if rest.is_empty() {
                break;
            }
            let len = piece.len().min(rest.len());
            if piece[..len] != rest[..len] {
                let within = piece.iter().zip(rest).take_while(|(expected, found)| expected == found).count();
                return Some(at + within);
            }
            at += len;
        }
        None
    }

    pub(crate) fn bytes(&self, number: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.lens[number]);
        for piece in self.pieces(number, 0) {
            let left = self.lens[number] - bytes.len();
            if left == 0 {
                break;
            }
            bytes.extend_from_slice(&piece[..left.min(piece.len())]);
        }
        bytes
    }

    /// Writes the files into `folder/g{generation}`.
    pub(crate) fn write(&self, folder: &Path, version: Version) {
        let inner = folder.join(format!("g{}", version.generation));
        fs::create_dir_all(&inner).unwrap();
        (0..self.lens.len()).for_each(|number| fs::write(inner.join(number.to_string()), self.bytes(number)).unwrap());
    }
}

/// A cache of the contents of all versions.
pub(crate) struct Contents {
    seed: u64,
    known: BTreeMap<Version, Content>,
}

impl Contents {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, known: BTreeMap::new() }
    }

    pub(crate) fn get(&mut self, version: Version) -> &Content {
        self.known.entry(version).or_insert_with(|| Content::new(self.seed, version))
    }
}

#[test]
fn each_version_file_and_offset_has_its_own_bytes() {
    let version = Version { tag: 0, generation: 1 };
    let content = Content::new(3, version);
    let other = Content::new(3, Version { generation: 2, ..version });
    let largest = (0..content.lens.len()).max_by_key(|&number| content.lens[number]).unwrap();
    let bytes = content.bytes(largest);
    assert_eq!(bytes.len(), content.lens[largest]);
    assert_eq!(content.difference(largest, 0, &bytes), None);
    assert_eq!(content.difference(largest, 4 << 20, &bytes[4 << 20..5 << 20]), None);
    assert!(content.difference(largest, 4 << 20, &bytes[..1 << 20]).is_some(), "another chunk");
    assert!(content.difference(largest - 1, 0, &bytes[..4096]).is_some(), "another file");
    assert!(other.difference(largest, 0, &bytes[..4096]).is_some(), "another version");
    let mut damaged = bytes;
    damaged[7_000_000] ^= 1;
    assert_eq!(content.difference(largest, 0, &damaged), Some(7_000_000));
}
