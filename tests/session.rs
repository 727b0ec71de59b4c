//! Tests of a session from its user's point of view: the main job, every command, and a clean end.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::harness::{self, Ground, assert_same_tree, output_of, pack, read_tree, signal, text, tool, wait_for, wait_until};
use dayfly_client::View;
use nix::sys::signal::Signal;

harness::with_few_and_many_workers! {
    a_canceled_stage_in_leaves_nothing,
}

/// Creates a tree with everything that an archive can hold.
fn make_tree(folder: &Path) {
    fs::create_dir_all(folder.join("sub/deep")).unwrap();
    fs::create_dir(folder.join("empty-directory")).unwrap();
    fs::write(folder.join("empty"), "").unwrap();
    fs::write(folder.join("one byte"), "x").unwrap();
    for number in 0..200_u32 {
        let content: Vec<u8> = (0..number * 37).map(|at| (at * number) as u8).collect();
        fs::write(folder.join(format!("sub/{number}.bin")), content).unwrap();
    }
    fs::write(folder.join("sub/deep/large"), vec![7; 3_000_001]).unwrap();
    fs::write(folder.join(std::ffi::OsStr::from_bytes(b"not utf-8 \xff\xfe\n")), "strange").unwrap();
    fs::write(folder.join(format!("sub/{}", "n".repeat(255))), "long name").unwrap();
    symlink("sub/deep", folder.join("link")).unwrap();
    symlink("nowhere", folder.join("dangling")).unwrap();
    fs::hard_link(folder.join("sub/7.bin"), folder.join("hard")).unwrap();
    tool("chmod", &["4750".as_ref(), folder.join("sub/3.bin").as_os_str()]);
    tool("touch", &["-d".as_ref(), "1969-12-31T23:00:00.25Z".as_ref(), folder.join("sub/5.bin").as_os_str()]);
    tool("chmod", &["700".as_ref(), folder.join("sub/deep").as_os_str()]);
}

#[test]
fn run_stages_in_and_runs_its_command() {
    let ground = Ground::new();
    make_tree(&ground.at("tree"));
    pack(&ground.at("a.tar.gz"), &ground.at("tree"), &["--format=pax"]);
    let stage_in = format!("{}:/dayfly/a", ground.at("*.tar.gz").display());
    let output = ground.output(&["run", "--local", "4", "--stage-in", &stage_in, "--", "dayfly", "verify", "--from-every-node"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("from 4 nodes"), "{}", text(&output.stdout));
    ground.assert_clean();
}

/// SEMANTICS: "Times have nanoseconds where the source has them."
/// SEMANTICS: "A staged-in tar equals what GNU tar unpacks: names, bytes, modes, times, symlinks and
/// hard links."
#[test]
fn every_archive_comes_out_as_tar_unpacks_it() {
    let ground = Ground::new();
    make_tree(&ground.at("tree"));
    let formats = [
        ("plain.tar", "--format=gnu"),
        ("pax.tar", "--format=pax"),
        ("a.tar.gz", "--format=pax"),
        ("a.tar.xz", "--format=pax"),
        ("a.tar.bz2", "--format=gnu"),
        ("a.tar.zst", "--format=pax"),
        ("a.tar.lz4", "--format=gnu"),
    ];
    for (name, format) in formats {
        pack(&ground.at(name), &ground.at("tree"), &[format]);
        // The content determines the format, not the name.
        fs::copy(ground.at(name), ground.at(format!("{name}.dat"))).unwrap();
    }
    let cluster = ground.up(3);
    let tree = read_tree(&cluster.at("tree"));
    for (number, (name, format)) in formats.iter().enumerate() {
        let unpacked = cluster.at(format!("unpacked-{number}"));
        fs::create_dir(&unpacked).unwrap();
        // Unpack the plain archive of that format as the reference, because tar's decompressors may not be installed.
        let plain = if *format == "--format=gnu" { "plain.tar" } else { "pax.tar" };
        tool("tar", &["-xPf".as_ref(), cluster.at(plain).as_os_str(), "-C".as_ref(), unpacked.as_os_str()]);
        let target = format!("/dayfly/set-{number}");
        cluster.stage(&[&cluster.at(format!("{name}.dat"))], &target);
        let exported = cluster.at(format!("exported-{number}"));
        cluster.ok(&["cp", "-r", &target, exported.to_str().unwrap()]);
        assert_same_tree(&read_tree(&unpacked), &read_tree(&exported), name);
    }
    cluster.stage(&[&cluster.at("tree")], "/dayfly/tree");
    cluster.ok(&["cp", "-r", "/dayfly/tree", cluster.at("exported-tree").to_str().unwrap()]);
    assert_same_tree(&tree, &read_tree(&cluster.at("exported-tree")), "a tree");
    assert_eq!(cluster.ok(&["ls"]).lines().count(), formats.len() + 1);
    cluster.ok(&["verify"]);
    cluster.down();
}

/// SEMANTICS: "A sample of more than 64 MiB is cut into blocks that several nodes hold."
#[test]
fn a_sample_larger_than_a_block_is_read_whole_and_by_range_from_every_node() {
    let ground = Ground::new();
    let size: usize = (150 << 20) + 17;
    let content: Vec<u8> =
        (0..size as u64 / 8 + 1).flat_map(|word| (word.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes()).take(size).collect();
    fs::create_dir(ground.at("d")).unwrap();
    fs::write(ground.at("d/large"), &content).unwrap();
    fs::write(ground.at("d/small"), "s").unwrap();
    let cluster = ground.up_with(3, &["--memory", "160MiB"]);
    cluster.stage(&[&cluster.at("d")], "/dayfly/d");
    assert!(cluster.ok(&["stat", "/dayfly/d/large"]).matches(" Block:").count() == 3);
    for node in 0..3 {
        let view = cluster.view(node);
        let file = view.open(b"/dayfly/d/large").unwrap();
        for (offset, len) in [(0, 10), ((64 << 20) - 5, 10), ((128 << 20) - 1, 100), (size - 3, 10), (size, 1), (size + 9, 1)] {
            let mut buffer = vec![0; len];
            let count = view.read_at(&file, offset as u64, &mut buffer).unwrap();
            assert_eq!(buffer[..count], content[offset.min(size)..(offset + len).min(size)], "at {offset} on node {node}");
        }
    }
    cluster.ok(&["verify", "--from-every-node"]);
    let remote_bytes = |cluster: &harness::Cluster| cluster.status()["nodes"][0]["remote_bytes"].as_u64().unwrap();
    let before = remote_bytes(&cluster);
    let output = output_of(cluster.dayfly().args(["cat", "/dayfly/d/large", "/dayfly/d/small"]));
    assert!(
        remote_bytes(&cluster) - before <= 2 * size as u64,
        "bytes that crossed the network are counted, not every read of them"
    );
    assert!(output.stdout.len() == size + 1 && output.stdout[..size] == content[..] && output.stdout[size] == b's');
    cluster.down();
}

/// SEMANTICS: "A read of a block that the node holds sends no message to the server."
#[test]
fn local_reads_send_no_message_and_are_counted() {
    let ground = Ground::new();
    fs::create_dir(ground.at("d")).unwrap();
    (0..50).for_each(|number| fs::write(ground.at(format!("d/{number}")), [number; 100]).unwrap());
    let cluster = ground.up(1);
    cluster.stage(&[&cluster.at("d")], "/dayfly/d");
    let view = cluster.view(0);
    assert!(view.stat(b"/dayfly/d/0").is_ok());
    // Stop the server instead of killing it, so that any message to it would wait.
    let pid = cluster.pids()[&0];
    signal(pid, Signal::SIGSTOP);
    for number in 0..50_u8 {
        let file = view.open(format!("/dayfly/d/{number}").as_bytes()).unwrap();
        let mut buffer = [0; 200];
        assert_eq!(view.read_at(&file, 0, &mut buffer).unwrap(), 100);
        assert!(buffer[..100].iter().all(|&byte| byte == number));
    }
    signal(pid, Signal::SIGCONT);
    assert_eq!(cluster.status()["nodes"][0]["reads"]["segment"]["count"], 50);
    cluster.down();
}

/// SEMANTICS: "The namespace holds datasets. A dataset is an immutable subtree that one `stage-in`
/// made. Datasets do not overlap, and the directories above them are synthetic."
/// SEMANTICS: "`stage-in --replace` replaces a dataset with another. Before the replacement, reads return the old dataset; after
/// it, reads of the old dataset's files that are still open fail with `EIO`."
#[test]
fn datasets_do_not_overlap_and_are_replaced_whole() {
    let ground = Ground::new();
    for (folder, content) in [("old", "old"), ("new", "newer")] {
        fs::create_dir(ground.at(folder)).unwrap();
        fs::write(ground.at(folder).join("f"), content).unwrap();
    }
    let cluster = ground.up(2);
    let (old, new) = (cluster.at("old"), cluster.at("new"));
    cluster.stage(&[&old], "/dayfly/a/b");
    let refuse = |target: &str, words: &str| {
        let message = cluster.fails(1, &["stage-in", new.to_str().unwrap(), target]);
        assert!(message.contains(words), "{message}");
    };
    refuse("/dayfly/a/b", "--replace");
    refuse("/dayfly/a", "overlap");
    refuse("/dayfly/a/b/c", "overlap");
    refuse("/dayfly", "overlap");
    assert!(cluster.fails(2, &["stage-in", new.to_str().unwrap(), "/elsewhere"]).contains("/dayfly"));
    let view = cluster.view(1);
    let file = view.open(b"/dayfly/a/b/f").unwrap();
    let mut buffer = [0; 9];
    assert_eq!(view.read_at(&file, 0, &mut buffer).unwrap(), 3);
    cluster.ok(&["stage-in", "--replace", new.to_str().unwrap(), "/dayfly/a/b"]);
    assert_eq!(view.read_at(&file, 0, &mut buffer).unwrap_err().errno(), nix::libc::EIO, "never zeros");
    let file = view.open(b"/dayfly/a/b/f").unwrap();
    assert_eq!((view.read_at(&file, 0, &mut buffer).unwrap(), &buffer[..5]), (5, &b"newer"[..]));
    assert_eq!(cluster.ok(&["cat", "/dayfly/a/b/f"]), "newer");
    assert_eq!(cluster.ok(&["ls", "/dayfly"]), "a\n");
    for (directory, name) in
        [(&b"/dayfly"[..], &b"/dayfly/a"[..]), (b"/dayfly/a", b"/dayfly/a/b"), (b"/dayfly/a/b", b"/dayfly/a/b/f")]
    {
        let open = view.open_directory(directory).unwrap();
        let listed = open.entry(0).unwrap();
        assert_eq!(listed.inode, view.lstat(name).unwrap().inode, "the same inode number as that of `lstat`");
    }
    cluster.down();
}

/// SEMANTICS: "Names are bytes. A name has at most 255 bytes, a path 4,096, and a symlink's target 4,095."
/// SEMANTICS: "Directories are listed in the order of their names' bytes."
/// SEMANTICS: "Files belong to the session's user. Permission bits are shown but not enforced: every
/// process that may attach, which is every process of the same user, may read."
/// SEMANTICS: "A directory that no source names has mode 0755 and the time of its stage-in."
/// SEMANTICS: "Hard links are several names of one file with one inode number. A file has the same
/// inode number on all nodes."
#[test]
fn attributes_and_the_order_of_entries_are_the_same_on_every_node() {
    let ground = Ground::new();
    make_tree(&ground.at("tree"));
    // This archive does not name the directories above its members, and its permissions let nobody read its files.
    let archive = ground.at("partial.tar");
    let members = ["sub/7.bin", "hard"].map(AsRef::as_ref);
    let options = ["--mode=0", "-cf"].map(AsRef::as_ref);
    let folder = ground.at("tree");
    tool("tar", &[&options[..], &[archive.as_os_str(), "-C".as_ref(), folder.as_os_str()], &members].concat());
    let cluster = ground.up(2);
    cluster.stage(&[&cluster.at("tree")], "/dayfly/t");
    cluster.stage(&[&archive], "/dayfly/partial");
    let views = [cluster.view(0), cluster.view(1)];
    let list = |view: &View| {
        let directory = view.open_directory(b"/dayfly/t/sub").unwrap();
        directory.entries(0).map(|entry| (entry.name.to_vec(), entry.inode)).collect::<Vec<_>>()
    };
    let [listed, listed_elsewhere] = [list(&views[0]), list(&views[1])];
    assert_eq!(listed.len(), 202);
    assert!(listed.is_sorted(), "names are listed in the order of their bytes");
    assert_eq!(listed, listed_elsewhere);
    for view in &views {
        let [first, second] = [&b"/dayfly/t/hard"[..], b"/dayfly/t/sub/7.bin"].map(|path| view.stat(path).unwrap());
        assert_eq!((first.inode, first.links), (second.inode, 2), "two names of one file");
        assert_eq!(view.stat(b"/dayfly/partial/sub").unwrap().permissions, 0o755, "a directory that no source names");
        let too_long = [[&b"/dayfly/t/sub/"[..], &[b'n'; 256]].concat(), [&b"/dayfly"[..], &b"/t".repeat(2048)].concat()];
        for path in too_long {
            assert_eq!(view.stat(&path).unwrap_err().errno(), nix::libc::ENAMETOOLONG);
        }
    }
    let user = nix::unistd::geteuid();
    for node in ["0", "1"] {
        let show = "stat -c '%u %a' /dayfly/partial/sub/7.bin && cksum < /dayfly/partial/sub/7.bin";
        let shown = cluster.ok(&["exec", "--node", node, "--", "sh", "-c", show]);
        assert!(shown.starts_with(&format!("{user} 0\n")), "permissions must be shown: {shown}");
    }
    cluster.down();
}

/// SEMANTICS: "`--no-unpack` keeps each archive as one file."
#[test]
fn an_archive_that_is_not_unpacked_stays_one_file() {
    let ground = Ground::new();
    make_tree(&ground.at("tree"));
    pack(&ground.at("a.tar.gz"), &ground.at("tree"), &["--format=pax"]);
    let cluster = ground.up(2);
    cluster.ok(&["stage-in", "--no-unpack", "a.tar.gz", "/dayfly/whole"]);
    assert_eq!(cluster.ok(&["ls", "-R", "/dayfly/whole"]), "/dayfly/whole:\na.tar.gz\n");
    let copied = output_of(cluster.dayfly().args(["cat", "/dayfly/whole/a.tar.gz"]));
    assert!(copied.stdout == fs::read(cluster.at("a.tar.gz")).unwrap());
    cluster.down();
}

/// SEMANTICS: "Directories are listed in the order of their names' bytes."
#[test]
fn commands_answer_like_those_of_coreutils() {
    let ground = Ground::new();
    make_tree(&ground.at("tree"));
    let cluster = ground.up(2);
    cluster.stage(&[&cluster.at("tree")], "/dayfly/t");
    let coreutils = |arguments: &[&str]| {
        text(
            &output_of(Command::new(arguments[0]).args(&arguments[1..]).env("LC_ALL", "C").current_dir(cluster.at("tree")))
                .stdout,
        )
    };
    assert_eq!(cluster.ok(&["ls", "/dayfly/t/sub"]), coreutils(&["ls", "sub"]));
    assert_eq!(cluster.ok(&["ls", "/dayfly/t"]), coreutils(&["ls"]));
    assert_eq!(cluster.ok(&["cat", "/dayfly/t/one byte", "/dayfly/t/link/large"]), coreutils(&["cat", "one byte", "link/large"]));
    let recursive = cluster.ok(&["ls", "-R", "/dayfly/t"]).replace("/dayfly/t", ".");
    assert_eq!(recursive, coreutils(&["ls", "-R"]));
    let bytes: u64 =
        read_tree(&cluster.at("tree/sub")).values().filter(|node| node.kind == 'f').map(|node| node.content.len() as u64).sum();
    assert_eq!(cluster.ok(&["du", "-s", "/dayfly/t/sub"]), format!("{}\t/dayfly/t/sub\n", bytes.div_ceil(1024)));
    let long = cluster.ok(&["ls", "-l", "/dayfly/t"]);
    assert!(
        long.contains("link -> sub/deep") && long.lines().any(|line| line.starts_with("-rw") && line.contains(" 2 ")),
        "{long}"
    );
    let stat = cluster.ok(&["stat", "/dayfly/t/sub/3.bin"]);
    assert!(
        stat.contains("Access: 4750/-rwsr-x---") && stat.contains("Origin: /") && stat.contains("/tree/sub/3.bin\n"),
        "{stat}"
    );
    for (status, arguments) in [
        (1, &["cat", "/dayfly/t/none"][..]),
        (1, &["cat", "/dayfly/t/sub"]),
        (1, &["ls", "/dayfly/none"]),
        (1, &["stat", "/etc"]),
        (2, &["cp", "/dayfly/t/empty", "/dayfly/t/x"]),
    ] {
        assert!(cluster.fails(status, arguments).starts_with("dayfly: "), "{arguments:?}");
    }
    assert!(cluster.fails(1, &["cp", "/dayfly/t/sub", "/tmp"]).contains("-r"));
    assert!(cluster.ok(&["df"]).lines().count() == 4);
    assert!(cluster.ok(&["verify", "/dayfly/t/sub/deep"]).contains("verified 1 sample "));
    assert!(cluster.fails(1, &["verify", "/dayfly/none"]).contains("no such file"));
    cluster.down();
}

#[test]
fn exec_and_env_make_a_process_part_of_the_session() {
    let cluster = Ground::new().up(3);
    let show = ["--", "sh", "-c", "echo $DAYFLY_SESSION $DAYFLY_NODE"];
    assert_eq!(cluster.ok(&[&["exec", "--node", "2"], &show[..]].concat()), format!("{} 2\n", cluster.id));
    assert_eq!(cluster.ok(&[&["exec"], &show[..]].concat()), format!("{} 0\n", cluster.id));
    assert!(cluster.ok(&["exec", "--node", "1", "--", "dayfly", "status"]).contains(&cluster.id));
    assert!(cluster.ok(&["env", "--node", "1"]).contains("export DAYFLY_NODE='1'"));
    assert!(cluster.fails(125, &["exec", "--node", "7", "--", "true"]).contains("no live node 7"));
    cluster.fails(127, &["exec", "--", "no-such-command"]);
    cluster.fails(126, &["exec", "--", "/etc/passwd"]);
    assert_eq!(cluster.output(&["exec", "--", "sh", "-c", "exit 9"]).status.code(), Some(9));
    cluster.down();
}

#[test]
fn commands_distinguish_sessions() {
    let ground = Ground::new();
    assert!(ground.fails(1, &["status"]).contains("dayfly up"));
    assert!(ground.ok(&["down"]).contains("nothing to do"));
    let first = ground.ok(&["up"]).trim().to_owned();
    let second = ground.ok(&["up"]).trim().to_owned();
    let message = ground.fails(1, &["status"]);
    assert!(message.contains(&first) && message.contains(&second) && message.contains("DAYFLY_SESSION"), "{message}");
    assert!(ground.fails(1, &["down"]).contains(&first));
    let down = |session: &str| text(&output_of(ground.dayfly().arg("down").env("DAYFLY_SESSION", session)).stdout);
    assert!(down(&second).contains("1 node ended"));
    // The session may be another user's, which nobody else can see.
    assert!(down(&second).contains(&format!("you have no session '{second}' on this machine: nothing to do")));
    assert!(ground.ok(&["status"]).contains(&first));
    // `up` must not remove a session that runs elsewhere and shares the data dir, although that session's folders look empty.
    let other = Ground::new();
    let up = |ground: &Ground| output_of(ground.dayfly().arg("up").env("TMPDIR", other.data.path())).status.success();
    assert!(up(&other) && up(&ground));
    fs::write(other.at("file"), "content").unwrap();
    other.ok(&["stage-in", "file", "/dayfly/x"]);
    assert_eq!(other.ok(&["cat", "/dayfly/x/file"]), "content");
    other.ok(&["down"]);
    for session in
        ground.fails(1, &["down"]).split(|character: char| !character.is_ascii_hexdigit()).filter(|word| word.len() == 16)
    {
        assert!(down(session).contains("1 node ended"));
    }
    ground.assert_clean();
    other.assert_clean();
}

/// SEMANTICS: "`run` ends the session whatever its command does, and on SIGINT, SIGTERM, SIGHUP and
/// SIGQUIT, after which its command has 30 seconds to exit. If `run` itself is killed, its servers
/// exit."
#[test]
fn run_ends_the_session_whatever_its_command_does() {
    let ground = Ground::new();
    for (script, status) in [("exit 7", 7), ("kill -9 $$", 137), ("true", 0)] {
        assert_eq!(ground.output(&["run", "--", "sh", "-c", script]).status.code(), Some(status), "{script}");
        ground.assert_clean();
    }
    assert!(ground.fails(127, &["run", "--", "no-such-command"]).contains("no-such-command"));
    ground.assert_clean();
    assert!(ground.fails(125, &["run", "--stage-in", "missing:/dayfly/x", "--", "true"]).contains("missing"));
    ground.assert_clean();
    assert!(ground.fails(2, &["run", "--stage-in", "missing", "--", "true"]).contains("as in train.tar:/dayfly/train"));
    for (number, status) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143), (Signal::SIGHUP, 129)] {
        let mut child = ground.dayfly().args(["run", "--local", "2", "--", "sleep", "100"]).spawn().unwrap();
        wait_until("the session is up", || ground.output(&["status"]).status.success());
        let start = Instant::now();
        signal(child.id() as i32, number);
        let ended = wait_for(&mut child, Duration::from_secs(20)).expect("run ends");
        assert_eq!(ended.code(), Some(status), "{number}");
        harness::assert_no_hang(start);
        ground.assert_clean();
    }
    // If `run` itself is killed, its servers notice.
    let mut child = ground.dayfly().args(["run", "--", "sleep", "10"]).spawn().unwrap();
    wait_until("the session is up", || ground.output(&["status"]).status.success());
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("the server has exited", || ground.output(&["status"]).status.code() == Some(1));
    ground.ok(&["down"]);
    ground.assert_clean();
}

#[test]
fn down_and_clean_wait_for_a_session_that_is_ending() {
    let ground = Ground::new();
    for command in ["down", "clean"] {
        let all = dayfly_client::locate::runtime_dir_in(ground.runtime.path());
        let (location, lock) = dayfly_client::locate::create(&all, dayfly_meta::id::SessionId([7; 8]), None).unwrap();
        let going = std::thread::spawn(move || {
            // The process that holds the lock must remove the folder.
            std::thread::sleep(Duration::from_millis(200));
            while location.folder.exists() {
                // A process that tries to take the lock may recreate the folder in the meantime.
                let _ = fs::remove_dir_all(&location.folder);
            }
            drop(lock);
        });
        ground.ok(&[command]);
        ground.assert_clean();
        going.join().unwrap();
    }
}

/// SEMANTICS: "A stage-in that is interrupted, for example by Ctrl-C, leaves nothing behind."
fn a_canceled_stage_in_leaves_nothing() {
    let ground = Ground::new();
    fs::create_dir(ground.at("d")).unwrap();
    (0..20_000).for_each(|number| fs::write(ground.at(format!("d/{number}")), [1; 3000]).unwrap());
    let cluster = ground.up(2);
    for node in ["0", "1"] {
        // Without the interrupt this would take 15 seconds.
        let mut command = cluster.dayfly();
        command.args(["stage-in", "--max-rate", "4MB/s", "d", "/dayfly/d"]).env("DAYFLY_NODE", node);
        let mut child = command.spawn().unwrap();
        wait_until("it takes space", || cluster.used_bytes() > 0);
        let start = Instant::now();
        // Do not send SIGINT, because background processes of a script ignore it, and these tests
        // may be such a process.
        signal(child.id() as i32, Signal::SIGTERM);
        wait_for(&mut child, Duration::from_secs(10)).expect("the command exits");
        wait_until("its space is free again", || cluster.used_bytes() == 0);
        harness::assert_no_hang(start);
        assert_eq!(cluster.ok(&["ls"]), "");
    }
    cluster.stage(&[&cluster.at("d")], "/dayfly/d");
    assert_eq!(cluster.ok(&["ls", "/dayfly/d"]).lines().count(), 20_000);
    cluster.down();
}

/// SEMANTICS: "`run` passes SIGUSR1 and SIGUSR2 on to its command."
#[test]
fn run_forwards_signals_and_refuses_two_stage_ins_to_one_target() {
    let ground = Ground::new();
    let script = "trap 'echo received; exit 3' USR1; echo ready; while :; do sleep 0.05; done";
    let mut command = ground.dayfly();
    command.args(["run", "--", "sh", "-c", script]).stdout(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut output, &mut line).unwrap();
    assert_eq!(line, "ready\n");
    harness::signal(child.id() as i32, nix::sys::signal::Signal::SIGUSR1);
    std::io::BufRead::read_line(&mut output, &mut line).unwrap();
    assert_eq!(line, "ready\nreceived\n");
    assert_eq!(harness::wait_for(&mut child, harness::COMMAND_TIMEOUT).unwrap().code(), Some(3));
    let message = ground.fails(2, &["run", "--stage-in", "a.tar:/dayfly/x", "--stage-in", "b.tar:/dayfly/x", "--", "true"]);
    assert!(message.contains("'/dayfly/x' is the target of two --stage-in"), "{message}");
    ground.assert_clean();
}

/// SEMANTICS: "`run` checks what it can before it starts a session. It exits with 127 if CMD does
/// not exist and with 126 if CMD cannot be run (a CMD in the namespace is checked only later); with
/// 2 if options are wrong, or targets are outside of the prefix or overlap; and with 125 for bad
/// filters, bad lists, a `--report` that cannot be written, and sources that do not exist, cannot
/// be read or are not the archives that their names promise (checking the content of the first 256
/// files of each `--stage-in`)."
#[test]
fn run_refuses_what_would_fail_later_before_it_starts_anything() {
    let ground = Ground::new();
    let executable = |name: &str, mode: &str, content: &str| {
        fs::write(ground.at(name), content).unwrap();
        tool("chmod", &[mode.as_ref(), ground.at(name).as_os_str()]);
    };
    fs::create_dir(ground.at("tree")).unwrap();
    fs::write(ground.at("tree/f"), "a sample").unwrap();
    pack(&ground.at("good.tar"), &ground.at("tree"), &[]);
    fs::write(ground.at("false.tar"), "no archive").unwrap();
    fs::write(ground.at("list"), "good.tar\nnot-there\n").unwrap();
    executable("not-executable", "644", "#!/bin/sh\n");
    executable("lost-interpreter", "755", "#!/no/such/interpreter\n");
    tool("mkfifo", &[ground.at("pipe").as_os_str()]);
    let cases: &[(i32, &str, &[&str], &[&str])] = &[
        // CMD.
        (127, "cannot run 'no-such-command'", &["good.tar:/dayfly/a"], &["--", "no-such-command"]),
        (127, "cannot run './no-such'", &[], &["--", "./no-such"]),
        (127, "'/no/such/interpreter'", &[], &["--", "./lost-interpreter"]),
        (126, "cannot run './not-executable': Permission denied", &["good.tar:/dayfly/a"], &["--", "./not-executable"]),
        (126, "cannot run './tree'", &[], &["--", "./tree"]),
        // Targets.
        (2, "'/dayfly/a' is the target of two --stage-in", &["good.tar:/dayfly/a", "tree:/dayfly/a/"], &["--", "true"]),
        (2, "targets '/dayfly/a' and '/dayfly/a/b' overlap", &["good.tar:/dayfly/a", "tree:/dayfly//a/b"], &["--", "true"]),
        (2, "targets '/dayfly/a' and '/dayfly' overlap", &["good.tar:/dayfly/a", "tree:/dayfly"], &["--", "true"]),
        (2, "a target begins with /dayfly/", &["good.tar:/dayfly/a", "tree:/elsewhere"], &["--", "true"]),
        (2, "a target begins with /data/", &["good.tar:/dayfly/a"], &["--prefix", "/data", "--", "true"]),
        (2, "it contains '..'", &["good.tar:/dayfly/../a"], &["--", "true"]),
        (2, "as in train.tar:/dayfly/train", &["good.tar:/dayfly/a", "tree"], &["--", "true"]),
        // Sources.
        (125, "no file or directory matches", &["good.tar:/dayfly/a", "not-there:/dayfly/b"], &["--", "true"]),
        (125, "no file or directory matches", &["good.tar:/dayfly/a", "*.none:/dayfly/b"], &["--", "true"]),
        (125, "not-there", &["good.tar:/dayfly/a", "@list:/dayfly/b"], &["--", "true"]),
        (125, "no-list", &["good.tar:/dayfly/a", "@no-list:/dayfly/b"], &["--", "true"]),
        (125, "is not a valid pattern", &["good.tar:/dayfly/a", "a[*:/dayfly/b"], &["--", "true"]),
        (125, "named like an archive", &["good.tar:/dayfly/a", "false.tar:/dayfly/b"], &["--", "true"]),
        (125, "a pipe cannot be staged in", &["good.tar:/dayfly/a", "pipe:/dayfly/b"], &["--", "true"]),
        // Options.
        (125, "is not a valid pattern", &["good.tar:/dayfly/a"], &["--include", "a[", "--", "true"]),
        (
            125,
            "cannot write --report 'no/such/page.html'",
            &["good.tar:/dayfly/a"],
            &["--report", "no/such/page.html", "--", "true"],
        ),
        (125, "is a directory", &["good.tar:/dayfly/a"], &["--report", "tree", "--", "true"]),
    ];
    // In this folder, every attempt to start a session fails, with a different message.
    let nowhere = ground.at("no-such-folder");
    for (status, word, sources, rest) in cases {
        let stage_ins = sources.iter().flat_map(|source| ["--stage-in", source]);
        let mut command = ground.dayfly();
        command.env("DAYFLY_RUNTIME_DIR", &nowhere).args(["run", "--local", "1"]).args(stage_ins).args(*rest);
        let output = output_of(&mut command);
        let printed = text(&output.stderr);
        assert!(
            output.status.code() == Some(*status) && printed.contains(word),
            "{sources:?} {rest:?}: {:?}: {printed}",
            output.status
        );
        assert!(!printed.contains("staging"), "{printed}");
        ground.assert_clean();
    }
    let started = output_of(ground.dayfly().env("DAYFLY_RUNTIME_DIR", &nowhere).args(["run", "--local", "1", "--", "true"]));
    assert!(text(&started.stderr).contains("no-such-folder"), "a session must fail to start there: {}", text(&started.stderr));
    // `run` accepts sources that `--keep-going` leaves out, a command that exists only in the namespace, and an absent PATH.
    let runs = |arguments: &[&str]| {
        let output = output_of(ground.dayfly().env_remove("PATH").args(["run", "--local", "1"]).args(arguments));
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        ground.assert_clean();
    };
    executable("tree/script", "755", "#!/bin/sh\nexit 0\n");
    runs(&["--stage-in", "tree:/dayfly/t", "--", "/dayfly/t/script"]);
    runs(&["--keep-going", "--stage-in", "*.tar:/dayfly/t", "--", "true"]);
    runs(&["--no-unpack", "--stage-in", "false.tar:/dayfly/t", "--", "true"]);
}

/// Names that imitate other names or control the terminal.
///
/// SEMANTICS: "Names from archives and hosts are escaped (`\u{202e}`, `\x1b` as `\u{1b}`, bytes that
/// are not UTF-8 as `\xff`) in all error messages, progress, `status` and `stat`, and also in `ls` and
/// `du` if their output is a terminal, as in `ls` of coreutils. A program that reads these names gets
/// their bytes."
#[test]
fn names_reach_a_terminal_escaped_and_a_program_as_they_are() {
    let ground = Ground::new();
    let names = ["a\u{202e}gpj.exe", "b\u{2066}\u{200f}", "c\u{1b}[31mred", "d\u{9b}2J", "e\nline"];
    fs::create_dir(ground.at("tree")).unwrap();
    for name in names {
        fs::create_dir(ground.at("tree").join(name)).unwrap();
        fs::write(ground.at("tree").join(name).join("f"), "a sample").unwrap();
    }
    let cluster = ground.up(1);
    cluster.stage(&[&cluster.at("tree")], "/dayfly/t");
    let is_quiet = |printed: &str| {
        let printed = printed.replace("\r\n", "\n");
        !printed.chars().any(|character| {
            character.is_control() && !"\n\t".contains(character) || "\u{202e}\u{2066}\u{200f}".contains(character)
        })
    };
    // `script` provides a terminal.
    let on_terminal = |arguments: &str| {
        let mut command = harness::program("script");
        let line = format!("{} {arguments}", env!("CARGO_BIN_EXE_dayfly"));
        command.args(["-q", "-e", "-c", &line, "/dev/null"]).env("DAYFLY_RUNTIME_DIR", cluster.runtime.path());
        text(&output_of(command.current_dir(cluster.work.path()).stdin(std::process::Stdio::null())).stdout)
    };
    if harness::is_installed("script") {
        for command in ["ls -lR /dayfly/t", "du /dayfly/t", "ls /dayfly/t"] {
            let printed = on_terminal(command);
            assert!(printed.contains("a\\u{202e}gpj.exe") && is_quiet(&printed), "{command}: {printed:?}");
        }
    }
    assert_eq!(cluster.ok(&["ls", "/dayfly/t"]), names.map(|name| format!("{name}\n")).concat());
    assert!(names.iter().all(|name| cluster.ok(&["du", "/dayfly/t"]).contains(name)));
    // Messages are escaped wherever they go, because people read them.
    for name in names {
        let path = format!("/dayfly/t/{name}/none");
        for arguments in
            [&["ls", &path][..], &["cat", &path], &["stat", &path], &["verify", &path], &["stage-in", &path, "/dayfly/x"]]
        {
            let printed = cluster.fails(1, arguments);
            assert!(is_quiet(&printed) && printed.lines().count() == 1, "{arguments:?}: {printed:?}");
        }
        assert!(is_quiet(&cluster.ok(&["stat", &format!("/dayfly/t/{name}/f")])));
    }
    let target = format!("/dayfly/{}", names[0]);
    let staged = cluster.output(&["stage-in", "tree", &target]);
    assert!(staged.status.success() && is_quiet(&text(&staged.stderr)), "{}", text(&staged.stderr));
    assert!(is_quiet(&cluster.ok(&["status"])));
    cluster.down();
}
