//! Paths within a dataset. A path is relative and consists of bytes, with single slashes between
//! its components. No component is `.` or `..`. The root is the empty path.

use std::cmp::Ordering;

use crate::limits::{NAME_LEN_MAX, PATH_LEN_MAX};

/// Why a name cannot become a path in the namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPath {
    /// A component is `..`.
    #[error("it contains '..'; a path in the namespace must be written without it")]
    Leaves,
    /// A component is longer than [`NAME_LEN_MAX`] bytes.
    #[error("a name in it is longer than {NAME_LEN_MAX} bytes")]
    LongName,
    /// The whole path is longer than [`PATH_LEN_MAX`] bytes.
    #[error("it is longer than {PATH_LEN_MAX} bytes")]
    LongPath,
    /// The name contains a NUL byte.
    #[error("it contains a NUL byte")]
    Nul,
}

/// Makes `name` relative and plain: leading, repeated and trailing slashes and `.` components are
/// dropped.
///
/// # Errors
///
/// If the name cannot be a path in the namespace.
pub fn normalize(name: &[u8]) -> Result<Vec<u8>, InvalidPath> {
    let mut path = Vec::with_capacity(name.len());
    for component in name.split(|&byte| byte == b'/') {
        match component {
            b"" | b"." => continue,
            b".." => return Err(InvalidPath::Leaves),
            _ if component.len() > NAME_LEN_MAX => return Err(InvalidPath::LongName),
            _ if component.contains(&0) => return Err(InvalidPath::Nul),
            _ => join_into(&mut path, component),
        }
    }
    if path.len() > PATH_LEN_MAX { Err(InvalidPath::LongPath) } else { Ok(path) }
}

/// Returns the path without its extension, which begins at the last dot of the last name. The result is the same for `k.jpg`,
/// `k.txt` and `k.json` in one directory. A name whose only dot comes first has no extension.
pub fn group(path: &[u8]) -> &[u8] {
    let name_at = path.iter().rposition(|&byte| byte == b'/').map_or(0, |at| at + 1);
    match path[name_at..].iter().rposition(|&byte| byte == b'.') {
        None | Some(0) => path,
        Some(dot) => &path[..name_at + dot],
    }
}

/// Returns whether [`normalize`] would leave `path` unchanged.
pub fn is_normal(path: &[u8]) -> bool {
    normalize(path).is_ok_and(|normal| normal == path)
}

/// Returns `base/name`; either may be empty.
pub fn join(base: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = base.to_vec();
    if !name.is_empty() {
        join_into(&mut path, name);
    }
    path
}

fn join_into(path: &mut Vec<u8>, component: &[u8]) {
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(component);
}

/// Returns the components of a normal path.
pub fn components(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|&byte| byte == b'/').filter(|component| !component.is_empty())
}

/// Returns the directory of a normal path and its last name; `None` for the root.
pub fn split_last(path: &[u8]) -> Option<(&[u8], &[u8])> {
    if path.is_empty() {
        return None;
    }
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(slash) => Some((&path[..slash], &path[slash + 1..])),
        None => Some((b"", path)),
    }
}

/// Returns whether `path` lies below `directory`. No path lies below itself.
pub fn is_below(path: &[u8], directory: &[u8]) -> bool {
    if directory.is_empty() {
        return !path.is_empty();
    }
    path.len() > directory.len() && path.starts_with(directory) && path[directory.len()] == b'/'
}

/// Returns the path that a symlink in `directory` leads to, if no other symlink is on the way. Both are paths from the root of the file
/// system.
pub fn link_destination(directory: &[u8], target: &[u8]) -> Vec<u8> {
    let above = if target.starts_with(b"/") { &[][..] } else { directory };
    let mut names: Vec<&[u8]> = components(above).collect();
    for component in components(target) {
        match component {
            b"." => {}
            // There is nothing above the root.
            b".." => {
                names.pop();
            }
            name => names.push(name),
        }
    }
    names.join(&b'/')
}

/// Compares paths in the order of a walk: a directory before its content, names in a directory by their
/// bytes.
pub fn walk_order(left: &[u8], right: &[u8]) -> Ordering {
    // A slash sorts before every other byte, so comparing bytes compares component by component.
    let key = |&byte: &u8| if byte == b'/' { 0 } else { u16::from(byte) + 1 };
    left.iter().map(key).cmp(right.iter().map(key))
}

/// Returns a path as text for a message or a terminal. Bytes that are not UTF-8 are escaped, and so
/// are control characters and characters that cannot be seen or that change how others are shown.
pub fn display(path: &[u8]) -> String {
    let mut text = String::new();
    for chunk in path.utf8_chunks() {
        for character in chunk.valid().chars() {
            if is_unseen(character) { text.extend(character.escape_default()) } else { text.push(character) }
        }
        chunk.invalid().iter().for_each(|byte| text.push_str(&format!("\\x{byte:02x}")));
    }
    text
}

/// Characters of Unicode's categories Cc, Cf, Zl and Zp, and blank letters. Among them are those that reverse the direction of the
/// text after them, such as U+202E, which can make one name look like another.
const UNSEEN: [(u32, u32); 24] = [
    (0x00, 0x1f),
    (0x7f, 0x9f),
    (0xad, 0xad),
    (0x600, 0x605),
    (0x61c, 0x61c),
    (0x6dd, 0x6dd),
    (0x70f, 0x70f),
    (0x890, 0x891),
    (0x8e2, 0x8e2),
    (0x180e, 0x180e),
    (0x200b, 0x200f),
    (0x2028, 0x202e),
    // The range includes U+2065, which is reserved for another such character.
    (0x2060, 0x206f),
    (0xfeff, 0xfeff),
    (0xfff9, 0xfffb),
    (0x110bd, 0x110bd),
    (0x110cd, 0x110cd),
    (0x13430, 0x1343f),
    (0x1bca0, 0x1bca3),
    (0x1d173, 0x1d17a),
    (0xe0001, 0xe0001),
    (0xe0020, 0xe007f),
    // Fillers: letters that are displayed as blanks.
    (0x115f, 0x1160),
    (0x3164, 0x3164),
];

fn is_unseen(character: char) -> bool {
    let number = u32::from(character);
    UNSEEN.iter().any(|(first, last)| (*first..=*last).contains(&number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_normalized_or_rejected() {
        let check = |name: &[u8], expect: Result<&str, InvalidPath>| {
            assert_eq!(normalize(name), expect.map(|path| path.as_bytes().to_vec()), "{}", display(name));
        };
        check(b"", Ok(""));
        check(b"./", Ok(""));
        check(b"/etc//passwd/", Ok("etc/passwd"));
        check(b"a/./b/.", Ok("a/b"));
        check(b"a/..", Err(InvalidPath::Leaves));
        check(b"../a", Err(InvalidPath::Leaves));
        check(b"...", Ok("..."));
        check(b"a\0b", Err(InvalidPath::Nul));
        check(&[b'x'; 256], Err(InvalidPath::LongName));
        check(&b"x/".repeat(2050), Err(InvalidPath::LongPath));
    }

    #[test]
    fn symlinks_lead_where_their_targets_say() {
        let check = |directory: &[u8], target: &[u8], expect: &[u8]| {
            assert_eq!(link_destination(directory, target), expect, "{}", display(target));
        };
        check(b"dayfly/d/a", b"../b", b"dayfly/d/b");
        check(b"/dayfly/d", b"./a//b/", b"dayfly/d/a/b");
        check(b"dayfly/d", b"../../blobs/b1", b"blobs/b1");
        check(b"d", b"../../../x", b"x");
        check(b"d", b"/etc/./passwd", b"etc/passwd");
        check(b"d", b"..", b"");
        check(b"", b"", b"");
    }

    #[test]
    fn characters_that_change_how_a_terminal_shows_text_are_escaped() {
        for (name, expect) in [
            ("plain.jpg", "plain.jpg"),
            ("größe/日本語 😀.jpg", "größe/日本語 😀.jpg"),
            ("e\u{301}", "e\u{301}"),
            ("gpj.\u{202e}exe", "gpj.\\u{202e}exe"),
            ("a\u{2066}b\u{2069}", "a\\u{2066}b\\u{2069}"),
            ("\u{200f}\u{61c}\u{feff}\u{200b}", "\\u{200f}\\u{61c}\\u{feff}\\u{200b}"),
            ("\u{1b}[2J\u{9b}1m\u{7}", "\\u{1b}[2J\\u{9b}1m\\u{7}"),
            ("line\u{2028}\nline\r\t", "line\\u{2028}\\nline\\r\\t"),
            ("tag\u{e0041}", "tag\\u{e0041}"),
        ] {
            assert_eq!(display(name.as_bytes()), expect);
            assert_eq!(display(expect.as_bytes()), expect, "an escaped text stays as it is");
        }
        assert_eq!(display(b"\xff\xe2\x80"), "\\xff\\xe2\\x80");
        // U+202E in an overlong encoding, as a faulty encoder writes it.
        assert_eq!(display(b"\xf0\x82\x80\xae"), "\\xf0\\x82\\x80\\xae");
    }

    #[test]
    fn a_walk_visits_a_directory_and_then_everything_below_it() {
        let mut paths: Vec<&[u8]> = vec![b"a.b", b"a/z", b"a", b"", b"a\x01", b"b", b"a/b/c", b"a/b"];
        paths.sort_by(|left, right| walk_order(left, right));
        let expect: Vec<&[u8]> = vec![b"", b"a", b"a/b", b"a/b/c", b"a/z", b"a\x01", b"a.b", b"b"];
        assert_eq!(paths, expect);
    }

    #[test]
    fn below_means_strictly_below() {
        assert!(is_below(b"a/b", b"a") && is_below(b"a", b""));
        assert!(!is_below(b"ab", b"a") && !is_below(b"a", b"a") && !is_below(b"", b""));
    }
}
