//! What is said between who starts servers, the *supervisor*, and each server: the invitation, by standard input or a file, which has the
//! key; all else on a channel that the key seals, in which the server is the guest.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use dayfly_meta::deadlines::Deadlines;
use dayfly_server::{Ability, Agreement, Preference};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::failure::Failure;

/// Room for all that is said but for names of hosts.
const LINE_LEN: usize = 64 << 10;

/// Told first: what all servers of a session are told alike, and, where each is started by itself, which it is.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Invitation {
    pub(crate) session: String,
    pub(crate) key: Zeroizing<[u8; 32]>,
    /// Where the supervisor listens.
    pub(crate) supervisor: Vec<SocketAddr>,
    /// The name of the guest's node in the list, if it is meant for one.
    pub(crate) host: Option<String>,
    /// The variable that has the name, if it is meant for all.
    pub(crate) node_name: Option<String>,
    /// Whether the manager tells it of the job's end, and perhaps some time before.
    pub(crate) is_step: bool,
    /// The manager's name of the job.
    pub(crate) job: Option<String>,
    pub(crate) runtime_dir: PathBuf,
    pub(crate) settings: Settings,
    /// How long the session goes on without its supervisor.
    pub(crate) keep_ms: u64,
    /// How long nodes may take to come together.
    pub(crate) start_timeout_ms: u64,
    /// Others for the guest to start.
    pub(crate) below: Vec<String>,
    /// And how.
    pub(crate) launcher: String,
    pub(crate) launcher_args: Vec<String>,
    /// What servers log.
    pub(crate) log: Option<String>,
}

impl Invitation {
    /// As it is told, in one piece, for what a buffer has grown out of is not overwritten.
    pub(super) fn to_line(&self) -> Result<Zeroizing<Vec<u8>>, Failure> {
        let names: usize = self.below.iter().map(|name| name.len() + 3).sum();
        let mut line = Zeroizing::new(Vec::with_capacity(LINE_LEN + names));
        serde_json::to_writer(&mut *line, self).map_err(Failure::new)?;
        line.push(b'\n');
        Ok(line)
    }
}

/// What the user has said of each server.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// Servers that share a machine.
    pub(crate) servers_here: u16,
    pub(crate) data_dirs: Vec<PathBuf>,
    pub(crate) allow_network_data_dir: bool,
    pub(crate) capacity: Option<u64>,
    pub(crate) memory: u64,
    pub(crate) stage_in_memory: Option<u64>,
    pub(crate) stage_in_workers: Option<u16>,
    pub(crate) prefix: Vec<u8>,
    pub(crate) verify_reads: bool,
    pub(crate) encrypt: bool,
    pub(crate) interface: Option<String>,
    pub(crate) transport: Preference,
    pub(crate) rdma_device: Option<String>,
    pub(crate) service_level: u8,
    pub(crate) traffic_class: u8,
    pub(crate) deadlines: Deadlines,
}

/// From a server.
#[derive(Serialize, Deserialize)]
pub(crate) enum FromServer {
    /// It can do what it was told, and waits for its place.
    Hello {
        /// Names by which its node may be listed.
        names: Vec<String>,
        /// Addresses by which it may.
        addresses: Vec<IpAddr>,
        /// For the user.
        warnings: Vec<String>,
    },
    /// Its server is there.
    Started { address: SocketAddr, ability: Ability },
    /// From node 0: all have met; some not in the way that was tried.
    Met { fallen_back: Vec<String> },
    /// From node 0: all do as was agreed.
    Ready,
    /// It lives.
    Alive,
    /// It ends, as it was told to.
    Ended,
    /// It cannot.
    Failed { names: Vec<String>, reason: String },
}

/// To a server.
#[derive(Serialize, Deserialize)]
pub(crate) enum FromSupervisor {
    /// Its place. An address, if it is not to listen where its channel is.
    Orders { node: u16, listen: Option<IpAddr> },
    /// There is one on its node already.
    Surplus,
    /// To node 0: who all are, and how they try to reach each other.
    Roster { addresses: Vec<SocketAddr>, agreement: Agreement },
    /// To node 0: how they do from now on.
    Agree(Agreement),
    /// The session goes on.
    Renew,
    /// It does not.
    End,
}
