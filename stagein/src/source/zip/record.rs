//! Parses the records of the central directory. Each record describes one member.

use jiff::civil::DateTime;
use jiff::tz::TimeZone;

use super::{ZipError, damaged, u16_at, u32_at, u64_at};

/// Bytes of a record without the name, the extra fields and the comment.
const FIXED_LEN: usize = 46;
/// Systems on which a zip may have been made. They decide what the attributes and names mean.
const UNIX: u8 = 3;
const MACOS: u8 = 19;
const DOS: u8 = 0;

/// The kind of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ZipKind {
    File,
    Directory,
    /// A symlink, whose target is the member's data.
    Symlink,
    /// A device, FIFO or socket without content.
    Special,
}

/// A member, as the central directory describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) name: Vec<u8>,
    pub(crate) kind: ZipKind,
    pub(crate) mode: u32,
    pub(crate) mtime_s: i64,
    pub(crate) mtime_ns: u32,
    /// Number of the compression method; 0 is none.
    pub(crate) method: u16,
    pub(crate) is_encrypted: bool,
    /// CRC-32 of the unpacked data.
    pub(crate) checksum: u32,
    /// Bytes of data in the archive.
    pub(crate) stored_len: u64,
    /// Bytes of unpacked data.
    pub(crate) size: u64,
    /// Offset of the local header in the file.
    pub(crate) local: u64,
    /// Offset of this record in the file.
    pub(crate) offset: u64,
}

/// Returns the length of the record at the start of `bytes`. `None` if `bytes` ends within the
/// record.
pub(super) fn len(bytes: &[u8]) -> Result<Option<usize>, &'static str> {
    if !b"PK\x01\x02".starts_with(&bytes[..bytes.len().min(4)]) {
        return Err("the central directory is malformed: a record is expected here");
    }
    if bytes.len() < FIXED_LEN {
        return Ok(None);
    }
    let len = FIXED_LEN + [28, 30, 32].map(|at| usize::from(u16_at(bytes, at))).iter().sum::<usize>();
    Ok((len <= bytes.len()).then_some(len))
}

/// Returns the bytes that a record's member takes in the archive, for planning units.
pub(super) fn stored_len(record: &[u8]) -> u64 {
    match u32_at(record, 20) {
        // The exact number is in an extra field. A member of 4 GiB or more ends its unit anyway.
        u32::MAX => dayfly_meta::limits::UNIT_BYTES_MAX,
        len => u64::from(len),
    }
}

impl Record {
    /// Parses all records of a part. `offset` is the first record's offset in the file, and `shift`
    /// the number of bytes before the archive.
    pub(crate) fn read_all(mut bytes: &[u8], mut offset: u64, shift: u64) -> Result<Vec<Self>, ZipError> {
        let mut records = Vec::new();
        while !bytes.is_empty() {
            let cut = damaged(offset, "a record of the central directory is truncated");
            let len = len(bytes).map_err(|reason| damaged(offset, reason))?.ok_or(cut)?;
            records.push(Self::read(&bytes[..len], offset, shift).map_err(|reason| damaged(offset, reason))?);
            bytes = &bytes[len..];
            offset += len as u64;
        }
        Ok(records)
    }

    fn read(bytes: &[u8], offset: u64, shift: u64) -> Result<Self, &'static str> {
        let system = bytes[5];
        let flags = u16_at(bytes, 8);
        let name_end = FIXED_LEN + usize::from(u16_at(bytes, 28));
        let raw_name = &bytes[FIXED_LEN..name_end];
        let extra = &bytes[name_end..name_end + usize::from(u16_at(bytes, 30))];
        let mut zip64 = Zip64Numbers::find(extra);
        let mut number = |at: usize| match u32_at(bytes, at) {
            u32::MAX => zip64.next().ok_or("a zip64 member lacks its 64-bit numbers"),
            short => Ok(u64::from(short)),
        };
        // The extra field holds the 64-bit numbers in this order, which differs from their order in
        // the record.
        let (size, stored_len, local) = (number(24)?, number(20)?, number(42)?);
        let local = local.checked_add(shift).filter(|&local| local < 1 << 62).ok_or("a member claims to lie past the end")?;
        if stored_len >= 1 << 62 || size >= 1 << 62 {
            return Err("a member claims an impossible size");
        }
        let name = name(raw_name, flags & 0x800 != 0, system, extra);
        let attributes = u32_at(bytes, 38);
        let unix_mode = if matches!(system, UNIX | MACOS) { attributes >> 16 } else { 0 };
        let is_directory = name.ends_with(b"/") || unix_mode & 0o170_000 == 0o040_000 || unix_mode == 0 && attributes & 0x10 != 0;
        let kind = match unix_mode & 0o170_000 {
            _ if is_directory => ZipKind::Directory,
            0 | 0o100_000 => ZipKind::File,
            0o120_000 => ZipKind::Symlink,
            // A member that zip read from its standard input has the mode of the pipe. As in unzip,
            // it becomes a file.
            _ if size > 0 => ZipKind::File,
            _ => ZipKind::Special,
        };
        let mode = if unix_mode != 0 { unix_mode & 0o777 } else { mode_of_dos(system, attributes, is_directory) };
        let (mtime_s, mtime_ns) = time(extra).unwrap_or_else(|| (dos_time(u16_at(bytes, 14), u16_at(bytes, 12)), 0));
        Ok(Self {
            name,
            kind,
            mode,
            mtime_s,
            mtime_ns,
            method: u16_at(bytes, 10),
            is_encrypted: flags & 1 != 0,
            checksum: u32_at(bytes, 16),
            stored_len,
            size,
            local,
            offset,
        })
    }
}

/// Returns the mode of a member that was not stored on a system with modes. As in unzip, what programs of DOS have stored in the place
/// of a mode counts if it does not contradict the attributes.
fn mode_of_dos(system: u8, attributes: u32, is_directory: bool) -> u32 {
    let (is_read_only, stated) = (attributes & 1 != 0, attributes >> 16 & 0o777);
    let bits = if is_read_only { 0 } else { 2 } | u32::from(is_directory);
    match stated & 0o700 == 0o400 | bits << 6 {
        true if system == DOS => stated,
        // What is writable is so for everybody but the usual umask.
        _ => 0o444 | bits << 6 | (bits & 1) << 3 | bits & 1,
    }
}

/// Returns the kinds and contents of the extra fields. As in unzip, a truncated field is ignored.
fn fields(mut extra: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let len = usize::from(u16_at(extra, 2));
        let field = extra.get(4..4 + len)?;
        let kind = u16_at(extra, 0);
        extra = &extra[4 + len..];
        Some((kind, field))
    })
}

/// The 64-bit numbers in the extra field of a zip64 member, in order.
struct Zip64Numbers<'a>(&'a [u8]);

impl<'a> Zip64Numbers<'a> {
    fn find(extra: &'a [u8]) -> Self {
        Self(fields(extra).find(|(kind, _)| *kind == 1).map_or(&[], |(_, field)| field))
    }

    fn next(&mut self) -> Option<u64> {
        let (first, rest) = self.0.split_at_checked(8)?;
        self.0 = rest;
        Some(u64_at(first, 0))
    }
}

/// Returns the name, converted to UTF-8 if its encoding is known.
fn name(raw: &[u8], is_utf8: bool, system: u8, extra: &[u8]) -> Vec<u8> {
    let unicode = fields(extra).find(|(kind, field)| *kind == 0x7075 && field.first() == Some(&1));
    if let Some((_, field)) = unicode.filter(|(_, field)| u32_at(field, 1) == crc32fast::hash(raw) && field.len() > 5) {
        return field[5..].to_vec();
    }
    let mut name = if is_utf8 || system != DOS || std::str::from_utf8(raw).is_ok() {
        raw.to_vec()
    } else {
        raw.iter().map(|&byte| oem(byte)).collect::<String>().into_bytes()
    };
    if system == DOS && !name.contains(&b'/') {
        name.iter_mut().filter(|byte| **byte == b'\\').for_each(|byte| *byte = b'/');
    }
    name
}

/// Returns a character of code page 437, the encoding of names on DOS.
fn oem(byte: u8) -> char {
    const UPPER: &str = "ÇüéâäàåçêëèïîìÄÅÉæÆôöòûùÿÖÜ¢£¥₧ƒáíóúñÑªº¿⌐¬½¼¡«»░▒▓│┤╡╢╖╕╣║╗╝╜╛┐└┴┬├─┼╞╟╚╔╩╦╠═╬╧╨╤╥╙╘╒╓╫╪┘┌█▄▌▐▀αßΓπΣσµτΦΘΩδ∞φε∩≡±≥≤⌠⌡÷≈°∙·√ⁿ²■\u{a0}";
    match byte {
        0..128 => char::from(byte),
        _ => UPPER.chars().nth(usize::from(byte) - 128).unwrap_or(char::REPLACEMENT_CHARACTER),
    }
}

/// Returns the modification time in the extra fields, which is exact and in UTC. The Unix field is
/// preferred.
fn time(extra: &[u8]) -> Option<(i64, u32)> {
    const NTFS_EPOCH_S: i64 = -11_644_473_600;
    let mut found = None;
    for (kind, field) in fields(extra) {
        let unix = |at: usize| field.get(at..at + 4).map(|_| (i64::from(u32_at(field, at) as i32), 0));
        found = match kind {
            0x5455 if field.first().is_some_and(|flags| flags & 1 != 0) => return unix(1),
            0x5855 => unix(4).or(found),
            0x000a if u16_at(field, 4) == 1 && field.len() >= 16 => {
                let ticks = u64_at(field, 8);
                Some(((ticks / 10_000_000) as i64 + NTFS_EPOCH_S, (ticks % 10_000_000) as u32 * 100))
            }
            _ => found,
        };
    }
    found
}

/// Converts a DOS time, which is a local time in steps of two seconds. As in unzip, it is taken to
/// be in this machine's time zone.
fn dos_time(date: u16, time: u16) -> i64 {
    let (year, month, day) = (1980 + (date >> 9) as i16, (date >> 5 & 15) as i8, (date & 31) as i8);
    let (hour, minute, second) = ((time >> 11) as i8, (time >> 5 & 63) as i8, ((time & 31) * 2) as i8);
    let wall = DateTime::new(year, month.clamp(1, 12), day.max(1), hour, minute, second, 0);
    wall.and_then(|wall| wall.to_zoned(TimeZone::system())).map_or(0, |time| time.timestamp().as_second())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SEMANTICS: "The name of a zip's member is in UTF-8 if the zip says so or was made on DOS; otherwise its bytes stay as they are.
    /// Control characters and version numbers such as `;1`, which `unzip` drops, stay."
    #[test]
    fn names_are_converted_to_utf8_where_their_encoding_is_known() {
        let check = |raw: &[u8], is_utf8, system, expect: &str| {
            assert_eq!(String::from_utf8_lossy(&name(raw, is_utf8, system, &[])), expect);
        };
        check(b"gr\x81n.txt", false, DOS, "grün.txt");
        check(b"a\\b", false, DOS, "a/b");
        check(b"a\\b", false, UNIX, "a\\b");
        check("grün".as_bytes(), false, DOS, "grün");
        check(b"a\x01\tb.c;1", false, DOS, "a\x01\tb.c;1");
        assert_eq!(name(b"gr\xfcn", false, UNIX, &[]), b"gr\xfcn");
        let mut extra = vec![0x75, 0x70, 9, 0, 1];
        extra.extend(crc32fast::hash(b"x").to_le_bytes());
        extra.extend(b"long");
        assert_eq!(name(b"x", false, UNIX, &extra), b"long");
        assert_eq!(name(b"y", false, UNIX, &extra), b"y");
    }

    #[test]
    fn members_without_a_mode_have_the_one_that_unzip_gives_them() {
        let check = |system, attributes, is_directory, expect| {
            let mode = mode_of_dos(system, attributes, is_directory);
            assert_eq!(mode, expect, "{system} {attributes:#x} {is_directory}");
        };
        check(DOS, 0x20, false, 0o644);
        check(DOS, 0x21, false, 0o444);
        check(DOS, 0x10, true, 0o755);
        check(DOS, 0x11, true, 0o555);
        check(DOS, 0o100_640 << 16 | 0x20, false, 0o640);
        check(DOS, 0o100_755 << 16 | 0x20, false, 0o644);
        check(DOS, 0o100_440 << 16 | 0x21, false, 0o440);
        check(DOS, 0o040_700 << 16 | 0x10, true, 0o700);
        check(10, 0o100_600 << 16 | 0x20, false, 0o644);
    }

    #[test]
    fn the_most_exact_modification_time_is_used() {
        assert_eq!(time(&[0x55, 0x54, 5, 0, 1, 1, 0, 0, 0]), Some((1, 0)));
        assert_eq!(time(&[0x55, 0x54, 5, 0, 1, 0xff, 0xff, 0xff, 0xff]), Some((-1, 0)));
        assert_eq!(time(&[0x55, 0x54, 5, 0, 2, 1, 0, 0, 0]), None);
        assert_eq!(time(&[0x55, 0x54, 50, 0, 1]), None);
        let mut ntfs = vec![0x0a, 0, 32, 0, 0, 0, 0, 0, 1, 0, 24, 0];
        ntfs.extend((116_444_736_000_000_000_u64 + 15).to_le_bytes());
        ntfs.extend([0; 16]);
        assert_eq!(time(&ntfs), Some((0, 1500)));
        assert_eq!(dos_time(0, 0), dos_time(0x21, 0), "a day or month of 0 counts as 1");
    }
}
