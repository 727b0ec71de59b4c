//! What the kernel says about other processes of this machine.

use std::path::Path;
use std::time::Duration;
use std::{fs, future, io, process};

use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use tokio::time::{MissedTickBehavior, interval};

/// How often a process is looked for that a session ends with.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// A process as its line in `/proc/PID/stat` describes it.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    /// Whether the process has ended, and only its parent has not asked for its status yet.
    has_ended: bool,
    parent: i32,
    /// When it started, in clock ticks since the machine did.
    started: u64,
}

impl Stat {
    /// Fails like a file that does not exist if there is no such process, or none that this user can see.
    fn of(pid: i32) -> io::Result<Self> {
        Self::from_line(&fs::read_to_string(format!("/proc/{pid}/stat"))?).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn from_line(line: &str) -> Option<Self> {
        // The name of the program, which is in parentheses, may contain anything.
        let fields: Vec<&str> = line.rsplit(')').next()?.split_whitespace().collect();
        let threads: u64 = fields.get(17)?.parse().ok()?;
        // The first thread of a process may end before the others.
        let has_ended = matches!(*fields.first()?, "Z" | "X") && threads <= 1;
        Some(Self { has_ended, parent: fields.get(1)?.parse().ok()?, started: fields.get(19)?.parse().ok()? })
    }
}

/// Returns whether a process has started this one, or the process that has, and so on.
pub(crate) fn is_ancestor(pid: i32) -> bool {
    let mut ancestor = std::os::unix::process::parent_id() as i32;
    while ancestor > 1 && ancestor != pid {
        ancestor = Stat::of(ancestor).map_or(0, |stat| stat.parent);
    }
    ancestor == pid
}

/// Why a process cannot be watched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FindError {
    #[error("this user sees no such process on this machine")]
    NotFound,
    #[error("it is a thread of process {0}; name that process")]
    Thread(i32),
    #[error("/proc is of another PID namespace; mount this one's, as 'unshare --mount-proc' does")]
    OtherNamespace,
    #[error("cannot read /proc: {0}")]
    Unreadable(#[from] io::Error),
}

/// A running process. Later processes with the same number are others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Process {
    pid: i32,
    started: u64,
}

impl Process {
    pub(crate) fn find(pid: i32) -> Result<Self, FindError> {
        if fs::read_link("/proc/self")? != Path::new(&process::id().to_string()) {
            return Err(FindError::OtherNamespace);
        }
        let not_found = |error| if is_gone(&error) { FindError::NotFound } else { error.into() };
        let stat = Stat::of(pid).map_err(not_found)?;
        if stat.has_ended {
            return Err(FindError::NotFound);
        }
        let status = fs::read_to_string(format!("/proc/{pid}/status")).map_err(not_found)?;
        match status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok()) {
            Some(process) if process != pid => Err(FindError::Thread(process)),
            _ => Ok(Self { pid, started: stat.started }),
        }
    }

    fn has_ended(self) -> bool {
        match Stat::of(self.pid) {
            Ok(stat) => stat.has_ended || stat.started != self.started,
            // The process may be hidden, as another user's now is, or this process may have no file descriptor left.
            Err(_) => kill(Pid::from_raw(self.pid), None) == Err(Errno::ESRCH),
        }
    }

    /// Waits until the process has ended. Looks again and again, because Linux 4.18 has no `pidfd_open`.
    pub(crate) async fn ended(self) {
        let mut ticks = interval(LOOK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !self.has_ended() {
            ticks.tick().await;
        }
    }
}

/// Returns whether reading a file of a process failed because the process is gone.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::ESRCH as i32)
}

/// Waits until a process has ended, and returns its number. Waits forever if there is no process to wait for.
pub(crate) async fn ended(process: Option<Process>) -> i32 {
    let Some(process) = process else { return future::pending().await };
    process.ended().await;
    process.pid
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::thread;

    use super::*;

    #[test]
    fn a_line_of_the_kernel_is_read() {
        let rest = "17 1 1 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 {threads} 0 815 0 0";
        for (state, threads, has_ended) in [("S", 1, false), ("Z", 1, true), ("Z", 2, false), ("X", 1, true), ("T", 1, false)] {
            let line = format!("42 (a b) Z) {state} {}", rest.replace("{threads}", &threads.to_string()));
            assert_eq!(Stat::from_line(&line), Some(Stat { has_ended, parent: 17, started: 815 }), "{line}");
        }
        for line in ["", "42 (sh)", "42 (sh) S 17", "42 (sh) S x 1 1 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 815"] {
            assert_eq!(Stat::from_line(line), None, "{line}");
        }
    }

    #[test]
    fn a_process_has_ended_before_its_parent_asks_and_another_one_with_its_number_is_not_the_same() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::find(child.id() as i32).unwrap();
        assert!(!process.has_ended());
        assert!(Process { started: process.started + 1, ..process }.has_ended());
        child.kill().unwrap();
        while !process.has_ended() {
            thread::yield_now();
        }
        assert!(matches!(Process::find(process.pid), Err(FindError::NotFound)));
        child.wait().unwrap();
        assert!(process.has_ended());
        assert!(is_ancestor(std::os::unix::process::parent_id() as i32) && !is_ancestor(std::process::id() as i32));
    }

    #[test]
    fn a_thread_is_not_a_process() {
        let own = process::id() as i32;
        let thread = thread::spawn(nix::unistd::gettid).join().unwrap().as_raw();
        assert!(matches!(Process::find(thread), Err(FindError::NotFound)), "it has ended");
        let found = thread::spawn(|| Process::find(nix::unistd::gettid().as_raw())).join().unwrap();
        assert!(matches!(found, Err(FindError::Thread(process)) if process == own), "{found:?}");
        assert!(Process::find(own).is_ok());
    }
}
