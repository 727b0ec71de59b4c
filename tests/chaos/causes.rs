//! What an error may say, and what explains that it is said. An error whose words are in no row is a failure, and so is one that no
//! fault of the run explains.

use crate::data::Version;
use crate::schedule::{Drive, Fault, READERS, Victim};

/// What an error names as its cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// Another node, or its server, is gone or silent.
    NodeLost,
    /// A drive, of this node or of the one that is named.
    Drive,
    /// The server of the reader's own node.
    OwnServer,
    /// The session, or the dataset, is no more.
    Gone,
    /// A path of a dataset that was replaced.
    NoName,
    /// No room.
    Full,
    /// It was interrupted.
    Cancelled,
    /// A source of a stage-in has gone or changed.
    Source,
    /// `cat` knows nothing but EIO; the library's line beside it names the cause.
    Io,
    /// Another stage-in has not ended.
    Busy,
}

/// By words of the message, the first row that matches.
const TABLE: &[(&str, Cause)] = &[
    ("Input/output error (os error 5)", Cause::Drive),
    ("Input/output error", Cause::Io),
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
    ("no live node", Cause::OwnServer),
    ("has no node", Cause::OwnServer),
    ("its bytes are gone", Cause::Gone),
    ("the dataset is not there any more", Cause::Gone),
    ("the session has ended", Cause::Gone),
    ("the session was ended", Cause::Gone),
    ("is not running", Cause::Gone),
    ("no session of yours is running", Cause::Gone),
    ("changed while it was staged in", Cause::Source),
    ("is damaged at byte", Cause::Source),
    ("no file or directory matches", Cause::Source),
    ("cannot read '", Cause::Source),
    ("cancelled", Cause::Cancelled),
    ("is being staged in", Cause::Busy),
    ("is lost", Cause::NodeLost),
    ("was lost", Cause::NodeLost),
    ("did not answer within", Cause::NodeLost),
    ("not there (any more)", Cause::Gone),
    ("refuses", Cause::Drive),
    ("No such file or directory", Cause::NoName),
    ("no such file or directory", Cause::NoName),
];

/// The cause that a message names, and the nodes that it names.
pub(crate) fn classify(message: &str) -> Option<(Cause, Vec<u16>)> {
    let cause = TABLE.iter().find(|(words, _)| message.contains(words)).map(|&(_, cause)| cause)?;
    let digits = |rest: &str| rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok();
    Some((cause, message.split("node ").skip(1).filter_map(digits).collect()))
}

/// Something that was done, and the time from which to which it explains errors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interval {
    pub(crate) event: Event,
    pub(crate) begin_ms: u64,
    /// With what comes after it; none while it lasts.
    pub(crate) end_ms: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    Fault(Fault),
    /// This version was, perhaps, replaced.
    Replaced(Version),
}

/// Who met an error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Who {
    pub(crate) node: u16,
    pub(crate) reader: Option<usize>,
}

/// Whether a fault explains an error that names this cause, and perhaps nodes, met by a reader or a command of a node in what it did.
pub(crate) fn explains(event: Event, what: &str, cause: Cause, nodes: &[u16], who: Who) -> bool {
    let fault = match event {
        // Of the version that takes its place nothing may fail. A walk over all may meet a name that is gone.
        Event::Replaced(old) => {
            let is_old = what.contains(&old.path_of_all()) || what == "list";
            return is_old && matches!(cause, Cause::Gone | Cause::NoName | Cause::Io);
        }
        Event::Fault(fault) => fault,
    };
    match fault {
        // A node that stands still loses its peers' answers, and they its.
        Fault::Stop(Victim::Server(node)) => match cause {
            Cause::NodeLost => nodes.contains(&node) || who.node == node,
            Cause::OwnServer => who.node == node,
            Cause::Io => true,
            _ => false,
        },
        Fault::KillServer(node) => match cause {
            Cause::NodeLost => nodes.contains(&node) || who.node == node,
            Cause::OwnServer => who.node == node,
            // One that ends by itself says that it has given everything up.
            Cause::Gone => who.node == node || nodes.contains(&node),
            Cause::NoName => who.node == node && who.reader.is_none(),
            Cause::Io => true,
            _ => false,
        },
        // A reader that does not take what it is sent is given up by its server.
        Fault::Stop(Victim::Reader(reader)) => who.reader == Some(reader) && matches!(cause, Cause::OwnServer | Cause::Io),
        Fault::KillReader(_) | Fault::Tune(_) => false,
        Fault::Drive(Victim::Reader(reader), _) => who.reader == Some(reader) && matches!(cause, Cause::Drive | Cause::Io),
        Fault::Drive(Victim::Server(node), drive) => match cause {
            Cause::Io => true,
            Cause::Drive => nodes.is_empty() && who.node == node || nodes.contains(&node),
            Cause::Full => matches!(drive, Drive::NoRoom { .. }),
            _ => false,
        },
        Fault::FullDrive => matches!(cause, Cause::Full),
        Fault::KillSupervisor => {
            matches!(cause, Cause::Gone | Cause::OwnServer | Cause::NodeLost | Cause::Io | Cause::NoName | Cause::Cancelled)
        }
    }
}

#[test]
fn a_message_tells_its_cause_and_its_nodes() {
    let check =
        |message: &str, cause: Cause, nodes: &[u16]| assert_eq!(classify(message), Some((cause, nodes.to_vec())), "{message}");
    check("node 2 (127.0.0.3:99) is lost: it closed the connection", Cause::NodeLost, &[2]);
    check("node 1 (127.0.0.2:1) did not answer within 5000 ms", Cause::NodeLost, &[1]);
    check("cannot read this node's segment: Input/output error (os error 5)", Cause::Drive, &[]);
    check("its bytes are gone: the session has ended or the dataset was replaced", Cause::Gone, &[]);
    assert_eq!(classify("something went wrong"), None);
    assert_eq!(classify(""), None);
}

#[test]
fn only_what_was_done_to_a_node_explains_errors_about_it() {
    let who = Who { node: 0, reader: Some(READERS - 1) };
    let killed = Event::Fault(Fault::KillServer(2));
    assert!(explains(killed, "", Cause::NodeLost, &[2], who));
    assert!(!explains(killed, "", Cause::NodeLost, &[1], who));
    assert!(!explains(killed, "", Cause::Drive, &[2], who));
    let drive = Event::Fault(Fault::Drive(Victim::Server(2), Drive::ReadFails { nth: 1 }));
    assert!(explains(drive, "", Cause::Drive, &[2], who));
    assert!(!explains(drive, "", Cause::NodeLost, &[2], who), "a drive that fails is no node that is lost");
    let replaced = Event::Replaced(Version { tag: 1, generation: 3 });
    assert!(explains(replaced, "read /dayfly/t1/g3/7 at 9", Cause::Gone, &[], who));
    assert!(!explains(replaced, "read /dayfly/t1/g4/7 at 9", Cause::Gone, &[], who), "the new one");
    assert!(!explains(Event::Fault(Fault::Tune(&[])), "", Cause::NodeLost, &[1], who));
}
