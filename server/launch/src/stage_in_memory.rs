//! Computes how much memory a server may use for stage-ins.
//!
//! The user may set the bound. Otherwise it is fixed, or lower if the server's control group is
//! small. The bound is never a share of the machine's memory, because that memory belongs to the
//! job.

use std::fs;
use std::path::{Path, PathBuf};

use dayfly_meta::limits::{STAGE_IN_MEMORY_DEFAULT, STAGE_IN_MEMORY_MIN, stage_in_memory_min};

use crate::error::LaunchError;

/// The stage-ins of all servers in a control group take at most the group's limit divided by this
/// number, because the job's processes are in the group too.
const GROUP_DIVISOR: u64 = 4;

/// Checks that the memory suffices for the number of workers, or for one worker if the number is
/// not given.
pub(crate) fn check(wanted: Option<u64>, workers: Option<u16>) -> Result<(), LaunchError> {
    let minimum = stage_in_memory_min(workers.map_or(1, usize::from));
    match wanted {
        Some(wanted) if wanted < minimum => Err(LaunchError::StageInMemoryTooSmall { minimum, workers }),
        _ => Ok(()),
    }
}

/// Returns the bytes that each of `servers` servers in this process's control group may take.
pub(crate) fn per_server(wanted: Option<u64>, servers: u16, workers: Option<u16>) -> u64 {
    let minimum = stage_in_memory_min(workers.map_or(1, usize::from));
    let default = || default(group_limit(Path::new("/proc/self/cgroup"), Path::new("/sys/fs/cgroup")), servers);
    wanted.unwrap_or_else(|| default().max(minimum))
}

fn default(limit: Option<u64>, servers: u16) -> u64 {
    let share = limit.map_or(u64::MAX, |limit| limit / GROUP_DIVISOR / u64::from(servers.max(1)));
    share.clamp(STAGE_IN_MEMORY_MIN, STAGE_IN_MEMORY_DEFAULT)
}

/// Returns the lowest memory limit of the control groups that this process is in, or `None` if
/// there is none.
fn group_limit(groups: &Path, root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(groups).ok()?;
    let mut lowest = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        // A line for version 2 of control groups names no controllers. For version 1, only the line
        // of the memory controller matters.
        let (root, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => continue,
        };
        let mut at: PathBuf = root.join(path.trim_start_matches('/'));
        // In a container the path may be the host's, which does not exist here; the root is then
        // our group.
        while at.starts_with(&root) {
            let value = fs::read_to_string(at.join(file)).ok().and_then(|text| text.trim().parse::<u64>().ok());
            lowest = [lowest, value].into_iter().flatten().min();
            if !at.pop() {
                break;
            }
        }
    }
    lowest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_limit_among_a_group_and_its_parents_counts() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("fs/job/step")).unwrap();
        fs::create_dir_all(at("fs/memory/a")).unwrap();
        fs::write(at("fs/job/memory.max"), "8589934592\n").unwrap();
        fs::write(at("fs/job/step/memory.max"), "max\n").unwrap();
        fs::write(at("fs/memory/a/memory.limit_in_bytes"), "1000").unwrap();
        let check = |groups: &str, expect| {
            fs::write(at("cgroup"), groups).unwrap();
            assert_eq!(group_limit(&at("cgroup"), &at("fs")), expect, "{groups}");
        };
        check("0::/job/step\n", Some(8 << 30));
        check("0::/\n", None);
        check("0::/not/here\n", None);
        check("4:cpu,memory:/a\n1:cpuset:/a\n", Some(1000));
        assert_eq!(group_limit(&at("nothing"), &at("fs")), None);
        assert_eq!((default(None, 4), default(Some(8 << 30), 4)), (STAGE_IN_MEMORY_DEFAULT, 512 << 20));
        assert_eq!(default(Some(1 << 20), 1), STAGE_IN_MEMORY_MIN);
    }
}
