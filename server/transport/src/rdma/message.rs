//! What the two ends of a queue pair say: over the pair's TCP connection to set it up, by SEND to ask, by WRITE to answer.
//! All numbers are little-endian. Whatever does not parse ends the queue pair.

use super::device::Address;
use super::queue::{End, Remote};
use crate::{Refusal, Unread};

/// Version of all that is below.
const VERSION: u8 = 2;
/// Length of an [`Offer`] of an end.
const HELLO_LEN: usize = 48;
/// A request for a single block fits into this.
const REQUEST_LEN_MIN: u32 = 1 << 10;
/// Length of a request before its places and its message.
const REQUEST_HEAD_LEN: usize = 32;
/// Length of a place in a request.
const PLACE_LEN: usize = 12;
/// In place of a piece's length: it could not be read.
const UNREAD: u32 = u32::MAX;
/// Length of an answer before its lengths and its message.
const ANSWER_HEAD_LEN: usize = 12;

/// Our end, and what we take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) end: End,
    /// Its name, by which it is not confused with one that had its number before.
    pub(super) nonce: u64,
    /// Requests that may wait for their answers.
    pub(super) window: u32,
    /// Longest request.
    pub(super) request_len: u32,
}

impl Hello {
    pub(super) fn encode(&self) -> Vec<u8> {
        let Self { end: End { queue, packet, address, reads }, nonce, window, request_len } = self;
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
        let end = End { queue: number(0), packet: number(1), address, reads: bytes[1] };
        let nonce = u64::from_le_bytes(std::array::from_fn(|byte| bytes[40 + byte]));
        let (window, request_len) = (number(2), number(3));
        let is_valid = bytes[0] == VERSION && (1..=5).contains(&address.mtu) && end.reads > 0;
        (is_valid && window > 0 && request_len >= REQUEST_LEN_MIN).then_some(Self { end, nonce, window, request_len })
    }
}

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// Nothing: the answer shows that a WRITE comes through.
    Ping,
    /// Bytes, into places.
    Pull,
    /// That the bytes in the one place are taken.
    Offer,
}

/// A request. Places are in memory of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) ask: Ask,
    /// Its number on this queue pair.
    pub(super) number: u32,
    /// Where the answer goes, and how long it may be.
    pub(super) answer: Remote,
    pub(super) answer_len: u32,
    pub(super) places: Vec<(Remote, u32)>,
    pub(super) message: Vec<u8>,
}

/// How long a request is, and its answer may be, with so many places and so long a message.
pub(super) fn request_len(places: usize, message: usize) -> usize {
    REQUEST_HEAD_LEN + places * PLACE_LEN + message
}

/// How much room an answer takes.
pub(super) fn answer_len(lens: usize, message: usize) -> usize {
    ANSWER_HEAD_LEN + lens * 4 + message
}

impl Request {
    /// Writes it into `into`, which is [`request_len`] long.
    pub(super) fn encode(&self, into: &mut [u8]) {
        let ask = match self.ask {
            Ask::Ping => 0_u32,
            Ask::Pull => 1,
            Ask::Offer => 2,
        };
        let key = self.places.first().map_or(0, |(place, _)| place.key);
        let mut writer = Writer(into);
        [ask, self.number, self.answer.key, self.answer_len].iter().for_each(|number| writer.put(&number.to_le_bytes()));
        writer.put(&self.answer.address.to_le_bytes());
        [key, self.places.len() as u32].iter().for_each(|number| writer.put(&number.to_le_bytes()));
        for (place, len) in &self.places {
            writer.put(&place.address.to_le_bytes());
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
        // Bounded by the bytes that are there.
        if count > reader.0.len() / PLACE_LEN || (ask == Ask::Offer && count != 1) {
            return None;
        }
        let place = |reader: &mut Reader<'_>| Some((Remote { address: reader.u64()?, key }, reader.u32()?));
        let places = (0..count).map(|_| place(&mut reader)).collect::<Option<Vec<_>>>()?;
        Some(Self { ask, number, answer, answer_len, places, message: reader.0.to_vec() })
    }
}

/// How a request was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answered {
    /// So many bytes in each place, but for those that could not be read, and a message.
    Done { lens: Vec<u32>, message: Vec<u8>, unread: Unread },
    /// It will not.
    Refused(Refusal),
    /// It would, but its message does not fit here.
    TooLong,
}

impl Answered {
    /// Its bytes, at most `room`.
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

    /// Takes it from what was written; there may be more bytes behind it.
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
    use super::*;

    fn hello() -> Hello {
        let address = Address { lid: 7, gid: [3; 16], gid_index: 1, is_ethernet: true, mtu: 5 };
        Hello { end: End { queue: 17, packet: 0xab_cdef, address, reads: 16 }, nonce: 1 << 60, window: 64, request_len: 32 << 10 }
    }

    fn request(ask: Ask) -> Request {
        let place = |address| (Remote { address, key: 9 }, 3000);
        let places = if ask == Ask::Offer { vec![place(5)] } else { vec![place(1 << 40), place(2)] };
        Request { ask, number: 3, answer: Remote { address: 77, key: 8 }, answer_len: 100, places, message: b"what".to_vec() }
    }

    fn done(lens: Vec<u32>, message: &[u8], unread: &[u32]) -> Answered {
        let reason = if unread.is_empty() { String::new() } else { "its drive fails".to_owned() };
        Answered::Done { lens, message: message.to_vec(), unread: Unread { pieces: unread.to_vec(), reason } }
    }

    #[test]
    fn what_is_said_is_heard_and_what_is_cut_short_is_not() {
        let bytes = hello().encode();
        assert_eq!(Hello::decode(&bytes), Some(hello()));
        assert!((0..bytes.len()).all(|len| Hello::decode(&bytes[..len]).is_none()));
        for ask in [Ask::Ping, Ask::Pull, Ask::Offer] {
            let request = request(ask);
            let mut bytes = vec![0; request_len(request.places.len(), request.message.len())];
            request.encode(&mut bytes);
            assert_eq!(Request::decode(&bytes), Some(request));
            assert!((0..bytes.len() - 4).all(|len| Request::decode(&bytes[..len]).is_none()));
        }
        for answer in [
            done(vec![1, 2], b"m", &[]),
            done(vec![1, 0, 2, 0], b"m", &[1, 3]),
            Answered::Refused("no".into()),
            Answered::TooLong,
        ] {
            let bytes = answer.clone().encode(1000);
            assert_eq!(Answered::decode(&[&bytes[..], &[0; 9]].concat()), Some(answer));
            assert!((0..bytes.len()).all(|len| Answered::decode(&bytes[..len]).is_none()));
        }
        for long in [done(vec![], &[0; 100], &[]), done(vec![0; 4], &[0; 8], &[2])] {
            assert_eq!(Answered::decode(&long.encode(40)), Some(Answered::TooLong));
        }
        assert_eq!(
            Answered::decode(&Answered::Refused("long".repeat(99).into()).encode(16)),
            Some(Answered::Refused("long".into()))
        );
    }

    #[test]
    fn noise_is_never_more_than_noise() {
        proptest::proptest!(|(bytes: Vec<u8>)| {
            let _ = (Hello::decode(&bytes), Answered::decode(&bytes));
            if let Some(request) = Request::decode(&bytes) {
                proptest::prop_assert!(request.places.len() * PLACE_LEN <= bytes.len());
            }
        });
    }
}
