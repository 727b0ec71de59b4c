//! The causes that errors name, and the faults that explain them. The test fails on an error whose text matches no row of the
//! table, and on an error that no fault of the run explains.

use crate::chaos::data::Version;
use crate::chaos::schedule::{Cut, Drive, Fault, READERS, Sources, Victim};

/// The cause that an error names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Another node or its server has died or does not answer.
    NodeLost,
    /// A drive of this node, or of the node that the error names, failed.
    Drive,
    /// The server of the reader's own node does not answer.
    OwnServer,
    /// The session has ended, or the dataset was removed.
    Gone,
    /// A path does not exist, because its dataset was replaced.
    NoName,
    /// A drive is full.
    Full,
    /// Samples of a compressed tar were read again after a loss, and there was no room to keep them.
    NotKept,
    /// The stage-in was interrupted.
    Cancelled,
    /// A source of a stage-in disappeared or changed.
    Source,
    /// `cat` reports only EIO; the preload library prints the cause separately.
    Io,
    /// Another stage-in to the same target is still running.
    Busy,
    /// Fewer nodes are left than there are to be copies.
    FewNodes,
}

/// In Dayfly's messages, these words mean that a drive failed. In messages of `cat`, they stand for
/// any failed read.
const FAILED_IO: &str = "Input/output error";

/// Maps words of a message to the cause that they name. The first matching row counts.
const TABLE: &[(&str, Cause)] = &[
    ("it has no room to keep the block", Cause::NotKept),
    ("No space left on device", Cause::Full),
    ("no node has room left", Cause::Full),
    ("no room for", Cause::Full),
    ("it was deleted while it was being read", Cause::Gone),
    ("cannot write", Cause::Drive),
    ("failed to fill whole buffer", Cause::Drive),
    ("unexpected end of file", Cause::Drive),
    ("shorter than what was written to it", Cause::Drive),
    ("drive cannot be read", Cause::Drive),
    ("cannot read this node's segment", Cause::Drive),
    ("the server of this node does not answer", Cause::OwnServer),
    ("the server of node ", Cause::OwnServer),
    ("no live node", Cause::OwnServer),
    ("has no live node", Cause::OwnServer),
    ("its bytes are gone", Cause::Gone),
    ("the dataset no longer exists", Cause::Gone),
    ("the session has ended", Cause::Gone),
    ("the session was ended", Cause::Gone),
    ("is not running", Cause::Gone),
    ("no session of yours is running", Cause::Gone),
    ("you have no such session", Cause::Gone),
    ("changed while it was staged in", Cause::Source),
    ("is damaged at byte", Cause::Source),
    ("no file or directory matches", Cause::Source),
    ("cannot read '", Cause::Source),
    ("does not exist anymore", Cause::Source),
    ("canceled", Cause::Cancelled),
    ("is being staged in", Cause::Busy),
    ("needs at least", Cause::FewNodes),
    ("cannot be reached", Cause::NodeLost),
    ("is lost", Cause::NodeLost),
    ("was lost", Cause::NodeLost),
    ("did not answer within", Cause::NodeLost),
    ("has not heard from node", Cause::NodeLost),
    ("the dataset does not exist, or no longer exists", Cause::Gone),
    ("refused the request", Cause::Drive),
    ("No such file or directory", Cause::NoName),
    ("no such file or directory", Cause::NoName),
];

/// Returns the cause and the nodes that a message names.
pub(crate) fn classify(message: &str) -> Option<(Cause, Vec<u16>)> {
    let mut failed_io = message.lines().filter(|line| line.contains(FAILED_IO)).map(|line| line.contains("cat: /"));
    let of_failed_io = match failed_io.next() {
        Some(true) if failed_io.all(|is_of_cat| is_of_cat) => Some(Cause::Io),
        Some(_) => Some(Cause::Drive),
        None => None,
    };
    let in_table = || TABLE.iter().find(|(words, _)| message.contains(words)).map(|&(_, cause)| cause);
    let cause = of_failed_io.or_else(in_table)?;
    let digits = |rest: &str| rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok();
    Some((cause, message.split("node ").skip(1).filter_map(digits).collect()))
}

/// An event of the run, and the time within which it explains errors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interval {
    pub(crate) event: Event,
    pub(crate) begin_ms: u64,
    /// Includes the aftermath of the event; `None` while the event lasts.
    pub(crate) end_ms: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    Fault(Fault),
    /// A stage-in that may replace this version began.
    Replaced(Version),
    /// The machine was too busy to run this node's server.
    Starved(u16),
}

/// The process that saw an error: a command on a node, or a reader.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Observer {
    pub(crate) node: u16,
    pub(crate) reader: Option<usize>,
}

/// An error of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Observed<'a> {
    /// The operation.
    pub(crate) what: &'a str,
    /// The cause that the error names.
    pub(crate) cause: Cause,
    /// The nodes that the error names.
    pub(crate) nodes: &'a [u16],
    /// Whether the loss of other nodes is no reason for an error; see [`crate::chaos::promises`].
    pub(crate) is_promised: bool,
    /// Whether the operation may read sources; see [`crate::chaos::promises`].
    pub(crate) may_read_sources: bool,
}

/// Returns true if `event` explains why `observer` saw an error.
pub(crate) fn explains(event: Event, observed: Observed<'_>, observer: Observer) -> bool {
    let Observed { what, cause, nodes, is_promised, may_read_sources } = observed;
    let fault = match event {
        // No read of the new version may fail. A listing of all datasets may encounter a name that was just removed.
        Event::Replaced(old) => {
            let is_old = what.contains(&old.path_of_all()) || what == "list";
            return is_old && matches!(cause, Cause::Gone | Cause::NoName | Cause::Io);
        }
        Event::Starved(node) => Fault::Stop(Victim::Server(node)),
        Event::Fault(fault) => fault,
    };
    let is_of_node = |node: u16| nodes.is_empty() && observer.node == node || nodes.contains(&node);
    match fault {
        // A stopped node misses the answers of its peers, and they miss its answers.
        Fault::Stop(Victim::Server(node)) => match cause {
            Cause::NodeLost => nodes.contains(&node) && !is_promised || observer.node == node,
            // Readers wait for their server.
            Cause::OwnServer => observer.node == node && observer.reader.is_none(),
            // A stage-in ends if the node is lost on which it was requested.
            Cause::Cancelled => observer.node == node && observer.reader.is_none(),
            Cause::Io | Cause::NotKept => !is_promised || observer.node == node,
            _ => false,
        },
        Fault::KillServer(node) => is_explained_by_loss(node, observed, observer),
        Fault::Cut(cut) => cut.nodes().into_iter().any(|node| is_explained_by_loss(node, observed, observer)),
        // A server revokes the leases of a reader that does not drain its socket.
        Fault::Stop(Victim::Reader(reader)) => observer.reader == Some(reader) && matches!(cause, Cause::OwnServer | Cause::Io),
        Fault::KillReader(_) | Fault::Tune(_) => false,
        Fault::Drive(Victim::Reader(reader), _) => observer.reader == Some(reader) && matches!(cause, Cause::Drive | Cause::Io),
        Fault::Drive(Victim::Server(node), drive) => match cause {
            Cause::Io => true,
            // A sample whose copy cannot be read is read from its source, which another event of the run may have removed.
            Cause::Drive | Cause::Source => is_of_node(node),
            Cause::Full => matches!(drive, Drive::NoRoom { .. }),
            _ => false,
        },
        // Blocks that are not stored, or whose owner is lost, are read from their sources.
        Fault::Sources(node, Sources::ReadFails { .. }) => match cause {
            Cause::Io => may_read_sources,
            Cause::Drive | Cause::Source => may_read_sources && is_of_node(node),
            _ => false,
        },
        Fault::Sources(_, Sources::ReadIsSlow { .. }) => false,
        Fault::FullDrive => matches!(cause, Cause::Full),
        Fault::KillSupervisor => {
            matches!(cause, Cause::Gone | Cause::OwnServer | Cause::NodeLost | Cause::Io | Cause::NoName | Cause::Cancelled)
        }
    }
}

/// Returns true if an error is explained by the death of a node's server, or by its loss.
fn is_explained_by_loss(node: u16, observed: Observed<'_>, observer: Observer) -> bool {
    let Observed { cause, nodes, is_promised, .. } = observed;
    match cause {
        Cause::NodeLost => nodes.contains(&node) && !is_promised || observer.node == node,
        Cause::OwnServer => observer.node == node,
        Cause::FewNodes => true,
        // A server that exits on its own reports that its data is gone.
        Cause::Gone => observer.node == node || nodes.contains(&node) && !is_promised,
        // A stage-in ends if the node is lost on which it was requested.
        Cause::NoName | Cause::Cancelled => observer.node == node && observer.reader.is_none(),
        Cause::Io | Cause::NotKept => !is_promised || observer.node == node,
        _ => false,
    }
}

#[test]
fn a_message_is_classified_by_its_cause_and_its_nodes() {
    let check =
        |message: &str, cause: Cause, nodes: &[u16]| assert_eq!(classify(message), Some((cause, nodes.to_vec())), "{message}");
    check("node 2 (127.0.0.3:99) cannot be reached: it closed the connection", Cause::NodeLost, &[2]);
    check("node 1 (127.0.0.2:1) did not answer within 5000 ms", Cause::NodeLost, &[1]);
    check(
        "node 0, which coordinates the stage-in, has not heard from node 2 for 4 s, and the node is not declared lost, so it has given up",
        Cause::NodeLost,
        &[0, 2],
    );
    check("cannot read this node's segment: Input/output error", Cause::Drive, &[]);
    check("exit status: 1: cat: /dayfly/a: Input/output error", Cause::Io, &[]);
    check("exit status: 1: cat: /dayfly/a: Input/output error\ndayfly: node 1: Input/output error", Cause::Drive, &[1]);
    check("its bytes are gone: the session has ended or the dataset was replaced", Cause::Gone, &[]);
    assert_eq!(classify("something went wrong"), None);
    assert_eq!(classify(""), None);
}

#[test]
fn a_fault_of_one_node_explains_only_errors_that_concern_that_node() {
    let observer = Observer { node: 0, reader: Some(READERS - 1) };
    let explains = |event: Event, what: &str, cause: Cause, nodes: &[u16], is_promised: bool| {
        explains(event, Observed { what, cause, nodes, is_promised, may_read_sources: !is_promised }, observer)
    };
    let losses = [Fault::KillServer(2), Fault::Stop(Victim::Server(2)), Fault::Cut(Cut::Link(2))];
    for lost in losses.map(Event::Fault).into_iter().chain([Event::Starved(2)]) {
        assert!(explains(lost, "", Cause::NodeLost, &[2], false));
        assert!(!explains(lost, "", Cause::NodeLost, &[1], false));
        assert!(!explains(lost, "", Cause::Drive, &[2], false));
        assert!(!explains(lost, "", Cause::NodeLost, &[2], true), "other nodes have the samples, or can read them");
        assert!(!explains(lost, "", Cause::Io, &[], true), "other nodes have the samples, or can read them");
    }
    let drive = Event::Fault(Fault::Drive(Victim::Server(2), Drive::ReadFails { nth: 1 }));
    assert!(explains(drive, "", Cause::Drive, &[2], true));
    assert!(!explains(drive, "", Cause::NodeLost, &[2], false), "a failing drive does not make its node lost");
    let replaced = Event::Replaced(Version { tag: 1, generation: 3 });
    assert!(explains(replaced, "read /dayfly/t1/g3/7 at 9", Cause::Gone, &[], true));
    assert!(!explains(replaced, "read /dayfly/t1/g4/7 at 9", Cause::Gone, &[], true), "reads of the new version must not fail");
    let sources = Event::Fault(Fault::Sources(2, Sources::ReadFails { nth: 1 }));
    assert!(explains(sources, "", Cause::Source, &[2], false));
    assert!(!explains(sources, "", Cause::Source, &[1], false));
    assert!(!explains(sources, "", Cause::Io, &[], true), "the samples are stored on nodes that can be reached");
    assert!(!explains(Event::Fault(Fault::Tune(&[])), "", Cause::NodeLost, &[1], false));
}
