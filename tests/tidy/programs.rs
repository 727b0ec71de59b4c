//! Compares the table of programs from outside, `tests/programs.toml`, with the tests that use them and with the list in CONTRIBUTING.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use toml::{Table, Value};

use super::source::blanked;
use super::{posix_programs, root, sources};

/// What precedes the name of a program in a test.
const CALLS: [&str; 5] = ["Command::new(\"", "program(\"", "tool(\"", "is_installed(\"", "run_if_there(\""];

/// Words that need a row of the table wherever they stand in a test: compilers, and options that need a package of their own.
const COMPILERS: [&str; 9] = ["cc", "gcc", "g++", "clang", "musl-gcc", "rustc", "-m32", "-static", "-fsanitize"];

/// One row of the table.
struct Row {
    name: String,
    package: String,
    used_by: Vec<String>,
}

fn rows(kind: &str) -> Vec<Row> {
    let text = fs::read_to_string(root().join("tests/programs.toml")).unwrap();
    let table: Table = text.parse().unwrap();
    let read = |row: &Value| {
        let word = |key: &str| row[key].as_str().filter(|word| !word.is_empty()).expect("a word").to_owned();
        assert_eq!(row.as_table().unwrap().len(), 4, "{row:?}: a row has name, package, used_by and why");
        word("why");
        let used_by = row["used_by"].as_array().unwrap().iter().map(|place| place.as_str().unwrap().to_owned()).collect();
        Row { name: word("name"), package: word("package"), used_by }
    };
    table[kind].as_array().unwrap().iter().map(read).collect()
}

/// Returns the string literals of a Rust file that name a program: after a call that runs one, and compilers anywhere.
fn named(text: &str) -> BTreeSet<String> {
    let literal = |after: &str| after.split('"').next().unwrap_or_default().to_owned();
    let called = CALLS.iter().flat_map(|call| text.split(call).skip(1).map(literal));
    let quoted = text.split('"').map(str::to_owned).filter(|word| {
        COMPILERS
            .iter()
            .any(|compiler| word == compiler || compiler.starts_with('-') && word.starts_with(&format!("{compiler}=")))
    });
    called.chain(quoted).filter(|name| !name.contains('{')).collect()
}

/// Returns whether a row covers a name that a test uses: the program, or one of its options.
fn covers(row: &Row, name: &str) -> bool {
    let option = name.split('=').next().unwrap_or(name);
    row.name == name.trim_start_matches("/bin/") || option.starts_with('-') && row.name.split(' ').any(|word| word == option)
}

#[test]
fn every_program_that_a_test_uses_is_in_the_table() {
    let rows = rows("program");
    let is_in_table = |name: &str| rows.iter().any(|row| covers(row, name));
    let in_scripts = posix_programs::PROGRAMS.iter().chain(posix_programs::COPIERS);
    for (program, script) in in_scripts {
        assert!(is_in_table(program), "tests/posix/programs.rs: '{program}' is not in tests/programs.toml ({script})");
    }
    for (path, file) in sources().all().filter(|(path, _)| !path.starts_with("tests/tidy")) {
        for name in named(&blanked(&file.text, false)).iter().filter(|name| !name.is_empty()) {
            assert!(is_in_table(name), "{}: '{name}' is not in tests/programs.toml", path.display());
        }
    }
}

#[test]
fn every_row_names_a_place_that_uses_the_program() {
    let (programs, libraries) = (rows("program"), rows("library"));
    let mut names = BTreeSet::new();
    for row in &programs {
        assert!(names.insert(&row.name), "{} stands twice in tests/programs.toml", row.name);
    }
    for row in programs.iter().chain(&libraries) {
        for place in &row.used_by {
            let text = fs::read_to_string(root().join(place)).unwrap_or_else(|error| panic!("{place}: {error}"));
            // No place spells out the path of a library that it needs.
            let is_used = row.name.starts_with('/') || row.name.split([' ', '.']).all(|word| text.contains(word));
            assert!(is_used, "{place} does not use '{}'", row.name);
        }
    }
}

#[test]
fn contributing_lists_the_packages_of_the_table() {
    let packages: BTreeSet<String> = rows("program").into_iter().chain(rows("library")).map(|row| row.package).collect();
    let expected = format!("```\n{}\n```", wrapped(&packages, 100));
    let contributing = fs::read_to_string(root().join("CONTRIBUTING.md")).unwrap();
    assert!(contributing.contains(&expected), "CONTRIBUTING.md must list the packages of tests/programs.toml:\n{expected}");
}

/// Joins words with blanks and line ends.
fn wrapped(words: &BTreeSet<String>, columns: usize) -> String {
    let mut lines = vec![String::new()];
    for word in words {
        let line = lines.last_mut().unwrap();
        match line.len() + 1 + word.len() {
            _ if line.is_empty() => line.push_str(word),
            len if len <= columns => line.extend([" ", word]),
            _ => lines.push(word.clone()),
        }
    }
    lines.join("\n")
}

#[test]
fn the_check_installs_only_what_the_table_names() {
    for script in [".ci/run", ".ci/fresh"] {
        let text = fs::read_to_string(root().join(Path::new(script))).unwrap();
        assert!(!text.contains("apt-get install"), "{script}: packages come from tests/programs.toml, by .ci/packages");
    }
}
