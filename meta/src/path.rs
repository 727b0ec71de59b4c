//! Paths within a dataset: relative, bytes, components between single slashes, never `.` or `..`; the root is empty.

use std::cmp::Ordering;

use crate::limits::{NAME_LEN_MAX, PATH_LEN_MAX};

/// Why a name cannot be a path of the namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPath {
    /// A component is `..`.
    #[error("it leaves the tree by '..'")]
    Leaves,
    /// A component is longer than [`NAME_LEN_MAX`] bytes.
    #[error("a name in it is longer than {NAME_LEN_MAX} bytes")]
    LongName,
    /// All of it is longer than [`PATH_LEN_MAX`] bytes.
    #[error("it is longer than {PATH_LEN_MAX} bytes")]
    LongPath,
    /// It holds a NUL byte.
    #[error("it holds a NUL byte")]
    Nul,
}

/// Makes `name` relative and plain: leading, doubled and trailing slashes and `.` components fall away.
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

/// The path without what follows the last dot of its name: equal for `k.jpg`, `k.txt` and `k.json` of one directory. A name that
/// begins with its only dot is whole.
pub fn group(path: &[u8]) -> &[u8] {
    let name_at = path.iter().rposition(|&byte| byte == b'/').map_or(0, |at| at + 1);
    match path[name_at..].iter().rposition(|&byte| byte == b'.') {
        None | Some(0) => path,
        Some(dot) => &path[..name_at + dot],
    }
}

/// Whether `path` is as [`normalize`] would leave it.
pub fn is_normal(path: &[u8]) -> bool {
    normalize(path).is_ok_and(|normal| normal == path)
}

/// `base/name`, where either may be empty.
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

/// The components of a normal path.
pub fn components(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|&byte| byte == b'/').filter(|component| !component.is_empty())
}

/// The directory that holds a normal path, and its last name; `None` for the root.
pub fn split_last(path: &[u8]) -> Option<(&[u8], &[u8])> {
    if path.is_empty() {
        return None;
    }
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(slash) => Some((&path[..slash], &path[slash + 1..])),
        None => Some((b"", path)),
    }
}

/// Whether `path` lies below `directory`; nothing lies below itself.
pub fn is_below(path: &[u8], directory: &[u8]) -> bool {
    if directory.is_empty() {
        return !path.is_empty();
    }
    path.len() > directory.len() && path.starts_with(directory) && path[directory.len()] == b'/'
}

/// The order of a walk: a directory before what is in it, names of one directory by their bytes.
pub fn walk_order(left: &[u8], right: &[u8]) -> Ordering {
    // A slash sorts before every other byte; then comparing bytes compares component by component.
    let key = |&byte: &u8| if byte == b'/' { 0 } else { u16::from(byte) + 1 };
    left.iter().map(key).cmp(right.iter().map(key))
}

/// As text for a message: bytes that are no UTF-8, and control characters, are escaped.
pub fn display(path: &[u8]) -> String {
    let mut text = String::new();
    for chunk in path.utf8_chunks() {
        for character in chunk.valid().chars() {
            if character.is_control() { text.extend(character.escape_default()) } else { text.push(character) }
        }
        chunk.invalid().iter().for_each(|byte| text.push_str(&format!("\\x{byte:02x}")));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_plain_or_are_refused() {
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
    fn a_walk_visits_a_directory_before_its_names_and_its_names_together() {
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
