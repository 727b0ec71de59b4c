//! Stands for a parallel file system: a read-only FUSE file system over a directory, which limits the rate of all reads together,
//! delays each operation, and counts operations and bytes. Operations overlap, as far as its threads go.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags, KernelConfig,
    LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs,
    Request, SessionACL, spawn_mount,
};
use nix::sys::signal::{SigSet, Signal};

use crate::measure::Failure;

/// Show a directory as a slow file system, and count what is read from it, until SIGTERM or SIGINT
///
/// Needs root and /dev/fuse. The counts are written to --counts on SIGUSR1 and at the end.
#[derive(Args)]
pub(crate) struct Pfs {
    /// The directory to show
    source: PathBuf,
    /// An empty directory to mount it on
    mount: PathBuf,
    /// Bytes per second of all reads together
    #[arg(long, default_value_t = u64::MAX)]
    rate: u64,
    /// How much later each operation is answered, in milliseconds
    #[arg(long, default_value_t = 0)]
    delay_ms: u64,
    /// Let the kernel cache pages; otherwise each read of a program is an operation
    #[arg(long)]
    page_cache: bool,
    /// File for the counts, as JSON
    #[arg(long)]
    counts: Option<PathBuf>,
}

/// Operations that are answered at the same time.
const THREADS: usize = 128;
/// Length of the longest read that the kernel asks for at once.
const READ_LEN_MAX: u32 = 1 << 20;
/// How long the kernel remembers attributes and names, as the client of a parallel file system would.
const REMEMBERED: Duration = Duration::from_secs(10);

#[derive(Default)]
struct Counts {
    opens: AtomicU64,
    lookups: AtomicU64,
    lists: AtomicU64,
    reads: AtomicU64,
    bytes: AtomicU64,
}

impl Counts {
    fn write(&self, path: Option<&Path>) -> io::Result<()> {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let text = format!(
            "{{\"opens\": {}, \"lookups\": {}, \"lists\": {}, \"reads\": {}, \"bytes\": {}}}\n",
            count(&self.opens),
            count(&self.lookups),
            count(&self.lists),
            count(&self.reads),
            count(&self.bytes)
        );
        let Some(path) = path else { return Ok(()) };
        // Whoever waits for the file never sees a part of it.
        let new = path.with_extension("new");
        fs::write(&new, text)?;
        fs::rename(&new, path)
    }
}

struct SlowFiles {
    source: PathBuf,
    rate: u64,
    delay: Duration,
    page_cache: bool,
    counts: Arc<Counts>,
    /// When the bytes that have been promised so far will have been read.
    busy_until: Mutex<Instant>,
    /// Paths below the source, by inode.
    paths: Mutex<HashMap<u64, PathBuf>>,
    open: Mutex<HashMap<u64, Arc<File>>>,
    last_handle: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_i32(error.raw_os_error().unwrap_or(nix::libc::EIO))
}

impl SlowFiles {
    fn path(&self, inode: INodeNo) -> PathBuf {
        if inode == INodeNo::ROOT {
            return self.source.clone();
        }
        lock(&self.paths).get(&inode.0).cloned().unwrap_or_default()
    }

    fn attributes(&self, path: &Path) -> io::Result<FileAttr> {
        let metadata = fs::symlink_metadata(path)?;
        let inode = if path == self.source { INodeNo::ROOT } else { INodeNo(metadata.ino()) };
        if inode != INodeNo::ROOT {
            lock(&self.paths).insert(inode.0, path.to_owned());
        }
        Ok(attributes(&metadata, inode))
    }

    /// Waits as long as a read of `bytes` bytes takes.
    fn wait(&self, bytes: u64) {
        let now = Instant::now();
        let read_at = {
            let mut busy_until = lock(&self.busy_until);
            *busy_until = (*busy_until).max(now) + Duration::from_secs_f64(bytes as f64 / self.rate as f64);
            *busy_until
        };
        std::thread::sleep(read_at.max(now + self.delay).saturating_duration_since(now));
    }
}

fn attributes(metadata: &Metadata, ino: INodeNo) -> FileAttr {
    let time = |s: i64, ns: i64| {
        let since = Duration::new(s.unsigned_abs(), ns as u32);
        if s < 0 { UNIX_EPOCH - since } else { UNIX_EPOCH + since }
    };
    let kind = metadata.file_type();
    FileAttr {
        ino,
        size: metadata.len(),
        blocks: metadata.blocks(),
        atime: time(metadata.atime(), metadata.atime_nsec()),
        mtime: time(metadata.mtime(), metadata.mtime_nsec()),
        ctime: time(metadata.ctime(), metadata.ctime_nsec()),
        crtime: SystemTime::UNIX_EPOCH,
        kind: match kind {
            kind if kind.is_dir() => FileType::Directory,
            kind if kind.is_symlink() => FileType::Symlink,
            _ => FileType::RegularFile,
        },
        perm: (metadata.mode() & 0o7777) as u16,
        nlink: metadata.nlink() as u32,
        uid: metadata.uid(),
        gid: metadata.gid(),
        rdev: 0,
        blksize: READ_LEN_MAX,
        flags: 0,
    }
}

impl Filesystem for SlowFiles {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // A kernel that refuses one of these reads in smaller pieces, or looks up one name of a directory after the other.
        let flags = InitFlags::FUSE_MAX_PAGES | InitFlags::FUSE_ASYNC_READ | InitFlags::FUSE_PARALLEL_DIROPS;
        let _ = config.add_capabilities(flags);
        let _ = config.set_max_write(READ_LEN_MAX);
        let _ = config.set_max_readahead(READ_LEN_MAX);
        let _ = config.set_max_background(THREADS as u16);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.counts.lookups.fetch_add(1, Ordering::Relaxed);
        self.wait(0);
        match self.attributes(&self.path(parent).join(name)) {
            Ok(attributes) => reply.entry(&REMEMBERED, &attributes, Generation(0)),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.counts.lookups.fetch_add(1, Ordering::Relaxed);
        self.wait(0);
        match self.attributes(&self.path(inode)) {
            Ok(attributes) => reply.attr(&REMEMBERED, &attributes),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn readlink(&self, _: &Request, inode: INodeNo, reply: ReplyData) {
        match fs::read_link(self.path(inode)) {
            Ok(target) => reply.data(target.as_os_str().as_encoded_bytes()),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn open(&self, _: &Request, inode: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.counts.opens.fetch_add(1, Ordering::Relaxed);
        self.wait(0);
        match File::open(self.path(inode)) {
            Ok(file) => {
                let handle = self.last_handle.fetch_add(1, Ordering::Relaxed) + 1;
                lock(&self.open).insert(handle, Arc::new(file));
                let flags = if self.page_cache { FopenFlags::FOPEN_KEEP_CACHE } else { FopenFlags::FOPEN_DIRECT_IO };
                reply.opened(FileHandle(handle), flags);
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(file) = lock(&self.open).get(&handle.0).cloned() else { return reply.error(Errno::EBADF) };
        let mut bytes = vec![0; size as usize];
        let mut filled = 0;
        while filled < bytes.len() {
            match file.read_at(&mut bytes[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) => return reply.error(errno(&error)),
            }
        }
        self.counts.reads.fetch_add(1, Ordering::Relaxed);
        self.counts.bytes.fetch_add(filled as u64, Ordering::Relaxed);
        self.wait(filled as u64);
        reply.data(&bytes[..filled]);
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        lock(&self.open).remove(&handle.0);
        reply.ok();
    }

    fn readdir(&self, _: &Request, inode: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        if offset == 0 {
            self.counts.lists.fetch_add(1, Ordering::Relaxed);
            self.wait(0);
        }
        let listed = fs::read_dir(self.path(inode)).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        let mut entries = match listed {
            Ok(entries) => entries,
            Err(error) => return reply.error(errno(&error)),
        };
        entries.sort_by_key(fs::DirEntry::file_name);
        for (number, entry) in (0_u64..).zip(entries).skip(offset as usize) {
            let kind = entry.file_type().map_or(FileType::RegularFile, |kind| match kind {
                kind if kind.is_dir() => FileType::Directory,
                kind if kind.is_symlink() => FileType::Symlink,
                _ => FileType::RegularFile,
            });
            let inode = entry.metadata().map_or(0, |metadata| metadata.ino());
            if reply.add(INodeNo(inode), number + 1, kind, entry.file_name()) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        reply.statfs(1 << 30, 1 << 29, 1 << 29, 1 << 20, 1 << 20, 4096, 255, 4096);
    }
}

/// Lets the kernel read ahead by as much as one read may ask for. Its default for FUSE, 128 KiB, would split a program's reads into
/// up to eight operations, and count against whatever reads through the page cache.
fn read_ahead(mount: &Path) -> io::Result<()> {
    let device = fs::metadata(mount)?.dev();
    let (major, minor) = (nix::sys::stat::major(device), nix::sys::stat::minor(device));
    fs::write(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"), (READ_LEN_MAX / 1024).to_string())
}

/// Mounts the file system, and serves it until a signal comes.
pub(crate) fn run(arguments: &Pfs) -> Result<(), Failure> {
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT, Signal::SIGUSR1]);
    // All threads inherit the mask, so that only `wait` below receives these signals.
    signals.thread_block()?;
    let counts = Arc::new(Counts::default());
    let files = SlowFiles {
        source: fs::canonicalize(&arguments.source)?,
        rate: arguments.rate.max(1),
        delay: Duration::from_millis(arguments.delay_ms),
        page_cache: arguments.page_cache,
        counts: counts.clone(),
        busy_until: Mutex::new(Instant::now()),
        paths: Mutex::default(),
        open: Mutex::default(),
        last_handle: AtomicU64::new(0),
    };
    let mut config = Config::default();
    config.mount_options = vec![MountOption::RO, MountOption::FSName("dayfly-bench".to_owned()), MountOption::DefaultPermissions];
    config.acl = SessionACL::All;
    config.n_threads = Some(THREADS);
    config.clone_fd = true;
    let session = spawn_mount(files, &arguments.mount, &config)?;
    if arguments.page_cache {
        read_ahead(&arguments.mount)?;
    }
    while signals.wait()? == Signal::SIGUSR1 {
        counts.write(arguments.counts.as_deref())?;
    }
    // Unmounts.
    drop(session);
    Ok(counts.write(arguments.counts.as_deref())?)
}
