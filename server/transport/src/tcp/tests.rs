//! Links under faults: drives that fail while the kernel sends from them, streams that die, and drives that hang.

use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::wire::frame::Kind;
use tokio::net::TcpStream;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

use super::link::{Link, RequestState};
use super::relay::{Relay, StreamState};
use super::seal::split;
use super::stream::{FileRange, Outgoing, Timestamp, writer};
use super::*;
use crate::budget::Progress;
use crate::conformance::{Echo, pattern, tcp, tcp_for, tcp_with};
use crate::contract::{Answer, Incoming, Piece};
use crate::error::{PieceError, Refusal};
use crate::region::Slot;

/// `docs/PROTOCOL.md`: bytes that a drive does not return are replaced by zeros, and the stream continues.
#[tokio::test]
async fn a_file_that_fails_while_the_kernel_sends_it_does_not_end_the_stream() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, vec![7; 3 << 20]).unwrap();
    let good = Arc::new(std::fs::File::open(&path).unwrap());
    // Reading this file fails with EBADF.
    let unreadable = Arc::new(OpenOptions::new().write(true).open(&path).unwrap());
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let mut far = listener.accept().unwrap().0;
    let (_read, write) = split(stream, None);
    let (sender, writing) = writer(write, TIMEOUT, Timestamp::new(Instant::now()));
    let writing = tokio::spawn(writing);
    let got = std::thread::spawn(move || {
        let mut got = Vec::new();
        far.read_to_end(&mut got).unwrap();
        got
    });
    let mut results = Vec::new();
    // A file that is half a frame too short, an unreadable one, and an intact one.
    for (file, offset) in [(&good, (1 << 20) + (1 << 19)), (&unreadable, 0), (&good, 0)] {
        let (done, sent) = oneshot::channel();
        let range = FileRange { file: file.clone(), offset, len: 2 << 20, revoked: Arc::new(AtomicBool::new(false)) };
        sender.send(Outgoing::File { request: 1, range, done }).await.unwrap();
        results.push(sent.await.unwrap());
    }
    drop(sender);
    writing.await.unwrap().unwrap();
    let got = got.join().unwrap();
    assert!(matches!(results[0], Err(PieceError::Truncated)), "{results:?}");
    assert!(matches!(&results[1], Err(PieceError::Unreadable(error)) if error.to_string().contains("Bad file descriptor")));
    assert!(results[2].is_ok(), "{results:?}");
    let frame = 24 + (1 << 20);
    assert_eq!(got.len(), 6 * frame);
    let is_all = |frame_number: usize, range: std::ops::Range<usize>, byte: u8| {
        got[frame_number * frame + 24..][range].iter().all(|&got| got == byte)
    };
    assert!(is_all(0, 0..1 << 20, 7) && is_all(1, 0..1 << 19, 7) && is_all(1, 1 << 19..1 << 20, 0));
    assert!(is_all(2, 0..1 << 20, 0) && is_all(3, 0..1 << 20, 0));
    assert!(is_all(4, 0..1 << 20, 7) && is_all(5, 0..1 << 20, 7));
}

const TIMEOUT: Duration = Duration::from_secs(5);

/// Reads in a loop until `end` is set. Returns the number of reads and the longest time that one took.
async fn read_on(connection: Arc<dyn Connection>, region: Region, end: watch::Receiver<bool>) -> (usize, Duration) {
    let (mut reads, mut longest) = (0, Duration::ZERO);
    while !*end.borrow() {
        let slot = region.slot_within(300_000, TIMEOUT).await.unwrap();
        let start = Instant::now();
        let pulled = connection.pull(b"give".to_vec(), vec![slot], TIMEOUT).await.unwrap();
        longest = longest.max(start.elapsed());
        assert!(pulled.slots[0][..] == pattern(300_000)[..], "the bytes are right");
        reads += 1;
    }
    (reads, longest)
}

/// `docs/SEMANTICS.md`: one dead stream of a peer is noticed, and no reader sees an error.
async fn a_stream_fails(purpose: Purpose, stream: usize, state: StreamState) {
    let ((ours, _), (theirs, address)) = (tcp_for(0, purpose).await, tcp_for(1, purpose).await);
    let _serving = theirs.serve(Echo::new(theirs.region(16 << 20).unwrap())).await.unwrap();
    let relay = Relay::to(address).await;
    let connection = ours.connect(NodeId(1), relay.address).await.unwrap();
    let region = ours.region(64 << 20).unwrap();
    assert_eq!(relay.count(), 3);
    let (end, ended) = watch::channel(false);
    let mut readers = JoinSet::new();
    for _ in 0..4 {
        readers.spawn(read_on(connection.clone(), region.clone(), ended.clone()));
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    relay.set(stream, state);
    // Waits until the link is replaced.
    let start = Instant::now();
    while relay.count() < 4 {
        assert!(start.elapsed() < 6 * TIMEOUT, "the link is not replaced");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    end.send_replace(true);
    let (mut reads, mut longest) = (0, Duration::ZERO);
    while let Some(read) = readers.join_next().await {
        let read = read.unwrap();
        (reads, longest) = (reads + read.0, longest.max(read.1));
    }
    let _ = writeln!(std::io::stderr(), "{purpose:?}, stream {stream} {state:?}: {reads} reads, the longest took {longest:?}");
    assert!(!connection.is_lost());
    connection.pull(b"hi".to_vec(), vec![], TIMEOUT).await.unwrap();
    drop(connection);
    // All slots are free again.
    assert!(region.slot_within(63 << 20, TIMEOUT).await.is_some());
}

/// SEMANTICS: "A dead connection (for example, after a member of a bundle of links fails or a firewall loses an entry) is
/// detected within about 2.5 s and replaced, if other connections between the two nodes still work. Reads that are waiting on the
/// dead connection move to another one, and no reader sees an error."
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_link_is_replaced_and_no_reader_notices() {
    for purpose in [Purpose::Peer, Purpose::SealedPeer] {
        for state in [StreamState::Black, StreamState::Closed] {
            // The first stream is for small messages, and the others are for bulk bytes.
            tokio::join!(a_stream_fails(purpose, 0, state), a_stream_fails(purpose, 1, state), a_stream_fails(purpose, 2, state));
        }
    }
}

/// `docs/PROTOCOL.md`: a slow link is not mistaken for a dead one, even while pings wait behind bulk bytes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_link_is_not_replaced() {
    const LEN: usize = 1 << 20;
    let ((ours, _), (theirs, address)) = (tcp(0).await, tcp(1).await);
    let _serving = theirs.serve(Echo::new(theirs.region(16 << 20).unwrap())).await.unwrap();
    let relay = Relay::to(address).await;
    let connection = ours.connect(NodeId(1), relay.address).await.unwrap();
    let region = ours.region(16 << 20).unwrap();
    relay.set_all(StreamState::Slow);
    let pull = connection.pull(b"give".to_vec(), vec![region.slot(LEN as u64).unwrap()], 4 * TIMEOUT);
    let mut payload = region.slot(LEN as u64);
    payload.as_mut().unwrap().copy_from_slice(&pattern(LEN));
    let offer = connection.offer(b"take".to_vec(), &mut payload, LEN, 4 * TIMEOUT);
    let (pulled, offered) = tokio::join!(pull, offer);
    assert!(pulled.unwrap().slots[0][..] == pattern(LEN)[..] && offered.unwrap() == b"take");
    assert_eq!(relay.count(), 3, "no link was replaced");
}

/// `docs/PROTOCOL.md`: the peer is lost when all of its links are silent or have ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_is_lost_when_all_of_its_links_are_dead() {
    for state in [StreamState::Black, StreamState::Closed] {
        let ((ours, _), (theirs, address)) = (tcp(0).await, tcp(1).await);
        let _serving = theirs.serve(Echo::new(theirs.region(16 << 20).unwrap())).await.unwrap();
        let relay = Relay::to(address).await;
        let connection = ours.connect(NodeId(1), relay.address).await.unwrap();
        let region = ours.region(1 << 20).unwrap();
        let offered = ours.region(1 << 20).unwrap();
        let mut payload = offered.slot(1 << 20);
        relay.set_all(state);
        let pull = connection.pull(b"give".to_vec(), vec![region.slot(9).unwrap()], 4 * TIMEOUT);
        let offer = connection.offer(b"take".to_vec(), &mut payload, 1 << 20, 4 * TIMEOUT);
        let (pulled, taken) = tokio::join!(pull, offer);
        for error in [pulled.err(), taken.err()] {
            assert!(matches!(error, Some(TransportError::Lost { .. })), "{state:?}: {error:?}");
        }
        assert!(payload.is_some(), "what was offered can be offered again");
        assert!(connection.is_lost() && region.slot_within(1 << 20, TIMEOUT).await.is_some());
    }
}

/// Answers pulls into slots only after the flag is set. Refuses offers.
struct Hung(watch::Receiver<bool>);

#[async_trait]
impl Service for Hung {
    async fn pulled(&self, _from: NodeId, _message: Vec<u8>, room: Vec<u64>) -> Result<Answer, Refusal> {
        let mut flag = self.0.clone();
        if !room.is_empty() && flag.wait_for(|is_set| *is_set).await.is_err() {
            return Err("it ends".into());
        }
        Ok(Answer { message: Vec::new(), pieces: room.iter().map(|&len| Piece::Bytes(vec![1; len as usize])).collect() })
    }

    async fn offered(&self, _from: NodeId, _message: Vec<u8>, _incoming: Incoming) -> Result<Vec<u8>, Refusal> {
        Err("no".into())
    }
}

/// `docs/SEMANTICS.md`: a node whose drive hangs takes a bounded part of the others' memory; data on healthy nodes is read as
/// usual.
///
/// SEMANTICS: "A drive that hangs costs readers of its data one request's deadline, and after that no time: the drive's node gets
/// no further requests until it answers, and the error says so. Meanwhile, requests to that node occupy at most a quarter of each
/// other node's arena."
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hung_drive_holds_a_bounded_part_of_memory_and_healthy_peers_are_still_read() {
    let (ours, _) = tcp(0).await;
    let ((hung, hung_address), (good, good_address)) = (tcp(1).await, tcp(2).await);
    let (answer, flag) = watch::channel(false);
    let _serving =
        [hung.serve(Arc::new(Hung(flag))).await.unwrap(), good.serve(Echo::new(good.region(1 << 20).unwrap())).await.unwrap()];
    let hung = ours.connect(NodeId(1), hung_address).await.unwrap();
    let good = ours.connect(NodeId(2), good_address).await.unwrap();
    let region = ours.region(16 << 20).unwrap();
    // Many readers repeatedly ask the node whose drive hangs, each with a deadline of its own.
    let (end, ended) = watch::channel(false);
    let (mut readers, stuck) = (JoinSet::new(), Arc::new(AtomicUsize::new(0)));
    for _ in 0..16 {
        let (hung, region, ended, stuck) = (hung.clone(), region.clone(), ended.clone(), stuck.clone());
        readers.spawn(async move {
            while !*ended.borrow() {
                let Some(slot) = region.slot_within(300_000, TIMEOUT).await else { panic!("the memory is full") };
                match hung.pull(b"give".to_vec(), vec![slot], Duration::from_millis(200)).await.err() {
                    Some(TransportError::Timeout { .. }) => {}
                    Some(error @ TransportError::Stuck { .. }) => {
                        assert!(error.to_string().starts_with("node 1 ") && error.to_string().contains("drive hangs"), "{error}");
                        stuck.fetch_add(1, Ordering::Relaxed);
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    other => panic!("{other:?}"),
                }
            }
        });
    }
    let start = Instant::now();
    let mut reads = 0;
    while start.elapsed() < Duration::from_secs(4) || stuck.load(Ordering::Relaxed) < 100 {
        assert!(start.elapsed() < 12 * TIMEOUT);
        let slot = region.slot_within(1 << 20, TIMEOUT).await.unwrap();
        good.pull(b"give".to_vec(), vec![slot], TIMEOUT).await.unwrap();
        reads += 1;
    }
    end.send_replace(true);
    while let Some(reader) = readers.join_next().await {
        reader.unwrap();
    }
    // What the hung node holds may lie anywhere, so the rest need not be in one piece.
    let free: Vec<Slot> = (0..44).map_while(|_| region.slot(256 << 10)).collect();
    let _ = writeln!(
        std::io::stderr(),
        "{reads} reads of the healthy node, {} requests failed at once",
        stuck.load(Ordering::Relaxed)
    );
    assert_eq!(free.len(), 44, "the hung node holds more than a quarter");
    // Requests without slots are still answered. All other requests are answered once the drive works again.
    hung.pull(Vec::new(), vec![], TIMEOUT).await.unwrap();
    drop(free);
    answer.send_replace(true);
    let start = Instant::now();
    loop {
        let slot = region.slot_within(300_000, TIMEOUT).await.unwrap();
        match hung.pull(b"give".to_vec(), vec![slot], TIMEOUT).await {
            Ok(pulled) => break assert!(pulled.slots[0][..].iter().all(|&byte| byte == 1)),
            Err(error) => assert!(start.elapsed() < 6 * TIMEOUT, "{error}"),
        }
    }
    assert!(!hung.is_lost() && region.slot_within(15 << 20, TIMEOUT).await.is_some());
}

/// Reserves its only slot for an offer, once `go` is notified.
struct Lender {
    region: Region,
    /// Answers offers whose bytes did not land, as [`crate::Service`] may, instead of refusing them.
    answers_always: bool,
    asked: tokio::sync::Notify,
    go: tokio::sync::Notify,
}

#[async_trait]
impl Service for Lender {
    async fn pulled(&self, _from: NodeId, _message: Vec<u8>, _room: Vec<u64>) -> Result<Answer, Refusal> {
        Err("nothing is here".into())
    }

    async fn offered(&self, _from: NodeId, message: Vec<u8>, incoming: Incoming) -> Result<Vec<u8>, Refusal> {
        self.asked.notify_one();
        self.go.notified().await;
        let slot = self.region.slot_within(incoming.len(), TIMEOUT).await.ok_or("no slot")?;
        match incoming.land(slot).await {
            Err(error) if !self.answers_always => Err(Refusal::new(error)),
            _ => Ok(message),
        }
    }
}

/// `docs/PROTOCOL.md`, "Offer": an offer that is given up after it was accepted is withdrawn, so that its slot is free again.
#[tokio::test]
async fn a_slot_reserved_for_an_offer_is_free_again_after_the_offer_was_given_up() {
    for answers_always in [false, true] {
        give_up_an_offer(answers_always).await;
    }
}

async fn give_up_an_offer(answers_always: bool) {
    let len = 1 << 20;
    let ours = tcp_with(0, Purpose::Peer, Deadlines::DEFAULT.scaled(20)).await.0;
    let (theirs, address) = tcp_with(1, Purpose::Peer, Deadlines::DEFAULT.scaled(20)).await;
    let region = theirs.region(len as u64).unwrap();
    let lender = Arc::new(Lender { region, answers_always, asked: tokio::sync::Notify::new(), go: tokio::sync::Notify::new() });
    let _serving = theirs.serve(lender.clone()).await.unwrap();
    let connection = ours.connect(NodeId(1), address).await.unwrap();
    let ours_region = ours.region(len as u64).unwrap();
    let offer = |message: &'static [u8]| {
        let (connection, mut payload) = (connection.clone(), ours_region.slot(len as u64));
        tokio::spawn(async move { connection.offer(message.to_vec(), &mut payload, len, TIMEOUT).await })
    };
    let given_up = offer(b"first");
    lender.asked.notified().await;
    given_up.abort();
    assert!(given_up.await.is_err());
    lender.go.notify_one();
    // A second offer gets the only slot, over the same links.
    let second = offer(b"second");
    lender.asked.notified().await;
    lender.go.notify_one();
    assert_eq!(second.await.unwrap().unwrap(), b"second");
    assert!(!connection.is_lost());
}

/// A request whose frame still waits in the queue when its caller gives up does not keep its slots or its permit.
#[tokio::test]
async fn a_request_that_is_given_up_before_it_was_sent_leaves_nothing_behind() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let stream = tokio::net::TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let halves = split(stream, None);
    // Nothing takes frames from the queue, because nothing polls the link's future.
    let (link, _run) = Link::start(halves, Instant::now(), TIMEOUT);
    let region = Region::new(1 << 20).unwrap();
    while link.sender.capacity() > 0 {
        link.send(Kind::Ping, 0, (0, Vec::new()), TIMEOUT).await.unwrap();
    }
    let (done, _answer) = oneshot::channel();
    let permit = link.permits.clone().acquire_owned().await.unwrap();
    let state = RequestState::Pull { slots: vec![region.slot(1 << 20).unwrap()], done };
    let request = link.register(&Progress::new(), permit, None, state).unwrap_or_else(|_| panic!("the link has not ended"));
    let sending = link.send(Kind::Pull, request, (0, Vec::new()), TIMEOUT);
    assert!(tokio::time::timeout(Duration::from_millis(20), sending).await.is_err(), "the queue is full");
    assert_eq!(link.load(), 0);
    assert!(region.slot(1 << 20).is_some());
}
