//! Starting a session: where its servers run, what each is told, and who keeps it.

mod data_dir;
mod hosts;
mod invitation;
mod key_file;
mod launchers;
mod memory;
mod names;
mod processes;
mod supervisor;
mod watch;

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use dayfly_client::ClientError;
use dayfly_client::locate::{self, Location};
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{NodeId, SessionId};
use dayfly_meta::limits::{ARENA_LEN_DEFAULT, ARENA_LEN_MIN, DECODERS_MAX, stage_in_workers_max};
use dayfly_meta::path::display;
use dayfly_server::{Key, Preference};
use nix::fcntl::Flock;
use nix::unistd::gethostname;
use tokio::sync::oneshot;
use zeroize::Zeroizing;

use crate::args::{Network, SessionOptions};
use crate::failure::{Failure, complain};
use crate::size;
use launchers::Chosen;
use supervisor::{Plan, Supervisor};

/// A server that has ended is gone within this.
const GOING_TIMEOUT: Duration = Duration::from_secs(2);
/// Tries at removing a folder in which others make something.
const REMOVE_ATTEMPTS_MAX: u32 = 10;
/// The file in a session's folder that names its key file, where there is one.
const KEY_FILE: &str = "key-file";

pub(crate) use data_dir::{chosen as chosen_data_dirs, kind as data_dir_kind};
pub(crate) use invitation::{FromServer, FromSupervisor, Invitation, Settings};
pub(crate) use launchers::{job, names as launcher_names};
pub(crate) use names::own_addresses;
pub(crate) use processes::Processes;
pub(crate) use watch::{gone_message, until_gone};

/// A session that has just been started, kept as long as this lives.
pub(crate) struct Started {
    pub(crate) location: Location,
    supervisor: Supervisor,
    lock: Option<Flock<File>>,
}

impl Started {
    /// What ends the session when it is sent or dropped.
    pub(crate) fn end_handle(&mut self) -> Option<oneshot::Sender<()>> {
        self.supervisor.end_handle()
    }

    /// What tells why the session has ended that nobody ended; dropped without a word where somebody did.
    pub(crate) fn loss(&mut self) -> Option<oneshot::Receiver<String>> {
        self.supervisor.loss()
    }

    /// Waits until all servers have ended.
    pub(crate) fn wait(&mut self) {
        self.supervisor.wait();
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        drop(self.supervisor.end_handle());
        self.supervisor.wait();
        // Under the lock, so that nobody else does; where servers are still on their way out, without it, so that the last of them may.
        let removed = self.location.remove_if_last(|| remove_all(&self.location));
        drop(self.lock.take());
        if let Err(error) = removed.and_then(|was_last| if was_last { Ok(()) } else { remove_soon(&self.location) }) {
            complain(format_args!("cannot remove '{}': {error}", self.location.folder.display()));
        }
    }
}

/// A session that was asked for in a way that makes sense, and where it is to be; nothing of it is there yet.
pub(crate) struct Planned {
    options: SessionOptions,
    keep: Duration,
    prefix: Vec<u8>,
    memory: u64,
    deadlines: Deadlines,
    chosen: Chosen,
    transport: Preference,
}

impl Planned {
    /// The path below which programs will see the namespace.
    pub(crate) fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    /// Whether node 0 will be on this machine, so that what this process sees of the sources is what will be read.
    pub(crate) fn is_led_from_here(&self) -> bool {
        let own = gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default();
        self.chosen.launcher.is_local() || self.chosen.hosts.iter().any(|host| names::same_name(host, &own))
    }
}

/// Finds out where a session is to be, and checks what is asked of it. It is to go on for `keep` when its supervisor is lost.
pub(crate) fn plan(options: &SessionOptions, keep: Duration) -> Result<Planned, Failure> {
    let prefix = check_prefix(options.prefix.as_bytes())?;
    let path = Path::new(OsStr::from_bytes(&prefix));
    if let Some(real) = fs::canonicalize(path).ok().filter(|real| real != path) {
        complain(format_args!(
            "the prefix '{}' is, by symbolic links, '{}': a program that comes by that path reads what lies there, not the session",
            path.display(),
            real.display()
        ));
    }
    let memory = options.memory.unwrap_or(ARENA_LEN_DEFAULT);
    if memory < ARENA_LEN_MIN {
        return Err(Failure::usage(format!(
            "--memory must be at least {}: blocks of other nodes are read through it, several chunks at a time",
            size::show(ARENA_LEN_MIN)
        )));
    }
    memory::check(options.stage_in_memory, options.stage_in_workers)?;
    let mut deadlines = Deadlines::DEFAULT.scaled(options.deadlines_divisor);
    if let Some(seconds) = options.stage_in_timeout {
        deadlines.stall = Duration::from_secs(seconds);
    }
    deadlines.check().map_err(Failure::new)?;
    let chosen = launchers::choose(&options.launch)?;
    if chosen.is_fallback {
        complain("this is no job of a known manager: one server, on this machine (--local 1 says so, --hosts names others)");
    }
    let transport = preference(options)?;
    if chosen.launcher.is_step && !keep.is_zero() {
        return Err(Failure::usage(format!(
            "--keep: what {} starts ends with the job; where the site lets processes outlive one, use --launcher ssh",
            chosen.launcher.name
        )));
    }
    Ok(Planned { options: options.clone(), keep, prefix, memory, deadlines, chosen, transport })
}

/// Starts all servers and waits until they are ready, or until `cancelled`.
pub(crate) fn start(planned: Planned, cancelled: oneshot::Receiver<()>) -> Result<Started, Failure> {
    let Planned { options, keep, prefix, memory, deadlines, chosen, transport } = planned;
    let (session, key) = (SessionId(random()?), Zeroizing::new(random()?));
    let data_dirs = data_dir::chosen(&options.data_dir).iter().map(std::path::absolute).collect::<Result<Vec<_>, _>>()?;
    sweep(&locate::runtime_dir(), &data_dirs)?;
    let launch = &options.launch;
    let key_file = match &launch.key_file {
        Some(path) => std::path::absolute(path)?,
        None => env::current_dir()?.join(format!(".dayfly-{session}.key")),
    };
    let (location, lock) = locate::create(&locate::runtime_dir(), session, chosen.job.as_deref())?;
    let noted = match chosen.launcher.input {
        // Should this be killed while it is there, the next that comes by removes it.
        launchers::Input::File => fs::write(location.folder.join(KEY_FILE), key_file.as_os_str().as_bytes()),
        _ => Ok(()),
    };
    let invitation = Invitation {
        session: session.to_string(),
        key: key.clone(),
        supervisor: Vec::new(),
        host: None,
        node_name: chosen.launcher.node_name.map(str::to_owned),
        is_step: chosen.launcher.is_step,
        job: chosen.job.clone(),
        runtime_dir: locate::runtime_base(),
        settings: Settings {
            servers_here: launch.local.unwrap_or(1),
            data_dirs,
            allow_network_data_dir: options.allow_network_data_dir,
            capacity: options.capacity,
            memory,
            stage_in_memory: options.stage_in_memory,
            stage_in_workers: options.stage_in_workers,
            prefix,
            verify_reads: options.verify_reads,
            encrypt: options.encrypt,
            interface: launch.interface.clone(),
            transport,
            rdma_device: options.rdma_device.clone(),
            service_level: options.service_level,
            traffic_class: options.traffic_class,
            deadlines,
        },
        keep_ms: keep.as_millis() as u64,
        start_timeout_ms: launch.start_timeout * 1000,
        below: Vec::new(),
        launcher: chosen.launcher.name.to_owned(),
        launcher_args: launch.launcher_args.iter().flat_map(|words| words.split_whitespace()).map(str::to_owned).collect(),
        log: env::var("DAYFLY_LOG").ok(),
    };
    let plan = Plan {
        session,
        key: Arc::new(Key::new(*key)),
        invitation,
        key_file: Some(key_file),
        min_nodes: launch.min_nodes.map_or(chosen.hosts.len(), usize::from),
        start_timeout: Duration::from_secs(launch.start_timeout),
        chosen,
    };
    let watch = noted.and_then(|()| location.watch_supervisor(&lock));
    match watch.map_err(Failure::from).and_then(|watch| Supervisor::start(plan, watch, cancelled)) {
        Ok(supervisor) => Ok(Started { location, supervisor, lock: Some(lock) }),
        Err(failure) => {
            drop(lock);
            remove(&location)?;
            Err(failure)
        }
    }
}

fn preference(options: &SessionOptions) -> Result<Preference, Failure> {
    let is_rdma_wanted = !matches!(options.transport, Network::Auto | Network::Tcp);
    if options.encrypt && is_rdma_wanted {
        return Err(Failure::usage(
            "--encrypt seals every byte between nodes, and a card writes bytes as they are: it is by TCP",
        ));
    }
    Ok(match options.transport {
        Network::Auto => Preference::Auto,
        Network::Rdma => Preference::Rdma,
        Network::Tcp => Preference::Tcp,
        #[cfg(feature = "async-rdma")]
        Network::AsyncRdma => Preference::AsyncRdma,
    })
}

fn check_prefix(prefix: &[u8]) -> Result<Vec<u8>, Failure> {
    let wrong = |what: &str| Failure::usage(format!("'{}' cannot be the prefix: {what}", display(prefix)));
    if !prefix.starts_with(b"/") {
        return Err(wrong("it must be absolute"));
    }
    let normal = dayfly_meta::path::normalize(prefix).map_err(|reason| wrong(&reason.to_string()))?;
    if normal.is_empty() { Err(wrong("it must not be the root")) } else { Ok([b"/", &normal[..]].concat()) }
}

fn random<const LEN: usize>() -> Result<[u8; LEN], Failure> {
    let mut bytes = [0; LEN];
    getrandom::fill(&mut bytes).map_err(|error| Failure::new(format!("no randomness: {error}")))?;
    Ok(bytes)
}

/// What a server finds that it can do here.
pub(crate) struct Place {
    pub(crate) location: Location,
    /// Keeps the folder until the node has a lock of its own.
    pub(crate) lock: Flock<File>,
    data_dirs: Vec<PathBuf>,
    pub(crate) capacity: u64,
    pub(crate) workers: usize,
    pub(crate) decoders: usize,
    pub(crate) stage_memory: u64,
    /// For the user.
    pub(crate) warnings: Vec<String>,
}

impl Place {
    /// Looks at this machine for an invited server; takes nothing yet but a folder.
    pub(crate) fn find(session: SessionId, invitation: &Invitation) -> Result<Self, Failure> {
        let settings = &invitation.settings;
        let is_local = invitation.launcher == "local";
        let all = locate::runtime_dir_in(&invitation.runtime_dir);
        // On one machine whoever starts all of them has done so.
        if !is_local {
            sweep(&all, &settings.data_dirs)?;
        }
        let (data_dirs, mut warnings) = data_dir::check(&settings.data_dirs, settings.allow_network_data_dir)?;
        let (capacity, warning) = data_dir::capacity(settings.capacity, &data_dirs, settings.servers_here)?;
        warnings.extend(warning);
        let stage_memory = memory::for_stage_ins(settings.stage_in_memory, settings.servers_here, settings.stage_in_workers);
        let (location, lock) = locate::enter(&all, session, invitation.job.as_deref(), is_local)?;
        let list = location.folder.join(data_dir::LIST);
        let unusable = |error| ClientError::Folder { folder: location.folder.clone(), error };
        match OpenOptions::new().create_new(true).write(true).mode(0o600).open(list) {
            Ok(mut list) => list.write_all(&data_dir::list(&data_dirs, session)).map_err(unusable)?,
            // By another server of this machine.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(unusable(error).into()),
        }
        // Of those that this process may use, by its cpuset and control group.
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let share = (cores / usize::from(settings.servers_here)).clamp(1, stage_in_workers_max(stage_memory));
        let workers = settings.stage_in_workers.map_or(share, usize::from);
        // One source is decoded by as many as are there: with many sources, its workers take turns all the same.
        let decoders = cores.clamp(1, DECODERS_MAX);
        Ok(Self { location, lock, data_dirs, capacity, workers, decoders, stage_memory, warnings })
    }

    /// The session's folders in the data dirs, which hold those of the nodes.
    pub(crate) fn session_folders(&self) -> Vec<PathBuf> {
        data_dir::for_session(&self.data_dirs, self.location.session)
    }

    /// A node's folders in the data dirs, made, and held for as long as the locks live.
    pub(crate) fn take_data_dirs(&self, node: NodeId) -> Result<(Vec<PathBuf>, Vec<Flock<File>>), Failure> {
        let folders = data_dir::for_node(&self.data_dirs, self.location.session, node.0);
        let locks = data_dir::create_and_lock(&folders)?;
        Ok((folders, locks))
    }
}

/// Removes a session's folders in its data dirs but for those of servers that live: also where the list of them is gone with the
/// session's own folder.
pub(crate) fn remove_data_folders(folders: &[PathBuf]) {
    data_dir::remove(folders);
}

/// Starts servers for those below an invited one in the tree.
pub(crate) fn start_below(invitation: &Invitation) -> Result<Option<processes::Processes>, Failure> {
    if invitation.below.is_empty() {
        return Ok(None);
    }
    let launcher = launchers::by_name(&invitation.launcher);
    let launcher = launcher.ok_or_else(|| Failure::new(format!("there is no launcher '{}' here", invitation.launcher)))?;
    let mut processes = processes::Processes::none();
    processes.start(launcher, &invitation.below, invitation, None)?;
    Ok(Some(processes))
}

/// A node's lock, taken by its server for as long as it lives.
pub(crate) fn lock_node(location: &Location, node: NodeId) -> Result<Flock<File>, Failure> {
    let lock = location.lock_node(node).map_err(|error| ClientError::Folder { folder: location.folder.clone(), error })?;
    lock.ok_or_else(|| Failure::new(format!("node {node} of session {} has a server already", location.session)))
}

/// Removes what sessions left here whose servers were killed; says how many they were.
pub(crate) fn sweep(runtime_dir: &Path, data_dirs: &[PathBuf]) -> Result<usize, Failure> {
    let mut removed = 0;
    for location in locate::all(runtime_dir)? {
        removed += usize::from(remove(&location)?);
    }
    let running: Vec<SessionId> = locate::all(runtime_dir)?.iter().map(|location| location.session).collect();
    removed += data_dir::remove_leftovers(data_dirs, &running);
    remove_if_empty(runtime_dir);
    Ok(removed)
}

/// The same by who was asked to, and so waits a moment for what is on its way out.
pub(crate) fn sweep_patiently(runtime_dir: &Path, data_dirs: &[PathBuf]) -> Result<usize, Failure> {
    let mut removed = sweep(runtime_dir, data_dirs)?;
    let deadline = Instant::now() + GOING_TIMEOUT;
    for location in locate::all(runtime_dir)? {
        if location.live_nodes().is_empty() {
            removed += usize::from(remove_until(&location, deadline)?);
        }
    }
    Ok(removed)
}

/// Removes a session's folders, after its end.
pub(crate) fn remove(location: &Location) -> io::Result<bool> {
    location.remove_if_dead(|| remove_all(location))
}

/// The same, by this one or another, within a moment: servers that have ended may still be on their way out.
pub(crate) fn remove_soon(location: &Location) -> io::Result<()> {
    remove_until(location, Instant::now() + GOING_TIMEOUT).map(drop)
}

/// Says whether it is removed.
fn remove_until(location: &Location, deadline: Instant) -> io::Result<bool> {
    while location.folder.exists() && !remove(location)? && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(2));
    }
    // Another that has removed the session's may not have come to this yet.
    location.folder.parent().into_iter().for_each(remove_if_empty);
    Ok(!location.folder.exists())
}

fn remove_all(location: &Location) -> io::Result<()> {
    let listed = fs::read(location.folder.join(data_dir::LIST)).unwrap_or_default();
    data_dir::remove(&data_dir::listed(&listed));
    if let Ok(key_file) = fs::read(location.folder.join(KEY_FILE)) {
        // It is there only if who wrote it was killed.
        let _ = fs::remove_file(OsStr::from_bytes(&key_file));
    }
    let mut attempts_left = REMOVE_ATTEMPTS_MAX;
    let removed = loop {
        match fs::remove_dir_all(&location.folder) {
            // Another that is about to remove it has made the lock anew.
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && attempts_left > 0 => attempts_left -= 1,
            Err(error) if error.kind() == io::ErrorKind::NotFound => break Ok(()),
            removed => break removed,
        }
    };
    location.folder.parent().into_iter().for_each(remove_if_empty);
    removed
}

fn remove_if_empty(folder: &Path) {
    // Fails where another session lives in it, which is as it should be.
    let _ = fs::remove_dir(folder);
}
