//! `dayfly doctor`: whether a node, and each pair of nodes, has what a session takes.

mod checks;
mod hosts;

use std::io::Write;
use std::process::ExitCode;

use dayfly_meta::path::display;
use serde::{Deserialize, Serialize};

use crate::args::Doctor;
use crate::failure::{Failure, output, say};

/// How a thing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// As it should be.
    Ok,
    /// It works, and could do better.
    Slow,
    /// It is not there.
    Missing,
}

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Finding {
    /// The thing.
    what: String,
    state: State,
    /// What was seen.
    detail: String,
    /// What to do about it; empty if nothing.
    advice: String,
    /// Whether a session needs it.
    is_needed: bool,
}

impl Finding {
    fn ok(what: &str, detail: impl ToString) -> Self {
        let (what, detail) = (what.to_owned(), detail.to_string());
        Self { what, state: State::Ok, detail, advice: String::new(), is_needed: false }
    }

    fn slow(what: &str, detail: impl ToString, advice: &str) -> Self {
        Self { state: State::Slow, advice: advice.to_owned(), ..Self::ok(what, detail) }
    }

    fn missing(what: &str, detail: impl ToString, advice: &str) -> Self {
        Self { state: State::Missing, ..Self::slow(what, detail, advice) }
    }

    fn needed(self) -> Self {
        Self { is_needed: true, ..self }
    }
}

/// What was found on a node.
#[derive(Serialize, Deserialize)]
struct Report {
    host: String,
    findings: Vec<Finding>,
    /// Its clock, in seconds since 1970.
    clock: Option<f64>,
}

pub(super) fn run(arguments: &Doctor) -> Result<ExitCode, Failure> {
    if arguments.answer {
        return hosts::answer(arguments);
    }
    if let Some(address) = &arguments.reach {
        return hosts::reach(arguments, address);
    }
    let reports = if arguments.hosts.is_empty() { vec![checks::all(arguments)] } else { hosts::all(arguments)? };
    if arguments.json {
        say!("{}", serde_json::to_string(&reports).map_err(Failure::new)?);
    } else {
        reports.iter().for_each(show);
    }
    let lacks = |report: &Report| report.findings.iter().any(|finding| finding.is_needed && finding.state == State::Missing);
    Ok(if reports.iter().any(lacks) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn show(report: &Report) {
    say!("{}", display(report.host.as_bytes()));
    for Finding { what, state, detail, advice, .. } in &report.findings {
        let state = match state {
            State::Ok => "ok",
            State::Slow => "slow",
            State::Missing => "missing",
        };
        say!("  {:<16} {state:<8} {}", display(what.as_bytes()), display(detail.as_bytes()));
        if !advice.is_empty() {
            say!("  {:<16} {:<8} -> {}", "", "", display(advice.as_bytes()));
        }
    }
}

/// A line of JSON for another `dayfly doctor`.
fn tell(what: &impl Serialize) -> Result<(), Failure> {
    let mut output = output();
    writeln!(output, "{}", serde_json::to_string(what).map_err(Failure::new)?)?;
    Ok(output.flush()?)
}
