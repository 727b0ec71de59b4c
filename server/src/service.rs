//! Handles the requests of a node's peers, and the node's own.
//!
//! A request is decoded once and passed to the handler for its kind: [`reads`], [`offers`], [`coordination`], [`stage_ins`] or
//! [`administration`]. Each handler holds only the parts of the node that it needs. It has its own messages
//! ([`dayfly_meta::wire::peer`]) and its own errors, which become typed [`Rejection`](dayfly_meta::wire::peer::Rejection)s.
//! Nothing is decided in this module: handlers translate messages into calls.

mod administration;
mod coordination;
mod offers;
mod reads;
mod stage_ins;

use async_trait::async_trait;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::peer::{OfferRequest, Request};
use dayfly_meta::wire::{decode_sealed, encode_sealed};
use dayfly_transport::{Answer, Incoming, Refusal, Service};

pub(crate) use administration::Administration;
pub(crate) use coordination::Coordination;
pub(crate) use offers::Offers;
pub(crate) use reads::Reads;
pub(crate) use stage_ins::StageIns;

/// The handlers of one node, by kind of request.
pub(crate) struct NodeService {
    pub(crate) reads: Reads,
    pub(crate) offers: Offers,
    pub(crate) coordination: Coordination,
    pub(crate) stage_ins: StageIns,
    pub(crate) administration: Administration,
}

#[async_trait]
impl Service for NodeService {
    async fn pulled(&self, from: NodeId, message: Vec<u8>, room: Vec<u64>) -> Result<Answer, Refusal> {
        match decode_sealed::<Request>(&message).map_err(Refusal::new)? {
            Request::Read(request) => {
                let (answered, pieces) = match self.reads.answer(request, &room).await {
                    Ok((reply, pieces)) => (Ok(reply), pieces),
                    Err(rejection) => (Err(rejection), Vec::new()),
                };
                Ok(Answer { message: encode_sealed(&answered), pieces })
            }
            Request::Coordinator(request) => Ok(without_pieces(encode_sealed(&self.coordination.answer(from, request).await))),
            Request::NodeStageIn(request) => Ok(without_pieces(encode_sealed(&self.stage_ins.answer(request).await))),
            Request::Administration(request) => Ok(without_pieces(encode_sealed(&self.administration.answer(request).await))),
        }
    }

    async fn offered(&self, from: NodeId, message: Vec<u8>, incoming: Incoming) -> Result<Vec<u8>, Refusal> {
        let request = decode_sealed::<OfferRequest>(&message).map_err(Refusal::new)?;
        Ok(encode_sealed(&self.offers.answer(from, request, incoming).await))
    }
}

fn without_pieces(message: Vec<u8>) -> Answer {
    Answer { message, pieces: Vec::new() }
}
