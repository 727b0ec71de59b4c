//! What can go wrong between a process and its server.

use std::io;
use std::path::PathBuf;

use crate::privacy::NotPrivate;

/// Why a session cannot be found, attached to or read.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// This user has no session on this machine.
    #[error("no session of yours is running on this machine; start one with 'dayfly up' or 'dayfly run'")]
    NoSession,
    /// The session that was named is not there.
    #[error("session {name} is not running on this machine{}", list(.running))]
    Unknown {
        /// As named, by `DAYFLY_SESSION` mostly.
        name: String,
        /// Those that are.
        running: Vec<String>,
    },
    /// More than one session, and none was named.
    #[error("you have {} sessions on this machine; say which one by DAYFLY_SESSION{}", .0.len(), list(.0))]
    Ambiguous(Vec<String>),
    /// The session has no such node here.
    #[error("session {session} has no node {node} on this machine{}", list(.nodes))]
    NoNode {
        /// Which session.
        session: String,
        /// Which node was wanted.
        node: String,
        /// Those that are here.
        nodes: Vec<String>,
    },
    /// The folder of sessions belongs to somebody else, or others could write to it.
    #[error("{0}; else set DAYFLY_RUNTIME_DIR to a folder of your own")]
    NotPrivate(#[from] NotPrivate),
    /// A folder of sessions cannot be made or read.
    #[error("cannot use '{}' for sessions' sockets and locks: {error}; {}", folder.display(), way_out(.error))]
    Folder {
        /// Which.
        folder: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// Sockets in a session's folder would have names that the kernel does not take.
    #[error(
        "'{}' is too long for a session's folder: its sockets' paths would have {len} bytes, and 107 is the most; set DAYFLY_RUNTIME_DIR to \
         a shorter one",
        folder.display()
    )]
    LongFolder {
        /// Which.
        folder: PathBuf,
        /// Of the longest path in it.
        len: usize,
    },
    /// The server cannot be reached, or does not answer in time.
    #[error("the server of this node does not answer: {0}")]
    Server(#[from] io::Error),
    /// The server will not.
    #[error("{0}")]
    Refused(String),
    /// The server ends the conversation at the first word.
    #[error(
        "the session's server does not understand this dayfly (version {}), perhaps because it was built since; \
         use the dayfly that started the session, or end it by 'dayfly down' and start again",
        env!("CARGO_PKG_VERSION")
    )]
    OtherBuild,
    /// What the server sent cannot be understood.
    #[error("the server sent what this client does not understand: {0}")]
    Protocol(&'static str),
    /// The catalog cannot be used.
    #[error("{0}")]
    Catalog(#[from] dayfly_meta::catalog::CatalogError),
    /// What was asked for by its path cannot be opened.
    #[error("'{path}': {reason}")]
    Path {
        /// The path.
        path: String,
        /// Why not.
        reason: String,
        /// The errno that a program sees.
        errno: i32,
    },
    /// A block cannot be had from its node.
    #[error("{0}")]
    Unreachable(String),
    /// The node's own segment cannot be read.
    #[error("cannot read this node's segment: {0}")]
    Segment(#[source] io::Error),
    /// The session has ended, or the dataset was replaced.
    #[error("its bytes are gone: the session has ended or the dataset was replaced")]
    Gone,
    /// A view's lease ended before its bytes were looked at.
    #[error("the server took the view's lease back, because others waited for its room; read it again")]
    Revoked,
    /// The bytes are not those that were staged in.
    #[error(
        "block {block} of '{path}' is damaged as node {node} reads it: its checksum is {found:08x}, at stage-in it was {expected:08x}"
    )]
    Checksum {
        /// Which block of the dataset.
        block: u32,
        /// A sample that it is a piece of.
        path: String,
        /// The node on which it was read.
        node: u16,
        /// Taken at stage-in.
        expected: u32,
        /// Of what was read.
        found: u32,
    },
}

/// What to do about a folder of sessions that cannot be used.
fn way_out(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "make room there, or set DAYFLY_RUNTIME_DIR to a folder with some"
        }
        _ => "set DAYFLY_RUNTIME_DIR to a folder that you may write to",
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!(" (running: {})", names.join(", ")) }
}
