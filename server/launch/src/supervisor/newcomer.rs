//! Servers that dial the supervisor of a session that has begun: those that have lost their control channel, and new ones that are to
//! take the place of a lost server.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use dayfly_meta::id::NodeId;
use dayfly_server::channel::Channel;
use dayfly_server::{Preference, agree};
use tokio::time::timeout;

use super::start::{receive_answer, receive_from_server, unexpected_message};
use crate::control::{self, FromServer, FromSupervisor};

/// A server that has dialed the supervisor.
pub(super) enum Dialed {
    /// A member that has lost its control channel.
    Resumed { node: NodeId, incarnation: u32, channel: Channel },
    /// A new server that is to take the place of a lost one.
    Asking(Candidate),
    /// A new server that listens for peers, at this address.
    Started { node: NodeId, address: SocketAddr, channel: Channel },
    /// A new server that cannot start, and the names of its host or the number of its node.
    Failed { names: Vec<String>, node: Option<NodeId>, reason: String },
}

/// A new server, as its hello describes it.
pub(super) struct Candidate {
    pub(super) node: NodeId,
    pub(super) names: Vec<String>,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) warnings: Vec<String>,
    pub(super) channel: Channel,
}

/// Waits for the first message of a server that has dialed. A new server examines its node first, whose drives may be slow. Returns
/// `None` if it is of no use to the session.
pub(super) async fn greet(mut channel: Channel, limit: Duration) -> Option<Dialed> {
    match timeout(limit, receive_from_server(&mut channel.receiver)).await.ok()?.ok()? {
        FromServer::Resume { node, incarnation } => Some(Dialed::Resumed { node: NodeId(node), incarnation, channel }),
        FromServer::Hello { names, addresses, warnings, replaces: Some(node) } => {
            Some(Dialed::Asking(Candidate { node: NodeId(node), names, addresses, warnings, channel }))
        }
        FromServer::Hello { replaces: None, .. } => {
            // The session has begun without this server.
            dismiss(channel).await;
            None
        }
        FromServer::Failed { names, reason } => Some(Dialed::Failed { names, node: None, reason }),
        _ => None,
    }
}

/// Tells a server that it is not needed.
pub(super) async fn dismiss(mut channel: Channel) {
    // A server that is gone does not need to know.
    let _ = control::send(&mut channel.sender, &FromSupervisor::Surplus).await;
}

/// Makes a new server listen for peers as a node of the session.
pub(super) async fn start(
    node: NodeId,
    listen: Option<IpAddr>,
    preference: Preference,
    mut channel: Channel,
    limit: Duration,
) -> Option<Dialed> {
    let starting = async {
        let join = FromSupervisor::JoinAs { node: node.0, listen };
        control::send(&mut channel.sender, &join).await.map_err(|error| error.to_string())?;
        match receive_answer(&mut channel.receiver).await? {
            FromServer::Started { address, ability, .. } => {
                // The session's network is agreed. This finds out whether the server could have agreed to it.
                agree(preference, &[ability], &[]).map_err(|obstacle| obstacle.to_string())?;
                Ok(address)
            }
            FromServer::Failed { reason, .. } => Err(reason),
            _ => Err(unexpected_message()),
        }
    };
    let started = timeout(limit, starting).await;
    Some(match started.unwrap_or_else(|_| Err("it was not ready in time".to_owned())) {
        Ok(address) => Dialed::Started { node, address, channel },
        Err(reason) => {
            dismiss(channel).await;
            Dialed::Failed { names: Vec::new(), node: Some(node), reason }
        }
    })
}
