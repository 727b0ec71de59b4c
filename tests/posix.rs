//! Runs unchanged programs over the namespace. Each runs twice: over a plain directory, and over a session whose prefix has taken
//! the directory's place. The program's output and the files that it leaves behind must be equal.
//!
//! Programs that are not installed are skipped, with a line on standard error, unless `DAYFLY_TEST_ALL_PROGRAMS` is set.

mod answers;
mod border;
mod edges;
mod handoffs;
mod jumps;
mod limits;
mod loaders;
mod programs;
mod raw;
mod reserved;
mod signals;

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::harness::twin::twin;
use crate::harness::{self, Ground, assert_same_tree, copy_program, is_installed, output_of, read_tree, text, tool};
use nix::sys::signal::Signal;
use programs::{COPIERS, PROGRAMS};

fn here(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/posix").join(name)
}

/// Runs a program outside the session.
fn plainly(ground: &Ground, arguments: &[&OsStr]) -> Output {
    let mut command = Command::new(arguments[0]);
    command.args(&arguments[1..]).current_dir(ground.work.path()).env("LC_ALL", "C").env("TZ", "UTC");
    output_of(&mut command)
}

/// Creates a tree of sources, and one file of each kind that the programs below need.
fn sources_and_data(root: &Path) {
    for folder in ["meta", "client", "docs"] {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        tool("cp", &["-r".as_ref(), "--preserve=timestamps".as_ref(), from.as_os_str(), root.as_os_str()]);
    }
    let data = root.join("data");
    fs::create_dir(&data).unwrap();
    fs::create_dir(root.join("empty")).unwrap();
    fs::write(data.join("numbers.txt"), (0..20_000).map(|number| format!("{number}\n")).collect::<String>()).unwrap();
    fs::write(data.join("words.txt"), "some words\nin lines\n").unwrap();
    fs::write(data.join("nothing"), "").unwrap();
    let bytes: Vec<u8> = (0..3_000_001_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    fs::write(data.join("big.bin"), bytes).unwrap();
    fs::write(data.join("answer.h"), "#define ANSWER 42\n").unwrap();
    fs::write(data.join("hello.sh"), "#!/bin/sh\necho hello $1 from $(basename $(pwd)) by $0\n").unwrap();
    fs::set_permissions(data.join("hello.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(data.join("words.txt"), fs::Permissions::from_mode(0o640)).unwrap();
    symlink("data/numbers.txt", root.join("link")).unwrap();
    symlink("/etc/hostname", root.join("out")).unwrap();
    symlink("nowhere", root.join("dangling")).unwrap();
    fs::hard_link(data.join("words.txt"), root.join("same-words")).unwrap();
    let script =
        "import zipfile,sys; zipfile.ZipFile(sys.argv[1]+'/archive.zip','w').write(sys.argv[1]+'/numbers.txt','numbers.txt')";
    run_if_there("python3", &["-c".as_ref(), script.as_ref(), data.as_os_str()]);
    let script = "import numpy,sys; numpy.save(sys.argv[1]+'/array.npy', numpy.arange(300000).reshape(300,1000))";
    run_if_there("python3", &["-c".as_ref(), script.as_ref(), data.as_os_str()]);
    let script = "import sys; from PIL import Image; Image.linear_gradient('L').save(sys.argv[1]+'/image.png')";
    run_if_there("python3", &["-c".as_ref(), script.as_ref(), data.as_os_str()]);
    let table = "create table t(n, w); insert into t select value, 'row '||value from generate_series(1,5000)";
    run_if_there("sqlite3", &[data.join("table.db").as_os_str(), table.as_ref()]);
}

fn run_if_there(program: &str, arguments: &[&OsStr]) {
    // If the program is missing, the tests that need its output are also skipped.
    let _ = Command::new(program).args(arguments).output();
}

/// Prepends a script's variables to the script.
fn words(words: &str, root: &Path, out: &Path) -> String {
    format!("R={} O={} PROGRAMS={}; export R; {words}", root.display(), out.display(), here("programs.py").display())
}

/// SEMANTICS: "Programs see what they would see in a plain directory: coreutils, find, tar, rsync, git, gcc, sqlite3, shells, and
/// Python with mmap, numpy, PIL, subprocess and every start method of multiprocessing."
#[test]
fn real_programs_see_the_namespace_as_a_plain_directory() {
    let run = |(program, script): &(&str, &str), ground: &Ground, root: &Path| {
        let script = words(script, root, &ground.at("unused"));
        is_installed(program).then(|| plainly(ground, &["bash".as_ref(), "-c".as_ref(), script.as_ref()]))
    };
    let (twin, expected) =
        twin(sources_and_data, |ground, root| PROGRAMS.iter().map(|entry| run(entry, ground, root)).collect::<Vec<_>>());
    let mut differences = Vec::new();
    for ((program, script), expected) in PROGRAMS.iter().zip(expected) {
        let Some(expected) = expected else { continue };
        assert!(!expected.stdout.is_empty(), "{program} printed nothing: {}", text(&expected.stderr));
        let script = words(script, &twin.root, &twin.cluster.at("unused"));
        let found = twin.exec(&["bash".as_ref(), "-c".as_ref(), script.as_ref()]);
        if (expected.status.code(), &expected.stdout) != (found.status.code(), &found.stdout) {
            differences.push(format!("{script}\n{}\n{}", first_difference(&expected, &found), text(&found.stderr)));
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n\n"));
    let expected = read_tree(&twin.plain);
    for (program, script) in COPIERS.iter().filter(|(program, _)| is_installed(program)) {
        let out = twin.cluster.at("out");
        twin.shell(&words(script, &twin.root, &out));
        assert_same_tree(&expected, &read_tree(&out), program);
        fs::remove_dir_all(&out).unwrap();
    }
    twin.shell(&words(&format!("diff -r --no-dereference $R {}", twin.plain.display()), &twin.root, &twin.plain));
    twin.cluster.down();
}

fn first_difference(expected: &Output, found: &Output) -> String {
    let (left, right) = (text(&expected.stdout), text(&found.stdout));
    let pair =
        left.lines().map(Some).chain([None]).zip(right.lines().map(Some).chain([None])).find(|(left, right)| left != right);
    format!("plain: {:?} {:?}\nours:  {:?} {:?}", expected.status, pair.map(|pair| pair.0), found.status, pair.map(|pair| pair.1))
}

/// Creates the tree that `calls.c` needs.
fn tree_for_calls(root: &Path) {
    fs::create_dir_all(root.join("sub/empty")).unwrap();
    fs::create_dir(root.join("sub/deep")).unwrap();
    fs::write(root.join("list"), (1..=2000).map(|number| format!("{number}\n")).collect::<String>()).unwrap();
    for number in 1..=3_u32 {
        let bytes: Vec<u8> = (0..number * 3000).map(|at| (at.wrapping_mul(number * 977) >> 5) as u8).collect();
        fs::write(root.join(format!("sub/f{number}")), bytes).unwrap();
    }
    fs::write(root.join("big"), (0..300_001_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 11) as u8).collect::<Vec<_>>())
        .unwrap();
    fs::write(root.join("script"), "#!/bin/sh\necho script $1\n").unwrap();
    fs::set_permissions(root.join("script"), fs::Permissions::from_mode(0o755)).unwrap();
    for (target, name) in [("sub/f1", "link"), ("nowhere", "dangling"), ("/etc/hostname", "out"), ("loop", "loop")] {
        symlink(target, root.join(name)).unwrap();
    }
}

fn compile(ground: &Ground, source: &str, options: &[&str]) -> PathBuf {
    let program = ground.at(source.split('.').next().unwrap());
    let mut arguments: Vec<&OsStr> =
        vec!["-O1".as_ref(), "-Wall".as_ref(), "-pthread".as_ref(), "-o".as_ref(), program.as_os_str()];
    let source = here(source);
    arguments.push(source.as_os_str());
    arguments.extend(options.iter().map(OsStr::new));
    tool("gcc", &arguments);
    program
}

/// Sorts the lines of each `nftw` walk, because each directory has its own order.
fn sorted_walks(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    for group in lines.chunk_by_mut(|left, right| left.starts_with("nftw ") && right.starts_with("nftw ")) {
        group.sort_unstable();
    }
    lines
}

/// SEMANTICS: "The C library's calls with paths and descriptors, in all variants that glibc has, return what they return for a
/// plain directory, except for the differences below. A successful call leaves errno unchanged."
/// SEMANTICS: "Descriptors are numbers in the kernel's own table, each the lowest that is free."
/// SEMANTICS: "Offsets are shared across dup and fork and, for files of up to 64 MiB, across exec into other programs."
/// SEMANTICS: "epoll refuses files, as on Linux; poll and select report them as ready."
/// SEMANTICS: "Other programs (exec, posix_spawn, system, popen), and processes that receive a descriptor over a socket, find a
/// kernel file behind the number."
/// SEMANTICS: "Standard input that comes from the namespace is copied into such a kernel file at once, because the streams of the
/// C library read standard input without calling this library."
/// SEMANTICS: "The working directory may be in the namespace; programs started from there begin there."
/// SEMANTICS: "mmap works for reading and for private mappings"
#[test]
fn every_call_returns_what_it_returns_on_a_plain_directory() {
    for options in [&[][..], &["-D_FORTIFY_SOURCE=2", "-O2"], &["-D_FILE_OFFSET_BITS=64"]] {
        let run = |ground: &Ground, root: &Path| {
            let program = compile(ground, "calls.c", options);
            text(&plainly(ground, &[program.as_os_str(), root.as_os_str()]).stdout)
        };
        let (twin, expected) = twin(tree_for_calls, run);
        let program = twin.cluster.at("calls");
        for node in 0..2 {
            let found = output_of(twin.exec_command(node).arg(&program).arg(&twin.root));
            let found = text(&found.stdout);
            let (expected, found) = (sorted_walks(&expected), sorted_walks(&found));
            assert!(expected.len() > 400);
            for (number, (expected, found)) in expected.iter().zip(&found).enumerate() {
                assert_eq!(expected, found, "line {number}, node {node}, {options:?}");
            }
            assert_eq!(expected.len(), found.len());
        }
        twin.cluster.down();
    }
}

/// SEMANTICS: "The namespace is read-only; data enters it only through stage-in."
/// SEMANTICS: "statfs reports a full, read-only file system of its own type"
/// SEMANTICS: "openat2 fails with ENOSYS for a path in the namespace if resolve has any flag other than RESOLVE_NO_MAGICLINKS"
#[test]
fn the_namespace_is_read_only() {
    let (twin, ()) = twin(tree_for_calls, |_, _| ());
    let program = compile(&twin.cluster, "calls.c", &[]);
    let found = twin.exec(&[program.as_os_str(), twin.root.as_os_str(), "refusals".as_ref()]);
    let found = text(&found.stdout);
    let allowed = [
        ("O_CREAT | O_EXCL", "EEXIST"),
        ("mkdir(at(\"sub\")", "EEXIST"),
        ("at(\"sub\"), O_WRONLY)", "EISDIR"),
        ("missing/new", "ENOENT"),
        ("unlink(at(\"missing\")", "ENOENT"),
        ("\"/tmp/new\"", "EXDEV"),
        ("&beneath", "ENOSYS"),
    ];
    let mut refused = 0;
    for line in found.lines().filter(|line| line.contains("failed")) {
        let expected = allowed.iter().find(|(call, _)| line.contains(call)).map_or("EROFS", |(_, errno)| errno);
        assert!(line.ends_with(expected), "{line}");
        refused += 1;
    }
    assert!(refused >= 25 && found.contains("O_CREAT | O_RDONLY, 0600) >= 0 ? 0 : -1: 0"), "{found}");
    assert!(found.contains("s.f_flag & ST_RDONLY: 1") && found.contains("sizeof plain) < 0: 0"), "{found}");
    twin.cluster.down();
}

/// SEMANTICS: "Calls that would change it fail as on a read-only mount of Linux. Writing fails with EROFS, and creating a path that
/// exists fails with EEXIST. Renaming a path fails with EROFS, even if the path does not exist. Renaming or linking a path from one
/// file system to another fails with EXDEV. Removing or renaming the prefix itself fails with EBUSY, as for a mount point. One
/// error differs: removing a path that does not exist fails with ENOENT, so that programs that remove leftovers work."
#[test]
fn calls_that_change_files_fail_as_on_a_read_only_mount() {
    let mounted = ["unshare", "-m", "sh", "-ec", "mount --bind $1 $1; mount -o remount,bind,ro $1; shift; exec \"$@\"", "sh"];
    let can =
        harness::program("unshare").args(["-m", "mount", "--bind", "/tmp", "/tmp"]).status().is_ok_and(|status| status.success());
    if !can {
        harness::skip("this machine does not allow mounts");
        return;
    }
    let tree = |root: &Path| {
        tree_for_calls(root);
        symlink("sub", root.join("folder_link")).unwrap();
        symlink("../outside/created", root.join("leaving")).unwrap();
        symlink("../outside", root.join("leaving_folder")).unwrap();
    };
    let outside = |ground: &Ground| {
        let outside = ground.at("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("file"), "outside").unwrap();
        outside
    };
    let (twin, (outside, expected)) = twin(tree, |ground, root| {
        let (outside, program) = (outside(ground), compile(ground, "read_only.c", &[]));
        let arguments = mounted.iter().map(OsStr::new).chain([root, program.as_path(), root, &outside].map(Path::as_os_str));
        let printed = plainly(ground, &arguments.collect::<Vec<_>>());
        (outside, text(&printed.stdout))
    });
    let program = twin.cluster.at("read_only");
    assert!(expected.lines().count() > 5000, "{expected}");
    for node in 0..2 {
        let found = output_of(twin.exec_command(node).args([&program, &twin.root, &outside].map(|path| path.as_os_str())));
        let found = text(&found.stdout);
        let pairs = expected.lines().map(Some).chain([None]).zip(found.lines().map(Some).chain([None]));
        let different: Vec<_> = pairs.filter(|(expected, found)| expected != found).collect();
        let lines: Vec<String> =
            different.iter().take(40).map(|(expected, found)| format!("{expected:?}, not {found:?}")).collect();
        assert!(different.is_empty(), "node {node}, {} differences:\n{}", different.len(), lines.join("\n"));
    }
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 1, "a call created a file outside");
    for program in ["unlink", "rmdir"] {
        let found = output_of(twin.exec_command(0).arg(program).arg(twin.root.join("missing")));
        assert!(text(&found.stderr).contains("No such file or directory"), "{program}: {}", text(&found.stderr));
    }
    twin.cluster.down();
}

/// SEMANTICS: "vfork works too: closing or duplicating descriptors in the child does not affect the parent's files."
#[test]
fn a_parent_keeps_reading_while_its_vfork_children_close_and_duplicate() {
    if !is_installed("python3") {
        return;
    }
    let (twin, ()) = twin(sources_and_data, |_, _| ());
    let found = twin.shell(&words("python3 $PROGRAMS beside_children $R", &twin.root, &twin.plain));
    assert!(found.trim().ends_with(" []"), "{found}");
    twin.cluster.down();
}

/// SEMANTICS: "dayfly exec tries to load the library before it starts CMD: a library that is missing or cannot be loaded is an
/// error."
#[test]
fn dayfly_exec_fails_if_the_library_is_missing_or_cannot_be_loaded() {
    let ground = Ground::new();
    // A copy of the program without the library next to it.
    let alone = ground.at("alone");
    fs::create_dir(&alone).unwrap();
    copy_program(env!("CARGO_BIN_EXE_dayfly"), alone.join("dayfly"));
    let cluster = ground.up(1);
    let run = || {
        let mut command = Command::new(alone.join("dayfly"));
        command.args(["exec", "--", "true"]).env("DAYFLY_RUNTIME_DIR", cluster.runtime.path());
        let output = output_of(&mut command);
        (output.status.code(), text(&output.stderr))
    };
    let (status, message) = run();
    assert!(status == Some(125) && message.contains("cannot find libdayfly_preload.so"), "{status:?} {message}");
    fs::write(alone.join("libdayfly_preload.so"), "not a library").unwrap();
    let (status, message) = run();
    assert!(status == Some(125) && message.contains("cannot load"), "{status:?} {message}");
    copy_program(library(), alone.join("libdayfly_preload.so"));
    assert_eq!(run(), (Some(0), String::new()));
    cluster.down();
}

/// SEMANTICS: "dayfly env affects the programs that the shell starts, not the shell itself."
#[test]
fn dayfly_env_makes_a_shells_children_part_of_the_session() {
    let (twin, ()) = twin(tree_for_calls, |_, _| ());
    let dayfly = env!("CARGO_BIN_EXE_dayfly");
    let script =
        format!("eval \"$({dayfly} env)\"; head -n 2 {}/list; env | grep -c APPTAINERENV_LD_PRELOAD", twin.root.display());
    let mut command = harness::program("sh");
    command.args(["-ec", &script]).env("DAYFLY_RUNTIME_DIR", twin.cluster.runtime.path()).env_remove("DAYFLY_SESSION");
    assert_eq!(text(&output_of(&mut command).stdout), "1\n2\n1\n");
    twin.cluster.down();
}

/// SEMANTICS: "If the server dies, blocks that the node holds are still read; other reads fail with EIO within the deadline, and
/// one line is printed to standard error."
#[test]
fn after_the_server_dies_local_blocks_are_read_and_other_reads_fail_within_the_deadline() {
    if !is_installed("python3") {
        return;
    }
    let (twin, ()) = twin(sources_and_data, |_, _| ());
    let script = format!(
        "import os, sys\n\
         paths = [os.path.join(folder, name) for folder, _, names in os.walk('{0}') for name in names if not os.path.islink(os.path.join(folder, name))]\n\
         open(paths[0], 'rb').read()\n\
         print('ready', flush=True)\n\
         sys.stdin.readline()\n\
         right = failed = 0\n\
         for path in paths:\n\
         \x20   try:\n\
         \x20       right += open(path, 'rb').read() == open(path.replace('{0}', '{1}', 1), 'rb').read()\n\
         \x20   except OSError as error:\n\
         \x20       failed += error.errno == 5\n\
         print(len(paths), right, failed)\n",
        twin.root.display(),
        twin.plain.display()
    );
    let mut child = twin
        .exec_command(0)
        .args(["python3", "-c", &script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    harness::signal(twin.cluster.pids()[&0], Signal::SIGKILL);
    harness::wait_until("the server is gone", || !twin.cluster.pids().contains_key(&0));
    child.stdin.take().unwrap().write_all(b"\n").unwrap();
    line.clear();
    output.read_line(&mut line).unwrap();
    let numbers: Vec<usize> = line.split_whitespace().map(|number| number.parse().unwrap()).collect();
    assert!(numbers[0] == numbers[1] + numbers[2] && numbers[1] > 0 && numbers[2] > 0, "{line}");
    let mut complaint = String::new();
    child.stderr.take().unwrap().read_to_string(&mut complaint).unwrap();
    assert!(complaint.starts_with("dayfly: ") && complaint.lines().count() == 1, "one line: {complaint}");
    assert!(child.wait().unwrap().success());
}

/// SEMANTICS: "If the session ends, reads fail with EIO; access to data mapped in place raises SIGBUS, and copied data stays."
/// SEMANTICS: "For every other fault, the program's own handling of SIGBUS applies"
/// SEMANTICS: "down frees all blocks at once, even while processes still have files open: their reads fail with EIO."
#[test]
fn after_down_reads_and_mappings_fail_and_never_return_zeros() {
    let (twin, ()) = twin(sources_and_data, |_, _| ());
    let program = compile(&twin.cluster, "gone.c", &[]);
    let big = twin.root.join("data/big.bin");
    let mut children: Vec<_> = (0..2)
        .map(|node| {
            let mut command = twin.exec_command(node);
            command.arg(&program).arg(&big).stdin(Stdio::piped()).stdout(Stdio::piped());
            command.spawn().unwrap()
        })
        .collect();
    let mut outputs: Vec<_> = children.iter_mut().map(|child| BufReader::new(child.stdout.take().unwrap()).lines()).collect();
    outputs.iter_mut().for_each(|output| assert_eq!(output.next().unwrap().unwrap(), "ready"));
    twin.cluster.ok(&["down"]);
    let mut mapped = Vec::new();
    for (child, output) in children.iter_mut().zip(outputs) {
        child.stdin.take().unwrap().write_all(b"\n").unwrap();
        let mut rest: Vec<String> = output.map(|line| line.unwrap()).collect();
        mapped.push(rest.remove(3));
        assert_eq!(rest, ["read: EIO", "pread: EIO", "open: EIO", "handler: kept"]);
        assert!(child.wait().unwrap().success());
    }
    mapped.sort();
    assert_eq!(mapped, ["mapped: SIGBUS", "mapped: its bytes"], "one node has the block in place, the other has a copy");
    twin.cluster.assert_clean();
}

/// SEMANTICS: "Paths lead into the namespace however they are spelled, relative or with .., from the working directory or from a
/// directory's descriptor."
#[test]
fn every_spelling_of_the_prefix_leads_into_the_namespace() {
    let (twin, ()) = twin(tree_for_calls, |_, _| ());
    let root = twin.root.display();
    let found = twin.shell(&format!(
        "cd /; head -n1 .{root}/list; cd {root}/..; head -n1 tree/list; head -n1 ./plain/../tree/list; head -n1 /..//{root}/./list; cd {root}/sub; head -n1 ../../tree/list; cat ../../plain/list | head -n1; ls {root}/../plain | wc -l"
    ));
    assert_eq!(found, "1\n1\n1\n1\n1\n1\n8\n");
    twin.cluster.down();
}

/// The variable that sets how many seconds the stress test runs; `.ci/long` sets a minute.
const STRESS_SECONDS: &str = "DAYFLY_TEST_STRESS_SECONDS";

/// SEMANTICS: "fork works from any thread."
#[test]
fn threads_read_correct_bytes_while_they_fork_children_that_read() {
    let (twin, ()) = twin(sources_and_data, |_, _| ());
    let program = compile(&twin.cluster, "stress.c", &[]);
    let list = twin.shell(&format!(
        "find {} -type f | sed 's|.*|& &|; s| {}| {}|'",
        twin.root.display(),
        twin.root.display(),
        twin.plain.display()
    ));
    let list_path = twin.cluster.at("list");
    fs::write(&list_path, list).unwrap();
    let seconds = std::env::var(STRESS_SECONDS).unwrap_or_else(|_| "5".to_owned());
    let found = twin.exec(&[program.as_os_str(), seconds.as_ref(), list_path.as_os_str()]);
    assert!(found.status.success(), "{}{}", text(&found.stdout), text(&found.stderr));
    assert!(found.stdout.ends_with(b" 0 wrong\n"), "{}", text(&found.stdout));
    println!("{}", text(&found.stdout));
    twin.cluster.down();
}

fn library() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_dayfly")).parent().unwrap().join("deps/libdayfly_preload.so")
}

/// SEMANTICS: "C programs may include client/preload/include/dayfly.h and link the library. The library has functions to attach, to
/// open, read, stat and list, to read many files at once, by paths or by numbers, and to use views and orders. `dayfly_error` says
/// why a call of the thread failed."
#[test]
fn the_c_interface_reads_a_staged_in_dataset() {
    let (twin, ()) = twin(tree_for_calls, |_, _| ());
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("client/preload/include");
    let (include, library) = (format!("-I{}", include.display()), library());
    let rpath = format!("-Wl,-rpath,{}", library.parent().unwrap().display());
    let program = compile(&twin.cluster, "interface.c", &[&include, "-Wextra", "-std=c99", library.to_str().unwrap(), &rpath]);
    for node in 0..2 {
        let found = output_of(twin.exec_command(node).arg(&program).arg(&twin.root));
        let prefix = twin.root.display();
        let expected = format!(
            "stat 0 300001\nsize 300001\nread 300000\nend 0\nmissing 1 No such file or directory; '/nowhere': it is not in the \
             namespace, which is at '{prefix}'\nfailed 1\nsub/f1 3000\nsub/f2 6000\nmissing -2\nbig 300001\ncut 1 0\nsame 1\n\
             early -1 1 1\nget 0 0 3000 0 \nget 1 0 6000 0 \nget 2 0 0 2 '{prefix}/missing': no such file or directory\n\
             get 3 0 300001 0 \nget 4 -1 0 2 the batch has no such file\n\
             whole -1 1 1 1 1 end 0 2 1 0 failed -1 4 1 1\n\
             ids 0 look 0 own 1 here 1 small -1 1 1 1 all 0 right 1 order 1\nunknown 1 0 1 -1 -1 -1 -1 1\nlist 7 after 3\nepoch 0 0 local 0 same 1 some 1\n"
        );
        assert_eq!(text(&found.stdout), expected, "{}", text(&found.stderr));
    }
    twin.cluster.down();
}

/// SEMANTICS: "the library needs glibc 2.28 or newer, inside the container as well as outside."
#[test]
fn the_library_needs_no_symbol_newer_than_glibc_2_28() {
    let output = output_of(harness::program("objdump").args(["-T".as_ref(), library().as_os_str()]));
    let symbols = text(&output.stdout);
    let versions = symbols.lines().filter_map(|line| Some((line, line.split("GLIBC_2.").nth(1)?.split([')', '.', ' ']).next()?)));
    let mut checked = 0;
    for (line, minor) in versions {
        let minor: u32 = minor.parse().unwrap();
        assert!(minor <= 28, "{line}");
        checked += 1;
    }
    assert!(checked > 30, "{symbols}");
}

/// SEMANTICS: "PID and user namespaces make no difference."
#[test]
fn a_program_in_other_pid_and_user_namespaces_reads_the_namespace() {
    let (twin, ()) = twin(tree_for_calls, |_, _| ());
    let sums = format!("cd {} && find . -type f | sort | xargs sha256sum", twin.root.display());
    let expected = twin.shell(&sums);
    let can = harness::program("unshare").args(["-Urpf", "--mount-proc", "true"]).status().is_ok_and(|status| status.success());
    if !can {
        harness::skip("this machine does not allow user namespaces");
        return;
    }
    let isolated = ["unshare", "-Urpf", "--mount-proc", "sh", "-ec", &sums].map(OsStr::new);
    let found = twin.exec(&isolated);
    assert_eq!(text(&found.stdout), expected, "{}", text(&found.stderr));
    twin.cluster.down();
}

/// The variable that names a root file system with an older glibc, which `.ci/run` creates.
const FOREIGN_ROOT: &str = "DAYFLY_TEST_FOREIGN_ROOT";

/// SEMANTICS: "Containers: the library needs glibc 2.28 or newer, inside the container as well as outside."
#[test]
fn a_foreign_root_with_an_older_glibc_reads_the_namespace() {
    let Some(foreign) = std::env::var_os(FOREIGN_ROOT).map(PathBuf::from) else {
        harness::skip(&format!("{FOREIGN_ROOT} names no other root file system"));
        return;
    };
    let (twin, ()) = twin(sources_and_data, |_, _| ());
    let root = twin.root.display();
    let look = format!(
        "cd {root}; find . -type f | sort | xargs sha256sum; ls -l data | tail -n +2; grep -rc fn meta | sort; tar cf - docs | tar tf - | sort; \
         head -c 5 < data/numbers.txt; perl -e 'print -s \"data/big.bin\"'; (cd data; ./hello.sh you)"
    );
    let expected = twin.shell(&look);
    // Bind the library and the session's folder, as a container under `dayfly env` does.
    let library = fs::canonicalize(library()).unwrap();
    let session = twin.cluster.folder();
    let binds: String = [library.parent().unwrap(), session.as_path()]
        .iter()
        .map(|path| format!("mkdir -p {0}/{1}; mount --bind {1} {0}/{1};", foreign.display(), path.display()))
        .collect();
    let script = format!("{binds} mount -t proc proc {0}/proc; exec chroot {0} sh -ec \"$0\"", foreign.display());
    let arguments = ["unshare", "-m", "sh", "-ec", &script, &look].map(OsStr::new);
    let found = twin.exec(&arguments);
    assert_eq!(text(&found.stdout), expected, "{}", text(&found.stderr));
    let version = output_of(harness::program("chroot").args([foreign.as_os_str(), "ldd".as_ref(), "--version".as_ref()]));
    println!("read by {}", text(&version.stdout).lines().next().unwrap_or_default());
    twin.cluster.down();
}

/// SEMANTICS: "A program that is itself in the namespace runs from such a copy, and a script is run by its interpreter. A static
/// CMD causes a warning."
#[test]
fn a_static_program_causes_a_warning_and_a_script_in_the_namespace_runs() {
    let (twin, ()) = twin(tree_for_calls, |_, _| ());
    let script = twin.root.join("script");
    let found = twin.exec(&[script.as_os_str(), "here".as_ref()]);
    assert_eq!(text(&found.stdout), "script here\n", "{}", text(&found.stderr));
    let source = twin.cluster.at("static.c");
    fs::write(&source, "int main(void) { return 0; }\n").unwrap();
    let program = twin.cluster.at("static");
    tool("gcc", &["-static".as_ref(), "-o".as_ref(), program.as_os_str(), source.as_os_str()]);
    let found = twin.exec(&[program.as_os_str()]);
    assert!(found.status.success() && text(&found.stderr).contains("is a static program"), "{}", text(&found.stderr));
    twin.cluster.down();
}
