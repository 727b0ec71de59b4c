//! Tests of stage-ins that do not simply succeed: those that stall, are refused, conflict or are interrupted, and their exit
//! statuses.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::harness::{self, Cluster, Ground, pack, signal, text, wait_for, wait_until};
use nix::sys::signal::Signal;

harness::with_few_and_many_workers! {
    samples_of_one_path_in_archives_of_one_pattern_are_a_conflict,
    a_conflict_ends_a_stage_in_while_its_sources_are_read,
    an_interrupted_stage_in_reports_that_nothing_was_staged_in,
    a_stage_in_reports_the_end_of_its_session,
    a_file_whose_size_differs_from_its_metadata_is_an_error,
    samples_that_are_archives_give_a_hint,
    a_tar_that_follows_another_one_in_its_file_is_left_out_with_a_warning,
    a_stage_in_that_stands_still_ends_and_names_what_it_waits_for,
}

/// Stalls a server's reads of one file until this value is dropped.
struct HeldUpReads(std::process::Child);

impl HeldUpReads {
    fn new(pid: i32, path: &Path) -> Option<Self> {
        if !harness::is_installed("strace") {
            return None;
        }
        let mut strace = harness::program("strace");
        strace.args(["-f", "-qq", "-e", "trace=read,pread64", "-e", "inject=read,pread64:delay_enter=600s", "-P"]).arg(path);
        strace.args(["-o", "/dev/null", "-p", &pid.to_string()]).stderr(Stdio::piped());
        let mut child = strace.spawn().ok()?;
        // Wait until the kernel reports a tracer for each thread. If strace may not trace, it exits.
        let traced = format!("TracerPid:\t{}\n", child.id());
        let is_traced = || {
            let mut threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
            threads.all(|thread| {
                fs::read_to_string(thread.unwrap().path().join("status")).is_ok_and(|status| status.contains(&traced))
            })
        };
        let start = Instant::now();
        while !is_traced() {
            if start.elapsed() > Duration::from_secs(20) || child.try_wait().unwrap().is_some() {
                let _ = child.kill();
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(Self(child))
    }
}

impl Drop for HeldUpReads {
    fn drop(&mut self) {
        // The reads continue once strace has exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// SEMANTICS: "A stage-in that stalls ends: when no node has read, decoded, sent, written or merged anything for 300 s (`up
/// --stage-in-timeout`), the stage-in fails, and its error names for each node the pipeline step and the source or drive that the
/// node is waiting for."
fn a_stage_in_that_stands_still_ends_and_names_what_it_waits_for() {
    let ground = Ground::new();
    fs::create_dir_all(ground.at("tree/class-1")).unwrap();
    (0..60).for_each(|number| fs::write(ground.at(format!("tree/class-1/{number}.bin")), vec![number; 3000]).unwrap());
    pack(&ground.at("a.tar"), &ground.at("tree"), &[]);
    let cluster = ground.up_with(2, &["--stage-in-timeout", "5"]);
    // A worker is the first to read a file of a tree; an archive is already read during planning.
    for (source, held) in [("tree", "tree/class-1/1.bin"), ("a.tar", "a.tar")] {
        let path = cluster.at(held).canonicalize().unwrap();
        let pids = cluster.pids();
        let holding: Option<Vec<HeldUpReads>> = pids.values().map(|&pid| HeldUpReads::new(pid, &path)).collect();
        let Some(holding) = holding else {
            harness::skip("strace cannot trace a server here");
            return cluster.down();
        };
        let start = Instant::now();
        let message = cluster.fails(1, &["stage-in", source, "/dayfly/x"]);
        assert!(start.elapsed() >= Duration::from_secs(5), "{message}");
        for word in ["no progress", "5 s", "--stage-in-timeout", "node ", "reading", held] {
            assert!(message.contains(word), "{word:?} is not in {message}");
        }
        drop(holding);
        assert_eq!(cluster.ok(&["ls"]), "");
    }
    cluster.stage(&[&cluster.at("a.tar")], "/dayfly/x");
    cluster.down();
}

/// Creates three archives that contain the same four names. The content of a file names its archive.
fn shards(ground: &Ground) {
    fs::create_dir(ground.at("col")).unwrap();
    for shard in ["a", "b", "c"] {
        let tree = ground.at(format!("tree-{shard}"));
        fs::create_dir_all(tree.join("sub")).unwrap();
        (0..4).for_each(|number| fs::write(tree.join(format!("{number}.txt")), format!("{number} of {shard}")).unwrap());
        fs::write(tree.join("LICENSE"), "the same in all").unwrap();
        fs::write(tree.join("empty"), "").unwrap();
        fs::write(tree.join(format!("sub/{shard}")), shard).unwrap();
        pack(&ground.at(format!("col/{shard}.tar")), &tree, &[]);
    }
}

/// SEMANTICS: "Several sources that *one* pattern or *one* `@LIST` names must not have a path in
/// common, except for directories and for files of equal size and checksum. A path conflict ends the
/// stage-in with an error that names the path and both sources, as `cp` refuses to overwrite a file
/// that it has just created."
/// SEMANTICS: "`--prefix-by-source` unpacks each archive into a directory that has the archive's name
/// without its ending; `--on-conflict replace` lets the later source win. Within one archive, and
/// between sources that are given one by one, the later one wins without an option."
/// SEMANTICS: "Every sample that is replaced by different content is counted in the summary, the report
/// and `--json`, and the first few are named."
fn samples_of_one_path_in_archives_of_one_pattern_are_a_conflict() {
    let ground = Ground::new();
    shards(&ground);
    fs::write(ground.at("list"), "col/a.tar\ncol/b.tar\n").unwrap();
    let cluster = ground.up(2);
    for source in ["col/*.tar", "@list"] {
        let message = cluster.fails(1, &["stage-in", source, "/dayfly/x"]);
        for word in [".txt'", "col/a.tar", "col/b.tar", "--prefix-by-source", "--on-conflict replace"] {
            assert!(message.contains(word), "{source}: {word:?} is not in {message}");
        }
        assert_eq!(cluster.ok(&["ls"]), "", "nothing is staged in");
    }
    let stage_in = |arguments: &[&str]| -> (serde_json::Value, String) {
        let output = cluster.output(&[&["stage-in", "--json", "--replace"], arguments, &["/dayfly/x"]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        (serde_json::from_str(text(&output.stdout).lines().last().unwrap()).unwrap(), text(&output.stderr))
    };
    // Samples that are replaced are counted and named, with and without an option.
    for arguments in [&["--on-conflict", "replace", "col/*.tar"][..], &["col/a.tar", "col/b.tar", "col/c.tar"]] {
        let (summary, _) = stage_in(arguments);
        assert_eq!((summary["samples"].as_u64(), summary["replaced"].as_u64()), (Some(9), Some(8)), "{summary}");
        let notes = summary["notes"].to_string();
        assert!(notes.contains("'0.txt' from") && notes.contains("col/c.tar"), "{notes}");
        assert_eq!(cluster.ok(&["cat", "/dayfly/x/3.txt"]), "3 of c");
    }
    let output = cluster.output(&["stage-in", "--on-conflict", "replace", "col/*.tar", "/dayfly/y"]);
    assert!(text(&output.stderr).contains("warning: 8 samples replaced"), "{}", text(&output.stderr));
    let (summary, _) = stage_in(&["--prefix-by-source", "col/*.tar"]);
    assert_eq!((summary["samples"].as_u64(), summary["replaced"].as_u64()), (Some(21), Some(0)), "{summary}");
    assert_eq!(cluster.ok(&["cat", "/dayfly/x/b/3.txt"]), "3 of b");
    // Equal files, and a path that one archive has twice, are not a conflict.
    let (summary, _) = stage_in(&["--exclude", "?.txt", "col/*.tar"]);
    assert_eq!((summary["samples"].as_u64(), summary["replaced"].as_u64()), (Some(5), Some(0)), "{summary}");
    let append = harness::program("tar")
        .arg("-rf")
        .arg(cluster.at("col/a.tar"))
        .arg("-C")
        .arg(cluster.at("tree-b"))
        .arg("./0.txt")
        .status();
    assert!(append.unwrap().success());
    fs::remove_file(cluster.at("col/b.tar")).unwrap();
    let (summary, _) = stage_in(&["--include", "0.txt", "--on-conflict", "error", "col/a.tar"]);
    assert_eq!((summary["samples"].as_u64(), summary["replaced"].as_u64()), (Some(1), Some(1)), "{summary}");
    assert_eq!(cluster.ok(&["cat", "/dayfly/x/0.txt"]), "0 of b");
    cluster.down();
}

/// SEMANTICS: "Most path conflicts are found while sources are still being read."
fn a_conflict_ends_a_stage_in_while_its_sources_are_read() {
    let ground = Ground::new();
    let mut state = 1_u64;
    for shard in ["a", "b"] {
        let tree = ground.at(format!("tree-{shard}"));
        fs::create_dir(&tree).unwrap();
        for number in 0..400 {
            let noise = std::iter::repeat_with(|| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) as u8
            });
            fs::write(tree.join(format!("{number}.bin")), noise.take(50_000).collect::<Vec<u8>>()).unwrap();
        }
        pack(&ground.at(format!("{shard}.tar.gz")), &tree, &[]);
    }
    let cluster = ground.up(2);
    let output = cluster.output(&["stage-in", "--json", "--max-rate", "1MB/s", "[ab].tar.gz", "/dayfly/x"]);
    let (events, message) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{message}");
    let read =
        events.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["source_bytes"].as_u64());
    let all = fs::metadata(cluster.at("a.tar.gz")).unwrap().len() + fs::metadata(cluster.at("b.tar.gz")).unwrap().len();
    let read = read.skip(1).max().unwrap();
    assert!(read < all / 4 * 3, "{read} of {all} bytes were read");
    assert!(message.contains("a.tar.gz") && message.contains("b.tar.gz") && message.contains("--on-conflict"), "{message}");
    assert_eq!(cluster.ok(&["ls"]), "");
    cluster.down();
}

/// Starts a stage-in that would take minutes, and waits until it has read something.
fn slow_stage_in(cluster: &Cluster) -> std::process::Child {
    fs::create_dir_all(cluster.at("d")).unwrap();
    (0..2000).for_each(|number| fs::write(cluster.at(format!("d/{number}")), [1; 3000]).unwrap());
    let mut command = cluster.dayfly();
    command.args(["stage-in", "--max-rate", "50kB/s", "d", "/dayfly/d"]).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    wait_until("it takes space", || cluster.used_bytes() > 0);
    child
}

fn standard_error_of(child: &mut std::process::Child) -> String {
    let mut message = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut message).unwrap();
    message
}

/// SEMANTICS: "An interrupted `stage-in` prints whether anything was staged in, and exits with the
/// status that shells expect, 130 after Ctrl-C."
fn an_interrupted_stage_in_reports_that_nothing_was_staged_in() {
    let cluster = Ground::new().up(2);
    for (number, status) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let mut child = slow_stage_in(&cluster);
        signal(child.id() as i32, number);
        let ended = wait_for(&mut child, Duration::from_secs(30)).expect("it exits");
        let message = standard_error_of(&mut child);
        assert_eq!(ended.code(), Some(status), "{message}");
        assert!(message.contains("'/dayfly/d': interrupted: nothing was staged in"), "{message}");
        wait_until("its space is free again", || cluster.used_bytes() == 0);
        assert_eq!(cluster.ok(&["ls"]), "");
    }
    cluster.down();
}

/// SEMANTICS: "An interrupted `stage-in` prints whether anything was staged in, and exits with the
/// status that shells expect, 130 after Ctrl-C."
#[test]
fn a_stage_in_interrupted_before_its_server_answers_reports_that_nothing_was_staged_in() {
    let cluster = Ground::new().up(1);
    fs::create_dir_all(cluster.at("d")).unwrap();
    let server = cluster.pids()[&0];
    signal(server, Signal::SIGSTOP);
    let mut child = cluster.dayfly().args(["stage-in", "d", "/dayfly/d"]).stderr(Stdio::piped()).spawn().unwrap();
    let handles_interruptions = || {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim();
        u64::from_str_radix(caught, 16).unwrap() >> (Signal::SIGINT as i32 - 1) & 1 == 1
    };
    wait_until("it handles SIGINT", handles_interruptions);
    signal(child.id() as i32, Signal::SIGINT);
    let ended = wait_for(&mut child, Duration::from_secs(30)).expect("it exits");
    signal(server, Signal::SIGCONT);
    let message = standard_error_of(&mut child);
    assert!(ended.code() == Some(130) && message.contains("interrupted: nothing was staged in"), "{ended}: {message}");
    cluster.down();
}

/// SEMANTICS: "If the session ends during a stage-in, `stage-in` prints that the session ended."
fn a_stage_in_reports_the_end_of_its_session() {
    let cluster = Ground::new().up(2);
    let mut child = slow_stage_in(&cluster);
    cluster.ok(&["down"]);
    let ended = wait_for(&mut child, Duration::from_secs(30)).expect("it exits");
    let message = standard_error_of(&mut child);
    assert!(ended.code() == Some(1) && message.contains("the session was ended"), "{message}");
    cluster.ground.assert_clean();
    // Also while its servers have not exited yet.
    let cluster = Ground::new().up(2);
    let fails = || cluster.fails(1, &["stage-in", "missing", "/dayfly/x"]);
    let ending = cluster.location().begin_ending().unwrap();
    assert!(fails().contains("the session was ended"), "{}", fails());
    drop(ending);
    assert!(fails().contains("/missing'"), "{}", fails());
    cluster.down();
}

/// SEMANTICS: "A file that has more or fewer bytes than its metadata promises, as files in `/proc` have, causes an error that names
/// it, and does not become an empty sample."
fn a_file_whose_size_differs_from_its_metadata_is_an_error() {
    let cluster = Ground::new().up(2);
    // According to its metadata, this file has 0 bytes, but it has content.
    let message = cluster.fails(1, &["stage-in", "/proc/version", "/dayfly/x"]);
    assert!(message.contains("/proc/version") && message.contains("has a size of 0 bytes but yields more"), "{message}");
    assert_eq!(cluster.ok(&["ls"]), "");
    // According to its metadata, a file in /sys has the length of a page, but its content is shorter.
    let short = "/sys/kernel/mm/transparent_hugepage/enabled";
    if fs::metadata(short).is_ok_and(|metadata| metadata.len() == 4096) {
        let message = cluster.fails(1, &["stage-in", short, "/dayfly/x"]);
        assert!(message.contains(short) && message.contains("has a size of 4096 bytes but yields fewer"), "{message}");
    }
    cluster.down();
}

/// SEMANTICS: "A dataset has at most a million directories plus four for each file, counting directories that no source names, or
/// as many as --max-directories allows. More directories are an error."
/// SEMANTICS: "Hard links are resolved within a stage-in's share of `--stage-in-memory`. More hard
/// links than fit there are an error."
#[test]
fn too_many_directories_or_hard_links_are_an_error() {
    let ground = Ground::new();
    fs::create_dir_all(ground.at("t")).unwrap();
    fs::write(ground.at("t/file"), "x").unwrap();
    // Write the archives with Python, because a plain folder with this many entries would take longer.
    let script = "import tarfile, io
with tarfile.open('deep.tar.gz', 'w:gz', compresslevel=9) as tar:
    for number in range(600):
        member = tarfile.TarInfo('%d/' % number + '/'.join('d' * 2000)); member.type = tarfile.DIRTYPE; tar.addfile(member)
with tarfile.open('links.tar.gz', 'w:gz') as tar:
    tar.addfile(tarfile.TarInfo('a'), io.BytesIO(b''))
    for number in range(150000):
        member = tarfile.TarInfo('l%d' % number); member.type = tarfile.LNKTYPE; member.linkname = 'a'; tar.addfile(member)
";
    let made = harness::program("python3").args(["-c", script]).current_dir(ground.work.path()).output().unwrap();
    assert!(made.status.success(), "{}", text(&made.stderr));
    let cluster = ground.up_with(1, &["--stage-in-memory", "300MiB"]);
    let message = cluster.fails(1, &["stage-in", "deep.tar.gz", "/dayfly/x"]);
    assert!(message.contains("more than 1000000 directories") && message.contains("--max-directories"), "{message}");
    let message = cluster.fails(1, &["stage-in", "links.tar.gz", "/dayfly/x"]);
    assert!(message.contains("hard links") && message.contains("--stage-in-memory"), "{message}");
    assert_eq!(cluster.ok(&["ls"]), "");
    let message = cluster.fails(1, &["stage-in", "--max-directories", "0", "t", "/dayfly/x"]);
    assert!(message.contains("--max-directories"), "{message}");
    cluster.ok(&["stage-in", "--max-directories", "1", "t", "/dayfly/x"]);
    cluster.down();
}

/// SEMANTICS: "What follows a tar's end mark is left out, as by GNU tar. If it is another archive, as in the output of `cat a.tar
/// b.tar`, the summary says so."
fn a_tar_that_follows_another_one_in_its_file_is_left_out_with_a_warning() {
    let ground = Ground::new();
    for name in ["a", "b"] {
        fs::create_dir(ground.at(name)).unwrap();
        fs::write(ground.at(format!("{name}/{name}")), name.repeat(5000)).unwrap();
        pack(&ground.at(format!("{name}.tar")), &ground.at(name), &[]);
        pack(&ground.at(format!("{name}.tar.gz")), &ground.at(name), &[]);
    }
    let join = |names: [&str; 2], to: &str| {
        let bytes = names.map(|name| fs::read(ground.at(name)).unwrap()).concat();
        fs::write(ground.at(to), bytes).unwrap();
    };
    join(["a.tar", "b.tar"], "ab.tar");
    join(["a.tar.gz", "b.tar.gz"], "ab.tar.gz");
    join(["a.tar", "b.tar.gz"], "other-kind.tar");
    fs::write(ground.at("zeros"), vec![0; 3 << 20]).unwrap();
    join(["a.tar", "zeros"], "padded.tar");
    join(["padded.tar", "b.tar"], "far.tar");
    // What is no archive costs no word, also if several workers read the tar.
    fs::write(ground.at("rest"), vec![7; 9000]).unwrap();
    join(["a.tar", "rest"], "rest.tar");
    fs::create_dir(ground.at("large")).unwrap();
    fs::File::create(ground.at("large/a")).unwrap().set_len(20 << 20).unwrap();
    pack(&ground.at("large.tar"), &ground.at("large"), &[]);
    join(["large.tar", "rest"], "large-rest.tar");
    join(["large.tar", "b.tar"], "large-ab.tar");
    let cluster = ground.up(1);
    let followed = ["ab.tar", "ab.tar.gz", "other-kind.tar", "far.tar", "large-ab.tar"].map(|name| (name, true));
    let others = ["rest.tar", "large-rest.tar", "padded.tar", "a.tar", "a.tar.gz"].map(|name| (name, false));
    for (name, is_followed) in followed.into_iter().chain(others) {
        let target = format!("/dayfly/{}", name.replace('.', "-"));
        let output = cluster.output(&["stage-in", name, &target]);
        let shown = text(&output.stderr);
        assert!(output.status.success(), "{shown}");
        assert_eq!(
            shown.contains("1 archive followed by another one in the same file, which is left out"),
            is_followed,
            "{shown}"
        );
        assert_eq!(shown.contains(&format!("/{name}': another archive follows")), is_followed, "{shown}");
        assert_eq!(cluster.ok(&["ls", &target]), "a\n");
    }
    cluster.down();
}

/// SEMANTICS: "If at least nine of ten samples have the names of archives, the summary suggests
/// `--nested`."
fn samples_that_are_archives_give_a_hint() {
    let ground = Ground::new();
    fs::create_dir(ground.at("inner")).unwrap();
    fs::create_dir(ground.at("t")).unwrap();
    fs::write(ground.at("t/file"), "x").unwrap();
    (0..10).for_each(|number| pack(&ground.at(format!("inner/n{number}.tar")), &ground.at("t"), &[]));
    pack(&ground.at("train.tar"), &ground.at("inner"), &[]);
    let cluster = ground.up(1);
    let hint = |options: &[&str], target: &str| {
        let output = cluster.output(&[&["stage-in"], options, &["train.tar", target]].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stderr).contains("hint: 10 of 10 samples have names of archives; --nested")
    };
    assert!(hint(&[], "/dayfly/plain"));
    assert!(!hint(&["--nested"], "/dayfly/nested"));
    assert!(!hint(&["--no-unpack"], "/dayfly/whole"));
    cluster.down();
}
