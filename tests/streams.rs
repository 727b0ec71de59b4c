//! Tests of standard output, standard error and log files that cannot be written: commands still do their work, and servers
//! continue.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::harness::drive::SmallDrive;
use crate::harness::{self, Ground, output_of, signal, text, wait_for, wait_until};
use nix::sys::signal::Signal;

const LIMIT: Duration = Duration::from_secs(100);

/// Opens a file to which every write fails with "No space left on device".
fn full() -> Stdio {
    OpenOptions::new().write(true).open("/dev/full").unwrap().into()
}

/// Creates a pipe whose reader is gone.
fn unread() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

fn make_tree(ground: &Ground) -> PathBuf {
    let tree = ground.at("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("a"), "content").unwrap();
    tree
}

/// SEMANTICS: "If a log cannot be written because its file system is full, its lines are lost and
/// nothing else is: servers continue."
#[test]
fn a_server_whose_log_cannot_be_written_continues() {
    let ground = Ground::new();
    let tree = make_tree(&ground);
    let Some(disk) = SmallDrive::mount(ground.runtime.path().to_owned(), "256k") else { return };
    let cluster = ground.up(1);
    // The last page of the log may have room, so fill it too.
    let log = cluster.folder().join("node-0.log");
    disk.fill(0);
    if let Ok(mut log) = OpenOptions::new().append(true).open(&log) {
        while log.write_all(b".").is_ok() {}
    }
    for number in 0..3 {
        cluster.stage(&[&tree], &format!("/dayfly/{number}"));
    }
    assert_eq!(cluster.ok(&["cat", "/dayfly/2/a"]), "content");
    disk.make_room();
    cluster.down();
}

/// SEMANTICS: "Messages and progress that cannot be written to standard error are lost, and nothing
/// else is: `run` exits with CMD's status."
#[test]
fn run_exits_with_its_commands_status_even_if_standard_error_fails() {
    let ground = Ground::new();
    let tree = make_tree(&ground);
    let stage_in = format!("{}:/dayfly/t", tree.display());
    for (name, stderr) in [("full", full as fn() -> Stdio), ("unread", unread)] {
        for options in [&[][..], &["--stage-in", &stage_in]] {
            let mut command = ground.dayfly();
            command.args(["run", "--local", "1"]).args(options).args(["--", "sh", "-c", "exit 7"]);
            let mut child = command.stdout(Stdio::null()).stderr(stderr()).spawn().unwrap();
            let status = wait_for(&mut child, LIMIT).expect("it exits");
            assert_eq!(status.code(), Some(7), "standard error is {name}, with {options:?}");
        }
    }
    ground.assert_clean();
}

/// SEMANTICS: "When a signal ends `run`, messages that nobody reads are dropped, and the session ends
/// anyway."
#[test]
fn a_signal_ends_run_even_if_its_messages_are_not_read() {
    let ground = Ground::new();
    let stage_in = format!("{}:/dayfly/t", make_tree(&ground).display());
    let (_reader, writer) = std::io::pipe().unwrap();
    let flags = |flags| nix::fcntl::fcntl(&writer, nix::fcntl::FcntlArg::F_SETFL(flags)).unwrap();
    flags(nix::fcntl::OFlag::O_NONBLOCK);
    while (&writer).write(&[b'x'; 4096]).is_ok() {}
    flags(nix::fcntl::OFlag::empty());
    let mut command = ground.dayfly();
    command.args(["run", "--local", "1", "--stage-in", &stage_in, "--", "true"]);
    let mut child = command.stdout(Stdio::null()).stderr(writer).spawn().unwrap();
    wait_until("the session is up", || ground.output(&["status"]).status.success());
    // `run` may be blocked while it writes its first message, or may not have reached that message yet. The signal must end `run`
    // in both cases.
    std::thread::sleep(Duration::from_millis(300));
    signal(child.id() as i32, Signal::SIGTERM);
    let status = wait_for(&mut child, LIMIT);
    if status.is_none() {
        signal(child.id() as i32, Signal::SIGKILL);
    }
    assert_eq!(status.expect("it exits").code(), Some(143));
    ground.assert_clean();
}

/// Returns the same command with its standard output closed.
fn closed(command: &Command) -> Command {
    let mut shell = harness::program("sh");
    shell.args(["-c", "exec \"$0\" \"$@\" >&-"]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        shell.current_dir(folder);
    }
    shell
}

/// SEMANTICS: "If standard output cannot be written, a command that would have succeeded exits with 1 and names standard output;
/// if standard output is a pipe whose reader has exited, the command prints nothing about it."
#[test]
fn output_that_cannot_be_written_is_an_error_that_names_it() {
    let ground = Ground::new();
    let tree = make_tree(&ground);
    let cluster = ground.up(1);
    cluster.stage(&[&tree], "/dayfly/t");
    let again = ["stage-in", "--json", "--replace", tree.to_str().unwrap(), "/dayfly/t"];
    let commands: [&[&str]; 15] = [
        &["status"],
        &["status", "--json"],
        &["metrics"],
        &["metrics", "--describe"],
        &["env"],
        &["df"],
        &["verify"],
        &["stat", "/dayfly/t/a"],
        &["tune", "--cache", "off"],
        &["top", "--interval", "0.1", "--count", "100000"],
        &again,
        &["doctor"],
        &["ls"],
        &["du"],
        &["cat", "/dayfly/t/a"],
    ];
    for arguments in commands.into_iter().chain([&["--help"][..], &["--version"]]) {
        for (stdout, is_reported) in [(full as fn() -> Stdio, true), (unread, false)] {
            // For `top`, it is normal that the reader goes away.
            if !is_reported && arguments[0] == "top" {
                continue;
            }
            let mut child = cluster.dayfly().args(arguments).stdout(stdout()).stderr(Stdio::piped()).spawn().unwrap();
            let status = wait_for(&mut child, LIMIT).expect("it exits");
            let message = text(&child.wait_with_output().unwrap().stderr);
            assert_eq!(message.contains("standard output"), is_reported, "{arguments:?}: {message}");
            assert!(!is_reported || status.code() == Some(1), "{arguments:?}: {status}, {message}");
        }
        if arguments[0] != "top" {
            let output = output_of(closed(cluster.dayfly().args(arguments)).stdin(Stdio::null()));
            let message = text(&output.stderr);
            assert!(output.status.code() == Some(1) && message.contains("standard output"), "{arguments:?}: {message}");
        }
    }
    cluster.down();
}

/// SEMANTICS: "If `up` cannot print its session's id, it ends the session and reports that."
#[test]
fn a_session_whose_id_cannot_be_printed_ends() {
    let ground = Ground::new();
    for options in [&[][..], &["--foreground"]] {
        for stdout in [Some(full as fn() -> Stdio), Some(unread), None] {
            let mut command = ground.dayfly();
            command.args(["up", "--local", "1"]).args(options);
            match stdout {
                Some(stdout) => drop(command.stdout(stdout())),
                None => command = closed(&command),
            }
            let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
            let status = wait_for(&mut child, LIMIT).expect("it exits");
            let message = text(&child.wait_with_output().unwrap().stderr);
            assert_eq!(status.code(), Some(1), "{message}");
            assert!(message.contains("standard output") && message.contains("was ended"), "{message}");
            ground.assert_clean();
        }
    }
}

/// SEMANTICS: "Command-line arguments are escaped in messages."
#[test]
fn command_line_arguments_are_escaped_in_messages() {
    let ground = Ground::new();
    let hostile = "\x1b]0;owned\x07\x1b[31m";
    let commands: [(i32, &[&str]); 5] = [
        (2, &["up", hostile]),
        (2, &["up", "--local", hostile]),
        (2, &[hostile]),
        (2, &["status", "--no-such\x1b[31m"]),
        (1, &["doctor", "--data-dir", "/absent\x1b[31m"]),
    ];
    for (status, arguments) in commands {
        let output = output_of(ground.dayfly().args(arguments));
        let printed = text(&output.stdout) + &text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{printed}");
        assert!(printed.contains("\\u{1b}") && !printed.contains('\x1b') && !printed.contains('\x07'), "{printed:?}");
        assert!(printed.lines().count() > 1, "line ends are not escaped: {printed:?}");
    }
}

/// SEMANTICS: "A session that finds no room for its folder leaves no folder behind, and its error asks the user to make room."
#[test]
fn a_session_that_finds_no_room_for_its_folder_leaves_none() {
    let ground = Ground::new();
    for spare in (0..12).map(|pages| pages * 4096) {
        let Some(disk) = SmallDrive::mount(ground.runtime.path().to_owned(), "64k") else { return };
        disk.fill(spare);
        let output = ground.output(&["up", "--local", "1"]);
        if output.status.success() {
            // On this kernel, that much space is enough.
            ground.ok(&["down"]);
        } else {
            let message = text(&output.stderr);
            assert!(message.contains("No space left on device") && message.contains("make room"), "{message}");
        }
        disk.make_room();
        let left: Vec<_> = fs::read_dir(ground.runtime.path()).unwrap().flatten().map(|entry| entry.path()).collect();
        assert!(left.is_empty(), "with {spare} bytes left: {left:?}");
    }
}
