//! The cluster harness: real servers of the real program, in sessions that run in parallel, each in its own folders. When a test
//! ends, whether it passed or failed, the processes of its session are gone. A failing test says whether the machine was too busy for
//! it ([`witness`]), and only so many servers run at once ([`permits`]).

pub(crate) mod alone;
pub(crate) mod drive;
pub(crate) mod hosts;
pub(crate) mod inside;
pub(crate) mod permits;
pub(crate) mod programs;
pub(crate) mod samples;
pub(crate) mod strace;
pub(crate) mod twin;
pub(crate) mod witness;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::unistd::Pid;
use permits::Permits;
pub(crate) use programs::{is_installed, program, skip};
use tempfile::TempDir;
use witness::Witness;

/// Creates two tests from each function: one with few stage-in workers per server, and one with many.
macro_rules! with_few_and_many_workers {
    ($($test:ident),* $(,)?) => {
        mod with_few_workers {
            $(#[test] fn $test() { crate::harness::with_workers(0, super::$test) })*
        }
        mod with_many_workers {
            $(#[test] fn $test() { crate::harness::with_workers(1, super::$test) })*
        }
    };
}
pub(crate) use with_few_and_many_workers;

thread_local! {
    /// The number of stage-in workers per server in sessions that this thread starts; `None` lets the servers choose.
    static WORKERS: Cell<Option<u16>> = const { Cell::new(None) };
}

/// Runs a test with few (`which` 0) or many (1) stage-in workers per server: 1 and 7, or the two numbers in
/// `DAYFLY_TEST_STAGE_IN_WORKERS`.
pub(crate) fn with_workers<R>(which: usize, test: impl FnOnce() -> R) -> R {
    let wanted = std::env::var("DAYFLY_TEST_STAGE_IN_WORKERS").unwrap_or_else(|_| "1,7".to_owned());
    let counts: Vec<u16> = wanted.split(',').map(|count| count.parse().expect("a number of workers")).collect();
    WORKERS.set(Some(counts[which]));
    let result = test();
    WORKERS.set(None);
    result
}

/// Returns those rows of a table that a test runs: all with `DAYFLY_TEST_ALL_ROWS`, as in `.ci/long`, or else the first so many. For
/// tables whose rows take long and have much in common.
pub(crate) fn first_rows<T>(count: usize, rows: &[T]) -> &[T] {
    if std::env::var_os("DAYFLY_TEST_ALL_ROWS").is_some() { rows } else { &rows[..count] }
}

/// The time limit of any command in a test. A command that takes longer is assumed to hang.
pub(crate) const COMMAND_TIMEOUT: Duration = Duration::from_secs(120);

/// The folders of a test, and the program to run in them.
pub(crate) struct Ground {
    /// Dropped before the folders, because it reads the logs in them.
    pub(crate) witness: Witness,
    pub(crate) runtime: TempDir,
    pub(crate) data: TempDir,
    pub(crate) work: TempDir,
    /// The permits of the sessions that run here.
    permits: Mutex<Vec<Permits>>,
}

impl Drop for Ground {
    /// Removes the mounts of small drives, without which the folders cannot be removed. A test's own variable for a mount may live
    /// longer than its session.
    fn drop(&mut self) {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let points = mounts.lines().filter_map(|line| line.split(' ').nth(1)).map(Path::new);
        for point in points.filter(|point| point.starts_with(self.work.path())) {
            let _ = program("umount").arg("-l").arg(point).status();
        }
    }
}

impl Ground {
    pub(crate) fn new() -> Self {
        let folder = || tempfile::Builder::new().prefix("df").tempdir().unwrap();
        let runtime = folder();
        Self { witness: Witness::new(runtime.path()), runtime, data: folder(), work: folder(), permits: Mutex::default() }
    }

    /// Returns a path in the folder for the test's own files.
    pub(crate) fn at(&self, name: impl AsRef<Path>) -> PathBuf {
        self.work.path().join(name)
    }

    /// Returns a command that runs the program, without arguments yet.
    pub(crate) fn dayfly(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dayfly"));
        command.env("DAYFLY_RUNTIME_DIR", self.runtime.path()).env("TMPDIR", self.data.path());
        // The tests themselves may be running within a job.
        for name in ["DAYFLY_SESSION", "DAYFLY_NODE", "SLURM_TMPDIR", "SLURM_JOB_ID", "FLUX_URI", "PBS_JOBID", "LSB_JOBID"] {
            command.env_remove(name);
        }
        command.current_dir(self.work.path()).stdin(Stdio::null());
        command
    }

    /// Runs a command until it exits, for at most [`COMMAND_TIMEOUT`]. If it starts servers, first waits for their permits.
    pub(crate) fn output(&self, arguments: &[&str]) -> Output {
        let servers = permits::servers_of(arguments);
        let permits = (servers > 0).then(|| permits::take(servers));
        let output = output_of(self.dayfly().args(arguments));
        match arguments.first() {
            Some(&"up") if output.status.success() => self.hold(permits),
            Some(&"down") if output.status.success() => {
                self.permits.lock().unwrap_or_else(PoisonError::into_inner).pop();
            }
            _ => {}
        }
        output
    }

    /// Holds the permits of a session until it is ended with [`Self::output`], or until this value is dropped.
    pub(crate) fn hold(&self, permits: impl IntoIterator<Item = Permits>) {
        self.permits.lock().unwrap_or_else(PoisonError::into_inner).extend(permits);
    }

    /// Runs a command, which must succeed, and returns its standard output.
    pub(crate) fn ok(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        assert!(output.status.success(), "dayfly {arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// Runs a command, which must fail with this status, and returns its standard error.
    pub(crate) fn fails(&self, status: i32, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "dayfly {arguments:?}: {}{message}", text(&output.stdout));
        message
    }

    /// Starts a session of several nodes.
    pub(crate) fn up(self, nodes: u16) -> Cluster {
        self.up_with(nodes, &[])
    }

    pub(crate) fn up_with(self, nodes: u16, options: &[&str]) -> Cluster {
        // A server that a test kills stays away, and what cannot be read by itself cannot be read, so that the test sees what the
        // others do without it.
        self.up_rejoining(nodes, &[options, &["--no-rejoin", "--recovery-timeout", "0"]].concat())
    }

    /// Starts local servers with further options. The supervisor starts a new server in the place of one that has died.
    pub(crate) fn up_rejoining(self, nodes: u16, options: &[&str]) -> Cluster {
        let (nodes_text, workers) = (nodes.to_string(), WORKERS.get().map(|workers| workers.to_string()));
        let workers = workers.as_deref().map(|workers| ["--stage-in-workers", workers]);
        let workers = workers.as_ref().map_or(&[][..], |option| option);
        let id = self.ok(&[&["up", "--local", &nodes_text], workers, options].concat()).trim().to_owned();
        Cluster { ground: self, id }
    }

    /// Asserts that no session has left a file or a folder.
    pub(crate) fn assert_clean(&self) {
        let left = self.left_behind();
        assert!(left.is_empty(), "left behind: {left:?}");
    }

    /// Waits until no file or folder of a session is left. Processes that end without a command clean up by themselves.
    #[track_caller]
    pub(crate) fn wait_until_clean(&self, what: &str) {
        wait_until(&format!("{what}, and nothing is left behind"), || self.left_behind().is_empty());
    }

    fn left_behind(&self) -> Vec<PathBuf> {
        let entries =
            |folder: &TempDir| fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
        [entries(&self.runtime), entries(&self.data)].concat()
    }
}

/// A running session.
pub(crate) struct Cluster {
    pub(crate) ground: Ground,
    pub(crate) id: String,
}

impl std::ops::Deref for Cluster {
    type Target = Ground;

    fn deref(&self) -> &Ground {
        &self.ground
    }
}

impl Cluster {
    /// Returns the session's folder.
    pub(crate) fn folder(&self) -> PathBuf {
        let user = fs::read_dir(self.runtime.path()).unwrap().next().unwrap().unwrap().path();
        user.join(&self.id)
    }

    pub(crate) fn location(&self) -> dayfly_client::locate::SessionFolder {
        dayfly_client::locate::SessionFolder { session: self.id.parse().unwrap(), folder: self.folder() }
    }

    /// Attaches to a node through the client library.
    pub(crate) fn view(&self, node: u16) -> dayfly_client::View {
        let session = dayfly_client::Session::attach_to(&self.location(), dayfly_meta::id::NodeId(node)).unwrap();
        dayfly_client::View::new(session)
    }

    /// Returns the output of `dayfly status --json`.
    pub(crate) fn status(&self) -> serde_json::Value {
        serde_json::from_str(&self.ok(&["status", "--json"])).unwrap()
    }

    /// Returns the bytes that staged-in data occupies on all nodes.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.status()["nodes"].as_array().unwrap().iter().map(|node| node["used_bytes"].as_u64().unwrap()).sum()
    }

    /// Returns the process ids of the live servers, by node.
    pub(crate) fn pids(&self) -> BTreeMap<u16, i32> {
        let location = self.location();
        location.live_nodes().into_iter().filter_map(|node| Some((node.0, location.pid(node)?))).collect()
    }

    /// Returns what `status` reports on a node, as soon as every node answers or is lost.
    #[track_caller]
    pub(crate) fn status_on(&self, node: u16) -> serde_json::Value {
        let deadline = Instant::now() + COMMAND_TIMEOUT;
        loop {
            let output = output_of(self.dayfly().args(["status", "--json"]).env("DAYFLY_NODE", node.to_string()));
            let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            let is_known = |node: &serde_json::Value| node["error"].is_null() || node["lost_for_ms"].is_u64();
            if status["nodes"].as_array().is_some_and(|nodes| nodes.iter().all(is_known)) {
                return status;
            }
            assert!(Instant::now() < deadline, "{status}{}", text(&output.stderr));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Kills a server with SIGKILL, and waits until it is gone.
    pub(crate) fn kill(&self, node: u16) {
        let pid = self.pids()[&node];
        signal(pid, Signal::SIGKILL);
        wait_until("the killed server is gone", || !self.pids().contains_key(&node));
    }

    pub(crate) fn stage(&self, sources: &[&Path], target: &str) {
        let sources: Vec<&str> = sources.iter().map(|source| source.to_str().unwrap()).collect();
        self.ok(&[&["stage-in"], &sources[..], &[target]].concat());
    }

    /// Packs a folder of the ground as a compressed tar, and stages that in. Samples of a compressed tar cannot be read again by
    /// themselves, so only their owners can serve them: reads fail while the owner does not answer.
    pub(crate) fn stage_compressed(&self, folder: &str, target: &str) {
        let archive = self.at(format!("{folder}.tar.gz"));
        pack(&archive, &self.at(folder), &[]);
        self.stage(&[&archive], target);
    }

    /// Ends the session with `dayfly down`, and asserts that nothing is left.
    pub(crate) fn down(self) {
        self.ok(&["down"]);
        assert!(self.pids_or_none().is_empty(), "left behind: servers");
        self.assert_clean();
    }

    fn pids_or_none(&self) -> Vec<i32> {
        if fs::read_dir(self.runtime.path()).unwrap().next().is_some() { self.pids().into_values().collect() } else { Vec::new() }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // While the servers live, and before their logs are gone.
        self.witness.testify();
        for pid in self.pids_or_none() {
            // It may have exited on its own.
            let _ = nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// Sends a signal to a process, which must be alive. After SIGSTOP, waits until its threads have stopped: the kernel tells one of them,
/// and until that one gets a processor, the others go on.
pub(crate) fn signal(pid: i32, signal: Signal) {
    nix::sys::signal::kill(Pid::from_raw(pid), signal).unwrap();
    if signal == Signal::SIGSTOP {
        wait_until(&format!("process {pid} has stopped"), || has_stopped(pid));
    }
}

/// Returns whether no thread of a process runs. A thread that waits for a drive (`D`) stops when it leaves the kernel, once another one
/// has stopped. What has ended does not run either.
fn has_stopped(pid: i32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    let stats = threads.flatten().filter_map(|thread| fs::read_to_string(thread.path().join("stat")).ok());
    let states: Vec<char> = stats.filter_map(|stat| stat.rsplit(") ").next()?.chars().next()).collect();
    let is_told = states.iter().any(|state| matches!(state, 'T' | 't'));
    states.iter().all(|state| matches!(state, 'T' | 't' | 'Z' | 'X') || (*state == 'D' && is_told))
}

/// Runs a command until it exits, for at most [`COMMAND_TIMEOUT`].
pub(crate) fn output_of(command: &mut Command) -> Output {
    output_within(command, COMMAND_TIMEOUT)
}

/// Runs a command until it exits, for at most `limit`.
pub(crate) fn output_within(command: &mut Command, limit: Duration) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let drain = |mut pipe: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            pipe.read_to_end(&mut bytes).unwrap();
            bytes
        })
    };
    let (stdout, stderr) = (drain(Box::new(child.stdout.take().unwrap())), drain(Box::new(child.stderr.take().unwrap())));
    let status = wait_for(&mut child, limit).unwrap_or_else(|| {
        child.kill().unwrap();
        panic!("{command:?} hangs");
    });
    Output { status, stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap() }
}

pub(crate) fn wait_for(child: &mut Child, limit: Duration) -> Option<std::process::ExitStatus> {
    let deadline = Instant::now() + limit;
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    None
}

/// A call that takes longer than this hangs, unless the machine is busy.
const HANG_GUARD: Duration = Duration::from_secs(60);

/// Asserts that what began at `start` did not hang.
#[track_caller]
pub(crate) fn assert_no_hang(start: Instant) {
    assert_within(HANG_GUARD, start);
}

/// Asserts that what began at `start` took at most `limit`, and as long as this process waited for a processor. Only tests whose
/// subject is a deadline use this: `tests/tidy.rs` lists them.
#[track_caller]
pub(crate) fn assert_within(limit: Duration, start: Instant) {
    let (took, late) = (start.elapsed(), witness::lateness_since(start));
    assert!(took < limit + late, "took {took:?} instead of at most {limit:?}; this process was late by {late:?}");
}

#[track_caller]
pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let (start, mut pause) = (Instant::now(), Duration::from_millis(2));
    while !condition() {
        assert!(start.elapsed() < HANG_GUARD + witness::lateness_since(start), "waited in vain until {what}");
        std::thread::sleep(pause);
        // Most conditions start a command, which takes longer than the first pauses.
        pause = (pause * 5 / 4).min(Duration::from_millis(50));
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a system tool that must succeed.
pub(crate) fn tool(program: &str, arguments: &[&OsStr]) {
    let output = output_of(programs::program(program).args(arguments));
    assert!(output.status.success(), "{program} {arguments:?}: {}", text(&output.stderr));
}

/// Copies a program that a test runs afterward. `cp` does the work, so that no other thread's child inherits a descriptor through
/// which the copy can still be written: the kernel would then refuse to run the copy.
pub(crate) fn copy_program(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    tool("cp", &[from.as_ref().as_os_str(), to.as_ref().as_os_str()]);
}

/// Packs a folder's content with GNU tar, sorted by name, with these additional options. The archive's name determines its
/// compression.
pub(crate) fn pack(archive: &Path, folder: &Path, options: &[&str]) {
    let mut arguments: Vec<&OsStr> = options.iter().map(OsStr::new).collect();
    arguments.extend(["--sort=name", "-c", "-C"].map(OsStr::new));
    arguments.extend([folder.as_os_str(), OsStr::new(".")]);
    let output = output_of(program("tar").args(&arguments));
    assert!(output.status.success(), "tar {arguments:?}: {}", text(&output.stderr));
    fs::write(archive, compress(archive, &output.stdout)).unwrap();
}

fn compress(archive: &Path, bytes: &[u8]) -> Vec<u8> {
    match archive.extension().unwrap().to_str().unwrap() {
        "gz" => {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        "bz2" => {
            let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        "xz" => {
            let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 1);
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        "zst" => zstd::encode_all(bytes, 1).unwrap(),
        "lz4" => {
            let mut encoder = lz4_flex::frame::FrameEncoder::new(Vec::new());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        _ => bytes.to_vec(),
    }
}

/// Everything in a tree, by path.
pub(crate) type Tree = BTreeMap<Vec<u8>, Node>;

/// The file, directory or link at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) kind: char,
    pub(crate) mode: u32,
    pub(crate) mtime: (i64, i64),
    pub(crate) content: Vec<u8>,
    /// The first of the file's paths in byte order. For a hard link, it can differ from the node's own path.
    pub(crate) first: Vec<u8>,
}

/// Reads a tree from a plain folder. The result does not include the folder itself.
pub(crate) fn read_tree(folder: &Path) -> Tree {
    let mut tree = Tree::new();
    let mut waiting = vec![Vec::new()];
    let mut inodes = Vec::new();
    while let Some(path) = waiting.pop() {
        let full = folder.join(OsStr::from_bytes(&path));
        let metadata = fs::symlink_metadata(&full).unwrap();
        let kind = metadata.file_type();
        let (kind, content) = if kind.is_dir() {
            for entry in fs::read_dir(&full).unwrap() {
                let name = entry.unwrap().file_name();
                waiting.push(dayfly_meta::path::join(&path, name.as_bytes()));
            }
            ('d', Vec::new())
        } else if kind.is_symlink() {
            ('l', fs::read_link(&full).unwrap().as_os_str().as_bytes().to_vec())
        } else {
            ('f', fs::read(&full).unwrap())
        };
        if kind == 'f' {
            inodes.push((metadata.ino(), path.clone()));
        }
        let mode = metadata.permissions().mode() & 0o7777;
        let node = Node { kind, mode, mtime: (metadata.mtime(), metadata.mtime_nsec()), content, first: path.clone() };
        if !path.is_empty() {
            tree.insert(path, node);
        }
    }
    inodes.sort();
    let mut first: Option<(u64, Vec<u8>)> = None;
    for (inode, path) in inodes {
        match &first {
            Some((known, name)) if *known == inode => tree.get_mut(&path).unwrap().first = name.clone(),
            _ => first = Some((inode, path)),
        }
    }
    tree
}

/// Asserts that two trees are equal. A failure shows the first few differences.
pub(crate) fn assert_same_tree(expected: &Tree, found: &Tree, what: &str) {
    let mut differences = Vec::new();
    for (path, node) in expected {
        match found.get(path) {
            None => differences.push(format!("missing {}", text(path))),
            Some(other) if other != node => differences.push(format!("differs {}: {}", text(path), describe(node, other))),
            Some(_) => {}
        }
    }
    differences.extend(found.keys().filter(|path| !expected.contains_key(*path)).map(|path| format!("extra {}", text(path))));
    differences.truncate(10);
    assert!(differences.is_empty(), "{what}: {differences:#?}");
}

fn describe(expected: &Node, found: &Node) -> String {
    let short = |node: &Node| {
        format!("{} {:o} {:?} {} bytes, first {}", node.kind, node.mode, node.mtime, node.content.len(), text(&node.first))
    };
    let wrong = if expected.content == found.content { "" } else { ", wrong bytes" };
    format!("{} became {}{wrong}", short(expected), short(found))
}

/// Writes a program in another process. If this one wrote it, a child that another test starts meanwhile would hold the file open for
/// writing, and for that time the program could not be run.
pub(crate) fn write_program(path: &Path, script: &str) {
    let mut command = program("sh");
    command.args(["-c", "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\""]).arg(path).arg(script);
    assert!(command.status().unwrap().success());
}
