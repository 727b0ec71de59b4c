//! Estimates what plain tars contain, when their lengths alone do not tell whether their samples fit.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use dayfly_meta::catalog::Source;
use dayfly_meta::limits::{TAR_WINDOW_LEN, TAR_WINDOWS_MAX};
use dayfly_meta::wire::control::Selection;

use super::activity::PlanActivity;
use crate::StageInError;
use crate::progress::ProgressMonitor;
use crate::selection::{Decision, Selector};
use crate::source::plain::PlainReader;
use crate::source::tar::{BLOCK_LEN, Extension, Next, TarKind, TarReader, find_header};

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

/// The members that were seen in the windows.
#[derive(Default)]
struct Seen {
    /// Bytes of headers, data and padding of these members.
    span: u64,
    taken: TarSamples,
}

/// Estimates how many samples plain tars contain, and how many bytes. Reads a few short windows, spread evenly over all tars
/// together, and looks at the members that begin there. A window that cannot be read does not count: the worker that reads the
/// same bytes will report why.
///
/// # Errors
///
/// [`StageInError::InvalidPattern`] if a pattern of the selection does not parse, and [`StageInError::Cancelled`].
pub fn sample_tars(tars: &[Source], selection: &Selection, monitor: &ProgressMonitor) -> Result<TarSamples, StageInError> {
    let (selector, activity) = (Selector::new(selection)?, PlanActivity::new(monitor));
    let total: u64 = tars.iter().map(|tar| tar.version.size).sum();
    let mut seen = Seen::default();
    let (mut tar, mut before) = (0, 0);
    for window in 0..TAR_WINDOWS_MAX {
        // The middle of the window's share of all bytes.
        let at = (u128::from(total) * u128::from(2 * window + 1) / u128::from(2 * TAR_WINDOWS_MAX)) as u64;
        while tars.get(tar).is_some_and(|found| before + found.version.size <= at) {
            before += tars[tar].version.size;
            tar += 1;
        }
        let Some(source) = tars.get(tar) else { break };
        activity.begin(&source.path)?;
        let half_before = (at - before).saturating_sub(TAR_WINDOW_LEN / 2);
        // Windows start on blocks, as headers do.
        let start = half_before - half_before % BLOCK_LEN as u64;
        // An error shows again when a worker reads the same bytes.
        let _ = look(source, start, &selector, &mut seen);
    }
    // Without any header in the windows, members are so large that their headers do not matter.
    let scaled = |seen_part: u64, without: u64| {
        (u128::from(total) * u128::from(seen_part)).checked_div(seen.span.into()).map_or(without, |scaled| scaled as u64)
    };
    let (files, bytes) = (scaled(seen.taken.files, tars.len() as u64), scaled(seen.taken.bytes, total).min(total));
    Ok(TarSamples { files, bytes, seen: seen.taken.files })
}

/// Counts the members whose headers begin in the window at `start`.
fn look(source: &Source, start: u64, selector: &Selector, seen: &mut Seen) -> io::Result<()> {
    let end = start + TAR_WINDOW_LEN;
    let file = File::open(Path::new(OsStr::from_bytes(&source.path)))?;
    let mut reader = PlainReader::new(file, start, end, Arc::default())?;
    let Some(first) = find_header(&mut reader, end)? else { return Ok(()) };
    let mut tar = TarReader::at(reader, first, Extension::default());
    while tar.next_start() < end {
        // Damage ends the window. The worker will report it.
        let Ok(Next::Member(member)) = tar.next() else { return Ok(()) };
        seen.span += tar.next_start() - tar.member_start();
        if member.kind == TarKind::File && matches!(selector.decide(&member.name, false), Decision::Take(_)) {
            seen.taken.files += 1;
            seen.taken.bytes += member.size;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use dayfly_meta::catalog::{Compression, SourceKind, Version};

    use super::*;

    /// Makes a tar of members with these sizes, whose data are holes.
    fn tar_of(path: &Path, sizes: &[u64]) -> Source {
        let file = File::create(path).unwrap();
        let mut offset = 0;
        for (number, &size) in sizes.iter().enumerate() {
            let mut header = [0; BLOCK_LEN];
            let mut put = |at: usize, text: String| header[at..at + text.len()].copy_from_slice(text.as_bytes());
            put(0, format!("{}/{number}.{}", number % 10, if number % 4 == 0 { "txt" } else { "jpg" }));
            put(100, "0000644\0".to_owned());
            put(124, format!("{size:011o}\0"));
            put(136, "00000000000\0".to_owned());
            put(156, "0".to_owned());
            put(257, "ustar\x0000".to_owned());
            put(148, " ".repeat(8));
            let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
            header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            file.write_all_at(&header, offset).unwrap();
            offset += BLOCK_LEN as u64 + size.next_multiple_of(BLOCK_LEN as u64);
        }
        file.set_len(offset + 2 * BLOCK_LEN as u64).unwrap();
        Source {
            path: path.as_os_str().as_bytes().to_vec(),
            prefix: Vec::new(),
            kind: SourceKind::Tar,
            compression: Compression::None,
            version: Version { size: offset, ..Version::default() },
            inode: 0,
        }
    }

    fn random_sizes(count: usize, mean: f64, spread: f64) -> Vec<u64> {
        let mut state = 7_u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1_u64 << 53) as f64
        };
        // The sum of twelve is close to a normal distribution.
        let normal = |random: &mut dyn FnMut() -> f64| (0..12).map(|_| random()).sum::<f64>() - 6.0;
        (0..count).map(|_| (mean * (spread * normal(&mut random)).exp()) as u64).collect()
    }

    #[test]
    fn the_bytes_in_tars_are_estimated_within_two_percent() {
        let folder = tempfile::tempdir().unwrap();
        for (name, sizes) in [
            ("small", random_sizes(100_000, 3000.0, 0.0)),
            ("mixed small", random_sizes(100_000, 2000.0, 1.0)),
            ("mixed", random_sizes(20_000, 60_000.0, 1.0)),
            ("sorted", {
                let mut sizes = random_sizes(50_000, 5000.0, 1.0);
                sizes.sort_unstable();
                sizes
            }),
            ("large", random_sizes(300, 30e6, 0.5)),
            ("one", vec![5 << 30]),
            ("empty", vec![0; 5000]),
            ("few", vec![100, 2000]),
        ] {
            let third = sizes.len() / 3;
            let (path, other) = (folder.path().join("a.tar"), folder.path().join("b.tar"));
            let tars = [tar_of(&path, &sizes[..third]), tar_of(&other, &sizes[third..])];
            let sampled = sample_tars(&tars, &Selection::default(), &ProgressMonitor::default()).unwrap();
            let bytes: u64 = sizes.iter().sum();
            assert!(sampled.bytes.abs_diff(bytes) <= bytes / 50 + 4096, "{name}: {} of {bytes}", sampled.bytes);
            let files = sizes.len() as u64;
            assert!((files / 2..=files * 2).contains(&sampled.files), "{name}: {} of {files}", sampled.files);
        }
    }

    #[test]
    fn only_selected_members_count_and_damage_does_not_matter() {
        let folder = tempfile::tempdir().unwrap();
        let tar = tar_of(&folder.path().join("a.tar"), &vec![3000; 20_000]);
        let selection = Selection { include: vec!["*.txt".to_owned()], ..Selection::default() };
        let sampled = sample_tars(std::slice::from_ref(&tar), &selection, &ProgressMonitor::default()).unwrap();
        assert!(sampled.bytes.abs_diff(15_000_000) < 1_000_000, "{}", sampled.bytes);
        let gone = Source { path: b"/nowhere".to_vec(), ..tar.clone() };
        let sampled = sample_tars(&[gone, tar], &Selection::default(), &ProgressMonitor::default()).unwrap();
        assert!(sampled.bytes.abs_diff(120_000_000) < 6_000_000, "{}", sampled.bytes);
        assert_eq!(sample_tars(&[], &selection, &ProgressMonitor::default()).unwrap(), TarSamples::default());
        let monitor = ProgressMonitor::default();
        monitor.cancel();
        let gone = Source {
            path: b"/nowhere".to_vec(),
            version: Version { size: 1, ..Version::default() },
            ..tar_of(&folder.path().join("b"), &[1])
        };
        assert!(matches!(sample_tars(&[gone], &selection, &monitor), Err(StageInError::Cancelled)));
    }
}
