//! Coordination: what nodes ask of the coordinator.

use std::sync::Arc;

use dayfly_meta::id::NodeId;
use dayfly_meta::wire::peer::{Answered, CoordinatorReply, CoordinatorRequest};
use dayfly_stagein::unit_ledger::WorkerId;

use crate::coordinator::{Coordinator, NodeReport};

/// Answers requests to the coordinator.
pub(crate) struct Coordination {
    pub(crate) coordinator: Arc<Coordinator>,
}

impl Coordination {
    pub(super) async fn answer(&self, from: NodeId, request: CoordinatorRequest) -> Answered<CoordinatorReply> {
        let Self { coordinator } = self;
        Ok(match request {
            CoordinatorRequest::Start { id, request } => {
                let subscription = coordinator.start(from, id, request)?;
                CoordinatorReply::Started { subscription }
            }
            CoordinatorRequest::NextEvent { subscription, received } => {
                let event = coordinator.subscriptions().next(subscription, received).await?;
                CoordinatorReply::Event(event.map(Box::new))
            }
            CoordinatorRequest::Unsubscribe { subscription } => {
                coordinator.subscriptions().close(subscription);
                CoordinatorReply::Done
            }
            CoordinatorRequest::Datasets { epoch } => {
                CoordinatorReply::Datasets { datasets: coordinator.list_datasets(epoch)?, policy: coordinator.policy() }
            }
            CoordinatorRequest::NextUnits { stage_in, worker, request, finished } => {
                let worker = WorkerId { node: from, number: worker };
                coordinator.next_units(stage_in, (worker, request), finished).await
            }
            CoordinatorRequest::Report { stage_in, report: number, progress, waits, suspects, sightings } => {
                coordinator.report(stage_in, from, NodeReport { number, progress, waits, suspects, sightings })?
            }
            CoordinatorRequest::Fail { stage_in, rejection } => {
                coordinator.fail(stage_in, from, rejection);
                CoordinatorReply::Done
            }
        })
    }
}
