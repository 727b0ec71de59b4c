//! Nodes that return to a session whose datasets have changed while they were lost. The network is healthy, and the test says who is
//! a member and when.

use std::sync::Arc;
use std::time::Duration;

use dayfly_meta::catalog::StoredBlock;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{DatasetId, NodeId};
use dayfly_meta::roster::{RosterChange, RosterMember};
use dayfly_meta::wire::control::{Copies, StageInRequest};
use dayfly_stagein::origin::SystemFiles;
use dayfly_transport::Agreement;
use tokio::time::{Instant, sleep, timeout};

use super::jobs::{Jobs, Pool};
use super::net::Net;
use super::random::Random;
use super::reader::dataset;
use super::session::Session;
use super::source::{Source, scratch};
use crate::Node;
use crate::store::testing::dataset_at;

const NODES: u16 = 3;
/// The node that is lost and returns.
const RETURNING: NodeId = NodeId(2);
/// A node that stands still.
const STOPPED: NodeId = NodeId(1);
const TARGET: &[u8] = b"data";
const DEADLINES: Deadlines = Deadlines::DEFAULT;

/// A session without datasets.
struct World<'a> {
    session: &'a Session<'a>,
    servers: Vec<Arc<Node>>,
    source: &'a Source,
    epoch: u32,
}

/// Runs a test in a simulated session, and checks that nothing of the session is left.
fn in_session(test: impl AsyncFnOnce(&mut World<'_>)) {
    in_session_with(&(0..24).map(|number| number * 397).collect::<Vec<_>>(), test);
}

/// Runs a test with a source whose files have these lengths.
fn in_session_with(lens: &[usize], test: impl AsyncFnOnce(&mut World<'_>)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let folders = [scratch(), scratch()];
    let source = Source::write(folders[0].path(), "small", lens);
    runtime.block_on(async {
        let mut random = Random::new(1);
        let paths = folders.each_ref().map(|folder| folder.path().display().to_string()).to_vec();
        let net = Net::new(Random::new(random.next()), DEADLINES, paths, false);
        let jobs = Jobs::new(Random::new(random.next()), Pool::default());
        let session = Session {
            net,
            seed: 1,
            folder: folders[1].path(),
            report: Arc::default(),
            bug: None,
            capacity: 16 << 20,
            pfs_streams: 4,
            copies: Copies::default(),
            files: &|_| Arc::new(SystemFiles),
        };
        let servers = session.start(NODES, &mut random, jobs.clone()).await;
        let all: Vec<_> = servers.iter().map(|server| server.address()).collect();
        servers[0].join(&all, Agreement::Tcp { why: "it is simulated".to_owned() }).await.unwrap();
        let mut world = World { session: &session, servers, source: &source, epoch: 0 };
        test(&mut world).await;
        let World { servers, .. } = world;
        session.end(servers).await;
        assert_eq!(jobs.panics(), [""; 0]);
        assert_eq!(session.report.lock().unwrap().failure(), None);
    });
}

impl World<'_> {
    fn returning(&self) -> &Arc<Node> {
        &self.servers[RETURNING.index()]
    }

    /// Returns the dataset that a node shows.
    fn shown(&self, node: NodeId) -> Option<DatasetId> {
        dataset(&self.servers[node.index()], TARGET).map(|dataset| dataset.id())
    }

    /// Tells all nodes that the returning node is lost, or that it is a member again.
    fn announce(&mut self, is_lost: bool) {
        self.epoch += 1;
        let member = RosterMember { address: self.returning().address(), incarnation: u32::from(!is_lost), is_lost };
        let change = RosterChange { epoch: self.epoch, coordinator: 0, members: vec![(RETURNING.0, member)] };
        for server in &self.servers {
            server.change_roster(&change);
        }
    }

    /// Stages in a dataset on all members, in place of the one before.
    async fn stage(&self) {
        let request = StageInRequest { replace: true, ..self.session.request(&[self.source], TARGET) };
        self.session.stage_in_as(&self.servers[0], request, std::future::pending()).await.unwrap();
    }

    /// Stages in a dataset. Then the returning node is lost, and a server without datasets is in its place.
    async fn lose_server(&mut self) {
        self.stage().await;
        self.announce(true);
        let parts = &self.returning().parts;
        for dataset in parts.store.datasets() {
            parts.store.hide(dataset.id());
            parts.arena.forget(dataset.id());
            dataset.set_gone(true);
            dataset.free();
        }
        self.servers.iter().for_each(|server| self.session.net.reset(RETURNING, server.parts.config.node));
    }

    /// Lets the node catch up, although its messages to the coordinator and back take a second each. Returns whether it shows a
    /// dataset all the time.
    async fn catch_up_slowly(&self) -> bool {
        let slow_down = |slow| self.session.net.change_link(NodeId(0), RETURNING, |link| link.slow = slow);
        slow_down(Duration::from_secs(1));
        let catching_up = tokio::spawn({
            let server = self.returning().clone();
            async move { server.catch_up().await }
        });
        let mut is_always_shown = true;
        while !catching_up.is_finished() {
            is_always_shown &= self.shown(RETURNING).is_some();
            sleep(Duration::from_millis(10)).await;
        }
        slow_down(Duration::ZERO);
        catching_up.await.unwrap().unwrap();
        is_always_shown
    }

    /// Reads all files on all nodes.
    async fn read_all(&self) {
        self.session.read_all(&self.servers, TARGET, &self.source.files).await;
    }
}

/// SEMANTICS: "The paths of a dataset that was replaced are never absent on its node, unless the drives have no room for both
/// catalogs."
#[test]
fn a_dataset_that_was_replaced_meanwhile_is_never_absent_on_a_node_that_returns() {
    for is_full in [false, true] {
        in_session(async |world| {
            world.stage().await;
            world.announce(true);
            world.stage().await;
            let (old, new) = (world.shown(RETURNING).unwrap(), world.shown(NodeId(0)).unwrap());
            assert_ne!(old, new);
            let old = Arc::downgrade(&dataset(world.returning(), TARGET).unwrap());
            let drive = world.returning().parts.store.drives()[0].clone();
            let held = is_full.then(|| drive.reserve(drive.free()).unwrap());
            let is_always_shown = world.catch_up_slowly().await;
            assert!(is_always_shown || is_full);
            assert_eq!(world.shown(RETURNING), Some(new));
            assert!(old.upgrade().is_none_or(|old| old.is_gone()), "the room of the old dataset is free");
            drop(held);
            world.announce(false);
            assert!(world.returning().catch_up_again().await);
            world.read_all().await;
        });
    }
}

#[test]
fn a_dataset_that_a_returning_node_has_just_replaced_does_not_come_back() {
    in_session(async |world| {
        // The node returns before it has heard of a dataset that appeared while it was lost.
        world.announce(true);
        world.stage().await;
        world.announce(false);
        let (server, older) = (world.returning().clone(), world.shown(NodeId(0)).unwrap());
        let catching_up = tokio::spawn({
            let server = server.clone();
            async move { server.catch_up_again().await }
        });
        let asks = timeout(DEADLINES.lost_after, world.session.net.trap("DatasetCatalog", 1)).await.unwrap();
        assert_eq!(asks, Some(RETURNING));
        // While the catalog is on its way, a stage-in in which the node takes part replaces that dataset.
        let id = DatasetId(older.0 + 1);
        let block = |arrival| StoredBlock { owner: NodeId(1), arrival };
        let newer = Arc::new(dataset_at((id, TARGET), NODES.into(), server.parts.store.drives(), &[vec![1; 100]], block));
        server.parts.store.show(newer.clone(), None);
        sleep(5 * DEADLINES.progress_interval).await;
        assert_eq!(world.shown(RETURNING), Some(id));
        assert!(!newer.is_gone(), "its blocks are not freed");
        assert!(!catching_up.is_finished(), "the stage-in may still fail");
        // The stage-in fails on another node.
        server.parts.store.hide(id);
        drop(newer);
        assert!(timeout(Duration::from_secs(10), catching_up).await.unwrap().unwrap());
        assert_eq!(world.shown(RETURNING), Some(older));
        world.read_all().await;
    });
}

/// Bytes for which each node makes several requests of another.
const LARGE: [usize; 60] = [100_000; 60];

/// Reads files on node 0, so many at a time. No read may take long.
async fn read_quickly(world: &World<'_>, count: usize) {
    let reader = world.session.reader(&world.servers[0]);
    let files: Vec<(&[u8], &[u8])> = world.source.files.iter().map(|(path, expected)| (&path[..], &expected[..])).collect();
    for files in files.chunks(count) {
        let start = Instant::now();
        assert_eq!(reader.read(TARGET, files).await, [""; 0]);
        assert!(start.elapsed() < DEADLINES.request / 4, "a read took {:?}", start.elapsed());
    }
}

/// A node that took over blocks of a lost one may stand still when a new server comes in its place.
#[test]
fn readers_do_not_wait_while_a_new_server_asks_a_node_that_stands_still() {
    in_session_with(&LARGE, async |world| {
        world.lose_server().await;
        world.session.net.change_node(STOPPED, |health| health.is_frozen = true);
        world.returning().catch_up().await.unwrap();
        // The reader's node knows that that node stands still; the new server does not.
        world.servers[0].parts.peers.suspect(STOPPED);
        world.announce(false);
        read_quickly(world, 1).await;
        world.session.net.change_node(STOPPED, |health| health.is_frozen = false);
    });
}

/// A new server asks others for blocks that they may have read in its place, and they ask it for the same ones.
#[test]
fn a_new_server_and_those_who_read_from_it_do_not_wait_for_each_other() {
    in_session_with(&LARGE, async |world| {
        world.lose_server().await;
        world.returning().catch_up().await.unwrap();
        // So it asks node 0 also for the blocks that that node has not read.
        world.returning().parts.peers.suspect(NodeId(1));
        world.announce(false);
        read_quickly(world, LARGE.len()).await;
    });
}
