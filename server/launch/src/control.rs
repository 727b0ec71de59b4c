//! The messages between the supervisor and each server, as JSON on the sealed control channel.
//!
//! Each server connects to the supervisor and sends [`FromServer::Hello`]. The supervisor answers
//! with the node number, collects the addresses, and has node 0 connect all servers. From then on
//! both sides send heartbeats: [`FromSupervisor::Renew`] and [`FromServer::Alive`]. In a session of many servers, heartbeats travel
//! along a tree of servers: [`FromSupervisor::Round`] and [`FromServer::Heard`]. A server whose
//! channel breaks dials again and sends [`FromServer::Resume`]. One that was lost in the meantime is
//! told to [return](FromSupervisor::Return), and is a member again after [`FromServer::CaughtUp`].
//!
//! A new server that takes the place of a lost one names its node in its hello. It gets the node
//! number like the others, and then [`FromSupervisor::Replace`] instead of the roster.

use std::io;
use std::net::{IpAddr, SocketAddr};

use dayfly_meta::roster::{LeaseRound, RosterChange};
use dayfly_server::channel::{Receiver, Sender};
use dayfly_server::{Ability, Agreement};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// A message from a server to the supervisor.
#[derive(Serialize, Deserialize)]
pub(crate) enum FromServer {
    /// The server can do what its invitation asks, and waits for a node number.
    Hello {
        /// Names that the host list may use for the server's node.
        names: Vec<String>,
        /// Addresses that the host list may use for the server's node.
        addresses: Vec<IpAddr>,
        /// Warnings for the user.
        warnings: Vec<String>,
        /// The lost node whose place the server is to take.
        replaces: Option<u16>,
    },
    /// The server listens for peers, and may take so many bytes in its data dirs.
    Started { address: SocketAddr, ability: Ability, capacity: u64 },
    /// From node 0: all nodes can reach each other. `fallen_back` names the pairs that cannot do so
    /// over the transport that was tried, and says why.
    Met { fallen_back: Vec<String> },
    /// From node 0: all nodes use the transport that was agreed on.
    Ready,
    /// A heartbeat of the server.
    Alive,
    /// From the root of the tree along which leases are renewed: the servers that have been heard.
    Heard(Vec<u16>),
    /// The first message of a server that has lost its control channel and has dialed again.
    Resume { node: u16, incarnation: u32 },
    /// The server has caught up with the session, and can be a member again.
    CaughtUp { incarnation: u32, address: SocketAddr },
    /// A new server cannot catch up with the session, and has ended. The node stays lost.
    GaveUp { reason: String },
    /// A user wants a new server in the place of a lost one. The answer has the same number.
    Rejoin { number: u64, node: u16, host: Option<String> },
    /// The server ends because it was asked to, together with the whole session or alone.
    Ended { ends_session: bool },
    /// The server cannot start, or cannot continue.
    Failed { names: Vec<String>, reason: String },
}

/// A message from the supervisor to a server.
#[derive(Serialize, Deserialize)]
pub(crate) enum FromSupervisor {
    /// The server becomes this node. It listens at `listen`, or else at the address of its control
    /// channel.
    JoinAs { node: u16, listen: Option<IpAddr> },
    /// The server's node has another server, so the server that gets this message ends.
    Surplus,
    /// To node 0: connect all nodes, with the transport to try.
    Roster { addresses: Vec<SocketAddr>, agreement: Agreement },
    /// To node 0: all nodes use this transport from now on.
    Agree(Agreement),
    /// Heartbeat: the session continues.
    Renew,
    /// To the root of the tree along which leases are renewed: the session continues.
    Round(LeaseRound),
    /// The members have changed.
    Change(RosterChange),
    /// To a new server in the place of a lost one: the session as it began, and what has changed since. The server becomes a
    /// member when it has caught up with the session as this incarnation.
    Replace { addresses: Vec<SocketAddr>, agreement: Agreement, incarnation: u32, change: RosterChange },
    /// What became of [`FromServer::Rejoin`]: a message for the user, or the reason of a failure.
    Rejoined { number: u64, outcome: Result<String, String> },
    /// The server was lost. To be a member again, it catches up with the session as this incarnation.
    Return { incarnation: u32, change: RosterChange },
    /// The session ends.
    End,
}

/// Why a message could not be sent or received.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ControlError {
    #[error("{0}")]
    Channel(#[from] io::Error),
    /// The bytes are not one of the expected messages.
    #[error("the message cannot be decoded: {0}")]
    Decode(#[source] serde_json::Error),
}

/// Sends one message.
pub(crate) async fn send(sender: &mut Sender, message: &impl Serialize) -> Result<(), ControlError> {
    let bytes = serde_json::to_vec(message).map_err(io::Error::from)?;
    Ok(sender.send(&bytes).await?)
}

/// Receives one message.
pub(crate) async fn receive<T: DeserializeOwned>(receiver: &mut Receiver) -> Result<T, ControlError> {
    serde_json::from_slice(&receiver.receive().await?).map_err(ControlError::Decode)
}
