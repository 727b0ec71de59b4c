//! The model tests: random operations on the namespace and on a plain directory must have equal results after every step. Each
//! step runs on a random node, so that blocks that are local in one step are remote in the next.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

use crate::harness::twin::twin_with;
use crate::harness::{self, Cluster, Ground, pack, tool};
use dayfly_client::{FileKind, View};
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use nix::unistd::{AccessFlags, Whence};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

const STEPS: usize = 6000;

/// An operation that a program performs, with its path.
#[derive(Debug)]
enum Op {
    Stat(Vec<u8>),
    Lstat(Vec<u8>),
    ReadLink(Vec<u8>),
    List(Vec<u8>),
    Read(Vec<u8>, u64, usize),
    Canonical(Vec<u8>),
}

/// The result of an operation: its text, or an errno.
type Outcome = Result<String, i32>;

fn make_tree(folder: &Path, random: &mut StdRng) {
    let mut directories = vec![folder.to_owned()];
    fs::create_dir(folder).unwrap();
    for number in 0..300 {
        let parent = directories.choose(random).unwrap().clone();
        let path = parent
            .join(["f", "g", "h.jpg", "name with spaces", "\u{e9}"].choose(random).unwrap())
            .with_extension(number.to_string());
        match random.random_range(0..10) {
            0..2 if directories.len() < 40 => {
                fs::create_dir(&path).unwrap();
                directories.push(path);
            }
            2 => {
                let targets = ["..", ".", "../..", "nowhere", "f.0/../f.1", "./f.2/", "/", "/etc/passwd", ""];
                let known = fs::read_dir(&parent).unwrap().next().map(|entry| entry.unwrap().file_name());
                let target =
                    known.filter(|_| random.random_bool(0.6)).unwrap_or_else(|| targets[..8].choose(random).unwrap().into());
                symlink(target, &path).unwrap();
            }
            _ => {
                let size = *[0, 1, 100, 5000, 65_535, 65_536, 200_000].choose(random).unwrap();
                fs::write(&path, (0..size).map(|at: u32| (at ^ number) as u8).collect::<Vec<u8>>()).unwrap();
            }
        }
    }
}

/// Returns a path that exists, or a variation of one.
fn random_path(known: &[Vec<u8>], random: &mut StdRng) -> Vec<u8> {
    let mut path = known.choose(random).unwrap().clone();
    match random.random_range(0..12) {
        0 => path.extend_from_slice(b"/"),
        1 => path.extend_from_slice(b"/."),
        2 => path.extend_from_slice(b"/.."),
        3 => path.extend_from_slice(b"/missing"),
        4 => path.push(b'x'),
        5 => path = path.iter().flat_map(|&byte| if byte == b'/' { vec![b'/', b'/', b'.', b'/'] } else { vec![byte] }).collect(),
        6 => path.extend_from_slice(&[b'/'; 3]),
        7 => path.extend([b"/".as_slice(), &[b'n'; 256]].concat()),
        _ => {}
    }
    path
}

fn random_op(known: &[Vec<u8>], random: &mut StdRng) -> Op {
    let path = random_path(known, random);
    match random.random_range(0..6) {
        0 => Op::Stat(path),
        1 => Op::Lstat(path),
        2 => Op::ReadLink(path),
        3 => Op::List(path),
        4 => Op::Canonical(path),
        _ => Op::Read(path, random.random_range(0..70_000), random.random_range(0..70_000)),
    }
}

fn kind_text(kind: FileKind) -> char {
    match kind {
        FileKind::File => 'f',
        FileKind::Directory => 'd',
        FileKind::Symlink => 'l',
    }
}

fn in_namespace(view: &View, op: &Op, root: &[u8]) -> Outcome {
    let at = |path: &[u8]| [root, path].concat();
    let stat_text = |stat: dayfly_client::Stat| {
        let size = if stat.kind == FileKind::Directory { 0 } else { stat.size };
        format!("{:o} {size} {} {}.{}", stat.mode(), stat.links, stat.mtime_s, stat.mtime_ns)
    };
    let outcome = match op {
        Op::Stat(path) => view.stat(&at(path)).map(stat_text),
        Op::Lstat(path) => view.lstat(&at(path)).map(stat_text),
        Op::ReadLink(path) => view.read_link(&at(path)).map(|target| format!("{target:?}")),
        Op::Canonical(path) => view.canonical(&at(path)).map(|path| format!("{:?}", path.strip_prefix(root))),
        Op::List(path) => view.open_directory(&at(path)).map(|directory| {
            // Read the directory in two parts, as a program with a small buffer does.
            let first: Vec<_> = directory.entries(0).take(3).collect();
            let rest: Vec<_> = first.last().map_or_else(Vec::new, |last| directory.entries(last.next).collect());
            let entries = first.into_iter().chain(rest).map(|entry| format!("{:?}{}", entry.name, kind_text(entry.kind)));
            entries.collect::<Vec<_>>().join(" ")
        }),
        Op::Read(path, offset, len) => view.open(&at(path)).and_then(|file| {
            let mut buffer = vec![0; *len];
            let count = view.read_at(&file, *offset, &mut buffer)?;
            Ok(format!("{count} {:08x}", crc(&buffer[..count])))
        }),
    };
    outcome.map_err(|error| error.errno())
}

fn in_plain(folder: &Path, op: &Op) -> Outcome {
    let at = |path: &[u8]| PathBuf::from(std::ffi::OsStr::from_bytes(&[folder.as_os_str().as_bytes(), path].concat()));
    let stat_text = |metadata: fs::Metadata| {
        let size = if metadata.is_dir() { 0 } else { metadata.len() };
        format!("{:o} {size} {} {}.{}", metadata.mode(), metadata.nlink(), metadata.mtime(), metadata.mtime_nsec())
    };
    let outcome = match op {
        Op::Stat(path) => fs::metadata(at(path)).map(stat_text),
        Op::Lstat(path) => fs::symlink_metadata(at(path)).map(stat_text),
        Op::ReadLink(path) => fs::read_link(at(path)).map(|target| format!("{:?}", target.as_os_str().as_bytes().to_vec())),
        Op::Canonical(path) => fs::canonicalize(at(path)).map(|path| {
            format!("{:?}", path.as_os_str().as_bytes().strip_prefix(folder.as_os_str().as_bytes()).map(<[u8]>::to_vec))
        }),
        Op::List(path) => fs::read_dir(at(path)).map(|entries| {
            let kind = |kind: fs::FileType| {
                if kind.is_dir() {
                    'd'
                } else if kind.is_symlink() {
                    'l'
                } else {
                    'f'
                }
            };
            let mut entries: Vec<_> = entries.map(|entry| entry.unwrap()).collect();
            entries.sort_by_key(|entry| entry.file_name().as_bytes().to_vec());
            let entries = entries
                .iter()
                .map(|entry| format!("{:?}{}", entry.file_name().as_bytes().to_vec(), kind(entry.file_type().unwrap())));
            entries.collect::<Vec<_>>().join(" ")
        }),
        Op::Read(path, offset, len) => fs::File::open(at(path)).and_then(|file| {
            let mut buffer = vec![0; *len];
            let mut count = 0;
            loop {
                match file.read_at(&mut buffer[count..], offset + count as u64)? {
                    0 => return Ok(format!("{count} {:08x}", crc(&buffer[..count]))),
                    more => count += more,
                }
            }
        }),
    };
    outcome.map_err(|error| error.raw_os_error().unwrap())
}

fn crc(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |sum: u64, &byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)))
}

/// Returns true if the path leads out of the tree. In a plain directory the kernel follows such a path, but the namespace has
/// nothing outside the tree, so the results cannot be compared.
fn leads_out(folder: &Path, op: &Op) -> bool {
    let (Op::Stat(path) | Op::Lstat(path) | Op::ReadLink(path) | Op::List(path) | Op::Canonical(path) | Op::Read(path, ..)) = op;
    let full = PathBuf::from(std::ffi::OsStr::from_bytes(&[folder.as_os_str().as_bytes(), path].concat()));
    let mut at = PathBuf::new();
    let mut followed = 0;
    let mut waiting: Vec<std::ffi::OsString> =
        full.components().rev().map(|component| component.as_os_str().to_owned()).collect();
    while let Some(name) = waiting.pop() {
        match name.as_bytes() {
            b"/" => at = "/".into(),
            b".." => drop(at.pop()),
            _ => at.push(&name),
        }
        // The path has left the root of the tree.
        if full.starts_with(folder) && at.components().count() >= 1 && !folder.starts_with(&at) && !at.starts_with(folder) {
            return true;
        }
        if folder.starts_with(&at) && at != *folder && followed > 0 {
            return true;
        }
        if let Ok(target) = fs::read_link(&at) {
            followed += 1;
            if followed > 60 {
                return false;
            }
            at.pop();
            waiting.extend(target.components().rev().map(|component| component.as_os_str().to_owned()));
        }
    }
    !at.starts_with(folder)
}

/// Returns the bytes of all blocks that no node stores.
fn unstored(cluster: &Cluster) -> u64 {
    let status = cluster.status();
    status["nodes"].as_array().unwrap().iter().map(|node| node["origins"]["unstored_bytes"].as_u64().unwrap()).sum()
}

/// SEMANTICS: "Paths, symlinks, `.` and `..`, trailing slashes and error codes behave as in a directory
/// on Linux."
#[test]
fn random_operations_agree_with_a_plain_directory() {
    let small: &[&str] = &["--capacity", "1500KiB"];
    for (seed, options, is_tar) in
        [(0, &["--verify-reads"][..], false), (1, &[], true), (2, &[], false), (3, small, false), (4, small, true)]
    {
        let mut random = StdRng::seed_from_u64(seed);
        let ground = Ground::new();
        let folder = ground.at("tree");
        make_tree(&folder, &mut random);
        let folder = fs::canonicalize(folder).unwrap();
        let archive = ground.at("tree.tar");
        pack(&archive, &folder, &["--format=posix"]);
        let cluster = ground.up_with(3, options);
        cluster.stage(&[if is_tar { &archive } else { &folder }], "/dayfly/data/tree");
        // In a session with little room, a part of the blocks is not stored.
        assert_eq!(unstored(&cluster) > 1 << 20, options == small, "{}", unstored(&cluster));
        let views: Vec<View> = (0..3).map(|node| cluster.view(node)).collect();
        let listed = harness::program("find").arg(&folder).arg("-print0").output().unwrap().stdout;
        let prefix = folder.as_os_str().as_bytes();
        let known: Vec<Vec<u8>> =
            listed.split(|&byte| byte == 0).filter_map(|path| path.strip_prefix(prefix)).map(<[u8]>::to_vec).collect();
        assert!(known.len() > 200);
        let mut compared = 0;
        for step in 0..STEPS {
            let op = random_op(&known, &mut random);
            if leads_out(&folder, &op) {
                continue;
            }
            compared += 1;
            let view = views.choose(&mut random).unwrap();
            let (expected, found) = (in_plain(&folder, &op), in_namespace(view, &op, b"/dayfly/data/tree"));
            assert_eq!(expected, found, "seed {seed}, step {step}: {op:?}");
        }
        assert!(compared > STEPS / 2, "only {compared} steps were compared");
        let out = cluster.at("out");
        cluster.ok(&["cp", "-r", "/dayfly/data/tree", out.to_str().unwrap()]);
        tool("diff", &["-r".as_ref(), "--no-dereference".as_ref(), folder.as_os_str(), out.as_os_str()]);
        cluster.down();
    }
}

/// The variable with the instructions for a child process of this test binary: seed, output file and folder.
const CHILD: &str = "DAYFLY_TEST_MODEL";
const CALLS: usize = 4000;

/// Runs random calls on descriptors, one after another. Each line of the result shows the outcome of one call, with the numbers of new
/// descriptors.
fn trace(root: &Path, seed: u64) -> String {
    let mut random = StdRng::seed_from_u64(seed);
    let names = [
        "",
        "a",
        "a/b",
        "a/b/deep",
        "a/small",
        "a/b/large",
        "empty",
        "link",
        "up/small",
        "missing",
        "a/small/x",
        "a/../empty",
        ".",
    ];
    let mut open: Vec<OwnedFd> = Vec::new();
    let mut lines = String::new();
    for step in 0..CALLS {
        let name = *names.choose(&mut random).unwrap();
        let path = if random.random_bool(0.3) { PathBuf::from(name) } else { root.join(name) };
        let which = random.random_range(0..open.len().max(1));
        let (offset, len) = (random.random_range(0..300_000_i64), random.random_range(0..70_000_usize));
        let mut buffer = vec![0; len];
        let outcome = |result: nix::Result<i64>| result.map_or_else(|errno| format!("{errno:?}"), |value| value.to_string());
        let line = match (random.random_range(0..15), open.get(which)) {
            (0..3, _) => {
                let flags =
                    *[OFlag::empty(), OFlag::O_CLOEXEC, OFlag::O_DIRECTORY, OFlag::O_NOFOLLOW].choose(&mut random).unwrap();
                let result = nix::fcntl::open(&path, OFlag::O_RDONLY | flags, Mode::empty());
                let line = outcome(result.as_ref().map(|file| file.as_raw_fd().into()).map_err(|errno| *errno));
                open.extend(result);
                line
            }
            (3, Some(file)) => {
                let result = nix::fcntl::openat(file, name, OFlag::O_RDONLY, Mode::empty());
                let line = outcome(result.as_ref().map(|file| file.as_raw_fd().into()).map_err(|errno| *errno));
                open.extend(result);
                line
            }
            (4..7, Some(file)) => {
                let result = nix::unistd::read(file, &mut buffer);
                format!("{} {}", outcome(result.map(|count| count as i64)), crc(&buffer))
            }
            (7, Some(file)) => {
                let result = nix::sys::uio::pread(file, &mut buffer, offset);
                format!("{} {}", outcome(result.map(|count| count as i64)), crc(&buffer))
            }
            (8, Some(file)) => {
                let whence = *[Whence::SeekSet, Whence::SeekCur, Whence::SeekEnd].choose(&mut random).unwrap();
                // Offsets in directories differ between file systems.
                let is_file = nix::sys::stat::fstat(file).unwrap().st_mode & nix::libc::S_IFMT == nix::libc::S_IFREG;
                if is_file { outcome(nix::unistd::lseek(file, offset - 100_000, whence)) } else { String::new() }
            }
            (9, Some(file)) => {
                let result = nix::unistd::dup(file);
                let line = outcome(result.as_ref().map(|file| file.as_raw_fd().into()).map_err(|errno| *errno));
                open.extend(result);
                line
            }
            (10, Some(_)) if open.len() > 1 => {
                let from = nix::unistd::dup(&open[random.random_range(0..open.len())]).unwrap();
                outcome(nix::unistd::dup2(&from, &mut open[which]).map(|()| open[which].as_raw_fd().into()))
            }
            (11, Some(_)) if open.len() > 6 => {
                let number = open.swap_remove(which).as_raw_fd();
                format!("closed {number}")
            }
            (12, Some(file)) => {
                let stat = nix::sys::stat::fstat(file).unwrap();
                let size = if stat.st_mode & nix::libc::S_IFMT == nix::libc::S_IFDIR { 0 } else { stat.st_size };
                format!("{:o} {size} {} {}", stat.st_mode, stat.st_nlink, stat.st_mtime)
            }
            (13, _) => {
                let result = nix::unistd::chdir(&path).map(|()| 0);
                let now = nix::unistd::getcwd().unwrap();
                format!("{} {}", outcome(result), now.display())
            }
            (14, _) => {
                let target =
                    nix::fcntl::readlink(&path).map_or_else(|errno| format!("{errno:?}"), |target| format!("{target:?}"));
                let listed = fs::read_dir(&path).map(|entries| {
                    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
                    names.sort();
                    names
                });
                let listed = listed.map_or_else(|error| format!("{:?}", error.raw_os_error()), |names| format!("{names:?}"));
                format!("{} {target} {listed}", outcome(nix::unistd::access(&path, AccessFlags::R_OK).map(|()| 0)))
            }
            _ => String::new(),
        };
        lines += &format!("{step}: {line}\n");
        if open.len() > 40 {
            open.truncate(20);
        }
    }
    lines
}

/// Does nothing, except in the processes that the next test starts.
#[test]
fn child_of_the_model() {
    let Ok(orders) = std::env::var(CHILD) else { return };
    let (seed, rest) = orders.split_once(' ').unwrap();
    let (out, root) = rest.split_once(' ').unwrap();
    fs::write(out, trace(Path::new(root), seed.parse().unwrap())).unwrap();
}

/// SEMANTICS: "The C library's calls with paths and descriptors, in all variants that glibc has, return what they return for a
/// plain directory, except for the differences below."
#[test]
fn random_calls_through_the_library_agree_with_a_plain_directory() {
    let make = |root: &Path| {
        fs::create_dir_all(root.join("a/b/deep")).unwrap();
        fs::write(root.join("a/small"), vec![5; 3000]).unwrap();
        fs::write(root.join("a/b/large"), (0..250_000_u32).map(|at| (at >> 3) as u8).collect::<Vec<_>>()).unwrap();
        fs::write(root.join("empty"), "").unwrap();
        symlink("a/b/large", root.join("link")).unwrap();
        symlink("a", root.join("up")).unwrap();
    };
    let run = |command: &mut std::process::Command, out: &Path, root: &Path, seed: u64| {
        command
            .arg("--exact")
            .arg("model::child_of_the_model")
            .env(CHILD, format!("{seed} {} {}", out.display(), root.display()));
        let output = harness::output_of(command);
        assert!(output.status.success(), "{}", harness::text(&output.stdout));
        fs::read_to_string(out).unwrap()
    };
    let program = std::env::current_exe().unwrap();
    // No node of the second session has room for the large file.
    for (seeds, options, unstored_min) in [(0..4_u64, &[][..], 0), (4..6, &["--capacity", "100KiB"], 250_000)] {
        let (twin, expected) = twin_with(options, make, |ground, root| {
            let plainly = |seed| {
                let mut command = std::process::Command::new(&program);
                run(command.current_dir(ground.work.path()), &ground.at("trace"), root, seed)
            };
            seeds.clone().map(plainly).collect::<Vec<_>>()
        });
        assert!(unstored(&twin.cluster) >= unstored_min);
        for (seed, expected) in seeds.zip(expected) {
            let found = run(twin.exec_command(seed as u16 % 2).arg(&program), &twin.cluster.at("trace"), &twin.root, seed);
            assert!(expected.lines().filter(|line| line.len() > 8).count() > CALLS / 3);
            for (expected, found) in expected.lines().zip(found.lines()) {
                assert_eq!(expected, found, "seed {seed}");
            }
            assert_eq!(expected.len(), found.len());
        }
        twin.cluster.down();
    }
}
