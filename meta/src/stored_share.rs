//! Which blocks of a dataset are stored if the nodes have no room for all of it. Hashes choose them, so the choice is the same on
//! every node and in every epoch, and the blocks that are not stored are spread evenly over nodes and directories.

use rkyv::{Archive, Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The threshold that selects all blocks: every hash is below it.
const ALL: u64 = 1 << 32;
/// Makes these hashes independent of those that choose owners and the order on drives.
const SEED: u64 = 0x570_4ed5_4a4e_0a17;

/// The share of blocks that are stored.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StoredShare {
    /// Blocks whose hash is below this are stored.
    threshold: u64,
}

impl StoredShare {
    /// Every block is stored.
    pub const ALL: Self = Self { threshold: ALL };
    /// Every block that fits is stored, but perhaps not all fit.
    pub const NEARLY_ALL: Self = Self { threshold: ALL - 1 };

    /// Returns the share of `bytes` that fits into `room` bytes.
    pub fn that_fits(room: u64, bytes: u64) -> Self {
        let threshold = (u128::from(room) * u128::from(ALL)).checked_div(bytes.into());
        Self { threshold: threshold.map_or(ALL, |threshold| threshold.min(ALL.into()) as u64) }
    }

    /// Returns whether block `part` of a sample is stored. `path` is the path by which the sample is placed.
    pub fn selects(self, seed: u64, path: &[u8], part: u32) -> bool {
        self == Self::ALL || xxh3_64_with_seed(path, seed ^ SEED ^ u64::from(part)) >> 32 < self.threshold
    }

    /// Returns the share in thousandths.
    pub fn permille(self) -> u64 {
        self.threshold * 1000 / ALL
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_selects_that_part_of_all_blocks_and_a_larger_share_keeps_them() {
        let count = |share: StoredShare| {
            (0..100_000).filter(|number: &u32| share.selects(7, number.to_string().as_bytes(), number % 3)).count()
        };
        for percent in [0, 1, 40, 60, 99, 100] {
            let share = StoredShare::that_fits(percent, 100);
            assert!(count(share).abs_diff(percent as usize * 1000) <= 500, "{percent}");
            assert!(share.permille().abs_diff(percent * 10) <= 1);
        }
        let (small, large) = (StoredShare::that_fits(40, 100), StoredShare::that_fits(41, 100));
        assert!((0..10_000_u32).all(|part| !small.selects(1, b"a", part) || large.selects(1, b"a", part)));
        for room in [100, 101, u64::MAX] {
            assert_eq!(StoredShare::that_fits(room, 100), StoredShare::ALL);
        }
        assert_eq!((StoredShare::that_fits(0, 0), count(StoredShare::ALL)), (StoredShare::ALL, 100_000));
    }

    /// The choice is part of the protocol: all nodes of a session must agree, and a stage-in that is repeated stores the same
    /// blocks.
    #[test]
    fn the_choice_is_the_same_in_every_build() {
        let share = StoredShare::that_fits(1, 2);
        let chosen: Vec<u32> = (0..24).filter(|&part| share.selects(7, b"train/cat.jpg", part)).collect();
        assert_eq!(chosen, GOLDEN);
    }

    const GOLDEN: &[u32] = &[0, 2, 4, 5, 10, 12, 16, 17, 20, 21, 23];
}
