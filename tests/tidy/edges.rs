//! Checks which top-level modules of a crate use which others: `edges.toml` must declare exactly
//! the edges in the sources.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;

use super::source::{Sources, blanked, closing};
use super::{metadata, root, sources};

/// Maps each module to the modules that it uses.
type Edges = BTreeMap<String, BTreeSet<String>>;

/// The name in `edges.toml` for the code in `lib.rs` or `main.rs` itself.
const CRATE_ROOT: &str = "crate";

#[test]
fn edges_between_modules_are_declared() {
    let declared = declaration();
    let mut found = String::new();
    let mut is_equal = true;
    for (name, edges) in all_edges() {
        is_equal &= edges == table_of(&declared, "edges", &name);
        writeln!(found, "[edges.{name}]").unwrap();
        for (module, uses) in &edges {
            writeln!(found, "{module} = {:?}", uses.iter().collect::<Vec<_>>()).unwrap();
        }
        found.push('\n');
    }
    assert!(is_equal, "edges between modules differ from tests/tidy/edges.toml. The sources have:\n\n{found}");
}

#[test]
fn modules_form_no_circle_without_a_stated_reason() {
    let declared = declaration();
    let (mut found, mut expected) = (BTreeSet::new(), BTreeSet::new());
    for (name, edges) in all_edges() {
        let reasons: BTreeMap<String, String> = table_of(&declared, "circles", &name);
        assert!(reasons.values().all(|reason| reason.len() > 20), "a circle of {name} is declared without a reason");
        expected.extend(reasons.into_keys().map(|modules| format!("{name}: {modules}")));
        let modules = circles(&edges).into_iter().map(|modules| modules.into_iter().collect::<Vec<_>>().join(" "));
        found.extend(modules.map(|modules| format!("{name}: {modules}")));
    }
    assert_eq!(found, expected, "circles among modules: those in the sources, and those in tests/tidy/edges.toml");
}

fn declaration() -> toml::Value {
    toml::from_str(&fs::read_to_string(root().join("tests/tidy/edges.toml")).unwrap()).unwrap()
}

/// Returns the table `[kind.name]` of the declaration, or an empty table if there is none.
fn table_of<T: DeserializeOwned>(declared: &toml::Value, kind: &str, name: &str) -> BTreeMap<String, T> {
    let table = declared.get(kind).and_then(|tables| tables.get(name));
    table.map_or_else(BTreeMap::new, |table| table.clone().try_into().unwrap())
}

fn all_edges() -> BTreeMap<String, Edges> {
    let mut found = BTreeMap::new();
    for package in metadata().workspace_packages() {
        let target = package.targets.iter().find(|target| !target.is_custom_build() && !target.is_test()).unwrap();
        let main = target.src_path.strip_prefix(root()).unwrap();
        found.insert(package.name.to_string(), edges(sources(), main.as_std_path()));
    }
    found
}

/// Returns the edges between the top-level modules of the crate whose `lib.rs` or `main.rs` is `main`.
fn edges(sources: &Sources, main: &Path) -> Edges {
    let folder = main.parent().unwrap();
    let mut edges = Edges::new();
    let code_of_root = blanked(&sources.get(main).unwrap().code, true);
    let modules: BTreeSet<&str> = statements(&code_of_root, "mod ").filter_map(|rest| rest.split(';').next()).collect();
    let reexports = reexports(&code_of_root);
    // The use of a name that the root only re-exports counts as a use of the module that defines
    // the name.
    let resolve = |name: &str| match modules.get(name) {
        Some(module) => (*module).to_owned(),
        None => reexports.get(name).cloned().unwrap_or_else(|| CRATE_ROOT.to_owned()),
    };
    for (path, file) in sources.shipped() {
        let Ok(below) = path.strip_prefix(folder) else { continue };
        let levels: Vec<&str> = below.iter().map(|part| part.to_str().unwrap().trim_end_matches(".rs")).collect();
        if path == main || !modules.contains(levels[0]) {
            continue;
        }
        let code = blanked(&file.code, true);
        let used = paths_from_root(&code, levels.len()).into_iter().map(resolve);
        edges.entry(levels[0].to_owned()).or_default().extend(used.filter(|module| module != levels[0]));
    }
    let own = without_reexports(&code_of_root);
    let is_used = |module: &&&str| statements(&own, &format!("{module}::")).next().is_some();
    edges.insert(CRATE_ROOT.to_owned(), modules.iter().filter(is_used).map(|module| (*module).to_owned()).collect());
    edges.retain(|_, used| !used.is_empty());
    edges
}

/// Returns the text after each `start`, except where `start` is part of a longer word or path.
fn statements<'a>(code: &'a str, start: &'a str) -> impl Iterator<Item = &'a str> {
    code.match_indices(start).filter_map(move |(at, _)| {
        let before = code[..at].chars().next_back();
        let is_start = before.is_none_or(|letter| !letter.is_alphanumeric() && letter != '_' && letter != ':');
        is_start.then(|| &code[at + start.len()..])
    })
}

/// Returns the names that the root re-exports with `pub use module::…`, and their modules.
fn reexports(code: &str) -> BTreeMap<&str, String> {
    let mut found = BTreeMap::new();
    for line in code.split(';').filter_map(|item| item.split("pub use ").nth(1)) {
        let Some((module, names)) = line.split_once("::") else { continue };
        let is_name = |letter: char| letter.is_alphanumeric() || letter == '_';
        found
            .extend(names.split(|letter| !is_name(letter)).filter(|name| !name.is_empty()).map(|name| (name, module.to_owned())));
    }
    found
}

fn without_reexports(code: &str) -> String {
    code.split_inclusive(';').filter(|item| !item.contains("pub use ")).collect()
}

/// Returns the first names of all paths that start at the crate's root, through `crate::` or
/// through `depth` times `super::`.
fn paths_from_root(code: &str, depth: usize) -> Vec<&str> {
    let mut found = Vec::new();
    for rest in statements(code, "crate::") {
        first_names(rest, 0, &mut found);
    }
    for rest in statements(code, "super::") {
        // This finds every chain of `super::` once, at its first link, which accounts for one
        // level.
        first_names(rest, depth - 1, &mut found);
    }
    found
}

/// Collects the names that a path leads to after `levels` more `super::`. For a group, these are
/// all names in it.
fn first_names<'a>(path: &'a str, levels: usize, found: &mut Vec<&'a str>) {
    if path.starts_with('{') {
        let mut rest = &path[1..closing(path, 0)];
        while !rest.trim().is_empty() {
            first_names(rest.trim_start(), levels, found);
            // The next member of this group follows a comma that is outside of all brackets.
            let mut at = 0;
            while at < rest.len() && rest.as_bytes()[at] != b',' {
                at = if rest.as_bytes()[at] == b'{' { closing(rest, at) + 1 } else { at + 1 };
            }
            rest = rest.get(at + 1..).unwrap_or("");
        }
    } else if let Some(rest) = path.strip_prefix("super::") {
        if levels > 0 {
            first_names(rest, levels - 1, found);
        }
    } else if levels == 0 {
        let name = path.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next().unwrap();
        if !name.is_empty() && name != "self" {
            found.push(name);
        }
    }
}

/// Returns the groups of modules that all lead to each other.
fn circles(edges: &Edges) -> BTreeSet<BTreeSet<&str>> {
    let reach = |from: &str| {
        let mut found = BTreeSet::new();
        let mut waiting = vec![from.to_owned()];
        while let Some(module) = waiting.pop() {
            for next in edges.get(&module).into_iter().flatten() {
                if found.insert(next.clone()) {
                    waiting.push(next.clone());
                }
            }
        }
        found
    };
    let reached: BTreeMap<&str, BTreeSet<String>> = edges.keys().map(|module| (module.as_str(), reach(module))).collect();
    let circle = |module: &&str| {
        let others = reached[module].iter().filter_map(|other| reached.get_key_value(other.as_str()));
        others.filter(|(_, back)| back.contains(*module)).map(|(other, _)| *other).collect::<BTreeSet<&str>>()
    };
    reached.keys().map(circle).filter(|circle| !circle.is_empty()).collect()
}

#[test]
fn paths_to_other_modules_are_found() {
    let code = "use crate::{a::{B, c}, d, self}; use super::{e, super::f::G}; use super::super::h; fn i() { $crate::j::k(); x::crate_::l() }";
    assert_eq!(paths_from_root(code, 2), ["a", "d", "j", "f", "h"]);
    assert_eq!(paths_from_root("use super::m::N;", 1), ["m"]);
}

#[test]
fn circles_are_found() {
    let edge = |from: &str, to: &[&str]| (from.to_owned(), to.iter().map(|name| (*name).to_owned()).collect());
    let edges = Edges::from([edge("a", &["b", "d"]), edge("b", &["c"]), edge("c", &["a"]), edge("d", &["e"])]);
    assert_eq!(circles(&edges), BTreeSet::from([BTreeSet::from(["a", "b", "c"])]));
}
