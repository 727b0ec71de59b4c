//! Messages between servers, by kind.
//!
//! A request travels as the message of a transport operation, which may carry bulk bytes. A [`Request`] goes in a pull,
//! whose answer may carry bytes back; an [`OfferRequest`] goes in an offer, which carries bytes to the peer. Each kind of
//! request has one enum for its requests and one for its replies:
//!
//! | kind | requests | what they are for |
//! |---|---|---|
//! | reads | [`ReadRequest`] | bytes of blocks, sorted runs and catalogs |
//! | offers | [`OfferRequest`] | blocks for their owner |
//! | coordination | [`CoordinatorRequest`] | what a node asks of the coordinator |
//! | stage-ins | [`NodeStageInRequest`] | what a node's part of a stage-in must do |
//! | administration | [`AdministrationRequest`] | the session itself: membership, status, policy, end |
//!
//! Every request is answered with [`Answered`]: a reply of its kind, or a typed [`Rejection`].

mod administration;
mod conflicts;
mod coordination;
mod offers;
mod reads;
mod rejection;
mod stage_in;
mod units;

use rkyv::{Archive, Deserialize, Serialize};

use super::{InvalidMessage, decode_sealed};

pub use administration::{AdministrationReply, AdministrationRequest, AgreedNetwork};
pub use conflicts::{Rival, Rivalry, Sighting, SuspectPath};
pub use coordination::{CoordinatorReply, CoordinatorRequest, ListedDataset};
pub use offers::{Damaged, OfferReply, OfferRequest, ShippedBlock};
pub use reads::{MissingChunk, ReadReply, ReadRequest, WhyMissing};
pub use rejection::{Answered, Rejection, RejectionKind};
pub use stage_in::{NodeStageInReply, NodeStageInRequest};
pub use units::{RangeReport, TarPosition, TarRange, TreeEntry, TreeKind, Unit, UnitReport, Work, ZipPart};

/// A request that goes in a pull.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum Request {
    /// Answered with bytes, which land in the asker's slots.
    Read(ReadRequest),
    /// For the coordinator of stage-ins.
    Coordinator(CoordinatorRequest),
    /// For the peer's part of a stage-in.
    NodeStageIn(NodeStageInRequest),
    /// For the peer as a member of the session.
    Administration(AdministrationRequest),
}

/// A kind of request that goes in a pull. It fixes the type of the replies, so that an asker decodes nothing else.
pub trait RequestKind: Into<Request> {
    /// The replies of this kind.
    type Reply;

    /// Decodes the answer to a request of this kind.
    ///
    /// # Errors
    /// The bytes are damaged, or are not an answer of this kind.
    fn decode_answer(message: &[u8]) -> Result<Answered<Self::Reply>, InvalidMessage>;
}

macro_rules! request_kinds {
    ($($variant:ident: $request:ident => $reply:ident;)+) => {$(
        impl From<$request> for Request {
            fn from(request: $request) -> Self {
                Self::$variant(request)
            }
        }

        impl RequestKind for $request {
            type Reply = $reply;

            fn decode_answer(message: &[u8]) -> Result<Answered<$reply>, InvalidMessage> {
                decode_sealed(message)
            }
        }
    )+};
}

request_kinds! {
    Read: ReadRequest => ReadReply;
    Coordinator: CoordinatorRequest => CoordinatorReply;
    NodeStageIn: NodeStageInRequest => NodeStageInReply;
    Administration: AdministrationRequest => AdministrationReply;
}
