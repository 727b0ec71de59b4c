//! Terms of coordinators. A node's term begins with the membership epoch in which it becomes the coordinator, and ends when the
//! roster names another one. A new coordinator first ends the stage-ins of its predecessors: it asks all live nodes how far these
//! got, and then commits or aborts each on all of them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::id::NodeId;
use dayfly_meta::roster::Roster;
use dayfly_meta::wire::peer::{AdministrationRequest, NodeStageInReply, NodeStageInRequest, RejectionKind};
use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use super::{Coordinator, CoordinatorContext, CoordinatorError};
use crate::membership::decision::{Decision, Inquiry, Next, Round};
use crate::peers::PeerError;

/// Stage-ins of one term are numbered up to this. The rest of a stage-in's number is the epoch in which the term began.
const NUMBERS_PER_TERM: u64 = 1 << 16;

/// The term of this node, if it is the coordinator.
pub(super) struct Term(Mutex<State>);

#[derive(Clone, Copy)]
enum State {
    /// Another node is the coordinator.
    Other,
    /// This node has become the coordinator, and is ending what its predecessors began.
    Beginning,
    /// This node coordinates stage-ins.
    Ready { epoch: u32, last_number: u64 },
}

impl Term {
    /// Node 0 is the coordinator when the session begins.
    pub(super) fn new(node: NodeId) -> Self {
        let first = node == NodeId(0);
        Self(Mutex::new(if first { State::Ready { epoch: 0, last_number: 0 } } else { State::Other }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether this node coordinates stage-ins.
    pub(super) fn is_ready(&self) -> bool {
        matches!(*self.state(), State::Ready { .. })
    }

    /// Returns whether another node is the coordinator.
    pub(super) fn is_other(&self) -> bool {
        matches!(*self.state(), State::Other)
    }

    /// Returns the number of the next stage-in; `None` if this node does not coordinate stage-ins, or has no number left.
    pub(super) fn next_number(&self) -> Option<u64> {
        let mut state = self.state();
        let State::Ready { epoch, last_number } = &mut *state else { return None };
        let number = (*last_number + 1 < NUMBERS_PER_TERM).then_some(u64::from(*epoch) * NUMBERS_PER_TERM + *last_number + 1);
        *last_number += u64::from(number.is_some());
        number.filter(|&number| u32::try_from(number).is_ok())
    }
}

/// How an attempt to decide a stage-in on all nodes ended.
pub(super) enum Outcome {
    /// All live nodes have carried out the decision.
    Done,
    /// Another node is the coordinator now, and decides.
    StoodDown,
    /// A node cannot do it, or neither answers nor is lost.
    Failed(PeerError),
}

impl Coordinator {
    /// Begins and ends this node's terms, as the roster says. Runs as long as the node.
    pub(crate) async fn follow_roster(self: Arc<Self>) {
        let mut changes = self.context.peers.roster_changes();
        while changes.changed().await.is_ok() {
            let roster = changes.borrow_and_update().clone();
            let (state, leads) = (*self.term.state(), leads(&self.context, &roster));
            match state {
                State::Other if leads => {
                    tracing::warn!(node = %self.context.node, epoch = roster.epoch(), "this node coordinates stage-ins from now on");
                    *self.term.state() = State::Beginning;
                    if self.end_earlier_stage_ins().await {
                        *self.term.state() = State::Ready { epoch: roster.epoch(), last_number: 0 };
                    } else {
                        *self.term.state() = State::Other;
                        // The change that ended the term must be looked at, too.
                        changes.mark_changed();
                    }
                }
                State::Ready { .. } if !leads && roster.count() > 0 => {
                    *self.term.state() = State::Other;
                    self.registry.fail_all(|| CoordinatorError::StoodDown);
                }
                _ => {}
            }
        }
    }

    /// Decides the stage-ins that earlier coordinators left behind. Returns `false` if another node has become the coordinator.
    async fn end_earlier_stage_ins(&self) -> bool {
        let (context, mut inquiry) = (&self.context, Inquiry::default());
        loop {
            match inquiry.next(context.node, &context.peers.roster()) {
                Next::Done => break,
                Next::StandDown => return false,
                Next::Ask { epoch, nodes } => {
                    let replies = ask(context, &nodes, NodeStageInRequest::Inquire { epoch }).await;
                    for (node, reply) in replies {
                        if let Ok(NodeStageInReply::Inquired { open, visible }) = reply {
                            inquiry.answered(node, open, visible.into_iter().map(|dataset| u64::from(dataset.0)));
                        }
                    }
                    sleep(context.deadlines().progress_interval).await;
                }
            }
        }
        for (number, decision) in inquiry.decisions() {
            tracing::info!(number, ?decision, "ending a stage-in of an earlier coordinator");
            loop {
                match carry_out(context, number, decision).await {
                    Outcome::Done => break,
                    Outcome::StoodDown => return false,
                    Outcome::Failed(error) => tracing::warn!(number, %error, "cannot end a stage-in on all nodes; trying again"),
                }
            }
            if decision == Decision::Commit {
                self.registry.set_published(number);
                settle(context, number).await;
            }
        }
        true
    }
}

fn leads(context: &CoordinatorContext, roster: &Roster) -> bool {
    roster.coordinator() == context.node && roster.is_live(context.node)
}

/// Makes all live nodes commit or abort a stage-in. Asks each again until it answers or is lost.
pub(super) async fn carry_out(context: &CoordinatorContext, number: u64, decision: Decision) -> Outcome {
    // The supervisor takes at most this long to decide about a node that does not answer, unless there is no supervisor.
    let deadline = Instant::now() + 2 * context.deadlines().lost_after;
    let (mut round, mut strangers, mut failures) = (Round::default(), Vec::new(), HashMap::new());
    loop {
        let (epoch, nodes) = match round.next(context.node, &context.peers.roster()) {
            Next::Done => break,
            Next::StandDown => return Outcome::StoodDown,
            Next::Ask { epoch, nodes } => (epoch, nodes),
        };
        let request = match decision {
            Decision::Commit => NodeStageInRequest::Commit { stage_in: number, epoch },
            Decision::Abort => NodeStageInRequest::Abort { stage_in: number, epoch },
        };
        failures.clear();
        for (node, reply) in ask(context, &nodes, request).await {
            match reply {
                Ok(_) => round.answered(node),
                // The node has returned since the stage-in began, or has settled it already.
                Err(PeerError::Rejected { rejection, .. }) if rejection.kind == RejectionKind::NoSuchStageIn => {
                    round.answered(node);
                    strangers.push(node);
                }
                Err(error) if error.is_absence() || is_old(&error) => drop(failures.insert(node, error)),
                Err(error) => return Outcome::Failed(error),
            }
        }
        if failures.is_empty() {
            continue;
        }
        if Instant::now() > deadline
            && let Some((_, error)) = failures.drain().next()
        {
            return Outcome::Failed(error);
        }
        sleep(context.deadlines().progress_interval).await;
    }
    if decision == Decision::Commit {
        let timeout = context.deadlines().prepare;
        let asking = strangers.into_iter().filter(|&node| node != context.node);
        let asking = asking.map(|node| context.peers.ask(node, AdministrationRequest::CatchUp, timeout));
        for failed in join_all(asking).await.into_iter().filter_map(Result::err) {
            tracing::warn!(number, error = %failed, "a node that has returned does not show the dataset yet");
        }
    }
    Outcome::Done
}

/// Returns whether a node has rejected a request because it knows a newer epoch. This node is about to hear of that epoch.
fn is_old(error: &PeerError) -> bool {
    matches!(error, PeerError::Rejected { rejection, .. } if rejection.kind == RejectionKind::OldEpoch)
}

/// Frees what a dataset replaced. A node that misses this learns it from the answer to its next report.
pub(super) async fn settle(context: &CoordinatorContext, number: u64) -> Vec<PeerError> {
    let roster = context.peers.roster();
    let nodes: Vec<NodeId> = roster.live().collect();
    let request = NodeStageInRequest::Settle { stage_in: number, epoch: roster.epoch() };
    ask(context, &nodes, request).await.into_iter().filter_map(|(_, reply)| reply.err()).collect()
}

/// Asks several nodes at once.
async fn ask(
    context: &CoordinatorContext,
    nodes: &[NodeId],
    request: NodeStageInRequest,
) -> Vec<(NodeId, Result<NodeStageInReply, PeerError>)> {
    let timeout = context.deadlines().request;
    let asking = nodes.iter().map(|&node| {
        let request = request.clone();
        async move { (node, context.peers.ask(node, request, timeout).await) }
    });
    join_all(asking).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unique_to_a_term() {
        let term = Term::new(NodeId(0));
        assert_eq!((term.next_number(), term.next_number()), (Some(1), Some(2)));
        *term.state() = State::Ready { epoch: 3, last_number: 0 };
        assert_eq!(term.next_number(), Some(3 << 16 | 1));
        *term.state() = State::Ready { epoch: 3, last_number: NUMBERS_PER_TERM - 2 };
        assert_eq!((term.next_number(), term.next_number()), (Some((4 << 16) - 1), None));
        *term.state() = State::Ready { epoch: 1 << 16, last_number: 0 };
        assert_eq!(term.next_number(), None, "a dataset's number has 32 bits");
        assert!(!Term::new(NodeId(1)).is_ready());
    }
}
