//! The invitation in a file, for launchers that pass no standard input on to all.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::invitation::Invitation;
use crate::failure::{Failure, complain};

/// The invitation in a file that only its owner reads, for as long as servers start.
pub(super) struct Written(PathBuf);

impl Written {
    pub(super) fn new(path: &Path, invitation: &Invitation) -> Result<Self, Failure> {
        let cannot = |error: std::io::Error| {
            Failure::new(format!(
                "cannot write '{}', which all nodes must see (--key-file names another): {error}",
                path.display()
            ))
        };
        let mut file = fs::OpenOptions::new().create_new(true).write(true).mode(0o600).open(path).map_err(cannot)?;
        let written = Self(path.to_owned());
        let line = invitation.to_line()?;
        file.write_all(&line).and_then(|()| file.sync_all()).map_err(cannot)?;
        Ok(written)
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            complain(format_args!("cannot remove '{}', which has the session's key: {error}", self.0.display()));
        }
    }
}
