//! Matches the promises of the docs with the tests that keep them.
//!
//! A test that keeps a promise of `docs/SEMANTICS.md` quotes it above its function, word for word but without links and
//! emphasis: `/// SEMANTICS: "Directories are listed in the order of their names' bytes."`. A quotation may run over several
//! lines, and a test may have several. FORMATS.md and PROTOCOL.md name their tests: (test: `name`).

use std::fs;

use serde::Deserialize;

use super::{root, sources};

/// The start of a quotation.
const START: &str = "/// SEMANTICS: \"";

/// A quotation of SEMANTICS.md above a test.
struct Quotation {
    /// The file and the test below the quotation.
    place: String,
    text: String,
}

/// `untested.toml`.
#[derive(Deserialize)]
struct Untested {
    promise: Vec<UntestedPromise>,
}

#[derive(Deserialize)]
struct UntestedPromise {
    text: String,
    reason: String,
}

#[test]
fn each_quotation_is_a_part_of_a_promise() {
    let promises = promises(&read("docs/SEMANTICS.md"));
    for quotation in quotations() {
        let is_promised = promises.iter().any(|promise| promise.contains(&quotation.text));
        assert!(is_promised, "{}: no promise of docs/SEMANTICS.md reads \"{}\"", quotation.place, quotation.text);
    }
}

#[test]
fn each_promise_is_kept_by_a_test() {
    let promises = promises(&read("docs/SEMANTICS.md"));
    assert!(promises.len() > 100, "only {} promises were found in docs/SEMANTICS.md", promises.len());
    let quotations = quotations();
    let untested: Untested = toml::from_str(&read("tests/tidy/untested.toml")).unwrap();
    let is_quoted = |promise: &str| quotations.iter().any(|quotation| promise.contains(&quotation.text));
    let is_untested = |promise: &str| untested.promise.iter().any(|untested| plain(&untested.text) == promise);
    let forgotten: Vec<&String> = promises.iter().filter(|promise| !is_quoted(promise) && !is_untested(promise)).collect();
    assert!(forgotten.is_empty(), "promises of docs/SEMANTICS.md that no test quotes: {forgotten:#?}");
    for UntestedPromise { text, reason } in &untested.promise {
        assert!(promises.contains(&plain(text)), "tests/tidy/untested.toml: no promise of docs/SEMANTICS.md reads \"{text}\"");
        assert!(!is_quoted(&plain(text)), "tests/tidy/untested.toml: a test quotes \"{text}\"");
        assert!(reason.len() > 20, "tests/tidy/untested.toml: \"{text}\" has no reason");
    }
}

#[test]
fn formats_and_protocol_name_tests_that_exist() {
    let code: String = sources().all().map(|(_, file)| file.text.as_str()).collect();
    for page in ["docs/FORMATS.md", "docs/PROTOCOL.md"] {
        let text = read(page);
        let names: Vec<&str> = text.split("test: `").skip(1).filter_map(|rest| rest.split('`').next()).collect();
        assert!(names.len() >= 3, "{page} names too few tests");
        for name in names {
            assert!(code.contains(&format!("fn {name}(")), "{page} names the test '{name}', which does not exist");
        }
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

/// Returns the promises of a page: its numbered items, its bulleted items and the rows of its tables.
fn promises(page: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut is_open = false;
    let mut lines = page.lines().peekable();
    while let Some(line) = lines.next() {
        let is_numbered = line.split_once(". ").is_some_and(|(number, _)| number.parse::<u32>().is_ok());
        let is_heading_of_table = lines.peek().is_some_and(|next| next.starts_with("|---"));
        if line.starts_with("- ") || is_numbered || line.starts_with("| ") && !is_heading_of_table {
            found.push(line.trim_start_matches("- ").to_owned());
            is_open = true;
        } else if is_open && line.starts_with("  ") {
            found.last_mut().unwrap().push_str(line);
        } else {
            is_open = false;
        }
    }
    found.iter().map(|promise| plain(promise)).collect()
}

/// Returns all quotations above tests.
fn quotations() -> Vec<Quotation> {
    let mut found = Vec::new();
    for (path, file) in sources().all() {
        let is_shipped = sources().shipped().any(|(shipped, _)| shipped == path);
        assert!(!is_shipped || !file.shipped.contains(START), "{}: code outside tests quotes SEMANTICS.md", path.display());
        let mut texts = Vec::new();
        let mut lines = file.text.lines().map(str::trim);
        while let Some(line) = lines.next() {
            if let Some(start) = line.strip_prefix(START) {
                let mut text = start.to_owned();
                while !text.ends_with('"') {
                    let next = lines.next().and_then(|line| line.strip_prefix("///"));
                    text.push_str(next.unwrap_or_else(|| panic!("{}: a quotation has no closing quote: {text}", path.display())));
                }
                texts.push(plain(text.trim_end_matches('"')));
            } else if let Some((_, rest)) = line.split_once("fn ") {
                let name = rest.split('(').next().unwrap();
                let place = format!("{}, {name}", path.display());
                found.extend(texts.drain(..).map(|text| Quotation { place: place.clone(), text }));
            } else {
                let is_above_function = line.starts_with("///") || line.starts_with("#[");
                assert!(
                    texts.is_empty() || is_above_function,
                    "{}: a quotation is not directly above a test: {texts:?}",
                    path.display()
                );
            }
        }
    }
    assert!(found.len() > 100, "only {} quotations of SEMANTICS.md were found", found.len());
    found
}

/// Returns text without Markdown markup, with one space between words.
fn plain(text: &str) -> String {
    let mut without_links = String::new();
    let mut rest = text;
    while let Some((before, target)) = rest.split_once("](") {
        let (before, name) = before.rsplit_once('[').unwrap();
        without_links.extend([before, name]);
        rest = target.split_once(')').unwrap().1;
    }
    without_links.push_str(rest);
    let without_marks = without_links.replace(['`', '*'], "");
    without_marks.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn promises_are_items_and_rows() {
    let page = "# Title\n\nA paragraph.\n- **One** thing,\n  see [there](x.md).\n- Two\n\nNo item.\n  1.5\n1. First\n\n| a | b |\n|---|---|\n| `c` | d |\n";
    assert_eq!(promises(page), ["One thing, see there.", "Two", "1. First", "| c | d |"]);
}
