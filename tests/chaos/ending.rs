//! Ends a run: every file is read once more, and the session must leave nothing behind.

use std::fs;
use std::time::{Duration, Instant};

use dayfly_meta::id::NodeId;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::chaos::causes::{Cause, classify};
use crate::chaos::deadlines;
use crate::chaos::leftovers::{Descriptors, named_after, processes_of, sockets_below, taken};
use crate::chaos::log::Line;
use crate::chaos::network::Network;
use crate::chaos::reader::now_ms;
use crate::chaos::readers::{self, Reader};
use crate::chaos::run::Run;
use crate::chaos::schedule::{EPOCH_READERS, EPOCHS, NODES, READERS};
use crate::harness::text;

/// The number of lines of each server's log that a failure report shows.
const LOG_LINES: usize = 12;

impl Run {
    /// Ends the readers and the session, and checks that nothing is left.
    pub(crate) fn end(&mut self) -> Result<(), String> {
        if !self.is_over {
            self.read_epochs()?;
        }
        fs::write(&self.stop, "").unwrap();
        for mut reader in std::mem::take(&mut self.readers) {
            let mut failures = Vec::new();
            reader.wait(|reader| failures.extend(self.look_at(reader)))?;
            if !failures.is_empty() {
                return Err(failures.join("\n"));
            }
        }
        if !self.is_over {
            fs::remove_file(&self.stop).unwrap();
            self.read_everything()?;
            self.is_settled()?;
        }
        if !self.launched.end(self.is_over)? {
            self.command(&["down"])?;
        }
        let data = self.cluster().data.path().to_str().unwrap().to_owned();
        self.command(&["clean", "--data-dir", &data])?;
        self.nothing_is_left()
    }

    /// Lets the readers go on until one of them has read a few whole epochs.
    fn read_epochs(&mut self) -> Result<(), String> {
        let are_read = |run: &Self| {
            let lives = |reader: &&usize| !run.dead.contains(&(**reader as u16 % NODES));
            let reader = EPOCH_READERS.iter().find(lives);
            reader.is_none_or(|&reader| run.tally.epochs[reader] >= EPOCHS)
        };
        self.wait_until("a reader reads five epochs", deadlines::of_epochs(), &mut None, &mut None, are_read)
    }

    /// Reads every file from every live node, except for blocks that only dead nodes have. Retries errors until the aftermath of the
    /// last fault must be over.
    fn read_everything(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + deadlines::aftermath() * 2;
        let live = self.location.live_nodes();
        let expected = self.live();
        if live.len() != expected {
            return Err(format!("DIED: {} servers are alive instead of {expected}", live.len()));
        }
        for (node, &pid) in &self.survivors {
            if self.location.pid(NodeId(*node)) != Some(pid) {
                return Err(format!(
                    "REPLACED: node {node} was stopped, or cut off for a moment, and process {pid} ended for that"
                ));
            }
        }
        for node in live {
            for attempt in 0.. {
                let errors = self.read_from(node.0, attempt)?;
                let is_excepted = |(what, error): &&(String, String)| {
                    let is_of_lost = |(cause, _)| matches!(cause, Cause::NodeLost | Cause::Source | Cause::NotKept);
                    !self.promises.holds_for(what, now_ms()) && classify(error).is_some_and(is_of_lost)
                };
                let Some((_, error)) = errors.iter().find(|error| !is_excepted(error)) else { break };
                if Instant::now() > deadline {
                    return Err(format!("STAYS BROKEN: node {node}: {} errors, the first: {error}", errors.len()));
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        Ok(())
    }

    /// Reads every file from a node and returns the operations that failed, with their errors.
    fn read_from(&mut self, node: u16, attempt: u32) -> Result<Vec<(String, String)>, String> {
        let task = readers::task(self.cluster(), self.schedule.seed, READERS, attempt, node, None, &self.stop);
        let mut reader = Reader::start(self.cluster(), task);
        let (mut errors, mut failures, mut is_finished) = (Vec::new(), Vec::new(), false);
        reader.wait(|reader| {
            for line in reader.look(&mut failures) {
                match line {
                    Line::Done { what, error: Some(error), .. } => errors.push((what, error)),
                    Line::Finished => is_finished = true,
                    _ => {}
                }
            }
        })?;
        match failures.is_empty() {
            true if is_finished || !errors.is_empty() => Ok(errors),
            true => Err(format!("DIED: the last reader on node {node} did not finish")),
            false => Err(failures.join("\n")),
        }
    }

    /// Checks that the readers, which have exited, left no lease, no request and no descriptor in the servers.
    fn is_settled(&mut self) -> Result<(), String> {
        let datasets = self.visible.len().saturating_sub(self.datasets_before);
        let start = Instant::now();
        loop {
            // Only connections may stay for longer: their other ends can vanish without closing them.
            let counts_sockets = self.network.is_none() || start.elapsed() > deadlines::of_connections();
            let excess: Vec<String> = self.unsettled(datasets, true)?;
            if excess.is_empty() {
                return Ok(());
            }
            if start.elapsed() > deadlines::aftermath() * 2 && !self.unsettled(datasets, counts_sockets)?.is_empty() {
                return Err(format!("LEFT: {excess:?}"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn unsettled(&mut self, datasets: usize, counts_sockets: bool) -> Result<Vec<String>, String> {
        let mut excess = Vec::new();
        // The servers that have taken the place of others have as many connections as those.
        let most = self.descriptors.values().max_by_key(|descriptors| descriptors.sockets);
        for node in 0..NODES {
            let Some(before) = self.descriptors.get(&node).or(most) else { continue };
            let Some(pid) = self.location.pid(NodeId(node)) else { continue };
            excess.extend(
                Descriptors::of(pid).excess(before, datasets, counts_sockets).map(|excess| format!("node {node}: {excess}")),
            );
        }
        // If a node is dead, the command exits with 1.
        let output = self.cluster().output(&["status", "--json"]);
        let status: serde_json::Value =
            serde_json::from_slice(&output.stdout).map_err(|error| format!("no status: {error}: {}", text(&output.stderr)))?;
        for (number, node) in status["nodes"].as_array().unwrap().iter().enumerate() {
            for account in ["leases", "asking", "queued"] {
                if node[account].as_u64().is_some_and(|count| count > 0) {
                    excess.push(format!("node {number}: {} {account}", node[account]));
                }
            }
        }
        Ok(excess)
    }

    fn nothing_is_left(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + deadlines::of_lease();
        loop {
            let ground = &self.cluster().ground;
            let mut left: Vec<String> = processes_of(ground.runtime.path())
                .into_iter()
                .map(|(pid, command)| format!("process {pid}: {command}"))
                .collect();
            for folder in [ground.runtime.path(), ground.data.path()] {
                left.extend(fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path().display().to_string()));
            }
            let taken = self.drive.as_ref().map_or(0, |drive| taken(&drive.0));
            if taken > self.taken_before {
                left.push(format!("{taken} bytes"));
            }
            left.extend(named_after(&self.cluster().id));
            left.extend(sockets_below(ground.runtime.path()));
            left.extend(self.network.iter().flat_map(Network::processes).map(|pid| format!("process {pid} in a namespace")));
            if left.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!("LEFT: {left:#?}"));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the last lines of the logs of the supervisor and the servers, and what the witness of starvation measured.
    pub(crate) fn logs(&self) -> String {
        let printed = self.launched.printed();
        let mut all = format!("\n  {}", self.cluster().witness);
        if !printed.is_empty() {
            all.push_str(&format!("\n  `run` printed:\n    {}", printed.trim_end()));
        }
        for entry in fs::read_dir(&self.location.folder).into_iter().flatten().flatten() {
            if entry.path().extension().is_some_and(|kind| kind == "log") {
                let log = fs::read(entry.path()).unwrap_or_default();
                let log = String::from_utf8_lossy(&log).into_owned();
                let lines: Vec<&str> = log.lines().collect();
                let last = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n    ");
                if !last.is_empty() {
                    all.push_str(&format!("\n  {}:\n    {last}", entry.file_name().display()));
                }
            }
        }
        all
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.readers.clear();
        let Some(cluster) = self.cluster.take() else { return };
        // Match only processes that use this session's folders. After a run without a failure there are none.
        for (pid, _) in processes_of(cluster.runtime.path()) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        // The folder that it is mounted at goes with the cluster.
        drop(self.drive.take());
    }
}
