//! Estimates what compressed tars contain, as far as their formats tell, when they may not fit.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use dayfly_meta::catalog::{Compression, Source};
use dayfly_meta::limits::{COMPRESSED_FRAMES_MAX, COMPRESSED_HEAD_LEN, COMPRESSED_LOOKS_MAX, XZ_INDEX_LEN_MAX};
use dayfly_meta::wire::control::Selection;

use super::activity::PlanActivity;
use crate::StageInError;
use crate::progress::ProgressMonitor;
use crate::selection::{Decision, Selector};
use crate::source::compressed::decoder;
use crate::source::plain::Skip;
use crate::source::tar::{Next, TarKind, TarReader};

/// What compressed tars contain, as far as they tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompressedSamples {
    /// An estimate of the bytes of samples in the tars that tell their unpacked size.
    pub told_bytes: u64,
    /// Length of the tars that do not tell it.
    pub untold_bytes: u64,
}

/// Estimates how many bytes of samples compressed tars contain. Reads a few bytes that state the unpacked size, and decodes the
/// beginning to see what part of that size is data of selected samples. Only the first [`COMPRESSED_LOOKS_MAX`] tars are looked
/// into; the others count as if they told nothing. A tar that cannot be read counts so, too: its worker will report why.
///
/// Sizes are claims: a false one makes a stage-in refuse its own source, and nothing else.
///
/// # Errors
///
/// [`StageInError::InvalidPattern`] if a pattern of the selection does not parse, and [`StageInError::Cancelled`].
pub fn sample_compressed(
    tars: &[Source],
    selection: &Selection,
    monitor: &ProgressMonitor,
) -> Result<CompressedSamples, StageInError> {
    let (selector, activity) = (Selector::new(selection)?, PlanActivity::new(monitor));
    let mut samples = CompressedSamples::default();
    for (number, source) in tars.iter().enumerate() {
        activity.begin(&source.path)?;
        let told = if number < COMPRESSED_LOOKS_MAX { estimate(source, &selector).ok().flatten() } else { None };
        match told {
            Some(bytes) => samples.told_bytes = samples.told_bytes.saturating_add(bytes),
            None => samples.untold_bytes += source.version.size,
        }
    }
    Ok(samples)
}

fn estimate(source: &Source, selector: &Selector) -> io::Result<Option<u64>> {
    let file = File::open(Path::new(OsStr::from_bytes(&source.path)))?;
    let len = file.metadata()?.len();
    let Some(unpacked) = unpacked_size(&file, len, source.compression)? else { return Ok(None) };
    let Some((data, span)) = head(&file, source.compression, selector)? else { return Ok(None) };
    Ok((u128::from(unpacked) * u128::from(data)).checked_div(span.into()).map(|bytes| bytes as u64))
}

/// Returns the size of the unpacked stream, if the format states it.
fn unpacked_size(file: &File, len: u64, compression: Compression) -> io::Result<Option<u64>> {
    match compression {
        Compression::Zstd => zstd_size(file),
        Compression::Lz4 => lz4_size(file),
        Compression::Xz => xz_size(file, len),
        Compression::Gzip => gzip_size(file, len),
        Compression::Bzip2 | Compression::None => Ok(None),
    }
}

/// Returns the size of the first frame after skippable ones. Usually it is the only one.
fn zstd_size(file: &File) -> io::Result<Option<u64>> {
    let mut offset = 0;
    for _ in 0..COMPRESSED_FRAMES_MAX {
        let mut start = [0; 18];
        let count = file.read_at(&mut start, offset)?;
        if let [0x50..=0x5f, 0x2a, 0x4d, 0x18, a, b, c, d, ..] = start {
            offset += 8 + u64::from(u32::from_le_bytes([a, b, c, d]));
            continue;
        }
        return Ok(zstd::zstd_safe::get_frame_content_size(&start[..count]).unwrap_or(None));
    }
    Ok(None)
}

fn lz4_size(file: &File) -> io::Result<Option<u64>> {
    let mut start = [0; 14];
    file.read_exact_at(&mut start, 0)?;
    let [4, 0x22, 0x4d, 0x18, flags, _, size @ ..] = start else { return Ok(None) };
    Ok((flags & 8 != 0).then(|| u64::from_le_bytes(size)))
}

/// Sums the sizes in the index of the file's last stream.
fn xz_size(file: &File, len: u64) -> io::Result<Option<u64>> {
    let mut footer = [0; 12];
    let Some(at) = len.checked_sub(12) else { return Ok(None) };
    file.read_exact_at(&mut footer, at)?;
    let [_, _, _, _, a, b, c, d, _, _, b'Y', b'Z'] = footer else { return Ok(None) };
    let index_len = (u64::from(u32::from_le_bytes([a, b, c, d])) + 1) * 4;
    let Some(start) = at.checked_sub(index_len).filter(|_| index_len <= XZ_INDEX_LEN_MAX) else { return Ok(None) };
    let mut index = vec![0; index_len as usize];
    file.read_exact_at(&mut index, start)?;
    Ok(sum_of_xz_index(&index))
}

fn sum_of_xz_index(index: &[u8]) -> Option<u64> {
    let mut rest = index.strip_prefix(&[0])?;
    let mut number = || -> Option<u64> {
        let mut value = 0_u64;
        for shift in (0..63).step_by(7) {
            let (&byte, after) = rest.split_first()?;
            rest = after;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    };
    let records = number()?;
    let mut total = 0_u64;
    // Each record takes at least two bytes, so a false number ends with the index.
    for _ in 0..records {
        number()?;
        total = total.saturating_add(number()?);
    }
    Some(total)
}

/// A gzip stream ends with its size, but only with the lower 32 bits. A size that is smaller than the file has probably lost some:
/// deflate adds little to bytes that it cannot compress.
fn gzip_size(file: &File, len: u64) -> io::Result<Option<u64>> {
    let mut end = [0; 4];
    let Some(at) = len.checked_sub(4) else { return Ok(None) };
    file.read_exact_at(&mut end, at)?;
    let size = u64::from(u32::from_le_bytes(end));
    // Deflate unpacks to at most 1,032 times the length.
    Ok((size + size / 64 + 1024 >= len && size <= len.saturating_mul(1032)).then_some(size))
}

/// Decodes the beginning. Returns the bytes of selected samples that begin there, and the bytes that all members there take.
fn head(file: &File, compression: Compression, selector: &Selector) -> io::Result<Option<(u64, u64)>> {
    let input = file.try_clone()?.take(COMPRESSED_HEAD_LEN);
    let mut tar = TarReader::new(Decoded(decoder(compression, input)?.take(COMPRESSED_HEAD_LEN / 2)));
    let (mut data, mut span) = (0_u64, 0_u64);
    // The end of the beginning looks like a truncated archive.
    while let Ok(Next::Member(member)) = tar.next() {
        span = span.saturating_add(tar.next_start() - tar.member_start());
        if member.kind == TarKind::File && matches!(selector.decide(&member.name, false), Decision::Take(_)) {
            data = data.saturating_add(member.stored_len);
        }
    }
    Ok((span > 0).then_some((data, span)))
}

/// A decoder, which can skip bytes only by decoding them.
struct Decoded<R>(R);

impl<R: Read> Read for Decoded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl<R: Read> Skip for Decoded<R> {}

#[cfg(test)]
mod tests {
    use dayfly_meta::catalog::{SourceKind, Version};

    use super::*;

    fn shell(folder: &Path, words: &str) {
        let done = std::process::Command::new("bash").arg("-ec").arg(words).current_dir(folder).status().unwrap();
        assert!(done.success(), "{words}");
    }

    fn source(path: &Path, compression: Compression) -> Source {
        let size = std::fs::metadata(path).unwrap().len();
        let (path, version) = (path.as_os_str().as_bytes().to_vec(), Version { size, ..Version::default() });
        Source { path, prefix: Vec::new(), kind: SourceKind::Tar, compression, version, inode: 0 }
    }

    #[test]
    fn formats_that_tell_their_size_are_estimated_and_the_others_counted() {
        let folder = tempfile::tempdir().unwrap();
        shell(
            folder.path(),
            "mkdir t; for i in {1..900}; do head -c 3000 /dev/urandom > t/$i.jpg; echo $i > t/$i.txt; done; tar -cf a.tar t
             gzip -1k a.tar; zstd -q1 a.tar; xz -1k -T2 --block-size=1MiB a.tar; lz4 -q --content-size a.tar a.tar.lz4; bzip2 -1k a.tar
             zstd -q1 < a.tar > stream.tar.zst; zstd -q1 a.tar -o b.tar.zst; cat a.tar.zst b.tar.zst > two.tar.zst",
        );
        let expected: u64 = 900 * 3000 + (1..=900).map(|number: u32| number.to_string().len() as u64 + 1).sum::<u64>();
        let (all, monitor) = (Selection::default(), ProgressMonitor::default());
        let sample = |name: &str, compression, selection: &Selection| {
            sample_compressed(&[source(&folder.path().join(name), compression)], selection, &monitor).unwrap()
        };
        for (name, compression) in [
            ("a.tar.gz", Compression::Gzip),
            ("a.tar.zst", Compression::Zstd),
            ("a.tar.xz", Compression::Xz),
            ("a.tar.lz4", Compression::Lz4),
            // Only the first frame is found.
            ("two.tar.zst", Compression::Zstd),
        ] {
            let found = sample(name, compression, &all);
            assert!(
                found.untold_bytes == 0 && found.told_bytes.abs_diff(expected) < expected / 10,
                "{name}: {found:?}, {expected}"
            );
            let jpg = Selection { include: vec!["*.txt".to_owned()], ..Selection::default() };
            assert!(sample(name, compression, &jpg).told_bytes < 10_000, "{name}");
        }
        for (name, compression) in [("a.tar.bz2", Compression::Bzip2), ("stream.tar.zst", Compression::Zstd)] {
            let found = sample(name, compression, &all);
            assert!(found.told_bytes == 0 && found.untold_bytes > 2_000_000, "{name}: {found:?}");
        }
    }

    #[test]
    fn hostile_bytes_neither_panic_nor_take_memory() {
        let folder = tempfile::tempdir().unwrap();
        shell(
            folder.path(),
            "seq 99999 > f; tar -cf a.tar f; gzip -k a.tar; zstd -q a.tar; xz -k a.tar; lz4 -q --content-size a.tar a.tar.lz4",
        );
        for (name, compression) in [
            ("a.tar.gz", Compression::Gzip),
            ("a.tar.zst", Compression::Zstd),
            ("a.tar.xz", Compression::Xz),
            ("a.tar.lz4", Compression::Lz4),
        ] {
            let whole = std::fs::read(folder.path().join(name)).unwrap();
            let path = folder.path().join("hostile");
            let look = |bytes: &[u8]| {
                std::fs::write(&path, bytes).unwrap();
                drop(sample_compressed(&[source(&path, compression)], &Selection::default(), &ProgressMonitor::default()));
            };
            for cut in (0..whole.len().min(64)).chain(whole.len().saturating_sub(64)..whole.len()) {
                look(&whole[..cut]);
                let mut flipped = whole.clone();
                flipped[cut] = !flipped[cut];
                look(&flipped);
            }
        }
        assert_eq!(sum_of_xz_index(&[0, 0xff, 0xff, 0xff, 0xff, 0x7f]), None);
        assert_eq!(sum_of_xz_index(&[0, 2, 5, 0x80, 1, 5, 3, 0, 0]), Some(131));
    }
}
