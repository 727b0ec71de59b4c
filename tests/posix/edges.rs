//! Calls at the edges of what is allowed.

use std::os::unix::fs::symlink;
use std::path::Path;

use crate::harness::twin::twin;
use crate::harness::{Ground, copy_program, output_of, text};
use crate::posix::{compile, plainly, tree_for_calls};

/// Compares what `edges.c` prints over a plain directory and over the namespace, line by line.
fn prints_the_same(mode: &str) {
    if !is_ext4(&std::env::temp_dir()) {
        eprintln!("skipped, because the temporary directory is not on ext4, which is what we compare with");
        return;
    }
    let run = |ground: &Ground, root: &Path| {
        let program = compile(ground, "edges.c", &[]);
        text(&plainly(ground, &[program.as_os_str(), mode.as_ref(), root.as_os_str()]).stdout)
    };
    let tree = |root: &Path| {
        tree_for_calls(root);
        copy_program("/bin/true", root.join("program"));
        symlink("sub", root.join("folder")).unwrap();
    };
    let (twin, expected) = twin(tree, run);
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

fn is_ext4(folder: &Path) -> bool {
    text(&output_of(crate::harness::program("stat").args(["-f", "-c", "%T"]).arg(folder)).stdout).trim() == "ext2/ext3"
}

/// SEMANTICS: "the size in units of 512; st_blksize is 131072;"
#[test]
fn the_preferred_size_of_reads_is_128_kib() {
    let (twin, ()) = twin(tree_for_calls, |_, _| ());
    assert_eq!(twin.shell(&format!("stat -c %o {0}/list {0}/sub", twin.root.display())), "131072\n131072\n");
    twin.cluster.down();
}

/// SEMANTICS: "Where the file systems of Linux differ, offsets and errors are those of ext4."
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

#[test]
fn invalid_arguments_give_the_error_of_a_plain_directory() {
    prints_the_same("arguments");
}

/// SEMANTICS: "The process's own `/proc/self/cwd`, `/proc/PID/cwd` and the like lead to its working directory."
#[test]
fn the_link_to_the_working_directory_leads_into_the_namespace() {
    prints_the_same("directory_link");
}

#[test]
fn links_to_descriptors_are_followed_only_as_far_as_the_kernel_follows_them() {
    prints_the_same("links");
}

#[test]
fn a_program_that_cannot_run_fails_as_in_a_plain_directory() {
    prints_the_same("programs");
}

/// SEMANTICS: "there are no extended attributes and no file handles; statx gives the basic attributes, whatever its mask asks for;"
#[test]
fn statx_gives_the_basic_attributes_for_every_mask() {
    let (twin, ()) = twin(tree_for_calls, |ground, _| drop(compile(ground, "edges.c", &[])));
    let found = twin.shell(&format!("{} statx {}", twin.cluster.at("edges").display(), twin.root.display()));
    let handle = "name_to_handle_at(AT_FDCWD, at(\"list\"), &handle, &mount, 0): -1 EOPNOTSUPP\n";
    assert_eq!(found, "0 7ff\n".repeat(5) + handle);
    twin.cluster.down();
}
