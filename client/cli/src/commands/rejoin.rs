//! `dayfly rejoin`: starts new servers in the place of lost ones.

use std::process::ExitCode;

use dayfly_client::Session;
use dayfly_meta::wire::control::{Command, Event};

use super::query;
use crate::args::RejoinArguments;
use crate::failure::{Failure, complain, print_line};

pub(super) fn run(arguments: &RejoinArguments) -> Result<ExitCode, Failure> {
    let (session, status) = query::status()?;
    // A node that only does not answer may have died without a supervisor that declares it lost. The session's answer says so.
    let lost = status.nodes.iter().filter(|entry| entry.lost_for_ms.is_some() || entry.status.is_err()).map(|entry| entry.node.0);
    let nodes: Vec<u16> = arguments.node.map_or_else(|| lost.collect(), |node| vec![node]);
    if nodes.is_empty() {
        print_line!("no node is lost");
    }
    let mut failures = 0;
    for node in nodes {
        match rejoin(&session, node, arguments.host.clone()) {
            Ok(message) => print_line!("{message}"),
            Err(failure) if arguments.node.is_some() => return Err(failure),
            // The other lost nodes are tried, too.
            Err(failure) => {
                complain(failure);
                failures += 1;
            }
        }
    }
    Ok(if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn rejoin(session: &Session, node: u16, host: Option<String>) -> Result<String, Failure> {
    let mut outcome = Err(Failure::new("the server ended the connection without an answer; try again"));
    session.control(Command::Rejoin { node, host }, &mut |event| match event {
        Event::Rejoining => {}
        Event::Rejoined(message) => outcome = Ok(message),
        Event::Failed { reason, .. } => outcome = Err(Failure::new(format!("cannot start a server for node {node}: {reason}"))),
        _ => outcome = Err(Failure::new("the server sent an answer to another command; this is a bug")),
    })?;
    outcome
}
