//! A drive that fails: `strace` attached to one process answers some of its calls in the kernel's place.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::harness::{signal, wait_for};
use crate::schedule::{Drive, Victim};

/// Attaching and letting go of all threads of a process, on a machine with much else to do.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(20);

/// Whether there is an `strace` that may attach to other processes; says once why not.
pub(crate) fn is_possible() -> bool {
    static POSSIBLE: OnceLock<bool> = OnceLock::new();
    *POSSIBLE.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let mut sleeper = Command::new("sleep").arg("60").spawn().unwrap();
        let attached = Injection::attach(sleeper.id() as i32, &["-e", "trace=none"], folder.path());
        let is_possible = attached.map_err(|error| eprintln!("drives that fail are NOT tested: {error}")).is_ok();
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
        is_possible
    })
}

/// A tracer at work.
pub(crate) struct Injection {
    tracer: Child,
    output: PathBuf,
}

impl Injection {
    pub(crate) fn begin(pid: i32, victim: Victim, drive: Drive, folder: &Path) -> Result<Self, String> {
        let reads = match victim {
            Victim::Server(_) => "sendfile,pread64,preadv2",
            Victim::Reader(_) => "pread64",
        };
        let writes = "pwritev,pwritev2,pwrite64";
        let (calls, how) = match drive {
            Drive::ReadFails { nth } => (reads, format!("error=EIO:when={nth}+{nth}")),
            Drive::ReadGivesNothing { nth } => (reads, format!("retval=0:when={nth}+{nth}")),
            Drive::ReadIsSlow { ms } => (reads, format!("delay_enter={}", ms * 1000)),
            Drive::WriteFails { nth } => (writes, format!("error=EIO:when={nth}+{nth}")),
            Drive::NoRoom { nth } => ("fallocate", format!("error=ENOSPC:when={nth}+{nth}")),
            Drive::SyncFails { nth } => ("fdatasync,fsync,sync_file_range", format!("error=EIO:when={nth}+{nth}")),
        };
        Self::attach(pid, &["-e", &format!("trace={calls}"), "-e", &format!("inject={calls}:{how}")], folder)
    }

    fn attach(pid: i32, options: &[&str], folder: &Path) -> Result<Self, String> {
        let (output, messages) = (folder.join(format!("strace-{pid}.out")), folder.join(format!("strace-{pid}.err")));
        let mut command = Command::new("strace");
        command.args(["-f", "-p", &pid.to_string(), "-o"]).arg(&output).args(options);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(File::create(&messages).unwrap());
        let tracer = command.spawn().map_err(|error| format!("cannot start strace: {error}"))?;
        let mut injection = Self { tracer, output };
        let deadline = std::time::Instant::now() + ATTACH_TIMEOUT;
        loop {
            let said = fs::read_to_string(&messages).unwrap_or_default();
            if said.contains("attached") {
                return Ok(injection);
            }
            let has_ended = injection.tracer.try_wait().unwrap().is_some();
            if has_ended || std::time::Instant::now() > deadline {
                injection.end();
                return Err(format!("strace does not attach: {}", said.trim()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Lets go; how many calls were answered or delayed.
    pub(crate) fn end(&mut self) -> usize {
        if self.tracer.try_wait().unwrap().is_none() {
            signal(self.tracer.id() as i32, Signal::SIGINT);
        }
        if wait_for(&mut self.tracer, ATTACH_TIMEOUT).is_none() {
            self.tracer.kill().unwrap();
            self.tracer.wait().unwrap();
        }
        let traced = fs::read(&self.output).unwrap_or_default();
        String::from_utf8_lossy(&traced).lines().filter(|line| line.contains("(INJECTED)") || line.contains("(DELAYED)")).count()
    }
}

impl Drop for Injection {
    fn drop(&mut self) {
        // Ended already, mostly.
        self.end();
    }
}
