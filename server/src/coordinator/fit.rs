//! Decides, before anything is read, what share of the samples is stored.

use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{ARCHIVE_GROWTH_GUESS, BATCH_LEN_MAX, COPIES_TRIED, PAGE_BLOCK_SIZE_MIN, PAGE_SIZE, left_for_catalogs};
use dayfly_meta::placement::{Member, Placement};
use dayfly_meta::stored_share::StoredShare;
use dayfly_meta::wire::control::Copies;

use super::CoordinatorError;

/// Blocks that find all nodes full are not stored, so slightly more blocks than should fit are chosen. Otherwise an estimate
/// that is a little too high would leave room unused. In thousandths.
const CHOSEN_PERMILLE: u64 = 1020;
/// A stage-in is tight if less than one part in this many of its bytes would be left free.
const TIGHT_SHARE: u64 = 8;
/// An estimate of what must be stored may be too high by one part in this many.
const ESTIMATE_TOLERANCE: u64 = 10;
/// Bytes that a file takes on each node in the catalog.
const CATALOG_FILE_LEN: u64 = 128;

/// What a stage-in will find in its sources, as far as the plan tells.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Amounts {
    /// An estimate of the number of files.
    pub(super) files: u64,
    /// Bytes of the samples that can be read again from their origins, one by one.
    pub(super) readable_bytes: u64,
    /// Bytes of the other samples, if their sources tell.
    pub(super) unreadable_bytes: u64,
    /// The part of these that a stage-in may be refused for.
    pub(super) sure_bytes: u64,
    /// Length of the compressed sources that do not tell how many bytes they unpack to.
    pub(super) untold_bytes: u64,
    /// How often all of these bytes are stored.
    pub(super) copies: u64,
}

impl Amounts {
    /// Returns the amounts if `copies` nodes store each block.
    pub(super) fn copied(self, copies: u16) -> Self {
        let copies = u64::from(copies.max(1));
        Self {
            readable_bytes: self.readable_bytes.saturating_mul(copies),
            unreadable_bytes: self.unreadable_bytes.saturating_mul(copies),
            sure_bytes: self.sure_bytes.saturating_mul(copies),
            untold_bytes: self.untold_bytes.saturating_mul(copies),
            copies,
            ..self
        }
    }

    /// Returns the room that samples take for certain, if they must be stored and cannot be read again.
    fn must_be_stored(&self) -> u64 {
        self.unreadable_bytes.saturating_add(self.untold_bytes.saturating_mul(ARCHIVE_GROWTH_GUESS))
    }

    /// Returns the bytes that blocks lose because they begin on pages.
    fn padding(&self) -> u64 {
        let bytes = self.readable_bytes.saturating_add(self.unreadable_bytes);
        let blocks = self.files.saturating_mul(self.copies.max(1));
        let is_padded = bytes / blocks.max(1) >= PAGE_BLOCK_SIZE_MIN;
        if is_padded { blocks.saturating_mul(PAGE_SIZE / 2).min(bytes / 16) } else { 0 }
    }

    /// Returns whether even these amounts, as upper bounds, leave no doubt that everything fits, with catalogs on all nodes.
    pub(super) fn surely_fit(&self, free: &[u64]) -> bool {
        let bytes = self.readable_bytes.saturating_add(self.must_be_stored());
        let catalogs = self.files.saturating_mul(CATALOG_FILE_LEN).saturating_mul(free.len() as u64);
        bytes.saturating_add(bytes / TIGHT_SHARE).saturating_add(catalogs) <= free.iter().sum()
    }
}

/// What is stored of the samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fit {
    /// Which of the blocks that can be read again are stored; `None` if all blocks must be stored.
    pub(super) stored_share: Option<StoredShare>,
    pub(super) expected_files: u64,
    /// If not all samples fit: an estimate of their bytes, and of the share that is stored, in thousandths.
    pub(super) partial: Option<(u64, u64)>,
}

impl Fit {
    /// Like [`Self::of`], for samples of which several nodes store copies. Returns also how many. Several copies must fit as a whole:
    /// a block that is left in its source has no copies.
    pub(super) fn with_copies(
        amounts: Amounts,
        free: &[u64],
        is_required: bool,
        copies: Copies,
        seed: u64,
    ) -> Result<(Self, u16), CoordinatorError> {
        let one = amounts.readable_bytes.saturating_add(amounts.sure_bytes);
        match copies {
            Copies::Number(0 | 1) => Self::of(amounts, free, is_required).map(|fit| (fit, 1)),
            Copies::Number(copies) => match Self::of(amounts.copied(copies), free, true) {
                Err(CoordinatorError::NotEnoughRoom { needed, free, .. }) => {
                    Err(CoordinatorError::NotEnoughRoomForCopies { copies, needed, free })
                }
                fit => match full_node(one, free, copies, seed) {
                    Some((node, needed)) => {
                        Err(CoordinatorError::NodeTooSmallForCopies { copies, node, needed, free: free[node] })
                    }
                    None => Ok((fit?, copies)),
                },
            },
            Copies::Auto => {
                let one = amounts.readable_bytes.saturating_add(amounts.must_be_stored());
                let is_enough = free.len() > 1 && amounts.copied(2).surely_fit(free) && full_node(one, free, 2, seed).is_none();
                let copies = if is_enough { 2 } else { 1 };
                Self::of(amounts, free, is_required).map(|fit| (fit, copies))
            }
        }
    }

    /// Compares amounts with the free bytes of each node.
    pub(super) fn of(amounts: Amounts, free: &[u64], is_required: bool) -> Result<Self, CoordinatorError> {
        let Amounts { files, readable_bytes, .. } = amounts;
        let catalog = files.saturating_mul(CATALOG_FILE_LEN);
        if let Some((node, &free)) = free.iter().enumerate().find(|&(_, &free)| free < catalog) {
            return Err(CoordinatorError::NoCatalogRoom { needed: catalog, node, free });
        }
        let catalogs = catalog.saturating_mul(free.len() as u64);
        let room = free.iter().sum::<u64>().saturating_sub(catalogs).saturating_sub(amounts.padding());
        let too_much = |needed: u64, can_be_left: bool| {
            Err(CoordinatorError::NotEnoughRoom { needed: needed.saturating_add(catalogs), free: free.to_vec(), can_be_left })
        };
        // What compressed tars contain is an estimate. If it comes close, the stage-in finds out.
        if amounts.sure_bytes - amounts.sure_bytes / ESTIMATE_TOLERANCE > room {
            return too_much(amounts.sure_bytes, false);
        }
        let known_bytes = readable_bytes.saturating_add(amounts.sure_bytes);
        if is_required && known_bytes > room {
            return too_much(known_bytes, true);
        }
        // If it is tight, nodes must prepare for the case that not all blocks fit.
        let share = if amounts.surely_fit(free) { StoredShare::ALL } else { StoredShare::NEARLY_ALL };
        let all = Self { stored_share: (!is_required).then_some(share), expected_files: files, partial: None };
        let must_be_stored = amounts.must_be_stored();
        // Blocks that need not be stored leave some room to the catalogs of later datasets.
        let left = free.iter().map(|&free| left_for_catalogs(free)).sum::<u64>().saturating_sub(catalogs);
        let room = if is_required { room } else { room.saturating_sub(left) };
        let mut room_for_readable = room.saturating_sub(must_be_stored);
        let mut chosen_permille = CHOSEN_PERMILLE;
        if must_be_stored > 0 && readable_bytes > 0 {
            // The stage-in fails if these samples find no room. They come in batches, and what they need is an estimate.
            let batches = free.len() as u64 * 2 * BATCH_LEN_MAX as u64;
            room_for_readable = (room_for_readable - room_for_readable / 20).saturating_sub(batches);
            chosen_permille = 1000;
        }
        if is_required || readable_bytes <= room_for_readable {
            return Ok(all);
        }
        let all_bytes = readable_bytes.saturating_add(must_be_stored);
        let stored_bytes = must_be_stored.min(room) + room_for_readable;
        let permille = (u128::from(stored_bytes) * 1000).checked_div(all_bytes.into()).unwrap_or(0) as u64;
        let chosen = (u128::from(room_for_readable) * u128::from(chosen_permille) / 1000) as u64;
        // Less than all, so that nodes know from the beginning that their room will not suffice.
        let share = StoredShare::that_fits(chosen, readable_bytes).min(StoredShare::NEARLY_ALL);
        Ok(Self { stored_share: Some(share), partial: Some((all_bytes, permille)), ..all })
    }
}

/// Returns a node that has too little room for the copies that it would hold, and the bytes that it needs. A small node holds more
/// than its share as a further candidate, because a node never holds a block twice.
fn full_node(bytes: u64, free: &[u64], copies: u16, seed: u64) -> Option<(usize, u64)> {
    // Each node has room for one copy of everything, so no placement can be too much for it.
    if free.iter().all(|&free| free >= bytes) {
        return None;
    }
    let members = (0..).map(NodeId).zip(free).map(|(node, &capacity)| Member { node, capacity });
    let placement = Placement::new(seed, &members.collect::<Vec<_>>());
    let mut held = vec![0_u64; free.len()];
    for block in 0..COPIES_TRIED {
        for holder in placement.candidates(&block.to_le_bytes(), 0).take(usize::from(copies)) {
            held[holder.index()] += 1;
        }
    }
    let needed = |held: u64| (u128::from(bytes) * u128::from(held) / u128::from(COPIES_TRIED)) as u64;
    held.into_iter().map(needed).enumerate().find(|&(node, needed)| needed > free[node])
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn what_can_be_read_again_is_stored_as_far_as_it_fits() {
        let check = |(readable, unreadable, untold): (u64, u64, u64), expected: Option<u64>| {
            let amounts = Amounts {
                files: 0,
                readable_bytes: readable * MIB,
                unreadable_bytes: unreadable * MIB,
                sure_bytes: unreadable * MIB,
                untold_bytes: untold * MIB,
                copies: 1,
            };
            let fit = Fit::of(amounts, &[400 * MIB, 600 * MIB], false).unwrap();
            assert_eq!(fit.partial.map(|(_, permille)| permille), expected, "{amounts:?}");
            let is_all = fit.stored_share >= Some(StoredShare::NEARLY_ALL);
            assert!(is_all || expected.is_some(), "{amounts:?}");
        };
        check((0, 0, 0), None);
        // About 16 MiB are left for catalogs.
        check((984, 0, 0), None);
        check((1001, 0, 0), Some(983));
        check((2000, 0, 0), Some(492));
        check((1000, 1000, 0), Some(492));
        // Room is kept for those that must be stored.
        check((600, 500, 0), Some(869));
        check((1000, 0, 10), Some(897));
        // If only compressed sources are left, whether they fit shows when they are read.
        check((0, 1000, 0), None);
        check((0, 0, 5000), None);
    }

    #[test]
    fn what_must_be_stored_and_does_not_fit_is_refused_with_the_numbers() {
        let amounts = |readable_bytes, sure_bytes| Amounts {
            readable_bytes,
            unreadable_bytes: sure_bytes,
            sure_bytes,
            ..Amounts::default()
        };
        for (amounts, is_required, words) in [
            (amounts(0, 1120 * MIB), false, "at least 1.1GiB"),
            (amounts(5, 1120 * MIB), true, "at least 1.1GiB"),
            (amounts(1001 * MIB, 0), true, "without --require-fit"),
            (amounts(600 * MIB, 600 * MIB), true, "without --require-fit"),
        ] {
            let message = Fit::of(amounts, &[1000 * MIB], is_required).unwrap_err().to_string();
            assert!(message.contains(words) && message.contains("1000.0MiB free"), "{message}");
            assert!(message.contains("without --require-fit") == words.contains("without"), "{message}");
        }
        let fit = Fit::of(amounts(999 * MIB, 0), &[1000 * MIB], true).unwrap();
        assert_eq!((fit.stored_share, fit.partial), (None, None));
    }

    #[test]
    fn an_estimate_that_is_a_little_too_high_is_tried() {
        let amounts = Amounts { unreadable_bytes: 1100 * MIB, sure_bytes: 1100 * MIB, ..Amounts::default() };
        assert!(Fit::of(amounts, &[1000 * MIB], false).is_ok());
        // Nobody is refused for what is not sure.
        let unsure = Amounts { unreadable_bytes: 5000 * MIB, ..Amounts::default() };
        assert!([false, true].iter().all(|&is_required| Fit::of(unsure, &[1000 * MIB], is_required).is_ok()));
        assert!(!amounts.surely_fit(&[1237 * MIB]) && amounts.surely_fit(&[1238 * MIB]));
        let untold = Amounts { untold_bytes: 250 * MIB, ..Amounts::default() };
        assert!(untold.surely_fit(&[1125 * MIB]) && !untold.surely_fit(&[1124 * MIB]));
        let share =
            |free| Fit::of(Amounts { readable_bytes: 1000 * MIB, ..Amounts::default() }, &[free], false).unwrap().stored_share;
        assert_eq!([1124, 1125].map(|free| share(free * MIB)), [StoredShare::NEARLY_ALL, StoredShare::ALL].map(Some));
    }

    #[test]
    fn catalogs_take_room_on_every_node_and_sums_do_not_overflow() {
        let amounts = Amounts { files: MIB, readable_bytes: 900 * MIB, ..Amounts::default() };
        assert!(Fit::of(amounts, &[500 * MIB, 500 * MIB], false).unwrap().partial.is_some());
        let huge = Amounts { readable_bytes: u64::MAX, untold_bytes: u64::MAX, ..Amounts::default() };
        assert!(Fit::of(huge, &[1, 2], false).unwrap().partial.is_some());
        assert!(Fit::of(Amounts { unreadable_bytes: u64::MAX, sure_bytes: u64::MAX, ..huge }, &[1, 2], false).is_err());
        let many = Amounts { files: 10, ..Amounts::default() };
        let message = Fit::of(many, &[1280, 1279], false).unwrap_err().to_string();
        assert!(message.contains("node 1 has 1.2KiB free") && message.contains("for the catalog"), "{message}");
        Fit::of(many, &[1280, 1280], false).unwrap();
    }

    #[test]
    fn several_copies_must_fit_as_a_whole_and_auto_means_two_where_there_is_certainly_room() {
        let amounts = |readable| Amounts { readable_bytes: readable * MIB, copies: 1, ..Amounts::default() };
        let copies =
            |readable, nodes: usize, copies| Fit::with_copies(amounts(readable), &vec![500 * MIB; nodes], false, copies, 7);
        assert_eq!(copies(490, 2, Copies::Number(2)).unwrap().1, 2);
        let message = copies(510, 2, Copies::Number(2)).unwrap_err().to_string();
        assert!(
            message.contains("2 copies of the samples take at least 1020.0MiB") && message.contains("fewer --copies"),
            "{message}"
        );
        let (fit, one) = copies(1200, 2, Copies::Number(1)).unwrap();
        assert!(fit.partial.is_some() && one == 1);
        assert_eq!([440, 450, 1200].map(|readable| copies(readable, 2, Copies::Auto).unwrap().1), [2, 1, 1]);
        assert_eq!(copies(10, 1, Copies::Auto).unwrap().1, 1, "one node cannot hold two copies");
        // All nodes together have room, but the small one must hold a copy of each block, or of more blocks than fit there.
        for (free, node) in [([100, 900].as_slice(), 0), (&[300, 100, 300], 1)] {
            let free: Vec<u64> = free.iter().map(|free| free * MIB).collect();
            let bytes = amounts(free.iter().sum::<u64>() / MIB * 9 / 20);
            let message = Fit::with_copies(bytes, &free, false, Copies::Number(2), 7).unwrap_err().to_string();
            assert!(message.contains(&format!("node {node} would hold about")) && message.contains("100.0MiB free"), "{message}");
            assert_eq!(Fit::with_copies(bytes, &free, false, Copies::Auto, 7).unwrap().1, 1);
        }
    }
}
