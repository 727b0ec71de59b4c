//! What the catalog says about many samples at once.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;

use dayfly_meta::catalog::{Catalog, EntryId, EntryKind, Grouping};
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::{BlockId, SampleId};
use xxhash_rust::xxh3::Xxh3;

use super::NO_OWNER;

/// Separates the parts of the text that the fingerprint hashes. A change of that text changes all fingerprints, so it must change
/// this as well.
const FINGERPRINT_VERSION: &[u8] = b"dayfly fingerprint 2\0";

pub(super) fn sizes(catalog: &Catalog, samples: &[SampleId]) -> Vec<u64> {
    samples.iter().map(|&sample| catalog.sample(sample).map_or(0, |(size, _)| size)).collect()
}

/// Returns the owner of each sample. Samples without bytes are dealt to the nodes, as local shuffling does.
pub(super) fn owners(catalog: &Catalog, nodes: u16) -> Vec<u16> {
    let owner = |sample: u32| match catalog.sample(SampleId(sample)) {
        Some((0, _)) => (sample % u32::from(nodes.max(1))) as u16,
        Some((_, blocks)) => catalog.owner(BlockId(blocks.start)).map_or(NO_OWNER, |node| node.0),
        None => NO_OWNER,
    };
    (0..catalog.header().samples).map(owner).collect()
}

/// Returns for each sample 1 if all of it is on this node's drives, else 0.
pub(super) fn is_here(dataset: &dayfly_client::Dataset, samples: &[SampleId]) -> Vec<u8> {
    let is_here = |&sample: &SampleId| {
        let blocks = dataset.catalog().sample(sample).map(|(_, blocks)| blocks);
        blocks.is_some_and(|mut blocks| blocks.all(|block| dataset.is_here(BlockId(block))))
    };
    samples.iter().map(is_here).map(u8::from).collect()
}

/// Returns for each sample the index of its directory, and the directories' paths, sorted.
pub(super) fn directories(catalog: &Catalog) -> (Vec<u32>, Vec<Vec<u8>>) {
    let mut numbers: HashMap<EntryId, u32> = HashMap::new();
    let mut directories: Vec<EntryId> = Vec::new();
    let mut last = None;
    let mut indices: Vec<u32> = Vec::with_capacity(catalog.header().samples as usize);
    for sample in 0..catalog.header().samples {
        let parent = catalog.entry_of(SampleId(sample)).map_or(EntryId(0), |entry| entry.parent);
        // Neighbors in the walk usually lie in one directory.
        let number = match last {
            Some((known, number)) if known == parent => number,
            _ => match numbers.entry(parent) {
                Slot::Occupied(known) => *known.get(),
                Slot::Vacant(new) => {
                    directories.push(parent);
                    *new.insert(directories.len() as u32 - 1)
                }
            },
        };
        last = Some((parent, number));
        indices.push(number);
    }
    let path = |&directory: &EntryId| catalog.entry(directory).map_or_else(Vec::new, |entry| catalog.path(&entry));
    let mut named: Vec<(Vec<u8>, usize)> = directories.iter().map(path).enumerate().map(|(at, path)| (path, at)).collect();
    named.sort();
    let mut place = vec![0; named.len()];
    for (at, (_, number)) in named.iter().enumerate() {
        place[*number] = at as u32;
    }
    for index in &mut indices {
        *index = place[*index as usize];
    }
    (indices, named.into_iter().map(|(path, _)| path).collect())
}

/// Returns a hash of the names, sizes and checksums of all samples, and of how they are grouped, on which the order of an epoch
/// depends. It does not depend on the session or on where blocks lie.
pub(super) fn fingerprint(catalog: &Catalog) -> String {
    let mut hash = Xxh3::new();
    hash.update(FINGERPRINT_VERSION);
    hash.update(&[match catalog.header().group {
        Grouping::None => 0,
        Grouping::Stem => 1,
    }]);
    for id in 1..catalog.header().entries {
        let Some(entry) = catalog.entry(EntryId(id)) else { continue };
        let kind = match entry.kind {
            EntryKind::File => 0_u8,
            EntryKind::Directory => 1,
            EntryKind::Symlink => 2,
        };
        hash.update(&[kind, entry.name.len() as u8]);
        hash.update(entry.name);
        // The number of the parent's entry follows from the names alone.
        hash.update(&entry.parent.0.to_le_bytes());
        if entry.kind == EntryKind::File {
            hash.update(&entry.node.to_le_bytes());
        }
    }
    for sample in 0..catalog.header().samples {
        let Some((size, blocks)) = catalog.sample(SampleId(sample)) else { continue };
        hash.update(&size.to_le_bytes());
        for block in blocks.map(BlockId) {
            let len = catalog.block(block).map_or(0, |(_, len)| len);
            for chunk in Chunk::all(block, len) {
                hash.update(&catalog.chunk_checksum(chunk).unwrap_or(0).to_le_bytes());
            }
        }
    }
    format!("{:032x}", hash.digest128())
}
