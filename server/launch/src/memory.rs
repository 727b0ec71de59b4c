//! How much memory a server may take for stage-ins: what its user says, or a bound of our own that the control group it runs in may
//! lower. Never a share of what the machine has: that is the job's.

use std::fs;
use std::path::{Path, PathBuf};

use dayfly_meta::limits::{STAGE_IN_MEMORY_DEFAULT, STAGE_IN_MEMORY_MIN, stage_in_memory_min};

use crate::failure::Failure;
use crate::size;

/// Of a control group's limit, the share of all its servers' stage-ins: the job lives there too.
const GROUP_SHARE: u64 = 4;

/// Whether it is enough, for so many workers if their number is given.
pub(super) fn check(wanted: Option<u64>, workers: Option<u16>) -> Result<(), Failure> {
    let least = stage_in_memory_min(workers.map_or(1, usize::from));
    match (wanted, workers) {
        (Some(wanted), Some(workers)) if wanted < least => {
            let least = size::show(least);
            Err(Failure::usage(format!("--stage-in-memory must be at least {least} for {workers} workers of --stage-in-workers")))
        }
        (Some(wanted), None) if wanted < least => {
            Err(Failure::usage(format!("--stage-in-memory must be at least {}", size::show(least))))
        }
        _ => Ok(()),
    }
}

/// Bytes for each of `servers` in the same control group.
pub(super) fn for_stage_ins(wanted: Option<u64>, servers: u16, workers: Option<u16>) -> u64 {
    let least = stage_in_memory_min(workers.map_or(1, usize::from));
    let default = || default(limit(Path::new("/proc/self/cgroup"), Path::new("/sys/fs/cgroup")), servers);
    wanted.unwrap_or_else(|| default().max(least))
}

fn default(limit: Option<u64>, servers: u16) -> u64 {
    let share = limit.map_or(u64::MAX, |limit| limit / GROUP_SHARE / u64::from(servers.max(1)));
    share.clamp(STAGE_IN_MEMORY_MIN, STAGE_IN_MEMORY_DEFAULT)
}

/// The lowest limit of the control groups that we are in; `None` where there is none.
fn limit(groups: &Path, root: &Path) -> Option<u64> {
    let groups = fs::read_to_string(groups).ok()?;
    let mut lowest = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        // Version 2 names no controllers; of version 1 only the one for memory matters.
        let (root, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => continue,
        };
        let mut at: PathBuf = root.join(path.trim_start_matches('/'));
        // In a container the path may be one of the outside; then the root is ours.
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
    fn the_lowest_limit_on_the_way_up_counts() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("fs/job/step")).unwrap();
        fs::create_dir_all(at("fs/memory/a")).unwrap();
        fs::write(at("fs/job/memory.max"), "8589934592\n").unwrap();
        fs::write(at("fs/job/step/memory.max"), "max\n").unwrap();
        fs::write(at("fs/memory/a/memory.limit_in_bytes"), "1000").unwrap();
        let check = |groups: &str, expect| {
            fs::write(at("cgroup"), groups).unwrap();
            assert_eq!(limit(&at("cgroup"), &at("fs")), expect, "{groups}");
        };
        check("0::/job/step\n", Some(8 << 30));
        check("0::/\n", None);
        check("0::/not/here\n", None);
        check("4:cpu,memory:/a\n1:cpuset:/a\n", Some(1000));
        assert_eq!(limit(&at("nothing"), &at("fs")), None);
        assert_eq!((default(None, 4), default(Some(8 << 30), 4)), (STAGE_IN_MEMORY_DEFAULT, 512 << 20));
        assert_eq!(default(Some(1 << 20), 1), STAGE_IN_MEMORY_MIN);
    }
}
