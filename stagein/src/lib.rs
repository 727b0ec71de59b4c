//! Stage-in: sources become samples, samples become blocks, blocks go to their owners.
//!
//! The coordinator makes a [`plan`] and [hands out](unit_ledger) its units; every server runs [`pipeline::Worker`]s over them; what the workers
//! found is kept in sorted [`runs`] that the coordinator merges into a catalog. This crate knows no network: blocks are shipped into a
//! [`pipeline::Sink`].

pub mod error;
pub mod path_conflicts;
pub mod pipeline;
pub mod plan;
pub mod progress;
pub mod runs;
mod selection;
mod source;
#[cfg(test)]
mod tests;
pub mod unit_ledger;

pub use error::StageInError;
pub use source::has_archive_ending;
