//! Runs on the node that a user asks for a stage-in: requests the stage-in from the coordinator, and relays the stage-in's
//! events.

use std::sync::Arc;

use dayfly_meta::wire::control::{Event, StageInRequest};
use dayfly_meta::wire::peer::{CoordinatorReply, CoordinatorRequest};
use dayfly_transport::TransportError;
use tokio::sync::mpsc;

use super::COORDINATOR;
use crate::peers::{PeerError, Peers};

/// Asks the coordinator to run a stage-in, and sends the stage-in's events to `events`. The last event says how the stage-in
/// ended. If the receiver goes away, the stage-in is canceled.
pub(crate) async fn stage_in(peers: Arc<Peers>, request: StageInRequest, events: mpsc::Sender<Event>) {
    let timeout = peers.deadlines().request;
    let subscription = match peers.ask(COORDINATOR, CoordinatorRequest::Start(request), timeout).await {
        Ok(CoordinatorReply::Started { subscription }) => subscription,
        other => {
            // Here and below, sending may fail because the client that asked is gone.
            let _ = events.send(failure(other)).await;
            return;
        }
    };
    let last = tokio::select! {
        biased;
        last = relay(&peers, subscription, &events) => last,
        () = events.closed() => None,
    };
    if let Some(last) = last {
        let _ = events.send(last).await;
    }
    // If this message is lost, the coordinator notices that nobody asks anymore.
    let _ = peers.ask(COORDINATOR, CoordinatorRequest::Unsubscribe { subscription }, timeout).await;
}

/// Relays progress. Returns the last event, or `None` if the client is gone.
async fn relay(peers: &Peers, subscription: u64, events: &mpsc::Sender<Event>) -> Option<Event> {
    let timeout = peers.deadlines().request;
    let mut received = 0;
    loop {
        let request = CoordinatorRequest::NextEvent { subscription, received };
        let mut answer = peers.ask(COORDINATOR, request.clone(), timeout).await;
        if matches!(answer, Err(PeerError::Transport(_))) {
            answer = peers.ask(COORDINATOR, request, timeout).await;
        }
        match answer {
            Ok(CoordinatorReply::Event(None)) => {}
            Ok(CoordinatorReply::Event(Some(event))) if matches!(*event, Event::Planned(_) | Event::Progress(_)) => {
                received += 1;
                events.send(*event).await.ok()?;
            }
            Ok(CoordinatorReply::Event(Some(event))) => return Some(*event),
            other => return Some(failure(other)),
        }
    }
}

/// Returns the event for the user when the coordinator rejects a request, or cannot be reached.
fn failure(answer: Result<CoordinatorReply, PeerError>) -> Event {
    let reason = match answer {
        // The reason is enough: it does not help the user to know which node is the coordinator.
        Err(PeerError::Rejected { rejection, .. }) => rejection.reason,
        Err(error @ PeerError::Transport(TransportError::TooLong(_))) => {
            format!("{error}: too many sources for one message; list them in a file, and pass @FILE")
        }
        Err(error) => format!("{error}; 'dayfly ls' shows whether the dataset exists nevertheless"),
        Ok(_) => PeerError::InvalidAnswer(COORDINATOR).to_string(),
    };
    Event::Failed { reason }
}
