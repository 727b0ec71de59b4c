//! The library's own descriptors: no call reaches them, and they leave the program's numbers alone.

use std::path::Path;

use crate::harness::twin::twin;
use crate::harness::{Ground, output_of, text};
use crate::posix::{compile, plainly, tree_for_calls};

/// Runs `reserved.c` over a plain directory and over the namespace, and returns what it prints there.
fn run(mode: &str) -> (String, Vec<String>) {
    let plain = |ground: &Ground, root: &Path| {
        let program = compile(ground, "reserved.c", &[]);
        text(&plainly(ground, &[program.as_os_str(), mode.as_ref(), root.as_os_str(), root.as_os_str()]).stdout)
    };
    let (twin, expected) = twin(tree_for_calls, plain);
    let program = twin.cluster.at("reserved");
    let run = |node| text(&output_of(twin.exec_command(node).arg(&program).arg(mode).args([&twin.root, &twin.plain])).stdout);
    let found = (0..2).map(run).collect();
    twin.cluster.down();
    (expected, found)
}

/// SEMANTICS: "The library's own descriptors have high numbers, and look closed to the program: every call of the C library or of
/// syscall that names one fails with EBADF (poll says POLLNVAL), and the files of the namespace stay as they are."
#[test]
fn no_call_reaches_the_library_s_descriptors() {
    let (expected, found) = run("closed");
    assert!(expected.starts_with("1 calls, 0 differences\nfirst use: 0 reserved\n"), "{expected}");
    let expected = expected.replace("first use: 0 reserved", "first use: 1 reserved");
    for found in found {
        assert_eq!(found, expected);
    }
}

/// SEMANTICS: "If the soft limit on descriptors is low, the library raises it while its own descriptors get their numbers, if the
/// hard limit allows that. Otherwise these descriptors take some of the program's numbers."
#[test]
fn a_low_limit_leaves_the_program_its_numbers() {
    let (expected, found) = run("low");
    assert!(expected.ends_with("0 wrong\nstatus 0\n"), "{expected}");
    for found in found {
        assert_eq!(found, expected);
    }
}
