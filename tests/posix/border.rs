//! Programs at the border to C: pointers that lead nowhere, and threads that are canceled.

use std::fs;
use std::path::Path;

use super::{compile, plainly, tree_for_calls};
use crate::harness::twin::twin;
use crate::harness::{Ground, output_of, pack, text};

/// SEMANTICS: "A pointer to unmapped memory gives EFAULT, as from the kernel. This holds for paths in the namespace and outside of
/// it, and for all memory that a call reads or writes. If only the beginning of a buffer is mapped, a read fills that part."
#[test]
fn bad_pointers_give_what_they_give_on_a_plain_directory() {
    let outside = |ground: &Ground| {
        let folder = ground.at("outside");
        if !folder.exists() {
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("list"), (1..=2000).map(|number| format!("{number}\n")).collect::<String>()).unwrap();
        }
        folder
    };
    let run = |ground: &Ground, root: &Path| {
        let program = compile(ground, "pointers.c", &[]);
        text(&plainly(ground, &[program.as_os_str(), root.as_os_str(), outside(ground).as_os_str()]).stdout)
    };
    let (twin, expected) = twin(tree_for_calls, run);
    assert!(expected.lines().count() > 1600 && !expected.contains("crashed"), "{expected}");
    let program = twin.cluster.at("pointers");
    for node in 0..2 {
        let found = output_of(twin.exec_command(node).arg(&program).arg(&twin.root).arg(outside(&twin.cluster)));
        // A bad buffer is not a failure of the session, so no line is printed about it.
        assert_eq!(text(&found.stderr), "", "node {node}");
        let found = text(&found.stdout);
        let different: Vec<_> = expected.lines().zip(found.lines()).filter(|(expected, found)| expected != found).collect();
        assert!(different.is_empty(), "node {node}: {different:#?}");
        assert_eq!(expected.lines().count(), found.lines().count(), "node {node}");
    }
    twin.cluster.down();
}

/// The number of threads that are canceled on each node.
const CANCELS: &str = "10000";

/// SEMANTICS: "A thread may be canceled (pthread_cancel) in any call: it ends there, or at its next cancellation point if the
/// library is waiting for the server. Reading and opening files of the namespace are cancellation points, as elsewhere."
#[test]
fn threads_are_canceled_in_any_call_and_nothing_is_lost() {
    let ground = Ground::new();
    let (root, plain) = (ground.at("tree"), ground.at("plain"));
    fs::create_dir(&root).unwrap();
    for number in 0..150_u32 {
        let bytes: Vec<u8> = (0..400_000_u32).map(|at| (at.wrapping_mul(2 * number + 977) >> 7) as u8).collect();
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
    let program = compile(&cluster, "cancel.c", &[]);
    for node in 0..2 {
        let mut command = cluster.dayfly();
        command.args(["exec", "--node", &node.to_string(), "--"]).arg(&program).arg(CANCELS).args([&root, &plain]);
        let found = output_of(&mut command);
        let expected = format!("{CANCELS} canceled, 0 descriptors and 0 lost, some reads\n");
        assert_eq!(text(&found.stdout), expected, "node {node}: {}", text(&found.stderr));
        fs::remove_file(ground_fifo(&plain)).unwrap();
    }
    cluster.down();
}

/// Returns the path at which `cancel.c` creates a FIFO.
fn ground_fifo(plain: &Path) -> std::path::PathBuf {
    plain.with_extension("fifo")
}
