//! Starts sessions whose servers run in the test's own process, over a transport that injects faults. This process holds all of the
//! servers' memory and unnamed files, so a test can flip a bit wherever bytes are stored.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use dayfly_client::locate::SessionFolder;
use dayfly_client::{Session, View};
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{NodeId, SessionId};
use dayfly_meta::limits::{ARENA_LEN_MIN, PAGE_SIZE};
use dayfly_meta::roster::{RosterChange, RosterMember};
use dayfly_meta::wire::control::{Command, Copies, Event, Selection, StageInRequest, Summary};
use dayfly_meta::wire::status::{NodeStatus, Policy};
use dayfly_server::{Agreement, Config, Key, Node, Options, Preference};
use dayfly_transport::Transport;
use dayfly_transport::fault::{Fault, FaultSchedule, Faulty, OutgoingRequest};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::samples::content;

/// Copies of a sample are found by searching for this many of its first bytes.
const NEEDLE_LEN: usize = 64;

/// Chooses the fault of each request between servers.
pub(crate) type Injector = Box<dyn Fn(&OutgoingRequest<'_>) -> Option<Fault> + Send + Sync>;

/// A session in this process.
pub(crate) struct Inside {
    runtime: Runtime,
    servers: Vec<Arc<Node>>,
    location: SessionFolder,
    data: Vec<TempDir>,
    pub(crate) work: TempDir,
    _folder: TempDir,
    inject: Arc<Mutex<Option<Injector>>>,
    /// The length of each node's arena. It differs between the sessions in this process, so it identifies this session's arenas.
    memory: u64,
    /// The epoch of the roster.
    epoch: u32,
    /// How many nodes store each block of the datasets that are staged in.
    pub(crate) copies: Copies,
}

/// The number of sessions that this process has started.
static SESSIONS: AtomicU64 = AtomicU64::new(0);

/// A place where bytes are stored, and where a test can change them.
pub(crate) enum Rest<'a> {
    /// The arenas of all nodes.
    Arenas,
    /// The segments in a node's data dir.
    Segments(&'a Path),
}

impl Inside {
    pub(crate) fn new(nodes: u16, verify_reads: bool) -> Self {
        Self::with_config(nodes, |config| config.verify_reads = verify_reads)
    }

    /// Starts a session whose nodes have configurations that `configure` changes.
    pub(crate) fn with_config(nodes: u16, configure: impl Fn(&mut Config)) -> Self {
        let folder = || tempfile::Builder::new().prefix("df").tempdir().unwrap();
        let (work, session_folder) = (folder(), folder());
        let data: Vec<TempDir> = (0..nodes).map(|_| folder()).collect();
        let location = SessionFolder { session: SessionId([7; 8]), folder: session_folder.path().to_owned() };
        let runtime = Runtime::new().unwrap();
        let memory = 2 * ARENA_LEN_MIN + SESSIONS.fetch_add(1, Ordering::Relaxed) * PAGE_SIZE;
        let inject: Arc<Mutex<Option<Injector>>> = Arc::default();
        let start = |node: u16| {
            let mut config = Config {
                session: location.session,
                key: Arc::new(Key::new([3; 32])),
                encrypt: false,
                node: NodeId(node),
                is_replacement: false,
                listen: "127.0.0.1:0".parse().unwrap(),
                network: Options { preference: Preference::Tcp, ..Options::default() },
                runtime_dir: location.folder.clone(),
                data_dirs: vec![data[usize::from(node)].path().to_owned()],
                capacity: 1 << 30,
                growth: None,
                memory,
                prefix: b"/dayfly".to_vec(),
                verify_reads: false,
                workers: 2,
                decoders: 1,
                pfs_streams: 16,
                recovery_rate: 0,
                recovery_timeout: std::time::Duration::ZERO,
                stage_in_memory: 256 << 20,
                deadlines: Deadlines::DEFAULT,
            };
            configure(&mut config);
            let known = inject.clone();
            let plan: FaultSchedule = Arc::new(move |seen| known.lock().unwrap().as_ref().and_then(|inject| inject(seen)));
            let decorate = |inner: Arc<dyn Transport>| -> Arc<dyn Transport> { Arc::new(Faulty::new(inner, plan)) };
            runtime.block_on(Node::start_over(config, decorate)).unwrap()
        };
        let servers: Vec<Arc<Node>> = (0..nodes).map(start).collect();
        let addresses: Vec<_> = servers.iter().map(|server| server.address()).collect();
        for server in &servers {
            runtime.block_on(server.join(&addresses, Agreement::Tcp { why: "a test".to_owned() })).unwrap();
        }
        Self {
            runtime,
            servers,
            location,
            data,
            work,
            _folder: session_folder,
            inject,
            memory,
            epoch: 0,
            copies: Copies::default(),
        }
    }

    /// Starts to inject faults.
    pub(crate) fn inject(&self, inject: impl Fn(&OutgoingRequest<'_>) -> Option<Fault> + Send + Sync + 'static) {
        *self.inject.lock().unwrap() = Some(Box::new(inject));
    }

    /// Stops injecting faults.
    pub(crate) fn leave_alone(&self) {
        *self.inject.lock().unwrap() = None;
    }

    /// Stops a node's server, and tells all nodes that the node is lost, as the supervisor does.
    pub(crate) fn lose(&mut self, node: u16) {
        self.stop(node);
        let _within = self.runtime.enter();
        self.announce(node, true);
    }

    /// Stops a node's server. The other nodes find out by themselves.
    pub(crate) fn stop(&self, node: u16) {
        let _within = self.runtime.enter();
        let server = &self.servers[usize::from(node)];
        server.free_all();
        server.close();
    }

    /// Makes a node's server forget all datasets, like a server that is about to exit.
    pub(crate) fn forget_all(&self, node: u16) {
        let _within = self.runtime.enter();
        self.servers[usize::from(node)].free_all();
    }

    /// Tells all nodes that a node is lost, or that it has returned.
    pub(crate) fn announce(&mut self, node: u16, is_lost: bool) {
        self.epoch += 1;
        let address = self.servers[usize::from(node)].address();
        // Only a member that returns has a new incarnation.
        let member = RosterMember { address, incarnation: self.epoch - u32::from(is_lost), is_lost };
        let coordinator = u16::from(node == 0 && is_lost);
        let change = RosterChange { epoch: self.epoch, coordinator, members: vec![(node, member)] };
        for server in &self.servers {
            server.change_roster(&change);
        }
    }

    pub(crate) fn view(&self, node: u16) -> View {
        View::new(Session::attach_to(&self.location, NodeId(node)).unwrap())
    }

    /// Returns the folder of a node's segments.
    pub(crate) fn data_dir(&self, node: u16) -> &Path {
        self.data[usize::from(node)].path()
    }

    /// Writes the files `d/0`, `d/1` … with these lengths, and returns their folder.
    pub(crate) fn write(&self, lens: &[usize]) -> PathBuf {
        self.write_in("d", lens, 0)
    }

    /// Writes files with these lengths into the folder `name`. The first file gets content number `first`, the next one number
    /// `first + 1`, and so on.
    pub(crate) fn write_in(&self, name: &str, lens: &[usize], first: usize) -> PathBuf {
        let folder = self.work.path().join(name);
        fs::create_dir_all(&folder).unwrap();
        for (number, &len) in lens.iter().enumerate() {
            fs::write(folder.join(number.to_string()), content(first + number, len)).unwrap();
        }
        folder
    }

    /// Stages in a source at `/dayfly/d`.
    pub(crate) fn stage(&self, source: &Path) -> Result<Summary, String> {
        self.stage_over(source, false)
    }

    /// Stages in a source at `/dayfly/d`. If `replace` is true, the stage-in may replace a dataset
    /// there.
    pub(crate) fn stage_over(&self, source: &Path, replace: bool) -> Result<Summary, String> {
        self.stage_at(b"d", source, replace)
    }

    /// Stages in a source at a path below `/dayfly`.
    pub(crate) fn stage_at(&self, target: &[u8], source: &Path, replace: bool) -> Result<Summary, String> {
        let request = StageInRequest {
            sources: vec![source.as_os_str().as_encoded_bytes().to_vec()],
            target: target.to_vec(),
            selection: Selection::default(),
            seed: 1,
            replace,
            max_rate: None,
            require_fit: false,
            copies: self.copies,
        };
        let mut outcome = None;
        let see = &mut |event| match event {
            Event::StagedIn(summary) => outcome = Some(Ok(*summary)),
            Event::Failed { reason, .. } => outcome = Some(Err(reason)),
            _ => {}
        };
        self.view(0).session().control(Command::StageIn(request), see).unwrap();
        outcome.unwrap()
    }

    /// Returns each node's status.
    pub(crate) fn status(&self) -> Vec<NodeStatus> {
        let mut found = Vec::new();
        let see = &mut |event| {
            if let Event::Status(status) = event {
                found = status.nodes.into_iter().map(|node| node.status.unwrap()).collect();
            }
        };
        self.view(0).session().control(Command::Status, see).unwrap();
        found
    }

    /// Returns the status of one node. Other nodes may be lost.
    pub(crate) fn status_of(&self, node: u16) -> NodeStatus {
        let mut found = None;
        let see = &mut |event| {
            if let Event::Status(mut status) = event {
                found = Some(status.nodes.swap_remove(usize::from(node)).status.unwrap());
            }
        };
        self.view(node).session().control(Command::Status, see).unwrap();
        found.unwrap()
    }

    /// Sets how many bytes each node may cache.
    pub(crate) fn tune_cache(&self, bytes: u64) {
        let policy = Policy { cache_bytes: Some(bytes), ..Policy::default() };
        self.view(0).session().control(Command::Tune(policy), &mut drop).unwrap();
    }

    /// Returns the path of a node's socket for clients.
    pub(crate) fn socket(&self, node: u16) -> PathBuf {
        self.location.socket(NodeId(node))
    }

    /// Flips a bit in every copy of these bytes, and returns the number of copies.
    pub(crate) fn flip(&self, rest: Rest<'_>, bytes: &[u8]) -> usize {
        let mut flipped = Vec::new();
        self.each_place(rest, bytes, &mut |file, at| {
            // Several descriptors may refer to one file.
            let metadata = file.metadata().unwrap();
            let place = (metadata.dev(), metadata.ino(), at);
            if flipped.contains(&place) {
                return;
            }
            let (mut byte, middle) = ([0], at + bytes.len().min(NEEDLE_LEN) as u64 / 2);
            file.read_exact_at(&mut byte, middle).unwrap();
            byte[0] ^= 0x10;
            file.write_all_at(&byte, middle).unwrap();
            flipped.push(place);
        });
        flipped.len()
    }

    /// Truncates a segment at the position where these bytes begin.
    pub(crate) fn cut(&self, folder: &Path, bytes: &[u8]) {
        self.each_place(Rest::Segments(folder), bytes, &mut |file, at| file.set_len(at).unwrap());
    }

    fn each_place(&self, rest: Rest<'_>, bytes: &[u8], see: &mut dyn FnMut(&fs::File, u64)) {
        for link in fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| entry.ok().map(|entry| entry.path())) {
            let Ok(target) = fs::read_link(&link) else { continue };
            let is_meant = match rest {
                Rest::Arenas => target.to_string_lossy().contains("memfd:dayfly-region"),
                Rest::Segments(folder) => target.starts_with(folder),
            };
            if !is_meant {
                continue;
            }
            let Ok(file) = OpenOptions::new().read(true).write(true).open(&link) else { continue };
            if matches!(rest, Rest::Arenas) && file.metadata().unwrap().len() != self.memory {
                continue;
            }
            for at in find(&file, &bytes[..bytes.len().min(NEEDLE_LEN)]) {
                see(&file, at);
            }
        }
    }
}

/// Returns all offsets in a file at which `needle` begins. Most pages of an arena are zero, and are skipped.
fn find(file: &fs::File, needle: &[u8]) -> Vec<u64> {
    const PAGE_LEN: usize = PAGE_SIZE as usize;
    let zeros = vec![0; PAGE_LEN + needle.len()];
    let mut all = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut all, 0).unwrap();
    let last = all.len().saturating_sub(needle.len());
    let mut found = Vec::new();
    for page in (0..last).step_by(PAGE_LEN) {
        let window = &all[page..all.len().min(page + PAGE_LEN + needle.len())];
        if *window != zeros[..window.len()] {
            let offsets = page..last.min(page + PAGE_LEN);
            found.extend(offsets.filter(|&at| all[at] == needle[0] && all[at..].starts_with(needle)).map(|at| at as u64));
        }
    }
    found
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _within = self.runtime.enter();
        self.leave_alone();
        for server in &self.servers {
            server.free_all();
            server.close();
        }
    }
}
