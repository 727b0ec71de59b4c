//! Tests of sources that are not what they seem, or that change.

use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};

use super::*;

/// Overwrites bytes of a file in place and restores the file's modification time.
fn overwrite(path: &Path, bytes: &[u8], offset: u64) {
    let file = fs::File::options().write(true).open(path).unwrap();
    let before = file.metadata().unwrap();
    loop {
        file.write_all_at(bytes, offset).unwrap();
        file.set_modified(before.modified().unwrap()).unwrap();
        let after = file.metadata().unwrap();
        assert_eq!((after.mtime(), after.mtime_nsec(), after.len()), (before.mtime(), before.mtime_nsec(), before.len()));
        // File systems take the time from a clock that advances in steps of several milliseconds.
        if (after.ctime(), after.ctime_nsec()) != (before.ctime(), before.ctime_nsec()) {
            return;
        }
    }
}

/// SEMANTICS: "A source has changed if its size, modification time or inode change time differs from what it was at the first
/// inspection. Setting the modification time back hides no change, and a `chmod` or a new hard link counts as a change."
#[test]
fn a_source_that_was_changed_in_place_is_an_error_even_if_its_time_was_restored() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), vec![1; 5000]).unwrap();
    let pack = |program: &str| {
        let done = crate::programs::program("bash").args(["-ec", program]).current_dir(folder.path()).status().unwrap();
        assert!(done.success(), "{program}");
    };
    pack("tar -cf a.tar file; python3 -m zipfile -c a.zip file");
    for (name, offset) in [("file", 100), ("a.tar", 1000), ("a.zip", 40)] {
        let path = folder.path().join(name);
        let plan = planned(&[&path], &Selection::default()).unwrap();
        overwrite(&path, b"new", offset);
        let error = run(plan, &Selection::default(), &[1 << 30], 1, &mut |_| 0).map(drop).unwrap_err();
        assert!(matches!(&error, StageInError::Changed { path: named } if *named == path), "{name}: {error}");
    }
}

/// SEMANTICS: "A zip member that has the mode of a FIFO, device or socket and has content is a file, because that is how `zip`
/// packs its standard input."
#[test]
fn a_zip_member_with_the_mode_of_a_pipe_is_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let script = "import zipfile, stat
z = zipfile.ZipFile('a.zip', 'w')
for name, kind, data in ('-', stat.S_IFIFO, b'piped'), ('block', stat.S_IFBLK, b'b'), ('fifo', stat.S_IFIFO, b''):
    i = zipfile.ZipInfo(name); i.create_system = 3; i.external_attr = (kind | 0o600) << 16; z.writestr(i, data)
z.close()";
    let done = crate::programs::program("python3").args(["-c", script]).current_dir(folder.path()).status().unwrap();
    assert!(done.success());
    let staged = run_simply(&[&folder.path().join("a.zip")], &Selection::default()).unwrap();
    let found: Vec<(String, Vec<u8>)> =
        staged.members.values().map(|(member, bytes)| (display(&member.path), bytes.clone())).collect();
    assert!(found.contains(&("-".to_owned(), b"piped".to_vec())) && found.contains(&("block".to_owned(), b"b".to_vec())));
    assert_eq!((found.len(), staged.counts.special), (2, 1), "a FIFO without content is not a file");
}

/// SEMANTICS: "A symlink whose target contains a NUL byte is refused, and so is a name that contains
/// one."
#[test]
fn a_symlink_whose_target_contains_a_nul_byte_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let script = "import tarfile, zipfile, stat
with tarfile.open('a.tar', 'w', format=tarfile.PAX_FORMAT) as t:
    i = tarfile.TarInfo('link'); i.type = b'2'; i.linkname = 'q'; i.pax_headers = {'linkpath': 'q\\0r'}; t.addfile(i)
    t.addfile(tarfile.TarInfo('file'))
z = zipfile.ZipFile('a.zip', 'w')
i = zipfile.ZipInfo('link'); i.create_system = 3; i.external_attr = (stat.S_IFLNK | 0o777) << 16; z.writestr(i, b'q\\0r')
z.writestr('file', b''); z.close()";
    let done = crate::programs::program("python3").args(["-c", script]).current_dir(folder.path()).status().unwrap();
    assert!(done.success());
    for name in ["a.tar", "a.zip"] {
        let staged = run_simply(&[&folder.path().join(name)], &Selection::default()).unwrap();
        assert_eq!((staged.members.len(), staged.counts.refused), (1, 1), "{name}");
        assert!(staged.counts.notes[0].contains("NUL"), "{name}: {:?}", staged.counts.notes);
    }
}

/// Several writers store other modes, and unpacking ignores them.
#[test]
fn symlinks_have_the_mode_that_linux_gives_them() {
    let folder = tempfile::tempdir().unwrap();
    let script = "import tarfile, zipfile, stat
with tarfile.open('a.tar', 'w') as t:
    i = tarfile.TarInfo('link'); i.type = b'2'; i.linkname = 'q'; i.mode = 0o644; t.addfile(i)
z = zipfile.ZipFile('a.zip', 'w')
i = zipfile.ZipInfo('link'); i.create_system = 3; i.external_attr = stat.S_IFLNK << 16; z.writestr(i, b'q'); z.close()";
    let done = crate::programs::program("python3").args(["-c", script]).current_dir(folder.path()).status().unwrap();
    assert!(done.success());
    for name in ["a.tar", "a.zip"] {
        let staged = run_simply(&[&folder.path().join(name)], &Selection::default()).unwrap();
        let modes: Vec<u32> = staged.members.values().map(|(member, _)| member.mode).collect();
        assert_eq!(modes, [0o777], "{name}");
    }
}

/// SEMANTICS: "With `--nested`, a file whose content is not an archive stays a file, even in a tree."
#[test]
fn with_nested_a_member_that_is_an_archive_only_by_name_stays_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let tree = folder.path().join("t");
    fs::create_dir(&tree).unwrap();
    fs::File::create(tree.join("e.tar")).unwrap();
    fs::File::create(tree.join("n.zip")).unwrap().write_all(b"no").unwrap();
    let done = crate::programs::program("tar").args(["-cf", "in.tar", "t"]).current_dir(folder.path()).status().unwrap();
    assert!(done.success());
    let selection = Selection { nested: true, ..Selection::default() };
    for (source, prefix) in [("t", ""), ("in.tar", "t/")] {
        let staged = run_simply(&[&folder.path().join(source)], &selection).unwrap();
        for (name, content) in [("e.tar", &b""[..]), ("n.zip", b"no")] {
            let path = format!("{prefix}{name}");
            let found = staged.members.values().find(|(member, _)| display(&member.path) == path);
            let (member, bytes) = found.unwrap_or_else(|| panic!("{source}: no {path}"));
            assert!(matches!(member.kind, MemberKind::File { .. }) && bytes == content, "{source}: {path}");
        }
    }
}
