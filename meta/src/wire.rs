//! Messages as plain data: between servers ([`peer`]), between a server and the processes of its
//! node ([`local`]), and the commands that these processes send ([`control`]).
//!
//! All messages are encoded with rkyv and are validated before they are used. Both ends of a
//! connection begin by naming [`VERSION`].

#![allow(missing_docs, reason = "rkyv derives archived twins without documentation; the messages themselves have it")]

pub mod control;
pub mod frame;
pub mod local;
pub mod peer;
pub mod status;

use rkyv::api::high::{HighDeserializer, HighSerializer, HighValidator, to_bytes_in_with_alloc};
use rkyv::bytecheck::CheckBytes;
use rkyv::rancor::Error;
use rkyv::ser::allocator::{Arena, ArenaHandle};
use rkyv::util::AlignedVec;
use rkyv::{Archive, Deserialize, Serialize};

/// Version of all messages and frames. Any change to a message or frame must increment the version.
/// Both ends must have the same version, because all processes of a session run the same binary.
pub const VERSION: u32 = 19;

/// Bytes that are not a message of this version.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("not a message of version {VERSION}, or damaged in transit")]
pub struct InvalidMessage;

/// Length of the checksum that follows a message between servers.
const SEAL_LEN: usize = 4;

/// Encodes a message between servers and appends the CRC32C of its bytes. A message decides where
/// bytes are stored and which bytes are sent, and the network's own checksums let some damage pass.
pub fn encode_sealed<T>(message: &T) -> Vec<u8>
where
    T: for<'a> Serialize<HighSerializer<AlignedVec, ArenaHandle<'a>, Error>>,
{
    let mut bytes = encode(message);
    bytes.extend(crate::checksum::checksum(&bytes).to_le_bytes());
    bytes
}

/// Decodes a message that another server encoded with [`encode_sealed`].
///
/// # Errors
///
/// If the checksum does not match or the bytes are not a message.
pub fn decode_sealed<T>(bytes: &[u8]) -> Result<T, InvalidMessage>
where
    T: Archive,
    T::Archived: for<'a> CheckBytes<HighValidator<'a, Error>> + Deserialize<T, HighDeserializer<Error>>,
{
    let (message, seal) = bytes.split_last_chunk::<SEAL_LEN>().ok_or(InvalidMessage)?;
    crate::checksum::check(message, u32::from_le_bytes(*seal)).map_err(|_| InvalidMessage)?;
    decode(message)
}

/// Encodes a message.
pub fn encode<T>(message: &T) -> Vec<u8>
where
    T: for<'a> Serialize<HighSerializer<AlignedVec, ArenaHandle<'a>, Error>>,
{
    // Not `rkyv::to_bytes`: it keeps memory in a thread-local variable with a destructor, whose registration allocates by way of
    // the C library's `malloc`. A client may have been called in a signal handler that interrupted `malloc`.
    let mut scratch = Arena::new();
    let bytes = to_bytes_in_with_alloc::<_, _, Error>(message, AlignedVec::new(), scratch.acquire());
    // Writing plain data into a growing buffer does not fail. If it did, the reader would reject the empty message.
    bytes.map(AlignedVec::into_vec).unwrap_or_default()
}

/// Decodes a message. The memory it takes is proportional to the number of bytes.
///
/// # Errors
///
/// If the bytes are not a valid message.
pub fn decode<T>(bytes: &[u8]) -> Result<T, InvalidMessage>
where
    T: Archive,
    T::Archived: for<'a> CheckBytes<HighValidator<'a, Error>> + Deserialize<T, HighDeserializer<Error>>,
{
    rkyv::from_bytes::<T, Error>(bytes).map_err(|_| InvalidMessage)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;

    use super::*;

    #[test]
    fn a_decoded_message_equals_the_encoded_one() {
        let message = local::FromClient::Fetch {
            dataset: crate::id::DatasetId(3),
            chunks: vec![crate::chunk::Chunk { block: crate::id::BlockId(1), index: 3 }],
            recheck: true,
        };
        assert_eq!(decode::<local::FromClient>(&encode(&message)).as_ref(), Ok(&message));
        assert_eq!(decode::<local::FromClient>(&encode(&message)[1..]), Err(InvalidMessage));
        assert_eq!(decode::<local::FromClient>(&[]), Err(InvalidMessage));
    }

    /// SEMANTICS: "A request whose message arrives damaged fails with an error."
    #[test]
    fn a_flipped_bit_in_a_sealed_message_is_detected() {
        let message = peer::OfferReply::Stored { first_arrival: 7 };
        let bytes = encode_sealed(&message);
        assert_eq!(decode_sealed::<peer::OfferReply>(&bytes).as_ref(), Ok(&message));
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode_sealed::<peer::OfferReply>(&damaged), Err(InvalidMessage), "bit {bit}");
        }
        (0..bytes.len()).for_each(|len| assert_eq!(decode_sealed::<peer::OfferReply>(&bytes[..len]), Err(InvalidMessage)));
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            rng_seed: RngSeed::Fixed(crate::test_seed::seed("PROPTEST_RNG_SEED", 1)),
            ..ProptestConfig::default()
        })]

        #[test]
        fn decoding_random_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode::<local::FromClient>(&bytes);
            let _ = decode::<local::FromServer>(&bytes);
            let _ = decode::<peer::Request>(&bytes);
            let _ = decode::<peer::OfferRequest>(&bytes);
            let _ = decode::<peer::Answered<peer::CoordinatorReply>>(&bytes);
        }

        #[test]
        fn decoding_a_damaged_message_never_panics(at in 0_usize..200, flip in 1_u8..) {
            let message = peer::OfferRequest::Batch { stage_in: 1, blocks: vec![peer::ShippedBlock { len: 4, checksum: 6, shuffle: 5, rival: peer::Rival::default() }; 3] };
            let mut bytes = encode(&message);
            let at = at % bytes.len();
            bytes[at] ^= flip;
            let _ = decode::<peer::OfferRequest>(&bytes);
        }
    }
}
