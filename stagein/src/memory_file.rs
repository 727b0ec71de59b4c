//! Files in memory, for tests that make thousands of files.

use std::fs::File;
use std::io::Write;

use nix::sys::memfd::{MFdFlags, memfd_create};

/// Returns a file with these bytes. Making one in a folder can take milliseconds, where many files were removed just before.
pub(crate) fn file_with(bytes: &[u8]) -> File {
    let mut file = File::from(memfd_create("test", MFdFlags::MFD_CLOEXEC).unwrap());
    file.write_all(bytes).unwrap();
    file
}
