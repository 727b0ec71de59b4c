//! The stage-ins of a run: their sources, their commands, the disturbances of both, and the expected results.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::chaos::data::Contents;
use crate::chaos::deadlines::{of_schedule, of_stage_in};
use crate::chaos::schedule::{Cut, Fault, Form, StageIn, Step, Twist, Victim};
use crate::harness::{Cluster, pack, signal};

/// A `dayfly stage-in` command that is running.
pub(crate) struct RunningStageIn {
    pub(crate) plan: StageIn,
    child: Child,
    source: PathBuf,
    output: PathBuf,
    errors: PathBuf,
    begin: Instant,
    is_twisted: bool,
    /// The time of the last disturbance of the command or the nodes. The command's time limit counts from then.
    pub(crate) disturbed: Instant,
}

/// The result of a stage-in.
pub(crate) struct Ended {
    pub(crate) is_success: bool,
    /// True if a signal ended the command, or if its exit status says that a signal interrupted it.
    pub(crate) was_interrupted: bool,
    pub(crate) message: String,
}

/// The expected result of a stage-in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expected {
    Success,
    Failure,
    Either,
}

impl RunningStageIn {
    pub(crate) fn start(cluster: &Cluster, contents: &mut Contents, plan: StageIn, is_replacing: bool) -> Self {
        let version = plan.version;
        let name = format!("s{}-{}", version.tag, version.generation);
        let folder = cluster.at(&name);
        contents.get(version).write(&folder, version);
        let source = match plan.form {
            Form::Folder => folder.clone(),
            Form::Tar => cluster.at(format!("{name}.tar")),
            Form::TarGz => cluster.at(format!("{name}.tar.gz")),
        };
        if plan.form != Form::Folder {
            pack(&source, &folder, &["--format=pax"]);
            fs::remove_dir_all(&folder).unwrap();
        }
        let (output, errors) = (cluster.at(format!("{name}.out")), cluster.at(format!("{name}.err")));
        let mut command = cluster.dayfly();
        command
            .args(["stage-in", "--json", "--copies", plan.copies])
            .env("DAYFLY_NODE", plan.node.to_string())
            .env("DAYFLY_SESSION", &cluster.id);
        if let Some(rate) = plan.rate {
            command.args(["--max-rate", &format!("{rate}MB/s")]);
        }
        if is_replacing {
            command.arg("--replace");
        }
        command.arg(&source).arg(version.target());
        command.stdout(File::create(&output).unwrap()).stderr(File::create(&errors).unwrap()).stdin(Stdio::null());
        let child = command.spawn().unwrap();
        let now = Instant::now();
        Self { plan, child, source, output, errors, begin: now, is_twisted: false, disturbed: now }
    }

    /// Disturbs the command as planned, once the planned time has passed.
    fn twist(&mut self) {
        let is_due = |at: u32| self.begin.elapsed() >= of_schedule(at);
        let is_planned = || fs::read_to_string(&self.output).is_ok_and(|events| events.contains("\"planned\""));
        match self.plan.twist {
            Twist::Interrupt(at) if is_due(at) => signal(self.child.id() as i32, Signal::SIGTERM),
            Twist::Kill(at) if is_due(at) => signal(self.child.id() as i32, Signal::SIGKILL),
            // A source that disappears before it is listed is simply missing, so wait until the stage-in is planned.
            Twist::SourceVanishes(at) if is_due(at) && is_planned() => remove(&self.source),
            Twist::SourceShrinks(at) if is_due(at) && is_planned() => shrink(&self.source),
            _ => return,
        }
        self.is_twisted = true;
        self.disturbed = Instant::now();
    }

    /// Returns the result if the command has exited, or an error if it hangs.
    pub(crate) fn look(&mut self) -> Result<Option<Ended>, String> {
        if let Some(status) = self.child.try_wait().unwrap() {
            // The source stays: samples whose copies a drive loses are read from there.
            let message = fs::read_to_string(&self.errors).unwrap_or_default();
            let was_interrupted = status.code().is_none() || status.code().is_some_and(|code| code >= 128);
            return Ok(Some(Ended { is_success: status.success(), was_interrupted, message }));
        }
        if !self.is_twisted {
            self.twist();
        }
        if self.disturbed.elapsed() > of_stage_in() + self.at_its_rate() {
            return Err(format!("HANGS: {:?} for {:?}", self.plan, self.begin.elapsed()));
        }
        Ok(None)
    }

    /// Returns the time that the rate limit adds.
    fn at_its_rate(&self) -> Duration {
        Duration::from_secs(100 / u64::from(self.plan.rate.unwrap_or(100)))
    }
}

impl Drop for RunningStageIn {
    fn drop(&mut self) {
        // It has exited already, unless the run failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn remove(source: &Path) {
    if source.is_dir() {
        // The stage-in may be reading these files at this moment: this test is meant to cover that case.
        let _ = fs::remove_dir_all(source);
    } else {
        let _ = fs::remove_file(source);
    }
}

fn shrink(source: &Path) {
    let cut = |path: &Path| {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        let len = file.metadata().unwrap().len();
        file.set_len(len / 2).unwrap();
    };
    if !source.is_dir() {
        return cut(source);
    }
    for folder in fs::read_dir(source).unwrap() {
        fs::read_dir(folder.unwrap().path()).unwrap().for_each(|file| cut(&file.unwrap().path()));
    }
}

/// Returns the result that the stage-in of a step must have, given the nodes that are dead when it begins, and whether the others
/// may have too little room for it.
pub(crate) fn expected(step: &Step, dead: &[u16], has_little_room: bool) -> Expected {
    let Some(stage_in) = step.stage_in else { return Expected::Either };
    if dead.contains(&stage_in.node) {
        return Expected::Failure;
    }
    let is_harmless = match step.fault {
        None
        | Some(Fault::Tune(_) | Fault::KillReader(_) | Fault::Stop(Victim::Reader(_)) | Fault::Drive(Victim::Reader(_), _)) => {
            true
        }
        // It goes on without the node, or begins again.
        Some(Fault::KillServer(node) | Fault::Cut(Cut::Power(node))) => node != stage_in.node,
        Some(_) => false,
    };
    if is_harmless && !has_little_room && stage_in.twist == Twist::None { Expected::Success } else { Expected::Either }
}
