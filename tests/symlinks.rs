//! Tests of symlinks in trees that are staged in: as they are, and with `--dereference`.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::Command;

use crate::harness::{Cluster, Ground, output_of, pack, text, wait_until};

/// Makes a cache as the Hugging Face Hub's library does: files with the names of their contents, and snapshots of symlinks to them.
fn make_cache(cache: &Path) {
    fs::create_dir_all(cache.join("blobs")).unwrap();
    fs::create_dir_all(cache.join("snapshots/main/train")).unwrap();
    for number in 0..6 {
        let blob = if number == 5 { 0 } else { number };
        fs::write(cache.join(format!("blobs/b{blob}")), format!("sample {blob}").repeat(500)).unwrap();
        symlink(format!("../../../blobs/b{blob}"), cache.join(format!("snapshots/main/train/{number}.jpg"))).unwrap();
    }
}

/// Asserts that a directory of the namespace equals what `cp -rL` makes of a tree.
fn assert_equals_copy(cluster: &Cluster, tree: &Path, target: &str) {
    let copy = cluster.at("copy");
    let _ = fs::remove_dir_all(&copy);
    assert!(Command::new("cp").args(["-rL".as_ref(), tree.as_os_str(), copy.as_os_str()]).status().unwrap().success());
    let output = output_of(cluster.dayfly().args(["exec", "--", "diff", "-r", "--no-dereference", target]).arg(&copy));
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

fn json_summary(cluster: &Cluster, arguments: &[&str]) -> serde_json::Value {
    let events = cluster.ok(&[&["stage-in", "--json"], arguments].concat());
    let mut events = events.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    events.find(|event| event["event"] == "staged-in").unwrap()
}

/// SEMANTICS: "Symlinks in a tree are staged in as symlinks. The summary counts those whose targets, as they are written, lead out of the
/// dataset, and names one."
#[test]
fn symlinks_that_lead_out_of_the_dataset_are_counted() {
    let ground = Ground::new();
    make_cache(&ground.at("cache"));
    symlink("/dayfly/d/main/train", ground.at("cache/snapshots/latest")).unwrap();
    pack(&ground.at("cache.tar"), &ground.at("cache/snapshots"), &[]);
    let cluster = ground.up(2);
    let stderr = |source: &str, target: &str| {
        let output = cluster.output(&["stage-in", source, target]);
        assert!(output.status.success());
        text(&output.stderr)
    };
    let warning = "6 of 7 symbolic links lead out of the dataset (main/train/0.jpg -> ../../../blobs/b0); ";
    for (source, target) in [("cache/snapshots", "/dayfly/d"), ("cache.tar", "/dayfly/tar")] {
        // An absolute path is in one of the two datasets.
        let warning = if target == "/dayfly/d" { warning } else { "7 of 7 symbolic links" };
        let shown = stderr(source, target);
        assert!(shown.contains(warning) && shown.contains("or use --dereference"), "{shown}");
        assert!(shown.contains("3 directories, 7 symbolic links"), "{shown}");
    }
    let shown = stderr("cache", "/dayfly/whole");
    assert!(
        shown.contains("1 of 7 symbolic links lead out of the dataset (snapshots/latest -> /dayfly/d/main/train)"),
        "{shown}"
    );
    assert!(cluster.ok(&["cat", "/dayfly/whole/snapshots/main/train/5.jpg"]).starts_with("sample 0"));
    let summary = json_summary(&cluster, &["cache/blobs", "/dayfly/blobs"]);
    assert_eq!((summary["symlinks"].as_u64(), summary["directories"].as_u64()), (Some(0), Some(1)));
    cluster.down();
}

/// SEMANTICS: "`--dereference` stages in what the symlinks in a tree lead to, files and directories, as `tar -h` does. A file to which
/// several names in a tree lead is stored once. A symlink that leads to nothing, or to a directory that contains it, is an error;
/// `--exclude` and `--keep-going` leave it out."
#[test]
fn dereferencing_stages_in_what_symlinks_lead_to() {
    let ground = Ground::new();
    make_cache(&ground.at("cache"));
    let tree = ground.at("tree");
    fs::create_dir_all(tree.join("a/deep")).unwrap();
    fs::create_dir_all(ground.at("outside/sub")).unwrap();
    fs::write(ground.at("outside/sub/file"), "outside").unwrap();
    fs::write(tree.join("a/deep/file"), "inside").unwrap();
    // Links to files and directories, relative and absolute, over other links, and twice to one place.
    symlink("../../outside", tree.join("a/relative")).unwrap();
    symlink(ground.at("outside/sub"), tree.join("absolute")).unwrap();
    symlink("a/relative/sub", tree.join("chain")).unwrap();
    symlink("chain/file", tree.join("file")).unwrap();
    symlink("a/deep", tree.join("twice")).unwrap();
    symlink("tree", ground.at("root")).unwrap();
    nix::unistd::mkfifo(&ground.at("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();

    let cluster = ground.up(3);
    let summary = json_summary(&cluster, &["--dereference", "cache/snapshots/main", "/dayfly/hub"]);
    assert_eq!((summary["samples"].as_u64(), summary["symlinks"].as_u64()), (Some(5), Some(0)), "{summary}");
    assert_eq!(summary["bytes"].as_u64(), Some(5 * 8 * 500), "{summary}");
    let sum = |of: &str| summary["nodes"].as_array().unwrap().iter().map(|node| node[of].as_u64().unwrap()).sum::<u64>();
    assert_eq!((sum("owned_samples"), sum("owned_bytes")), (5, 5 * 8 * 500), "a sample with several names counts once");
    assert_equals_copy(&cluster, &cluster.at("cache/snapshots/main"), "/dayfly/hub");
    let inode = |name: &str| cluster.ok(&["exec", "--", "stat", "-c", "%i %h", &format!("/dayfly/hub/train/{name}.jpg")]);
    assert_eq!(inode("0"), inode("5"));
    for (source, target) in [("tree", "/dayfly/t"), ("root", "/dayfly/root")] {
        cluster.ok(&["stage-in", "--dereference", source, target]);
        assert_equals_copy(&cluster, &tree, target);
    }
    cluster.ok(&["stage-in", "--dereference", "--strip-components", "1", "tree", "/dayfly/stripped"]);
    assert_eq!(cluster.ok(&["cat", "/dayfly/stripped/relative/sub/file"]), "outside");

    // What cannot be staged in says so, unless it is left out.
    symlink("../fifo", tree.join("fifo")).unwrap();
    for (name, target, expect) in [
        ("nothing", "none", "/tree/nothing' is a symbolic link to 'none', which does not exist; leave it out with --exclude"),
        ("self", "self", "/tree/self': Too many levels of symbolic links"),
        ("a/up", "..", "/tree/a/up' leads back to a directory that contains it; leave it out with --exclude"),
    ] {
        let link = tree.join(name);
        symlink(target, &link).unwrap();
        // Nothing is left of a name at the top if a component is stripped.
        for strip in if name.contains('/') { &["0", "1"][..] } else { &["0"] } {
            let message = cluster.fails(1, &["stage-in", "--dereference", "--strip-components", strip, "tree", "/dayfly/x"]);
            assert!(message.contains(expect), "{message}");
        }
        let target = format!("/dayfly/without/{}", name.replace('/', "-"));
        cluster.ok(&["stage-in", "--dereference", "--exclude", &format!("./{name}"), "tree", &target]);
        let message = cluster.fails(3, &["stage-in", "--dereference", "--keep-going", "tree", &format!("{target}-skipped")]);
        assert!(message.contains("1 unreadable") && message.contains("1 device, FIFO or socket skipped"), "{message}");
        fs::remove_file(&link).unwrap();
        fs::remove_file(tree.join("fifo")).unwrap();
        [&target, &format!("{target}-skipped")].into_iter().for_each(|target| assert_equals_copy(&cluster, &tree, target));
        symlink("../fifo", tree.join("fifo")).unwrap();
    }

    // Blocks of a node that is lost are read again through the symlinks. Nobody has read them before.
    let summary = json_summary(&cluster, &["--dereference", "cache/snapshots/main", "/dayfly/late"]);
    let owner = (1..3).find(|&node| summary["nodes"][node]["owned_samples"] != 0).unwrap();
    cluster.kill(owner as u16);
    assert_equals_copy(&cluster, &cluster.at("cache/snapshots/main"), "/dayfly/late");
    wait_until("the node is lost, so that the command succeeds", || cluster.output(&["status"]).status.success());
    let status = cluster.status();
    let origins = status["nodes"].as_array().unwrap().iter().filter_map(|node| node["origins"]["bytes"].as_u64());
    assert!(origins.sum::<u64>() > 0, "{status}");
    cluster.down();
}

/// An archive with several names is unpacked under each of them.
#[test]
fn archives_with_several_names_are_unpacked_under_each() {
    let ground = Ground::new();
    fs::create_dir_all(ground.at("in")).unwrap();
    fs::write(ground.at("in/file"), "a sample").unwrap();
    fs::create_dir(ground.at("tree")).unwrap();
    pack(&ground.at("tree/a.tar"), &ground.at("in"), &[]);
    symlink("a.tar", ground.at("tree/b.tar")).unwrap();
    symlink("a.tar", ground.at("tree/plain")).unwrap();
    fs::hard_link(ground.at("tree/a.tar"), ground.at("tree/c.tar")).unwrap();
    // What only has an archive's name stays one file.
    fs::write(ground.at("tree/no.tar"), "not an archive").unwrap();
    fs::hard_link(ground.at("tree/no.tar"), ground.at("tree/other")).unwrap();
    fs::write(ground.at("tree/empty.tar"), vec![0; 10_240]).unwrap();
    let len = fs::metadata(ground.at("tree/a.tar")).unwrap().size();
    let cluster = ground.up(2);
    cluster.ok(&["stage-in", "--nested", "--dereference", "tree", "/dayfly/d"]);
    for name in ["a", "b", "c"] {
        assert_eq!(cluster.ok(&["cat", &format!("/dayfly/d/{name}/file")]), "a sample");
    }
    assert_eq!(cluster.ok(&["exec", "--", "stat", "-c", "%s", "/dayfly/d/plain"]), format!("{len}\n"));
    assert_eq!(cluster.ok(&["exec", "--", "stat", "-c", "%h", "/dayfly/d/other"]), "2\n");
    // An empty tar within a tree or an archive stays a file.
    assert_eq!(cluster.ok(&["exec", "--", "stat", "-c", "%s", "/dayfly/d/empty.tar"]), "10240\n");
    cluster.ok(&["stage-in", "--nested", "tree", "/dayfly/e"]);
    assert_eq!(cluster.ok(&["cat", "/dayfly/e/c/file"]), "a sample");
    cluster.down();
}

/// SEMANTICS: "With `--strip-components`, what lies in different folders of a tree whose names are stripped is not linked: each of
/// several names of a file, or of symlinks that lead to it, becomes a file of its own."
#[test]
fn names_in_different_stripped_folders_are_not_linked() {
    let ground = Ground::new();
    let tree = ground.at("tree");
    for folder in ["a/within", "b"] {
        fs::create_dir_all(tree.join(folder)).unwrap();
    }
    fs::write(tree.join("a/1"), "content").unwrap();
    for name in ["a/within/2", "b/3"] {
        fs::hard_link(tree.join("a/1"), tree.join(name)).unwrap();
    }
    symlink("../a/1", tree.join("b/4")).unwrap();
    let cluster = ground.up(2);
    cluster.ok(&["stage-in", "--dereference", "--strip-components", "1", "tree", "/dayfly/x"]);
    let inode = |name: &str| cluster.ok(&["exec", "--", "stat", "-c", "%i", &format!("/dayfly/x/{name}")]);
    let inodes = ["1", "within/2", "3", "4"].map(inode);
    assert!(inodes[0] == inodes[1] && inodes[2] == inodes[3] && inodes[0] != inodes[2], "{inodes:?}");
    for name in ["1", "within/2", "3", "4"] {
        assert_eq!(cluster.ok(&["cat", &format!("/dayfly/x/{name}")]), "content");
    }
    cluster.down();
}
