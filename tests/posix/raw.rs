//! Descriptors behind the C library's back: system calls by number, and system calls that no library sees.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;

use crate::harness::twin::{Twin, twin};
use crate::harness::{self, Ground, output_of, text};
use crate::posix::{compile, plainly, tree_for_calls};

/// Compares what `raw.c` prints over a plain directory and over the namespace, line by line.
fn prints_the_same(mode: &str) {
    let run = |ground: &Ground, root: &Path| {
        let program = compile(ground, "raw.c", &[]);
        text(&plainly(ground, &[program.as_os_str(), mode.as_ref(), root.as_os_str()]).stdout)
    };
    let (twin, expected) = twin(tree_for_calls, run);
    assert!(expected.lines().count() > 20, "{expected}");
    let program = twin.cluster.at("raw");
    for node in 0..2 {
        let found = output_of(twin.exec_command(node).arg(&program).arg(mode).arg(&twin.root));
        let found = text(&found.stdout);
        let differences: Vec<_> =
            expected.lines().zip(found.lines()).filter(|(left, right)| left != right).map(|(l, r)| format!("{l}\n{r}")).collect();
        assert!(differences.is_empty() && found.lines().count() == expected.lines().count(), "{}", differences.join("\n"));
    }
    twin.cluster.down();
}

/// SEMANTICS: "System calls by number (syscall) see the namespace as the C library's functions do."
#[test]
fn system_calls_by_number_see_the_namespace() {
    prints_the_same("calls");
}

/// SEMANTICS: "If the program closes a descriptor by a system call of its own, which the library does not see, the descriptor's
/// number then stands for whatever the kernel has there. Every call notices that, except read, lseek, and the first four calls of
/// fstat, isatty and posix_fadvise about a file."
#[test]
fn a_number_closed_behind_the_library_s_back_belongs_to_the_kernel() {
    prints_the_same("reuse");
}

/// Runs `raw.c kept`, calls `meanwhile` after the program has read the namespace for the first time, and returns what the program
/// prints afterward.
fn without_descriptors(how: &str, meanwhile: impl FnOnce(&Twin)) -> (String, String) {
    let (twin, ()) = twin(tree_for_calls, |_, _| ());
    let program = compile(&twin.cluster, "raw.c", &[]);
    let own = twin.cluster.at("own");
    fs::create_dir(&own).unwrap();
    let mut command: Command = twin.exec_command(0);
    command.arg(&program).arg("kept").args([&twin.root, &twin.plain, &own]).arg(how);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while line != "ready\n" {
        assert!(line.is_empty() || line == "before: 0 wrong, 0 failed\n", "{line}");
        line.clear();
        assert!(output.read_line(&mut line).unwrap() > 0);
    }
    meanwhile(&twin);
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let (mut rest, mut failures) = (String::new(), String::new());
    output.read_to_string(&mut rest).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut failures).unwrap();
    assert!(child.wait().unwrap().success(), "{failures}");
    twin.cluster.down();
    (rest, failures)
}

/// SEMANTICS: "If the program closes one of the library's descriptors by a system call of its own, the library opens it again;
/// where that is impossible, calls that need it fail with EIO."
#[test]
fn a_program_that_closes_the_library_s_descriptors_gets_right_bytes_and_keeps_its_own_files() {
    // The program's own files come from `open`, `fopen`, and a system call that no library sees; in the last round, the program
    // closes all descriptors by `syscall`.
    for how in ["0", "1", "2", "3"] {
        let (found, failures) = without_descriptors(how, |_| ());
        let expected = " wrong, 0 spoiled\n0 could not be closed\n";
        assert!(found.ends_with(&format!(" read, 0{expected}")), "{how}: {found}");
        let failed: usize = failures.split_whitespace().next().unwrap().parse().unwrap();
        let read: usize = found.split_whitespace().nth(1).unwrap().parse().unwrap();
        assert!(failed == 0 && read >= 15, "{how}: {found}{failures}");
    }
}

/// SEMANTICS: "If the program has opened a file at such a number, the library never uses or closes that file, not even after the
/// server has died."
#[test]
fn after_the_server_died_a_program_without_the_library_s_descriptors_gets_no_wrong_bytes() {
    for how in ["0", "2"] {
        let (found, _) = without_descriptors(how, |twin| {
            harness::signal(twin.cluster.pids()[&0], Signal::SIGKILL);
            harness::wait_until("the server is gone", || !twin.cluster.pids().contains_key(&0));
        });
        assert!(found.ends_with(" read, 0 wrong, 0 spoiled\n0 could not be closed\n"), "{how}: {found}");
    }
}

/// SEMANTICS: "dup2 onto one of the library's own descriptors moves that descriptor to another
/// number. If another thread keeps using the descriptor for 5 s, or if `dup2` is called by a signal handler that interrupted a use,
/// dup2 fails with EBUSY."
#[test]
fn the_library_s_descriptors_look_closed_and_give_way() {
    let run = |ground: &Ground, root: &Path| {
        let own = ground.at("own");
        fs::create_dir(&own).unwrap();
        let program = compile(ground, "raw.c", &[]);
        let arguments: [&OsStr; 5] = [program.as_os_str(), "high".as_ref(), root.as_os_str(), root.as_os_str(), own.as_os_str()];
        text(&plainly(ground, &arguments).stdout)
    };
    let (twin, expected) = twin(tree_for_calls, run);
    let program = twin.cluster.at("raw");
    let mut command = twin.exec_command(0);
    let found = output_of(command.arg(&program).arg("high").args([&twin.root, &twin.plain]).arg(twin.cluster.at("own")));
    assert_eq!(text(&found.stdout), expected, "{}", text(&found.stderr));
    assert!(expected.starts_with("0 foreign descriptors\n0 refused\n"), "{expected}");
    twin.cluster.down();
}
