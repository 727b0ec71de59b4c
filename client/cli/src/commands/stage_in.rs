//! `dayfly stage-in`: the request, its progress and its summary.

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
use dayfly_client::locate::Location;
use dayfly_meta::id::NodeId;
use dayfly_meta::wire::control::{Command, Event, Grouping, OnConflict as Conflicts, Selection, StageInRequest as Request};

use super::signals::Interruptions;
use crate::args::{Group, OnConflict, StageInArguments, StageInOptions};
use crate::failure::{Failure, LEFT_OUT, end_soon};
use crate::namespace;
use progress::Reporter;

/// A session that ends while its stage-in fails is told by a server that goes within this.
const SIGN_TIME: Duration = Duration::from_millis(100);
/// A server that has closed its connections goes within this, and the others of this machine with it.
const END_TIME: Duration = Duration::from_secs(2);
/// How long a stage-in that is interrupted waits for what it is just telling.
const TELLING_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) fn run(arguments: StageInArguments) -> Result<ExitCode, Failure> {
    let (target, sources) = arguments.paths.split_last().ok_or_else(|| Failure::usage("a source and a target are needed"))?;
    let location = namespace::location()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (sources, target) = (sources.to_vec(), target.clone());
    let status = runtime.block_on(async {
        let mut interruptions = Interruptions::new()?;
        let telling = ProgressDisplay::default();
        let told = telling.clone();
        let staging =
            tokio::task::spawn_blocking(move || stage(&location, &sources, &target, &arguments.options, arguments.json, &told));
        tokio::select! {
            staged = staging => match staged.map_err(Failure::new)?? {
                0 => Ok(ExitCode::SUCCESS),
                _ => Ok(ExitCode::from(LEFT_OUT)),
            },
            _ = interruptions.next() => {
                telling.interrupt();
                Ok(ExitCode::from(interruptions.status()))
            }
        }
    });
    // Its server notices that nobody waits any more when this process is gone, and cancels.
    runtime.shutdown_background();
    status
}

/// Who tells the user how a stage-in goes, until it was interrupted.
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

    /// Clears what is shown, and says what became of the stage-in.
    pub(super) fn interrupt(&self) {
        end_soon();
        // Who has it may wait for a reader who does not come.
        let start = Instant::now();
        while start.elapsed() < TELLING_TIMEOUT {
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

/// Stages in, telling the user how it goes; how many members or sources were left out.
pub(super) fn stage(
    location: &Location,
    sources: &[OsString],
    target: &OsStr,
    options: &StageInOptions,
    json: bool,
    telling: &ProgressDisplay,
) -> Result<u64, Failure> {
    let session = Session::attach(location)?;
    let request = Request {
        sources: sources.iter().map(|source| absolute(source)).collect::<Result<_, _>>()?,
        target: namespace::target(&session, target)?,
        selection: Selection {
            strip_components: options.strip_components,
            include: options.include.clone(),
            exclude: options.exclude.clone(),
            no_unpack: options.no_unpack,
            nested: options.nested,
            group: options.group.map_or(Grouping::None, |Group::Stem| Grouping::Stem),
            keep_going: options.keep_going,
            on_conflict: match options.on_conflict {
                OnConflict::Error => Conflicts::Error,
                OnConflict::Replace => Conflicts::Replace,
            },
            prefix_by_source: options.prefix_by_source,
            max_directories: options.max_directories,
        },
        seed: options.seed,
        replace: options.replace,
        max_rate: options.max_rate,
    };
    telling.begin(Reporter::new(json, &target.to_string_lossy(), options));
    let before = location.live_nodes();
    let mut failure = None;
    let mut summary = None;
    let ended = session.control(Command::StageIn(request), &mut |event| {
        telling.show(&event);
        match event {
            Event::Failed { reason } => failure = Some(reason),
            Event::StagedIn(done) => summary = Some(done),
            _ => {}
        }
    });
    let lost = ended.err().map(|error| format!("node {}: {error}", session.node()));
    let patience = match (&lost, session.node()) {
        (Some(_), _) => END_TIME,
        // What its own server says of itself.
        (None, NodeId(0)) => Duration::ZERO,
        // The coordinator may have ended first.
        (None, _) => SIGN_TIME,
    };
    let failure = lost.or(failure);
    let failure =
        failure.map(|reason| if is_ended(location, &before, patience) { "the session was ended".to_owned() } else { reason });
    if let (None, Some(summary), Some(path)) = (&failure, &summary, &options.report) {
        let written = std::fs::write(path, page::page(&target.to_string_lossy(), summary));
        // The dataset is there; that its report is not is no reason to say otherwise.
        written.map_err(|error| Failure::new(format!("it is staged in, but cannot write '{}': {error}", path.display())))?;
    }
    match failure {
        None => Ok(summary.map_or(0, |summary| summary.counts.skipped)),
        Some(reason) => Err(Failure::new(format!("cannot stage in to '{}': {reason}", target.display()))),
    }
}

/// Whether the session has ended meanwhile, which servers do one after another: as soon as one of this machine's is gone, the others
/// get some time to follow.
fn is_ended(location: &Location, before: &[NodeId], patience: Duration) -> bool {
    let start = Instant::now();
    loop {
        let live = location.live_nodes();
        if live.is_empty() || live.len() == before.len() && start.elapsed() > patience || start.elapsed() > END_TIME {
            return live.is_empty();
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// The servers know nothing of our working folder, nor of our descriptors. A final `/.` means something, so nothing is tidied up.
pub(super) fn absolute(source: &OsStr) -> Result<Vec<u8>, Failure> {
    if source.is_empty() {
        return Err(Failure::usage("a source is empty; is a variable not set?"));
    }
    let folder = env::current_dir()?;
    let path = folder.join(source);
    if let Some(list) = source.as_bytes().strip_prefix(b"@").filter(|_| path.symlink_metadata().is_err()) {
        // The coordinator reads it: there may be more names in it than fit a message.
        return Ok([b"@", folder.join(OsStr::from_bytes(list)).as_os_str().as_bytes()].concat());
    }
    if path.metadata().is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir()) {
        return Err(Failure::usage(format!(
            "'{}' is neither a file nor a directory; a pipe cannot be staged in",
            source.display()
        )));
    }
    // What these name depends on who looks.
    if path.starts_with("/proc") || path.starts_with("/dev") {
        let named = path.canonicalize().map_err(|error| Failure::new(format!("cannot read '{}': {error}", source.display())))?;
        return Ok(named.into_os_string().into_vec());
    }
    if Path::new(source).is_absolute() {
        return Ok(source.as_bytes().to_vec());
    }
    // In a pattern, our folder's name must mean only itself.
    let mut absolute = match folder.to_str().filter(|_| path.symlink_metadata().is_err()) {
        Some(folder) => glob::Pattern::escape(folder).into_bytes(),
        None => folder.into_os_string().into_vec(),
    };
    absolute.push(b'/');
    absolute.extend_from_slice(source.as_bytes());
    Ok(absolute)
}
