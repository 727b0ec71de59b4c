//! The messages between the two ends of a queue pair: those that set it up over the inner transport, requests (sent with SEND)
//! and answers (sent with WRITE). All numbers are little-endian. A message that does not parse ends the queue pair.

use super::device::Address;
use super::queue::{Endpoint, Remote};
use crate::contract::Unread;
use crate::error::Refusal;

/// Version of the formats in this file.
const VERSION: u8 = 2;
/// Length of an encoded [`QueuePairHello`].
const HELLO_LEN: usize = 48;
/// Every end must accept requests of this length, which is enough to request a single piece.
const REQUEST_LEN_MIN: u32 = 1 << 10;
/// Length of the part of a request that precedes its ranges and its message.
const REQUEST_HEAD_LEN: usize = 32;
/// Length of a memory range in a request.
const RANGE_LEN: usize = 12;
/// Stands in place of the length of a piece that could not be read.
const UNREAD: u32 = u32::MAX;
/// Length of the part of an answer that precedes its lengths and its message.
const ANSWER_HEAD_LEN: usize = 12;

/// The description of one end of a queue pair, which the other end uses to connect to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueuePairHello {
    pub(super) end: Endpoint,
    /// A random number that identifies the queue pair. The card's own number for the queue pair would not do, because the card
    /// may reuse it.
    pub(super) nonce: u64,
    /// Number of requests that may wait for their answers.
    pub(super) window: u32,
    /// The longest request in bytes that this end accepts.
    pub(super) request_len: u32,
}

impl QueuePairHello {
    pub(super) fn encode(&self) -> Vec<u8> {
        let Self { end: Endpoint { queue, packet, address, reads }, nonce, window, request_len } = self;
        let mut bytes = vec![VERSION, *reads, address.mtu, u8::from(address.is_ethernet)];
        bytes.extend_from_slice(&address.gid);
        bytes.extend_from_slice(&address.lid.to_le_bytes());
        bytes.extend_from_slice(&u16::from(address.gid_index).to_le_bytes());
        [*queue, *packet, *window, *request_len].iter().for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()));
        bytes.extend_from_slice(&nonce.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HELLO_LEN] = bytes.try_into().ok()?;
        let gid = std::array::from_fn(|at| bytes[4 + at]);
        let lid = u16::from_le_bytes([bytes[20], bytes[21]]);
        let address = Address { lid, gid, gid_index: bytes[22], is_ethernet: bytes[3] != 0, mtu: bytes[2] };
        let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| bytes[24 + 4 * at + byte]));
        let end = Endpoint { queue: number(0), packet: number(1), address, reads: bytes[1] };
        let nonce = u64::from_le_bytes(std::array::from_fn(|byte| bytes[40 + byte]));
        let (window, request_len) = (number(2), number(3));
        let is_valid = bytes[0] == VERSION && (1..=5).contains(&address.mtu) && end.reads > 0;
        (is_valid && window > 0 && request_len >= REQUEST_LEN_MIN).then_some(Self { end, nonce, window, request_len })
    }
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// Asks for nothing. Its answer proves that a WRITE arrives.
    Ping,
    /// Asks for bytes, to be written into the ranges.
    Pull,
    /// Offers the bytes of the only range.
    Offer,
}

/// A request in its wire format. All ranges are in one region, so they have the same key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WireRequest {
    pub(super) ask: Ask,
    /// Number of the request on this queue pair.
    pub(super) number: u32,
    /// The asker's memory for the answer.
    pub(super) answer: Remote,
    /// The longest answer in bytes.
    pub(super) answer_len: u32,
    /// The asker's memory for bulk bytes: addresses and lengths.
    pub(super) ranges: Vec<(Remote, u32)>,
    pub(super) message: Vec<u8>,
}

/// Returns the length of a request with this many ranges and a message of this length.
pub(super) fn request_len(ranges: usize, message: usize) -> usize {
    REQUEST_HEAD_LEN + ranges * RANGE_LEN + message
}

/// Returns the length of an answer with this many lengths and a message of this length.
pub(super) fn answer_len(lens: usize, message: usize) -> usize {
    ANSWER_HEAD_LEN + lens * 4 + message
}

impl WireRequest {
    /// Encodes the request into `into`, which must be [`request_len`] long.
    pub(super) fn encode(&self, into: &mut [u8]) {
        let ask = match self.ask {
            Ask::Ping => 0_u32,
            Ask::Pull => 1,
            Ask::Offer => 2,
        };
        let key = self.ranges.first().map_or(0, |(range, _)| range.key);
        let mut writer = Writer(into);
        [ask, self.number, self.answer.key, self.answer_len].iter().for_each(|number| writer.put(&number.to_le_bytes()));
        writer.put(&self.answer.address.to_le_bytes());
        [key, self.ranges.len() as u32].iter().for_each(|number| writer.put(&number.to_le_bytes()));
        for (range, len) in &self.ranges {
            writer.put(&range.address.to_le_bytes());
            writer.put(&len.to_le_bytes());
        }
        writer.put(&self.message);
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let ask = match reader.u32()? {
            0 => Ask::Ping,
            1 => Ask::Pull,
            2 => Ask::Offer,
            _ => return None,
        };
        let (number, answer_key, answer_len) = (reader.u32()?, reader.u32()?, reader.u32()?);
        let answer = Remote { address: reader.u64()?, key: answer_key };
        let (key, count) = (reader.u32()?, reader.u32()? as usize);
        // The count is bounded by the bytes that follow.
        if count > reader.0.len() / RANGE_LEN || (ask == Ask::Offer && count != 1) {
            return None;
        }
        let range = |reader: &mut Reader<'_>| Some((Remote { address: reader.u64()?, key }, reader.u32()?));
        let ranges = (0..count).map(|_| range(&mut reader)).collect::<Option<Vec<_>>>()?;
        Some(Self { ask, number, answer, answer_len, ranges, message: reader.0.to_vec() })
    }
}

/// An answer in its wire format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WireAnswer {
    /// The request was answered. `lens` has the number of bytes in each range.
    Done { lens: Vec<u32>, message: Vec<u8>, unread: Unread },
    /// The request was refused.
    Refused(Refusal),
    /// The answer does not fit into the memory that the asker reserved for it.
    TooLong,
}

impl WireAnswer {
    /// Encodes the answer into at most `room` bytes.
    pub(super) fn encode(self, room: usize) -> Vec<u8> {
        let (status, lens, mut message) = match self {
            Self::Done { lens, message, unread } if unread.pieces.is_empty() && answer_len(lens.len(), message.len()) <= room => {
                (0_u32, lens, message)
            }
            Self::Done { mut lens, message, unread }
                if answer_len(lens.len(), 4 + unread.reason.len() + message.len()) <= room && !unread.pieces.is_empty() =>
            {
                for &piece in &unread.pieces {
                    lens[piece as usize] = UNREAD;
                }
                let reason = unread.reason.as_bytes();
                (3, lens, [&(reason.len() as u32).to_le_bytes(), reason, &message].concat())
            }
            Self::Refused(refusal) => (1, Vec::new(), refusal.to_string().into_bytes()),
            Self::Done { .. } | Self::TooLong => (2, Vec::new(), Vec::new()),
        };
        message.truncate(room.saturating_sub(answer_len(lens.len(), 0)));
        let mut bytes = Vec::with_capacity(answer_len(lens.len(), message.len()));
        let head = [status, lens.len() as u32, message.len() as u32];
        head.iter().chain(&lens).for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()));
        bytes.extend_from_slice(&message);
        bytes
    }

    /// Decodes an answer. More bytes may follow it.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader(bytes);
        let (status, count, len) = (reader.u32()?, reader.u32()? as usize, reader.u32()? as usize);
        if count > reader.0.len() / 4 {
            return None;
        }
        let lens = (0..count).map(|_| reader.u32()).collect::<Option<Vec<_>>>()?;
        let message = reader.0.get(..len)?.to_vec();
        match status {
            0 => Some(Self::Done { lens, message, unread: Unread::default() }),
            3 => {
                let mut reader = Reader(&message);
                let len = reader.u32()? as usize;
                let (reason, message) = reader.0.split_at_checked(len)?;
                let pieces = (0..).zip(&lens).filter(|(_, len)| **len == UNREAD).map(|(piece, _)| piece).collect();
                let unread = Unread { pieces, reason: String::from_utf8_lossy(reason).into_owned() };
                let lens = lens.iter().map(|&len| if len == UNREAD { 0 } else { len }).collect();
                Some(Self::Done { lens, message: message.to_vec(), unread })
            }
            1 => Some(Self::Refused(Refusal::new(String::from_utf8_lossy(&message)))),
            2 => Some(Self::TooLong),
            _ => None,
        }
    }
}

struct Writer<'a>(&'a mut [u8]);

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) {
        let (here, rest) = std::mem::take(&mut self.0).split_at_mut(bytes.len());
        here.copy_from_slice(bytes);
        self.0 = rest;
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn u32(&mut self) -> Option<u32> {
        let (bytes, rest) = self.0.split_first_chunk::<4>()?;
        self.0 = rest;
        Some(u32::from_le_bytes(*bytes))
    }

    fn u64(&mut self) -> Option<u64> {
        let (bytes, rest) = self.0.split_first_chunk::<8>()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*bytes))
    }
}

#[cfg(test)]
mod tests {
    use proptest::test_runner::{Config, RngSeed};

    use super::*;

    fn hello() -> QueuePairHello {
        let address = Address { lid: 7, gid: [3; 16], gid_index: 1, is_ethernet: true, mtu: 5 };
        QueuePairHello {
            end: Endpoint { queue: 17, packet: 0xab_cdef, address, reads: 16 },
            nonce: 1 << 60,
            window: 64,
            request_len: 32 << 10,
        }
    }

    fn request(ask: Ask) -> WireRequest {
        let range = |address| (Remote { address, key: 9 }, 3000);
        let ranges = if ask == Ask::Offer { vec![range(5)] } else { vec![range(1 << 40), range(2)] };
        WireRequest { ask, number: 3, answer: Remote { address: 77, key: 8 }, answer_len: 100, ranges, message: b"what".to_vec() }
    }

    fn done(lens: Vec<u32>, message: &[u8], unread: &[u32]) -> WireAnswer {
        let reason = if unread.is_empty() { String::new() } else { "its drive fails".to_owned() };
        WireAnswer::Done { lens, message: message.to_vec(), unread: Unread { pieces: unread.to_vec(), reason } }
    }

    #[test]
    fn messages_decode_to_what_was_encoded_and_truncated_ones_do_not_decode() {
        let bytes = hello().encode();
        assert_eq!(QueuePairHello::decode(&bytes), Some(hello()));
        assert!((0..bytes.len()).all(|len| QueuePairHello::decode(&bytes[..len]).is_none()));
        for ask in [Ask::Ping, Ask::Pull, Ask::Offer] {
            let request = request(ask);
            let mut bytes = vec![0; request_len(request.ranges.len(), request.message.len())];
            request.encode(&mut bytes);
            assert_eq!(WireRequest::decode(&bytes), Some(request));
            assert!((0..bytes.len() - 4).all(|len| WireRequest::decode(&bytes[..len]).is_none()));
        }
        for answer in [
            done(vec![1, 2], b"m", &[]),
            done(vec![1, 0, 2, 0], b"m", &[1, 3]),
            WireAnswer::Refused("no".into()),
            WireAnswer::TooLong,
        ] {
            let bytes = answer.clone().encode(1000);
            assert_eq!(WireAnswer::decode(&[&bytes[..], &[0; 9]].concat()), Some(answer));
            assert!((0..bytes.len()).all(|len| WireAnswer::decode(&bytes[..len]).is_none()));
        }
        for long in [done(vec![], &[0; 100], &[]), done(vec![0; 4], &[0; 8], &[2])] {
            assert_eq!(WireAnswer::decode(&long.encode(40)), Some(WireAnswer::TooLong));
        }
        assert_eq!(
            WireAnswer::decode(&WireAnswer::Refused("long".repeat(99).into()).encode(16)),
            Some(WireAnswer::Refused("long".into()))
        );
    }

    #[test]
    fn random_bytes_never_decode_to_more_ranges_than_they_hold() {
        let rng_seed = RngSeed::Fixed(crate::test_seed::seed("PROPTEST_RNG_SEED", 1));
        proptest::proptest!(Config { rng_seed, ..Config::default() }, |(bytes: Vec<u8>)| {
            let _ = (QueuePairHello::decode(&bytes), WireAnswer::decode(&bytes));
            if let Some(request) = WireRequest::decode(&bytes) {
                proptest::prop_assert!(request.ranges.len() * RANGE_LEN <= bytes.len());
            }
        });
    }
}
