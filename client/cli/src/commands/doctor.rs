//! `dayfly doctor`: checks whether nodes, and each pair of them, have what a session needs.

mod checks;
mod finding;
mod hosts;
mod probe;

use std::process::ExitCode;

use dayfly_meta::path::display;

use crate::args::DoctorArguments;
use crate::failure::{Failure, print_line};
use finding::{CheckState, Finding, Report};

pub(super) fn run(arguments: &DoctorArguments) -> Result<ExitCode, Failure> {
    if arguments.answer {
        return probe::answer(arguments);
    }
    if let Some(address) = &arguments.reach {
        return probe::reach(arguments, address);
    }
    let reports = if arguments.hosts.is_empty() { vec![checks::check_node(arguments)] } else { hosts::check_all(arguments)? };
    if arguments.json {
        print_line!("{}", serde_json::to_string(&reports).map_err(Failure::new)?);
    } else {
        reports.iter().for_each(show);
    }
    let is_missing = |finding: &Finding| finding.is_needed && finding.state == CheckState::Missing;
    let is_any_missing = reports.iter().any(|report| report.findings.iter().any(is_missing));
    Ok(if is_any_missing { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn show(report: &Report) {
    print_line!("{}", display(report.host.as_bytes()));
    for Finding { what, state, detail, advice, .. } in &report.findings {
        let state = match state {
            CheckState::Ok => "ok",
            CheckState::Slow => "slow",
            CheckState::Missing => "missing",
        };
        print_line!("  {:<16} {state:<8} {}", display(what.as_bytes()), display(detail.as_bytes()));
        if !advice.is_empty() {
            print_line!("  {:<16} {:<8} -> {}", "", "", display(advice.as_bytes()));
        }
    }
}
