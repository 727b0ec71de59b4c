//! Terms of coordinators. A node's term begins with the membership epoch in which it becomes the coordinator, and ends when the
//! roster names another one. A new coordinator first ends the stage-ins of its predecessors: it asks all live nodes how far these
//! got, and then commits or aborts each on all of them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::id::NodeId;
use dayfly_meta::roster::Roster;
use dayfly_meta::wire::peer::{AdministrationRequest, ListedDataset, NodeStageInReply, NodeStageInRequest, RejectionKind};
use futures_util::future::join_all;
use tokio::task::JoinSet;
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
    /// All live nodes have carried out the decision, except these, which have returned since the stage-in began and do not know it.
    Done { strangers: Vec<NodeId> },
    /// Another node is the coordinator now, and decides.
    StoodDown,
    /// A node cannot do it, or neither answers nor is lost.
    Failed(PeerError),
}

impl Coordinator {
    /// Begins and ends this node's terms, as the roster says. Runs as long as the node.
    pub(crate) async fn follow_roster(self: Arc<Self>) {
        let mut changes = self.context.peers.roster_changes();
        let mut catching_up = JoinSet::new();
        loop {
            let roster = changes.next().await;
            let (state, leads) = (*self.term.state(), leads(&self.context, &roster));
            match state {
                State::Other if leads => {
                    tracing::warn!(node = %self.context.node, epoch = roster.epoch(), "this node coordinates stage-ins from now on");
                    *self.term.state() = State::Beginning;
                    if self.end_earlier_stage_ins().await.is_some() {
                        *self.term.state() = State::Ready { epoch: roster.epoch(), last_number: 0 };
                        // The predecessor may have been lost before it could ask a node that had returned to catch up. Only now does
                        // this node tell others its datasets.
                        let (coordinator, live) = (self.clone(), roster.live().collect::<Vec<_>>());
                        catching_up.spawn(async move { catch_up(&coordinator.context, live).await });
                    } else {
                        *self.term.state() = State::Other;
                        // The change that ended the term must be looked at, too.
                        changes.look_again();
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

    /// Decides the stage-ins that earlier coordinators left behind, and takes the datasets that this node lacks. Returns `None` if
    /// another node has become the coordinator.
    async fn end_earlier_stage_ins(&self) -> Option<()> {
        let context = &self.context;
        let (inquiry, _) = self.inquire().await?;
        for (number, decision) in inquiry.decisions() {
            tracing::info!(number, ?decision, "ending a stage-in of an earlier coordinator");
            loop {
                match carry_out(context, number, decision, &[]).await {
                    Outcome::Done { .. } => break,
                    Outcome::StoodDown => return None,
                    Outcome::Failed(error) => tracing::warn!(number, %error, "cannot end a stage-in on all nodes; trying again"),
                }
            }
            if decision == Decision::Commit {
                self.registry.set_published(number);
                settle(context, number).await;
            }
        }
        let deadline = Instant::now() + 2 * context.deadlines().lost_after;
        loop {
            // Those that had a dataset may have been lost meanwhile, and the dataset with them.
            let (_, shown) = self.inquire().await?;
            let Err(error) = context.catch_up.take(shown).await else { return Some(()) };
            tracing::warn!(%error, "this node coordinates stage-ins, and cannot take all datasets that other nodes show");
            if Instant::now() > deadline {
                return Some(());
            }
            sleep(context.deadlines().progress_interval).await;
        }
    }

    /// Asks all live nodes which stage-ins have not ended there, and which datasets are visible there. Returns `None` if another node
    /// has become the coordinator.
    async fn inquire(&self) -> Option<(Inquiry, Vec<ListedDataset>)> {
        let (context, mut inquiry, mut shown) = (&self.context, Inquiry::default(), BTreeMap::new());
        loop {
            let roster = context.peers.roster();
            let (epoch, nodes) = match inquiry.next(context.node, &roster) {
                Next::Done => return Some((inquiry, shown.into_values().collect())),
                Next::StandDown => return None,
                Next::Ask { epoch, nodes } => (epoch, nodes),
            };
            let replies = ask(context, &nodes, NodeStageInRequest::Inquire { epoch }).await;
            let mut are_all_here = true;
            for (node, reply) in replies {
                let Ok(NodeStageInReply::Inquired { open, visible }) = reply else {
                    are_all_here = false;
                    continue;
                };
                inquiry.answered((node, &roster), open, visible.iter().map(|listed| u64::from(listed.dataset.0)));
                shown.extend(visible.into_iter().map(|listed| (listed.dataset, listed)));
            }
            if !are_all_here {
                sleep(context.deadlines().progress_interval).await;
            }
        }
    }
}

fn leads(context: &CoordinatorContext, roster: &Roster) -> bool {
    roster.coordinator() == context.node && roster.is_live(context.node)
}

/// Makes all live nodes commit or abort a stage-in. Asks each again until it answers or is lost. Fails if one of `members` no longer
/// knows the stage-in: it has given up its part, although it is the incarnation that took part.
pub(super) async fn carry_out(
    context: &CoordinatorContext,
    number: u64,
    decision: Decision,
    members: &[(NodeId, u32)],
) -> Outcome {
    // The supervisor takes at most this long to decide about a node that does not answer, unless there is no supervisor.
    let deadline = Instant::now() + 2 * context.deadlines().lost_after;
    let (mut round, mut strangers, mut failures) = (Round::default(), Vec::new(), BTreeMap::new());
    loop {
        let roster = context.peers.roster();
        let (epoch, nodes) = match round.next(context.node, &roster) {
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
                Ok(_) => round.answered(node, &roster),
                // The node has returned since the stage-in began, or has settled it already.
                Err(PeerError::Rejected { rejection, .. })
                    if rejection.kind == RejectionKind::NoSuchStageIn && !is_of(members, node, &roster) =>
                {
                    round.answered(node, &roster);
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
            && let Some((_, error)) = failures.pop_first()
        {
            return Outcome::Failed(error);
        }
        sleep(context.deadlines().progress_interval).await;
    }
    Outcome::Done { strangers }
}

fn is_of(members: &[(NodeId, u32)], node: NodeId, roster: &Roster) -> bool {
    roster.member(node).is_some_and(|member| members.contains(&(node, member.incarnation)))
}

/// Makes nodes that have returned show the datasets that appeared meanwhile. Asks each again until it has done so or is lost.
pub(super) async fn catch_up(context: &CoordinatorContext, nodes: impl IntoIterator<Item = NodeId>) {
    let asking = nodes.into_iter().filter(|&node| node != context.node).map(|node| async move {
        let deadline = Instant::now() + 2 * context.deadlines().lost_after;
        loop {
            let asked = context.peers.ask(node, AdministrationRequest::CatchUp, context.deadlines().prepare).await;
            let roster = context.peers.roster();
            let Err(error) = asked else { return };
            if !roster.is_live(node) || !leads(context, &roster) {
                return;
            }
            if Instant::now() > deadline {
                return tracing::warn!(%node, %error, "a node that has returned does not show all datasets");
            }
            sleep(context.deadlines().progress_interval).await;
        }
    });
    join_all(asking).await;
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
