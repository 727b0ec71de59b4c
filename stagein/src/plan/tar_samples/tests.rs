//! Tests of the estimates, most of them with tars that are made up where they are read.

use std::collections::HashMap;

use dayfly_meta::catalog::{Compression, SourceKind, Version};

use super::*;

/// A tar of which only the members' sizes exist. Names end with `.jpg`, and each fourth with `.txt`.
struct ImaginedTar {
    sizes: Vec<u64>,
    /// Where each member begins, and where the last one ends.
    starts: Vec<u64>,
}

impl ImaginedTar {
    fn new(sizes: &[u64]) -> Self {
        let mut starts = vec![0];
        for size in sizes {
            starts.push(starts[starts.len() - 1] + (BLOCK_LEN as u64 + size).next_multiple_of(BLOCK_LEN as u64));
        }
        Self { sizes: sizes.to_vec(), starts }
    }

    fn source(&self, path: &[u8]) -> Source {
        // Tar fills its last record of 20 blocks.
        let size = (self.starts[self.sizes.len()] + 2 * BLOCK_LEN as u64).next_multiple_of(20 * BLOCK_LEN as u64);
        let version = Version { size, ..Version::default() };
        let (kind, compression) = (SourceKind::Tar, Compression::None);
        Source { path: path.to_vec(), prefix: Vec::new(), kind, compression, version, inode: 0 }
    }

    fn read(&self, start: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        let first = self.starts.partition_point(|&at| at < start);
        for (number, &at) in self.starts.iter().enumerate().skip(first).take_while(|(_, at)| **at < start + len) {
            let Some(&size) = self.sizes.get(number) else { break };
            let at = (at - start) as usize;
            bytes[at..at + BLOCK_LEN].copy_from_slice(&header(number, size));
        }
        bytes
    }
}

fn header(number: usize, size: u64) -> [u8; BLOCK_LEN] {
    let mut header = [0; BLOCK_LEN];
    let mut put = |at: usize, text: String| header[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, format!("{}/{number}.{}", number % 10, ["txt", "jpg", "jpg", "jpg"][number % 4]));
    put(100, "0000644\0".to_owned());
    if size < 8 << 30 {
        put(124, format!("{size:011o}\0"));
    }
    put(136, "00000000000\0".to_owned());
    put(156, "0".to_owned());
    put(257, "ustar\x0000".to_owned());
    put(148, " ".repeat(8));
    if size >= 8 << 30 {
        header[124] = 0x80;
        header[128..136].copy_from_slice(&size.to_be_bytes());
    }
    let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}

/// Estimates what imagined tars contain. Returns the number of reads too.
fn sample(tars: &[ImaginedTar], selection: &Selection) -> (TarSamples, u64) {
    let named = tars.iter().enumerate().map(|(number, tar)| (number.to_string().into_bytes(), tar));
    let by_path: HashMap<Vec<u8>, &ImaginedTar> = named.collect();
    let sources: Vec<Source> = tars.iter().enumerate().map(|(number, tar)| tar.source(number.to_string().as_bytes())).collect();
    let mut reads = 0;
    let found = estimate(&sources, &Selector::new(selection).unwrap(), &mut |source, start, len| {
        reads += 1;
        assert!(start + len <= source.version.size && start % BLOCK_LEN as u64 == 0);
        Ok(Some(by_path[&source.path].read(start, len)))
    });
    (found.unwrap(), reads)
}

/// Makes the same numbers in each run.
struct Random(u64);

impl Random {
    fn below_one(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns sizes of a log-normal distribution around `median`.
    fn sizes(&mut self, count: usize, median: f64, spread: f64) -> Vec<u64> {
        // The sum of twelve is close to a normal distribution.
        let mut normal = || (0..12).map(|_| self.below_one()).sum::<f64>() - 6.0;
        (0..count).map(|_| (median * (spread * normal()).exp()) as u64).collect()
    }

    fn shuffle(&mut self, sizes: &mut [u64]) {
        for at in (1..sizes.len()).rev() {
            sizes.swap(at, (self.below_one() * (at + 1) as f64) as usize);
        }
    }
}

#[test]
fn the_bytes_in_tars_are_estimated_within_two_percent_in_any_order() {
    let mut random = Random(7);
    let mix = |first: &[u64], second: &[u64]| [first, second].concat();
    for (name, percent, sizes) in [
        ("3 KB", 2.0, vec![3000; 100_000]),
        ("100 KB", 2.0, vec![100_000; 100_000]),
        ("around 3 KB", 2.0, random.sizes(100_000, 2000.0, 1.0)),
        ("around 100 KB", 2.0, random.sizes(100_000, 60_000.0, 1.0)),
        ("widely mixed", 2.0, random.sizes(100_000, 10_000.0, 2.0)),
        ("pairs", 2.0, [300, 100_000].repeat(50_000)),
        ("triples", 2.0, [100, 700, 20_000].repeat(30_000)),
        ("large", 2.0, random.sizes(300, 30e6, 0.5)),
        ("empty and large", 2.0, mix(&vec![0; 50_000], &vec![100_000; 50_000])),
        // In a tar, tiny members take ten times their size. If 1,000 large ones are spread at random over
        // 1,000 tars, tars differ so much that 64 of them have a standard error of 5 %.
        ("tiny and large", 15.0, mix(&vec![100; 90_000], &vec![200_000; 1000])),
        ("tiny and huge", 2.0, mix(&vec![100; 90_000], &[30_000_000; 10])),
    ] {
        let bytes: u64 = sizes.iter().sum();
        let files = sizes.len() as u64;
        let mut ascending = sizes.clone();
        ascending.sort_unstable();
        let descending = ascending.iter().rev().copied().collect();
        let mut shuffled = sizes.clone();
        random.shuffle(&mut shuffled);
        for (order, sizes) in [("as made", sizes), ("ascending", ascending), ("descending", descending), ("shuffled", shuffled)] {
            for tars in [1, 1000] {
                let tars: Vec<_> = sizes.chunks(sizes.len().div_ceil(tars)).map(ImaginedTar::new).collect();
                let (found, reads) = sample(&tars, &Selection::default());
                let by = found.bytes.abs_diff(bytes) as f64 / bytes as f64;
                let files_by = found.files as f64 / files as f64;
                assert!(by * 100.0 <= percent, "{name}, {order}, {} tars: {} of {bytes}", tars.len(), found.bytes);
                // Members that are larger than windows are seldom seen to begin, and all empty files may
                // lie together between two windows.
                let files_min = if found.seen < TAR_MEMBERS_MIN || name.contains("empty") { 0.0 } else { 0.5 };
                assert!((files_min..2.0).contains(&files_by), "{name}, {order}, {} tars: {found:?}, {files}", tars.len());
                assert!(reads <= TAR_WINDOWS_MAX, "{name}, {order}: {reads} reads");
            }
        }
    }
}

/// Makes a real tar with holes instead of data.
fn write_tar(path: &Path, sizes: &[u64]) -> Source {
    let file = File::create(path).unwrap();
    let tar = ImaginedTar::new(sizes);
    for (number, (&size, &at)) in tar.sizes.iter().zip(&tar.starts).enumerate() {
        file.write_all_at(&header(number, size), at).unwrap();
    }
    let source = tar.source(path.as_os_str().as_bytes());
    file.set_len(source.version.size).unwrap();
    source
}

#[test]
fn tars_that_are_short_together_are_counted_exactly() {
    let sizes: Vec<u64> = (0..3000).map(|number| number % 7000).collect();
    let tars: Vec<_> = sizes.chunks(50).map(ImaginedTar::new).collect();
    let (found, reads) = sample(&tars, &Selection::default());
    assert_eq!((found.files, found.bytes, found.seen, reads), (3000, sizes.iter().sum(), 3000, 60));
    let folder = tempfile::tempdir().unwrap();
    let tar = write_tar(&folder.path().join("a.tar"), &[100, 0, 2000]);
    let found = sample_tars(&[tar], &Selection::default(), &ProgressMonitor::default()).unwrap();
    assert_eq!(found, TarSamples { files: 3, bytes: 2100, seen: 3 });
    // An empty tar, and an empty list.
    assert_eq!(sample(&[ImaginedTar::new(&[])], &Selection::default()).0, TarSamples::default());
    assert_eq!(sample(&[], &Selection::default()), (TarSamples::default(), 0));
}

#[test]
fn however_many_tars_there_are_only_some_are_read() {
    let tars: Vec<_> = (0..100_000).map(|number| ImaginedTar::new(&[number % 20_000; 3])).collect();
    let (found, reads) = sample(&tars, &Selection::default());
    assert_eq!(reads, TAR_WINDOWS_MAX);
    let bytes = (0..100_000_u64).map(|number| number % 20_000 * 3).sum::<u64>();
    assert!(found.bytes.abs_diff(bytes) < bytes / 50, "{found:?}, {bytes}");
    // One member of 20 GiB.
    let (found, _) = sample(&[ImaginedTar::new(&[20 << 30])], &Selection::default());
    assert!(found.files == 1 && found.bytes.abs_diff(20 << 30) < 1 << 24, "{found:?}");
}

#[test]
fn only_selected_members_count() {
    let only = |pattern: &str| Selection { include: vec![pattern.to_owned()], ..Selection::default() };
    let tar = |sizes: &[u64]| [ImaginedTar::new(sizes)];
    let near = |found: u64, expected: u64, name: &str| {
        assert!(found.abs_diff(expected) <= expected / 10, "{name}: {found}, not {expected}");
    };
    let (found, _) = sample(&tar(&[3000; 20_000]), &only("*.txt"));
    near(found.bytes, 15_000_000, "texts");
    near(found.files, 5000, "texts");
    // Texts are small, and most windows begin within other members.
    let sizes = [50_000, 500_000, 500_000, 500_000].repeat(500);
    near(sample(&tar(&sizes), &only("*.jpg")).0.bytes, 750_000_000, "large");
    let (found, _) = sample(&tar(&sizes), &only("*.png"));
    assert_eq!((found.files, found.bytes), (0, 0));
    let stripped = Selection { strip_components: 2, ..Selection::default() };
    assert_eq!(sample(&tar(&sizes), &stripped).0.bytes, 0);
}

#[test]
fn tars_that_cannot_be_read_count_as_the_others_do() {
    let folder = tempfile::tempdir().unwrap();
    let tar = write_tar(&folder.path().join("a.tar"), &vec![3000; 20_000]);
    let gone = Source { path: b"/nowhere".to_vec(), ..tar.clone() };
    let sample = |tars: &[Source]| sample_tars(tars, &Selection::default(), &ProgressMonitor::default()).unwrap();
    let found = sample(&[gone.clone(), tar.clone()]);
    assert!(found.bytes.abs_diff(120_000_000) < 2_000_000, "{found:?}");
    // Nothing is known, so all bytes may be samples.
    let found = sample(std::slice::from_ref(&gone));
    assert_eq!((found.bytes, found.seen), (gone.version.size, 0));
    let longer = Source { version: Version { size: u64::MAX, ..Version::default() }, ..gone };
    assert_eq!(sample(&[longer.clone(), longer]).bytes, u64::MAX);
}

#[test]
fn every_read_is_shown_and_can_be_the_last() {
    let monitor = ProgressMonitor::default();
    let tars: Vec<_> = (0..3).map(|number| ImaginedTar::new(&[9 << 30]).source(&[b'a' + number])).collect();
    sample_tars(&tars, &Selection::default(), &monitor).unwrap();
    assert_eq!(monitor.take_counted().steps, TAR_WINDOWS_MAX);
    monitor.cancel();
    assert!(matches!(sample_tars(&tars, &Selection::default(), &monitor), Err(StageInError::Cancelled)));
    assert_eq!(monitor.take_counted().steps, 1);
}

#[test]
fn members_with_holes_count_as_long_as_they_become() {
    let folder = tempfile::tempdir().unwrap();
    for format in ["gnu", "pax"] {
        let script = format!(
            "mkdir -p d; for i in {{1..40}}; do truncate -s 10M d/$i; echo end >> d/$i; done
             tar --format={format} --sparse -cf a.tar d; truncate -s 5M d/hole; tar --format={format} --sparse -rf a.tar d/hole"
        );
        let done = crate::programs::program("bash").args(["-ec", &script]).current_dir(folder.path()).status().unwrap();
        assert!(done.success());
        let path = folder.path().join("a.tar");
        let version = Version { size: path.metadata().unwrap().len(), ..Version::default() };
        let source = Source { path: path.as_os_str().as_bytes().to_vec(), version, ..ImaginedTar::new(&[]).source(b"") };
        let found = sample_tars(&[source], &Selection::default(), &ProgressMonitor::default()).unwrap();
        let expected = (40 << 20) * 10 + 40 * 4 + (5 << 20);
        assert_eq!((found.files, found.bytes), (41, expected), "{format}");
        std::fs::remove_dir_all(folder.path().join("d")).unwrap();
    }
}

#[test]
fn hostile_headers_neither_panic_nor_overflow() {
    let selector = Selector::new(&Selection::default()).unwrap();
    let mut random = Random(3);
    for _ in 0..20_000 {
        let mut bytes = [&header(1, 700)[..], &[0; 1024], &header(2, u64::MAX >> 2), &header(3, 8 << 40), &[0; 999]].concat();
        for _ in 0..(random.below_one() * 4.0) as usize {
            let block = (random.below_one() * 6.0) as usize * BLOCK_LEN;
            let at = block + (random.below_one() * 512.0) as usize;
            if let Some(byte) = bytes.get_mut(at) {
                *byte = (random.below_one() * 256.0) as u8;
            }
            // The checksum is right, so that the field counts.
            if let Some(header) = bytes.get_mut(block..block + BLOCK_LEN) {
                header[148..156].fill(b' ');
                let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
                header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            }
        }
        bytes.truncate((random.below_one() * 4000.0) as usize);
        let window = Window::of(&bytes, random.below_one() < 0.5, &selector);
        let found = sum_up(&[window], u128::MAX, 1, random.below_one() < 0.5);
        assert!(found.seen <= 8);
    }
}
