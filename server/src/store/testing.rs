//! A dataset for tests, without a session.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use dayfly_meta::catalog::member::{MemberKey, MemberKind, StoredBlock};
use dayfly_meta::catalog::{About, CatalogBuilder, Compression, Member, Place, Source, SourceKind, Version};
use dayfly_meta::checksum::checksum;
use dayfly_meta::id::{DatasetId, NodeId};
use dayfly_meta::limits::CHUNK_LEN;
use dayfly_meta::wire::control::Counts;

use super::{Dataset, Drive, NewDataset, Segments};

/// Like [`dataset_of`], with two nodes.
pub(crate) fn dataset(drives: &[Arc<Drive>], contents: &[Vec<u8>], block: impl Fn(u32) -> StoredBlock) -> Dataset {
    dataset_of(2, drives, contents, block)
}

/// Prepares a dataset, on node 0 of `nodes`, whose samples have these contents and one block each. In their source `/a.tar`, they lie
/// one after another. `block` says where each block is.
pub(crate) fn dataset_of(
    nodes: usize,
    drives: &[Arc<Drive>],
    contents: &[Vec<u8>],
    block: impl Fn(u32) -> StoredBlock,
) -> Dataset {
    dataset_at((DatasetId(1), b"d"), nodes, drives, contents, block)
}

/// Like [`dataset_of`], with this id and this target.
pub(crate) fn dataset_at(
    (id, target): (DatasetId, &[u8]),
    nodes: usize,
    drives: &[Arc<Drive>],
    contents: &[Vec<u8>],
    block: impl Fn(u32) -> StoredBlock,
) -> Dataset {
    let about = About { capacities: vec![1; nodes], ..About::default() };
    dataset_with(about, (id, target), drives, contents, block)
}

/// Like [`dataset_at`], with as many nodes as there are capacities.
pub(crate) fn dataset_with(
    about: About,
    (id, target): (DatasetId, &[u8]),
    drives: &[Arc<Drive>],
    contents: &[Vec<u8>],
    block: impl Fn(u32) -> StoredBlock,
) -> Dataset {
    let nodes = about.capacities.len();
    let source = Source {
        path: b"/a.tar".to_vec(),
        prefix: Vec::new(),
        kind: SourceKind::Tar,
        compression: Compression::None,
        version: Version { size: 1 << 40, ..Version::default() },
        inode: 0,
    };
    let mut builder = CatalogBuilder::new(&tempfile::tempfile, about, &[source]).unwrap();
    let mut offset = 512;
    for (number, bytes) in (0..).zip(contents) {
        let kind = MemberKind::File {
            size: bytes.len() as u64,
            place: Place::Bytes { offset },
            blocks: vec![block(number)],
            checksums: bytes.chunks(CHUNK_LEN as usize).map(checksum).collect(),
        };
        offset += bytes.len() as u64;
        let (path, key) = (format!("{number:04}").into_bytes(), MemberKey { source: 0, offset: number.into() });
        let member = Member { path, key, ticket: 0, mode: 0o644, mtime_s: 0, mtime_ns: 0, kind };
        builder.add(&member.path, &member, 1).unwrap();
    }
    let built = builder.finish(&|| {}).unwrap();
    let new = NewDataset {
        request: 0,
        counts: Counts::default(),
        id,
        target: target.to_vec(),
        catalog: &built.file,
        drive: &drives[0],
        checksum: built.checksum,
        room: drives[0].reserve(built.len).unwrap(),
        segments: Arc::new(Segments::create(drives, id).unwrap()),
        stored_bytes: 0,
    };
    new.prepare(NodeId(0), nodes, Some(&|_| None)).unwrap()
}
