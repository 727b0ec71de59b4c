//! The check of a whole catalog, which each server makes once before it shows the dataset. Once the
//! check has passed, every access that follows the catalog's own numbers succeeds, every walk ends,
//! and every name is a valid file name.

use super::layout::{BUCKET_LEN, Column, EntryKind};
use super::map::{Catalog, CatalogError, EntryId, block_len};
use crate::limits::{CHUNK_LEN, NAME_LEN_MAX, SYMLINK_LEN_MAX};

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
        self.check_samples(nodes)?;
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
            let sample = crate::id::SampleId(sample);
            match self.sample(sample) {
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
            let source = self
                .record::<12>(Column::Origins, u64::from(sample.0))
                .map(|origin| super::layout::OriginRecord::decode(origin).source);
            if source.is_none_or(|source| source >= header.sources) {
                return damaged("a sample's source");
            }
        }
        if end != header.blocks || bytes != header.bytes {
            return damaged("the number of blocks or bytes");
        }
        if (checksums, larges) != (self.columns[Column::Checksums as usize].count, self.columns[Column::Larges as usize].count) {
            return damaged("the number of checksums");
        }
        if (0..header.sources).any(|source| self.source(source).is_none()) {
            return damaged("a source");
        }
        let owned = |block| self.owner(crate::id::BlockId(block)).is_some_and(|owner| owner.index() < nodes);
        if (0..header.blocks).all(owned) { Ok(()) } else { damaged("a block's owner") }
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
