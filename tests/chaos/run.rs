//! Performs one run: a session of four nodes, readers on all nodes, and the steps of a schedule. The first failure ends the run.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use dayfly_client::locate::SessionFolder;
use dayfly_meta::id::NodeId;

use crate::causes::{Event, Interval, Observed, Observer, classify, explains};
use crate::data::{Contents, Version};
use crate::deadlines;
use crate::harness::{Cluster, Ground, signal, strace, text};
use crate::inject;
use crate::leftovers::{Descriptors, taken};
use crate::log::Line;
use crate::reader::{now_ms, visible};
use crate::readers::{self, Reader};
use crate::schedule::{Fault, NODES, READERS, STOPPED_UNTIL_LOST, Schedule, StageIn, Step, Twist, Victim};
use crate::stage_ins::{Ended, Expected, RunningStageIn, expected};

/// The size of the file system that a run mounts as its data dir, if it can mount one. The file system has room for a few datasets
/// and their cached copies, and little more.
const DRIVE_LEN: u64 = 640 << 20;

/// Counts of a run that found no failure.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) operations: u64,
    pub(crate) errors: u64,
    pub(crate) injected: usize,
    pub(crate) skipped: usize,
}

pub(crate) struct Run {
    pub(crate) schedule: Schedule,
    pub(crate) cluster: Option<Cluster>,
    /// The session's location, which is still needed after the session has ended.
    pub(crate) location: SessionFolder,
    /// The mounted file system for data; `None` without root.
    pub(crate) drive: Option<PathBuf>,
    pub(crate) taken_before: u64,
    pub(crate) contents: Contents,
    pub(crate) readers: Vec<Reader>,
    pub(crate) stop: PathBuf,
    /// The visible version of each tag.
    pub(crate) visible: BTreeMap<u8, Version>,
    /// The versions whose samples every node can read from their sources.
    pub(crate) with_sources: BTreeSet<Version>,
    pub(crate) dead: Vec<u16>,
    pub(crate) is_over: bool,
    pub(crate) intervals: Vec<Interval>,
    pub(crate) descriptors: BTreeMap<u16, Descriptors>,
    pub(crate) datasets_before: usize,
    pub(crate) tally: Tally,
}

/// Runs the schedule of a seed to its end.
pub(crate) fn run(seed: u64) -> Result<Tally, String> {
    let mut run = Run::start(Schedule::new(seed));
    let steps = run.schedule.steps.clone();
    for (number, step) in steps.iter().enumerate() {
        run.step(step).map_err(|failure| format!("step {number} ({step}): {failure}{}", run.logs()))?;
        if number == 0 {
            run.begin_to_read();
        }
    }
    run.end().map_err(|failure| format!("at the end: {failure}{}", run.logs()))?;
    Ok(std::mem::take(&mut run.tally))
}

impl Run {
    fn start(schedule: Schedule) -> Self {
        let ground = Ground::new();
        let drive = ground.data.path().to_owned();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={DRIVE_LEN}"), "none"]).arg(&drive).stderr(Stdio::null());
        let drive = mount.status().is_ok_and(|status| status.success()).then_some(drive);
        let taken_before = taken(ground.data.path());
        let stop = ground.at("stop");
        let nodes = NODES.to_string();
        let divisor = deadlines::divisor().to_string();
        let arguments =
            ["up", "--local", &nodes, "--memory", schedule.memory, "--capacity", "140MiB", "--deadlines-divisor", &divisor];
        let id = ground.ok(&[&arguments[..], &schedule.options].concat()).trim().to_owned();
        let cluster = Cluster { ground, id };
        Self {
            contents: Contents::new(schedule.seed),
            schedule,
            location: cluster.location(),
            cluster: Some(cluster),
            drive,
            taken_before,
            readers: Vec::new(),
            stop,
            visible: BTreeMap::new(),
            with_sources: BTreeSet::new(),
            dead: Vec::new(),
            is_over: false,
            intervals: Vec::new(),
            descriptors: BTreeMap::new(),
            datasets_before: 0,
            tally: Tally::default(),
        }
    }

    pub(crate) fn cluster(&self) -> &Cluster {
        self.cluster.as_ref().unwrap()
    }

    /// Starts the readers once the first dataset is visible, and records the open descriptors for comparison at the end.
    fn begin_to_read(&mut self) {
        let pids = self.cluster().pids();
        self.descriptors = pids.into_iter().map(|(node, pid)| (node, Descriptors::of(pid))).collect();
        self.datasets_before = self.visible.len();
        for reader in 0..READERS {
            let interface = Some(self.schedule.interfaces[reader]);
            let task = readers::task(self.cluster(), self.schedule.seed, reader, 0, reader as u16 % NODES, interface, &self.stop);
            self.readers.push(Reader::start(self.cluster(), task));
        }
    }

    fn step(&mut self, step: &Step) -> Result<(), String> {
        let expected = expected(step, &self.dead);
        let mut stage_in = step.stage_in.map(|plan| {
            let old = self.visible.get(&plan.version.tag).copied();
            if let Some(old) = old {
                self.begin(Event::Replaced(old));
            }
            if plan.leaves_a_readable_source() {
                self.with_sources.insert(plan.version);
            }
            RunningStageIn::start(self.cluster.as_ref().unwrap(), &mut self.contents, plan, old.is_some())
        });
        let mut ended = None;
        let begin = Instant::now();
        if let Some(fault) = step.fault {
            while begin.elapsed() < deadlines::of_schedule(step.delay) {
                self.look(&mut stage_in, &mut ended)?;
            }
            self.fault(fault, step.lasts, &mut stage_in, &mut ended)?;
        }
        while stage_in.is_some() {
            self.look(&mut stage_in, &mut ended)?;
        }
        if let (Some(plan), Some(ended)) = (step.stage_in, ended) {
            self.judge(step, plan, expected, &ended)?;
            self.end_event(|event| matches!(event, Event::Replaced(_)));
        }
        // Let the readers work alone for a moment.
        let begin = Instant::now();
        while begin.elapsed() < deadlines::of_schedule(40) {
            self.look(&mut None, &mut None)?;
        }
        Ok(())
    }

    /// Injects a fault and ends it after its duration.
    fn fault(
        &mut self,
        fault: Fault,
        lasts: u32,
        stage_in: &mut Option<RunningStageIn>,
        ended: &mut Option<Ended>,
    ) -> Result<(), String> {
        let is_until_lost = lasts == STOPPED_UNTIL_LOST;
        let lasts = deadlines::of_schedule(lasts);
        let pid = self.pid_of(fault);
        self.begin(Event::Fault(fault));
        match fault {
            Fault::Stop(victim) => {
                let Some(pid) = pid else { return Ok(()) };
                let begin = Instant::now();
                self.signal(victim, pid, Signal::SIGSTOP);
                let mut passed = self.pass(lasts, stage_in, ended);
                if let (Victim::Server(node), true, true) = (victim, is_until_lost, passed.is_ok()) {
                    let is_lost = |run: &Self| run.is_lost(node) == Some(true);
                    passed =
                        self.wait_until("a stopped server is declared lost", deadlines::of_lease(), stage_in, ended, is_lost);
                }
                self.signal(victim, pid, Signal::SIGCONT);
                if let Victim::Reader(reader) = victim {
                    self.readers[reader].was_stopped(begin.elapsed());
                }
                passed?;
                if let (Victim::Server(node), true) = (victim, is_until_lost) {
                    let is_back = |run: &Self| run.is_lost(node) == Some(false);
                    self.wait_until("a server returns after it was lost", deadlines::of_lease(), stage_in, ended, is_back)?;
                }
            }
            Fault::KillReader(reader) => {
                self.readers[reader].kill();
                let mut task = self.readers[reader].task.clone();
                task.incarnation += 1;
                task = readers::task(self.cluster(), task.seed, reader, task.incarnation, task.node, task.interface, &self.stop);
                self.readers[reader] = Reader::start(self.cluster(), task);
            }
            Fault::Drive(victim, drive) => {
                let Some(pid) = pid.filter(|_| strace::is_possible()) else {
                    self.tally.skipped += 1;
                    return Ok(());
                };
                let injection = inject::begin(pid, victim, drive, self.cluster().work.path());
                let passed = self.pass(lasts, stage_in, ended);
                self.tally.injected += injection?.end();
                passed?;
            }
            Fault::FullDrive => self.fill_drive(lasts, stage_in, ended)?,
            Fault::Tune(options) => {
                self.command(&[&["tune"], options].concat())?;
            }
            Fault::KillServer(node) => {
                self.dead.push(node);
                if let Some(pid) = pid {
                    signal(pid, Signal::SIGKILL);
                }
            }
            Fault::KillSupervisor => {
                self.is_over = true;
                if let Some(pid) = self.location.supervisor() {
                    signal(pid, Signal::SIGKILL);
                }
                let gone = |run: &Self| run.location.live_nodes().is_empty();
                self.wait_until("servers without a supervisor exit", deadlines::of_lease(), stage_in, ended, gone)?;
            }
        }
        if !matches!(fault, Fault::KillServer(_) | Fault::KillSupervisor) {
            self.end_event(|event| matches!(event, Event::Fault(other) if other == fault));
        }
        if let Some(stage_in) = stage_in {
            stage_in.disturbed = Instant::now();
        }
        Ok(())
    }

    /// Returns whether another node counts a node as lost; `None` if that is not known.
    fn is_lost(&self, node: u16) -> Option<bool> {
        let asked = (0..NODES).find(|other| *other != node && !self.dead.contains(other))?;
        let mut command = self.cluster().dayfly();
        command.args(["status", "--json"]).env("DAYFLY_SESSION", &self.cluster().id).env("DAYFLY_NODE", asked.to_string());
        // The command fails if a node does not answer and is not lost.
        let output = crate::harness::output_of(&mut command);
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
        Some(status["nodes"][usize::from(node)]["lost_for_ms"].is_u64())
    }

    fn pid_of(&self, fault: Fault) -> Option<i32> {
        match fault {
            Fault::Stop(Victim::Reader(reader)) | Fault::Drive(Victim::Reader(reader), _) => Some(self.readers[reader].pid()),
            Fault::Stop(Victim::Server(node)) | Fault::Drive(Victim::Server(node), _) | Fault::KillServer(node) => {
                self.location.pid(NodeId(node))
            }
            _ => None,
        }
    }

    fn signal(&self, victim: Victim, pid: i32, number: Signal) {
        match victim {
            Victim::Server(_) => signal(pid, number),
            Victim::Reader(reader) => self.readers[reader].send(number),
        }
    }

    fn fill_drive(
        &mut self,
        lasts: Duration,
        stage_in: &mut Option<RunningStageIn>,
        ended: &mut Option<Ended>,
    ) -> Result<(), String> {
        let Some(drive) = &self.drive else {
            eprintln!("a full drive is NOT tested: only root can mount a file system of its own");
            self.tally.skipped += 1;
            return Ok(());
        };
        let filler = drive.join("filler");
        let file = fs::File::create(&filler).unwrap();
        let free = DRIVE_LEN.saturating_sub(taken(drive));
        // This fails if a server takes some of the space at the same time; the drive is then almost full.
        let _ = nix::fcntl::fallocate(&file, nix::fcntl::FallocateFlags::empty(), 0, free.saturating_sub(64 << 10) as i64);
        drop(file);
        let passed = self.pass(lasts, stage_in, ended);
        fs::remove_file(&filler).unwrap();
        passed
    }

    /// Watches the readers and the stage-in for a while.
    fn pass(&mut self, time: Duration, stage_in: &mut Option<RunningStageIn>, ended: &mut Option<Ended>) -> Result<(), String> {
        let begin = Instant::now();
        while begin.elapsed() < time {
            self.look(stage_in, ended)?;
        }
        Ok(())
    }

    pub(crate) fn wait_until(
        &mut self,
        what: &str,
        limit: Duration,
        stage_in: &mut Option<RunningStageIn>,
        ended: &mut Option<Ended>,
        condition: impl Fn(&Self) -> bool,
    ) -> Result<(), String> {
        let deadline = Instant::now() + limit;
        while !condition(self) {
            self.look(stage_in, ended)?;
            if Instant::now() > deadline {
                return Err(format!("HANGS: waited {limit:?}, but this never happened: {what}"));
            }
        }
        Ok(())
    }

    /// Checks all readers and the stage-in once, and sleeps for a moment.
    pub(crate) fn look(&mut self, stage_in: &mut Option<RunningStageIn>, ended: &mut Option<Ended>) -> Result<(), String> {
        let mut readers = std::mem::take(&mut self.readers);
        let failures: Vec<String> = readers.iter_mut().flat_map(|reader| self.look_at(reader)).collect();
        self.readers = readers;
        if !failures.is_empty() {
            return Err(failures.join("\n"));
        }
        if let Some(running) = stage_in
            && let Some(end) = running.look()?
        {
            (*stage_in, *ended) = (None, Some(end));
        }
        std::thread::sleep(Duration::from_millis(10));
        Ok(())
    }

    /// Returns a reader's failures since the last call.
    pub(crate) fn look_at(&mut self, reader: &mut Reader) -> Vec<String> {
        let mut failures = Vec::new();
        for line in reader.look(&mut failures) {
            let Line::Done { what, begin_ms, end_ms, error } = line else { continue };
            self.tally.operations += 1;
            if let Some(error) = error {
                self.tally.errors += 1;
                failures.extend(self.unexplained(&what, &error, reader.observer(), begin_ms, end_ms).map(|why| {
                    format!(
                        "{why}: reader {} ({:?}) on node {}, {what}: {error}",
                        reader.task.reader, reader.task.interface, reader.task.node
                    )
                }));
            }
        }
        failures
    }

    /// Returns why an error is a failure, or `None` if the error is allowed. An error is a failure if its message names no cause,
    /// or if no event of the run explains it.
    pub(crate) fn unexplained(
        &self,
        what: &str,
        error: &str,
        observer: Observer,
        begin_ms: u64,
        end_ms: u64,
    ) -> Option<&'static str> {
        let Some((cause, nodes)) = classify(error) else { return Some("NO CAUSE") };
        let is_then = |interval: &&Interval| interval.begin_ms <= end_ms && interval.end_ms.is_none_or(|end| end >= begin_ms);
        let observed = Observed { what, cause, nodes: &nodes, has_source: self.has_source(what) };
        let is_explained = self.intervals.iter().filter(is_then).any(|interval| explains(interval.event, observed, observer));
        if is_explained { None } else { Some("UNEXPLAINED") }
    }

    /// Returns whether an operation reads samples that every node can read from their sources.
    pub(crate) fn has_source(&self, what: &str) -> bool {
        self.with_sources.iter().any(|version| what.contains(&version.path_of_all()))
    }

    fn begin(&mut self, event: Event) {
        self.intervals.push(Interval { event, begin_ms: now_ms(), end_ms: None });
    }

    fn end_event(&mut self, is: impl Fn(Event) -> bool) {
        let end_ms = now_ms() + deadlines::aftermath().as_millis() as u64;
        for interval in self.intervals.iter_mut().filter(|interval| interval.end_ms.is_none() && is(interval.event)) {
            interval.end_ms = Some(end_ms);
        }
    }

    /// Checks the result of a stage-in, and checks that all nodes agree on which version is visible.
    fn judge(&mut self, step: &Step, plan: StageIn, expected: Expected, ended: &Ended) -> Result<(), String> {
        let version = plan.version;
        let result = if ended.is_success { "succeeded" } else { "failed" };
        let outcome = format!("{plan:?} {result}: {}", ended.message.trim());
        match expected {
            Expected::Success if !ended.is_success => return Err(format!("FAILED for no reason: {outcome}")),
            Expected::Failure if ended.is_success => return Err(format!("SUCCEEDED although its server is dead: {outcome}")),
            _ => {}
        }
        let is_source = matches!(plan.twist, Twist::SourceVanishes(_) | Twist::SourceShrinks(_));
        if !ended.is_success && !ended.was_interrupted {
            let Some((cause, nodes)) = classify(&ended.message) else { return Err(format!("NO CAUSE: {outcome}")) };
            let observer = Observer { node: plan.node, reader: None };
            let observed = Observed { what: "", cause, nodes: &nodes, has_source: false };
            let is_explained = is_source && cause == crate::causes::Cause::Source
                || self.intervals.iter().any(|interval| explains(interval.event, observed, observer));
            if !is_explained {
                return Err(format!("UNEXPLAINED: {outcome}"));
            }
        }
        if self.is_over {
            return Ok(());
        }
        let old = self.visible.get(&version.tag).copied();
        // A command that was interrupted, or that lost its server, does not learn the outcome of its stage-in.
        let is_known =
            !ended.was_interrupted && !matches!(step.fault, Some(Fault::KillServer(_) | Fault::Stop(Victim::Server(_))));
        let may_be: Vec<Option<Version>> = match (ended.is_success, is_known) {
            (true, _) => vec![Some(version)],
            (false, true) => vec![old],
            (false, false) => vec![old, Some(version)],
        };
        let now = self.agreed(version.tag, &may_be).map_err(|error| format!("{error}; {outcome}"))?;
        match now {
            Some(version) => drop(self.visible.insert(version.tag, version)),
            None => drop(self.visible.remove(&version.tag)),
        }
        Ok(())
    }

    /// Waits until all nodes show the same version of a tag, which must be one of `may_be`, and returns it.
    fn agreed(&mut self, tag: u8, may_be: &[Option<Version>]) -> Result<Option<Version>, String> {
        let deadline = Instant::now() + deadlines::of_command();
        loop {
            let nodes = self.location.live_nodes();
            let found: Vec<Result<Option<Version>, String>> = nodes
                .iter()
                .map(|node| {
                    let session = dayfly_client::Session::attach_to(&self.location, *node);
                    let view = session.map(dayfly_client::View::new).map_err(|error| error.to_string())?;
                    Ok(visible(&view)?.into_iter().find(|version| version.tag == tag))
                })
                .collect();
            if let Some(Ok(first)) = found.first()
                && found.iter().all(|other| other.as_ref().is_ok_and(|other| other == first))
                && may_be.contains(first)
            {
                return Ok(*first);
            }
            if Instant::now() > deadline {
                return Err(format!("HALF-VISIBLE: t{tag} is {found:?} on nodes {nodes:?}, and may be {may_be:?}"));
            }
            self.look(&mut None, &mut None)?;
        }
    }

    /// Runs a command and returns its output. The command must finish in time; if it fails, an event of the run must explain its
    /// error.
    pub(crate) fn command(&mut self, arguments: &[&str]) -> Result<String, String> {
        let mut command = self.cluster().dayfly();
        command.args(arguments).env("DAYFLY_SESSION", &self.cluster().id);
        let begin_ms = now_ms();
        let output = crate::harness::output_of(&mut command);
        let took = Duration::from_millis(now_ms() - begin_ms);
        if took > deadlines::of_command() {
            return Err(format!("LATE: dayfly {arguments:?} took {took:?}"));
        }
        let message = text(&output.stderr);
        if !output.status.success()
            && let Some(why) = self.unexplained("", &message, Observer { node: 0, reader: None }, begin_ms, now_ms())
        {
            return Err(format!("{why}: dayfly {arguments:?}: {message}"));
        }
        Ok(text(&output.stdout))
    }
}
