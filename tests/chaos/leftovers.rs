//! Finds what a run must not leave behind: processes, descriptors, space, folders.

use std::fs;
use std::path::Path;

use nix::sys::statvfs::statvfs;

/// The open descriptors of a process, by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Descriptors {
    pub(crate) sockets: usize,
    /// The number of pidfds.
    pub(crate) processes: usize,
    /// Names and lengths of segments, catalogs and shared memory.
    pub(crate) files: Vec<(String, u64)>,
}

impl Descriptors {
    pub(crate) fn of(pid: i32) -> Self {
        let mut found = Self::default();
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            let target = target.to_string_lossy();
            match () {
                () if target.starts_with("socket:") => found.sockets += 1,
                () if target.contains("pidfd") => found.processes += 1,
                () if target.contains("(deleted)") => {
                    let len = fs::metadata(entry.path()).map_or(0, |metadata| metadata.len());
                    found.files.push((target.rsplit('/').next().unwrap_or_default().to_owned(), len));
                }
                () => {}
            }
        }
        found
    }

    /// Describes the open descriptors if there are more than `before` plus what `datasets` new datasets need. `counts_sockets` says
    /// whether this includes sockets.
    pub(crate) fn excess(&self, before: &Self, datasets: usize, counts_sockets: bool) -> Option<String> {
        // Each dataset has a catalog, its locations and a segment.
        let is_excess = counts_sockets && self.sockets > before.sockets
            || self.processes > before.processes
            || self.files.len() > before.files.len() + 3 * datasets;
        is_excess.then(|| format!("{self:?}, before {before:?} with {datasets} datasets fewer"))
    }
}

/// Returns the processes of the sessions in a runtime folder (servers, supervisor, clients), each with its command line.
pub(crate) fn processes_of(runtime: &Path) -> Vec<(i32, String)> {
    let needle = format!("DAYFLY_RUNTIME_DIR={}\0", runtime.display());
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let Ok(mut environment) = fs::read(entry.path().join("environ")) else { continue };
        environment.push(0);
        if environment.windows(needle.len()).any(|window| window == needle.as_bytes()) {
            let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            found.push((pid, String::from_utf8_lossy(&command).replace('\0', " ")));
        }
    }
    found
}

/// Returns the files and folders in the machine's folders for temporary files that are named after a session.
pub(crate) fn named_after(session: &str) -> Vec<String> {
    let folders =
        ["/tmp", "/dev/shm", "/run"].into_iter().flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
    folders.map(|entry| entry.path().display().to_string()).filter(|path| path.contains(session)).collect()
}

/// Returns the open sockets whose addresses are below a folder.
pub(crate) fn sockets_below(folder: &Path) -> Vec<String> {
    let folder = format!("{}/", folder.display());
    let sockets = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    sockets.lines().filter(|socket| socket.contains(&folder)).map(|socket| format!("socket {socket}")).collect()
}

/// Returns the bytes in use on a file system.
pub(crate) fn taken(folder: &Path) -> u64 {
    let stat = statvfs(folder).unwrap();
    (stat.blocks() - stat.blocks_free()) * stat.fragment_size()
}
