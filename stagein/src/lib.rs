//! Stage-in: sources become samples, samples become blocks, and blocks go to the nodes that own
//! them.
//!
//! A source is a tar (plain, or compressed with gzip, zstd, xz, bzip2 or lz4), a zip, a directory
//! tree or a single file on the parallel file system. This crate reads each source once and
//! sequentially, with several workers on several nodes at the same time:
//!
//! | module | what it does | who uses it |
//! |---|---|---|
//! | [`plan`] | expands the user's patterns, determines formats, splits sources into units | the coordinator |
//! | [`unit_ledger`] | assigns units to workers, and decides which results count | the coordinator |
//! | [`pipeline`] | reads a unit, cuts and places its samples, ships their blocks to a [`pipeline::Sink`] | every worker |
//! | [`origin`] | reads samples again from where they lie in their sources | every node |
//! | [`runs`] | stores the members found, sorted by path, in temporary files; merges these files | workers; the coordinator |
//! | [`path_conflicts`] | notices early that samples of rival sources have the same path | owners and workers |
//! | [`progress`] | counts, shows and cancels a stage-in's work on a node, and limits its read rate | all of them |
//! | [`error`] | says what went wrong, in which source, and what to do | all of them |
//!
//! Two internal modules complete the picture: `source` parses the formats, and `selection` decides
//! which members to take (`--include` and the like).
//!
//! # Invariants
//!
//! - The owners have stored every block that a member in a run names, together with a checksum that
//!   was taken while the source was being read.
//! - However a plain tar is split, the workers find the same members as a reader that starts at the
//!   beginning would.
//! - Whatever a source claims, memory is bounded: by the buffers that the sink lends, by the length of a run, and by
//!   [`pipeline::DecoderLimits`].
//! - A source that changes while it is being read is an error, never a mixture of old and new
//!   bytes.
//!
//! # Named absences
//!
//! There is no network and no async runtime here: data leaves through the [`pipeline::Sink`] trait, and calls block the
//! calling thread. The server, not this crate, decides where temporary files are and how messages travel.
//!
//! # Example
//!
//! A tiny tar is planned, and one worker reads it into a sink that keeps all blocks in memory.
//!
//! ```
//! use std::collections::VecDeque;
//! use std::sync::Arc;
//!
//! use dayfly_meta::id::NodeId;
//! use dayfly_meta::limits::BATCH_LEN_MAX;
//! use dayfly_meta::placement::{Member, Placement};
//! use dayfly_meta::wire::control::Selection;
//! use dayfly_meta::wire::peer::Rival;
//! use dayfly_stagein::StageInError;
//! use dayfly_stagein::pipeline::{Batch, BlockPiece, DecoderLimits, Delivery, Reserved, Sink, Worker, WorkerConfig};
//! use dayfly_stagein::plan::{PlanRequest, plan_sources};
//! use dayfly_stagein::progress::ProgressMonitor;
//! use dayfly_stagein::runs::RunWriter;
//! use dayfly_stagein::unit_ledger::{NextUnits, UnitLedger, WorkerId};
//!
//! /// Stores each batch immediately. It refuses large blocks, which would come in pieces.
//! #[derive(Default)]
//! struct MemorySink {
//!     delivered: VecDeque<Delivery<Vec<u8>>>,
//!     stored: Vec<u8>,
//!     blocks: u32,
//! }
//!
//! impl Sink for &mut MemorySink {
//!     type Buffer = Vec<u8>;
//!
//!     fn buffer(&mut self, _owner: NodeId) -> Result<Option<Vec<u8>>, StageInError> {
//!         Ok(Some(vec![0; BATCH_LEN_MAX]))
//!     }
//!
//!     fn ship(&mut self, _owner: NodeId, batch: Batch<Vec<u8>>) -> Result<(), StageInError> {
//!         let (buffer, table) = batch.into_parts();
//!         self.stored.extend_from_slice(&buffer[..table.len]);
//!         let first = self.blocks;
//!         self.blocks += table.blocks.len() as u32;
//!         self.delivered.push_back(Delivery::Stored(first, table));
//!         Ok(())
//!     }
//!
//!     fn ship_piece(&mut self, _owner: NodeId, _piece: BlockPiece<Vec<u8>>) -> Result<(), StageInError> {
//!         Err(StageInError::Cancelled)
//!     }
//!
//!     fn in_flight(&self) -> usize {
//!         self.delivered.len()
//!     }
//!
//!     fn next_delivery(&mut self) -> Result<Delivery<Vec<u8>>, StageInError> {
//!         self.delivered.pop_front().ok_or(StageInError::Cancelled)
//!     }
//!
//!     fn reserve(&mut self, _owner: NodeId, _len: u64, _rival: Rival) -> Result<Reserved, StageInError> {
//!         Ok(Reserved::Full)
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A tar with one member, "hello.txt": a header, a block of data, and the end mark.
//! let mut header = [0_u8; 512];
//! header[..9].copy_from_slice(b"hello.txt");
//! header[100..107].copy_from_slice(b"0000644");
//! header[124..135].copy_from_slice(b"00000000005");
//! header[257..262].copy_from_slice(b"ustar");
//! header[148..156].fill(b' ');
//! let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
//! header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("tiny.tar");
//! std::fs::write(&path, [&header[..], b"hello", &[0; 507 + 1024]].concat())?;
//!
//! // The coordinator plans the stage-in, and keeps the units in a ledger.
//! let selection = Selection::default();
//! let patterns = [path.into_os_string().into_encoded_bytes()];
//! let request = PlanRequest { patterns: &patterns, selection: &selection, seed: 7, workers: 1 };
//! let monitor = Arc::new(ProgressMonitor::default());
//! let plan = plan_sources(&request, tempfile::tempfile()?, &monitor)?;
//! let mut ledger = UnitLedger::new(plan.units, plan.split_tars);
//!
//! // A worker reads units until there are none. Here, all blocks belong to node 0.
//! let mut sink = MemorySink::default();
//! let config = WorkerConfig {
//!     placement: Arc::new(Placement::new(7, &[Member { node: NodeId(0), capacity: 1 << 30 }])),
//!     selection: &selection,
//!     seed: 7,
//!     decoders: DecoderLimits { threads: 1, ahead_len: 1 << 20, memory_max: 256 << 20 },
//!     suspect_paths: Arc::default(),
//!     stored_share: None,
//! };
//! let runs = RunWriter::new(Box::new(tempfile::tempfile), 1 << 20);
//! let mut worker = Worker::new(&mut sink, runs, config, monitor)?;
//! let mut files = 0;
//! let only = WorkerId { node: NodeId(0), number: 0 };
//! while let NextUnits::Assigned(units) = ledger.assign_next(only)? {
//!     for report in worker.run(&units)? {
//!         files += ledger.record(report).accepted.iter().map(|(_, counts)| counts.files).sum::<u64>();
//!     }
//! }
//! assert_eq!(files, 1);
//! assert_eq!(worker.finish()?.finish()?.len(), 1, "one sorted run");
//! assert_eq!(sink.stored, b"hello");
//! # Ok(())
//! # }
//! ```

pub mod error;
#[cfg(test)]
mod memory_file;
pub mod origin;
pub mod path_conflicts;
pub mod pipeline;
pub mod plan;
#[cfg(test)]
#[path = "../../tests/harness/programs.rs"]
mod programs;
pub mod progress;
pub mod runs;
mod selection;
mod source;
#[cfg(test)]
#[path = "../../meta/src/test_seed.rs"]
mod test_seed;
#[cfg(test)]
mod tests;
pub mod unit_ledger;

pub use error::{NO_ROOM, StageInError};
pub use source::has_archive_ending;
