//! Stands in for hex-simd 0.5, all releases of which depend on a withdrawn crate: the three names that async-rdma 0.5 uses, for
//! showing the identifier of a card.

use std::mem::MaybeUninit;

/// Case of the digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsciiCase {
    /// 0-9, a-f.
    Lower,
    /// 0-9, A-F.
    Upper,
}

/// Room for digits.
pub struct OutBuf<'a>(&'a mut [MaybeUninit<u8>]);

impl<'a> OutBuf<'a> {
    /// Takes the room.
    pub fn from_uninit_mut(room: &'a mut [MaybeUninit<u8>]) -> Self {
        Self(room)
    }
}

/// There is less room than two digits a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error;

/// Writes two digits for each byte.
pub fn encode_as_str<'a>(bytes: &[u8], room: OutBuf<'a>, case: AsciiCase) -> Result<&'a mut str, Error> {
    let digits = if case == AsciiCase::Lower { b"0123456789abcdef" } else { b"0123456789ABCDEF" };
    let room = room.0.get_mut(..bytes.len() * 2).ok_or(Error)?;
    for (pair, byte) in room.chunks_exact_mut(2).zip(bytes) {
        pair[0].write(digits[usize::from(byte >> 4)]);
        pair[1].write(digits[usize::from(byte & 15)]);
    }
    // SAFETY: all of `room` was written just now, with ASCII.
    Ok(unsafe { std::str::from_utf8_unchecked_mut(&mut *(std::ptr::from_mut(room) as *mut [u8])) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_digits_a_byte() {
        let mut room = [MaybeUninit::uninit(); 6];
        let text = encode_as_str(&[0, 0x9a, 0xff], OutBuf::from_uninit_mut(&mut room), AsciiCase::Lower).unwrap();
        assert_eq!(text, "009aff");
        assert!(encode_as_str(&[1, 2, 3, 4], OutBuf::from_uninit_mut(&mut room), AsciiCase::Upper).is_err());
    }
}
