//! The client library of Dayfly: attaches a process to this node's server, looks up names, and
//! reads samples.
//!
//! The library blocks, starts no threads, and needs no runtime. It works in programs with many threads and in forked children,
//! each of which must call [`Session::after_fork`]. Lookups read mapped memory. Reading a block that is on this node takes at most
//! one `pread`. Only a block that is neither on this node's drives nor in the arena requires a message to the server.
//!
//! - [`locate`] finds the sessions on this machine, [`Session`] attaches to one.
//! - [`View`] is the namespace with the meaning that POSIX programs expect; the command line and the preload library are
//!   built on it.
//! - [`Session::read_many`] reads many samples with one message and lends them without a copy, as a [`Batch`].
//! - [`Samples`] shuffles a dataset, and [`Session::submit`] has the server prefetch along that order.
//!
//! A client never talks to another node; only servers do.
//!
//! # Example
//!
//! This program reads a dataset in the shuffled order of an epoch. It needs a running session, as `dayfly exec` provides;
//! `docs/examples/read_samples.rs` is a longer version, which the tests run.
//!
//! ```no_run
//! use dayfly_client::{Delivery, OnMissing, Samples, Session, View, locate};
//! use dayfly_meta::id::SampleId;
//!
//! let view = View::new(Session::attach(&locate::find(None)?)?);
//! println!("{} bytes", view.stat(b"/dayfly/train/cat.jpg")?.size);
//!
//! let dataset = view.dataset_of(b"/dayfly/train")?;
//! let order: Vec<SampleId> = Samples::of(dataset.catalog()).epoch(7, 0).collect();
//! let _order = view.session().submit(&dataset, order.iter().copied())?;
//! for samples in order.chunks(64) {
//!     let mut batch = view.session().read_many(&dataset, samples, Delivery::InOrder, OnMissing::Fail)?;
//!     while let Some(delivered) = batch.next() {
//!         let delivered = delivered?;
//!         println!("sample {}: {:?}", samples[delivered.index].0, delivered.bytes.map(<[u8]>::len));
//!     }
//!     assert!(batch.is_good(), "all bytes were valid until now");
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Samples::epoch`] needs only a catalog, so an order can also be computed without a session:
//!
//! ```
//! use dayfly_client::Samples;
//! use dayfly_meta::catalog::{About, Catalog, CatalogBuilder};
//!
//! let scratch = || tempfile::tempfile();
//! let built = CatalogBuilder::new(&scratch, About::default(), &[])?.finish(&|| {})?;
//! let samples = Samples::of(&Catalog::open(&built.file)?);
//! assert_eq!(samples.epoch(7, 0).count(), samples.len());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod arena;
mod attach;
mod attachment;
mod batch;
pub mod cancellation;
pub mod current;
mod dataset;
mod error;
pub mod fault;
mod fetch;
pub mod fork;
mod greeting;
mod heartbeat;
pub mod interruption;
pub mod locate;
pub mod notice;
mod order;
mod pool;
mod privacy;
pub mod raw_call;
mod read;
pub mod reserved_fd;
mod segment_map;
mod shared_copy;
mod socket;
pub mod thread_number;
mod verify;
mod view;

pub use attach::{Datasets, Order, Session};
pub use batch::{Batch, Delivered, Delivery, OnMissing};
pub use dataset::Dataset;
pub use error::ClientError;
pub use order::Samples;
pub use read::BlockData;
pub use view::{Directory, DirectoryEntry, FileKind, OpenFile, Opened, Stat, View, ViewError};
