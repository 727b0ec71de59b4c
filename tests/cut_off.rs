//! Nodes whose links are down for a while, in network namespaces, with a server in each.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::wire::control;
use serde_json::Value;

use crate::chaos::network::{self, Network};
use crate::harness::samples::content;
use crate::harness::{Cluster, Ground, output_of, pack, text, wait_for, wait_until};

const DEADLINES_DIVISOR: u32 = 5;
const NODES: u16 = 3;
const CUT: u16 = 2;
const FILES: usize = 200;
const FILE_LEN: usize = 30_000;

/// Returns the command that starts a session with a server in each namespace.
fn up(network: &Network, ground: &Ground) -> Command {
    let mut up = network.dayfly(ground);
    up.arg("up").args(network.options()).arg("--data-dir").arg(ground.data.path());
    up.args(["--memory", "64M", "--deadlines-divisor", &DEADLINES_DIVISOR.to_string()]);
    up
}

/// Starts a session, and stages a tar in.
fn session(network: &Network, ground: Ground) -> Cluster {
    fs::create_dir(ground.at("tree")).unwrap();
    (0..FILES).for_each(|number| fs::write(ground.at(format!("tree/{number}")), content(number, FILE_LEN)).unwrap());
    pack(&ground.at("a.tar"), &ground.at("tree"), &[]);
    let output = output_of(&mut up(network, &ground));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let cluster = Cluster { ground, id: text(&output.stdout).trim().to_owned() };
    cluster.stage(&[&cluster.at("a.tar")], "/dayfly/d");
    cluster
}

fn read_all(cluster: &Cluster) {
    for node in 0..NODES {
        let view = cluster.view(node);
        for number in 0..FILES {
            let path = format!("/dayfly/d/{number}");
            let (file, mut bytes) = (view.open(path.as_bytes()).unwrap(), vec![0; FILE_LEN]);
            view.read_at(&file, 0, &mut bytes).unwrap_or_else(|error| panic!("{path} on node {node}: {error}"));
            assert!(bytes == content(number, FILE_LEN), "{path} on node {node}");
        }
    }
}

/// Returns what the status says on a node.
fn status_on(cluster: &Cluster, asked: u16) -> Value {
    let output = output_of(cluster.dayfly().args(["status", "--json"]).env("DAYFLY_NODE", asked.to_string()));
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

/// Returns whether all other nodes say that the node is lost, or that it is not.
fn others_say(cluster: &Cluster, is_lost: bool) -> bool {
    (0..NODES).filter(|&node| node != CUT).all(|asked| {
        let node = &status_on(cluster, asked)["nodes"][usize::from(CUT)];
        node.is_object() && node["lost_for_ms"].is_u64() == is_lost
    })
}

fn origin_reads(cluster: &Cluster) -> u64 {
    let status = cluster.status_on(0);
    status["nodes"].as_array().unwrap().iter().map(|node| node["origins"]["reads"].as_u64().unwrap()).sum()
}

/// SEMANTICS: "The same holds for a node that was cut off, if that lasts for less than 90 s, or three times `--lost-after` where that
/// is longer. After that time its server exits, and the node gets a new one when it can be reached again, like one whose server has
/// died."
#[test]
fn a_node_that_was_cut_off_returns_with_its_blocks_or_gets_a_new_server() {
    if !network::is_possible() {
        return;
    }
    let ground = Ground::new();
    let network = Network::new(NODES, ground.work.path()).unwrap();
    let (cluster, deadlines) = (session(&network, ground), Deadlines::DEFAULT.scaled(DEADLINES_DIVISOR));
    let server = cluster.pids()[&CUT];

    let cut_at = Instant::now();
    network.set_link(CUT, false).unwrap();
    wait_until("it is lost", || others_say(&cluster, true));
    std::thread::sleep((deadlines.lost_after * 2).saturating_sub(cut_at.elapsed()));
    network.set_link(CUT, true).unwrap();
    wait_until("it is a member again", || others_say(&cluster, false) && status_on(&cluster, CUT)["nodes"].is_array());
    assert_eq!(cluster.pids()[&CUT], server, "its server goes on");
    let before = origin_reads(&cluster);
    read_all(&cluster);
    assert_eq!(origin_reads(&cluster), before, "it owns what it owned");

    network.set_link(CUT, false).unwrap();
    wait_until("its server exits", || !cluster.pids().contains_key(&CUT));
    network.set_link(CUT, true).unwrap();
    wait_until("a new server is a member", || cluster.pids().contains_key(&CUT) && others_say(&cluster, false));
    read_all(&cluster);
    cluster.down();
}

/// With `is_far`, nobody who ends the session sees the supervisor, as if `down` were called on a compute node and `up` on a login node.
#[test]
fn a_session_that_was_ended_does_not_wait_for_a_node_that_is_cut_off() {
    if !network::is_possible() {
        return;
    }
    for is_far in [false, true] {
        let ground = Ground::new();
        let network = Network::new(NODES, ground.work.path()).unwrap();
        let mut up = up(&network, &ground).arg("--foreground").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut id = String::new();
        BufReader::new(up.stdout.take().unwrap()).read_line(&mut id).unwrap();
        let cluster = Cluster { ground, id: id.trim().to_owned() };
        network.set_link(CUT, false).unwrap();
        match is_far {
            true => cluster.view(0).session().control(control::Command::Down { except: Some(Vec::new()) }, &mut drop).unwrap(),
            false => drop(cluster.ok(&["down"])),
        }
        let ended = wait_for(&mut up, Duration::from_secs(20)).expect("it does not wait for the node");
        assert_eq!(ended.code(), Some(0), "{}", std::io::read_to_string(up.stderr.take().unwrap()).unwrap());
        network.set_link(CUT, true).unwrap();
        cluster.wait_until_clean("all servers have exited");
    }
}
