//! Checks the options of a session, and decides where it will run. Nothing is started yet.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::limits::{ARENA_LEN_DEFAULT, ARENA_LEN_MAX, ARENA_LEN_MIN};
use dayfly_server::Preference;

use crate::allocation::{self, Allocation};
use crate::error::LaunchError;
use crate::notices::Notices;
use crate::options::SessionOptions;
use crate::stage_in_memory;

/// A session with valid options and a place to run. [`crate::RunningSession::start`] starts it.
pub struct SessionPlan {
    pub(crate) options: SessionOptions,
    pub(crate) keep: Duration,
    pub(crate) prefix: Vec<u8>,
    pub(crate) memory: u64,
    pub(crate) deadlines: Deadlines,
    pub(crate) allocation: Allocation,
    pub(crate) notices: Notices,
}

impl SessionPlan {
    /// Checks the options, and chooses the launcher and the hosts. The session continues for `keep`
    /// if its supervisor is lost.
    ///
    /// # Errors
    /// Fails if the options contradict each other, or the hosts cannot be determined.
    pub fn new(options: &SessionOptions, keep: Duration, notices: Notices) -> Result<Self, LaunchError> {
        let prefix = normalized_prefix(&options.prefix)?;
        let path = Path::new(OsStr::from_bytes(&prefix));
        if let Some(real) = fs::canonicalize(path).ok().filter(|real| real != path) {
            notices.show(format_args!(
                "the prefix '{}' leads through a symbolic link to '{}'; a program that opens files by that path reads the files \
                 there, not the session",
                path.display(),
                real.display()
            ));
        }
        let memory = options.memory.unwrap_or(ARENA_LEN_DEFAULT);
        if memory < ARENA_LEN_MIN {
            return Err(LaunchError::ArenaTooSmall { minimum: ARENA_LEN_MIN });
        }
        if memory > ARENA_LEN_MAX {
            return Err(LaunchError::ArenaTooLarge { maximum: ARENA_LEN_MAX });
        }
        stage_in_memory::check(options.stage_in_memory, options.stage_in_workers)?;
        let mut deadlines = Deadlines::DEFAULT.scaled(options.deadlines_divisor).patient(options.patience);
        if let Some(timeout) = options.stage_in_timeout {
            deadlines.stall = timeout;
        }
        if let Some(lost_after) = options.lost_after {
            deadlines.lost_after = lost_after;
            deadlines.lease = deadlines.lease.max(lost_after * 3);
            // A server stops publishing before it counts as lost.
            deadlines.publish_lease = deadlines.publish_lease.min(lost_after * 2 / 3);
        }
        deadlines.check().map_err(LaunchError::Deadlines)?;
        let allocation = allocation::choose(&options.launch)?;
        if allocation.is_fallback {
            notices.show(
                "no workload manager was detected, so one server starts on this machine \
                 (--local 1 asks for this, --hosts names other machines)",
            );
        }
        if options.encrypt && !matches!(options.transport, Preference::Auto | Preference::Tcp) {
            return Err(LaunchError::EncryptNeedsTcp);
        }
        if allocation.launcher.is_job_step && !keep.is_zero() {
            return Err(LaunchError::KeepNeedsSurvivors { launcher: allocation.launcher.name });
        }
        Ok(Self { options: options.clone(), keep, prefix, memory, deadlines, allocation, notices })
    }

    /// Returns the path below which programs will see the namespace.
    pub fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    /// Returns whether node 0, which reads the sources' names, will run on this machine. Only then
    /// can this process check the sources.
    pub fn has_node_0_here(&self) -> bool {
        self.allocation.has_node_0_here()
    }
}

fn normalized_prefix(prefix: &[u8]) -> Result<Vec<u8>, LaunchError> {
    let invalid = |reason: String| LaunchError::InvalidPrefix { prefix: prefix.to_vec(), reason };
    if !prefix.starts_with(b"/") {
        return Err(invalid("it must be absolute".to_owned()));
    }
    let normal = dayfly_meta::path::normalize(prefix).map_err(|reason| invalid(reason.to_string()))?;
    if normal.is_empty() { Err(invalid("it must not be the root".to_owned())) } else { Ok([b"/", &normal[..]].concat()) }
}
