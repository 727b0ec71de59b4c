//! The check of a whole catalog, which each server makes once before it shows the dataset. Once the
//! check has passed, every access that follows the catalog's own numbers succeeds, every walk ends,
//! and every name is a valid file name.

use super::layout::{BUCKET_LEN, Column, Compression, EntryKind, OriginRecord, Place, Source, SourceKind};
use super::map::{Catalog, CatalogError, EntryId, block_len};
use crate::id::{NodeId, SampleId};
use crate::limits::{CHUNK_LEN, NAME_LEN_MAX, NODES_MAX, SYMLINK_LEN_MAX};

impl Catalog {
    /// Checks every record against the others and against the number of nodes.
    ///
    /// # Errors
    ///
    /// The error names the first part that is damaged.
    pub fn check(&self, nodes: usize) -> Result<(), CatalogError> {
        let damaged = |what| Err(CatalogError::Damaged(what));
        let header = *self.header();
        // The directories that contain the current entry. For each directory: its entry, the end of
        // its subtree, and the length of its path.
        let mut open: Vec<(EntryId, EntryId, usize)> = Vec::new();
        let mut path = Vec::new();
        for id in 0..header.entries {
            let Some(entry) = self.entry(EntryId(id)) else { return damaged("an entry") };
            while open.last().is_some_and(|&(_, end, _)| end <= entry.id) {
                open.pop();
            }
            let (parent, end, path_len) = open.last().copied().unwrap_or((EntryId(0), EntryId(header.entries), 0));
            path.truncate(path_len);
            if path_len > 0 {
                path.push(b'/');
            }
            path.extend_from_slice(entry.name);
            if self.find(&path).is_none_or(|found| found.id != entry.id) {
                return damaged("the path index");
            }
            if entry.next <= entry.id || entry.next > end {
                return damaged("the end of a directory");
            }
            if id == 0 {
                if entry.kind != EntryKind::Directory || !entry.name.is_empty() || entry.next != end {
                    return damaged("the root");
                }
            } else {
                if entry.parent != parent {
                    return damaged("an entry's parent");
                }
                let name = entry.name;
                let bad = |byte: &u8| matches!(byte, b'/' | 0);
                if name.is_empty() || name.len() > NAME_LEN_MAX || name == b"." || name == b".." || name.iter().any(bad) {
                    return damaged("a name");
                }
            }
            match entry.kind {
                EntryKind::Directory => open.push((entry.id, entry.next, path.len())),
                _ if entry.next.0 != id + 1 => return damaged("an entry's end"),
                EntryKind::Symlink if self.symlink_target(&entry).is_none_or(|target| target.len() > SYMLINK_LEN_MAX) => {
                    return damaged("a symlink");
                }
                _ => {}
            }
            if self.attributes(&entry).is_none_or(|attributes| attributes.mtime_ns > 999_999_999) {
                return damaged("an entry's attributes");
            }
        }
        self.check_sources()?;
        self.check_samples(nodes)?;
        self.check_origins()?;
        self.check_index()
    }

    fn check_samples(&self, nodes: usize) -> Result<(), CatalogError> {
        let damaged = |what| Err(CatalogError::Damaged(what));
        let header = *self.header();
        let mut end = 0;
        let mut bytes = 0_u64;
        // The number of rows seen so far, in `Checksums` and in `Larges`.
        let (mut checksums, mut larges) = (0_u64, 0_u64);
        for sample in 0..header.samples {
            match self.sample(SampleId(sample)) {
                Some((size, blocks)) if blocks.start == end => {
                    end = blocks.end;
                    bytes = bytes.saturating_add(size);
                    for (part, block) in (0..).zip(blocks) {
                        let chunks = block_len(size, part).div_ceil(CHUNK_LEN);
                        if chunks > 1 {
                            let is_named =
                                |large: super::layout::LargeRecord| (large.block, u64::from(large.first)) == (block, checksums);
                            if !self.large(larges).is_some_and(is_named) {
                                return damaged("where a block's checksums lie");
                            }
                            larges += 1;
                        }
                        checksums += chunks;
                    }
                }
                _ => return damaged("a sample's blocks"),
            }
        }
        if end != header.blocks || bytes != header.bytes {
            return damaged("the number of blocks or bytes");
        }
        if (checksums, larges) != (self.columns[Column::Checksums as usize].count, self.columns[Column::Larges as usize].count) {
            return damaged("the number of checksums");
        }
        let is_possible = |owner: NodeId| owner.index() < nodes;
        if !(0..header.blocks).all(|block| self.owner(crate::id::BlockId(block)).is_some_and(is_possible)) {
            return damaged("a block's owner");
        }
        if !(1..=nodes.max(1)).contains(&usize::from(header.copies)) {
            return damaged("the number of copies");
        }
        let capacities = self.columns[Column::Capacities as usize].count;
        if capacities == nodes as u64 && nodes <= NODES_MAX { Ok(()) } else { damaged("the nodes' capacities") }
    }

    /// Checks that every source has a path that can be opened, a prefix without `..`, and possible times.
    fn check_sources(&self) -> Result<(), CatalogError> {
        for number in 0..self.header().sources {
            let is_good = |source: &Source| {
                let times = [source.version.mtime_ns, source.version.ctime_ns];
                !source.path.is_empty()
                    && !source.path.contains(&0)
                    && is_normal(&source.prefix)
                    && times.iter().all(|&ns| ns <= 999_999_999)
            };
            if !self.source(number).as_ref().is_some_and(is_good) {
                return Err(CatalogError::Damaged("a source"));
            }
        }
        Ok(())
    }

    /// Checks where the samples came from, and under which paths they were placed.
    fn check_origins(&self) -> Result<(), CatalogError> {
        let damaged = |what| Err(CatalogError::Damaged(what));
        let mut next_placed = 0;
        for number in 0..self.header().samples {
            let sample = SampleId(number);
            let Some(OriginRecord { source, place, .. }) = self.origin_record(sample) else {
                return damaged("a sample's place in its source");
            };
            let Some(source) = self.source(source) else { return damaged("a sample's source") };
            if self.entry_of(sample).is_none() {
                return damaged("a sample's first name");
            }
            if self.placed(next_placed).is_some_and(|placed| placed.sample == number) {
                next_placed += 1;
                if self.placed_path(sample).is_none_or(|path| path.is_empty() || !is_normal(&path)) {
                    return damaged("the path that a sample was placed under");
                }
            }
            let Some((size, _)) = self.sample(sample) else { return damaged("a sample's blocks") };
            // The length of a decompressed stream is not known.
            let end = if source.compression == Compression::None { source.version.size } else { u64::MAX };
            let is_within = |offset: u64, len: u64| offset.checked_add(len).is_some_and(|at| at <= end);
            let fits = match (place, source.kind) {
                (Place::Tree, SourceKind::Directory | SourceKind::FollowedDirectory) => self.path_in_source(sample).is_some(),
                (Place::Tree, SourceKind::File) => self.path_in_source(sample).is_some() && size == source.version.size,
                (Place::Bytes { offset }, SourceKind::Tar) => is_within(offset, size),
                (Place::SparseTar { offset, len }, SourceKind::Tar) => is_within(offset, len),
                (Place::ZipRecord { offset, len }, SourceKind::Zip) => is_within(offset, len),
                (Place::Nested { offset, len }, SourceKind::Tar | SourceKind::Zip) => is_within(offset, len),
                _ => false,
            };
            if !fits {
                return damaged("a sample's place in its source");
            }
        }
        // The rows are in the order of samples, so any row that is left names no sample, or one out of order.
        if next_placed == self.columns[Column::PlacedPaths as usize].count { Ok(()) } else { damaged("the placed paths") }
    }

    /// Checks that the index contains nothing but the entries. The caller has already found every
    /// entry through the index.
    fn check_index(&self) -> Result<(), CatalogError> {
        let buckets =
            (0..self.columns[Column::Index as usize].count).filter_map(|bucket| self.record::<BUCKET_LEN>(Column::Index, bucket));
        let taken: usize =
            buckets.map(|bucket| bucket.as_chunks::<8>().0.iter().filter(|slot| slot[..4] != [0; 4]).count()).sum();
        if taken as u64 == u64::from(self.header().entries) { Ok(()) } else { Err(CatalogError::Damaged("the path index")) }
    }
}

/// Returns whether a path is relative, has no empty component, and does not lead out of its root.
fn is_normal(path: &[u8]) -> bool {
    let is_name = |name: &[u8]| !matches!(name, b"" | b"." | b"..") && name.len() <= NAME_LEN_MAX && !name.contains(&0);
    path.is_empty() || path.split(|&byte| byte == b'/').all(is_name)
}
