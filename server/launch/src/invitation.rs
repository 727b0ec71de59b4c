//! The invitation: the data that a server gets from its launcher before it connects to the
//! supervisor.
//!
//! It is one line of JSON on standard input, or in the key file, and the only message that carries
//! the session's key in the clear. Everything else goes over the control channel, which the key
//! seals (see [`crate::control`]).

use std::net::SocketAddr;
use std::path::PathBuf;

use dayfly_meta::deadlines::Deadlines;
use dayfly_server::Preference;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::error::LaunchError;

/// Room for everything in an invitation except the names of hosts.
const BASE_LEN: usize = 64 << 10;

/// What a server needs to find its supervisor and to start. All servers of a session get the same
/// invitation, except for `host` and `below`.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Invitation {
    /// The launcher's version, so that a server of another version can name both
    /// versions.
    pub(crate) version: String,
    /// Session id, in hexadecimal.
    pub(crate) session: String,
    pub(crate) key: Zeroizing<[u8; 32]>,
    /// Addresses at which the supervisor listens.
    pub(crate) supervisor: Vec<SocketAddr>,
    /// The server's host, as the list of hosts names it, if the invitation is for one server only.
    pub(crate) host: Option<String>,
    /// The variable that holds the host's name, if the invitation is for all servers.
    pub(crate) node_name_variable: Option<String>,
    /// The lost node whose place the server is to take.
    pub(crate) replaces: Option<u16>,
    /// The most bytes that this server may take in its data dirs, if others of the session are on the same drives: what the lost one was
    /// given.
    pub(crate) replaced_capacity: Option<u64>,
    /// Whether the server runs as a job step (see `Launcher::is_job_step`).
    pub(crate) is_job_step: bool,
    /// Whether all servers run on one machine (see `Launcher::is_local`).
    pub(crate) is_local: bool,
    /// The manager's name for the job.
    pub(crate) job: Option<String>,
    /// The folder that holds each user's folder of sessions.
    pub(crate) runtime_dir: PathBuf,
    pub(crate) settings: Settings,
    /// How long the session continues without its supervisor.
    pub(crate) keep_ms: u64,
    /// How long the nodes may take to join.
    pub(crate) start_timeout_ms: u64,
    /// Hosts on which this server starts further servers, along the tree of launchers.
    pub(crate) below: Vec<String>,
    /// The launcher for the servers in `below`.
    pub(crate) launcher: String,
    pub(crate) launcher_args: Vec<String>,
    /// The log filter, as in `DAYFLY_LOG`.
    pub(crate) log: Option<String>,
}

impl Invitation {
    /// Encodes the invitation as one line. The buffer is allocated once, because a buffer that has
    /// to grow leaves the old copy, and thus the key, in memory.
    pub(crate) fn to_line(&self) -> Result<Zeroizing<Vec<u8>>, LaunchError> {
        let names: usize = self.below.iter().map(|name| name.len() + 3).sum();
        let mut line = Zeroizing::new(Vec::with_capacity(BASE_LEN + names));
        serde_json::to_writer(&mut *line, self)
            .map_err(|error| LaunchError::io("cannot encode the invitation")(std::io::Error::from(error)))?;
        line.push(b'\n');
        Ok(line)
    }

    /// Decodes a line.
    ///
    /// # Errors
    /// Fails if the line is not an invitation, or comes from another version.
    pub(crate) fn from_line(line: &[u8]) -> Result<Self, LaunchError> {
        #[derive(Deserialize)]
        struct VersionOnly {
            version: String,
        }
        serde_json::from_slice(line).map_err(|_| match serde_json::from_slice::<VersionOnly>(line) {
            Ok(VersionOnly { version }) => LaunchError::VersionMismatch { launcher: version },
            Err(_) => LaunchError::NoInvitation,
        })
    }
}

/// The user's options that concern each server.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// Number of servers that share the machine.
    pub(crate) servers_here: u16,
    pub(crate) data_dirs: Vec<PathBuf>,
    pub(crate) allow_network_data_dir: bool,
    pub(crate) capacity: Option<u64>,
    pub(crate) memory: u64,
    pub(crate) stage_in_memory: Option<u64>,
    pub(crate) stage_in_workers: Option<u16>,
    pub(crate) pfs_streams: u16,
    pub(crate) recovery_rate: u64,
    pub(crate) recovery_timeout_ms: u64,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invitation_of_another_version_is_an_error_that_names_the_version() {
        let other = Invitation::from_line(b"{\"version\":\"9.9.9\",\"unknown\":1}\n");
        assert!(matches!(other, Err(LaunchError::VersionMismatch { launcher }) if launcher == "9.9.9"));
        assert!(matches!(Invitation::from_line(b"\n"), Err(LaunchError::NoInvitation)));
    }
}
