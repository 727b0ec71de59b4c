//! The schedule of a run is a pure function of the seed. Times are in permille of the deadline after which a peer is lost, so that
//! a schedule has the same meaning with any deadlines.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::data::Version;

pub(crate) const NODES: u16 = 4;
pub(crate) const READERS: usize = 6;
const STEPS: usize = 7;
const TAGS: u8 = 3;
/// By the time a server has been stopped for this long, the supervisor has declared it lost (`lost_after` is six times as long as the
/// deadline after which a peer is lost).
pub(crate) const STOPPED_UNTIL_LOST: u32 = 7000;

/// The full plan of a run.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Schedule {
    pub(crate) seed: u64,
    pub(crate) memory: &'static str,
    pub(crate) options: Vec<&'static str>,
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
    /// Calls `read_at` along an order that was submitted earlier.
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
    /// The stage-in's rate limit in MB/s. Without a limit, the stage-in would finish before a fault could hit it.
    pub(crate) rate: Option<u32>,
    pub(crate) twist: Twist,
}

impl StageIn {
    /// Returns whether any node can read the samples from the source again, one by one.
    pub(crate) fn leaves_a_readable_source(&self) -> bool {
        self.form != Form::TarGz && !matches!(self.twist, Twist::SourceVanishes(_) | Twist::SourceShrinks(_))
    }
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Stop(Victim),
    KillReader(usize),
    Drive(Victim, Drive),
    FullDrive,
    Tune(&'static [&'static str]),
    KillServer(u16),
    KillSupervisor,
}

impl Schedule {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let interfaces = std::array::from_fn(|_| {
            *[Interface::Plain, Interface::Batch, Interface::Batch, Interface::Order, Interface::Preload]
                .choose(&mut random)
                .unwrap()
        });
        let memory = *["40MiB", "64MiB", "256MiB"].choose(&mut random).unwrap();
        let options = [&[][..], &[], &["--verify-reads"], &["--encrypt"]].choose(&mut random).unwrap().to_vec();
        let mut generations = [0; TAGS as usize];
        let mut stage_in = |random: &mut StdRng, tag: u8, is_first: bool| {
            let version = Version { tag, generation: generations[usize::from(tag)] };
            generations[usize::from(tag)] += 1;
            let form = *[Form::Folder, Form::Tar, Form::TarGz].choose(random).unwrap();
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
            let rate = (is_slow && !is_first).then(|| random.random_range(10..60));
            StageIn { version, form, node: random.random_range(0..NODES), rate, twist }
        };
        let mut steps = vec![Step { stage_in: Some(stage_in(&mut random, 0, true)), fault: None, delay: 0, lasts: 0 }];
        let mut killed = Vec::new();
        for number in 1..STEPS {
            let is_last = number == STEPS - 1;
            let fault = match random.random_range(0..20) {
                _ if is_last && random.random_ratio(1, 5) => Some(Fault::KillSupervisor),
                0..3 => Some(Fault::Stop(Victim::Server(random.random_range(0..NODES)))),
                3 | 4 => Some(Fault::Stop(Victim::Reader(random.random_range(0..READERS)))),
                5 | 6 => Some(Fault::KillReader(random.random_range(0..READERS))),
                7..13 => Some(drive(&mut random, &interfaces)),
                13 => Some(Fault::FullDrive),
                14 | 15 => Some(Fault::Tune(tune(&mut random))),
                16 | 17 if number > 2 && killed.is_empty() => {
                    let node = random.random_range(0..NODES);
                    killed.push(node);
                    Some(Fault::KillServer(node))
                }
                _ => None,
            };
            let is_staged = fault.is_none() || random.random_ratio(1, 2);
            let tag = random.random_range(0..TAGS);
            let stage_in = is_staged.then(|| stage_in(&mut random, tag, false));
            // Most stops are shorter than the time after which a peer is lost.
            let lasts = if random.random_ratio(1, 5) { random.random_range(500..800) } else { random.random_range(40..400) };
            let lasts = match fault {
                // The supervisor declares the server lost. It returns when it continues.
                Some(Fault::Stop(Victim::Server(node))) if number > 2 && killed.is_empty() && random.random_ratio(1, 4) => {
                    killed.push(node);
                    STOPPED_UNTIL_LOST
                }
                Some(Fault::Stop(Victim::Reader(_))) if random.random_ratio(1, 3) => random.random_range(1100..1600),
                _ => lasts,
            };
            steps.push(Step { stage_in, fault, delay: random.random_range(0..200), lasts });
        }
        Self { seed, memory, options, interfaces, steps }
    }
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
        writeln!(formatter, "seed {}: memory {}, {:?}, readers {:?}", self.seed, self.memory, self.options, self.interfaces)?;
        for (number, step) in self.steps.iter().enumerate() {
            writeln!(formatter, "  step {number}: {step}")?;
        }
        Ok(())
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if let Some(StageIn { version, form, node, rate, twist }) = self.stage_in {
            let (tag, generation) = (version.tag, version.generation);
            write!(formatter, "stage-in of t{tag} g{generation} from {form:?} by node {node}, rate {rate:?}, {twist:?}; ")?;
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

#[test]
fn the_first_twenty_schedules_contain_every_kind_of_fault() {
    let all: Vec<Schedule> = (1..=20).map(Schedule::new).collect();
    let steps = || all.iter().flat_map(|schedule| &schedule.steps);
    let has_fault = |is: &dyn Fn(&Fault) -> bool| steps().any(|step| step.fault.as_ref().is_some_and(is));
    assert!(has_fault(&|fault| matches!(fault, Fault::Stop(Victim::Server(_)))));
    assert!(has_fault(&|fault| matches!(fault, Fault::Stop(Victim::Reader(_)))));
    assert!(has_fault(&|fault| matches!(fault, Fault::KillReader(_))));
    assert!(has_fault(&|fault| matches!(fault, Fault::Tune(_))));
    assert!(has_fault(&|fault| matches!(fault, Fault::FullDrive)));
    assert!(has_fault(&|fault| matches!(fault, Fault::KillServer(_))));
    assert!(has_fault(&|fault| matches!(fault, Fault::KillSupervisor)));
    assert!(has_fault(&|fault| matches!(fault, Fault::Drive(_, Drive::ReadFails { .. }))));
    assert!(has_fault(&|fault| matches!(fault, Fault::Drive(_, Drive::ReadGivesNothing { .. }))));
    assert!(has_fault(&|fault| matches!(fault, Fault::Drive(_, Drive::ReadIsSlow { .. }))));
    assert!(has_fault(&|fault| matches!(
        fault,
        Fault::Drive(_, Drive::WriteFails { .. } | Drive::NoRoom { .. } | Drive::SyncFails { .. })
    )));
    let has_twist = |is: &dyn Fn(&Twist) -> bool| steps().any(|step| step.stage_in.is_some_and(|stage_in| is(&stage_in.twist)));
    assert!(has_twist(&|twist| matches!(twist, Twist::Interrupt(_) | Twist::Kill(_))));
    assert!(has_twist(&|twist| matches!(twist, Twist::SourceVanishes(_) | Twist::SourceShrinks(_))));
    assert!(steps().any(|step| step.stage_in.is_some_and(|stage_in| stage_in.version.generation > 0)), "a dataset is replaced");
}
