//! `dayfly cat`: writes files in the namespace to standard output.

use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use dayfly_client::{OpenFile, View, ViewError};

use crate::args::CatArguments;
use crate::failure::{Failure, complain, output};
use crate::namespace::{about, view};

/// Bytes per read.
const READ_LEN: usize = 1 << 20;

pub(super) fn run(arguments: CatArguments) -> Result<ExitCode, Failure> {
    let view = view()?;
    let mut output = output();
    let mut failed = false;
    for path in &arguments.paths {
        let copied = view.open(path.as_bytes()).map_err(CopyError::Read).and_then(|file| copy(&view, &file, &mut output));
        match copied {
            Ok(()) => {}
            Err(CopyError::Write(error)) => return Err(error.into()),
            Err(CopyError::Read(error)) => {
                complain(about(path.as_bytes(), &error));
                failed = true;
            }
        }
    }
    output.flush()?;
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Says which side of a copy failed.
pub(super) enum CopyError {
    Read(ViewError),
    Write(io::Error),
}

/// Writes a whole file in the namespace to `output`.
pub(super) fn copy(view: &View, file: &OpenFile, output: &mut impl Write) -> Result<(), CopyError> {
    let mut buffer = vec![0; READ_LEN.min(file.stat().size as usize)];
    let mut offset = 0;
    while offset < file.stat().size {
        let count = view.read_at(file, offset, &mut buffer).map_err(CopyError::Read)?;
        output.write_all(&buffer[..count]).map_err(CopyError::Write)?;
        offset += count as u64;
    }
    Ok(())
}
