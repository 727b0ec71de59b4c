//! A replacement for hex-simd 0.5, all releases of which depend on a withdrawn crate. This replacement has only the three items
//! that async-rdma 0.5 uses to display the identifier of a card.

use std::mem::MaybeUninit;

/// Case of the hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsciiCase {
    /// Digits `0-9` and `a-f`.
    Lower,
    /// Digits `0-9` and `A-F`.
    Upper,
}

/// A buffer for the digits.
pub struct OutBuf<'a>(&'a mut [MaybeUninit<u8>]);

impl<'a> OutBuf<'a> {
    /// Wraps a buffer that may be uninitialized.
    pub fn from_uninit_mut(room: &'a mut [MaybeUninit<u8>]) -> Self {
        Self(room)
    }
}

/// The buffer is too short for two digits per byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error;

/// Encodes each byte as two digits.
///
/// # Errors
/// The buffer is too short.
pub fn encode_as_str<'a>(bytes: &[u8], room: OutBuf<'a>, case: AsciiCase) -> Result<&'a mut str, Error> {
    let digits = if case == AsciiCase::Lower { b"0123456789abcdef" } else { b"0123456789ABCDEF" };
    let room = room.0.get_mut(..bytes.len() * 2).ok_or(Error)?;
    for (pair, byte) in room.chunks_exact_mut(2).zip(bytes) {
        pair[0].write(digits[usize::from(byte >> 4)]);
        pair[1].write(digits[usize::from(byte & 15)]);
    }
    // SAFETY: all of `room` was initialized above, with ASCII digits.
    Ok(unsafe { std::str::from_utf8_unchecked_mut(&mut *(std::ptr::from_mut(room) as *mut [u8])) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_becomes_two_digits() {
        let mut room = [MaybeUninit::uninit(); 6];
        let text = encode_as_str(&[0, 0x9a, 0xff], OutBuf::from_uninit_mut(&mut room), AsciiCase::Lower).unwrap();
        assert_eq!(text, "009aff");
        assert!(encode_as_str(&[1, 2, 3, 4], OutBuf::from_uninit_mut(&mut room), AsciiCase::Upper).is_err());
    }
}
