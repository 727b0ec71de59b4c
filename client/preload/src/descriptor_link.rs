//! Paths that lead through a link to one of this process's descriptors: `/dev/fd/N`, `/proc/self/fd/N` and the like.
//!
//! The kernel follows such a link to whatever it has open at the number. If the number is ours, that is a placeholder.
//! Likewise it follows `/proc/self/cwd` to its own working directory, which is an empty one while the program's is in the
//! namespace.

use std::os::fd::RawFd;

use crate::memory;

/// Splits a path that leads through a link to one of this process's descriptors. Returns the descriptor's number and the rest of
/// the path, which is empty or begins with a slash. Such links are `/dev/stdin`, `/dev/fd/N`, `/proc/self/fd/N`,
/// `/proc/thread-self/fd/N`, `/proc/PID/fd/N`, and the same links below `task/TID`.
#[inline]
pub(crate) fn descriptor_link(path: &[u8]) -> Option<(RawFd, &[u8])> {
    match path.get(..5)? {
        b"/dev/" if &path[5..] == b"stdin" => Some((0, b"")),
        b"/dev/" | b"/proc" => link_number(path),
        _ => None,
    }
}

/// Like [`descriptor_link`], but without `/dev/stdin`, which is a link to a link.
pub(crate) fn link_number(path: &[u8]) -> Option<(RawFd, &[u8])> {
    let rest = match path.strip_prefix(b"/dev/fd/") {
        Some(rest) => rest,
        None => fd_folder(path.strip_prefix(b"/proc/")?)?,
    };
    let end = rest.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(rest.len());
    let (number, rest) = rest.split_at(end);
    // The kernel does not accept a number with a leading zero.
    if number.starts_with(b"0") && number.len() > 1 || !(rest.is_empty() || rest.starts_with(b"/")) {
        return None;
    }
    Some((std::str::from_utf8(number).ok()?.parse().ok()?, rest))
}

/// Returns what follows a link to this process's working directory, which is empty or begins with a slash. Such links are
/// `/proc/self/cwd`, `/proc/thread-self/cwd`, `/proc/PID/cwd`, and the same links below `task/TID`.
#[inline]
pub(crate) fn directory_link(path: &[u8]) -> Option<&[u8]> {
    of_this_process(path.strip_prefix(b"/proc/")?, b"cwd")
}

/// Returns what follows `fd/` in a path below /proc, if the path leads to the descriptors of this process.
fn fd_folder(path: &[u8]) -> Option<&[u8]> {
    of_this_process(path, b"fd")?.strip_prefix(b"/")
}

/// Returns what follows a name in a path below /proc, if it is the name of an entry of this process. The rest is empty or begins
/// with a slash.
fn of_this_process<'a>(path: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let (process, rest) = split_name(path)?;
    // Threads share the process's descriptors and its working directory.
    let (thread, rest) = match rest.strip_prefix(b"task/") {
        Some(rest) => split_name(rest).map(|(thread, rest)| (Some(thread), rest))?,
        None => (None, rest),
    };
    let below = rest.strip_prefix(name).filter(|below| below.is_empty() || below.starts_with(b"/"))?;
    let is_ours = matches!(process, b"self" | b"thread-self") || is_thread_here(process);
    (is_ours && thread.is_none_or(is_thread_here)).then_some(below)
}

fn split_name(path: &[u8]) -> Option<(&[u8], &[u8])> {
    let slash = path.iter().position(|&byte| byte == b'/')?;
    Some((&path[..slash], &path[slash + 1..]))
}

/// Returns whether a name is the number of this process or of one of its threads.
fn is_thread_here(name: &[u8]) -> bool {
    let number = std::str::from_utf8(name).ok().filter(|name| !name.starts_with(['0', '+', '-']));
    let Some(number) = number.and_then(|number| number.parse::<libc::pid_t>().ok()) else { return false };
    let before = memory::errno();
    // SAFETY: signal 0 is never delivered; the call only asks whether this process has such a thread.
    let is_thread = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), number, 0) } == 0;
    memory::set_errno(before);
    is_thread
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_descriptors_are_recognized() {
        let check = |path: &str, expect: Option<(RawFd, &str)>| {
            let expect = expect.map(|(number, rest)| (number, rest.as_bytes()));
            assert_eq!(descriptor_link(path.as_bytes()), expect, "{path}");
        };
        let process = std::process::id();
        check("/dev/fd/7", Some((7, "")));
        check("/dev/stdin", Some((0, "")));
        check("/proc/self/fd/12", Some((12, "")));
        check("/proc/self/fd/0", Some((0, "")));
        check("/proc/self/fd/12/a/b", Some((12, "/a/b")));
        check("/proc/thread-self/fd/12", Some((12, "")));
        check(&format!("/proc/{process}/fd/12"), Some((12, "")));
        check(&format!("/proc/{process}/task/{process}/fd/12/"), Some((12, "/")));
        check(&format!("/proc/self/task/{process}/fd/12"), Some((12, "")));
        check(&format!("/proc/0{process}/fd/12"), None);
        check("/proc/1/fd/12", None);
        check("/proc/self/fd/012", None);
        check("/proc/self/fd/+12", None);
        check("/proc/self/fd/12a", None);
        check("/proc/self/fd/", None);
        check("/proc/self/fdinfo/1", None);
        check("/dev/null", None);
        check("/de", None);
    }

    #[test]
    fn paths_through_the_working_directory_are_recognized() {
        let check = |path: &str, expect: Option<&str>| {
            assert_eq!(directory_link(path.as_bytes()), expect.map(str::as_bytes), "{path}");
        };
        let process = std::process::id();
        check("/proc/self/cwd", Some(""));
        check("/proc/self/cwd/a/b", Some("/a/b"));
        check("/proc/thread-self/cwd/", Some("/"));
        check(&format!("/proc/{process}/cwd"), Some(""));
        check(&format!("/proc/{process}/task/{process}/cwd/a"), Some("/a"));
        check("/proc/1/cwd", None);
        check("/proc/self/cwd2", None);
        check("/proc/self/root", None);
        check("/proc/cwd", None);
    }
}
