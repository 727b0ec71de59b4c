//! The contract of all transports, as one test body ([`conforms`]). It runs over plain and sealed TCP, over the fault decorator,
//! and over RDMA. This file also tests what strangers can do to a listener.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{NodeId, SessionId};
use dayfly_meta::limits::FRAME_BODY_LEN_MAX;

use crate::contract::{Answer, Incoming, Piece, Service, Transport};
use crate::error::{Refusal, TransportError};
use crate::fault::{Fault, FaultSchedule, Faulty};
use crate::key::Key;
use crate::rdma::{Choice, Rdma};
use crate::region::Region;
use crate::selection::Preference;
use crate::tcp::{Identity, Purpose, Tcp};

const TIMEOUT: Duration = Duration::from_secs(5);

/// A service whose answer depends on the message. The pieces of an answer to a pull come alternately from a file and from memory.
/// `"file"` is answered with bytes of the file only, `"broken"` with every fourth piece from an unreadable file, and `"no"` with a refusal.
/// `"wait"` is never answered. Offers are taken, except for `"full"`.
pub(crate) struct Echo {
    file: Arc<File>,
    /// Reading its first page fails with `EIO`.
    broken: Arc<File>,
    region: Region,
    landed: AtomicUsize,
}

impl Echo {
    pub(crate) fn new(region: Region) -> Arc<Self> {
        let mut file = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut file, &pattern(4 << 20)).unwrap();
        let broken = Arc::new(File::open("/proc/self/mem").unwrap());
        Arc::new(Self { file: Arc::new(file), broken, region, landed: AtomicUsize::new(0) })
    }
}

pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect()
}

#[async_trait]
impl Service for Echo {
    async fn pulled(&self, from: NodeId, message: Vec<u8>, room: Vec<u64>) -> Result<Answer, Refusal> {
        match message.as_slice() {
            b"no" => return Err("told to refuse".into()),
            b"wait" => std::future::pending().await,
            b"slow" => tokio::time::sleep(Duration::from_millis(300)).await,
            _ => {}
        }
        let piece = |(slot, len): (usize, &u64)| match slot % 2 {
            _ if message == b"broken" && slot % 4 == 2 => {
                Piece::File { file: self.broken.clone(), offset: 0, len: *len, revoked: Arc::default() }
            }
            number if number == 0 || message == b"file" => Piece::File {
                file: self.file.clone(),
                // Only the first 100 bytes of this range exist, as if the file had been truncated.
                offset: if message == b"short" { (4 << 20) - 100 } else { slot as u64 },
                len: *len,
                revoked: Arc::new(AtomicBool::new(message == b"gone")),
            },
            _ => Piece::Bytes(pattern(*len as usize)),
        };
        let message = [&message[..], &from.0.to_le_bytes()].concat();
        Ok(Answer { message, pieces: room.iter().enumerate().map(piece).collect() })
    }

    async fn offered(&self, _from: NodeId, message: Vec<u8>, incoming: Incoming) -> Result<Vec<u8>, Refusal> {
        if message == b"full" {
            return Ok(b"no room".to_vec());
        }
        let len = incoming.len();
        let slot = self.region.slot_within(len, TIMEOUT).await.ok_or("no slot")?;
        let slot = incoming.land(slot).await.map_err(Refusal::new)?;
        assert!(slot[..len as usize] == pattern(len as usize));
        self.landed.fetch_add(len as usize, Ordering::Relaxed);
        Ok(message)
    }
}

pub(crate) async fn tcp(node: u16) -> (Tcp, SocketAddr) {
    tcp_for(node, Purpose::Peer).await
}

pub(crate) async fn tcp_for(node: u16, purpose: Purpose) -> (Tcp, SocketAddr) {
    tcp_with(node, purpose, Deadlines::DEFAULT).await
}

pub(crate) async fn tcp_with(node: u16, purpose: Purpose, deadlines: Deadlines) -> (Tcp, SocketAddr) {
    let identity =
        Identity { session: SessionId([9; 8]), key: Arc::new(Key::new([3; 32])), node: NodeId(node), purpose, deadlines };
    Tcp::bind(identity, "127.0.0.1:0".parse().unwrap()).await.unwrap()
}

/// Checks the contract between two nodes.
async fn conforms(ours: &dyn Transport, theirs: &dyn Transport, address: SocketAddr) {
    let echo = Echo::new(theirs.region(16 << 20).unwrap());
    let serving = theirs.serve(echo.clone()).await.unwrap();
    let connection = ours.connect(NodeId(1), address).await.unwrap();
    let region = ours.region(32 << 20).unwrap();
    assert_eq!(connection.peer(), NodeId(1));

    // One pull has no slots. Another has slots of many sizes, in which the pieces land byte for byte.
    let pulled = connection.pull(b"hi".to_vec(), vec![], TIMEOUT).await.unwrap();
    assert_eq!(pulled.message, b"hi\0\0");
    let lens = [1, 3000, 0, FRAME_BODY_LEN_MAX - 1, FRAME_BODY_LEN_MAX, FRAME_BODY_LEN_MAX + 1, 3 << 20, 64];
    let slots = lens.iter().map(|&len| region.slot(len as u64).unwrap()).collect();
    let pulled = connection.pull(b"bulk".to_vec(), slots, TIMEOUT).await.unwrap();
    for (at, (slot, len)) in pulled.slots.iter().zip(lens).enumerate() {
        let skip = if at % 2 == 0 { at } else { 0 };
        assert!(pulled.lens[at] == len as u64 && slot[..len] == pattern(len + skip)[skip..], "slot {at}");
    }
    drop(pulled);

    // Many pulls and offers at the same time.
    let many = (0..64_usize).map(|number| {
        let (connection, region) = (connection.clone(), region.clone());
        tokio::spawn(async move {
            let len = number * 2000;
            let mut slot = region.slot_within(len.max(1) as u64, TIMEOUT).await.unwrap();
            if number % 3 == 0 {
                slot[..len].copy_from_slice(&pattern(len));
                let (mut payload, message) = (Some(slot), b"take".to_vec());
                assert_eq!(connection.offer(message, &mut payload, len, TIMEOUT).await.unwrap(), b"take");
                assert!(payload.is_some());
            } else {
                let pulled = connection.pull(b"give".to_vec(), vec![slot], TIMEOUT).await.unwrap();
                assert!(pulled.slots[0][..len] == pattern(len)[..]);
            }
        })
    });
    for task in many.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    assert_eq!(
        echo.landed.load(Ordering::Relaxed),
        (0..64).filter(|number| number % 3 == 0).map(|number| number * 2000).sum::<usize>()
    );

    // The slot of an offer that is not taken comes back unchanged. A refusal carries its reason.
    let mut payload = region.slot(100);
    payload.as_mut().unwrap().fill(7);
    assert_eq!(connection.offer(b"full".to_vec(), &mut payload, 100, TIMEOUT).await.unwrap(), b"no room");
    assert!(payload.unwrap().iter().all(|&byte| byte == 7));
    let refused = connection.pull(b"no".to_vec(), vec![], TIMEOUT).await;
    assert!(matches!(refused, Err(TransportError::Refused { refusal, .. }) if refusal == "told to refuse".into()));

    // A piece that cannot be read fails alone, with a reason, and is not mistaken for zeros. The other pieces are sent as usual.
    let gone = connection.pull(b"gone".to_vec(), vec![region.slot(100).unwrap()], TIMEOUT).await.unwrap();
    assert_eq!(gone.unread.pieces, [0]);
    for len in [1000, 300_000, 3 << 20] {
        let slots = [len, len, 10].map(|len| region.slot(len).unwrap()).into();
        let short = connection.pull(b"short".to_vec(), slots, TIMEOUT).await.unwrap();
        assert_eq!(short.unread.pieces, [0], "{len} bytes, of which 100 exist");
        assert!(short.unread.reason.contains("drive is shorter"), "{}", short.unread.reason);
        assert!(short.slots[1][..] == pattern(len as usize)[..]);
        assert!(short.slots[2][..] == pattern(4 << 20)[(4 << 20) - 100..][..10]);
        drop(short);
        let slots = (0..7).map(|_| region.slot(len).unwrap()).collect();
        let broken = connection.pull(b"broken".to_vec(), slots, TIMEOUT).await.unwrap();
        assert_eq!(broken.unread.pieces, [2, 6], "{len} bytes");
        assert!(broken.unread.reason.contains("drive cannot be read: Input/output error"), "{}", broken.unread.reason);
        for at in [0, 1, 3, 4, 5] {
            let skip = if at % 2 == 0 { at } else { 0 };
            assert!(broken.slots[at][..] == pattern(len as usize + skip)[skip..], "slot {at} of {len} bytes");
        }
    }
    assert!(!connection.is_lost(), "the failure of a drive does not make the peer lost");

    // A request fails at its deadline, and others are served in the meantime. The slot of the failed request is freed only when
    // the connection ends.
    let start = Instant::now();
    let slot = region.slot(20 << 20).unwrap();
    let late = connection.pull(b"wait".to_vec(), vec![slot], Duration::from_millis(200));
    let (late, other) = tokio::join!(late, connection.pull(b"slow".to_vec(), vec![], TIMEOUT));
    assert!(matches!(late, Err(TransportError::Timeout { .. })) && other.is_ok());
    assert!(start.elapsed() < Duration::from_secs(2));
    assert!(region.slot(20 << 20).is_none(), "the slot must stay with the connection");
    assert!(matches!(connection.pull(vec![0; 2 << 20], vec![], TIMEOUT).await, Err(TransportError::TooLong(_))));

    // When the peer dies, requests under way and new ones fail at once, and all slots are freed.
    let dying = connection.pull(b"wait".to_vec(), vec![region.slot(64).unwrap()], TIMEOUT);
    let (died, ()) = tokio::join!(dying, async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(serving);
    });
    assert!(matches!(died, Err(TransportError::Lost { .. })), "{:?}", died.map(|pulled| pulled.lens));
    assert!(matches!(connection.pull(b"hi".to_vec(), vec![], TIMEOUT).await, Err(TransportError::Lost { .. })));
    assert!(connection.is_lost() && start.elapsed() < Duration::from_secs(4));
    assert!(region.slot_within(30 << 20, TIMEOUT).await.is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_conforms() {
    let ((ours, _), (theirs, address)) = (tcp(0).await, tcp(1).await);
    conforms(&ours, &theirs, address).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sealed_tcp_conforms() {
    let ((ours, _), (theirs, address)) = (tcp_for(0, Purpose::SealedPeer).await, tcp_for(1, Purpose::SealedPeer).await);
    conforms(&ours, &theirs, address).await;
}

/// Blocks all threads at once, as in a suspended job or on a starved node.
#[tokio::test]
async fn a_suspended_process_loses_no_peer() {
    let ((ours, _), (theirs, address)) = (tcp(0).await, tcp(1).await);
    let _serving = theirs.serve(Echo::new(theirs.region(16 << 20).unwrap())).await.unwrap();
    let connection = ours.connect(NodeId(1), address).await.unwrap();
    let asked = tokio::spawn({
        let connection = connection.clone();
        async move { connection.pull(b"slow".to_vec(), vec![], TIMEOUT).await.map(|pulled| pulled.message) }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    std::thread::sleep(Deadlines::DEFAULT.peer_lost.max(TIMEOUT) + Duration::from_secs(1));
    assert_eq!(asked.await.unwrap().unwrap(), b"slow\0\0");
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!connection.is_lost());
}

/// Forwards connections to `to`. If `change_at` is set, changes that byte of what comes back from `to`. Returns the address to
/// dial, and all bytes that passed in either direction.
async fn tap(to: SocketAddr, change_at: Option<usize>) -> (SocketAddr, Arc<Mutex<Vec<u8>>>) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, seen) = (listener.local_addr().unwrap(), Arc::new(Mutex::new(Vec::new())));
    let all = seen.clone();
    tokio::spawn(async move {
        loop {
            let (near, far) = (listener.accept().await.unwrap().0, tokio::net::TcpStream::connect(to).await.unwrap());
            let ((near_read, near_write), (far_read, far_write)) = (near.into_split(), far.into_split());
            for (mut from, mut to, change_at) in [(near_read, far_write, None), (far_read, near_write, change_at)] {
                let all = all.clone();
                tokio::spawn(async move {
                    let (mut buffer, mut passed) = (vec![0; 64 << 10], 0);
                    while let Ok(got @ 1..) = from.read(&mut buffer).await {
                        if let Some(at) = change_at.filter(|&at| (passed..passed + got).contains(&at)) {
                            buffer[at - passed] ^= 1;
                        }
                        passed += got;
                        all.lock().unwrap().extend_from_slice(&buffer[..got]);
                        if to.write_all(&buffer[..got]).await.is_err() {
                            return;
                        }
                    }
                });
            }
        }
    });
    (address, seen)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sealed_bytes_reveal_nothing_and_cannot_be_changed() {
    let secret = pattern(100_000);
    for (purpose, is_plain) in [(Purpose::Peer, true), (Purpose::SealedPeer, false)] {
        let ((ours, _), (theirs, address)) = (tcp_for(0, purpose).await, tcp_for(1, purpose).await);
        let _serving = theirs.serve(Echo::new(theirs.region(16 << 20).unwrap())).await.unwrap();
        let region = ours.region(16 << 20).unwrap();
        let pull = async |address| {
            let connection = ours.connect(NodeId(1), address).await.unwrap();
            let slot = region.slot_within(100_000, TIMEOUT).await.unwrap();
            let pulled = connection.pull(b"file".to_vec(), vec![slot], TIMEOUT).await;
            pulled.map(|pulled| pulled.slots[0][..100_000] == secret[..])
        };
        let (tapped, seen) = tap(address, None).await;
        assert!(pull(tapped).await.unwrap());
        let is_seen = seen.lock().unwrap().windows(64).any(|window| window == &secret[5000..5064]);
        assert_eq!(is_seen, is_plain);
        let (tapped, _) = tap(address, Some(50_000)).await;
        match pull(tapped).await {
            Ok(is_right) => assert!(is_plain && !is_right, "a plain stream can be changed"),
            Err(error) => assert!(!is_plain && error.to_string().contains("changed in transit"), "{error}"),
        }
    }
    let (sealed, _) = tcp_for(0, Purpose::SealedPeer).await;
    let sealed = Rdma::without(sealed, Preference::Auto, crate::rdma::RdmaError::Sealed);
    assert!(sealed.ability().rdma.is_err_and(|why| why.contains("--encrypt")));
}

/// Strangers that connect and stay silent cost bounded memory, and do not delay members. The test runs in a process of its own, whose
/// memory and descriptors no other test takes.
#[test]
fn ten_thousand_half_open_connections_delay_no_member() {
    const ALONE: &str = "DAYFLY_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        return runtime.block_on(ten_thousand_half_open_connections());
    }
    let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
    alone.args(["--exact", "conformance::ten_thousand_half_open_connections_delay_no_member", "--nocapture"]).env(ALONE, "1");
    let output = alone.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("strangers: "), "{text}");
}

async fn ten_thousand_half_open_connections() {
    let strangers: usize = match nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap() {
        (_, hard) if hard >= 12_000 => {
            nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE, hard, hard).unwrap();
            10_000
        }
        (_, hard) => hard as usize / 4,
    };
    let ((ours, _), (theirs, address)) = (tcp(0).await, tcp(1).await);
    let _serving = theirs.serve(Echo::new(theirs.region(1 << 20).unwrap())).await.unwrap();
    let resident = || {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    };
    let (before, mut silent, mut slowest) = (resident(), Vec::with_capacity(strangers), Duration::ZERO);
    for number in 0..strangers {
        silent.push(tokio::net::TcpStream::connect(address).await.unwrap());
        if number % (strangers / 10) == 0 {
            let start = Instant::now();
            let connection = ours.connect(NodeId(1), address).await.unwrap();
            connection.pull(b"hi".to_vec(), vec![], TIMEOUT).await.unwrap();
            slowest = slowest.max(start.elapsed());
        }
    }
    let grown = resident().saturating_sub(before);
    let _ = io::Write::write_fmt(
        &mut io::stderr(),
        format_args!("{strangers} strangers: {grown} bytes, slowest member {slowest:?}\n"),
    );
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    assert!(grown < 64 << 20, "{grown}");
}

/// Random bytes from strangers get no answer, cause no panic, and do not block the listener. The only message that gets
/// an answer is a member's first message of a handshake, recorded and sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fuzzed_handshakes_never_succeed() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let seconds = std::env::var("DAYFLY_FUZZ_SECONDS").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(0.5);
    let ((ours, _), (theirs, address)) = (tcp(0).await, tcp(1).await);
    let _serving = theirs.serve(Echo::new(theirs.region(1 << 20).unwrap())).await.unwrap();
    // A valid handshake, which is then modified at random.
    let (tapped, seen) = tap(address, None).await;
    ours.connect(NodeId(1), tapped).await.unwrap();
    let good = seen.lock().unwrap().clone();
    // The generator needs a state other than 0.
    let mut state = crate::test_seed::seed("DAYFLY_FUZZ_SEED", 1) | 1;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as usize
    };
    let (start, mut rounds) = (Instant::now(), 0);
    while start.elapsed().as_secs_f64() < seconds {
        let mut bytes = good[..1 + random() % good.len()].to_vec();
        for _ in 0..random() % 4 {
            let at = random() % bytes.len();
            match random() % 3 {
                0 => bytes[at] = random() as u8,
                1 => drop(bytes.splice(at..at, (0..random() % 300).map(|byte| byte as u8))),
                _ => bytes.truncate(at + 1),
            }
        }
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        // The listener may close the stream in the middle of this.
        let _ = stream.write_all(&bytes).await;
        let _ = stream.shutdown().await;
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut answer)).await.expect("closed in time");
        // A recorded first message is answered once, with bytes that are useless without the key.
        assert!(answer.len() < 128, "{} bytes", answer.len());
        rounds += 1;
    }
    ours.connect(NodeId(1), address).await.unwrap().pull(b"hi".to_vec(), vec![], TIMEOUT).await.unwrap();
    let _ = io::Write::write_fmt(&mut io::stderr(), format_args!("{rounds} strangers\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_conforms_when_slow() {
    let ((ours, _), (theirs, address)) = (tcp(0).await, tcp(1).await);
    let plan: FaultSchedule =
        Arc::new(|seen| (seen.number % 3 == 0).then_some(Fault::Delay(Duration::from_millis(seen.number % 7))));
    conforms(&Faulty::new(ours, plan), &theirs, address).await;
}

/// Without a card, the RDMA transport behaves as its inner transport does, with one more byte at the end of each message.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rdma_without_a_card_conforms() {
    let ((ours, _), (theirs, address)) = (tcp(0).await, tcp(1).await);
    let [ours, theirs] = [ours, theirs].map(|tcp| Rdma::new(tcp, Preference::Tcp, &Choice::default(), Deadlines::DEFAULT));
    conforms(&ours, &theirs, address).await;
    assert!(!ours.status().is_rdma && ours.status().detail == "TCP was asked for");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rdma_conforms() {
    if !crate::rdma::tests::has_card() {
        return;
    }
    let ((ours, _), (theirs, address)) = (tcp(0).await, tcp(1).await);
    let [ours, theirs] = [ours, theirs].map(|tcp| Rdma::new(tcp, Preference::Rdma, &Choice::default(), Deadlines::DEFAULT));
    conforms(&ours, &theirs, address).await;
    assert!(ours.status().is_rdma);
    // At least the bytes of the first pull with slots, and those of the offers, went over RDMA.
    crate::rdma::tests::until("they are counted", || theirs.status().written_bytes > 6 << 20).await;
    assert!(theirs.status().read_bytes > 1 << 20, "{:?}", theirs.status());
    assert_eq!((ours.status().failed, theirs.status().failed), (0, 0));
}

#[cfg(feature = "async-rdma")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn async_rdma_conforms() {
    if !crate::rdma::tests::has_card() {
        return;
    }
    let ((ours, _), (theirs, address)) = (tcp(0).await, tcp(1).await);
    let [ours, theirs] = [ours, theirs].map(|tcp| crate::async_rdma::AsyncRdma::new(tcp, &Choice::default(), Deadlines::DEFAULT));
    conforms(&ours, &theirs, address).await;
    assert!(ours.status().is_rdma, "{:?}", ours.status());
    crate::rdma::tests::until("they are counted", || theirs.status().written_bytes > 6 << 20).await;
    assert!(theirs.status().read_bytes > 1 << 20, "{:?}", theirs.status());
}

#[tokio::test]
async fn each_injected_fault_has_its_effect() {
    let ((ours, _), (theirs, address)) = (tcp(0).await, tcp(1).await);
    let _serving = theirs.serve(Echo::new(theirs.region(1 << 20).unwrap())).await.unwrap();
    let plan: FaultSchedule = Arc::new(|seen| {
        [None, Some(Fault::Refuse), Some(Fault::Lose), Some(Fault::Kill)].get(seen.number as usize).copied().flatten()
    });
    let connection = Faulty::new(ours, plan).connect(NodeId(1), address).await.unwrap();
    let mut results = Vec::new();
    for _ in 0..5 {
        results.push(connection.pull(b"hi".to_vec(), vec![], Duration::from_millis(50)).await.map(drop));
    }
    use TransportError::{Lost, Refused, Timeout};
    assert!(
        matches!(&results[..], [Ok(()), Err(Refused { .. }), Err(Timeout { .. }), Err(Lost { .. }), Err(Lost { .. })]),
        "{results:?}"
    );
    assert!(connection.is_lost());
}

/// SEMANTICS: "Peers prove the session's key to each other before any other exchange; a stranger gets
/// no byte in answer."
#[tokio::test]
async fn a_stranger_gets_no_answer() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let (theirs, address) = tcp(1).await;
    let _serving = theirs.serve(Echo::new(theirs.region(1 << 20).unwrap())).await.unwrap();
    for noise in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], &[0; 64]] {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        stream.write_all(noise).await.unwrap();
        let mut answer = Vec::new();
        // A reset, which the unread bytes cause, also counts as an end.
        let _ = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut answer)).await.expect("closed in time");
        assert!(answer.is_empty());
    }
    let (session, key, deadlines) = (SessionId([9; 8]), Arc::new(Key::new([4; 32])), Deadlines::DEFAULT);
    let identity = Identity { session, key, node: NodeId(0), purpose: Purpose::Peer, deadlines };
    let (stranger, _) = Tcp::bind(identity, "127.0.0.1:0".parse().unwrap()).await.unwrap();
    assert!(matches!(stranger.connect(NodeId(1), address).await, Err(TransportError::Lost { .. })));
}
