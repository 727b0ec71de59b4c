//! Reading samples of a running session from one node: what it holds, and what others hold.

use std::time::Instant;

use clap::Args;
use dayfly_client::{Dataset, Session, View, locate};
use dayfly_meta::id::{BlockId, NodeId, SampleId};

use crate::Failure;
use crate::measure::{Numbers, median};

/// Read the samples of a session's first dataset in random order, one at a time and in batches.
///
/// No sample is read twice, so no remote one comes from the arena. Right after a stage-in that fits memory the page cache is
/// warm; a first round is not counted.
#[derive(Args)]
pub(crate) struct Read {
    /// The node to read from.
    #[arg(long, default_value_t = 0)]
    node: u16,
    /// Samples a run, if there are enough.
    #[arg(long, default_value_t = 5_000)]
    samples: usize,
    /// Samples a batch.
    #[arg(long, default_value_t = 256)]
    batch: usize,
    /// Runs; medians are told.
    #[arg(long, default_value_t = 5)]
    runs: usize,
}

pub(crate) fn run(arguments: &Read) -> Result<(), Failure> {
    let view = View::new(Session::attach_to(&locate::find()?, NodeId(arguments.node))?);
    let datasets = view.session().datasets()?;
    let dataset = datasets.first().ok_or("the session has no dataset")?;
    let samples = dataset.catalog().header().samples;
    let first_block = |sample: u32| dataset.catalog().sample(SampleId(sample)).and_then(|(_, blocks)| blocks.into_iter().next());
    let (mut here, mut far): (Vec<u32>, Vec<u32>) = (0..samples)
        .filter(|&sample| first_block(sample).is_some())
        .partition(|&sample| first_block(sample).is_some_and(|block| dataset.is_here(BlockId(block))));
    for (what, list) in [("local", &mut here), ("remote", &mut far)] {
        Numbers(7).shuffle(list);
        // Two ways of reading, each with a round before those that count.
        let count = arguments.samples.min(list.len() / (2 * (arguments.runs + 1)));
        let mut rounds = list.chunks_exact(count.max(1));
        if count == 0 {
            println!("{what:<8} too few samples");
            continue;
        }
        let one = rates(arguments.runs, &mut rounds, |samples| one_at_a_time(view.session(), dataset, samples))?;
        println!("{what:<8} one at a time   {one} ({count} a run)");
        let batch = rates(arguments.runs, &mut rounds, |samples| in_batches(view.session(), dataset, samples, arguments.batch))?;
        println!("{what:<8} batches of {:<4} {batch} ({count} a run)", arguments.batch);
    }
    Ok(())
}

/// Samples and bytes a second, medians over rounds of fresh samples; the first is not counted.
fn rates<'a>(
    runs: usize,
    rounds: &mut impl Iterator<Item = &'a [u32]>,
    work: impl Fn(&[u32]) -> Result<(u64, u64), Failure>,
) -> Result<String, Failure> {
    let (mut samples_s, mut bytes_s) = (Vec::new(), Vec::new());
    for (round, samples) in rounds.take(runs + 1).enumerate() {
        let start = Instant::now();
        let (samples, bytes) = work(samples)?;
        let seconds = start.elapsed().as_secs_f64();
        if round > 0 {
            samples_s.push(samples as f64 / seconds);
            bytes_s.push(bytes as f64 / seconds);
        }
    }
    Ok(format!("{:>9.0} samples/s {:>8.1} MiB/s", median(samples_s), median(bytes_s) / (1 << 20) as f64))
}

fn one_at_a_time(session: &Session, dataset: &Dataset, samples: &[u32]) -> Result<(u64, u64), Failure> {
    let mut buffer = Vec::new();
    let mut bytes = 0;
    for &sample in samples {
        let (size, _) = dataset.catalog().sample(SampleId(sample)).ok_or("a damaged catalog")?;
        buffer.resize(size as usize, 0);
        bytes += session.read_at(dataset, SampleId(sample), 0, &mut buffer, &mut None)? as u64;
    }
    Ok((samples.len() as u64, bytes))
}

fn in_batches(session: &Session, dataset: &Dataset, samples: &[u32], batch: usize) -> Result<(u64, u64), Failure> {
    let mut bytes = 0;
    for samples in samples.chunks(batch.max(1)) {
        let blocks = samples.iter().filter_map(|&sample| dataset.catalog().sample(SampleId(sample)));
        let blocks: Vec<BlockId> = blocks.flat_map(|(_, blocks)| blocks).map(BlockId).collect();
        session.read_blocks(dataset, &blocks, &mut |data| {
            bytes += data.bytes.len() as u64;
            Ok(())
        })?;
    }
    Ok((samples.len() as u64, bytes))
}
