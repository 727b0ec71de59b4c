//! Administration: membership, status, policy and the end of a session.

use rkyv::{Archive, Deserialize, Serialize};

use crate::id::DatasetId;
use crate::roster::LeaseRound;
use crate::wire::status::{NodeStatus, Policy};

/// A request to a member of the session.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum AdministrationRequest {
    /// Report this node's status. Reply: [`AdministrationReply::Status`].
    Status,
    /// Apply a policy for prefetching and caching. Reply: [`AdministrationReply::Done`].
    Tune(Policy),
    /// Join the session: connect to the peers in this roster, and pass it on to the nodes below in the tree. Reply:
    /// [`AdministrationReply::Joined`].
    Join {
        /// The address of every node, in order.
        addresses: Vec<String>,
        /// The network over which to try to reach the peers.
        network: AgreedNetwork,
    },
    /// Use this network from now on, as all nodes do, and pass the agreement on to the nodes below in the tree. Reply:
    /// [`AdministrationReply::Done`].
    Agree(AgreedNetwork),
    /// Make this node's datasets the same as the coordinator's. Reply: [`AdministrationReply::Done`].
    CatchUp,
    /// Say whether all copies of a dataset that are to be on this node have come back to it. Reply: [`AdministrationReply::HasCopies`].
    HasCopies {
        /// A dataset that the asking node knows.
        dataset: DatasetId,
    },
    /// Renew this node's lease, and pass the round on to the nodes below in its tree. Reply: [`AdministrationReply::Heard`].
    Renew(LeaseRound),
    /// End the session on this node. Reply: [`AdministrationReply::Ended`], after which the server exits.
    End,
}

/// The network that all nodes use.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum AgreedNetwork {
    /// All nodes use RDMA.
    Rdma {
        /// A message for the user about a flaw in the setup that does not keep RDMA from working.
        note: Option<String>,
    },
    /// All nodes use TCP.
    Tcp {
        /// A message for the user that says why RDMA is not used.
        why: String,
    },
}

/// The answer to an [`AdministrationRequest`].
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum AdministrationReply {
    /// The node and all nodes below it have connected to their peers.
    Joined {
        /// One sentence for each pair of nodes that cannot reach each other over the network that was tried.
        fallen_back: Vec<String>,
    },
    /// The request was carried out.
    Done,
    /// The node's status.
    Status(Box<NodeStatus>),
    /// Whether all copies that are to be on the node are there. Not so if it does not know the dataset.
    HasCopies(bool),
    /// This node, and the nodes below it that it has heard in this round or the one before.
    Heard(Vec<u16>),
    /// The node has stopped serving.
    Ended {
        /// Bytes freed in its data dirs.
        freed_bytes: u64,
    },
}
