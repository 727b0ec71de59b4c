//! `dayfly metrics`: prints the counters of nodes, for Prometheus.

use std::process::ExitCode;

use dayfly_meta::metrics::{page, prometheus};
use dayfly_meta::wire::status::NodeEntry;

use super::query;
use crate::args::MetricsArguments;
use crate::failure::{Failure, print_line};
use crate::namespace;

pub(super) fn run(arguments: &MetricsArguments) -> Result<ExitCode, Failure> {
    if arguments.describe {
        print_line!("{}", page().trim_end());
        return Ok(ExitCode::SUCCESS);
    }
    let own = namespace::location()?.my_node()?;
    let (_, status) = query::status()?;
    let is_wanted = |node| arguments.all_nodes || node == own;
    let is_here = |entry: &&NodeEntry| is_wanted(entry.node) && entry.lost_for_ms.is_none();
    let mut nodes = Vec::new();
    for entry in status.nodes.iter().filter(is_here) {
        match &entry.status {
            Ok(node) => nodes.push((entry.node.0, node)),
            Err(reason) => return Err(Failure::new(format!("node {} does not answer: {reason}", entry.node))),
        }
    }
    print_line!("{}", prometheus(&nodes).trim_end());
    Ok(ExitCode::SUCCESS)
}
