//! Checks that a folder belongs to this user alone. Folders of sessions lie where all users may
//! create folders, and everyone can guess their names.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

/// The permission bit that lets all users write.
const WRITABLE_BY_ALL: u32 = 0o002;
/// With this bit, only the owner of a file, or of the folder that contains it, may remove or rename
/// the file.
const STICKY: u32 = 0o1000;

/// A folder that others could look into or replace.
#[derive(Debug, thiserror::Error)]
#[error("'{}' is not a private folder of yours: {exposure}", folder.display())]
pub struct NotPrivate {
    folder: PathBuf,
    exposure: Exposure,
}

/// What is wrong with the folder. Owners are named by number, because looking up a name may require
/// a query to a directory service.
#[derive(Debug, thiserror::Error)]
enum Exposure {
    #[error("it cannot be examined: {0}")]
    Unseen(io::Error),
    #[error("it is a symbolic link{}", of(*.owner))]
    Link { owner: u32 },
    #[error("it is not a directory{}", of(*.owner))]
    NoDirectory { owner: u32 },
    #[error("it belongs to user {owner}, who created it before you could")]
    Foreign { owner: u32 },
    #[error("its mode is {mode:04o}, which lets others in: 'chmod 700' makes it private")]
    Open { mode: u32 },
    #[error("all users may write to '{}', which has no sticky bit (mode {mode:04o}), so anyone could replace the folder: 'chmod +t' prevents that", base.display())]
    Renamable { base: PathBuf, mode: u32 },
}

/// Returns the end of a message, which names the file's owner and what this user can do about it.
fn of(owner: u32) -> String {
    if owner == geteuid().as_raw() { "; it is yours: remove it".to_owned() } else { format!("; it belongs to user {owner}") }
}

impl NotPrivate {
    /// Returns the user that the folder belongs to, if that is not this user.
    pub fn owner(&self) -> Option<u32> {
        let (Exposure::Link { owner } | Exposure::NoDirectory { owner } | Exposure::Foreign { owner }) = self.exposure else {
            return None;
        };
        (owner != geteuid().as_raw()).then_some(owner)
    }
}

/// Checks that a folder belongs only to this user.
///
/// # Errors
///
/// If it is a symbolic link, not a directory, owned by another user, open to others, or missing.
pub fn check_private(folder: &Path) -> Result<(), NotPrivate> {
    let exposure = match fs::symlink_metadata(folder) {
        Err(error) => Exposure::Unseen(error),
        Ok(found) => {
            let (owner, mode) = (found.uid(), found.mode() & 0o7777);
            if found.is_symlink() {
                Exposure::Link { owner }
            } else if !found.is_dir() {
                Exposure::NoDirectory { owner }
            } else if owner != geteuid().as_raw() {
                Exposure::Foreign { owner }
            } else if mode & 0o077 != 0 {
                Exposure::Open { mode }
            } else {
                return Ok(());
            }
        }
    };
    Err(NotPrivate { folder: folder.to_owned(), exposure })
}

/// Checks that other users cannot replace a folder: if all users may write to the folder above it,
/// the folder above must have the sticky bit. The owner of the folder above, the members of its
/// group, and root can replace the folder anyway, and are trusted.
///
/// # Errors
///
/// If other users can replace it.
pub fn check_stays(folder: &Path) -> Result<(), NotPrivate> {
    let base = folder.parent().unwrap_or(folder);
    match fs::metadata(base) {
        Ok(found) if found.mode() & WRITABLE_BY_ALL != 0 && found.mode() & STICKY == 0 => {
            let exposure = Exposure::Renamable { base: base.to_owned(), mode: found.mode() & 0o7777 };
            Err(NotPrivate { folder: folder.to_owned(), exposure })
        }
        // A missing folder is noticed when it is used.
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn only_a_directory_of_ones_own_with_mode_700_is_private() {
        let base = tempfile::tempdir().unwrap();
        let at = |name: &str| base.path().join(name);
        let set = |path: &Path, mode: u32| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        for name in ["good", "open", "base"] {
            fs::create_dir(at(name)).unwrap();
            set(&at(name), 0o700);
        }
        set(&at("open"), 0o750);
        fs::write(at("file"), "").unwrap();
        symlink(at("good"), at("link")).unwrap();
        let said = |name: &str| check_private(&at(name)).err().map(|error| error.to_string());
        assert_eq!(said("good"), None);
        for (name, word) in [
            ("open", "mode is 0750"),
            ("file", "not a directory; it is yours: remove it"),
            ("link", "a symbolic link; it is yours"),
            ("none", "No such file"),
        ] {
            assert!(said(name).is_some_and(|said| said.contains(word) && said.contains("not a private folder")), "{name}");
        }
        for (mode, stays) in [(0o700, true), (0o1777, true), (0o775, true), (0o777, false), (0o702, false)] {
            set(&at("base"), mode);
            assert_eq!(check_stays(&at("base/x")).is_ok(), stays, "{mode:o}");
        }
    }
}
