//! `dayfly verify`: reads every block back, as a program on another node would, and checks it. A
//! bad cached block is replaced when it is found. Nothing is read through a node that is lost.

use std::collections::BTreeSet;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use dayfly_client::locate::SessionFolder;
use dayfly_client::{ClientError, Dataset, Session, View};
use dayfly_launch::units::counted;
use dayfly_meta::id::{BlockId, NodeId};
use dayfly_meta::path::{components, join};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::query;
use crate::args::VerifyArguments;
use crate::failure::{Failure, complain, print_line};
use crate::namespace::{self, about};
use crate::size::show;

/// Blocks per call of the client library.
const BLOCKS_PER_CALL: usize = 4096;

pub(super) fn run(arguments: VerifyArguments) -> Result<ExitCode, Failure> {
    let location = namespace::location()?;
    let (nodes, lost) = members(&location)?;
    let Some(&first) = nodes.first() else {
        return Err(Failure::new("all nodes on this machine are lost; run this command on another machine"));
    };
    if !lost.is_empty() {
        let names: Vec<String> = lost.iter().map(NodeId::to_string).collect();
        complain(format_args!("nothing is read through nodes that are lost: {}", names.join(", ")));
    }
    let below = arguments.path.map_or_else(|| Ok(Vec::new()), |path| below_prefix(&location, first, path.as_bytes()))?;
    let start = Instant::now();
    let checker = Checker {
        location: &location,
        nodes: &nodes,
        below: &below,
        from_every_node: arguments.from_every_node,
        tally: Tally::default(),
        bar: progress_bar(),
    };
    let failures: Vec<String> = thread::scope(|scope| {
        let checker = &checker;
        let readers: Vec<_> = nodes.iter().map(|&node| scope.spawn(move || checker.read_from(node))).collect();
        let results = readers.into_iter().zip(&nodes).map(|(reader, node)| match reader.join() {
            Ok(result) => result.err().map(|error| format!("reading from node {node} failed: {error}")),
            Err(_) => Some(format!("reading from node {node} failed: a thread of this process panicked")),
        });
        results.flatten().collect()
    });
    checker.bar.finish_and_clear();
    for failure in &failures {
        complain(failure);
    }
    if !failures.is_empty() {
        return Err(Failure::silent());
    }
    let [blocks, bytes, remote, replaced, samples] = {
        let Tally { blocks, bytes, remote, replaced, samples } = checker.tally;
        [blocks, bytes, remote, replaced, samples].map(AtomicU64::into_inner)
    };
    if samples == 0 {
        print_line!("nothing was verified, because no dataset has a sample here");
        return Ok(ExitCode::SUCCESS);
    }
    if replaced > 0 {
        let copies = counted(replaced, "bad cached block");
        print_line!("found {copies} of other nodes, and fetched them again from their owners");
    }
    let seconds = start.elapsed().as_secs_f64().max(0.001);
    print_line!(
        "verified {} from {}: {} read ({remote} over the network), {}, all as staged in; {seconds:.2} s, {}/s",
        counted(samples, "sample"),
        counted(nodes.len() as u64, "node"),
        counted(blocks, "block"),
        show(bytes),
        show((bytes as f64 / seconds) as u64)
    );
    Ok(ExitCode::SUCCESS)
}

fn progress_bar() -> ProgressBar {
    let target = if io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(0), target);
    // The template is fixed, so it parses. If it did not, the default style would do.
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {percent:>3}% of bytes, {binary_bytes_per_sec}, {eta} left") {
        bar.set_style(style);
    }
    bar
}

/// Returns the members whose servers live on this machine, and all nodes of the session that are lost.
fn members(location: &SessionFolder) -> Result<(Vec<NodeId>, Vec<NodeId>), Failure> {
    let mut nodes = location.live_nodes();
    let (_, status) = query::status_from_any(location, &nodes)?;
    let lost: Vec<NodeId> = status.nodes.iter().filter(|entry| entry.lost_for_ms.is_some()).map(|entry| entry.node).collect();
    nodes.retain(|node| !lost.contains(node));
    Ok((nodes, lost))
}

/// Returns the part of an existing path that follows the prefix.
fn below_prefix(location: &SessionFolder, node: NodeId, path: &[u8]) -> Result<Vec<u8>, Failure> {
    let view = View::new(Session::attach_to(location, node)?);
    // The path is resolved as the user wrote it, so that a wrong path is an error and not an empty
    // success.
    let canonical = view.canonical(path).map_err(|error| Failure::new(about(path, &error)))?;
    Ok(canonical[view.session().prefix().len()..].strip_prefix(b"/").unwrap_or_default().to_vec())
}

/// The totals of what all readers have checked so far.
#[derive(Default)]
struct Tally {
    samples: AtomicU64,
    blocks: AtomicU64,
    bytes: AtomicU64,
    /// Blocks that came over the network.
    remote: AtomicU64,
    /// Bad cached blocks that were fetched again.
    replaced: AtomicU64,
}

/// Reads blocks through all nodes on this machine, on one thread per node.
struct Checker<'a> {
    location: &'a SessionFolder,
    nodes: &'a [NodeId],
    /// The path below the prefix that is verified; empty for the whole namespace.
    below: &'a [u8],
    from_every_node: bool,
    tally: Tally,
    bar: ProgressBar,
}

impl Checker<'_> {
    /// Reads, through one node, the blocks that are assigned to it.
    fn read_from(&self, node: NodeId) -> Result<(), ClientError> {
        // Waits for a server that stands still, as a program that reads does.
        let session = Session::attach_to(self.location, node)?;
        for dataset in session.datasets()?.iter() {
            if let Some(within) = part_of(dataset, self.below) {
                self.read_dataset(&session, dataset, &within, node)?;
            }
        }
        Ok(())
    }

    fn read_dataset(&self, session: &Session, dataset: &Dataset, within: &[u8], node: NodeId) -> Result<(), ClientError> {
        let catalog = dataset.catalog();
        let samples = samples(dataset, within);
        if self.nodes.first() == Some(&node) {
            self.tally.samples.fetch_add(samples.len() as u64, Ordering::Relaxed);
        }
        let blocks =
            samples.iter().filter_map(|&sample| catalog.sample(dayfly_meta::id::SampleId(sample))).flat_map(|(_, blocks)| blocks);
        let wanted: Vec<BlockId> =
            blocks.map(BlockId).filter(|&block| self.from_every_node || self.reader_of(dataset, block) == Some(node)).collect();
        let lens = wanted.iter().filter_map(|&block| catalog.block(block)).map(|(_, len)| len);
        self.bar.inc_length(lens.sum());
        for chunk in wanted.chunks(BLOCKS_PER_CALL) {
            session.read_blocks(dataset, chunk, &mut |data| {
                self.tally.blocks.fetch_add(1, Ordering::Relaxed);
                self.tally.bytes.fetch_add(data.bytes.len() as u64, Ordering::Relaxed);
                self.tally.remote.fetch_add(u64::from(!data.is_local), Ordering::Relaxed);
                self.tally.replaced.fetch_add(u64::from(data.was_bad), Ordering::Relaxed);
                self.bar.inc(data.bytes.len() as u64);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Chooses the node that reads a block if each block is read only once: never the owner, unless
    /// the owner is the only node.
    fn reader_of(&self, dataset: &Dataset, block: BlockId) -> Option<NodeId> {
        let owner = dataset.catalog().owner(block)?;
        let others: Vec<NodeId> = self.nodes.iter().copied().filter(|&node| node != owner).collect();
        others.get(block.0 as usize % others.len().max(1)).copied().or(Some(owner))
    }
}

/// Returns the part of a dataset that lies below a path in the namespace, or `None` if the path
/// excludes all of the dataset.
fn part_of(dataset: &Dataset, below: &[u8]) -> Option<Vec<u8>> {
    let (mut target, mut wanted) = (components(dataset.target()), components(below));
    loop {
        match (target.next(), wanted.next()) {
            (_, None) => return Some(Vec::new()),
            (None, Some(first)) => return Some(wanted.fold(first.to_vec(), |path, name| join(&path, name))),
            (Some(ours), Some(theirs)) if ours != theirs => return None,
            _ => {}
        }
    }
}

/// Returns the samples at or below a path in a dataset.
fn samples(dataset: &Dataset, within: &[u8]) -> BTreeSet<u32> {
    let catalog = dataset.catalog();
    let Some(top) = catalog.find(within) else { return BTreeSet::new() };
    let entries = (top.id.0..top.next.0).filter_map(|id| catalog.entry(dayfly_meta::catalog::EntryId(id)));
    entries.into_iter().filter_map(|entry| entry.sample()).map(|sample| sample.0).collect()
}
