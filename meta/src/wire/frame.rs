//! Frames: the headers in front of messages on a stream.
//!
//! Between peers a header has 24 bytes: body length, kind, the request's number, and an argument.
//! On the local socket it has 4 bytes: the length of the message.

use crate::limits::{FRAME_BODY_LEN_MAX, LOCAL_MESSAGE_LEN_MAX};

/// Length of a peer frame's header.
pub const PEER_HEADER_LEN: usize = 24;
/// Length of a local message's header.
pub const LOCAL_HEADER_LEN: usize = 4;

/// The kind of a peer frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A request for bulk data. The argument is the number of bytes that may be sent. Body: lengths
    /// of the slots, then the message.
    Pull = 1,
    /// The answer to a pull. The argument is the number of bytes that follow as `Data`. Body:
    /// lengths of the pieces, then the message.
    Pulled = 2,
    /// Bulk bytes of a pull or an offer, in order.
    Data = 3,
    /// An offer of as many bytes as the argument says. Body: the message.
    Offer = 4,
    /// The receiver is ready for the offered bytes.
    Ready = 5,
    /// The answer to an offer. Body: the message.
    Offered = 6,
    /// The request failed. Body: text.
    Refused = 7,
    /// Asks the peer to show that it is alive.
    Ping = 8,
    /// The answer to a ping.
    Pong = 9,
    /// All `Data` of an answer has been sent. Body: empty, or the pieces that could not be read.
    End = 10,
    /// The offering side sends this in place of `Data`: it has withdrawn an accepted offer, and
    /// none of the offered bytes will come.
    Withdrawn = 11,
}

const KINDS: [Kind; 11] = [
    Kind::Pull,
    Kind::Pulled,
    Kind::Data,
    Kind::Offer,
    Kind::Ready,
    Kind::Offered,
    Kind::Refused,
    Kind::Ping,
    Kind::Pong,
    Kind::End,
    Kind::Withdrawn,
];

/// The header of a peer frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerHeader {
    /// Length of the body that follows, in bytes.
    pub body_len: u32,
    /// The kind of the frame.
    pub kind: Kind,
    /// The number of the request that the frame belongs to. The requesting side assigns it.
    pub request: u64,
    /// A number whose meaning depends on the [`Kind`].
    pub argument: u64,
}

/// A header that no peer of this version sends.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("not a frame of this version")]
pub struct InvalidFrame;

impl PeerHeader {
    /// Encodes the header.
    pub fn encode(self) -> [u8; PEER_HEADER_LEN] {
        let mut bytes = [0; PEER_HEADER_LEN];
        bytes[..4].copy_from_slice(&self.body_len.to_le_bytes());
        bytes[4] = self.kind as u8;
        bytes[8..16].copy_from_slice(&self.request.to_le_bytes());
        bytes[16..].copy_from_slice(&self.argument.to_le_bytes());
        bytes
    }

    /// Decodes a header and checks the bound on the body's length.
    ///
    /// # Errors
    ///
    /// If the kind is unknown, the body too long, or a reserved byte not zero.
    pub fn decode(bytes: [u8; PEER_HEADER_LEN]) -> Result<Self, InvalidFrame> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]));
        let body_len = u32::from_le_bytes(std::array::from_fn(|byte| bytes[byte]));
        let kind = KINDS.into_iter().find(|&kind| kind as u8 == bytes[4]).ok_or(InvalidFrame)?;
        if body_len as usize > FRAME_BODY_LEN_MAX || bytes[5..8] != [0; 3] {
            return Err(InvalidFrame);
        }
        Ok(Self { body_len, kind, request: word(8), argument: word(16) })
    }
}

/// Encodes the header of a local message.
///
/// # Errors
///
/// If the message is too long.
pub fn encode_local(len: usize) -> Result<[u8; LOCAL_HEADER_LEN], InvalidFrame> {
    if len > LOCAL_MESSAGE_LEN_MAX { Err(InvalidFrame) } else { Ok((len as u32).to_le_bytes()) }
}

/// Decodes a local message's header into the length of the message.
///
/// # Errors
///
/// If the message is too long.
pub fn decode_local(header: [u8; LOCAL_HEADER_LEN]) -> Result<usize, InvalidFrame> {
    let len = u32::from_le_bytes(header) as usize;
    if len > LOCAL_MESSAGE_LEN_MAX { Err(InvalidFrame) } else { Ok(len) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_golden_header_is_decoded_and_invalid_ones_are_rejected() {
        let header = PeerHeader { body_len: 0x0102, kind: Kind::Offer, request: 7, argument: 1 << 40 };
        let bytes = *b"\x02\x01\0\0\x04\0\0\0\x07\0\0\0\0\0\0\0\0\0\0\0\0\x01\0\0";
        assert_eq!(header.encode(), bytes);
        assert_eq!(PeerHeader::decode(bytes), Ok(header));
        for (at, value) in [(3, 1), (4, 0), (4, 12), (5, 1)] {
            let mut wrong = bytes;
            wrong[at] = value;
            assert_eq!(PeerHeader::decode(wrong), Err(InvalidFrame), "byte {at} = {value}");
        }
        assert_eq!(decode_local([0xff; 4]), Err(InvalidFrame));
    }
}
