//! The schedule of a run is a pure function of the seed. Times are in permille of the deadline after which a peer is lost, so that
//! a schedule has the same meaning with any deadlines.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::chaos::data::Version;

pub(crate) const NODES: u16 = 4;
pub(crate) const READERS: usize = 6;
/// Readers with these numbers read epochs, one on each of two nodes. Another node's server may die for good, but not both of these.
pub(crate) const EPOCH_READERS: [usize; 2] = [0, 1];
/// A run ends when an epoch reader whose node lives has read this many epochs.
pub(crate) const EPOCHS: u32 = 5;
const STEPS: usize = 7;
/// One seed in so many has a session in network namespaces.
const NAMESPACES_INTERVAL: u64 = 3;
/// One seed in so many has a session whose leases are renewed along a tree, as in large sessions.
const LEASE_TREE_INTERVAL: u64 = 4;
const TAGS: u8 = 3;
/// By the time a server has been stopped or cut off for this long, the supervisor has declared it lost (`lost_after` is six times as long as the
/// deadline after which a peer is lost).
pub(crate) const UNTIL_LOST: u32 = 7000;
/// A node that is cut off for this long is lost, and its server has ended because it heard nothing of the supervisor.
const UNTIL_ENDED: u32 = 21_000;
/// How often a run may kill the server of one node that the supervisor replaces. After that, the pauses before a new one is started
/// are long.
const KILLS_MAX: usize = 2;

/// Where the servers run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// All on this machine, in one network.
    Local,
    /// Each in a network namespace, so that links can fail.
    Namespaces,
}

/// The command that starts the session, and ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Launch {
    /// `up` and `down`.
    Up,
    /// `run`, whose command ends with this status.
    Run(u8),
}

/// The full plan of a run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Schedule {
    pub(crate) seed: u64,
    pub(crate) place: Place,
    pub(crate) launch: Launch,
    pub(crate) memory: &'static str,
    pub(crate) options: Vec<&'static str>,
    /// Whether the supervisor starts new servers in the place of those that die.
    pub(crate) is_rejoining: bool,
    pub(crate) interfaces: [Interface; READERS],
    pub(crate) steps: Vec<Step>,
}

/// The interface through which a reader reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum Interface {
    /// Calls `read_at`, file by file, in parts.
    Plain,
    /// Calls `read_many`.
    Batch,
    /// Calls `read_at` along an order that was submitted earlier: the order of an epoch, which contains each sample once.
    Order,
    /// Runs `cat` under `dayfly exec`.
    Preload,
}

/// A stage-in, a fault, or both at the same time.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Step {
    pub(crate) stage_in: Option<StageIn>,
    pub(crate) fault: Option<Fault>,
    /// The time from the beginning of the step to the beginning of the fault.
    pub(crate) delay: u32,
    /// The duration of the fault.
    pub(crate) lasts: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Folder,
    Tar,
    TarGz,
}

/// A disturbance of the stage-in itself, in addition to the step's fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Twist {
    None,
    /// The command `stage-in` gets SIGTERM after this time.
    Interrupt(u32),
    /// The command `stage-in` gets SIGKILL after this time.
    Kill(u32),
    /// The source is removed after this time.
    SourceVanishes(u32),
    /// The source is cut to half of its length after this time.
    SourceShrinks(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StageIn {
    pub(crate) version: Version,
    pub(crate) form: Form,
    /// The node that the command connects to.
    pub(crate) node: u16,
    /// The value of the option `--copies`.
    pub(crate) copies: &'static str,
    /// The stage-in's rate limit in MB/s. Without a limit, the stage-in would finish before a fault could hit it.
    pub(crate) rate: Option<u32>,
    pub(crate) twist: Twist,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Victim {
    Server(u16),
    Reader(usize),
}

/// A fault of a drive. With `nth` equal to 5, every fifth call is affected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Drive {
    /// Reads fail.
    ReadFails { nth: u32 },
    /// Reads return 0 bytes, as at the end of a file. (`strace` cannot inject a short read that returns correct bytes.)
    ReadGivesNothing { nth: u32 },
    /// Reads are delayed.
    ReadIsSlow { ms: u32 },
    /// Writes fail.
    WriteFails { nth: u32 },
    /// Space cannot be reserved.
    NoRoom { nth: u32 },
    /// Syncs fail.
    SyncFails { nth: u32 },
}

/// A fault of the parallel file system that holds the sources, as one server sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sources {
    /// Every `nth` read fails. With `nth` greater than 1, an attempt to read again succeeds.
    ReadFails { nth: u32 },
    /// Reads are delayed.
    ReadIsSlow { ms: u32 },
}

/// A fault of the network, which only runs in namespaces have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// The node's link is down.
    Link(u16),
    /// What the node sends is lost; what others send to it arrives.
    Sends(u16),
    /// What one node sends to another is lost, and nothing else.
    OneWay { from: u16, to: u16 },
    /// The node's power is off: its server dies, and nobody hears of it.
    Power(u16),
}

impl Cut {
    /// Returns the nodes that do not hear each other, and neither what they should.
    pub(crate) fn nodes(self) -> Vec<u16> {
        match self {
            Self::Link(node) | Self::Sends(node) | Self::Power(node) => vec![node],
            Self::OneWay { from, to } => vec![from, to],
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Stop(Victim),
    KillReader(usize),
    Drive(Victim, Drive),
    FullDrive,
    Tune(&'static [&'static str]),
    KillServer(u16),
    KillSupervisor,
    Sources(u16, Sources),
    Cut(Cut),
}

/// Chooses the steps of a schedule, and remembers what they do to the servers.
struct Choices {
    random: StdRng,
    place: Place,
    is_rejoining: bool,
    interfaces: [Interface; READERS],
    generations: [u32; TAGS as usize],
    /// The nodes whose servers have died for good.
    dead: Vec<u16>,
    /// The nodes whose servers have been killed and replaced.
    replaced: Vec<u16>,
}

impl Schedule {
    pub(crate) fn new(seed: u64) -> Self {
        let place = if seed.is_multiple_of(NAMESPACES_INTERVAL) { Place::Namespaces } else { Place::Local };
        let mut random = StdRng::seed_from_u64(seed);
        let interfaces = std::array::from_fn(|reader| {
            let any = *[Interface::Plain, Interface::Batch, Interface::Batch, Interface::Order, Interface::Preload]
                .choose(&mut random)
                .unwrap();
            if EPOCH_READERS.contains(&reader) { Interface::Order } else { any }
        });
        let memory = *["40MiB", "64MiB", "256MiB"].choose(&mut random).unwrap();
        let mut options = [&[][..], &[], &["--verify-reads"], &["--encrypt"]].choose(&mut random).unwrap().to_vec();
        let launch = if random.random_ratio(1, 3) { Launch::Run(random.random_range(1..100)) } else { Launch::Up };
        let is_rejoining = random.random_ratio(1, 2);
        if !is_rejoining {
            options.push("--no-rejoin");
        }
        options
            .extend([&[][..], &[], &["--recovery-rate", "0"], &["--recovery-rate", "1MiB"]].choose(&mut random).unwrap().iter());
        if seed % LEASE_TREE_INTERVAL == 2 {
            options.extend(["--lease-tree-width", "1"]);
        }
        let mut choices = Choices {
            random,
            place,
            is_rejoining,
            interfaces,
            generations: [0; TAGS as usize],
            dead: Vec::new(),
            replaced: Vec::new(),
        };
        let mut steps = vec![Step { stage_in: Some(choices.stage_in(0, true)), fault: None, delay: 0, lasts: 0 }];
        steps.extend((1..STEPS).map(|number| choices.step(number)));
        Self { seed, place, launch, memory, options, is_rejoining, interfaces, steps }
    }
}

impl Schedule {
    /// Returns a schedule without faults.
    pub(crate) fn calm(seed: u64) -> Self {
        let steps = Self::new(seed).steps;
        let first =
            steps.first().and_then(|step| step.stage_in).map(|stage_in| StageIn { form: Form::Tar, copies: "1", ..stage_in });
        let waits = Step { stage_in: None, fault: None, delay: 0, lasts: 0 };
        Self {
            seed,
            place: Place::Local,
            launch: Launch::Up,
            memory: "64MiB",
            options: Vec::new(),
            is_rejoining: true,
            interfaces: [
                Interface::Order,
                Interface::Order,
                Interface::Plain,
                Interface::Batch,
                Interface::Preload,
                Interface::Plain,
            ],
            steps: vec![Step { stage_in: first, ..waits.clone() }, waits],
        }
    }
}

impl Schedule {
    /// Returns whether nodes may have no room for samples that they read again.
    pub(crate) fn limits_room(&self) -> bool {
        let limits = |fault: &Fault| match fault {
            Fault::Tune(options) => options.contains(&"--cache"),
            Fault::Drive(_, Drive::WriteFails { .. } | Drive::NoRoom { .. } | Drive::SyncFails { .. }) | Fault::FullDrive => true,
            _ => false,
        };
        self.steps.iter().filter_map(|step| step.fault.as_ref()).any(limits)
    }
}

impl Choices {
    fn stage_in(&mut self, tag: u8, is_first: bool) -> StageIn {
        let live: Vec<u16> = (0..NODES).filter(|node| !self.dead.contains(node)).collect();
        let random = &mut self.random;
        let version = Version { tag, generation: self.generations[usize::from(tag)] };
        self.generations[usize::from(tag)] += 1;
        let form = *[Form::Folder, Form::Tar, Form::TarGz].choose(random).unwrap();
        let copies = *["1", "1", "2", "auto"].choose(random).unwrap();
        let at = random.random_range(10..200);
        let twist = match random.random_range(0..14) {
            _ if is_first => Twist::None,
            0 | 1 => Twist::Interrupt(at),
            2 => Twist::Kill(at),
            3 => Twist::SourceVanishes(at),
            4 => Twist::SourceShrinks(at),
            _ => Twist::None,
        };
        let is_slow = twist != Twist::None || random.random_ratio(3, 5);
        let rate = (is_slow && !is_first).then(|| random.random_range(5..30));
        // A few commands go to a dead server.
        let any = random.random_range(0..NODES);
        let node = if random.random_ratio(1, 8) { any } else { *live.choose(random).unwrap() };
        StageIn { version, form, node, copies, rate, twist }
    }

    fn step(&mut self, number: usize) -> Step {
        let is_last = number == STEPS - 1;
        let (fault, lasts) = match self.random.random_range(0..24) {
            _ if is_last && self.random.random_ratio(1, 5) => (Some(Fault::KillSupervisor), 0),
            _ if self.place == Place::Namespaces && self.random.random_ratio(2, 3) => self.cut(),
            0..4 => self.stop(),
            4 => (Some(Fault::Stop(Victim::Reader(self.random.random_range(0..READERS)))), self.random.random_range(40..1600)),
            5 => (Some(Fault::KillReader(self.random.random_range(0..READERS))), 0),
            6..10 => (Some(drive(&mut self.random, &self.interfaces)), self.moment()),
            10..13 => (Some(sources(&mut self.random)), self.moment()),
            13 => (Some(Fault::FullDrive), self.moment()),
            14 | 15 => (Some(Fault::Tune(tune(&mut self.random))), 0),
            16..20 => (self.kill(), 0),
            _ => (None, 0),
        };
        let is_staged = fault.is_none() || self.random.random_ratio(1, 2);
        let tag = self.random.random_range(0..TAGS);
        let mut stage_in = is_staged.then(|| self.stage_in(tag, false));
        // A stage-in that begins again lists its sources again. It would stage in what a source holds after it shrank.
        let may_begin_again = matches!(fault, Some(Fault::KillServer(_) | Fault::Cut(_) | Fault::Stop(_)));
        if let Some(StageIn { twist, .. }) = &mut stage_in
            && may_begin_again
            && let Twist::SourceShrinks(at) = *twist
        {
            *twist = Twist::SourceVanishes(at);
        }
        Step { stage_in, fault, delay: self.random.random_range(0..200), lasts }
    }

    /// Most faults are shorter than the time after which a peer is lost.
    fn moment(&mut self) -> u32 {
        if self.random.random_ratio(1, 5) { self.random.random_range(500..1200) } else { self.random.random_range(40..400) }
    }

    /// Chooses a node whose server may be lost: another node lives then, and one with an epoch reader.
    fn victim(&mut self) -> Option<u16> {
        let epochs: Vec<u16> = EPOCH_READERS.iter().map(|&reader| reader as u16 % NODES).collect();
        let may_be_lost = |node: &u16| {
            let live = |other: &u16| other != node && !self.dead.contains(other);
            !self.dead.contains(node) && epochs.iter().any(live)
        };
        let nodes: Vec<u16> = (0..NODES).filter(may_be_lost).collect();
        nodes.choose(&mut self.random).copied()
    }

    fn stop(&mut self) -> (Option<Fault>, u32) {
        let is_until_lost = self.random.random_ratio(1, 3);
        match self.victim() {
            Some(node) => (Some(Fault::Stop(Victim::Server(node))), if is_until_lost { UNTIL_LOST } else { self.moment() }),
            None => (None, 0),
        }
    }

    fn kill(&mut self) -> Option<Fault> {
        let node = self.victim()?;
        if self.is_rejoining {
            if self.replaced.iter().filter(|replaced| **replaced == node).count() >= KILLS_MAX {
                return None;
            }
            self.replaced.push(node);
        } else {
            self.dead.push(node);
        }
        Some(Fault::KillServer(node))
    }

    fn cut(&mut self) -> (Option<Fault>, u32) {
        let Some(node) = self.victim() else { return (None, 0) };
        let others: Vec<u16> = (0..NODES).filter(|other| *other != node && !self.dead.contains(other)).collect();
        let to = *others.choose(&mut self.random).unwrap();
        let cut = match self.random.random_range(0..6) {
            0..2 => Cut::Link(node),
            2 => Cut::Sends(node),
            3 => Cut::OneWay { from: node, to },
            _ => Cut::Power(node),
        };
        let lasts = match cut {
            Cut::Power(_) => UNTIL_LOST,
            Cut::OneWay { .. } => self.random.random_range(300..3000),
            // Shorter than the time after which a peer is lost, shorter than `--lost-after`, shorter than the lease, or longer than all.
            _ => *[300, 800, 2500, UNTIL_LOST, UNTIL_ENDED].choose(&mut self.random).unwrap(),
        };
        (Some(Fault::Cut(cut)), lasts)
    }
}

fn sources(random: &mut StdRng) -> Fault {
    let nth = *[1, 2, 3, 7].choose(random).unwrap();
    let sources = if random.random_ratio(1, 2) {
        Sources::ReadFails { nth }
    } else {
        Sources::ReadIsSlow { ms: random.random_range(1..60) }
    };
    Fault::Sources(random.random_range(0..NODES), sources)
}

fn drive(random: &mut StdRng, interfaces: &[Interface; READERS]) -> Fault {
    let reader = random.random_range(0..READERS);
    let victim = match random.random_range(0..5) {
        // For a reader that starts programs, the faults would hit the program files before the reader reads a byte of the
        // namespace.
        0 if interfaces[reader] != Interface::Preload => Victim::Reader(reader),
        _ => Victim::Server(random.random_range(0..NODES)),
    };
    let nth = *[1, 2, 5, 20].choose(random).unwrap();
    let drive = match random.random_range(0..8) {
        0..3 => Drive::ReadFails { nth },
        3 => Drive::ReadGivesNothing { nth },
        4 => Drive::ReadIsSlow { ms: random.random_range(1..100) },
        _ if matches!(victim, Victim::Reader(_)) => Drive::ReadFails { nth },
        5 => Drive::WriteFails { nth },
        6 => Drive::NoRoom { nth },
        _ => Drive::SyncFails { nth },
    };
    Fault::Drive(victim, drive)
}

fn tune(random: &mut StdRng) -> &'static [&'static str] {
    const ALL: [&[&str]; 6] = [
        &["--cache", "off"],
        &["--cache", "all"],
        &["--cache", "10MiB"],
        &["--prefetch", "off"],
        &["--prefetch", "auto"],
        &["--prefetch", "64", "--prefetch-memory", "8MiB"],
    ];
    ALL.choose(random).unwrap()
}

impl std::fmt::Display for Schedule {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { seed, place, launch, memory, options, interfaces, .. } = self;
        writeln!(formatter, "seed {seed}: {place:?}, {launch:?}, memory {memory}, {options:?}, readers {interfaces:?}")?;
        for (number, step) in self.steps.iter().enumerate() {
            writeln!(formatter, "  step {number}: {step}")?;
        }
        Ok(())
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(StageIn { version, form, node, copies, rate, twist }) = self.stage_in {
            let (tag, generation) = (version.tag, version.generation);
            write!(
                formatter,
                "stage-in of t{tag} g{generation} from {form:?} by node {node}, copies {copies}, rate {rate:?}, {twist:?}; "
            )?;
        }
        match self.fault {
            Some(fault) => write!(formatter, "{fault:?} after {} for {}", self.delay, self.lasts),
            None => Ok(()),
        }
    }
}

#[test]
fn a_schedule_is_a_pure_function_of_its_seed() {
    assert_eq!(Schedule::new(7), Schedule::new(7));
    assert_ne!(Schedule::new(7), Schedule::new(8));
}

/// What a run of the check's seeds must contain.
const KINDS: [&str; 28] = [
    "a server stands still until it is lost",
    "a server stands still for a moment",
    "a reader stands still",
    "a reader is killed",
    "an option is tuned",
    "a drive is full",
    "the supervisor is killed",
    "sources cannot be read",
    "sources are slow",
    "drive reads fail",
    "drive reads give nothing",
    "drive reads are slow",
    "drive writes fail",
    "several servers are lost for good",
    "a server is replaced",
    "a link is down",
    "what a node sends is lost",
    "one direction between two nodes is cut",
    "a node's power is off",
    "`run`",
    "`up`",
    "a stage-in is interrupted",
    "a source vanishes or shrinks",
    "a dataset is replaced",
    "1 copy",
    "2 copies",
    "auto copies",
    "leases along a tree",
];

impl Schedule {
    /// Returns which of [`KINDS`] the schedule contains.
    fn kinds(&self) -> Vec<&'static str> {
        let kills = self.steps.iter().filter(|step| matches!(step.fault, Some(Fault::KillServer(_)))).count();
        let of_fault = |step: &Step| match step.fault? {
            Fault::Stop(Victim::Server(_)) if step.lasts == UNTIL_LOST => Some("a server stands still until it is lost"),
            Fault::Stop(Victim::Server(_)) => Some("a server stands still for a moment"),
            Fault::Stop(Victim::Reader(_)) => Some("a reader stands still"),
            Fault::KillReader(_) => Some("a reader is killed"),
            Fault::Tune(_) => Some("an option is tuned"),
            Fault::FullDrive => Some("a drive is full"),
            Fault::KillSupervisor => Some("the supervisor is killed"),
            Fault::KillServer(_) if self.is_rejoining => Some("a server is replaced"),
            Fault::KillServer(_) => (kills >= 2).then_some("several servers are lost for good"),
            Fault::Sources(_, Sources::ReadFails { .. }) => Some("sources cannot be read"),
            Fault::Sources(_, Sources::ReadIsSlow { .. }) => Some("sources are slow"),
            Fault::Drive(_, Drive::ReadFails { .. }) => Some("drive reads fail"),
            Fault::Drive(_, Drive::ReadGivesNothing { .. }) => Some("drive reads give nothing"),
            Fault::Drive(_, Drive::ReadIsSlow { .. }) => Some("drive reads are slow"),
            Fault::Drive(_, Drive::WriteFails { .. } | Drive::NoRoom { .. } | Drive::SyncFails { .. }) => {
                Some("drive writes fail")
            }
            Fault::Cut(Cut::Link(_)) => Some("a link is down"),
            Fault::Cut(Cut::Sends(_)) => Some("what a node sends is lost"),
            Fault::Cut(Cut::OneWay { .. }) => Some("one direction between two nodes is cut"),
            Fault::Cut(Cut::Power(_)) => Some("a node's power is off"),
        };
        let of_stage_in = |stage_in: StageIn| {
            let twist = match stage_in.twist {
                Twist::None => None,
                Twist::Interrupt(_) | Twist::Kill(_) => Some("a stage-in is interrupted"),
                Twist::SourceVanishes(_) | Twist::SourceShrinks(_) => Some("a source vanishes or shrinks"),
            };
            let copies = match stage_in.copies {
                "1" => "1 copy",
                "2" => "2 copies",
                _ => "auto copies",
            };
            [twist, (stage_in.version.generation > 0).then_some("a dataset is replaced"), Some(copies)]
        };
        let mut kinds = vec![if matches!(self.launch, Launch::Run(_)) { "`run`" } else { "`up`" }];
        kinds.extend(self.options.contains(&"--lease-tree-width").then_some("leases along a tree"));
        kinds.extend(self.steps.iter().filter_map(of_fault));
        kinds.extend(self.steps.iter().filter_map(|step| step.stage_in).flat_map(of_stage_in).flatten());
        kinds
    }
}

/// Chooses few of the first seeds whose schedules together have all kinds.
fn covering() -> Vec<u64> {
    let all: Vec<Vec<&str>> = (0..20_000).map(|seed| Schedule::new(seed).kinds()).collect();
    let mut missing: Vec<&str> = KINDS.to_vec();
    let mut chosen = Vec::new();
    while !missing.is_empty() {
        let gain = |seed: &usize| missing.iter().filter(|kind| all[*seed].contains(kind)).count();
        let best = (0..all.len()).rev().max_by_key(gain).filter(|best| gain(best) > 0).expect("a seed with what is missing");
        missing.retain(|kind| !all[best].contains(kind));
        chosen.push(best as u64);
    }
    chosen
}

#[test]
fn the_seeds_of_the_check_contain_every_kind_of_fault() {
    let found: Vec<&str> = crate::chaos::SEEDS.iter().flat_map(|&seed| Schedule::new(seed).kinds()).collect();
    let missing: Vec<&&str> = KINDS.iter().filter(|kind| !found.contains(kind)).collect();
    assert!(missing.is_empty(), "no seed has {missing:?}; these seeds have all kinds: {:?}", covering());
}

#[test]
fn a_schedule_always_leaves_a_server_and_an_epoch_reader() {
    for seed in 0..2000 {
        let schedule = Schedule::new(seed);
        let is_killed = |node: u16| schedule.steps.iter().any(|step| step.fault == Some(Fault::KillServer(node)));
        let lives = |reader: &usize| schedule.is_rejoining || !is_killed(*reader as u16 % NODES);
        assert!(EPOCH_READERS.iter().any(lives), "{schedule}");
    }
}
