//! Shows what planning is doing, and lets planning learn that it was canceled.

use dayfly_meta::wire::control::Step;

use crate::StageInError;
use crate::progress::{Activity, ProgressMonitor};

/// The planning thread's view of the stage-in's monitor.
pub(super) struct PlanActivity<'a> {
    monitor: &'a ProgressMonitor,
    activity: Activity,
}

impl<'a> PlanActivity<'a> {
    pub(super) fn new(monitor: &'a ProgressMonitor) -> Self {
        Self { monitor, activity: monitor.new_activity() }
    }

    /// Shows that planning is now looking at `path`. The planner calls this before every access
    /// that a slow file system may delay, so that the error about a stall names the path.
    ///
    /// # Errors
    ///
    /// [`StageInError::Cancelled`] once the stage-in is canceled.
    pub(super) fn begin(&self, path: &[u8]) -> Result<(), StageInError> {
        self.activity.begin(Step::Reading, path);
        self.monitor.advance();
        if self.monitor.is_cancelled() { Err(StageInError::Cancelled) } else { Ok(()) }
    }
}
