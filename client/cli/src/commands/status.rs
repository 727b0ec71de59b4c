//! `dayfly status`.

use std::process::ExitCode;

use dayfly_client::Session;
use dayfly_meta::path::{display, join};
use dayfly_meta::wire::control::{Command, Event, NodeEntry, NodeStatus, Status as SessionStatus};
use serde_json::{Value, json};

use crate::args::Status;
use crate::failure::Failure;
use crate::failure::say;
use crate::namespace;
use crate::size::show;

pub(super) fn run(arguments: Status) -> Result<ExitCode, Failure> {
    let (session, status) = ask()?;
    if arguments.json {
        say!("{}", as_json(&session, &status))
    } else {
        as_table(&session, &status)
    }
    let all_answer = status.nodes.iter().all(|entry| entry.status.is_ok());
    if all_answer { Ok(ExitCode::SUCCESS) } else { Err(Failure::silent()) }
}

/// What all nodes say, by way of this process's own.
pub(super) fn ask() -> Result<(Session, SessionStatus), Failure> {
    let session = Session::attach(&namespace::location()?)?;
    let mut status = None;
    session.control(Command::Status, &mut |event| {
        if let Event::Status(told) = event {
            status = Some(told);
        }
    })?;
    Ok((session, status.ok_or_else(|| Failure::new("the server told no status"))?))
}

/// Bytes held by all nodes.
fn all_held(status: &SessionStatus) -> u64 {
    status.nodes.iter().filter_map(|entry| entry.status.as_ref().ok()).map(|node| node.held_bytes).sum()
}

fn share_percent(node: &NodeStatus, all: u64) -> f64 {
    if all == 0 { 0.0 } else { node.held_bytes as f64 * 100.0 / all as f64 }
}

fn as_table(session: &Session, status: &SessionStatus) {
    say!("session {} at {}, {} nodes", session.id(), display(session.prefix()), session.nodes());
    say!(
        "{:<5} {:<21} {:>10} {:>10} {:>6} {:>10} {:>10} {:>20} {:>20} {:>8}",
        "node",
        "address",
        "samples",
        "bytes",
        "share",
        "taken",
        "free",
        "local reads",
        "remote reads",
        "memory"
    );
    let all = all_held(status);
    for NodeEntry { node, address, status } in &status.nodes {
        match status {
            Err(reason) => say!("{node:<5} {address:<21} does not answer: {reason}"),
            Ok(node_status) => say!(
                "{node:<5} {address:<21} {:>10} {:>10} {:>5.1}% {:>10} {:>10} {:>20} {:>20} {:>8}",
                node_status.samples,
                show(node_status.held_bytes),
                share_percent(node_status, all),
                show(node_status.used_bytes),
                show(node_status.capacity_bytes.saturating_sub(node_status.used_bytes)),
                format!("{} ({})", node_status.local_reads, show(node_status.local_bytes)),
                format!("{} ({})", node_status.remote_reads, show(node_status.remote_bytes)),
                show(node_status.memory_bytes)
            ),
        }
    }
    say!("'taken' is what nameless files take on the data dirs: du does not see them. Empty samples are on no node.");
    for dataset in &status.datasets {
        let path = display(&join(session.prefix(), &dataset.target));
        say!(
            "dataset {path}: {} samples, {}, catalog {} on each node",
            dataset.samples,
            show(dataset.bytes),
            show(dataset.catalog_bytes)
        );
    }
}

fn as_json(session: &Session, status: &SessionStatus) -> Value {
    let all = all_held(status);
    let node = |entry: &NodeEntry| match &entry.status {
        Err(reason) => json!({ "node": entry.node.0, "address": entry.address, "error": reason }),
        Ok(status) => json!({
            "node": entry.node.0, "address": entry.address, "pid": status.pid,
            "data_dirs": status.data_dirs.iter().map(|path| display(path)).collect::<Vec<_>>(),
            "samples": status.samples, "blocks": status.blocks, "held_bytes": status.held_bytes,
            "share_percent": share_percent(status, all),
            "used_bytes": status.used_bytes, "capacity_bytes": status.capacity_bytes,
            "arena_bytes": status.arena_bytes, "arena_used_bytes": status.arena_used_bytes,
            "leases": status.leases, "clients": status.clients, "memory_bytes": status.memory_bytes,
            "local_reads": status.local_reads, "local_bytes": status.local_bytes,
            "remote_reads": status.remote_reads, "remote_bytes": status.remote_bytes,
            "served_blocks": status.served_blocks, "served_bytes": status.served_bytes,
        }),
    };
    let datasets = status.datasets.iter().map(|dataset| {
        json!({
            "path": display(&join(session.prefix(), &dataset.target)),
            "samples": dataset.samples, "bytes": dataset.bytes, "catalog_bytes": dataset.catalog_bytes,
        })
    });
    json!({
        "session": session.id().to_string(), "prefix": display(session.prefix()),
        "nodes": status.nodes.iter().map(node).collect::<Vec<_>>(), "datasets": datasets.collect::<Vec<_>>(),
    })
}
