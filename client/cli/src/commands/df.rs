//! `dayfly df`: shows the space on the nodes' drives.

use std::process::ExitCode;

use super::query;
use crate::args::DfArguments;
use crate::failure::{Failure, complain, print_line};
use crate::size;

pub(super) fn run(arguments: DfArguments) -> Result<ExitCode, Failure> {
    let (_, status) = query::status()?;
    let show = |bytes: u64| if arguments.human { size::show(bytes) } else { (bytes / 1024).to_string() };
    let unit = if arguments.human { "Size" } else { "1K-blocks" };
    print_line!("{:<8} {unit:>14} {:>14} {:>14} {:>14} {:>5}", "Node", "Used", "Mapped", "Available", "Use%");
    let (mut all_size, mut all_used, mut all_mapped, mut all_free) = (0, 0, 0, 0);
    let line = |name: &str, size: u64, used: u64, mapped: u64, free: u64| {
        let percent = (used * 100).checked_div(size).unwrap_or(0);
        let [size, used, mapped, free] = [size, used, mapped, free].map(show);
        print_line!("{name:<8} {size:>14} {used:>14} {mapped:>14} {free:>14} {percent:>4}%");
    };
    let mut failed = false;
    for entry in &status.nodes {
        match &entry.status {
            Ok(node) => {
                line(&entry.node.to_string(), node.capacity_bytes, node.used_bytes, node.mapped_bytes, node.free_bytes);
                all_size += node.capacity_bytes;
                all_used += node.used_bytes;
                all_mapped += node.mapped_bytes;
                all_free += node.free_bytes;
            }
            // A lost node is no failure of this command.
            Err(_) if entry.lost_for_ms.is_some() => {
                print_line!("{:<8} {:>14} {:>14} {:>14} {:>14} {:>5}", entry.node, "lost", "-", "-", "-", "-")
            }
            Err(reason) => {
                complain(format_args!("node {} does not answer: {reason}", entry.node));
                failed = true;
            }
        }
    }
    line("all", all_size, all_used, all_mapped, all_free);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
