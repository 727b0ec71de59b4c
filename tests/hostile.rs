//! Tests of hostile and damaged input. Errors are clear and name the position, nothing becomes partly visible, and servers survive.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use crate::harness::{self, Cluster, Ground, pack};

harness::with_few_and_many_workers! {
    damaged_archives_are_named_with_the_place,
    a_header_with_a_false_size_neither_takes_memory_nor_kills_a_server,
    sources_that_cannot_be_read_are_named,
    full_nodes_cause_an_error_that_names_the_remedy,
    a_full_file_system_ends_the_stage_in_and_its_space_is_free_again,
}

/// A session with a good dataset, which must survive everything.
fn cluster() -> Cluster {
    let ground = Ground::new();
    fs::create_dir(ground.at("good")).unwrap();
    (0..100).for_each(|number| fs::write(ground.at(format!("good/{number}")), vec![number; 5000]).unwrap());
    pack(&ground.at("good.tar"), &ground.at("good"), &[]);
    pack(&ground.at("good.tar.gz"), &ground.at("good"), &[]);
    pack(&ground.at("good.tar.xz"), &ground.at("good"), &[]);
    pack(&ground.at("good.tar.bz2"), &ground.at("good"), &[]);
    let cluster = ground.up_with(2, &["--capacity", "8MiB"]);
    cluster.stage(&[&cluster.at("good.tar")], "/dayfly/good");
    cluster
}

/// Asserts that a failed stage-in left nothing behind, and that everything else is unchanged.
fn assert_unharmed(cluster: &Cluster, used_before: u64) {
    assert_eq!(cluster.ok(&["ls"]), "good\n");
    cluster.ok(&["verify", "--from-every-node"]);
    harness::wait_until("its space is free again", || cluster.used_bytes() == used_before);
    assert_eq!(cluster.pids().len(), 2);
}

fn damaged(cluster: &Cluster, name: &str, change: impl Fn(&mut Vec<u8>)) -> PathBuf {
    let mut bytes = fs::read(cluster.at(name)).unwrap();
    change(&mut bytes);
    let path = cluster.at(format!("damaged-{name}"));
    fs::write(&path, bytes).unwrap();
    path
}

/// SEMANTICS: "A stage-in that fails frees the space that it took, and leaves other datasets untouched."
/// SEMANTICS: "A damaged archive causes an error that names the archive and the place of the damage."
/// SEMANTICS: "The archive's own checksums detect it, if its format has any."
fn damaged_archives_are_named_with_the_place() {
    let cluster = cluster();
    let used = cluster.used_bytes();
    let check = |name: &str, change: &dyn Fn(&mut Vec<u8>), words: &[&str]| {
        let path = damaged(&cluster, name, change);
        let good = cluster.at("good.tar");
        let message = cluster.fails(1, &["stage-in", good.to_str().unwrap(), path.to_str().unwrap(), "/dayfly/x"]);
        for word in words.iter().chain(&[path.to_str().unwrap()]) {
            assert!(message.contains(word), "{word:?} is not in {message}");
        }
        assert_unharmed(&cluster, used);
    };
    let cut = |bytes: &mut Vec<u8>| bytes.truncate(bytes.len() / 2 + 77);
    check("good.tar", &cut, &["damaged at byte", "truncated"]);
    check("good.tar.gz", &cut, &["damaged at byte"]);
    check("good.tar.xz", &cut, &["damaged at byte"]);
    check("good.tar.bz2", &cut, &["damaged at byte"]);
    check("good.tar", &|bytes| bytes[512] ^= 0x55, &["damaged at byte 512", "checksum"]);
    check(
        "good.tar.gz",
        &|bytes| {
            let at = bytes.len() - 6;
            bytes[at] ^= 1
        },
        &["damaged at byte"],
    );
    check(
        "good.tar.xz",
        &|bytes| {
            let at = bytes.len() / 2;
            bytes[at] ^= 1
        },
        &["damaged at byte"],
    );
    check("good.tar", &|bytes| bytes.fill(0x5a), &["named like an archive"]);
    check("good.tar", &|bytes| bytes.clear(), &["named like an archive"]);
    cluster.down();
}

/// Returns the tar header of a regular file, with a correct checksum.
fn header(name: &str, size_field: &[u8; 12]) -> Vec<u8> {
    let mut block = vec![0; 512];
    block[..name.len()].copy_from_slice(name.as_bytes());
    block[100..107].copy_from_slice(b"0000644");
    block[124..136].copy_from_slice(size_field);
    block[148..156].fill(b' ');
    block[156] = b'0';
    block[257..265].copy_from_slice(b"ustar  \0");
    let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

fn a_header_with_a_false_size_neither_takes_memory_nor_kills_a_server() {
    let cluster = cluster();
    let used = cluster.used_bytes();
    // 2^61 and 2^40 bytes, in base 256.
    for (size, words) in [(b"\x80\0\0\0\x20\0\0\0\0\0\0\0", "at most"), (b"\x80\0\0\0\0\0\x01\0\0\0\0\0", "")] {
        fs::write(cluster.at("lie.tar"), header("lie", size)).unwrap();
        let message = cluster.fails(1, &["stage-in", "lie.tar", "/dayfly/lie"]);
        assert!(message.contains("lie") && message.contains(words), "{message}");
        assert_unharmed(&cluster, used);
    }
    // A name of nearly a megabyte is refused, and shortened in the message.
    let name = format!("./{}", "x/".repeat(400_000));
    let record = format!(" path={name}\n");
    let len = record.len() + 6;
    let record = format!("{len}{record}");
    assert_eq!(record.len(), len);
    let mut archive = header("pax", format!("{len:011o} ").as_bytes().try_into().unwrap());
    archive[156] = b'x';
    archive[148..156].fill(b' ');
    let sum: u32 = archive.iter().map(|&byte| u32::from(byte)).sum();
    archive[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    archive.extend_from_slice(record.as_bytes());
    archive.resize(archive.len().next_multiple_of(512), 0);
    archive.extend(header("short", b"00000000000 "));
    archive.extend([0; 1024]);
    fs::write(cluster.at("long.tar"), archive).unwrap();
    let message = cluster.fails(1, &["stage-in", "long.tar", "/dayfly/long"]);
    assert!(message.contains("1 is refused") && message.len() < 2000, "{message}");
    assert_eq!(cluster.pids().len(), 2);
    cluster.down();
}

/// SEMANTICS: "A stage-in that fails frees the space that it took, and leaves other datasets untouched."
/// SEMANTICS: "A source that cannot be read causes an error that names it."
fn sources_that_cannot_be_read_are_named() {
    let cluster = cluster();
    let used = cluster.used_bytes();
    // `/proc/self/mem` can be opened, but even root cannot read it at offset 0.
    for (source, words) in
        [("/nowhere", "/nowhere"), ("/proc/self/mem", "/mem'"), ("no-match-*.tar", "no-match-*.tar"), ("good/7/x", "good/7")]
    {
        let message = cluster.fails(1, &["stage-in", source, "/dayfly/x"]);
        assert!(message.contains(words), "{message}");
        assert_unharmed(&cluster, used);
    }
    // Arguments that cannot be sources are usage errors.
    assert!(harness::program("mkfifo").arg(cluster.at("fifo")).status().unwrap().success());
    for (source, words) in
        [("", "empty"), ("fifo", "neither a file nor a directory"), ("/dev/null", "neither a file nor a directory")]
    {
        let message = cluster.fails(2, &["stage-in", source, "/dayfly/x"]);
        assert!(message.contains(words), "{message}");
    }
    for list in ["@fifo", "@/dev/zero"] {
        let message = cluster.fails(1, &["stage-in", list, "/dayfly/x"]);
        assert!(message.contains("not a regular file"), "{message}");
    }
    // A path such as `/dev/fd/3` refers to a descriptor of the caller, never to one of the server.
    for descriptor in 3..40 {
        let output = cluster.output(&["stage-in", &format!("/dev/fd/{descriptor}"), "/dayfly/x"]);
        assert!(!output.status.success(), "the server's descriptor {descriptor} was staged in");
    }
    assert_unharmed(&cluster, used);
    fs::create_dir(cluster.at("strange")).unwrap();
    fs::write(cluster.at("strange").join(std::ffi::OsStr::from_bytes(b"a\xff")), "x").unwrap();
    assert!(cluster.fails(1, &["stage-in", "strange/b*", "/dayfly/x"]).contains("strange/b*"));
    assert_unharmed(&cluster, used);
    std::os::unix::fs::symlink("nowhere", cluster.at("dangling")).unwrap();
    assert!(cluster.fails(1, &["stage-in", "dangling", "/dayfly/x"]).contains("dangling"));
    cluster.down();
}

/// SEMANTICS: "A stage-in that fails frees the space that it took, and leaves other datasets untouched."
/// SEMANTICS: "Full nodes cause an error that names the remedy."
fn full_nodes_cause_an_error_that_names_the_remedy() {
    let cluster = cluster();
    let used = cluster.used_bytes();
    fs::create_dir(cluster.at("much")).unwrap();
    (0..40).for_each(|number| fs::write(cluster.at(format!("much/{number}")), vec![1; 1 << 19]).unwrap());
    let message = cluster.fails(1, &["stage-in", "--require-fit", "much", "/dayfly/much"]);
    for words in ["the sources take at least 20.0MiB", "MiB free (node 0: ", "--capacity", "more nodes", "--data-dir"] {
        assert!(message.contains(words), "{words}: {message}");
    }
    assert_unharmed(&cluster, used);
    // The unpacked size of a compressed archive becomes known only while it is unpacked.
    pack(&cluster.at("much.tar.gz"), &cluster.at("much"), &[]);
    let message = cluster.fails(1, &["stage-in", "much.tar.gz", "/dayfly/much"]);
    for words in ["no node has room left for '", "' (512.0KiB)", " were stored", "MiB free (node 0: ", "--capacity", "more nodes"]
    {
        assert!(message.contains(words), "{words}: {message}");
    }
    assert_unharmed(&cluster, used);
    // One full node is not an error: its blocks go to their next candidates.
    fs::create_dir(cluster.at("some")).unwrap();
    (0..20).for_each(|number| fs::write(cluster.at(format!("some/{number}")), vec![1; 1 << 19]).unwrap());
    cluster.stage(&[&cluster.at("some")], "/dayfly/some");
    cluster.ok(&["verify", "--from-every-node"]);
    cluster.down();
}

fn a_full_file_system_ends_the_stage_in_and_its_space_is_free_again() {
    let ground = Ground::new();
    let small = ground.at("small");
    fs::create_dir(&small).unwrap();
    let mounted = harness::program("mount").args(["-t", "tmpfs", "-o", "size=3m", "none"]).arg(&small).output();
    if !mounted.is_ok_and(|mounted| mounted.status.success()) {
        harness::skip("mounting a small file system needs root");
        return;
    }
    fs::create_dir(ground.at("much")).unwrap();
    (0..20).for_each(|number| fs::write(ground.at(format!("much/{number}")), vec![1; 1 << 18]).unwrap());
    fs::create_dir(ground.at("few")).unwrap();
    fs::write(ground.at("few/file"), "x").unwrap();
    fs::create_dir(ground.at("large")).unwrap();
    fs::write(ground.at("large/file"), vec![1; 9 << 20]).unwrap();
    pack(&ground.at("large.tar.gz"), &ground.at("large"), &[]);
    let cluster = ground.up_with(2, &["--data-dir", small.to_str().unwrap(), "--capacity", "1GiB"]);
    // A stage-in that is known to be too large, such as this one of a folder, does not start. For an archive, the size of the
    // content is known only after the archive has been read.
    let message = cluster.fails(1, &["stage-in", "--require-fit", "much", "/dayfly/much"]);
    assert!(message.contains("free on all nodes"), "{message}");
    pack(&cluster.at("much.tar.gz"), &cluster.at("much"), &[]);
    let message = cluster.fails(1, &["stage-in", "much.tar.gz", "/dayfly/much"]);
    assert!(message.contains("room") || message.contains("No space"), "{message}");
    assert_eq!(cluster.ok(&["ls"]), "");
    // A large block is shipped in pieces. Before the first piece is sent, the owner must notice that the last piece will not fit.
    let message = cluster.fails(1, &["stage-in", "large.tar.gz", "/dayfly/large"]);
    assert!(message.contains("room") || message.contains("No space"), "{message}");
    assert_eq!((cluster.ok(&["ls"]), cluster.pids().len()), (String::new(), 2));
    // Failed stage-ins have freed their space.
    cluster.stage(&[&cluster.at("few")], "/dayfly/few");
    cluster.ok(&["verify", "--from-every-node"]);
    // Unmount the small file system before its parent folder is removed.
    cluster.ok(&["down"]);
    harness::wait_until("the kernel has closed the servers' files", || {
        harness::program("umount").arg(&small).status().unwrap().success()
    });
    cluster.ground.assert_clean();
}

/// Returns noise of many lengths, the same in every run.
fn noise() -> Vec<Vec<u8>> {
    let mut state = 7_u64;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as u8
    };
    let mut all: Vec<Vec<u8>> =
        [1_usize, 4, 24, 100, 5000, 100_000].iter().map(|&len| (0..len).map(|_| byte()).collect()).collect();
    all.extend([vec![0; 64], vec![0xff; 64], b"GET / HTTP/1.0\r\n\r\n".to_vec(), 0x00ff_ffff_u32.to_le_bytes().to_vec()]);
    // Noise after a well-formed length.
    all.push([&50_u32.to_le_bytes()[..], &(0..50).map(|_| byte()).collect::<Vec<_>>()].concat());
    all.push([&80_u16.to_le_bytes()[..], &(0..80).map(|_| byte()).collect::<Vec<_>>()].concat());
    all
}

/// SEMANTICS: "Random bytes sent to the peer port or to the local socket change nothing."
#[test]
fn noise_on_the_peer_port_and_the_local_socket_changes_nothing() {
    let cluster = cluster();
    let used = cluster.used_bytes();
    let address = cluster.status()["nodes"][1]["address"].as_str().unwrap().to_owned();
    let socket = cluster.location().socket(dayfly_meta::id::NodeId(1));
    for noise in noise() {
        let mut peer = TcpStream::connect(&address).unwrap();
        peer.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        // The server may close either connection in the middle of the noise.
        let _ = peer.write_all(&noise);
        let mut answer = Vec::new();
        let _ = peer.read_to_end(&mut answer);
        assert!(answer.is_empty(), "a stranger got the answer {answer:?}");
        let mut local = UnixStream::connect(&socket).unwrap();
        let _ = local.write_all(&noise);
    }
    // The server closes silent connections in time, and keeps serving members in the meantime.
    let silent: Vec<_> = (0..100).map(|_| TcpStream::connect(&address).unwrap()).collect();
    assert_unharmed(&cluster, used);
    let mut stream = &silent[0];
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0);
    cluster.down();
}

/// SEMANTICS: "The local socket serves the same user only. Folders have mode 0700. The key is on no
/// command line and in no log; it is in a file, readable by the user alone, only while servers start
/// and only with launchers that pass no standard input."
#[test]
fn no_secret_is_in_sight_and_folders_are_private() {
    use std::os::unix::fs::PermissionsExt;
    let cluster = cluster();
    for path in [cluster.folder(), cluster.folder().parent().unwrap().to_owned()] {
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700, "{}", path.display());
    }
    for pid in cluster.pids().values() {
        let command_line = fs::read(format!("/proc/{pid}/cmdline")).unwrap();
        assert_eq!(command_line.split(|&byte| byte == 0).nth(1), Some(&b"serve"[..]));
        assert!(command_line.ends_with(b"serve\0"), "the command line holds nothing but the command's name");
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap();
        assert!(!environment.windows(4).any(|word| word.eq_ignore_ascii_case(b"key=")));
    }
    for entry in fs::read_dir(cluster.folder()).unwrap() {
        let path = entry.unwrap().path();
        let mode = fs::symlink_metadata(&path).unwrap().permissions().mode();
        assert!(path.is_dir() || mode & 0o077 == 0 || path.extension().is_some_and(|kind| kind == "sock"), "{}", path.display());
    }
    cluster.down();
}
