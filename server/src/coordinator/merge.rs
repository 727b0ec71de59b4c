//! Merging what all workers found into the catalog, with memory that does not grow with the dataset.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek};
use std::sync::Arc;

use dayfly_meta::catalog::member::{read_member, write_member};
use dayfly_meta::catalog::resolve::{Histories, LinkCollector, Links, Refused};
use dayfly_meta::catalog::{About, Built, CatalogBuilder, Member, Scratch, Source};
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{MERGE_MEMORY, RUN_READ_AHEAD_MAX, RUN_READ_AHEAD_MIN, STAGE_INS_MAX};
use dayfly_meta::wire::peer::Request;
use dayfly_stagein::runs::Merge;

use super::CoordinatedStageIn;
use super::conflicts::{Replaced, Rivals};
use crate::server::Server;
use crate::store::unnamed_file;

/// What is to be merged.
pub(super) struct Merging {
    pub(super) server: Arc<Server>,
    pub(super) stage: Arc<CoordinatedStageIn>,
    pub(super) runs: Vec<(NodeId, u32, u64)>,
    pub(super) about: About,
    pub(super) sources: Vec<Source>,
    pub(super) rivals: Arc<Rivals>,
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
    pub(super) replaced: Replaced,
}

impl Merging {
    /// Blocks.
    pub(super) fn run(self) -> Result<Merged, String> {
        let drive = self.server.store().roomiest_drive();
        let scratch = || unnamed_file(drive.path());
        let rejected = self.stage.rejected();
        let counts = |member: &io::Result<Member>| member.as_ref().map_or(true, |member| !rejected.contains(&member.ticket));
        let members = self.all().filter(counts);
        if self.stage.counts().hard_links == 0 {
            return self.build(&scratch, Histories::new(members), &Links::default());
        }
        // Hard links need to be known before the catalog is built, so all members are put aside, in order.
        let cannot = |error: io::Error| format!("cannot merge what was found: {error}");
        let cannot_write = |error: io::Error| cannot(drive.write_error(error));
        let mut collector = LinkCollector::new((self.server.config().stage_memory / STAGE_INS_MAX as u64) as usize);
        let mut aside = BufWriter::new(scratch().map_err(cannot_write)?);
        for member in members {
            let member = member.map_err(cannot)?;
            self.stage.step();
            collector.see(&member).map_err(|error| error.to_string())?;
            write_member(&mut aside, &member).map_err(cannot_write)?;
        }
        let aside = aside.into_inner().map_err(|error| cannot_write(error.into_error()))?;
        let links = collector.resolve(Histories::new(read_back(&aside).map_err(cannot)?)).map_err(|error| error.to_string())?;
        self.build(&scratch, Histories::new(read_back(&aside).map_err(cannot)?), &links)
    }

    /// The members of all runs, in order.
    fn all(&self) -> Merge<RunReader<'_>> {
        let share = MERGE_MEMORY / self.runs.len().max(1) as u64;
        let ahead_len = share.clamp(RUN_READ_AHEAD_MIN, RUN_READ_AHEAD_MAX);
        let reader = |&(node, run, len): &(NodeId, u32, u64)| {
            let buffer = Vec::new();
            RunReader { merging: self, node, run, len, ahead_len, offset: 0, buffer, at: 0 }
        };
        Merge::new(self.runs.iter().map(reader).collect())
    }

    fn build<I>(&self, scratch: Scratch<'_>, mut histories: Histories<I>, links: &Links) -> Result<Merged, String>
    where
        I: Iterator<Item = io::Result<Member>>,
    {
        let mut builder = CatalogBuilder::new(scratch, self.about, &self.sources).map_err(|error| error.to_string())?;
        let mut refused = Refused::default();
        let mut replaced = Replaced::default();
        while let Some(history) = histories.advance().map_err(|error| error.to_string())? {
            self.stage.step();
            let path = history.path.clone();
            if let Some(conflict) = self.rivals.conflict(&history.members) {
                return Err(conflict);
            }
            // Nearly every path happened once.
            let several = if history.members.len() > 1 { history.members.clone() } else { Vec::new() };
            if let Some((member, names)) = links.outcome(history, &mut refused) {
                replaced.see(&several, &member, &self.rivals);
                builder.add(&path, &member, names).map_err(|error| error.to_string())?;
            }
        }
        refused.count += histories.refused.count;
        refused.names.append(&mut histories.refused.names);
        let Built { file, len, checksum, samples, bytes, others } =
            builder.finish(&|| self.stage.step()).map_err(|error| error.to_string())?;
        Ok(Merged { file: Arc::new(file), len, checksum, samples, bytes, others, refused, replaced })
    }
}

/// Members that were put aside.
fn read_back(mut file: &File) -> io::Result<impl Iterator<Item = io::Result<Member>>> {
    file.rewind()?;
    let mut reader = BufReader::with_capacity(RUN_READ_AHEAD_MAX as usize, file);
    Ok(std::iter::from_fn(move || read_member(&mut reader).transpose()))
}

/// Reads a run wherever it lies.
struct RunReader<'a> {
    merging: &'a Merging,
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
            let server = &self.merging.server;
            let bytes = server.blocking().wait_for(server.pull_bytes(self.node, request, room)).map_err(io::Error::other)?;
            self.merging.stage.step();
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
