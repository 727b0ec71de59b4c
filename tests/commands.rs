//! Tests that commands lose none of the user's files, ignore no option, and report each mistake once.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};

use crate::harness::{self, Ground, assert_same_tree, output_of, read_tree, text, tool};

#[test]
fn cp_replaces_a_file_only_with_a_whole_copy_and_replaces_no_device_or_fifo() {
    let ground = Ground::new();
    fs::create_dir_all(ground.at("tree/sub")).unwrap();
    fs::write(ground.at("tree/empty"), "").unwrap();
    fs::write(ground.at("tree/sub/large"), vec![7; 3_000_001]).unwrap();
    symlink("sub", ground.at("tree/link")).unwrap();
    fs::hard_link(ground.at("tree/sub/large"), ground.at("tree/hard")).unwrap();
    tool("chmod", &["750".as_ref(), ground.at("tree/empty").as_os_str()]);
    let cluster = ground.up(1);
    assert!(cluster.ok(&["verify"]).contains("nothing was verified"));
    cluster.stage(&[&cluster.at("tree")], "/dayfly/t");
    let at = |name: &str| cluster.at(name);
    let names = || {
        let mut names: Vec<_> = fs::read_dir(at("")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    fs::write(at("old"), "precious").unwrap();
    symlink("old", at("alias")).unwrap();
    symlink("nowhere", at("dangling")).unwrap();
    tool("mkfifo", &[at("fifo").as_os_str()]);
    tool("chmod", &["640".as_ref(), at("fifo").as_os_str()]);
    let before = names();
    // The kernel refuses to write more than the limit, as if the drive were full.
    for target in ["old", "alias", "new"] {
        let script = "trap '' XFSZ; ulimit -f 100; exec \"$0\" cp /dayfly/t/sub/large \"$1\"";
        let mut limited = harness::program("sh");
        limited.args(["-c", script, env!("CARGO_BIN_EXE_dayfly"), target]);
        limited.env("DAYFLY_RUNTIME_DIR", cluster.runtime.path()).env("DAYFLY_SESSION", &cluster.id).current_dir(at(""));
        let output = output_of(&mut limited);
        assert!(output.status.code() == Some(1) && text(&output.stderr).contains("too large"), "{}", text(&output.stderr));
        assert_eq!(fs::read_to_string(at("old")).unwrap(), "precious");
        assert_eq!(names(), before, "no part is left");
    }
    assert!(cluster.fails(1, &["cp", "/dayfly/t/empty", "dangling"]).contains("target does not exist"));
    assert!(cluster.fails(1, &["cp", "-r", "/dayfly/t/link", "fifo"]).contains("does not replace"));
    let large = fs::read(at("tree/sub/large")).unwrap();
    for takes_all in [true, false] {
        let reader = std::thread::spawn({
            let fifo = at("fifo");
            move || {
                let mut fifo = fs::File::open(fifo).unwrap();
                let mut read = Vec::new();
                if takes_all {
                    fifo.read_to_end(&mut read).unwrap()
                } else {
                    fifo.read(&mut [0; 10]).unwrap()
                };
                read
            }
        });
        let copied = cluster.output(&["cp", "/dayfly/t/sub/large", "fifo"]);
        assert_eq!(copied.status.success(), takes_all, "{}", text(&copied.stderr));
        assert!(reader.join().unwrap() == if takes_all { large.clone() } else { Vec::new() });
        let mode = fs::symlink_metadata(at("fifo")).unwrap();
        assert!(mode.file_type().is_fifo() && mode.permissions().mode() & 0o777 == 0o640);
    }
    // A copy that succeeds replaces the file that a symlink points to. Hard links stay hard links, even if the copy is repeated.
    cluster.ok(&["cp", "/dayfly/t/sub/large", "alias"]);
    assert!(fs::read(at("old")).unwrap() == large && at("alias").is_symlink());
    fs::create_dir(at("copy")).unwrap();
    for _ in 0..2 {
        cluster.ok(&["cp", "-r", "/dayfly/t", "copy"]);
        assert_same_tree(&read_tree(&at("tree")), &read_tree(&at("copy/t")), "cp -r");
    }
    cluster.down();
}

#[test]
fn a_wrong_path_is_reported_once_however_many_nodes_read() {
    let ground = Ground::new();
    fs::write(ground.at("sample"), "x").unwrap();
    let cluster = ground.up(3);
    cluster.stage(&[&cluster.at("sample")], "/dayfly/t");
    for command in ["verify", "ls", "stat", "cat"] {
        let elsewhere = cluster.fails(1, &[command, "/etc"]);
        assert_eq!(elsewhere, "dayfly: '/etc': it is not in the namespace, which is at '/dayfly'\n", "{command}");
        assert_eq!(cluster.fails(1, &[command, "/dayfly/none"]), "dayfly: '/dayfly/none': no such file or directory\n");
    }
    cluster.down();
}

#[test]
fn messages_about_errors_of_the_operating_system_have_no_numbers() {
    let ground = Ground::new();
    let absent = ground.at("absent");
    let absent = absent.to_str().unwrap();
    let cluster = ground.up(1);
    for (status, arguments) in [
        (1, &["stage-in", absent, "/dayfly/x", "--report", "no/such/page"][..]),
        (2, &["up", "--hostfile", absent]),
        (1, &["clean", "--data-dir", absent]),
        (2, &["serve", "--key-file", absent]),
        (1, &["up", "--local", "1", "--data-dir", absent]),
    ] {
        let output = cluster.output(arguments);
        let message = text(&output.stderr);
        assert!(!output.status.success() && message.contains("No such file or directory"), "{arguments:?}: {message}");
        assert!(!message.contains("os error"), "{arguments:?}, {status}: {message}");
    }
    let doctor = text(&cluster.output(&["doctor", "--json", "--data-dir", absent]).stdout);
    assert!(doctor.contains("No such file") && !doctor.contains("os error"), "{doctor}");
    cluster.down();
}

#[test]
fn a_hostfile_that_is_a_fifo_without_a_writer_is_refused_in_time() {
    let ground = Ground::new();
    let fifo = ground.at("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let message = ground.fails(2, &["up", "--start-timeout", "1", "--hostfile", fifo.to_str().unwrap()]);
    assert!(message.contains("its writer has not finished within 1 s"), "{message}");
}

#[test]
fn status_and_top_explain_each_column() {
    let ground = Ground::new();
    let (status, top) = (ground.ok(&["status", "--help"]), ground.ok(&["top", "--help"]));
    assert!(status.contains("explain its columns"), "{status}");
    let cluster = ground.up(1);
    let shown = cluster.ok(&["status"]);
    for column in ["samples", "bytes", "share", "cached", "taken", "free", "memory", "workers", "own", "arena", "asked"] {
        assert!(shown.matches(column).count() > 1, "{column}: {shown}");
    }
    for column in ["over the network", "local/expect", "prefetch"] {
        assert!(shown.contains(&format!("{column}:")), "{column}: {shown}");
    }
    let screen = cluster.ok(&["top", "--count", "1", "--interval", "0.1"]);
    let header = screen.lines().nth(1).unwrap();
    for column in
        ["reads/s", "bytes/s", "own", "cached", "arena", "asked", "remote/s", "wait p50/p99", "prefetch", "ahead", "queued"]
    {
        assert!(header.contains(column) && top.contains(&format!("'{column}'")), "{column}: {header} {top}");
    }
    cluster.down();
}

#[test]
fn options_that_would_be_ignored_are_refused() {
    let ground = Ground::new();
    fs::create_dir(ground.at("tree")).unwrap();
    fs::write(ground.at("tree/f"), "a sample").unwrap();
    let cluster = ground.up_with(1, &["--memory", "64MiB"]);
    assert!(
        cluster.fails(2, &["tune", "--prefetch-memory", "1TiB"]).contains("more than each server's arena, which has 64.0MiB")
    );
    assert!(cluster.ok(&["tune", "--prefetch-memory", "64MiB"]).contains("64.0MiB"));
    for (status, report, word) in
        [(1, "no/such/page.html", "cannot write --report"), (1, "tree", "is a directory"), (2, "/dayfly/page", "read-only")]
    {
        let message = cluster.fails(status, &["stage-in", "--report", report, "tree", "/dayfly/t"]);
        assert!(message.contains(word), "{message}");
        assert_eq!(cluster.ok(&["ls"]), "", "nothing is staged in");
    }
    for option in ["--launcher-args", "--key-file"] {
        let message = cluster.fails(2, &["up", option, "x"]);
        assert!(message.contains(&format!("{option} has no effect")) && message.contains("--launcher"), "{message}");
    }
    assert!(cluster.fails(1, &["clean", "--data-dir", "/no/such"]).contains("'/no/such': No such file"));
    cluster.down();
}
