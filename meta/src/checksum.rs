//! CRC32C, the checksum that travels with every chunk from its source to its reader. It detects
//! accidental damage; it does not stop an attacker, who can compute one too.

/// Bytes that differ from those that were staged in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its checksum is {found:08x}, at stage-in it was {expected:08x}")]
pub struct Mismatch {
    /// The checksum taken while the source was read.
    pub expected: u32,
    /// The checksum of the bytes at hand.
    pub found: u32,
}

/// Computes the CRC32C of `bytes`.
pub fn checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}

/// Computes the checksum of two adjacent parts from the checksum of each and the length of the
/// right part.
pub fn combine(left: u32, right: u32, len: u64) -> u32 {
    crc32c::crc32c_combine(left, right, len as usize)
}

/// Compares bytes with the checksum that they should have.
///
/// # Errors
/// Returns both checksums if they differ.
pub fn check(bytes: &[u8], expected: u32) -> Result<(), Mismatch> {
    let found = checksum(bytes);
    if found == expected { Ok(()) } else { Err(Mismatch { expected, found }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_of_parts_combine_to_that_of_the_whole() {
        let bytes: Vec<u8> = (0..100_000_u32).map(|number| (number.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
        for cut in [0, 1, 4096, 99_999, 100_000] {
            let (left, right) = bytes.split_at(cut);
            assert_eq!(combine(checksum(left), checksum(right), right.len() as u64), checksum(&bytes), "cut at {cut}");
        }
        assert_eq!(checksum(b"123456789"), 0xe306_9283, "the check value of CRC32C");
    }
}
