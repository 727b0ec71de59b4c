//! Strikes nodes at each step of a stage-in: whatever node it is, and whether it dies, stands still for a moment or until it is lost,
//! either the stage-in begins again, or it fails and nothing is visible, or all samples can be read. If no node is lost, it only waits.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{BlockId, NodeId};
use dayfly_meta::wire::control::{Copies, Summary};
use dayfly_stagein::origin::SystemFiles;
use dayfly_transport::Agreement;
use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use super::faults::{Blow, Fault, apply, strike_nodes};
use super::jobs::{Jobs, Pool};
use super::net::Net;
use super::random::Random;
use super::reader::dataset;
use super::session::Session;
use super::source::{Files, Source, scratch};
use super::supervisor::Supervisor;
use crate::Node;

const NODES: u16 = 4;
const TARGET: &[u8] = b"data";
/// If this variable is set, as in `.ci/long`, all cases run.
const ALL: &str = "DAYFLY_SIMULATION_ALL_STEPS";
/// Otherwise one in so many does, beginning with this one, so that one that once failed is among them.
const ONE_IN: usize = 11;
const FIRST: usize = 8;
/// After this time, each blow is over.
const BLOWS_END: Duration = Duration::from_secs(90);

/// Messages between nodes with which a coordinator makes and publishes a stage-in, and those of its workers.
const STEPS: [(&str, u32); 12] = [
    ("Begin", 2),
    ("NextUnits", 3),
    ("Batch", 2),
    ("Finish", 1),
    ("Finish", 3),
    ("Run", 1),
    ("Prepare", 2),
    ("Catalog", 1),
    ("Copy", 2),
    ("Commit", 1),
    ("Commit", 3),
    ("Settle", 2),
];
const BLOWS: [Blow; 3] = [Blow::Kill, Blow::Freeze(Duration::from_secs(15)), Blow::Freeze(Duration::from_secs(45))];
/// The nodes that are struck at the same time. Node 0 coordinates.
const VICTIMS: [&[u16]; 6] = [&[0], &[1], &[2], &[3], &[0, 2], &[1, 3]];

/// How a stage-in ended, and how long it took.
type Ended = (Result<(), String>, Duration);

/// Steps at which some of the sources have been read and others not.
const READING: [(&str, u32); 5] = [("NextUnits", 5), ("NextUnits", 7), ("NextUnits", 9), ("NextUnits", 10), ("NextUnits", 11)];

/// What is staged in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    PlainTar,
    CompressedTar,
    /// A compressed tar beside plain tars, each of which is a unit of its own.
    Mixed,
}

/// The sources, by form, and their files.
type Sources = [(Form, Vec<Source>, Files); 3];

fn sources(folder: &Path) -> Sources {
    let lens: Vec<usize> = (0..40).map(|number| number * 1171 % 30_000).chain([300_000]).collect();
    let of = |form, sources: Vec<Source>| {
        let files = sources.iter().flat_map(|source| source.files.clone()).collect();
        (form, sources, files)
    };
    let large = |name: &&str| Source::write(folder, name, &[1_060_000, 3000]);
    let mut mixed = vec![Source::write_compressed(folder, "small", &lens[..20])];
    mixed.extend(["a", "b", "c", "d", "e", "f"].iter().map(large));
    [
        of(Form::PlainTar, vec![Source::write(folder, "plain", &lens)]),
        of(Form::CompressedTar, vec![Source::write_compressed(folder, "packed", &lens)]),
        of(Form::Mixed, mixed),
    ]
}

struct Case {
    seed: u64,
    form: Form,
    copies: u16,
    step: (&'static str, u32),
    victims: &'static [u16],
    blow: Blow,
}

impl Case {
    fn all() -> Vec<Self> {
        let mut cases = Vec::new();
        for (form, steps) in [(Form::CompressedTar, &STEPS[..]), (Form::PlainTar, &STEPS), (Form::Mixed, &READING)] {
            for copies in 1..=3 {
                for &step in steps {
                    for victims in VICTIMS {
                        for blow in BLOWS {
                            cases.push(Self { seed: cases.len() as u64, form, copies, step, victims, blow });
                        }
                    }
                }
            }
        }
        cases
    }

    /// Returns whether samples may be lost: their only copies were on nodes that have died after the dataset had begun to appear.
    fn may_lose_samples(&self) -> bool {
        let is_dead = matches!(self.blow, Blow::Kill);
        let begins_to_appear = matches!(self.step.0, "Commit" | "Settle");
        is_dead && begins_to_appear && self.form != Form::PlainTar && usize::from(self.copies) <= self.victims.len()
    }

    /// Returns whether the supervisor declares the struck nodes lost.
    fn loses_nodes(&self) -> bool {
        !matches!(self.blow, Blow::Freeze(lasts) if lasts < Deadlines::DEFAULT.lost_after)
    }

    /// Plays the case. Returns the promises that it broke, and whether the stage-in had the step.
    fn play(&self, sources: &Sources, pool: &Pool) -> (Option<String>, bool) {
        let (_, sources, files) = sources.iter().find(|(form, ..)| *form == self.form).unwrap();
        let sources: Vec<&Source> = sources.iter().collect();
        let play =
            async |session: &Session<'_>, random: &mut Random, jobs| session.strike(self, (&sources, files), random, jobs).await;
        in_session(self.seed, self.copies, pool, play)
    }
}

/// Runs a test in a simulated session. Returns the promises that it broke, and the test's result.
fn in_session<T>(
    seed: u64,
    copies: u16,
    pool: &Pool,
    test: impl AsyncFnOnce(&Session<'_>, &mut Random, Arc<Jobs>) -> T,
) -> (Option<String>, T) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let folder = scratch();
    runtime.block_on(async {
        let mut random = Random::new(seed);
        let folders = vec![folder.path().display().to_string()];
        let net = Net::new(Random::new(random.next()), Deadlines::DEFAULT, folders, false);
        let jobs = Jobs::new(Random::new(random.next()), pool.clone());
        let session = Session {
            net,
            seed,
            folder: folder.path(),
            report: Arc::default(),
            bug: None,
            capacity: 16 << 20,
            pfs_streams: 16,
            copies: Copies::Number(copies),
            files: &|_| Arc::new(SystemFiles),
        };
        let result = test(&session, &mut random, jobs.clone()).await;
        let mut outcome = session.report.lock().unwrap().clone();
        outcome.broken.extend(jobs.panics().into_iter().map(|panic| format!("a job panicked: {panic}")));
        (outcome.failure(), result)
    })
}

impl std::fmt::Display for Case {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { form, copies, step: (message, count), victims, blow, .. } = self;
        write!(formatter, "{form:?}, {copies} copies, nodes {victims:?} at {message} {count}: {blow:?}")
    }
}

impl Session<'_> {
    /// Starts servers that are one session.
    async fn start_joined(&self, random: &mut Random, jobs: Arc<Jobs>) -> Vec<Arc<Node>> {
        let servers = self.start(NODES, random, jobs).await;
        let all: Vec<_> = servers.iter().map(|server| server.address()).collect();
        servers[0].join(&all, Agreement::Tcp { why: "it is simulated".to_owned() }).await.unwrap();
        servers
    }

    /// Interrupts a stage-in whose node then does not reach the coordinator for a while, and at once stages in to the same target on
    /// another node. Returns how that ended, and how long it took.
    async fn stage_in_after_an_interrupted_one(&self, source: &Source, random: &mut Random, jobs: Arc<Jobs>) -> Ended {
        let servers = self.start_joined(random, jobs).await;
        let supervisor = Supervisor::start(self.net.clone(), &servers, None, None);
        let net = &self.net;
        // The first stage-in does not get past this.
        net.change_link(NodeId(0), NodeId(3), |link| link.is_silent = true);
        let interrupted = async {
            sleep(Duration::from_secs(1)).await;
            net.change_link(NodeId(0), NodeId(1), |link| link.is_silent = true);
        };
        let sources = [source];
        let first = self.stage_in(&servers[1], &sources, TARGET, interrupted);
        let second = async {
            sleep(Duration::from_millis(1500)).await;
            let start = Instant::now();
            let staged = self.stage_in(&servers[2], &[source], TARGET, std::future::pending()).await;
            (staged, start.elapsed())
        };
        let healing = async {
            sleep(Duration::from_secs(8)).await;
            [1, 3].into_iter().for_each(|node| net.change_link(NodeId(0), NodeId(node), |link| link.is_silent = false));
        };
        let (_, ended, ()) = tokio::join!(first, second, healing);
        drop(supervisor);
        self.end(servers).await;
        ended
    }

    /// Stages in while something is wrong with links, from the start or from a step on. `faults` gets the node that takes the step. Returns
    /// how the stage-in ended, and how long it took.
    async fn stage_in_beside(
        &self,
        source: &Source,
        (random, jobs): (&mut Random, Arc<Jobs>),
        from: Option<(&'static str, u32)>,
        faults: impl FnOnce(NodeId) -> Vec<Fault> + Send + 'static,
    ) -> Ended {
        let servers = self.start_joined(random, jobs).await;
        let supervisor = Supervisor::start(self.net.clone(), &servers, None, None);
        let (net, shared) = (self.net.clone(), supervisor.shared().clone());
        let cutting = tokio::spawn(async move {
            let node = match from {
                Some((message, count)) => net.trap(message, count).await.expect("a stage-in has this step"),
                None => NodeId(0),
            };
            join_all(faults(node).into_iter().map(|fault| apply(&net, &shared, fault))).await;
        });
        tokio::task::yield_now().await;
        let start = Instant::now();
        let staged = self.stage_in(&servers[1], &[source], TARGET, std::future::pending()).await;
        let took = start.elapsed();
        self.check_stored(&servers[1]);
        cutting.await.unwrap();
        sleep(BLOWS_END).await;
        self.check_agreement(&servers, TARGET, &staged);
        drop(supervisor);
        self.end(servers).await;
        (staged, took)
    }

    /// Checks that a stage-in's summary, which `asked` has received, counts no copy that no member has, and says what the stage-in has
    /// encountered, also if its coordinator was lost after it had decided to publish the dataset.
    fn check_summary(&self, asked: &Node, servers: &[Arc<Node>], summary: &Summary) {
        let roster = asked.parts.peers.roster();
        let members = servers.iter().filter(|server| roster.is_live(server.parts.config.node));
        let shown: Vec<_> = members.filter_map(|server| dataset(server, TARGET)).collect();
        let Some(catalog) = shown.first().map(|dataset| dataset.catalog()) else { return };
        if summary.counts.files != u64::from(catalog.header().samples) {
            self.broken(format!("the summary counts {} files, not {}", summary.counts.files, catalog.header().samples));
        }
        let missing = |block| {
            let (_, len) = catalog.block(block).unwrap();
            let held = shown.iter().filter(|dataset| dataset.has_own_copy(block)).count() as u64;
            len * u64::from(summary.copies).saturating_sub(held)
        };
        let missing_bytes: u64 = (0..catalog.header().blocks).map(BlockId).map(missing).sum();
        if summary.copies > 1 && summary.uncopied_bytes < missing_bytes {
            self.broken(format!("{missing_bytes} bytes of copies are missing, the summary says {}", summary.uncopied_bytes));
        }
    }

    /// Checks that a stage-in has waited for nodes that only stood still, and has stored everything.
    fn check_patience(&self, staged: &Result<(), String>, asked: &Node) {
        self.check_restarts(staged);
        self.check_stored(asked);
    }

    fn check_restarts(&self, staged: &Result<(), String>) {
        let restarts = self.report.lock().unwrap().restarts;
        if let Err(reason) = staged {
            self.broken(format!("the stage-in failed, although no node was lost: {reason}"));
        } else if restarts > 0 {
            self.broken("the stage-in began again, although no node was lost".to_owned());
        }
    }

    /// Checks that no block was left in its source.
    fn check_stored(&self, asked: &Node) {
        let Some(dataset) = dataset(asked, TARGET) else { return };
        let catalog = dataset.catalog();
        let unstored = (0..catalog.header().blocks).filter(|block| !catalog.is_stored(BlockId(*block))).count();
        if unstored > 0 {
            self.broken(format!("{unstored} blocks are not stored, although no node was lost"));
        }
    }

    /// Returns whether the stage-in had the step at which the case strikes.
    async fn strike(&self, case: &Case, (sources, files): (&[&Source], &Files), random: &mut Random, jobs: Arc<Jobs>) -> bool {
        let servers = self.start_joined(random, jobs).await;
        let supervisor = Supervisor::start(self.net.clone(), &servers, None, None);
        let (net, step, victims, blow) = (self.net.clone(), case.step, case.victims, case.blow);
        let striking = tokio::spawn(async move { strike_nodes(&net, step, victims, blow).await });
        let asked = &servers[(0..NODES).find(|node| !case.victims.contains(node)).map(usize::from).unwrap()];
        let staged = self.stage_in_as(asked, self.request(sources, TARGET), std::future::pending()).await;
        if let Ok(summary) = &staged {
            self.check_summary(asked, &servers, summary);
        }
        let staged = staged.map(drop);
        if !case.loses_nodes() {
            self.check_patience(&staged, asked);
        }
        sleep(BLOWS_END).await;
        self.net.heal();
        let is_struck = striking.await.unwrap();
        sleep(BLOWS_END).await;
        let is_killed = |server: &Arc<Node>| self.net.health(server.parts.config.node).is_killed;
        let alive: Vec<Arc<Node>> = servers.iter().filter(|server| !is_killed(server)).cloned().collect();
        let visible = self.check_agreement(&alive, TARGET, &staged);
        if visible == alive.len() {
            self.check_visible(&alive, TARGET, files).await;
            if !case.may_lose_samples() {
                self.check_copies(&alive);
                self.read_all(&alive, TARGET, files).await;
            }
        }
        drop((supervisor, alive));
        self.end(servers).await;
        is_struck
    }
}

/// SEMANTICS: "When `stage-in` returns, the dataset is visible on every node."
/// SEMANTICS: "A stage-in waits for nodes that stand still, until they continue or are lost: it does not begin again, and stores what it
/// would have stored otherwise."
#[test]
fn a_blow_at_any_step_of_a_stage_in_loses_no_sample() {
    let folder = scratch();
    let sources = sources(folder.path());
    let (first, stride) = if std::env::var_os(ALL).is_some() { (0, 1) } else { (FIRST, ONE_IN) };
    let cases = Case::all();
    let pool = Pool::default();
    let (mut broken, mut struck) = (Vec::new(), HashSet::new());
    for case in cases.iter().skip(first).step_by(stride) {
        let (failure, is_struck) = case.play(&sources, &pool);
        broken.extend(failure.map(|failure| format!("{case}: {failure}")));
        struck.extend(is_struck.then_some(case.step));
    }
    // A stage-in need not have all steps: the coordinator may read all sources itself.
    let missing: Vec<_> = STEPS.iter().chain(&READING).filter(|step| !struck.contains(step)).collect();
    assert!(missing.is_empty(), "no stage-in has these steps: {missing:?}");
    assert!(broken.is_empty(), "{} cases broke a promise:\n{}", broken.len(), broken[..broken.len().min(20)].join("\n"));
}

/// SEMANTICS: "A member that only the coordinator does not reach is waited for: 15 s longer than it takes to declare a node lost. Then the
/// stage-in fails, and the error names both nodes. If the stage-in has begun before, it may begin again once more, and wait as long."
#[test]
fn a_stage_in_waits_for_a_node_that_only_its_coordinator_does_not_reach() {
    let folder = scratch();
    let source = Source::write(folder.path(), "plain", &[1000; 40]);
    let deadlines = Deadlines::DEFAULT;
    let patience = deadlines.lost_after + deadlines.node_silent;
    let cases = [(None, patience / 3, true), (None, 4 * patience, false), (Some(("Batch", 2)), 4 * patience, false)];
    for (from, lasts, succeeds) in cases {
        let cut = async |session: &Session<'_>, random: &mut Random, jobs| {
            session
                .stage_in_beside(&source, (random, jobs), from, move |_| vec![Fault::Silence(NodeId(0), NodeId(2), lasts)])
                .await
        };
        let (broken, (staged, took)) = in_session(1, 1, &Pool::default(), cut);
        assert_eq!(broken, None);
        match staged {
            Ok(()) => assert!(succeeds && took < lasts + deadlines.node_silent, "{took:?}"),
            Err(reason) => {
                assert!(!succeeds && reason.contains("node 0") && reason.contains("node 2"), "{reason}");
                let rounds = if from.is_some() { 3 } else { 2 };
                assert!(took > patience && took < rounds * patience, "{took:?}: {reason}");
            }
        }
    }
}

/// The owner of a batch says that the bytes have not arrived, for example because the sender stood still.
#[test]
fn a_batch_that_did_not_reach_its_owner_in_time_is_offered_again() {
    let folder = scratch();
    let sources =
        [Source::write(folder.path(), "plain", &[1000; 40]), Source::write_compressed(folder.path(), "packed", &[1000; 40])];
    // Answers come within the deadline of a batch, but its bytes do not arrive within that of the owner.
    let slow = Duration::from_secs(3);
    for source in &sources {
        for seed in 0..4 {
            let slow_down = move |sender: NodeId| {
                let owners = (0..NODES).map(NodeId).filter(move |owner| *owner != sender);
                owners.map(|owner| Fault::Slow(sender, owner, slow, 5 * slow)).collect()
            };
            let stage = async |session: &Session<'_>, random: &mut Random, jobs| {
                let ended = session.stage_in_beside(source, (random, jobs), Some(("Batch", 1)), slow_down).await;
                session.check_restarts(&ended.0);
                ended
            };
            let (broken, (staged, _)) = in_session(seed, 1, &Pool::default(), stage);
            assert_eq!((broken, staged), (None, Ok(())), "seed {seed}");
        }
    }
}

/// SEMANTICS: "A `stage-in` to the target of an interrupted one that has not ended yet waits until it has."
#[test]
fn a_stage_in_waits_for_an_interrupted_one_whose_node_cannot_say_so() {
    let folder = scratch();
    let source = Source::write(folder.path(), "plain", &[1000; 40]);
    let stage = async |session: &Session<'_>, random: &mut Random, jobs| {
        session.stage_in_after_an_interrupted_one(&source, random, jobs).await
    };
    let (broken, (staged, took)) = in_session(1, 1, &Pool::default(), stage);
    assert_eq!((broken, staged), (None, Ok(())));
    assert!(took > Duration::from_secs(6), "{took:?}");
}
