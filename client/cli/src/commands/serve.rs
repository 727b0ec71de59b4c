//! `dayfly serve`: runs the server of a node. `dayfly-launch` does the work.

use std::process::ExitCode;

use dayfly_launch::InvitedServer;

use super::start::{protect_key, start_log};
use crate::args::ServeArguments;
use crate::failure::Failure;

pub(super) fn run(arguments: &ServeArguments) -> Result<ExitCode, Failure> {
    protect_key();
    let server = InvitedServer::read(&arguments.key_file, arguments.rendezvous.as_deref())?;
    start_log(server.log_filter());
    server.run()?;
    Ok(ExitCode::SUCCESS)
}
