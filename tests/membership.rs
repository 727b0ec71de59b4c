//! Sessions whose members are lost and return, while their supervisor lives.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Stdio};
use std::time::Duration;

use crate::harness::samples::content;
use crate::harness::strace::Tracer;
use crate::harness::{self, Cluster, Ground, first_rows, pack, signal, text, wait_until};
use nix::sys::signal::Signal;

const FILES: usize = 400;
/// A server that is silent for 6 s is lost.
const QUICK: [&str; 2] = ["--lost-after", "6"];

fn len(number: usize) -> usize {
    number * 37 % 50_000
}

/// Renews leases along a tree in which node 0 passes them on to node 1, node 1 to node 2, and so on.
const ALONG_A_TREE: [&str; 4] = [QUICK[0], QUICK[1], "--lease-tree-width", "1"];

/// Starts four nodes, and makes a tar that they can stage in.
fn session() -> Cluster {
    session_with(&QUICK)
}

fn session_with(options: &[&str]) -> Cluster {
    session_of(4, options)
}

fn session_of(nodes: u16, options: &[&str]) -> Cluster {
    let ground = Ground::new();
    fs::create_dir(ground.at("tree")).unwrap();
    (0..FILES).for_each(|number| fs::write(ground.at(format!("tree/{number}")), content(number, len(number))).unwrap());
    pack(&ground.at("a.tar"), &ground.at("tree"), &[]);
    pack(&ground.at("a.tar.gz"), &ground.at("tree"), &[]);
    ground.up_with(nodes, options)
}

/// Reads all files of a dataset on a node.
fn read_all(cluster: &Cluster, node: u16, dataset: &str) {
    let view = cluster.view(node);
    for number in 0..FILES {
        let path = format!("/dayfly/{dataset}/{number}");
        let file = view.open(path.as_bytes()).unwrap_or_else(|error| panic!("{path} on node {node}: {error:?}"));
        let mut bytes = vec![0; len(number)];
        if let Err(error) = view.read_at(&file, 0, &mut bytes) {
            panic!("file {number} on node {node}: {error}");
        }
        assert!(bytes == content(number, len(number)), "file {number} on node {node}");
    }
}

fn status(cluster: &Cluster, node: u16) -> serde_json::Value {
    let output = harness::output_of(cluster.dayfly().args(["status", "--json"]).env("DAYFLY_NODE", node.to_string()));
    // The command fails as long as a node does not answer and is not lost yet.
    serde_json::from_slice(&output.stdout).unwrap()
}

fn is_lost(cluster: &Cluster, asked: u16, node: u16) -> bool {
    status(cluster, asked)["nodes"][usize::from(node)]["lost_for_ms"].is_u64()
}

fn origin_reads(cluster: &Cluster) -> u64 {
    let status = status(cluster, 0);
    let reads = |node: &serde_json::Value| node["origins"]["reads"].as_u64().unwrap();
    status["nodes"].as_array().unwrap().iter().map(reads).sum()
}

/// A stage-in that takes about eight seconds.
struct SlowStageIn {
    command: Child,
    messages: BufReader<ChildStderr>,
    seen: String,
}

impl SlowStageIn {
    /// Starts the stage-in on a node, and returns when it has been reading for a while.
    fn begin(cluster: &Cluster, source: &str, node: u16, target: &str) -> Self {
        let source = cluster.at(source);
        let mut command = cluster.dayfly();
        command.args(["stage-in", "--keep-going", "--max-rate", "400K", source.to_str().unwrap(), target]);
        command.env("DAYFLY_NODE", node.to_string());
        let mut command = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let (mut messages, mut seen) = (BufReader::new(command.stderr.take().unwrap()), String::new());
        while !seen.contains("staging in ") {
            assert!(messages.read_line(&mut seen).unwrap() > 0, "{seen}");
        }
        std::thread::sleep(Duration::from_millis(1500));
        Self { command, messages, seen }
    }

    /// Waits for the stage-in, which must succeed, and returns its messages.
    fn finish(self) -> String {
        self.finish_with(0)
    }

    /// Waits for the stage-in, which must exit with a status, and returns its messages.
    fn finish_with(mut self, status: i32) -> String {
        self.messages.read_to_string(&mut self.seen).unwrap();
        assert_eq!(self.command.wait().unwrap().code(), Some(status), "{}", self.seen);
        self.seen
    }
}

/// SEMANTICS: "A server that stands still for longer than `--lost-after` is lost, and is a member again when it continues: it owns what
/// it owned, and nothing is read from the sources anymore."
/// SEMANTICS: "A server is lost when nothing has been heard of it for `--lost-after` (30 s), or when it has closed its connection to
/// the supervisor and has not dialed again within 2 s. `status` says which nodes are lost, and for how long."
#[test]
fn a_server_that_stood_still_returns_with_its_blocks() {
    let rows = [(&ALONG_A_TREE[..], 0, [1, 2, 3]), (&QUICK, 3, [0, 1, 2]), (&ALONG_A_TREE, 1, [0, 2, 3])];
    for &(options, stopped, others) in first_rows(1, &rows) {
        let cluster = session_with(options);
        cluster.stage(&[&cluster.at("a.tar")], "/dayfly/d");
        let (pid, asked) = (cluster.pids()[&stopped], others[0]);
        signal(pid, Signal::SIGSTOP);
        wait_until("it is lost", || is_lost(&cluster, asked, stopped));
        others.iter().for_each(|&node| read_all(&cluster, node, "d"));
        assert!(others.iter().all(|&node| !is_lost(&cluster, asked, node)), "only the server that stood still is lost");
        assert!(origin_reads_of_live(&cluster, asked) > 0, "other nodes have read its blocks from the source");
        signal(pid, Signal::SIGCONT);
        wait_until("all nodes know that it is a member again", || (0..4).all(|node| !is_lost(&cluster, node, stopped)));
        let before = origin_reads(&cluster);
        (0..4).for_each(|node| read_all(&cluster, node, "d"));
        assert_eq!(origin_reads(&cluster), before);
        cluster.down();
    }
}

fn origin_reads_of_live(cluster: &Cluster, asked: u16) -> u64 {
    let status = status(cluster, asked);
    let reads = |node: &serde_json::Value| node["origins"]["reads"].as_u64().unwrap_or(0);
    status["nodes"].as_array().unwrap().iter().map(reads).sum()
}

#[test]
fn commands_succeed_while_a_member_is_lost() {
    let cluster = session();
    cluster.stage(&[&cluster.at("a.tar")], "/dayfly/d");
    cluster.kill(3);
    wait_until("node 3 is lost", || is_lost(&cluster, 0, 3));
    for words in [&["status"][..], &["du", "/dayfly/d"], &["ls", "/dayfly/d"], &["tune"], &["metrics"], &["verify"]] {
        cluster.ok(words);
    }
    let rows = cluster.ok(&["df"]);
    let names: Vec<Vec<&str>> = rows.lines().map(|line| line.split_whitespace().take(2).collect()).collect();
    assert_eq!((names.len(), &names[4][..]), (6, &["3", "lost"][..]), "{rows}");
    cluster.down();
}

/// SEMANTICS: "It reads nothing through nodes that are lost, and names them."
#[test]
fn verify_names_lost_servers_and_does_not_wait_for_those_that_stand_still() {
    let cluster = session();
    cluster.stage(&[&cluster.at("a.tar")], "/dayfly/d");
    // Node 0 is the one that commands ask by default.
    for &(stopped, how) in first_rows(2, &[(0, Signal::SIGSTOP), (1, Signal::SIGKILL), (3, Signal::SIGSTOP)]) {
        let pid = cluster.pids()[&stopped];
        signal(pid, how);
        let others = || (0..4).filter(|&node| node != stopped);
        wait_until("all others know that it is lost", || others().all(|node| is_lost(&cluster, node, stopped)));
        for arguments in [&["verify"][..], &["verify", "/dayfly/d"], &["verify", "--from-every-node"]] {
            let output = cluster.output(arguments);
            let (message, found) = (text(&output.stderr), text(&output.stdout));
            assert!(output.status.success(), "{arguments:?} while node {stopped} is lost: {message}");
            assert_eq!(message, format!("dayfly: nothing is read through nodes that are lost: {stopped}\n"));
            assert!(found.starts_with(&format!("verified {FILES} samples from 3 nodes: ")), "{found}");
        }
        // Other commands do not wait for such a server either.
        let table = cluster.ok(&["status"]);
        assert!(table.lines().any(|line| line.contains("lost")), "{table}");
        if how == Signal::SIGSTOP {
            signal(pid, Signal::SIGCONT);
            wait_until("it is a member again", || (0..4).all(|node| !is_lost(&cluster, node, stopped)));
        }
    }
    cluster.down();
}

/// SEMANTICS: "Once the supervisor of a session with `up --keep` is gone, no node is declared lost, a node that is lost does not
/// return, and no new server is started. If a server dies then, its blocks are read like those of a silent node, nothing is recovered
/// in the background, and every stage-in fails."
#[test]
fn a_kept_session_without_its_supervisor_does_not_recover_from_the_death_of_a_server() {
    // The stage-in waits for as long as it takes to declare a node lost, and longer.
    let cluster = session_with(&["--deadlines-divisor", "10", "--keep", "10m"]);
    let archive = cluster.at("a.tar");
    cluster.stage(&[&archive], "/dayfly/d");
    signal(cluster.location().supervisor().unwrap(), Signal::SIGKILL);
    let is_alone = || text(&cluster.output(&["rejoin", "3"]).stderr).contains("the supervisor of this session has ended");
    wait_until("node 0 knows that there is no supervisor", is_alone);
    cluster.kill(3);
    // By the time that this fails, a supervisor would have declared the node lost.
    let message = cluster.fails(1, &["stage-in", archive.to_str().unwrap(), "/dayfly/e"]);
    assert!(message.contains("node 3 "), "{message}");
    let message = cluster.fails(1, &["rejoin"]);
    assert!(message.contains("node 3: the supervisor of this session has ended"), "{message}");
    (0..3).for_each(|node| read_all(&cluster, node, "d"));
    for node in 0..3 {
        assert!(!is_lost(&cluster, node, 3));
        assert_eq!(status(&cluster, node)["nodes"][usize::from(node)]["recovery"]["wanted"]["blocks"], 0);
    }
}

/// SEMANTICS: "A server that returns shows the datasets that were staged in meanwhile, and no longer those that were replaced."
#[test]
fn a_server_that_returns_shows_what_the_others_show() {
    let cluster = session();
    cluster.stage(&[&cluster.at("a.tar")], "/dayfly/old");
    let pid = cluster.pids()[&2];
    signal(pid, Signal::SIGSTOP);
    wait_until("node 2 is lost", || is_lost(&cluster, 0, 2));
    cluster.ok(&["stage-in", "--replace", cluster.at("a.tar").to_str().unwrap(), "/dayfly/old"]);
    cluster.stage(&[&cluster.at("a.tar")], "/dayfly/new");
    (0..2).for_each(|node| read_all(&cluster, node, "new"));
    signal(pid, Signal::SIGCONT);
    wait_until("node 2 is a member again", || !is_lost(&cluster, 0, 2) && !is_lost(&cluster, 2, 2));
    for node in 0..4 {
        read_all(&cluster, node, "new");
        read_all(&cluster, node, "old");
    }
    // The node takes part in stage-ins again.
    cluster.stage(&[&cluster.at("a.tar")], "/dayfly/newest");
    (0..4).for_each(|node| read_all(&cluster, node, "newest"));
    assert!(status(&cluster, 0)["nodes"][2]["samples"].as_u64().unwrap() > 0);
    cluster.down();
}

/// SEMANTICS: "A stage-in that loses a node goes on without it: other nodes read again what it had read. The command says so in one
/// line, and succeeds."
#[test]
fn a_stage_in_goes_on_when_a_server_is_lost() {
    for source in first_rows(1, &["a.tar", "tree"]) {
        let cluster = session();
        let stage_in = SlowStageIn::begin(&cluster, source, 1, "/dayfly/d");
        cluster.kill(3);
        let messages = stage_in.finish();
        assert!(messages.contains("node 3 was lost; the stage-in goes on without it"), "{messages}");
        assert!(messages.contains("found no room, or lay on lost nodes"), "{messages}");
        assert!(!messages.contains("begins again"), "{messages}");
        (0..3).for_each(|node| read_all(&cluster, node, "d"));
        assert_eq!(samples(&cluster), FILES as u64);
        cluster.down();
    }
}

/// Returns the number of samples in the only dataset.
fn samples(cluster: &Cluster) -> u64 {
    status(cluster, 0)["datasets"][0]["samples"].as_u64().unwrap()
}

/// SEMANTICS: "If the node is lost that coordinates a stage-in, or if samples of compressed tars are lost with a node, the stage-in
/// begins again on the nodes that are left, up to the moment when its dataset appears."
#[test]
fn a_stage_in_begins_again_when_its_coordinator_is_lost() {
    for &(source, lost) in first_rows(2, &[("a.tar", 0), ("a.tar.gz", 2), ("a.tar.gz", 0)]) {
        let cluster = session();
        let stage_in = SlowStageIn::begin(&cluster, source, 1, "/dayfly/d");
        cluster.kill(lost);
        let messages = stage_in.finish();
        if lost == 0 {
            let restarts: Vec<&str> = messages.lines().filter(|line| line.contains("begins again")).collect();
            assert_eq!(restarts.len(), 1, "{messages}");
            assert!(restarts[0].contains("node 0"), "{messages}");
        }
        let live: Vec<u16> = (0..4).filter(|&node| node != lost).collect();
        for &node in &live {
            read_all(&cluster, node, "d");
            assert!(is_lost(&cluster, node, lost));
        }
        // Stage-ins go on, on the nodes that are left, and node 1 may coordinate them.
        stage_on(&cluster, live[1], "a.tar", "/dayfly/e");
        live.iter().for_each(|&node| read_all(&cluster, node, "e"));
        end_from(&cluster, 1);
    }
}

/// SEMANTICS: "If it left out anything, `stage-in` exits with 3, and `run` continues."
#[test]
fn a_stage_in_that_begins_again_still_says_what_it_left_out() {
    let cluster = session();
    let whole = fs::read(cluster.at("a.tar")).unwrap();
    fs::write(cluster.at("cut.tar"), &whole[..whole.len() / 2]).unwrap();
    let stage_in = SlowStageIn::begin(&cluster, "cut.tar", 1, "/dayfly/d");
    cluster.kill(0);
    let messages = stage_in.finish_with(3);
    assert!(messages.contains("begins again") && messages.contains("cut.tar"), "{messages}");
    end_from(&cluster, 1);
}

fn stage_on(cluster: &Cluster, node: u16, source: &str, target: &str) {
    let source = cluster.at(source);
    let mut command = cluster.dayfly();
    let output =
        harness::output_of(command.args(["stage-in", source.to_str().unwrap(), target]).env("DAYFLY_NODE", node.to_string()));
    assert!(output.status.success(), "{}", text(&output.stderr));
}

fn end_from(cluster: &Cluster, node: u16) {
    let output = harness::output_of(cluster.dayfly().arg("down").env("DAYFLY_NODE", node.to_string()));
    assert!(output.status.success(), "{}", text(&output.stderr));
    cluster.wait_until_clean("after down");
}

/// SEMANTICS: "A session survives down to its last server."
#[test]
fn a_session_survives_down_to_its_last_server() {
    let cluster = session();
    cluster.stage(&[&cluster.at("a.tar")], "/dayfly/d");
    for node in 0..3 {
        cluster.kill(node);
        wait_until("the node is lost", || is_lost(&cluster, 3, node));
        read_all(&cluster, 3, "d");
    }
    for (source, dataset) in [("a.tar", "e"), ("tree", "f"), ("a.tar.gz", "g")] {
        stage_on(&cluster, 3, source, &format!("/dayfly/{dataset}"));
        read_all(&cluster, 3, dataset);
    }
    end_from(&cluster, 3);
}

/// SEMANTICS: "A session whose servers all stand still at the same time, like those of a suspended job, goes on when they
/// continue, also one after the other: silence alone does not end a session."
#[test]
fn a_session_whose_servers_all_stand_still_goes_on() {
    for nodes in [1, 3] {
        let ground = Ground::new();
        fs::create_dir(ground.at("tree")).unwrap();
        (0..FILES).for_each(|number| fs::write(ground.at(format!("tree/{number}")), content(number, len(number))).unwrap());
        let cluster = ground.up_with(nodes, &QUICK);
        cluster.stage_compressed("tree", "/dayfly/d");
        let servers = cluster.pids();
        servers.values().for_each(|&pid| signal(pid, Signal::SIGSTOP));
        // A server that is silent for 6 s is lost.
        std::thread::sleep(Duration::from_secs(9));
        servers.values().for_each(|&pid| signal(pid, Signal::SIGCONT));
        wait_until("all are members", || (0..nodes).all(|node| !is_lost(&cluster, 0, node)));
        assert_eq!(cluster.pids(), servers);
        (0..nodes).for_each(|node| read_all(&cluster, node, "d"));
        cluster.down();
    }
}

/// SEMANTICS: "If the last server dies, the session is over. `run` ends its command and exits with 125, `up --foreground` exits with
/// 1, and both say which server was the last and why it is lost."
#[test]
fn a_session_whose_last_server_dies_is_over_and_says_so() {
    for (words, status) in
        [(&["run", "--local", "1", "--no-rejoin"][..], 125), (&["up", "--local", "1", "--no-rejoin", "--foreground"], 1)]
    {
        let ground = Ground::new();
        let mut command = ground.dayfly();
        command.args(words).args(QUICK);
        if status == 125 {
            command.args(["--", "sh", "-c", "echo started; exec sleep 600"]);
        }
        let mut session = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // The session's id, or what the command prints.
        BufReader::new(session.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        let of_user = fs::read_dir(ground.runtime.path()).unwrap().next().unwrap().unwrap().path();
        let id = fs::read_dir(of_user).unwrap().next().unwrap().unwrap().file_name().into_string().unwrap();
        let cluster = Cluster { ground, id };
        cluster.kill(0);
        let ended = harness::wait_for(&mut session, harness::COMMAND_TIMEOUT).expect("it ends with its session");
        let mut messages = String::new();
        session.stderr.take().unwrap().read_to_string(&mut messages).unwrap();
        assert_eq!(ended.code(), Some(status), "{messages}");
        let why = "all servers of the session are lost, and its datasets with them; the last one was node 0: SIGKILL has ended its server";
        assert!(messages.contains(why), "{messages}");
        cluster.wait_until_clean("after the session");
    }
}

/// SEMANTICS: "Its command may end the session earlier with `down`; `run` then exits with the command's status, even if `down` has to
/// kill a server."
#[test]
fn the_command_of_run_may_end_the_session_itself() {
    let ground = Ground::new();
    let find = "server=$(cat $DAYFLY_RUNTIME_DIR/*/*/node-1.lock); ";
    // A server that has died a moment before is not found lost yet.
    let kill = format!("{find} kill -9 $server; sleep 0.5; ");
    // A server that stands still does not hear that the others end, and is killed.
    let stop = format!("{find} kill -STOP $server; ");
    for before in first_rows(2, &[&kill[..], &stop, ""]) {
        let script = format!("{before}dayfly down && sleep 4 && echo after && exit 7");
        let output = ground.output(&["run", "--local", "3", "--", "sh", "-c", &script]);
        let (shown, message) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(7), "{before}: {message}");
        assert!(shown.ends_with("after\n"), "{before}: {shown}");
        assert!(message.contains("ended by another command, such as 'dayfly down'"), "{before}: {message}");
        ground.assert_clean();
    }
}

/// SEMANTICS: "A server that was lost for its silence learns from the others what has changed. If it continues only after the last other
/// server has died, there is nobody to learn from: the session is over, and that server ends."
#[test]
fn a_silent_server_ends_if_nobody_is_left_to_learn_from() {
    let cluster = Ground::new().up_with(2, &QUICK);
    let pid = cluster.pids()[&1];
    signal(pid, Signal::SIGSTOP);
    wait_until("node 1 is lost", || is_lost(&cluster, 0, 1));
    cluster.kill(0);
    signal(pid, Signal::SIGCONT);
    cluster.wait_until_clean("after the session");
}

/// SEMANTICS: "A server whose process runs while its runtime does nothing for `--lost-after` is deadlocked, and ends itself."
#[test]
fn a_server_whose_runtime_is_deadlocked_ends_itself() {
    let cluster = session_of(2, &QUICK);
    cluster.stage(&[&cluster.at("a.tar")], "/dayfly/a");
    let log = cluster.folder().join("node-1.log");
    // The runtime's threads do not return from their wait for events. Other threads do not make this call.
    let waits = [("epoll_wait,epoll_pwait", "delay_exit=600000000")];
    let tracer = Tracer::inject(cluster.pids()[&1], &waits, cluster.work.path()).unwrap();
    wait_until("the server finds that", || fs::read_to_string(&log).unwrap().contains("its runtime has made no turn for 10 s"));
    // The tracer holds threads that it delays, even while their process ends.
    drop(tracer);
    wait_until("the server ends", || !cluster.pids().contains_key(&1));
    read_all(&cluster, 0, "a");
    cluster.down();
}
