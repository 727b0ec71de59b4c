//! Estimates what compressed tars contain, as far as their formats tell, when they may not fit.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use dayfly_meta::catalog::Source;
use dayfly_meta::limits::{
    COMPRESSED_CLAIM_MAX, COMPRESSED_HEAD_LEN, COMPRESSED_HEADS_MAX, COMPRESSED_LOOKS_MAX, COMPRESSED_READS_MAX,
    COMPRESSED_READS_MIN, COMPRESSED_READS_SUM_MAX,
};
use dayfly_meta::wire::control::Selection;

use super::activity::PlanActivity;
use crate::StageInError;
use crate::progress::ProgressMonitor;
use crate::selection::{Decision, Selector};
use crate::source::compressed::decoder;
use crate::source::compressed::unpacked_len::{UnpackedLen, unpacked_len};
use crate::source::plain::Skip;
use crate::source::tar::{Next, TarKind, TarReader};

/// What compressed tars contain, as far as they tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompressedSamples {
    /// An estimate of the bytes of samples in the tars, and parts of tars, that tell their unpacked
    /// length.
    pub told_bytes: u64,
    /// The part of it that a stage-in may be refused for. With patterns, the beginning of a tar
    /// says nothing about which of the other members they select.
    pub sure_bytes: u64,
    /// Length of those that do not tell it.
    pub untold_bytes: u64,
}

/// What the beginning of one tar shows, or those of several tars together.
#[derive(Clone, Copy, Debug, Default)]
struct Heads {
    /// Bytes of selected samples, and the bytes that all members take.
    data: u64,
    span: u64,
    /// Bytes that were decoded, and those that they were decoded from, at most.
    unpacked: u64,
    packed: u64,
}

/// Estimates how many bytes of samples compressed tars contain. Reads a few bytes that state the unpacked size, and decodes the
/// beginnings of some to see what part of that size is data of selected samples. Only the first [`COMPRESSED_LOOKS_MAX`] tars are
/// looked into; the others count as if they told nothing. A tar that cannot be read counts so, too: its worker will report why.
///
/// Sizes are claims: a false one makes a stage-in refuse its own source, and nothing else. A gzip file that unpacks to more than
/// 4 GiB states too little, so it may be found not to fit only when room ends.
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
    let takes_all = selection.include.is_empty() && selection.exclude.is_empty();
    let looks = tars.len().clamp(1, COMPRESSED_LOOKS_MAX);
    let reads_max = (COMPRESSED_READS_SUM_MAX / looks as u32).clamp(COMPRESSED_READS_MIN, COMPRESSED_READS_MAX);
    let step = looks.div_ceil(COMPRESSED_HEADS_MAX as usize);
    let (mut samples, mut all_heads) = (CompressedSamples::default(), Heads::default());
    for (number, source) in tars.iter().enumerate() {
        activity.begin(&source.path)?;
        let nothing = CompressedSamples { untold_bytes: source.version.size, ..CompressedSamples::default() };
        let found = if number < COMPRESSED_LOOKS_MAX {
            let head = if number.is_multiple_of(step) { head(source, &selector, selection.decoder_memory_max()) } else { None };
            head.iter().for_each(|head| all_heads.add(head));
            look(source, &head.unwrap_or(all_heads), reads_max, &activity)?.unwrap_or(nothing)
        } else {
            nothing
        };
        samples.told_bytes = samples.told_bytes.saturating_add(found.told_bytes);
        samples.sure_bytes = samples.sure_bytes.saturating_add(if takes_all { found.told_bytes } else { 0 });
        samples.untold_bytes = samples.untold_bytes.saturating_add(found.untold_bytes);
    }
    Ok(samples)
}

/// Looks into one tar. `heads` says what its beginning shows, or those of other tars. Returns `None` if it tells nothing that can
/// be believed.
fn look(
    source: &Source,
    heads: &Heads,
    reads_max: u32,
    activity: &PlanActivity<'_>,
) -> Result<Option<CompressedSamples>, StageInError> {
    let Ok(file) = File::open(Path::new(OsStr::from_bytes(&source.path))) else { return Ok(None) };
    let UnpackedLen { told_bytes, untold_len } =
        unpacked_len(&file, source.compression, reads_max, &mut || activity.begin(&source.path))?;
    let told_len = source.version.size.saturating_sub(untold_len);
    if told_bytes == 0 || heads.span == 0 || heads.would_be_exceeded_by(told_bytes, told_len) {
        return Ok(None);
    }
    let data = u128::from(told_bytes) * u128::from(heads.data) / u128::from(heads.span);
    let told_bytes = u64::try_from(data).unwrap_or(u64::MAX);
    Ok(Some(CompressedSamples { told_bytes, sure_bytes: told_bytes, untold_bytes: untold_len }))
}

impl Heads {
    fn add(&mut self, head: &Self) {
        self.data = self.data.saturating_add(head.data);
        self.span = self.span.saturating_add(head.span);
        self.unpacked = self.unpacked.saturating_add(head.unpacked);
        self.packed = self.packed.saturating_add(head.packed);
    }

    /// Returns whether `told` bytes are far more than `len` bytes unpack to if they are like the heads.
    fn would_be_exceeded_by(&self, told: u64, len: u64) -> bool {
        let like_heads = u128::from(len) * u128::from(self.unpacked) / u128::from(self.packed.max(1));
        u128::from(told) > like_heads.saturating_mul(u128::from(COMPRESSED_CLAIM_MAX)) + u128::from(COMPRESSED_HEAD_LEN)
    }
}

/// Decodes the beginning of a tar. Returns `None` if no member is found there.
fn head(source: &Source, selector: &Selector, decoder_memory: u64) -> Option<Heads> {
    let (packed, unpacked) = (AtomicU64::new(0), AtomicU64::new(0));
    let file = File::open(Path::new(OsStr::from_bytes(&source.path))).ok()?;
    let input = Counted { input: file.take(COMPRESSED_HEAD_LEN), count: &packed };
    let decoded = decoder(source.compression, input, decoder_memory).ok()?.take(COMPRESSED_HEAD_LEN / 2);
    let mut tar = TarReader::new(Decoded(Counted { input: decoded, count: &unpacked }));
    let mut heads = Heads::default();
    // The end of the beginning looks like a truncated archive.
    while let Ok(Next::Member(member)) = tar.next() {
        heads.span = heads.span.saturating_add(tar.next_start() - tar.member_start());
        if member.kind == TarKind::File && matches!(selector.decide(&member.name, false), Decision::Take(_)) {
            heads.data = heads.data.saturating_add(member.stored_len);
        }
    }
    drop(tar);
    (heads.packed, heads.unpacked) = (packed.into_inner(), unpacked.into_inner());
    (heads.span > 0).then_some(heads)
}

/// Counts the bytes that are read.
struct Counted<'a, R> {
    input: R,
    count: &'a AtomicU64,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.input.read(buffer)?;
        self.count.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
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
    use dayfly_meta::catalog::{Compression, SourceKind, Version};

    use super::*;
    use crate::tests::noise;

    fn shell(folder: &Path, words: &str) {
        let done = crate::programs::program("bash").arg("-ec").arg(words).current_dir(folder).status().unwrap();
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
        std::fs::write(folder.path().join("noise"), noise(900 * 3000)).unwrap();
        shell(
            folder.path(),
            "mkdir t; for i in {1..900}; do head -c 3000 > t/$i.jpg; echo $i > t/$i.txt; done < noise; tar -cf a.tar t
             gzip -1k a.tar; zstd -q1 a.tar; xz -1k -T2 --block-size=1MiB a.tar; lz4 -q --content-size a.tar a.tar.lz4; bzip2 -1k a.tar
             zstd -q1 < a.tar > stream.tar.zst; split -n 2 a.tar part; zstd -q1 --rm partaa partab; cat part*.zst > two.tar.zst",
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
            // Frames of one tar.
            ("two.tar.zst", Compression::Zstd),
        ] {
            let found = sample(name, compression, &all);
            assert!(
                found.untold_bytes == 0 && found.told_bytes.abs_diff(expected) < expected / 10,
                "{name}: {found:?}, {expected}"
            );
            let txt = Selection { include: vec!["*.txt".to_owned()], ..Selection::default() };
            let found = sample(name, compression, &txt);
            assert!(found.told_bytes < 10_000 && found.sure_bytes == 0, "{name}: {found:?}");
        }
        for (name, compression) in [("a.tar.bz2", Compression::Bzip2), ("stream.tar.zst", Compression::Zstd)] {
            let found = sample(name, compression, &all);
            assert!(found.told_bytes == 0 && found.untold_bytes > 2_000_000, "{name}: {found:?}");
        }
    }

    #[test]
    fn a_claim_that_the_beginning_does_not_support_is_not_believed() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("f"), noise(5_000_000)).unwrap();
        shell(
            folder.path(),
            "tar -cf a.tar f; cp a.tar padded.tar; truncate -s 90M padded.tar; zstd -q padded.tar
             gzip -1k a.tar; head -c 4000000 a.tar.gz > cut.tar.gz; printf '\\xff\\xff\\xff\\xee' >> cut.tar.gz",
        );
        for (name, compression) in [("padded.tar.zst", Compression::Zstd), ("cut.tar.gz", Compression::Gzip)] {
            let source = source(&folder.path().join(name), compression);
            let found = sample_compressed(&[source], &Selection::default(), &ProgressMonitor::default()).unwrap();
            assert!(found.told_bytes == 0 && found.untold_bytes > 3_000_000, "{name}: {found:?}");
        }
    }

    #[test]
    fn many_tars_share_what_some_beginnings_show() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("f"), noise(100_000)).unwrap();
        shell(folder.path(), "tar -cf a.tar f; gzip -1 a.tar");
        let tars = vec![source(&folder.path().join("a.tar.gz"), Compression::Gzip); 500];
        let found = sample_compressed(&tars, &Selection::default(), &ProgressMonitor::default()).unwrap();
        assert!(found.untold_bytes == 0 && found.told_bytes.abs_diff(500 * 100_000) < 5_000_000, "{found:?}");
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
    }

    #[test]
    fn a_part_that_does_not_tell_is_counted_apart_and_looks_can_be_canceled() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("f"), noise(2_000_000)).unwrap();
        shell(
            folder.path(),
            "tar -cf a.tar f; split -n 2 a.tar part; zstd -q --rm partaa; zstd -q < partab > stream
             cat partaa.zst stream > mixed",
        );
        let mixed = source(&folder.path().join("mixed"), Compression::Zstd);
        let monitor = ProgressMonitor::default();
        let found = sample_compressed(std::slice::from_ref(&mixed), &Selection::default(), &monitor).unwrap();
        assert!(found.told_bytes.abs_diff(1_000_000) < 50_000 && found.untold_bytes.abs_diff(1_000_000) < 50_000, "{found:?}");
        assert!(monitor.take_counted().steps > 3, "each read is shown");
        monitor.cancel();
        let canceled = sample_compressed(&[mixed], &Selection::default(), &monitor);
        assert!(matches!(canceled, Err(StageInError::Cancelled)));
    }
}
