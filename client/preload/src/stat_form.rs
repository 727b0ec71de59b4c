//! A view's attributes in the form of C's `struct stat`.

use std::sync::atomic::{AtomicU64, Ordering};

use dayfly_client::Stat;

use crate::memory::zeroed;
use crate::setup::setup;

/// Bytes that programs should read at a time (`st_blksize`).
pub(crate) const IO_SIZE: u32 = 128 << 10;

/// Returns this process's user and group, to which every file of the namespace belongs.
pub(crate) fn owner() -> (u32, u32) {
    /// The user in the upper half, the group in the lower. No user has the highest number.
    static OWNER: AtomicU64 = AtomicU64::new(UNKNOWN);
    const UNKNOWN: u64 = u64::MAX;
    let mut owner = OWNER.load(Ordering::Relaxed);
    if owner == UNKNOWN {
        // SAFETY: both only ask for a number.
        owner = unsafe { u64::from(libc::geteuid()) << 32 | u64::from(libc::getegid()) };
        OWNER.store(owner, Ordering::Relaxed);
    }
    ((owner >> 32) as u32, owner as u32)
}

/// Returns `st_dev` of every file of the namespace.
pub(crate) fn device() -> u64 {
    setup().map_or(0, |setup| setup.device)
}

/// Returns attributes as `struct stat`. The namespace has one time per file, which fills all three fields.
pub(crate) fn kernel_form(stat: &Stat) -> libc::stat {
    let mut form: libc::stat = zeroed();
    (form.st_uid, form.st_gid) = owner();
    form.st_dev = device();
    form.st_ino = stat.inode;
    form.st_mode = stat.mode();
    form.st_nlink = stat.links.into();
    form.st_size = stat.size as i64;
    form.st_blksize = IO_SIZE.into();
    form.st_blocks = stat.size.div_ceil(512) as i64;
    (form.st_mtime, form.st_mtime_nsec) = (stat.mtime_s, stat.mtime_ns.into());
    (form.st_atime, form.st_atime_nsec) = (form.st_mtime, form.st_mtime_nsec);
    (form.st_ctime, form.st_ctime_nsec) = (form.st_mtime, form.st_mtime_nsec);
    form
}
