//! Reads Rust source text. Determines which files are shipped, which parts of them are code, and which are built only for tests.
//!
//! This is a scanner, not a parser. It knows comments, strings, character literals and brackets, which is enough to find
//! where an item ends, and it has to be correct only for rustfmt's output.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The text of one source file, in three forms.
pub(crate) struct SourceFile {
    /// The file as it is on disk.
    pub(crate) text: String,
    /// The file without the items that are built only for tests. Comments and strings are kept.
    pub(crate) shipped: String,
    /// The file without comments and without the items that are built only for tests. Strings are kept.
    pub(crate) code: String,
}

/// The project's source files, and which of them are built only for tests.
pub(crate) struct Sources {
    /// The key is the file's path below the root of the project.
    files: BTreeMap<PathBuf, SourceFile>,
    test_modules: BTreeSet<PathBuf>,
}

impl Sources {
    /// Reads all source files below `root`.
    pub(crate) fn read(root: &Path) -> Self {
        let mut files = BTreeMap::new();
        let mut waiting: Vec<PathBuf> =
            ["meta", "stagein", "server", "client", "bench", "tests"].iter().map(|name| root.join(name)).collect();
        while let Some(folder) = waiting.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    waiting.push(path);
                } else if path.extension().is_some_and(|kind| kind == "rs") {
                    let text = fs::read_to_string(&path).unwrap();
                    let shipped = without_test_items(&text);
                    let code = blanked(&shipped, false);
                    files.insert(path.strip_prefix(root).unwrap().to_owned(), SourceFile { text, shipped, code });
                }
            }
        }
        assert!(files.len() > 50, "only {} source files were found", files.len());
        let test_modules = files.iter().flat_map(|(path, file)| test_modules(path, &file.text)).collect();
        Self { files, test_modules }
    }

    /// Returns all files, by path.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&Path, &SourceFile)> {
        self.files.iter().map(|(path, file)| (path.as_path(), file))
    }

    /// Returns the files from which the program or a library is built. This excludes `tests/` and test-only modules.
    pub(crate) fn shipped(&self) -> impl Iterator<Item = (&Path, &SourceFile)> {
        self.all().filter(|(path, _)| !self.is_test(path))
    }

    /// Returns the file at `path`.
    pub(crate) fn get(&self, path: &Path) -> Option<&SourceFile> {
        self.files.get(path)
    }

    fn is_test(&self, path: &Path) -> bool {
        let module = path.with_extension("");
        path.starts_with("tests") || module.ancestors().any(|ancestor| self.test_modules.contains(ancestor))
    }
}

/// Returns the modules in other files that `text` declares under `#[cfg(test)]`, as paths without `.rs`.
fn test_modules(path: &Path, text: &str) -> Vec<PathBuf> {
    let name = path.file_stem().unwrap().to_str().unwrap();
    let is_root = ["lib", "main", "mod", "build"].contains(&name);
    let folder = if is_root { path.parent().unwrap().to_owned() } else { path.with_extension("") };
    let declared = |item: Range<usize>| {
        let item = text[item].trim_end().strip_suffix(';')?;
        let (_, module) = item.rsplit_once("mod ")?;
        Some(folder.join(module))
    };
    test_items(text).into_iter().filter_map(declared).collect()
}

/// Returns `text` without the items to which a `#[cfg(test)]` applies.
fn without_test_items(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut at = 0;
    for item in test_items(text) {
        kept.push_str(&text[at..item.start]);
        at = item.end;
    }
    kept.push_str(&text[at..]);
    kept
}

/// Returns the ranges of all items with a `#[cfg(test)]`, including their attributes.
fn test_items(text: &str) -> Vec<Range<usize>> {
    const ATTRIBUTE: &str = "#[cfg(test)]";
    let code = blanked(text, true);
    let mut items = Vec::new();
    let mut at = 0;
    while let Some(found) = code[at..].find(ATTRIBUTE) {
        let start = at + found;
        let end = item_end(&code, start + ATTRIBUTE.len());
        items.push(start..end);
        at = end;
    }
    items
}

/// Returns the end of an item, statement or field, given the position after one of its attributes.
fn item_end(code: &str, start: usize) -> usize {
    let mut at = start;
    // Skip further attributes.
    loop {
        at += code[at..].len() - code[at..].trim_start().len();
        if !code[at..].starts_with("#[") {
            break;
        }
        at = closing(code, at + 1) + 1;
    }
    // Items that end with a block, and statements that end with a semicolon.
    const BLOCKS: [&str; 9] = ["mod", "fn", "struct", "enum", "union", "impl", "trait", "macro_rules", "extern"];
    const STATEMENTS: [&str; 5] = ["use", "const", "static", "type", "let"];
    let mut words = code[at..].split(|letter: char| !letter.is_alphanumeric() && letter != '_').peekable();
    let is_qualifier = |word: &&str| ["", "pub", "crate", "super", "self", "in", "unsafe", "async"].contains(word);
    while words.next_if(is_qualifier).is_some() {}
    let first = words.next().unwrap_or("");
    let is_block = BLOCKS.contains(&first) || first == "const" && words.next() == Some("fn");
    let is_item = is_block || STATEMENTS.contains(&first);
    while at < code.len() {
        match code.as_bytes()[at] {
            b';' => return at + 1,
            b',' if !is_item => return at + 1,
            // The enclosing block ends here, so this was its last statement or field.
            b'}' => return at,
            b'{' if is_block => return closing(code, at) + 1,
            b'{' | b'(' | b'[' => at = closing(code, at),
            _ => {}
        }
        at += 1;
    }
    code.len()
}

/// Returns the position of the bracket that closes the one at `open`.
pub(crate) fn closing(code: &str, open: usize) -> usize {
    let mut depth = 0;
    for (at, letter) in code.bytes().enumerate().skip(open) {
        match letter {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    panic!("a bracket is not closed: {}", code[open..].lines().next().unwrap_or(""))
}

/// Replaces comments in `text` with spaces and, if `strings` is set, also the contents of string literals. Positions
/// and line ends stay the same.
pub(crate) fn blanked(text: &str, strings: bool) -> String {
    let bytes = text.as_bytes();
    let mut out = bytes.to_vec();
    let mut blank = |range: Range<usize>| {
        for byte in &mut out[range] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
    };
    let mut at = 0;
    while at < bytes.len() {
        let rest = &text[at..];
        let is_word = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
        let end = match bytes[at] {
            b'/' if rest.starts_with("//") => {
                let end = at + rest.find('\n').unwrap_or(rest.len());
                blank(at..end);
                end
            }
            b'/' if rest.starts_with("/*") => {
                let end = at + block_comment(rest);
                blank(at..end);
                end
            }
            b'r' | b'b' | b'c' if !is_word && raw_string(rest).is_some() => {
                let (open, close, end) = raw_string(rest).unwrap();
                if strings {
                    blank(at + open..at + close);
                }
                at + end
            }
            b'"' => {
                let end = at + quoted(rest, b'"');
                if strings {
                    blank(at + 1..end - 1);
                }
                end
            }
            b'\'' if is_character(rest) => {
                let end = at + quoted(rest, b'\'');
                if strings {
                    blank(at + 1..end - 1);
                }
                end
            }
            _ => at + rest.chars().next().unwrap().len_utf8(),
        };
        at = end;
    }
    String::from_utf8(out).unwrap()
}

/// Returns the length of the block comment that `rest` begins with. Block comments nest.
fn block_comment(rest: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        match rest.as_bytes().get(at..at + 2) {
            Some(b"/*") => (depth, at) = (depth + 1, at + 2),
            Some(b"*/") => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

/// If `rest` begins with a raw string, returns the start and the end of its content, and the end of the whole literal.
fn raw_string(rest: &str) -> Option<(usize, usize, usize)> {
    let prefix = ["r", "br", "cr"].into_iter().filter(|prefix| rest.starts_with(prefix)).max_by_key(|prefix| prefix.len())?;
    let hashes = rest[prefix.len()..].bytes().take_while(|byte| *byte == b'#').count();
    let open = prefix.len() + hashes + 1;
    if rest.as_bytes().get(open - 1) != Some(&b'"') {
        return None;
    }
    let close = open + rest[open..].find(&format!("\"{}", "#".repeat(hashes)))?;
    Some((open, close, close + 1 + hashes))
}

/// Returns the length of the literal that `rest` begins with, including its quotation marks.
fn quoted(rest: &str, mark: u8) -> usize {
    let bytes = rest.as_bytes();
    let mut at = 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            letter if letter == mark => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// Returns true if the single quote at the start of `rest` starts a character literal rather than a lifetime.
fn is_character(rest: &str) -> bool {
    let mut letters = rest.chars().skip(1);
    match (letters.next(), letters.next()) {
        (Some('\\'), _) => true,
        (Some(letter), Some('\'')) => letter != '\'',
        _ => false,
    }
}

#[test]
fn only_what_cfg_test_applies_to_is_left_out() {
    let text = r##"
//! A page with #[cfg(test)] in it.
use a::b;
#[cfg(test)]
use c::{d, e};
struct S {
    one: u32,
    #[cfg(test)]
    two: Vec<(u32, u32)>,
    three: u32,
}
#[cfg(test)]
#[allow(dead_code, reason = "; }")]
pub(crate) fn look(at: [u8; 3]) -> u32
where
    A: B<C, D>,
{
    let open = '{';
    let text = r#"}"} "#;
    1
}
fn shipped<'a>() { f(S { #[cfg(test)] two: vec![], three: 3 }) }
#[cfg(test)]
mod tests;
#[cfg(test)]
mod more {
    fn inner() { "{ \" {"; /* { /* { */ */ }
}
fn last() {}
"##;
    let left: String = blanked(&without_test_items(text), false).split_whitespace().collect::<Vec<_>>().join(" ");
    let expected = "use a::b; struct S { one: u32, three: u32, } fn shipped<'a>() { f(S { three: 3 }) } fn last() {}";
    assert_eq!(left, expected);
    assert_eq!(test_modules(Path::new("x/src/y.rs"), text), [Path::new("x/src/y/tests")]);
    assert_eq!(test_modules(Path::new("x/src/lib.rs"), text), [Path::new("x/src/tests")]);
}
