//! `dayfly metrics`.

use std::process::ExitCode;

use dayfly_meta::metrics::{page, prometheus};

use super::status::ask;
use crate::args::Metrics;
use crate::failure::{Failure, say};

pub(super) fn run(arguments: &Metrics) -> Result<ExitCode, Failure> {
    if arguments.describe {
        say!("{}", page().trim_end());
        return Ok(ExitCode::SUCCESS);
    }
    let (session, status) = ask()?;
    let mine = |node| arguments.all_nodes || node == session.node();
    let mut nodes = Vec::new();
    for entry in status.nodes.iter().filter(|entry| mine(entry.node)) {
        match &entry.status {
            Ok(node) => nodes.push((entry.node.0, node)),
            Err(reason) => return Err(Failure::new(format!("node {} does not answer: {reason}", entry.node))),
        }
    }
    say!("{}", prometheus(&nodes).trim_end());
    Ok(ExitCode::SUCCESS)
}
