//! Tests how sessions start and live: servers start along a tree, a session can start without nodes that are missing,
//! supervisors hold leases, and jobs find their own sessions. Tests that need a cluster are in `tests/slurm/jobs`.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::harness::hosts::Hosts;
use crate::harness::{self, Ground, first_rows, signal, text, wait_for, wait_until};
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::limits::TREE_WIDTH;
use nix::sys::signal::Signal;

/// SEMANTICS: "A session lives as long as its servers hear from its supervisor, which is `run` or a process that `up` leaves
/// behind: if the supervisor is killed, has exited or is cut off for 90 s, its servers exit."
#[test]
fn many_servers_are_started_along_a_tree_and_end_with_their_supervisor() {
    let (cluster, _) = Hosts::new().up(&["--hosts", "h[01-40]"]);
    let status = cluster.status();
    assert_eq!(status["nodes"].as_array().unwrap().len(), 40);
    let mut asked: BTreeMap<String, usize> = BTreeMap::new();
    for line in fs::read_to_string(cluster.at("notes")).unwrap().lines() {
        *asked.entry(line.split(' ').nth(1).unwrap().to_owned()).or_default() += 1;
    }
    assert!(asked.values().sum::<usize>() == 40 && asked.len() > 10, "{asked:?}");
    assert!(asked.values().all(|&servers| servers <= TREE_WIDTH), "no process starts many servers: {asked:?}");
    fs::write(cluster.at("f"), "a sample").unwrap();
    cluster.stage(&[&cluster.at("f")], "/dayfly/d");
    cluster.ok(&["verify", "--from-every-node"]);
    let supervisor = cluster.location().supervisor().unwrap();
    signal(supervisor, Signal::SIGKILL);
    cluster.wait_until_clean("all processes have ended and cleaned up");
}

/// SEMANTICS: "If not all nodes of a session arrive, the session does not start, and leaves nothing behind. With --min-nodes,
/// fewer nodes may be enough."
#[test]
fn a_node_that_does_not_join_is_named_in_time() {
    let hosts = Hosts::new();
    for (list, word) in [
        ("h1,broken", "no session: broken: its server did not start: ssh: connect to host broken port 22: No route"),
        ("h1,silent", "no session: silent: its server did not join within 5 s"),
    ] {
        let start = Instant::now();
        let output = harness::output_of(&mut hosts.command(&["up", "--hosts", list, "--start-timeout", "5"]));
        assert!(!output.status.success() && text(&output.stderr).contains(word), "{}", text(&output.stderr));
        harness::assert_no_hang(start);
        // A launcher that hangs is killed after a while.
        hosts.0.wait_until_clean("nothing is left");
    }
    let output = harness::output_of(&mut hosts.command(&[
        "up",
        "--hosts",
        "h1,broken,silent",
        "--min-nodes",
        "2",
        "--start-timeout",
        "5",
    ]));
    assert!(text(&output.stderr).contains("1 joined, and --min-nodes asks for 2"), "{}", text(&output.stderr));
    for (list, without) in [("h1,broken,h2", "broken"), ("h1,silent,h2", "silent")] {
        let (cluster, message) = Hosts::new().up(&["--hosts", list, "--min-nodes", "2", "--start-timeout", "5"]);
        assert!(message.contains(&format!("continuing without {without}")), "{message}");
        assert_eq!(cluster.status()["nodes"].as_array().unwrap().len(), 2);
        cluster.down();
    }
    // If a host that was to start others cannot be reached, the others join anyway.
    let list: Vec<String> = (0..34).map(|host| if host == 3 { "broken".to_owned() } else { format!("h{host}") }).collect();
    let (cluster, message) = Hosts::new().up(&["--hosts", &list.join(","), "--min-nodes", "33"]);
    assert!(message.contains("continuing without broken"), "{message}");
    assert_eq!(cluster.status()["nodes"].as_array().unwrap().len(), 33);
    cluster.down();
    let message = hosts.0.fails(2, &["up", "--hosts", "h1", "--min-nodes", "2"]);
    assert!(message.contains("--min-nodes asks for 2"), "{message}");
}

#[test]
fn the_files_of_a_session_are_private_whatever_the_umask() {
    let ground = Ground::new();
    let mut shell = harness::program("sh");
    shell.args(["-c", "umask 000; exec \"$0\" up --local 2"]).arg(ground.dayfly().get_program());
    for (name, value) in ground.dayfly().get_envs() {
        if let Some(value) = value {
            shell.env(name, value);
        }
    }
    let output = harness::output_of(shell.current_dir(ground.work.path()).env("SLURM_JOB_ID", "7"));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let folder = dayfly_client::locate::runtime_dir_in(ground.runtime.path()).join(text(&output.stdout).trim());
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{name}");
        names.push(name);
    }
    for name in ["job", "node-0.sock", "node-1.lock", "node-1.log", "supervisor.lock", "data-dirs"] {
        assert!(names.iter().any(|found| found == name), "no {name} in {names:?}");
    }
    ground.ok(&["down"]);
    ground.assert_clean();
}

#[test]
fn a_low_limit_of_open_files_is_reported_at_the_start() {
    let ground = Ground::new();
    let mut limited = harness::program("sh");
    limited.args(["-c", "ulimit -n 64; exec \"$0\" up --local 8", env!("CARGO_BIN_EXE_dayfly")]);
    for (name, value) in ground.dayfly().get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    let output = harness::output_of(&mut limited);
    let message = text(&output.stderr);
    assert!(output.status.code() == Some(1) && message.contains("no session: node "), "{message}");
    assert!(message.contains("only 64 files open") && message.contains("'ulimit -n'"), "{message}");
    ground.assert_clean();
}

#[test]
fn a_server_that_fails_to_start_reports_why() {
    let hosts = Hosts::new();
    let output = harness::output_of(&mut hosts.command(&["up", "--hosts", "h1,h2", "--data-dir", "/no/such/dir"]));
    let message = text(&output.stderr);
    assert!(message.contains("no session: h") && message.contains("cannot use the data dir '/no/such/dir'"), "{message}");
    hosts.0.assert_clean();
    let message = hosts.0.fails(1, &["up", "--local", "2", "--interface", "no-such"]);
    assert!(message.contains("'no-such' does not exist"), "{message}");
    hosts.0.assert_clean();
}

/// SEMANTICS: "A session lives as long as its servers hear from its supervisor, which is `run` or a process that `up` leaves
/// behind: if the supervisor is killed, has exited or is cut off for 90 s, its servers exit."
#[test]
fn a_session_lives_as_long_as_its_supervisor_sends_heartbeats() {
    for &tree in first_rows(1, &[&["--lease-tree-width", "1"][..], &[]]) {
        let cluster = Ground::new().up_with(2, &[&["--deadlines-divisor", "10"][..], tree].concat());
        let lease = Deadlines::DEFAULT.scaled(10).lease;
        let (supervisor, servers) = (cluster.location().supervisor().unwrap(), cluster.pids());
        // The session of a job that is suspended for longer than a lease continues.
        let all: Vec<i32> = servers.values().copied().chain([supervisor]).collect();
        all.iter().for_each(|&pid| signal(pid, Signal::SIGSTOP));
        std::thread::sleep(lease + Duration::from_secs(2));
        all.iter().for_each(|&pid| signal(pid, Signal::SIGCONT));
        std::thread::sleep(Duration::from_secs(2));
        assert_eq!(cluster.pids(), servers);
        // A session ends if only its supervisor is silent, as if the supervisor's machine were gone.
        signal(supervisor, Signal::SIGSTOP);
        let (start, before) = (Instant::now(), cluster.ground.witness.run_delays());
        wait_until("the servers have ended", || cluster.pids().is_empty());
        // Servers count the time in ticks of their own, so it grows by their waits for a processor.
        let waits = cluster.ground.witness.run_delay_since(&before);
        harness::assert_within(lease + Duration::from_secs(3) + waits, start);
        signal(supervisor, Signal::SIGCONT);
        cluster.wait_until_clean("the supervisor has cleaned up");
    }
}

/// A server may take `--start-timeout` to join, and so may a new server in the place of a dead one.
#[test]
fn a_server_whose_drive_is_slow_joins() {
    if !harness::strace::is_possible() {
        return;
    }
    let hosts = Hosts::new();
    let slow = "strace -f -qq -o /dev/null -e trace=statfs -e inject=statfs:delay_enter=3000000:when=1";
    let first = r#"while [ "${1#-}" != "$1" ]; do shift 2; done; host=$1; shift; [ $host = h2 ] || exec sh -c "$*""#;
    hosts.stand_in("ssh", &format!("{first}; exec {slow} sh -c \"$*\""));
    // A tenth of the deadlines, which are about messages and not about drives.
    let (cluster, _) = hosts.up(&["--hosts", "h1,h2", "--deadlines-divisor", "10"]);
    let dead = cluster.pids()[&1];
    cluster.kill(1);
    wait_until("a new server is a member", || {
        cluster.pids().get(&1).is_some_and(|&pid| pid != dead) && cluster.status_on(0)["nodes"][1]["lost_for_ms"].is_null()
    });
    cluster.down();
}

#[test]
fn up_in_the_foreground_lives_as_long_as_its_session() {
    let ground = Ground::new();
    for (number, status) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130)] {
        let mut child = ground.dayfly().args(["up", "--foreground", "--local", "2"]).stdout(Stdio::null()).spawn().unwrap();
        wait_until("the session is up", || ground.output(&["status"]).status.success());
        signal(child.id() as i32, number);
        assert_eq!(wait_for(&mut child, Duration::from_secs(10)).unwrap().code(), Some(status));
        ground.assert_clean();
    }
    let mut child = ground.dayfly().args(["up", "--foreground"]).stdout(Stdio::piped()).spawn().unwrap();
    // Servers answer a moment before their supervisor knows that they are ready, and a session that
    // ends then has failed to start. So wait for the id.
    let mut id = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut id).unwrap();
    ground.ok(&["down"]);
    assert_eq!(wait_for(&mut child, Duration::from_secs(10)).unwrap().code(), Some(0));
    ground.assert_clean();
}

#[test]
fn an_interrupted_start_leaves_nothing() {
    let hosts = Hosts::new();
    for (command, rest) in [("up", &[][..]), ("run", &["--", "true"])] {
        let mut child = hosts.command(&[command, "--hosts", "h1,silent"]).args(rest).spawn().unwrap();
        wait_until("it waits for the silent host", || hosts.0.at("notes").exists());
        std::thread::sleep(Duration::from_millis(300));
        signal(child.id() as i32, Signal::SIGTERM);
        let ended = wait_for(&mut child, Duration::from_secs(15)).expect("it ends");
        assert!(!ended.success());
        // The background process of `up` ends when its parent is gone.
        hosts.0.wait_until_clean("nothing is left");
        fs::remove_file(hosts.0.at("notes")).unwrap();
    }
}

/// SEMANTICS: "Within a job, commands use that job's session, and never another job's."
#[test]
fn commands_in_a_job_use_the_session_of_that_job() {
    let ground = Ground::new();
    let of_job = |job: &str, arguments: &[&str]| {
        let mut command = ground.dayfly();
        command.args(arguments).env("SLURM_JOB_ID", job);
        let output = harness::output_of(&mut command);
        (text(&output.stdout).trim().to_owned(), text(&output.stderr), output.status.success())
    };
    let (seven, ..) = of_job("7", &["up", "--local", "1"]);
    let (eight, ..) = of_job("8", &["up", "--local", "1"]);
    let session = |job: &str| {
        serde_json::from_str::<serde_json::Value>(&of_job(job, &["status", "--json"]).0)
            .map(|status| status["session"].as_str().unwrap().to_owned())
    };
    assert_eq!(session("7").unwrap(), seven);
    assert_eq!(session("8").unwrap(), eight);
    let (_, message, is_done) = of_job("9", &["status"]);
    assert!(!is_done && message.contains("no session of yours"), "a session of another job is not used: {message}");
    assert!(ground.fails(1, &["status"]).contains("you have 2 sessions"));
    let unknown = text(&harness::output_of(ground.dayfly().arg("status").env("DAYFLY_SESSION", " x")).stderr);
    assert!(unknown.contains("DAYFLY_SESSION is ' x', but you have no such session on this machine (running: "), "{unknown}");
    assert!(unknown.contains(&seven) && unknown.contains(&eight) && unknown.contains("; unset it"), "{unknown}");
    assert!(of_job("7", &["down"]).2 && of_job("8", &["down"]).2);
    ground.assert_clean();
}

/// SEMANTICS: "With `up --keep TIME`, they exit after that time."
#[test]
fn the_next_job_finds_a_session_started_with_keep_and_its_time_is_limited() {
    let ground = Ground::new();
    let in_job = |job: &str, arguments: &[&str]| harness::output_of(ground.dayfly().args(arguments).env("SLURM_JOB_ID", job));
    for wait in [false, true] {
        let up = in_job("7", &["up", "--local", "2", "--keep", if wait { "10s" } else { "60s" }]);
        let id = text(&up.stdout).trim().to_owned();
        let user = fs::read_dir(ground.runtime.path()).unwrap().next().unwrap().unwrap().path();
        let supervisor =
            dayfly_client::locate::SessionFolder { session: id.parse().unwrap(), folder: user.join(&id) }.supervisor().unwrap();
        assert!(!in_job("8", &["status"]).status.success());
        signal(supervisor, Signal::SIGKILL);
        wait_until("the next job finds it", || in_job("8", &["status"]).status.success());
        if wait {
            ground.wait_until_clean("the time of --keep is over");
        } else {
            assert!(in_job("8", &["down"]).status.success());
        }
        ground.assert_clean();
    }
    let message = harness::output_of(
        ground
            .dayfly()
            .args(["up", "--launcher", "slurm", "--keep", "1h"])
            .env("SLURM_JOB_ID", "7")
            .env("SLURM_JOB_NODELIST", "n1"),
    );
    assert!(text(&message.stderr).contains("end with the job"), "{}", text(&message.stderr));
}

#[test]
fn keep_does_not_apply_to_a_session_that_failed_to_start_or_was_ended() {
    let hosts = Hosts::new();
    let output = harness::output_of(&mut hosts.command(&["up", "--keep", "1h", "--hosts", "h1,broken"]));
    assert!(!output.status.success());
    hosts.0.wait_until_clean("nothing is left");
    // Nor does `--keep` apply if the supervisor gets a signal.
    let up = hosts.0.ok(&["up", "--keep", "1h", "--local", "2"]);
    let user = fs::read_dir(hosts.0.runtime.path()).unwrap().next().unwrap().unwrap().path();
    let folder = user.join(up.trim());
    let supervisor = dayfly_client::locate::SessionFolder { session: up.trim().parse().unwrap(), folder }.supervisor().unwrap();
    signal(supervisor, Signal::SIGTERM);
    hosts.0.wait_until_clean("nothing is left");
}

#[test]
fn an_encrypted_session_works_like_any_other() {
    let ground = Ground::new();
    fs::create_dir(ground.at("d")).unwrap();
    (0..300_usize).for_each(|number| fs::write(ground.at(format!("d/{number}")), vec![number as u8; 1000 * number]).unwrap());
    let cluster = ground.up_with(3, &["--encrypt"]);
    cluster.stage(&[&cluster.at("d")], "/dayfly/d");
    cluster.ok(&["verify", "--from-every-node"]);
    assert!(cluster.ok(&["status"]).contains("by TCP: node 0 has no RDMA: --encrypt"));
    assert!(cluster.fails(2, &["up", "--encrypt", "--transport", "rdma"]).contains("--encrypt"));
    cluster.down();
}

/// Returns true if a process is running. A zombie is not.
/// Node 0 looks up the sources. A machine that is not one of the nodes cannot check the sources in advance.
///
/// SEMANTICS: "Node 0 looks up the sources. If the machine that runs run is one of the nodes, it is node 0, and run checks the
/// sources beforehand. Otherwise the stage-in reports sources that are missing."
#[test]
fn run_checks_sources_in_advance_only_if_node_0_is_on_this_machine() {
    let own = nix::unistd::gethostname().unwrap().into_string().unwrap();
    let hosts = Hosts::new();
    let message = |list: &str, runtime: &std::path::Path| {
        let arguments = ["run", "--hosts", list, "--stage-in", "not-there:/dayfly/a"];
        let output = harness::output_of(hosts.command(&arguments).args(["--", "true"]).env("DAYFLY_RUNTIME_DIR", runtime));
        assert_eq!(output.status.code(), Some(125));
        text(&output.stderr)
    };
    let nowhere = hosts.0.at("no-such-folder");
    assert!(
        message(&own, &nowhere).contains("no file or directory matches"),
        "the missing source is reported before the session starts"
    );
    assert!(message("elsewhere", &nowhere).contains("no-such-folder"), "the source is not checked before the session starts");
    let late = message("elsewhere", hosts.0.runtime.path());
    assert!(late.contains("no file or directory matches"), "{late}");
    hosts.0.assert_clean();
}
