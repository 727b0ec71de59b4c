//! Whether anybody else uses a file without a name.

use std::fs::File;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::libc::{self, F_SETLEASE, F_UNLCK, F_WRLCK};

/// Returns whether anybody but this file's only descriptor has the file open, maps it, or runs it. `None` if its file system cannot tell.
pub(super) fn is_used_elsewhere(file: &File) -> Option<bool> {
    let lease = |kind: libc::c_int| {
        // SAFETY: the call takes numbers only, and the descriptor is open for as long as `file` is borrowed.
        Errno::result(unsafe { libc::fcntl(file.as_raw_fd(), F_SETLEASE, kind) })
    };
    // The kernel grants a lease for writing only if nobody else has the file open.
    match lease(F_WRLCK) {
        Ok(_) => lease(F_UNLCK).ok().map(|_| false),
        Err(Errno::EAGAIN) => Some(true),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::read_only;

    #[test]
    #[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    fn descriptors_and_mappings_are_seen() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let other = read_only(&file).unwrap();
        assert_eq!(is_used_elsewhere(&file), Some(true));
        assert_eq!(is_used_elsewhere(&other), Some(true));
        drop(file);
        assert_eq!(is_used_elsewhere(&other), Some(false));
        let third = read_only(&other).unwrap();
        let mapping = dayfly_meta::shared::map_immutable(&third).unwrap();
        drop(third);
        assert_eq!(is_used_elsewhere(&other), Some(true));
        drop(mapping);
        assert_eq!(is_used_elsewhere(&other), Some(false));
        read_only(&other).unwrap();
    }
}
