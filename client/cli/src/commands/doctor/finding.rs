//! The findings of a check, and the report of a node.

use dayfly_meta::text::without_os_numbers;
use serde::{Deserialize, Serialize};

/// The state of something that was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum CheckState {
    /// It is as it should be.
    Ok,
    /// It works, but could be faster.
    Slow,
    /// It does not exist or does not work.
    Missing,
}

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Finding {
    /// The thing that was checked, such as `kernel`.
    pub(super) what: String,
    pub(super) state: CheckState,
    /// What was observed.
    pub(super) detail: String,
    /// What to do about it; empty if nothing.
    pub(super) advice: String,
    /// Whether every session needs the thing.
    pub(super) is_needed: bool,
}

impl Finding {
    pub(super) fn ok(what: &str, detail: impl ToString) -> Self {
        let (what, detail) = (what.to_owned(), without_os_numbers(&detail.to_string()).into_owned());
        Self { what, state: CheckState::Ok, detail, advice: String::new(), is_needed: false }
    }

    pub(super) fn slow(what: &str, detail: impl ToString, advice: &str) -> Self {
        Self { state: CheckState::Slow, advice: advice.to_owned(), ..Self::ok(what, detail) }
    }

    pub(super) fn missing(what: &str, detail: impl ToString, advice: &str) -> Self {
        Self { state: CheckState::Missing, ..Self::slow(what, detail, advice) }
    }

    pub(super) fn needed(self) -> Self {
        Self { is_needed: true, ..self }
    }
}

/// The findings on one node, or between nodes.
#[derive(Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) host: String,
    pub(super) findings: Vec<Finding>,
    /// The node's clock: first in seconds since 1970, and later as the difference from this
    /// machine's clock. `None` if the node did not answer.
    pub(super) clock: Option<f64>,
}
