//! `dayfly ls`: lists directories in the namespace.

use std::io::{self, BufWriter, IsTerminal, Write};
use std::process::ExitCode;

use dayfly_client::{FileKind, Stat, View, ViewError};
use dayfly_meta::path::join;
use nix::unistd::{Group, User, getegid, geteuid};

use crate::args::LsArguments;
use crate::failure::{Failure, Output, complain, output};
use crate::namespace::{about, paths_or_all, view, write_name};
use crate::size;

pub(super) fn run(arguments: LsArguments) -> Result<ExitCode, Failure> {
    let view = view()?;
    let paths = paths_or_all(&view, arguments.paths.clone());
    let (user, group) = (User::from_uid(geteuid()), Group::from_gid(getegid()));
    let mut lister = Lister {
        view: &view,
        arguments: &arguments,
        owner: user.ok().flatten().map_or_else(|| geteuid().to_string(), |user| user.name),
        group: group.ok().flatten().map_or_else(|| getegid().to_string(), |group| group.name),
        escapes: io::stdout().is_terminal(),
        output: BufWriter::new(output()),
        failed: false,
    };
    let (files, directories): (Vec<_>, Vec<_>) = paths
        .iter()
        .filter_map(|path| {
            let stat = if arguments.long { view.lstat(path) } else { view.stat(path) };
            stat.map_err(|error| lister.complain(path, &error)).ok().map(|stat| (path, stat))
        })
        .partition(|(_, stat)| stat.kind != FileKind::Directory);
    for (path, stat) in &files {
        lister.line(path, path, stat)?;
    }
    let titled = paths.len() > 1 || arguments.recursive;
    for (number, (path, _)) in directories.iter().enumerate() {
        if number > 0 || !files.is_empty() {
            writeln!(lister.output)?;
        }
        lister.directory(path, titled)?;
    }
    lister.output.flush()?;
    Ok(if lister.failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Lists paths, and continues after errors.
struct Lister<'a> {
    view: &'a View,
    arguments: &'a LsArguments,
    owner: String,
    group: String,
    escapes: bool,
    output: BufWriter<Output>,
    failed: bool,
}

impl Lister<'_> {
    fn complain(&mut self, path: &[u8], error: &ViewError) {
        complain(about(path, error));
        self.failed = true;
    }

    /// Lists a directory, and with -R everything below it in the order of `ls -R`.
    fn directory(&mut self, top: &[u8], titled: bool) -> Result<(), Failure> {
        let mut waiting = vec![top.to_vec()];
        let mut is_first = true;
        while let Some(path) = waiting.pop() {
            if !std::mem::take(&mut is_first) {
                writeln!(self.output)?;
            }
            if titled {
                self.name(&path)?;
                writeln!(self.output, ":")?;
            }
            let directory = match self.view.open_directory(&path) {
                Ok(directory) => directory,
                Err(error) => {
                    self.complain(&path, &error);
                    continue;
                }
            };
            let mut below = Vec::new();
            for entry in directory.entries(0) {
                let child = join(&path, entry.name);
                if self.arguments.long {
                    match self.view.lstat(&child) {
                        Ok(stat) => self.line(&child, entry.name, &stat)?,
                        Err(error) => self.complain(&child, &error),
                    }
                } else {
                    self.name(entry.name)?;
                    writeln!(self.output)?;
                }
                if self.arguments.recursive && entry.kind == FileKind::Directory {
                    below.push(child);
                }
            }
            waiting.extend(below.into_iter().rev());
        }
        Ok(())
    }

    fn line(&mut self, path: &[u8], name: &[u8], stat: &Stat) -> Result<(), Failure> {
        if self.arguments.long {
            let size = if self.arguments.human { size::show(stat.size) } else { stat.size.to_string() };
            let (mode, time) = (mode_text(stat), time_text(stat));
            write!(self.output, "{mode} {:>3} {} {} {size:>10} {time} ", stat.links, self.owner, self.group)?;
        }
        self.name(name)?;
        if self.arguments.long && stat.kind == FileKind::Symlink {
            write!(self.output, " -> ")?;
            match self.view.read_link(path) {
                Ok(target) => self.name(&target)?,
                Err(error) => self.complain(path, &error),
            }
        }
        Ok(writeln!(self.output)?)
    }

    fn name(&mut self, name: &[u8]) -> Result<(), Failure> {
        Ok(write_name(&mut self.output, name, self.escapes)?)
    }
}

/// Formats type and permissions, as in `-rw-r--r--`.
pub(super) fn mode_text(stat: &Stat) -> String {
    let kind = match stat.kind {
        FileKind::File => '-',
        FileKind::Directory => 'd',
        FileKind::Symlink => 'l',
    };
    let mut text = String::from(kind);
    for (shift, special_bit, special) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = stat.permissions >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (stat.permissions & special_bit != 0, bits & 1 != 0) {
            (false, false) => '-',
            (false, true) => 'x',
            (true, true) => special,
            (true, false) => special.to_ascii_uppercase(),
        });
    }
    text
}

/// Formats the modification time in local time.
pub(super) fn time_text(stat: &Stat) -> String {
    let time = jiff::Timestamp::new(stat.mtime_s, stat.mtime_ns as i32);
    time.map_or_else(
        |_| format!("@{}", stat.mtime_s),
        |time| time.to_zoned(jiff::tz::TimeZone::system()).strftime("%Y-%m-%d %H:%M").to_string(),
    )
}
