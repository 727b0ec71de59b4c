//! Tests that have a process of their own, because they change what all threads of a process share.

use std::process::Command;

use super::{COMMAND_TIMEOUT, output_within, text};

const ALONE: &str = "DAYFLY_TEST_ALONE";

/// Runs the calling test, whose name is `test`, in a process of its own, with a handler for SIGBUS. Returns whether this is that
/// process: elsewhere, the test has then passed.
///
/// Without the handler, no view shows bytes of a segment in place. With it, a drive that fails makes all batches of the process
/// invalid, also those of other tests.
#[track_caller]
pub(crate) fn runs_alone_with_views(test: &str) -> bool {
    if std::env::var_os(ALONE).is_some_and(|alone| alone == test) {
        dayfly_client::fault::install(nix::libc::sigaction).unwrap();
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads", "1"]).env(ALONE, test);
    // It may first wait for its permits.
    let output = output_within(&mut command, 5 * COMMAND_TIMEOUT);
    print!("{}{}", text(&output.stdout), text(&output.stderr));
    // Without a test of this name, the process succeeds, too.
    let has_passed = output.status.success() && text(&output.stdout).contains("test result: ok. 1 passed");
    assert!(has_passed, "{test} failed in a process of its own");
    false
}
