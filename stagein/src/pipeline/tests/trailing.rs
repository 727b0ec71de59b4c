//! Tests of bytes that follow a compressed stream.

use super::*;

/// SEMANTICS: "Bytes after a gzip, bzip2 or lz4 stream that begin no other stream are left out, as by these programs, and the summary says so
/// unless they are zeros."
#[test]
fn bytes_after_a_stream_are_left_out_where_the_program_of_the_format_leaves_them_out() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let shell = |script: &str| {
        let done = crate::programs::program("bash").args(["-ec", script]).current_dir(folder.path()).status().unwrap();
        assert!(done.success(), "{script}");
    };
    shell("mkdir d; head -c 4000000 /dev/urandom > d/large; seq 20 > d/small; tar -cf a.tar d; mkdir o");
    let selection = Selection { nested: true, ..Selection::default() };
    for (packer, leaves_out) in [
        ("gzip -c", true),
        ("pigz -p 2 -i -b 128 -c", true),
        ("bgzip -c", true),
        ("bzip2 -c", true),
        ("lz4 -q -B4 -c", true),
        ("two() { head -c 2000000 $1 | lz4 -qc -B7; tail -c +2000001 $1 | lz4 -qc -B4; }; two", true),
        ("xz -c", false),
        ("zstd -q -c", false),
    ] {
        shell(&format!("{packer} a.tar > packed"));
        // Zeros fill tapes and devices.
        let zeros_are_fine = leaves_out || packer.starts_with("xz");
        for (rest, is_fine, trailed) in [
            ("", true, 0),
            ("head -c 4096 /dev/zero", zeros_are_fine, 0),
            ("echo more", leaves_out, 1),
            ("head -c 700 /dev/zero; echo more", leaves_out, 1),
            ("echo", leaves_out, 1),
            ("printf 1234", leaves_out, 1),
        ] {
            shell(&format!("(cat packed; {rest}) > o/a.tgz; echo b > o/b; tar -cf outer.tar -C o a.tgz b"));
            for source in ["o/a.tgz", "outer.tar"] {
                let what = format!("{source} by {packer}, then {rest}");
                match run_simply(&[&at(source)], &selection) {
                    Ok(staged) => {
                        assert!(is_fine, "{what}");
                        let samples = if source == "outer.tar" { 3 } else { 2 };
                        let files =
                            staged.tree().into_values().filter(|(kind, _)| matches!(kind, MemberKind::File { .. })).count();
                        assert_eq!((files, staged.counts.trailed_streams), (samples, trailed), "{what}");
                        assert_eq!(staged.counts.notes.len() as u64, trailed, "{what}: {:?}", staged.counts.notes);
                    }
                    Err(error) => assert!(!is_fine && matches!(error, StageInError::Damaged { .. }), "{what}: {error}"),
                }
            }
        }
    }
}

/// SEMANTICS: "If the tar in the stream has not ended, that is damage."
#[test]
fn bytes_after_a_stream_that_ends_within_the_tar_are_damage() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let script = "for n in 1 2 3; do head -c 1000 /dev/zero | tr '\\0' $n > $n; done; tar -cf a.tar 1 2 3
        (head -c 3072 a.tar | gzip; tail -c +3073 a.tar) > cut.tgz
        (head -c 3000 a.tar | gzip; tail -c +3001 a.tar) > within.tgz; tar -cf outer.tar cut.tgz 3";
    let done = crate::programs::program("bash").args(["-ec", script]).current_dir(folder.path()).status().unwrap();
    assert!(done.success());
    for (source, kept, skipped) in [("cut.tgz", 2, 1), ("within.tgz", 1, 2), ("outer.tar", 3, 1)] {
        let selection = Selection { nested: true, ..Selection::default() };
        let error = run_simply(&[&at(source)], &selection).err().unwrap();
        assert!(matches!(error, StageInError::Damaged { .. }), "{source}: {error}");
        let staged = run_simply(&[&at(source)], &Selection { keep_going: true, ..selection }).unwrap();
        let files = staged.tree().into_values().filter(|(kind, _)| matches!(kind, MemberKind::File { .. })).count();
        assert_eq!(
            (files, staged.counts.skipped, staged.counts.trailed_streams),
            (kept, skipped, 0),
            "{source}: {:?}",
            staged.counts
        );
    }
}

/// lz4 and zstd files may have frames that decoders skip, anywhere, and files of `lz4 -l` are lz4 files, too.
///
/// SEMANTICS: "An lz4 file consists of frames, or of one frame of `lz4 -l`. Of frames that follow one of `lz4 -l`, the error says that the
/// file is damaged."
#[test]
fn frames_to_skip_are_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let shell = |script: &str| {
        let done = crate::programs::program("bash").args(["-ec", script]).current_dir(folder.path()).status().unwrap();
        assert!(done.success(), "{script}");
    };
    shell("seq 100000 > f; tar -cf a.tar f; head -c 300000 a.tar > 1; tail -c +300001 a.tar > 2
           s() { printf '\\x50\\x2a\\x4d\\x18\\x04\\0\\0\\0abcd'; }; e() { printf '\\x5f\\x2a\\x4d\\x18\\0\\0\\0\\0'; }
           for p in lz4 zstd; do (s; $p -qc 1; e; s; $p -qc 2; s; e) > a.tar.$p; (e; $p -qc a.tar; e) > b.tar.$p; ($p -qc a.tar; s | head -c 10) > cut.tar.$p
           (printf '\\x53\\x2a\\x4d\\x18\\x88\\x13\\0\\0'; head -c 5000 /dev/urandom; s; $p -qc a.tar) > long.tar.$p; done
           (lz4 -l -qc 1; lz4 -qc 2) > joined.tar.lz4; lz4 -l -qc a.tar > legacy.tar.lz4; zstd -qc a.tar > legacy.tar.zstd");
    for packer in ["lz4", "zstd"] {
        let at = |name: &str| folder.path().join(format!("{name}.tar.{packer}"));
        for name in ["a", "b", "long", "legacy"] {
            let staged = run_simply(&[&at(name)], &Selection::default()).unwrap();
            let lens: Vec<usize> = staged.tree().into_values().map(|(_, bytes)| bytes.len()).collect();
            assert_eq!(lens, [588_895], "{name}, {packer}");
        }
        // The last frame to skip is cut short, which lz4 does not mind and zstd does.
        let staged = run_simply(&[&at("cut")], &Selection::default());
        let trailed = staged.map(|staged| (staged.tree().len(), staged.counts.trailed_streams)).ok();
        assert_eq!(trailed, (packer == "lz4").then_some((1, 1)), "{packer}");
    }
    // The same within an archive.
    shell("mv long.tar.zstd z.tar.zst; tar -cf outer.tar a.tar.lz4 long.tar.lz4 z.tar.zst legacy.tar.lz4");
    let staged = run_simply(&[&folder.path().join("outer.tar")], &Selection { nested: true, ..Selection::default() }).unwrap();
    let lens: Vec<usize> = staged.tree().into_values().map(|(_, bytes)| bytes.len()).filter(|&len| len > 0).collect();
    assert_eq!(lens, [588_895; 4]);
    let error = run_simply(&[&folder.path().join("joined.tar.lz4")], &Selection::default()).err().unwrap();
    assert!(matches!(error, StageInError::Damaged { .. }), "{error}");
}
