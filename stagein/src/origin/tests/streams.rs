//! Tests that read samples of compressed tars again.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::errno::Errno;

use super::super::stream::{Streamed, is_streamable};
use super::*;

const ENDINGS: [(&str, &str); 5] = [("gz", "gzip"), ("zst", "zstd"), ("xz", "xz"), ("bz2", "bzip2"), ("lz4", "lz4")];

/// Stages in a compressed tar that also has a sparse member, a large one, a hard link, and an empty one.
fn stage_in(folder: &Path, ending: &str) -> Option<Dataset> {
    let (_, program) = ENDINGS.into_iter().find(|(known, _)| *known == ending).unwrap();
    if !crate::programs::is_installed(program) {
        return None;
    }
    fs::create_dir(folder.join("t")).unwrap();
    (0..40).for_each(|number: usize| fs::write(folder.join(format!("t/{number}")), vec![number as u8; number * 997]).unwrap());
    let large: Vec<u8> = (0..(9_u32 << 20) / 4).flat_map(|word| word.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    fs::write(folder.join("t/large"), large).unwrap();
    shell(folder, "truncate -s 3M t/sparse; printf end >> t/sparse; ln t/7 t/link; : > t/empty");
    shell(folder, &format!("tar --sparse --sort=name -cf - t | {program} -c > a.tar.{ending}"));
    Some(Dataset::stage_in(&[&folder.join(format!("a.tar.{ending}"))], &Selection::default()))
}

/// Returns the blocks of samples, in the order of the tar.
fn blocks(dataset: &Dataset, is_wanted: impl Fn(&str) -> bool) -> Vec<BlockId> {
    let mut found = Vec::new();
    for (path, (sample, _)) in &dataset.samples {
        let place = dataset.catalog.origin(*sample).unwrap().place;
        let (Place::Bytes { offset } | Place::SparseTar { offset, .. }) = place else { panic!("{path}: {place:?}") };
        assert!(is_streamable(&dataset.catalog, *sample), "{path}");
        let (_, blocks) = dataset.catalog.sample(*sample).unwrap();
        found.extend(blocks.filter(|_| is_wanted(path)).map(|block| (offset, block)));
    }
    found.sort_unstable();
    // A hard link names the same sample.
    found.dedup();
    found.into_iter().map(|(_, block)| BlockId(block)).collect()
}

/// Streams blocks. Returns their bytes, and how many bytes of the source were reported as read.
fn stream<F: SourceFiles>(
    reader: &OriginReader<F>,
    dataset: &Dataset,
    wanted: &[BlockId],
) -> Result<(BTreeMap<BlockId, Vec<u8>>, u64), OriginError> {
    let (mut found, mut read) = (BTreeMap::<BlockId, Vec<u8>>::new(), 0);
    reader.stream(&dataset.catalog, 0, wanted, &mut |streamed| {
        match streamed {
            Streamed::Chunk(chunk, bytes) => {
                let whole = found.entry(chunk.block).or_default();
                assert_eq!(whole.len() as u64, chunk.start(), "chunks come in order");
                whole.extend(bytes);
            }
            Streamed::Progress(bytes) => read += bytes,
        }
        ControlFlow::Continue(())
    })?;
    Ok((found, read))
}

#[test]
fn wanted_samples_of_a_compressed_tar_are_found_in_one_pass() {
    for (ending, _) in ENDINGS {
        let folder = tempfile::tempdir().unwrap();
        let Some(dataset) = stage_in(folder.path(), ending) else { continue };
        let len = fs::metadata(folder.path().join(format!("a.tar.{ending}"))).unwrap().len();
        let reader = OriginReader::new(4);
        let selections: [&dyn Fn(&str) -> bool; 6] = [
            &|_| true,
            &|path| path == "t/0" || path == "t/1",
            &|path| path == "t/sparse",
            &|path| path.ends_with("large"),
            &|path| path.len() == 4,
            &|_| false,
        ];
        for (number, is_wanted) in selections.into_iter().enumerate() {
            let wanted = blocks(&dataset, is_wanted);
            let (found, read) = stream(&reader, &dataset, &wanted).unwrap_or_else(|error| panic!("{ending}, {number}: {error}"));
            assert_eq!(found.len(), wanted.len(), "{ending}, {number}");
            for (path, (sample, expected)) in dataset.samples.iter().filter(|(path, _)| is_wanted(path)) {
                let (_, blocks) = dataset.catalog.sample(*sample).unwrap();
                let bytes: Vec<u8> = blocks.flat_map(|block| found[&BlockId(block)].clone()).collect();
                assert!(bytes == *expected, "{ending}: {path}");
            }
            assert!(read <= len, "{read} of {len}");
        }
    }
}

#[test]
fn a_stream_ends_when_nobody_wants_more_and_does_not_read_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let Some(dataset) = stage_in(folder.path(), "gz") else { return };
    let (wanted, files) = (blocks(&dataset, |_| true), observed());
    let reader = OriginReader::with_files(files.clone(), 4);
    let mut taken = 0;
    let take = &mut |streamed: Streamed| {
        taken += usize::from(matches!(streamed, Streamed::Chunk(..)));
        ControlFlow::Break(())
    };
    reader.stream(&dataset.catalog, 0, &wanted, take).unwrap();
    assert!(taken <= 1);
    assert_eq!(take_reads(&files).0.len(), 1, "one read of the source");
}

/// SEMANTICS: "A call that the file system fails meanwhile is made up to four times within about two seconds."
#[test]
fn a_source_that_has_changed_fails_or_cannot_be_read_is_an_error_and_never_wrong_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let Some(dataset) = stage_in(folder.path(), "gz") else { return };
    let wanted = blocks(&dataset, |_| true);
    let faults: [(SourceFault, &str); 4] = [
        (SourceFault::Fail(Errno::EIO), "cannot read"),
        (SourceFault::Truncated(20_000), "ends at byte"),
        (SourceFault::Replaced, "no longer what was staged in"),
        (SourceFault::Fail(Errno::ENOENT), "does not exist anymore"),
    ];
    for (fault, expected) in faults {
        let files = faulty(move |call| match (call, fault) {
            (SourceCall::Read { offset, .. }, _) if offset > 0 => Some(fault),
            (SourceCall::State, SourceFault::Replaced) => Some(fault),
            (SourceCall::Open, SourceFault::Fail(Errno::ENOENT)) => Some(fault),
            _ => None,
        });
        let error = stream(&OriginReader::with_files(files, 4), &dataset, &wanted).unwrap_err().to_string();
        assert!(error.contains(expected), "{fault:?}: {error}");
    }
    let calls = AtomicU64::new(0);
    let files = faulty(move |_| (calls.fetch_add(1, Ordering::Relaxed) % 4 != 3).then_some(SourceFault::Fail(Errno::EIO)));
    assert!(stream(&OriginReader::with_files(files, 4), &dataset, &wanted).is_ok(), "calls that fail are made up to four times");
    let files = faulty(|call| matches!(call, SourceCall::Read { .. }).then_some(SourceFault::Short(7)));
    assert!(stream(&OriginReader::with_files(files, 4), &dataset, &wanted).is_ok(), "short reads are continued");
    // The size and the times stay the same.
    let path = folder.path().join("a.tar.gz");
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle..middle + 64].fill(0x55);
    let damaged = tempfile::tempdir().unwrap();
    fs::write(damaged.path().join("a.tar.gz"), &bytes).unwrap();
    let altered = Dataset::stage_in_and(&[&path], &Selection::default(), &|source| {
        let other = fs::File::open(damaged.path().join("a.tar.gz")).unwrap();
        let state = SystemFiles.state(&other).unwrap();
        source.path = damaged.path().join("a.tar.gz").into_os_string().into_encoded_bytes();
        (source.version, source.inode) = (state.version, state.inode);
    });
    let error = stream(&OriginReader::new(4), &altered, &blocks(&altered, |_| true)).unwrap_err().to_string();
    assert!(error.contains("is damaged"), "{error}");
}
