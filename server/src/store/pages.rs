//! A bitmap of the pages of a file that are in use. The other pages can be given back to the file system.

use std::ops::Range;

use dayfly_meta::limits::PAGE_SIZE;

/// The pages that begin in a range of a file.
pub(super) struct Pages {
    first: u64,
    count: u64,
    used: Vec<u64>,
}

impl Pages {
    /// Creates a bitmap with no page in use.
    pub(super) fn new(range: Range<u64>) -> Self {
        let first = range.start.div_ceil(PAGE_SIZE);
        let count = range.end.div_ceil(PAGE_SIZE).saturating_sub(first);
        Self { first, count, used: vec![0; count.div_ceil(64) as usize] }
    }

    /// Marks the pages that contain the given bytes as used. Bytes outside the bitmap's range are ignored.
    pub(super) fn mark(&mut self, offset: u64, len: u64) {
        let end = (offset + len).div_ceil(PAGE_SIZE).min(self.first + self.count);
        for page in (offset / PAGE_SIZE).max(self.first)..end {
            let index = page - self.first;
            self.used[(index / 64) as usize] |= 1 << (index % 64);
        }
    }

    /// Returns the total length of all used pages in bytes.
    pub(super) fn used_bytes(&self) -> u64 {
        self.used.iter().map(|word| u64::from(word.count_ones())).sum::<u64>() * PAGE_SIZE
    }

    /// Returns the offset of the first used page.
    pub(super) fn first_used(&self) -> Option<u64> {
        let word = self.used.iter().position(|&word| word != 0)?;
        Some((self.first + word as u64 * 64 + u64::from(self.used[word].trailing_zeros())) * PAGE_SIZE)
    }

    /// Returns the ranges of the file that consist of at least `pages_min` unused pages, as byte offsets.
    pub(super) fn unused(&self, pages_min: u64) -> impl Iterator<Item = Range<u64>> {
        let mut page = 0;
        std::iter::from_fn(move || {
            while page < self.count {
                let start = page;
                while page < self.count && !self.is_used(page) {
                    page += 1;
                }
                let unused = start..page;
                page += 1;
                if unused.end - unused.start >= pages_min {
                    return Some((self.first + unused.start) * PAGE_SIZE..(self.first + unused.end) * PAGE_SIZE);
                }
            }
            None
        })
    }

    fn is_used(&self, index: u64) -> bool {
        self.used[(index / 64) as usize] >> (index % 64) & 1 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_unused_pages_are_found() {
        let mut pages = Pages::new(PAGE_SIZE..100 * PAGE_SIZE);
        pages.mark(0, PAGE_SIZE + 1);
        pages.mark(10 * PAGE_SIZE - 1, 2);
        pages.mark(98 * PAGE_SIZE, 10 * PAGE_SIZE);
        let unused = |min| pages.unused(min).map(|range| (range.start / PAGE_SIZE, range.end / PAGE_SIZE)).collect::<Vec<_>>();
        assert_eq!(unused(1), [(2, 9), (11, 98)]);
        assert_eq!(unused(8), [(11, 98)]);
        assert_eq!((pages.used_bytes(), pages.first_used()), (5 * PAGE_SIZE, Some(PAGE_SIZE)));
        assert_eq!(Pages::new(0..0).unused(1).count(), 0);
        assert_eq!(Pages::new(PAGE_SIZE..PAGE_SIZE + 1).unused(1).count(), 1);
    }
}
