//! Whether a folder is this user's alone. Folders of sessions lie where everyone may make some, under names that everyone can guess.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

/// Others may write.
const WRITABLE_BY_ALL: u32 = 0o002;
/// Only who owns what is in a folder, or the folder, may remove and rename it.
const STICKY: u32 = 0o1000;

/// A folder that others could look into, or put another in the place of.
#[derive(Debug, thiserror::Error)]
#[error("'{}' is not a private folder of yours: {exposure}", folder.display())]
pub struct NotPrivate {
    folder: PathBuf,
    exposure: Exposure,
}

/// What is wrong with it. Owners are told by number: their names are a matter of whoever may ask a directory service.
#[derive(Debug, thiserror::Error)]
enum Exposure {
    #[error("it cannot be looked at: {0}")]
    Unseen(io::Error),
    #[error("it is a symbolic link{}", of(*.owner))]
    Link { owner: u32 },
    #[error("it is no directory{}", of(*.owner))]
    NoDirectory { owner: u32 },
    #[error("it belongs to user {owner}, who made it before you could")]
    Foreign { owner: u32 },
    #[error("its mode is {mode:04o}, which lets others in: 'chmod 700' makes it private")]
    Open { mode: u32 },
    #[error("all may write to '{}', which has no sticky bit (mode {mode:04o}), so anyone may put another in its place: 'chmod +t' prevents that", base.display())]
    Renamable { base: PathBuf, mode: u32 },
}

/// Whose a thing is, and who can take it away.
fn of(owner: u32) -> String {
    if owner == geteuid().as_raw() { ", of your own: remove it".to_owned() } else { format!(" of user {owner}") }
}

impl NotPrivate {
    /// The user that it belongs to, where that is another.
    pub fn owner(&self) -> Option<u32> {
        let (Exposure::Link { owner } | Exposure::NoDirectory { owner } | Exposure::Foreign { owner }) = self.exposure else {
            return None;
        };
        (owner != geteuid().as_raw()).then_some(owner)
    }
}

/// Checks that a folder is this user's alone.
///
/// # Errors
///
/// If it is a symbolic link, no directory, another user's, or open to others; or if it is not there.
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

/// Checks that others cannot rename a folder away: that not all may write to the one that holds it, unless that has the sticky bit. Its
/// owner, members of its group and root can all the same, and are trusted.
///
/// # Errors
///
/// If others can.
pub fn check_stays(folder: &Path) -> Result<(), NotPrivate> {
    let base = folder.parent().unwrap_or(folder);
    match fs::metadata(base) {
        Ok(found) if found.mode() & WRITABLE_BY_ALL != 0 && found.mode() & STICKY == 0 => {
            let exposure = Exposure::Renamable { base: base.to_owned(), mode: found.mode() & 0o7777 };
            Err(NotPrivate { folder: folder.to_owned(), exposure })
        }
        // What is not there is found by whoever wants to use it.
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
            ("file", "no directory, of your own: remove it"),
            ("link", "a symbolic link, of your own"),
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
