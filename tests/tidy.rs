//! Enforces what the design says about the code: the edges between crates and between modules, the named absences, the places of
//! unsafe code, the form of files, and the licenses. Also checks that each promise of the docs has its test.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[path = "tidy/edges.rs"]
mod edges;
#[path = "posix/programs.rs"]
mod posix_programs;
#[path = "tidy/programs.rs"]
mod programs;
#[path = "tidy/promises.rs"]
mod promises;
#[path = "tidy/source.rs"]
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand};

use source::Sources;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn metadata() -> &'static Metadata {
    static METADATA: OnceLock<Metadata> = OnceLock::new();
    METADATA.get_or_init(|| {
        MetadataCommand::new()
            .manifest_path(root().join("Cargo.toml"))
            .other_options(["--offline", "--filter-platform", "x86_64-unknown-linux-gnu"].map(str::to_owned))
            .exec()
            .unwrap()
    })
}

fn sources() -> &'static Sources {
    static SOURCES: OnceLock<Sources> = OnceLock::new();
    SOURCES.get_or_init(|| Sources::read(&root()))
}

#[test]
fn arrows_between_crates_run_one_way() {
    let allowed: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::from([
        ("dayfly-meta", BTreeSet::new()),
        ("dayfly-stagein", BTreeSet::from(["dayfly-meta"])),
        ("dayfly-transport", BTreeSet::from(["dayfly-meta"])),
        ("dayfly-server", BTreeSet::from(["dayfly-meta", "dayfly-stagein", "dayfly-transport"])),
        ("dayfly-launch", BTreeSet::from(["dayfly-meta", "dayfly-server", "dayfly-client"])),
        ("dayfly-client", BTreeSet::from(["dayfly-meta"])),
        ("dayfly-preload", BTreeSet::from(["dayfly-meta", "dayfly-client"])),
        ("dayfly-python", BTreeSet::from(["dayfly-meta", "dayfly-client"])),
        ("dayfly-bench", BTreeSet::from(["dayfly-meta", "dayfly-client", "dayfly-stagein"])),
        // The dependency on dayfly-preload makes Cargo build that library next to the program. The program does not use the
        // library's code.
        ("dayfly", BTreeSet::from(["dayfly-meta", "dayfly-launch", "dayfly-transport", "dayfly-client", "dayfly-preload"])),
    ]);
    let packages = metadata().workspace_packages();
    assert_eq!(packages.len(), allowed.len(), "a new crate must be added here and to ARCHITECTURE.md");
    for package in packages {
        let ours = package
            .dependencies
            .iter()
            .filter(|dependency| dependency.kind == DependencyKind::Normal && dependency.path.is_some());
        let found: BTreeSet<&str> = ours.map(|dependency| dependency.name.as_str()).collect();
        assert_eq!(found, allowed[package.name.as_str()], "dependencies of {} on other crates of the project", package.name);
    }
}

#[test]
fn no_crate_uses_what_its_named_absences_forbid() {
    let absences: &[(&str, &[&str])] = &[
        ("meta/src", &["std::net", "std::thread", "std::time::Instant", "SystemTime", "tokio", "OpenOptions"]),
        ("stagein/src", &["std::net", "tokio"]),
        ("server/transport/src", &["catalog", "Catalog", "dataset", "Dataset", "Sample", "segment"]),
        ("client/src", &["tokio", "thread::spawn", "TcpStream"]),
        ("server/src", &["std::thread::sleep", "println!", "eprintln!"]),
    ];
    for (path, file) in sources().shipped() {
        for (_, words) in absences.iter().filter(|(folder, _)| path.starts_with(folder)) {
            for word in *words {
                assert!(!file.code.contains(word), "{} must not use '{word}' (comments may mention it)", path.display());
            }
        }
    }
}

#[test]
fn only_the_rdma_modules_name_rdma_verbs() {
    for (path, file) in sources().all() {
        let text = &file.text;
        let is_border = path.starts_with("server/transport/src/rdma") || path.starts_with("server/transport/src/async_rdma");
        let is_border = is_border
            || [Path::new("server/transport/src/rdma.rs"), Path::new("server/transport/src/async_rdma.rs")].contains(&path);
        let is_free = is_border || path.starts_with("tests");
        assert!(is_free || (!text.contains("ibv_") && !text.contains("libibverbs")), "{} names an RDMA verb", path.display());
    }
}

#[test]
fn unsafe_code_is_where_the_design_says() {
    let allowed = [
        "meta/src/shared.rs",
        "server/src/store/in_use.rs",
        "server/src/store/write_back.rs",
        "server/transport/src/region.rs",
        // The boundary with libibverbs: its structures, and the objects that own them and destroy them.
        "server/transport/src/rdma/device.rs",
        "server/transport/src/rdma/direct.rs",
        "server/transport/src/rdma/queue.rs",
        "server/transport/src/rdma/verbs.rs",
        "server/transport/patches/hex-simd/src/lib.rs",
        // Mapped memory, descriptors that come from the kernel, data that several threads share without locks, and what C's threads do.
        "client/src/arena.rs",
        "client/src/cancellation.rs",
        "client/src/current.rs",
        "client/src/fault.rs",
        "client/src/locate/names.rs",
        "client/src/raw_call.rs",
        "client/src/reserved_fd.rs",
        "client/src/pool.rs",
        "client/src/segment_map.rs",
        "client/src/socket.rs",
        "client/src/thread_number.rs",
        // The boundary with Python: memory of its objects, and exports of ours.
        "client/python/src/array.rs",
        "client/python/src/dlpack.rs",
        "client/python/src/fork.rs",
        "client/python/src/memory.rs",
        "client/python/src/view.rs",
        // The boundary with C: pointers, calls of the next library, and the tables that outlive a fork.
        "client/preload/src/api.rs",
        "client/preload/src/atfork.rs",
        "client/preload/src/attach.rs",
        "client/preload/src/cwd.rs",
        "client/preload/src/exec_handoff.rs",
        "client/preload/src/exec_handoff/vfork_channel.rs",
        "client/preload/src/environment.rs",
        "client/preload/src/heap.rs",
        "client/preload/src/heap/pages.rs",
        "client/preload/src/kernel_copy.rs",
        "client/preload/src/descriptor_link.rs",
        "client/preload/src/library.rs",
        "client/preload/src/memory.rs",
        "client/preload/src/next.rs",
        "client/preload/src/offset.rs",
        "client/preload/src/pages.rs",
        "client/preload/src/path.rs",
        "client/preload/src/placeholder.rs",
        "client/preload/src/stat_form.rs",
        "client/preload/src/table.rs",
        "client/preload/src/vfork.rs",
        // Calls whose arguments or results are structures of C, and calls that map memory.
        "client/preload/src/calls/creates.rs",
        "client/preload/src/calls/descriptor.rs",
        "client/preload/src/calls/directory.rs",
        "client/preload/src/calls/exec.rs",
        "client/preload/src/calls/fts.rs",
        "client/preload/src/calls/kernel_reads.rs",
        "client/preload/src/calls/loader.rs",
        "client/preload/src/calls/map.rs",
        "client/preload/src/calls/message.rs",
        "client/preload/src/calls/poll.rs",
        "client/preload/src/calls/scan.rs",
        "client/preload/src/calls/signal.rs",
        "client/preload/src/calls/spawn.rs",
        "client/preload/src/calls/stdio.rs",
        "client/preload/src/calls/syscall.rs",
        "client/preload/src/calls/transfer.rs",
        "client/preload/src/calls/vfork.rs",
    ];
    for allowed in allowed {
        let file = sources().get(Path::new(allowed)).unwrap_or_else(|| panic!("{allowed} does not exist"));
        assert!(file.text.contains("unsafe"), "{allowed} has no unsafe code; remove it from this list");
    }
    for (path, file) in sources().all() {
        let is_allowed = allowed.iter().any(|allowed| path == Path::new(allowed));
        let has_unsafe = source::blanked(&file.text, true).contains("unsafe {");
        assert!(is_allowed || !has_unsafe, "{} has unsafe code and is not on the list", path.display());
    }
}

#[test]
fn files_have_a_doc_page_at_most_600_lines_and_a_parent_module() {
    for (path, file) in sources().all() {
        assert!(file.text.starts_with("//!"), "{} does not begin with a page of documentation", path.display());
        assert!(file.shipped.lines().count() <= 600, "{} is longer than 600 lines", path.display());
        for banned in ["todo!(", "unimplemented!(", "dbg!(", "#[ignore", "FIXME", "process::exit("] {
            assert!(path == Path::new("tests/tidy.rs") || !file.text.contains(banned), "{} has '{banned}'", path.display());
        }
        let name = path.file_stem().unwrap().to_str().unwrap();
        // The tests of a crate lie beside its manifest, and each is a program.
        let is_program = |folder: &Path| folder.ends_with("tests") && root().join(folder.with_file_name("Cargo.toml")).exists();
        let is_test = path.starts_with("tests") || path.parent().is_some_and(is_program);
        if is_test || ["lib", "main", "mod", "build"].contains(&name) {
            continue;
        }
        let folder = path.parent().unwrap();
        let parents = [folder.join("lib.rs"), folder.join("main.rs"), folder.with_extension("rs")];
        let mut parents = parents.iter().filter_map(|parent| sources().get(parent));
        let is_named = parents.any(|parent| parent.text.contains(&format!("mod {name};")));
        assert!(is_named, "{} is not a module of any other file", path.display());
    }
}

#[test]
fn doc_comments_say_more_than_the_name() {
    let mut short = Vec::new();
    for (path, file) in sources().shipped() {
        let mut lines = file.shipped.lines().map(str::trim).peekable();
        while let Some(line) = lines.next() {
            let Some(first) = line.strip_prefix("///") else { continue };
            let mut text = first.to_owned();
            while let Some(next) = lines.next_if(|line| line.starts_with("///")) {
                text.push_str(&next[3..]);
            }
            // A comment with code in it refers to another item.
            if text.split_whitespace().count() < 3 && !text.contains('`') {
                short.push(format!("{}: {line}", path.display()));
            }
        }
    }
    assert!(short.is_empty(), "doc comments of one or two words; say something, or delete them: {short:#?}");
}

#[test]
fn the_top_level_holds_what_the_readme_says() {
    let folders: BTreeSet<String> = fs::read_dir(root())
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().is_dir())
        .map(|entry| entry.file_name().into_string().unwrap())
        .filter(|name| name != "target" && name != ".git")
        .collect();
    let expected =
        [".cargo", ".ci", ".github", "bench", "client", "docs", "meta", "server", "stagein", "tests"].map(str::to_owned);
    assert_eq!(folders, BTreeSet::from(expected));
}

/// Cargo does not look for programs of tests here, so a file that is no module would never run.
#[test]
fn every_file_of_tests_is_run() {
    let modules = fs::read_to_string(root().join("tests/all.rs")).unwrap();
    for path in fs::read_dir(root().join("tests")).unwrap().map(|entry| entry.unwrap().path()) {
        let is_program = ["all.rs", "tidy.rs"].iter().any(|name| path.ends_with(name));
        if path.extension().is_some_and(|extension| extension == "rs") && !is_program {
            let line = format!("mod {};", path.file_stem().unwrap().to_str().unwrap());
            assert!(modules.lines().any(|of_all| of_all == line), "tests/all.rs lacks '{line}'");
        }
    }
}

#[test]
fn no_file_has_the_marks_of_an_unfinished_merge() {
    let mut folders = vec![root()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()) {
            let (path, name) = (entry.path(), entry.file_name());
            if path.is_dir() && name != "target" && name != ".git" {
                folders.push(path);
            } else if let Ok(text) = fs::read_to_string(&path) {
                let is_mark = |line: &str| ["<<<<<<< ", "||||||| ", ">>>>>>> "].iter().any(|mark| line.starts_with(mark));
                assert!(!text.lines().any(is_mark), "{} has the marks of an unfinished merge", path.display());
            }
        }
    }
}

#[test]
fn nothing_builds_all_features() {
    // One of the features changes the license of the program and needs C headers.
    for file in [".ci/run", ".ci/test", ".ci/long", "README.md", "tests/vm/rdma"] {
        assert!(!fs::read_to_string(root().join(file)).unwrap().contains("--all-features"), "{file}");
    }
}

#[test]
fn every_license_is_on_the_list() {
    let deny: toml::Value = toml::from_str(&fs::read_to_string(root().join("deny.toml")).unwrap()).unwrap();
    let allowed: Vec<&str> =
        deny["licenses"]["allow"].as_array().unwrap().iter().map(|license| license.as_str().unwrap()).collect();
    for package in &metadata().packages {
        let text = package.license.clone().unwrap_or_else(|| panic!("{} has no license", package.name));
        let expression = spdx::Expression::parse_mode(&text, spdx::ParseMode::LAX).unwrap();
        let is_allowed = expression.evaluate(|requirement| allowed.contains(&requirement.to_string().as_str()));
        assert!(is_allowed, "{} is under '{text}', which deny.toml does not allow", package.name);
    }
}

#[test]
fn the_readme_gives_the_commands_that_ci_runs() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let ci = fs::read_to_string(root().join(".ci/run")).unwrap();
    assert!(ci.contains("readme-command"), "CI takes its commands out of the README");
    for command in ["cargo run -- run --local 4", "cargo test --workspace"] {
        assert!(readme.contains(command), "{command}");
    }
}

#[test]
fn ci_runs_a_failed_test_once_more_only_if_it_was_starved() {
    let output = Command::new(root().join(".ci/test-check")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// On a busy machine, each limit is too short one day. The harness knows how busy the machine was; the tests listed here are about a
/// deadline.
#[test]
fn tests_leave_time_limits_to_the_harness() {
    let about_deadlines = ["faults.rs", "launch.rs", "leases.rs", "read_path.rs"].map(|name| Path::new("tests").join(name));
    for (path, file) in sources().all().filter(|(path, _)| {
        path.starts_with("tests") && !path.starts_with("tests/harness") && *path != Path::new("tests/tidy.rs")
    }) {
        for line in file.text.lines().filter(|line| line.contains("assert")) {
            assert!(!line.contains("elapsed() <"), "{}: use harness::assert_no_hang: {line}", path.display());
            let is_allowed = !line.contains("assert_within(") || about_deadlines.iter().any(|known| known == path);
            assert!(is_allowed, "{} is not about a deadline: {line}", path.display());
        }
    }
}

/// With the handler, a drive that fails makes all batches of a process invalid, so other tests must not run in that process.
#[test]
fn tests_with_a_handler_for_sigbus_have_a_process_of_their_own() {
    for (path, file) in sources().all().filter(|(path, _)| path.starts_with("tests") && *path != Path::new("tests/tidy.rs")) {
        let is_allowed = path == Path::new("tests/harness/alone.rs") || !file.code.contains("fault::install");
        assert!(is_allowed, "{}: use harness::alone::runs_alone_with_views", path.display());
    }
}
