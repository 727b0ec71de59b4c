//! Parses a header block.

use super::BLOCK_LEN;

/// The type flag of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    File,
    Directory,
    /// A directory whose data is a list of names, from an incremental backup.
    ListedDirectory,
    Symlink,
    HardLink,
    Special,
    Sparse,
    /// PAX records for the next member.
    Extended,
    /// PAX records for all members that follow.
    Global,
    /// The next member's name, which is too long for that member's header. GNU tar writes such
    /// entries.
    LongName,
    /// The next member's link target, which is too long for that member's header. GNU tar writes
    /// such entries.
    LongLink,
    /// A volume's label, which is not a member.
    Ignored,
}

/// The fields of a header.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) name: Vec<u8>,
    pub(super) link: Vec<u8>,
    pub(super) kind: Type,
    pub(super) size: u64,
    pub(super) mode: u32,
    pub(super) mtime_s: i64,
    /// What is wrong with a field that the member can do without.
    pub(super) remark: Option<&'static str>,
}

impl Type {
    /// Returns whether data may follow the header. The other types have none, even if the header states a size: some programs repeat
    /// there the size of what a link points to, or what a directory takes.
    pub(super) fn has_data(self) -> bool {
        !matches!(self, Self::Directory | Self::Symlink | Self::HardLink | Self::Special)
    }
}

/// Returns whether the checksum field matches the block. Some old versions of tar summed signed
/// bytes, so both sums are accepted.
pub(super) fn checksum_matches(block: &[u8; BLOCK_LEN]) -> bool {
    const FIELD: std::ops::Range<usize> = 148..156;
    // The checksum field itself is summed as if it were filled with blanks.
    const BLANKS: i32 = 8 * b' ' as i32;
    let Some(stored) = number(&block[FIELD]) else { return false };
    let unsigned = |bytes: &[u8]| bytes.iter().map(|&byte| i32::from(byte)).sum::<i32>();
    let sum = unsigned(block) - unsigned(&block[FIELD]) + BLANKS;
    // As a signed number, each byte with its highest bit set is 256 less.
    let negative = |bytes: &[u8]| bytes.iter().filter(|&&byte| byte >= 0x80).count() as i32 * 256;
    stored == i128::from(sum) || stored == i128::from(sum - negative(block) + negative(&block[FIELD]))
}

impl Header {
    pub(super) fn parse(block: &[u8; BLOCK_LEN]) -> Result<Self, &'static str> {
        if !checksum_matches(block) {
            return Err("a header's checksum does not match");
        }
        let is_posix = block[257..263] == *b"ustar\0";
        let kind = match block[156] {
            b'1' => Type::HardLink,
            b'2' => Type::Symlink,
            b'3' | b'4' | b'6' => Type::Special,
            b'5' => Type::Directory,
            b'D' => Type::ListedDirectory,
            b'S' => Type::Sparse,
            b'x' | b'X' => Type::Extended,
            b'g' => Type::Global,
            b'L' => Type::LongName,
            b'K' => Type::LongLink,
            b'V' => Type::Ignored,
            b'M' => return Err("a member continues from another volume of a multi-volume archive"),
            // POSIX requires that unknown types be read as files.
            _ => Type::File,
        };
        let mut name = text(&block[..100]);
        if is_posix && block[345] != 0 {
            name = [&text(&block[345..500]), &b"/"[..], &name].concat();
        }
        let size = number(&block[124..136]).and_then(|size| u64::try_from(size).ok()).filter(|&size| size < 1 << 62);
        let size = match kind.has_data() {
            true => size.ok_or("a header's size is not a number, or too large")?,
            false => 0,
        };
        let mtime_s = number(&block[136..148]).and_then(|time| i64::try_from(time).ok());
        let mode = number(&block[100..108]);
        let remark = match (mode, mtime_s) {
            (None, _) => Some("its mode is not a number"),
            (_, None) => Some("its modification time is not a number, or too large"),
            _ => None,
        };
        let mode = mode.map_or(if kind == Type::Directory { 0o755 } else { 0o644 }, |mode| (mode & 0o7777) as u32);
        Ok(Self { name, link: text(&block[157..257]), kind, size, mode, mtime_s: mtime_s.unwrap_or(0), remark })
    }
}

/// Returns the text of a field, which ends at the first NUL.
fn text(field: &[u8]) -> Vec<u8> {
    field.split(|&byte| byte == 0).next().unwrap_or_default().to_vec()
}

/// Returns the number in a field: octal digits between blanks or, if the first bit is set,
/// big-endian two's complement ("base 256"). An empty field is 0.
pub(super) fn number(field: &[u8]) -> Option<i128> {
    let first = *field.first()?;
    if first & 0x80 != 0 {
        // The second bit is the sign. Fields have at most 12 bytes, which an i128 holds.
        let start = if first & 0x40 != 0 { -1_i128 << 6 | i128::from(first & 0x3f) } else { i128::from(first & 0x3f) };
        return Some(field[1..].iter().fold(start, |value, &byte| value << 8 | i128::from(byte)));
    }
    let digits = field.iter().skip_while(|&&byte| byte == b' ').take_while(|&&byte| byte != b' ' && byte != 0);
    digits.copied().try_fold(0_i128, |value, digit| matches!(digit, b'0'..=b'7').then(|| value * 8 + i128::from(digit - b'0')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn octal_and_base_256_numbers_are_parsed() {
        let check = |field: &[u8], expect| assert_eq!(number(field), expect, "{field:?}");
        check(b"0000644\0", Some(0o644));
        check(b"   644 \0", Some(0o644));
        check(b"\0\0\0\0", Some(0));
        check(b"77777777777\0", Some((8 << 30) - 1));
        check(b"\x80\0\0\0\0\0\0\x02\0\0\0\0", Some(8 << 30));
        check(&[0xff; 12], Some(-1));
        check(b"12x4\0", None);
        check(b"8\0", None);
        check(&[0x80, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], Some((1 << 88) - 1));
    }
}
