//! Records the choices of the prefetch controller and their results, while a process reads an order
//! one sample after another.

use std::fmt::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use dayfly_client::{Samples, Session, locate};
use dayfly_meta::id::{NodeId, SampleId};
use dayfly_meta::wire::control::{Command, Event};
use dayfly_meta::wire::status::PrefetchStatus;

use crate::measure::Failure;

const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Watch the prefetch controller, or plot a recording
#[derive(Args)]
pub(crate) struct Prefetch {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Read remote samples on node 0 in a submitted order; prints 20 times a second: ms, depth in
    /// bytes, requests, bytes/s, late
    Watch {
        /// Duration in seconds
        #[arg(long, default_value_t = 4.0)]
        seconds: f64,
        /// Bytes per second that the reader consumes, if they arrive that fast
        #[arg(long)]
        pace: f64,
    },
    /// Plot recordings side by side, each with its title: FILE=TITLE
    Plot { files: Vec<String> },
}

pub(crate) fn run(arguments: &Prefetch) -> Result<(), Failure> {
    match &arguments.what {
        What::Watch { seconds, pace } => watch(*seconds, *pace),
        What::Plot { files } => plot(files),
    }
}

fn watch(seconds: f64, pace: f64) -> Result<(), Failure> {
    let session = Session::attach_to(&locate::find(None)?, NodeId(0))?;
    let datasets = session.datasets()?;
    let dataset = datasets.first().ok_or("the session has no dataset")?;
    let order: Vec<SampleId> = Samples::of(dataset.catalog()).epoch(1, 0).collect();
    let (bytes, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    let start = Instant::now();
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| look(&session, &bytes, &is_over, start).map_err(|error| error.to_string()));
        let submitted = session.submit(dataset, order.iter().copied())?;
        let mut buffer = vec![0; 1 << 20];
        let mut due = Duration::ZERO;
        for &sample in &order {
            let (size, _) = dataset.catalog().sample(sample).ok_or("a damaged catalog")?;
            session.read_at(dataset, sample, 0, &mut buffer[..size as usize], &mut None)?;
            bytes.fetch_add(size, Ordering::Relaxed);
            due += Duration::from_secs_f64(size as f64 / pace);
            // A late reader does not catch up, because a training step takes its time.
            due = due.max(start.elapsed().saturating_sub(Duration::from_millis(20)));
            std::thread::sleep(due.saturating_sub(start.elapsed()));
            if start.elapsed().as_secs_f64() > seconds {
                break;
            }
        }
        is_over.store(true, Ordering::Relaxed);
        drop(submitted);
        watcher.join().map_err(|_| "the thread that watches the controller panicked")??;
        Ok(())
    })
}

fn look(session: &Session, bytes: &AtomicU64, is_over: &AtomicBool, start: Instant) -> Result<(), Failure> {
    let (mut before, mut late, mut looked) = (0, 0, start.elapsed());
    while !is_over.load(Ordering::Relaxed) {
        std::thread::sleep(POLL_INTERVAL);
        let prefetch = ask(session)?;
        let (now, read) = (start.elapsed(), bytes.load(Ordering::Relaxed));
        let rate = (read - before) as f64 / (now - looked).as_secs_f64();
        let PrefetchStatus { depth_bytes, requests, late: all_late, .. } = prefetch;
        println!("{} {depth_bytes} {requests} {rate:.0} {}", now.as_millis(), all_late - late);
        (before, late, looked) = (read, all_late, now);
    }
    Ok(())
}

fn ask(session: &Session) -> Result<PrefetchStatus, Failure> {
    let mut found = None;
    session.control(Command::Status, &mut |event| {
        if let Event::Status(status) = event {
            found = status.nodes.into_iter().next().and_then(|entry| entry.status.ok()).map(|node| node.prefetch);
        }
    })?;
    found.ok_or_else(|| "node 0 reported no status".into())
}

fn plot(files: &[String]) -> Result<(), Failure> {
    const WIDTH: f64 = 370.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.0} 240\" font-family=\"sans-serif\" font-size=\"11\">",
        (WIDTH + 20.0) * files.len() as f64
    );
    for (number, file) in files.iter().enumerate() {
        let (file, title) = file.split_once('=').ok_or("a recording must be given as FILE=TITLE")?;
        let text = std::fs::read_to_string(PathBuf::from(file))?;
        let rows: Vec<Vec<f64>> =
            text.lines().map(|line| line.split(' ').filter_map(|word| word.parse().ok()).collect()).collect();
        let left = 40.0 + (WIDTH + 20.0) * number as f64;
        let end_ms = rows.last().and_then(|row| row.first()).copied().unwrap_or(1.0);
        let most = |column: usize| rows.iter().filter_map(|row| row.get(column)).copied().fold(1.0, f64::max) * 1.1;
        let lines =
            [(1, "#0072b2", "depth", 1e6, " MB"), (2, "#e69f00", "requests", 1.0, ""), (3, "#009e73", "read", 1e6, " MB/s")];
        let _ = write!(
            svg,
            "<text x=\"{left}\" y=\"14\" font-weight=\"bold\">{title}</text><path d=\"M{left},30 V190 H{:.0}\" fill=\"none\" stroke=\"#888\"/>",
            left + WIDTH - 50.0
        );
        for (at, (column, color, name, unit, suffix)) in lines.into_iter().enumerate() {
            let highest = most(column);
            let point = |row: &Vec<f64>| {
                format!("{:.1},{:.1}", left + (WIDTH - 50.0) * row[0] / end_ms, 190.0 - 160.0 * row[column] / highest)
            };
            let points: Vec<String> = rows.iter().filter(|row| row.len() > 4).map(point).collect();
            let last = rows.iter().rev().filter(|row| row.len() > 4).take(20).map(|row| row[column]).sum::<f64>() / 20.0;
            let _ =
                write!(svg, "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"1.5\"/>", points.join(" "));
            let _ = write!(
                svg,
                "<text x=\"{:.0}\" y=\"222\" fill=\"{color}\">{name}: last {:.1}{suffix}, highest {:.1}</text>",
                left + 125.0 * at as f64,
                last / unit,
                highest / unit
            );
        }
        for second in 0..=(end_ms / 1000.0) as u32 {
            let x = left + (WIDTH - 50.0) * f64::from(second) * 1000.0 / end_ms;
            let _ = write!(svg, "<text x=\"{x:.0}\" y=\"204\" text-anchor=\"middle\">{second} s</text>");
        }
    }
    println!("{svg}</svg>");
    Ok(())
}
