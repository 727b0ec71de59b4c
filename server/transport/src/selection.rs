//! The choice between RDMA and TCP. All nodes of a session use the same network, so that no node is slow for a reason that only
//! its own log would show.
//!
//! Each node reports its [`Ability`]. From these and the user's [`Preference`], [`agree`] derives one [`Agreement`]. If the user
//! insists on RDMA and the nodes cannot use it, [`agree`] returns the [`Obstacle`] instead. A transport keeps a `Selection`, which
//! starts as the node's own preference and then follows the agreement. This module opens no card and no connection.

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// The network that the user asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Preference {
    /// RDMA if all pairs of nodes have it, otherwise TCP.
    #[default]
    Auto,
    /// RDMA, or no session at all.
    Rdma,
    /// TCP, even where there is RDMA.
    Tcp,
    /// RDMA through the second provider, the crate `async-rdma`, or no session at all.
    #[cfg(feature = "async-rdma")]
    AsyncRdma,
}

/// The networks that a node can use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ability {
    /// The RDMA port that the node would use, or the reason why it has none.
    pub rdma: Result<Port, String>,
}

/// An RDMA port that is active and has an address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// Name of the card and number of the port: `NAME:PORT`.
    pub device: String,
    /// Whether the port speaks RoCE over Ethernet; otherwise it speaks InfiniBand.
    pub is_ethernet: bool,
    /// Largest packet in bytes.
    pub packet_len: u32,
    /// The port's address in text form: an IP address (RoCE) or a LID (InfiniBand).
    pub address: String,
}

impl Port {
    fn kind(&self) -> &'static str {
        if self.is_ethernet { "Ethernet" } else { "InfiniBand" }
    }
}

/// The network that all nodes of a session use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Agreement {
    /// RDMA between all pairs of nodes.
    Rdma {
        /// Tells the user about a defect of the setup that costs speed but does not prevent RDMA.
        note: Option<String>,
    },
    /// TCP between all pairs of nodes.
    Tcp {
        /// Tells the user why the session does not use RDMA.
        why: String,
    },
}

/// Why a session cannot use RDMA.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Obstacle {
    /// A node has no usable RDMA port.
    #[error("node {node} has no RDMA: {reason}")]
    NoRdma {
        /// Number of the first such node.
        node: usize,
        /// The reason that the node reported.
        reason: String,
    },
    /// InfiniBand ports and Ethernet ports cannot reach each other.
    #[error(
        "card {} of node 0 is {} and card {} of node {node} is {}, so they cannot reach each other; use --rdma-device to name \
         cards of one kind",
        first.device, first.kind(), other.device, other.kind()
    )]
    MixedPorts {
        /// Node 0's port.
        first: Port,
        /// Number of the first node whose port is of the other kind.
        node: usize,
        /// That node's port.
        other: Port,
    },
    /// Pairs of nodes tried to connect over RDMA and failed.
    #[error("{first}{}", match more { 0 => String::new(), 1 => " (and 1 more pair)".to_owned(), _ => format!(" (and {more} more pairs)") })]
    UnreachedPairs {
        /// What the first pair reported.
        first: String,
        /// Number of other pairs that failed.
        more: usize,
    },
}

/// Determines the network that all nodes can use. `failed` has a description of each pair of nodes that tried RDMA and failed.
///
/// # Errors
/// The obstacle to RDMA, if the preference insists on RDMA.
///
/// ```
/// use dayfly_transport::{Ability, Agreement, Preference, agree};
///
/// let nodes = [Ability { rdma: Err("there is no card".to_owned()) }];
/// assert!(matches!(agree(Preference::Auto, &nodes, &[]), Ok(Agreement::Tcp { .. })));
/// let obstacle = agree(Preference::Rdma, &nodes, &[]).unwrap_err();
/// assert_eq!(obstacle.to_string(), "node 0 has no RDMA: there is no card");
/// ```
pub fn agree(preference: Preference, nodes: &[Ability], failed: &[String]) -> Result<Agreement, Obstacle> {
    let without = nodes.iter().enumerate().find_map(|(node, ability)| {
        let reason = ability.rdma.as_ref().err()?.clone();
        Some(Obstacle::NoRdma { node, reason })
    });
    let ports: Vec<&Port> = nodes.iter().filter_map(|ability| ability.rdma.as_ref().ok()).collect();
    let differs = |is_other: &dyn Fn(&Port, &Port) -> bool| {
        let first = *ports.first()?;
        let node = ports.iter().position(|port| is_other(first, port))?;
        Some((node, first, ports[node]))
    };
    let mixed = differs(&|one, other| one.is_ethernet != other.is_ethernet).map(|(node, first, other)| Obstacle::MixedPorts {
        first: first.clone(),
        node,
        other: other.clone(),
    });
    let unreached = failed.first().map(|first| Obstacle::UnreachedPairs { first: first.clone(), more: failed.len() - 1 });
    match (preference, without.or(mixed).or(unreached)) {
        (Preference::Tcp, _) => Ok(Agreement::Tcp { why: "TCP was asked for".to_owned() }),
        (Preference::Auto, Some(obstacle)) => Ok(Agreement::Tcp { why: obstacle.to_string() }),
        (_, Some(obstacle)) => Err(obstacle),
        (_, None) => {
            let note = differs(&|one, other| one.packet_len != other.packet_len).map(|(node, first, other)| {
                format!(
                    "node 0's port sends packets of {} bytes and node {node}'s of {} bytes, so these two use the smaller \
                     size; set the same MTU on all nodes",
                    first.packet_len, other.packet_len
                )
            });
            Ok(Agreement::Rdma { note })
        }
    }
}

/// The network that a transport may use. Until all nodes have agreed, it is the best that the transport has; from then on, it is
/// the one that they agreed on.
pub(crate) struct Selection {
    preference: Preference,
    agreed: watch::Sender<Option<Agreement>>,
}

impl Selection {
    pub(crate) fn new(preference: Preference) -> Self {
        Self { preference, agreed: watch::Sender::default() }
    }

    /// Records the agreement, which the transport follows from then on.
    pub(crate) fn agree(&self, agreement: Agreement) {
        self.agreed.send_replace(Some(agreement));
    }

    pub(crate) fn is_agreed(&self) -> bool {
        self.agreed.borrow().is_some()
    }

    /// Returns whether this node must fail if it cannot use RDMA. After the agreement, it may fall back to TCP for single peers.
    pub(crate) fn insists_on_rdma(&self) -> bool {
        self.preference == Preference::Rdma && !self.is_agreed()
    }

    pub(crate) fn allows_rdma(&self) -> bool {
        !matches!(*self.agreed.borrow(), Some(Agreement::Tcp { .. }))
    }

    /// Waits until the nodes agree not to use RDMA.
    pub(crate) async fn rdma_excluded(&self) {
        // The sender lives as long as `self`, so this cannot fail.
        let _ = self.agreed.subscribe().wait_for(|agreed| matches!(agreed, Some(Agreement::Tcp { .. }))).await;
    }

    /// Describes the network in use, given the node's own port or the reason why it has none. If the network is RDMA, returns `Ok`
    /// with the description. If it is TCP, returns `Err` with the reason why RDMA is not used.
    pub(crate) fn describe(&self, port: Result<String, String>) -> Result<String, String> {
        match (&*self.agreed.borrow(), port) {
            (Some(Agreement::Tcp { why }), _) => Err(why.clone()),
            (Some(Agreement::Rdma { note: Some(note) }), Ok(port)) => Ok(format!("{port}; {note}")),
            (_, port) => port,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(is_ethernet: bool, packet_len: u32) -> Ability {
        Ability { rdma: Ok(Port { device: "mlx5_0:1".to_owned(), is_ethernet, packet_len, address: "10.0.0.1".to_owned() }) }
    }

    fn none() -> Ability {
        Ability { rdma: Err("there is no card".to_owned()) }
    }

    #[test]
    fn all_nodes_use_rdma_or_none_does_and_the_obstacle_is_named() {
        use Preference::{Auto, Rdma, Tcp};
        let good = || port(true, 4096);
        let failed = ["node 1 cannot write to node 0".to_owned(), "another".to_owned()];
        let check = |preference, nodes: &[Ability], failed: &[String], expected: Result<Option<&str>, &str>| {
            let agreed = agree(preference, nodes, failed).map_err(|obstacle| obstacle.to_string());
            let matches = match (&agreed, expected) {
                (Ok(Agreement::Rdma { note }), Ok(None)) => note.is_none(),
                (Ok(Agreement::Rdma { note: Some(words) } | Agreement::Tcp { why: words }), Ok(Some(expected))) => {
                    words.contains(expected)
                }
                (Err(words), Err(expected)) => words.contains(expected),
                _ => false,
            };
            assert!(matches, "{preference:?}: {agreed:?}, not {expected:?}");
        };
        check(Auto, &[good(), good()], &[], Ok(None));
        check(Rdma, &[good()], &[], Ok(None));
        check(Tcp, &[good(), good()], &[], Ok(Some("asked for")));
        check(Auto, &[good(), none()], &[], Ok(Some("node 1 has no RDMA: there is no card")));
        check(Rdma, &[good(), none()], &[], Err("node 1 has no RDMA"));
        check(Auto, &[good(), good(), port(false, 4096)], &[], Ok(Some("mlx5_0:1 of node 2 is InfiniBand")));
        check(Rdma, &[good(), port(false, 4096)], &[], Err("InfiniBand"));
        check(Auto, &[good(), port(true, 1024)], &[], Ok(Some("node 1's of 1024 bytes")));
        check(Auto, &[good(), good()], &failed, Ok(Some("node 1 cannot write to node 0 (and 1 more pair)")));
        check(Rdma, &[good(), good()], &failed[..1], Err("node 1 cannot write"));
    }
}
