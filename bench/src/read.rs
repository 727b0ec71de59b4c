//! Measures how fast one node reads a running session's samples, both its own and those of other
//! nodes.

use std::collections::VecDeque;
use std::hint::black_box;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use clap::{Args, ValueEnum};
use dayfly_client::{Dataset, Delivery, OnMissing, Samples, Session, View, fault, locate};
use dayfly_meta::id::{BlockId, NodeId, SampleId};
use dayfly_meta::path::join;
use dayfly_stagein::origin::{OriginReader, WantedBytes};

use crate::measure::{Failure, Numbers};
use crate::posix::read_file;

/// Read samples of a session's first dataset once, in random order; prints samples and bytes per
/// second
///
/// `--skip` continues where another run ended, so that no sample is still in the arena from an
/// earlier read.
#[derive(Args)]
pub(crate) struct Read {
    /// Node to read from
    #[arg(long, default_value_t = 0)]
    node: u16,
    #[arg(long, value_enum, default_value_t = From::Remote)]
    from: From,
    #[arg(long, value_enum, default_value_t = How::Views)]
    how: How,
    /// Samples per batch
    #[arg(long, default_value_t = 256)]
    batch: usize,
    /// Number of samples to read; all of them if there are fewer
    #[arg(long, default_value_t = 20_000)]
    samples: usize,
    /// Number of further batches in flight while the program works on one
    #[arg(long, default_value_t = 1)]
    ahead: usize,
    /// Read the samples in the order of this epoch, instead of one random order
    #[arg(long)]
    epoch: Option<u64>,
    /// Threads that read from origins
    #[arg(long, default_value_t = 16)]
    threads: usize,
    /// Number of samples to skip
    #[arg(long, default_value_t = 0)]
    skip: usize,
    /// Submit the order to the server first
    #[arg(long)]
    submit: bool,
    /// Time to wait before the first read, after any `--submit`, in milliseconds
    #[arg(long, default_value_t = 0)]
    head_start_ms: u64,
    /// What to do with views
    #[arg(long, value_enum, default_value_t = Touch::Ends)]
    touch: Touch,
    /// Number of passes over the samples; the last one is timed
    #[arg(long, default_value_t = 1)]
    passes: usize,
}

/// Which samples are read.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum From {
    /// Samples on the node's drives
    Local,
    /// Samples that are not on the node's drives
    Remote,
    Any,
}

/// How much of each view is touched.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Touch {
    /// The first and the last byte
    Ends,
    /// Every byte, summed up one by one
    Sum,
    /// Every byte, copied as into a tensor
    Copy,
}

/// The interface used.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum How {
    /// One sample at a time, with the Rust interface
    One,
    /// In batches, in place
    Views,
    /// In batches, into buffers
    Buffers,
    /// open, fstat, read, close; run it under `dayfly exec`
    Posix,
    /// Straight from the sources, without the session's servers
    Origins,
}

pub(crate) fn run(arguments: &Read) -> Result<(), Failure> {
    fault::install(nix::libc::sigaction)?;
    let view = View::new(Session::attach_to(&locate::find(None)?, NodeId(arguments.node))?);
    let datasets = view.session().datasets()?;
    let dataset = datasets.first().ok_or("the session has no dataset")?;
    let samples = chosen(dataset, arguments);
    if samples.is_empty() {
        return Err("the dataset has no such samples".into());
    }
    let paths = if arguments.how == How::Posix { paths(&view, dataset, &samples) } else { Vec::new() };
    let order = if arguments.submit { Some(view.session().submit(dataset, samples.iter().copied())?) } else { None };
    std::thread::sleep(std::time::Duration::from_millis(arguments.head_start_ms));
    // The buffer's pages must be in memory before the clock starts, like the pages of the TCP
    // stream's buffer.
    let largest = samples.iter().filter_map(|&sample| dataset.catalog().sample(sample)).map(|(size, _)| size).max();
    let mut buffer = vec![1; largest.unwrap_or(0) as usize];
    let mut last = (0.0, 0);
    for _ in 0..arguments.passes {
        let start = Instant::now();
        let bytes = match arguments.how {
            How::One => one_at_a_time(view.session(), dataset, &samples, &mut buffer)?,
            How::Views => views(view.session(), dataset, &samples, arguments, &mut buffer)?,
            How::Buffers => buffers(view.session(), dataset, &samples, arguments.batch)?,
            How::Posix => posix(&paths)?,
            How::Origins => origins(dataset, &samples, arguments.threads)?,
        };
        last = (start.elapsed().as_secs_f64(), bytes);
    }
    drop(order);
    let (seconds, bytes) = last;
    println!("{:.0} {:.0}", samples.len() as f64 / seconds, bytes as f64 / seconds);
    Ok(())
}

fn chosen(dataset: &Dataset, arguments: &Read) -> Vec<SampleId> {
    let is_meant = |sample: &SampleId| {
        let Some((size, blocks)) = dataset.catalog().sample(*sample) else { return false };
        let is_here = size > 0 && dataset.is_here(BlockId(blocks.start));
        size > 0 && (arguments.from == From::Any || is_here == (arguments.from == From::Local))
    };
    let samples: Vec<SampleId> = match arguments.epoch {
        Some(epoch) => Samples::of(dataset.catalog()).epoch(7, epoch).filter(is_meant).collect(),
        None => {
            let mut samples: Vec<SampleId> = (0..dataset.catalog().header().samples).map(SampleId).filter(is_meant).collect();
            Numbers(7).shuffle(&mut samples);
            samples
        }
    };
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
    let mut in_flight = VecDeque::new();
    let mut chunks = samples.chunks(arguments.batch.max(1));
    loop {
        while in_flight.len() <= arguments.ahead
            && let Some(samples) = chunks.next()
        {
            in_flight.push_back(session.read_many(dataset, samples, Delivery::AsAvailable, OnMissing::Fail)?);
        }
        let Some(mut batch) = in_flight.pop_front() else { return Ok(bytes) };
        while let Some(delivered) = batch.next() {
            let Ok(seen) = delivered?.bytes else { return Err("a sample cannot be read".into()) };
            bytes += seen.len() as u64;
            match arguments.touch {
                Touch::Ends => _ = black_box((seen.first(), seen.last())),
                Touch::Sum => _ = black_box(seen.iter().map(|&byte| u64::from(byte)).sum::<u64>()),
                Touch::Copy => buffer[..seen.len()].copy_from_slice(seen),
            }
        }
        if !batch.is_good() {
            return Err("the dataset is gone or a lease was revoked; start again".into());
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

/// Reads samples from their sources with several threads.
fn origins(dataset: &Dataset, samples: &[SampleId], threads: usize) -> Result<u64, Failure> {
    let (next, bytes) = (AtomicUsize::new(0), AtomicU64::new(0));
    let reader = OriginReader::new(threads);
    let work = || -> Result<(), String> {
        let mut buffer = Vec::new();
        while let Some(&sample) = samples.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (size, _) = dataset.catalog().sample(sample).ok_or("a damaged catalog")?;
            buffer.resize(size as usize, 0);
            let wanted = WantedBytes { sample, start: 0, bytes: &mut buffer };
            reader.read(dataset.catalog(), wanted).map_err(|error| error.to_string())?;
            bytes.fetch_add(size, Ordering::Relaxed);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
        all.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".to_owned())))
    })?;
    Ok(bytes.into_inner())
}
