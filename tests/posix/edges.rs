//! Calls at the edges of what is allowed.

use std::path::Path;

use crate::harness::twin::twin;
use crate::harness::{Ground, output_of, text};
use crate::{compile, plainly, tree_for_calls};

/// Compares what `edges.c` prints over a plain directory and over the namespace, line by line.
fn prints_the_same(mode: &str) {
    let run = |ground: &Ground, root: &Path| {
        let program = compile(ground, "edges.c", &[]);
        text(&plainly(ground, &[program.as_os_str(), mode.as_ref(), root.as_os_str()]).stdout)
    };
    let (twin, expected) = twin(tree_for_calls, run);
    assert!(expected.lines().count() > 20, "{expected}");
    let program = twin.cluster.at("edges");
    for node in 0..2 {
        let found = text(&output_of(twin.exec_command(node).arg(&program).arg(mode).arg(&twin.root)).stdout);
        let mut title = "";
        let mut differences = Vec::new();
        for (expected, found) in expected.lines().zip(found.lines()) {
            if expected.starts_with('-') {
                title = expected;
            }
            if expected != found {
                differences.push(format!("{title}\nplain: {expected}\nours:  {found}"));
            }
        }
        assert!(differences.is_empty(), "{} differences\n{}", differences.len(), differences.join("\n"));
        assert_eq!(found.lines().count(), expected.lines().count());
    }
    twin.cluster.down();
}

#[test]
fn without_a_free_number_every_open_fails_alike() {
    prints_the_same("numbers");
}

#[test]
fn bad_pointers_give_the_error_of_a_plain_directory_for_every_kind_of_descriptor() {
    prints_the_same("pointers");
}

#[test]
fn huge_offsets_and_advice_give_the_results_of_a_plain_directory() {
    prints_the_same("offsets");
}

#[test]
fn moving_bytes_fails_as_from_a_plain_directory() {
    prints_the_same("moves");
}
