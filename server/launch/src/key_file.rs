//! The key file: the invitation in a file, for launchers that do not pass standard input to every
//! server.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::error::LaunchError;
use crate::invitation::Invitation;
use crate::notices::Notices;

/// A key file that only the user can read. Dropping it removes the file, which happens once all
/// servers have joined.
pub(crate) struct KeyFile {
    path: PathBuf,
    notices: Notices,
}

impl KeyFile {
    /// Writes the invitation to a new file.
    pub(crate) fn create(path: &Path, invitation: &Invitation, notices: Notices) -> Result<Self, LaunchError> {
        let cannot = |source| LaunchError::WriteKeyFile { path: path.to_owned(), source };
        let mut file = fs::OpenOptions::new().create_new(true).write(true).mode(0o600).open(path).map_err(cannot)?;
        let key_file = Self { path: path.to_owned(), notices };
        let line = invitation.to_line()?;
        file.write_all(&line).and_then(|()| file.sync_all()).map_err(cannot)?;
        Ok(key_file)
    }
}

impl Drop for KeyFile {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            let path = self.path.display();
            self.notices
                .show(format_args!("cannot remove '{path}', which contains the session's key: {error}; remove it yourself"));
        }
    }
}
