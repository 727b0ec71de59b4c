//! Signal handlers that leave by `siglongjmp`, in the middle of calls on the namespace.

use std::fs;

use crate::harness::{Ground, output_of, pack, text};
use crate::posix::compile;

/// The number of jumps on each node.
const JUMPS: &str = "2000";

/// SEMANTICS: "A handler may leave by siglongjmp: the call that it interrupted does not continue, and all later calls work as
/// before."
#[test]
fn a_handler_that_jumps_out_of_a_call_leaves_everything_in_order() {
    let ground = Ground::new();
    let (root, plain) = (ground.at("tree"), ground.at("plain"));
    fs::create_dir(&root).unwrap();
    for number in 0..150_u32 {
        let len = if number % 3 == 0 { 400_000 } else { 3000 + number };
        let bytes: Vec<u8> = (0..len).map(|at| (at.wrapping_mul(2 * number + 977) >> 7) as u8).collect();
        fs::write(root.join(number.to_string()), bytes).unwrap();
    }
    let archive = ground.at("tree.tar");
    pack(&archive, &root, &["--format=posix"]);
    let prefix = root.to_str().unwrap().to_owned();
    // The arena is too small for the other node's files, so reads ask for them again and again.
    let cluster = ground.up_with(2, &["--prefix", &prefix, "--memory", "32MiB"]);
    cluster.ok(&["tune", "--cache", "off"]);
    cluster.stage(&[&archive], &prefix);
    fs::rename(&root, &plain).unwrap();
    let program = compile(&cluster, "jumps.c", &["-lrt"]);
    for node in ["0", "1"] {
        let mut command = cluster.dayfly();
        command.args(["exec", "--node", node, "--"]).arg(&program).arg(JUMPS).args([&root, &plain]);
        let found = output_of(&mut command);
        assert_eq!(text(&found.stdout), format!("{JUMPS} jumps\n"), "node {node}: {}{}", found.status, text(&found.stderr));
    }
    cluster.down();
}
