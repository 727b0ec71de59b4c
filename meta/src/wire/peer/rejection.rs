//! Typed rejections: why a server did not do what a peer asked.

use std::error::Error;
use std::fmt;

use rkyv::{Archive, Deserialize, Serialize};

/// The answer to a request: a reply of its kind, or why the peer rejected it.
pub type Answered<T> = Result<T, Rejection>;

/// Why a server rejected a request. Programs branch on the kind; people read the reason.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// What a program needs to know.
    pub kind: RejectionKind,
    /// What failed, on which object, and why. The text does not name the rejecting node: the asker adds
    /// the node's name.
    pub reason: String,
}

/// The causes of rejections that an asker can tell apart.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectionKind {
    /// The request contradicts itself, or what its receiver knows. A retry does not help.
    Invalid,
    /// The receiver has no such dataset: it was replaced, or never existed.
    NoSuchDataset,
    /// The receiver, or a node that it depends on, takes no part in this stage-in: it has ended, or never began there.
    NoSuchStageIn,
    /// The request is for the coordinator, but its receiver is not the coordinator.
    NotCoordinator,
    /// The request came from a coordinator of an older membership epoch.
    OldEpoch,
    /// A step that must come first has not been taken.
    NotReady,
    /// The stage-in, or the wait for it, was canceled.
    Cancelled,
    /// The receiver has no memory or no permit free. A later retry may succeed.
    Busy,
    /// The receiver's drives have no room left within `--capacity`.
    NoRoom,
    /// Bytes differ from what was read from the source.
    Damaged,
    /// A drive of the receiver failed.
    DriveFailed,
    /// A source of a stage-in cannot be read, or has changed.
    SourceFailed,
    /// Another node failed. The reason names it.
    PeerFailed,
    /// Anything else, such as a panic.
    Failed,
}

impl Rejection {
    /// Creates a rejection; `reason` is for the user.
    pub fn new(kind: RejectionKind, reason: impl ToString) -> Self {
        Self { kind, reason: reason.to_string() }
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.reason)
    }
}

impl Error for Rejection {}
