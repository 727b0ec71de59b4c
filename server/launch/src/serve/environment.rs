//! The environment of a server on its machine: the session's folder, usable data dirs, and its
//! shares of drives, cores and memory.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::thread;

use dayfly_client::ClientError;
use dayfly_client::locate::{self, SessionFolder};
use dayfly_meta::id::{NodeId, SessionId};
use dayfly_meta::limits::{DECODERS_MAX, SERVER_DESCRIPTORS_MIN, stage_in_workers_max};
use dayfly_server::Growth;
use nix::fcntl::Flock;
use nix::sys::resource::{Resource, getrlimit};

use crate::cleanup;
use crate::data_dir;
use crate::error::LaunchError;
use crate::invitation::Invitation;
use crate::stage_in_memory;

/// The machine as an invited server finds it. Nothing is taken yet except the session's folder.
pub(super) struct ServerEnvironment {
    pub(super) location: SessionFolder,
    /// Holds the folder until the node has its own lock.
    pub(super) lock: Flock<File>,
    data_dirs: Vec<PathBuf>,
    /// Bytes that the server may use in its data dirs.
    pub(super) capacity: u64,
    /// How this may change later.
    pub(super) growth: Option<Growth>,
    /// Stage-in workers of this server.
    pub(super) workers: usize,
    /// Decoder threads for one compressed source.
    pub(super) decoders: usize,
    /// Bytes of memory for all stage-ins.
    pub(super) stage_in_memory: u64,
    /// Warnings for the user.
    pub(super) warnings: Vec<String>,
}

impl ServerEnvironment {
    /// Examines this machine, and creates the session's folder or joins it.
    pub(super) fn examine(session: SessionId, invitation: &Invitation) -> Result<Self, LaunchError> {
        let settings = &invitation.settings;
        check_descriptor_limit()?;
        let runtime_dir = locate::runtime_dir_in(&invitation.runtime_dir);
        // On one machine the supervisor has removed leftovers already.
        if !invitation.is_local {
            cleanup::sweep(&runtime_dir, &settings.data_dirs)?;
        }
        let (data_dirs, mut warnings) = data_dir::check(&settings.data_dirs, settings.allow_network_data_dir)?;
        let growth = || data_dir::growth(settings.capacity, invitation.replaced_capacity, settings.servers_here);
        let growth = invitation.replaces.map(|_| growth());
        let capacity = match growth {
            Some(growth) => data_dir::capacity_now(growth, &data_dirs)?,
            None => {
                let (capacity, warning) = data_dir::capacity(settings.capacity, &data_dirs, settings.servers_here)?;
                warnings.extend(warning);
                capacity
            }
        };
        let stage_in_memory =
            stage_in_memory::per_server(settings.stage_in_memory, settings.servers_here, settings.stage_in_workers);
        let (location, lock) = locate::enter(&runtime_dir, session, invitation.job.as_deref(), invitation.is_local)?;
        let list = location.folder.join(data_dir::LIST);
        let unusable = |error| ClientError::Folder { folder: location.folder.clone(), error };
        match OpenOptions::new().create_new(true).write(true).mode(0o600).open(list) {
            Ok(mut list) => list.write_all(&data_dir::encode_list(&data_dirs, session)).map_err(unusable)?,
            // Another server on this machine wrote the list first.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(unusable(error).into()),
        }
        // This counts only the cores that this process's cpuset and control group allow.
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let share = (cores / usize::from(settings.servers_here)).clamp(1, stage_in_workers_max(stage_in_memory));
        let workers = settings.stage_in_workers.map_or(share, usize::from);
        // A single source is decoded by all cores. With many sources the workers keep the cores
        // busy, and share the decoder threads.
        let decoders = cores.clamp(1, DECODERS_MAX);
        Ok(Self { location, lock, data_dirs, capacity, growth, workers, decoders, stage_in_memory, warnings })
    }

    /// Returns the session's folders in the data dirs. Each contains the folders of its nodes.
    pub(super) fn session_folders(&self) -> Vec<PathBuf> {
        data_dir::session_folders(&self.data_dirs, self.location.session)
    }

    /// Creates a node's folders in the data dirs, and holds them for as long as the locks live.
    pub(super) fn take_data_dirs(&self, node: NodeId) -> Result<(Vec<PathBuf>, Vec<Flock<File>>), LaunchError> {
        let folders = data_dir::node_folders(&self.data_dirs, self.location.session, node.0);
        let locks = data_dir::create_and_lock(&folders)?;
        Ok((folders, locks))
    }

    /// Takes a node's lock, which its server holds for as long as the server lives.
    pub(super) fn lock_node(&self, node: NodeId) -> Result<Flock<File>, LaunchError> {
        let location = &self.location;
        let lock = location.lock_node(node).map_err(|error| ClientError::Folder { folder: location.folder.clone(), error })?;
        lock.ok_or_else(|| LaunchError::NodeTaken { node: node.0, session: location.session.to_string() })
    }
}

/// Checks that this process may open enough files; its soft limit has been raised already. Otherwise, the server could accept
/// neither peers nor clients.
fn check_descriptor_limit() -> Result<(), LaunchError> {
    let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).map_err(LaunchError::io("cannot read the limit of open files"))?;
    if limit < SERVER_DESCRIPTORS_MIN { Err(LaunchError::DescriptorLimit { limit }) } else { Ok(()) }
}
