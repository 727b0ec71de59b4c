//! The catalog, a dataset's immutable index of names, sizes, owners and origins. Every node has a
//! complete copy.
//!
//! A stage-in writes the [`Member`]s that it finds into sorted runs. [`resolve`] decides what each
//! path becomes, [`CatalogBuilder`] streams the result into a file, and [`Catalog`] maps and reads
//! that file without trusting it. `docs/FORMATS.md` describes the layout.
//!
//! Invariants: a catalog never changes once it is published, so it can be mapped into every process
//! and read without locks. A damaged catalog gives `None` or an error, never a fault or an endless
//! walk. A catalog does not know where on a node a block lies; that is in the [locations
//! table](crate::locations).

mod build;
mod check;
pub(crate) mod layout;
mod map;
pub mod member;
pub mod resolve;
mod scratch;

pub use build::{About, BuildError, Built, CatalogBuilder, Scratch};
pub use layout::{Compression, EntryKind, Grouping, Place, Source, SourceKind, Version};
pub use map::{Attributes, Catalog, CatalogError, Entry, EntryId, Header, Origin, block_len};
pub use member::{Member, MemberKey, MemberKind, NOT_STORED, NOT_STORED_MIN, StoredBlock};

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs::File;
    use std::io;
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::chunk::Chunk;
    use crate::id::{BlockId, NodeId, SampleId};
    use crate::limits::{BLOCK_SIZE_MAX, CHUNK_LEN};
    use crate::path::walk_order;

    fn scratch() -> io::Result<File> {
        tempfile::tempfile()
    }

    fn member(path: &[u8], number: u64, kind: MemberKind) -> Member {
        let key = MemberKey { source: 0, offset: number };
        Member { path: path.to_vec(), key, ticket: 0, mode: 0o640, mtime_s: 1_000 + number as i64, mtime_ns: 7, kind }
    }

    fn file(path: &[u8], number: u64, size: u64) -> Member {
        let block = |part| StoredBlock { owner: NodeId((part % 4) as u16), arrival: part as u32 + 7 };
        let blocks = (0..size.div_ceil(BLOCK_SIZE_MAX)).map(block).collect();
        let checksums = (0..size.div_ceil(CHUNK_LEN)).map(|chunk| (number * 100 + chunk) as u32).collect();
        member(path, number, MemberKind::File { size, place: Place::Bytes { offset: number }, blocks, checksums })
    }

    fn source() -> Source {
        let (path, prefix) = (b"/pfs/a.tar".to_vec(), b"x/y".to_vec());
        Source { path, prefix, kind: SourceKind::Tar, compression: Compression::Gzip, version: VERSION, inode: 77 }
    }

    const VERSION: Version = Version { size: 1 << 40, mtime_s: -3, mtime_ns: 4, ctime_s: 5, ctime_ns: 6 };

    fn build(members: &[(Member, u32)]) -> Built {
        build_from(&[source()], members).unwrap()
    }

    fn build_from(sources: &[Source], members: &[(Member, u32)]) -> Result<Built, BuildError> {
        let mut sorted: Vec<_> = members.iter().collect();
        sorted.sort_by(|left, right| walk_order(&left.0.path, &right.0.path));
        let about = About { seed: 5, created_s: 99, capacities: vec![9, 8, 7, 6], ..About::default() };
        let mut builder = CatalogBuilder::new(&scratch, about, sources)?;
        for (member, names) in sorted {
            builder.add(&member.path, member, *names)?;
        }
        builder.finish(&|| {})
    }

    fn list(catalog: &Catalog, directory: &[u8]) -> Vec<String> {
        let directory = catalog.find(directory).unwrap();
        catalog.children(&directory, None).map(|entry| String::from_utf8_lossy(entry.name).into_owned()).collect()
    }

    #[test]
    fn added_members_are_found_listed_and_read_back() {
        let built = build(&[
            (file(b"a/b/one", 1, 5), 1),
            (file(b"a/b/large", 2, 2 * BLOCK_SIZE_MAX + 1), 1),
            (file(b"a/empty", 3, 0), 1),
            (file(b"a.first", 4, 1), 2),
            (Member { path: b"z".to_vec(), ..file(b"a.first", 4, 1) }, 2),
            (member(b"link", 5, MemberKind::Symlink(b"a/b".to_vec())), 1),
            (member(b"a", 6, MemberKind::Directory), 1),
        ]);
        let catalog = Catalog::open(&built.file).unwrap();
        catalog.check(4).unwrap();
        assert_eq!(catalog.file_checksum(), built.checksum);
        assert_eq!((built.samples, built.others), (4, 4));
        assert_eq!(list(&catalog, b""), ["a", "a.first", "link", "z"]);
        assert_eq!(list(&catalog, b"a"), ["b", "empty"]);
        assert_eq!(list(&catalog, b"a/b"), ["large", "one"]);
        for missing in ["b", "a/b/on", "a/b/one/x", "x/one", "/a", "a/"] {
            assert!(catalog.find(missing.as_bytes()).is_none(), "{missing}");
        }
        let large = catalog.find(b"a/b/large").unwrap();
        assert_eq!(catalog.path(&large), b"a/b/large");
        assert_eq!(catalog.attributes(&large).unwrap().size, 2 * BLOCK_SIZE_MAX + 1);
        let (_, blocks) = catalog.sample(large.sample().unwrap()).unwrap();
        let lens: Vec<u64> = blocks.clone().map(|block| catalog.block(BlockId(block)).unwrap().1).collect();
        assert_eq!(lens, [BLOCK_SIZE_MAX, BLOCK_SIZE_MAX, 1]);
        assert!(blocks.clone().all(|block| catalog.block(BlockId(block)).unwrap().0 == large.sample().unwrap()));
        let chunk = |part, index| catalog.chunk_checksum(Chunk { block: BlockId(blocks.start + part), index });
        assert_eq!((chunk(0, 0), chunk(0, 15), chunk(0, 16)), (Some(200), Some(215), None));
        assert_eq!((chunk(1, 0), chunk(2, 0), chunk(2, 1)), (Some(216), Some(232), None));
        assert_eq!(catalog.checksum(BlockId(blocks.start + 2)), Some(232));
        assert_eq!(catalog.owner(BlockId(blocks.start + 1)), Some(NodeId(1)));
        assert_eq!(catalog.arrival(BlockId(blocks.start + 1)), Some(8));
        assert_eq!(catalog.block(BlockId(catalog.header().blocks)), None);
        let (first, last) = (catalog.find(b"a.first").unwrap(), catalog.find(b"z").unwrap());
        assert_eq!((first.sample(), catalog.attributes(&last).unwrap().links), (last.sample(), 2));
        assert_eq!(catalog.origin(first.sample().unwrap()), Some(Origin { source: 0, place: Place::Bytes { offset: 4 } }));
        assert_eq!((catalog.source(0), catalog.source(1)), (Some(source()), None));
        assert_eq!(catalog.capacities().collect::<Vec<_>>(), [9, 8, 7, 6]);
        let link = catalog.find(b"link").unwrap();
        assert_eq!(catalog.symlink_target(&link), Some(&b"a/b"[..]));
        let directory = catalog.attributes(&catalog.find(b"a").unwrap()).unwrap();
        assert_eq!((directory.links, directory.mtime_s, directory.mode), (3, 1006, 0o640));
        assert_eq!(catalog.attributes(&catalog.find(b"a/b").unwrap()).unwrap().mtime_s, 99);
        assert_eq!(catalog.sample(SampleId(4)), None);
    }

    fn source_of(kind: SourceKind, prefix: &[u8]) -> Source {
        let (path, prefix, compression) = (b"/pfs/source".to_vec(), prefix.to_vec(), Compression::None);
        Source { path, prefix, kind, compression, version: Version { size: 1000, ..VERSION }, inode: 1 }
    }

    /// Builds a catalog from one file of `size` bytes that lies at `place` and has the given names in the dataset.
    fn build_one(source: Source, path: &[u8], size: u64, place: Place, names: &[&[u8]]) -> Result<Built, BuildError> {
        let mut member = file(path, 1, size);
        if let MemberKind::File { place: at, .. } = &mut member.kind {
            *at = place;
        }
        let about = About { capacities: vec![1; 4], ..About::default() };
        let mut builder = CatalogBuilder::new(&scratch, about, &[source])?;
        names.iter().try_for_each(|name| builder.add(name, &member, names.len() as u32))?;
        builder.finish(&|| {})
    }

    #[test]
    fn a_sample_leads_to_its_path_in_the_source_and_to_the_path_it_was_placed_under() {
        use SourceKind::{Directory, File, Tar};
        let bytes = Place::Bytes { offset: 0 };
        let check = |source: Source, path: &str, place: Place, names: &[&str], expect: Option<&str>| {
            let names: Vec<&[u8]> = names.iter().map(|name| name.as_bytes()).collect();
            let catalog = Catalog::open(&build_one(source, path.as_bytes(), 1000, place, &names).unwrap().file).unwrap();
            catalog.check(4).unwrap();
            assert_eq!(catalog.placed_path(SampleId(0)).unwrap(), path.as_bytes());
            assert_eq!(catalog.path(&catalog.entry_of(SampleId(0)).unwrap()), names[0]);
            let found = catalog.path_in_source(SampleId(0)).map(|path| String::from_utf8(path).unwrap());
            assert_eq!(found.as_deref(), expect, "{path}");
            assert_eq!((catalog.placed_path(SampleId(1)), catalog.path_in_source(SampleId(1))), (None, None));
        };
        check(source_of(Directory, b""), "a/b", Place::Tree, &["a/b"], Some("a/b"));
        check(source_of(Directory, b"p/q"), "p/q/a/b", Place::Tree, &["p/q/a/b"], Some("a/b"));
        // A hard link sorts first, or a later member took the path of the file itself.
        check(source_of(Directory, b"p"), "p/x", Place::Tree, &["a", "p/x"], Some("x"));
        check(source_of(Directory, b"p"), "p/x", Place::Tree, &["z"], Some("x"));
        check(source_of(File, b"name"), "name", Place::Tree, &["name"], Some(""));
        check(source_of(File, b"name"), "name", Place::Tree, &["a", "b"], Some(""));
        check(source_of(Tar, b""), "x", bytes, &["a", "x"], None);
    }

    #[test]
    fn an_impossible_origin_is_found_by_the_check() {
        use SourceKind::{Directory, File, Tar, Zip};
        let check = |kind, compression, prefix: &str, path: &str, place, is_good| {
            let source = Source { compression, ..source_of(kind, prefix.as_bytes()) };
            let built = build_one(source, path.as_bytes(), 900, place, &[b"a/x"]).unwrap();
            let checked = Catalog::open(&built.file).unwrap().check(4);
            assert_eq!(checked.is_ok(), is_good, "{kind:?} '{prefix}' '{path}' {place:?}: {checked:?}");
        };
        let none = Compression::None;
        check(Tar, none, "", "a/x", Place::Bytes { offset: 100 }, true);
        check(Tar, none, "", "a/x", Place::Bytes { offset: 101 }, false);
        check(Tar, Compression::Zstd, "", "a/x", Place::Bytes { offset: 101 }, true);
        check(Tar, none, "", "a/x", Place::SparseTar { offset: 900, len: 100 }, true);
        check(Tar, none, "", "a/x", Place::SparseTar { offset: 900, len: 101 }, false);
        check(Zip, none, "", "a/x", Place::ZipRecord { offset: 0, len: 1001 }, false);
        check(Zip, none, "", "a/x", Place::Nested { offset: (1 << 61) - 1, len: 1 }, false);
        for (kind, place) in [
            (Zip, Place::Bytes { offset: 0 }),
            (Zip, Place::SparseTar { offset: 0, len: 1 }),
            (Tar, Place::ZipRecord { offset: 0, len: 1 }),
            (Tar, Place::Tree),
            (Directory, Place::Bytes { offset: 0 }),
            (Directory, Place::Nested { offset: 0, len: 1 }),
        ] {
            check(kind, none, "", "a/x", place, false);
        }
        check(File, none, "a/x", "a/x", Place::Tree, false);
        for (path, is_good) in [
            ("a/x", true),
            ("a/y/z", true),
            ("a", false),
            ("ab/x", false),
            ("a/../../etc/passwd", false),
            ("a/./x", false),
            ("a//x", false),
            ("a/x\0y", false),
            ("/a/x", false),
        ] {
            check(Directory, none, "a", path, Place::Tree, is_good);
        }
        check(Directory, none, "..", "../x", Place::Tree, false);
        let impossible = build_one(source_of(Tar, b""), b"a", 1, Place::Bytes { offset: 1 << 61 }, &[b"a"]);
        assert!(matches!(impossible, Err(BuildError::Place(path)) if path == "a"));
    }

    #[test]
    fn every_block_has_an_owner_but_not_every_block_is_stored() {
        let mut member = file(b"a", 1, 5);
        for (owner, arrival, is_good) in
            [(3, 0, true), (3, NOT_STORED_MIN, true), (3, NOT_STORED, true), (4, 0, false), (u16::MAX, 0, false)]
        {
            if let MemberKind::File { blocks, .. } = &mut member.kind {
                blocks[0] = StoredBlock { owner: NodeId(owner), arrival };
            }
            let catalog = Catalog::open(&build(&[(member.clone(), 1)]).file).unwrap();
            assert_eq!(catalog.check(4).is_ok(), is_good, "{owner}");
            assert_eq!(catalog.is_stored(BlockId(0)), arrival < NOT_STORED_MIN);
        }
    }

    #[test]
    fn many_paths_are_all_found() {
        let paths: BTreeMap<String, u64> =
            (0..20_000).map(|number| (format!("c{}/{}.jpg", number % 97, number), number)).collect();
        let built = build(&paths.iter().map(|(path, &number)| (file(path.as_bytes(), number, number), 1)).collect::<Vec<_>>());
        let catalog = Catalog::open(&built.file).unwrap();
        catalog.check(4).unwrap();
        for (path, &size) in &paths {
            let entry = catalog.find(path.as_bytes()).unwrap();
            assert_eq!(catalog.attributes(&entry).unwrap().size, size);
        }
        let beside_names = built.len - paths.keys().map(|path| path.len() as u64).sum::<u64>();
        assert!(beside_names <= 96 * 20_000, "{beside_names} bytes besides the names");
    }

    #[test]
    fn blocks_lead_back_to_their_samples() {
        let sizes = |kind: u32, number: u32| match kind {
            0 => 5,
            1 => u64::from(number.is_multiple_of(3)) * 7,
            2 => {
                if number < 150 {
                    0
                } else {
                    3 * BLOCK_SIZE_MAX + 1
                }
            }
            3 => [0, 1, BLOCK_SIZE_MAX, BLOCK_SIZE_MAX + 1][number as usize % 4],
            _ => [CHUNK_LEN, 0, CHUNK_LEN + 1, 1, CHUNK_LEN - 1][number as usize % 5],
        };
        for kind in 0..5 {
            let members: Vec<_> = (0..200)
                .map(|number| (file(format!("{number:03}").as_bytes(), u64::from(number) + 1, sizes(kind, number)), 1))
                .collect();
            let catalog = Catalog::open(&build(&members).file).unwrap();
            catalog.check(4).unwrap();
            let mut next = 0;
            for sample in (0..200).map(SampleId) {
                let (size, blocks) = catalog.sample(sample).unwrap();
                for (part, block) in (0..).zip(blocks) {
                    assert_eq!(catalog.block(BlockId(block)), Some((sample, block_len(size, part))), "kind {kind}");
                    assert_eq!(block, next);
                    next += 1;
                    let chunks = Chunk::all(BlockId(block), block_len(size, part)).count() as u16;
                    for index in 0..=chunks {
                        let within = u64::from(part) * (BLOCK_SIZE_MAX / CHUNK_LEN) + u64::from(index);
                        let expected = (index < chunks).then(|| (u64::from(sample.0 + 1) * 100 + within) as u32);
                        assert_eq!(catalog.chunk_checksum(Chunk { block: BlockId(block), index }), expected, "kind {kind}");
                    }
                }
            }
            assert_eq!(catalog.block(BlockId(next)), None);
        }
    }

    #[test]
    fn an_empty_dataset_has_a_root() {
        let catalog = Catalog::open(&build(&[]).file).unwrap();
        catalog.check(4).unwrap();
        assert!(catalog.check(3).is_err() && catalog.check(5).is_err(), "every node has one capacity");
        assert_eq!(list(&catalog, b""), Vec::<String>::new());
    }

    /// Reads everything that a client could ask for. No read may panic.
    fn read_all(catalog: &Catalog) {
        for id in 0..=catalog.header().entries.min(100) {
            let Some(entry) = catalog.entry(EntryId(id)) else { continue };
            let path = catalog.path(&entry);
            catalog.find(&path);
            catalog.attributes(&entry);
            catalog.symlink_target(&entry);
            catalog.children(&entry, None).take(100).for_each(drop);
            if let Some((_, blocks)) = entry.sample().and_then(|sample| catalog.sample(sample)) {
                blocks.take(10).map(BlockId).for_each(|block| {
                    assert!(catalog.block(block).is_none() || catalog.owner(block).is_some());
                    let _ = (catalog.checksum(block), catalog.chunk_checksum(Chunk { block, index: u16::MAX }));
                });
            }
            if let Some(sample) = entry.sample() {
                let _ = (catalog.origin(sample), catalog.entry_of(sample));
                let _ = (catalog.placed_path(sample), catalog.path_in_source(sample));
            }
            let _ = (catalog.source(entry.node), catalog.capacities().count());
        }
    }

    #[test]
    fn damage_is_detected_and_never_faults() {
        let members = [
            (file(b"a/one", 1, 5), 1),
            (file(b"a/two", 2, 2 * BLOCK_SIZE_MAX), 1),
            (member(b"link", 3, MemberKind::Symlink(b"a".to_vec())), 1),
        ];
        let (directory, names) = (source_of(SourceKind::Directory, b"p"), [&b"b"[..], b"p/x"]);
        for built in [build(&members), build_one(directory, b"p/x", 5, Place::Tree, &names).unwrap()] {
            let mut bytes = vec![0; built.len as usize];
            built.file.read_exact_at(&mut bytes, 0).unwrap();
            let try_bytes = |bytes: &[u8]| {
                let file = scratch().unwrap();
                file.write_all_at(bytes, 0).unwrap();
                let Ok(catalog) = Catalog::open(&file) else { return true };
                read_all(&catalog);
                catalog.check(4).is_err() || catalog.file_checksum() != built.checksum
            };
            assert!(!try_bytes(&bytes));
            for len in [0, 8, 31, 32, 100, 4095, 4096, bytes.len() - 1] {
                assert!(try_bytes(&bytes[..len]), "cut to {len}");
            }
            for at in (0..bytes.len()).filter(|&at| at < 400 || bytes[at] != 0) {
                for flip in [0xff, 1, 0x80] {
                    let mut damaged = bytes.clone();
                    damaged[at] ^= flip;
                    let unchecked = (16 + 4..24).contains(&at);
                    assert!(unchecked || try_bytes(&damaged), "byte {at} flipped by {flip:#x}");
                }
            }
        }
    }
}
