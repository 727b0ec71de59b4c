//! What patterns and lists name, also among names that are not UTF-8, and of lists that nobody should write.

use std::os::unix::ffi::OsStringExt;
use std::sync::mpsc;
use std::time::Duration;

use super::*;
use crate::plan::check_sources;
use crate::progress::ProgressMonitor;

/// What one pattern names below a folder, by its path there.
fn named(folder: &Path, pattern: &[u8]) -> Result<Vec<Vec<u8>>, StageInError> {
    let monitor = ProgressMonitor::default();
    let pattern = [folder.as_os_str().as_bytes(), b"/", pattern].concat();
    let paths = expand(&[pattern], &Watch::new(&monitor))?;
    let below = paths.into_iter().map(|path| path.strip_prefix(folder).map(Path::to_owned));
    Ok(below.map(|path| path.unwrap().into_os_string().into_vec()).collect())
}

fn listed_in(list: &Path) -> Result<(), StageInError> {
    check_sources(&[[b"@", list.as_os_str().as_bytes()].concat()], &Selection::default())
}

#[test]
fn a_glob_passes_over_a_folder_with_names_that_are_not_utf8() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &[u8]| folder.path().join(OsStr::from_bytes(name));
    fs::create_dir_all(at(b"p/sub\xfe")).unwrap();
    for name in [&b"p/g1.tar"[..], b"p/g2.tar", b"p/g\xff.tar", b"p/\xffx", b"p/sub\xfe/g.tar", b"p/.\xff.tar"] {
        fs::write(at(name), "x").unwrap();
    }
    let check =
        |pattern: &str, expect: &[&[u8]]| assert_eq!(named(folder.path(), pattern.as_bytes()).unwrap(), expect, "{pattern}");
    check("p/g*.tar", &[b"p/g1.tar", b"p/g2.tar", b"p/g\xff.tar"]);
    check("p/g[12].tar", &[b"p/g1.tar", b"p/g2.tar"]);
    check("p/*/*", &[b"p/sub\xfe/g.tar"]);
    check("**/g*.tar", &[b"p/g1.tar", b"p/g2.tar", b"p/g\xff.tar", b"p/sub\xfe/g.tar"]);
}

#[test]
fn globs_name_what_they_name_elsewhere() {
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
        match expand(&[whole.into_bytes()], &Watch::new(&monitor)) {
            Ok(found) => assert_eq!(found, expect, "{pattern}"),
            Err(error) => assert!(matches!(error, StageInError::NoMatch(_)) && expect.is_empty(), "{pattern}: {error}"),
        }
    }
    for pattern in ["[", "a**", "***", "[a/b]*"] {
        assert!(matches!(named(folder.path(), pattern.as_bytes()), Err(StageInError::InvalidPattern { .. })), "{pattern}");
    }
}

#[test]
fn a_list_is_a_regular_file_and_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    nix::unistd::mkfifo(&at("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    fs::write(at("a"), "x").unwrap();
    fs::write(at("name"), vec![b'a'; PATH_LEN_MAX + 1]).unwrap();
    fs::write(at("long"), [&b"a\n"[..], &vec![b'a'; PATH_LEN_MAX + 1], b"\na\n"].concat()).unwrap();
    fs::File::create(at("big")).unwrap().set_len(1 << 30).unwrap();
    fs::write(at("many"), "a\n".repeat(2_000_000)).unwrap();
    for (name, words) in [
        ("fifo", "no regular file"),
        ("/dev/null", "no regular file"),
        (".", "no regular file"),
        ("long", "line 2 is longer"),
        ("name", "line 1 is longer"),
        ("big", "more than"),
        ("many", "sources"),
    ] {
        let list = at(name);
        let (told, answer) = mpsc::channel();
        std::thread::spawn(move || told.send(listed_in(&list).map_err(|error| error.to_string())));
        let message = answer.recv_timeout(Duration::from_secs(60)).expect(name).unwrap_err();
        assert!(message.contains(words) && message.contains(at(name).to_str().unwrap()), "{name}: {message}");
    }
    fs::write(at("fine"), "a\n\n[a]").unwrap();
    listed_in(&at("fine")).unwrap();
}

#[test]
fn a_stage_in_that_is_cancelled_reads_its_list_no_further() {
    let folder = tempfile::tempdir().unwrap();
    let list = folder.path().join("list");
    fs::write(&list, "\n".repeat(1000)).unwrap();
    let monitor = ProgressMonitor::default();
    monitor.cancel();
    assert!(matches!(listed(&list, &Watch::new(&monitor), &mut Named::default()), Err(StageInError::Cancelled)));
}
