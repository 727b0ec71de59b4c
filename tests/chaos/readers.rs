//! The reader processes of a run. This module starts, stops and kills them, and follows their logs.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::chaos::causes::Observer;
use crate::chaos::deadlines;
use crate::chaos::log::{Follower, Line};
use crate::chaos::reader::{Task, VARIABLE, now_ms};
use crate::chaos::schedule::Interface;
use crate::harness::Cluster;

/// A reader process.
pub(crate) struct Reader {
    pub(crate) task: Task,
    child: Child,
    follower: Follower,
    errors: PathBuf,
    /// The time for which the reader has been stopped during the current operation.
    stopped: Duration,
}

impl Reader {
    pub(crate) fn start(cluster: &Cluster, task: Task) -> Self {
        let errors = task.log.with_extension("err");
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["chaos::a_reader_in_a_process_of_its_own", "--exact", "--nocapture", "--test-threads=1"]);
        command.env(VARIABLE, serde_json::to_string(&task).unwrap()).env("DAYFLY_RUNTIME_DIR", cluster.runtime.path());
        command.env_remove("DAYFLY_SESSION").env_remove("DAYFLY_NODE");
        // Give the reader a process group, so that its children are killed with it.
        command.process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&errors).unwrap());
        let child = command.spawn().unwrap();
        Self { task, child, follower: Follower::new(), errors, stopped: Duration::ZERO }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub(crate) fn observer(&self) -> Observer {
        Observer { node: self.task.node, reader: Some(self.task.reader) }
    }

    pub(crate) fn send(&self, signal: Signal) {
        // It may have exited already.
        let _ = killpg(Pid::from_raw(self.pid()), signal);
    }

    /// Extends the limit of the current operation by the time for which the reader has been stopped.
    pub(crate) fn was_stopped(&mut self, time: Duration) {
        self.stopped += time;
    }

    pub(crate) fn kill(&mut self) {
        self.send(Signal::SIGKILL);
        self.child.wait().unwrap();
    }

    /// Returns the new lines of the reader's log. Adds to `failures` what no injected fault can excuse: wrong bytes, operations
    /// that take too long, and the death of the process.
    pub(crate) fn look(&mut self, failures: &mut Vec<String>) -> Vec<Line> {
        let name = format!("reader {} ({:?}) on node {}", self.task.reader, self.task.interface, self.task.node);
        let lines = self.follower.read(&self.task.log);
        for line in &lines {
            match line {
                Line::Wrong { what, .. } => failures.push(format!("WRONG BYTES: {name}: {what}")),
                Line::Done { what, begin_ms, end_ms, error } => {
                    let took = Duration::from_millis(end_ms - begin_ms);
                    if took > deadlines::of_reader(what) + self.stopped {
                        failures.push(format!("LATE: {name}: {what} took {took:?}, error {error:?}"));
                    }
                }
                Line::Finished => {}
            }
        }
        if lines.iter().any(|line| matches!(line, Line::Done { .. })) {
            self.stopped = Duration::ZERO;
        }
        if let Some((since, what)) = &self.follower.under_way {
            let took = Duration::from_millis(now_ms().saturating_sub(*since));
            if took > deadlines::of_reader(what) + self.stopped {
                failures.push(format!("HANGS: {name}: {what} for {took:?}"));
            }
        }
        if let Some(status) = self.child.try_wait().unwrap()
            && !status.success()
        {
            let message = fs::read_to_string(&self.errors).unwrap_or_default();
            failures.push(format!("DIED: {name}: {status}: {}", message.trim()));
        }
        lines
    }

    /// Waits until the reader exits because of the stop file. If it does not exit, the error names its current operation.
    pub(crate) fn wait(&mut self, mut look: impl FnMut(&mut Self)) -> Result<(), String> {
        let deadline = Instant::now() + deadlines::of_reader("read") + Duration::from_secs(60);
        while self.child.try_wait().unwrap().is_none() {
            look(self);
            if Instant::now() > deadline {
                return Err(format!("HANGS: reader {} does not exit: {:?}", self.task.reader, self.follower.under_way));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        look(self);
        Ok(())
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.send(Signal::SIGCONT);
        self.send(Signal::SIGKILL);
        // It may have been reaped already.
        let _ = self.child.wait();
    }
}

/// Creates a reader's instructions.
pub(crate) fn task(
    cluster: &Cluster,
    seed: u64,
    reader: usize,
    incarnation: u32,
    node: u16,
    interface: Option<Interface>,
    stop: &Path,
) -> Task {
    Task {
        seed,
        reader,
        incarnation,
        node,
        interface,
        session: cluster.id.clone(),
        folder: cluster.folder(),
        log: cluster.at(format!("reader-{reader}-{incarnation}-{node}.log")),
        stop: stop.to_owned(),
    }
}
