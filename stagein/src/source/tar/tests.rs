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
