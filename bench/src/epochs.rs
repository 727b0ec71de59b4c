//! Reads a dataset that `make` wrote, in shuffled epochs, compares every byte, and reports what a reader noticed: errors, wrong bytes,
//! the longest read, and the rate. A script controls it while it makes nodes fail.

use std::io::BufRead;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

use clap::Args;
use dayfly_client::{Dataset, OnMissing, Samples, Session, locate};
use dayfly_meta::id::{NodeId, SampleId};

use crate::make::{Content, Sizes};
use crate::measure::Failure;

/// Read a session's first dataset, which `make` wrote, in shuffled epochs, and compare every byte
///
/// Lines on standard input control it, until it ends: `epoch` reads all samples once; `mark` begins a new part of the epoch.
/// It prints `ready` when it can begin, `half EPOCH` after half of an epoch's samples, and `end EPOCH`. Before that, it prints for each
/// part: part EPOCH SECONDS BYTES SAMPLES LONGEST_MS ERRORS WRONG. The longest read is the longest single call.
/// Errors are printed on standard error; after 16, it gives up.
#[derive(Args)]
pub(crate) struct Epochs {
    /// Node to read from
    #[arg(long, default_value_t = 0)]
    node: u16,
    /// Samples per call
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Do not submit the order of an epoch to the server
    #[arg(long)]
    no_order: bool,
    #[command(flatten)]
    sizes: Sizes,
}

/// The number of errors, or of samples with wrong bytes, after which the reader gives up.
const FAULTS_MAX: u64 = 16;
/// Lines of standard input that may wait. The script waits for answers, so there are never many.
const LINES_MAX: usize = 16;

/// A part of an epoch.
struct Part {
    start: Instant,
    bytes: u64,
    samples: u64,
    longest: Duration,
    errors: u64,
    wrong: u64,
}

impl Part {
    fn new() -> Self {
        Self { start: Instant::now(), bytes: 0, samples: 0, longest: Duration::ZERO, errors: 0, wrong: 0 }
    }

    fn print(&self, epoch: u64) {
        let Self { start, bytes, samples, longest, errors, wrong } = self;
        let (seconds, longest_ms) = (start.elapsed().as_secs_f64(), longest.as_secs_f64() * 1e3);
        println!("part {epoch} {seconds:.3} {bytes} {samples} {longest_ms:.1} {errors} {wrong}");
    }
}

pub(crate) fn run(arguments: &Epochs) -> Result<(), Failure> {
    let session = Session::attach_to(&locate::find(None)?, NodeId(arguments.node))?;
    let datasets = session.datasets()?;
    let dataset = datasets.first().ok_or("the session has no dataset")?;
    let samples = Samples::of(dataset.catalog());
    let reader = Reader { arguments, session: &session, dataset, contents: contents(dataset, &samples, arguments.sizes)? };
    let (sender, lines) = sync_channel(LINES_MAX);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    println!("ready");
    let mut epoch = 0;
    while let Ok(line) = lines.recv() {
        match line.as_str() {
            "epoch" => {
                epoch += 1;
                let order: Vec<SampleId> = samples.epoch(7, epoch).collect();
                reader.read(epoch, &order, &lines)?;
            }
            // The epoch ended before its mark arrived.
            "mark" => {}
            other => return Err(format!("unknown line '{other}'").into()),
        }
    }
    Ok(())
}

/// Returns the content of each sample, found by the number in its name.
fn contents(dataset: &Dataset, samples: &Samples, sizes: Sizes) -> Result<Vec<Content>, Failure> {
    let by_number: Vec<Content> = sizes.contents().take(samples.len()).collect();
    let number_of = |sample| {
        let entry = dataset.catalog().entry(samples.entry(SampleId(sample))?)?;
        let path = String::from_utf8(dataset.catalog().path(&entry)).ok()?;
        path.rsplit('/').next()?.strip_suffix(".bin")?.parse::<usize>().ok()
    };
    let content_of = |sample| number_of(sample).and_then(|number| by_number.get(number)).cloned();
    let contents: Option<Vec<Content>> = (0..samples.len() as u32).map(content_of).collect();
    contents.ok_or_else(|| "the dataset was not written by `dayfly-bench make`, or not all of it is there".into())
}

struct Reader<'a> {
    arguments: &'a Epochs,
    session: &'a Session,
    dataset: &'a Arc<Dataset>,
    contents: Vec<Content>,
}

impl Reader<'_> {
    fn read(&self, epoch: u64, order: &[SampleId], lines: &Receiver<String>) -> Result<(), Failure> {
        let is_ordered = !self.arguments.no_order;
        let mut part = Part::new();
        let submitted = if is_ordered { Some(self.session.submit(self.dataset, order.iter().copied())?) } else { None };
        let mut buffers: Vec<Vec<u8>> = vec![Vec::new(); self.arguments.batch.max(1)];
        let (mut done, mut faults) = (0, 0);
        for samples in order.chunks(self.arguments.batch.max(1)) {
            self.read_together(samples, &mut buffers, &mut part)?;
            if done < order.len() / 2 && done + samples.len() >= order.len() / 2 {
                println!("half {epoch}");
            }
            done += samples.len();
            match lines.try_recv().as_deref() {
                Ok("mark") => {
                    part.print(epoch);
                    faults += part.errors + part.wrong;
                    part = Part::new();
                }
                Ok(other) => return Err(format!("'{other}' in the middle of an epoch").into()),
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => return Ok(()),
            }
            if faults + part.errors + part.wrong >= FAULTS_MAX {
                part.print(epoch);
                return Err("too many errors".into());
            }
        }
        drop(submitted);
        part.print(epoch);
        println!("end {epoch}");
        Ok(())
    }

    /// Reads some samples with one call, and compares them.
    fn read_together(&self, samples: &[SampleId], buffers: &mut [Vec<u8>], part: &mut Part) -> Result<(), Failure> {
        let mut targets: Vec<&mut [u8]> = Vec::with_capacity(samples.len());
        for (buffer, &sample) in buffers.iter_mut().zip(samples) {
            let (size, _) = self.dataset.catalog().sample(sample).ok_or("a damaged catalog")?;
            if buffer.len() < size as usize {
                buffer.resize(size as usize, 0);
            }
            // Bytes of an earlier sample must not pass for this one's.
            buffer[..size as usize].fill(0);
            targets.push(&mut buffer[..size as usize]);
        }
        let start = Instant::now();
        let read = match (&mut targets[..], samples) {
            ([target], &[sample]) => {
                vec![self.session.read_at(self.dataset, sample, 0, target, &mut None).map(|len| len as u64)]
            }
            _ => self.session.read_many_into(self.dataset, samples, &mut targets, OnMissing::Report)?,
        };
        part.longest = part.longest.max(start.elapsed());
        for ((read, target), &sample) in read.into_iter().zip(&targets).zip(samples) {
            part.samples += 1;
            match read {
                Err(error) => {
                    eprintln!("node {}: sample {}: {error}", self.arguments.node, sample.0);
                    part.errors += 1;
                }
                Ok(len) if len != target.len() as u64 || !self.contents[sample.0 as usize].is(target) => {
                    eprintln!("node {}: sample {} has wrong bytes", self.arguments.node, sample.0);
                    part.wrong += 1;
                }
                Ok(len) => part.bytes += len,
            }
        }
        Ok(())
    }
}
