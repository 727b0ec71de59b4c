//! A session that this process supervises.

use std::env;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;

use dayfly_client::locate::{self, SessionFolder};
use dayfly_meta::id::SessionId;
use dayfly_meta::limits::{PFS_STREAMS_DEFAULT, RECOVERY_RATE_DEFAULT, RECOVERY_TIMEOUT_DEFAULT};
use dayfly_server::Key;
use nix::fcntl::Flock;
use tokio::sync::oneshot;
use tracing::info_span;
use zeroize::Zeroizing;

use crate::cleanup::{self, KEY_FILE_NAME};
use crate::data_dir;
use crate::ended::Ended;
use crate::error::LaunchError;
use crate::invitation::{Invitation, Settings};
use crate::launchers::Input;
use crate::notices::Notices;
use crate::plan::SessionPlan;
use crate::supervisor::{StartRequest, Supervisor};

/// A session whose servers are ready. Dropping it ends the session and removes its folders.
pub struct RunningSession {
    location: SessionFolder,
    supervisor: Supervisor,
    /// The supervisor's lock on the session's folder.
    lock: Option<Flock<File>>,
    notices: Notices,
}

impl RunningSession {
    /// Starts all servers, and waits until they are ready or `cancelled` fires.
    ///
    /// # Errors
    /// Fails if the servers cannot be started, or do not become one session in time. In that case,
    /// nothing is left behind.
    pub fn start(plan: SessionPlan, cancelled: oneshot::Receiver<()>) -> Result<Self, LaunchError> {
        let (session, key) = (SessionId(random()?), Zeroizing::new(random()?));
        let _span = info_span!("start_session", %session, nodes = plan.allocation.hosts.len()).entered();
        let absolute = |path: PathBuf| {
            std::path::absolute(&path).map_err(LaunchError::io(format!("cannot find the path of '{}'", path.display())))
        };
        let data_dirs =
            data_dir::chosen_data_dirs(&plan.options.data_dirs).into_iter().map(absolute).collect::<Result<Vec<_>, _>>()?;
        cleanup::sweep(&locate::runtime_dir(), &data_dirs)?;
        let key_file = match &plan.options.launch.key_file {
            Some(path) => absolute(path.clone())?,
            None => {
                let folder = env::current_dir().map_err(LaunchError::io("cannot find the working directory"))?;
                folder.join(format!(".dayfly-{session}.key"))
            }
        };
        let (location, lock) = locate::create(&locate::runtime_dir(), session, plan.allocation.job.as_deref())?;
        let noted = match plan.allocation.launcher.input {
            // If this process is killed while the key file exists, the next cleanup finds the key
            // file by this note and removes it.
            Input::File => locate::write_private(&location.folder.join(KEY_FILE_NAME), key_file.as_os_str().as_bytes()),
            Input::Standard => Ok(()),
        };
        let notices = plan.notices.clone();
        let request = StartRequest {
            session,
            key: Arc::new(Key::new(*key)),
            invitation: invitation(&plan, session, key, data_dirs),
            key_file,
            min_nodes: plan.options.launch.min_nodes.map_or(plan.allocation.hosts.len(), usize::from),
            start_timeout: plan.options.launch.start_timeout,
            restarts_lost: plan.options.restarts_lost,
            lease_tree_width: plan.options.lease_tree_width,
            allocation: plan.allocation,
            notices: notices.clone(),
        };
        let folder = location.folder.display().to_string();
        let watch = noted.and_then(|()| location.watch_supervisor(&lock));
        let watch = watch.map_err(LaunchError::io(format!("cannot use the session's folder '{folder}'")));
        match watch.and_then(|watch| Supervisor::start(request, watch, Ended::new(location.clone()), cancelled)) {
            Ok(supervisor) => Ok(Self { location, supervisor, lock: Some(lock), notices }),
            Err(error) => {
                drop(lock);
                cleanup::remove_if_dead(&location)?;
                Err(error)
            }
        }
    }

    /// Returns the session's folder on this machine.
    pub fn location(&self) -> &SessionFolder {
        &self.location
    }

    /// Returns a handle that ends the session when it is sent or dropped. Only the first call
    /// returns one.
    pub fn end_handle(&mut self) -> Option<oneshot::Sender<()>> {
        self.supervisor.end_handle()
    }

    /// Returns a channel that receives the reason if the session is lost. Its sender is dropped if
    /// the session ends otherwise. Only the first call returns one.
    pub fn loss(&mut self) -> Option<oneshot::Receiver<String>> {
        self.supervisor.loss()
    }

    /// Returns what is known about who has ended the session.
    pub fn ended(&self) -> Ended {
        self.supervisor.ended()
    }

    /// Waits until all servers have ended.
    pub fn wait(&mut self) {
        self.supervisor.wait();
    }
}

impl Drop for RunningSession {
    fn drop(&mut self) {
        drop(self.supervisor.end_handle());
        self.supervisor.wait();
        // The lock is held during the first attempt, so that no other process removes the folder at
        // the same time. This attempt does nothing if servers are still about to exit. The second
        // attempt follows without the lock, so that the last of those servers can also remove the
        // folder.
        let removed = cleanup::remove_if_last(&self.location);
        drop(self.lock.take());
        if let Err(error) =
            removed.and_then(|was_last| if was_last { Ok(()) } else { cleanup::remove_soon(&self.location).map(drop) })
        {
            self.notices.show(error);
        }
    }
}

fn invitation(plan: &SessionPlan, session: SessionId, key: Zeroizing<[u8; 32]>, data_dirs: Vec<PathBuf>) -> Invitation {
    let (options, launch, launcher) = (&plan.options, &plan.options.launch, plan.allocation.launcher);
    Invitation {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        session: session.to_string(),
        key,
        supervisor: Vec::new(),
        host: None,
        node_name_variable: launcher.node_name_variable.map(str::to_owned),
        replaces: None,
        replaced_capacity: None,
        is_job_step: launcher.is_job_step,
        is_local: launcher.is_local(),
        job: plan.allocation.job.clone(),
        runtime_dir: locate::runtime_base(),
        settings: Settings {
            servers_here: launch.local.unwrap_or(1),
            data_dirs,
            allow_network_data_dir: options.allow_network_data_dir,
            capacity: options.capacity,
            memory: plan.memory,
            stage_in_memory: options.stage_in_memory,
            stage_in_workers: options.stage_in_workers,
            pfs_streams: options.pfs_streams.unwrap_or(PFS_STREAMS_DEFAULT),
            recovery_rate: options.recovery_rate.unwrap_or(RECOVERY_RATE_DEFAULT),
            recovery_timeout_ms: options.recovery_timeout.unwrap_or(RECOVERY_TIMEOUT_DEFAULT).as_millis() as u64,
            prefix: plan.prefix.clone(),
            verify_reads: options.verify_reads,
            encrypt: options.encrypt,
            interface: launch.interface.clone(),
            transport: options.transport,
            rdma_device: options.rdma_device.clone(),
            service_level: options.service_level,
            traffic_class: options.traffic_class,
            deadlines: plan.deadlines,
        },
        keep_ms: plan.keep.as_millis() as u64,
        start_timeout_ms: launch.start_timeout.as_millis() as u64,
        below: Vec::new(),
        launcher: launcher.name.to_owned(),
        launcher_args: launch.launcher_args.iter().flat_map(|words| words.split_whitespace()).map(str::to_owned).collect(),
        log: env::var("DAYFLY_LOG").ok(),
    }
}

fn random<const LEN: usize>() -> Result<[u8; LEN], LaunchError> {
    let mut bytes = [0; LEN];
    getrandom::fill(&mut bytes)
        .map_err(|error| LaunchError::io("cannot get random bytes for the session's key")(io::Error::from(error)))?;
    Ok(bytes)
}
