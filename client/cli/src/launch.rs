//! Starting a session's servers, on this machine: what is told to each, and what it answers.

mod data_dir;
mod memory;

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use dayfly_client::locate::{self, Location};
use dayfly_meta::id::{NodeId, SessionId};
use dayfly_meta::limits::{ARENA_LEN_DEFAULT, ARENA_LEN_MIN, DECODERS_MAX, START_TIMEOUT};
use dayfly_meta::path::display;
use dayfly_server::{Ability, Agreement, Preference, agree};
use serde::{Deserialize, Serialize};

use crate::args::{Network, SessionOptions};
use crate::failure::{Failure, complain};
use crate::size;

pub(crate) use data_dir::{chosen as chosen_data_dirs, kind as data_dir_kind};

/// The first line on a server's standard input. It has the key: never on a command line, never in a file.
#[derive(Serialize, Deserialize)]
pub(crate) struct Orders {
    pub(crate) session: String,
    pub(crate) key: [u8; 32],
    pub(crate) node: u16,
    pub(crate) listen: SocketAddr,
    pub(crate) transport: Preference,
    pub(crate) rdma_device: Option<String>,
    pub(crate) service_level: u8,
    pub(crate) traffic_class: u8,
    pub(crate) folder: PathBuf,
    pub(crate) data_dirs: Vec<PathBuf>,
    pub(crate) capacity: u64,
    pub(crate) memory: u64,
    pub(crate) prefix: Vec<u8>,
    pub(crate) verify_reads: bool,
    pub(crate) workers: usize,
    pub(crate) decoders: usize,
    pub(crate) stage_memory: u64,
    /// Whether the end of standard input ends the server.
    pub(crate) is_tethered: bool,
}

/// The first line of a server's standard output.
#[derive(Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) address: SocketAddr,
    pub(crate) ability: Ability,
}

/// The second line on standard input: every node's address, in order, and how they try to reach each other.
#[derive(Serialize, Deserialize)]
pub(crate) struct Roster {
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) agreement: Agreement,
}

/// The second line of standard output: all peers were reached; some not in the way that was tried. What all then do, an [`Agreement`],
/// is the third line on standard input.
#[derive(Serialize, Deserialize)]
pub(crate) struct Ready {
    pub(crate) fallen_back: Vec<String>,
}

/// A session that has just been started.
pub(crate) struct Started {
    pub(crate) location: Location,
    /// Tethered servers, which end with this process.
    tethered: Vec<(ChildStdin, Child)>,
}

impl Started {
    /// Takes note of the end of servers that were tethered to us, so that none is left as a zombie.
    pub(crate) fn reap(&mut self) {
        for (input, mut child) in self.tethered.drain(..) {
            drop(input);
            if let Err(error) = child.wait() {
                complain(format_args!("cannot wait for a server: {error}"));
            }
        }
    }
}

/// Starts all servers and waits until they are ready. Tethered ones end with this process.
pub(crate) fn start(options: &SessionOptions, is_tethered: bool) -> Result<Started, Failure> {
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
            "--memory must be at least {}: what is read takes its way through it, in pieces",
            size::show(ARENA_LEN_MIN)
        )));
    }
    sweep(&data_dir::chosen(&options.data_dir))?;
    let data_dirs = data_dir::check(&data_dir::chosen(&options.data_dir), options.allow_network_data_dir)?;
    let capacity = options.capacity.map_or_else(|| data_dir::share_of_free(&data_dirs, options.local), Ok)?;
    let (session, key) = (SessionId(random()?), random()?);
    let (location, starting) = locate::create(session).map_err(|error| {
        let folder = locate::runtime_dir();
        Failure::new(format!("cannot make a session's folder in '{}' (DAYFLY_RUNTIME_DIR moves it): {error}", folder.display()))
    })?;
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let workers = (cores / usize::from(options.local)).clamp(1, dayfly_meta::limits::WORKERS_MAX);
    // One source is decoded by as many as are there: with many sources, its workers take turns all the same.
    let decoders = cores.clamp(1, DECODERS_MAX);
    let stage_memory = memory::for_stage_ins(options.stage_in_memory, options.local)?;
    let transport = match options.transport {
        Network::Auto => Preference::Auto,
        Network::Rdma => Preference::Rdma,
        Network::Tcp => Preference::Tcp,
        #[cfg(feature = "async-rdma")]
        Network::AsyncRdma => Preference::AsyncRdma,
    };
    let mut starting_servers = Servers { location: location.clone(), servers: Vec::new(), is_up: false };
    let list = OpenOptions::new().create_new(true).write(true).mode(0o600).open(location.folder.join(data_dir::LIST));
    list?.write_all(&data_dir::list(&data_dirs, session))?;
    for node in 0..options.local {
        let orders = Orders {
            session: session.to_string(),
            key,
            node,
            // Nodes of one machine differ by their loopback address, as nodes of a cluster differ by theirs.
            listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, 0, 0, (node + 1) as u8)), 0),
            transport,
            rdma_device: options.rdma_device.clone(),
            service_level: options.service_level,
            traffic_class: options.traffic_class,
            folder: location.folder.clone(),
            data_dirs: data_dir::for_node(&data_dirs, session, node),
            capacity,
            memory,
            prefix: prefix.clone(),
            verify_reads: options.verify_reads,
            workers,
            decoders,
            stage_memory,
            is_tethered,
        };
        starting_servers.servers.push(ServerProcess::spawn(&location, &orders)?);
    }
    starting_servers.wait_until_ready(transport)?;
    drop(starting);
    let tethered = starting_servers.release(is_tethered);
    Ok(Started { location, tethered })
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

/// Removes what sessions left here whose servers were killed.
pub(crate) fn sweep(data_dirs: &[PathBuf]) -> Result<(), Failure> {
    for location in locate::all()? {
        let listed = fs::read(location.folder.join(data_dir::LIST)).unwrap_or_default();
        if location.remove_if_dead()? {
            data_dir::remove(&data_dir::listed(&listed));
        }
    }
    let running: Vec<SessionId> = locate::all()?.iter().map(|location| location.session).collect();
    data_dir::remove_leftovers(data_dirs, &running);
    remove_if_empty(&locate::runtime_dir());
    Ok(())
}

/// Servers that are being started: dropped before they are up, they are killed and leave nothing.
struct Servers {
    location: Location,
    servers: Vec<ServerProcess>,
    is_up: bool,
}

struct ServerProcess {
    node: u16,
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    log: PathBuf,
}

impl Servers {
    fn wait_until_ready(&mut self, transport: Preference) -> Result<(), Failure> {
        let deadline = Instant::now() + START_TIMEOUT;
        let (mut addresses, mut abilities) = (Vec::with_capacity(self.servers.len()), Vec::new());
        for server in &mut self.servers {
            let line = server.line(deadline)?;
            let hello: Hello = serde_json::from_str(&line).map_err(|_| server.failure("it says no hello"))?;
            addresses.push(hello.address);
            abilities.push(hello.ability);
        }
        let agreed = |failed: &[String]| {
            agree(transport, &abilities, failed)
                .map_err(|why| Failure::new(format!("no session by RDMA, as --transport rdma demands: {why}")))
        };
        self.tell_all(&Roster { addresses, agreement: agreed(&[])? })?;
        let mut fallen_back = Vec::new();
        for server in &mut self.servers {
            let ready: Ready =
                serde_json::from_str(&server.line(deadline)?).map_err(|_| server.failure("it does not become ready"))?;
            fallen_back.extend(ready.fallen_back);
        }
        self.tell_all(&agreed(&fallen_back)?)
    }

    fn tell_all(&mut self, what: &impl Serialize) -> Result<(), Failure> {
        let line = serde_json::to_string(what).map_err(Failure::new)?;
        self.servers.iter_mut().try_for_each(|server| server.tell(&line))
    }

    /// From here on the servers live on their own, or by the tethers that this returns.
    fn release(mut self, is_tethered: bool) -> Vec<(ChildStdin, Child)> {
        self.is_up = true;
        let servers = std::mem::take(&mut self.servers).into_iter().map(|server| (server.input, server.child));
        if is_tethered { servers.collect() } else { Vec::new() }
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        if self.is_up {
            return;
        }
        for server in &mut self.servers {
            // Either may fail because it has ended by itself.
            let _ = server.child.kill();
            let _ = server.child.wait();
        }
        let listed = fs::read(self.location.folder.join(data_dir::LIST)).unwrap_or_default();
        data_dir::remove(&data_dir::listed(&listed));
        let _ = fs::remove_dir_all(&self.location.folder);
        remove_if_empty(&locate::runtime_dir());
    }
}

impl ServerProcess {
    fn spawn(location: &Location, orders: &Orders) -> Result<Self, Failure> {
        let node = orders.node;
        let cannot = |error: io::Error| Failure::new(format!("cannot start the server of node {node}: {error}"));
        let log = location.folder.join(format!("node-{node}.log"));
        let log_file = OpenOptions::new().create(true).append(true).mode(0o600).open(&log).map_err(cannot)?;
        let mut child = Command::new(env::current_exe().map_err(cannot)?)
            .arg("serve")
            // Where this runs within another session: a server sees that one's namespace no more than it needs to.
            .env_remove(crate::preload::VARIABLE)
            // The servers are the session's, not of whatever job control started them; and no job's folder stays busy.
            .process_group(0)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log_file)
            .spawn()
            .map_err(cannot)?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failure::new(format!("cannot speak with the server of node {node}")));
        };
        let mut server = Self { node, child, input, lines: read_lines(output), log };
        server.tell(&serde_json::to_string(orders).map_err(Failure::new)?)?;
        Ok(server)
    }

    fn tell(&mut self, line: &str) -> Result<(), Failure> {
        let written = self.input.write_all(format!("{line}\n").as_bytes());
        written.map_err(|error| self.failure(&error.to_string()))
    }

    fn line(&mut self, deadline: Instant) -> Result<String, Failure> {
        let left = deadline.saturating_duration_since(Instant::now());
        self.lines
            .recv_timeout(left)
            .map_err(|_| self.failure(&format!("it is not ready within {} s, or has ended", START_TIMEOUT.as_secs())))
    }

    /// Why it failed: its own last words, if it left any.
    fn failure(&self, reason: &str) -> Failure {
        // Give it a moment to write them.
        thread::sleep(Duration::from_millis(50));
        let words = fs::read_to_string(&self.log).unwrap_or_default();
        let last = words.lines().rev().find(|line| !line.trim().is_empty()).map(str::to_owned);
        Failure::new(format!("the server of node {} did not start: {}", self.node, last.as_deref().unwrap_or(reason)))
    }
}

/// Reads lines on a thread that ends with the pipe.
fn read_lines(output: ChildStdout) -> Receiver<String> {
    let (sender, lines) = channel();
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    lines
}

/// A node's lock, taken by its server for as long as it lives.
pub(crate) fn lock_node(location: &Location, node: NodeId) -> Result<nix::fcntl::Flock<File>, Failure> {
    let lock = location.lock_node(node).map_err(|error| Failure::new(format!("cannot lock node {node}: {error}")))?;
    lock.ok_or_else(|| Failure::new(format!("node {node} of session {} has a server already", location.session)))
}

/// A node's folders in the data dirs, made, and held for as long as its server lives.
pub(crate) fn take_data_dirs(folders: &[PathBuf]) -> Result<Vec<nix::fcntl::Flock<File>>, Failure> {
    data_dir::create_and_lock(folders)
}

/// Removes a session's folders, after its end.
pub(crate) fn remove(location: &Location) -> io::Result<bool> {
    let listed = fs::read(location.folder.join(data_dir::LIST)).unwrap_or_default();
    let removed = location.remove_if_dead()?;
    if removed {
        data_dir::remove(&data_dir::listed(&listed));
        remove_if_empty(&locate::runtime_dir());
    }
    Ok(removed)
}

fn remove_if_empty(folder: &Path) {
    // Fails where another session lives in it, which is as it should be.
    let _ = fs::remove_dir(folder);
}
