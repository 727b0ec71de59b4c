//! Tests of archives within archives.

use std::process::Command;

use super::*;

fn tool(folder: &Path, program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn files(staged: &Staged) -> Vec<(String, String)> {
    let entries = staged.tree().into_iter();
    entries
        .filter(|(_, (kind, _))| matches!(kind, MemberKind::File { .. }))
        .map(|(path, (_, bytes))| (path, String::from_utf8_lossy(&bytes).into_owned()))
        .collect()
}

/// SEMANTICS: "`--nested` turns an archive within an archive or a tree into a directory, which has the
/// archive's name without its ending, up to four levels deep."
#[test]
fn a_member_archive_becomes_a_directory() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for class in ["n01", "n02", "n03"] {
        fs::create_dir(at(class)).unwrap();
        for number in 0..3 {
            fs::write(at(class).join(format!("{class}_{number}.JPEG")), format!("{class} {number}")).unwrap();
        }
    }
    tool(folder.path(), "tar", &["-C", "n01", "-cf", "n01.tar", "n01_0.JPEG", "n01_1.JPEG", "n01_2.JPEG"]);
    tool(folder.path(), "tar", &["-C", "n02", "-czf", "n02.tar.gz", "n02_0.JPEG", "n02_1.JPEG", "n02_2.JPEG"]);
    tool(
        folder.path(),
        "python3",
        &[
            "-c",
            "import zipfile, os\nz = zipfile.ZipFile('n03.zip', 'w', zipfile.ZIP_DEFLATED)\nfor n in sorted(os.listdir('n03')): z.write('n03/' + n, n)\nz.close()",
        ],
    );
    fs::write(at("no.tar"), "no archive at all").unwrap();
    tool(folder.path(), "bash", &["-ec", "echo text | gzip > no.tgz"]);
    let inner = ["n01.tar", "n02.tar.gz", "n03.zip", "no.tar", "no.tgz"];
    tool(folder.path(), "tar", &[&["-cf", "plain.tar"], &inner[..]].concat());
    tool(folder.path(), "tar", &[&["-czf", "packed.tar.gz"], &inner[..]].concat());
    tool(folder.path(), "tar", &["-cf", "deep.tar", "plain.tar"]);
    tool(
        folder.path(),
        "python3",
        &[
            "-c",
            "import zipfile\nz = zipfile.ZipFile('outer.zip', 'w')\nfor n in ['n01.tar', 'n02.tar.gz', 'n03.zip', 'no.tar', 'no.tgz']: z.write(n)\nz.close()",
        ],
    );
    fs::create_dir(at("tree")).unwrap();
    for name in ["n01.tar", "n02.tar.gz", "n03.zip"] {
        fs::copy(at(name), at("tree").join(name)).unwrap();
    }
    let mut expect: Vec<(String, String)> = Vec::new();
    for class in ["n01", "n02", "n03"] {
        expect.extend((0..3).map(|number| (format!("{class}/{class}_{number}.JPEG"), format!("{class} {number}"))));
    }
    let images = expect.clone();
    expect.push(("no.tar".to_owned(), "no archive at all".to_owned()));
    expect.push(("no.tgz".to_owned(), String::from_utf8_lossy(&fs::read(at("no.tgz")).unwrap()).into_owned()));
    let nested = Selection { nested: true, ..Selection::default() };
    for outer in ["plain.tar", "packed.tar.gz", "outer.zip"] {
        assert_eq!(files(&run_simply(&[&at(outer)], &nested).unwrap()), expect, "{outer}");
    }
    assert_eq!(files(&run_simply(&[&at("tree")], &nested).unwrap()), images);
    let deep = files(&run_simply(&[&at("deep.tar")], &nested).unwrap());
    assert_eq!(deep, expect.iter().map(|(path, text)| (format!("plain/{path}"), text.clone())).collect::<Vec<_>>());
    let not_nested = run_simply(&[&at("plain.tar")], &Selection::default()).unwrap();
    assert_eq!(not_nested.tree().keys().collect::<Vec<_>>(), inner);
    let only = Selection { include: vec!["*_1.JPEG".to_owned()], strip_components: 1, ..nested };
    let names: Vec<String> = files(&run_simply(&[&at("plain.tar")], &only).unwrap()).into_iter().map(|(path, _)| path).collect();
    assert_eq!(names, ["n01_1.JPEG", "n02_1.JPEG", "n03_1.JPEG"]);
}

/// SEMANTICS: "Of two members with the same path, the later one wins within such directories too."
#[test]
fn of_two_members_with_one_path_the_later_wins_even_within_archives() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("a")).unwrap();
    fs::write(at("x.txt"), "second").unwrap();
    tool(folder.path(), "tar", &["-cf", "a.tar", "x.txt"]);
    fs::write(at("a/x.txt"), "first").unwrap();
    tool(
        folder.path(),
        "python3",
        &["-c", "import zipfile\nz = zipfile.ZipFile('o.zip', 'w')\nfor n in ['a/x.txt', 'a.tar']: z.write(n)\nz.close()"],
    );
    tool(folder.path(), "tar", &["-cf", "o.tar", "a/x.txt", "a.tar"]);
    let nested = Selection { nested: true, ..Selection::default() };
    for outer in ["o.zip", "o.tar"] {
        assert_eq!(files(&run_simply(&[&at(outer)], &nested).unwrap()), [("a/x.txt".to_owned(), "second".to_owned())], "{outer}");
    }
    // The inner archive is sparse in the outer one, so offsets in the two differ.
    let hole = "import os, tarfile, io\nt = tarfile.open('in.tar', 'w')\nd = tarfile.TarInfo('pad'); d.size = 1 << 20; t.addfile(d, io.BytesIO(bytes(1 << 20)))\n\
                d = tarfile.TarInfo('x'); d.size = 5; t.addfile(d, io.BytesIO(b'inner'))\nt.close()\nos.makedirs('in'); open('in/x', 'w').write('outer')";
    tool(folder.path(), "python3", &["-c", hole]);
    tool(
        folder.path(),
        "bash",
        &["-ec", "cp --sparse=always in.tar s.tar && mv s.tar in.tar && tar -S -cf sparse.tar in.tar in/x"],
    );
    let found = files(&run_simply(&[&at("sparse.tar")], &nested).unwrap());
    assert_eq!(found[1], ("in/x".to_owned(), "outer".to_owned()));
}

#[test]
fn a_checksum_reveals_damage_in_an_archive_within_a_zip() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("hello"), "hello world original").unwrap();
    tool(folder.path(), "tar", &["-cf", "a.tar", "hello"]);
    tool(folder.path(), "python3", &["-c", "import zipfile\nz = zipfile.ZipFile('o.zip', 'w')\nz.write('a.tar')\nz.close()"]);
    let mut bytes = fs::read(at("o.zip")).unwrap();
    let place = bytes.windows(5).position(|window| window == b"world").unwrap();
    bytes[place] ^= 1;
    fs::write(at("o.zip"), bytes).unwrap();
    for nested in [false, true] {
        let selection = Selection { nested, ..Selection::default() };
        let error = run_simply(&[&at("o.zip")], &selection).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("checksum"), "{error}");
    }
}

#[test]
fn with_keep_going_sources_that_are_archives_only_by_name_are_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("x"), "x").unwrap();
    tool(folder.path(), "tar", &["-czf", "good.tar.gz", "x"]);
    fs::write(at("short.tar.gz"), &fs::read(at("good.tar.gz")).unwrap()[..40]).unwrap();
    fs::write(at("empty.tar"), "").unwrap();
    fs::write(at("false.zip"), "PK\x03\x04 and no more").unwrap();
    let sources = ["good.tar.gz", "short.tar.gz", "empty.tar", "false.zip"].map(at);
    let sources: Vec<&Path> = sources.iter().map(std::path::PathBuf::as_path).collect();
    assert!(run_simply(&sources, &Selection::default()).is_err());
    let plan = planned(&sources, &Selection { keep_going: true, ..Selection::default() }).unwrap();
    assert_eq!((plan.counts.skipped, plan.sources.len()), (3, 2), "{:?}", plan.counts.skipped_notes);
}

/// SEMANTICS: "If the window with which something was compressed needs more, the error says that, and does not call the archive damaged."
#[test]
fn a_window_that_is_too_large_ends_an_archive_with_one_remark() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in ["1", "2", "3"] {
        fs::write(at(name), [name.as_bytes()[0]; 40_000]).unwrap();
    }
    tool(folder.path(), "tar", &["-cf", "whole.tar", "1", "2", "3"]);
    let bytes = fs::read(at("whole.tar")).unwrap();
    let frame = |bytes: &[u8], window_log| {
        let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(window_log).unwrap();
        std::io::Write::write_all(&mut encoder, bytes).unwrap();
        encoder.finish().unwrap()
    };
    // The data of the second member, and its header.
    for cut in [60_000, 40_960] {
        fs::create_dir_all(at("o")).unwrap();
        fs::write(at("o/a.tar.zst"), [frame(&bytes[..cut], 20), frame(&bytes[cut..], 29)].concat()).unwrap();
        fs::write(at("o/b"), "b").unwrap();
        tool(folder.path(), "tar", &["-cf", "outer.tar", "-C", "o", "a.tar.zst", "b"]);
        let keep_going = Selection { keep_going: true, nested: true, ..Selection::default() };
        for (source, kept) in [(at("o/a.tar.zst"), 1), (at("outer.tar"), 2)] {
            let error = run_simply(&[&source], &Selection { nested: true, ..Selection::default() }).err().unwrap();
            assert!(matches!(error, StageInError::WindowTooLarge { .. }), "{error}");
            let plan = planned(&[&source], &keep_going).unwrap();
            let staged = run(plan, &keep_going, &[1 << 20], 1, &mut |_| 0).unwrap();
            let files = staged.members.values().filter(|(member, _)| matches!(member.kind, MemberKind::File { .. })).count();
            assert_eq!((files, staged.counts.skipped), (kept, 1), "{:?}", staged.counts);
            assert!(staged.counts.skipped_notes[0].contains("so large a window"), "{:?}", staged.counts);
            assert_eq!(staged.counts.unmarked_ends, 0);
        }
    }
}

/// SEMANTICS: "A source that has changed since it was listed causes an error that names it."
#[test]
fn an_archive_that_changed_is_an_error_that_names_it() {
    for name in ["a.tar", "a.tar.gz", "a.zip"] {
        for keep_going in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let at = |name: &str| folder.path().join(name);
            fs::write(at("x"), "x").unwrap();
            tool(folder.path(), "tar", &["-cf", "a.tar", "x"]);
            tool(folder.path(), "gzip", &["-k", "a.tar"]);
            tool(folder.path(), "python3", &["-c", "import zipfile\nz = zipfile.ZipFile('a.zip', 'w')\nz.write('x')\nz.close()"]);
            let selection = Selection { keep_going, ..Selection::default() };
            let plan = planned(&[&at(name)], &selection).unwrap();
            let file = fs::OpenOptions::new().append(true).open(at(name)).unwrap();
            file.set_modified(std::time::UNIX_EPOCH).unwrap();
            match run(plan, &selection, &[1 << 20], 1, &mut |_| 0) {
                Err(error) => assert!(!keep_going && error.to_string().contains(&format!("{name}' changed")), "{error}"),
                Ok(staged) => assert!(keep_going && staged.members.is_empty() && staged.counts.skipped == 1, "{name}"),
            }
        }
    }
}
