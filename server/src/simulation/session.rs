//! The session of one seed: a stage-in on a healthy network; then a second one, with readers, while faults happen; then all
//! faults end, and the promises are checked.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{NodeId, SessionId};
use dayfly_meta::limits::{ARENA_LEN_MIN, STAGE_IN_MEMORY_MIN};
use dayfly_meta::wire::control::{Copies, Event, StageInRequest, Summary};
use dayfly_stagein::origin::{SharedFiles, SystemFiles};
use dayfly_transport::{Agreement, Key, Options, Transport};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::faults::{Fault, apply, draw};
use super::jobs::{Jobs, Pool};
use super::net::{Net, SimTransport};
use super::planted::{Buggy, Planted};
use super::random::Random;
use super::reader::{Reader, dataset};
use super::source::{Files, Source, Sources, scratch};
use super::supervisor::{Counts, Supervisor};
use crate::blocking::Blocking;
use crate::coordinator::EVENTS_QUEUE_LEN;
use crate::{Config, Node};

/// This is longer than any session takes. A session that is not over by then has hung.
const HANG: Duration = Duration::from_secs(1800);
/// A stage-in ends within this time, whatever happens, because it only waits for one deadline after another.
const STAGE_IN_MAX: Duration = Duration::from_secs(240);
/// What the error of a stage-in may name as its cause, apart from the paths of sources.
const CAUSES: [&str; 4] = ["node ", CANCELED, "has not heard from the supervisor", "--copies 2 needs at least 2 nodes"];
/// What a user sees who cancels a stage-in.
const CANCELED: &str = "the simulated user canceled it";
/// After this time without faults, everything that was in flight has ended. The longest wait is that of a node that has prepared a
/// dataset and gets no answer.
const QUIET: Duration = Duration::from_secs(180);

/// The outcome of a seed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Outcome {
    pub(super) seed: u64,
    pub(super) reads: u64,
    pub(super) failed_reads: u64,
    pub(super) faults: u64,
    pub(super) stage_ins: u64,
    pub(super) failed_stage_ins: u64,
    /// How often stage-ins have begun again.
    pub(super) restarts: u64,
    pub(super) messages: u64,
    /// How often members were lost and returned.
    pub(super) changes: Counts,
    /// How long the session took by the simulated clock.
    pub(super) took: Duration,
    /// A hash of everything that happened.
    pub(super) trace: u64,
    /// Descriptions of the promises that were broken.
    pub(super) broken: Vec<String>,
}

impl Outcome {
    /// Returns the message about broken promises, if there are any.
    pub(super) fn failure(&self) -> Option<String> {
        (!self.broken.is_empty()).then(|| format!("seed {}: {}", self.seed, self.broken.join("; ")))
    }
}

/// A fault, and when it begins.
pub(super) type TimedFault = (Duration, Fault);

/// How the session of a seed differs from others.
#[derive(Clone, Copy, Default)]
pub(super) struct Variant<'a> {
    /// A bug that is planted in it.
    pub(super) bug: Option<Planted>,
    /// The faults that happen, in place of those that the seed draws.
    pub(super) faults: Option<&'a [TimedFault]>,
    /// Whether each message and each fault is printed.
    pub(super) is_verbose: bool,
}

/// Runs the session of one seed.
pub(super) fn run(seed: u64, sources: &Sources, pool: &Pool, variant: Variant<'_>) -> Outcome {
    let Variant { bug, faults, is_verbose } = variant;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let folder = scratch();
    let mut outcome = runtime.block_on(async {
        let mut random = Random::new(seed);
        let folders = [folder.path(), sources.folder()].map(|path| path.display().to_string()).to_vec();
        let net = Net::new(Random::new(random.next()), Deadlines::DEFAULT, folders, is_verbose);
        let jobs = Jobs::new(Random::new(random.next()), pool.clone());
        let start = Instant::now();
        let session = Session {
            net: net.clone(),
            seed,
            folder: folder.path(),
            report: Arc::default(),
            bug,
            capacity: 16 << 20,
            pfs_streams: 16,
            copies: Copies::Number(1 + u16::from(seed.is_multiple_of(3))),
            files: &|_| Arc::new(SystemFiles),
        };
        if timeout(HANG, session.run(random, sources, jobs.clone(), faults)).await.is_err() {
            session.broken(format!("the session hangs: it is not over after {} s", HANG.as_secs()));
        }
        let mut outcome = session.report.lock().unwrap().clone();
        outcome.broken.extend(jobs.panics().into_iter().map(|panic| format!("a job panicked: {panic}")));
        (outcome.trace, outcome.messages) = net.trace();
        outcome.took = start.elapsed();
        outcome
    });
    outcome.seed = seed;
    outcome
}

pub(super) struct Session<'a> {
    pub(super) net: Arc<Net>,
    pub(super) seed: u64,
    pub(super) folder: &'a Path,
    pub(super) report: Arc<Mutex<Outcome>>,
    pub(super) bug: Option<Planted>,
    /// The room of each node, in bytes.
    pub(super) capacity: u64,
    /// How many reads each node makes at the same time on the parallel file system.
    pub(super) pfs_streams: usize,
    /// How many nodes store each block.
    pub(super) copies: Copies,
    /// How each node reaches the parallel file system.
    pub(super) files: &'a (dyn Fn(NodeId) -> SharedFiles + Sync),
}

impl Session<'_> {
    /// Records a broken promise.
    pub(super) fn broken(&self, what: String) {
        self.net.note(&what);
        self.report.lock().unwrap().broken.push(what);
    }

    async fn run(&self, mut random: Random, sources: &Sources, jobs: Arc<Jobs>, faults: Option<&[TimedFault]>) {
        let nodes = 3 + random.below(2) as u16;
        let servers = self.start(nodes, &mut random, jobs).await;
        let all: Vec<SocketAddr> = servers.iter().map(|server| server.address()).collect();
        servers[0].join(&all, Agreement::Tcp { why: "it is simulated".to_owned() }).await.unwrap();

        let first: Vec<&Source> = vec![&sources.first];
        let asked = &servers[random.below(nodes.into()) as usize];
        let staged = self.stage_in(asked, &first, b"first", std::future::pending()).await;
        if let Err(reason) = staged {
            return self.broken(format!("a stage-in without faults failed: {reason}"));
        }
        self.check_visible(&servers, b"first", &sources.first.files).await;
        // One session in eight renews leases along a tree.
        let tree_width = (self.seed % 8 == 5).then(|| 1 + (self.seed / 8 % 2) as u16);
        let supervisor = Supervisor::start(self.net.clone(), &servers, tree_width, self.bug);

        // From here on, faults happen.
        let faults = faults.map_or_else(|| draw(&mut random, nodes), <[_]>::to_vec);
        let is_truncated = faults.iter().any(|(_, fault)| matches!(fault, Fault::Truncate));
        // Three out of four seeds leave out the last source: it is the largest, and simulating it takes the most time.
        let (changed, left_out) = (random.below(3) as usize, if random.is_one_in(4) { random.below(3) as usize } else { 3 });
        let truncated = is_truncated.then(|| Sources::copy(&sources.second[changed], self.folder));
        let unchanged = sources.second.iter().enumerate().filter(|(number, _)| *number != left_out || *number == changed);
        let unchanged = unchanged.filter(|(number, _)| !is_truncated || *number != changed).map(|(_, source)| source);
        let second: Vec<&Source> = unchanged.chain(&truncated).collect();
        let files: Files = second.iter().flat_map(|source| source.files.clone()).collect();
        let asked = &servers[random.below(nodes.into()) as usize];
        let cancel = faults.iter().find(|(_, fault)| matches!(fault, Fault::Cancel)).map(|(at, _)| *at);
        let cancelled = async {
            match cancel {
                Some(at) => sleep(at).await,
                None => std::future::pending().await,
            }
        };
        let mut readers = JoinSet::new();
        for server in &servers {
            let reader = self.reader(server);
            readers.spawn(reader.read_some(Random::new(random.next()), sources.first.files.clone()));
        }
        let failing = self.apply_faults(faults, &supervisor, truncated.as_ref());
        let stage_in = self.stage_in(asked, &second, b"second", cancelled);
        let done = Notify::new();
        let ((staged, ()), third) = tokio::join!(
            async { (tokio::join!(stage_in, failing), done.notify_one()).0 },
            self.stage_in_after_return(&supervisor, &servers, &first, &done)
        );
        self.check_cause(&staged, &second);
        third.iter().for_each(|staged| self.check_cause(staged, &first));
        while readers.join_next().await.is_some() {}

        // All faults end, and what is still in flight gets time to finish.
        self.net.heal();
        self.net.note("all faults end");
        sleep(QUIET).await;
        supervisor.broken().into_iter().for_each(|what| self.broken(what));
        let is_killed = |server: &Arc<Node>| self.net.health(server.parts.config.node).is_killed;
        let alive: Vec<Arc<Node>> = servers.iter().filter(|server| !is_killed(server)).cloned().collect();
        self.check_visible(&alive, b"first", &sources.first.files).await;
        self.read_all(&alive, b"first", &sources.first.files).await;
        let visible = self.check_agreement(&alive, b"second", &staged);
        if let Some(staged) = &third
            && self.check_agreement(&alive, b"third", staged) == alive.len()
        {
            self.check_visible(&alive, b"third", &sources.first.files).await;
        }
        // If a source was truncated, the files that the dataset has depend on when that happened, so they are not checked.
        if visible > 0 && visible == alive.len() && !is_truncated {
            self.check_visible(&alive, b"second", &files).await;
            let one = random.below(alive.len() as u64) as usize;
            self.read_all(&alive[one..=one], b"second", &files).await;
        }
        self.check_copies(&alive);
        self.report.lock().unwrap().changes = supervisor.counts();
        drop(supervisor);
        drop(alive);
        self.end(servers).await;
    }

    pub(super) async fn start(&self, nodes: u16, random: &mut Random, jobs: Arc<Jobs>) -> Vec<Arc<Node>> {
        let mut servers = Vec::new();
        let buggy = NodeId(1 + random.below(u64::from(nodes) - 1) as u16);
        for node in (0..nodes).map(NodeId) {
            let data_dir = self.folder.join(format!("data-{node}"));
            std::fs::create_dir(&data_dir).unwrap();
            let address: SocketAddr = format!("10.0.0.{}:4000", node.0 + 1).parse().unwrap();
            let config = Config {
                session: SessionId(self.seed.to_le_bytes()),
                key: Arc::new(Key::new([7; 32])),
                encrypt: false,
                node,
                is_replacement: false,
                listen: address,
                network: Options::default(),
                runtime_dir: self.folder.to_owned(),
                data_dirs: vec![data_dir],
                capacity: self.capacity,
                growth: None,
                memory: ARENA_LEN_MIN,
                prefix: b"/dayfly".to_vec(),
                verify_reads: false,
                workers: 1 + random.below(3) as usize,
                decoders: 1,
                pfs_streams: self.pfs_streams,
                recovery_rate: 256 << 20,
                recovery_timeout: std::time::Duration::ZERO,
                stage_in_memory: STAGE_IN_MEMORY_MIN,
                deadlines: self.net.deadlines,
            };
            let transport = SimTransport { net: self.net.clone(), me: node };
            let transport: Arc<dyn Transport> = match self.bug {
                Some(bug) if bug.is_in_transport(node == buggy) => Arc::new(Buggy { inner: transport, bug }),
                _ => Arc::new(transport),
            };
            let jobs: Arc<dyn Blocking> = jobs.clone();
            servers.push(Node::start_on(config, transport, address, jobs, (self.files)(node)).await.unwrap());
        }
        servers
    }

    pub(super) async fn stage_in(
        &self,
        server: &Arc<Node>,
        sources: &[&Source],
        target: &[u8],
        cancelled: impl Future<Output = ()>,
    ) -> Result<(), String> {
        self.stage_in_as(server, self.request(sources, target), cancelled).await.map(drop)
    }

    /// Returns the request for a stage-in.
    pub(super) fn request(&self, sources: &[&Source], target: &[u8]) -> StageInRequest {
        StageInRequest {
            sources: sources.iter().map(|source| source.path.as_os_str().as_encoded_bytes().to_vec()).collect(),
            target: target.to_vec(),
            seed: self.seed,
            copies: self.copies,
            ..StageInRequest::default()
        }
    }

    /// Stages in as requested, on a node.
    pub(super) async fn stage_in_as(
        &self,
        server: &Arc<Node>,
        request: StageInRequest,
        cancelled: impl Future<Output = ()>,
    ) -> Result<Box<Summary>, String> {
        let (sender, mut events) = mpsc::channel(EVENTS_QUEUE_LEN);
        let (target, start) = (request.target.clone(), Instant::now());
        let stage_in = tokio::spawn(crate::coordinator::stage_in(server.parts.peers.clone(), request, sender));
        let end = async {
            loop {
                match events.recv().await {
                    Some(Event::StagedIn(summary)) => return Ok(summary),
                    Some(Event::Failed { reason, .. }) => return Err(reason),
                    Some(Event::Restarted { .. }) => self.report.lock().unwrap().restarts += 1,
                    Some(_) => {}
                    None => return Err("the stage-in ended without a result".to_owned()),
                }
            }
        };
        let ended = tokio::select! {
            biased;
            ended = end => ended,
            () = cancelled => Err(CANCELED.to_owned()),
        };
        drop(events);
        // The stage-in must end on its own, even if nobody receives its events.
        let ended = if timeout(HANG / 2, stage_in).await.is_err() { Err("the stage-in does not end".to_owned()) } else { ended };
        let took = start.elapsed();
        self.net.note(&format!(
            "the stage-in of {} ends after {took:?}: {:?}",
            String::from_utf8_lossy(&target),
            ended.as_ref().err()
        ));
        let node = server.parts.config.node;
        let is_member = !self.net.health(node).is_killed && server.parts.peers.roster().is_live(node);
        if ended.is_ok() && is_member && dataset(server, &target).is_none() {
            self.broken(format!("node {node} was told that a stage-in has succeeded, and does not show its dataset"));
        }
        if took > STAGE_IN_MAX {
            self.broken(format!("a stage-in took {} s: {ended:?}", took.as_secs()));
        }
        let mut report = self.report.lock().unwrap();
        report.stage_ins += 1;
        report.failed_stage_ins += u64::from(ended.is_err());
        ended
    }

    /// Applies each fault when its time comes, and waits until all have ended.
    async fn apply_faults(&self, faults: Vec<(Duration, Fault)>, supervisor: &Supervisor, truncated: Option<&Source>) {
        let start = Instant::now();
        let mut applied = JoinSet::new();
        for (at, fault) in faults {
            sleep(at.saturating_sub(start.elapsed())).await;
            self.net.note(&format!("{fault:?}"));
            self.report.lock().unwrap().faults += 1;
            if let (Fault::Truncate, Some(truncated)) = (&fault, truncated) {
                let file = std::fs::OpenOptions::new().write(true).open(&truncated.path).unwrap();
                file.set_len(file.metadata().unwrap().len() / 3).unwrap();
            }
            let (net, supervisor) = (self.net.clone(), supervisor.shared().clone());
            applied.spawn(async move { apply(&net, &supervisor, fault).await });
        }
        while applied.join_next().await.is_some() {}
    }

    /// Stages in a dataset as soon as a node has returned, while it still looks for what it missed. Returns `None` if no node
    /// returns before `done`.
    async fn stage_in_after_return(
        &self,
        supervisor: &Supervisor,
        servers: &[Arc<Node>],
        sources: &[&Source],
        done: &Notify,
    ) -> Option<Result<(), String>> {
        let returned = tokio::select! {
            biased;
            returned = supervisor.returned() => returned,
            () = done.notified() => return None,
        };
        // An even seed asks the node that has returned, an odd one another.
        let asked = (returned.index() + (self.seed % 2) as usize) % servers.len();
        Some(self.stage_in(&servers[asked], sources, b"third", std::future::pending()).await)
    }

    /// Checks that the error of a stage-in names a cause that a user can understand.
    fn check_cause(&self, staged: &Result<(), String>, sources: &[&Source]) {
        let Err(reason) = staged else { return };
        let has_cause = CAUSES.iter().any(|cause| reason.contains(cause))
            || sources.iter().any(|source| reason.contains(&source.path.display().to_string()));
        if !has_cause {
            self.broken(format!("the error of a stage-in names no cause: {reason}"));
        }
    }

    /// Checks that all live nodes show a dataset or none does. Returns how many show it.
    pub(super) fn check_agreement(&self, alive: &[Arc<Node>], target: &[u8], staged: &Result<(), String>) -> usize {
        let (visible, name) =
            (alive.iter().filter(|server| dataset(server, target).is_some()).count(), String::from_utf8_lossy(target));
        if visible != 0 && visible != alive.len() {
            self.broken(format!("{visible} of {} nodes show {name}", alive.len()));
        }
        if staged.is_ok() && visible == 0 && !alive.is_empty() {
            self.broken(format!("a stage-in succeeded, and no node shows {name}"));
        }
        visible
    }

    /// Checks that the nodes show the dataset with all of its files.
    pub(super) async fn check_visible(&self, servers: &[Arc<Node>], target: &[u8], files: &Files) {
        for server in servers {
            let node = server.parts.config.node;
            let Some(dataset) = dataset(server, target) else {
                self.broken(format!("node {node} does not show {}", String::from_utf8_lossy(target)));
                continue;
            };
            if dataset.catalog().header().samples as usize != files.len() {
                self.broken(format!("node {node} shows {} of {} samples", dataset.catalog().header().samples, files.len()));
            }
        }
    }

    pub(super) fn reader(&self, server: &Arc<Node>) -> Reader {
        Reader { net: self.net.clone(), server: server.clone(), report: self.report.clone(), limit: self.net.deadlines.server }
    }

    /// Reads all files on all nodes. No read may fail, because other nodes read the blocks of killed nodes from their sources.
    pub(super) async fn read_all(&self, servers: &[Arc<Node>], target: &[u8], files: &Files) {
        let mut reading = JoinSet::new();
        for server in servers {
            let reader = self.reader(server);
            let (target, files) = (target.to_vec(), files.clone());
            reading.spawn(async move {
                let files: Vec<_> = files.iter().map(|(path, expected)| (&path[..], &expected[..])).collect();
                for batch in files.chunks(8) {
                    for reason in reader.read(&target, batch).await {
                        reader.broken(format!("a read on a healthy network failed: {reason}"));
                    }
                }
            });
        }
        while reading.join_next().await.is_some() {}
    }

    /// Ends the session, and checks that nothing is left of it.
    pub(super) async fn end(&self, servers: Vec<Arc<Node>>) {
        // Blocks that were read last are cached on the drives a little later, once they are synced.
        sleep(Duration::from_secs(5)).await;
        for server in &servers {
            let node = server.parts.config.node;
            if self.net.health(node).is_killed {
                // Nothing that a dead process held is left.
                server.free_all();
                continue;
            }
            if server.parts.stage_ins.is_any() {
                self.broken(format!("node {node} still has a stage-in"));
            }
            if server.parts.coordinator.is_any_running() {
                self.broken(format!("node {node} still coordinates a stage-in"));
            }
            let (_, leases) = server.parts.arena.usage();
            if leases != 0 {
                self.broken(format!("node {node} has {leases} leases without a holder"));
            }
            server.free_all();
            if server.parts.store.used() != 0 {
                self.broken(format!("node {node} has not freed {} bytes of room", server.parts.store.used()));
            }
        }
        let weak: Vec<_> = servers.iter().map(|server| (server.parts.config.node, Arc::downgrade(&server.parts.peers))).collect();
        servers.iter().for_each(|server| server.close());
        drop(servers);
        sleep(QUIET).await;
        for (node, peers) in weak {
            if peers.strong_count() > 0 {
                self.broken(format!("a task of node {node} is still running after its end"));
            }
        }
        let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
        if tasks > 0 {
            self.broken(format!("{tasks} tasks are still running after the end"));
        }
        for node in self.net.leaks() {
            self.broken(format!("node {node} has a slot that was never freed"));
        }
        for node in std::fs::read_dir(self.folder).unwrap().map(|entry| entry.unwrap().path()) {
            let is_empty = node.is_file() || std::fs::read_dir(&node).unwrap().next().is_none();
            if node.extension().is_some_and(|extension| extension == "sock") || !is_empty {
                self.broken(format!("'{}' was left behind", node.display()));
            }
        }
    }
}
