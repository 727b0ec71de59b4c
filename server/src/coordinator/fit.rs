//! Decides, before anything is read, what share of the samples is stored.

use dayfly_meta::limits::ARCHIVE_GROWTH_GUESS;
use dayfly_meta::stored_share::StoredShare;

use super::CoordinatorError;

/// Blocks that find all nodes full are not stored, so slightly more blocks than should fit are chosen. Otherwise an estimate
/// that is a little too high would leave room unused. In thousandths.
const CHOSEN_PERMILLE: u64 = 1020;
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
    /// Length of the compressed sources that do not tell how many bytes they unpack to.
    pub(super) untold_bytes: u64,
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
    /// Compares amounts with the free bytes of each node.
    pub(super) fn of(amounts: Amounts, free: &[u64], is_required: bool) -> Result<Self, CoordinatorError> {
        let Amounts { files, readable_bytes, unreadable_bytes, untold_bytes } = amounts;
        let catalog = files.saturating_mul(CATALOG_FILE_LEN);
        if let Some((node, &free)) = free.iter().enumerate().find(|&(_, &free)| free < catalog) {
            return Err(CoordinatorError::NoCatalogRoom { needed: catalog, node, free });
        }
        let catalogs = catalog.saturating_mul(free.len() as u64);
        let room = free.iter().sum::<u64>().saturating_sub(catalogs);
        let too_much = |needed: u64, can_be_left: bool| {
            Err(CoordinatorError::NotEnoughRoom { needed: needed.saturating_add(catalogs), free: free.to_vec(), can_be_left })
        };
        if unreadable_bytes > room {
            return too_much(unreadable_bytes, false);
        }
        let known_bytes = readable_bytes.saturating_add(unreadable_bytes);
        if is_required && known_bytes > room {
            return too_much(known_bytes, true);
        }
        let all = Self { stored_share: (!is_required).then_some(StoredShare::ALL), expected_files: files, partial: None };
        let must_be_stored = unreadable_bytes.saturating_add(untold_bytes.saturating_mul(ARCHIVE_GROWTH_GUESS));
        let room_for_readable = room.saturating_sub(must_be_stored);
        if is_required || readable_bytes <= room_for_readable {
            return Ok(all);
        }
        let all_bytes = readable_bytes.saturating_add(must_be_stored);
        let stored_bytes = must_be_stored.min(room) + room_for_readable;
        let permille = (u128::from(stored_bytes) * 1000).checked_div(all_bytes.into()).unwrap_or(0) as u64;
        let chosen = (u128::from(room_for_readable) * u128::from(CHOSEN_PERMILLE) / 1000) as u64;
        // Less than all, so that nodes know from the beginning that their room will not suffice.
        let share = StoredShare::that_fits(chosen.min(readable_bytes - 1), readable_bytes);
        Ok(Self { stored_share: Some(share), partial: Some((all_bytes, permille)), ..all })
    }
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
                untold_bytes: untold * MIB,
            };
            let fit = Fit::of(amounts, &[400 * MIB, 600 * MIB], false).unwrap();
            assert_eq!(fit.partial.map(|(_, permille)| permille), expected, "{amounts:?}");
            assert_eq!(fit.stored_share == Some(StoredShare::ALL), expected.is_none());
        };
        check((0, 0, 0), None);
        check((1000, 0, 0), None);
        check((1001, 0, 0), Some(999));
        check((2000, 0, 0), Some(500));
        check((1000, 1000, 0), Some(500));
        check((600, 500, 0), Some(909));
        check((1000, 0, 10), Some(961));
        // If only compressed sources are left, whether they fit shows when they are read.
        check((0, 1000, 0), None);
        check((0, 0, 5000), None);
    }

    #[test]
    fn what_must_be_stored_and_does_not_fit_is_refused_with_the_numbers() {
        let amounts = |readable_bytes, unreadable_bytes| Amounts { readable_bytes, unreadable_bytes, ..Amounts::default() };
        for (amounts, is_required, words) in [
            (amounts(0, 1001 * MIB), false, "at least 1001.0MiB"),
            (amounts(5, 1001 * MIB), true, "at least 1001.0MiB"),
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
    fn catalogs_take_room_on_every_node_and_sums_do_not_overflow() {
        let amounts = Amounts { files: MIB, readable_bytes: 900 * MIB, ..Amounts::default() };
        assert!(Fit::of(amounts, &[500 * MIB, 500 * MIB], false).unwrap().partial.is_some());
        let huge = Amounts { files: 0, readable_bytes: u64::MAX, unreadable_bytes: 0, untold_bytes: u64::MAX };
        assert!(Fit::of(huge, &[1, 2], false).unwrap().partial.is_some());
        assert!(Fit::of(Amounts { unreadable_bytes: u64::MAX, ..huge }, &[1, 2], false).is_err());
        let many = Amounts { files: 10, ..Amounts::default() };
        let message = Fit::of(many, &[1280, 1279], false).unwrap_err().to_string();
        assert!(message.contains("node 1 has 1.2KiB free") && message.contains("for the catalog"), "{message}");
        Fit::of(many, &[1280, 1280], false).unwrap();
    }
}
