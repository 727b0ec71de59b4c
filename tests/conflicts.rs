//! Tests that duplicates, hard links and conflicts across sources give the same result as unpacking the sources one after another
//! in the order given. GNU tar itself is the reference. The number of nodes varies, so that different nodes read different sources.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::harness::{self, Ground, assert_same_tree, output_of, pack, read_tree, tool};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

harness::with_few_and_many_workers! {
    sources_come_out_as_if_unpacked_one_after_another,
    members_that_cannot_be_stored_are_counted_and_named,
    strip_include_and_exclude_select_as_tar_does,
}

/// There are only a few names, so that paths collide.
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// Creates a random tree. The content of each file names its source.
fn random_tree(folder: &Path, random: &mut StdRng, source: usize) {
    fs::create_dir_all(folder).unwrap();
    for _ in 0..random.random_range(1..12) {
        let depth = random.random_range(1..4);
        let path = (0..depth).map(|_| *NAMES.choose(random).unwrap()).collect::<Vec<_>>().join("/");
        let full = folder.join(&path);
        // A source is packed from this folder, so skip each path that conflicts with an earlier one. Conflicts then arise only
        // between sources.
        let parent_is_real = full.ancestors().skip(1).take_while(|at| *at != folder).all(|at| !at.is_symlink());
        if !parent_is_real || fs::create_dir_all(full.parent().unwrap()).is_err() || fs::symlink_metadata(&full).is_ok() {
            continue;
        }
        match random.random_range(0..10) {
            0..5 => fs::write(&full, format!("{path} of source {source}").repeat(random.random_range(0..400))).unwrap(),
            5..7 => fs::create_dir(&full).unwrap(),
            // The target never exists: stage-in refuses members below a symlink, whereas tar would follow the symlink (see
            // SEMANTICS.md).
            7 => symlink(format!("nowhere-{source}"), &full).unwrap(),
            _ => {
                let file = fs::read_dir(full.parent().unwrap())
                    .unwrap()
                    .map(|entry| entry.unwrap().path())
                    .find(|path| path.is_file() && !path.is_symlink());
                if let Some(file) = file {
                    fs::hard_link(file, &full).unwrap();
                }
            }
        }
    }
    for entry in
        harness::program("find").arg(folder).output().unwrap().stdout.split(|&byte| byte == b'\n').filter(|path| !path.is_empty())
    {
        let time = format!("@{}", 1_000_000 + source * 1000 + entry.len());
        tool("touch", &["-h".as_ref(), "-d".as_ref(), time.as_ref(), std::ffi::OsStr::from_bytes(entry)]);
    }
}

/// SEMANTICS: "Where sources overlap, the result is the same as if they were unpacked one after another in the order given, with
/// the matches of a glob in byte order, whichever node reads which source."
fn sources_come_out_as_if_unpacked_one_after_another() {
    let seeds = 0..12_u64;
    for nodes in [1, 4] {
        let cluster = Ground::new().up(nodes);
        for seed in seeds.clone() {
            let mut random = StdRng::seed_from_u64(seed);
            let base = cluster.at(format!("{seed}"));
            let reference = base.join("reference");
            fs::create_dir_all(&reference).unwrap();
            let mut archives = Vec::new();
            for source in 0..random.random_range(2..7) {
                let tree = base.join(format!("tree-{source}"));
                random_tree(&tree, &mut random, source);
                let archive = base.join(format!("{source}.tar"));
                pack(&archive, &tree, &[["--format=gnu", "--format=pax"][source % 2]]);
                // If tar cannot unpack a member, it continues and fails at the end; what it has unpacked by then is the reference
                // that we want.
                output_of(harness::program("tar").arg("-xPf").arg(&archive).arg("-C").arg(&reference));
                archives.push(archive);
            }
            let target = format!("/dayfly/{seed}");
            cluster.stage(&archives.iter().map(|path| path.as_path()).collect::<Vec<_>>(), &target);
            let exported = base.join("exported");
            cluster.ok(&["cp", "-r", &target, exported.to_str().unwrap()]);
            let mut expected = read_tree(&reference);
            let mut found = read_tree(&exported);
            // Directory times differ: tar sets a directory's time when it leaves the directory, and later members change that time
            // again.
            for tree in [&mut expected, &mut found] {
                tree.values_mut().filter(|node| node.kind == 'd').for_each(|node| node.mtime = (0, 0));
            }
            assert_same_tree(&expected, &found, &format!("seed {seed} on {nodes} nodes"));
        }
        cluster.down();
    }
}

/// SEMANTICS: "Names that leave the tree by `..` are refused, absolute names are made relative, and
/// devices, FIFOs and sockets are skipped. All of them are counted."
fn members_that_cannot_be_stored_are_counted_and_named() {
    let ground = Ground::new();
    fs::create_dir(ground.at("t")).unwrap();
    fs::write(ground.at("t/file"), "inside").unwrap();
    fs::write(ground.at("outside"), "outside").unwrap();
    tool("mkfifo", &[ground.at("t/fifo").as_os_str()]);
    let make = |options: &[&str], name: &str| {
        let mut command = harness::program("tar");
        command.arg("-cPf").arg(ground.at(name)).args(options).current_dir(ground.at("t"));
        assert!(command.output().unwrap().status.success());
    };
    make(&["../outside", "file", "fifo"], "leaves.tar");
    make(&[ground.at("t/file").to_str().unwrap()], "absolute.tar");
    fs::create_dir(ground.at("link")).unwrap();
    symlink("t", ground.at("link/t")).unwrap();
    pack(&ground.at("below-symlink-1.tar"), &ground.at("link"), &[]);
    fs::create_dir_all(ground.at("below/t")).unwrap();
    fs::write(ground.at("below/t/x"), "below").unwrap();
    fs::remove_dir_all(ground.at("link")).unwrap();
    let file_only = output_of(
        harness::program("tar").arg("-cf").arg(ground.at("below-symlink-2.tar")).arg("-C").arg(ground.at("below")).arg("t/x"),
    );
    assert!(file_only.status.success());
    let cluster = ground.up(2);
    let stage =
        |sources: &[&str], target: &str| harness::text(&cluster.output(&[&["stage-in"], sources, &[target]].concat()).stderr);
    let summary = stage(&["leaves.tar"], "/dayfly/leaves");
    assert!(
        summary.contains("1 archive member refused")
            && summary.contains("../outside")
            && summary.contains("1 device, FIFO or socket"),
        "{summary}"
    );
    assert_eq!(cluster.ok(&["ls", "/dayfly/leaves"]), "file\n");
    let summary = stage(&["absolute.tar"], "/dayfly/absolute");
    assert!(summary.contains("1 absolute name made relative"), "{summary}");
    let path = format!("/dayfly/absolute{}", cluster.at("t/file").display());
    assert_eq!(cluster.ok(&["cat", &path]), "inside");
    let summary = stage(&["below-symlink-1.tar", "below-symlink-2.tar"], "/dayfly/symlink");
    assert!(summary.contains("1 archive member refused") && summary.contains("t/x"), "{summary}");
    cluster.down();
}

/// SEMANTICS: "`--strip-components` and `--exclude` work as those of tar, and `--include` as `tar --wildcards --no-anchored`: on names
/// as the archive spells them, so `./a` has two components. The names in a tree begin with `./`, which `--strip-components` does not
/// count."
/// SEMANTICS: "A stage-in fails if no sample or symlink of its sources is left: its error counts what `--include`, `--exclude` and `--strip-components`
/// leave out, what is refused, and what cannot be read."
fn strip_include_and_exclude_select_as_tar_does() {
    let ground = Ground::new();
    for path in ["t/x/a.jpg", "t/x/b.txt", "t/y/c.jpg", "t/top"] {
        fs::create_dir_all(ground.at(path).parent().unwrap()).unwrap();
        fs::write(ground.at(path), path).unwrap();
    }
    let packed = output_of(harness::program("tar").arg("-cf").arg(ground.at("t.tar")).arg("-C").arg(ground.work.path()).arg("t"));
    assert!(packed.status.success());
    pack(&ground.at("dotted.tar"), &ground.at("t"), &[]);
    let cluster = ground.up(2);
    let files = |options: &[&str], source: &str| {
        let arguments = [&["stage-in", "--replace"], options, &[source, "/dayfly/s"]].concat();
        cluster.ok(&arguments);
        let tree = cluster.at("out");
        let _ = fs::remove_dir_all(&tree);
        cluster.ok(&["cp", "-r", "/dayfly/s", tree.to_str().unwrap()]);
        let tree = read_tree(&tree).into_iter().filter(|(_, node)| node.kind == 'f');
        tree.map(|(path, _)| harness::text(&path)).collect::<Vec<_>>().join(" ")
    };
    for source in ["t.tar", "t"] {
        // Paths in a tree are relative to its root; paths of archive members are used unchanged.
        let (prefix, strip) = if source == "t" { ("", "0") } else { ("t/", "1") };
        assert_eq!(files(&[], source), format!("{prefix}top {prefix}x/a.jpg {prefix}x/b.txt {prefix}y/c.jpg"));
        assert_eq!(files(&["--strip-components", strip, "--include", "*.jpg"], source), "x/a.jpg y/c.jpg");
        assert_eq!(files(&["--strip-components", strip, "--exclude", "x"], source), "top y/c.jpg");
    }
    for source in ["dotted.tar", "t"] {
        assert_eq!(files(&["--exclude", "./x", "--include", "./*/*"], source), "y/c.jpg");
        assert_eq!(files(&["--exclude", "./x/*"], source), "top y/c.jpg");
    }
    assert_eq!(files(&["--strip-components", "1"], "dotted.tar"), "top x/a.jpg x/b.txt y/c.jpg");
    assert_eq!(files(&["--strip-components", "1"], "t"), "a.jpg b.txt c.jpg");
    assert_eq!(files(&["--strip-components", "1", "--exclude", "x/a.jpg"], "t"), "b.txt c.jpg");
    assert_eq!(files(&["--strip-components", "2"], "t.tar"), "a.jpg b.txt c.jpg");
    for (source, option, value) in
        [("t.tar", "--include", "*.none"), ("t", "--exclude", "*"), ("t.tar", "--strip-components", "9")]
    {
        let summary = cluster.output(&["stage-in", option, value, source, "/dayfly/empty"]);
        let message = harness::text(&summary.stderr);
        assert!(summary.status.code() == Some(1) && message.contains("are left out by --include"), "{message}");
        assert!(!cluster.output(&["ls", "/dayfly/empty"]).status.success());
    }
    let summary = cluster.ok(&["stage-in", "--json", "t.tar", "/dayfly/json"]);
    let last: serde_json::Value = serde_json::from_str(summary.lines().last().unwrap()).unwrap();
    assert_eq!((last["samples"].as_u64(), last["source_bytes"].as_u64() > Some(0)), (Some(4), true), "{last}");
    cluster.down();
}
