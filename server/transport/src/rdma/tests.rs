//! RDMA under faults and for long. These run where there is a card: in a virtual machine with Soft-RoCE, by `tests/vm/rdma`, one after
//! another, as root, for some take the card's link down and look at the kernel's memory.

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
/// Tells a child of these tests what it is.
const ROLE: &str = "DAYFLY_TEST_ROLE";

/// Whether there is a card to test with; says so where there is none, past the test harness.
pub(crate) fn has_card() -> bool {
    let is_there = !device::names().is_empty();
    if !is_there {
        assert!(std::env::var_os("DAYFLY_TEST_RDMA").is_none(), "a card was promised by DAYFLY_TEST_RDMA, and there is none");
        let words = "RDMA was NOT tested: there is no card here. Run tests/vm/rdma, which has one in a virtual machine.";
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| drop(writeln!(std::io::stderr(), "{words}")));
    }
    is_there
}

fn rdma(tcp: Tcp, limits: Limits) -> Rdma<Tcp> {
    let rdma = Rdma::with_limits(tcp, Preference::Rdma, &Choice::default(), limits);
    assert!(rdma.shared.card().is_ok());
    rdma
}

/// Two nodes of one process: who asks, and who answers.
struct Two {
    ours: Rdma<Tcp>,
    theirs: Rdma<Tcp>,
    connection: Arc<dyn Connection>,
    region: Region,
    _serving: Serving,
}

impl Two {
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

/// What must be as it was: descriptors, and the kernel's objects in caches that verbs use.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

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

/// By how much the cache that grew most has grown, in objects.
fn growth(before: &BTreeMap<String, i64>) -> (String, i64) {
    let grown = slabs().into_iter().map(|(name, count)| (name.clone(), count - before.get(&name).copied().unwrap_or(0)));
    grown.max_by_key(|(_, grown)| *grown).unwrap_or_default()
}

/// What is as it was once, and is to be again.
struct Before {
    descriptors: usize,
    slabs: BTreeMap<String, i64>,
}

impl Before {
    fn take() -> Self {
        Self { descriptors: descriptors(), slabs: slabs() }
    }

    async fn is_again(&self) {
        until("no descriptor more", || descriptors() <= self.descriptors).await;
        let (cache, grown) = growth(&self.slabs);
        assert!(grown < 500, "{cache} has {grown} objects more");
    }
}

async fn until(what: &str, is_so: impl FnMut() -> bool) {
    until_within(TIMEOUT, what, is_so).await;
}

async fn until_within(limit: Duration, what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < limit, "not within {limit:?}: {what}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// A child of these tests, killed with them.
struct Role(Child);

impl Role {
    fn start(role: &str) -> (Self, BufReader<std::process::ChildStdout>) {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "rdma::tests::role_of_a_child_process", "--nocapture"]).env(ROLE, role);
        let mut child = child.stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        (Self(child), output)
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn line_with(output: &mut impl BufRead, word: &str) -> String {
    for line in output.lines() {
        // The harness writes before it, on the same line.
        if let Some((_, rest)) = line.unwrap().split_once(word) {
            return rest.trim().to_owned();
        }
    }
    panic!("the child has ended without '{word}'");
}

fn on_runtime(future: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(future);
}

/// Not a test by itself: what children of the others do.
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
            let Some(sign) = words.next() else { return std::future::pending().await };
            // As if its power had gone: nothing is told to anyone.
            until_within(Duration::from_secs(200), "the sign", || std::path::Path::new(sign).exists()).await;
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
            assert!(auto.region(128 << 20).is_ok(), "TCP does without");
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
    let (owner, mut output) = Role::start("owner");
    let address = line_with(&mut output, "listening at").parse().unwrap();
    let (tcp, _) = tcp(0).await;
    let ours = rdma(tcp, Limits::default());
    let region = ours.region(64 << 20).unwrap();
    let before = Before::take();
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
    assert!(region.slot_within(63 << 20, TIMEOUT).await.is_some(), "all slots are back");
    drop(connection);
    until("no queue pair", || ours.status().queue_pairs == 0).await;
    before.is_again().await;
}

/// `tests/vm/rdma` runs the owner in another virtual machine, and tells where it is.
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
    let before = Before::take();
    for _ in 0..10 {
        pull(&connection, &region, b"bulk", &[110_000; 64]).await;
    }
    let payload = region.slot(1 << 20).unwrap();
    let received = ours.status();
    assert_eq!((received.failed, received.queue_pairs), (0, 1), "by RDMA");
    // In the middle of a transfer of which nothing is told any more.
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
    let offered = connection.offer(b"take".to_vec(), payload, 100, TIMEOUT).await;
    assert!(matches!(offered, Err(TransportError::Lost { .. })));
    assert!(region.slot_within(63 << 20, TIMEOUT).await.is_some(), "all slots are back");
    drop(connection);
    until("no queue pair", || ours.status().queue_pairs == 0).await;
    before.is_again().await;
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
    let mut before = Before::take();
    for round in 0..4 {
        if round == 1 {
            before = Before::take();
        }
        let (asker, mut output) = Role::start(&format!("asker {address}"));
        line_with(&mut output, "asking");
        let written = theirs.status().written_bytes;
        until("it writes", || theirs.status().written_bytes > written + (8 << 20)).await;
        drop(asker);
        drop(output);
        until("no queue pair", || theirs.status().queue_pairs == 0).await;
        assert!(
            staging.slot_within(dayfly_meta::limits::RDMA_STAGING_LEN - (1 << 20), TIMEOUT).await.is_some(),
            "nothing is under way"
        );
    }
    before.is_again().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_do_not_notice_a_link_that_goes_down_and_up() {
    if !has_card() {
        return;
    }
    let two = Two::new(Limits::default()).await;
    two.pull(b"bulk", &[100_000; 16]).await;
    let before = Before::take();
    let link = |state: &str| assert!(Command::new("ip").args(["link", "set", "dummy0", state]).status().unwrap().success());
    let reading = tokio::spawn({
        let (connection, region) = (two.connection.clone(), two.region.clone());
        async move {
            for _ in 0..40 {
                pull(&connection, &region, b"bulk", &[100_000; 16]).await;
                sleep(Duration::from_millis(20)).await;
            }
        }
    });
    sleep(Duration::from_millis(300)).await;
    link("down");
    until("it says so", || !two.ours.fallen_back().is_empty()).await;
    let written = two.written();
    two.pull(b"bulk", &[100_000; 16]).await;
    assert_eq!(two.written(), written, "by TCP");
    link("up");
    reading.await.unwrap();
    until("RDMA again", || two.ours.fallen_back().is_empty()).await;
    two.pull(b"bulk", &[100_000; 16]).await;
    assert!(two.written() > written + 1_500_000, "by RDMA");
    assert!(two.ours.status().failed > 0);
    before.is_again().await;
    assert!(two.region.slot_within(47 << 20, TIMEOUT).await.is_some(), "all slots are back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unregistered_memory_is_served_too() {
    if !has_card() {
        return;
    }
    let ((ours, _), (theirs, address)) = (tcp(0).await, tcp(1).await);
    let (ours, theirs) = (rdma(ours, Limits::default()), rdma(theirs, Limits::default()));
    let echo = Echo::new(Region::new(16 << 20).unwrap());
    let _serving = theirs.serve(echo).await.unwrap();
    let connection = ours.connect(NodeId(1), address).await.unwrap();
    // Where the owner could not register what offers land in: they are read by way of what it could.
    for len in [100, 1 << 20, (2 << 20) + 7] {
        let mut slot = ours.region(4 << 20).unwrap().slot(len as u64).unwrap();
        slot.copy_from_slice(&pattern(len));
        assert_eq!(connection.offer(b"take".to_vec(), slot, len, TIMEOUT).await.unwrap().message, b"take");
    }
    let read = theirs.status().read_bytes;
    assert!(read > 3 << 20, "{read}");
    // Where the asker could not: TCP.
    let region = Region::new(1 << 20).unwrap();
    let written = theirs.status().written_bytes;
    pull(&connection, &region, b"bulk", &[1000; 8]).await;
    let offered = connection.offer(b"take".to_vec(), region.slot(0).unwrap(), 0, TIMEOUT).await.unwrap();
    assert_eq!((offered.message, theirs.status().written_bytes), (b"take".to_vec(), written));
}

/// Takes note of what happens.
#[derive(Clone, Default)]
struct Noted(Arc<Mutex<Notes>>);

#[derive(Default)]
struct Notes {
    messages: Vec<Vec<u8>>,
    ended: Option<String>,
}

impl Events for Noted {
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
async fn a_wrong_key_ends_only_that_queue_pair() {
    if !has_card() {
        return;
    }
    let two = Two::new(Limits::default()).await;
    two.pull(b"bulk", &[100_000; 8]).await;
    let before = Before::take();
    let (card, other) = (two.ours.shared.card().unwrap(), two.theirs.shared.card().unwrap());
    let (near, far) = (card.engine.queue_pair(8).unwrap(), other.engine.queue_pair(8).unwrap());
    near.join(&far.endpoint()).unwrap();
    far.join(&near.endpoint()).unwrap();
    let (noted, far_noted) = (Noted::default(), Noted::default());
    let queue = card.engine.add(near, Box::new(noted.clone()));
    other.engine.add(far, Box::new(far_noted.clone()));
    let free = card.staging.slot(dayfly_meta::limits::RDMA_STAGING_LEN / 2).is_some();
    let target = two.theirs.region(1 << 20).unwrap().slot(4096).unwrap();
    let place = |key| Remote { address: target.address(), key };
    let mut slot = card.staging.slot(100).unwrap();
    slot.fill(7);
    post(card, queue, slot, Action::Write(place(target.keys().unwrap().remote)), 100);
    until("it is written", || target[..100] == [7; 100]).await;
    post(card, queue, card.staging.slot(100).unwrap(), Action::Send, 100);
    until("it is received", || lock(&far_noted.0).messages.len() == 1).await;
    post(card, queue, card.staging.slot(100).unwrap(), Action::Write(place(target.keys().unwrap().remote ^ 0x55)), 100);
    until("it ends", || lock(&noted.0).ended.is_some()).await;
    assert!(lock(&noted.0).ended.as_deref().unwrap().contains("remote access error"), "{:?}", lock(&noted.0).ended);
    // What comes after is dropped, and the others do not notice.
    post(card, queue, card.staging.slot(100).unwrap(), Action::Send, 100);
    two.pull(b"bulk", &[100_000; 8]).await;
    assert!(free && card.staging.slot_within(dayfly_meta::limits::RDMA_STAGING_LEN / 2, TIMEOUT).await.is_some());
    assert_eq!(two.ours.fallen_back(), []);
    drop(target);
    before.is_again().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_wait_for_receives_but_not_forever() {
    if !has_card() {
        return;
    }
    // Many more requests than receives: the card sends them again.
    let two = Two::new(Limits { receives: 2, ..Limits::default() }).await;
    let (connection, region) = (&two.connection, &two.region);
    let before = Before::take();
    let requests = (0..200).map(|_| pull(connection, region, b"bulk", &[2000, 100]));
    futures_util::future::join_all(requests).await;
    assert!(two.written() > 200 * 2000);
    // None at all, and never one: the queue pair ends by itself.
    let card = two.ours.shared.card().unwrap();
    let (completions, receives) = (Completions::new(&card.device, 16).unwrap(), Receives::new(&card.device, 1).unwrap());
    let far = QueuePair::new(&card.device, &Arc::new(completions), &Arc::new(receives), 8).unwrap();
    let near = card.engine.queue_pair(8).unwrap();
    near.join(&far.endpoint()).unwrap();
    far.join(&near.endpoint()).unwrap();
    let noted = Noted::default();
    let queue = card.engine.add(near, Box::new(noted.clone()));
    post(card, queue, card.staging.slot(100).unwrap(), Action::Send, 100);
    until("it ends", || lock(&noted.0).ended.is_some()).await;
    assert!(lock(&noted.0).ended.as_deref().unwrap().contains("RNR"), "{:?}", lock(&noted.0).ended);
    two.pull(b"bulk", &[100_000; 8]).await;
    drop(far);
    before.is_again().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_waits_for_room_in_the_completion_queue() {
    if !has_card() {
        return;
    }
    let small = Limits { receives: 16, completions: 90, send_depth: 64, ..Limits::default() };
    let two = Two::new(small).await;
    let (connection, region) = (&two.connection, &two.region);
    let before = Before::take();
    let requests = (0..64).map(|_| pull(connection, region, b"bulk", &[1000; 100]));
    futures_util::future::join_all(requests).await;
    before.is_again().await;
    assert_eq!((two.ours.status().failed, two.theirs.status().failed), (0, 0));
    assert!(Card::open(&Choice::default(), Limits { completions: 40, ..small }).is_err(), "less than one queue pair needs");
}

#[test]
fn too_little_locked_memory_is_reported_with_a_remedy() {
    if !has_card() {
        return;
    }
    // Too little for what is always registered, and too little for an arena.
    for limit in [8 << 20, 100 << 20_u64] {
        let mut child = Command::new("setpriv");
        child.args(["--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]).arg(std::env::current_exe().unwrap());
        child.args(["--exact", "rdma::tests::role_of_a_child_process", "--nocapture"]).env(ROLE, format!("memlock {limit}"));
        let output = String::from_utf8(child.output().unwrap().stdout).unwrap();
        let told = line_with(&mut output.as_bytes(), "ability");
        assert!(told.contains(&format!("limited to {limit} bytes")) && told.contains("ulimit -l unlimited"), "{told}");
    }
}
