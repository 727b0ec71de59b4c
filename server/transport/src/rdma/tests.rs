//! RDMA under faults and under load. These tests run only where there is a card. `tests/vm/rdma` runs them in a virtual machine
//! with Soft-RoCE, one at a time and as root, because some take the card's link down and read the kernel's memory statistics.

mod figures;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::SessionId;
use nix::sys::resource::{Resource, setrlimit};
use tokio::time::sleep;

use super::engine::Events;
use super::queue::{Action, Completions, QueuePair, Receives, Remote, Work};
use super::*;
use crate::Key;
use crate::Slot;
use crate::conformance::{Echo, pattern, tcp};
use crate::tcp::{Identity, Purpose, Tcp};

const TIMEOUT: Duration = Duration::from_secs(20);
/// The variable that tells a child process of these tests what to do.
const ROLE: &str = "DAYFLY_TEST_ROLE";

/// Returns whether there is a card to test with. If there is none, prints a notice once, bypassing the test harness.
pub(crate) fn has_card() -> bool {
    let is_there = !device::names().is_empty();
    if !is_there {
        assert!(std::env::var_os("DAYFLY_TEST_RDMA").is_none(), "DAYFLY_TEST_RDMA is set, but there is no card");
        let notice = "RDMA was NOT tested: there is no card here. Run tests/vm/rdma, which has one in a virtual machine.";
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| drop(writeln!(std::io::stderr(), "{notice}")));
    }
    is_there
}

fn rdma(tcp: Tcp, limits: Limits) -> Rdma<Tcp> {
    let rdma = Rdma::with_limits(tcp, Preference::Rdma, &Choice::default(), limits);
    assert!(rdma.shared.card().is_ok());
    rdma
}

/// Two nodes in one process: the asker (`ours`) and the owner (`theirs`).
struct NodePair {
    ours: Rdma<Tcp>,
    theirs: Rdma<Tcp>,
    connection: Arc<dyn Connection>,
    region: Region,
    _serving: Serving,
}

impl NodePair {
    async fn new(limits: Limits) -> Self {
        let ((ours, _), (theirs, address)) = (tcp(0).await, tcp(1).await);
        let (ours, theirs) = (rdma(ours, limits), rdma(theirs, limits));
        let serving = theirs.serve(Echo::new(theirs.region(16 << 20).unwrap())).await.unwrap();
        let connection = ours.connect(NodeId(1), address).await.unwrap();
        assert_eq!(ours.fallen_back(), []);
        let region = ours.region(48 << 20).unwrap();
        Self { ours, theirs, connection, region, _serving: serving }
    }

    async fn pull(&self, message: &[u8], lens: &[u64]) {
        pull(&self.connection, &self.region, message, lens).await;
    }

    fn written(&self) -> u64 {
        self.theirs.status().written_bytes
    }
}

async fn pull(connection: &Arc<dyn Connection>, region: &Region, message: &[u8], lens: &[u64]) {
    let mut slots = Vec::new();
    for &len in lens {
        slots.push(region.slot_within(len, TIMEOUT).await.unwrap());
    }
    let pulled = connection.pull(message.to_vec(), slots, TIMEOUT).await.unwrap();
    assert_eq!(pulled.lens, lens);
    for (at, (slot, &len)) in pulled.slots.iter().zip(lens).enumerate() {
        let skip = if at % 2 == 0 { at } else { 0 };
        assert!(slot[..len as usize] == pattern(len as usize + skip)[skip..], "slot {at}");
    }
}

/// Returns the number of open descriptors of this process.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Returns, for each of the kernel's caches that verbs use, the number of objects in it.
fn slabs() -> BTreeMap<String, i64> {
    let text = std::fs::read_to_string("/proc/slabinfo").unwrap();
    let line = |line: &str| {
        let mut words = line.split_whitespace();
        let name = words.next()?.to_owned();
        let is_of_interest =
            name.starts_with("kmalloc-") || name.starts_with("skbuff") || name.starts_with("ib_") || name.starts_with("rxe");
        is_of_interest.then_some((name, words.next()?.parse().ok()?))
    };
    text.lines().filter_map(line).collect()
}

/// Returns the cache that has grown most, and its growth in objects.
fn growth(before: &BTreeMap<String, i64>) -> (String, i64) {
    // Slabs that are kept for a processor count as a whole, although no object in them is used.
    for name in before.keys() {
        // Not every cache has such a file.
        let _ = std::fs::write(format!("/sys/kernel/slab/{name}/shrink"), "1");
    }
    let grown = slabs().into_iter().map(|(name, count)| (name.clone(), count - before.get(&name).copied().unwrap_or(0)));
    grown.max_by_key(|(_, grown)| *grown).unwrap_or_default()
}

/// The state of this process and the kernel before a test, to which both must return.
struct Baseline {
    descriptors: usize,
    slabs: BTreeMap<String, i64>,
}

impl Baseline {
    fn take() -> Self {
        Self { descriptors: descriptors(), slabs: slabs() }
    }

    async fn assert_restored(&self) {
        until("no descriptor is leaked", || descriptors() <= self.descriptors).await;
        let (start, mut grown) = (Instant::now(), growth(&self.slabs));
        // The kernel frees some objects a while later.
        while grown.1 >= 500 && start.elapsed() < TIMEOUT {
            sleep(Duration::from_millis(200)).await;
            grown = growth(&self.slabs);
        }
        assert!(grown.1 < 500, "{} has grown by {} objects", grown.0, grown.1);
    }
}

/// Waits until it is so. A write is counted when the card has told that it is complete, which may be after its bytes have been used.
pub(crate) async fn until(what: &str, is_so: impl FnMut() -> bool) {
    until_within(TIMEOUT, what, is_so).await;
}

async fn until_within(limit: Duration, what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// A child process of these tests, killed when it is dropped.
struct ChildProcess(Child);

impl ChildProcess {
    fn start(role: &str) -> (Self, BufReader<std::process::ChildStdout>) {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "rdma::tests::role_of_a_child_process", "--nocapture"]).env(ROLE, role);
        let mut child = child.stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        (Self(child), output)
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn line_with(output: &mut impl BufRead, word: &str) -> String {
    for line in output.lines() {
        // The test harness may have written to the same line before.
        if let Some((_, rest)) = line.unwrap().split_once(word) {
            return rest.trim().to_owned();
        }
    }
    panic!("the child exited without printing '{word}'");
}

fn on_runtime(future: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(future);
}

/// Not a test in itself: the child processes of the other tests run this.
#[test]
fn role_of_a_child_process() {
    let role = std::env::var(ROLE).unwrap_or_default();
    let mut words = role.split(' ');
    match words.next().unwrap_or_default() {
        "owner" => on_runtime(async {
            let identity = Identity {
                session: SessionId([9; 8]),
                key: Arc::new(Key::new([3; 32])),
                node: NodeId(1),
                purpose: Purpose::Peer,
                deadlines: Deadlines::DEFAULT,
            };
            let listen = words.next().unwrap_or("127.0.0.1:0").parse().unwrap();
            let (tcp, address) = Tcp::bind(identity, listen).await.unwrap();
            let owner = rdma(tcp, Limits::default());
            let _serving = owner.serve(Echo::new(owner.region(16 << 20).unwrap())).await.unwrap();
            println!("listening at {address}");
            let Some(signal_file) = words.next() else { return std::future::pending().await };
            // Resets the machine at once, as a power failure would: no connection is closed.
            until_within(Duration::from_secs(200), "the signal file", || std::path::Path::new(signal_file).exists()).await;
            std::fs::write("/proc/sysrq-trigger", "b").unwrap();
        }),
        "asker" => on_runtime(async {
            let (tcp, _) = tcp(0).await;
            let asker = rdma(tcp, Limits::default());
            let connection = asker.connect(NodeId(1), words.next().unwrap().parse().unwrap()).await.unwrap();
            let region = asker.region(64 << 20).unwrap();
            println!("asking");
            loop {
                pull(&connection, &region, b"bulk", &[500_000; 64]).await;
            }
        }),
        "memlock" => on_runtime(async {
            let limit = words.next().unwrap().parse().unwrap();
            setrlimit(Resource::RLIMIT_MEMLOCK, limit, limit).unwrap();
            let (tcp, _) = tcp(0).await;
            let auto = Rdma::new(tcp, Preference::Auto, &Choice::default(), Deadlines::DEFAULT);
            assert!(auto.region(128 << 20).is_ok(), "TCP needs no locked memory");
            println!("ability {:?}", auto.ability().rdma);
        }),
        _ => {}
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_owner_with_64_requests_under_way_is_lost_at_once() {
    if !has_card() {
        return;
    }
    let (owner, mut output) = ChildProcess::start("owner");
    let address = line_with(&mut output, "listening at").parse().unwrap();
    let (tcp, _) = tcp(0).await;
    let ours = rdma(tcp, Limits::default());
    let region = ours.region(64 << 20).unwrap();
    let before = Baseline::take();
    let connection = ours.connect(NodeId(1), address).await.unwrap();
    pull(&connection, &region, b"bulk", &[100_000; 8]).await;
    let waiting: Vec<_> = (0..64)
        .map(|_| {
            let (connection, slot) = (connection.clone(), region.slot(1000).unwrap());
            tokio::spawn(async move { connection.pull(b"wait".to_vec(), vec![slot], TIMEOUT).await.map(|_| ()) })
        })
        .collect();
    sleep(Duration::from_millis(300)).await;
    let start = Instant::now();
    drop(owner);
    for request in waiting {
        assert!(matches!(request.await.unwrap(), Err(TransportError::Lost { .. })));
    }
    assert!(start.elapsed() < Deadlines::DEFAULT.peer_lost, "{:?}", start.elapsed());
    assert!(region.slot_within(63 << 20, TIMEOUT).await.is_some(), "all slots are free again");
    drop(connection);
    until("no queue pair", || ours.status().queue_pairs == 0).await;
    before.assert_restored().await;
}

/// `tests/vm/rdma` runs the owner in another virtual machine and passes its address.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_to_a_host_that_is_reset_fail_in_time() {
    let Some(address) = std::env::var("DAYFLY_TEST_OWNER").ok().filter(|_| has_card()) else { return };
    let reset = std::env::var("DAYFLY_TEST_RESET").unwrap();
    let (tcp, _) = tcp(0).await;
    let ours = rdma(tcp, Limits::default());
    let region = ours.region(64 << 20).unwrap();
    let start = Instant::now();
    let connection = loop {
        match ours.connect(NodeId(1), address.parse().unwrap()).await {
            Ok(connection) => break connection,
            Err(error) => assert!(start.elapsed() < Duration::from_secs(100), "{error}"),
        }
        sleep(Duration::from_millis(500)).await;
    };
    assert_eq!(ours.fallen_back(), []);
    let before = Baseline::take();
    for _ in 0..10 {
        pull(&connection, &region, b"bulk", &[110_000; 64]).await;
    }
    let mut payload = region.slot(1 << 20);
    let received = ours.status();
    assert_eq!((received.failed, received.queue_pairs), (0, 1), "by RDMA");
    // The owner is reset in the middle of a transfer, and closes no connection.
    std::fs::write(reset, "now").unwrap();
    let start = Instant::now();
    let error = loop {
        let slots = (0..64).map(|_| region.slot(500_000).unwrap()).collect();
        if let Err(error) = connection.pull(b"bulk".to_vec(), slots, Duration::from_secs(60)).await {
            break error;
        }
        assert!(start.elapsed() < Duration::from_secs(60));
    };
    let _ = writeln!(std::io::stderr(), "after {:?}: {error}", start.elapsed());
    assert!(matches!(error, TransportError::Lost { .. }), "{error}");
    let offered = connection.offer(b"take".to_vec(), &mut payload, 100, TIMEOUT).await;
    assert!(matches!(offered, Err(TransportError::Lost { .. })));
    assert!(region.slot_within(63 << 20, TIMEOUT).await.is_some(), "all slots are free again");
    drop(connection);
    until("no queue pair", || ours.status().queue_pairs == 0).await;
    before.assert_restored().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_asker_leaves_nothing_behind_at_its_owner() {
    if !has_card() {
        return;
    }
    let (tcp, address) = tcp(1).await;
    let theirs = rdma(tcp, Limits::default());
    let _serving = theirs.serve(Echo::new(theirs.region(16 << 20).unwrap())).await.unwrap();
    let staging = theirs.shared.card().unwrap().staging.clone();
    let mut before = Baseline::take();
    for round in 0..4 {
        if round == 1 {
            before = Baseline::take();
        }
        let (asker, mut output) = ChildProcess::start(&format!("asker {address}"));
        line_with(&mut output, "asking");
        let written = theirs.status().written_bytes;
        until("it writes", || theirs.status().written_bytes > written + (8 << 20)).await;
        drop(asker);
        drop(output);
        until("no queue pair", || theirs.status().queue_pairs == 0).await;
        assert!(
            staging.slot_within(dayfly_meta::limits::RDMA_STAGING_LEN - (1 << 20), TIMEOUT).await.is_some(),
            "no answer is under way"
        );
    }
    before.assert_restored().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_do_not_notice_a_link_that_goes_down_and_up() {
    if !has_card() {
        return;
    }
    let nodes = NodePair::new(Limits::default()).await;
    nodes.pull(b"bulk", &[100_000; 16]).await;
    let before = Baseline::take();
    let link = |state: &str| assert!(Command::new("ip").args(["link", "set", "dummy0", state]).status().unwrap().success());
    let reading = tokio::spawn({
        let (connection, region) = (nodes.connection.clone(), nodes.region.clone());
        async move {
            for _ in 0..40 {
                pull(&connection, &region, b"bulk", &[100_000; 16]).await;
                sleep(Duration::from_millis(20)).await;
            }
        }
    });
    sleep(Duration::from_millis(300)).await;
    link("down");
    until("the fallback is reported", || !nodes.ours.fallen_back().is_empty()).await;
    let written = nodes.written();
    nodes.pull(b"bulk", &[100_000; 16]).await;
    assert_eq!(nodes.written(), written, "by TCP");
    assert!(nodes.ours.status().requests_by_tcp > 0);
    link("up");
    reading.await.unwrap();
    until("RDMA again", || nodes.ours.fallen_back().is_empty()).await;
    nodes.pull(b"bulk", &[100_000; 16]).await;
    until("it goes by RDMA", || nodes.written() > written + 1_500_000).await;
    assert!(nodes.ours.status().failed > 0);
    before.assert_restored().await;
    assert!(nodes.region.slot_within(47 << 20, TIMEOUT).await.is_some(), "all slots are free again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_with_unregistered_memory_also_succeed() {
    if !has_card() {
        return;
    }
    let ((ours, _), (theirs, address)) = (tcp(0).await, tcp(1).await);
    let (ours, theirs) = (rdma(ours, Limits::default()), rdma(theirs, Limits::default()));
    let echo = Echo::new(Region::new(16 << 20).unwrap());
    let _serving = theirs.serve(echo).await.unwrap();
    let connection = ours.connect(NodeId(1), address).await.unwrap();
    // The owner's memory for offers is not registered, so the bytes pass through registered memory.
    for len in [100, 1 << 20, (2 << 20) + 7] {
        let mut slot = ours.region(4 << 20).unwrap().slot(len as u64).unwrap();
        slot.copy_from_slice(&pattern(len));
        assert_eq!(connection.offer(b"take".to_vec(), &mut Some(slot), len, TIMEOUT).await.unwrap(), b"take");
    }
    let read = theirs.status().read_bytes;
    assert!(read > 3 << 20, "{read}");
    // The asker's memory is not registered, so its requests go over TCP.
    let region = Region::new(1 << 20).unwrap();
    let written = theirs.status().written_bytes;
    pull(&connection, &region, b"bulk", &[1000; 8]).await;
    let taken = connection.offer(b"take".to_vec(), &mut region.slot(0), 0, TIMEOUT).await.unwrap();
    assert_eq!(taken, b"take");
    // Earlier answers, which are short, may be counted only now.
    assert!(theirs.status().written_bytes < written + 8 * 1000, "by TCP");
    assert_eq!(ours.status().requests_by_tcp, 2);
}

/// Records the events of a queue pair.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<RecordedEvents>>);

#[derive(Default)]
struct RecordedEvents {
    messages: Vec<Vec<u8>>,
    ended: Option<String>,
}

impl Events for Recorder {
    fn on_message(&mut self, message: &[u8]) -> Result<(), &'static str> {
        lock(&self.0).messages.push(message.to_vec());
        Ok(())
    }

    fn on_completion(&mut self, _number: u32) -> Result<(), &'static str> {
        Ok(())
    }

    fn on_end(&mut self, reason: &str) {
        lock(&self.0).ended = Some(reason.to_owned());
    }
}

fn post(card: &Card, queue: engine::QueueId, slot: Slot, action: Action, len: u32) {
    let works = vec![Work { action, address: slot.address(), len, local_key: slot.keys().unwrap().local }];
    card.engine.post(queue, engine::Batch { works, hold: Box::new(slot), done: None });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_with_a_wrong_key_ends_only_its_own_queue_pair() {
    if !has_card() {
        return;
    }
    let nodes = NodePair::new(Limits::default()).await;
    nodes.pull(b"bulk", &[100_000; 8]).await;
    let before = Baseline::take();
    let (card, other) = (nodes.ours.shared.card().unwrap(), nodes.theirs.shared.card().unwrap());
    let (near, far) = (card.engine.queue_pair(8).unwrap(), other.engine.queue_pair(8).unwrap());
    near.join(&far.endpoint()).unwrap();
    far.join(&near.endpoint()).unwrap();
    let (recorder, far_recorder) = (Recorder::default(), Recorder::default());
    let queue = card.engine.add(near, Box::new(recorder.clone()));
    other.engine.add(far, Box::new(far_recorder.clone()));
    let free = card.staging.slot(dayfly_meta::limits::RDMA_STAGING_LEN / 2).is_some();
    let target = nodes.theirs.region(1 << 20).unwrap().slot(4096).unwrap();
    let place = |key| Remote { address: target.address(), key };
    let mut slot = card.staging.slot(100).unwrap();
    slot.fill(7);
    post(card, queue, slot, Action::Write(place(target.keys().unwrap().remote)), 100);
    until("it is written", || target[..100] == [7; 100]).await;
    post(card, queue, card.staging.slot(100).unwrap(), Action::Send, 100);
    until("it is received", || lock(&far_recorder.0).messages.len() == 1).await;
    post(card, queue, card.staging.slot(100).unwrap(), Action::Write(place(target.keys().unwrap().remote ^ 0x55)), 100);
    until("it ends", || lock(&recorder.0).ended.is_some()).await;
    assert!(lock(&recorder.0).ended.as_deref().unwrap().contains("remote access error"), "{:?}", lock(&recorder.0).ended);
    // Later work on that queue pair is dropped, and other queue pairs are not affected.
    post(card, queue, card.staging.slot(100).unwrap(), Action::Send, 100);
    nodes.pull(b"bulk", &[100_000; 8]).await;
    assert!(free && card.staging.slot_within(dayfly_meta::limits::RDMA_STAGING_LEN / 2, TIMEOUT).await.is_some());
    assert_eq!(nodes.ours.fallen_back(), []);
    drop(target);
    before.assert_restored().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_wait_for_receives_but_not_forever() {
    if !has_card() {
        return;
    }
    // There are many more requests than receives, so the card sends requests again.
    let nodes = NodePair::new(Limits { receives: 2, ..Limits::default() }).await;
    let (connection, region) = (&nodes.connection, &nodes.region);
    let before = Baseline::take();
    let requests = (0..200).map(|_| pull(connection, region, b"bulk", &[2000, 100]));
    futures_util::future::join_all(requests).await;
    assert!(nodes.written() > 200 * 2000);
    // There is no receive at all and never will be, so the queue pair ends on its own.
    let card = nodes.ours.shared.card().unwrap();
    let (completions, receives) = (Completions::new(&card.device, 16).unwrap(), Receives::new(&card.device, 1).unwrap());
    let far = QueuePair::new(&card.device, &Arc::new(completions), &Arc::new(receives), 8).unwrap();
    let near = card.engine.queue_pair(8).unwrap();
    near.join(&far.endpoint()).unwrap();
    far.join(&near.endpoint()).unwrap();
    let recorder = Recorder::default();
    let queue = card.engine.add(near, Box::new(recorder.clone()));
    post(card, queue, card.staging.slot(100).unwrap(), Action::Send, 100);
    until("it ends", || lock(&recorder.0).ended.is_some()).await;
    assert!(lock(&recorder.0).ended.as_deref().unwrap().contains("RNR"), "{:?}", lock(&recorder.0).ended);
    nodes.pull(b"bulk", &[100_000; 8]).await;
    drop(far);
    before.assert_restored().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_waits_for_room_in_the_completion_queue() {
    if !has_card() {
        return;
    }
    let small = Limits { receives: 16, completions: 90, send_depth: 64, ..Limits::default() };
    let nodes = NodePair::new(small).await;
    let (connection, region) = (&nodes.connection, &nodes.region);
    let before = Baseline::take();
    let requests = (0..64).map(|_| pull(connection, region, b"bulk", &[1000; 100]));
    futures_util::future::join_all(requests).await;
    before.assert_restored().await;
    assert_eq!((nodes.ours.status().failed, nodes.theirs.status().failed), (0, 0));
    assert!(Card::open(&Choice::default(), Limits { completions: 40, ..small }).is_err(), "too few for one queue pair");
}

#[test]
fn too_little_locked_memory_is_reported_with_a_remedy() {
    if !has_card() {
        return;
    }
    // The first limit is too low for the memory that is always registered, and the second is too low for an arena.
    for limit in [8 << 20, 100 << 20_u64] {
        let mut child = Command::new("setpriv");
        child.args(["--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]).arg(std::env::current_exe().unwrap());
        child.args(["--exact", "rdma::tests::role_of_a_child_process", "--nocapture"]).env(ROLE, format!("memlock {limit}"));
        let output = String::from_utf8(child.output().unwrap().stdout).unwrap();
        let ability = line_with(&mut output.as_bytes(), "ability");
        assert!(ability.contains(&format!("limited to {limit} bytes")) && ability.contains("ulimit -l unlimited"), "{ability}");
    }
}
