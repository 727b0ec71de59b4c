//! Estimates what plain tars contain, when their lengths alone do not tell whether their samples fit.
//!
//! At most [`TAR_WINDOWS_MAX`] windows are read, each with one read. The tars are laid end to end, and
//! the windows stand at equal distances, so each of them speaks for an equal share of all bytes,
//! however the members are sized and ordered. In a window, each byte is data of a selected sample
//! or it is not. The bytes before the first header, or all bytes if there is no header, are taken
//! for data of a member that began earlier.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use dayfly_meta::catalog::Source;
use dayfly_meta::limits::{TAR_MEMBERS_MIN, TAR_WINDOW_LEN, TAR_WINDOWS_MAX};
use dayfly_meta::wire::control::Selection;

use super::activity::PlanActivity;
use crate::StageInError;
use crate::progress::ProgressMonitor;
use crate::selection::{Decision, Selector};
use crate::source::tar::{BLOCK_LEN, Extension, Next, TarKind, TarMember, TarReader, header_in};

/// An estimate of what plain tars contain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TarSamples {
    /// Number of samples that the selection takes.
    pub files: u64,
    /// The total size of these samples, in bytes.
    pub bytes: u64,
    /// How many samples were seen. The more there were, the better is the estimate.
    pub seen: u64,
}

/// What one window shows.
#[derive(Default)]
struct Window {
    len: u64,
    /// Number of members that begin here, and the bytes that they take in the tar.
    members: u64,
    span: u128,
    /// Number of selected samples that begin here.
    files: u64,
    /// Bytes of selected samples here, as far as their headers are here too.
    bytes: u128,
    /// Bytes here of a member whose header lies before the window.
    bytes_of_unknown: u64,
    /// Total size of the samples that begin here.
    sizes: u128,
    /// The same of those that are selected.
    taken_sizes: u128,
}

/// Estimates how many samples plain tars contain, and how many bytes. If the tars are few and short enough, all of their bytes
/// are read. A window that cannot be read does not count: the worker that reads the same bytes will report why.
///
/// # Errors
///
/// [`StageInError::InvalidPattern`] if a pattern of the selection does not parse, and [`StageInError::Cancelled`].
pub fn sample_tars(tars: &[Source], selection: &Selection, monitor: &ProgressMonitor) -> Result<TarSamples, StageInError> {
    let (selector, activity) = (Selector::new(selection)?, PlanActivity::new(monitor));
    estimate(tars, &selector, &mut |tar, start, len| {
        activity.begin(&tar.path)?;
        // An error shows again when a worker reads the same bytes.
        Ok(read(tar, start, len).ok())
    })
}

/// Returns `len` bytes of a tar.
fn read(tar: &Source, start: u64, len: u64) -> io::Result<Vec<u8>> {
    let file = File::open(Path::new(OsStr::from_bytes(&tar.path)))?;
    let mut bytes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
    file.read_exact_at(&mut bytes, start)?;
    Ok(bytes)
}

/// Reads a part of a tar: the bytes from an offset on, and how many. Returns `None` if they cannot be read.
type ReadPart<'a> = &'a mut dyn FnMut(&Source, u64, u64) -> Result<Option<Vec<u8>>, StageInError>;

fn estimate(tars: &[Source], selector: &Selector, read: ReadPart<'_>) -> Result<TarSamples, StageInError> {
    let total: u128 = tars.iter().map(|tar| u128::from(tar.version.size)).sum();
    let are_tars = tars.len() as u64 <= TAR_WINDOWS_MAX && total <= u128::from(TAR_WINDOWS_MAX * TAR_WINDOW_LEN);
    let mut windows = Vec::new();
    let mut look_at = |tar: &Source, start, len| {
        let bytes = read(tar, start, len)?;
        windows.extend(bytes.map(|bytes| Window::of(&bytes, start == 0, selector)));
        Ok(())
    };
    if are_tars {
        for tar in tars.iter().filter(|tar| tar.version.size > 0) {
            look_at(tar, 0, tar.version.size)?;
        }
    } else {
        let (mut rest, mut before) = (tars.iter().peekable(), 0);
        for number in 0..TAR_WINDOWS_MAX {
            // The middle of the window's share of all bytes.
            let middle = total * u128::from(2 * number + 1) / u128::from(2 * TAR_WINDOWS_MAX);
            while let Some(passed) = rest.next_if(|tar| before + u128::from(tar.version.size) <= middle) {
                before += u128::from(passed.version.size);
            }
            let Some(tar) = rest.peek() else { break };
            let half_before = (middle - before).saturating_sub(u128::from(TAR_WINDOW_LEN / 2)) as u64;
            // Windows start on blocks, as headers do.
            let start = half_before - half_before % BLOCK_LEN as u64;
            look_at(tar, start, TAR_WINDOW_LEN.min(tar.version.size - start))?;
        }
    }
    Ok(sum_up(&windows, total, tars.len() as u64, are_tars))
}

/// Concludes from windows what tars of `total` bytes contain. `are_tars` means that the windows are whole tars.
fn sum_up(windows: &[Window], total: u128, tars: u64, are_tars: bool) -> TarSamples {
    let sum = |count: fn(&Window) -> u128| windows.iter().fold(0, |sum: u128, window| sum.saturating_add(count(window)));
    let (members, span) = (sum(|window| window.members.into()), sum(|window| window.span));
    let seen = sum(|window| window.files.into()) as u64;
    if windows.is_empty() {
        return TarSamples { files: tars, bytes: saturate(total), seen };
    }
    // A member whose header was not seen is selected as likely as the others, byte for byte.
    let sizes = sum(|window| window.sizes);
    let taken_share = if sizes == 0 { 1.0 } else { sum(|window| window.taken_sizes) as f64 / sizes as f64 };
    let bytes_of = |window: &Window| window.bytes as f64 + window.bytes_of_unknown as f64 * taken_share;
    let len = sum(|window| window.len.into()) as f64;
    // Each window speaks for as many bytes as any other, even if the end of its tar cuts it off.
    let share_of = |count: &dyn Fn(&Window) -> f64| match are_tars {
        true => windows.iter().map(count).sum::<f64>() / len,
        false => windows.iter().map(|window| count(window) / window.len as f64).sum::<f64>() / windows.len() as f64,
    };
    // A conversion to an integer saturates.
    let scaled = |share: f64| (share * total as f64).round() as u64;
    let files = match u64::try_from(members) {
        Ok(0) if !are_tars => tars,
        Ok(1..TAR_MEMBERS_MIN) if !are_tars => scaled(seen as f64 / span as f64),
        _ => scaled(share_of(&|window| window.files as f64)),
    };
    TarSamples { files, bytes: scaled(share_of(&bytes_of)), seen }
}

impl Window {
    /// Looks at bytes that are at a tar's beginning or at a later block of it.
    fn of(bytes: &[u8], is_at_beginning: bool, selector: &Selector) -> Self {
        let header = if is_at_beginning { Some(0) } else { header_in(bytes) };
        let first = header.unwrap_or(bytes.len());
        // On average, half a block of padding lies between data and a header.
        let padding = header.map_or(0, |_| BLOCK_LEN as u64 / 2);
        let bytes_of_unknown = (first as u64).saturating_sub(padding);
        let mut window = Self { len: bytes.len() as u64, bytes_of_unknown, ..Self::default() };
        let mut tar = TarReader::at(&bytes[first..], first as u64, Extension::default());
        while tar.next_start() < window.len {
            // Damage, a header that the window cuts, or the end of the archive.
            let Ok(Next::Member(member)) = tar.next() else { break };
            window.members += 1;
            window.span = window.span.saturating_add(u128::from(tar.next_start() - tar.member_start()));
            window.count(&member, selector);
        }
        window
    }

    fn count(&mut self, member: &TarMember, selector: &Selector) {
        if member.kind != TarKind::File {
            return;
        }
        let size = u128::from(member.size);
        self.sizes = self.sizes.saturating_add(size);
        if !matches!(selector.decide(&member.name, false), Decision::Take(_)) {
            return;
        }
        self.files += 1;
        self.taken_sizes = self.taken_sizes.saturating_add(size);
        let here = member.stored_len.min(self.len.saturating_sub(member.data_offset));
        // The holes of a sparse file are spread over its data. Without data, they are all here.
        let with_holes = (size * u128::from(here)).checked_div(member.stored_len.into());
        self.bytes = self.bytes.saturating_add(with_holes.unwrap_or(size));
    }
}

fn saturate(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
