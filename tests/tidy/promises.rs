//! Promises of the docs and the tests that keep them.
//!
//! A test of a promise of `docs/SEMANTICS.md` quotes it above its function, word for word:
//! `/// SEMANTICS: "Directories are listed in the order of their names' bytes."`. A quotation may run over several lines,
//! and a test may have several. FORMATS.md and PROTOCOL.md name their tests: (test: `name`).

use std::fs;

use super::{root, sources};

#[test]
fn formats_and_protocol_name_tests_that_exist() {
    let code: String = sources().all().map(|(_, file)| file.text.as_str()).collect();
    for page in ["FORMATS.md", "PROTOCOL.md"] {
        let text = fs::read_to_string(root().join("docs").join(page)).unwrap();
        let names: Vec<&str> = text.split("test: `").skip(1).filter_map(|rest| rest.split('`').next()).collect();
        assert!(names.len() >= 3, "{page} names too few tests");
        for name in names {
            assert!(code.contains(&format!("fn {name}(")), "{page} names the test '{name}', which does not exist");
        }
    }
}
