//! Reading a tar as it streams by: ustar, GNU and PAX. Every field is checked; nothing is allocated on the word of a header.

mod header;
mod pax;

use std::io::{self, Read};

use dayfly_meta::limits::TAR_EXTENSION_LEN_MAX;

use header::{Header, Type};
use pax::Extension;

/// Tar's unit of length.
pub(crate) const BLOCK_LEN: usize = 512;

/// What a member is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TarKind {
    File,
    Directory,
    Symlink(Vec<u8>),
    HardLink(Vec<u8>),
    /// A device, FIFO or socket.
    Special,
}

/// A member, before its data is read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TarMember {
    /// As it stands in the archive.
    pub(crate) name: Vec<u8>,
    pub(crate) kind: TarKind,
    /// Bytes of data.
    pub(crate) size: u64,
    pub(crate) mode: u32,
    pub(crate) mtime_s: i64,
    pub(crate) mtime_ns: u32,
    /// Where its data starts in the unpacked stream.
    pub(crate) data_offset: u64,
}

/// Why an archive cannot be read on.
#[derive(Debug)]
pub(crate) enum TarError {
    /// It breaks off, or its bytes are no tar.
    Damaged { offset: u64, reason: String },
    /// It is well, but holds what is not unpacked.
    Unsupported { offset: u64, reason: String },
}

/// How an archive ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// By two blocks of zeros.
    Marked,
    /// Without them: it may have been cut off between two members.
    Unmarked,
}

/// A member, or the end.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Member(TarMember),
    End(End),
}

/// Whether a file that starts so is a tar (or was one before it was damaged).
pub(crate) fn is_tar(start: &[u8]) -> bool {
    start.first_chunk::<BLOCK_LEN>().is_some_and(|block| block[257..262] == *b"ustar" || header::checksum_matches(block))
}

/// Reads members one after another; between two calls of [`Self::next`] its `Read` gives the member's data.
pub(crate) struct TarReader<R> {
    input: R,
    position: u64,
    data_left: u64,
    padding: u64,
    global: Extension,
}

impl<R: Read> TarReader<R> {
    pub(crate) fn new(input: R) -> Self {
        Self { input, position: 0, data_left: 0, padding: 0, global: Extension::default() }
    }

    /// Skips what is left of the member before, and reads the next one's headers.
    pub(crate) fn next(&mut self) -> Result<Next, TarError> {
        self.skip_data()?;
        let mut extension = self.global.clone();
        let mut has_extension = false;
        loop {
            let offset = self.position;
            let Some(block) = self.read_header_block()? else {
                if has_extension {
                    return Err(damaged(offset, "it ends after an extended header"));
                }
                return Ok(Next::End(End::Unmarked));
            };
            if block.iter().all(|&byte| byte == 0) {
                let marked = self.read_header_block()?.is_some_and(|block| block.iter().all(|&byte| byte == 0));
                return Ok(Next::End(if marked { End::Marked } else { End::Unmarked }));
            }
            let header = Header::parse(&block).map_err(|reason| damaged(offset, reason))?;
            match header.kind {
                Type::Extended => {
                    extension.parse(&self.read_extension(offset, header.size)?).map_err(|reason| damaged(offset, reason))?;
                }
                Type::Global => {
                    let text = self.read_extension(offset, header.size)?;
                    self.global.parse(&text).map_err(|reason| damaged(offset, reason))?;
                    extension.parse(&text).map_err(|reason| damaged(offset, reason))?;
                }
                Type::LongName => extension.path = Some(until_nul(self.read_extension(offset, header.size)?)),
                Type::LongLink => extension.link_path = Some(until_nul(self.read_extension(offset, header.size)?)),
                Type::Ignored => self.expect_data(header.size),
                _ => return self.member(offset, header, extension).map(Next::Member),
            }
            has_extension = true;
            self.skip_data()?;
        }
    }

    /// Reads to the end of the stream, so that a decoder has checked all of it.
    pub(crate) fn drain(&mut self) -> Result<(), TarError> {
        let position = self.position;
        io::copy(&mut self.input, &mut io::sink()).map(drop).map_err(|error| damaged(position, error.to_string()))
    }

    fn member(&mut self, offset: u64, header: Header, extension: Extension) -> Result<TarMember, TarError> {
        if extension.is_sparse || header.kind == Type::Sparse {
            let reason = "it is sparse; pack it again without --sparse".to_owned();
            return Err(TarError::Unsupported { offset, reason });
        }
        let name = extension.path.unwrap_or(header.name);
        let link = extension.link_path.unwrap_or(header.link);
        let size = extension.size.unwrap_or(header.size);
        let (kind, data_len) = match header.kind {
            // Before POSIX a directory was a file whose name ends with a slash, and some still write them so.
            Type::File if name.ends_with(b"/") => (TarKind::Directory, size),
            Type::File => (TarKind::File, size),
            Type::Directory => (TarKind::Directory, size),
            Type::Symlink => (TarKind::Symlink(link), size),
            // A hard link has no data, whatever size its header copies from the file.
            Type::HardLink => (TarKind::HardLink(link), 0),
            _ => (TarKind::Special, size),
        };
        self.expect_data(data_len);
        let (mtime_s, mtime_ns) = extension.mtime.unwrap_or((header.mtime_s, 0));
        let data_offset = self.position;
        let size = if kind == TarKind::File { size } else { 0 };
        Ok(TarMember { name, kind, size, mode: header.mode, mtime_s, mtime_ns, data_offset })
    }

    fn expect_data(&mut self, len: u64) {
        self.data_left = len;
        self.padding = len.wrapping_neg() % BLOCK_LEN as u64;
    }

    fn read_extension(&mut self, offset: u64, len: u64) -> Result<Vec<u8>, TarError> {
        if len > TAR_EXTENSION_LEN_MAX {
            return Err(damaged(offset, format!("an extended header of {len} bytes (at most {TAR_EXTENSION_LEN_MAX})")));
        }
        self.expect_data(len);
        let mut text = Vec::new();
        self.read_to_end(&mut text).map_err(|error| damaged(self.position, error.to_string()))?;
        Ok(text)
    }

    fn skip_data(&mut self) -> Result<(), TarError> {
        let copied = io::copy(self, &mut io::sink());
        copied.map_err(|error| damaged(self.position, error.to_string()))?;
        let mut padding = [0; BLOCK_LEN];
        let len = std::mem::take(&mut self.padding) as usize;
        self.fill(&mut padding[..len])
    }

    /// The next block; `None` where the stream ends before it.
    fn read_header_block(&mut self) -> Result<Option<[u8; BLOCK_LEN]>, TarError> {
        let mut block = [0; BLOCK_LEN];
        loop {
            match self.input.read(&mut block[..1]) {
                Ok(0) => return Ok(None),
                Ok(_) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(damaged(self.position, error.to_string())),
            }
        }
        self.position += 1;
        self.fill(&mut block[1..])?;
        Ok(Some(block))
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), TarError> {
        self.input.read_exact(buffer).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => damaged(self.position, "it breaks off"),
            _ => damaged(self.position, error.to_string()),
        })?;
        self.position += buffer.len() as u64;
        Ok(())
    }
}

impl<R: Read> Read for TarReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.data_left == 0 || buffer.is_empty() {
            return Ok(0);
        }
        let len = usize::try_from(self.data_left).unwrap_or(usize::MAX).min(buffer.len());
        let count = self.input.read(&mut buffer[..len])?;
        if count == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it breaks off within a member's data"));
        }
        self.data_left -= count as u64;
        self.position += count as u64;
        Ok(count)
    }
}

fn damaged(offset: u64, reason: impl Into<String>) -> TarError {
    TarError::Damaged { offset, reason: reason.into() }
}

fn until_nul(mut text: Vec<u8>) -> Vec<u8> {
    let len = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
    text.truncate(len);
    text
}

#[cfg(test)]
mod tests;
