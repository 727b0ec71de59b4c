//! Measures the calls that programs make on files through the C library, over a plain directory or,
//! under `dayfly exec`, over the namespace.

use std::fs;
use std::hint::black_box;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use clap::{Args, ValueEnum};
use nix::fcntl::{OFlag, open};
use nix::sys::stat::{Mode, fstat, stat};
use nix::unistd::{close, read};

use crate::measure::Failure;

/// Measure calls on files; prints nanoseconds per file
#[derive(Args)]
pub(crate) struct Posix {
    #[arg(value_enum)]
    what: Work,
    /// Folder that contains the list's paths
    root: PathBuf,
    /// File with relative paths, one per line, in the order of use
    list: PathBuf,
    /// Number of passes over the list; the last one is timed
    #[arg(long, default_value_t = 2)]
    passes: usize,
    /// Print the time of the fastest pass instead, for calls that cost little compared with the
    /// machine's noise
    #[arg(long)]
    best: bool,
    /// Number of threads, which share the list
    #[arg(long, default_value_t = 1)]
    threads: usize,
}

#[derive(Clone, Copy, ValueEnum)]
enum Work {
    /// open, fstat, read the whole file, close
    Files,
    /// stat of every path
    Stat,
    /// The first call of a process: stat of the first path
    Attach,
    /// Memory that `files` costs this process alone, in bytes: the private pages that the process wrote. Linux also counts pages of
    /// a file that only one process has mapped as private; these belong to the page cache and are left out here
    Memory,
}

pub(crate) fn run(arguments: &Posix) -> Result<(), Failure> {
    let list = fs::read_to_string(&arguments.list)?;
    let paths: Vec<PathBuf> = list.lines().map(|path| arguments.root.join(path)).collect();
    let work: fn(&Path, &mut Vec<u8>) -> nix::Result<()> = match arguments.what {
        Work::Files | Work::Memory => |path, buffer| read_file(path, buffer).map(drop),
        Work::Stat | Work::Attach => |path, _| stat(path).map(|stat| _ = black_box(stat)),
    };
    if matches!(arguments.what, Work::Attach) {
        let start = Instant::now();
        work(paths.first().ok_or("the list is empty")?, &mut Vec::new())?;
        println!("{}", start.elapsed().as_nanos());
        return Ok(());
    }
    let before = private_bytes()?;
    let mut nanoseconds = f64::INFINITY;
    for _ in 0..arguments.passes {
        let next = AtomicUsize::new(0);
        let one = || -> nix::Result<()> {
            let mut buffer = vec![0; 1 << 20];
            while let Some(path) = paths.get(next.fetch_add(1, Ordering::Relaxed)) {
                work(path, &mut buffer)?;
            }
            Ok(())
        };
        let start = Instant::now();
        std::thread::scope(|scope| {
            let threads: Vec<_> = (1..arguments.threads).map(|_| scope.spawn(one)).collect();
            one()?;
            threads.into_iter().try_for_each(|thread| thread.join().unwrap_or(Err(nix::Error::EIO)))
        })?;
        let this_pass = start.elapsed().as_nanos() as f64 / paths.len() as f64;
        nanoseconds = if arguments.best { this_pass.min(nanoseconds) } else { this_pass };
    }
    match arguments.what {
        Work::Memory => println!("{}", private_bytes()?.saturating_sub(before)),
        _ => println!("{nanoseconds:.0}"),
    }
    Ok(())
}

/// Reads a whole file and returns its size.
pub(crate) fn read_file(path: &Path, buffer: &mut Vec<u8>) -> nix::Result<u64> {
    let file = open(path, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?;
    let size = fstat(file.as_fd())?.st_size as usize;
    if buffer.len() < size {
        buffer.resize(size, 0);
    }
    let mut got = 0;
    while got < size {
        match read(file.as_fd(), &mut buffer[got..size])? {
            0 => return Err(nix::Error::EIO),
            count => got += count,
        }
    }
    let number = file.as_raw_fd();
    std::mem::forget(file);
    close(number).map(|()| size as u64)
}

/// Returns the memory of this process alone, in bytes.
fn private_bytes() -> Result<u64, Failure> {
    let rollup = fs::read_to_string("/proc/self/smaps_rollup")?;
    let lines = rollup.lines().filter(|line| line.starts_with("Private_Dirty"));
    let kilobytes = lines.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    Ok(kilobytes.sum::<u64>() * 1024)
}
