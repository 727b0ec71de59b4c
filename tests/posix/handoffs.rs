//! What the kernel or another process gets in place of a descriptor of the namespace: `handoffs.c` prints the same over a plain
//! directory.

use std::path::Path;

use crate::harness::twin::twin;
use crate::harness::{Ground, output_of, text};
use crate::posix::{compile, plainly, tree_for_calls};

/// Compares what a command of `handoffs.c` prints.
fn prints_the_same(command: &str) {
    let run = |ground: &Ground, root: &Path| {
        let program = compile(ground, "handoffs.c", &["-lrt"]);
        text(&plainly(ground, &[program.as_os_str(), command.as_ref(), root.as_os_str()]).stdout)
    };
    let (twin, expected) = twin(tree_for_calls, run);
    assert!(!expected.is_empty(), "{expected}");
    let program = twin.cluster.at("handoffs");
    for node in 0..2 {
        let found = output_of(twin.exec_command(node).arg(&program).arg(command).arg(&twin.root));
        let printed = text(&found.stdout);
        let lines = expected.lines().map(Some).chain([None]).zip(printed.lines().map(Some).chain([None]));
        let differences: Vec<_> = lines.filter(|(left, right)| left != right).map(|(l, r)| format!("{l:?}\n{r:?}")).collect();
        assert!(differences.is_empty(), "{}\n{}{}", found.status, differences.join("\n"), text(&found.stderr));
    }
    twin.cluster.down();
}

/// SEMANTICS: "Calls by number are not covered if they start processes (fork, vfork, clone), set signal handlers or masks
/// (rt_sigaction, rt_sigprocmask), or copy descriptors of other processes (pidfd_getfd)."
#[test]
fn system_calls_by_number_can_wait_and_list_and_send() {
    prints_the_same("numbers");
}

#[test]
fn descriptors_in_constant_memory_are_sent() {
    prints_the_same("constant");
}

/// SEMANTICS: "A process that receives a directory's descriptor over a socket gets an empty directory that has been deleted."
/// SEMANTICS: "An asynchronous read of a directory fails with EISDIR, as elsewhere."
#[test]
fn a_directory_that_the_kernel_or_another_process_gets_is_a_directory() {
    prints_the_same("directories");
}

#[test]
fn splice_fills_the_free_part_of_a_pipe() {
    prints_the_same("pipes");
}

#[test]
fn a_program_that_locks_all_its_memory_stays_small() {
    prints_the_same("locked");
}
