//! `dayfly tune`.

use std::process::ExitCode;

use dayfly_client::Session;
use dayfly_meta::wire::control::{Command, Event};
use dayfly_meta::wire::status::{CACHE_ALL_ROOM, Depth, Policy};

use crate::args::Tune;
use crate::failure::{Failure, say};
use crate::namespace;
use crate::size::show;

pub(super) fn run(arguments: &Tune) -> Result<ExitCode, Failure> {
    let session = Session::attach(&namespace::location()?)?;
    let policy = Policy { prefetch: arguments.prefetch, prefetch_bytes: arguments.prefetch_memory, cache_bytes: arguments.cache };
    let mut outcome = Err(Failure::new("the server told no outcome"));
    session.control(Command::Tune(policy), &mut |event| {
        outcome = match event {
            Event::Tuned(policy) => Ok(policy),
            Event::Failed { reason } => Err(Failure::new(reason)),
            _ => Err(Failure::new("the server told another command's outcome")),
        }
    })?;
    say!("{}", told(&outcome?));
    Ok(ExitCode::SUCCESS)
}

/// A policy, in a line.
pub(super) fn told(policy: &Policy) -> String {
    let depth = match policy.prefetch.unwrap_or_default() {
        Depth::Auto => "auto".to_owned(),
        Depth::Samples(0) => "off".to_owned(),
        Depth::Samples(samples) => format!("{samples} samples"),
    };
    let memory = policy.prefetch_bytes.map_or_else(|| "half of the arena".to_owned(), show);
    let cache = match policy.cache_bytes.unwrap_or(CACHE_ALL_ROOM) {
        CACHE_ALL_ROOM => "all free room".to_owned(),
        0 => "off".to_owned(),
        bytes => show(bytes),
    };
    format!("prefetch {depth}, in {memory}; cache: {cache}")
}
