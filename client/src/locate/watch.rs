//! Checks that the files that a process holds in a session's folder still have their names. A lock
//! or a socket that has lost its name is useless: nobody can find the session or end it through
//! that file.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;

/// Files and folders that must keep their names, and folders whose content must not look old.
#[derive(Debug)]
pub struct Watch {
    held: Vec<Held>,
    folders: Vec<PathBuf>,
}

/// The file that a name referred to.
#[derive(Debug)]
struct Held {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Watch {
    /// Watches a folder.
    ///
    /// # Errors
    ///
    /// If the folder is gone already.
    pub fn new(folder: &Path) -> io::Result<Self> {
        let mut watch = Self { held: Vec::new(), folders: Vec::new() };
        watch.add(folder.to_owned(), &fs::symlink_metadata(folder)?);
        watch.keep_fresh(folder.to_owned());
        Ok(watch)
    }

    /// Adds a folder that [`Self::touch`] keeps fresh, but whose loss is tolerated: a node's folder
    /// in a data dir.
    pub fn keep_fresh(&mut self, folder: PathBuf) {
        self.folders.push(folder);
    }

    /// Watches a name that must keep referring to the file with this metadata.
    pub fn add(&mut self, path: PathBuf, metadata: &Metadata) {
        self.held.push(Held { path, device: metadata.dev(), inode: metadata.ino() });
    }

    /// Returns the first watched name that no longer exists or refers to another file. A name that
    /// cannot be looked up for another reason counts as present.
    pub fn gone(&self) -> Option<&Path> {
        self.held.iter().find(|held| held.is_gone()).map(|held| &*held.path)
    }

    /// Updates the times of the folders and of everything in them, so that programs that remove old
    /// files from folders such as `/tmp` leave them alone.
    pub fn touch(&self) {
        for folder in &self.folders {
            let content = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
            for path in content.chain([folder.clone()]) {
                // At worst, a file whose times cannot be updated is removed, which `gone` notices.
                let _ = utimensat(AT_FDCWD, &path, &TimeSpec::UTIME_NOW, &TimeSpec::UTIME_NOW, UtimensatFlags::NoFollowSymlink);
            }
        }
    }
}

impl Held {
    fn is_gone(&self) -> bool {
        match fs::symlink_metadata(&self.path) {
            Ok(metadata) => (metadata.dev(), metadata.ino()) != (self.device, self.inode),
            Err(error) => {
                let gone = [Errno::ENOENT, Errno::ENOTDIR, Errno::ESTALE].map(|errno| errno as i32);
                error.raw_os_error().is_some_and(|errno| gone.contains(&errno))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_name_that_is_removed_or_refers_to_another_file_is_gone() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path().join("folder");
        let remake = || {
            let _ = fs::remove_dir_all(&folder);
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("lock"), "1").unwrap();
            let mut watch = Watch::new(&folder).unwrap();
            watch.add(folder.join("lock"), &fs::metadata(folder.join("lock")).unwrap());
            assert_eq!(watch.gone(), None);
            watch
        };
        let check = |change: &dyn Fn(), gone: Option<&Path>| {
            let watch = remake();
            change();
            assert_eq!(watch.gone(), gone);
        };
        let lock = folder.join("lock");
        check(&|| fs::write(&lock, "2").unwrap(), None);
        check(&|| fs::remove_file(&lock).unwrap(), Some(&lock));
        check(
            &|| {
                fs::rename(&lock, folder.join("other")).unwrap();
                fs::write(&lock, "1").unwrap();
            },
            Some(&lock),
        );
        check(&|| fs::remove_dir_all(&folder).unwrap(), Some(&folder));
        check(
            &|| {
                fs::rename(&folder, base.path().join("moved")).unwrap();
                fs::write(&folder, "").unwrap();
                fs::remove_dir_all(base.path().join("moved")).unwrap();
            },
            Some(&folder),
        );
        fs::remove_file(&folder).unwrap();
        let watch = remake();
        fs::rename(base.path(), base.path().with_extension("moved")).unwrap();
        assert_eq!(watch.gone(), Some(&*folder));
        fs::rename(base.path().with_extension("moved"), base.path()).unwrap();
        assert_eq!(watch.gone(), None);
    }

    #[test]
    fn touched_files_look_young() {
        let folder = tempfile::tempdir().unwrap();
        let lock = folder.path().join("lock");
        let _socket = std::os::unix::net::UnixListener::bind(folder.path().join("socket")).unwrap();
        fs::write(&lock, "1").unwrap();
        let all = [folder.path().to_owned(), lock, folder.path().join("socket")];
        for path in &all {
            assert!(Command::new("touch").args(["-d", "2001-02-03"]).arg(path).status().unwrap().success());
        }
        Watch::new(folder.path()).unwrap().touch();
        for path in &all {
            let metadata = fs::symlink_metadata(path).unwrap();
            assert!(metadata.modified().unwrap().elapsed().unwrap().as_secs() < 3600, "{}", path.display());
            assert!(metadata.accessed().unwrap().elapsed().unwrap().as_secs() < 3600, "{}", path.display());
        }
    }
}
