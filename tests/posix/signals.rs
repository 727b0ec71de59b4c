//! Signal handlers that use the namespace, at random instructions of the program and of the library.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::{STRESS_SECONDS, compile};
use crate::harness::twin::Twin;
use crate::harness::{Ground, output_of, pack, signal, text, wait_for, wait_until};

/// The path of the files in the namespace.
const ROOT: &str = "/dayfly/signals";

/// Number and size of each file. Both nodes have files of each kind: those that a server sends in one message, in several, or not
/// at all.
fn files() -> impl Iterator<Item = (u32, usize)> {
    let small = (0..60).map(|number| (number, 1000 + number as usize * 67));
    let middle = (60..76).map(|number| (number, 110_000 + number as usize));
    let large = (76..84).map(|number| (number, (9 << 20) + number as usize));
    small.chain(middle).chain(large)
}

/// Returns the bytes of a file, as `expected` in `signals.c` does.
fn bytes_of(number: u32, size: usize) -> Vec<u8> {
    (0..size as u32).map(|at| (at.wrapping_mul(2_654_435_761).wrapping_add(number.wrapping_mul(40503)) >> 13) as u8).collect()
}

/// A session, a program and its list of files.
struct Signals {
    twin: Twin,
    program: PathBuf,
    list: PathBuf,
}

impl Signals {
    /// Starts a session in which the files of the other node stay there: nothing is cached on drives, and the arena is smaller than
    /// these files.
    fn new() -> Self {
        let ground = Ground::new();
        let (plain, archive, list) = (ground.at("plain"), ground.at("plain.tar"), ground.at("list"));
        fs::create_dir(&plain).unwrap();
        for (number, size) in files() {
            fs::write(plain.join(format!("{number}-{size}")), bytes_of(number, size)).unwrap();
        }
        pack(&archive, &plain, &["--format=posix"]);
        let cluster = ground.up_with(2, &["--memory", "32MiB"]);
        cluster.ok(&["tune", "--cache", "off"]);
        cluster.stage(&[&archive], ROOT);
        let names: String = files().map(|(number, size)| format!("{number}-{size}\n")).collect();
        fs::write(&list, format!("{ROOT}\n{names}")).unwrap();
        let program = compile(&cluster, "signals.c", &["-Wextra"]);
        Self { twin: Twin { cluster, root: ROOT.into(), plain }, program, list }
    }

    /// Runs the program, which must find no wrong byte, and returns what it printed.
    fn run(self, what: &str, how_much: &str) {
        // No `--node`: the program finds its node by itself.
        let mut command = self.twin.cluster.dayfly();
        command.args(["exec", "--"]).arg(&self.program).args([what, how_much]).arg(&self.list);
        let found = output_of(&mut command);
        assert!(found.status.success(), "{}{}{}", found.status, text(&found.stdout), text(&found.stderr));
        assert!(found.stdout.ends_with(b" 0 wrong\n"), "{}", text(&found.stdout));
        println!("{}", text(&found.stdout));
        self.twin.cluster.down();
    }
}

/// SEMANTICS: "Signal handlers may use the namespace: the functions that POSIX calls async-signal-safe stay so, even if a handler
/// is the first to use the namespace."
#[test]
fn handlers_that_interrupt_anything_read_correct_bytes_without_a_hang() {
    let seconds = std::env::var(STRESS_SECONDS).unwrap_or_else(|_| "3".to_owned());
    Signals::new().run("run", &seconds);
}

#[test]
fn a_handler_may_be_the_first_to_use_the_namespace() {
    // A longer test has more of these processes, too.
    let runs = if std::env::var(STRESS_SECONDS).is_ok() { "200" } else { "40" };
    Signals::new().run("first", runs);
}

/// SEMANTICS: "While the library waits for the server, a signal with a handler waits too. A signal without a handler ends the program
/// at once."
#[test]
fn a_signal_whose_handler_is_gone_ends_a_program_that_waits() {
    let ground = Ground::new();
    fs::create_dir(ground.at("d")).unwrap();
    (0..40).for_each(|number| fs::write(ground.at(format!("d/{number}")), "a sample").unwrap());
    let cluster = ground.up_rejoining(2, &["--lost-after", "600"]);
    cluster.stage_compressed("d", "/dayfly/d");
    // Reads of its files wait until it is lost.
    let stopped = cluster.pids()[&1];
    signal(stopped, Signal::SIGSTOP);
    let program = "
import os, signal, subprocess
files = [os.open(f'/dayfly/d/{number}', os.O_RDONLY) for number in range(40)]
for action in (lambda *_: None, signal.SIG_DFL): signal.signal(signal.SIGTERM, action)
# Its child, of a vfork, sets no handler for SIGPIPE.
signal.signal(signal.SIGPIPE, lambda *_: None)
subprocess.run(['true'], check=True)
print(os.getpid(), flush=True)
while True:
    for file in files: os.pread(file, 10, 0)
";
    let mut command = cluster.dayfly();
    command.args(["exec", "--node", "0", "--", "python3", "-c", program]);
    let mut python = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(python.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let pid: i32 = line.trim().parse().unwrap();
    let blocked = || {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
        let mask = u64::from_str_radix(mask.trim(), 16).unwrap();
        [Signal::SIGPIPE, Signal::SIGTERM].map(|number| mask >> (number as i32 - 1) & 1 == 1)
    };
    wait_until("handlers wait", || blocked()[0]);
    assert!(!blocked()[1]);
    let begin = Instant::now();
    signal(pid, Signal::SIGTERM);
    let status = wait_for(&mut python, Duration::from_secs(20));
    signal(stopped, Signal::SIGCONT);
    assert_eq!(status.and_then(|status| status.signal()), Some(15), "after {:?}", begin.elapsed());
    cluster.down();
}

/// SEMANTICS: "If the server stands still, a signal with a handler waits for at most 2 s. After the handler, the call begins again;
/// `open` and `read` fail with EINTR if the handler was set without SA_RESTART."
#[test]
fn handlers_run_while_the_server_stands_still() {
    let ground = Ground::new();
    fs::create_dir(ground.at("d")).unwrap();
    (0..40).for_each(|number| fs::write(ground.at(format!("d/{number}")), "a sample").unwrap());
    let cluster = ground.up_with(2, &[]);
    cluster.stage_compressed("d", "/dayfly/d");
    cluster.ok(&["tune", "--cache", "off"]);
    // The interpreter's own handler writes the signal's number, which for SIGUSR1 is a line break, and takes note of it. What the
    // program has set runs when a call returns, for example with EINTR, after which the interpreter makes the call again. A signal
    // that comes just before the library holds signals back ends no call, as with a system call, and only the next one does.
    // It may also come while the handler of the one before runs, in which `print` would fail.
    let program = "
import os, signal, sys
files = [os.open(f'/dayfly/d/{number}', os.O_RDONLY) for number in range(40)]
os.set_blocking(1, False)
signal.set_wakeup_fd(1)
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'handled\\n'))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
while True:
    for file in files: assert os.pread(file, 10, 0) == b'a sample'
    with open('/dayfly/d/0') as again: assert again.read() == 'a sample'
";
    let mut command = cluster.dayfly();
    command.args(["exec", "--node", "0", "--", "python3", "-c", program]);
    let mut python = command.stdout(Stdio::piped()).spawn().unwrap();
    let output = BufReader::new(python.stdout.take().unwrap());
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    // A program that waited for the server would do so for longer.
    let next = || lines.recv_timeout(Duration::from_secs(30)).unwrap();
    let pid: i32 = next().parse().unwrap();
    let interrupt = || {
        let is_noticed = (0..3).any(|_| {
            signal(pid, Signal::SIGUSR1);
            while !next().is_empty() {}
            lines.recv_timeout(Duration::from_secs(5)).is_ok_and(|line| line == "handled")
        });
        assert!(is_noticed, "no call has failed with EINTR");
    };
    let server = cluster.pids()[&0];
    signal(server, Signal::SIGSTOP);
    (0..3).for_each(|_| interrupt());
    // It reads on where it was.
    signal(server, Signal::SIGCONT);
    interrupt();
    std::thread::sleep(Duration::from_secs(1));
    signal(server, Signal::SIGSTOP);
    let status = (0..3).find_map(|_| {
        signal(pid, Signal::SIGTERM);
        wait_for(&mut python, Duration::from_secs(30))
    });
    signal(server, Signal::SIGCONT);
    assert_eq!(status.and_then(|status| status.code()), Some(7));
    cluster.down();
}
