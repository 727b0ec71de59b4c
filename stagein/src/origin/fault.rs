//! A decorator that injects faults into the file system that the sources lie on. It implements [`SourceFiles`] itself, so the
//! code under test is the code that ships.
//!
//! A [`SourceFaults`] is asked before each call, and names the [`SourceFault`] that hits the call, if any. While it does not
//! return, the call hangs.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;

use super::files::{FileState, SourceFiles};

/// The fault that hits a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceFault {
    /// The call fails.
    Fail(Errno),
    /// A read returns at most this many bytes.
    Short(usize),
    /// The file seems to end at this offset.
    Truncated(u64),
    /// Another file of the same length seems to be in the place of this one: its inode, times and bytes differ.
    Replaced,
}

/// A call that is about to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceCall {
    /// A file or a directory is opened.
    Open,
    /// The state of an open file is asked for.
    State,
    /// Bytes are read.
    Read {
        /// Offset in the file.
        offset: u64,
        /// Number of bytes wanted.
        len: usize,
    },
}

/// Decides which fault hits each call. All threads share it.
pub type SourceFaults = Arc<dyn Fn(SourceCall) -> Option<SourceFault> + Send + Sync>;

/// Files whose calls suffer the faults of a schedule. They also list all calls.
pub struct FaultyFiles<F> {
    inner: F,
    faults: SourceFaults,
    history: Mutex<CallHistory>,
}

#[derive(Default)]
struct CallHistory {
    calls: Vec<SourceCall>,
    under_way: usize,
    under_way_max: usize,
}

impl<F> FaultyFiles<F> {
    /// Decorates `inner`.
    pub fn new(inner: F, faults: SourceFaults) -> Self {
        Self { inner, faults, history: Mutex::default() }
    }

    /// Returns the calls since this was last called, in the order in which they began.
    pub fn take_calls(&self) -> Vec<SourceCall> {
        std::mem::take(&mut self.history().calls)
    }

    /// Returns how many calls have been under way at the same time at most.
    pub fn under_way_max(&self) -> usize {
        self.history().under_way_max
    }

    fn history(&self) -> MutexGuard<'_, CallHistory> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a call, which suffers the fault that the schedule names.
    fn call<T>(&self, call: SourceCall, make: impl FnOnce(Option<SourceFault>) -> io::Result<T>) -> io::Result<T> {
        {
            let mut history = self.history();
            history.calls.push(call);
            history.under_way += 1;
            history.under_way_max = history.under_way_max.max(history.under_way);
        }
        // A thread that unwinds ends its call, too.
        let _ended = CallEnd(&self.history);
        match (self.faults)(call) {
            Some(SourceFault::Fail(errno)) => Err(errno.into()),
            fault => make(fault),
        }
    }
}

struct CallEnd<'a>(&'a Mutex<CallHistory>);

impl Drop for CallEnd<'_> {
    fn drop(&mut self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).under_way -= 1;
    }
}

impl<F: SourceFiles> SourceFiles for FaultyFiles<F> {
    type File = F::File;

    fn open(&self, path: &Path) -> io::Result<F::File> {
        self.call(SourceCall::Open, |_| self.inner.open(path))
    }

    fn open_directory(&self, path: &Path) -> io::Result<F::File> {
        self.call(SourceCall::Open, |_| self.inner.open_directory(path))
    }

    fn open_below(&self, directory: &F::File, path: &Path) -> io::Result<F::File> {
        self.call(SourceCall::Open, |_| self.inner.open_below(directory, path))
    }

    fn state(&self, file: &F::File) -> io::Result<FileState> {
        self.call(SourceCall::State, |fault| {
            let mut state = self.inner.state(file)?;
            match fault {
                Some(SourceFault::Truncated(end)) => state.version.size = state.version.size.min(end),
                Some(SourceFault::Replaced) => {
                    (state.inode, state.version.mtime_s) = (state.inode.wrapping_add(1), state.version.mtime_s.wrapping_add(1));
                }
                _ => {}
            }
            Ok(state)
        })
    }

    fn read_at(&self, file: &F::File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        self.call(SourceCall::Read { offset, len: bytes.len() }, |fault| {
            let len = match fault {
                Some(SourceFault::Short(len)) => bytes.len().min(len),
                Some(SourceFault::Truncated(end)) => end.saturating_sub(offset).min(bytes.len() as u64) as usize,
                _ => bytes.len(),
            };
            let len = self.inner.read_at(file, &mut bytes[..len], offset)?;
            if fault == Some(SourceFault::Replaced) {
                bytes[..len].iter_mut().for_each(|byte| *byte = !*byte);
            }
            Ok(len)
        })
    }
}
