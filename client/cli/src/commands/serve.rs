//! `dayfly serve`: a node's server. It is invited by who keeps the session, tells that one whether it can, is told its place and who
//! the others are, and serves until the session ends or its supervisor is lost.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use dayfly_client::locate::{Location, Watch};
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{NodeId, SessionId};
use dayfly_server::channel::{self, Channel, Receiver, Sender};
use dayfly_server::{Choice, Config, Key, Options, Server};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{dup2_stderr, dup2_stdout, gethostname};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Duration, Instant, MissedTickBehavior, interval, sleep, timeout};
use tracing_subscriber::EnvFilter;
use zeroize::Zeroizing;

use super::harden;
use crate::args::Serve;
use crate::failure::Failure;
use crate::launch::{self, FromServer, FromSupervisor, Invitation, Place, Processes};

/// Threads that move messages; the rest is done on threads for blocking work.
const RUNTIME_THREADS_MAX: usize = 4;
/// Longest invitation: most of it is the list of those to start.
const INVITATION_LEN_MAX: usize = 1 << 20;
/// A supervisor that is pressed is asked again after this,
const RETRY_INTERVAL: Duration = Duration::from_millis(300);
/// for so long.
const FIND_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) fn run(arguments: &Serve) -> Result<ExitCode, Failure> {
    harden();
    raise_descriptor_limit();
    let mut invitation = read_invitation(&arguments.key_file)?;
    if let Some(address) = &arguments.rendezvous {
        let found = address.to_socket_addrs();
        invitation.supervisor = found.map_err(|error| Failure::usage(format!("--rendezvous '{address}': {error}")))?.collect();
    }
    let filter = invitation.log.as_ref().and_then(|log| log.parse().ok()).unwrap_or_else(|| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(false);
    // A line that cannot be written is lost. By default that is told on standard error, the same full log, with a panic.
    log.log_internal_errors(false).init();
    let session: SessionId = invitation.session.parse().map_err(Failure::new)?;
    let cores = std::thread::available_parallelism().map_or(1, usize::from) / usize::from(invitation.settings.servers_here);
    // As many as this server's share of the cores: a message handed to a sleeping thread costs more than what is done with it.
    let threads = cores.clamp(1, RUNTIME_THREADS_MAX);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    let served = runtime.block_on(come(session, invitation));
    // What still blocks is of no use to anyone any more.
    runtime.shutdown_background();
    served.map(|()| ExitCode::SUCCESS)
}

fn read_invitation(path: &Path) -> Result<Invitation, Failure> {
    // In one piece, for what a buffer has grown out of is not overwritten.
    let mut line = Zeroizing::new(Vec::with_capacity(INVITATION_LEN_MAX));
    let cannot = |error: io::Error| Failure::new(format!("cannot read the key file '{}': {error}", path.display()));
    let mut file = if path == Path::new("-") {
        // Past the buffer of standard input.
        File::from(io::stdin().as_fd().try_clone_to_owned()?)
    } else {
        File::open(path).map_err(cannot)?
    };
    let mut byte = Zeroizing::new([0; 1]);
    while line.len() < INVITATION_LEN_MAX && file.read(&mut *byte).map_err(cannot)? == 1 && byte[0] != b'\n' {
        line.push(byte[0]);
    }
    serde_json::from_slice(&line).map_err(|_| {
        Failure::usage(
            "'dayfly serve' is told what to serve by 'dayfly up', on standard input or in a --key-file: see its --help",
        )
    })
}

/// The names by which this node may be listed; the manager's own first.
fn names(invitation: &Invitation) -> Vec<String> {
    let of_manager = invitation.node_name.as_ref().and_then(|name| std::env::var(name).ok());
    let of_host = gethostname().ok().and_then(|name| name.into_string().ok());
    let mut names: Vec<String> = [invitation.host.clone(), of_manager, of_host].into_iter().flatten().collect();
    names.dedup();
    names
}

async fn come(session: SessionId, invitation: Invitation) -> Result<(), Failure> {
    // What a job's steps are told by these is for the job, and a terminal's end is none of the session's.
    let _ignored = [SignalKind::hangup(), SignalKind::user_defined1(), SignalKind::user_defined2()].map(signal);
    let mut terminate = signal(SignalKind::terminate())?;
    let key = Arc::new(Key::new(*invitation.key));
    let mut below = launch::start_below(&invitation)?;
    let names = names(&invitation);
    let Channel { mut sender, receiver, local, .. } = tokio::select! {
        channel = find_supervisor(session, &key, &invitation, &names) => channel?,
        _ = terminate.recv() => return Err(Failure::new("ended by SIGTERM")),
    };
    let place = match Place::find(session, &invitation) {
        Ok(place) => place,
        Err(failure) => {
            tell_failure(&mut sender, names, &failure).await;
            wait_for_below(below.as_mut(), &invitation).await;
            return Ok(());
        }
    };
    if let Some(mut below) = below {
        tokio::spawn(async move {
            loop {
                let line = below.line().await;
                tracing::info!(line, "from a launcher");
            }
        });
    }
    let (location, folders) = (place.location.clone(), place.session_folders());
    let served = serve(session, key, &invitation, place, names, terminate, Far { sender, receiver, local }).await;
    // By whoever goes last.
    launch::remove(&location)?;
    launch::remove_data_folders(&folders);
    served
}

/// Those that this one has started come to the supervisor by themselves, even if this one cannot serve; but they end with it before.
async fn wait_for_below(below: Option<&mut Processes>, invitation: &Invitation) {
    if let Some(below) = below {
        let _ = timeout(Duration::from_millis(invitation.start_timeout_ms), below.all_ended()).await;
    }
}

/// Comes to the supervisor; again and again if it is pressed, as long as nodes may take to come.
async fn find_supervisor(
    session: SessionId,
    key: &Arc<Key>,
    invitation: &Invitation,
    names: &[String],
) -> Result<Channel, Failure> {
    let deadline = Instant::now() + Duration::from_millis(invitation.start_timeout_ms).min(FIND_TIMEOUT);
    loop {
        let error = match channel::dial(session, key, invitation.settings.deadlines, &invitation.supervisor).await {
            Ok(channel) => return Ok(channel),
            Err(error) => error,
        };
        if error.kind() != io::ErrorKind::ConnectionReset || Instant::now() > deadline {
            let me = names.first().map_or("this node", String::as_str);
            return Err(Failure::new(format!("the server on {me} cannot reach who started it ({error})")));
        }
        sleep(RETRY_INTERVAL).await;
    }
}

/// The way to the supervisor.
struct Far {
    sender: Sender,
    receiver: Receiver,
    local: IpAddr,
}

async fn serve(
    session: SessionId,
    key: Arc<Key>,
    invitation: &Invitation,
    place: Place,
    names: Vec<String>,
    mut terminate: Signal,
    Far { mut sender, mut receiver, local }: Far,
) -> Result<(), Failure> {
    let addresses = launch::own_addresses(None).unwrap_or_default();
    say(&mut sender, &FromServer::Hello { names: names.clone(), addresses, warnings: place.warnings.clone() }).await?;
    // Its deadline is the supervisor's, who waits for others; this is for one that is gone without a word.
    let patience = Duration::from_millis(invitation.start_timeout_ms) + invitation.settings.deadlines.lease;
    let orders = tokio::select! {
        orders = timeout(patience, hear(&mut receiver)) => orders.map_err(|_| Failure::new("the launcher let this server come and then said nothing; did it end?"))??,
        _ = terminate.recv() => return Err(Failure::new("ended by SIGTERM")),
    };
    let FromSupervisor::Orders { node, listen } = orders else {
        // There is one here already.
        return Ok(());
    };
    match start(session, key, invitation, place, NodeId(node), listen.unwrap_or(local)).await {
        Ok(serving) => serving.go_on(sender, receiver, terminate, invitation).await,
        Err(failure) => {
            tell_failure(&mut sender, names, &failure).await;
            Ok(())
        }
    }
}

/// Tells who can do something about it. That is all: a status other than 0 makes some launchers end all other servers.
async fn tell_failure(sender: &mut Sender, names: Vec<String>, failure: &Failure) {
    tracing::error!("{failure}");
    // One that is gone need not know.
    let _ = say(sender, &FromServer::Failed { names, reason: failure.to_string() }).await;
}

/// A server that listens, and what it holds.
struct Serving {
    server: Arc<Server>,
    location: Location,
    watch: Watch,
    locks: Vec<Flock<File>>,
}

async fn start(
    session: SessionId,
    key: Arc<Key>,
    invitation: &Invitation,
    place: Place,
    node: NodeId,
    listen: IpAddr,
) -> Result<Serving, Failure> {
    let settings = &invitation.settings;
    let listen = match &settings.interface {
        Some(name) => launch::own_addresses(Some(name))?.first().copied().unwrap_or(listen),
        None => listen,
    };
    let location = place.location.clone();
    let node_lock = launch::lock_node(&location, node)?;
    let mut locks = Vec::new();
    // Who ages files in /tmp passes over a folder that is locked.
    locks.extend(Flock::lock(File::open(&location.folder)?, FlockArg::LockSharedNonblock));
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(location.folder.join(format!("node-{node}.log")))?;
    dup2_stdout(&log).and_then(|()| dup2_stderr(&log)).map_err(io::Error::from)?;
    let (data_dirs, held) = place.take_data_dirs(node)?;
    locks.extend(held);
    locks.push(place.lock);
    let config = Config {
        session,
        key,
        encrypt: settings.encrypt,
        node,
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
        capacity: place.capacity,
        memory: settings.memory,
        prefix: settings.prefix.clone(),
        verify_reads: settings.verify_reads,
        workers: place.workers,
        decoders: place.decoders,
        stage_memory: place.stage_memory,
        deadlines: settings.deadlines,
    };
    let server = Server::start(config).await.map_err(Failure::new)?;
    let mut watch = location.watch_node(node, &node_lock)?;
    data_dirs.into_iter().for_each(|folder| watch.keep_fresh(folder));
    locks.push(node_lock);
    Ok(Serving { server, location, watch, locks })
}

impl Serving {
    /// Serves until the session ends here, and leaves nothing.
    async fn go_on(
        self,
        mut sender: Sender,
        receiver: Receiver,
        mut terminate: Signal,
        invitation: &Invitation,
    ) -> Result<(), Failure> {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let Self { server, location, watch, locks } = self;
        let server = &server;
        say(&mut sender, &FromServer::Started { address: server.address(), ability: server.ability() }).await?;
        let (mut loss, patience) = (None, invitation.settings.deadlines.lease_interval);
        let why = tokio::select! {
            () = server.ended() => "as it was told to",
            () = terminated(&mut terminate, invitation.is_step) => "by SIGTERM",
            _ = interrupt.recv() => "by SIGINT",
            path = launch::until_gone(watch) => {
                loss = Some(launch::gone_message(&path));
                "for its folder is gone"
            }
            why = async {
                match obey(server, &mut sender, receiver, invitation).await {
                    Parting::Meant(why) => why,
                    Parting::Lost(why) => stay(&location, Duration::from_millis(invitation.keep_ms), why).await,
                }
            } => why,
        };
        if let Some(reason) = &loss {
            tracing::error!(reason);
            // Said before anything fails for it. The supervisor tells the other nodes, and who waits for it.
            let failed = FromServer::Failed { names: Vec::new(), reason: reason.clone() };
            let _ = timeout(patience, say(&mut sender, &failed)).await;
        }
        // Its bytes first: whoever ended us may not give us long.
        server.give_up();
        if loss.is_some() {
            // No supervisor may be left to tell the other nodes.
            let _ = timeout(patience, server.end_others()).await;
        }
        // A supervisor that is gone needs no word.
        let _ = say(&mut sender, &FromServer::Ended).await;
        server.close();
        tracing::info!("the session has ended here, {why}");
        drop(locks);
        Ok(())
    }
}

/// Goes on without a supervisor, for who comes next.
async fn stay(location: &Location, keep: Duration, why: &'static str) -> &'static str {
    if keep.is_zero() {
        return why;
    }
    tracing::info!("{why}, the session goes on for {} s", keep.as_secs());
    // Its job is over: the next one finds it as nobody's.
    if let Err(error) = location.forget_job() {
        tracing::warn!(%error, "the session stays that of its job");
    }
    sleep(keep).await;
    "for its time is over"
}

/// A manager may tell all steps some time before the end of the job, which CMD is to use: so the first time is a notice, and the
/// session goes on. At the end of the job both the manager and its launcher tell, and so it comes twice.
async fn terminated(terminate: &mut Signal, is_step: bool) {
    terminate.recv().await;
    if is_step {
        tracing::info!("SIGTERM, once; the session goes on until it comes again, or its supervisor ends it");
        terminate.recv().await;
    }
}

/// How a supervisor leaves, and why that ends what it kept.
enum Parting {
    /// It said so, or the session never began.
    Meant(&'static str),
    /// It is lost to a session that had begun.
    Lost(&'static str),
}

/// Does what the supervisor says, and tells it that we live; ends with it.
async fn obey(server: &Arc<Server>, sender: &mut Sender, mut receiver: Receiver, invitation: &Invitation) -> Parting {
    let Deadlines { lease_interval, lease, .. } = invitation.settings.deadlines;
    let (said, mut orders) = mpsc::channel(4);
    // On a task of its own, for what was read of a message would be lost where another of these comes first; it ends with this.
    let mut listening = JoinSet::new();
    listening.spawn(async move {
        while let Ok(order) = hear(&mut receiver).await {
            if said.send(order).await.is_err() {
                return;
            }
        }
    });
    let mut ticks = interval(lease_interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Counted in ticks, which do not come while this process is stopped, as a suspended job's is.
    let lease = (lease.as_millis() / lease_interval.as_millis()) as u64;
    let mut left = (invitation.start_timeout_ms / lease_interval.as_millis() as u64).max(lease);
    let mut has_begun = false;
    let parting = |has_begun: bool, why: &'static str| if has_begun { Parting::Lost(why) } else { Parting::Meant(why) };
    loop {
        let answer = tokio::select! {
            order = orders.recv() => match order {
                None => return parting(has_begun, "for its supervisor is gone"),
                Some(FromSupervisor::End) => return Parting::Meant("as its supervisor was told to"),
                Some(FromSupervisor::Renew) => {
                    (left, has_begun) = (lease, true);
                    continue;
                }
                Some(FromSupervisor::Roster { addresses, agreement }) => match server.join(&addresses, agreement).await {
                    Ok(fallen_back) => FromServer::Met { fallen_back },
                    Err(reason) => FromServer::Failed { names: Vec::new(), reason },
                },
                Some(FromSupervisor::Agree(agreement)) => match server.agree(agreement).await {
                    Ok(()) => FromServer::Ready,
                    Err(reason) => FromServer::Failed { names: Vec::new(), reason },
                },
                Some(_) => continue,
            },
            _ = ticks.tick() => {
                if left == 0 {
                    return parting(has_begun, "for nothing was heard of its supervisor");
                }
                left -= 1;
                FromServer::Alive
            }
        };
        if say(sender, &answer).await.is_err() {
            return parting(has_begun, "for its supervisor takes no word");
        }
    }
}

async fn say(sender: &mut Sender, message: &FromServer) -> Result<(), Failure> {
    let message = serde_json::to_vec(message).map_err(Failure::new)?;
    Ok(sender.send(&message).await?)
}

fn other_version() -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!("this server's build of dayfly (version {version}) differs from its launcher's; use the same one on all nodes")
}

async fn hear(receiver: &mut Receiver) -> Result<FromSupervisor, Failure> {
    let message = receiver.receive().await;
    let message = message.map_err(|error| Failure::new(format!("the launcher of this server is gone ({error})")))?;
    serde_json::from_slice(&message).map_err(|_| Failure::new(other_version()))
}

/// Clients and peers each cost descriptors; the soft limit is often far below what is allowed.
fn raise_descriptor_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}
