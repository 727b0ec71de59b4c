//! Tests of planning.

use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use dayfly_meta::catalog::{Compression, SourceKind};
use dayfly_meta::path::{display, join};
use dayfly_meta::wire::control::OnConflict;
use dayfly_meta::wire::peer::{Unit, Work};

use super::*;

/// Returns a plan and its units, sorted by source.
fn units(patterns: &[&Path], selection: &Selection) -> Result<(StageInPlan, Vec<Unit>), StageInError> {
    let patterns: Vec<Vec<u8>> = patterns.iter().map(|path| path.as_os_str().as_bytes().to_vec()).collect();
    let request = PlanRequest { patterns: &patterns, selection, seed: 1, workers: 1 };
    let mut plan = plan_sources(&request, tempfile::tempfile().unwrap(), &ProgressMonitor::default())?;
    let mut units = Vec::new();
    while let Some((_, unit)) = plan.units.next_unit()? {
        units.push(unit);
    }
    units.sort_by_key(|unit| unit.source);
    Ok((plan, units))
}

/// Returns the paths of all entries of trees. An archive appears as one entry.
fn paths(units: &[Unit]) -> Vec<String> {
    let mut paths = Vec::new();
    for unit in units {
        match &unit.work {
            Work::Tar { .. } | Work::TarRange(_) => paths.push("(tar)".to_owned()),
            Work::Zip(_) => paths.push("(zip)".to_owned()),
            Work::Tree { entries, .. } => paths.extend(entries.iter().map(|entry| display(&join(&unit.prefix, &entry.path)))),
        }
    }
    paths
}

/// SEMANTICS: "Sources are named as for `cp`: a single directory becomes the target; several sources are placed in the target,
/// directories and files under their own names; an archive is unpacked into the target."
#[test]
fn sources_get_the_paths_that_cp_would_give_them() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir_all(at("d/sub")).unwrap();
    fs::create_dir(at("e")).unwrap();
    for file in ["d/sub/x", "d/y", "e/z", "single"] {
        fs::write(at(file), file).unwrap();
    }
    let check = |patterns: &[PathBuf], strip_components, expect: &[&str]| {
        let selection = Selection { strip_components, ..Selection::default() };
        let patterns: Vec<&Path> = patterns.iter().map(PathBuf::as_path).collect();
        assert_eq!(paths(&units(&patterns, &selection).unwrap().1), expect);
    };
    check(&[at("d")], 0, &["", "sub", "sub/x", "y"]);
    check(&[at("d"), at("e")], 0, &["d", "d/sub", "d/sub/x", "d/y", "e", "e/z"]);
    check(&[at("[de]")], 0, &["d", "d/sub", "d/sub/x", "d/y", "e", "e/z"]);
    check(&[at("d/."), at("single")], 0, &["", "sub", "sub/x", "y", "single"]);
    check(&[at("d")], 1, &["", "x"]);
    let (plan, _) = units(&[&at("d"), &at("single")], &Selection::default()).unwrap();
    assert_eq!((plan.known_files, plan.source_bytes, plan.files_are_all_known), (3, 7 + 3 + 6, true));
    fs::write(at("list"), "d\nsingle\n\n[e]\n").unwrap();
    let list = PathBuf::from(format!("@{}", at("list").display()));
    check(&[list], 0, &["d", "d/sub", "d/sub/x", "d/y", "single", "e", "e/z"]);
    fs::write(at("list"), "d\nmissing\n").unwrap();
    let list = PathBuf::from(format!("@{}", at("list").display()));
    let error = units(&[&list], &Selection::default()).err().unwrap().to_string();
    assert!(error.contains("list'") && error.contains("line 2: no file or directory matches"), "{error}");
    let list = PathBuf::from(format!("@{}", at("no-list").display()));
    assert!(matches!(units(&[&list], &Selection::default()), Err(StageInError::InvalidList { .. })));
    assert!(matches!(units(&[&at("missing")], &Selection::default()), Err(StageInError::NoMatch(_))));
    assert!(matches!(units(&[&at("missing*")], &Selection::default()), Err(StageInError::NoMatch(_))));
}

#[test]
fn sources_of_one_pattern_are_rivals_and_may_get_directories_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for name in ["a.tar", "b.tar.crate", "c"] {
        fs::write(at(name), if name == "c" { vec![1] } else { vec![0; 10240] }).unwrap();
    }
    fs::write(at("list"), "a.tar\n[c]\n").unwrap();
    let list = PathBuf::from(format!("@{}", at("list").display()));
    let check = |patterns: &[&Path], selection: &Selection, expect: &[(u32, u32)]| {
        let (plan, _) = units(patterns, selection).unwrap();
        let found: Vec<(u32, u32)> = plan.rivalries.iter().map(|rivalry| (rivalry.pattern, rivalry.match_number)).collect();
        assert_eq!(found, expect, "{patterns:?}");
    };
    let selection = Selection { on_conflict: OnConflict::Error, ..Selection::default() };
    check(&[&at("a.tar"), &at("c")], &selection, &[(0, 0), (0, 0)]);
    check(&[&at("[abc]*"), &list, &at("c")], &selection, &[(1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (0, 0)]);
    check(&[&at("[a]*"), &at("[c]*")], &selection, &[(0, 0), (0, 0)]);
    check(&[&at("[abc]*")], &Selection { on_conflict: OnConflict::Replace, ..Selection::default() }, &[(0, 0); 3]);
    let apart = Selection { prefix_by_source: true, ..Selection::default() };
    let prefixes: Vec<String> =
        units(&[&at("[abc]*")], &apart).unwrap().0.sources.iter().map(|source| display(&source.prefix)).collect();
    assert_eq!(prefixes, ["a", "b.tar", "c"]);
}

/// SEMANTICS: "The content decides whether a file is a tar; content and name (`.zip`, `.whl`, `.egg`, `.jar`, `.cbz`) decide
/// whether it is a zip, because many other files, such as `.npz` and `.pt`, are also zips inside, and those are samples. A file
/// that has an archive's name but not its content is an error, not a sample. A compressed file that holds no tar stays as it is."
/// SEMANTICS: "The last part of a split zip is an error, which says how to join the parts."
#[test]
fn contents_decide_the_format_and_an_archive_name_without_an_archive_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("file"), "x").unwrap();
    let tar =
        crate::programs::program("tar").args(["-cf"]).arg(at("strange.jpg")).arg("-C").arg(folder.path()).arg("file").status();
    assert!(tar.unwrap().success());
    fs::write(at("false.tar"), "no tar at all").unwrap();
    fs::write(at("image.raw"), [0; 4096]).unwrap();
    fs::write(at("empty.tar"), [0; 10240]).unwrap();
    fs::write(at("data.gz"), crate::source::compressed::tests::compress(Compression::Gzip, b"no tar")).unwrap();
    fs::write(at("broken.gz"), [0x1f, 0x8b, 8, 0, 1, 2, 3]).unwrap();
    let kinds = |name: &str| units(&[&at(name)], &Selection::default()).map(|(plan, _)| plan.sources[0].kind);
    assert_eq!(kinds("strange.jpg").unwrap(), SourceKind::Tar);
    assert_eq!(kinds("file").unwrap(), SourceKind::File);
    assert_eq!(kinds("data.gz").unwrap(), SourceKind::File);
    assert_eq!(kinds("image.raw").unwrap(), SourceKind::File);
    assert_eq!(kinds("empty.tar").unwrap(), SourceKind::Tar);
    assert!(matches!(kinds("false.tar"), Err(StageInError::NotAnArchive { .. })));
    assert!(matches!(kinds("broken.gz"), Err(StageInError::Damaged { .. })));
    // The last part of a split zip begins anywhere. Its end record names the part's number, from 0.
    let end = *b"PK\x05\x06\x02\0\x02\0\x01\0\x01\0\x2e\0\0\0\0\0\0\0\0\0";
    fs::write(at("split.zip"), [&[7; 600][..], &end].concat()).unwrap();
    let split = kinds("split.zip").unwrap_err();
    assert!(matches!(split, StageInError::SplitZip { .. }) && split.to_string().contains("join the parts"), "{split}");
    fs::write(at("other.zip"), [&[7; 600][..], &end[..20]].concat()).unwrap();
    assert!(matches!(kinds("other.zip"), Err(StageInError::NotAnArchive { .. })));
    let whole = Selection { no_unpack: true, ..Selection::default() };
    for name in ["strange.jpg", "data.gz", "broken.gz"] {
        assert_eq!(paths(&units(&[&at(name)], &whole).unwrap().1), [name], "with --no-unpack");
    }
}

/// SEMANTICS: "A decoder takes at most 256 MiB of memory, or what `--decoder-memory` says, and less within an archive. If the window with
/// which something was compressed needs more, the error says that, and does not call the archive damaged."
#[test]
fn windows_that_are_too_large_are_not_called_damage() {
    let folder = tempfile::tempdir().unwrap();
    let zstd = |window_log| {
        let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
        encoder.window_log(window_log).unwrap();
        encoder.write_all(&[0; 10_000]).unwrap();
        encoder.finish().unwrap()
    };
    // The header of the first block has the dictionary's size in its last byte before the padding.
    let xz = |dictionary: u8| {
        let mut encoder = liblzma::write::XzEncoder::new(Vec::new(), 0);
        encoder.write_all(&[0; 10_000]).unwrap();
        let mut bytes = encoder.finish().unwrap();
        assert_eq!(bytes[14..16], [0x21, 1]);
        let end = 12 + usize::from(bytes[12]) * 4;
        bytes[16] = dictionary;
        let checksum = crc32fast::hash(&bytes[12..end]);
        bytes[end..end + 4].copy_from_slice(&checksum.to_le_bytes());
        bytes
    };
    let path = folder.path().join("a.tar.x");
    // The memory that is enough, and what the error says if it is less.
    for (bytes, enough, advised) in [
        (zstd(28), 256 << 20, "256MiB"),
        (zstd(29), 512 << 20, "512MiB"),
        (zstd(31), 2 << 30, "2048MiB"),
        (xz(30), 128 << 20, "128MiB"),
        (xz(35), 768 << 20, "1024MiB"),
        (xz(39), 3 << 30, "4096MiB"),
    ] {
        fs::write(&path, bytes).unwrap();
        for memory in [None, Some(16 << 20), Some(enough - (2 << 20)), Some(enough), Some(4 << 30)] {
            let is_fine = memory.unwrap_or(256 << 20) >= enough;
            match units(&[&path], &Selection { decoder_memory: memory, ..Selection::default() }) {
                Ok(_) => assert!(is_fine, "{advised} with {memory:?}"),
                Err(error) => {
                    assert!(
                        !is_fine && matches!(error, StageInError::WindowTooLarge { .. }),
                        "{advised} with {memory:?}: {error}"
                    );
                    assert!(error.to_string().contains(&format!("with --decoder-memory {advised}, or")), "{error}");
                }
            }
        }
    }
    // No memory is enough for this one.
    fs::write(&path, [&[0x28, 0xb5, 0x2f, 0xfd, 0, 0xff][..], &[0; 64]].concat()).unwrap();
    let error = units(&[&path], &Selection { decoder_memory: Some(4 << 30), ..Selection::default() }).err().unwrap().to_string();
    assert!(!error.contains("--decoder-memory") && !error.contains("damaged"), "{error}");
}

#[test]
fn a_plan_tells_what_its_sources_unpack_to_at_most() {
    let folder = tempfile::tempdir().unwrap();
    let script = "mkdir t; head -c 3000 /dev/zero > t/a.jpg; head -c 500 /dev/zero > t/b.txt; ln -s b.txt t/link
        tar -cf t.tar t; gzip -k t.tar; cd t; zip -q -y ../stored.zip -0 -r . ; zip -q ../deflated.zip -9 -r .";
    let done = crate::programs::program("bash").args(["-ec", script]).current_dir(folder.path()).status().unwrap();
    assert!(done.success());
    let at = |name: &str| folder.path().join(name);
    let len = |name: &str| at(name).metadata().unwrap().len();
    let sizes = |name: &str, selection: &Selection| units(&[&at(name)], selection).unwrap().0.sizes;
    let readable = |readable_bytes_max, zip_members| UnpackedSizes { readable_bytes_max, zip_members, compressed_bytes: 0 };
    let all = Selection::default();
    assert_eq!(sizes("t", &all), readable(3500, 0));
    assert_eq!(sizes("t/a.jpg", &all), readable(3000, 0));
    assert_eq!(sizes("t.tar", &all), readable(len("t.tar"), 0));
    assert_eq!(sizes("t.tar.gz", &all), UnpackedSizes { compressed_bytes: len("t.tar.gz"), ..UnpackedSizes::default() });
    // A symlink's data is its target.
    assert_eq!(sizes("stored.zip", &all), readable(3500 + 5, 3));
    // Without -y, zip follows the link.
    assert_eq!(sizes("deflated.zip", &all), readable(3500 + 500, 3));
    for (include, exclude, expected) in [(vec!["*.jpg"], vec![], 3000), (vec![], vec!["*.jpg"], 505), (vec!["x"], vec![], 0)] {
        let own = |patterns: Vec<&str>| patterns.into_iter().map(str::to_owned).collect();
        let selection = Selection { include: own(include), exclude: own(exclude), ..Selection::default() };
        assert_eq!(sizes("stored.zip", &selection).readable_bytes_max, expected, "{selection:?}");
        assert_eq!(sizes("t", &selection).readable_bytes_max, expected.min(3000) / 100 * 100, "{selection:?}");
    }
    let both = units(&[&at("t"), &at("t.tar"), &at("stored.zip")], &all).unwrap().0.sizes;
    assert_eq!(both, readable(3500 + len("t.tar") + 3505, 3));
}

#[test]
fn sums_of_sizes_do_not_overflow() {
    let folder = tempfile::tempdir().unwrap();
    let mut sizes = UnpackedSizes::default();
    for _ in 0..3 {
        sizes.add_readable(u64::MAX / 2);
        sizes.add_compressed(u64::MAX / 2);
    }
    assert_eq!((sizes.readable_bytes_max, sizes.compressed_bytes), (u64::MAX, u64::MAX));
    // A zip whose member claims 2^62 - 1 bytes.
    let script = "import zipfile
z = zipfile.ZipFile('a.zip', 'w'); z.writestr('x', b'1'); z.filelist[0].file_size = z.filelist[0].compress_size = 2**62 - 1; z.close()";
    let done = crate::programs::program("python3").args(["-c", script]).current_dir(folder.path()).status().unwrap();
    assert!(done.success());
    let (plan, _) = units(&[folder.path().join("a.zip").as_path(); 5], &Selection::default()).unwrap();
    assert_eq!(plan.sizes.readable_bytes_max, u64::MAX);
}
