//! `dayfly tune`: changes how nodes prefetch and cache.

use std::process::ExitCode;

use dayfly_client::Session;
use dayfly_meta::wire::control::{Command, Event};
use dayfly_meta::wire::status::Policy;

use super::policy::describe;
use crate::args::TuneArguments;
use crate::failure::{Failure, print_line};
use crate::namespace;

pub(super) fn run(arguments: &TuneArguments) -> Result<ExitCode, Failure> {
    let session = Session::attach(&namespace::location()?)?;
    let policy = Policy { prefetch: arguments.prefetch, prefetch_bytes: arguments.prefetch_memory, cache_bytes: arguments.cache };
    let mut outcome = Err(Failure::new("the server ended the connection without an answer; try again"));
    session.control(Command::Tune(policy), &mut |event| {
        outcome = match event {
            Event::Tuned(policy) => Ok(policy),
            Event::Failed { reason } => Err(Failure::new(reason)),
            _ => Err(Failure::new("the server sent an answer to another command; this is a bug")),
        }
    })?;
    print_line!("{}", describe(&outcome?));
    Ok(ExitCode::SUCCESS)
}
