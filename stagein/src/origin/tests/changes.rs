//! Tests of sources that changed after the stage-in, and of file systems that fail.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::LazyLock;

use nix::errno::Errno;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::source::plain::version_of;

/// A zip with the file of the other kinds of sources. Starting Python takes longer than each of the tests.
static ZIP: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let write = "import zipfile; z = zipfile.ZipFile('a.zip', 'w', 8); z.write('file', 'sub/file'); z.close()";
    shell(folder.path(), &format!("seq 3000 > file; python3 -c \"{write}\""));
    fs::read(folder.path().join("a.zip")).unwrap()
});

/// A folder with the same file in each kind of source.
fn sources() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    shell(
        folder.path(),
        "mkdir tree tree/sub; seq 3000 > tree/sub/file; truncate -s 1M tree/holes; echo end >> tree/holes; cp tree/sub/file single
         tar -cSf a.tar tree",
    );
    fs::write(folder.path().join("a.zip"), &*ZIP).unwrap();
    folder
}

/// Every kind of source, with the file that a sample lies in, and the path of the sample.
const KINDS: [(&str, &str, &str); 5] = [
    ("a.tar", "a.tar", "tree/sub/file"),
    ("a.tar", "a.tar", "tree/holes"),
    ("a.zip", "a.zip", "sub/file"),
    ("tree", "tree/sub/file", "sub/file"),
    ("single", "single", "single"),
];

/// Changes a file until the file system's clock, which advances in steps, shows the change.
fn until_time_changes(path: &Path, change: &dyn Fn()) {
    let before = fs::metadata(path).unwrap();
    loop {
        change();
        let after = fs::metadata(path);
        if after.map_or(true, |after| (after.ctime(), after.ctime_nsec()) != (before.ctime(), before.ctime_nsec())) {
            return;
        }
    }
}

#[test]
fn a_source_that_changed_is_an_error_that_names_it_also_under_a_kept_descriptor() {
    // For each change, whether the source is then missing, and whether it is noticed by size and time, or by the inode, which a
    // tree does not compare.
    for (change, is_missing, is_noticed, inode_is_noticed) in [
        ("truncate -s -1 F", false, true, true),
        ("truncate -s 0 F", false, true, true),
        ("echo more >> F", false, true, true),
        ("touch F", false, true, true),
        ("touch -d '2001-01-01 UTC' F", false, true, true),
        ("cp F new; mv new F", false, true, true),
        ("cp -p F new; mv new F", false, false, true),
        ("chmod 600 F; chmod 640 F", false, false, false),
        ("ln -f F other; mv F F.old; mv F.old F", false, false, false),
        ("rm F", true, true, true),
        ("mv F F.old; mkfifo F", false, true, true),
        ("mv F F.old; mkdir F", false, true, true),
        ("mv F F.old; ln -s /dev/zero F", false, true, true),
        ("mv F F.old; ln -s nothing F", true, true, true),
    ] {
        for keeps_descriptor in [false, true] {
            for (source, file, path) in KINDS {
                let folder = sources();
                let dataset = Dataset::stage_in(&[&folder.path().join(source)], &Selection::default());
                let (sample, expected) = &dataset.samples[path];
                let reader = OriginReader::new(2);
                if keeps_descriptor {
                    assert!(dataset.read(&reader, *sample).unwrap() == *expected);
                }
                let script = change.replace('F', file);
                until_time_changes(&folder.path().join(file), &|| shell(folder.path(), &script));
                let what = format!("{script}, keeps: {keeps_descriptor}");
                let is_tree = source == "tree";
                match dataset.read(&reader, *sample) {
                    Ok(bytes) => assert!(!is_noticed && (is_tree || !inode_is_noticed) && bytes == *expected, "{what}"),
                    Err(error) => {
                        assert!(is_noticed || !is_tree && inode_is_noticed, "{what}: {error}");
                        // A tree does not follow the symlink, so nothing is known to be missing.
                        let is_missing = is_missing && !(is_tree && script.contains("ln -s"));
                        let kind = if is_missing {
                            matches!(error, OriginError::Missing { .. })
                        } else {
                            matches!(error, OriginError::Changed { .. })
                        };
                        assert!(kind && error.to_string().contains(&format!("/{file}'")), "{what}: {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_directory_above_a_file_that_became_a_symlink_is_not_followed() {
    let folder = sources();
    let dataset = Dataset::stage_in(&[&folder.path().join("tree")], &Selection::default());
    let sample = dataset.samples["sub/file"].0;
    let reader = OriginReader::new(2);
    dataset.read(&reader, sample).unwrap();
    shell(folder.path(), "mv tree/sub elsewhere; ln -s ../elsewhere tree/sub");
    assert!(matches!(dataset.read(&reader, sample), Err(OriginError::Changed { .. })));
    // The whole tree may move, as long as its path leads to it.
    shell(folder.path(), "rm tree/sub; mv elsewhere tree/sub; mv tree moved; ln -s moved tree");
    dataset.read(&reader, sample).unwrap();
    dataset.read(&OriginReader::new(2), sample).unwrap();
}

#[test]
fn a_tree_that_was_replaced_by_an_equal_one_is_found_behind_a_kept_descriptor() {
    let folder = sources();
    let dataset = Dataset::stage_in(&[&folder.path().join("tree")], &Selection::default());
    let (sample, expected) = &dataset.samples["sub/file"];
    let reader = OriginReader::new(2);
    dataset.read(&reader, *sample).unwrap();
    shell(folder.path(), "cp -a tree new; rm -r tree; mv new tree");
    assert!(dataset.read(&reader, *sample).unwrap() == *expected);
}

#[test]
fn faults_of_the_file_system_are_reported_and_do_not_last() {
    for (source, _, path) in KINDS {
        let folder = sources();
        let dataset = Dataset::stage_in(&[&folder.path().join(source)], &Selection::default());
        let (sample, expected) = &dataset.samples[path];
        let faults: Arc<Mutex<Vec<Errno>>> = Arc::default();
        let next = faults.clone();
        let is_read = |call| matches!(call, SourceCall::Read { .. });
        let files = faulty(move |call| is_read(call).then(|| next.lock().unwrap().pop().map(SourceFault::Fail)).flatten());
        let reader = OriginReader::with_files(files, 2);
        let inject = |errors: &[Errno]| faults.lock().unwrap().extend_from_slice(errors);
        for round in 0..2 {
            inject(&[Errno::ESTALE]);
            assert!(dataset.read(&reader, *sample).unwrap() == *expected, "{source}: a stale descriptor is opened again");
            inject(&[Errno::EINTR]);
            assert!(dataset.read(&reader, *sample).unwrap() == *expected, "{source}: an interrupted read goes on");
            for errors in [&[Errno::EIO][..], &[Errno::ESTALE, Errno::ESTALE]] {
                inject(errors);
                let error = dataset.read(&reader, *sample).unwrap_err();
                assert!(matches!(error, OriginError::Io { .. }) && error.to_string().contains(source), "{round}: {error}");
            }
            assert!(faults.lock().unwrap().is_empty(), "nothing is tried more than twice");
        }
    }
}

#[test]
fn short_reads_go_on_and_an_early_end_is_an_error() {
    for (source, _, path) in KINDS {
        let folder = sources();
        let dataset = Dataset::stage_in(&[&folder.path().join(source)], &Selection::default());
        let (sample, expected) = &dataset.samples[path];
        let files = faulty(|_| Some(SourceFault::Short(777)));
        assert!(dataset.read(&OriginReader::with_files(files, 2), *sample).unwrap() == *expected, "{source}");
        let files = faulty(|call| matches!(call, SourceCall::Read { .. }).then_some(SourceFault::Truncated(600)));
        let error = dataset.read(&OriginReader::with_files(files.clone(), 2), *sample).unwrap_err();
        assert!(matches!(error, OriginError::ShortRead { .. }) && error.to_string().contains(source), "{error}");
        let mut bytes = [vec![0; expected.len()], vec![0; expected.len()]];
        let mut wanted: Vec<_> = bytes.iter_mut().map(|bytes| WantedBytes { sample: *sample, start: 0, bytes }).collect();
        let reader = OriginReader::with_files(files.clone(), 2);
        for result in reader.read_many(&dataset.catalog, &mut wanted) {
            assert!(matches!(result, Err(OriginError::ShortRead { .. })), "{source}: every sample of a failed read fails");
        }
    }
}

/// Whatever happens to an archive, a sample's bytes are either right or recognized as wrong. To get past the version, the
/// catalog gets the version of the damaged archive.
#[test]
fn damage_gives_an_error_and_never_other_bytes() {
    for (source, _, path) in KINDS {
        let folder = sources();
        let file = folder.path().join(KINDS.iter().find(|kind| kind.0 == source && kind.2 == path).unwrap().1);
        let dataset = Dataset::stage_in(&[&folder.path().join(source)], &Selection::default());
        let (sample, expected) = &dataset.samples[path];
        let intact = fs::read(&file).unwrap();
        let place = dataset.catalog.origin(*sample).unwrap().place;
        let start = match place {
            Place::Bytes { offset } | Place::SparseTar { offset, .. } | Place::ZipRecord { offset, .. } => offset as usize,
            _ => 0,
        };
        let mut random = StdRng::seed_from_u64(7);
        let mut errors = 0;
        for round in 0..150 {
            let mut bytes = intact.clone();
            for _ in 0..random.random_range(1..4) {
                // Most faults are in the headers.
                let at = start + random.random_range(0..if round % 3 == 0 { 3000 } else { 600 }.min(bytes.len() - start));
                match random.random_range(0..4) {
                    0 => bytes[at] ^= 1 << random.random_range(0..8),
                    1 => bytes[at] = [0, 0xff, b'0', b'7'][random.random_range(0..4)],
                    2 => {
                        let len = random.random_range(0..64).min(bytes.len() - at);
                        bytes[at..at + len].fill([0, 0xff, b'7'][random.random_range(0..3)]);
                    }
                    _ => bytes[at..].rotate_left(1),
                }
            }
            fs::File::options().write(true).open(&file).unwrap().write_all_at(&bytes, 0).unwrap();
            let damaged = with_current_versions(&dataset, &file);
            let reader = OriginReader::new(1);
            match damaged.read(&reader, *sample) {
                Ok(read) => assert!(read == *expected, "{source}, round {round}: wrong bytes"),
                Err(OriginError::Damaged { path, .. }) => {
                    assert!(path == file);
                    errors += 1;
                }
                Err(error) => panic!("{source}, round {round}: {error}"),
            }
            let mut many = vec![0; expected.len()];
            let mut wanted = [WantedBytes { sample: *sample, start: 0, bytes: &mut many }];
            let _ = reader.read_many(&damaged.catalog, &mut wanted);
        }
        assert!(errors > 50, "{source}: {errors} errors");
    }
}

/// Returns the same dataset with a catalog that knows the current version of its source.
fn with_current_versions(dataset: &Dataset, file: &Path) -> Dataset {
    let catalog = &dataset.catalog;
    let metadata = fs::metadata(file).unwrap();
    let mut sources: Vec<Source> = (0..catalog.header().sources).map(|number| catalog.source(number).unwrap()).collect();
    for source in sources.iter_mut().filter(|source| source.inode != 0) {
        (source.version, source.inode) = (version_of(&metadata), metadata.ino());
    }
    let mut builder =
        CatalogBuilder::new(&tempfile::tempfile, About { capacities: vec![1; 3], ..About::default() }, &sources).unwrap();
    for id in 0..catalog.header().entries {
        let entry = catalog.entry(EntryId(id)).unwrap();
        let Some(sample) = entry.sample() else { continue };
        let origin = catalog.origin(sample).unwrap();
        let (size, blocks) = catalog.sample(sample).unwrap();
        let chunks = |block| Chunk::all(BlockId(block), catalog.block(BlockId(block)).unwrap().1);
        let kind = dayfly_meta::catalog::MemberKind::File {
            size,
            place: origin.place,
            checksums: blocks.clone().flat_map(chunks).map(|chunk| catalog.chunk_checksum(chunk).unwrap()).collect(),
            blocks: blocks
                .map(|_| dayfly_meta::catalog::StoredBlock {
                    owner: dayfly_meta::id::NodeId(0),
                    arrival: dayfly_meta::catalog::NOT_STORED,
                })
                .collect(),
        };
        let key = dayfly_meta::catalog::MemberKey { source: origin.source, offset: u64::from(id) };
        let path = catalog.path(&entry);
        let (mtime_s, mtime_ns) = (metadata.mtime(), metadata.mtime_nsec() as u32);
        builder.add(&path, &Member { path: path.clone(), key, ticket: 0, mode: 0, mtime_s, mtime_ns, kind }, 1).unwrap();
    }
    let catalog = Catalog::open(&builder.finish(&|| {}).unwrap().file).unwrap();
    Dataset { catalog, samples: dataset.samples.clone() }
}
