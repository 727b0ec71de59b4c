//! Reading a tar as it streams by: ustar, GNU and PAX. Every field is checked; nothing is allocated on the word of a header.

mod header;
mod pax;
mod sparse;

use std::io::{self, Read};

use dayfly_meta::limits::{TAR_EXTENSION_LEN_MAX, TAR_GLOBALS_LEN_MAX};

use header::{Header, Type};
pub(crate) use pax::Extension;
use sparse::Expansion;

use crate::source::plain::{PlainReader, Skip};

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
    /// Bytes of data; of a sparse file, with its holes.
    pub(crate) size: u64,
    /// Bytes of data in the archive.
    pub(crate) stored_len: u64,
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
    expansion: Option<Expansion>,
    member_start: u64,
    /// A header that was read before it was wanted.
    pending: Option<[u8; BLOCK_LEN]>,
}

impl<R: Skip> TarReader<R> {
    pub(crate) fn new(input: R) -> Self {
        Self::at(input, 0, Extension::default())
    }

    /// From between two members; `globals` is what global extended headers have said so far.
    pub(crate) fn at(input: R, position: u64, global: Extension) -> Self {
        Self { input, position, data_left: 0, padding: 0, global, expansion: None, member_start: position, pending: None }
    }

    /// Where the last member's first header begins.
    pub(crate) fn member_start(&self) -> u64 {
        self.member_start
    }

    /// Where the next member's first header begins.
    pub(crate) fn next_start(&self) -> u64 {
        self.position.saturating_add(self.data_left).saturating_add(self.padding)
    }

    /// What global extended headers have said so far.
    pub(crate) fn globals(&self) -> &Extension {
        &self.global
    }

    /// What is read from.
    pub(crate) fn input(&mut self) -> &mut R {
        &mut self.input
    }

    /// Skips what is left of the member before, and reads the next one's headers.
    pub(crate) fn next(&mut self) -> Result<Next, TarError> {
        self.skip_data()?;
        self.member_start = self.position;
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
                    self.global.sparse = None;
                    if self.global.records().len() > TAR_GLOBALS_LEN_MAX {
                        return Err(damaged(offset, "a global header too long to be kept"));
                    }
                    extension.parse(&text).map_err(|reason| damaged(offset, reason))?;
                }
                Type::LongName => extension.path = Some(until_nul(self.read_extension(offset, header.size)?)),
                Type::LongLink => extension.link_path = Some(until_nul(self.read_extension(offset, header.size)?)),
                Type::Ignored => self.expect_data(header.size),
                _ => return self.member(offset, &block, header, extension).map(Next::Member),
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

    fn member(
        &mut self,
        offset: u64,
        block: &[u8; BLOCK_LEN],
        header: Header,
        mut extension: Extension,
    ) -> Result<TarMember, TarError> {
        let size = extension.size.unwrap_or(header.size);
        let name = extension.path.unwrap_or(header.name);
        let link = extension.link_path.unwrap_or(header.link);
        let (mtime_s, mtime_ns) = extension.mtime.unwrap_or((header.mtime_s, 0));
        if header.kind == Type::Sparse || extension.sparse.is_some() && header.kind == Type::File {
            let sparse_name = extension.sparse.as_mut().and_then(|sparse| sparse.name.take());
            let expansion = match extension.sparse {
                Some(sparse) => {
                    self.expect_data(size);
                    sparse.expansion(self)
                }
                None => sparse::old_gnu(self, block, size),
            };
            let expansion = expansion.map_err(|reason| damaged(offset, reason))?;
            let size = expansion.size();
            self.expansion = Some(expansion);
            let (data_offset, name) = (self.position, sparse_name.unwrap_or(name));
            let (kind, mode, stored_len) = (TarKind::File, header.mode, self.data_left);
            return Ok(TarMember { name, kind, size, stored_len, mode, mtime_s, mtime_ns, data_offset });
        }
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
        let data_offset = self.position;
        let size = if kind == TarKind::File { size } else { 0 };
        Ok(TarMember { name, kind, size, stored_len: size, mode: header.mode, mtime_s, mtime_ns, data_offset })
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
        let mut chunk = [0; 4096];
        loop {
            match self.read_raw(&mut chunk).map_err(|error| self.broken(error))? {
                0 => return Ok(text),
                count => text.extend_from_slice(&chunk[..count]),
            }
        }
    }

    fn skip_data(&mut self) -> Result<(), TarError> {
        self.expansion = None;
        let (data_left, padding) = (std::mem::take(&mut self.data_left), std::mem::take(&mut self.padding));
        for len in [data_left, padding] {
            if len > 0 {
                self.input.skip(len).map_err(|error| self.broken(error))?;
                self.position += len;
            }
        }
        Ok(())
    }

    fn broken(&self, error: io::Error) -> TarError {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => damaged(self.position, "it breaks off"),
            _ => damaged(self.position, error.to_string()),
        }
    }

    /// A block that belongs to the headers.
    fn read_block(&mut self) -> Result<[u8; BLOCK_LEN], TarError> {
        let mut block = [0; BLOCK_LEN];
        self.fill(&mut block)?;
        Ok(block)
    }

    /// The next block; `None` where the stream ends before it.
    fn read_header_block(&mut self) -> Result<Option<[u8; BLOCK_LEN]>, TarError> {
        if let Some(block) = self.pending.take() {
            self.position += BLOCK_LEN as u64;
            return Ok(Some(block));
        }
        let mut block = [0; BLOCK_LEN];
        let mut filled = 0;
        while filled < BLOCK_LEN {
            match self.input.read(&mut block[filled..]) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err(self.broken(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broken(error)),
            }
        }
        self.position += BLOCK_LEN as u64;
        Ok(Some(block))
    }

    /// After damage: goes to the next block before `until` that may be a header. `false` if there is none.
    pub(crate) fn resume(&mut self, until: u64) -> bool {
        (self.data_left, self.padding, self.expansion) = (0, 0, None);
        while self.position < until {
            match self.read_header_block() {
                Ok(Some(block)) if header::checksum_matches(&block) => {
                    self.position -= BLOCK_LEN as u64;
                    self.pending = Some(block);
                    return true;
                }
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return false,
            }
        }
        false
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), TarError> {
        self.input.read_exact(buffer).map_err(|error| self.broken(error))?;
        self.position += buffer.len() as u64;
        Ok(())
    }
}

impl<R: Skip> Read for TarReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Some(mut expansion) = self.expansion.take() {
            let count = expansion.read(buffer, self);
            self.expansion = Some(expansion);
            return count;
        }
        self.read_raw(buffer)
    }
}

impl<R: Skip> TarReader<R> {
    /// The member's data as they stand in the archive.
    fn read_raw(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
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

/// The next place before `until` where a header may begin, which it goes to.
pub(crate) fn find_header(reader: &mut PlainReader, until: u64) -> io::Result<Option<u64>> {
    while reader.position() < until {
        let Some(block) = reader.peek(BLOCK_LEN)?.first_chunk::<BLOCK_LEN>() else { return Ok(None) };
        if header::checksum_matches(block) {
            return Ok(Some(reader.position()));
        }
        reader.skip(BLOCK_LEN as u64)?;
    }
    Ok(None)
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
