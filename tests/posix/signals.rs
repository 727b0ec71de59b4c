//! Signal handlers that use the namespace, at random instructions of the program and of the library.

use std::fs;
use std::path::PathBuf;

use super::{STRESS_SECONDS, compile};
use crate::harness::twin::Twin;
use crate::harness::{Ground, output_of, pack, text};

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
