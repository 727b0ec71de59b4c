//! `dayfly tune`: changes how nodes prefetch and cache.

use std::process::ExitCode;

use dayfly_client::Session;
use dayfly_meta::wire::control::{Command, Event};
use dayfly_meta::wire::status::Policy;

use super::policy::describe;
use super::query;
use crate::args::TuneArguments;
use crate::failure::{Failure, print_line};
use crate::namespace;
use crate::size::show;

pub(super) fn run(arguments: &TuneArguments) -> Result<ExitCode, Failure> {
    let location = namespace::location()?;
    let session = Session::attach_briefly(&location, location.my_node()?)?;
    if let Some(wanted) = arguments.prefetch_memory {
        check_prefetch_memory(wanted)?;
    }
    let policy = Policy { prefetch: arguments.prefetch, prefetch_bytes: arguments.prefetch_memory, cache_bytes: arguments.cache };
    let mut outcome = Err(Failure::new("the server ended the connection without an answer; try again"));
    session.control(Command::Tune(policy), &mut |event| {
        outcome = match event {
            Event::Tuned(policy) => Ok(policy),
            Event::Failed { reason, .. } => Err(Failure::new(reason)),
            _ => Err(Failure::new("the server sent an answer to another command; this is a bug")),
        }
    })?;
    print_line!("{}", describe(&outcome?));
    Ok(ExitCode::SUCCESS)
}

/// Checks that the memory wanted for prefetching fits into the smallest arena of all servers.
fn check_prefetch_memory(wanted: u64) -> Result<(), Failure> {
    let (_, status) = query::status()?;
    let arenas = status.nodes.iter().filter_map(|node| node.status.as_ref().ok()).map(|node| node.arena_bytes);
    match arenas.min().filter(|&arena| wanted > arena) {
        Some(arena) => Err(Failure::usage(format!(
            "--prefetch-memory {} is more than each server's arena, which has {}; 'dayfly up --memory' sets the arena's size",
            show(wanted),
            show(arena)
        ))),
        None => Ok(()),
    }
}
