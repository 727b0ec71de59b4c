//! Tests of patterns and lists, with names that are not UTF-8 and with files that cannot be lists.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStringExt;
use std::sync::mpsc;
use std::time::Duration;

use super::*;
use crate::plan::check_sources;
use crate::progress::ProgressMonitor;

/// Returns the matches of a pattern in a folder, relative to the folder.
fn matches(folder: &Path, pattern: &[u8]) -> Result<Vec<Vec<u8>>, StageInError> {
    let monitor = ProgressMonitor::default();
    let pattern = [folder.as_os_str().as_bytes(), b"/", pattern].concat();
    let paths = expand(&[pattern], &PlanActivity::new(&monitor))?;
    let below = paths.into_iter().map(|path| path.strip_prefix(folder).map(Path::to_owned));
    Ok(below.map(|path| path.unwrap().into_os_string().into_vec()).collect())
}

fn check_list(list: &Path) -> Result<(), StageInError> {
    check_sources(&[[b"@", list.as_os_str().as_bytes()].concat()], &Selection::default())
}

/// SEMANTICS: "In globs, `*` matches bytes of a name that are not UTF-8, and `?` matches them as one character."
#[test]
fn globs_match_names_that_are_not_utf8() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &[u8]| folder.path().join(OsStr::from_bytes(name));
    fs::create_dir_all(at(b"p/sub\xfe")).unwrap();
    for name in [&b"p/g1.tar"[..], b"p/g2.tar", b"p/g\xff.tar", b"p/\xffx", b"p/sub\xfe/g.tar", b"p/.\xff.tar"] {
        fs::write(at(name), "x").unwrap();
    }
    let check =
        |pattern: &str, expect: &[&[u8]]| assert_eq!(matches(folder.path(), pattern.as_bytes()).unwrap(), expect, "{pattern}");
    check("p/g*.tar", &[b"p/g1.tar", b"p/g2.tar", b"p/g\xff.tar"]);
    check("p/g[12].tar", &[b"p/g1.tar", b"p/g2.tar"]);
    check("p/*/*", &[b"p/sub\xfe/g.tar"]);
    check("**/g*.tar", &[b"p/g1.tar", b"p/g2.tar", b"p/g\xff.tar", b"p/sub\xfe/g.tar"]);
}

/// SEMANTICS: "In globs, `*`, `?` and `[...]` match within a name, and `**` matches any number of
/// folders. A wildcard does not match a leading dot."
#[test]
fn globs_match_what_the_glob_crate_matches() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in ["a/b/c/d", "a/b2/b", "x/a/y", "[s]"] {
        fs::create_dir_all(at(name)).unwrap();
    }
    for name in ["a/1.tar", "a/b/2.tar", "a/b/c/3.tar", "4.tar", "x/a/y/b", "[s]/5.tar", "a/.6.tar"] {
        fs::write(at(name), "x").unwrap();
    }
    std::os::unix::fs::symlink("a", at("link")).unwrap();
    std::os::unix::fs::symlink("nowhere", at("dangling")).unwrap();
    let options = glob::MatchOptions { require_literal_leading_dot: true, ..glob::MatchOptions::new() };
    for pattern in [
        "*",
        "*/",
        "*.tar",
        "*/*.tar",
        "**/*.tar",
        "**",
        "a/**",
        "**/b",
        "**/b/*",
        "a/**/*.tar",
        "**/**/c",
        "?",
        "[ax]",
        "[!a]/*",
        "[[]s]/*",
        "a/../*.tar",
        "./*/.",
        "a*/b*/",
        "link/*",
        "l*/b/*",
        "d*",
        "a/1.tar/*",
        "nowhere/*",
        "[s]/*",
        "**/c/",
        "a//*.tar",
    ] {
        let whole = format!("{}/{pattern}", folder.path().display());
        let mut expect: Vec<PathBuf> = glob::glob_with(&whole, options).unwrap().map(Result::unwrap).collect();
        expect.sort_by(|left, right| left.as_os_str().as_bytes().cmp(right.as_os_str().as_bytes()));
        expect.dedup();
        let monitor = ProgressMonitor::default();
        match expand(&[whole.into_bytes()], &PlanActivity::new(&monitor)) {
            Ok(found) => assert_eq!(found, expect, "{pattern}"),
            Err(error) => assert!(matches!(error, StageInError::NoMatch(_)) && expect.is_empty(), "{pattern}: {error}"),
        }
    }
    for pattern in ["[", "a**", "***", "[a/b]*"] {
        let result = matches(folder.path(), pattern.as_bytes());
        assert!(matches!(result, Err(StageInError::InvalidPattern { .. })), "{pattern}");
    }
}

/// SEMANTICS: "`@LIST` names a file that lists sources, one per line. The lines may be globs, and are relative to the list's own
/// folder. A file whose own name begins with `@` is written `./@name`. A list is a regular file of at most 256 MiB with lines of at
/// most 4,096 bytes; a FIFO or a device is refused at once, and `run` refuses it before it starts anything."
/// SEMANTICS: "One stage-in has at most 1,048,576 sources, whose paths take at most 256 MiB in total, whether globs or lists name
/// them."
#[test]
fn a_list_must_be_a_regular_file_of_bounded_size() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    nix::unistd::mkfifo(&at("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    fs::write(at("a"), "x").unwrap();
    fs::write(at("name"), vec![b'a'; PATH_LEN_MAX + 1]).unwrap();
    fs::write(at("long"), [&b"a\n"[..], &vec![b'a'; PATH_LEN_MAX + 1], b"\na\n"].concat()).unwrap();
    fs::File::create(at("big")).unwrap().set_len(1 << 30).unwrap();
    fs::write(at("many"), "a\n".repeat(2_000_000)).unwrap();
    for (name, words) in [
        ("fifo", "not a regular file"),
        ("/dev/null", "not a regular file"),
        (".", "not a regular file"),
        ("long", "line 2 is longer"),
        ("name", "line 1 is longer"),
        ("big", "more than"),
        ("many", "sources"),
    ] {
        let list = at(name);
        // This runs on a thread of its own, because opening a FIFO could block forever.
        let (sender, result) = mpsc::channel();
        std::thread::spawn(move || sender.send(check_list(&list).map_err(|error| error.to_string())));
        let message = result.recv_timeout(Duration::from_secs(60)).expect(name).unwrap_err();
        assert!(message.contains(words) && message.contains(at(name).to_str().unwrap()), "{name}: {message}");
    }
    fs::write(at("fine"), "a\n\n[a]").unwrap();
    check_list(&at("fine")).unwrap();
}

/// SEMANTICS: "A list may have the byte order mark and the line ends of Windows, unless a file's name has them."
#[test]
fn lists_may_come_from_windows() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let check = |list: &str, expect: &[&str]| {
        fs::write(at("list"), list).unwrap();
        let pattern = [b"@", at("list").as_os_str().as_bytes()].concat();
        let found = expand(&[pattern], &PlanActivity::new(&ProgressMonitor::default())).unwrap();
        assert_eq!(found, expect.iter().map(|name| at(name)).collect::<Vec<_>>(), "{list:?}");
    };
    ["a", "b", "strange\r"].into_iter().for_each(|name| fs::write(at(name), "x").unwrap());
    check("\u{feff}a\r\n\r\nb\r\n", &["a", "b"]);
    check("[ab]\r\nb", &["a", "b", "b"]);
    check("strange\r\na\r", &["strange\r", "a"]);
    check("\u{feff}", &[]);
    fs::write(at("\u{feff}a"), "x").unwrap();
    check("\u{feff}a\n", &["\u{feff}a"]);
}

/// SEMANTICS: "A stage-in that is canceled stops reading its list."
#[test]
fn canceling_a_stage_in_stops_the_reading_of_its_list() {
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("list");
    fs::write(&list, "\n".repeat(1000)).unwrap();
    let monitor = ProgressMonitor::default();
    monitor.cancel();
    let expanded = expand_list(&list, &PlanActivity::new(&monitor), &mut SourcePaths::default());
    assert!(matches!(expanded, Err(StageInError::Cancelled)));
}
