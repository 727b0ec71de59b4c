//! Runs on the node that a user asks for a stage-in: requests the stage-in from the coordinator, and relays the stage-in's
//! events. If a node is lost meanwhile, even the coordinator, the stage-in is requested again.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use dayfly_meta::id::NodeId;
use dayfly_meta::limits::STAGE_IN_RESTARTS_MAX;
use dayfly_meta::wire::control::{Event, Phase, Progress, StageInRequest};
use dayfly_meta::wire::peer::{AdministrationRequest, CoordinatorReply, CoordinatorRequest, RejectionKind};
use dayfly_transport::TransportError;
use futures_util::future::join_all;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use crate::peers::{PeerError, Peers};

/// Asks the coordinator to run a stage-in, and sends the stage-in's events to `events`. The last event says how the stage-in
/// ended. If the receiver goes away, the stage-in is canceled.
pub(crate) async fn stage_in(peers: Arc<Peers>, request: StageInRequest, events: mpsc::Sender<Event>) {
    let id = request_id(peers.own_node());
    for restarts in 0.. {
        let last = match run_once(&peers, id, &request, &events).await {
            Some(last) => last,
            None => return,
        };
        let Event::Failed { reason, can_restart: true } = &last else {
            if restarts > 0 && matches!(last, Event::StagedIn(_)) {
                show_here(&peers, &events).await;
            }
            // Here and below, sending may fail because the client that asked is gone.
            let _ = events.send(last).await;
            return;
        };
        let is_over = restarts >= STAGE_IN_RESTARTS_MAX;
        if is_over || !all_present(&peers, &events).await {
            let reason = format!("{reason}; 'dayfly ls' shows whether the dataset exists nevertheless");
            let _ = events.send(Event::Failed { reason, can_restart: false }).await;
            return;
        }
        tracing::warn!(reason, "a stage-in begins again");
        if events.send(Event::Restarted { reason: reason.clone() }).await.is_err() {
            return;
        }
    }
}

/// Returns a number that no other request has.
fn request_id(node: NodeId) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    xxhash_rust::xxh3::xxh3_64_with_seed(&now.to_le_bytes(), u64::from(node.0))
}

/// Waits until every member answers, except those that the supervisor has declared lost. Returns `false` if that takes too long,
/// or if the client is gone.
async fn all_present(peers: &Peers, events: &mpsc::Sender<Event>) -> bool {
    let (start, deadlines) = (Instant::now(), *peers.deadlines());
    let limit = deadlines.lost_after + deadlines.node_silent;
    while start.elapsed() < limit && !events.is_closed() {
        let asking = peers.roster().live().collect::<Vec<_>>().into_iter();
        let asking = asking.map(|node| peers.ask(node, AdministrationRequest::Status, deadlines.request));
        if join_all(asking).await.iter().all(Result::is_ok) {
            return true;
        }
        show_waiting(events);
        sleep(deadlines.progress_interval).await;
    }
    false
}

/// Makes this node show a dataset that a new coordinator has published, because that may not have told this node of it yet.
async fn show_here(peers: &Peers, events: &mpsc::Sender<Event>) {
    let (start, deadlines) = (Instant::now(), *peers.deadlines());
    while let Err(error) = peers.ask(peers.own_node(), AdministrationRequest::CatchUp, deadlines.prepare).await {
        if start.elapsed() > deadlines.lost_after || events.is_closed() {
            tracing::warn!(%error, "this node does not show a new dataset yet");
            return;
        }
        show_waiting(events);
        sleep(deadlines.progress_interval).await;
    }
}

/// Shows the client that its stage-in waits. A client that hears nothing gives up.
fn show_waiting(events: &mpsc::Sender<Event>) {
    let _ = events.try_send(Event::Progress(Progress { phase: Phase::Waiting, ..Progress::default() }));
}

/// Runs a stage-in once. Returns the last event, or `None` if the client is gone.
async fn run_once(peers: &Peers, id: u64, request: &StageInRequest, events: &mpsc::Sender<Event>) -> Option<Event> {
    let (coordinator, subscription) = match start(peers, id, request, events).await {
        (coordinator, Ok(CoordinatorReply::Started { subscription })) => (coordinator, subscription),
        (coordinator, other) => return Some(failure(peers.own_node(), coordinator, other)),
    };
    let last = tokio::select! {
        biased;
        last = relay(peers, coordinator, subscription, events) => last,
        () = events.closed() => None,
    };
    let unsubscribe = CoordinatorRequest::Unsubscribe { subscription };
    if last.is_none() {
        // If this fails, the coordinator notices after a while that nobody asks anymore.
        let _ = peers.ask_until_lost(coordinator, unsubscribe).await;
    } else if peers.roster().is_live(coordinator) {
        let _ = peers.ask(coordinator, unsubscribe, peers.deadlines().request).await;
    }
    last
}

/// Asks the coordinator to begin. A new coordinator is not ready at once, and one that does not answer may only be starved.
async fn start(
    peers: &Peers,
    id: u64,
    request: &StageInRequest,
    events: &mpsc::Sender<Event>,
) -> (NodeId, Result<CoordinatorReply, PeerError>) {
    let (start, deadlines) = (Instant::now(), *peers.deadlines());
    loop {
        let coordinator = peers.roster().coordinator();
        let asked = CoordinatorRequest::Start { id, request: request.clone() };
        let answer = ask_patiently(peers, coordinator, asked, events).await;
        let is_unready =
            matches!(&answer, Err(PeerError::Rejected { rejection, .. }) if rejection.kind == RejectionKind::NotCoordinator);
        if !is_unready || start.elapsed() > deadlines.lost_after {
            return (coordinator, answer);
        }
        show_waiting(events);
        sleep(deadlines.progress_interval).await;
    }
}

/// Asks the coordinator until it is lost. Shows the client when that takes long.
async fn ask_patiently(
    peers: &Peers,
    coordinator: NodeId,
    request: CoordinatorRequest,
    events: &mpsc::Sender<Event>,
) -> Result<CoordinatorReply, PeerError> {
    let asking = peers.ask_until_lost(coordinator, request);
    tokio::pin!(asking);
    loop {
        match timeout(peers.deadlines().request, &mut asking).await {
            Ok(answer) => return answer,
            Err(_) => show_waiting(events),
        }
    }
}

/// Relays progress. Returns the last event, or `None` if the client is gone.
async fn relay(peers: &Peers, coordinator: NodeId, subscription: u64, events: &mpsc::Sender<Event>) -> Option<Event> {
    let mut received = 0;
    loop {
        let request = CoordinatorRequest::NextEvent { subscription, received };
        match ask_patiently(peers, coordinator, request, events).await {
            Ok(CoordinatorReply::Event(None)) => {}
            Ok(CoordinatorReply::Event(Some(event))) if !event.is_last() => {
                received += 1;
                events.send(*event).await.ok()?;
            }
            Ok(CoordinatorReply::Event(Some(event))) => return Some(*event),
            other => return Some(failure(peers.own_node(), coordinator, other)),
        }
    }
}

/// Returns the event for the user when the coordinator rejects a request of the `asked` node, or cannot be reached.
fn failure(asked: NodeId, coordinator: NodeId, answer: Result<CoordinatorReply, PeerError>) -> Event {
    let can_restart = answer.as_ref().is_err_and(PeerError::is_absence);
    let reason = match answer {
        // The reason is enough: it does not help the user to know which node is the coordinator.
        Err(PeerError::Rejected { rejection, .. }) => rejection.reason,
        Err(error @ PeerError::Transport(TransportError::TooLong(_))) => {
            format!("{error}: too many sources for one message; list them in a file, and pass @FILE")
        }
        Err(error) if can_restart => format!("{error}; it coordinates the stage-in that node {asked} was asked for"),
        Err(error) => error.to_string(),
        Ok(_) => PeerError::InvalidAnswer(coordinator).to_string(),
    };
    Event::Failed { reason, can_restart }
}
