//! Programs that have little memory or few descriptors left, or an environment of their own.

use std::path::Path;

use crate::harness::twin::twin;
use crate::harness::{Ground, output_of, text};
use crate::posix::{compile, plainly, tree_for_calls};

/// Returns what `limits.c` prints over a plain directory, and over the namespace.
fn run(mode: &str, options: &[&str]) -> (String, String) {
    let plain = |ground: &Ground, root: &Path| {
        let program = compile(ground, "limits.c", options);
        text(&plainly(ground, &[program.as_os_str(), mode.as_ref(), root.as_os_str()]).stdout)
    };
    let (twin, expected) = twin(tree_for_calls, plain);
    let program = twin.cluster.at("limits");
    let found = text(&output_of(twin.exec_command(1).arg(&program).arg(mode).arg(&twin.root)).stdout);
    twin.cluster.down();
    (expected, found)
}

/// SEMANTICS: "A process that has too little memory for a call, or for its first use of the namespace, gets ENOMEM or a shorter
/// result; it is not ended as long as its stack can grow."
#[test]
fn too_little_memory_is_an_error_of_the_call() {
    let (expected, found) = run("memory", &[]);
    assert_eq!(expected, "done\n");
    assert_eq!(found, "done\n");
}

/// SEMANTICS: "The first use of the namespace, and the first after a dataset came or went, need free numbers for a moment. If there
/// are none, the library raises the soft limit meanwhile, which other threads can notice. If the hard limit leaves none either, the
/// call fails with EMFILE, and a later call succeeds once there are some."
#[test]
fn the_first_use_needs_no_free_numbers_unless_the_hard_limit_is_reached() {
    let (expected, found) = run("descriptors", &[]);
    assert!(expected.ends_with("status 0\ndone\n"), "{expected}");
    assert_eq!(found, expected);
}

#[test]
fn threads_that_use_the_namespace_first_need_no_free_numbers_and_leave_the_limit_as_it_was() {
    let (expected, found) = run("threads", &[]);
    assert_eq!(expected, "done\n");
    assert_eq!(found, expected);
}

/// SEMANTICS: "A handler that is the first to use it needs a stack of 64 KiB."
#[test]
fn a_handler_on_a_stack_of_64_kib_can_be_the_first_to_use_the_namespace() {
    let (expected, found) = run("stack", &[]);
    assert_eq!(expected, "10\ndone\n");
    assert_eq!(found, expected);
}

#[test]
fn a_program_with_its_own_getenv_finds_the_session() {
    let (expected, found) = run("environment", &["-DOWN_GETENV"]);
    assert_eq!(expected, "300001\ndone\n");
    assert_eq!(found, expected);
}
