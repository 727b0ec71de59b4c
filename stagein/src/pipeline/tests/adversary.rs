//! Tests of tars that are designed to fool a worker that starts in the middle: members whose data looks like headers, like
//! archives, or like the end mark, and extended headers at the boundaries of ranges. However such a tar is split, the result must
//! be the same as for a reader that starts at the beginning.

use std::io::Write;
use std::os::unix::ffi::OsStrExt;

use dayfly_meta::limits::RANGE_LEN_MIN;
use dayfly_meta::wire::peer::{TarPosition, TarRange, Work};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::plan::{SplitTar, UnitQueue};
use crate::source::plain::version;

/// Returns a header block with a correct checksum.
fn header(name: &[u8], kind: u8, size: u64, magic: &[u8; 8]) -> Vec<u8> {
    let mut block = vec![0; 512];
    block[..name.len().min(100)].copy_from_slice(&name[..name.len().min(100)]);
    block[100..108].copy_from_slice(b"0000644\0");
    block[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
    block[136..148].copy_from_slice(b"00000001750\0");
    block[156] = kind;
    block[257..265].copy_from_slice(magic);
    block[148..156].fill(b' ');
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

fn padded(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn pax(kind: u8, key: &str, value: &str) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let len = (1..5).map(|digits| rest + digits).find(|len| rest + len.to_string().len() == *len).unwrap();
    let text = format!("{len} {key}={value}\n").into_bytes();
    [header(b"pax", kind, text.len() as u64, b"ustar\x0000"), padded(text)].concat()
}

const MAGICS: [&[u8; 8]; 3] = [b"ustar\x0000", b"ustar  \0", b"\0\0\0\0\0\0\0\0"];

/// Returns a tar of some members, each of which may be a trap.
fn archive(random: &mut StdRng, depth: usize, members: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for number in 0..members {
        let name = format!("{depth}-{}", random.random_range(0..members * 2)).into_bytes();
        let magic = MAGICS[random.random_range(0..3)];
        match random.random_range(0..8) {
            // A range could start at the member's last header and miss the extended header before
            // that one.
            0 => bytes.extend(pax(b'x', "path", &format!("named-{number}"))),
            1 => bytes.extend(pax(b'x', "mtime", "7.5")),
            3 => {
                let long = format!("long-{number}-{}", "n".repeat(150)).into_bytes();
                bytes.extend([header(b"././@LongLink", b'L', long.len() as u64, b"ustar  \0"), padded(long)].concat());
            }
            4 if depth == 0 && number == members / 3 => bytes.extend(pax(b'g', "mtime", "1234")),
            _ => {}
        }
        let data = match random.random_range(0..9) {
            0 => Vec::new(),
            // Data that contains a header. The header's size field leads to another header or to
            // nothing.
            1 | 2 => {
                let size = [0, 512, 5000, 1 << 32][random.random_range(0..4)];
                let mut data = vec![b'.'; 512 * random.random_range(0..4)];
                data.extend(header(b"fake", b'0', size, magic));
                data.extend(vec![b'.'; random.random_range(0..1000)]);
                data
            }
            3 if depth < 2 => archive(random, depth + 1, 5),
            // Data that contains the end mark of an archive, and another header after it.
            4 => [vec![0; 1024], header(b"ghost", b'0', 100, magic), vec![b'g'; 512]].concat(),
            5 => pax(b'x', "path", "stray"),
            6 => (0..random.random_range(0..9000)).map(|_| random.random()).collect(),
            _ => vec![number as u8; random.random_range(0..3000)],
        };
        let kind = if random.random_range(0..12) == 0 { b'5' } else { b'0' };
        let data = if kind == b'5' { Vec::new() } else { data };
        bytes.extend(header(&name, kind, data.len() as u64, magic));
        bytes.extend(padded(data));
    }
    match random.random_range(0..4) {
        0 => {}
        1 => bytes.extend(vec![0; 10_240]),
        // Several archives one after another, of which only the first counts.
        2 if depth == 0 => bytes.extend([vec![0; 1024], archive(random, 1, 4)].concat()),
        _ => bytes.extend(vec![0; 1024]),
    }
    bytes
}

/// Returns a plan whose ranges start at these offsets. The start of the first member is known only
/// for the first range.
fn split_plan(path: &Path, cuts: &[u64]) -> StageInPlan {
    let file = fs::File::open(path).unwrap();
    let (version, path) = (version(&file).unwrap(), path.as_os_str().as_bytes().to_vec());
    let mut units = UnitQueue::new(tempfile::tempfile().unwrap());
    let ends = cuts.iter().skip(1).copied().chain([u64::MAX]);
    let ranges: Vec<(u64, u64)> = cuts.iter().copied().zip(ends).collect();
    for &(from, to) in &ranges {
        let start = (from == 0).then(TarPosition::default);
        let work = Work::TarRange(TarRange { path: path.clone(), version, from, to, start });
        units.push(&Unit { source: 0, ticket: 0, prefix: Vec::new(), rivalry: Rivalry::default(), work }, RANGE_LEN_MIN).unwrap();
    }
    units.close(cuts.len() as u64).unwrap();
    let tar = SplitTar { source: 0, path, version, prefix: Vec::new(), rivalry: Rivalry::default(), ranges };
    StageInPlan { units, split_tars: vec![tar], ..planned(&[], &Selection::default()).unwrap() }
}

/// Checks that the tar gives the same result however it is split. Returns how many ranges were rejected.
fn check(bytes: &[u8], random: &mut StdRng, selection: &Selection) -> usize {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    let run_len = [1 << 20, 4000][random.random_range(0..2)];
    let stage_in = |cuts: &[u64], workers: usize, pick: &mut dyn FnMut(usize) -> usize| {
        run_within(split_plan(file.path(), cuts), selection, MemorySink::new(&[1 << 40; 3]), run_len, workers, pick)
    };
    let whole = stage_in(&[0], 1, &mut |_| 0);
    let mut rejected = 0;
    for range_len in [1, 2, 7, 40] {
        let shift = random.random_range(0..range_len);
        let mut cuts = vec![0];
        cuts.extend((1..).map(|number| (number * range_len + shift) * 512).take_while(|&from| from < bytes.len() as u64));
        let workers = random.random_range(1..6);
        let mut seed = StdRng::seed_from_u64(random.random());
        let pieces = stage_in(&cuts, workers, &mut |waiting| seed.random_range(0..waiting));
        match (&whole, pieces) {
            (Ok(whole), Ok(pieces)) => {
                let plain = |staged: &Staged| -> Vec<_> {
                    let entries = staged.members.iter();
                    entries.map(|(key, (member, bytes))| (*key, member.path.clone(), member.mtime_s, bytes.clone())).collect()
                };
                assert!(plain(whole) == plain(&pieces), "split every {range_len} blocks");
                assert_eq!(whole.counts.files, pieces.counts.files);
                rejected += pieces.rejected;
            }
            (Err(_), Err(_)) => {}
            (whole, pieces) => panic!("{:?} as a whole, {:?} when split", whole.as_ref().err(), pieces.err()),
        }
    }
    rejected
}

/// SEMANTICS: "All workers read one plain tar, or one zip, at the same time. Whatever the members of a tar look like (headers,
/// archives, ends of archives), the result is the same as if the tar were read from its beginning."
#[test]
fn a_tar_has_the_same_members_however_it_is_split() {
    let mut rejected = 0;
    for seed in 0..60 {
        let mut random = StdRng::seed_from_u64(seed);
        let bytes = archive(&mut random, 0, 25);
        rejected += check(&bytes, &mut random, &Selection::default());
    }
    assert!(rejected > 100, "only {rejected} ranges started at a wrong place, so the test shows little");
}

#[test]
fn with_keep_going_a_truncated_tar_gives_its_intact_members_however_it_is_split() {
    let selection = Selection { keep_going: true, ..Selection::default() };
    for seed in 0..20 {
        let mut random = StdRng::seed_from_u64(2000 + seed);
        let mut bytes = Vec::new();
        for number in 0..20 {
            let data = vec![number; random.random_range(0..9000)];
            bytes.extend(header(format!("m{number}").as_bytes(), b'0', data.len() as u64, MAGICS[0]));
            bytes.extend(padded(data));
        }
        bytes.truncate(random.random_range(512..bytes.len()));
        check(&bytes, &mut random, &selection);
    }
}

/// SEMANTICS: "All workers read one plain tar, or one zip, at the same time. Whatever the members of a tar look like (headers,
/// archives, ends of archives), the result is the same as if the tar were read from its beginning."
#[test]
fn a_damaged_tar_has_the_same_result_however_it_is_split() {
    for seed in 0..40 {
        let mut random = StdRng::seed_from_u64(1000 + seed);
        let mut bytes = archive(&mut random, 0, 15);
        match random.random_range(0..2) {
            0 => bytes.truncate(random.random_range(0..bytes.len())),
            _ => {
                let at = random.random_range(0..bytes.len());
                bytes[at] ^= 0x20;
            }
        }
        check(&bytes, &mut random, &Selection::default());
    }
}

/// SEMANTICS: "After damage in a tar, reading resumes at the next header."
#[test]
fn with_keep_going_damaged_members_are_skipped() {
    let member = |name: &[u8], data: &[u8]| [header(name, b'0', data.len() as u64, MAGICS[0]), padded(data.to_vec())].concat();
    let mut bytes = [member(b"a", b"1"), member(b"b", b"2"), member(b"c", b"3"), vec![0; 1024]].concat();
    bytes[1024 + 10] ^= 1;
    let mut file = tempfile::NamedTempFile::with_suffix(".tar").unwrap();
    file.write_all(&bytes).unwrap();
    assert!(run_simply(&[file.path()], &Selection::default()).is_err());
    let selection = Selection { keep_going: true, ..Selection::default() };
    let staged = run_simply(&[file.path()], &selection).unwrap();
    assert_eq!(staged.tree().keys().collect::<Vec<_>>(), ["a", "c"]);
    assert_eq!(staged.counts.skipped, 1);
    file.as_file().set_len(512 * 5).unwrap();
    let staged = run_simply(&[file.path()], &selection).unwrap();
    assert_eq!((staged.tree().len(), staged.counts.skipped > 0), (1, true), "{:?}", staged.counts);
}

#[test]
fn an_odd_time_costs_a_remark_and_no_member() {
    let odd =
        [pax(b'x', "mtime", "NaN"), header(b"a", b'0', 0, MAGICS[0]), header(b"b", b'0', 0, MAGICS[0]), vec![0; 1024]].concat();
    let mut file = tempfile::NamedTempFile::with_suffix(".tar").unwrap();
    file.write_all(&odd).unwrap();
    let staged = run_simply(&[file.path()], &Selection::default()).unwrap();
    assert_eq!(staged.tree().keys().collect::<Vec<_>>(), ["a", "b"]);
    assert!(
        matches!(&staged.counts.notes[..], [note] if note.contains("'a'") && note.contains("time")),
        "{:?}",
        staged.counts.notes
    );
}

#[test]
fn with_keep_going_a_malformed_header_has_the_same_result_however_it_is_split() {
    let selection = Selection { keep_going: true, ..Selection::default() };
    let member = |name: &[u8], data: &[u8]| [header(name, b'0', data.len() as u64, MAGICS[0]), padded(data.to_vec())].concat();
    let records = b"12 path=nnn\nbroken".to_vec();
    let malformed = [header(b"pax", b'x', records.len() as u64, MAGICS[0]), padded(records)].concat();
    let bytes = [member(b"a", b"1"), malformed, member(b"b", b"2"), member(b"c", b"3"), vec![0; 1024]].concat();
    for seed in 0..20 {
        check(&bytes, &mut StdRng::seed_from_u64(3000 + seed), &selection);
    }
}
