//! Tests stage-in from end to end: for every kind of source, the dataset equals what the source's own tool unpacks, is either
//! completely visible or not at all, and is stored in shuffled order.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::harness::drive::SmallDrive;
use crate::harness::{self, Cluster, Ground, assert_same_tree, output_of, pack, read_tree, text, tool, wait_for, wait_until};
use dayfly_client::Samples;
use dayfly_meta::id::{BlockId, NodeId, SampleId};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

harness::with_few_and_many_workers! {
    every_format_comes_out_as_it_went_in,
    real_crates_and_wheels_come_out_as_their_tools_unpack_them,
    archives_of_parallel_packers_come_out_as_they_went_in,
    zips_come_out_as_unzip_unpacks_them,
    sparse_members_are_expanded,
    an_archive_cut_anywhere_is_an_error_that_names_it_and_leaves_nothing,
    keep_going_leaves_out_what_cannot_be_read_and_lists_it,
    several_stage_ins_run_at_once_unless_their_targets_overlap,
    a_stage_in_may_be_requested_on_any_node,
    the_rate_limit_holds,
    stored_order_is_random_and_complete,
    files_of_one_stem_are_placed_stored_and_listed_together,
    nested_archives_become_directories,
    a_report_is_written_and_events_name_each_node,
    a_full_disk_ends_a_stage_in_and_its_space_is_free_again,
}

/// Creates files of many sizes in a few directories, all with different content.
fn make_tree(folder: &Path, files: usize) {
    let mut random = StdRng::seed_from_u64(files as u64);
    for number in 0..files {
        let path = folder.join(format!("class-{}/{number}.bin", number % 7));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let size = [0, 10, 3000, 70_000, 1_300_000][if number % 40 == 0 { 4 } else { number % 4 }];
        let bytes: Vec<u8> = (0..size / 2).map(|_| random.random()).chain(std::iter::repeat_n(b'x', size - size / 2)).collect();
        fs::write(path, bytes).unwrap();
    }
    std::os::unix::fs::symlink("class-0/0.bin", folder.join("link")).unwrap();
    fs::hard_link(folder.join("class-1/1.bin"), folder.join("hard")).unwrap();
}

/// Copies a tree out of the namespace with `dayfly cp`, and reads the copy.
fn copied(cluster: &Cluster, from: &str, name: &str) -> harness::Tree {
    let to = cluster.at(name);
    cluster.ok(&["cp", "-r", from, to.to_str().unwrap()]);
    read_tree(&to)
}

fn python(ground: &Ground, script: &str, arguments: &[&OsStr]) {
    let script = [OsStr::new("-c"), OsStr::new(script)];
    let output = harness::program("python3").args(script).args(arguments).current_dir(ground.work.path()).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

/// Zips a folder with Python, directories included. `method` is a constant of `zipfile`.
fn zip(ground: &Ground, name: &str, folder: &str, method: &str) {
    let script = "import sys, os, zipfile
zip = zipfile.ZipFile(sys.argv[1], 'w', getattr(zipfile, sys.argv[3]))
for root, folders, files in os.walk(sys.argv[2]):
    for name in sorted(folders + files):
        path = os.path.join(root, name)
        inside = os.path.relpath(path, sys.argv[2])
        if os.path.islink(path):
            info = zipfile.ZipInfo(inside); info.create_system = 3; info.external_attr = 0o120777 << 16
            zip.writestr(info, os.readlink(path))
        else:
            zip.write(path, inside)
zip.close()";
    python(ground, script, &[name, folder, method].map(OsStr::new));
}

/// Removes what a zip cannot hold: hard links, and times more precise than two seconds.
fn as_zipped(mut tree: harness::Tree) -> harness::Tree {
    for (path, node) in &mut tree {
        node.first = path.clone();
        node.mtime = (0, 0);
    }
    tree
}

/// SEMANTICS: "Tars may be ustar, GNU or PAX, plain or compressed with gzip, zstd, xz, bzip2 or lz4."
/// SEMANTICS: "A file with a zip's name may begin with something else, as self-extracting zips do, if it ends as a zip."
fn every_format_comes_out_as_it_went_in() {
    let ground = Ground::new();
    make_tree(&ground.at("tree"), 170);
    let endings = ["tar", "tar.gz", "tar.bz2", "tar.xz", "tar.zst", "tar.lz4"];
    for ending in endings {
        pack(&ground.at(format!("a.{ending}")), &ground.at("tree"), &["--format=pax"]);
    }
    zip(&ground, "stored.zip", "tree", "ZIP_STORED");
    zip(&ground, "deflated.zip", "tree", "ZIP_DEFLATED");
    fs::write(ground.at("runs.zip"), [&b"#!/bin/sh\nexit\n"[..], &fs::read(ground.at("stored.zip")).unwrap()].concat()).unwrap();
    let expected = read_tree(&ground.at("tree"));
    let cluster = ground.up(3);
    for ending in endings {
        cluster.stage(&[&cluster.at(format!("a.{ending}"))], &format!("/dayfly/{ending}"));
        assert_same_tree(&expected, &copied(&cluster, &format!("/dayfly/{ending}"), ending), ending);
    }
    for name in ["stored", "deflated", "runs"] {
        cluster.stage(&[&cluster.at(format!("{name}.zip"))], &format!("/dayfly/{name}"));
        let found = as_zipped(copied(&cluster, &format!("/dayfly/{name}"), name));
        assert_same_tree(&as_zipped(expected.clone()), &found, name);
    }
    cluster.ok(&["verify", "--from-every-node"]);
    cluster.down();
}

/// SEMANTICS: "Zips may be stored or compressed with deflate, bzip2, zstd or xz, and may be zip64.
/// Their checksums are checked. Encrypted zips and other methods are errors. Permissions and symlinks are as `unzip` leaves them."
fn real_crates_and_wheels_come_out_as_their_tools_unpack_them() {
    let ground = Ground::new();
    let crates = glob::glob(&format!("{}/registry/cache/*/*.crate", cargo_home())).unwrap().map(Result::unwrap);
    let crates: Vec<_> = crates.take(25).collect();
    assert!(crates.len() > 10, "Cargo's registry holds the crates that this was built from");
    let script = "import ensurepip, glob, os; print(*glob.glob(os.path.join(os.path.dirname(ensurepip.__file__), '_bundled', '*.whl')), *glob.glob('/usr/share/python-wheels/*.whl'), sep='\\n')";
    let found = harness::program("python3").args(["-c", script]).output().unwrap();
    let wheels: Vec<String> = text(&found.stdout).lines().filter(|line| !line.is_empty()).map(str::to_owned).collect();
    fs::create_dir(ground.at("tools")).unwrap();
    for archive in &crates {
        tool("tar", &["-xf".as_ref(), archive.as_os_str(), "-C".as_ref(), ground.at("tools").as_os_str()]);
    }
    let cluster = ground.up(3);
    let sources: Vec<&Path> = crates.iter().map(std::path::PathBuf::as_path).collect();
    cluster.stage(&sources, "/dayfly/crates");
    let mut found = copied(&cluster, "/dayfly/crates", "crates");
    let mut expected = read_tree(&cluster.at("tools"));
    // Crates contain no entries for directories, so tar gives each directory the time of unpacking.
    for tree in [&mut expected, &mut found] {
        tree.values_mut().filter(|node| node.kind == 'd').for_each(|node| node.mtime = (0, 0));
    }
    assert_same_tree(&expected, &found, "crates");
    for (number, wheel) in wheels.iter().enumerate() {
        let unpacked = format!("wheel{number}");
        python(
            &cluster,
            "import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])",
            &[wheel, &unpacked].map(OsStr::new),
        );
        cluster.stage(&[Path::new(wheel)], &format!("/dayfly/{unpacked}"));
        let content = |tree: harness::Tree| -> BTreeMap<Vec<u8>, Vec<u8>> {
            tree.into_iter().filter(|(_, node)| node.kind == 'f').map(|(path, node)| (path, node.content)).collect()
        };
        let found = content(copied(&cluster, &format!("/dayfly/{unpacked}"), &format!("{unpacked}.out")));
        assert!(found == content(read_tree(&cluster.at(&unpacked))), "{wheel}");
    }
    cluster.down();
}

/// Shell commands that compress standard input to standard output, each with the name ending of the archives that it makes. The
/// archives consist of parts that can be decoded in parallel. The first word of a command is its program.
const IN_PARTS: [(&str, &str); 7] = [
    ("pigz -i -p 2 -b 128", "tar.gz"),
    ("bgzip -c", "tgz"),
    ("pzstd -q -p 2 -c", "tar.zst"),
    ("zstd -q -c", "tzst"),
    ("xz -0 -T 2 --block-size=1MiB -c", "tar.xz"),
    ("lz4 -q -B4 -c", "tar.lz4"),
    ("bzip2 -c", "tbz2"),
];

/// SEMANTICS: "A compressed tar may have one compressed stream or many, as parallel packers write
/// them."
fn archives_of_parallel_packers_come_out_as_they_went_in() {
    let ground = Ground::new();
    make_tree(&ground.at("tree"), 170);
    pack(&ground.at("a.tar"), &ground.at("tree"), &["--format=pax"]);
    let expected = read_tree(&ground.at("tree"));
    let cluster = ground.up(2);
    for (number, (command, ending)) in IN_PARTS.iter().enumerate() {
        let program = command.split(' ').next().unwrap();
        if !harness::is_installed(program) {
            continue;
        }
        let script = format!("(head -c 5000000 | {command}; {command}) < a.tar > {number}.{ending}");
        let packed = harness::program("bash").args(["-ec", &script]).current_dir(cluster.work.path()).output().unwrap();
        assert!(packed.status.success(), "{command}: {}", text(&packed.stderr));
        let target = format!("/dayfly/p{number}");
        cluster.stage(&[&cluster.at(format!("{number}.{ending}"))], &target);
        assert_same_tree(&expected, &copied(&cluster, &target, &format!("out{number}")), command);
    }
    cluster.down();
}

/// SEMANTICS: "Zips may be stored or compressed with deflate, bzip2, zstd or xz, and may be zip64.
/// Their checksums are checked. Encrypted zips and other methods are errors. Permissions and symlinks are as `unzip` leaves them."
fn zips_come_out_as_unzip_unpacks_them() {
    let ground = Ground::new();
    make_tree(&ground.at("tree"), 100);
    fs::create_dir(ground.at("out")).unwrap();
    if !harness::is_installed("zip") || !harness::is_installed("unzip") {
        return;
    }
    let script =
        "cd tree && chmod 640 class-1/1.bin && chmod 750 class-2 && zip -q -y -r ../a.zip . && cd .. && unzip -q a.zip -d out";
    let done = harness::program("bash").args(["-ec", script]).current_dir(ground.work.path()).output().unwrap();
    assert!(done.status.success(), "{}", text(&done.stderr));
    let cluster = ground.up(2);
    cluster.stage(&[&cluster.at("a.zip")], "/dayfly/x");
    let mut expected = read_tree(&cluster.at("out"));
    let mut found = copied(&cluster, "/dayfly/x", "found");
    for tree in [&mut expected, &mut found] {
        // unzip gives links the time of unpacking.
        tree.values_mut().filter(|node| node.kind == 'l').for_each(|node| node.mtime = (0, 0));
        tree.values_mut().for_each(|node| node.mtime.1 = 0);
    }
    assert_same_tree(&expected, &found, "unzip");
    cluster.down();
}

fn cargo_home() -> String {
    std::env::var("CARGO_HOME").unwrap_or_else(|_| format!("{}/.cargo", std::env::var("HOME").unwrap()))
}

/// SEMANTICS: "Sparse members of a tar are expanded."
fn sparse_members_are_expanded() {
    let ground = Ground::new();
    fs::create_dir(ground.at("tree")).unwrap();
    for (name, pieces) in
        [("one", vec![(1_000_000, 5000)]), ("ends", vec![(0, 100), (3 << 20, 70_000), (20 << 20, 1)]), ("hole", vec![])]
    {
        let mut file = fs::File::create(ground.at("tree").join(name)).unwrap();
        for (offset, len) in pieces {
            std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(offset)).unwrap();
            file.write_all(&vec![b'd'; len]).unwrap();
        }
        let len = file.metadata().unwrap().len();
        file.set_len(len + 100_000).unwrap();
    }
    // There are so many pieces that their map does not fit in one header.
    let mut many = fs::File::create(ground.at("tree/many")).unwrap();
    for piece in 0..100_u64 {
        std::io::Seek::seek(&mut many, std::io::SeekFrom::Start(piece * 65_536)).unwrap();
        many.write_all(&[piece as u8 + 1; 4096]).unwrap();
    }
    drop(many);
    let expected = read_tree(&ground.at("tree"));
    let formats = [
        ("gnu", &["--sparse", "--format=gnu"][..]),
        ("pax00", &["--sparse", "--format=pax", "--sparse-version=0.0"]),
        ("pax01", &["--sparse", "--format=pax", "--sparse-version=0.1"]),
        ("pax10", &["--sparse", "--format=pax", "--sparse-version=1.0"]),
    ];
    for (name, options) in formats {
        pack(&ground.at(format!("{name}.tar")), &ground.at("tree"), options);
        assert!(fs::metadata(ground.at(format!("{name}.tar"))).unwrap().len() < 2 << 20, "{name} is sparse");
    }
    let cluster = ground.up(2);
    for (name, _) in formats {
        cluster.stage(&[&cluster.at(format!("{name}.tar"))], &format!("/dayfly/{name}"));
        let mut found = copied(&cluster, &format!("/dayfly/{name}"), name);
        let mut expected = expected.clone();
        if name == "gnu" {
            // This format does not store fractions of seconds.
            expected.values_mut().chain(found.values_mut()).for_each(|node| node.mtime.1 = 0);
        }
        assert_same_tree(&expected, &found, name);
    }
    cluster.down();
}

/// SEMANTICS: "However many workers a server has (`--stage-in-workers`), the first failure ends the stage-in on all nodes."
/// SEMANTICS: "A truncated archive causes an error that names it, and leaves nothing behind."
fn an_archive_cut_anywhere_is_an_error_that_names_it_and_leaves_nothing() {
    let ground = Ground::new();
    make_tree(&ground.at("tree"), 60);
    for ending in ["tar", "tar.gz", "tar.xz", "tar.zst"] {
        pack(&ground.at(format!("a.{ending}")), &ground.at("tree"), &[]);
    }
    zip(&ground, "a.zip", "tree", "ZIP_DEFLATED");
    let cluster = ground.up(2);
    for ending in ["tar", "tar.gz", "tar.xz", "tar.zst", "zip"] {
        let whole = fs::read(cluster.at(format!("a.{ending}"))).unwrap();
        let name = format!("cut.{ending}");
        for part in 0..50 {
            fs::write(cluster.at(&name), &whole[..whole.len() / 50 * part]).unwrap();
            // A plain tar that is cut between two members cannot be distinguished from a whole tar without an end mark.
            let is_between = ending == "tar" && part > 0 && {
                let listed = harness::program("tar").arg("-tf").arg(cluster.at(&name)).output().unwrap();
                listed.status.success()
            };
            if is_between {
                continue;
            }
            let message = cluster.fails(1, &["stage-in", &name, "/dayfly/cut"]);
            assert!(message.contains(&name), "cut at {part}/50: {message}");
        }
        assert_eq!(cluster.ok(&["ls"]), "");
        assert_eq!(cluster.used_bytes(), 0, "{ending}");
    }
    cluster.down();
}

/// SEMANTICS: "`--keep-going` leaves out archive members and sources that cannot be read, counts them,
/// and lists the first 500 with their positions. If it left out anything, `stage-in` exits with 3, and
/// `run` continues."
fn keep_going_leaves_out_what_cannot_be_read_and_lists_it() {
    let ground = Ground::new();
    make_tree(&ground.at("tree"), 60);
    pack(&ground.at("good.tar"), &ground.at("tree"), &[]);
    zip(&ground, "bad.zip", "tree", "ZIP_STORED");
    let mut bytes = fs::read(ground.at("bad.zip")).unwrap();
    let at = bytes.windows(3000).position(|window| window.iter().all(|&byte| byte == b'x')).unwrap();
    bytes[at + 1500] ^= 1;
    fs::write(ground.at("bad.zip"), bytes).unwrap();
    let cut = fs::read(ground.at("good.tar")).unwrap();
    fs::write(ground.at("cut.tar"), &cut[..cut.len() / 2]).unwrap();
    let cluster = ground.up(2);
    let message = cluster.fails(1, &["stage-in", "bad.zip", "/dayfly/x"]);
    assert!(message.contains("bad.zip") && message.contains("checksum") && message.contains("at byte"), "{message}");
    let output = cluster.output(&["stage-in", "--json", "--keep-going", "bad.zip", "cut.tar", "/dayfly/x"]);
    assert_eq!(output.status.code(), Some(3), "some of it is missing: {}", text(&output.stderr));
    let printed = text(&output.stdout);
    let last: serde_json::Value = serde_json::from_str(printed.lines().last().unwrap()).unwrap();
    let notes = last["skipped_notes"].as_array().unwrap();
    assert!(last["skipped"].as_u64().unwrap() >= 2 && notes.len() >= 2, "{last}");
    for name in ["bad.zip", "cut.tar"] {
        assert!(notes.iter().any(|note| note.as_str().unwrap().contains(name)), "{name}: {notes:?}");
    }
    cluster.ok(&["verify"]);
    // If nothing is left out, the exit status is 0.
    cluster.ok(&["stage-in", "--keep-going", "good.tar", "/dayfly/whole"]);
    cluster.down();
}

/// SEMANTICS: "Up to four stage-ins run at once in a session, none with a target below or above another's; any others wait."
fn several_stage_ins_run_at_once_unless_their_targets_overlap() {
    let ground = Ground::new();
    make_tree(&ground.at("tree"), 200);
    pack(&ground.at("a.tar"), &ground.at("tree"), &["--format=pax"]);
    let expected = read_tree(&ground.at("tree"));
    let cluster = ground.up(2);
    // Start more stage-ins than may run at once, each slow enough to overlap with the others.
    let start = |number: u32, target: &str| {
        let mut command = cluster.dayfly();
        command.args(["stage-in", "--max-rate", "20MB/s", "a.tar", target]).env("DAYFLY_NODE", (number % 2).to_string());
        command.stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut first = start(0, "/dayfly/d0");
    // The command owns its target before it prints what it will stage in. The pipe stays open, because the command prints more.
    let mut printed = BufReader::new(first.stderr.take().unwrap()).lines();
    assert!(printed.by_ref().any(|line| line.unwrap().contains("staging")), "the first stage-in begins");
    let others = (1..6).map(|number| start(number, &format!("/dayfly/d{number}")));
    let mut children: Vec<_> = std::iter::once(first).chain(others).collect();
    wait_until("one of them is refused", || {
        let output = cluster.output(&["stage-in", "a.tar", "/dayfly/d0/below"]);
        let message = text(&output.stderr);
        assert!(!output.status.success());
        message.contains("another stage-in to '/dayfly/d0' is running") || message.contains("overlap")
    });
    for child in &mut children {
        assert!(wait_for(child, Duration::from_secs(60)).expect("it exits").success());
    }
    for number in 0..6 {
        assert_same_tree(&expected, &copied(&cluster, &format!("/dayfly/d{number}"), &format!("out{number}")), "one of several");
    }
    cluster.down();
}

fn a_stage_in_may_be_requested_on_any_node() {
    let ground = Ground::new();
    make_tree(&ground.at("tree"), 200);
    let expected = read_tree(&ground.at("tree"));
    let cluster = ground.up(3);
    let stage_in = |arguments: &[&str]| {
        let mut command = cluster.dayfly();
        output_of(command.arg("stage-in").args(arguments).env("DAYFLY_NODE", "2"))
    };
    let output = stage_in(&["--json", "tree", "/dayfly/d"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let events: Vec<serde_json::Value> = text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(
        events.iter().any(|event| event["event"] == "planned") && events.last().unwrap()["event"] == "staged-in",
        "{events:?}"
    );
    assert_same_tree(&expected, &copied(&cluster, "/dayfly/d", "out"), "from node 2");
    let output = stage_in(&["no-such.tar", "/dayfly/e"]);
    let message = text(&output.stderr);
    assert!(output.status.code() == Some(1) && message.contains("no-such.tar") && message.contains("node 0"), "{message}");
    cluster.down();
}

/// SEMANTICS: "`--max-rate` bounds the rate at which all nodes together read the sources."
fn the_rate_limit_holds() {
    let ground = Ground::new();
    fs::create_dir(ground.at("tree")).unwrap();
    (0..40).for_each(|number| fs::write(ground.at(format!("tree/{number}")), vec![1; 100_000]).unwrap());
    let cluster = ground.up(2);
    let start = Instant::now();
    cluster.ok(&["stage-in", "--max-rate", "4MB", "tree", "/dayfly/x"]);
    // Each node that reads has a share of the rate. What it does not use of its share is not given to other nodes.
    assert!(start.elapsed() > Duration::from_millis(800), "{:?}", start.elapsed());
    cluster.down();
}

/// Returns the names of each node's samples in stored order.
fn local_orders(cluster: &Cluster, nodes: u16, path: &str) -> Vec<Vec<String>> {
    let of_node = |node| {
        let view = cluster.view(node);
        let dataset = view.dataset_of(path.as_bytes()).unwrap();
        let samples = Samples::of(dataset.catalog());
        let name = |sample: SampleId| {
            let entry = dataset.catalog().entry(samples.entry(sample).unwrap()).unwrap();
            text(&dataset.catalog().path(&entry))
        };
        samples.local(&dataset, NodeId(node), nodes).into_iter().map(name).collect()
    };
    (0..nodes).map(of_node).collect()
}

/// SEMANTICS: "Local shuffling. A node stores its blocks in random order, so reading a segment from front to back yields the node's
/// samples in random order at the speed of sequential reading. `Samples::local` in Rust and `dayfly_local` in C return this node's
/// samples in stored order; across all nodes, each sample occurs exactly once."
fn stored_order_is_random_and_complete() {
    let ground = Ground::new();
    fs::create_dir(ground.at("tree")).unwrap();
    for number in 0..3000 {
        let size = [70_000, 0, 500, 500, 500][number % 5];
        fs::write(ground.at(format!("tree/{number:05}.bin")), vec![1; size]).unwrap();
    }
    pack(&ground.at("a.tar"), &ground.at("tree"), &[]);
    let cluster = ground.up(3);
    cluster.stage(&[&cluster.at("a.tar")], "/dayfly/x");
    let orders = local_orders(&cluster, 3, "/dayfly/x");
    let all: BTreeSet<&String> = orders.iter().flatten().collect();
    assert_eq!((all.len(), orders.iter().map(Vec::len).sum::<usize>()), (3000, 3000));
    for order in &orders {
        let ascents = order.windows(2).filter(|pair| pair[0] < pair[1]).count();
        let share = ascents as f64 / order.len() as f64;
        assert!((0.45..0.55).contains(&share), "{share} of the samples come after one with a lower name");
    }
    // The order of an epoch is the same on every node, and no two epochs have the same order.
    let epoch = |node, epoch| {
        let view = cluster.view(node);
        let dataset = view.dataset_of(b"/dayfly/x").unwrap();
        Samples::of(dataset.catalog()).epoch(7, epoch).collect::<Vec<_>>()
    };
    assert!(epoch(0, 1) == epoch(2, 1) && epoch(0, 1) != epoch(0, 2));
    assert_eq!(epoch(0, 1).into_iter().collect::<BTreeSet<_>>().len(), 3000);
    cluster.down();
}

/// SEMANTICS: "`--group stem` keeps together files of one directory whose names differ only after their
/// last dot (`k.jpg`, `k.json`): they have one owner, lie side by side on its drive, and follow each
/// other in the orders below."
fn files_of_one_stem_are_placed_stored_and_listed_together() {
    let ground = Ground::new();
    fs::create_dir(ground.at("tree")).unwrap();
    for number in 0..500 {
        for ending in ["jpg", "json", "txt"] {
            fs::write(ground.at(format!("tree/{number}.{ending}")), format!("{number} {ending}").repeat(50)).unwrap();
        }
    }
    pack(&ground.at("a.tar"), &ground.at("tree"), &[]);
    let cluster = ground.up(3);
    cluster.ok(&["stage-in", "--group", "stem", "a.tar", "/dayfly/x"]);
    let stem = |name: &String| name.split('.').next().unwrap().to_owned();
    for order in local_orders(&cluster, 3, "/dayfly/x") {
        assert_eq!(order.len() % 3, 0, "groups are whole");
        for group in order.chunks(3) {
            assert!(group.iter().all(|name| stem(name) == stem(&group[0])), "{group:?}");
        }
    }
    let view = cluster.view(0);
    let dataset = view.dataset_of(b"/dayfly/x").unwrap();
    let samples = Samples::of(dataset.catalog());
    let order: Vec<SampleId> = samples.epoch(1, 1).collect();
    assert_eq!(order.iter().collect::<BTreeSet<_>>().len(), 1500);
    for group in order.chunks(3) {
        let owner = |sample: &SampleId| dataset.catalog().owner(BlockId(dataset.catalog().sample(*sample).unwrap().1.start));
        let parents: BTreeSet<String> = group
            .iter()
            .map(|&sample| {
                let entry = dataset.catalog().entry(samples.entry(sample).unwrap()).unwrap();
                stem(&text(entry.name))
            })
            .collect();
        assert_eq!(parents.len(), 1, "{parents:?}");
        assert!(group.iter().all(|sample| owner(sample) == owner(&group[0])));
    }
    cluster.down();
}

/// SEMANTICS: "`--nested` turns an archive within an archive or a tree into a directory, which has the
/// archive's name without its ending, up to four levels deep."
fn nested_archives_become_directories() {
    let ground = Ground::new();
    make_tree(&ground.at("n01"), 30);
    make_tree(&ground.at("n02"), 30);
    fs::create_dir(ground.at("inner")).unwrap();
    pack(&ground.at("inner/n01.tar"), &ground.at("n01"), &["--format=pax"]);
    pack(&ground.at("inner/n02.tar.gz"), &ground.at("n02"), &["--format=pax"]);
    pack(&ground.at("outer.tar"), &ground.at("inner"), &[]);
    let cluster = ground.up(2);
    cluster.ok(&["stage-in", "--nested", "outer.tar", "/dayfly/x"]);
    for class in ["n01", "n02"] {
        assert_same_tree(
            &read_tree(&cluster.at(class)),
            &copied(&cluster, &format!("/dayfly/x/{class}"), &format!("{class}.out")),
            class,
        );
    }
    cluster.ok(&["stage-in", "--nested", "inner", "/dayfly/tree"]);
    assert_same_tree(&read_tree(&cluster.at("n01")), &copied(&cluster, "/dayfly/tree/n01", "tree.out"), "in a tree");
    cluster.down();
}

fn a_report_is_written_and_events_name_each_node() {
    let ground = Ground::new();
    make_tree(&ground.at("tree"), 100);
    let cluster = ground.up(2);
    let printed = cluster.ok(&["stage-in", "--json", "--report", "out.html", "tree", "/dayfly/x"]);
    let last: serde_json::Value = serde_json::from_str(printed.lines().last().unwrap()).unwrap();
    assert_eq!(last["event"], "staged-in");
    let nodes = last["nodes"].as_array().unwrap();
    assert_eq!(nodes.iter().map(|node| node["files"].as_u64().unwrap()).sum::<u64>(), 100);
    assert_eq!(nodes.iter().map(|node| node["source_bytes"].as_u64().unwrap()).sum::<u64>(), last["source_bytes"]);
    let page = fs::read_to_string(cluster.at("out.html")).unwrap();
    assert!(page.contains("class-3") && page.matches("<svg").count() == 6, "{page}");
    cluster.down();
}

/// SEMANTICS: "A drive that fills up ends a stage-in whose samples must be stored, and the stage-in's space is free again."
fn a_full_disk_ends_a_stage_in_and_its_space_is_free_again() {
    let ground = Ground::new();
    let Some(drive) = SmallDrive::mount(ground.at("drive"), "24m") else { return };
    fs::create_dir(ground.at("large")).unwrap();
    (0..300).for_each(|number| fs::write(ground.at(format!("large/{number}")), vec![7; 100_000]).unwrap());
    pack(&ground.at("large.tar.gz"), &ground.at("large"), &[]);
    fs::create_dir(ground.at("small")).unwrap();
    (0..30).for_each(|number| fs::write(ground.at(format!("small/{number}")), vec![7; 100_000]).unwrap());
    let cluster = ground.up_with(2, &["--data-dir", drive.path().to_str().unwrap(), "--capacity", "100MiB"]);
    cluster.stage(&[&cluster.at("small")], "/dayfly/small");
    let free = || nix::sys::statvfs::statvfs(drive.path()).unwrap().blocks_available();
    let before = free();
    let message = cluster.fails(1, &["stage-in", "large.tar.gz", "/dayfly/large"]);
    assert!(message.contains("room") || message.contains("No space left"), "{message}");
    wait_until("its space is free again", || free() >= before - 16);
    assert_eq!(cluster.ok(&["ls"]).trim(), "small");
    cluster.ok(&["verify"]);
    cluster.ok(&["down"]);
}
