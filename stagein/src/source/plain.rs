//! Reads an uncompressed file sequentially, in large pieces.
//!
//! Up to offset `eager_until`, the file belongs to this reader alone, and the reader reads ahead.
//! Beyond that offset it reads only the bytes that are requested, because another worker reads that
//! part, and source bytes should cross the network only once.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dayfly_meta::catalog::Version;
use dayfly_meta::wire::control::Step;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use crate::progress::ProgressMonitor;

/// Bytes of one buffered read. If the buffer exceeded the processor's near caches, copying from it
/// would be slower.
const BUFFER_LEN: usize = 256 << 10;
/// Reads of at least this many bytes bypass the buffer and go straight into the caller's memory.
const DIRECT_LEN_MIN: usize = 32 << 10;
/// Bytes read ahead after a read that bypassed the buffer. Such a read usually reached the end of a
/// member's data, and then only the next header is needed.
const AFTER_DIRECT_LEN: usize = 4 << 10;

/// A reader that may be able to skip bytes without reading them.
pub(crate) trait Skip: Read {
    /// Skips `len` bytes.
    fn skip(&mut self, len: u64) -> io::Result<()> {
        let mut left = len;
        let mut discarded = [0; 4096];
        while left > 0 {
            let room = left.min(discarded.len() as u64) as usize;
            match self.read(&mut discarded[..room]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => left -= count as u64,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Reads one uncompressed file.
pub(crate) struct PlainReader {
    file: File,
    /// Length of the file when it was opened.
    size: u64,
    buffer: Vec<u8>,
    /// Offset in the buffer of the next byte to return.
    at: usize,
    /// Offset in the file of the buffer's end.
    end: u64,
    eager_until: u64,
    /// Whether the last read bypassed the buffer.
    was_direct: bool,
    /// Bytes read from the file.
    read: u64,
    /// Time spent waiting for these bytes, including pauses for the rate limit.
    waited: Duration,
    monitor: Arc<ProgressMonitor>,
}

impl PlainReader {
    /// Creates a reader that starts at `offset` and reads ahead no further than `eager_until`.
    pub(crate) fn new(file: File, offset: u64, eager_until: u64, monitor: Arc<ProgressMonitor>) -> io::Result<Self> {
        let size = file.metadata()?.len();
        // A file system may ignore this advice, which is no reason to fail.
        let _ = posix_fadvise(file.as_fd(), 0, 0, PosixFadviseAdvice::POSIX_FADV_SEQUENTIAL);
        Ok(Self {
            file,
            size,
            buffer: Vec::new(),
            at: 0,
            end: offset,
            eager_until,
            was_direct: false,
            read: 0,
            waited: Duration::ZERO,
            monitor,
        })
    }

    /// Returns the file that is read.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Returns the file's length in bytes when it was opened.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Returns the offset, in the file, of the next byte to return.
    pub(crate) fn position(&self) -> u64 {
        self.end - (self.buffer.len() - self.at) as u64
    }

    /// Returns the number of bytes read from the file so far.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.read
    }

    /// Returns the time that the thread has waited for bytes from the file.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }

    /// Continues at offset `to`. Bytes that are in the buffer are not read again.
    pub(crate) fn seek(&mut self, to: u64) {
        let start = self.end - self.buffer.len() as u64;
        if (start..=self.end).contains(&to) {
            self.at = (to - start) as usize;
        } else {
            self.buffer.clear();
            (self.at, self.end) = (0, to);
        }
    }

    /// Returns the next `len` bytes, or fewer at the end of the file. They are returned again by
    /// the next read.
    pub(crate) fn peek(&mut self, len: usize) -> io::Result<&[u8]> {
        while self.buffer.len() - self.at < len {
            self.buffer.drain(..std::mem::take(&mut self.at));
            let have = self.buffer.len();
            let more = (len - have).max(self.fill_len(len - have));
            self.buffer.resize(have + more, 0);
            let mut buffer = std::mem::take(&mut self.buffer);
            let count = self.pread(&mut buffer[have..]);
            buffer.truncate(have + *count.as_ref().unwrap_or(&0));
            self.buffer = buffer;
            if count? == 0 {
                break;
            }
        }
        Ok(&self.buffer[self.at..(self.at + len).min(self.buffer.len())])
    }

    /// Returns how many bytes to read into the buffer when `wanted` bytes are needed.
    fn fill_len(&self, wanted: usize) -> usize {
        let ahead = if self.was_direct { AFTER_DIRECT_LEN } else { BUFFER_LEN };
        let eager = self.eager_until.saturating_sub(self.end).min(ahead as u64) as usize;
        eager.max(wanted.min(BUFFER_LEN))
    }

    /// Reads from the file at the buffer's end.
    fn pread(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.monitor.is_cancelled() {
            return Err(io::Error::other("canceled"));
        }
        let start = Instant::now();
        let count = loop {
            match self.file.read_at(buffer, self.end) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        self.monitor.add_busy_time(Step::Reading, start.elapsed());
        self.end += count as u64;
        self.read += count as u64;
        self.monitor.count_read(count as u64);
        self.waited += start.elapsed();
        Ok(count)
    }
}

impl Read for PlainReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.at == self.buffer.len() {
            self.buffer.clear();
            self.at = 0;
            if out.len() >= DIRECT_LEN_MIN {
                self.was_direct = true;
                return self.pread(out);
            }
            let len = self.fill_len(out.len());
            self.was_direct = false;
            let mut buffer = std::mem::take(&mut self.buffer);
            buffer.resize(len, 0);
            let count = self.pread(&mut buffer);
            buffer.truncate(*count.as_ref().unwrap_or(&0));
            self.buffer = buffer;
            count?;
        }
        let count = out.len().min(self.buffer.len() - self.at);
        out[..count].copy_from_slice(&self.buffer[self.at..self.at + count]);
        self.at += count;
        Ok(count)
    }
}

impl Skip for PlainReader {
    fn skip(&mut self, len: u64) -> io::Result<()> {
        match self.position().checked_add(len).filter(|&to| to <= self.size) {
            Some(to) => self.seek(to),
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
        Ok(())
    }
}

impl Skip for &[u8] {}

impl Skip for Box<dyn Read + Send + '_> {}

impl<R: Skip + ?Sized> Skip for &mut R {
    fn skip(&mut self, len: u64) -> io::Result<()> {
        (**self).skip(len)
    }
}

/// Returns the current version of an open file. Comparing versions shows whether a source has
/// changed.
pub(crate) fn version(file: &File) -> io::Result<Version> {
    let metadata = file.metadata()?;
    Ok(version_of(&metadata))
}

/// Returns the version that `metadata` describes.
pub(crate) fn version_of(metadata: &std::fs::Metadata) -> Version {
    Version {
        size: metadata.len(),
        mtime_s: metadata.mtime(),
        mtime_ns: metadata.mtime_nsec() as u32,
        ctime_s: metadata.ctime(),
        ctime_ns: metadata.ctime_nsec() as u32,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_reader_reads_each_byte_once_and_reads_nothing_beyond_its_part() {
        let content: Vec<u8> = (0..3_000_000_u32).map(|at| (at / 251) as u8).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&content).unwrap();
        let open = |from, until| PlainReader::new(file.try_clone().unwrap(), from, until, Arc::default()).unwrap();
        for piece in [100, 5000, 40_000, 700_000] {
            let mut reader = open(0, 1_000_000);
            let mut all = Vec::new();
            while reader.position() < 1_000_000 {
                let mut bytes = vec![0; piece];
                reader.read_exact(&mut bytes).unwrap();
                all.extend(bytes);
            }
            assert!(all == content[..all.len()] && reader.bytes_read() == all.len() as u64, "by {piece}");
        }
        let mut reader = open(512, 0);
        assert_eq!(reader.peek(10).unwrap(), &content[512..522]);
        reader.skip(2_000_000).unwrap();
        assert_eq!(reader.peek(1000).unwrap(), &content[2_000_512..2_001_512]);
        assert_eq!((reader.position(), reader.bytes_read()), (2_000_512, 1010));
        assert!(reader.skip(1_000_000).is_err());
        reader.skip(999_480).unwrap();
        assert_eq!(reader.peek(100).unwrap(), &content[2_999_992..]);
    }
}
