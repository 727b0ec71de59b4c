//! `dayfly cp`: copies files out of the namespace.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use dayfly_client::{FileKind, Stat, View};
use dayfly_meta::path::{display, join, split_last};
use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;
use nix::unistd::{AccessFlags, access};

use super::cat::{CopyError, copy};
use crate::args::CpArguments;
use crate::failure::{Failure, complain};
use crate::namespace::{about, view};

pub(super) fn run(arguments: CpArguments) -> Result<ExitCode, Failure> {
    let view = view()?;
    let (target, sources) =
        arguments.paths.split_last().ok_or_else(|| Failure::usage("give at least one SOURCE and a TARGET"))?;
    if view.contains(target.as_bytes()) {
        return Err(Failure::usage(format!(
            "'{}' is in the namespace, which is read-only; 'dayfly stage-in' adds files to it",
            target.display()
        )));
    }
    let target = Path::new(target);
    let into = target.is_dir();
    if sources.len() > 1 && !into {
        return Err(Failure::usage(format!("'{}' is not a directory, which several sources need", target.display())));
    }
    let mut copier = Copier { view: &view, names: HashMap::new(), failed: false };
    for source in sources {
        let source = source.as_bytes().strip_suffix(b"/").unwrap_or(source.as_bytes());
        let name = split_last(source).map_or(&b""[..], |(_, name)| name);
        let to = if into { target.join(OsStr::from_bytes(name)) } else { target.to_owned() };
        // Like cp: without -r, a symbolic link on the command line is followed.
        let stat = if arguments.recursive { view.lstat(source) } else { view.stat(source) };
        match stat {
            Err(error) => copier.complain(&about(source, &error)),
            Ok(stat) if stat.kind == FileKind::Directory && !arguments.recursive => {
                copier.complain(&format!("'{}' is a directory; use -r to copy it", display(source)));
            }
            Ok(stat) => copier.tree(source, stat, to),
        }
    }
    Ok(if copier.failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Copies trees, and continues after errors.
struct Copier<'a> {
    view: &'a View,
    /// The first copy of each file that has several names, by inode. The other names become hard
    /// links to it.
    names: HashMap<u64, PathBuf>,
    failed: bool,
}

/// Work that remains.
enum Task {
    Copy(Vec<u8>, Stat, PathBuf),
    /// Set a directory's times and permissions, once nothing more is written into it.
    Finish(Stat, PathBuf),
}

impl Copier<'_> {
    fn complain(&mut self, message: &str) {
        complain(message);
        self.failed = true;
    }

    fn tree(&mut self, source: &[u8], stat: Stat, to: PathBuf) {
        let mut tasks = vec![Task::Copy(source.to_vec(), stat, to)];
        while let Some(task) = tasks.pop() {
            let (to, done) = match task {
                Task::Finish(stat, to) => {
                    let done = finish(&stat, &to);
                    (to, done)
                }
                Task::Copy(source, stat, to) => {
                    let done = match stat.kind {
                        FileKind::Directory => self.directory(&source, stat, &to, &mut tasks),
                        FileKind::Symlink => self.symlink(&source, &stat, &to),
                        FileKind::File => self.file(&source, &stat, &to),
                    };
                    (to, done)
                }
            };
            if let Err(error) = done {
                self.complain(&format!("cannot copy to '{}': {error}", to.display()));
            }
        }
    }

    fn directory(&mut self, source: &[u8], stat: Stat, to: &Path, tasks: &mut Vec<Task>) -> io::Result<()> {
        match fs::create_dir(to) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && to.is_dir() => {}
            made => made?,
        }
        tasks.push(Task::Finish(stat, to.to_owned()));
        let directory = self.view.open_directory(source).map_err(io::Error::other)?;
        for entry in directory.entries(0) {
            let child = join(source, entry.name);
            let stat = self.view.lstat(&child).map_err(io::Error::other)?;
            tasks.push(Task::Copy(child, stat, to.join(OsStr::from_bytes(entry.name))));
        }
        Ok(())
    }

    fn symlink(&mut self, source: &[u8], stat: &Stat, to: &Path) -> io::Result<()> {
        let target = self.view.read_link(source).map_err(io::Error::other)?;
        if fs::symlink_metadata(to).is_ok_and(|found| is_written_in_place(&found)) {
            return Err(io::Error::other("it is a device, FIFO or socket, which a symbolic link does not replace"));
        }
        replace(to, |temporary| {
            symlink(OsStr::from_bytes(&target), temporary)?;
            set_times(stat, temporary)
        })
    }

    fn file(&mut self, source: &[u8], stat: &Stat, to: &Path) -> io::Result<()> {
        let to = match fs::metadata(to) {
            Ok(found) if found.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            Ok(found) if is_written_in_place(&found) => {
                return self.content(source, &mut OpenOptions::new().write(true).open(to)?);
            }
            Ok(_) => {
                // The rename below would replace even a file that this user may not write.
                access(to, AccessFlags::W_OK)?;
                // Like cp: an existing file is overwritten, even through a symbolic link.
                to.canonicalize()?
            }
            Err(_) if to.is_symlink() => return Err(io::Error::other("it is a symbolic link whose target does not exist")),
            // If the path is unusable for another reason, the creation of the temporary file reports
            // it.
            Err(_) => to.to_owned(),
        };
        replace(&to, |temporary| {
            if let Some(first) = self.names.get(&stat.inode) {
                return fs::hard_link(first, temporary);
            }
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(temporary)?;
            self.content(source, &mut file)?;
            file.set_permissions(fs::Permissions::from_mode(stat.permissions))?;
            set_times(stat, temporary)
        })?;
        if stat.links > 1 {
            self.names.entry(stat.inode).or_insert(to);
        }
        Ok(())
    }

    /// Writes the whole content of a sample to a file.
    fn content(&self, source: &[u8], file: &mut File) -> io::Result<()> {
        let from = self.view.open(source).map_err(io::Error::other)?;
        copy(self.view, &from, file).map_err(|error| match error {
            CopyError::Read(error) => io::Error::other(about(source, &error)),
            CopyError::Write(error) => error,
        })
    }
}

/// Returns whether a file is a device, FIFO or socket. Content is written into such a file, which
/// keeps its name and its permissions.
fn is_written_in_place(found: &Metadata) -> bool {
    !(found.is_file() || found.is_dir() || found.is_symlink())
}

/// Makes a file under a temporary name, and renames it to `to` once it is complete. After a
/// failure, the old file is unchanged, and no partial file could be mistaken for a complete one.
fn replace(to: &Path, make: impl Fn(&Path) -> io::Result<()>) -> io::Result<()> {
    let mut number = 0;
    loop {
        let temporary = to.with_file_name(format!(".dayfly-cp-{}-{number}", std::process::id()));
        match make(&temporary) {
            // An earlier process with the same id was killed and left the file.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            made => {
                let renamed = made.and_then(|()| fs::rename(&temporary, to));
                // A rename between two names of one file does nothing, so the temporary name may
                // exist even after a success.
                let _ = fs::remove_file(&temporary);
                return renamed;
            }
        }
    }
}

fn finish(stat: &Stat, to: &Path) -> io::Result<()> {
    fs::set_permissions(to, fs::Permissions::from_mode(stat.permissions))?;
    set_times(stat, to)
}

fn set_times(stat: &Stat, to: &Path) -> io::Result<()> {
    let time = TimeSpec::new(stat.mtime_s, i64::from(stat.mtime_ns));
    Ok(utimensat(AT_FDCWD, to, &time, &time, UtimensatFlags::NoFollowSymlink)?)
}
