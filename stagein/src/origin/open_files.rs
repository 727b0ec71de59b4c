//! Keeps the descriptors of the sources that were read last, so that the next read of the same source need not open it. Files
//! in trees are not kept, but the roots of trees are.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::OriginError;
use super::files::{FileState, SourceFiles};
use super::target::Target;

/// An open file or directory.
pub(super) struct Opened<T> {
    pub(super) file: T,
    /// What a source looked like when it was opened; `None` for a file or the root of a tree.
    pub(super) state: Option<FileState>,
}

/// Open files, by the path of the source.
type Kept<T> = Vec<(Vec<u8>, Arc<Opened<T>>)>;

/// The descriptors kept, by the path of the source. The one that was used last is at the end.
pub(super) struct OpenFiles<T> {
    kept: Mutex<Kept<T>>,
    max: usize,
}

impl<T> OpenFiles<T> {
    pub(super) fn new(max: usize) -> Self {
        Self { kept: Mutex::default(), max }
    }

    /// Returns the target's file, and whether a descriptor from an earlier read was used, of the file or of its tree's root.
    pub(super) fn open<F: SourceFiles<File = T>>(
        &self,
        files: &F,
        target: &Target,
    ) -> (Result<Arc<Opened<T>>, OriginError>, bool) {
        let path = Path::new(OsStr::from_bytes(&target.source_path));
        let (opened, was_kept) = match self.find(&target.source_path) {
            Some(kept) => (kept, true),
            None => {
                let opened = match target.below {
                    Some(_) => files.open_directory(path).map(|file| Opened { file, state: None }),
                    None => files.open(path).and_then(|file| Ok(Opened { state: Some(files.state(&file)?), file })),
                };
                let opened = match opened {
                    Ok(opened) => Arc::new(opened),
                    Err(error) => return (Err(OriginError::io(path, 0, error)), false),
                };
                self.keep(&target.source_path, &opened);
                (opened, false)
            }
        };
        let Some(below) = &target.below else { return (Ok(opened), was_kept) };
        let file = files.open_below(&opened.file, Path::new(OsStr::from_bytes(below)));
        (
            file.map(|file| Arc::new(Opened { file, state: None })).map_err(|error| OriginError::io(&target.path, 0, error)),
            was_kept,
        )
    }

    /// Closes the descriptor of the target's source, once no other thread reads it.
    pub(super) fn forget(&self, target: &Target) {
        self.lock().retain(|(path, _)| *path != target.source_path);
    }

    fn find(&self, path: &[u8]) -> Option<Arc<Opened<T>>> {
        let mut kept = self.lock();
        let at = kept.iter().position(|(other, _)| other == path)?;
        kept[at..].rotate_left(1);
        kept.last().map(|(_, file)| file.clone())
    }

    fn keep(&self, path: &[u8], file: &Arc<Opened<T>>) {
        let mut kept = self.lock();
        // Another thread may have opened the same source meanwhile.
        kept.retain(|(other, _)| other != path);
        kept.push((path.to_vec(), file.clone()));
        while kept.len() > self.max {
            kept.remove(0);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Kept<T>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
