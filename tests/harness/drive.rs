//! Makes drives fail: with a file system on a loop device whose backing file cannot grow, and with `strace`, which makes system
//! calls fail or delays them. Also drops pages from the page cache, so that the next read reaches the drive.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Stdio};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

/// An ext4 file system that is far larger than its backing store. A write that does not fit in the store fails when it is written
/// back, not earlier.
pub(crate) struct ThinDrive {
    backing: PathBuf,
    mounted: PathBuf,
}

impl ThinDrive {
    /// Returns `None`, with a message on standard error, if this user cannot mount.
    pub(crate) fn new(folder: &Path, backing_mib: u32) -> Option<Self> {
        let drive = Self { backing: folder.join("backing"), mounted: folder.join("mounted") };
        [&drive.backing, &drive.mounted].into_iter().for_each(|path| fs::create_dir_all(path).unwrap());
        let image = drive.backing.join("image");
        let (backing, image_path, mounted) = (drive.backing.display(), image.display(), drive.mounted.display());
        let script = format!(
            "mount -t tmpfs -o size={backing_mib}m none {backing} && truncate -s 1G {image_path} \
             && mkfs.ext4 -q -F -m 0 -N 256 -J size=4 -E lazy_itable_init=0,lazy_journal_init=0,nodiscard {image_path} \
             && mount -o loop {image_path} {mounted}"
        );
        let made = super::program("sh").args(["-c", &script]).output().unwrap();
        if made.status.success() {
            return Some(drive);
        }
        super::skip(&format!("no loop device can be mounted here: {}", super::text(&made.stderr)));
        None
    }

    pub(crate) fn path(&self) -> &Path {
        &self.mounted
    }

    /// Fills all remaining space of the backing store.
    pub(crate) fn fill(&self) {
        let mut filler = File::create(self.backing.join("filler")).unwrap();
        while filler.write_all(&[1; 4096]).is_ok() {}
    }

    /// Writes back everything that can be written back.
    pub(crate) fn sync(&self) {
        // The call fails if the drive fails.
        let _ = nix::unistd::syncfs(File::open(&self.mounted).unwrap());
    }
}

impl Drop for ThinDrive {
    fn drop(&mut self) {
        for mounted in [&self.mounted, &self.backing] {
            // Unmount lazily, because files may still be open. The command fails if nothing is mounted.
            let _ = super::program("umount").arg("-l").arg(mounted).stderr(Stdio::null()).status();
        }
    }
}

/// A small file system in memory, unmounted when this value is dropped.
pub(crate) struct SmallDrive(PathBuf);

impl SmallDrive {
    /// Mounts one of a size, such as `64m`, at a folder, and creates the folder if it does not exist. Returns `None`, with a message on
    /// standard error, if this user cannot mount.
    pub(crate) fn mount(at: PathBuf, size: &str) -> Option<Self> {
        fs::create_dir_all(&at).unwrap();
        let mounted =
            super::program("mount").args(["-t", "tmpfs", "-o", &format!("size={size}"), "none"]).arg(&at).output().unwrap();
        if mounted.status.success() {
            return Some(Self(at));
        }
        super::skip(&format!("no file system can be mounted here: {}", super::text(&mounted.stderr)));
        None
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Fills all remaining space, except for `spare` bytes, as another program would.
    pub(crate) fn fill(&self, spare: u64) {
        let mut filler = File::options().create(true).append(true).open(self.filler()).unwrap();
        while filler.write_all(&[1; 512]).is_ok() {}
        let len = filler.metadata().unwrap().len();
        filler.set_len(len.saturating_sub(spare)).unwrap();
    }

    /// Frees what `fill` has filled.
    pub(crate) fn make_room(&self) {
        fs::remove_file(self.filler()).unwrap();
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }
}

impl Drop for SmallDrive {
    fn drop(&mut self) {
        // Unmount lazily, because a server that is exiting may still have files open.
        let _ = super::program("umount").arg("-l").arg(&self.0).status();
    }
}

/// Returns the unnamed files that a process has open below a folder. Each file is returned once.
fn nameless_files(pid: i32, folder: &Path) -> Vec<File> {
    let mut found = std::collections::BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten() {
        if fs::read_link(entry.path())
            .is_ok_and(|target| target.starts_with(folder) && target.to_string_lossy().contains("(deleted)"))
            && let Ok(file) = File::open(entry.path())
        {
            found.insert(file.metadata().unwrap().ino(), file);
        }
    }
    found.into_values().collect()
}

/// Returns the number of bytes that a process's unnamed files occupy below a folder.
pub(crate) fn taken_by(pid: i32, folder: &Path) -> u64 {
    nameless_files(pid, folder).iter().map(|file| file.metadata().unwrap().blocks() * 512).sum()
}

/// Drops a process's unnamed files below a folder from the page cache, except for pages that have not been written back.
pub(crate) fn evict(pid: i32, folder: &Path) {
    for file in nameless_files(pid, folder) {
        posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
    }
}

/// Makes system calls of a running process fail or delays them, until this value is dropped.
pub(crate) struct Injected {
    strace: Child,
    /// This stays open, because `strace` prints a message for each thread, and would exit if the message could not be written.
    _messages: BufReader<ChildStderr>,
}

impl Injected {
    /// Injects `what`, which is an argument of `strace -e inject=`. Returns `None`, with a message on standard error, if there is
    /// no `strace` or if it may not trace.
    pub(crate) fn into(pid: i32, what: &str) -> Option<Self> {
        let call = what.split(':').next().unwrap();
        if !super::is_installed("strace") {
            return None;
        }
        let mut strace = super::program("strace");
        strace.args([
            "-f",
            "-o",
            "/dev/null",
            "-e",
            &format!("trace={call}"),
            "-e",
            &format!("inject={what}"),
            "-p",
            &pid.to_string(),
        ]);
        let mut child = strace.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut printed = BufReader::new(child.stderr.take().unwrap());
        printed.read_line(&mut line).unwrap();
        if line.contains("attached") {
            return Some(Self { strace: child, _messages: printed });
        }
        super::skip(&format!("strace cannot attach: {line}"));
        child.wait().unwrap();
        None
    }
}

impl Drop for Injected {
    fn drop(&mut self) {
        // SIGTERM makes strace detach from the process properly; SIGKILL would not.
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.strace.id() as i32), nix::sys::signal::Signal::SIGTERM);
        let _ = self.strace.wait();
    }
}
