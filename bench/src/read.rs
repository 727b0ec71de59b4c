//! Reading samples of a running session from one node: what it holds, and what others hold.

use std::collections::VecDeque;
use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::{Args, ValueEnum};
use dayfly_client::{Dataset, Delivery, OnMissing, Samples, Session, View, fault, locate};
use dayfly_meta::id::{BlockId, NodeId, SampleId};
use dayfly_meta::path::join;

use crate::Failure;
use crate::measure::Numbers;
use crate::posix::read_file;

/// Read samples of a session's first dataset once, in random order; prints samples and bytes a second.
///
/// `--skip` goes on where another run ended, so that nothing comes from the arena that was read before.
#[derive(Args)]
pub(crate) struct Read {
    /// The node to read from.
    #[arg(long, default_value_t = 0)]
    node: u16,
    #[arg(long, value_enum, default_value_t = From::Remote)]
    from: From,
    #[arg(long, value_enum, default_value_t = How::Views)]
    how: How,
    /// Samples a batch.
    #[arg(long, default_value_t = 256)]
    batch: usize,
    /// Samples; fewer if there are not as many.
    #[arg(long, default_value_t = 20_000)]
    samples: usize,
    /// Batches that are under way while one is looked at.
    #[arg(long, default_value_t = 1)]
    ahead: usize,
    /// Samples passed over.
    #[arg(long, default_value_t = 0)]
    skip: usize,
    /// Tell the server the order before.
    #[arg(long)]
    submit: bool,
    /// Wait so long after that, in milliseconds.
    #[arg(long, default_value_t = 0)]
    head_start_ms: u64,
    /// What is done with views.
    #[arg(long, value_enum, default_value_t = Touch::Ends)]
    touch: Touch,
    /// Go through them so often; the time is that of the last.
    #[arg(long, default_value_t = 1)]
    passes: usize,
}

/// Which samples.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum From {
    /// Those on the node's drives.
    Local,
    /// Those that are not.
    Remote,
    Any,
}

/// How views are looked at.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Touch {
    /// At the first and the last byte.
    Ends,
    /// At every byte, added up one by one.
    Sum,
    /// They are copied, as into a tensor.
    Copy,
}

/// By which interface.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum How {
    /// One at a time, by the Rust interface.
    One,
    /// In batches, looked at in place.
    Views,
    /// In batches, into buffers.
    Buffers,
    /// open, fstat, read, close; to be run under `dayfly exec`.
    Posix,
}

pub(crate) fn run(arguments: &Read) -> Result<(), Failure> {
    fault::install(nix::libc::sigaction)?;
    let view = View::new(Session::attach_to(&locate::find(None)?, NodeId(arguments.node))?);
    let datasets = view.session().datasets()?;
    let dataset = datasets.first().ok_or("the session has no dataset")?;
    let samples = chosen(dataset, arguments);
    if samples.is_empty() {
        return Err("there is no such sample".into());
    }
    let paths = if arguments.how == How::Posix { paths(&view, dataset, &samples) } else { Vec::new() };
    let order = if arguments.submit { Some(view.session().submit(dataset, samples.iter().copied())?) } else { None };
    std::thread::sleep(std::time::Duration::from_millis(arguments.head_start_ms));
    // Its pages are there before the time is taken, as those of the stream's buffer are.
    let largest = samples.iter().filter_map(|&sample| dataset.catalog().sample(sample)).map(|(size, _)| size).max();
    let mut buffer = vec![1; largest.unwrap_or(0) as usize];
    let mut told = (0.0, 0);
    for _ in 0..arguments.passes {
        let start = Instant::now();
        let bytes = match arguments.how {
            How::One => one_at_a_time(view.session(), dataset, &samples, &mut buffer)?,
            How::Views => views(view.session(), dataset, &samples, arguments, &mut buffer)?,
            How::Buffers => buffers(view.session(), dataset, &samples, arguments.batch)?,
            How::Posix => posix(&paths)?,
        };
        told = (start.elapsed().as_secs_f64(), bytes);
    }
    drop(order);
    let (seconds, bytes) = told;
    println!("{:.0} {:.0}", samples.len() as f64 / seconds, bytes as f64 / seconds);
    Ok(())
}

fn chosen(dataset: &Dataset, arguments: &Read) -> Vec<SampleId> {
    let is_meant = |sample: &SampleId| {
        let Some((size, blocks)) = dataset.catalog().sample(*sample) else { return false };
        let is_here = size > 0 && dataset.is_here(BlockId(blocks.start));
        size > 0 && (arguments.from == From::Any || is_here == (arguments.from == From::Local))
    };
    let mut samples: Vec<SampleId> = (0..dataset.catalog().header().samples).map(SampleId).filter(is_meant).collect();
    Numbers(7).shuffle(&mut samples);
    samples.into_iter().skip(arguments.skip).take(arguments.samples).collect()
}

fn paths(view: &View, dataset: &Dataset, samples: &[SampleId]) -> Vec<PathBuf> {
    use std::os::unix::ffi::OsStringExt;
    let names = Samples::of(dataset.catalog());
    let root = join(view.session().prefix(), dataset.target());
    let path = |&sample: &SampleId| {
        let entry = dataset.catalog().entry(names.entry(sample)?)?;
        Some(std::ffi::OsString::from_vec(join(&root, &dataset.catalog().path(&entry))).into())
    };
    samples.iter().filter_map(path).collect()
}

fn one_at_a_time(session: &Session, dataset: &Dataset, samples: &[SampleId], buffer: &mut [u8]) -> Result<u64, Failure> {
    let mut bytes = 0;
    for &sample in samples {
        let (size, _) = dataset.catalog().sample(sample).ok_or("a damaged catalog")?;
        bytes += session.read_at(dataset, sample, 0, &mut buffer[..size as usize], &mut None)? as u64;
    }
    Ok(bytes)
}

fn views(
    session: &Session,
    dataset: &Arc<Dataset>,
    samples: &[SampleId],
    arguments: &Read,
    buffer: &mut [u8],
) -> Result<u64, Failure> {
    let mut bytes = 0;
    let mut under_way = VecDeque::new();
    let mut chunks = samples.chunks(arguments.batch.max(1));
    loop {
        while under_way.len() <= arguments.ahead
            && let Some(samples) = chunks.next()
        {
            under_way.push_back(session.read_many(dataset, samples, Delivery::AsAvailable, OnMissing::Fail)?);
        }
        let Some(mut batch) = under_way.pop_front() else { return Ok(bytes) };
        while let Some(delivered) = batch.next() {
            let Ok(seen) = delivered?.bytes else { return Err("a sample is missing".into()) };
            bytes += seen.len() as u64;
            match arguments.touch {
                Touch::Ends => _ = black_box((seen.first(), seen.last())),
                Touch::Sum => _ = black_box(seen.iter().map(|&byte| u64::from(byte)).sum::<u64>()),
                Touch::Copy => buffer[..seen.len()].copy_from_slice(seen),
            }
        }
        if !batch.is_good() {
            return Err("the dataset is gone".into());
        }
    }
}

fn buffers(session: &Session, dataset: &Arc<Dataset>, samples: &[SampleId], batch: usize) -> Result<u64, Failure> {
    let mut bytes = 0;
    let mut room: Vec<Vec<u8>> = vec![Vec::new(); batch.max(1)];
    for samples in samples.chunks(batch.max(1)) {
        let mut targets: Vec<&mut [u8]> = Vec::with_capacity(samples.len());
        for (buffer, &sample) in room.iter_mut().zip(samples) {
            let (size, _) = dataset.catalog().sample(sample).ok_or("a damaged catalog")?;
            if buffer.len() < size as usize {
                buffer.resize(size as usize, 0);
            }
            targets.push(&mut buffer[..size as usize]);
        }
        for size in session.read_many_into(dataset, samples, &mut targets, OnMissing::Fail)? {
            bytes += size?;
        }
    }
    Ok(bytes)
}

fn posix(paths: &[PathBuf]) -> Result<u64, Failure> {
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    for path in paths {
        bytes += read_file(path, &mut buffer)?;
    }
    Ok(bytes)
}
