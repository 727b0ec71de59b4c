//! Tests of how sessions end, and that nothing is left of them.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::harness::hosts::Hosts;
use crate::harness::{Cluster, Ground, signal, text, wait_for, wait_until};
use dayfly_meta::limits::FOLDER_CHECK_INTERVAL;
use nix::sys::signal::Signal;

#[test]
fn two_commands_may_end_a_session_at_once() {
    let ground = Ground::new();
    for _ in 0..5 {
        ground.ok(&["up", "--local", "3"]);
        std::thread::scope(|scope| {
            for ending in [0, 1].map(|_| scope.spawn(|| ground.output(&["down"]))) {
                let output = ending.join().unwrap();
                assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
            }
        });
        ground.assert_clean();
    }
}

/// The other server may have ended because another command asked it first, or have died a moment ago.
#[test]
fn a_session_ends_without_complaints_about_servers_that_have_ended_already() {
    let cluster = Ground::new().up_with(3, &["--lost-after", "60"]);
    cluster.kill(2);
    let output = cluster.output(&["down"]);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("2 nodes ended"), "{}", text(&output.stdout));
    cluster.assert_clean();
    // A server that stands still for a while ends by a signal.
    let cluster = Ground::new().up(3);
    let stopped = cluster.pids()[&1];
    signal(stopped, Signal::SIGSTOP);
    let output = std::thread::scope(|scope| {
        let down = scope.spawn(|| cluster.output(&["down"]));
        std::thread::sleep(Duration::from_millis(4500));
        signal(stopped, Signal::SIGCONT);
        down.join().unwrap()
    });
    assert!(text(&output.stdout).contains("3 nodes ended"), "{}{}", text(&output.stdout), text(&output.stderr));
    cluster.assert_clean();
    // The supervisor does not complain either. Servers that stand still end only because they are killed in the end.
    std::thread::scope(|scope| {
        for stopped in [&[1][..], &[0, 1, 2]] {
            scope.spawn(|| end_in_the_foreground(stopped));
        }
    });
}

/// Starts a session of three nodes in the foreground.
fn up_in_the_foreground() -> (Cluster, Child) {
    let ground = Ground::new();
    let mut up = ground.dayfly();
    up.args(["up", "--foreground", "--local", "3"]);
    let mut up = up.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut id = String::new();
    BufReader::new(up.stdout.take().unwrap()).read_line(&mut id).unwrap();
    (Cluster { ground, id: id.trim().to_owned() }, up)
}

fn end_in_the_foreground(stopped: &[u16]) {
    let (cluster, mut up) = up_in_the_foreground();
    let pids = cluster.pids();
    stopped.iter().for_each(|node| signal(pids[node], Signal::SIGSTOP));
    cluster.ok(&["down"]);
    assert_eq!(wait_for(&mut up, Duration::from_secs(10)).unwrap().code(), Some(0));
    assert_eq!(std::io::read_to_string(up.stderr.take().unwrap()).unwrap(), "");
    cluster.assert_clean();
}

#[test]
fn an_interrupted_down_does_not_hide_later_losses() {
    let (cluster, mut up) = up_in_the_foreground();
    let servers = cluster.pids();
    // So the command ends nobody before it is interrupted.
    servers.values().for_each(|&server| signal(server, Signal::SIGSTOP));
    let mut down = cluster.dayfly().arg("down").spawn().unwrap();
    wait_until("the session is being ended", || cluster.location().is_ended());
    // The supervisor takes notice.
    std::thread::sleep(2 * FOLDER_CHECK_INTERVAL);
    down.kill().unwrap();
    down.wait().unwrap();
    assert!(!cluster.location().is_ended());
    std::thread::sleep(2 * FOLDER_CHECK_INTERVAL);
    servers.values().for_each(|&server| signal(server, Signal::SIGKILL));
    assert_eq!(wait_for(&mut up, Duration::from_secs(60)).unwrap().code(), Some(1));
    let message = std::io::read_to_string(up.stderr.take().unwrap()).unwrap();
    assert!(message.contains("all servers of the session are lost"), "{message}");
    cluster.assert_clean();
}

fn runs(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().and_then(|rest| rest.chars().next()).is_some_and(|state| !"ZX".contains(state))
}

/// The processes of a session. Dropping this value kills the processes, because without the session's
/// folder nothing else would find them after a failed test.
struct Pids(Vec<i32>);

impl Pids {
    fn of(location: &dayfly_client::locate::SessionFolder) -> Self {
        Self(location.live_nodes().into_iter().filter_map(|node| location.pid(node)).chain(location.supervisor()).collect())
    }

    fn all_ended(&self) -> bool {
        !self.0.iter().any(|&pid| runs(pid))
    }
}

impl Drop for Pids {
    fn drop(&mut self) {
        for &pid in self.0.iter().filter(|&&pid| runs(pid)) {
            // The process may just have exited.
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// A way to remove files that a session needs.
type Removal = (&'static str, fn(&std::path::Path));

const REMOVALS: [Removal; 7] = [
    ("the folder of all sessions", |folder| fs::remove_dir_all(folder.parent().unwrap()).unwrap()),
    ("the session's folder", |folder| fs::remove_dir_all(folder).unwrap()),
    ("the last node's lock", |folder| {
        let last = if folder.join("node-3.lock").exists() { "node-3.lock" } else { "node-0.lock" };
        fs::remove_file(folder.join(last)).unwrap();
    }),
    ("a socket", |folder| fs::remove_file(folder.join("node-0.sock")).unwrap()),
    ("the supervisor's lock", |folder| fs::remove_file(folder.join("supervisor.lock")).unwrap()),
    ("a folder that is moved and replaced", |folder| {
        let moved = folder.with_file_name("moved");
        fs::rename(folder, &moved).unwrap();
        fs::create_dir(folder).unwrap();
        fs::write(folder.join("node-0.lock"), "1").unwrap();
        fs::remove_dir_all(moved).unwrap();
    }),
    ("all files in it", |folder| {
        fs::read_dir(folder).unwrap().for_each(|entry| fs::remove_file(entry.unwrap().path()).unwrap());
    }),
];

/// SEMANTICS: "A session ends on all nodes and frees its space when its folder is removed on any of its nodes: the folder itself, a
/// server's lock or socket, or the supervisor's lock, even if another is put in its place. Servers and the supervisor check this
/// every second."
#[test]
fn a_session_ends_and_leaves_nothing_when_its_folder_or_lock_is_removed() {
    for nodes in [1, 4] {
        for (what, remove) in REMOVALS {
            let cluster = Ground::new().up_with(nodes, &["--memory", "32MiB"]);
            fs::write(cluster.at("f"), "a sample").unwrap();
            cluster.stage(&[&cluster.at("f")], "/dayfly/d");
            let pids = Pids::of(&cluster.location());
            assert_eq!(pids.0.len(), usize::from(nodes) + 1);
            remove(&cluster.folder());
            wait_until(&format!("all of {nodes} nodes and the supervisor have ended without {what}"), || pids.all_ended());
            cluster.ground.assert_clean();
        }
    }
}

/// SEMANTICS: "When the session's folder is removed, `run` asks its command to exit (SIGTERM, 30 s),
/// prints the reason and exits with 125."
#[test]
fn run_ends_its_command_and_prints_why_when_the_sessions_folder_is_removed() {
    let script = "trap 'echo ended > ended; exit 0' TERM; echo > ready; while :; do sleep 0.05; done";
    for (nodes, is_staging) in [("1", false), ("4", false), ("1", true), ("4", true)] {
        let ground = Ground::new();
        fs::write(ground.at("large"), vec![1; 40 << 20]).unwrap();
        let mut command = ground.dayfly();
        command.args(["run", "--local", nodes, "--memory", "32MiB"]);
        if is_staging {
            command.args(["--stage-in", "large:/dayfly/d", "--max-rate", "2MB/s"]);
        }
        let mut child = command.args(["--", "sh", "-c", script]).stderr(Stdio::piped()).spawn().unwrap();
        let _killed = Pids(vec![child.id() as i32]);
        let location = || dayfly_client::locate::all(&dayfly_client::locate::runtime_dir_in(ground.runtime.path())).unwrap();
        let exists = |file: &str| ground.at(file).exists();
        if is_staging {
            wait_until("the stage-in runs", || {
                location().first().is_some_and(|location| location.live_nodes().len().to_string() == nodes)
            });
            std::thread::sleep(Duration::from_millis(500));
        } else {
            wait_until("CMD runs", || exists("ready"));
        }
        let location = location().remove(0);
        let pids = Pids::of(&location);
        fs::remove_dir_all(&location.folder).unwrap();
        let status = wait_for(&mut child, Duration::from_secs(60)).expect("run ends");
        let mut errors = String::new();
        std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut errors).unwrap();
        assert_eq!(status.code(), Some(125), "{errors}");
        assert!(errors.contains(location.folder.to_str().unwrap()) && errors.contains("was removed"), "{errors}");
        assert!(is_staging || exists("ended"), "CMD gets SIGTERM: {errors}");
        assert!(!is_staging || !exists("ready"), "CMD is not started");
        assert!(pids.all_ended());
        ground.assert_clean();
    }
}

/// SEMANTICS: "`up --foreground` prints the reason and exits with 1."
#[test]
fn up_in_the_foreground_prints_why_it_ends() {
    let ground = Ground::new();
    let mut command = ground.dayfly();
    command.args(["up", "--foreground", "--local", "2"]).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let _killed = Pids(vec![child.id() as i32]);
    // A server answers before the others have started.
    wait_until("the session is up", || {
        text(&ground.output(&["status", "--json"]).stdout).matches("\"stage_in_workers\"").count() == 2
    });
    fs::remove_dir_all(dayfly_client::locate::runtime_dir_in(ground.runtime.path())).unwrap();
    let status = wait_for(&mut child, Duration::from_secs(60)).expect("it ends");
    let mut errors = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut errors).unwrap();
    assert!(status.code() == Some(1) && errors.contains("was removed"), "{errors}");
    ground.assert_clean();
}

/// Each server runs in its own mount namespace, with another file system at the runtime
/// folder, as on separate machines.
///
/// SEMANTICS: "A session ends on all nodes and frees its space when its folder is removed on any of its nodes: the folder itself, a
/// server's lock or socket, or the supervisor's lock, even if another is put in its place. Servers and the supervisor check this
/// every second."
#[test]
fn a_folder_removed_on_one_node_ends_the_session_on_all() {
    if !nix::unistd::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "Nodes with separate folders were NOT simulated: that needs root.");
        return;
    }
    for keep in [&[][..], &["--keep", "60s"]] {
        let hosts = Hosts::new();
        let script = format!(
            "#!/bin/sh\nwhile [ \"${{1#-}}\" != \"$1\" ]; do shift 2; done\nshift\n\
             exec unshare --mount sh -c \"mount -t tmpfs none {} && exec $*\"\n",
            hosts.0.runtime.path().display()
        );
        fs::write(hosts.0.at("bin/ssh"), script).unwrap();
        let (cluster, _) = hosts.up(&[&["--hosts", "h1,h2,h3"], keep].concat());
        let location = cluster.location();
        let supervisor = location.supervisor().unwrap();
        let _killed = Pids(vec![supervisor]);
        let ours = format!("/proc/{}/root{}", std::process::id(), location.folder.display());
        assert!(fs::read_dir(&ours).unwrap().all(|entry| entry.unwrap().file_name().to_str().unwrap().starts_with("supervisor")));
        // Find the servers by the folders that they see.
        let mut servers = Vec::new();
        for entry in fs::read_dir("/proc").unwrap() {
            let Some(pid) = entry.unwrap().file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
            let folder = std::path::PathBuf::from(format!("/proc/{pid}/root{}", location.folder.display()));
            let is_server =
                fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.split(|&byte| byte == 0).nth(1) == Some(b"serve"));
            let has_node = |folder| {
                let names = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
                names.map(|name| name.to_string_lossy().into_owned()).any(|name| name.starts_with("node-"))
            };
            if is_server && has_node(&folder) {
                servers.push((pid, folder));
            }
        }
        assert_eq!(servers.len(), 3, "{servers:?}");
        let pids = Pids(servers.iter().map(|(pid, _)| *pid).chain([supervisor]).collect());
        if !keep.is_empty() {
            signal(supervisor, Signal::SIGKILL);
            wait_until("the supervisor is gone", || !runs(supervisor));
        }
        fs::remove_dir_all(&servers[2].1).unwrap();
        wait_until("all have ended", || pids.all_ended());
        if !keep.is_empty() {
            cluster.ok(&["clean"]);
        }
        cluster.ground.assert_clean();
    }
}

/// SEMANTICS: "With `up --end-with PID`, the session also ends when the process PID ends, whatever ends it, and does not start if
/// that is earlier."
#[test]
fn a_session_ends_with_the_process_that_it_was_told_to_end_with() {
    let ground = Ground::new();
    for is_foreground in [false, true] {
        let mut owner = Command::new("sleep").arg("600").spawn().unwrap();
        let _killed = Pids(vec![owner.id() as i32]);
        let pid = owner.id().to_string();
        let mut command = ground.dayfly();
        command.args(["up", "--local", "2", "--end-with", &pid]).args(is_foreground.then_some("--foreground"));
        let mut up = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut id = String::new();
        BufReader::new(up.stdout.take().unwrap()).read_line(&mut id).unwrap();
        assert!(!id.is_empty() && ground.ok(&["status"]).contains(id.trim()), "{id:?}");
        owner.kill().unwrap();
        // Nobody asks for its status before the session has ended.
        ground.wait_until_clean("the session ends with its process");
        owner.wait().unwrap();
        let status = wait_for(&mut up, Duration::from_secs(60)).expect("it exits");
        let message = text(&up.wait_with_output().unwrap().stderr);
        assert!(status.success(), "{status}: {message}");
        assert_eq!(message.contains(&format!("the session ends with process {pid}")), is_foreground, "{message}");
        let message = ground.fails(2, &["up", "--local", "1", "--end-with", &pid]);
        assert!(message.contains("no such process"), "{message}");
        ground.assert_clean();
    }
    let message = ground.fails(2, &["up", "--local", "1", "--end-with", "1", "--keep", "1h"]);
    assert!(message.contains("--keep"), "{message}");
}

/// SEMANTICS: "With `up --end-with PID`, the session also ends when the process PID ends, whatever ends it, and does not start if
/// that is earlier."
#[test]
fn a_session_does_not_start_if_the_process_ends_first_that_it_was_to_end_with() {
    let ground = Ground::new();
    let mut owner = Command::new("sleep").arg("600").spawn().unwrap();
    let _killed = Pids(vec![owner.id() as i32]);
    let pid = owner.id().to_string();
    let mut command = ground.dayfly();
    command.args(["up", "--launcher", "manual", "--nodes", "2", "--start-timeout", "600", "--end-with", &pid]);
    let mut up = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let _up = Pids(vec![up.id() as i32]);
    let mut errors = BufReader::new(up.stderr.take().unwrap());
    let mut line = String::new();
    // What to start on the nodes.
    errors.read_line(&mut line).unwrap();
    owner.kill().unwrap();
    owner.wait().unwrap();
    let status = wait_for(&mut up, Duration::from_secs(60)).expect("it exits before the timeout");
    errors.read_to_string(&mut line).unwrap();
    assert_eq!(status.code(), Some(1), "{line}");
    assert!(line.contains(&format!("no session: process {pid}, which --end-with names, has ended")), "{line}");
    ground.assert_clean();
}

/// SEMANTICS: "With `up --end-with PID`, the session also ends when the process PID ends, whatever ends it, and does not start if
/// that is earlier."
#[test]
fn a_session_ends_with_its_process_while_nobody_reads_its_messages() {
    let ground = Ground::new();
    let mut owner = Command::new("sleep").arg("600").spawn().unwrap();
    let _killed = Pids(vec![owner.id() as i32]);
    let (_reader, writer) = std::io::pipe().unwrap();
    let flags = |flags| nix::fcntl::fcntl(&writer, nix::fcntl::FcntlArg::F_SETFL(flags)).unwrap();
    let mut command = ground.dayfly();
    command.args(["up", "--foreground", "--local", "1", "--end-with", &owner.id().to_string()]);
    let mut up = command.stdout(Stdio::piped()).stderr(writer.try_clone().unwrap()).spawn().unwrap();
    let _up = Pids(vec![up.id() as i32]);
    BufReader::new(up.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    flags(nix::fcntl::OFlag::O_NONBLOCK);
    while (&writer).write(&[b'x'; 4096]).is_ok() {}
    flags(nix::fcntl::OFlag::empty());
    owner.kill().unwrap();
    owner.wait().unwrap();
    ground.wait_until_clean("the session ends with its process");
    assert!(wait_for(&mut up, Duration::from_secs(60)).expect("it exits").success());
}
