//! Reads the names in a directory without the C library's directory streams, which call `malloc`: a process may look for its
//! session in a signal handler that has interrupted `malloc`.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::libc;

/// Offsets of a record's length and name in the kernel's `struct linux_dirent64`.
const LEN_AT: usize = 16;
const NAME_AT: usize = 19;

/// Returns the names in a directory, without `.` and `..`.
pub(super) fn names_in(folder: &Path) -> io::Result<Vec<OsString>> {
    let directory = File::open(folder)?;
    let mut buffer = vec![0_u8; 32 << 10];
    let mut names = Vec::new();
    loop {
        // SAFETY: an open descriptor and a live buffer with its length. Calls the kernel directly, because glibc has a function for
        // this only since version 2.30.
        let got = unsafe { libc::syscall(libc::SYS_getdents64, directory.as_raw_fd(), buffer.as_mut_ptr(), buffer.len()) };
        let mut records = &buffer[..usize::try_from(got).map_err(|_| io::Error::last_os_error())?];
        if records.is_empty() {
            return Ok(names);
        }
        while let Some((name, rest)) = split_record(records) {
            if name != "." && name != ".." {
                names.push(name.to_owned());
            }
            records = rest;
        }
    }
}

/// Returns the first record's name, and the records after it.
fn split_record(records: &[u8]) -> Option<(&OsStr, &[u8])> {
    let len = records.get(LEN_AT..LEN_AT + 2)?;
    let (record, rest) = records.split_at_checked(u16::from_ne_bytes([len[0], len[1]]).into())?;
    let name = record.get(NAME_AT..)?.split(|&byte| byte == 0).next()?;
    Some((OsStr::from_bytes(name), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_names_of_a_directory_are_found() {
        let folder = tempfile::tempdir().unwrap();
        assert!(names_in(folder.path()).unwrap().is_empty());
        let mut expected: Vec<OsString> = (0..2000).map(|number| format!("a name with number {number}").into()).collect();
        expected.iter().for_each(|name| drop(File::create(folder.path().join(name)).unwrap()));
        let mut found = names_in(folder.path()).unwrap();
        expected.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, expected);
        assert_eq!(names_in(&folder.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
