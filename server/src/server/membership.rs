//! How a session's nodes come together and part: what one is told, it tells those below it in a tree, so that nobody tells them all.

use std::net::SocketAddr;
use std::sync::Arc;

use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{FALLEN_BACK_SHOWN_MAX, START_TIMEOUT, TREE_WIDTH};
use dayfly_meta::wire::peer::{Reply, Request};
use dayfly_transport::Agreement;
use futures_util::future::{join_all, try_join_all};

use super::Server;
use crate::peers::PeerError;

impl Server {
    /// Takes the roster, meets the peers in it, and has those below do the same. Returns the pairs that are not reached as was tried.
    pub async fn join(self: &Arc<Self>, addresses: &[SocketAddr], agreement: Agreement) -> Result<Vec<String>, String> {
        self.peers.set(addresses);
        self.transport.agree(agreement.clone());
        let request =
            Request::Join { addresses: addresses.iter().map(SocketAddr::to_string).collect(), network: network(agreement) };
        let meeting = async { self.peers.meet().await.map_err(|error| format!("node {}: {error}", self.config.node)) };
        let (below, ()) = tokio::try_join!(self.tell_below(&request), meeting)?;
        let words = |(peer, why)| format!("node {} does not reach node {peer}: {why}", self.config.node);
        let mut fallen_back: Vec<String> = self.transport.fallen_back().into_iter().map(words).collect();
        for reply in below {
            if let Reply::Joined { fallen_back: theirs } = reply {
                fallen_back.extend(theirs);
            }
        }
        fallen_back.truncate(FALLEN_BACK_SHOWN_MAX);
        Ok(fallen_back)
    }

    /// Takes note of what all nodes have agreed on, and has those below do the same.
    pub async fn agree(self: &Arc<Self>, agreement: Agreement) -> Result<(), String> {
        self.transport.agree(agreement.clone());
        self.tell_below(&Request::Agree(network(agreement))).await.map(drop)
    }

    async fn tell_below(self: &Arc<Self>, request: &Request) -> Result<Vec<Reply>, String> {
        let telling = below(self.config.node.index(), self.peers.count()).map(|node| async move {
            let told = self.peers.ask(NodeId(node as u16), request, START_TIMEOUT).await;
            told.map_err(|error| match error {
                // It names the node that failed, which may be further below.
                PeerError::Failed { reason, .. } => reason,
                error => error.to_string(),
            })
        });
        try_join_all(telling).await
    }

    /// Ends the session on all other nodes, as far as they can be told.
    pub async fn end_others(self: &Arc<Self>) {
        drop(self.end_all_but(&[]).await);
    }

    /// Ends the session on all other nodes but these, and gives up what is here. Returns how many they are, the bytes freed, and who could not be told.
    pub(crate) async fn end_all_but(self: &Arc<Self>, but: &[u16]) -> (u16, u64, Vec<String>) {
        let others = self.peers.nodes().filter(|node| *node != self.config.node && !but.contains(&node.0));
        let ending = join_all(others.map(|node| self.peers.ask(node, &ASK_TO_END, self.deadlines().request)));
        let (mut nodes, mut freed_bytes, mut untold) = (0, 0, Vec::new());
        for ended in ending.await {
            match ended {
                Ok(Reply::Ended { freed_bytes: bytes }) => {
                    nodes += 1;
                    freed_bytes += bytes;
                }
                Ok(_) => {}
                Err(error) => untold.push(error.to_string()),
            }
        }
        match self.on_drives(Self::give_up).await {
            Ok(bytes) => {
                nodes += 1;
                freed_bytes += bytes;
            }
            Err(error) => untold.push(format!("node {}: {error}", self.config.node)),
        }
        (nodes, freed_bytes, untold)
    }
}

static ASK_TO_END: Request = Request::End;

/// The nodes below one in the tree.
fn below(node: usize, count: usize) -> impl Iterator<Item = usize> {
    (node * TREE_WIDTH + 1..=node * TREE_WIDTH + TREE_WIDTH).take_while(move |&below| below < count)
}

/// As it travels.
fn network(agreement: Agreement) -> Result<Option<String>, String> {
    match agreement {
        Agreement::Rdma { note } => Ok(note),
        Agreement::Tcp { why } => Err(why),
    }
}

/// As it is meant.
pub(super) fn agreement(network: Result<Option<String>, String>) -> Agreement {
    match network {
        Ok(note) => Agreement::Rdma { note },
        Err(why) => Agreement::Tcp { why },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_reaches_every_node_once() {
        for count in [1, 2, 16, 17, 18, 300, 4096] {
            let mut reached: Vec<usize> = (0..count).flat_map(|node| below(node, count)).collect();
            reached.sort_unstable();
            assert_eq!(reached, (1..count).collect::<Vec<_>>());
        }
    }
}
