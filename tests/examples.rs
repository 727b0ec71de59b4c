//! Builds the programs in `docs/examples` as its README says, and runs them in a real session.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use crate::harness::samples::{content, session};
use crate::harness::{self, Cluster, output_of, output_within, text};

/// Lengths of the samples: empty, small, and one that spans several chunks.
const LENS: [usize; 5] = [100, 0, 70_000, 5 << 20, 1];

/// A whole build on a slow machine.
const BUILD_TIMEOUT: Duration = Duration::from_secs(1_800);

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the folder with the programs of this build.
fn built() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_dayfly")).parent().unwrap()
}

fn ok(command: &mut Command) -> String {
    let output = output_of(command);
    succeeded(command, &output)
}

fn succeeded(command: &Command, output: &Output) -> String {
    assert!(output.status.success(), "{command:?}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn build_rust() -> PathBuf {
    let program = built().join("examples/read_samples");
    // `cargo test` without `--test` has just built the examples too.
    if program.exists() {
        return program;
    }
    let profile: &[&str] = if built().ends_with("release") { &["--release"] } else { &[] };
    let mut build = Command::new(env!("CARGO"));
    // With `--workspace`, the features of the dependencies are those of `cargo test --workspace`, which has built all of this.
    build.args(["build", "--workspace", "--offline", "--example", "read_samples"]).args(profile).current_dir(root());
    let output = output_within(&mut build, BUILD_TIMEOUT);
    succeeded(&build, &output);
    program
}

fn build_c(cluster: &Cluster) -> PathBuf {
    let (program, library) = (cluster.at("read_samples"), built().join("deps"));
    ok(harness::program("cc")
        .args(["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O2", "-I"])
        .arg(root().join("client/preload/include"))
        .arg(root().join("docs/examples/read_samples.c"))
        .arg("-o")
        .arg(&program)
        .arg("-L")
        .arg(&library)
        .arg("-ldayfly_preload")
        .arg(format!("-Wl,-rpath,{}", library.display())));
    program
}

#[test]
fn all_examples_read_every_sample_in_the_same_order() {
    let cluster = session(2, &[], &LENS);
    let run = |program: &Path, node: &str, epoch: &str| {
        ok(cluster.dayfly().args(["exec", "--node", node, "--"]).arg(program).args(["/dayfly/d", "7", epoch]))
    };
    let (rust, c) = (build_rust(), build_c(&cluster));
    let printed = run(&rust, "0", "0");
    assert_eq!(run(&c, "1", "0"), printed, "the order is the same on every node and in every language");
    assert_ne!(run(&rust, "0", "1"), printed, "another epoch has another order");
    if harness::is_installed("python3") {
        let script = root().join("docs/examples/read_samples.py");
        let python = ok(cluster.dayfly().args(["exec", "--", "python3"]).arg(script).args(["/dayfly/d", "7", "0"]));
        let samples: Vec<&str> = printed.lines().filter(|line| line.starts_with("sample")).collect();
        assert_eq!(python.lines().collect::<Vec<_>>(), samples, "Python reads the same samples in the same order");
    }

    // An epoch covers the whole dataset, so a part of one is refused.
    let nested = cluster.at("nested");
    std::fs::create_dir_all(nested.join("part")).unwrap();
    std::fs::write(nested.join("part/a"), "a").unwrap();
    std::fs::write(nested.join("b"), "b").unwrap();
    cluster.stage(&[&nested], "/dayfly/nested");
    let mut commands = vec![vec![rust.to_str().unwrap()], vec![c.to_str().unwrap()]];
    let script = root().join("docs/examples/read_samples.py");
    if harness::is_installed("python3") {
        commands.push(vec!["python3", script.to_str().unwrap()]);
    }
    for command in commands {
        let run = |path: &str| output_of(cluster.dayfly().args(["exec", "--"]).args(&command).args([path, "7", "0"]));
        let (whole, part) = (run("/dayfly/nested/"), run("/dayfly/nested/part"));
        assert!(whole.status.success() && text(&whole.stdout).contains("sample /dayfly/nested/b 1 98"), "{command:?}: {whole:?}");
        assert!(!part.status.success() && text(&part.stderr).contains("only a part of a dataset"), "{command:?}: {part:?}");
        assert!(!text(&part.stdout).contains("sample"), "{command:?}: {part:?}");
    }

    let lines = |kind: &str| {
        let mut lines: Vec<&str> = printed.lines().filter(|line| line.starts_with(kind)).collect();
        lines.sort_unstable();
        lines
    };
    let expect = |(number, &len): (usize, &usize)| {
        let sum: u64 = content(number, len).into_iter().map(u64::from).sum();
        format!("sample /dayfly/d/{number} {len} {sum}")
    };
    assert_eq!(lines("file"), ["file 0", "file 1", "file 2", "file 3", "file 4"]);
    assert_eq!(lines("sample"), LENS.iter().enumerate().map(expect).collect::<Vec<_>>());
    cluster.down();
}

/// The scripts in `docs/examples/jobs` are those that OPERATIONS shows, and shells understand them. `tests/slurm/jobs` runs those for
/// which it has what they need.
#[test]
fn job_scripts_are_those_of_the_docs_and_have_no_mistakes() {
    let page = std::fs::read_to_string(root().join("docs/OPERATIONS.md")).unwrap();
    let mut scripts: Vec<PathBuf> =
        std::fs::read_dir(root().join("docs/examples/jobs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    scripts.sort();
    let shown: Vec<&str> = page.split("```sh\n").skip(1).filter_map(|block| block.split("```").next()).collect();
    let shown: Vec<&str> = shown.into_iter().filter(|block| block.starts_with("#!")).collect();
    assert!(shown.len() == scripts.len() && scripts.len() >= 6, "{} are shown, and there are {scripts:?}", shown.len());
    for script in &scripts {
        let content = std::fs::read_to_string(script).unwrap();
        assert!(shown.contains(&&*content), "OPERATIONS does not show {}", script.display());
        ok(harness::program("bash").arg("-n").arg(script));
    }
    if harness::is_installed("shellcheck") {
        ok(harness::program("shellcheck").arg("--severity=warning").args(&scripts));
    }
}
