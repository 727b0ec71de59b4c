//! Tests the promises of `meta/src/deadlines.rs` with one table. For each kind of request and each fault of the far side, the table
//! has the error that the request gets, and the time after which the request gets this error. Sessions run with a fifth of the
//! default deadlines, or with the divisor in `DAYFLY_TEST_DEADLINES_DIVISOR`. A busy machine is slower, never faster, so each row
//! has a strict minimum and a generous maximum.

use std::fs;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::harness::samples::{content, path};
use crate::harness::strace::{self, Tracer};
use crate::harness::{self, Cluster, Ground, output_of, pack, signal, text, wait_until};
use dayfly_client::{Delivery, OnMissing, Samples, Session, View};
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::control::{Command, Event};
use nix::sys::signal::Signal;

const DIVISOR: u32 = 5;
const FILES: usize = 40;
/// Added to each deadline, for a busy machine and for the work before and after the wait.
const SLACK: Duration = Duration::from_secs(8);
/// The number of rows that run at once; each of them mostly waits.
const JOBS: usize = 4;
/// If this variable is set, as in `.ci/long`, all rows run. Otherwise a third of them do: the first row of each request, of each
/// fault of another node, and of each outcome.
const ALL_ROWS: &str = "DAYFLY_TEST_ALL_ROWS";

/// System calls that wait for a drive.
const DRIVE_WAITS: &str = "pread64,pwritev,pwritev2,pwrite64,fdatasync,sync_file_range";

/// A request. It goes to node 0 unless stated otherwise. Names in backquotes are the messages that it causes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ask {
    /// A process attaches: `Hello`.
    Attach,
    /// A file of node 1 is read: `Fetch`, and `Read` between servers. It comes from a compressed tar, so no other node can serve it.
    Read,
    /// Like `Read`, but the file comes from a directory, so another node can read it from there.
    ReadWithOrigin,
    /// Files of both nodes are read in one batch.
    Batch,
    /// Like `Batch`, but the files come from a directory.
    BatchWithOrigin,
    /// An order is submitted.
    Order,
    /// A client requests an unnamed file to pass to another program.
    Spill,
    /// `dayfly status`: `Control`, and `Status` between servers.
    Status,
    /// `dayfly tune`: `Tune` between servers.
    Tune,
    /// `dayfly stage-in`: `Begin`, `NextUnit`, `Ship`, `Finish`, `ReadRun`, `Prepare`, `Commit` ... between servers.
    StageIn,
    /// A stage-in that is already shipping blocks when the fault begins.
    Shipping,
    /// A stage-in requested on node 1, which forwards it to the coordinator: `StageIn`, `Follow`.
    StageInByAnother,
    /// `dayfly down`: `End`.
    Down,
}

/// A fault of the server that receives the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Far {
    /// The server is stopped and sends nothing.
    Silent,
    /// The server is dead: its connections are reset, and new ones are refused.
    Reset,
    /// One of the connections that node 0 has opened to the server is dead: 0 carries small messages, 1 and 2 carry bulk data.
    DeadFlow(u8),
    /// Its drive answers late, but before any deadline.
    Slow,
    /// Its drive does not answer.
    DriveHangs,
    /// Its drive fails.
    DriveFails,
    /// Its drive is full.
    Full,
    /// It cannot begin a stage-in.
    Refuses,
}

/// One row of the table.
struct Row {
    ask: Ask,
    /// The node whose server has the fault.
    node: u16,
    far: Far,
    /// The minimum time that the request takes, and its deadline, to which [`SLACK`] is added.
    after: fn(&Deadlines) -> (Duration, Duration),
    /// Words that the error contains; `None` if the request must succeed.
    names: Option<&'static [&'static str]>,
    /// If true, the request may also succeed, because the servers may find and repair the fault before the request is sent.
    may_work: bool,
}

const fn row(
    ask: Ask,
    node: u16,
    far: Far,
    after: fn(&Deadlines) -> (Duration, Duration),
    names: &'static [&'static str],
) -> Row {
    Row { ask, node, far, after, names: Some(names), may_work: false }
}

const fn either(
    ask: Ask,
    node: u16,
    far: Far,
    after: fn(&Deadlines) -> (Duration, Duration),
    names: &'static [&'static str],
) -> Row {
    Row { ask, node, far, after, names: Some(names), may_work: true }
}

const fn works(ask: Ask, node: u16, far: Far, after: fn(&Deadlines) -> (Duration, Duration)) -> Row {
    Row { ask, node, far, after, names: None, may_work: true }
}

impl Row {
    /// Even on a busy machine, a slow server must not be declared dead, and a dead link must be replaced before a request fails.
    /// The rows for these two faults therefore run with the full deadlines.
    fn divisor(&self) -> u32 {
        let given = std::env::var("DAYFLY_TEST_DEADLINES_DIVISOR").ok().and_then(|given| given.parse().ok());
        if matches!(self.far, Far::Slow | Far::DeadFlow(_)) { 1 } else { given.unwrap_or(DIVISOR) }
    }
}

/// The request fails at once, because nothing waits.
fn at_once(_: &Deadlines) -> (Duration, Duration) {
    (Duration::ZERO, Duration::ZERO)
}

/// The client watches its server's heartbeat in shared memory. It sends its request first, so its first look at the heartbeat may
/// come late.
fn still(deadlines: &Deadlines) -> (Duration, Duration) {
    let silence = deadlines.origin + 2 * deadlines.request;
    (silence - 2 * deadlines.heartbeat_interval, silence + deadlines.server)
}

/// Like `still`, for a command that shows something.
fn still_for_a_moment(deadlines: &Deadlines) -> (Duration, Duration) {
    (deadlines.heartbeat - 2 * deadlines.heartbeat_interval, deadlines.server)
}

/// A client that the server has not yet welcomed knows neither the session's deadlines nor the heartbeat.
fn hello(_: &Deadlines) -> (Duration, Duration) {
    still(&Deadlines::DEFAULT)
}

/// Like `hello`, for a command that shows, changes or ends something.
fn hello_of_command(_: &Deadlines) -> (Duration, Duration) {
    (Deadlines::DEFAULT.server, Deadlines::DEFAULT.server)
}

/// The peer's last byte may have arrived just before the peer fell silent, and the silence is noticed at the next check.
fn peer_lost(deadlines: &Deadlines) -> (Duration, Duration) {
    (deadlines.peer_lost - 2 * deadlines.ping_interval, deadlines.peer_lost + deadlines.request)
}

/// A reader waits for a peer until the supervisor has declared it lost.
fn lost(deadlines: &Deadlines) -> (Duration, Duration) {
    (deadlines.lost_after - 2 * deadlines.lease_interval, deadlines.lost_after + 2 * deadlines.request)
}

/// A dead connection is detected because pings still arrive on the other connections to the same peer.
fn link_silent(deadlines: &Deadlines) -> (Duration, Duration) {
    (Duration::ZERO, deadlines.link_silent + 2 * deadlines.ping_interval)
}

/// The peer is alive but makes no progress.
fn request(deadlines: &Deadlines) -> (Duration, Duration) {
    (deadlines.request, deadlines.request)
}

/// The supervisor counts the node as lost. Then the stage-in goes on without the node, or begins again. Its rate limit adds a few
/// seconds.
fn goes_on(deadlines: &Deadlines) -> (Duration, Duration) {
    (Duration::ZERO, deadlines.lost_after + deadlines.node_silent + 4 * deadlines.request + Duration::from_secs(5))
}

/// Either the first message to the node is lost, or the coordinator misses the node's reports.
fn stage_in_over_a_dead_flow(deadlines: &Deadlines) -> (Duration, Duration) {
    (Duration::ZERO, deadlines.node_silent + 4 * deadlines.request)
}

/// A hung drive looks like a slow one, so the stage-in ends only when it has made no progress for long enough.
fn stall(deadlines: &Deadlines) -> (Duration, Duration) {
    (deadlines.request, deadlines.stall + deadlines.offer + deadlines.node_silent)
}

/// Shipped blocks are written some MiB at a time, and arrive no faster than the rate limit of the row's stage-in.
fn next_write(_: &Deadlines) -> (Duration, Duration) {
    (Duration::ZERO, Duration::from_secs(10))
}

/// A slow drive takes this long.
fn slow(_: &Deadlines) -> (Duration, Duration) {
    (Duration::ZERO, Duration::from_secs(10))
}

/// SEMANTICS: "The end of a session kills a server on the same machine that has not answered for 20 s."
fn down(_: &Deadlines) -> (Duration, Duration) {
    (Duration::ZERO, dayfly_meta::limits::DOWN_TIMEOUT)
}

/// The quick rows of a request come before the ones that wait for half a minute and more, so that `.ci/run` plays the quick ones.
const TABLE: &[Row] = &[
    // The node's own server.
    row(Ask::Status, 0, Far::Silent, still_for_a_moment, &["the server of this node does not answer", "stood still"]),
    row(Ask::Attach, 0, Far::Reset, at_once, &["node 0"]),
    row(Ask::Read, 0, Far::Reset, at_once, &["the server of this node does not answer"]),
    row(Ask::Batch, 0, Far::Reset, at_once, &["the server of this node does not answer"]),
    row(Ask::Order, 0, Far::Reset, at_once, &["the server of this node does not answer"]),
    row(Ask::Spill, 0, Far::Reset, at_once, &["the server of this node does not answer"]),
    row(Ask::Attach, 0, Far::Silent, hello, &["the server of node 0 does not answer"]),
    row(Ask::Read, 0, Far::Silent, still, &["the server of this node does not answer", "stood still"]),
    row(Ask::Batch, 0, Far::Silent, still, &["the server of this node does not answer", "stood still"]),
    row(Ask::Order, 0, Far::Silent, still, &["the server of this node does not answer", "stood still"]),
    row(Ask::Spill, 0, Far::Silent, still, &["the server of this node does not answer", "stood still"]),
    // Another node.
    row(Ask::Read, 1, Far::Silent, lost, &["node 1"]),
    row(Ask::Batch, 1, Far::Silent, lost, &["node 1"]),
    works(Ask::ReadWithOrigin, 1, Far::Silent, peer_lost),
    works(Ask::BatchWithOrigin, 1, Far::Silent, peer_lost),
    row(Ask::Status, 1, Far::Silent, peer_lost, &["node 1", "does not answer"]),
    row(Ask::Tune, 1, Far::Silent, peer_lost, &["node 1"]),
    // The command attaches to its server itself.
    row(Ask::Tune, 0, Far::Silent, hello_of_command, &["the server of node 0 does not answer"]),
    works(Ask::StageIn, 1, Far::Silent, goes_on),
    works(Ask::StageInByAnother, 0, Far::Silent, goes_on),
    works(Ask::Shipping, 1, Far::Silent, goes_on),
    works(Ask::Shipping, 1, Far::Reset, goes_on),
    row(Ask::Shipping, 1, Far::DriveFails, next_write, &["node 1"]),
    works(Ask::Down, 1, Far::Silent, down),
    row(Ask::Read, 1, Far::Reset, at_once, &["node 1", "cannot be reached"]),
    row(Ask::Batch, 1, Far::Reset, at_once, &["node 1", "cannot be reached"]),
    works(Ask::ReadWithOrigin, 1, Far::Reset, at_once),
    works(Ask::BatchWithOrigin, 1, Far::Reset, at_once),
    row(Ask::Status, 1, Far::Reset, at_once, &["node 1", "does not answer"]),
    row(Ask::Tune, 1, Far::Reset, at_once, &["node 1"]),
    works(Ask::StageIn, 1, Far::Reset, goes_on),
    works(Ask::StageInByAnother, 0, Far::Reset, goes_on),
    works(Ask::Order, 1, Far::Silent, at_once),
    works(Ask::Spill, 1, Far::Silent, at_once),
    works(Ask::Attach, 1, Far::Silent, at_once),
    // One of its connections. A request that the peer may already have carried out is not sent again.
    works(Ask::Read, 1, Far::DeadFlow(0), link_silent),
    works(Ask::Read, 1, Far::DeadFlow(1), link_silent),
    works(Ask::Read, 1, Far::DeadFlow(2), link_silent),
    works(Ask::Batch, 1, Far::DeadFlow(1), link_silent),
    works(Ask::Status, 1, Far::DeadFlow(1), link_silent),
    works(Ask::Tune, 1, Far::DeadFlow(2), link_silent),
    either(Ask::Status, 1, Far::DeadFlow(0), link_silent, &["node 1", "does not answer"]),
    either(Ask::Tune, 1, Far::DeadFlow(0), link_silent, &["node 1"]),
    either(Ask::StageIn, 1, Far::DeadFlow(0), stage_in_over_a_dead_flow, &["node 1"]),
    // Its drive.
    works(Ask::Read, 1, Far::Slow, slow),
    works(Ask::Batch, 1, Far::Slow, slow),
    works(Ask::StageIn, 1, Far::Slow, slow),
    row(Ask::Read, 1, Far::DriveHangs, request, &["node 1", "did not answer within"]),
    works(Ask::ReadWithOrigin, 1, Far::DriveHangs, request),
    works(Ask::BatchWithOrigin, 1, Far::DriveHangs, request),
    works(Ask::Status, 1, Far::DriveHangs, at_once),
    row(Ask::StageIn, 1, Far::DriveHangs, stall, &["node 1"]),
    row(Ask::Shipping, 1, Far::DriveHangs, stall, &["node 1"]),
    row(Ask::Read, 1, Far::DriveFails, at_once, &["node 1", "its drive cannot be read", "Input/output error"]),
    row(Ask::Batch, 1, Far::DriveFails, at_once, &["node 1", "its drive cannot be read", "Input/output error"]),
    // The fault hits all reads of node 1, those of the source too.
    row(Ask::ReadWithOrigin, 1, Far::DriveFails, at_once, &["node 1 cannot read", "Input/output error"]),
    row(Ask::BatchWithOrigin, 1, Far::DriveFails, at_once, &["node 1 cannot read", "Input/output error"]),
    row(Ask::StageIn, 1, Far::DriveFails, at_once, &["node 1"]),
    // Space, and permission.
    row(Ask::StageIn, 1, Far::Full, at_once, &["no node has room left"]),
    row(Ask::StageIn, 1, Far::Refuses, at_once, &["node 1", "cannot begin"]),
];

fn are_all_stopped(pid: i32) -> bool {
    let stat = |task: fs::DirEntry| fs::read_to_string(task.path().join("stat")).unwrap_or_default();
    fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten().all(|task| stat(task).contains(") T "))
}

/// A session of two nodes with a dataset on both, ready for the request of a row.
struct Scene {
    cluster: Cluster,
    view: View,
    far: Vec<usize>,
}

impl Scene {
    fn new(row: &Row) -> Self {
        let ground = Ground::new();
        fs::create_dir(ground.at("d")).unwrap();
        (0..FILES).for_each(|number| fs::write(ground.at(format!("d/{number}")), content(number, 100_000)).unwrap());
        fs::create_dir(ground.at("e")).unwrap();
        (0..400).for_each(|number| fs::write(ground.at(format!("e/{number}")), content(number, 100_000)).unwrap());
        if row.far == Far::Full {
            // The size of the archive does not show how large its content is.
            fs::create_dir(ground.at("full")).unwrap();
            (0..3).for_each(|number| fs::write(ground.at(format!("full/{number}")), vec![0; 40 << 20]).unwrap());
            pack(&ground.at("full.tar.gz"), &ground.at("full"), &[]);
        }
        let divisor = row.divisor().to_string();
        let capacity = if row.far == Far::Full { "40MiB" } else { "4GiB" };
        let cluster = ground.up_with(2, &["--deadlines-divisor", &divisor, "--capacity", capacity]);
        match row.ask {
            Ask::ReadWithOrigin | Ask::BatchWithOrigin => cluster.stage(&[&cluster.at("d")], "/dayfly/d"),
            _ => cluster.stage_compressed("d", "/dayfly/d"),
        }
        let view = cluster.view(0);
        let far = harness::samples::numbers(&view, FILES, false);
        Self { cluster, view, far }
    }

    /// Starts the row's fault. Drive faults last until the returned tracer is dropped.
    fn begin(&self, row: &Row) -> Option<Tracer> {
        let pid = self.cluster.pids()[&row.node];
        let drive = |faults: &[(&str, &str)]| Some(Tracer::inject(pid, faults, self.cluster.work.path()).unwrap());
        // The page cache must look empty, because a read of a cached page never reaches the drive.
        let waits = |how: &str| drive(&[("preadv2", "error=EAGAIN"), (DRIVE_WAITS, how)]);
        match row.far {
            Far::Silent => {
                signal(pid, Signal::SIGSTOP);
                wait_until("all of its threads are stopped", || are_all_stopped(pid));
            }
            Far::Reset => self.cluster.kill(row.node),
            Far::DeadFlow(number) => self.kill_flow(row.node, number),
            Far::Slow => return waits("delay_enter=2000"),
            Far::DriveHangs => return waits("delay_enter=600000000"),
            Far::DriveFails => return drive(&[("sendfile,preadv2", "error=EIO"), (DRIVE_WAITS, "error=EIO")]),
            Far::Refuses => {
                let status = self.cluster.status();
                fs::remove_dir(status["nodes"][1]["data_dirs"][0].as_str().unwrap()).unwrap();
            }
            Far::Full => {}
        }
        None
    }

    /// Drops everything that arrives over one of the connections from node 0 to a node.
    fn kill_flow(&self, node: u16, number: u8) {
        // For some time after a server has sent offers, silence may mean that a ping waits behind the offered bytes, so a dead link
        // is found later (PROTOCOL, "Liveness"). The sessions with dead links have the full deadlines.
        std::thread::sleep(Deadlines::DEFAULT.peer_lost + Duration::from_secs(1));
        let status = self.cluster.status();
        let address = status["nodes"][usize::from(node)]["address"].as_str().unwrap().to_owned();
        let (_, port) = address.rsplit_once(':').unwrap();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/harness/flow.py");
        let arguments = [script, &self.cluster.pids()[&0].to_string(), port, &number.to_string()];
        let output = output_of(harness::program("python3").args(arguments));
        assert!(output.status.success(), "{}", text(&output.stderr));
    }

    /// Starts a slow stage-in, waits until the nodes hold some of its bytes, and returns the thread that waits for its result.
    fn ship(&self) -> std::thread::JoinHandle<Result<(), String>> {
        let before = self.cluster.used_bytes();
        let mut command = self.cluster.dayfly();
        command.args(["stage-in", "--max-rate", "10MB/s", "e", "/dayfly/e"]);
        let shipping = std::thread::spawn(move || {
            let output = output_of(&mut command);
            if output.status.success() { Ok(()) } else { Err(text(&output.stderr)) }
        });
        wait_until("batches have arrived", || self.cluster.used_bytes() > before + (4 << 20));
        shipping
    }

    /// Sends the request, and returns its error message.
    fn ask(&self, ask: Ask) -> Result<(), String> {
        let session = self.view.session();
        let command = |arguments: &[&str], node: u16| {
            let output = output_of(self.cluster.dayfly().args(arguments).env("DAYFLY_NODE", node.to_string()));
            let printed = text(&output.stdout) + &text(&output.stderr);
            if output.status.success() { Ok(()) } else { Err(printed) }
        };
        match ask {
            Ask::Attach => Session::attach_to(&self.cluster.location(), NodeId(0)).map(drop).map_err(|error| error.to_string()),
            Ask::Read | Ask::ReadWithOrigin => {
                let number = self.far[0];
                let mut buffer = vec![0; 100_000];
                let file = self.view.open(&path(number)).map_err(|error| error.to_string())?;
                self.view.read_at(&file, 0, &mut buffer).map_err(|error| error.to_string())?;
                assert!(buffer == content(number, 100_000), "wrong bytes");
                Ok(())
            }
            Ask::Batch | Ask::BatchWithOrigin => {
                let paths: Vec<Vec<u8>> = (0..FILES).map(path).collect();
                let paths: Vec<&[u8]> = paths.iter().map(Vec::as_slice).collect();
                let batch = self.view.read_many(&paths, Delivery::InOrder, OnMissing::Fail);
                let mut batch = batch.map_err(|error| error.to_string())?;
                batch.wait().map_err(|error| error.to_string())?;
                (0..FILES).for_each(|number| assert!(batch.get(number) == Some(&content(number, 100_000)[..]), "wrong bytes"));
                Ok(())
            }
            Ask::Order => {
                let dataset = harness::samples::dataset(&self.view);
                let samples = Samples::of(dataset.catalog());
                session.submit(&dataset, samples.epoch(1, 1)).map(drop).map_err(|error| error.to_string())
            }
            Ask::Spill => session.spill(1 << 20).map(drop).map_err(|error| error.to_string()),
            Ask::Status => {
                let mut failed = None;
                let asked = session.control(Command::Status, &mut |event| {
                    if let Event::Status(status) = event {
                        let silent =
                            status.nodes.iter().find_map(|entry| Some((entry.node, entry.status.as_ref().err()?.clone())));
                        failed = silent.map(|(node, reason)| format!("node {node} does not answer: {reason}"));
                    }
                });
                asked.map_err(|error| error.to_string())?;
                failed.map_or(Ok(()), Err)
            }
            Ask::Tune => command(&["tune", "--cache", "off"], 0),
            Ask::StageIn if self.cluster.at("full.tar.gz").exists() => command(&["stage-in", "full.tar.gz", "/dayfly/e"], 0),
            Ask::StageIn => command(&["stage-in", "e", "/dayfly/e"], 0),
            Ask::Shipping => unreachable!("the stage-in is already running"),
            Ask::StageInByAnother => command(&["stage-in", "e", "/dayfly/e"], 1),
            Ask::Down => command(&["down"], 0),
        }
    }
}

/// Runs a row, and returns how the outcome differs from the table.
fn play(row: &Row) -> Result<(), String> {
    let takes_strace = matches!(row.far, Far::Slow | Far::DriveHangs | Far::DriveFails);
    if takes_strace && !strace::is_possible() {
        return Ok(());
    }
    // The script `flow.py`, which makes connections dead, needs the same permissions as strace.
    if matches!(row.far, Far::DeadFlow(_)) && !(strace::is_possible() && harness::is_installed("python3")) {
        return Ok(());
    }
    let scene = Scene::new(row);
    let deadlines = Deadlines::DEFAULT.scaled(row.divisor());
    let pid = scene.cluster.pids()[&row.node];
    let shipping = (row.ask == Ask::Shipping).then(|| scene.ship());
    let tracer = scene.begin(row);
    let begin = Instant::now();
    let result = shipping.map_or_else(|| scene.ask(row.ask), |shipping| shipping.join().unwrap());
    let took = begin.elapsed();
    drop(tracer);
    if row.far == Far::Silent && row.ask != Ask::Down {
        signal(pid, Signal::SIGCONT);
    }
    let (least, deadline) = (row.after)(&deadlines);
    if took < least || took > deadline + SLACK {
        let witness = &scene.cluster.witness;
        return Err(format!("took {took:?} instead of {least:?} to {deadline:?}, {result:?}; {witness}"));
    }
    eprintln!("{:?} with node {} {:?}: {took:?}, {result:?}", row.ask, row.node, row.far);
    match (row.names, &result) {
        (_, Ok(())) if row.may_work => Ok(()),
        (Some(names), Err(error)) if names.iter().all(|name| error.contains(name)) => Ok(()),
        (names, result) => Err(format!("{result:?} after {took:?}, which should contain {names:?}; {}", scene.cluster.witness)),
    }
}

/// Returns the rows that this run plays.
fn rows() -> Vec<&'static Row> {
    let mut rows: Vec<&Row> = TABLE.iter().collect();
    if std::env::var_os(ALL_ROWS).is_none() {
        let (mut asks, mut faults) = (Vec::new(), Vec::new());
        rows.retain(|row| {
            let is_new_ask = !asks.contains(&row.ask);
            let fault = (row.far, row.names.is_some());
            let is_new_fault = row.node == 1 && !faults.contains(&fault);
            asks.extend(is_new_ask.then_some(row.ask));
            faults.extend(is_new_fault.then_some(fault));
            is_new_ask || is_new_fault
        });
    }
    rows
}

/// `meta/src/deadlines.rs` declares the deadlines.
///
/// SEMANTICS: "Nothing hangs. Every wait ends, with an answer or with an error that names the node, the object and the remedy."
/// SEMANTICS: "Commands that show, change or end something wait for 5 s only, or for 30 s if the server has not answered them before."
#[test]
fn every_kind_of_request_ends_with_its_error_at_its_deadline_whatever_the_far_side_does() {
    let rows = rows();
    let (next, wrong) = (Mutex::new(rows.iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..JOBS {
            scope.spawn(|| {
                loop {
                    let Some(row) = next.lock().unwrap().next() else { break };
                    let played =
                        std::panic::catch_unwind(|| play(row)).unwrap_or_else(|_| Err("the row panicked, see above".to_owned()));
                    if let Err(why) = played {
                        let line = format!("{:?} with node {} {:?}: {why}", row.ask, row.node, row.far);
                        eprintln!("{line}");
                        wrong.lock().unwrap().push(line);
                    }
                }
            });
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{wrong:#?}");
}
