//! Injects drive faults: `strace`, attached to a process, makes some of its system calls fail or
//! delays them.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::{signal, wait_for};

/// The limit for attaching to all threads of a process, or detaching from them, on a busy machine.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(20);

/// Returns true if there is an `strace` that may attach to other processes. If not, prints the reason once.
pub(crate) fn is_possible() -> bool {
    static POSSIBLE: OnceLock<bool> = OnceLock::new();
    *POSSIBLE.get_or_init(|| {
        if !super::is_installed("strace") {
            return false;
        }
        let folder = tempfile::tempdir().unwrap();
        let mut sleeper = super::program("sleep").arg("60").spawn().unwrap();
        let attached = Tracer::attach(sleeper.id() as i32, &["-e".to_owned(), "trace=none".to_owned()], folder.path());
        let is_possible = attached.map_err(|error| super::skip(&format!("drives that fail: {error}"))).is_ok();
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
        is_possible
    })
}

/// An attached tracer.
pub(crate) struct Tracer {
    tracer: Child,
    output: PathBuf,
}

impl Tracer {
    /// Injects faults into all threads of a process. Each fault is a pair: a list of calls, and the rest of
    /// strace's `inject=` option.
    pub(crate) fn inject(pid: i32, faults: &[(&str, &str)], folder: &Path) -> Result<Self, String> {
        Self::attach(pid, &Self::options(faults), folder)
    }

    /// Injects faults into the calls that concern some files.
    pub(crate) fn inject_at(files: &[PathBuf], pid: i32, faults: &[(&str, &str)], folder: &Path) -> Result<Self, String> {
        let mut options = Self::options(faults);
        for file in files {
            options.extend(["-P".to_owned(), file.to_str().ok_or("the path is not UTF-8")?.to_owned()]);
        }
        Self::attach(pid, &options, folder)
    }

    fn options(faults: &[(&str, &str)]) -> Vec<String> {
        let calls: Vec<&str> = faults.iter().map(|&(calls, _)| calls).collect();
        let mut options = vec!["-e".to_owned(), format!("trace={}", calls.join(","))];
        options.extend(faults.iter().flat_map(|(calls, how)| ["-e".to_owned(), format!("inject={calls}:{how}")]));
        options
    }

    fn attach(pid: i32, options: &[String], folder: &Path) -> Result<Self, String> {
        let (output, messages) = (folder.join(format!("strace-{pid}.out")), folder.join(format!("strace-{pid}.err")));
        let mut command = super::program("strace");
        command.args(["-f", "-p", &pid.to_string(), "-o"]).arg(&output).args(options);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&messages).unwrap());
        let tracer = command.spawn().map_err(|error| format!("cannot start strace: {error}"))?;
        let mut tracer = Self { tracer, output };
        let deadline = Instant::now() + ATTACH_TIMEOUT;
        loop {
            let printed = fs::read_to_string(&messages).unwrap_or_default();
            if printed.contains("attached") {
                return Ok(tracer);
            }
            if tracer.tracer.try_wait().unwrap().is_some() || Instant::now() > deadline {
                tracer.end();
                return Err(format!("strace did not attach: {}", printed.trim()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Detaches, and returns the number of calls that `strace` made fail or delayed.
    pub(crate) fn end(&mut self) -> usize {
        if self.tracer.try_wait().unwrap().is_none() {
            signal(self.tracer.id() as i32, Signal::SIGINT);
        }
        if wait_for(&mut self.tracer, ATTACH_TIMEOUT).is_none() {
            self.tracer.kill().unwrap();
            self.tracer.wait().unwrap();
        }
        let traced = fs::read(&self.output).unwrap_or_default();
        let is_injected = |line: &&str| line.contains("(INJECTED)") || line.contains("(DELAYED)");
        String::from_utf8_lossy(&traced).lines().filter(is_injected).count()
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        // The tracer has usually been detached already.
        self.end();
    }
}
