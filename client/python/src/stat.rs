//! What is known about files and directories, under the names of `os.stat_result` and `os.DirEntry`.

use dayfly_client::{FileKind, Stat as ClientStat};
use dayfly_meta::id::SessionId;
use dayfly_meta::path::join;
use nix::unistd::{getegid, geteuid};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::path::to_python;

/// Blocks of `st_blocks` have this length, whatever `st_blksize` says.
const STAT_BLOCK_LEN: u64 = 512;

/// The attributes of a file, directory or symbolic link.
#[pyclass(frozen, module = "dayfly", eq)]
#[derive(PartialEq)]
pub(crate) struct Stat {
    stat: ClientStat,
    /// The same number that the preload library shows.
    device: u64,
}

impl Stat {
    pub(crate) fn new(stat: ClientStat, session: SessionId) -> Self {
        let hash = session.to_string().bytes().fold(0_u64, |hash, byte| hash.wrapping_mul(31) + u64::from(byte));
        Self { stat, device: libc::makedev(0, 0x8_0000 | (hash as u32 & 0x7_ffff)) }
    }
}

#[pymethods]
impl Stat {
    #[getter]
    fn st_mode(&self) -> u32 {
        self.stat.mode()
    }

    #[getter]
    fn st_ino(&self) -> u64 {
        self.stat.inode
    }

    #[getter]
    fn st_dev(&self) -> u64 {
        self.device
    }

    #[getter]
    fn st_nlink(&self) -> u32 {
        self.stat.links
    }

    #[getter]
    fn st_uid(&self) -> u32 {
        geteuid().as_raw()
    }

    #[getter]
    fn st_gid(&self) -> u32 {
        getegid().as_raw()
    }

    #[getter]
    fn st_size(&self) -> u64 {
        self.stat.size
    }

    #[getter]
    fn st_blocks(&self) -> u64 {
        self.stat.size.div_ceil(STAT_BLOCK_LEN)
    }

    #[getter]
    fn st_blksize(&self) -> u64 {
        dayfly_meta::limits::CHUNK_LEN
    }

    #[getter]
    fn st_atime(&self) -> f64 {
        self.st_mtime()
    }

    #[getter]
    fn st_mtime(&self) -> f64 {
        self.stat.mtime_s as f64 + f64::from(self.stat.mtime_ns) / 1e9
    }

    #[getter]
    fn st_ctime(&self) -> f64 {
        self.st_mtime()
    }

    #[getter]
    fn st_mtime_ns(&self) -> i128 {
        i128::from(self.stat.mtime_s) * 1_000_000_000 + i128::from(self.stat.mtime_ns)
    }

    fn is_file(&self) -> bool {
        self.stat.kind == FileKind::File
    }

    fn is_dir(&self) -> bool {
        self.stat.kind == FileKind::Directory
    }

    fn is_symlink(&self) -> bool {
        self.stat.kind == FileKind::Symlink
    }

    fn __repr__(&self) -> String {
        format!("<dayfly.Stat st_mode=0o{:o} st_size={}>", self.stat.mode(), self.stat.size)
    }
}

/// A name in a directory.
#[pyclass(frozen, module = "dayfly")]
pub(crate) struct DirEntry {
    name: Vec<u8>,
    path: Vec<u8>,
    kind: FileKind,
}

impl DirEntry {
    pub(crate) fn new(directory: &[u8], name: &[u8], kind: FileKind) -> Self {
        Self { name: name.to_vec(), path: join(directory, name), kind }
    }
}

#[pymethods]
impl DirEntry {
    #[getter]
    fn name<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyString>> {
        to_python(py, &self.name)
    }

    #[getter]
    fn path<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyString>> {
        to_python(py, &self.path)
    }

    fn is_file(&self) -> bool {
        self.kind == FileKind::File
    }

    fn is_dir(&self) -> bool {
        self.kind == FileKind::Directory
    }

    fn is_symlink(&self) -> bool {
        self.kind == FileKind::Symlink
    }

    fn __fspath__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyString>> {
        self.path(py)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("<dayfly.DirEntry {}>", self.name(py)?.repr()?))
    }
}
