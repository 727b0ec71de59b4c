//! The server's side of a session's life, as `dayfly serve` runs it.
//!
//! An invited server starts the servers below it in the tree of launchers, connects to the
//! supervisor, and reports whether it can serve. It then gets its node number, starts, and serves
//! until the session ends or its supervisor is lost. Finally, it removes the session's folders,
//! unless other servers on this machine are still using them.

mod environment;
mod follow;

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use dayfly_client::locate::{SessionFolder, Watch};
use dayfly_meta::id::{NodeId, SessionId};
use dayfly_server::channel::{self, Channel, Receiver, Sender};
use dayfly_server::{Choice, Config, Key, Node, Options};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{dup2_stderr, dup2_stdout};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Duration, Instant, sleep, timeout};
use tracing::{Instrument, info_span};
use zeroize::Zeroizing;

use crate::cleanup;
use crate::control::{self, ControlError, FromServer, FromSupervisor};
use crate::error::LaunchError;
use crate::folder_watch::{gone_message, until_gone};
use crate::invitation::Invitation;
use crate::launchers;
use crate::node_names::{own_addresses, own_host_name};
use crate::processes::LauncherProcesses;
use environment::ServerEnvironment;
use follow::{Dialer, Follower, Parting};

/// Maximum number of runtime threads, which move messages. Everything that blocks runs on threads for blocking work.
const RUNTIME_THREADS_MAX: usize = 4;
/// The longest invitation. Most of it is the list of hosts whose servers the invited server starts.
const INVITATION_LEN_MAX: usize = 1 << 20;
/// The pause between two attempts to connect to the supervisor. A busy supervisor resets the
/// connections that it cannot hold.
const CONNECT_RETRY_INTERVAL: Duration = Duration::from_millis(300);

/// A server that has its invitation but has not contacted the supervisor yet.
pub struct InvitedServer {
    session: SessionId,
    invitation: Invitation,
}

impl InvitedServer {
    /// Reads the invitation from a key file, or from standard input if the path is `-`.
    /// `rendezvous`, as `HOST:PORT`, replaces the supervisor's addresses.
    ///
    /// # Errors
    /// Fails if there is no invitation, or if it comes from another version.
    pub fn read(path: &Path, rendezvous: Option<&str>) -> Result<Self, LaunchError> {
        let mut invitation = read_invitation(path)?;
        if let Some(address) = rendezvous {
            let found = address.to_socket_addrs();
            invitation.supervisor =
                found.map_err(|source| LaunchError::Rendezvous { address: address.to_owned(), source })?.collect();
        }
        let session = invitation.session.parse().map_err(|_| LaunchError::NoInvitation)?;
        Ok(Self { session, invitation })
    }

    /// Returns the log filter that the launcher was given in `DAYFLY_LOG`.
    pub fn log_filter(&self) -> Option<&str> {
        self.invitation.log.as_deref()
    }

    /// Serves until the session ends.
    ///
    /// # Errors
    /// Fails if the server cannot join. A failure after that is reported to the supervisor, which
    /// decides what happens to the session.
    pub fn run(self) -> Result<(), LaunchError> {
        raise_descriptor_limit();
        let servers_here = usize::from(self.invitation.settings.servers_here);
        let cores = std::thread::available_parallelism().map_or(1, usize::from) / servers_here;
        // The runtime gets this server's share of the cores and no more, because waking a sleeping
        // thread costs more than handling a message.
        let threads = cores.clamp(1, RUNTIME_THREADS_MAX);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build();
        let runtime = runtime.map_err(LaunchError::io("cannot start the server's runtime"))?;
        let served = runtime.block_on(join(self.session, self.invitation));
        // The results of calls that still block are no longer needed.
        runtime.shutdown_background();
        served
    }
}

fn read_invitation(path: &Path) -> Result<Invitation, LaunchError> {
    // The buffer is allocated once, because a buffer that has to grow leaves the old copy, and thus
    // the key, in memory.
    let mut line = Zeroizing::new(Vec::with_capacity(INVITATION_LEN_MAX));
    let cannot = |source: io::Error| LaunchError::ReadKeyFile { path: path.to_owned(), source };
    let mut file = if path == Path::new("-") {
        // This bypasses standard input's buffer, which is never overwritten and would also keep the
        // key.
        File::from(io::stdin().as_fd().try_clone_to_owned().map_err(LaunchError::io("cannot read standard input"))?)
    } else {
        File::open(path).map_err(cannot)?
    };
    let mut byte = Zeroizing::new([0; 1]);
    while line.len() < INVITATION_LEN_MAX && file.read(&mut *byte).map_err(cannot)? == 1 && byte[0] != b'\n' {
        line.push(byte[0]);
    }
    Invitation::from_line(&line)
}

/// Returns the names by which the host list may name this node: the launcher's first, then the
/// manager's, then the machine's own.
fn node_names(invitation: &Invitation) -> Vec<String> {
    let by_manager = invitation.node_name_variable.as_ref().and_then(|name| std::env::var(name).ok());
    let own = Some(own_host_name()).filter(|name| !name.is_empty());
    let mut names: Vec<String> = [invitation.host.clone(), by_manager, own].into_iter().flatten().collect();
    names.dedup();
    names
}

/// Joins the session and serves.
async fn join(session: SessionId, invitation: Invitation) -> Result<(), LaunchError> {
    // A manager sends these signals to all job steps, but they are meant for the job. The end of a
    // terminal does not end the session.
    let _ignored = [SignalKind::hangup(), SignalKind::user_defined1(), SignalKind::user_defined2()].map(signal);
    let mut terminate = signal(SignalKind::terminate()).map_err(LaunchError::io("cannot handle SIGTERM"))?;
    let key = Arc::new(Key::new(*invitation.key));
    let mut below = start_below(&invitation)?;
    let names = node_names(&invitation);
    let Channel { mut sender, receiver, local, far } = tokio::select! {
        channel = connect(session, &key, &invitation, &names) => channel?,
        _ = terminate.recv() => return Err(LaunchError::Terminated),
    };
    let environment = match ServerEnvironment::examine(session, &invitation) {
        Ok(environment) => environment,
        Err(error) => {
            report_failure(&mut sender, names, &error).await;
            wait_for_below(below.as_mut(), &invitation).await;
            return Ok(());
        }
    };
    if let Some(mut below) = below {
        tokio::spawn(async move {
            loop {
                let line = below.line().await;
                tracing::info!(line, "output of a launcher");
            }
        });
    }
    let (location, folders) = (environment.location.clone(), environment.session_folders());
    let supervisor = SupervisorLink { sender, receiver, local, far };
    let served = wait_and_serve(session, key, &invitation, environment, names, terminate, supervisor).await;
    // If several servers share this machine, only the last one succeeds.
    cleanup::remove_if_dead(&location)?;
    cleanup::remove_data_folders(&folders);
    served
}

/// Starts the servers below this one in the tree.
fn start_below(invitation: &Invitation) -> Result<Option<LauncherProcesses>, LaunchError> {
    if invitation.below.is_empty() {
        return Ok(None);
    }
    let launcher = launchers::find(&invitation.launcher)?;
    let mut processes = LauncherProcesses::new();
    processes.start(launcher, &invitation.below, invitation, None)?;
    Ok(Some(processes))
}

/// Waits until the processes that start the servers below this one have exited, because they would
/// be killed with this process. Those servers join on their own, even if this server cannot.
async fn wait_for_below(below: Option<&mut LauncherProcesses>, invitation: &Invitation) {
    if let Some(below) = below {
        let _ = timeout(Duration::from_millis(invitation.start_timeout_ms), below.all_exited()).await;
    }
}

/// Connects to the supervisor, and retries if it is too busy to accept.
async fn connect(session: SessionId, key: &Arc<Key>, invitation: &Invitation, names: &[String]) -> Result<Channel, LaunchError> {
    // The rest of the time is for the other servers, which report what they miss.
    let deadline = Instant::now() + Duration::from_millis(invitation.start_timeout_ms) / 2;
    loop {
        let error = match channel::dial(session, key, invitation.settings.deadlines, &invitation.supervisor).await {
            Ok(channel) => return Ok(channel),
            Err(error) => error,
        };
        if error.kind() != io::ErrorKind::ConnectionReset || Instant::now() > deadline {
            let host = names.first().map_or("this node", String::as_str).to_owned();
            return Err(LaunchError::SupervisorUnreachable { host, source: error });
        }
        sleep(CONNECT_RETRY_INTERVAL).await;
    }
}

/// The control channel to the supervisor.
struct SupervisorLink {
    sender: Sender,
    receiver: Receiver,
    /// This end's address.
    local: IpAddr,
    /// The supervisor's address.
    far: IpAddr,
}

/// Waits for the node number, starts the server and serves.
async fn wait_and_serve(
    session: SessionId,
    key: Arc<Key>,
    invitation: &Invitation,
    environment: ServerEnvironment,
    names: Vec<String>,
    mut terminate: Signal,
    SupervisorLink { mut sender, mut receiver, local, far }: SupervisorLink,
) -> Result<(), LaunchError> {
    let addresses = own_addresses(None).unwrap_or_default();
    let warnings = environment.warnings.clone();
    send(&mut sender, &FromServer::Hello { names: names.clone(), addresses, warnings, replaces: invitation.replaces }).await?;
    // The supervisor waits for other servers and has its own deadline. The one here covers a supervisor
    // that has vanished.
    let patience = Duration::from_millis(invitation.start_timeout_ms) + invitation.settings.deadlines.lease;
    let silent = |_| LaunchError::SupervisorSilent { seconds: patience.as_secs() };
    let answer = tokio::select! {
        answer = timeout(patience, receive(&mut receiver, invitation)) => answer.map_err(silent)??,
        _ = terminate.recv() => return Err(LaunchError::Terminated),
    };
    let FromSupervisor::JoinAs { node, listen } = answer else {
        // The node already has a server.
        return Ok(());
    };
    let span = info_span!("node", %session, node);
    let listen = listen.unwrap_or(local);
    let dialer = Dialer {
        session,
        key: key.clone(),
        deadlines: invitation.settings.deadlines,
        supervisor: addresses_reached(&invitation.supervisor, far),
    };
    match start(session, key, invitation, environment, NodeId(node), listen).instrument(span.clone()).await {
        Ok(serving) => serving.run(NodeId(node), dialer, (sender, receiver), terminate, invitation).instrument(span).await,
        Err(error) => {
            report_failure(&mut sender, names, &error).await;
            Ok(())
        }
    }
}

/// Returns the supervisor's addresses at `far`, where it was reached; all of them if it was reached another way.
fn addresses_reached(supervisor: &[SocketAddr], far: IpAddr) -> Vec<SocketAddr> {
    let reached: Vec<SocketAddr> = supervisor.iter().copied().filter(|address| address.ip() == far).collect();
    if reached.is_empty() { supervisor.to_vec() } else { reached }
}

/// Reports a failure to the supervisor. The process still exits with status 0, because some
/// launchers end all servers if one fails.
async fn report_failure(sender: &mut Sender, names: Vec<String>, error: &LaunchError) {
    tracing::error!(%error, "the server cannot start");
    // A supervisor that is gone does not need to know.
    let _ = send(sender, &FromServer::Failed { names, reason: error.to_string() }).await;
}

/// A listening server, and the resources that it holds.
struct Serving {
    server: Arc<Node>,
    /// Bytes that the server may use in its data dirs.
    capacity: u64,
    location: SessionFolder,
    watch: Watch,
    locks: Vec<Flock<File>>,
}

async fn start(
    session: SessionId,
    key: Arc<Key>,
    invitation: &Invitation,
    environment: ServerEnvironment,
    node: NodeId,
    listen: IpAddr,
) -> Result<Serving, LaunchError> {
    let settings = &invitation.settings;
    let listen = match &settings.interface {
        Some(name) => own_addresses(Some(name))?.first().copied().unwrap_or(listen),
        None => listen,
    };
    let location = environment.location.clone();
    let node_lock = environment.lock_node(node)?;
    let mut locks = Vec::new();
    let folder = location.folder.display().to_string();
    let cannot_use = || LaunchError::io(format!("cannot use the session's folder '{folder}'"));
    // When systemd-tmpfiles removes old files, it skips a folder that is locked.
    locks.extend(Flock::lock(File::open(&location.folder).map_err(cannot_use())?, FlockArg::LockSharedNonblock));
    let log_path = location.folder.join(format!("node-{node}.log"));
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(log_path).map_err(cannot_use())?;
    dup2_stdout(&log).and_then(|()| dup2_stderr(&log)).map_err(LaunchError::io("cannot redirect output to the log"))?;
    let (data_dirs, held) = environment.take_data_dirs(node)?;
    locks.extend(held);
    let config = Config {
        session,
        key,
        encrypt: settings.encrypt,
        node,
        is_replacement: invitation.replaces.is_some(),
        listen: SocketAddr::new(listen, 0),
        network: Options {
            preference: settings.transport,
            choice: Choice {
                device: settings.rdma_device.clone(),
                near: data_dirs.first().cloned(),
                service_level: settings.service_level,
                traffic_class: settings.traffic_class,
            },
        },
        runtime_dir: location.folder.clone(),
        data_dirs: data_dirs.clone(),
        capacity: environment.capacity,
        growth: environment.growth,
        memory: settings.memory,
        prefix: settings.prefix.clone(),
        verify_reads: settings.verify_reads,
        workers: environment.workers,
        decoders: environment.decoders,
        stage_in_memory: environment.stage_in_memory,
        pfs_streams: usize::from(settings.pfs_streams),
        recovery_rate: settings.recovery_rate,
        recovery_timeout: Duration::from_millis(settings.recovery_timeout_ms),
        deadlines: settings.deadlines,
    };
    locks.push(environment.lock);
    let server = Node::start(config).await.map_err(LaunchError::Server)?;
    let mut watch = location.watch_node(node, &node_lock).map_err(cannot_use())?;
    data_dirs.into_iter().for_each(|folder| watch.keep_fresh(folder));
    locks.push(node_lock);
    Ok(Serving { server, capacity: environment.capacity, location, watch, locks })
}

impl Serving {
    /// Serves until the session ends on this node, and then frees everything.
    async fn run(
        self,
        node: NodeId,
        dialer: Dialer,
        (mut sender, receiver): (Sender, Receiver),
        mut terminate: Signal,
        invitation: &Invitation,
    ) -> Result<(), LaunchError> {
        let mut interrupt = signal(SignalKind::interrupt()).map_err(LaunchError::io("cannot handle SIGINT"))?;
        let Self { server, capacity, location, watch, locks } = self;
        let server = &server;
        let (address, ability) = (server.address(), server.ability());
        send(&mut sender, &FromServer::Started { address, ability, capacity }).await?;
        let (mut loss, mut gave_up, patience) = (None, None, invitation.settings.deadlines.lease_interval);
        let (mut ends_session, mut is_told_by_signal, mut is_cut_off) = (false, false, false);
        let start_ticks = (invitation.start_timeout_ms as u128).div_ceil(patience.as_millis()) as u64;
        let mut follower = Follower::new(server, node, dialer, sender, receiver);
        let cause = tokio::select! {
            () = server.ended() => {
                ends_session = true;
                "a client or a peer asked for it"
            }
            () = terminated(&mut terminate, invitation.is_job_step) => {
                is_told_by_signal = true;
                "SIGTERM"
            }
            _ = interrupt.recv() => {
                is_told_by_signal = true;
                "SIGINT"
            }
            path = until_gone(watch) => {
                loss = Some(gone_message(&path));
                "its folder is gone"
            }
            cause = async {
                match follower.follow(start_ticks).await {
                    Parting::Ended(cause) => cause,
                    Parting::GaveUp(reason) => {
                        gave_up = Some(reason);
                        "it cannot catch up with the session"
                    }
                    Parting::Lost(cause) => {
                        is_cut_off = true;
                        stay(server, &location, Duration::from_millis(invitation.keep_ms), cause).await
                    }
                }
            } => cause,
        };
        if let Some(reason) = &loss {
            tracing::error!(reason);
            // The supervisor gets the reason before this server frees its blocks, because reads on
            // other nodes fail after that. The supervisor ends the other nodes, and informs the user.
            let failed = FromServer::Failed { names: Vec::new(), reason: reason.clone() };
            follower.tell(&failed).await;
        }
        if is_told_by_signal && !server.is_alone() {
            // The session may go on without this server. Programs that have the node's blocks open or mapped read on; the space is free
            // when they and this process have ended.
            server.leave();
        } else {
            // Frees the space first, because a manager may kill this process soon.
            server.free_all();
        }
        if loss.is_some() {
            // If the supervisor is gone, nobody else ends the other nodes.
            let _ = timeout(patience, server.end_others()).await;
        }
        // A supervisor that can be reached again later is to start a new server, as for one that has died.
        if gave_up.is_none() && !is_cut_off {
            follower.tell(&FromServer::Ended { ends_session }).await;
        }
        server.close();
        tracing::info!(cause, "the session has ended on this node");
        drop(locks);
        if let Some(reason) = gave_up {
            tracing::error!(reason, "this server gives up the place of the lost one");
            // From now on another server may be started for this node, so its locks must be free.
            follower.tell(&FromServer::GaveUp { reason }).await;
        }
        Ok(())
    }
}

/// Serves for the time `keep` without a supervisor, so that the next job can use the session.
/// Returns why the server ends.
async fn stay(server: &Node, location: &SessionFolder, keep: Duration, cause: &'static str) -> &'static str {
    if keep.is_zero() {
        return cause;
    }
    tracing::info!(cause, seconds = keep.as_secs(), "the session continues without its supervisor");
    server.tenure().go_on_alone();
    // The session's job is over. Without this, the next job's commands would not find the session.
    if let Err(error) = location.forget_job() {
        tracing::warn!(%error, "cannot detach the session from its job; the next job will not find it");
    }
    sleep(keep).await;
    "the time of --keep is over"
}

/// Waits for SIGTERM, twice if the server runs as a job step.
///
/// A manager may signal all job steps some time before the end of the job, so that the user's
/// command can save its work. That command still reads from the session, so the first signal does
/// not end the server. At the end of the job both the manager and its launcher send the signal, so it
/// arrives twice.
async fn terminated(terminate: &mut Signal, is_job_step: bool) {
    terminate.recv().await;
    if is_job_step {
        tracing::info!("got SIGTERM once; the session continues until it comes again, or the supervisor ends the session");
        terminate.recv().await;
    }
}

async fn send(sender: &mut Sender, message: &FromServer) -> Result<(), LaunchError> {
    control::send(sender, message).await.map_err(|error| match error {
        ControlError::Channel(error) => LaunchError::ControlChannel(error),
        ControlError::Decode(error) => LaunchError::ControlChannel(error.into()),
    })
}

async fn receive(receiver: &mut Receiver, invitation: &Invitation) -> Result<FromSupervisor, LaunchError> {
    control::receive(receiver).await.map_err(|error| match error {
        ControlError::Channel(error) => LaunchError::ControlChannel(error),
        ControlError::Decode(_) => LaunchError::VersionMismatch { launcher: invitation.version.clone() },
    })
}

/// Raises the soft limit of open files to the hard one. Each client and each peer costs
/// descriptors, and the soft limit is often far below what is allowed.
fn raise_descriptor_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}
