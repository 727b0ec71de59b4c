//! The archives that the simulated sessions stage in. They are written once; the contents of their files are known.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;

use super::random::Random;

/// The contents of files, by path below the dataset's root.
pub(super) type Files = BTreeMap<Vec<u8>, Vec<u8>>;

/// An archive, and the files in it.
pub(super) struct Source {
    pub(super) path: PathBuf,
    pub(super) files: Files,
}

impl Source {
    /// Writes an archive with files of these lengths into a folder.
    pub(super) fn write(folder: &Path, name: &str, lens: &[usize]) -> Self {
        let files: Files = lens.iter().enumerate().map(|(number, &len)| file(name, number, len)).collect();
        let path = folder.join(format!("{name}.tar"));
        fs::write(&path, tar(&files)).unwrap();
        Self { path, files }
    }

    /// Writes a compressed archive with files of these lengths into a folder.
    pub(super) fn write_compressed(folder: &Path, name: &str, lens: &[usize]) -> Self {
        let Self { path: plain, files } = Self::write(folder, name, lens);
        let path = folder.join(format!("{name}.tar.gz"));
        let mut encoder = GzEncoder::new(File::create(&path).unwrap(), Compression::fast());
        encoder.write_all(&fs::read(plain).unwrap()).unwrap();
        encoder.finish().unwrap();
        Self { path, files }
    }
}

/// All sources. Dropping this removes their folder.
pub(super) struct Sources {
    folder: tempfile::TempDir,
    /// One archive of small files, for the stage-in without faults.
    pub(super) first: Source,
    /// Archives for the stage-in during which faults happen.
    pub(super) second: Vec<Source>,
}

/// Creates a temporary folder. It is in memory if this machine has `/dev/shm`, because a seed creates many files, and a real
/// drive would only slow the simulation down.
pub(super) fn scratch() -> tempfile::TempDir {
    let builder = || {
        let mut builder = tempfile::Builder::new();
        builder.prefix("dayfly-simulation-");
        builder
    };
    builder().tempdir_in("/dev/shm").or_else(|_| builder().tempdir()).unwrap()
}

impl Sources {
    pub(super) fn write() -> Self {
        let folder = scratch();
        let archive = |name: &str, lens: &[usize]| Source::write(folder.path(), name, lens);
        let small: Vec<usize> = (0..24).map(|number| number * 397).collect();
        let large: Vec<usize> = [&[300_000, 0, 1, 511, 512, 513][..], &[20_000; 10]].concat();
        let pieces = [1_060_000, 3000];
        let first = archive("first", &small);
        let second =
            vec![archive("one", &small[..12]), archive("two", &large), archive("three", &small[6..]), archive("four", &pieces)];
        Self { folder, first, second }
    }

    /// Copies a source, so that a fault can change the copy.
    pub(super) fn copy(source: &Source, into: &Path) -> Source {
        let path = into.join(source.path.file_name().unwrap());
        fs::copy(&source.path, &path).unwrap();
        Source { path, files: source.files.clone() }
    }

    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }
}

fn file(archive: &str, number: usize, len: usize) -> (Vec<u8>, Vec<u8>) {
    let mut random = Random::new(number as u64 * 1000 + len as u64 + u64::from(archive.as_bytes()[0]));
    let words = std::iter::repeat_with(|| random.next().to_le_bytes());
    (format!("{archive}/{number}").into_bytes(), words.flatten().take(len).collect())
}

/// Returns an uncompressed tar archive of `files`.
fn tar(files: &Files) -> Vec<u8> {
    let mut archive = Vec::new();
    for (path, bytes) in files {
        let mut header = [0; 512];
        header[..path.len()].copy_from_slice(path);
        header[100..107].copy_from_slice(b"0000644");
        header[124..135].copy_from_slice(format!("{:011o}", bytes.len()).as_bytes());
        header[136..147].copy_from_slice(b"14000000000");
        header[148..156].fill(b' ');
        header[156] = b'0';
        header[257..265].copy_from_slice(b"ustar\x0000");
        let sum: u64 = header.iter().map(|&byte| u64::from(byte)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        archive.extend(header);
        archive.extend(bytes);
        archive.resize(archive.len().next_multiple_of(512), 0);
    }
    archive.resize(archive.len() + 1024, 0);
    archive
}
