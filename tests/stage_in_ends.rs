//! How stage-ins end that do not simply succeed: what they wait for, what they refuse, and what their exit status says.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod harness;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use harness::{Ground, pack};

harness::with_few_and_many_workers! {
    a_stage_in_that_stands_still_ends_and_names_what_it_waits_for,
}

/// Holds up what a server reads of a file, until this is dropped.
struct HeldUp(std::process::Child);

impl HeldUp {
    fn new(pid: i32, path: &Path) -> Option<Self> {
        let mut strace = Command::new("strace");
        strace.args(["-f", "-qq", "-e", "trace=read,pread64", "-e", "inject=read,pread64:delay_enter=600s", "-P"]).arg(path);
        strace.args(["-o", "/dev/null", "-p", &pid.to_string()]).stderr(Stdio::piped());
        let mut child = strace.spawn().ok()?;
        // It traces from when the kernel says so of each thread, or it may not and ends.
        let traced = format!("TracerPid:\t{}\n", child.id());
        let is_traced = || {
            let mut threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
            threads.all(|thread| {
                fs::read_to_string(thread.unwrap().path().join("status")).is_ok_and(|status| status.contains(&traced))
            })
        };
        let start = Instant::now();
        while !is_traced() {
            if start.elapsed() > Duration::from_secs(5) || child.try_wait().unwrap().is_some() {
                let _ = child.kill();
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(Self(child))
    }
}

impl Drop for HeldUp {
    fn drop(&mut self) {
        // What it holds up goes on then.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn a_stage_in_that_stands_still_ends_and_names_what_it_waits_for() {
    let ground = Ground::new();
    fs::create_dir_all(ground.at("tree/class-1")).unwrap();
    (0..60).for_each(|number| fs::write(ground.at(format!("tree/class-1/{number}.bin")), vec![number; 3000]).unwrap());
    pack(&ground.at("a.tar"), &ground.at("tree"), &[]);
    let cluster = ground.up_with(2, &["--stage-in-timeout", "2"]);
    // A file of a tree is first read by a worker, an archive already while the stage-in is planned.
    for (source, held) in [("tree", "tree/class-1/1.bin"), ("a.tar", "a.tar")] {
        let path = cluster.at(held).canonicalize().unwrap();
        let pids = cluster.pids();
        let holding: Option<Vec<HeldUp>> = pids.values().map(|&pid| HeldUp::new(pid, &path)).collect();
        let Some(holding) = holding else {
            eprintln!("not run: strace cannot trace a server here");
            assert!(std::env::var_os("DAYFLY_TEST_ALL_PROGRAMS").is_none(), "strace is not installed, or may not trace");
            return cluster.down();
        };
        let start = Instant::now();
        let message = cluster.fails(1, &["stage-in", source, "/dayfly/x"]);
        assert!(start.elapsed() >= Duration::from_secs(2), "{message}");
        for word in ["nothing went forward", "2 s", "--stage-in-timeout", "node ", "reading", held] {
            assert!(message.contains(word), "{word:?} is not in {message}");
        }
        drop(holding);
        assert_eq!(cluster.ok(&["ls"]), "");
    }
    cluster.stage(&[&cluster.at("a.tar")], "/dayfly/x");
    cluster.down();
}
