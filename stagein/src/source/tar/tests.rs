//! Tests of the tar reader with archives from GNU tar, and with damaged ones.
use std::fs;

use super::*;

/// Members with their data, and how the archive ended.
type Contents = (Vec<(TarMember, Vec<u8>)>, End);

fn read_all(bytes: &[u8]) -> Result<Contents, TarError> {
    let mut reader = TarReader::new(bytes);
    let mut members = Vec::new();
    loop {
        match reader.next()? {
            Next::End(end) => return Ok((members, end)),
            Next::Member(member) => {
                let mut data = Vec::new();
                reader.read_to_end(&mut data).map_err(|error| damaged(0, error.to_string()))?;
                members.push((member, data));
            }
        }
    }
}

fn pack(format: &str, prepare: impl Fn(&std::path::Path)) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    prepare(folder.path());
    let format = format!("--format={format}");
    let output =
        crate::programs::program("tar").args(["-c", "--sort=name", &format, "-C"]).arg(folder.path()).arg(".").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

#[test]
fn all_members_of_gnu_and_pax_archives_are_read() {
    let long = "n".repeat(200);
    for format in ["gnu", "pax"] {
        let bytes = pack(format, |folder| {
            fs::create_dir(folder.join(&long)).unwrap();
            fs::write(folder.join(&long).join("file"), "content").unwrap();
            fs::write(folder.join("empty"), "").unwrap();
            std::os::unix::fs::symlink("t".repeat(150), folder.join("link")).unwrap();
            fs::hard_link(folder.join("empty"), folder.join("hard")).unwrap();
            assert!(crate::programs::program("mkfifo").arg(folder.join("fifo")).status().unwrap().success());
        });
        let (members, end) = read_all(&bytes).unwrap();
        let names: Vec<_> =
            members.iter().map(|(member, data)| (String::from_utf8_lossy(&member.name).into_owned(), data.len())).collect();
        let expect = [
            ("./", 0),
            ("./empty", 0),
            ("./fifo", 0),
            ("./hard", 0),
            ("./link", 0),
            (&format!("./{long}/"), 0),
            (&format!("./{long}/file"), 7),
        ];
        assert_eq!(names, expect.map(|(name, len)| (name.to_owned(), len)), "{format}");
        assert_eq!(members[2].0.kind, TarKind::Special);
        assert_eq!(members[3].0.kind, TarKind::HardLink(b"./empty".to_vec()));
        assert_eq!(members[4].0.kind, TarKind::Symlink("t".repeat(150).into_bytes()));
        assert_eq!((&members[6].0.kind, end), (&TarKind::File, End::Marked));
        assert_eq!(&bytes[members[6].0.data_offset as usize..][..7], b"content");
    }
}

#[test]
fn a_missing_end_mark_and_a_truncated_member_are_noticed() {
    let bytes = pack("gnu", |folder| fs::write(folder.join("file"), [7; 1000]).unwrap());
    let data_end = 512 + 512 + 1024;
    assert!(matches!(read_all(&bytes), Ok((_, End::Marked))));
    assert!(matches!(read_all(&bytes[..data_end]), Ok((_, End::Unmarked))));
    assert!(matches!(read_all(&bytes[..data_end + 512]), Ok((_, End::Unmarked))));
    for cut in [1, 511, 513, 1023, 1025, data_end - 1, data_end + 1] {
        assert!(matches!(read_all(&bytes[..cut]), Err(TarError::Damaged { .. })), "cut to {cut}");
    }
    assert!(matches!(read_all(&[]), Ok((_, End::Unmarked))));
}

#[test]
fn damaged_bytes_never_panic() {
    let bytes = pack("pax", |folder| {
        fs::write(folder.join("n".repeat(150)), "content").unwrap();
        fs::write(folder.join("other"), [1; 600]).unwrap();
    });
    let mut state = 1_u64;
    for _ in 0..3000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut damaged = bytes.clone();
        let at = (state >> 33) as usize % damaged.len();
        damaged[at] ^= (state >> 20) as u8 | 1;
        // Half of the time the header's checksum is corrected, so that its fields are parsed.
        let block = at / 512 * 512;
        let sum: u32 = damaged[block..block + 512]
            .iter()
            .enumerate()
            .map(|(i, &b)| if (148..156).contains(&i) { 32 } else { u32::from(b) })
            .sum();
        if (state >> 10) & 1 == 0 {
            damaged[block + 148..block + 156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
        drop(read_all(&damaged));
    }
}

#[test]
fn a_header_that_claims_a_huge_extension_is_an_error() {
    let mut block = [0_u8; 512];
    block[..4].copy_from_slice(b"name");
    block[100..107].copy_from_slice(b"0000644");
    block[124..135].copy_from_slice(b"77777777777");
    for kind in [b'x', b'g', b'L', b'K'] {
        block[156] = kind;
        block[148..156].copy_from_slice(b"        ");
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        assert!(matches!(read_all(&block), Err(TarError::Damaged { offset: 0, .. })), "{}", char::from(kind));
    }
}

/// Returns a header of the old GNU format. Its checksum is right.
fn header(name: &str, kind: u8, size: usize, link: &str) -> [u8; 512] {
    let mut block = [0; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    for (at, text) in [(100, "0000644\0"), (108, "0000000\0"), (116, "0000000\0"), (136, "00000000001\0"), (257, "ustar  \0")] {
        block[at..at + text.len()].copy_from_slice(text.as_bytes());
    }
    block[124..136].copy_from_slice(format!("{size:011o}\0").as_bytes());
    block[156] = kind;
    block[157..157 + link.len()].copy_from_slice(link.as_bytes());
    summed(block)
}

/// Sets the checksum of a header.
fn summed(mut block: [u8; 512]) -> [u8; 512] {
    block[148..156].copy_from_slice(b"        ");
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

/// Returns an archive: what is given, between two files.
fn between_files(middle: &[u8]) -> Vec<u8> {
    let file = |name: &str| [&header(name, b'0', 700, "")[..], &name.as_bytes().repeat(350), &[0; 324]].concat();
    [&file("f1")[..], middle, &file("f2"), &[0; 1024]].concat()
}

/// Unpacks with GNU tar. Returns the files with their contents, and whether tar had no complaint.
fn unpacked_by_tar(bytes: &[u8]) -> (Vec<(String, Vec<u8>)>, bool) {
    let folder = tempfile::tempdir().unwrap();
    let (archive, tree) = (folder.path().join("a.tar"), folder.path().join("tree"));
    fs::write(&archive, bytes).unwrap();
    fs::create_dir(&tree).unwrap();
    let output = crate::programs::program("tar").arg("-xf").arg(&archive).arg("-C").arg(&tree).output().unwrap();
    let entries = fs::read_dir(&tree).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.filter(|path| fs::symlink_metadata(path).unwrap().is_file());
    let mut files: Vec<_> =
        files.map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(path).unwrap())).collect();
    files.sort();
    (files, output.status.success())
}

/// Reads an archive as with `--keep-going`. Returns the files with their contents, and whether nothing was wrong.
fn read_what_there_is(bytes: &[u8]) -> (Vec<(String, Vec<u8>)>, bool) {
    let (mut reader, mut files, mut is_good) = (TarReader::new(bytes), Vec::new(), true);
    loop {
        match reader.next() {
            Ok(Next::End(_)) => break,
            Ok(Next::Member(member)) => {
                let (mut data, name) = (Vec::new(), String::from_utf8(member.name).unwrap());
                is_good &= member.remark.is_none() && member.flaw.is_none();
                if reader.read_to_end(&mut data).is_err() {
                    is_good = false;
                } else if member.kind == TarKind::File {
                    files.push((name, data));
                }
            }
            Err(_) => {
                is_good = false;
                if !reader.resume(u64::MAX) {
                    break;
                }
            }
        }
    }
    files.sort();
    (files, is_good)
}

/// SEMANTICS: "Each field of a tar's header means what it means to GNU tar. Members that have no data, such as directories and links,
/// have none even if their header states a size. A mode or a time that is not a number costs a remark, not the member, which has the
/// usual mode, or the time in its other header."
#[test]
fn odd_fields_cost_no_other_member_and_are_read_as_gnu_tar_reads_them() {
    let numbers: [&[u8]; 14] = [
        b"",
        b"0",
        b"1024",
        b"2000 ",
        b" 2000",
        b"00002000",
        b"-1",
        b"+1000",
        b"1e3",
        b"9",
        b"77777777777",
        &[0x80; 1],
        &[0xff; 12],
        &[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0],
    ];
    let fields = [("mode", 100..108), ("uid", 108..116), ("size", 124..136), ("mtime", 136..148), ("device", 329..337)];
    let mut wrong = Vec::new();
    for (kind, name) in
        [(b'0', "x"), (b'\0', "x"), (b'7', "x"), (b'1', "x"), (b'2', "x"), (b'5', "x/"), (b'6', "x"), (b'0', "x/"), (b'\0', "x/")]
    {
        for (field, range) in fields.clone() {
            for number in numbers {
                let len = number.len().min(range.len());
                let mut block = header(name, kind, 0, if matches!(kind, b'1' | b'2') { "f1" } else { "" });
                block[range.clone()].fill(0);
                block[range.start..range.start + len].copy_from_slice(&number[number.len() - len..]);
                let bytes = between_files(&summed(block));
                let (theirs, is_good) = unpacked_by_tar(&bytes);
                let (ours, is_read) = read_what_there_is(&bytes);
                let of_others =
                    |files: &[(String, Vec<u8>)]| files.iter().filter(|(name, _)| name != "x").cloned().collect::<Vec<_>>();
                let is_same = if kind == b'1' { of_others(&ours) == of_others(&theirs) } else { ours == theirs };
                if !is_same && (is_good || is_read) {
                    let names = |files: &[(String, Vec<u8>)]| {
                        files.iter().map(|(name, data)| format!("{name} {}", data.len())).collect::<Vec<_>>()
                    };
                    let number = String::from_utf8_lossy(number);
                    wrong.push(format!(
                        "{} {name}, {field} '{number}': {:?} {is_read}, tar: {:?} {is_good}",
                        char::from(kind).escape_default(),
                        names(&ours),
                        names(&theirs)
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// SEMANTICS: "After damage in a tar, reading resumes at the next header."
#[test]
fn after_damage_the_members_are_read_that_gnu_tar_finds() {
    let extended = |records: &[u8], kind| {
        let padding = records.len().wrapping_neg() % 512;
        [&header("h", kind, records.len(), "")[..], records, &vec![0; padding]].concat()
    };
    let x = [&header("x", b'0', 100, "")[..], &[1; 100], &[0; 412]].concat();
    let long_name = [&extended(&[&b"n".repeat(150)[..], b"\0"].concat(), b'L')[..], &x].concat();
    let pax = [&extended(b"12 path=nnn\n20 mtime=12.5000001\n", b'x')[..], &x].concat();
    let global = [&extended(b"16 comment=none\n", b'g')[..], &x].concat();
    let mut wrong = Vec::new();
    for (name, middle) in [("file", &x), ("long name", &long_name), ("pax", &pax), ("global", &global)] {
        let good = between_files(middle);
        // Most zeros are padding.
        for at in (1536..1536 + middle.len()).filter(|at| good[*at] != 0 || at % 16 == 0) {
            let mut bytes = good.clone();
            bytes[at] ^= 0x5a;
            let (theirs, _) = unpacked_by_tar(&bytes);
            let (ours, is_read) = read_what_there_is(&bytes);
            let is_missing = |found: &&(String, Vec<u8>)| !ours.contains(found);
            let missing: Vec<&str> = theirs.iter().filter(is_missing).map(|(name, _)| &name[..]).collect();
            if !missing.is_empty() || is_read && ours != theirs {
                wrong.push(format!("{name}, byte {at}: {missing:?} are missing, good: {is_read}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} {}", wrong.len(), wrong[..wrong.len().min(40)].join("\n"));
}
