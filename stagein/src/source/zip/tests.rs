//! Tests of the zip reader with archives from Python, and with damaged ones.

use std::io::Read;
use std::sync::Arc;

use super::*;
use crate::memory_file::file_with;
use crate::source::plain::PlainReader;

/// Returns the name, kind and bytes of each member.
fn read_all(bytes: &[u8]) -> Result<Vec<(String, ZipKind, Vec<u8>)>, ZipError> {
    let file = file_with(bytes);
    let mut found = Vec::new();
    parts::<ZipError>(&file, &mut |part, shift| {
        for record in Record::read_all(&part.records, part.offset, shift)? {
            let mut reader = PlainReader::new(file.try_clone()?, 0, 0, Arc::default())?;
            let mut bytes = Vec::new();
            if record.kind != ZipKind::Directory {
                data::seek(&mut reader, &record)?;
                data::open(&mut reader, &record)?.take(1 << 22).read_to_end(&mut bytes)?;
            }
            found.push((String::from_utf8_lossy(&record.name).into_owned(), record.kind, bytes));
        }
        Ok(())
    })?;
    Ok(found)
}

fn python(script: &str) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let script = format!("import zipfile, stat\n{script}\n");
    let output = crate::programs::program("python3").args(["-c", &script]).current_dir(folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::read(folder.path().join("z")).unwrap()
}

fn sample() -> Vec<u8> {
    python(
        "z = zipfile.ZipFile('z', 'w')
z.writestr('stored', b'a' * 3000)
z.writestr('deflated', b'b' * 300000, zipfile.ZIP_DEFLATED)
z.writestr('bzip2', b'c' * 3000, zipfile.ZIP_BZIP2)
z.writestr('empty', b'')
z.writestr('gr\\u00fcn/', b'')
link = zipfile.ZipInfo('link'); link.create_system = 3; link.external_attr = (stat.S_IFLNK | 0o777) << 16
z.writestr(link, 'stored')
z.close()",
    )
}

#[test]
fn members_of_all_compression_methods_are_read() {
    let expect = [
        ("stored", ZipKind::File, vec![b'a'; 3000]),
        ("deflated", ZipKind::File, vec![b'b'; 300_000]),
        ("bzip2", ZipKind::File, vec![b'c'; 3000]),
        ("empty", ZipKind::File, vec![]),
        ("grün/", ZipKind::Directory, vec![]),
        ("link", ZipKind::Symlink, b"stored".to_vec()),
    ]
    .map(|(name, kind, bytes)| (name.to_owned(), kind, bytes));
    let bytes = sample();
    assert_eq!(read_all(&bytes).unwrap(), expect);
    let with_shell_before = [&b"#!/bin/sh\nexit 0\n"[..], &bytes].concat();
    assert_eq!(read_all(&with_shell_before).unwrap(), expect, "offsets do not include bytes before the archive");
}

#[test]
fn zip64_archives_are_read() {
    let bytes = python(
        "z = zipfile.ZipFile('z', 'w')
for n in range(66000): z.writestr(str(n), b'')
with z.open(zipfile.ZipInfo('long'), 'w', force_zip64=True) as f: f.write(b'x' * 1000)
z.close()",
    );
    let members = read_all(&bytes).unwrap();
    assert_eq!(members.len(), 66_001);
    assert_eq!(members[66_000].2, vec![b'x'; 1000]);
}

#[test]
fn encryption_and_unknown_methods_are_reported_as_unsupported() {
    let mut bytes = sample();
    let directory = bytes.windows(4).position(|window| window == b"PK\x01\x02").unwrap();
    bytes[directory + 8] |= 1;
    assert!(matches!(read_all(&bytes), Err(ZipError::Unsupported { .. })));
    bytes[directory + 8] &= !1;
    bytes[directory + 10] = 9;
    assert!(matches!(read_all(&bytes), Err(ZipError::Unsupported { reason, .. }) if reason.contains('9')));
}

#[test]
fn damage_is_an_error_and_never_a_panic() {
    let bytes = sample();
    for cut in (0..bytes.len()).step_by(7) {
        assert!(read_all(&bytes[..cut]).is_err(), "cut to {cut}");
    }
    let whole = read_all(&bytes).unwrap();
    for at in 0..bytes.len() {
        for flip in [1, 0x80, 0xff] {
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            // Some fields are stored twice or not checked (times, names), so not every change is an
            // error. The bytes of members must not change.
            if let Ok(members) = read_all(&damaged) {
                let changed = members.iter().zip(&whole).any(|(left, right)| left.1 == right.1 && left.2 != right.2);
                assert!(!changed, "byte {at} flipped by {flip:#x}");
            }
        }
    }
}
