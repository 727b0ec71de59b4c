//! Sessions whose dataset does not fit, so that all nodes read a part of it from its origin while the parallel file system fails:
//! in the order that a test commands, or at random.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dayfly_meta::chunk::Chunk;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{BlockId, NodeId};
use dayfly_meta::limits::{
    ARENA_UNIT, CACHE_SYNC_INTERVAL, CHUNK_LEN, ORIGIN_ATTEMPTS_MAX, ORIGIN_FAILING, ORIGIN_PAUSE, ORIGIN_PAUSE_GROWTH, PAGE_SIZE,
};
use dayfly_meta::wire::control::Copies;
use dayfly_stagein::origin::SystemFiles;
use dayfly_stagein::origin::fault::{FaultyFiles, SourceCall, SourceFault};
use dayfly_transport::Agreement;
use nix::errno::Errno;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::jobs::{Jobs, Pool};
use super::net::Net;
use super::random::Random;
use super::reader::dataset;
use super::session::Session;
use super::source::{Source, scratch};
use crate::Node;
use crate::blocking::Blocking;
use crate::store::Dataset;

const NODES: u16 = 3;
/// The room of each node. All nodes together have room for about half of the dataset.
const CAPACITY: u64 = 500 << 10;
const DEADLINES: Deadlines = Deadlines::DEFAULT;
const TARGET: &[u8] = b"data";
/// Number of seeds of the test with random faults.
const SEEDS: u64 = 40;

/// What the parallel file system does with a call: it takes so long, and then suffers this fault.
type Response = (Duration, Option<SourceFault>);
type Behavior = Box<dyn FnMut(SourceCall) -> Response + Send>;

/// The parallel file system of all nodes.
struct Pfs {
    blocking: Arc<dyn Blocking>,
    behavior: Mutex<Behavior>,
    /// Each read that has begun: when, and at which offset.
    reads: Mutex<Vec<(Instant, u64)>>,
    nodes: Mutex<BTreeMap<NodeId, Arc<FaultyFiles<SystemFiles>>>>,
}

fn healthy(_: SourceCall) -> Response {
    (Duration::ZERO, None)
}

fn is_read(call: SourceCall) -> bool {
    matches!(call, SourceCall::Read { .. })
}

impl Pfs {
    fn new(blocking: Arc<dyn Blocking>) -> Arc<Self> {
        Arc::new(Self { blocking, behavior: Mutex::new(Box::new(healthy)), reads: Mutex::default(), nodes: Mutex::default() })
    }

    /// Returns the file system as a node sees it.
    fn for_node(self: &Arc<Self>, node: NodeId) -> Arc<FaultyFiles<SystemFiles>> {
        let pfs = self.clone();
        let files = Arc::new(FaultyFiles::new(SystemFiles, Arc::new(move |call| pfs.respond(call))));
        self.nodes.lock().unwrap().insert(node, files.clone());
        files
    }

    fn respond(&self, call: SourceCall) -> Option<SourceFault> {
        if let SourceCall::Read { offset, .. } = call {
            self.reads.lock().unwrap().push((Instant::now(), offset));
        }
        let (delay, fault) = (*self.behavior.lock().unwrap())(call);
        if !delay.is_zero() {
            self.blocking.wait_for(sleep(delay));
        }
        fault
    }

    fn behave(&self, behavior: impl FnMut(SourceCall) -> Response + Send + 'static) {
        *self.behavior.lock().unwrap() = Box::new(behavior);
    }

    fn heal(&self) {
        self.behave(healthy);
    }

    fn take_reads(&self) -> Vec<(Instant, u64)> {
        std::mem::take(&mut self.reads.lock().unwrap())
    }

    fn under_way_max(&self) -> usize {
        self.nodes.lock().unwrap().values().map(|files| files.under_way_max()).max().unwrap()
    }
}

/// A file of which no node stores a copy.
#[derive(Clone)]
struct Unstored {
    path: Vec<u8>,
    bytes: Vec<u8>,
    chunks: Vec<Chunk>,
    owner: NodeId,
}

/// A session that has staged in a dataset which does not fit.
struct World<'a> {
    session: &'a Session<'a>,
    servers: Vec<Arc<Node>>,
    source: &'a Source,
    pfs: Arc<Pfs>,
    unstored: Vec<Unstored>,
}

/// Runs a test in a simulated session, and checks that nothing of the session is left.
fn in_session(seed: u64, pfs_streams: usize, test: impl AsyncFnOnce(&mut World<'_>, Random)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let folders = [scratch(), scratch()];
    let lens: Vec<usize> = (0..120).map(|number| number * 3973 % 40_000 + 1).chain([300_000, 1_060_000]).collect();
    let source = Source::write(folders[0].path(), "large", &lens);
    runtime.block_on(async {
        let mut random = Random::new(seed);
        let paths = folders.each_ref().map(|folder| folder.path().display().to_string()).to_vec();
        let net = Net::new(Random::new(random.next()), DEADLINES, paths, false);
        let jobs = Jobs::new(Random::new(random.next()), Pool::default());
        let pfs = Pfs::new(jobs.clone());
        let session = Session {
            net,
            seed,
            folder: folders[1].path(),
            report: Arc::default(),
            bug: None,
            capacity: CAPACITY,
            pfs_streams,
            copies: Copies::default(),
            files: &|node| pfs.for_node(node),
        };
        let servers = session.start(NODES, &mut random, jobs.clone()).await;
        let all: Vec<_> = servers.iter().map(|server| server.address()).collect();
        servers[0].join(&all, Agreement::Tcp { why: "it is simulated".to_owned() }).await.unwrap();
        session.stage_in(&servers[0], &[&source], TARGET, std::future::pending()).await.unwrap();
        // What the stage-in has kept in memory, or moved from there to a drive, would be read from there.
        sleep(2 * CACHE_SYNC_INTERVAL).await;
        servers.iter().for_each(|server| server.parts.arena.forget(dataset(server, TARGET).unwrap().id()));
        let mut unstored = unstored(&dataset(&servers[0], TARGET).unwrap(), &source);
        unstored.retain(|file| {
            let is_local = |server: &Arc<Node>| dataset(server, TARGET).unwrap().is_local(file.chunks[0].block);
            !servers.iter().any(is_local)
        });
        assert!((60..lens.len()).contains(&unstored.len()), "{} files are not stored", unstored.len());
        let mut world = World { session: &session, servers, source: &source, pfs: pfs.clone(), unstored };
        test(&mut world, random).await;
        // The file system is healthy again, so every file can be read on every node.
        world.pfs.heal();
        sleep(2 * DEADLINES.origin).await;
        session.read_all(&world.servers, TARGET, &source.files).await;
        assert!(pfs.under_way_max() <= pfs_streams, "{} calls were under way at the same time", pfs.under_way_max());
        let World { servers, .. } = world;
        session.end(servers).await;
        assert_eq!(jobs.panics(), [""; 0]);
        assert_eq!(session.report.lock().unwrap().failure(), None);
    });
}

fn unstored(dataset: &Dataset, source: &Source) -> Vec<Unstored> {
    let catalog = dataset.catalog();
    let with_chunks = |(path, bytes): (&Vec<u8>, &Vec<u8>)| {
        let (_, blocks) = catalog.sample(catalog.find(path)?.sample()?)?;
        let block = BlockId(blocks.start);
        let chunks = Chunk::all(block, bytes.len() as u64).collect();
        let unstored = Unstored { path: path.clone(), bytes: bytes.clone(), chunks, owner: catalog.owner(block)? };
        (!catalog.is_stored(block)).then_some(unstored)
    };
    source.files.iter().filter_map(with_chunks).collect()
}

impl World<'_> {
    /// Returns a file that has not been read yet, and that one chunk holds.
    fn next(&mut self) -> Unstored {
        loop {
            let next = self.unstored.pop().expect("enough files are not stored");
            if next.chunks.len() == 1 {
                return next;
            }
        }
    }

    /// Returns the owner of a file, or the node after it.
    fn node(&self, file: &Unstored, is_owner: bool) -> &Arc<Node> {
        &self.servers[usize::from((file.owner.0 + u16::from(!is_owner)) % NODES)]
    }

    /// Reads a file. The reader compares the bytes and the time with what they must be.
    async fn read(&self, server: &Arc<Node>, file: &Unstored) -> Result<(), String> {
        let mut reader = self.session.reader(server);
        reader.limit = DEADLINES.origin + DEADLINES.request;
        reader.read(TARGET, &[(&file.path, &file.bytes)]).await.pop().map_or(Ok(()), Err)
    }

    /// Begins to read files on all nodes, one request for each file and node.
    fn read_everywhere(&self, files: &[Unstored]) -> JoinSet<Vec<String>> {
        let mut reading = JoinSet::new();
        for (server, file) in self.servers.iter().flat_map(|server| files.iter().map(move |file| (server, file.clone()))) {
            let mut reader = self.session.reader(server);
            reader.limit = DEADLINES.origin + DEADLINES.request;
            reading.spawn(async move { reader.read(TARGET, &[(&file.path, &file.bytes)]).await });
        }
        reading
    }
}

/// A behavior that lasts until the test ends it: its name, and the words of the error that readers get; `None` if they get the
/// right bytes.
type Command = (&'static str, fn() -> Behavior, Option<&'static str>);

fn commanded() -> Vec<Command> {
    fn always(is_hit: fn(SourceCall) -> bool, fault: SourceFault) -> Behavior {
        Box::new(move |call| (Duration::ZERO, is_hit(call).then_some(fault)))
    }
    fn once(fault: SourceFault) -> Behavior {
        let mut is_over = false;
        Box::new(move |call| {
            let is_hit = is_read(call) && !std::mem::replace(&mut is_over, true);
            (Duration::ZERO, is_hit.then_some(fault))
        })
    }
    fn slow(delay: Duration) -> Behavior {
        Box::new(move |call| (if is_read(call) { delay } else { Duration::ZERO }, None))
    }
    vec![
        ("one EIO", || once(SourceFault::Fail(Errno::EIO)), None),
        ("EIO", || always(is_read, SourceFault::Fail(Errno::EIO)), Some("Input/output error")),
        ("EIO of all calls", || always(|_| true, SourceFault::Fail(Errno::EIO)), Some("Input/output error")),
        ("one ESTALE", || once(SourceFault::Fail(Errno::ESTALE)), None),
        ("ESTALE", || always(is_read, SourceFault::Fail(Errno::ESTALE)), Some("Stale file handle")),
        ("ESTALE of all calls", || always(|_| true, SourceFault::Fail(Errno::ESTALE)), Some("Stale file handle")),
        ("short reads", || always(is_read, SourceFault::Short(999)), None),
        ("a stall", || slow(Duration::from_secs(10)), None),
        ("a long stall", || slow(DEADLINES.origin * 9 / 10), None),
        ("a hang", || slow(DEADLINES.origin * 3 / 2), Some("did not answer within 100 s")),
        ("an early end", || always(is_read, SourceFault::Truncated(700)), Some("ends at byte")),
        ("one early end", || once(SourceFault::Truncated(700)), None),
        ("truncation", || always(|_| true, SourceFault::Truncated(700)), Some("no longer what was staged in")),
        ("replacement", || always(|_| true, SourceFault::Replaced), Some("no longer what was staged in")),
        (
            "replacement while it is read",
            || {
                let mut was_read = false;
                Box::new(move |call| {
                    was_read |= is_read(call);
                    (Duration::ZERO, was_read.then_some(SourceFault::Replaced))
                })
            },
            Some("no longer what was staged in"),
        ),
        ("other bytes with the same times", || always(is_read, SourceFault::Replaced), Some("other bytes")),
        ("a source that is gone", || always(|_| true, SourceFault::Fail(Errno::ENOENT)), Some("does not exist anymore")),
    ]
}

#[test]
fn each_fault_of_the_file_system_gives_the_right_bytes_or_a_clear_error_and_does_not_last() {
    in_session(1, 4, async |world, _| {
        for (what, behavior, error) in commanded() {
            for is_owner in [true, false] {
                let file = world.next();
                world.pfs.behave(behavior());
                let read = world.read(world.node(&file, is_owner), &file).await;
                match (read, error) {
                    (Ok(()), None) => {}
                    (Err(message), Some(words)) => {
                        assert!(message.contains(words) && message.contains("large.tar"), "{what}: {message}");
                    }
                    (read, _) => panic!("{what}, on the owner: {is_owner}: {read:?}"),
                }
                world.pfs.heal();
                assert_eq!(world.read(world.node(&file, is_owner), &file).await, Ok(()), "after {what}");
            }
        }
    });
}

#[test]
fn a_read_that_fails_is_repeated_a_few_times_after_longer_and_longer_pauses() {
    in_session(2, 4, async |world, _| {
        for is_owner in [true, false] {
            // A node that has failed to read the source just now would not repeat the read.
            sleep(ORIGIN_FAILING).await;
            let file = world.next();
            world.pfs.behave(|call| (Duration::ZERO, is_read(call).then_some(SourceFault::Fail(Errno::EIO))));
            world.pfs.take_reads();
            world.read(world.node(&file, is_owner), &file).await.unwrap_err();
            let reads = world.pfs.take_reads();
            assert_eq!(reads.len(), ORIGIN_ATTEMPTS_MAX as usize, "on the owner: {is_owner}");
            let pauses: Vec<Duration> = reads.windows(2).map(|pair| pair[1].0 - pair[0].0).collect();
            let mut least = ORIGIN_PAUSE;
            for pause in &pauses {
                // A job may begin a few milliseconds late.
                assert!(*pause >= least && *pause < least + Duration::from_millis(20), "{pauses:?}");
                least *= ORIGIN_PAUSE_GROWTH;
            }
        }
    });
}

/// The number includes reads that nobody waits for any more.
#[test]
fn a_file_system_that_hangs_gets_no_more_reads_than_the_user_allows_and_all_readers_end_at_the_deadline() {
    for pfs_streams in [1, 2, 5] {
        in_session(3, pfs_streams, async |world, _| {
            // Far longer than the deadline of the readers.
            let end = Instant::now() + 5 * DEADLINES.origin;
            world.pfs.behave(move |_| (end.saturating_duration_since(Instant::now()), None));
            let files = world.unstored.clone();
            for _ in 0..3 {
                let mut reading = world.read_everywhere(&files);
                while let Some(failed) = reading.join_next().await {
                    let failed = failed.unwrap();
                    assert!(failed.len() == 1 && failed[0].contains("did not answer within 100 s"), "{failed:?}");
                }
            }
            // All files are in one source, which cannot have all streams.
            assert_eq!(world.pfs.under_way_max(), (pfs_streams - 1).max(1));
            let calls: usize = world.pfs.nodes.lock().unwrap().values().map(|files| files.take_calls().len()).sum();
            assert!(calls <= usize::from(NODES) * pfs_streams, "{calls} calls");
            sleep(end.saturating_duration_since(Instant::now())).await;
            let mut reading = world.read_everywhere(&files);
            while let Some(failed) = reading.join_next().await {
                assert_eq!(failed.unwrap(), [""; 0], "the file system answers again");
            }
        });
    }
}

#[test]
fn readers_of_one_block_share_one_read_of_its_origin() {
    in_session(4, 4, async |world, _| {
        for delay in [Duration::from_millis(1), DEADLINES.request / 4, Duration::from_secs(10), DEADLINES.origin / 2] {
            let file = world.next();
            world.pfs.behave(move |call| (if is_read(call) { delay } else { Duration::ZERO }, None));
            world.pfs.take_reads();
            let mut reading = world.read_everywhere(&vec![file; 8]);
            while let Some(failed) = reading.join_next().await {
                assert_eq!(failed.unwrap(), [""; 0]);
            }
            assert_eq!(world.pfs.take_reads().len(), 1, "{delay:?}");
        }
    });
}

#[test]
fn a_reader_that_goes_away_does_not_cause_a_second_read() {
    in_session(5, 4, async |world, _| {
        for is_owner in [true, false] {
            for stays in [Duration::ZERO, Duration::from_millis(100), Duration::from_secs(3)] {
                let file = world.next();
                world.pfs.behave(|call| (if is_read(call) { Duration::from_secs(10) } else { Duration::ZERO }, None));
                world.pfs.take_reads();
                for _ in 0..3 {
                    let gone = timeout(stays, world.read(world.node(&file, is_owner), &file)).await;
                    assert!(gone.is_err());
                }
                assert_eq!(world.read(world.node(&file, is_owner), &file).await, Ok(()));
                assert_eq!(world.pfs.take_reads().len(), 1, "on the owner: {is_owner}, after {stays:?}");
            }
        }
    });
}

/// The owner then reads for its peers without its arena, and cannot keep the bytes there until the peer asks again.
#[test]
fn a_slow_file_system_and_an_owner_without_room_in_its_arena_do_not_fail_a_peers_read() {
    in_session(6, 4, async |world, _| {
        for delay in [Duration::ZERO, DEADLINES.request, Duration::from_secs(10), DEADLINES.origin * 9 / 10] {
            let file = world.next();
            let owner = world.node(&file, true).clone();
            let mut taken = Vec::new();
            for len in [CHUNK_LEN, PAGE_SIZE, ARENA_UNIT] {
                while let Some(slot) = owner.parts.arena.slot_within(len, Duration::from_millis(1)).await {
                    taken.push(slot);
                }
            }
            world.pfs.behave(move |call| (if is_read(call) { delay } else { Duration::ZERO }, None));
            world.pfs.take_reads();
            let mut reading = JoinSet::new();
            for number in (0..NODES).filter(|number| NodeId(*number) != file.owner) {
                let mut reader = world.session.reader(&world.servers[usize::from(number)]);
                reader.limit = DEADLINES.origin + DEADLINES.request;
                let file = file.clone();
                reading.spawn(async move { reader.read(TARGET, &[(&file.path, &file.bytes)]).await });
            }
            while let Some(failed) = reading.join_next().await {
                assert_eq!(failed.unwrap(), [""; 0], "{delay:?}");
            }
            // The two peers need not ask at the same time.
            let reads = world.pfs.take_reads().len();
            assert!(reads == 1 || reads == 2 && delay < DEADLINES.request, "{reads} reads that take {delay:?}");
            drop(taken);
        }
    });
}

/// Each seed draws how often the file system fails and in which ways, and who reads what when.
#[test]
fn random_faults_of_the_file_system_never_give_other_bytes_and_do_not_last() {
    for seed in 0..SEEDS {
        let streams = 1 + Random::new(seed).below(6) as usize;
        in_session(1000 + seed, streams, async |world, mut random| {
            let mut drawn = Random::new(random.next());
            let one_in = 1 + drawn.below(12);
            world.pfs.behave(move |call| {
                if !drawn.is_one_in(one_in) {
                    return (drawn.log_duration(Duration::from_micros(10), Duration::from_millis(100)), None);
                }
                let stall = if drawn.is_one_in(4) { Duration::from_secs(10) } else { Duration::ZERO };
                let fault = match drawn.below(8) {
                    0 | 1 => Some(SourceFault::Fail(Errno::EIO)),
                    2 | 3 => Some(SourceFault::Fail(Errno::ESTALE)),
                    4 if is_read(call) => Some(SourceFault::Short(1 + drawn.below(5000) as usize)),
                    5 => Some(SourceFault::Truncated(drawn.below(1 << 20))),
                    6 => Some(SourceFault::Replaced),
                    _ => None,
                };
                (stall, fault)
            });
            let mut reading = JoinSet::new();
            for _ in 0..12 {
                let mut reader = world.session.reader(random.pick(&world.servers));
                let all: Vec<_> = world.source.files.iter().map(|(path, bytes)| (path.clone(), bytes.clone())).collect();
                let mut random = Random::new(random.next());
                reading.spawn(async move {
                    let mut failed = Vec::new();
                    for _ in 0..10 {
                        sleep(random.log_duration(Duration::from_millis(1), Duration::from_secs(3))).await;
                        let files: Vec<_> = (0..1 + random.below(6)).map(|_| random.pick(&all)).collect();
                        let files: Vec<_> = files.iter().map(|(path, bytes)| (&path[..], &bytes[..])).collect();
                        // The deadline begins again when some of the chunks have arrived.
                        reader.limit = (DEADLINES.origin + DEADLINES.request) * files.len() as u32;
                        let patience = random.log_duration(Duration::from_millis(1), Duration::from_secs(3000));
                        failed.extend(timeout(patience, reader.read(TARGET, &files)).await.unwrap_or_default());
                    }
                    failed
                });
            }
            let mut failures = 0;
            while let Some(failed) = reading.join_next().await {
                for message in failed.unwrap() {
                    assert!(message.contains("large.tar"), "seed {seed}: {message}");
                    failures += 1;
                }
            }
            eprintln!("seed {seed}: {streams} streams, one call in {one_in} fails, {failures} reads failed");
        });
    }
}
