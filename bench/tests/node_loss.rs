//! The table of `node-loss.sh` holds measurements against their goals, and a goal that was missed, or not measured, is an error.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::process::Command;

/// One run of the row `killed`: the session of three nodes, and the one that lost a node.
fn killed(rate: u32, longest_ms: u32, errors: u32) -> String {
    format!(
        r#"{{"row": "killed", "part": "three", "reference": 100}}
{{"row": "killed", "part": "four", "rate": {rate}, "whole": 90, "recovered_rate": 95, "epoch_origins": 0.5, "origins": 1.0, "servers_origins": 1.0, "later_origins": 0, "errors": {errors}, "wrong": 0, "longest_ms": {longest_ms}, "not_recovered": 0}}
"#
    )
}

/// Returns the table and whether all goals were reached.
fn table(results: &str, options: &[&str]) -> (String, bool) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("results");
    fs::write(&file, results).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("node_loss_table.py");
    let output = Command::new("python3").arg(script).args(options).arg(file).output().unwrap();
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    (String::from_utf8(output.stdout).unwrap(), output.status.success())
}

/// Returns the verdict in the line with this title.
fn verdict<'a>(table: &'a str, title: &str) -> &'a str {
    table.lines().find(|line| line.contains(title)).unwrap().rsplit(' ').next().unwrap()
}

#[test]
fn a_rate_is_held_against_its_goal_by_the_median_and_a_wait_in_every_run() {
    let good = killed(80, 200, 0);
    let (text, all) = table(&[&*good, &killed(10, 200, 0), &good].concat(), &[]);
    assert!(all, "{text}");
    assert_eq!((verdict(&text, "rest of the epoch"), verdict(&text, "longest read")), ("pass", "pass"), "{text}");
    let (text, all) = table(&[&*good, &killed(80, 1001, 0), &good].concat(), &[]);
    assert!(!all, "{text}");
    assert_eq!((verdict(&text, "rest of the epoch"), verdict(&text, "longest read")), ("pass", "MISSED"), "{text}");
    let (text, all) = table(&killed(69, 200, 0), &[]);
    assert!(!all, "{text}");
    assert_eq!((verdict(&text, "rest of the epoch"), verdict(&text, "longest read")), ("MISSED", "pass"), "{text}");
    assert!(table(&killed(69, 200, 1), &["--no-goals"]).1);
}

#[test]
fn a_session_that_failed_is_a_missed_goal() {
    let failed = r#"{"row": "silent", "part": "silent", "errors": 1}"#;
    let (text, all) = table(failed, &[]);
    assert!(!all, "{text}");
    assert_eq!((verdict(&text, "read errors"), verdict(&text, "longest read")), ("MISSED", "MISSING"), "{text}");
    // The session that lost a node left no line at all.
    let (text, all) = table(&[&*killed(80, 200, 0), r#"{"row": "killed", "part": "three", "reference": 100}"#].concat(), &[]);
    assert!(!all, "{text}");
    assert_eq!(verdict(&text, "read errors"), "MISSED", "{text}");
}
