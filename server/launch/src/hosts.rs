//! Host lists, as workload managers and people write them.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use dayfly_meta::limits::{HOSTS_FILE_LEN_MAX, NODES_MAX};
use nix::errno::Errno;
use nix::libc::O_NONBLOCK;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::units::{shortened, show_bytes};

/// Why a list of hosts cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostListError {
    /// An item of the list does not follow the syntax.
    #[error("'{0}' is not a list of hosts such as n1,n2 or n[1-8]")]
    Syntax(String),
    /// The list has more hosts than a session can have.
    #[error("it names more than {NODES_MAX} hosts, the most that a session can have")]
    TooMany,
    /// The list is empty where hosts are needed.
    #[error("it names no hosts")]
    Empty,
}

/// How long to wait before another read of a FIFO that poll called readable, but that has no bytes.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Maximum number of characters of a malformed item that a message shows.
const ITEM_SHOWN_LEN: usize = 100;

/// Expands a host list such as `n[1-3,07],login,r[1-2]c[1-4]`, in order.
///
/// Items are separated by commas or spaces. A number range keeps the width of its first number.
///
/// # Errors
/// Fails if the text is not a host list, or names more than [`NODES_MAX`] hosts.
///
/// ```
/// let hosts = dayfly_launch::expand_host_list("n[08-10],login").unwrap();
/// assert_eq!(hosts, ["n08", "n09", "n10", "login"]);
/// ```
pub fn expand_host_list(list: &str) -> Result<Vec<String>, HostListError> {
    let mut hosts = Vec::new();
    for item in split(list) {
        expand_item(item, &mut hosts).ok_or_else(|| HostListError::Syntax(shortened(item, ITEM_SHOWN_LEN)))?;
        if hosts.len() > NODES_MAX {
            return Err(HostListError::TooMany);
        }
    }
    Ok(hosts)
}

/// Reads a machine file as text. The file may be a FIFO, such as that of `<(scontrol show hostnames)`, whose writer must have
/// finished before the timeout.
///
/// # Errors
/// Fails if the file cannot be read in time, is longer than [`HOSTS_FILE_LEN_MAX`], or is not UTF-8.
pub(crate) fn read_hosts_file(path: &Path, timeout: Duration) -> io::Result<String> {
    let mut content = Vec::new();
    let file = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path)?;
    let deadline = Instant::now() + timeout;
    let mut reader = (&file).take(HOSTS_FILE_LEN_MAX + 1);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut wanted = [PollFd::new(file.as_fd(), PollFlags::POLLIN)];
        match poll(&mut wanted, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
            Ok(0) => {
                let reason = format!("its writer has not finished within {} s", timeout.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
            }
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let before = content.len();
        match reader.read_to_end(&mut content) {
            Ok(_) => break,
            // A FIFO is empty for now.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && content.len() > before => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::sleep(POLL_INTERVAL),
            Err(error) => return Err(error),
        }
    }
    if content.len() as u64 > HOSTS_FILE_LEN_MAX {
        return Err(io::Error::other(format!("it is longer than {}", show_bytes(HOSTS_FILE_LEN_MAX))));
    }
    String::from_utf8(content).map_err(|_| io::Error::other("it is not a text file in UTF-8"))
}

/// Parses a machine file: the first word of each line, each host once, without `:slots`. A `#`
/// begins a comment.
///
/// # Errors
/// Same as for [`expand_host_list`].
pub(crate) fn hosts_of_file(content: &str) -> Result<Vec<String>, HostListError> {
    let mut hosts: Vec<String> = Vec::new();
    for line in content.lines() {
        let word = line.split('#').next().unwrap_or_default().split_whitespace().next().unwrap_or_default();
        // `host:4` means four slots, whereas `::1` is an address.
        let name = word.split_once(':').filter(|(_, slots)| slots.parse::<u32>().is_ok()).map_or(word, |(name, _)| name);
        for host in expand_host_list(name)? {
            if !hosts.contains(&host) {
                hosts.push(host);
            }
        }
        if hosts.len() > NODES_MAX {
            return Err(HostListError::TooMany);
        }
    }
    Ok(hosts)
}

/// Splits a list at commas and spaces outside brackets.
fn split(list: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0;
    let is_end = move |letter: char| {
        depth += i32::from(letter == '[') - i32::from(letter == ']');
        depth == 0 && (letter == ',' || letter.is_whitespace())
    };
    list.split(is_end).filter(|item| !item.is_empty())
}

fn expand_item(item: &str, hosts: &mut Vec<String>) -> Option<()> {
    let Some((before, rest)) = item.split_once('[') else {
        // A leading dash would turn the name into an option of the launcher.
        let is_name =
            !item.starts_with('-') && item.chars().all(|letter| letter.is_ascii_alphanumeric() || "._-@:%".contains(letter));
        return is_name.then(|| hosts.push(item.to_owned()));
    };
    let (ranges, after) = rest.split_once(']')?;
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (from, to): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if to < from {
            return None;
        }
        for number in from..=to {
            expand_item(&format!("{before}{number:0width$}{after}", width = first.len()), hosts)?;
            if hosts.len() > NODES_MAX {
                return Some(());
            }
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_lists_expand_as_managers_mean_them() {
        let check = |list: &str, expect: Option<&str>| {
            let found = expand_host_list(list).ok().map(|hosts| hosts.join(" "));
            assert_eq!(found.as_deref(), expect, "{list}");
        };
        check("n[1-3,7],login", Some("n1 n2 n3 n7 login"));
        check("node[008-011].site", Some("node008.site node009.site node010.site node011.site"));
        check("r[1-2]c[1-2]", Some("r1c1 r1c2 r2c1 r2c2"));
        check("a b,c", Some("a b c"));
        check("10.0.0.1,user@host,fe80::1%eth0", Some("10.0.0.1 user@host fe80::1%eth0"));
        check("", Some(""));
        for wrong in ["n[1-", "n[3-1]", "n[x]", "-oProxyCommand=x", "a;b", "n[0-4294967295]", "$(id)"] {
            check(wrong, None);
        }
    }

    #[test]
    fn a_message_about_a_list_names_the_wrong_item_or_the_bound() {
        let said = |list: &str| expand_host_list(list).unwrap_err().to_string();
        assert_eq!(said("n1,n[3-1],n4"), "'n[3-1]' is not a list of hosts such as n1,n2 or n[1-8]");
        assert!(said(&format!("n[{}", "1".repeat(100_000))).len() < 200, "a long item is cut");
        for list in ["n[1-5000]", "n[0-4294967295]", "n[1-4096],m", "r[1-99]n[1-99]"] {
            assert_eq!(said(list), "it names more than 4096 hosts, the most that a session can have", "{list}");
        }
        assert_eq!(expand_host_list("n[1-4096]").unwrap().len(), NODES_MAX);
        let lines: String = (0..=NODES_MAX).map(|host| format!("n{host}\n")).collect();
        assert_eq!(hosts_of_file(&lines), Err(HostListError::TooMany));
    }

    #[test]
    fn an_endless_hosts_file_is_refused() {
        let said = |path: &str| read_hosts_file(Path::new(path), Duration::from_secs(20)).unwrap_err().to_string();
        assert_eq!(said("/dev/zero"), "it is longer than 64.0MiB");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nodes");
        std::fs::write(&path, b"n1\xff\n").unwrap();
        assert_eq!(said(path.to_str().unwrap()), "it is not a text file in UTF-8");
    }

    #[test]
    fn a_fifo_is_read_to_its_end_unless_its_writer_takes_too_long() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fifo");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let read = |timeout: Duration| read_hosts_file(&path, timeout).map_err(|error| error.to_string());
        assert_eq!(read(Duration::from_millis(30)), Err("its writer has not finished within 0 s".to_owned()));
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut fifo = OpenOptions::new().write(true).open(&path).unwrap();
                for line in ["n1\n", "n2\n"] {
                    std::io::Write::write_all(&mut fifo, line.as_bytes()).unwrap();
                    std::thread::sleep(Duration::from_millis(30));
                }
            });
            assert_eq!(read(Duration::from_secs(60)).as_deref(), Ok("n1\nn2\n"));
            writer.join().unwrap();
        });
    }

    #[test]
    fn a_machine_file_lists_each_host_once() {
        let content = "# mine\nn1 slots=4\nn1\nn2:8\n\n  n[3-4] # two\n::1\n";
        assert_eq!(hosts_of_file(content).unwrap(), ["n1", "n2", "n3", "n4", "::1"]);
    }
}
