//! Tests of how servers are started: from lists of hosts, by the commands of managers and of MPI, and by hand.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::Duration;

use crate::harness::hosts::Hosts;
use crate::harness::{self, Ground, signal, text, wait_for, wait_until};
use nix::sys::signal::Signal;

#[test]
fn a_list_of_hosts_that_cannot_be_used_is_wrong_usage_only_if_the_user_wrote_it() {
    let hosts = Hosts::new();
    hosts.stand_in("flux", "echo 'n[1-9999]'");
    fs::write(hosts.0.at("nodes"), "a[\n").unwrap();
    let nodes = hosts.0.at("nodes").to_str().unwrap().to_owned();
    let own = |words: &'static str| (words, "");
    for (variables, arguments, status, (words, way_out)) in [
        ([("SLURM_JOB_ID", "7"), ("SLURM_JOB_NODELIST", "n[")], &[][..], 1, ("SLURM_JOB_NODELIST: 'n['", "with --hosts")),
        ([("PBS_JOBID", "7"), ("PBS_NODEFILE", &nodes)], &[], 1, ("(PBS_NODEFILE): 'a['", "with --hosts")),
        ([("LSB_JOBID", "7"), ("LSB_DJOB_HOSTFILE", &nodes)], &[], 1, ("(LSB_DJOB_HOSTFILE): 'a['", "with --hosts")),
        ([("FLUX_URI", "x"), ("X", "")], &[], 1, ("'flux getattr hostlist': it names more than 4096", "with --hosts")),
        ([("X", ""), ("Y", "")], &["--hosts", "n["], 2, own("--hosts: 'n['")),
        ([("X", ""), ("Y", "")], &["--hosts", ""], 2, own("--hosts: it names no hosts")),
        ([("X", ""), ("Y", "")], &["--hostfile", &nodes], 2, own("nodes': 'a['")),
        ([("X", ""), ("Y", "")], &["--hostfile", "/dev/zero"], 2, own("'/dev/zero': it is longer than 64.0MiB")),
    ] {
        for (command, rest, status) in [("up", &[][..], status), ("run", &["--", "true"], if status == 1 { 125 } else { status })]
        {
            let mut command = hosts.command(&[&[command], arguments].concat());
            let output = harness::output_of(command.args(rest).envs(variables));
            let message = text(&output.stderr);
            assert!(message.contains(words) && message.contains(way_out), "{message}");
            assert_eq!(output.status.code(), Some(status), "{message}");
        }
    }
}

#[test]
fn a_launcher_that_hangs_or_floods_ends_in_time_and_with_advice() {
    let hosts = Hosts::new();
    let fails = |arguments: &[&str]| {
        let output = harness::output_of(&mut hosts.command(&[&["up", "--hosts", "a,b"], arguments].concat()));
        assert_eq!(output.status.code(), Some(1));
        text(&output.stderr)
    };
    let mpiexec = ["--launcher", "mpiexec", "--start-timeout", "1"];
    hosts.stand_in("mpiexec", "sleep 100");
    let message = fails(&mpiexec);
    assert!(message.contains("'mpiexec --version' did not finish within 1 s; name the MPI with --launcher mpich"), "{message}");
    hosts.stand_in("mpiexec", "exit 3");
    let message = fails(&mpiexec[..2]);
    assert!(message.contains("'mpiexec --version' failed: exit status: 3; name the MPI"), "{message}");
    hosts.stand_in("mpiexec", "echo 'unknown option \"-ppn\"' >&2; exit 1");
    let message = fails(&["--launcher", "mpich"]);
    assert!(message.contains("unknown option") && message.contains("Open MPI needs --launcher openmpi"), "{message}");
    hosts.stand_in("mpiexec", "head -c 100000 /dev/zero | tr '\\0' x; exit 1");
    let message = fails(&["--launcher", "mpich"]);
    assert!(message.len() < 1000 && message.contains("xxx") && message.contains("needs --launcher openmpi"), "{message}");
    hosts.stand_in("ssh", "exit 255");
    let message = fails(&[]);
    assert!(message.contains("'ssh' ended without a message (exit status: 255); check that 'ssh"), "{message}");
    // The launcher's output is shown if the start takes long.
    hosts.stand_in("ssh", "exec yes junk");
    let message = fails(&["--start-timeout", "3"]);
    assert!(message.contains("'ssh' writes more than 100 lines"), "{message}");
    assert!(message.lines().count() < 1000, "{} lines", message.lines().count());
    hosts.0.assert_clean();
}

#[test]
fn warnings_and_refusals_name_the_node_and_the_option() {
    let ground = Ground::new();
    let output = ground.output(&["up", "--local", "2", "--capacity", "1PiB"]);
    assert!(text(&output.stderr).contains("warning: node "), "{}", text(&output.stderr));
    ground.ok(&["down"]);
    assert!(ground.fails(2, &["up", "--launcher", "local", "--hosts", "a"]).contains("--launcher local starts all servers"));
    assert!(ground.fails(2, &["up", "--local", "1", "--hosts", "a"]).contains("--local starts all servers"));
    assert!(ground.fails(2, &["up", "--memory", "256GiB"]).contains("--memory must be at most 255.0GiB"));
    for option in [["--prefix", "rel"], ["--memory", "0"], ["--memory", "256GiB"]] {
        let message = ground.fails(2, &[&["run"], &option[..], &["--", "true"]].concat());
        assert!(message.contains("--memory must be") || message.contains("'rel' cannot be the prefix"), "{message}");
    }
}

/// Uses stand-ins for launchers that are not available here. They start programs as the real ones
/// do: `pbsdsh`, for example, starts one for each slot.
#[test]
fn each_manager_is_used_through_its_own_commands_and_variables() {
    let name = nix::unistd::gethostname().unwrap().into_string().unwrap();
    for (program, script, variables, job) in [
        (
            "pbsdsh",
            "[ \"$1\" = -- ] && shift; \"$@\" < /dev/null & exec \"$@\" < /dev/null",
            ["PBS_JOBID", "PBS_NODEFILE"],
            "pbs:7",
        ),
        ("blaunch", "[ \"$1\" = -z ] && shift 2; exec \"$@\" < /dev/null", ["LSB_JOBID", "LSB_DJOB_HOSTFILE"], "lsf:7"),
        ("flux", "[ \"$1\" = getattr ] && exec uname -n; shift; exec \"$@\"", ["FLUX_ENCLOSING_ID", "FLUX_URI"], "flux:7"),
    ] {
        let ground = Ground::new();
        fs::create_dir(ground.at("bin")).unwrap();
        harness::write_program(&ground.at("bin").join(program), &format!("#!/bin/sh\n{script}\n"));
        fs::write(ground.at("nodes"), format!("{name}\n{name}\n")).unwrap();
        let dayfly = |arguments: &[&str]| {
            let mut command = ground.dayfly();
            command.env("PATH", format!("{}:{}", ground.at("bin").display(), std::env::var("PATH").unwrap()));
            let output = harness::output_of(command.args(arguments).env(variables[0], "7").env(variables[1], ground.at("nodes")));
            assert!(output.status.success(), "{program}: {}", text(&output.stderr));
            text(&output.stdout)
        };
        let id = dayfly(&["up", "--memory", "32MiB"]);
        let status: serde_json::Value = serde_json::from_str(&dayfly(&["status", "--json"])).unwrap();
        assert_eq!(status["nodes"].as_array().unwrap().len(), 1, "{program}");
        let user = fs::read_dir(ground.runtime.path()).unwrap().next().unwrap().unwrap().path();
        assert_eq!(fs::read_to_string(user.join(id.trim()).join("job")).unwrap(), job);
        assert!(
            fs::read_dir(ground.work.path()).unwrap().all(|entry| !entry.unwrap().file_name().to_str().unwrap().contains(".key"))
        );
        dayfly(&["down"]);
        ground.assert_clean();
    }
}

#[test]
fn clean_removes_the_key_file_of_a_start_that_was_killed() {
    let ground = Ground::new();
    let mut up = ground.dayfly();
    up.args(["up", "--foreground", "--launcher", "manual", "--nodes", "2", "--key-file", "here.key"]);
    let mut up = up.spawn().unwrap();
    let key = ground.at("here.key");
    wait_until("the key file exists", || key.exists());
    up.kill().unwrap();
    up.wait().unwrap();
    assert!(key.exists());
    ground.ok(&["clean"]);
    assert!(!key.exists(), "clean removes it");
    ground.assert_clean();
}

/// The supervisor does not wait for the server as long as `up` does, and cannot remove the folder meanwhile.
#[test]
fn nothing_is_left_if_a_server_that_was_started_by_hand_stands_still_at_the_end() {
    let ground = Ground::new();
    let key = ground.at("key");
    let mut up = ground.dayfly();
    up.args(["up", "--foreground", "--launcher", "manual", "--nodes", "2", "--deadlines-divisor", "10", "--key-file"]).arg(&key);
    let mut up = up.stdout(Stdio::piped()).spawn().unwrap();
    wait_until("the key file exists", || fs::read(&key).is_ok_and(|key| key.ends_with(b"}\n")));
    let mut servers = [0, 1].map(|_| ground.dayfly().args(["serve", "--key-file"]).arg(&key).spawn().unwrap());
    let mut id = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(up.stdout.take().unwrap()), &mut id).unwrap();
    signal(servers[1].id() as i32, Signal::SIGSTOP);
    signal(up.id() as i32, Signal::SIGTERM);
    assert_eq!(wait_for(&mut up, Duration::from_secs(40)).unwrap().code(), Some(143));
    ground.assert_clean();
    assert!(servers.iter_mut().all(|server| server.wait().is_ok()));
}

#[test]
fn servers_can_be_started_by_hand() {
    let ground = Ground::new();
    let key = ground.at("key");
    let mut up = ground.dayfly();
    up.args(["up", "--launcher", "manual", "--nodes", "2", "--memory", "32MiB", "--key-file"]).arg(&key);
    let mut up = up.stdout(Stdio::piped()).spawn().unwrap();
    wait_until("the key file exists", || fs::read(&key).is_ok_and(|key| key.ends_with(b"}\n")));
    assert_eq!(fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);
    let copy = ground.at("copy");
    fs::copy(&key, &copy).unwrap();
    let port = serde_json::from_slice::<serde_json::Value>(&fs::read(&key).unwrap()).unwrap()["supervisor"][0]
        .as_str()
        .unwrap()
        .rsplit(':')
        .next()
        .unwrap()
        .to_owned();
    let mut first = ground.dayfly().args(["serve", "--key-file"]).arg(&key).spawn().unwrap();
    let user = dayfly_client::locate::runtime_dir_in(ground.runtime.path());
    let of_first = format!("starting-{}.lock", first.id());
    wait_until("the first server has joined", || dayfly_client::locate::all(&user).unwrap()[0].folder.join(&of_first).exists());
    for number in [Signal::SIGHUP, Signal::SIGUSR1, Signal::SIGUSR2] {
        // These signals are meant for the job, so a server that waits for other servers ignores them.
        signal(first.id() as i32, number);
    }
    let mut second = ground
        .dayfly()
        .args(["serve", "--rendezvous", &format!("localhost:{port}")])
        .stdin(fs::File::open(&copy).unwrap())
        .spawn()
        .unwrap();
    assert!(wait_for(&mut up, Duration::from_secs(10)).unwrap().success());
    assert!(!key.exists(), "the key file is removed once all servers have joined");
    ground.ok(&["verify", "--from-every-node"]);
    ground.ok(&["down"]);
    for server in [&mut first, &mut second] {
        assert!(wait_for(server, Duration::from_secs(10)).unwrap().success());
    }
    ground.assert_clean();
    // Try a server that comes too late, and servers without an invitation.
    let late = harness::output_of(ground.dayfly().args(["serve", "--key-file"]).arg(&copy));
    assert!(text(&late.stderr).contains("cannot reach the supervisor"), "{}", text(&late.stderr));
    assert!(ground.fails(2, &["serve"]).contains("needs the invitation that 'dayfly up' writes"));
    assert!(ground.fails(1, &["serve", "--key-file", "missing"]).contains("'missing'"));
    assert!(ground.fails(2, &["up", "--launcher", "manual"]).contains("--nodes"));
}
