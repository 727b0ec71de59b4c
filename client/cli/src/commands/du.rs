//! `dayfly du`: sums up the bytes of the samples below directories. `df` and `status` show how much
//! space samples take on the nodes' drives.

use std::collections::HashSet;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::process::ExitCode;

use dayfly_client::{FileKind, View, ViewError};
use dayfly_meta::path::join;

use crate::args::DuArguments;
use crate::failure::{Failure, complain, output};
use crate::namespace::{about, paths_or_all, view, write_name};
use crate::size;

pub(super) fn run(arguments: DuArguments) -> Result<ExitCode, Failure> {
    let view = view()?;
    let escapes = io::stdout().is_terminal();
    let mut output = BufWriter::new(output());
    let mut failed = false;
    for path in paths_or_all(&view, arguments.paths.clone()) {
        let mut sums = Vec::new();
        match measure(&view, &path, &mut sums) {
            Ok(()) => {}
            Err(error) => {
                complain(about(&path, &error));
                failed = true;
            }
        }
        let shown = if arguments.summarize { sums.len().saturating_sub(1) } else { 0 };
        for (path, bytes) in &sums[shown..] {
            let bytes = if arguments.human { size::show(*bytes) } else { bytes.div_ceil(1024).to_string() };
            write!(output, "{bytes}\t")?;
            write_name(&mut output, path, escapes)?;
            writeln!(output)?;
        }
    }
    output.flush()?;
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// A directory whose total is being computed.
struct OpenDirectory {
    path: Vec<u8>,
    /// The sum so far.
    bytes: u64,
    /// Paths in the directory that are not counted yet.
    rest: std::vec::IntoIter<Vec<u8>>,
}

/// Appends the sum of each directory to `sums`, after the sums of the directories below it. A file
/// that has several names counts once.
fn measure(view: &View, path: &[u8], sums: &mut Vec<(Vec<u8>, u64)>) -> Result<(), ViewError> {
    let mut seen = HashSet::new();
    let stat = view.lstat(path)?;
    if stat.kind != FileKind::Directory {
        sums.push((path.to_vec(), stat.size));
        return Ok(());
    }
    let mut open = vec![open_directory(view, path.to_vec())?];
    while let Some(directory) = open.last_mut() {
        let Some(child) = directory.rest.next() else {
            let Some(OpenDirectory { path, bytes, .. }) = open.pop() else { break };
            if let Some(parent) = open.last_mut() {
                parent.bytes += bytes;
            }
            sums.push((path, bytes));
            continue;
        };
        let stat = view.lstat(&child)?;
        match stat.kind {
            FileKind::Directory => open.push(open_directory(view, child)?),
            FileKind::File if stat.links > 1 && !seen.insert(stat.inode) => {}
            FileKind::File => directory.bytes += stat.size,
            FileKind::Symlink => {}
        }
    }
    Ok(())
}

fn open_directory(view: &View, path: Vec<u8>) -> Result<OpenDirectory, ViewError> {
    let names: Vec<Vec<u8>> = view.open_directory(&path)?.entries(0).map(|entry| join(&path, entry.name)).collect();
    Ok(OpenDirectory { path, bytes: 0, rest: names.into_iter() })
}
