//! What the design says about the code, held by tests: arrows between crates, named absences, where unsafe code is,
//! what files look like, licences, and that the promises in the docs have their tests.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn metadata() -> Metadata {
    MetadataCommand::new()
        .manifest_path(root().join("Cargo.toml"))
        .other_options(["--offline", "--filter-platform", "x86_64-unknown-linux-gnu"].map(str::to_owned))
        .exec()
        .unwrap()
}

/// All source files of the project, by path below its root.
fn sources() -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut waiting: Vec<PathBuf> =
        ["meta", "stagein", "server", "client", "bench", "tests"].iter().map(|name| root().join(name)).collect();
    while let Some(folder) = waiting.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                waiting.push(path);
            } else if path.extension().is_some_and(|kind| kind == "rs") {
                found.insert(path.strip_prefix(root()).unwrap().to_owned(), fs::read_to_string(&path).unwrap());
            }
        }
    }
    assert!(found.len() > 50);
    found
}

fn is_test(path: &Path) -> bool {
    let is_simulation = path.starts_with("server/src/simulation") || path.ends_with("server/src/simulation.rs");
    is_simulation || path.starts_with("tests") || path.ends_with("tests.rs") || path.ends_with("conformance.rs")
}

/// The part of a file that is shipped.
fn shipped(text: &str) -> &str {
    text.split("#[cfg(test)]").next().unwrap()
}

#[test]
fn arrows_between_crates_run_one_way() {
    let allowed: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::from([
        ("dayfly-meta", BTreeSet::new()),
        ("dayfly-stagein", BTreeSet::from(["dayfly-meta"])),
        ("dayfly-transport", BTreeSet::from(["dayfly-meta"])),
        ("dayfly-server", BTreeSet::from(["dayfly-meta", "dayfly-stagein", "dayfly-transport"])),
        ("dayfly-client", BTreeSet::from(["dayfly-meta"])),
        ("dayfly-preload", BTreeSet::from(["dayfly-meta", "dayfly-client"])),
        ("dayfly-bench", BTreeSet::from(["dayfly-meta", "dayfly-client"])),
        // Not for its code, but so that Cargo builds the library beside the program.
        ("dayfly", BTreeSet::from(["dayfly-meta", "dayfly-server", "dayfly-transport", "dayfly-client", "dayfly-preload"])),
    ]);
    let metadata = metadata();
    let packages = metadata.workspace_packages();
    assert_eq!(packages.len(), allowed.len(), "a new crate needs its place here and in ARCHITECTURE.md");
    for package in packages {
        let ours = package
            .dependencies
            .iter()
            .filter(|dependency| dependency.kind == DependencyKind::Normal && dependency.path.is_some());
        let found: BTreeSet<&str> = ours.map(|dependency| dependency.name.as_str()).collect();
        assert_eq!(found, allowed[package.name.as_str()], "what {} depends on", package.name);
    }
}

#[test]
fn named_absences() {
    let absences: &[(&str, &[&str])] = &[
        ("meta/src", &["std::net", "std::thread", "std::time::Instant", "SystemTime", "tokio", "OpenOptions"]),
        ("stagein/src", &["std::net", "tokio"]),
        ("server/transport/src", &["catalog", "Catalog", "dataset", "Dataset", "Sample", "segment"]),
        ("client/src", &["tokio", "thread::spawn", "TcpStream"]),
        ("server/src", &["std::thread::sleep", "println!", "eprintln!"]),
    ];
    for (path, text) in sources().iter().filter(|(path, _)| !is_test(path)) {
        for (folder, words) in absences {
            if !path.starts_with(folder) {
                continue;
            }
            // Comments may name what is absent.
            let code: String =
                shipped(text).lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n");
            for word in *words {
                assert!(!code.contains(word), "{} mentions '{word}', which {folder} knows nothing of", path.display());
            }
        }
    }
}

#[test]
fn verbs_are_named_in_their_folder_only() {
    for (path, text) in sources() {
        let is_border = path.starts_with("server/transport/src/rdma") || path.starts_with("server/transport/src/async_rdma");
        let is_border = is_border
            || [Path::new("server/transport/src/rdma.rs"), Path::new("server/transport/src/async_rdma.rs")].contains(&&*path);
        let is_free = is_border || path.starts_with("tests");
        assert!(is_free || (!text.contains("ibv_") && !text.contains("libibverbs")), "{} names a verb", path.display());
    }
}

#[test]
fn unsafe_code_is_where_the_design_says() {
    let allowed = [
        "meta/src/shared.rs",
        "server/src/store/write_back.rs",
        "server/transport/src/region.rs",
        // The border to libibverbs: its structures, the objects made of them, and their ends.
        "server/transport/src/rdma/device.rs",
        "server/transport/src/rdma/direct.rs",
        "server/transport/src/rdma/queue.rs",
        "server/transport/src/rdma/verbs.rs",
        "server/transport/patches/hex-simd/src/lib.rs",
        // Mapped memory, descriptors that come from the kernel, and what several threads own without locks.
        "client/src/arena.rs",
        "client/src/fault.rs",
        "client/src/reserved_fd.rs",
        "client/src/pool.rs",
        "client/src/segment_map.rs",
        "client/src/socket.rs",
        // The border to C: pointers, calls of the next library, and the tables that outlive a fork.
        "client/preload/src/api.rs",
        "client/preload/src/carry.rs",
        "client/preload/src/carry/mail.rs",
        "client/preload/src/memory.rs",
        "client/preload/src/next.rs",
        "client/preload/src/offset.rs",
        "client/preload/src/path.rs",
        "client/preload/src/process.rs",
        "client/preload/src/table.rs",
        "client/preload/src/vfork.rs",
        // Calls whose arguments are functions or structures of C.
        "client/preload/src/calls/descriptor.rs",
        "client/preload/src/calls/directory.rs",
        "client/preload/src/calls/exec.rs",
        "client/preload/src/calls/fts.rs",
        "client/preload/src/calls/ftw.rs",
        "client/preload/src/calls/scan.rs",
        "client/preload/src/calls/signal.rs",
        "client/preload/src/calls/spawn.rs",
        "client/preload/src/calls/stat.rs",
        "client/preload/src/calls/stdio.rs",
        "client/preload/src/calls/transfer.rs",
    ];
    for allowed in allowed {
        assert!(sources()[Path::new(allowed)].contains("unsafe"), "{allowed} has no unsafe code");
    }
    for (path, text) in sources() {
        let is_allowed = allowed.iter().any(|allowed| path == Path::new(allowed)) || path == Path::new("tests/tidy.rs");
        assert!(is_allowed || !text.contains("unsafe {"), "{} has unsafe code", path.display());
    }
}

#[test]
fn files_have_a_purpose_a_bound_and_a_parent() {
    let all = sources();
    for (path, text) in &all {
        assert!(text.starts_with("//!"), "{} does not say what it is for", path.display());
        assert!(shipped(text).lines().count() <= 600, "{} is too long", path.display());
        for banned in ["todo!(", "unimplemented!(", "dbg!(", "#[ignore", "FIXME", "process::exit("] {
            assert!(path == Path::new("tests/tidy.rs") || !text.contains(banned), "{} has '{banned}'", path.display());
        }
        let name = path.file_stem().unwrap().to_str().unwrap();
        if path.starts_with("tests") || ["lib", "main", "mod", "build"].contains(&name) {
            continue;
        }
        let folder = path.parent().unwrap();
        let parents = [folder.join("lib.rs"), folder.join("main.rs"), folder.with_extension("rs")];
        let is_named = parents.iter().filter_map(|parent| all.get(parent)).any(|text| text.contains(&format!("mod {name};")));
        assert!(is_named, "{} belongs to nothing", path.display());
    }
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
    let expected = [".ci", ".github", "bench", "client", "docs", "meta", "server", "stagein", "tests"].map(str::to_owned);
    assert_eq!(folders, BTreeSet::from(expected));
}

#[test]
fn nothing_builds_all_features() {
    // One of them changes the licence of the program, and needs headers.
    for file in [".ci/run", ".ci/long", "README.md", "tests/vm/rdma"] {
        assert!(!fs::read_to_string(root().join(file)).unwrap().contains("--all-features"), "{file}");
    }
}

#[test]
fn every_licence_is_on_the_list() {
    let deny: toml::Value = toml::from_str(&fs::read_to_string(root().join("deny.toml")).unwrap()).unwrap();
    let allowed: Vec<&str> =
        deny["licenses"]["allow"].as_array().unwrap().iter().map(|licence| licence.as_str().unwrap()).collect();
    for package in metadata().packages {
        let text = package.license.clone().unwrap_or_else(|| panic!("{} has no licence", package.name));
        let expression = spdx::Expression::parse_mode(&text, spdx::ParseMode::LAX).unwrap();
        let is_allowed = expression.evaluate(|requirement| allowed.contains(&requirement.to_string().as_str()));
        assert!(is_allowed, "{} is under '{text}', which deny.toml does not allow", package.name);
    }
}

#[test]
fn promises_in_the_docs_name_tests_that_exist() {
    let code: String = sources().into_values().collect();
    for page in ["SEMANTICS.md", "FORMATS.md", "PROTOCOL.md"] {
        let text = fs::read_to_string(root().join("docs").join(page)).unwrap();
        let names: Vec<&str> = text.split("test: `").skip(1).filter_map(|rest| rest.split('`').next()).collect();
        assert!(names.len() >= 3, "{page} names too few tests");
        for name in names {
            assert!(code.contains(&format!("fn {name}(")), "{page} names the test '{name}', which does not exist");
        }
    }
}

#[test]
fn the_readme_gives_the_commands_that_ci_runs() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let ci = fs::read_to_string(root().join(".ci/run")).unwrap();
    assert!(ci.contains("readme-command"), "CI takes its commands out of the README");
    for command in ["cargo run --release -- run --local 4", "cargo test --workspace"] {
        assert!(readme.contains(command), "{command}");
    }
}
