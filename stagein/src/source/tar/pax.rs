//! Parses PAX extended headers, which consist of records of the form `length key=value`.

use super::sparse::PaxSparse;

/// Fields of the next member that extended headers override.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extension {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link_path: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) mtime: Option<(i64, u32)>,
    /// Whether the last time that was stated is none, so that the header's applies.
    pub(super) has_odd_mtime: bool,
    pub(crate) sparse: Option<PaxSparse>,
}

impl Extension {
    /// Applies the records of one extended header.
    pub(crate) fn parse(&mut self, mut text: &[u8]) -> Result<(), &'static str> {
        const BROKEN: &str = "an extended header is malformed";
        // Some programs pad the records with NULs.
        while text.first().is_some_and(|&byte| byte != 0) {
            let digits = text.iter().position(|&byte| byte == b' ').filter(|&len| (1..=7).contains(&len)).ok_or(BROKEN)?;
            let len: usize = ascii(&text[..digits]).and_then(|digits| digits.parse().ok()).ok_or(BROKEN)?;
            let record = text.get(digits + 1..len).and_then(|record| record.strip_suffix(b"\n")).ok_or(BROKEN)?;
            let equals = record.iter().position(|&byte| byte == b'=').ok_or(BROKEN)?;
            self.set(&record[..equals], &record[equals + 1..]).ok_or(BROKEN)?;
            text = &text[len..];
        }
        Ok(())
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        // An empty value cancels what a global header has set.
        let text = || (!value.is_empty()).then(|| value.to_vec());
        match key {
            b"path" => self.path = text(),
            b"linkpath" => self.link_path = text(),
            b"size" if value.is_empty() => self.size = None,
            b"size" => self.size = Some(ascii(value)?.parse().ok().filter(|&size: &u64| size < 1 << 62)?),
            b"mtime" => {
                self.mtime = ascii(value).and_then(time);
                self.has_odd_mtime = self.mtime.is_none() && !value.is_empty();
            }
            _ => {
                if let Some(key) = key.strip_prefix(b"GNU.sparse.") {
                    self.sparse.get_or_insert_default().set(key, value)?;
                }
            }
        }
        Some(())
    }
}

impl Extension {
    /// Returns the fields as records that [`Self::parse`] reads back. Equal extensions have equal
    /// records. Sparse maps are left out, because they belong to one member and never to a global
    /// header.
    pub(crate) fn records(&self) -> Vec<u8> {
        let mut text = Vec::new();
        let mut record = |key: &str, value: &[u8]| {
            // The length includes its own digits.
            let rest = key.len() + value.len() + 3;
            let len = (1..8).map(|digits| rest + digits).find(|len| rest + len.to_string().len() == *len).unwrap_or(rest);
            text.extend_from_slice(format!("{len} {key}=").as_bytes());
            text.extend_from_slice(value);
            text.push(b'\n');
        };
        if let Some(path) = &self.path {
            record("path", path);
        }
        if let Some(path) = &self.link_path {
            record("linkpath", path);
        }
        if let Some(size) = self.size {
            record("size", size.to_string().as_bytes());
        }
        if let Some((seconds, nanoseconds)) = self.mtime {
            // Nanoseconds always count upward from the whole seconds, but the digits of a negative
            // number count away from zero: -2 s + 750,000,000 ns is written -1.25.
            let text = match seconds {
                i64::MIN..0 if nanoseconds > 0 => format!("-{}.{:09}", -(seconds + 1), 1_000_000_000 - nanoseconds),
                _ => format!("{seconds}.{nanoseconds:09}"),
            };
            record("mtime", text.as_bytes());
        } else if self.has_odd_mtime {
            record("mtime", b"none");
        }
        text
    }
}

pub(super) fn ascii(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok().filter(|text| text.is_ascii())
}

/// Parses a decimal time such as `-12.345` into whole seconds, rounded down, and nanoseconds.
fn time(text: &str) -> Option<(i64, u32)> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let is_negative = whole.starts_with('-');
    let seconds: i64 = whole.parse().ok()?;
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let nanoseconds: u32 = format!("{:0<9}", fraction.get(..9).unwrap_or(fraction)).parse().ok()?;
    match (is_negative, nanoseconds) {
        (true, 1..) => Some((seconds.checked_sub(1)?, 1_000_000_000 - nanoseconds)),
        _ => Some((seconds, nanoseconds)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_and_decimal_times_are_parsed() {
        let mut extension = Extension::default();
        extension.parse(b"15 path=a/\xff\xfe=b\n20 mtime=12.5000001\n12 size=500\n").unwrap();
        assert_eq!(extension.path.as_deref(), Some(&b"a/\xff\xfe=b"[..]));
        assert_eq!((extension.mtime, extension.size), (Some((12, 500_000_100)), Some(500)));
        for odd in ["NaN", "1.7e9", "1e20", "-", "99999999999999999999"] {
            let (mut odd_time, len) = (Extension { mtime: Some((1, 0)), ..Extension::default() }, odd.len() + 10);
            odd_time.parse(format!("{len} mtime={odd}\n").as_bytes()).unwrap();
            assert_eq!((odd_time.mtime, odd_time.has_odd_mtime), (None, true), "{odd}");
        }
        for (text, expect) in
            [("5", Some((5, 0))), ("-1.25", Some((-2, 750_000_000))), ("1.2.3", None), ("", None), ("1.0000000009", Some((1, 0)))]
        {
            assert_eq!(time(text), expect, "{text}");
        }
    }

    #[test]
    fn written_records_parse_to_the_same_fields_and_malformed_records_are_errors() {
        for mtime in [(12, 5), (-2, 750_000_000), (-1, 1), (0, 0), (-7, 0)] {
            let extension = Extension {
                path: Some(b"a\xff".repeat(49)),
                link_path: Some(b"x".to_vec()),
                size: Some(1 << 40),
                mtime: Some(mtime),
                has_odd_mtime: false,
                sparse: None,
            };
            let mut again = Extension::default();
            again.parse(&extension.records()).unwrap();
            assert_eq!(again, extension);
        }
        for broken in [
            &b"99 path=a\n"[..],
            b"0 =\n",
            b"path=a\n",
            b"9 path=aa",
            b"7 size\n",
            b"11 size=-1\n",
            b"99999999999 a=b\n",
            b"3 \n",
        ] {
            assert!(Extension::default().parse(broken).is_err(), "{}", String::from_utf8_lossy(broken));
        }
    }
}
