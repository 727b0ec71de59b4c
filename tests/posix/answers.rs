//! Calls whose answers once differed between the namespace and a plain directory: `answers.c` makes them over both.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use super::{compile, here, plainly};
use crate::harness::twin::{Twin, twin};
use crate::harness::{Ground, output_of, text, tool};

/// Creates the tree that `answers.c` needs.
fn tree(root: &Path) {
    let bytes = |len: u32, seed: u32| -> Vec<u8> { (0..len).map(|at| (at.wrapping_mul(seed) >> 11) as u8).collect() };
    let put = |name: &str, bytes: &[u8], mode: u32| {
        fs::write(root.join(name), bytes).unwrap();
        fs::set_permissions(root.join(name), fs::Permissions::from_mode(mode)).unwrap();
    };
    put("data", &bytes(300_001, 2_654_435_761), 0o640);
    put("small", &bytes(3000, 977), 0o644);
    // Processes share the kernel file of a file of this size, so its mode allows no writing.
    put("large", &bytes(70_000_000, 2_246_822_519), 0o444);
    put("bare", &bytes(8000, 3_266_489_917), 0o400);
    put("script", b"#!/bin/sh\necho a script that is longer than the place that is read\n", 0o755);
    fs::create_dir(root.join("folder")).unwrap();
    put("folder/inner", b"the inner file\n", 0o600);
    symlink("data", root.join("link")).unwrap();
    symlink("nowhere", root.join("dangling")).unwrap();
}

fn shared_library(ground: &Ground, name: &str, options: &[&OsStr]) -> PathBuf {
    let (source, library) = (here(&format!("{name}.c")), ground.at(format!("{name}.so")));
    let fixed = ["-O1", "-Wall", "-shared", "-fPIC", "-o"].map(OsStr::new).into_iter();
    tool("gcc", &fixed.chain([library.as_os_str(), source.as_os_str()]).chain(options.iter().copied()).collect::<Vec<_>>());
    library
}

fn program(ground: &Ground) -> PathBuf {
    let library = shared_library(ground, "libasync", &[]);
    let rpath = format!("-Wl,-rpath,{}", library.parent().unwrap().display());
    compile(ground, "answers.c", &[library.to_str().unwrap(), &rpath])
}

/// Runs commands of `answers.c` over a plain directory and over the namespace, on a node that has the files and on one that does
/// not, and compares what they print.
fn compare(commands: &[&str]) {
    let (twin, expected) = twin(tree, |ground, root| {
        let program = program(ground);
        let run = |command: &&str| text(&plainly(ground, &[program.as_os_str(), command.as_ref(), root.as_os_str()]).stdout);
        commands.iter().map(run).collect::<Vec<_>>()
    });
    let mut differences = Vec::new();
    for (command, expected) in commands.iter().zip(&expected) {
        // If a machine does not allow rings, the commands about rings print only that.
        assert!(expected.lines().count() > 5 || command.starts_with("kernel_"), "{command} printed too little: {expected}");
        for node in 0..2 {
            let found = run(&twin, node, command);
            let pairs = expected.lines().map(Some).chain([None]).zip(found.lines().map(Some).chain([None]));
            let context = |number: usize| expected.lines().take(number).filter(|line| line.starts_with(['-', '='])).last();
            let different = pairs.enumerate().filter(|(_, (expected, found))| expected != found).take(20);
            differences.extend(different.map(|(number, (expected, found))| {
                format!("{command}, node {node}, line {number}, {:?}\nplain: {expected:?}\nours:  {found:?}", context(number))
            }));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n\n"));
    twin.cluster.down();
}

fn run(twin: &Twin, node: u16, command: &str) -> String {
    let program = twin.cluster.at("answers");
    let mut command_line = twin.exec_command(node);
    text(&output_of(command_line.arg(&program).arg(command).arg(&twin.root).current_dir(twin.cluster.work.path())).stdout)
}

/// SEMANTICS: "Other programs (exec, posix_spawn, system, popen), and processes that receive a descriptor over a socket, find a
/// kernel file behind the number."
#[test]
fn descriptors_sent_by_sendmmsg_are_files_for_their_receiver() {
    compare(&["messages"]);
}

/// SEMANTICS: "Asynchronous reads (aio_read, lio_listio, libaio's io_submit) find such a kernel file, which is made when the first
/// one starts."
#[test]
fn asynchronous_reads_find_the_files() {
    compare(&["posix_aio", "kernel_aio", "kernel_ring"]);
}

#[test]
fn asynchronous_reads_by_a_locally_loaded_library_find_the_files() {
    let (twin, expected) = twin(tree, |ground, root| {
        let library = shared_library(ground, "libasync", &[]);
        let rpath = format!("-Wl,-rpath,{}", library.parent().unwrap().display());
        let plugin = shared_library(ground, "plugin", &[library.as_os_str(), rpath.as_ref()]);
        let program = compile(ground, "local.c", &["-ldl"]);
        text(&plainly(ground, &[program.as_os_str(), plugin.as_os_str(), root.join("data").as_os_str()]).stdout)
    });
    assert_eq!(expected.lines().count(), 6, "{expected}");
    let (program, plugin) = (twin.cluster.at("local"), twin.cluster.at("plugin.so"));
    for node in 0..2 {
        for file in [twin.root.join("data"), twin.plain.join("data")] {
            let found = output_of(twin.exec_command(node).args([program.as_os_str(), plugin.as_os_str(), file.as_os_str()]));
            assert_eq!(text(&found.stdout), expected, "node {node}, {}: {}", file.display(), text(&found.stderr));
        }
    }
    twin.cluster.down();
}

/// SEMANTICS: "A process that has set up an io_uring gets a kernel file for each file of at most 64 MiB that it opens. For a larger
/// file, the library prints a line that says that the ring cannot read the file."
#[test]
fn a_file_that_is_too_large_for_a_ring_causes_a_line() {
    let (twin, _) = twin(tree, |ground, _| program(ground));
    let found = output_of(twin.exec_command(0).arg(twin.cluster.at("answers")).arg("large_ring").arg(&twin.root));
    let (printed, told) = (text(&found.stdout), text(&found.stderr));
    assert_eq!(printed, "ring -9\nread 1000\n");
    assert!(told.lines().count() == 1 && told.contains("io_uring") && told.contains("large"), "{told}");
    twin.cluster.down();
}

/// SEMANTICS: "A program that is started without these variables, for example by env -i, finds nothing below the prefix, and no
/// message says so."
#[test]
fn a_program_without_the_environment_finds_nothing() {
    let (twin, ()) = twin(tree, |_, _| ());
    let small = twin.root.join("small");
    let found = twin.exec(&["env".as_ref(), "-i".as_ref(), "cat".as_ref(), small.as_os_str()]);
    assert!(!found.status.success() && found.stdout.is_empty(), "{}", text(&found.stderr));
    assert!(text(&found.stderr).starts_with("cat: ") && text(&found.stderr).lines().count() == 1, "{}", text(&found.stderr));
    twin.cluster.down();
}

#[test]
fn flags_of_a_file_change_as_on_a_plain_directory() {
    compare(&["flags"]);
}

/// SEMANTICS: "A descriptor opened with O_PATH names a file and cannot read it."
#[test]
fn a_descriptor_that_only_names_a_file_cannot_be_read() {
    compare(&["paths"]);
}

/// SEMANTICS: "A kernel file behind a number has the mode, the size and the modification time of the file in the namespace, and is
/// open for reading only."
#[test]
fn an_inherited_file_has_its_own_mode_and_cannot_be_written() {
    compare(&["inherit"]);
}

/// SEMANTICS: "For every other fault, the program's own handling of SIGBUS applies, with its mask and its flags."
#[test]
fn sigbus_is_handled_blocked_and_queried_as_the_program_asked() {
    compare(&["bus"]);
}

/// SEMANTICS: "mmap works for reading and for private mappings, and no shared mapping can be made writable."
#[test]
fn a_mapping_cannot_be_made_writable() {
    compare(&["maps"]);
}

/// SEMANTICS: "/dev/fd/N, and the process's own /proc/self/fd/N, /proc/PID/fd/N and the like, lead to the file that is open at N."
#[test]
fn links_to_descriptors_lead_to_the_files() {
    compare(&["links"]);
}

/// SEMANTICS: "A thread that blocks SIGBUS reads by system calls instead of mappings, which is slower."
#[test]
fn a_thread_that_blocks_sigbus_gets_eio_after_the_session_ends() {
    let (twin, _) = twin(tree, |ground, _| program(ground));
    for node in 0..2 {
        assert!(run(&twin, node, "flags").lines().count() > 5);
    }
    let mut children: Vec<_> = (0..2)
        .map(|node| {
            let mut command = twin.exec_command(node);
            command.arg(twin.cluster.at("answers")).arg("gone").arg(&twin.root).stdin(Stdio::piped()).stdout(Stdio::piped());
            command.spawn().unwrap()
        })
        .collect();
    let mut outputs: Vec<_> = children.iter_mut().map(|child| BufReader::new(child.stdout.take().unwrap()).lines()).collect();
    for output in &mut outputs {
        for _ in 0..4 {
            assert_eq!(output.next().unwrap().unwrap(), "pread(file, bytes, 100, 70000): 100");
        }
    }
    twin.cluster.ok(&["down"]);
    for (child, output) in children.iter_mut().zip(&mut outputs) {
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        assert_eq!(output.next().unwrap().unwrap(), "pread(file, bytes, 100, 70000): failed, EIO");
        assert!(child.wait().unwrap().success());
    }
}
