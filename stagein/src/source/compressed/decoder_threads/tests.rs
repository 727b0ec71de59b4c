//! Tests of threaded decoding.

use std::io::Write;

use super::super::tests::compress;
use super::splitter::PIECE_LEN_MIN;
use super::*;

fn unpack(compression: Compression, packed: &[u8], threads: usize) -> io::Result<Vec<u8>> {
    let mut file = tempfile::tempfile()?;
    file.write_all(packed)?;
    let decoders = DecoderLimits { threads, ahead_len: 1 << 20, memory_max: 256 << 20 };
    std::thread::scope(|scope| {
        let mut all = Vec::new();
        start(scope, compression, file, decoders, Arc::default())?.read_to_end(&mut all)?;
        Ok(all)
    })
}

#[test]
fn frames_are_decoded_in_order_and_damage_is_an_error() {
    let content: Vec<u8> = (0..1_500_000_u32).flat_map(|number| number.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    for compression in [Compression::Gzip, Compression::Zstd, Compression::Xz, Compression::Bzip2, Compression::Lz4] {
        let packed: Vec<u8> = content.chunks(1_300_000).flat_map(|piece| compress(compression, piece)).collect();
        for threads in [1, 3] {
            assert!(unpack(compression, &packed, threads).unwrap() == content, "{compression:?} with {threads} threads");
            assert!(unpack(compression, &packed[..packed.len() - 1], threads).is_err(), "{compression:?} with {threads} threads");
        }
        let mut damaged = packed.clone();
        damaged[packed.len() / 2] ^= 0x55;
        let unpacked = unpack(compression, &damaged, 3);
        // zstd writes no checksum by default.
        assert!(compression == Compression::Zstd || unpacked.is_err(), "{compression:?}");
    }
}

/// Returns a gzip stream as `pigz --independent` writes it: each part ends with a full flush and
/// another empty block. If `is_independent` is false, a sync flush lets parts refer to the ones
/// before them.
fn in_parts(content: &[u8], part_len: usize, is_independent: bool) -> Vec<u8> {
    let mut deflate = flate2::Compress::new(flate2::Compression::fast(), false);
    let mut packed = vec![0x1f, 0x8b, 8, 8, 0, 0, 0, 0, 0, 3, b'n', 0];
    let parts: Vec<&[u8]> = content.chunks(part_len).collect();
    for (number, part) in parts.iter().enumerate() {
        let mut out = Vec::with_capacity(part.len() * 2 + 1000);
        let is_last = number + 1 == parts.len();
        let flush = if is_independent { flate2::FlushCompress::Full } else { flate2::FlushCompress::Sync };
        let flush = if is_last { flate2::FlushCompress::Finish } else { flush };
        deflate.compress_vec(part, &mut out, flush).unwrap();
        packed.extend(out);
        if !is_last {
            packed.extend([0, 0, 0, 0xff, 0xff]);
        }
    }
    packed.extend(crc32fast::hash(content).to_le_bytes());
    packed.extend((content.len() as u32).to_le_bytes());
    packed
}

#[test]
fn independent_parts_are_decoded_in_order_and_dependent_parts_are_decoded_again_in_one_piece() {
    let content: Vec<u8> = (0..2_000_000_u32).flat_map(|number| (number / 3).wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    let true_parts = in_parts(&content, 100_000, true);
    assert!(true_parts.len() > 3 * PIECE_LEN_MIN, "the stream is long enough for several pieces");
    let false_parts = in_parts(&content, 100_000, false);
    let two = [&true_parts[..], &true_parts].concat();
    for threads in [1, 3] {
        assert!(unpack(Compression::Gzip, &true_parts, threads).unwrap() == content, "{threads} threads");
        assert!(unpack(Compression::Gzip, &false_parts, threads).unwrap() == content, "{threads} threads");
        assert!(unpack(Compression::Gzip, &two, threads).unwrap() == content.repeat(2), "{threads} threads");
        assert!(unpack(Compression::Gzip, &true_parts[..true_parts.len() - 1], threads).is_err());
        for at in [true_parts.len() - 6, true_parts.len() / 2] {
            let mut damaged = true_parts.clone();
            damaged[at] ^= 1;
            assert!(unpack(Compression::Gzip, &damaged, threads).is_err(), "{at} with {threads} threads");
        }
    }
}

#[test]
fn dropping_the_stream_ends_the_threads() {
    let content = vec![7; 40 << 20];
    let packed = compress(Compression::Zstd, &content).repeat(4);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&packed).unwrap();
    std::thread::scope(|scope| {
        let decoders = DecoderLimits { threads: 2, ahead_len: 1 << 20, memory_max: 256 << 20 };
        let mut decoded = start(scope, Compression::Zstd, file, decoders, Arc::default()).unwrap();
        decoded.read_exact(&mut [0; 1000]).unwrap();
    });
}
