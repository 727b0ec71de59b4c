//! Fuzz targets, one for each parser. Whatever the input, a parser may return an error, but it must
//! not panic, and it must not use memory out of proportion to the input.
//!
//! Each target runs for `DAYFLY_FUZZ_SECONDS` (1 s by default, which keeps the unit tests fast)
//! over mutations of good input. The first seed is always the same, or a new one with
//! `DAYFLY_TEST_FRESH_SEEDS`. A target that panics prints the seed of its input; `DAYFLY_FUZZ_SEED`
//! runs that input again.

use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dayfly_meta::catalog::Compression;
use dayfly_meta::limits::DECODER_MEMORY_DEFAULT;
use dayfly_meta::wire::control::Selection;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::memory_file::file_with;
use crate::selection::Selector;
use crate::source::compressed::{decoder, tests::compress};
use crate::source::plain::PlainReader;
use crate::source::tar::{Extension, Next, TarReader, find_header};
use crate::source::zip::{Record, ZipError, ZipKind, data, parts};
use crate::test_seed;

/// The environment variable that selects one input.
const SEED: &str = "DAYFLY_FUZZ_SEED";
const SECONDS_DEFAULT: f64 = 1.0;
/// A target runs at least this many inputs, even if a busy machine needs longer than the time that
/// the target should run.
const ROUNDS_MIN: u64 = 100;
/// The maximum number of bytes that a target unpacks from one input.
const UNPACKED_MAX: u64 = 4 << 20;

/// Runs a target on mutations of its corpus.
fn fuzz(corpus: &[Vec<u8>], target: impl Fn(&[u8])) {
    let seconds = std::env::var("DAYFLY_FUZZ_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    let end = Instant::now() + Duration::from_secs_f64(seconds.unwrap_or(SECONDS_DEFAULT));
    let is_one_input = std::env::var_os(SEED).is_some();
    let mut rounds = 0;
    let mut seed = test_seed::seed(SEED, 1);
    while Instant::now() < end || rounds < ROUNDS_MIN {
        let print_on_panic = SeedOnPanic(seed);
        target(&mutate(corpus, &mut StdRng::seed_from_u64(seed)));
        std::mem::forget(print_on_panic);
        rounds += 1;
        if is_one_input {
            return;
        }
        seed = seed.wrapping_add(1);
    }
}

/// Prints the seed when a target panics.
struct SeedOnPanic(u64);

impl Drop for SeedOnPanic {
    fn drop(&mut self) {
        eprintln!("run this input again with {SEED}={}", self.0);
    }
}

/// Returns an input of the corpus with a few random changes.
fn mutate(corpus: &[Vec<u8>], random: &mut StdRng) -> Vec<u8> {
    let mut bytes = corpus[random.random_range(0..corpus.len())].clone();
    for _ in 0..random.random_range(1..6) {
        if bytes.is_empty() {
            break;
        }
        let at = random.random_range(0..bytes.len());
        let len = random.random_range(1..=(bytes.len() - at).min(16));
        match random.random_range(0..9) {
            0 => bytes[at] ^= 1 << random.random_range(0..8),
            1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff, b'0', b'7', b'9', b' ', b'/', b'\n'][random.random_range(0..11)],
            2 => bytes[at..at + len].fill([0, 0xff, b'7', b'9'][random.random_range(0..4)]),
            3 => bytes.truncate(at),
            4 => drop(bytes.drain(at..at + len)),
            5 => drop(bytes.splice(at..at, (0..len).map(|_| random.random()).collect::<Vec<u8>>())),
            6 => {
                let other = &corpus[random.random_range(0..corpus.len())];
                let from = random.random_range(0..=other.len());
                bytes.splice(at.., other[from..].iter().copied());
            }
            7 => {
                let from = random.random_range(0..=bytes.len() - len);
                let piece = bytes[from..from + len].to_vec();
                bytes[at..at + len].copy_from_slice(&piece);
            }
            _ => bytes[at..at + len].iter_mut().for_each(|byte| *byte = random.random()),
        }
    }
    bytes
}

/// Returns random bytes, which no program can compress.
pub(crate) fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    StdRng::seed_from_u64(test_seed::seed("DAYFLY_TEST_NOISE_SEED", 1)).fill(&mut bytes[..]);
    bytes
}

/// Returns the output of a program that runs in a folder filled by the shell script `prepare`.
fn tool(program: &str, arguments: &[&str], prepare: &str) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let prepared = crate::programs::program("bash").args(["-ec", prepare]).current_dir(folder.path()).status().unwrap();
    assert!(prepared.success());
    let output = std::process::Command::new(program).args(arguments).current_dir(folder.path()).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Returns tars with the same times in each run, so that a seed gives the same input again. Only the
/// process id of `tar` varies, which is part of the names of sparse files in two of the tars.
fn tars() -> Vec<Vec<u8>> {
    let prepare = "mkdir a; echo 1 > a/one; ln -s one a/link; ln a/one a/hard; mkfifo a/fifo; head -c 3000 /dev/zero > a/two
        name=$(printf 'n%.0s' {1..180}); echo 2 > a/$name; ln -s $name a/to
        truncate -s 1M a/sparse; echo end >> a/sparse; for i in {1..30}; do echo x | dd of=a/pieces bs=1 seek=$((i * 16384)) 2> /dev/null; done";
    let pack =
        |options: &[&str]| tool("tar", &[&["-c", "--sort=name", "--mtime=@1000000000.25"], options, &["a"]].concat(), prepare);
    let pax =
        |options: &[&str]| pack(&[&["--format=pax", "--pax-option=atime:=1000000001.5,ctime:=1000000002.5"], options].concat());
    vec![
        pack(&["--format=gnu"]),
        pax(&[]),
        pack(&["--format=gnu", "--sparse"]),
        pax(&["--sparse", "--sparse-version=0.0"]),
        pax(&["--sparse", "--sparse-version=0.1"]),
        pax(&["--sparse", "--sparse-version=1.0"]),
        pax(&["--pax-option=globexthdr.name=g,globexthdr.mtime=5,comment=x,mtime=5"]),
    ]
}

fn zips() -> Vec<Vec<u8>> {
    // Members get the same time in each run.
    let script = "import zipfile, sys, io, time
time.time = lambda: 1e9
out = io.BytesIO(); zip = zipfile.ZipFile(out, 'w')
zip.writestr('stored', b'a' * 300); zip.writestr('deflated', b'b' * 3000, zipfile.ZIP_DEFLATED)
zip.writestr('bzip2', b'c' * 300, zipfile.ZIP_BZIP2); zip.writestr('d/', b'')
with zip.open(zipfile.ZipInfo('long'), 'w', force_zip64=True) as f: f.write(b'x')
zip.comment = b'comment'; zip.close(); sys.stdout.buffer.write(out.getvalue())";
    let plain = tool("python3", &["-c", script], "true");
    vec![[b"#!/bin/sh\n", &plain[..]].concat(), plain]
}

#[test]
fn fuzz_tar() {
    fuzz(&tars(), |bytes| {
        let mut tar = TarReader::new(bytes);
        while let Ok(Next::Member(_)) = tar.next() {
            let mut data = Vec::new();
            if (&mut tar).take(UNPACKED_MAX).read_to_end(&mut data).is_err() {
                tar.resume(u64::MAX);
            }
        }
    });
}

#[test]
fn fuzz_tar_from_the_middle() {
    fuzz(&tars(), |bytes| {
        let mut reader = PlainReader::new(file_with(bytes), 0, 4096, Arc::default()).unwrap();
        reader.seek(bytes.len() as u64 / 3 / 512 * 512);
        while let Some(at) = find_header(&mut reader, bytes.len() as u64).unwrap() {
            let mut tar = TarReader::at(&mut reader, at, Extension::default());
            while let Ok(Next::Member(_)) = tar.next() {}
            reader.seek(at + 512);
        }
    });
}

#[test]
fn fuzz_extended_headers() {
    let texts = [
        &b"15 path=a/\xff\xfe=b\n20 mtime=12.5000001\n12 size=500\n"[..],
        b"29 GNU.sparse.map=0,5,10,20,3\n22 GNU.sparse.major=1\n25 GNU.sparse.offset=512\n27 GNU.sparse.numbytes=100\n",
    ];
    fuzz(&texts.map(<[u8]>::to_vec), |bytes| {
        let mut extension = Extension::default();
        if extension.parse(bytes).is_ok() {
            let mut again = Extension::default();
            again.parse(&extension.records()).unwrap();
            extension.sparse = None;
            assert_eq!(again, extension, "parsing the records gives the fields that were written");
        }
    });
}

#[test]
fn fuzz_zip() {
    fuzz(&zips(), |bytes| {
        let file = file_with(bytes);
        let _ = parts::<ZipError>(&file, &mut |part, shift| {
            for record in Record::read_all(&part.records, part.offset, shift)? {
                let mut reader = PlainReader::new(file.try_clone()?, 0, 0, Arc::default())?;
                if record.kind == ZipKind::File && data::seek(&mut reader, &record).is_ok() {
                    let mut unpacked = Vec::new();
                    let _ = data::open(&mut reader, &record).map(|data| data.take(UNPACKED_MAX).read_to_end(&mut unpacked));
                }
            }
            Ok(())
        });
    });
}

#[test]
fn fuzz_decoders() {
    let content: Vec<u8> = (0..2000_u32).flat_map(|number| (number / 3).to_le_bytes()).collect();
    let all = [Compression::Gzip, Compression::Zstd, Compression::Xz, Compression::Bzip2, Compression::Lz4];
    let corpus: Vec<Vec<u8>> = all.iter().map(|&compression| compress(compression, &content).repeat(2)).collect();
    fuzz(&corpus, |bytes| {
        for compression in all {
            let mut unpacked = Vec::new();
            let _ = decoder(compression, bytes, DECODER_MEMORY_DEFAULT)
                .map(|decoder| decoder.take(UNPACKED_MAX).read_to_end(&mut unpacked));
            crate::source::compressed::inspect(compression, bytes);
        }
    });
}

#[test]
fn fuzz_names_and_patterns() {
    let corpus =
        ["*.jpg", "[a-z]?{x,y}/**", "a/../b", "/x//./y", "\\*", "n01440764_10026.JPEG"].map(|text| text.as_bytes().to_vec());
    fuzz(&corpus, |bytes| {
        let text = String::from_utf8_lossy(bytes).into_owned();
        let selection =
            Selection { include: vec![text.clone()], exclude: vec![text], strip_components: 1, ..Selection::default() };
        if let Ok(selector) = Selector::new(&selection) {
            selector.decide(bytes, false);
        }
    });
}
