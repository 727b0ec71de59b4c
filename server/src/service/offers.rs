//! Offers: blocks that stage-ins ship to this node because it owns them.

use std::sync::Arc;

use dayfly_meta::checksum::Mismatch;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::peer::{Answered, Damaged, OfferReply, OfferRequest};
use dayfly_meta::wire::status::Hop;
use dayfly_transport::Incoming;

use crate::stage_in::NodeStageIns;
use crate::stats::Damage;

/// Answers the offers of peers.
pub(crate) struct Offers {
    pub(crate) stage_ins: Arc<NodeStageIns>,
    pub(crate) damage: Arc<Damage>,
}

impl Offers {
    pub(super) async fn answer(&self, from: NodeId, request: OfferRequest, incoming: Incoming) -> Answered<OfferReply> {
        let reply = match request {
            OfferRequest::Batch { stage_in, blocks } => self.stage_ins.get(stage_in)?.land_batch(blocks, incoming).await?,
            OfferRequest::Piece { stage_in, arrival, offset, checksum } => {
                self.stage_ins.get(stage_in)?.land_piece((arrival, offset), checksum, incoming).await?
            }
        };
        if let OfferReply::Damaged(Damaged { at, expected, found }) = reply {
            self.damage.record(Hop::Shipped, from, format!("block {at} of a batch"), Mismatch { expected, found });
        }
        Ok(reply)
    }
}
