//! Merging what all workers found into the catalog, with memory that does not grow with the dataset.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek};
use std::sync::Arc;

use dayfly_meta::catalog::member::{read_member, write_member};
use dayfly_meta::catalog::resolve::{Histories, LinkCollector, Links, Refused};
use dayfly_meta::catalog::{Built, CatalogBuilder, Member, Source};
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{MERGE_MEMORY, RUN_READ_AHEAD_MAX, RUN_READ_AHEAD_MIN};
use dayfly_meta::wire::peer::Request;
use dayfly_stagein::runs::Merge;
use tokio::runtime::Handle;

use super::LeadStage;
use crate::server::Server;
use crate::store::nameless_file;

/// What is to be merged.
pub(super) struct Merging {
    pub(super) server: Arc<Server>,
    pub(super) stage: Arc<LeadStage>,
    pub(super) runs: Vec<(NodeId, u32, u64)>,
    pub(super) seed: u64,
    pub(super) created_s: i64,
    pub(super) sources: Vec<Source>,
}

/// The finished catalog.
pub(super) struct Merged {
    pub(super) file: Arc<File>,
    pub(super) len: u64,
    pub(super) checksum: u32,
    pub(super) samples: u64,
    pub(super) bytes: u64,
    pub(super) others: u64,
    pub(super) refused: Refused,
}

impl Merging {
    /// Blocks.
    pub(super) fn run(self, runtime: &Handle) -> Result<Merged, String> {
        let drive = self.server.store().roomiest_drive();
        let scratch = || nameless_file(drive.path());
        let cannot = |error: io::Error| format!("cannot merge what was found: {error}");
        let (mut merged, collector) = self.merge(&scratch, runtime)?;
        let links = match collector.is_empty() {
            true => Links::default(),
            false => collector.resolve(histories(&mut merged).map_err(cannot)?).map_err(|error| error.to_string())?,
        };
        let mut builder =
            CatalogBuilder::new(&scratch, self.seed, self.created_s, &self.sources).map_err(|error| error.to_string())?;
        let mut histories = histories(&mut merged).map_err(cannot)?;
        let mut refused = Refused::default();
        while let Some(history) = histories.advance().map_err(|error| error.to_string())? {
            let path = history.path.clone();
            if let Some((member, names)) = links.outcome(history, &mut refused) {
                builder.add(&path, &member, names).map_err(|error| error.to_string())?;
            }
        }
        refused.count += histories.refused.count;
        refused.names.append(&mut histories.refused.names);
        let Built { file, len, checksum, samples, bytes, others } = builder.finish().map_err(|error| error.to_string())?;
        Ok(Merged { file: Arc::new(file), len, checksum, samples, bytes, others, refused })
    }

    /// All runs as one, in a file, since hard links need to be known before the catalog is built.
    fn merge(&self, scratch: &dyn Fn() -> io::Result<File>, runtime: &Handle) -> Result<(File, LinkCollector), String> {
        let cannot = |error: io::Error| format!("cannot merge what was found: {error}");
        let share = MERGE_MEMORY / self.runs.len().max(1) as u64;
        let ahead_len = share.clamp(RUN_READ_AHEAD_MIN, RUN_READ_AHEAD_MAX);
        let reader = |&(node, run, len): &(NodeId, u32, u64)| {
            let buffer = Vec::new();
            RunReader { merging: self, runtime, node, run, len, ahead_len, offset: 0, buffer, at: 0 }
        };
        let rejected = self.stage.rejected();
        let mut collector = LinkCollector::default();
        let mut merged = BufWriter::new(scratch().map_err(cannot)?);
        for member in Merge::new(self.runs.iter().map(reader).collect()) {
            let member = member.map_err(cannot)?;
            if rejected.contains(&member.ticket) {
                continue;
            }
            collector.see(&member).map_err(|error| error.to_string())?;
            write_member(&mut merged, &member).map_err(cannot)?;
        }
        Ok((merged.into_inner().map_err(|error| cannot(error.into_error()))?, collector))
    }
}

type MemberFile<'a> = std::iter::FromFn<Box<dyn FnMut() -> Option<io::Result<Member>> + 'a>>;

fn histories(merged: &mut File) -> io::Result<Histories<MemberFile<'_>>> {
    merged.rewind()?;
    let mut reader = BufReader::with_capacity(RUN_READ_AHEAD_MAX as usize, merged);
    let next: Box<dyn FnMut() -> Option<io::Result<Member>>> = Box::new(move || read_member(&mut reader).transpose());
    Ok(Histories::new(std::iter::from_fn(next)))
}

/// Reads a run wherever it lies.
struct RunReader<'a> {
    merging: &'a Merging,
    runtime: &'a Handle,
    node: NodeId,
    run: u32,
    len: u64,
    /// Bytes of it that are in memory at a time.
    ahead_len: u64,
    offset: u64,
    buffer: Vec<u8>,
    at: usize,
}

impl Read for RunReader<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.at == self.buffer.len() && self.offset < self.len {
            if self.merging.stage.has_failed() {
                return Err(io::Error::other("the stage-in has failed"));
            }
            let request = Request::ReadRun { stage: self.merging.stage.number, run: self.run, offset: self.offset };
            let room = self.ahead_len.min(self.len - self.offset);
            let bytes =
                self.runtime.block_on(self.merging.server.pull_bytes(self.node, request, room)).map_err(io::Error::other)?;
            if bytes.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.offset += bytes.len() as u64;
            (self.buffer, self.at) = (bytes, 0);
        }
        let count = out.len().min(self.buffer.len() - self.at);
        out[..count].copy_from_slice(&self.buffer[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}
