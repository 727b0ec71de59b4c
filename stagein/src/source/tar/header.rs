//! One 512-byte header.

use super::BLOCK_LEN;

/// What a header says that it heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    File,
    Directory,
    Symlink,
    HardLink,
    Special,
    Sparse,
    /// PAX records for the next member.
    Extended,
    /// PAX records for all that follows.
    Global,
    /// The next member's name, as GNU tar writes one that does not fit.
    LongName,
    /// The next member's link target, likewise.
    LongLink,
    /// A volume's label: not a member.
    Ignored,
}

/// A header's fields.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) name: Vec<u8>,
    pub(super) link: Vec<u8>,
    pub(super) kind: Type,
    pub(super) size: u64,
    pub(super) mode: u32,
    pub(super) mtime_s: i64,
}

/// Whether the block's checksum is that of its bytes. Some old tars summed signed bytes.
pub(super) fn checksum_matches(block: &[u8; BLOCK_LEN]) -> bool {
    const FIELD: std::ops::Range<usize> = 148..156;
    // The field counts as blanks.
    const BLANKS: i32 = 8 * b' ' as i32;
    let Some(told) = number(&block[FIELD]) else { return false };
    let unsigned = |bytes: &[u8]| bytes.iter().map(|&byte| i32::from(byte)).sum::<i32>();
    let sum = unsigned(block) - unsigned(&block[FIELD]) + BLANKS;
    // Each byte with its first bit set counts 256 less as a signed one.
    let negative = |bytes: &[u8]| bytes.iter().filter(|&&byte| byte >= 0x80).count() as i32 * 256;
    told == i128::from(sum) || told == i128::from(sum - negative(block) + negative(&block[FIELD]))
}

impl Header {
    pub(super) fn parse(block: &[u8; BLOCK_LEN]) -> Result<Self, &'static str> {
        if !checksum_matches(block) {
            return Err("not a tar header: its checksum does not match");
        }
        let is_posix = block[257..263] == *b"ustar\0";
        let kind = match block[156] {
            b'1' => Type::HardLink,
            b'2' => Type::Symlink,
            b'3' | b'4' | b'6' => Type::Special,
            b'5' | b'D' => Type::Directory,
            b'S' => Type::Sparse,
            b'x' | b'X' => Type::Extended,
            b'g' => Type::Global,
            b'L' => Type::LongName,
            b'K' => Type::LongLink,
            b'V' => Type::Ignored,
            b'M' => return Err("a member that continues from another volume"),
            // POSIX: an unknown type is a file.
            _ => Type::File,
        };
        let mut name = text(&block[..100]);
        if is_posix && block[345] != 0 {
            name = [&text(&block[345..500]), &b"/"[..], &name].concat();
        }
        let size = number(&block[124..136]).and_then(|size| u64::try_from(size).ok()).filter(|&size| size < 1 << 62);
        let mtime_s = number(&block[136..148]).and_then(|time| i64::try_from(time).ok());
        let mode = number(&block[100..108]).ok_or("a mode that is no number")?;
        Ok(Self {
            name,
            link: text(&block[157..257]),
            kind,
            size: size.ok_or("a size that is no number")?,
            mode: (mode & 0o7777) as u32,
            mtime_s: mtime_s.ok_or("a time that is no number")?,
        })
    }
}

/// A text field: up to the first NUL.
fn text(field: &[u8]) -> Vec<u8> {
    field.split(|&byte| byte == 0).next().unwrap_or_default().to_vec()
}

/// A number field: octal digits among blanks, or, with the first bit set, base 256 in two's complement. Empty is 0.
pub(super) fn number(field: &[u8]) -> Option<i128> {
    let first = *field.first()?;
    if first & 0x80 != 0 {
        // The second bit is the sign; 12 bytes of it fit.
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
    fn numbers_in_all_their_spellings() {
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
