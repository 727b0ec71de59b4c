//! Errors between a process and its server.

use std::io;
use std::path::PathBuf;

use dayfly_meta::catalog::CatalogError;
use dayfly_meta::id::NodeId;
use nix::libc;

use crate::privacy::NotPrivate;

/// Why a session cannot be found, attached to, or read.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// This user has no session on this machine.
    #[error("no session of yours is running on this machine; start one with 'dayfly up' or 'dayfly run'")]
    NoSession,
    /// The named session is not on this machine.
    #[error(
        "DAYFLY_SESSION is '{name}', but you have no such session on this machine{}; unset it, or name a session of yours",
        list(.running)
    )]
    Unknown {
        /// The value of `DAYFLY_SESSION`.
        name: String,
        /// The sessions that are running here.
        running: Vec<String>,
    },
    /// The named session is another user's.
    #[error("DAYFLY_SESSION is '{name}', a session of user {owner}; only that user can use or end it, so unset DAYFLY_SESSION")]
    Foreign {
        /// The value of `DAYFLY_SESSION`.
        name: String,
        /// The number of the user.
        owner: u32,
    },
    /// There are several sessions and none was named.
    #[error("you have {} sessions on this machine; name one with DAYFLY_SESSION{}", .0.len(), list(.0))]
    Ambiguous(Vec<String>),
    /// The session has no live server of the named node on this machine.
    #[error("session {session} has no live node {node} on this machine{}", list(.nodes))]
    NoNode {
        /// The session's id.
        session: String,
        /// The node that was named.
        node: String,
        /// The session's nodes on this machine.
        nodes: Vec<String>,
    },
    /// The folder of sessions belongs to another user, or others could write to it.
    #[error("{0}; to use another folder of your own, set DAYFLY_RUNTIME_DIR to its path")]
    NotPrivate(#[from] NotPrivate),
    /// This user may not look into a session's folder.
    #[error("cannot tell whether the session in '{}' is running: {error}; 'chmod 700' lets you use the folder again", folder.display())]
    Unsearchable {
        /// The folder's path.
        folder: PathBuf,
        /// The error of the operating system.
        error: io::Error,
    },
    /// A folder of sessions cannot be created or read.
    #[error("cannot use '{}' for sessions' sockets and locks: {error}; {}", folder.display(), way_out(.error))]
    Folder {
        /// The folder's path.
        folder: PathBuf,
        /// The error of the operating system.
        error: io::Error,
    },
    /// The sockets in a session's folder would have longer paths than the kernel accepts.
    #[error(
        "'{}' is too long for a session's folder: its sockets' paths would have {len} bytes, but the kernel allows 107; set DAYFLY_RUNTIME_DIR to \
         a shorter one",
        folder.display()
    )]
    LongFolder {
        /// The folder's path.
        folder: PathBuf,
        /// Length of the longest socket path in it.
        len: usize,
    },
    /// The server cannot be reached or does not answer in time.
    #[error("the server of this node does not answer: {0}")]
    Server(io::Error),
    /// This process has too little memory or too few descriptors left.
    #[error("this process cannot use the session, because it has reached a limit of its own (see 'ulimit -a'): {0}")]
    Limit(io::Error),
    /// The server of a named node cannot be reached or does not answer in time.
    #[error("the server of node {node} does not answer: {error}")]
    NodeServer {
        /// The number of the node.
        node: NodeId,
        /// The error of the connection.
        error: io::Error,
    },
    /// The server rejects the request. The text is the server's reason.
    #[error("{0}")]
    Refused(String),
    /// The node has no room for a kernel file with a copy of a file. The text is the server's reason.
    #[error("{0}")]
    NoCopy(String),
    /// The server closes the connection after the first message.
    #[error(
        "the session's server does not understand this build of dayfly (version {}), which may be newer or older; \
         use the dayfly that started the session, or end it with 'dayfly down' and start another",
        env!("CARGO_PKG_VERSION")
    )]
    OtherBuild,
    /// The server sent a message that makes no sense here.
    #[error("the server sent a message that this client does not understand: {0}")]
    Protocol(&'static str),
    /// The catalog cannot be used.
    #[error("{0}")]
    Catalog(CatalogError),
    /// A file that was requested by its path cannot be opened.
    #[error("'{path}': {reason}")]
    Path {
        /// The path as it was requested.
        path: String,
        /// Why it cannot be opened.
        reason: String,
        /// The errno that a program sees.
        errno: i32,
    },
    /// A block cannot be read from its node. The text names the node and says what to do.
    #[error("{0}")]
    Unreachable(String),
    /// This node's own segment cannot be read.
    #[error("cannot read this node's segment: {0}")]
    Segment(#[source] io::Error),
    /// The program's buffer cannot be written.
    #[error("the buffer for the bytes is not in writable memory")]
    Buffer,
    /// The program has ended the wait; see [`crate::interruption`].
    #[error("the program has interrupted the wait for the server of this node")]
    Interrupted,
    /// The session has ended or the dataset was replaced.
    #[error("its bytes are gone: the session has ended or the dataset was replaced")]
    Gone,
    /// The server revoked a view's lease before the program looked at the bytes.
    #[error("the server revoked the view's lease because other processes waited for its room; read the sample again")]
    Revoked,
    /// The bytes differ from those that were staged in, and no intact copy was found.
    #[error(
        "block {block} of '{path}' is damaged when node {node} reads it: its checksum is {found:08x}, but was {expected:08x} at stage-in"
    )]
    Checksum {
        /// The block's number in the dataset.
        block: u32,
        /// A path of the sample that contains the block.
        path: String,
        /// The node on which the block was read.
        node: u16,
        /// The checksum taken at stage-in.
        expected: u32,
        /// The checksum of the bytes that were read.
        found: u32,
    },
}

impl ClientError {
    /// Turns [`Self::Server`] into [`Self::NodeServer`], which names the node whose server does not answer.
    pub fn of_node(self, node: NodeId) -> Self {
        match self {
            Self::Server(error) => Self::NodeServer { node, error },
            error => error,
        }
    }
}

impl From<io::Error> for ClientError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::Interrupted => Self::Interrupted,
            _ if is_limit(&error) => Self::Limit(error),
            _ => Self::Server(error),
        }
    }
}

impl From<CatalogError> for ClientError {
    fn from(error: CatalogError) -> Self {
        match error {
            CatalogError::Map(error) if is_limit(&error) => Self::Limit(error),
            error => Self::Catalog(error),
        }
    }
}

/// Returns whether a call failed because this process, and not the server, has reached a limit.
fn is_limit(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EMFILE | libc::ENFILE))
}

/// Advice for a folder of sessions that cannot be used.
fn way_out(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "make room there, or set DAYFLY_RUNTIME_DIR to a folder that has room"
        }
        _ => "set DAYFLY_RUNTIME_DIR to a folder that you may write to",
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!(" (running: {})", names.join(", ")) }
}
