//! The check of what was shipped here, against the checksums that came with it: before a byte is taken in, so that what
//! an owner has once acknowledged is what was read from the source.

use dayfly_meta::checksum::{Mismatch, check};
use dayfly_meta::wire::peer::{Damaged, ShippedBlock};

/// Compares the blocks of a batch, which lie back to back in `bytes`.
pub(crate) fn batch(blocks: &[ShippedBlock], bytes: &[u8]) -> Result<(), Damaged> {
    let mut rest = bytes;
    for (at, block) in (0..).zip(blocks) {
        // The lengths were compared with the bytes before; a block that is cut off has another checksum.
        let (this, others) = rest.split_at(rest.len().min(block.len as usize));
        check(this, block.checksum).map_err(|Mismatch { expected, found }| Damaged { at, expected, found })?;
        rest = others;
    }
    Ok(())
}

/// Compares a piece of a large block.
pub(crate) fn piece(checksum: u32, bytes: &[u8]) -> Result<(), Damaged> {
    check(bytes, checksum).map_err(|Mismatch { expected, found }| Damaged { at: 0, expected, found })
}
