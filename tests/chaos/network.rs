//! Network namespaces of one machine, joined by a bridge: one for each server, one for the supervisor, one for the bridge. Links fail
//! in them as between machines, without any help from the kernel's other modules.
//!
//! A server's power fails when its link is cut first and its processes are killed then: its peers hear no more of it, as no packet
//! tells them that its connections are closed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::Ground;

/// No network interface has this address, so that whatever is sent to it is lost.
const NOBODY: &str = "02:00:00:00:00:99";

/// How often the kernel looks for a neighbor that does not answer.
const NEIGHBOR_INTERVAL_MS: &str = "100";

static NETWORKS: AtomicU32 = AtomicU32::new(0);

/// The namespaces of one session. They are removed when this value is dropped.
pub(crate) struct Network {
    name: String,
    nodes: u16,
    folder: PathBuf,
}

fn ip(arguments: &[&str]) -> Result<String, String> {
    let output =
        crate::harness::program("ip").args(arguments).stdin(Stdio::null()).output().map_err(|error| format!("ip: {error}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("ip {arguments:?}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

impl Network {
    /// Creates the namespaces. `folder` is for the stand-in for `ssh`. Fails without the rights to create namespaces.
    pub(crate) fn new(nodes: u16, folder: &Path) -> Result<Self, String> {
        let name = format!("dfc{}n{}", std::process::id(), NETWORKS.fetch_add(1, Ordering::Relaxed));
        let network = Self { name, nodes, folder: folder.to_owned() };
        let switch = network.switch();
        ip(&["netns", "add", &switch])?;
        ip(&["-n", &switch, "link", "add", "bridge", "type", "bridge"])?;
        ip(&["-n", &switch, "link", "set", "bridge", "up"])?;
        for place in 0..=nodes {
            let (namespace, port) = (network.host(place), format!("port{place}"));
            ip(&["netns", "add", &namespace])?;
            ip(&["-n", &switch, "link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", &namespace])?;
            ip(&["-n", &switch, "link", "set", &port, "master", "bridge", "up"])?;
            ip(&["-n", &namespace, "addr", "add", &format!("{}/24", address(place)), "dev", "eth0"])?;
            ip(&["-n", &namespace, "link", "set", "eth0", "up"])?;
            ip(&["-n", &namespace, "link", "set", "lo", "up"])?;
            // The kernel looks for a neighbor that was out of reach once per second, which is long at a tenth of the deadlines.
            ip(&["-n", &namespace, "ntable", "change", "name", "arp_cache", "dev", "eth0", "retrans", NEIGHBOR_INTERVAL_MS])?;
        }
        network.write_ssh();
        Ok(network)
    }

    /// Writes the stand-in for `ssh`. It hangs while a host has no power, like a connection to such a host.
    fn write_ssh(&self) {
        let folder = self.folder.join("bin");
        fs::create_dir(&folder).unwrap();
        let script = format!(
            r#"#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift 2; done
host=$1; shift
has_power() {{ while [ -e {folder}/off-$host ]; do sleep 0.1; done; }}
has_power
ip netns exec "$host" sh -c "$*"
status=$?
has_power
exit $status
"#,
            folder = self.folder.display()
        );
        crate::harness::write_program(&folder.join("ssh"), &script);
    }

    fn switch(&self) -> String {
        format!("{}sw", self.name)
    }

    /// Returns the name of a node's namespace. The place after the last node is the supervisor's.
    fn host(&self, place: u16) -> String {
        format!("{}h{place}", self.name)
    }

    fn all_nodes(&self) -> String {
        (0..self.nodes).map(|node| self.host(node)).collect::<Vec<_>>().join(",")
    }

    /// Returns the options that make `up` and `run` start servers in these namespaces.
    pub(crate) fn options(&self) -> [String; 4] {
        ["--hosts".to_owned(), self.all_nodes(), "--launcher".to_owned(), "ssh".to_owned()]
    }

    /// Returns the command `dayfly` as [`Ground::dayfly`] does, but in the supervisor's namespace.
    pub(crate) fn dayfly(&self, ground: &Ground) -> Command {
        let mut command = crate::harness::program("ip");
        command.args(["netns", "exec", &self.host(self.nodes), env!("CARGO_BIN_EXE_dayfly")]);
        for (name, value) in ground.dayfly().get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.current_dir(ground.work.path()).stdin(Stdio::null());
        command.env("PATH", format!("{}:{}", self.folder.join("bin").display(), std::env::var("PATH").unwrap()));
        command
    }

    /// Takes a node's link down or up.
    pub(crate) fn set_link(&self, node: u16, is_up: bool) -> Result<(), String> {
        ip(&["-n", &self.switch(), "link", "set", &format!("port{node}"), if is_up { "up" } else { "down" }]).map(drop)
    }

    /// Loses whatever `from` sends to `to`, or ends that. What `to` sends still arrives.
    pub(crate) fn set_one_way(&self, from: u16, to: u16, is_lost: bool) -> Result<(), String> {
        let (namespace, to) = (self.host(from), address(to));
        match is_lost {
            true => ip(&["-n", &namespace, "neigh", "replace", &to, "lladdr", NOBODY, "dev", "eth0", "nud", "permanent"]),
            false => ip(&["-n", &namespace, "neigh", "del", &to, "dev", "eth0"]),
        }
        .map(drop)
    }

    /// Returns everyone else on the network: all other nodes, and the supervisor.
    pub(crate) fn others(&self, node: u16) -> impl Iterator<Item = u16> + use<> {
        (0..=self.nodes).filter(move |other| *other != node)
    }

    /// Cuts a node's power.
    pub(crate) fn power_off(&self, node: u16) -> Result<(), String> {
        fs::write(self.gate(node), "").unwrap();
        self.set_link(node, false)?;
        self.kill_all(node);
        Ok(())
    }

    pub(crate) fn power_on(&self, node: u16) -> Result<(), String> {
        self.set_link(node, true)?;
        fs::remove_file(self.gate(node)).unwrap();
        Ok(())
    }

    fn gate(&self, node: u16) -> PathBuf {
        self.folder.join(format!("off-{}", self.host(node)))
    }

    fn kill_all(&self, place: u16) {
        let processes = ip(&["netns", "pids", &self.host(place)]).unwrap_or_default();
        for process in processes.split_whitespace().filter_map(|process| process.parse().ok()) {
            // It may have exited meanwhile.
            let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
        }
    }

    /// Returns the processes in these namespaces.
    pub(crate) fn processes(&self) -> Vec<String> {
        let of = |place| ip(&["netns", "pids", &self.host(place)]).unwrap_or_default();
        (0..=self.nodes).flat_map(|place| of(place).split_whitespace().map(str::to_owned).collect::<Vec<_>>()).collect()
    }
}

fn address(place: u16) -> String {
    format!("10.77.0.{}", place + 1)
}

impl Drop for Network {
    fn drop(&mut self) {
        for place in 0..=self.nodes {
            self.kill_all(place);
            let _ = ip(&["netns", "del", &self.host(place)]);
        }
        let _ = ip(&["netns", "del", &self.switch()]);
    }
}

/// Returns whether this process may create network namespaces. If not, prints the reason.
pub(crate) fn is_possible() -> bool {
    if !crate::harness::is_installed("ip") {
        return false;
    }
    let folder = tempfile::tempdir().unwrap();
    let made = Network::new(1, folder.path());
    made.map_err(|reason| crate::harness::skip(&format!("failing links, which takes root: {reason}"))).is_ok()
}
