//! Files that are written once and read back once, with a checksum over all bytes. If the drive
//! lost some of the bytes in between, reading fails; without the checksum, pages of zeros would end
//! up in a catalog.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};

/// A file that is being written.
pub(super) struct ScratchFile {
    file: BufWriter<File>,
    checksum: u32,
    len: u64,
}

/// A written file that is read from its start.
pub(super) struct ScratchReader {
    file: BufReader<File>,
    expected: u32,
    found: u32,
}

impl ScratchFile {
    pub(super) fn new(file: File) -> Self {
        Self { file: BufWriter::new(file), checksum: 0, len: 0 }
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.checksum = crc32c::crc32c_append(self.checksum, bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    pub(super) fn read_back(self) -> io::Result<ScratchReader> {
        let mut file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.rewind()?;
        Ok(ScratchReader { file: BufReader::new(file), expected: self.checksum, found: 0 })
    }
}

impl Read for ScratchReader {
    /// Fails at the end of a file whose content is not what was written.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.file.read(buffer)?;
        self.found = crc32c::crc32c_append(self.found, &buffer[..got]);
        if got == 0 && !buffer.is_empty() && self.found != self.expected {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a drive lost some bytes of a scratch file"));
        }
        Ok(got)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    /// SEMANTICS: "Temporary files of a stage-in are not synced, but they are checked when they are read back: sorted runs and
    /// units record by record, columns of the catalog as a whole."
    #[test]
    fn a_scratch_file_is_read_as_written_and_bytes_that_the_drive_lost_are_an_error() {
        let written: Vec<u8> = (0..20_000_u32).map(|number| number as u8 | 1).collect();
        for lost in [None, Some(0), Some(8192), Some(19_999)] {
            let file = tempfile::tempfile().unwrap();
            let drive = file.try_clone().unwrap();
            let mut scratch = ScratchFile::new(file);
            written.chunks(7).for_each(|bytes| scratch.append(bytes).unwrap());
            assert_eq!(scratch.len(), 20_000);
            let mut reader = scratch.read_back().unwrap();
            if let Some(at) = lost {
                drive.write_all_at(&[0], at).unwrap();
            }
            let mut found = Vec::new();
            let read = reader.read_to_end(&mut found);
            assert_eq!(read.is_ok(), lost.is_none());
            assert!(lost.is_some() || found == written);
        }
    }
}
