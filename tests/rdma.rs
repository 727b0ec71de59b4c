//! Tests of sessions over RDMA as users see them, and of the messages that users see if there is no card. Tests that need a card
//! run in a virtual machine with Soft-RoCE: see `tests/vm/rdma`.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::harness::{self, Cluster, Ground};
use serde_json::Value;

/// Returns true if there is a card to test with. If there is none, prints that once, bypassing the test harness.
fn has_card() -> bool {
    let is_there = fs::read_dir("/sys/class/infiniband").is_ok_and(|mut cards| cards.next().is_some());
    if !is_there {
        assert!(std::env::var_os("DAYFLY_TEST_RDMA").is_none(), "DAYFLY_TEST_RDMA is set, but there is no card");
        let notice =
            "Sessions over RDMA were NOT tested: there is no card here. Run tests/vm/rdma, which has one in a virtual machine.";
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| drop(writeln!(std::io::stderr(), "{notice}")));
    }
    is_there
}

/// Options for a small amount of memory, which is enough for these sessions. All of it is allocated and locked at the start.
const SMALL: [&str; 4] = ["--memory", "32M", "--stage-in-memory", "256M"];

/// The longest wait for a card to tell a server that its writes are complete.
const COUNTERS_TIMEOUT: Duration = Duration::from_secs(20);

fn networks(status: &Value) -> Vec<&Value> {
    status["nodes"].as_array().unwrap().iter().map(|node| &node["network"]).collect()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

fn read_number(path: &Path) -> u64 {
    fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

/// Returns the number of packets that the kernel's RDMA stack has received.
fn packets() -> u64 {
    let cards = fs::read_dir("/sys/class/infiniband").unwrap();
    cards.map(|card| read_number(&card.unwrap().path().join("ports/1/hw_counters/rcvd_pkts"))).sum()
}

/// Returns the number of bytes that went over the loopback interface. Servers on one machine reach each other by TCP through this
/// interface.
fn loopback_bytes() -> u64 {
    read_number(Path::new("/sys/class/net/lo/statistics/tx_bytes"))
}

/// Returns the sum of a counter over all nodes.
fn sum(status: &Value, counter: &str) -> u64 {
    networks(status).iter().map(|network| number(&network[counter])).sum()
}

/// Returns a status whose counters are as expected, or the last one, if they are not in time. A writer counts a write when the card
/// has told it that the write is complete, which may be after the reader has used the bytes.
fn status_with(cluster: &Cluster, is_expected: impl Fn(&Value) -> bool) -> Value {
    let start = Instant::now();
    loop {
        let status = cluster.status();
        if is_expected(&status) || start.elapsed() > COUNTERS_TIMEOUT {
            return status;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Returns real archives: the crates that the build has downloaded.
fn archives() -> Vec<PathBuf> {
    let home = std::env::var_os("CARGO_HOME")
        .map_or_else(|| PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cargo"), PathBuf::from);
    let mut found = Vec::new();
    for registry in fs::read_dir(home.join("registry/cache")).unwrap() {
        found.extend(fs::read_dir(registry.unwrap().path()).unwrap().map(|entry| entry.unwrap().path()));
    }
    found.sort();
    found.retain(|path| {
        path.file_name().unwrap().to_str().unwrap().starts_with('s') && path.extension().is_some_and(|kind| kind == "crate")
    });
    assert!(found.len() > 10, "{found:?}");
    found
}

#[test]
fn a_whole_session_uses_rdma() {
    if !has_card() {
        return;
    }
    let cluster = Ground::new().up_with(4, &[&["--transport", "rdma"], &SMALL[..]].concat());
    let (packets_before, loopback_before) = (packets(), loopback_bytes());
    let archives = archives();
    cluster.stage(&archives.iter().map(PathBuf::as_path).collect::<Vec<_>>(), "/dayfly/crates");
    let verified = cluster.ok(&["verify", "--from-every-node"]);
    assert!(verified.contains("from 4 nodes"), "{verified}");

    // The bytes between servers went over the card, according to the counters of the card, of Dayfly and of the TCP interface.
    // Only requests that waited long for a queue pair went by TCP, as happens where servers do not get the processor.
    let remote: u64 = cluster.status()["nodes"].as_array().unwrap().iter().map(|node| number(&node["remote_bytes"])).sum();
    let by_tcp = || loopback_bytes() - loopback_before;
    let is_whole = |status: &Value| {
        let blocks_by_tcp = if sum(status, "requests_by_tcp") > 0 { by_tcp() } else { 0 };
        sum(status, "written_bytes") + blocks_by_tcp >= remote
    };
    let status = status_with(&cluster, is_whole);
    let (written, read, tcp) = (sum(&status, "written_bytes"), sum(&status, "read_bytes"), by_tcp());
    let figures = format!("of {remote} bytes, {written} by RDMA and {tcp} by TCP; {:?}; {}", networks(&status), cluster.witness);
    assert!(remote > 40 << 20 && is_whole(&status) && tcp < remote / 8, "{figures}");
    assert!(read > 10 << 20, "a stage-in ships blocks by RDMA: {figures}");
    assert!((packets() - packets_before) * 4096 >= written, "{} packets; {figures}", packets() - packets_before);
    assert!(
        networks(&status).iter().all(|network| network["transport"] == "rdma" && network["fallen_back"] == Value::Array(vec![]))
    );
    assert!(cluster.ok(&["status"]).contains("node 3 reaches its peers by RDMA: rxe0 port 1, RoCE v2"));

    // Clients have no queue pairs. There are two for each pair of nodes, one for the requests of each side.
    // Sixteen clients run at a time. On two emulated processors, more of them would delay a server for longer than its peers wait.
    let script = "seq 64 | xargs -P 16 -I {} sh -c 'dayfly cat /dayfly/crates/*/Cargo.toml > /dev/null'";
    let program = PathBuf::from(env!("CARGO_BIN_EXE_dayfly"));
    let path = format!("{}:/usr/bin:/bin", program.parent().unwrap().display());
    let mut reading = cluster.dayfly();
    reading.env("PATH", path).args(["exec", "--node", "2", "--", "sh", "-c", script]);
    assert!(harness::output_of(&mut reading).status.success());
    let status = cluster.status();
    let whole = |network: &Value| network["queue_pairs"] == 6 && network["failed"] == 0;
    let logs =
        || (0..4).map(|node| fs::read_to_string(cluster.folder().join(format!("node-{node}.log"))).unwrap()).collect::<String>();
    assert!(networks(&status).into_iter().all(whole), "{:?}\n{}", networks(&status), logs());

    // A node dies. Reads of its blocks fail within the deadline, and all others succeed.
    cluster.stage(&archives[..20].iter().map(PathBuf::as_path).collect::<Vec<_>>(), "/dayfly/unread");
    cluster.kill(3);
    let start = Instant::now();
    let verified = cluster.output(&["verify", "--from-every-node", "/dayfly/unread"]);
    assert!(!verified.status.success() && harness::text(&verified.stderr).contains("node 3"), "{verified:?}");
    harness::assert_no_hang(start);
    let view = cluster.view(0);
    let (mut read, mut failed) = (0, 0);
    let walk = |folder: &str| -> Vec<String> {
        let mut names = Vec::new();
        let text = cluster.ok(&["ls", folder]);
        names.extend(text.lines().map(|name| format!("{folder}/{name}")));
        names
    };
    for path in walk("/dayfly/unread").iter().flat_map(|folder| walk(folder)) {
        let Ok(file) = view.open(path.as_bytes()) else { continue };
        let mut buffer = vec![0; 64 << 10];
        match view.read_at(&file, 0, &mut buffer) {
            Ok(_) => read += 1,
            Err(_) => failed += 1,
        }
    }
    assert!(read > failed && failed > 0, "{read} read, {failed} failed");
    cluster.down();
}

#[test]
fn transport_auto_uses_rdma_where_it_exists_and_transport_tcp_never_does() {
    if !has_card() {
        return;
    }
    for (option, expected) in [("auto", "rdma"), ("tcp", "tcp")] {
        let cluster = Ground::new().up_with(2, &[&["--transport", option], &SMALL[..]].concat());
        fs::create_dir(cluster.at("d")).unwrap();
        (0..50).for_each(|number| fs::write(cluster.at(format!("d/{number}")), vec![number; 5000]).unwrap());
        cluster.stage(&[&cluster.at("d")], "/dayfly/d");
        cluster.ok(&["verify", "--from-every-node"]);
        let is_expected = |network: &Value| (number(&network["written_bytes"]) > 0) == (expected == "rdma");
        let status = status_with(&cluster, |status| networks(status).into_iter().all(is_expected));
        for network in networks(&status) {
            assert_eq!(network["transport"], expected);
            assert!(is_expected(network), "{network}");
            assert!(expected == "rdma" || network["detail"] == "TCP was asked for", "{network}");
        }
        cluster.down();
    }
}

/// Anything that prevents RDMA on a node is found and named at the start. This test changes settings of the whole (virtual)
/// machine, and restores them.
#[test]
fn a_missing_prerequisite_of_rdma_is_named() {
    if !has_card() {
        return;
    }
    let library = "$(ldconfig -p | sed -n 's/.*libibverbs.so.1 .*=> //p' | head -1 | xargs readlink -f)";
    let cases = [
        ("ip link set dummy0 down", "ip link set dummy0 up", "port 1 of rxe0 is not active (it is '1: DOWN'): check its cable"),
        (
            "mv /dev/infiniband /dev/away",
            "mv /dev/away /dev/infiniband",
            "rxe0 has no file below /dev/infiniband that may be opened",
        ),
        ("mount -t tmpfs none /etc/libibverbs.d", "umount /etc/libibverbs.d", "no provider library drives rxe0: install"),
        (&format!("mount --bind /dev/null {library}"), &format!("umount {library}"), "libibverbs.so.1 cannot be opened"),
        (
            "rdma link delete rxe0",
            "rdma link add rxe0 type rxe netdev dummy0",
            "there is no RDMA device: /sys/class/infiniband is empty",
        ),
    ];
    let shell = |script: &str| harness::tool("sh", &["-ec".as_ref(), script.as_ref()]);
    let ground = Ground::new();
    for (break_it, repair, expected) in cases {
        shell(break_it);
        let doctor = harness::text(&ground.output(&["doctor"]).stdout);
        let insisted = ground.output(&[&["up", "--transport", "rdma"], &SMALL[..]].concat());
        let auto = ground.output(&[&["run", "--local", "2"], &SMALL[..], &["--", "dayfly", "status"]].concat());
        shell(repair);
        assert!(doctor.contains(expected), "{break_it}: {doctor}");
        assert!(!insisted.status.success() && harness::text(&insisted.stderr).contains(expected), "{break_it}: {insisted:?}");
        assert!(auto.status.success() && harness::text(&auto.stdout).contains(expected), "{break_it}: {auto:?}");
    }
    ground.assert_clean();
}

#[test]
fn without_a_card_transport_auto_uses_tcp_and_names_the_reason_and_transport_rdma_fails() {
    let has_card = fs::read_dir("/sys/class/infiniband").is_ok_and(|mut cards| cards.next().is_some());
    let absent = ["--rdma-device", "absent0"];
    let cluster = Ground::new().up_with(2, &[&absent, &SMALL[..]].concat());
    for network in networks(&cluster.status()) {
        let why = network["detail"].as_str().unwrap();
        assert_eq!(network["transport"], "tcp");
        assert!(why.starts_with("node 0 has no RDMA: "), "{why}");
        assert!(!has_card || why.contains("'absent0'; this node has rxe0"), "{why}");
    }
    cluster.down();
    let ground = Ground::new();
    let message = ground.fails(1, &[&["up", "--local", "2", "--transport", "rdma"], &absent[..]].concat());
    assert!(
        message.contains("cannot start a session over RDMA, which --transport rdma requires: node 0 has no RDMA"),
        "{message}"
    );
    ground.assert_clean();
}
