//! Injects the faults of a schedule, and checks that the session recovers from them as promised.

use std::fs;
use std::time::{Duration, Instant};

use dayfly_meta::id::NodeId;
use nix::sys::signal::Signal;

use crate::chaos::causes::Event;
use crate::chaos::deadlines;
use crate::chaos::inject;
use crate::chaos::leftovers::taken;
use crate::chaos::network::Network;
use crate::chaos::reader::now_ms;
use crate::chaos::readers::{self, Reader};
use crate::chaos::run::{DRIVE_LEN, Run};
use crate::chaos::schedule::{Cut, Fault, NODES, UNTIL_LOST, Victim};
use crate::chaos::stage_ins::{Ended, RunningStageIn};
use crate::harness::{output_of, signal, strace, text};

/// How often a run asks for the status of the session while it waits for a change.
const STATUS_INTERVAL: Duration = Duration::from_millis(100);

impl Run {
    /// Injects a fault and ends it after its duration.
    pub(crate) fn fault(
        &mut self,
        fault: Fault,
        lasts: u32,
        stage_in: &mut Option<RunningStageIn>,
        ended: &mut Option<Ended>,
    ) -> Result<(), String> {
        let is_until_lost = lasts >= UNTIL_LOST;
        let lasts = deadlines::of_schedule(lasts);
        let pid = self.pid_of(fault);
        self.begin(Event::Fault(fault));
        let mut returns = Vec::new();
        match fault {
            Fault::Stop(Victim::Reader(reader)) => {
                let begin = Instant::now();
                self.readers[reader].send(Signal::SIGSTOP);
                let passed = self.pass(lasts, stage_in, ended);
                self.readers[reader].send(Signal::SIGCONT);
                self.readers[reader].was_stopped(begin.elapsed());
                passed?;
            }
            Fault::Stop(Victim::Server(node)) => {
                let Some(pid) = pid else { return Ok(()) };
                self.promises.lose(&[node]);
                signal(pid, Signal::SIGSTOP);
                let mut passed = self.pass(lasts, stage_in, ended);
                if is_until_lost && passed.is_ok() {
                    passed = self.wait_for_members(&[node], true, stage_in, ended);
                }
                signal(pid, Signal::SIGCONT);
                passed?;
                self.survivors.insert(node, pid);
                returns.push(node);
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
                if matches!(victim, Victim::Server(_)) {
                    self.promises.fail_drives();
                }
                let injection = inject::begin(pid, victim, drive, self.cluster().work.path());
                let passed = self.pass(lasts, stage_in, ended);
                self.tally.injected += injection?.end();
                passed?;
            }
            Fault::Sources(_, sources) => {
                let Some(pid) = pid.filter(|_| strace::is_possible()) else {
                    self.tally.skipped += 1;
                    return Ok(());
                };
                let files = self.source_files();
                let injection = inject::begin_sources(pid, sources, &files, self.cluster().work.path());
                let passed = self.pass(lasts, stage_in, ended);
                self.tally.injected += injection?.end();
                passed?;
            }
            Fault::FullDrive => {
                self.promises.fail_drives();
                self.fill_drive(lasts, stage_in, ended)?;
            }
            Fault::Tune(options) => {
                self.command(&[&["tune"], options].concat())?;
            }
            Fault::KillServer(node) => {
                let Some(pid) = pid else { return Err(format!("DIED: node {node} has no server")) };
                self.promises.lose_blocks(&[node]);
                self.survivors.remove(&node);
                if !self.schedule.is_rejoining {
                    self.dead.push(node);
                }
                signal(pid, Signal::SIGKILL);
                if self.schedule.is_rejoining {
                    let is_replaced = |run: &Self| run.location.pid(NodeId(node)).is_some_and(|new| new != pid);
                    self.wait_until("a new server is started", deadlines::of_replacement(), stage_in, ended, is_replaced)?;
                    self.wait_for_members(&[node], false, stage_in, ended)?;
                    self.descriptors.remove(&node);
                } else {
                    self.wait_for_members(&[node], true, stage_in, ended)?;
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
            Fault::Cut(cut) => {
                let nodes = cut.nodes();
                self.promises.lose(&nodes);
                let before: Vec<Option<i32>> = nodes.iter().map(|&node| self.location.pid(NodeId(node))).collect();
                let cut_at = Instant::now();
                self.set_cut(cut, true)?;
                let mut passed = self.pass(lasts, stage_in, ended);
                if is_until_lost && passed.is_ok() {
                    passed = self.wait_for_members(&nodes, true, stage_in, ended);
                }
                self.set_cut(cut, false)?;
                passed?;
                if !matches!(cut, Cut::Power(_)) && cut_at.elapsed() < deadlines::of_outage() {
                    self.survivors.extend(nodes.iter().zip(&before).filter_map(|(&node, &before)| Some((node, before?))));
                } else {
                    self.survivors.retain(|node, _| !nodes.contains(node));
                }
                self.rejoin(&nodes, stage_in, ended)?;
                for (&node, before) in nodes.iter().zip(before) {
                    if before == self.location.pid(NodeId(node)) {
                        returns.push(node);
                    } else {
                        self.promises.lose_blocks(&[node]);
                        self.descriptors.remove(&node);
                    }
                }
            }
        }
        if !returns.is_empty() {
            self.wait_for_members(&returns, false, stage_in, ended)?;
            self.promises.regain(&returns, now_ms() + deadlines::aftermath().as_millis() as u64);
        }
        let is_for_good = matches!(fault, Fault::KillServer(node) if self.dead.contains(&node)) || fault == Fault::KillSupervisor;
        if !is_for_good {
            self.end_event(|event| matches!(event, Event::Fault(other) if other == fault));
        }
        if let Some(stage_in) = stage_in {
            stage_in.disturbed = Instant::now();
        }
        Ok(())
    }

    fn network(&self) -> Result<&Network, String> {
        self.network.as_ref().ok_or_else(|| "this run has no network of its own".to_owned())
    }

    /// Cuts the network, or mends it.
    fn set_cut(&self, cut: Cut, is_cut: bool) -> Result<(), String> {
        let network = self.network()?;
        match cut {
            Cut::Link(node) => network.set_link(node, !is_cut),
            Cut::Sends(node) => network.others(node).try_for_each(|other| network.set_one_way(node, other, is_cut)),
            Cut::OneWay { from, to } => network.set_one_way(from, to, is_cut),
            Cut::Power(node) if is_cut => network.power_off(node),
            Cut::Power(node) => network.power_on(node),
        }
    }

    /// Waits until these nodes, which can be reached again, are members, and starts new servers for those whose servers have ended.
    fn rejoin(&mut self, nodes: &[u16], stage_in: &mut Option<RunningStageIn>, ended: &mut Option<Ended>) -> Result<(), String> {
        let deadline = Instant::now() + deadlines::of_replacement();
        let mut message = String::new();
        loop {
            let vacant = nodes.iter().find(|&&node| self.location.pid(NodeId(node)).is_none());
            if vacant.is_none() && self.are_lost(nodes) == Some(false) {
                return Ok(());
            }
            if let Some(vacant) = vacant {
                // The supervisor may not know yet that the server has ended, or it may be starting a new one.
                let asked = self.observers(nodes).next().ok_or("no other node lives")?;
                let mut command = self.cluster().dayfly();
                command.args(["rejoin", &vacant.to_string()]).env("DAYFLY_SESSION", &self.cluster().id);
                message = text(&output_of(command.env("DAYFLY_NODE", asked.to_string())).stderr);
            }
            if Instant::now() > deadline {
                return Err(format!("STAYS LOST: nodes {nodes:?} can be reached again, but are not members: {message}"));
            }
            self.pass(STATUS_INTERVAL, stage_in, ended)?;
        }
    }

    /// Waits until the status on every other live node says that these nodes are lost, or that they are members.
    fn wait_for_members(
        &mut self,
        nodes: &[u16],
        are_lost: bool,
        stage_in: &mut Option<RunningStageIn>,
        ended: &mut Option<Ended>,
    ) -> Result<(), String> {
        let deadline = Instant::now() + deadlines::of_lease();
        while self.are_lost(nodes) != Some(are_lost) {
            if Instant::now() > deadline {
                let expected = if are_lost { "lost" } else { "members" };
                return Err(format!("STATUS: nodes {nodes:?} should be {expected}, but no status agrees"));
            }
            self.pass(STATUS_INTERVAL, stage_in, ended)?;
        }
        Ok(())
    }

    /// Returns the nodes that can tell whether these nodes are lost.
    fn observers(&self, nodes: &[u16]) -> impl Iterator<Item = u16> + use<'_> {
        let nodes = nodes.to_vec();
        (0..NODES).filter(move |node| !nodes.contains(node) && !self.dead.contains(node))
    }

    /// Returns whether all other nodes count these nodes as lost, or all count them as members; `None` if they do not agree. If no other
    /// node lives, these nodes themselves are asked.
    fn are_lost(&self, nodes: &[u16]) -> Option<bool> {
        let mut agreed = None;
        let mut observers: Vec<u16> = self.observers(nodes).collect();
        if observers.is_empty() {
            observers.extend(nodes);
        }
        for asked in observers {
            let mut command = self.cluster().dayfly();
            command.args(["status", "--json"]).env("DAYFLY_SESSION", &self.cluster().id).env("DAYFLY_NODE", asked.to_string());
            // The command fails if a node does not answer and is not lost.
            let output = output_of(&mut command);
            let status: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
            for node in nodes {
                let is_lost = status["nodes"][usize::from(*node)]["lost_for_ms"].is_u64();
                if agreed.is_some_and(|agreed| agreed != is_lost) {
                    return None;
                }
                agreed = Some(is_lost);
            }
        }
        agreed
    }

    fn pid_of(&self, fault: Fault) -> Option<i32> {
        match fault {
            Fault::Drive(Victim::Reader(reader), _) => Some(self.readers[reader].pid()),
            Fault::Stop(Victim::Server(node))
            | Fault::Drive(Victim::Server(node), _)
            | Fault::Sources(node, _)
            | Fault::KillServer(node) => self.location.pid(NodeId(node)),
            _ => None,
        }
    }

    fn fill_drive(
        &mut self,
        lasts: Duration,
        stage_in: &mut Option<RunningStageIn>,
        ended: &mut Option<Ended>,
    ) -> Result<(), String> {
        let Some(drive) = &self.drive else {
            crate::harness::skip("a full drive: only root can mount a file system of its own");
            self.tally.skipped += 1;
            return Ok(());
        };
        let filler = drive.0.join("filler");
        let file = fs::File::create(&filler).unwrap();
        let free = DRIVE_LEN.saturating_sub(taken(&drive.0));
        // This fails if a server takes some of the space at the same time; the drive is then almost full.
        let _ = nix::fcntl::fallocate(&file, nix::fcntl::FallocateFlags::empty(), 0, free.saturating_sub(64 << 10) as i64);
        drop(file);
        let passed = self.pass(lasts, stage_in, ended);
        fs::remove_file(&filler).unwrap();
        passed
    }

    /// Returns the files and archives that all stage-ins have read.
    fn source_files(&self) -> Vec<std::path::PathBuf> {
        let mut found = Vec::new();
        let mut folders = vec![self.cluster().work.path().to_owned()];
        while let Some(folder) = folders.pop() {
            // A stage-in's source may be removed at the same time.
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let path = entry.path();
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                match path.is_dir() {
                    true if name != "bin" => folders.push(path),
                    false if name.parse::<u32>().is_ok() || name.ends_with(".tar") || name.ends_with(".tar.gz") => {
                        found.push(path)
                    }
                    _ => {}
                }
            }
        }
        found
    }
}
