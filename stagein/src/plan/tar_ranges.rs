//! Splits a large plain tar into ranges, so that several workers can read it at the same time.

use std::fs::File;
use std::io;
use std::sync::Arc;

use dayfly_meta::limits::{RANGE_LEN_MAX, RANGE_LEN_MIN};
use dayfly_meta::wire::peer::TarPosition;

use crate::source::plain::PlainReader;
use crate::source::tar::{BLOCK_LEN, Next, TarReader};

/// Number of members whose headers are read to estimate the mean size.
const PROBED_MEMBERS: u64 = 16;
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
    let mut members = 0;
    while members < PROBED_MEMBERS {
        match tar.next() {
            Ok(Next::Member(_)) => members += 1,
            // If the archive is damaged here, the worker that reads this part will report the
            // damage.
            Ok(Next::End(_)) | Err(_) => break,
        }
    }
    let mut starts: Vec<(u64, Option<TarPosition>)> = vec![(0, Some(TarPosition::default()))];
    if members < PROBED_MEMBERS && tar.next_start() < len || tar.next_start() / members.max(1) < HOPPED_SIZE_MIN {
        starts.extend((1..size.div_ceil(len)).map(|number| (number * len, None)));
    } else {
        loop {
            let offset = tar.next_start();
            if starts.last().is_some_and(|(last, _)| offset >= last + len) && offset < size {
                starts.push((offset, Some(TarPosition { offset, globals: tar.globals().records() })));
            }
            match tar.next() {
                Ok(Next::Member(_)) => {}
                Ok(Next::End(_)) | Err(_) => break,
            }
        }
    }
    let ends = starts.iter().skip(1).map(|(from, _)| *from).chain([u64::MAX]).collect::<Vec<_>>();
    Ok(starts.into_iter().zip(ends).map(|((from, start), to)| TarSplit { from, to, start }).collect())
}
