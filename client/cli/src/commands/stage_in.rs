//! `dayfly stage-in`: the request, its progress and its summary.

mod page;
mod progress;

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::process::ExitCode;

use dayfly_client::Session;
use dayfly_client::locate::Location;
use dayfly_meta::wire::control::{Command, Event, Grouping, OnConflict as Conflicts, Selection, StageIn as Request};

use crate::args::{Group, OnConflict, StageIn, StageInOptions};
use crate::failure::Failure;
use crate::namespace;
use progress::Reporter;

pub(super) fn run(arguments: StageIn) -> Result<ExitCode, Failure> {
    let (target, sources) = arguments.paths.split_last().ok_or_else(|| Failure::usage("a source and a target are needed"))?;
    stage(&namespace::location()?, sources, target, &arguments.options, arguments.json)?;
    Ok(ExitCode::SUCCESS)
}

/// Stages in, telling the user how it goes.
pub(super) fn stage(
    location: &Location,
    sources: &[OsString],
    target: &OsStr,
    options: &StageInOptions,
    json: bool,
) -> Result<(), Failure> {
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
        },
        seed: options.seed,
        replace: options.replace,
        max_rate: options.max_rate,
    };
    let mut reporter = Reporter::new(json, &target.to_string_lossy(), options.max_rate);
    let mut failure = None;
    let mut summary = None;
    let ended = session.control(Command::StageIn(request), &mut |event| {
        reporter.show(&event);
        match event {
            Event::Failed { reason } => failure = Some(reason),
            Event::StagedIn(done) => summary = Some(done),
            _ => {}
        }
    });
    let failure = ended.err().map(|error| format!("node {}: {error}", session.node())).or(failure);
    if let (None, Some(summary), Some(path)) = (&failure, &summary, &options.report) {
        let written = std::fs::write(path, page::page(&target.to_string_lossy(), summary));
        // The dataset is there; that its report is not is no reason to say otherwise.
        written.map_err(|error| Failure::new(format!("it is staged in, but cannot write '{}': {error}", path.display())))?;
    }
    match failure {
        None => Ok(()),
        Some(reason) => Err(Failure::new(format!("cannot stage in to '{}': {reason}", target.display()))),
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
        // The lead reads it: there may be more names in it than fit a message.
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
