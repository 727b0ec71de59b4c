//! Tests with files that the formats' own tools have made.

use std::path::Path;

use dayfly_meta::limits::COMPRESSED_READS_MAX;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::super::frames::tests::bgzf;
use super::super::tests::compress;
use super::*;
use crate::programs::is_installed;

/// Length of the content that most files here unpack to.
const LEN: u64 = 12_000_000;

/// Runs a shell script, and returns false if the first program in it is not installed.
fn shell(folder: &Path, script: &str) -> bool {
    let program = script.split(' ').next().unwrap();
    if !is_installed(program) {
        return false;
    }
    let done = crate::programs::program("bash").args(["-ec", script]).current_dir(folder).status().unwrap();
    assert!(done.success(), "{script}");
    true
}

/// Returns what a file tells, and the number of reads that this took.
fn look(path: &Path, compression: Compression) -> (UnpackedLen, u32) {
    let mut reads = 0;
    let found = unpacked_len(&File::open(path).unwrap(), compression, COMPRESSED_READS_MAX, &mut || {
        reads += 1;
        Ok(())
    });
    (found.unwrap(), reads)
}

fn look_at(bytes: &[u8], compression: Compression) -> (UnpackedLen, u32) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("x"), bytes).unwrap();
    look(&folder.path().join("x"), compression)
}

fn told(told_bytes: u64) -> UnpackedLen {
    UnpackedLen { told_bytes, untold_len: 0 }
}

fn untold(bytes: &[u8]) -> UnpackedLen {
    UnpackedLen { told_bytes: 0, untold_len: bytes.len() as u64 }
}

/// Returns bytes that shrink to about a half.
fn content(len: u64) -> Vec<u8> {
    let mut random = StdRng::seed_from_u64(1);
    (0..len).map(|_| random.random::<u8>() & 0x0f).collect()
}

#[test]
fn files_of_the_formats_own_tools_tell_what_they_unpack_to() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("f"), content(LEN)).unwrap();
    std::fs::write(folder.path().join("s"), content(100_000)).unwrap();
    let both = LEN + 100_000;
    for (script, compression, expected, reads_max) in [
        ("zstd -q -c f > x", Compression::Zstd, Some(LEN), 3),
        ("zstd -q -T2 -c f > x", Compression::Zstd, Some(LEN), 3),
        ("zstd -q --long=27 -c f > x", Compression::Zstd, Some(LEN), 3),
        ("zstd -q -c s f > x", Compression::Zstd, Some(both), 9),
        ("zstd -q -c < f > x", Compression::Zstd, None, 3),
        ("pzstd -q -p 2 -c f > x", Compression::Zstd, None, 3),
        ("xz -0 -c f > x", Compression::Xz, Some(LEN), 2),
        ("xz -0 -T2 --block-size=1MiB -c < f > x", Compression::Xz, Some(LEN), 2),
        ("xz -0 -T1 -c f s f > x; head -c 4096 /dev/zero >> x", Compression::Xz, Some(both + LEN), 8),
        ("xz -0 --check=none -c s > x", Compression::Xz, Some(100_000), 2),
        ("lz4 -q --content-size -c f > x", Compression::Lz4, Some(LEN), 2),
        ("lz4 -q --content-size -BD -BX -c s > x; lz4 -q --content-size -B4 -c f >> x", Compression::Lz4, Some(both), 5),
        ("lz4 -q -c f > x", Compression::Lz4, None, 2),
        ("gzip -1 -c f > x", Compression::Gzip, Some(LEN), 2),
        ("pigz -p 2 -c f > x", Compression::Gzip, Some(LEN), 2),
        // The claim of the last of two members is too small.
        ("gzip -1 -c f s > x", Compression::Gzip, None, 2),
        ("gzip -1 -c s f > x", Compression::Gzip, Some(LEN), 2),
        ("bgzip -c f > x", Compression::Gzip, Some(LEN), 256),
        ("bzip2 -1 -c f > x", Compression::Bzip2, None, 0),
    ] {
        if shell(folder.path(), script) {
            let (found, reads) = look(&folder.path().join("x"), compression);
            let len = std::fs::metadata(folder.path().join("x")).unwrap().len();
            // A file from pzstd begins with a skippable frame.
            let is_untold = found.told_bytes == 0 && found.untold_len >= len - 12;
            assert!(expected.map_or(is_untold, |bytes| found == told(bytes)), "{script}: {found:?} of {len}");
            assert!(reads <= reads_max, "{script}: {reads} reads");
        }
    }
}

#[test]
fn what_comes_after_the_last_frame_that_tells_is_counted() {
    let stream = |bytes: &[u8]| zstd::encode_all(bytes, 1).unwrap();
    let telling = |bytes: &[u8]| zstd::bulk::compress(bytes, 1).unwrap();
    let skippable = [&0x184d_2a53_u32.to_le_bytes()[..], &3_u32.to_le_bytes(), b"abc"].concat();
    let bytes = content(300_000);
    // Small contents have headers of their own kinds.
    for lens in [&[0_usize][..], &[1, 255, 256, 257], &[65_791, 65_792, 0, 300_000], &[10; 100]] {
        let frames = lens.iter().map(|&len| [&telling(&bytes[..len])[..], &skippable].concat());
        let whole = frames.collect::<Vec<_>>().concat();
        assert_eq!(look_at(&whole, Compression::Zstd).0, told(lens.iter().sum::<usize>() as u64), "{lens:?}");
    }
    let tail = stream(&bytes);
    let mixed = [telling(&bytes), skippable, tail.clone()].concat();
    let found = look_at(&mixed, Compression::Zstd).0;
    assert_eq!(found.told_bytes, 300_000);
    assert!(found.untold_len.abs_diff(tail.len() as u64) < 16, "{found:?}");
    // Of many frames, only so many are looked at.
    let many = telling(&bytes[..20_000]).repeat(2000);
    let (found, reads) = look_at(&many, Compression::Zstd);
    assert_eq!(reads, COMPRESSED_READS_MAX);
    let share = found.told_bytes as f64 / 40e6;
    let untold_share = found.untold_len as f64 / many.len() as f64;
    assert!(share > 0.05 && (share + untold_share - 1.0).abs() < 0.01, "{found:?}");
    // The same of blocks of bgzf.
    let many = bgzf(&bytes[..60_000]).repeat(1000);
    let (found, reads) = look_at(&many, Compression::Gzip);
    assert!(reads == COMPRESSED_READS_MAX && found.told_bytes > 10_000_000 && found.untold_len > 0, "{found:?}");
    let few = bgzf(&bytes[..60_000]).repeat(100);
    assert_eq!(look_at(&[few, bgzf(b"")].concat(), Compression::Gzip).0, told(6_000_000));
}

#[test]
fn the_seek_table_of_a_zstd_file_tells() {
    let bytes = content(300_000);
    let make = |has_checksums: bool, lie: u32| {
        let mut file = Vec::new();
        let mut table = Vec::new();
        for piece in bytes.chunks(1000) {
            // The frames themselves do not tell.
            let frame = zstd::encode_all(piece, 1).unwrap();
            table.extend((frame.len() as u32 + lie).to_le_bytes());
            table.extend((piece.len() as u32).to_le_bytes());
            table.extend(if has_checksums { &[7; 4][..] } else { &[] });
            file.extend(frame);
        }
        file.extend(0x184d_2a5e_u32.to_le_bytes());
        file.extend((table.len() as u32 + 9).to_le_bytes());
        file.extend(table);
        file.extend(300_u32.to_le_bytes());
        file.push(if has_checksums { 0x80 } else { 0 });
        file.extend(0x8f92_eab1_u32.to_le_bytes());
        file
    };
    for has_checksums in [false, true] {
        let (found, reads) = look_at(&make(has_checksums, 0), Compression::Zstd);
        assert_eq!(found, told(300_000));
        assert!(reads <= 2, "{reads} reads");
        assert_eq!(look_at(&make(has_checksums, 1), Compression::Zstd).0.told_bytes, 0);
    }
}

/// A gzip file's claim has 32 bits.
#[test]
fn a_claim_that_has_wrapped_or_is_impossible_is_not_believed() {
    let folder = tempfile::tempdir().unwrap();
    let gzip = |len: u64, claim: u32| {
        let file = File::create(folder.path().join("x")).unwrap();
        file.set_len(len).unwrap();
        file.write_all_at(&compress(Compression::Gzip, b"content"), 0).unwrap();
        file.write_all_at(&claim.to_le_bytes(), len - 4).unwrap();
        look(&folder.path().join("x"), Compression::Gzip).0
    };
    let nothing = |untold_len| UnpackedLen { told_bytes: 0, untold_len };
    for (len, claim, expected) in [
        (1 << 20, 3 << 20, told(3 << 20)),
        // No file of this length unpacks to so much.
        (1 << 20, u32::MAX, nothing(1 << 20)),
        (1 << 20, 1032 << 20, told(1032 << 20)),
        (1 << 20, (1032 << 20) + 1, nothing(1 << 20)),
        // Bytes that do not shrink grow a little.
        (100 << 20, 99 << 20, told(99 << 20)),
        (100 << 20, 90 << 20, nothing(100 << 20)),
        (3 << 30, 1 << 30, nothing(3 << 30)),
        (3 << 30, u32::MAX, told(u64::from(u32::MAX))),
        (5 << 30, u32::MAX, nothing(5 << 30)),
    ] {
        assert_eq!(gzip(len, claim), expected, "{len} {claim}");
    }
    // A frame of zstd and one of lz4 that claim 2^60 bytes.
    let zstd = [&[0x28, 0xb5, 0x2f, 0xfd, 0xe0][..], &(1_u64 << 60).to_le_bytes(), &[1, 0, 0]].concat();
    assert_eq!(look_at(&zstd, Compression::Zstd).0, untold(&zstd));
    let lz4 = [&[4, 0x22, 0x4d, 0x18, 0x68, 0x70][..], &u64::MAX.to_le_bytes(), &[0; 5]].concat();
    assert_eq!(look_at(&lz4, Compression::Lz4).0, untold(&lz4));
    assert_eq!(look_at(&[zstd.repeat(3), zstd].concat(), Compression::Zstd).0.told_bytes, 0);
}

#[test]
fn an_error_of_the_callback_ends_the_look() {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&compress(Compression::Xz, b"x"), 0).unwrap();
    for compression in [Compression::Zstd, Compression::Lz4, Compression::Xz, Compression::Gzip] {
        let found = unpacked_len(&file, compression, COMPRESSED_READS_MAX, &mut || Err(StageInError::Cancelled));
        assert!(matches!(found, Err(StageInError::Cancelled)));
    }
}

#[test]
fn hostile_bytes_neither_panic_nor_tell_too_much() {
    let bytes = content(3000);
    let mut random = StdRng::seed_from_u64(17);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x");
    let seekable = {
        let table = [3000_u32.to_le_bytes(), 1_u32.to_le_bytes()].concat();
        let end = [&[0x5e, 0x2a, 0x4d, 0x18, 17, 0, 0, 0][..], &table, &[1, 0, 0, 0, 0, 0xb1, 0xea, 0x92, 0x8f]].concat();
        [zstd::encode_all(&bytes[..], 1).unwrap(), end].concat()
    };
    for (compression, whole) in [
        (Compression::Zstd, zstd::bulk::compress(&bytes, 1).unwrap().repeat(3)),
        (Compression::Zstd, seekable),
        (Compression::Lz4, compress(Compression::Lz4, &bytes).repeat(2)),
        (Compression::Xz, compress(Compression::Xz, &bytes).repeat(2)),
        (Compression::Gzip, compress(Compression::Gzip, &bytes)),
        (Compression::Gzip, bgzf(&bytes).repeat(3)),
    ] {
        for _ in 0..1500 {
            let mut hostile = whole.clone();
            for _ in 0..random.random_range(1..4) {
                // Most of what is looked at is at the ends.
                let edge = random.random_range(0..hostile.len().min(40));
                let at = if random.random() { edge } else { hostile.len() - 1 - edge };
                match random.random_range(0..4) {
                    0 => hostile[at] = [0, 0x7f, 0x80, 0xff][random.random_range(0..4)],
                    1 => hostile[at] ^= 1 << random.random_range(0..8),
                    2 if hostile.len() > 50 => hostile.truncate(at.max(45)),
                    _ => hostile.insert(at, random.random()),
                }
            }
            std::fs::write(&path, &hostile).unwrap();
            let (found, reads) = look(&path, compression);
            assert!(reads <= COMPRESSED_READS_MAX && found.untold_len <= hostile.len() as u64);
            assert!(found.told_bytes <= hostile.len() as u64 * growth_max(compression), "{compression:?}: {found:?}");
        }
    }
    for len in 0..24 {
        for compression in [Compression::Zstd, Compression::Lz4, Compression::Xz, Compression::Gzip, Compression::Bzip2] {
            assert_eq!(look_at(&vec![0; len], compression).0.told_bytes, 0, "{compression:?} {len}");
        }
    }
}
