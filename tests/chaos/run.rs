//! Performs one run: a session of four nodes, readers on all nodes, and the steps of a schedule. The first failure ends the run.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use dayfly_client::locate::SessionFolder;

use crate::chaos::causes::{Cause, Event, Interval, Observed, Observer, classify, explains};
use crate::chaos::data::{Contents, Version};
use crate::chaos::deadlines;
use crate::chaos::launch::Launched;
use crate::chaos::leftovers::{Descriptors, taken};
use crate::chaos::log::Line;
use crate::chaos::network::Network;
use crate::chaos::planted::Planted;
use crate::chaos::promises::Promises;
use crate::chaos::reader::{now_ms, visible};
use crate::chaos::readers::{self, Reader};
use crate::chaos::schedule::{Fault, NODES, Place, READERS, Schedule, StageIn, Step, Twist, Victim};
use crate::chaos::stage_ins::{Ended, Expected, RunningStageIn, expected};
use crate::chaos::starvation::{self, Starvation};
use crate::harness::{Cluster, Ground, text};

/// The size of the file system that a run mounts as its data dir, if it can mount one. The file system has room for a few datasets
/// and their cached copies, and little more.
pub(crate) const DRIVE_LEN: u64 = 640 << 20;

/// Servers have settled when so many looks at these intervals have found the same descriptors.
const SETTLED_LOOKS: u32 = 5;
const SETTLED_INTERVAL: Duration = Duration::from_millis(40);

/// Counts of a run that found no failure.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) operations: u64,
    pub(crate) errors: u64,
    pub(crate) injected: usize,
    pub(crate) skipped: usize,
    pub(crate) starved: usize,
    /// The epochs that each reader has read.
    pub(crate) epochs: [u32; READERS],
}

/// A file system of its own, which is unmounted when this value is dropped.
pub(crate) struct MountedDrive(pub(crate) PathBuf);

impl MountedDrive {
    /// Mounts a file system at a folder. Returns `None` without the right to do so.
    fn mount(folder: &Path) -> Option<Self> {
        let mut mount = crate::harness::program("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={DRIVE_LEN}"), "none"]).arg(folder).stderr(Stdio::null());
        mount.status().is_ok_and(|status| status.success()).then(|| Self(folder.to_owned()))
    }
}

impl Drop for MountedDrive {
    fn drop(&mut self) {
        let _ = crate::harness::program("umount").arg("-l").arg(&self.0).status();
        // Whoever made the folder may have tried to remove it before.
        let _ = std::fs::remove_dir(&self.0);
    }
}

pub(crate) struct Run {
    pub(crate) schedule: Schedule,
    pub(crate) cluster: Option<Cluster>,
    pub(crate) launched: Launched,
    /// The network of a session whose servers run in namespaces.
    pub(crate) network: Option<Network>,
    /// The session's location, which is still needed after the session has ended.
    pub(crate) location: SessionFolder,
    /// The mounted file system for data; `None` without root.
    pub(crate) drive: Option<MountedDrive>,
    pub(crate) taken_before: u64,
    pub(crate) contents: Contents,
    pub(crate) readers: Vec<Reader>,
    pub(crate) stop: PathBuf,
    /// The visible version of each tag.
    pub(crate) visible: BTreeMap<u8, Version>,
    pub(crate) promises: Promises,
    /// The nodes whose servers have died and are not replaced.
    pub(crate) dead: Vec<u16>,
    /// The servers that were stopped, or cut off for a moment, and must not have been replaced for that.
    pub(crate) survivors: BTreeMap<u16, i32>,
    pub(crate) is_over: bool,
    pub(crate) intervals: Vec<Interval>,
    pub(crate) descriptors: BTreeMap<u16, Descriptors>,
    pub(crate) datasets_before: usize,
    pub(crate) planted: Option<Planted>,
    starvation: Starvation,
    pub(crate) tally: Tally,
}

/// Runs a schedule to its end, with a planted defect or without one.
pub(crate) fn run(schedule: Schedule, planted: Option<Planted>) -> Result<Tally, String> {
    let mut run = Run::start(schedule, planted)?;
    let steps = run.schedule.steps.clone();
    for (number, step) in steps.iter().enumerate() {
        run.step(step).map_err(|failure| format!("step {number} ({step}): {failure}{}", run.logs()))?;
        if number == 0 {
            run.begin_to_read();
            run.plant();
        }
    }
    run.end().map_err(|failure| format!("at the end: {failure}{}", run.logs()))?;
    Ok(std::mem::take(&mut run.tally))
}

impl Run {
    fn start(schedule: Schedule, planted: Option<Planted>) -> Result<Self, String> {
        let ground = Ground::new();
        let drive = MountedDrive::mount(ground.data.path());
        let taken_before = taken(ground.data.path());
        let stop = ground.at("stop");
        let network = match schedule.place {
            Place::Local => None,
            Place::Namespaces => Some(Network::new(NODES, ground.work.path())?),
        };
        let (cluster, launched) = Launched::start(ground, &schedule, network.as_ref())?;
        Ok(Self {
            contents: Contents::new(schedule.seed),
            schedule,
            location: cluster.location(),
            cluster: Some(cluster),
            launched,
            network,
            drive,
            taken_before,
            readers: Vec::new(),
            stop,
            visible: BTreeMap::new(),
            promises: Promises::default(),
            dead: Vec::new(),
            survivors: BTreeMap::new(),
            is_over: false,
            intervals: Vec::new(),
            descriptors: BTreeMap::new(),
            datasets_before: 0,
            planted,
            starvation: Starvation::new(),
            tally: Tally::default(),
        })
    }

    pub(crate) fn cluster(&self) -> &Cluster {
        self.cluster.as_ref().unwrap()
    }

    /// Starts the readers once the first dataset is visible, and records the open descriptors for comparison at the end.
    fn begin_to_read(&mut self) {
        self.descriptors = self.settled_descriptors();
        self.datasets_before = self.visible.len();
        for reader in 0..READERS {
            let interface = Some(self.schedule.interfaces[reader]);
            let task = readers::task(self.cluster(), self.schedule.seed, reader, 0, reader as u16 % NODES, interface, &self.stop);
            self.readers.push(Reader::start(self.cluster(), task));
        }
    }

    /// Returns the servers' descriptors once each server has all its connections, as many as every other one. On a busy machine
    /// that takes a moment.
    fn settled_descriptors(&self) -> BTreeMap<u16, Descriptors> {
        let pids = self.cluster().pids();
        let (deadline, mut unchanged, mut before) = (Instant::now() + deadlines::of_lease(), 0, BTreeMap::new());
        loop {
            let now: BTreeMap<u16, Descriptors> = pids.iter().map(|(&node, &pid)| (node, Descriptors::of(pid))).collect();
            let counts: BTreeSet<usize> = now.values().map(|descriptors| descriptors.sockets).collect();
            unchanged = if counts.len() == 1 && now == before { unchanged + 1 } else { 0 };
            if unchanged >= SETTLED_LOOKS || Instant::now() > deadline {
                return now;
            }
            before = now;
            std::thread::sleep(SETTLED_INTERVAL);
        }
    }

    fn step(&mut self, step: &Step) -> Result<(), String> {
        let has_little_room = step.stage_in.is_some_and(|plan| self.has_little_room(plan));
        let expected = expected(step, &self.dead, has_little_room);
        let mut stage_in = step.stage_in.map(|plan| {
            let old = self.visible.get(&plan.version.tag).copied();
            if let Some(old) = old {
                self.begin(Event::Replaced(old));
            }
            self.promises.stage_in(plan, self.schedule.limits_room());
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

    /// Watches the readers and the stage-in for a while.
    pub(crate) fn pass(
        &mut self,
        time: Duration,
        stage_in: &mut Option<RunningStageIn>,
        ended: &mut Option<Ended>,
    ) -> Result<(), String> {
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
        self.look_for_starvation();
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
        std::thread::sleep(Duration::from_millis(20));
        Ok(())
    }

    /// Returns a reader's failures since the last call.
    pub(crate) fn look_at(&mut self, reader: &mut Reader) -> Vec<String> {
        let mut failures = Vec::new();
        for line in reader.look(&mut failures) {
            let Line::Done { what, begin_ms, end_ms, error } = line else { continue };
            self.tally.operations += 1;
            if error.is_none() && what.starts_with("epoch") {
                self.tally.epochs[reader.task.reader % READERS] += 1;
            }
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
        &mut self,
        what: &str,
        error: &str,
        observer: Observer,
        begin_ms: u64,
        end_ms: u64,
    ) -> Option<&'static str> {
        let Some((cause, nodes)) = classify(error) else { return Some("NO CAUSE") };
        let is_promised = observer.reader.is_some() && self.promises.holds_for(what, begin_ms);
        let may_read_sources = self.promises.may_read_sources(what, begin_ms);
        let observed = Observed { what, cause, nodes: &nodes, is_promised, may_read_sources };
        if self.is_explained(observed, observer, begin_ms, end_ms) {
            return None;
        }
        // A thread's wait for a processor is known only when the wait is over.
        std::thread::sleep(starvation::INTERVAL * 5);
        self.look_for_starvation();
        if self.is_explained(observed, observer, begin_ms, end_ms) { None } else { Some("UNEXPLAINED") }
    }

    fn is_explained(&self, observed: Observed<'_>, observer: Observer, begin_ms: u64, end_ms: u64) -> bool {
        let is_then = |interval: &&Interval| interval.begin_ms <= end_ms && interval.end_ms.is_none_or(|end| end >= begin_ms);
        self.intervals.iter().filter(is_then).any(|interval| explains(interval.event, observed, observer))
    }

    fn look_for_starvation(&mut self) {
        for (node, time) in self.starvation.look(&self.location) {
            self.tally.starved += 1;
            let (now, end_ms) = (now_ms(), now_ms() + deadlines::aftermath().as_millis() as u64);
            self.promises.lose(&[node]);
            self.promises.regain(&[node], end_ms);
            let begin_ms = now.saturating_sub(time.as_millis() as u64);
            self.intervals.push(Interval { event: Event::Starved(node), begin_ms, end_ms: Some(end_ms) });
        }
    }

    pub(crate) fn begin(&mut self, event: Event) {
        self.intervals.push(Interval { event, begin_ms: now_ms(), end_ms: None });
    }

    pub(crate) fn end_event(&mut self, is: impl Fn(Event) -> bool) {
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
            Expected::Success if !ended.is_success && !self.was_busy(ended) => {
                return Err(format!("FAILED for no reason: {outcome}"));
            }
            Expected::Failure if ended.is_success => return Err(format!("SUCCEEDED although its server is dead: {outcome}")),
            _ => {}
        }
        let is_source = matches!(plan.twist, Twist::SourceVanishes(_) | Twist::SourceShrinks(_));
        if !ended.is_success && !ended.was_interrupted {
            let Some((cause, nodes)) = classify(&ended.message) else { return Err(format!("NO CAUSE: {outcome}")) };
            let observer = Observer { node: plan.node, reader: None };
            let observed = Observed { what: "", cause, nodes: &nodes, is_promised: false, may_read_sources: true };
            let is_explained = is_source && cause == Cause::Source
                || cause == Cause::Full && self.has_little_room(plan)
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
        let is_known = !ended.was_interrupted
            && !matches!(step.fault, Some(Fault::KillServer(_) | Fault::Stop(Victim::Server(_)) | Fault::Cut(_)));
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

    /// Returns whether a stage-in failed because the machine was too busy to run a server in time.
    fn was_busy(&self, ended: &Ended) -> bool {
        let Some((Cause::NodeLost | Cause::OwnServer, nodes)) = classify(&ended.message) else { return false };
        let since = now_ms().saturating_sub(deadlines::of_stage_in().as_millis() as u64);
        let is_starved = |interval: &Interval| {
            let is_meant = |node: u16| nodes.is_empty() || nodes.contains(&node);
            matches!(interval.event, Event::Starved(node) if is_meant(node))
                && interval.end_ms.is_some_and(|end_ms| end_ms > since)
        };
        self.intervals.iter().any(is_starved)
    }

    /// Returns whether a stage-in may find too little room: its copies take twice the room, or nodes are dead.
    pub(crate) fn has_little_room(&self, plan: StageIn) -> bool {
        plan.copies == "2" && self.live() <= 2 || self.live() <= 1
    }

    pub(crate) fn live(&self) -> usize {
        usize::from(NODES) - self.dead.len()
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
                    let mut versions = visible(&view)?;
                    if self.planted == Some(Planted::HalfVisible) && node.0 == 1 {
                        versions.clear();
                    }
                    Ok(versions.into_iter().find(|version| version.tag == tag))
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
        let node = self.location.live_nodes().first().map_or(0, |node| node.0);
        command.env("DAYFLY_NODE", node.to_string());
        let begin_ms = now_ms();
        let output = crate::harness::output_of(&mut command);
        let took = Duration::from_millis(now_ms() - begin_ms);
        if took > deadlines::of_command() {
            return Err(format!("LATE: dayfly {arguments:?} took {took:?}"));
        }
        let message = text(&output.stderr);
        if !output.status.success()
            && let Some(why) = self.unexplained("", &message, Observer { node, reader: None }, begin_ms, now_ms())
        {
            return Err(format!("{why}: dayfly {arguments:?}: {message}"));
        }
        Ok(text(&output.stdout))
    }
}
