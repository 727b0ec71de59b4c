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
pub use layout::{Compression, EntryKind, Grouping, Source, SourceKind};
pub use map::{Attributes, Catalog, CatalogError, Entry, EntryId, Header, Origin, block_len};
pub use member::{Member, MemberKey, MemberKind, StoredBlock};

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
        member(path, number, MemberKind::File { size, blocks, checksums })
    }

    fn source() -> Source {
        let (path, prefix) = (b"/pfs/a.tar".to_vec(), b"x/y".to_vec());
        Source { path, prefix, kind: SourceKind::Tar, compression: Compression::Gzip }
    }

    fn build(members: &[(Member, u32)]) -> Built {
        let mut sorted: Vec<_> = members.iter().collect();
        sorted.sort_by(|left, right| walk_order(&left.0.path, &right.0.path));
        let mut builder =
            CatalogBuilder::new(&scratch, About { seed: 5, created_s: 99, ..About::default() }, &[source()]).unwrap();
        sorted.into_iter().for_each(|(member, names)| builder.add(&member.path, member, *names).unwrap());
        builder.finish(&|| {}).unwrap()
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
        assert_eq!(catalog.origin(first.sample().unwrap()), Some(Origin { source: source(), offset: 4 }));
        let link = catalog.find(b"link").unwrap();
        assert_eq!(catalog.symlink_target(&link), Some(&b"a/b"[..]));
        let directory = catalog.attributes(&catalog.find(b"a").unwrap()).unwrap();
        assert_eq!((directory.links, directory.mtime_s, directory.mode), (3, 1006, 0o640));
        assert_eq!(catalog.attributes(&catalog.find(b"a/b").unwrap()).unwrap().mtime_s, 99);
        assert_eq!(catalog.sample(SampleId(4)), None);
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
        catalog.check(1).unwrap();
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
            entry.sample().and_then(|sample| catalog.origin(sample));
        }
    }

    #[test]
    fn damage_is_detected_and_never_faults() {
        let members = [
            (file(b"a/one", 1, 5), 1),
            (file(b"a/two", 2, 2 * BLOCK_SIZE_MAX), 1),
            (member(b"link", 3, MemberKind::Symlink(b"a".to_vec())), 1),
        ];
        let built = build(&members);
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
