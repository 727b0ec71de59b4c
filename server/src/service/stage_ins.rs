//! Stage-ins: requests from the coordinator and from workers to this node's parts of stage-ins.

use std::sync::Arc;

use dayfly_meta::wire::peer::{Answered, NodeStageInReply, NodeStageInRequest};

use crate::stage_in::{NodeStageIns, PreparedCatalog, StageInOrder};

/// Answers requests to this node's parts of stage-ins.
pub(crate) struct StageIns {
    pub(crate) stage_ins: Arc<NodeStageIns>,
}

impl StageIns {
    pub(super) async fn answer(&self, request: NodeStageInRequest) -> Answered<NodeStageInReply> {
        let Self { stage_ins } = self;
        match request {
            NodeStageInRequest::MakeHeadroom => stage_ins.make_headroom().await?,
            NodeStageInRequest::Begin {
                stage_in: number,
                request,
                selection,
                seed,
                max_rate,
                capacities,
                stored_share,
                expected_files,
            } => {
                let order = StageInOrder { number, request, selection, seed, max_rate, capacities, stored_share, expected_files };
                stage_ins.begin(order).await?;
            }
            NodeStageInRequest::Reserve { stage_in, block_len, rival } => {
                let arrival = stage_ins.get(stage_in)?.reserve(block_len, rival).await?;
                return Ok(NodeStageInReply::Reserved { arrival });
            }
            NodeStageInRequest::Finish { stage_in } => {
                let (run_lens, counted) = stage_ins.get(stage_in)?.finish().await?;
                return Ok(NodeStageInReply::Finished { run_lens, counted });
            }
            NodeStageInRequest::Prepare { stage_in, dataset, target, from, len, checksum, replaces, counts } => {
                let announced = PreparedCatalog { dataset, target, from, len, checksum, replaces, counts };
                stage_ins.get(stage_in)?.prepare(announced).await?;
            }
            NodeStageInRequest::Copy { stage_in, is_required } => return Ok(stage_ins.get(stage_in)?.copy(is_required)?),
            NodeStageInRequest::Commit { stage_in, epoch } => {
                stage_ins.admit(epoch)?;
                stage_ins.get(stage_in)?.commit()?;
            }
            NodeStageInRequest::Settle { stage_in, epoch } => {
                stage_ins.admit(epoch)?;
                stage_ins.settle(stage_in).await?;
            }
            NodeStageInRequest::Abort { stage_in, epoch } => {
                stage_ins.admit(epoch)?;
                stage_ins.abort(stage_in).await?;
            }
            NodeStageInRequest::Inquire { epoch } => {
                stage_ins.admit(epoch)?;
                let (open, visible) = stage_ins.inquired();
                return Ok(NodeStageInReply::Inquired { open, visible });
            }
        }
        Ok(NodeStageInReply::Done)
    }
}
