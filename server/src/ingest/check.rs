//! Verifies shipped blocks against the checksums that came with them, before any of them is stored. So every block that an
//! owner has acknowledged is what was read from the source.

use dayfly_meta::checksum::{Mismatch, check};
use dayfly_meta::wire::peer::{Damaged, ShippedBlock};

/// Verifies the blocks of a batch, which lie back to back in `bytes`.
pub(crate) fn batch(blocks: &[ShippedBlock], bytes: &[u8]) -> Result<(), Damaged> {
    let mut rest = bytes;
    for (at, block) in (0..).zip(blocks) {
        // The caller has compared the lengths with the bytes. A block that is cut off here fails the check.
        let (this, others) = rest.split_at(rest.len().min(block.len as usize));
        check(this, block.checksum).map_err(|Mismatch { expected, found }| Damaged { at, expected, found })?;
        rest = others;
    }
    Ok(())
}

/// Verifies a piece of a large block.
pub(crate) fn piece(checksum: u32, bytes: &[u8]) -> Result<(), Damaged> {
    check(bytes, checksum).map_err(|Mismatch { expected, found }| Damaged { at: 0, expected, found })
}
