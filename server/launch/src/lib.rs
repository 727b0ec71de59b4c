//! Starts, supervises and cleans up a Dayfly session.
//!
//! A session begins in three steps, each of which can fail without leaving anything behind:
//!
//! 1. [`SessionPlan`] checks the options, and chooses the launcher and the hosts (`allocation`,
//!    `launchers`, `hosts`).
//! 2. [`RunningSession::start`] creates the session's folder and runs the supervisor
//!    (`supervisor`). The supervisor starts the servers through the launcher (`processes`), and
//!    each server gets an `invitation` with the session's key.
//! 3. Each server (`serve`) connects to the supervisor over a sealed control channel (`control`),
//!    gets its node number, and connects to its peers. The session is up once all have done so.
//!
//! From then on the supervisor holds a lease over the servers. When the lease ends, the servers end.
//! [`cleanup`] removes what a session leaves behind; [`preflight`] finds mistakes in a command line before any
//! of this starts.
//!
//! The crate knows nothing about command lines, and prints nothing: messages for the user go
//! through [`Notices`]. It does not read or write samples; `dayfly-server` does that.
//!
//! A host list, for example, expands to the names of the nodes:
//!
//! ```
//! let hosts = dayfly_launch::expand_host_list("node[01-03],login")?;
//! assert_eq!(hosts, ["node01", "node02", "node03", "login"]);
//! # Ok::<(), dayfly_launch::HostListError>(())
//! ```

mod allocation;
pub mod cleanup;
mod control;
mod data_dir;
mod ended;
mod error;
mod folder_watch;
mod hosts;
mod invitation;
mod key_file;
mod launchers;
mod node_names;
mod notices;
mod options;
mod plan;
pub mod preflight;
mod processes;
mod serve;
mod session;
mod stage_in_memory;
mod supervisor;
pub mod units;

pub use allocation::current_job;
pub use data_dir::{FileSystemKind, chosen_data_dirs, file_system};
pub use dayfly_server::Preference;
pub use error::{LaunchError, owner_hint};
pub use hosts::{HostListError, expand_host_list};
pub use launchers::launcher_names;
pub use notices::Notices;
pub use options::{LaunchOptions, SessionOptions};
pub use plan::SessionPlan;
pub use serve::InvitedServer;
pub use session::RunningSession;

/// Protects the session's key in this process: it writes no core file, and other processes of its
/// user cannot trace it.
///
/// # Errors
/// Fails if the kernel refuses.
pub fn protect_key() -> std::io::Result<()> {
    Ok(nix::sys::prctl::set_dumpable(false)?)
}
