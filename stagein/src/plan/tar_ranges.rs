//! Splits a large plain tar into ranges, so that several workers can read it at the same time.

use std::fs::File;
use std::io;
use std::sync::Arc;

use dayfly_meta::limits::{RANGE_LEN_MAX, RANGE_LEN_MIN};
use dayfly_meta::wire::peer::TarPosition;

use crate::source::plain::PlainReader;
use crate::source::tar::{BLOCK_LEN, Next, TarReader};

/// Number of members whose headers are read to estimate the mean size.
const PROBED_MEMBERS: usize = 16;
/// If the mean size of the members is at least this, planning reads all headers. An archive of
/// large members has few headers, and a range that starts at a known header needs no guess.
const HOPPED_SIZE_MIN: u64 = 4 << 20;

/// One range of a tar.
pub(super) struct TarSplit {
    pub(super) from: u64,
    pub(super) to: u64,
    /// The start of the range's first member, if it is known.
    pub(super) start: Option<TarPosition>,
}

/// Splits a tar into ranges of about equal length, so that each of `workers` gets several. The last
/// range ends with the archive, wherever that is.
pub(super) fn split(file: File, size: u64, workers: u64) -> io::Result<Vec<TarSplit>> {
    if size < 2 * RANGE_LEN_MIN {
        return Ok(vec![TarSplit { from: 0, to: u64::MAX, start: Some(TarPosition::default()) }]);
    }
    let len = (size / (4 * workers.max(1))).clamp(RANGE_LEN_MIN, RANGE_LEN_MAX).next_multiple_of(BLOCK_LEN as u64);
    // The reader does not read ahead, because only headers are wanted.
    let mut tar = TarReader::new(PlainReader::new(file, 0, 0, Arc::default())?);
    // If the archive is damaged somewhere, the worker that reads that part will report the damage.
    let mut members = std::iter::from_fn(|| {
        let position = TarPosition { offset: tar.next_start(), globals: tar.globals().records() };
        matches!(tar.next(), Ok(Next::Member(_))).then(|| (position, tar.next_start()))
    })
    .fuse();
    let probed: Vec<(TarPosition, u64)> = members.by_ref().take(PROBED_MEMBERS).collect();
    let end = probed.last().map_or(0, |(_, end)| *end);
    let mut starts: Vec<(u64, Option<TarPosition>)> = vec![(0, Some(TarPosition::default()))];
    if probed.len() < PROBED_MEMBERS && end < len || end / (probed.len() as u64).max(1) < HOPPED_SIZE_MIN {
        starts.extend((1..size.div_ceil(len)).map(|number| (number * len, None)));
    } else {
        for (position, _) in probed.into_iter().chain(members) {
            if starts.last().is_some_and(|(last, _)| position.offset >= last + len) && position.offset < size {
                starts.push((position.offset, Some(position)));
            }
        }
    }
    let ends = starts.iter().skip(1).map(|(from, _)| *from).chain([u64::MAX]).collect::<Vec<_>>();
    Ok(starts.into_iter().zip(ends).map(|((from, start), to)| TarSplit { from, to, start }).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::io::Write;

    use super::*;

    #[test]
    fn a_range_that_starts_at_a_known_place_starts_with_a_member() {
        let folder = tempfile::tempdir().unwrap();
        let script =
            "for number in 1 2 3; do truncate -s 20M $number; done; tar -cf a.tar 1 2 3; head -c 5120 /dev/urandom >> a.tar";
        let done = crate::programs::program("bash").args(["-ec", script]).current_dir(folder.path()).status().unwrap();
        assert!(done.success());
        let path = folder.path().join("a.tar");
        let splits = split(File::open(&path).unwrap(), path.metadata().unwrap().len(), 1).unwrap();
        let starts: Vec<u64> = splits.iter().map(|split| split.start.as_ref().unwrap().offset).collect();
        let member = (20 << 20) + BLOCK_LEN as u64;
        assert_eq!(starts, [0, member, 2 * member]);
        let mut file = File::options().write(true).open(&path).unwrap();
        file.write_all(&[7; BLOCK_LEN]).unwrap();
        let splits = split(File::open(&path).unwrap(), path.metadata().unwrap().len(), 1).unwrap();
        assert!(splits.iter().skip(1).all(|split| split.start.is_none()), "nothing is known of a damaged tar");
    }
}
