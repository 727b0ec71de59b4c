//! A process's side of a session: attach to the node's server, look up, read. Blocking, without threads or a runtime of
//! its own, and usable in a forked child.
//!
//! Lookups are reads of mapped memory. A block that the node holds is one `pread` of its segment; only what is not here
//! is asked of the server. [`View`] gives all this the meaning that POSIX programs expect.

mod arena;
mod attach;
mod batch;
mod dataset;
mod error;
pub mod fault;
mod fetch;
pub mod fork;
mod heartbeat;
pub mod locate;
mod order;
mod pool;
mod privacy;
mod read;
pub mod reserved_fd;
mod segment_map;
mod socket;
mod verify;
mod view;

pub use attach::{Datasets, Order, Session};
pub use batch::{Batch, Delivered, Delivery, OnMissing};
pub use dataset::Dataset;
pub use error::ClientError;
pub use order::Samples;
pub use read::BlockData;
pub use view::{Directory, DirectoryEntry, FileKind, OpenFile, Opened, Stat, View, ViewError};
