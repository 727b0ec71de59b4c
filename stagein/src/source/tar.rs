//! Reads a tar as a stream, in the ustar, GNU and PAX formats.
//!
//! [`TarReader::next`] reads the headers of the next member; reading from the [`TarReader`] then
//! returns the member's data. A reader can also start between two members in the middle of an
//! archive, which is how ranges are read. Every field is checked, and no memory is allocated merely
//! because a header claims a size.

mod header;
mod pax;
mod sparse;

use std::io::{self, Read};

use dayfly_meta::catalog::Compression;
use dayfly_meta::limits::{TAR_EXTENSION_LEN_MAX, TAR_GLOBALS_LEN_MAX, TAR_PADDING_LEN_MAX};

use header::{Header, Type};
pub(crate) use pax::Extension;
use sparse::Expansion;

use crate::error::{exceeds_memory, is_of_system};
use crate::source::compressed::recognize;
use crate::source::plain::{PlainReader, Skip};
use crate::source::zip::is_zip;

/// Headers take one block, and data is padded to whole blocks.
pub(crate) const BLOCK_LEN: usize = 512;

/// Zeros after an end mark are read in pieces of this length.
const PADDING_READ_LEN: usize = 64 << 10;

/// The kind of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TarKind {
    File,
    Directory,
    /// A symlink with its target.
    Symlink(Vec<u8>),
    /// A hard link with the name of the member that it links to.
    HardLink(Vec<u8>),
    /// A device, FIFO or socket.
    Special,
}

/// A member, as its headers describe it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TarMember {
    /// The name as the archive spells it, not normalized.
    pub(crate) name: Vec<u8>,
    pub(crate) kind: TarKind,
    /// Size of the data in bytes, including the holes of a sparse file.
    pub(crate) size: u64,
    /// Bytes of data in the archive.
    pub(crate) stored_len: u64,
    pub(crate) mode: u32,
    pub(crate) mtime_s: i64,
    pub(crate) mtime_ns: u32,
    /// Offset of the data in the tar, counted after decompression.
    pub(crate) data_offset: u64,
    /// What is wrong with a field that the member can do without.
    pub(crate) remark: Option<&'static str>,
    /// Where an extended header of the member is malformed, and how. What the header says before that place counts.
    pub(crate) flaw: Option<(u64, &'static str)>,
}

/// The reason why reading an archive cannot continue.
#[derive(Debug)]
pub(crate) enum TarError {
    /// The archive is truncated or damaged at this offset.
    Damaged { offset: u64, reason: String },
    /// The archive cannot be read at this offset: its file system failed, or its decoder needs too much memory.
    Unreadable { offset: u64, error: io::Error },
}

/// How an archive ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// With the end mark, two blocks of zeros.
    Marked,
    /// Without an end mark, so the archive may have been truncated between two members.
    Unmarked,
    /// Its decoder needs too much memory for the rest, which an error has said.
    Undecodable,
}

/// What [`TarReader::next`] found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    Member(TarMember),
    End(End),
}

/// Returns whether a file with these first bytes is a tar, possibly a damaged one.
pub(crate) fn is_tar(start: &[u8]) -> bool {
    start.first_chunk::<BLOCK_LEN>().is_some_and(|block| block[257..262] == *b"ustar" || header::checksum_matches(block))
}

/// Reads members one after another. Between two calls of [`Self::next`], the reader's [`Read`]
/// implementation returns the data of the current member.
pub(crate) struct TarReader<R> {
    input: R,
    /// Offset in the tar of the next byte of `input`.
    position: u64,
    /// Bytes of the current member's data that have not been read.
    data_left: u64,
    /// Bytes of padding after the data.
    padding: u64,
    /// The fields that global extended headers have set so far.
    global: Extension,
    /// Fills in the holes of the current member, if it is a sparse file.
    expansion: Option<Expansion>,
    member_start: u64,
    /// Whether the decoder needs too much memory for the rest, which an error has said.
    is_undecodable: bool,
    /// A header block that [`Self::resume`] has read ahead.
    pending: Option<[u8; BLOCK_LEN]>,
}

impl<R: Skip> TarReader<R> {
    pub(crate) fn new(input: R) -> Self {
        Self::at(input, 0, Extension::default())
    }

    /// Creates a reader in the middle of an archive, between two members. `global` holds the fields
    /// that global extended headers before that position have set.
    pub(crate) fn at(input: R, position: u64, global: Extension) -> Self {
        Self {
            input,
            position,
            data_left: 0,
            padding: 0,
            global,
            expansion: None,
            member_start: position,
            is_undecodable: false,
            pending: None,
        }
    }

    /// Returns the offset of the current member's first header.
    pub(crate) fn member_start(&self) -> u64 {
        self.member_start
    }

    /// Returns the offset of the next member's first header.
    pub(crate) fn next_start(&self) -> u64 {
        self.position.saturating_add(self.data_left).saturating_add(self.padding)
    }

    /// Returns the fields that global extended headers have set so far.
    pub(crate) fn globals(&self) -> &Extension {
        &self.global
    }

    /// Returns the reader of the tar's bytes.
    pub(crate) fn input(&mut self) -> &mut R {
        &mut self.input
    }

    /// Skips the rest of the current member's data and reads the next member's headers.
    pub(crate) fn next(&mut self) -> Result<Next, TarError> {
        if self.is_undecodable {
            return Ok(Next::End(End::Undecodable));
        }
        self.skip_data()?;
        self.member_start = self.position;
        let mut extension = self.global.clone();
        let (mut has_extension, mut flaw) = (false, None);
        loop {
            let offset = self.position;
            let Some(block) = self.read_header_block()? else {
                if has_extension {
                    return Err(damaged(offset, "the archive ends after an extended header"));
                }
                return Ok(Next::End(End::Unmarked));
            };
            if is_zero(&block) {
                let marked = self.read_header_block()?.is_some_and(|block| is_zero(&block));
                return Ok(Next::End(if marked { End::Marked } else { End::Unmarked }));
            }
            let header = Header::parse(&block).map_err(|reason| damaged(offset, reason))?;
            match header.kind {
                Type::Extended => {
                    if let Err(reason) = extension.parse(&self.read_extension(offset, header.size)?) {
                        flaw = flaw.or(Some((offset, reason)));
                    }
                }
                Type::Global => {
                    let text = self.read_extension(offset, header.size)?;
                    self.global.parse(&text).map_err(|reason| damaged(offset, reason))?;
                    self.global.sparse = None;
                    if self.global.records().len() > TAR_GLOBALS_LEN_MAX {
                        return Err(damaged(offset, format!("global headers have more than {TAR_GLOBALS_LEN_MAX} bytes")));
                    }
                    extension.parse(&text).map_err(|reason| damaged(offset, reason))?;
                }
                Type::LongName => extension.path = Some(until_nul(self.read_extension(offset, header.size)?)),
                Type::LongLink => extension.link_path = Some(until_nul(self.read_extension(offset, header.size)?)),
                Type::Ignored => self.expect_data(header.size),
                _ => {
                    return self
                        .member(offset, &block, header, extension)
                        .map(|member| Next::Member(TarMember { flaw, ..member }));
                }
            }
            has_extension = true;
            self.skip_data()?;
        }
    }

    /// Reads the stream to its end, so that a decoder checks all of it.
    pub(crate) fn drain(&mut self) -> Result<(), TarError> {
        if self.is_undecodable {
            return Ok(());
        }
        let position = self.position;
        io::copy(&mut self.input, &mut io::sink()).map(drop).map_err(|error| unreadable(position, error))
    }

    /// Returns whether another archive follows the end mark, as in the output of `cat a.tar b.tar`. Reads on, to the end if nothing but
    /// zeros follows.
    pub(crate) fn is_followed_by_archive(&mut self) -> Result<bool, TarError> {
        let (position, mut block) = (self.position, Vec::with_capacity(BLOCK_LEN));
        loop {
            block.clear();
            let read = (&mut self.input).take(BLOCK_LEN as u64).read_to_end(&mut block);
            let len = read.map_err(|error| unreadable(position, error))?;
            if len == 0 || !is_zero(&block) {
                return Ok(is_archive(&block));
            }
        }
    }

    fn member(
        &mut self,
        offset: u64,
        block: &[u8; BLOCK_LEN],
        header: Header,
        mut extension: Extension,
    ) -> Result<TarMember, TarError> {
        let name = extension.path.unwrap_or(header.name);
        // Before POSIX, a directory was a file whose name ends with a slash. Some programs still write directories that way.
        let kind = match header.kind {
            Type::File if extension.sparse.is_none() && name.ends_with(b"/") => Type::Directory,
            kind => kind,
        };
        let size = if kind.has_data() { extension.size.unwrap_or(header.size) } else { 0 };
        let link = extension.link_path.unwrap_or(header.link);
        let (mtime_s, mtime_ns) = extension.mtime.unwrap_or((header.mtime_s, 0));
        let odd_mtime =
            extension.has_odd_mtime.then_some("the modification time in its extended header is not a number, or too large");
        let remark = odd_mtime.or(header.remark);
        if kind == Type::Sparse || extension.sparse.is_some() && kind == Type::File {
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
            return Ok(TarMember { name, kind, size, stored_len, mode, mtime_s, mtime_ns, data_offset, remark, flaw: None });
        }
        let kind = match kind {
            Type::File => TarKind::File,
            Type::Directory | Type::ListedDirectory => TarKind::Directory,
            Type::Symlink => TarKind::Symlink(link),
            Type::HardLink => TarKind::HardLink(link),
            _ => TarKind::Special,
        };
        self.expect_data(size);
        let data_offset = self.position;
        let size = if kind == TarKind::File { size } else { 0 };
        Ok(TarMember {
            name,
            kind,
            size,
            stored_len: size,
            mode: header.mode,
            mtime_s,
            mtime_ns,
            data_offset,
            remark,
            flaw: None,
        })
    }

    fn expect_data(&mut self, len: u64) {
        self.data_left = len;
        self.padding = len.wrapping_neg() % BLOCK_LEN as u64;
    }

    fn read_extension(&mut self, offset: u64, len: u64) -> Result<Vec<u8>, TarError> {
        if len > TAR_EXTENSION_LEN_MAX {
            let reason = format!("an extended header claims {len} bytes (at most {TAR_EXTENSION_LEN_MAX} are supported)");
            return Err(damaged(offset, reason));
        }
        self.expect_data(len);
        let mut text = Vec::new();
        let mut chunk = [0; 4096];
        loop {
            match self.read_raw(&mut chunk).map_err(|error| self.read_error(error))? {
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
                self.input.skip(len).map_err(|error| self.read_error(error))?;
                self.position += len;
            }
        }
        Ok(())
    }

    fn read_error(&mut self, error: io::Error) -> TarError {
        self.is_undecodable |= exceeds_memory(&error);
        match error.kind() {
            io::ErrorKind::UnexpectedEof => damaged(self.position, "the archive is truncated"),
            _ => unreadable(self.position, error),
        }
    }

    /// Reads a block that belongs to the current member's headers.
    fn read_block(&mut self) -> Result<[u8; BLOCK_LEN], TarError> {
        let mut block = [0; BLOCK_LEN];
        self.fill(&mut block)?;
        Ok(block)
    }

    /// Reads the next header block. Returns `None` if the stream ends before it.
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
                Ok(0) => return Err(self.read_error(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.read_error(error)),
            }
        }
        self.position += BLOCK_LEN as u64;
        Ok(Some(block))
    }

    /// After damage, continues at the next block that looks like a header, if there is one before
    /// the offset `until`. Returns `false` if there is none.
    pub(crate) fn resume(&mut self, until: u64) -> bool {
        (self.data_left, self.padding, self.expansion) = (0, 0, None);
        // Headers begin on blocks, counted from the beginning of the tar.
        let padding = self.position.wrapping_neg() % BLOCK_LEN as u64;
        if padding > 0 && self.input.skip(padding).is_err() {
            return false;
        }
        self.position += padding;
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
        self.input.read_exact(buffer).map_err(|error| self.read_error(error))?;
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
    /// Reads the member's data as stored in the archive, without the holes of a sparse file.
    fn read_raw(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.data_left == 0 || buffer.is_empty() {
            return Ok(0);
        }
        let len = usize::try_from(self.data_left).unwrap_or(usize::MAX).min(buffer.len());
        let count = self.input.read(&mut buffer[..len]).inspect_err(|error| self.is_undecodable = exceeds_memory(error))?;
        if count == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the archive is truncated within a member's data"));
        }
        self.data_left -= count as u64;
        self.position += count as u64;
        Ok(count)
    }
}

/// Moves the reader to the next block that looks like a header, if there is one before the offset
/// `until`, and returns the block's offset.
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

/// Does what [`TarReader::is_followed_by_archive`] does, for a reader that is positioned after an end mark. Passes over nothing but zeros.
pub(crate) fn is_archive_next(reader: &mut PlainReader) -> io::Result<bool> {
    for _ in 0..TAR_PADDING_LEN_MAX / PADDING_READ_LEN {
        // The end of the file is known, so no read looks for it.
        let left = usize::try_from(reader.size().saturating_sub(reader.position())).unwrap_or(usize::MAX);
        let bytes = reader.peek(left.min(PADDING_READ_LEN))?;
        let zeros = bytes.chunks(BLOCK_LEN).take_while(|block| is_zero(block)).map(<[u8]>::len).sum();
        let next = &bytes[zeros..bytes.len().min(zeros + BLOCK_LEN)];
        let (is_padding, is_archive) = (zeros > 0 && next.is_empty(), is_archive(next));
        reader.skip(zeros as u64)?;
        if !is_padding {
            return Ok(is_archive);
        }
    }
    Ok(false)
}

fn is_zero(block: &[u8]) -> bool {
    block.iter().all(|&byte| byte == 0)
}

fn is_archive(start: &[u8]) -> bool {
    is_tar(start) || recognize(start) != Compression::None || is_zip(start)
}

/// Returns where the first block in `bytes` that looks like a header begins, if there is one.
/// `bytes` begin on a block.
pub(crate) fn header_in(bytes: &[u8]) -> Option<usize> {
    let (blocks, _) = bytes.as_chunks::<BLOCK_LEN>();
    blocks.iter().position(header::checksum_matches).map(|block| block * BLOCK_LEN)
}

fn damaged(offset: u64, reason: impl Into<String>) -> TarError {
    TarError::Damaged { offset, reason: reason.into() }
}

fn unreadable(offset: u64, error: io::Error) -> TarError {
    match is_of_system(&error) || exceeds_memory(&error) {
        true => TarError::Unreadable { offset, error },
        false => damaged(offset, error.to_string()),
    }
}

fn until_nul(mut text: Vec<u8>) -> Vec<u8> {
    let len = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
    text.truncate(len);
    text
}

#[cfg(test)]
mod tests;
