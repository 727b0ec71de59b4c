//! Merges the sorted runs of all workers, and builds the catalog from them. The memory that this takes does not grow with the
//! dataset.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek};
use std::sync::Arc;

use dayfly_meta::catalog::member::{read_member, write_member};
use dayfly_meta::catalog::resolve::{Histories, LinkCollector, Links, Refused};
use dayfly_meta::catalog::{About, BuildError, Built, CatalogBuilder, Compression, Member, MemberKind, Place, Scratch, Source};
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::{MERGE_MEMORY, NOTE_LEN_MAX, RUN_READ_AHEAD_MAX, RUN_READ_AHEAD_MIN, STAGE_INS_MAX};
use dayfly_meta::path::{display, is_below, join, link_destination, split_last};
use dayfly_meta::placement::NodeSet;
use dayfly_meta::wire::peer::ReadRequest;
use dayfly_stagein::runs::Merge;

use super::conflicts::{ReplacedSamples, Rivals};
use super::{CoordinatedStageIn, Coordinator, CoordinatorError};
use crate::store::Drive;

/// A sorted run on a node.
pub(super) struct Run {
    pub(super) node: NodeId,
    /// Index among the node's runs.
    pub(super) number: u32,
    /// Length in bytes.
    pub(super) len: u64,
}

/// Everything that a merge needs.
pub(super) struct MergeJob {
    pub(super) coordinator: Arc<Coordinator>,
    pub(super) stage_in: Arc<CoordinatedStageIn>,
    pub(super) runs: Vec<Run>,
    pub(super) about: About,
    pub(super) sources: Vec<Source>,
    pub(super) rivals: Arc<Rivals>,
    /// The path at which programs see the dataset.
    pub(super) root: Vec<u8>,
}

/// Symlinks whose targets lie outside the dataset.
#[derive(Default)]
pub(super) struct SymlinksOut {
    pub(super) count: u64,
    /// The first of them, with its target.
    pub(super) first: Option<String>,
}

impl SymlinksOut {
    /// Counts a member at this path if it is such a symlink.
    fn see(&mut self, root: &[u8], path: &[u8], member: &Member) {
        let MemberKind::Symlink(target) = &member.kind else { return };
        let directory = split_last(path).map_or(&[][..], |(directory, _)| directory);
        let destination = link_destination(&join(root, directory), target);
        if destination != root && !is_below(&destination, root) {
            self.count += 1;
            let shown = || format!("{} -> {}", display(path), display(target)).chars().take(NOTE_LEN_MAX).collect();
            self.first.get_or_insert_with(shown);
        }
    }
}

/// The finished catalog.
pub(super) struct Merged {
    pub(super) file: Arc<File>,
    pub(super) len: u64,
    pub(super) checksum: u32,
    pub(super) samples: u64,
    /// Bytes of all samples.
    pub(super) bytes: u64,
    /// Directories and symlinks.
    pub(super) others: u64,
    pub(super) symlinks: u64,
    pub(super) symlinks_out: SymlinksOut,
    pub(super) refused: Refused,
    pub(super) replaced: ReplacedSamples,
}

impl MergeJob {
    /// Merges all runs. Blocks the calling thread.
    pub(super) fn run(self) -> Result<Merged, CoordinatorError> {
        let drive = self.coordinator.context.store.roomiest_drive();
        self.merge_on(&drive).map_err(|error| match error {
            CoordinatorError::Build(BuildError::Write(error)) => BuildError::Write(drive.failure(error)).into(),
            error => error,
        })
    }

    /// Merges all runs, with temporary files on `drive`.
    fn merge_on(&self, drive: &Drive) -> Result<Merged, CoordinatorError> {
        let context = &self.coordinator.context;
        let scratch = || drive.unnamed_file();
        let rejected = self.stage_in.rejected_tickets();
        let counts = |member: &io::Result<Member>| member.as_ref().map_or(true, |member| !rejected.contains(&member.ticket));
        let members = self.all_members().filter(counts);
        if self.stage_in.counts().hard_links == 0 {
            return self.build(&scratch, Histories::new(members), &Links::default());
        }
        // Hard links must be resolved before the catalog is built, so all members are written to a file first, in order.
        let cannot_write = |error: io::Error| CoordinatorError::Merge(drive.failure(error));
        let mut collector = LinkCollector::new((context.stage_in_memory / STAGE_INS_MAX as u64) as usize);
        let mut aside = BufWriter::new(scratch().map_err(CoordinatorError::Merge)?);
        for member in members {
            let member = member.map_err(CoordinatorError::Merge)?;
            self.stage_in.step();
            collector.see(&member)?;
            write_member(&mut aside, &member).map_err(cannot_write)?;
        }
        let aside = aside.into_inner().map_err(|error| cannot_write(error.into_error()))?;
        let links = collector.resolve(Histories::new(read_back(&aside)?))?;
        self.build(&scratch, Histories::new(read_back(&aside)?), &links)
    }

    /// Returns the members of all runs, in order.
    fn all_members(&self) -> Merge<RunReader<'_>> {
        let share = MERGE_MEMORY / self.runs.len().max(1) as u64;
        let ahead_len = share.clamp(RUN_READ_AHEAD_MIN, RUN_READ_AHEAD_MAX);
        let reader = |run| RunReader { job: self, run, ahead_len, offset: 0, buffer: Vec::new(), at: 0 };
        Merge::new(self.runs.iter().map(reader).collect())
    }

    /// Returns whether a member can be read from its source by itself.
    fn has_origin(&self, member: &Member) -> bool {
        let source = self.sources.get(member.key.source as usize);
        match &member.kind {
            MemberKind::File { place, .. } => {
                !matches!(place, Place::Nested { .. }) && source.is_some_and(|source| source.compression == Compression::None)
            }
            _ => true,
        }
    }

    fn build<I>(&self, scratch: Scratch<'_>, mut histories: Histories<I>, links: &Links) -> Result<Merged, CoordinatorError>
    where
        I: Iterator<Item = io::Result<Member>>,
    {
        let mut builder = CatalogBuilder::new(scratch, self.about.clone(), &self.sources)?;
        // Nobody is left out while the runs are merged.
        let participants: NodeSet = self.stage_in.participants().into_iter().collect();
        let mut refused = Refused::default();
        let mut replaced = ReplacedSamples::default();
        let mut symlinks_out = SymlinksOut::default();
        while let Some(history) = histories.advance()? {
            self.stage_in.step();
            let path = history.path.clone();
            self.rivals.check(&history.members)?;
            // Nearly every path has one member only.
            let several = if history.members.len() > 1 { history.members.clone() } else { Vec::new() };
            if let Some((member, names)) = links.outcome(history, &mut refused) {
                replaced.count_all(&several, &member, &self.rivals);
                if !self.has_origin(&member) {
                    self.stage_in.set_needs_all_parts();
                    // It was stored on a node that was lost while other sources were still being read.
                    if let Some(node) = owners(&member).find(|&node| !participants.contains(node)) {
                        return Err(CoordinatorError::NodeLost { node, address: self.coordinator.context.peers.address(node) });
                    }
                }
                symlinks_out.see(&self.root, &path, &member);
                builder.add(&path, &member, names)?;
            }
        }
        refused.count += histories.refused.count;
        refused.names.append(&mut histories.refused.names);
        let Built { file, len, checksum, samples, bytes, others, symlinks } = builder.finish(&|| self.stage_in.step())?;
        Ok(Merged { file: Arc::new(file), len, checksum, samples, bytes, others, symlinks, symlinks_out, refused, replaced })
    }
}

/// Returns the owners of a member's blocks.
fn owners(member: &Member) -> impl Iterator<Item = NodeId> + '_ {
    let blocks = match &member.kind {
        MemberKind::File { blocks, .. } => &blocks[..],
        _ => &[],
    };
    blocks.iter().map(|block| block.owner)
}

/// Reads members back from a file that they were written to.
fn read_back(mut file: &File) -> Result<impl Iterator<Item = io::Result<Member>>, CoordinatorError> {
    file.rewind().map_err(CoordinatorError::Merge)?;
    let mut reader = BufReader::with_capacity(RUN_READ_AHEAD_MAX as usize, file);
    Ok(std::iter::from_fn(move || read_member(&mut reader).transpose()))
}

/// Reads a run from its node.
struct RunReader<'a> {
    job: &'a MergeJob,
    run: &'a Run,
    /// How many bytes of the run are in memory at a time.
    ahead_len: u64,
    /// The offset after the bytes in `buffer`.
    offset: u64,
    buffer: Vec<u8>,
    /// How much of `buffer` has been read.
    at: usize,
}

impl RunReader<'_> {
    fn fill(&mut self) -> io::Result<()> {
        if self.job.stage_in.has_failed() {
            return Err(io::Error::other("the stage-in has failed"));
        }
        let (context, Run { node, number, len }) = (&self.job.coordinator.context, self.run);
        let request = ReadRequest::Run { stage_in: self.job.stage_in.number, run: *number, offset: self.offset };
        let room = self.ahead_len.min(len - self.offset);
        let pull = || context.peers.pull_bytes(*node, request.clone(), room);
        let pulling = context.peers.until_lost(*node, context.deadlines().request, pull);
        let bytes = context.blocking.wait_for(pulling).map_err(|error| io::Error::other(CoordinatorError::Peer(error)))?;
        self.job.stage_in.step();
        if bytes.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.offset += bytes.len() as u64;
        (self.buffer, self.at) = (bytes, 0);
        Ok(())
    }
}

impl Read for RunReader<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.at == self.buffer.len() && self.offset < self.run.len {
            self.fill()?;
        }
        let count = out.len().min(self.buffer.len() - self.at);
        out[..count].copy_from_slice(&self.buffer[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}
