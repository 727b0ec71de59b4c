//! Deliberate defects that a run must find. The servers are the real ones, so each defect is made from outside.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::chaos::run::{Run, run};
use crate::chaos::schedule::Schedule;
use crate::harness::{first_rows, signal};

/// How long the readers read before a server hangs.
const HANG_AFTER: Duration = Duration::from_millis(500);

/// How many runs may end before they come to the planted defect.
const ATTEMPTS: usize = 3;

/// A defect of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Planted {
    /// A server serves wrong bytes.
    WrongBytes,
    /// A server hangs.
    Hang,
    /// A process of the session outlives it.
    LeftProcess,
    /// A folder of the session outlives it.
    LeftFolder,
    /// A process ends that must not: a server is replaced as if it were lost, but none was.
    Restarted,
    /// A dataset is visible on all nodes but one.
    HalfVisible,
}

impl Run {
    /// Makes the planted defect, if there is one. The readers have just begun to read.
    pub(crate) fn plant(&mut self) {
        match self.planted {
            None | Some(Planted::HalfVisible) => {}
            Some(Planted::LeftFolder) => fs::create_dir(self.cluster().data.path().join("dayfly-left")).unwrap(),
            Some(Planted::Restarted) => {
                let pid = self.cluster().pids()[&2];
                self.survivors.insert(2, pid);
                signal(pid, Signal::SIGKILL);
            }
            Some(Planted::WrongBytes) => {
                let pids: Vec<i32> = self.cluster().pids().into_values().collect();
                let data = self.cluster().data.path().to_owned();
                assert!(pids.into_iter().map(|pid| change_segments(pid, &data)).sum::<usize>() > 0);
            }
            Some(Planted::Hang) => {
                // A reader that has begun waits for the server that it knows.
                assert!(self.pass(HANG_AFTER, &mut None, &mut None).is_ok());
                signal(self.cluster().pids()[&2], Signal::SIGSTOP);
            }
            Some(Planted::LeftProcess) => {
                let mut command = crate::harness::program("sh");
                command.args(["-c", "sleep 600 < /dev/null > /dev/null 2>&1 &"]).stdin(Stdio::null());
                command.env("DAYFLY_RUNTIME_DIR", self.cluster().runtime.path());
                assert!(command.status().unwrap().success());
            }
        }
    }
}

/// Changes a byte of each page of the segments that a server has open. Returns the number of segments.
fn change_segments(pid: i32, data: &std::path::Path) -> usize {
    const PAGE_LEN: u64 = 4096;
    let mut changed = 0;
    for link in fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten().map(|entry| entry.path()) {
        if !fs::read_link(&link).is_ok_and(|target| target.starts_with(data)) {
            continue;
        }
        let Ok(file) = OpenOptions::new().read(true).write(true).open(&link) else { continue };
        for page in 0..file.metadata().unwrap().len() / PAGE_LEN {
            let (mut byte, at) = ([0], page * PAGE_LEN + 17);
            file.read_exact_at(&mut byte, at).unwrap();
            byte[0] ^= 1;
            file.write_all_at(&byte, at).unwrap();
        }
        changed += 1;
    }
    changed
}

/// Runs a session without faults, except for the planted one, and checks that the run fails with one of these words. With a tenth of
/// the deadlines, a busy machine can end a run before it comes to the defect; then there is another run.
fn is_found(planted: Planted, words: &[&str]) {
    let mut failures = Vec::new();
    for _ in 0..ATTEMPTS {
        match run(Schedule::calm(1), Some(planted)) {
            Ok(_) => panic!("{planted:?} was not found"),
            Err(failure) if words.iter().any(|word| failure.contains(word)) => return,
            Err(failure) => failures.push(failure),
        }
    }
    panic!("{planted:?} was not found, but {}", failures.join("\n"));
}

#[test]
fn a_session_without_a_planted_defect_has_no_failure() {
    if let Err(failure) = run(Schedule::calm(1), None) {
        panic!("{failure}");
    }
}

/// Each defect, with words of the failures that may show it.
const DEFECTS: &[(Planted, &[&str])] = &[
    // The catalog is changed, too, and some readers may not have read it yet.
    (Planted::WrongBytes, &["WRONG BYTES"]),
    (Planted::LeftProcess, &["sleep"]),
    (Planted::LeftFolder, &["dayfly-left"]),
    (Planted::HalfVisible, &["HALF-VISIBLE"]),
    (Planted::Hang, &["UNEXPLAINED", "HANGS", "LATE"]),
    (Planted::Restarted, &["UNEXPLAINED", "REPLACED", "DIED"]),
];

#[test]
fn planted_defects_are_found() {
    first_rows(1, DEFECTS).iter().for_each(|&(planted, words)| is_found(planted, words));
}
