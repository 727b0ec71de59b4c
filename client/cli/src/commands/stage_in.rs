//! `dayfly stage-in`: sends the request, and shows progress and summary.

mod page;
mod progress;

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use dayfly_client::Session;
use dayfly_client::locate::SessionFolder;
use dayfly_launch::preflight;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::control::OnConflict as ConflictPolicy;
use dayfly_meta::wire::control::{Command, Event, Grouping, Selection, StageInRequest};

use super::signals::Interruptions;
use crate::args::{Group, OnConflict, StageInArguments, StageInOptions};
use crate::failure::{Failure, LEFT_OUT, end_soon};
use crate::namespace;
use progress::Reporter;

/// If a stage-in fails because its session is ending, some server on this machine exits within this
/// time.
const FIRST_EXIT_TIMEOUT: Duration = Duration::from_millis(100);
/// After one server has closed its connections, all servers on this machine exit within this time.
const ALL_EXIT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long an interrupted stage-in waits for a message that is being written.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) fn run(arguments: StageInArguments) -> Result<ExitCode, Failure> {
    let (target, sources) =
        arguments.paths.split_last().ok_or_else(|| Failure::usage("give at least one SOURCE and a TARGET"))?;
    let location = namespace::location()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (sources, target) = (sources.to_vec(), target.clone());
    let status = runtime.block_on(async {
        let mut interruptions = Interruptions::new()?;
        let progress = ProgressDisplay::default();
        // The display begins here, so that an interruption before the session answers is reported
        // too.
        progress.begin(Reporter::new(arguments.json, &target.to_string_lossy(), &arguments.options));
        let shared = progress.clone();
        let staging = tokio::task::spawn_blocking(move || {
            perform(&location, &sources, &target, &arguments.options, arguments.json, &shared)
        });
        tokio::select! {
            staged = staging => match staged.map_err(Failure::new)?? {
                0 => Ok(ExitCode::SUCCESS),
                _ => Ok(ExitCode::from(LEFT_OUT)),
            },
            _ = interruptions.next() => {
                progress.interrupt();
                Ok(ExitCode::from(interruptions.status()))
            }
        }
    });
    // When this process exits, its connection closes, and the server cancels the stage-in.
    runtime.shutdown_background();
    status
}

/// Shows the progress of a stage-in to the user, until it is interrupted. Clones share one display.
#[derive(Clone, Default)]
pub(super) struct ProgressDisplay(Arc<Mutex<Option<Reporter>>>);

impl ProgressDisplay {
    fn begin(&self, reporter: Reporter) {
        *self.reporter() = Some(reporter);
    }

    fn show(&self, event: &Event) {
        if let Some(reporter) = &mut *self.reporter() {
            reporter.show(event);
        }
    }

    /// Clears the display, and prints the outcome of the stage-in.
    pub(super) fn interrupt(&self) {
        end_soon();
        // The thread that holds the lock may be stuck in a write to a stopped terminal.
        let start = Instant::now();
        while start.elapsed() < MESSAGE_TIMEOUT {
            if let Ok(mut reporter) = self.0.try_lock() {
                if let Some(mut reporter) = reporter.take() {
                    reporter.interrupt();
                }
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn reporter(&self) -> MutexGuard<'_, Option<Reporter>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs a stage-in and shows its progress. Returns how many archive members or sources were left
/// out.
pub(super) fn perform(
    location: &SessionFolder,
    sources: &[OsString],
    target: &OsStr,
    options: &StageInOptions,
    json: bool,
    progress: &ProgressDisplay,
) -> Result<u64, Failure> {
    progress.begin(Reporter::new(json, &target.to_string_lossy(), options));
    let session = Session::attach(location)?;
    if let Some(report) = &options.report {
        check_report(report, &session)?;
    }
    let request = StageInRequest {
        sources: sources.iter().map(|source| absolute(source)).collect::<Result<_, _>>()?,
        target: namespace::target(&session, target)?,
        selection: Selection {
            strip_components: options.strip_components,
            include: options.include.clone(),
            exclude: options.exclude.clone(),
            no_unpack: options.no_unpack,
            nested: options.nested,
            dereference: options.dereference,
            group: options.group.map_or(Grouping::None, |Group::Stem| Grouping::Stem),
            keep_going: options.keep_going,
            on_conflict: match options.on_conflict {
                OnConflict::Error => ConflictPolicy::Error,
                OnConflict::Replace => ConflictPolicy::Replace,
            },
            prefix_by_source: options.prefix_by_source,
            max_directories: options.max_directories,
            decoder_memory: options.decoder_memory,
        },
        seed: options.seed,
        replace: options.replace,
        max_rate: options.max_rate,
        require_fit: options.require_fit,
        copies: options.copies,
    };
    let before = location.live_nodes();
    let mut failure = None;
    let mut summary = None;
    let ended = session.control(Command::StageIn(request), &mut |event| {
        progress.show(&event);
        match event {
            Event::Failed { reason, .. } => failure = Some(reason),
            Event::StagedIn(done) => summary = Some(done),
            _ => {}
        }
    });
    // The coordinator, on another node, may already be publishing the dataset.
    let doubt = "'dayfly ls' on another node shows whether the dataset exists nevertheless";
    let lost = ended.err().map(|error| format!("node {}: {error}; {doubt}", session.node()));
    let patience = match (&lost, session.node()) {
        (Some(_), _) => ALL_EXIT_TIMEOUT,
        // The answer came from the coordinator itself.
        (None, NodeId(0)) => Duration::ZERO,
        // The reason may be that node 0's server has ended and that this node's server is about to
        // end.
        (None, _) => FIRST_EXIT_TIMEOUT,
    };
    let failure = lost.or(failure);
    let failure =
        failure.map(|reason| if is_ended(location, &before, patience) { "the session was ended".to_owned() } else { reason });
    if let (None, Some(summary), Some(path)) = (&failure, &summary, &options.report) {
        let written = std::fs::write(path, page::page(&target.to_string_lossy(), summary));
        // The dataset exists, and the message must not deny that.
        written.map_err(|error| {
            Failure::new(format!("the dataset is staged in, but its report '{}' cannot be written: {error}", path.display()))
        })?;
    }
    match failure {
        None => Ok(summary.map_or(0, |summary| summary.counts.skipped)),
        Some(reason) => Err(Failure::new(format!("cannot stage in to '{}': {reason}", target.display()))),
    }
}

/// Checks that the report can be written once the dataset is staged in. This process does not see the namespace: a report with a
/// path in the namespace would go into the local directory that the namespace covers.
fn check_report(report: &Path, session: &Session) -> Result<(), Failure> {
    if std::path::absolute(report)?.starts_with(OsStr::from_bytes(session.prefix())) {
        return Err(Failure::usage(format!(
            "--report '{}' is in the namespace, which is read-only; name a file outside of it",
            report.display()
        )));
    }
    Ok(preflight::check_report(report)?)
}

/// Returns whether the session is ending or has ended in the meantime. Servers exit one after another, so once one on this machine has
/// exited, the others get some time to follow. The session's folder is asked, too, because busy servers exit late.
fn is_ended(location: &SessionFolder, before: &[NodeId], patience: Duration) -> bool {
    let start = Instant::now();
    loop {
        let live = location.live_nodes();
        if live.is_empty() || location.is_ended() {
            return true;
        }
        if live.len() == before.len() && start.elapsed() > patience || start.elapsed() > ALL_EXIT_TIMEOUT {
            return false;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Turns a source into a path that means the same thing to the servers, which do not have this
/// process's working directory and descriptors. The path is not normalized, because a final `/.`
/// has a meaning.
pub(super) fn absolute(source: &OsStr) -> Result<Vec<u8>, Failure> {
    if source.is_empty() {
        return Err(Failure::usage("a SOURCE is empty; perhaps a variable is not set"));
    }
    let folder = env::current_dir()?;
    let path = folder.join(source);
    if let Some(list) = source.as_bytes().strip_prefix(b"@").filter(|_| path.symlink_metadata().is_err()) {
        // The coordinator reads the list, because its names may not fit into a message.
        return Ok([b"@", folder.join(OsStr::from_bytes(list)).as_os_str().as_bytes()].concat());
    }
    if path.metadata().is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir()) {
        return Err(Failure::usage(format!(
            "'{}' is neither a file nor a directory; a pipe cannot be staged in",
            source.display()
        )));
    }
    // These paths name different files in different processes.
    if path.starts_with("/proc") || path.starts_with("/dev") {
        let named = path.canonicalize().map_err(|error| Failure::new(format!("cannot read '{}': {error}", source.display())))?;
        return Ok(named.into_os_string().into_vec());
    }
    if Path::new(source).is_absolute() {
        return Ok(source.as_bytes().to_vec());
    }
    // If the source is a pattern, the working directory's name must match only itself.
    let mut absolute = match folder.to_str().filter(|_| path.symlink_metadata().is_err()) {
        Some(folder) => glob::Pattern::escape(folder).into_bytes(),
        None => folder.into_os_string().into_vec(),
    };
    absolute.push(b'/');
    absolute.extend_from_slice(source.as_bytes());
    Ok(absolute)
}
