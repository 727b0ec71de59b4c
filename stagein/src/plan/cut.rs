//! Cutting one large plain tar into ranges for several workers.

use std::fs::File;
use std::io;
use std::sync::Arc;

use dayfly_meta::limits::{RANGE_LEN_MAX, RANGE_LEN_MIN};
use dayfly_meta::wire::peer::TarPosition;

use crate::source::plain::PlainReader;
use crate::source::tar::{BLOCK_LEN, Next, TarReader};

/// Members looked at to learn how large they are.
const PROBED_MEMBERS: u64 = 16;
/// From this mean size on, all headers are looked at: few in number, and what lies within a member is never taken for one.
const HOPPED_SIZE_MIN: u64 = 4 << 20;

/// A range: where it begins, where it ends, and its first member, if that is known.
pub(super) type Range = (u64, u64, Option<TarPosition>);

/// Ranges of about equal length, so that each of `workers` gets several; the last one ends with the archive, wherever that is.
pub(super) fn cut(file: File, size: u64, workers: u64) -> io::Result<Vec<Range>> {
    let whole = vec![(0, u64::MAX, Some(TarPosition::default()))];
    if size < 2 * RANGE_LEN_MIN {
        return Ok(whole);
    }
    let len = (size / (4 * workers.max(1))).clamp(RANGE_LEN_MIN, RANGE_LEN_MAX).next_multiple_of(BLOCK_LEN as u64);
    // Nothing is read ahead: only headers are wanted.
    let mut tar = TarReader::new(PlainReader::new(file, 0, 0, Arc::default())?);
    let mut members = 0;
    while members < PROBED_MEMBERS {
        match tar.next() {
            Ok(Next::Member(_)) => members += 1,
            // What is wrong, and whether it is, will be found when it is read.
            Ok(Next::End(_)) | Err(_) => break,
        }
    }
    let mut cuts: Vec<(u64, Option<TarPosition>)> = vec![(0, Some(TarPosition::default()))];
    if members < PROBED_MEMBERS && tar.next_start() < len || tar.next_start() / members.max(1) < HOPPED_SIZE_MIN {
        cuts.extend((1..size.div_ceil(len)).map(|number| (number * len, None)));
    } else {
        loop {
            let offset = tar.next_start();
            if cuts.last().is_some_and(|(last, _)| offset >= last + len) && offset < size {
                cuts.push((offset, Some(TarPosition { offset, globals: tar.globals().records() })));
            }
            match tar.next() {
                Ok(Next::Member(_)) => {}
                Ok(Next::End(_)) | Err(_) => break,
            }
        }
    }
    let ends = cuts.iter().skip(1).map(|(from, _)| *from).chain([u64::MAX]).collect::<Vec<_>>();
    Ok(cuts.into_iter().zip(ends).map(|((from, start), to)| (from, to, start)).collect())
}
