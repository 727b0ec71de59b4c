//! Datasets that are larger than the nodes' room: see "Datasets that do not fit" in `docs/SEMANTICS.md`.

use std::fs;
use std::path::Path;

use crate::harness::samples::{content, count, dataset, path, read_epoch};
use crate::harness::strace::{self, Tracer};
use crate::harness::{self, Cluster, Ground, pack, wait_until};
use dayfly_client::View;
use dayfly_meta::catalog::{NOT_STORED, NOT_STORED_MIN};
use serde_json::Value;

harness::with_few_and_many_workers! {
    a_dataset_that_does_not_fit_is_readable_as_a_whole_and_a_part_is_stored,
    the_share_that_is_stored_is_told_before_and_after,
    what_must_be_stored_and_does_not_fit_is_refused,
    a_source_that_changed_is_an_error_of_the_samples_that_are_not_stored_and_of_no_others,
    a_source_may_be_moved_away_and_back,
    what_fits_neither_on_drives_nor_in_memory_alone_is_read_once,
    cached_blocks_make_way_for_a_stage_in,
    room_that_becomes_free_is_used_for_blocks_that_are_not_stored,
    a_source_whose_reads_fail_for_a_while_fails_only_the_samples_that_are_not_stored_and_only_so_long,
}

/// Lengths of files, about 45 MiB in all: empty ones, small ones, and ones of several pieces and chunks.
fn lens() -> Vec<usize> {
    let large = [0, 1, 1 << 20, (1 << 20) + 1, (4 << 20) + 1, 9_000_000];
    (0..1000).map(|number| number * 37 % 60_000).chain(large).collect()
}

fn make_files(folder: &Path, lens: &[usize]) {
    fs::create_dir(folder).unwrap();
    for (number, &len) in lens.iter().enumerate() {
        fs::write(folder.join(number.to_string()), content(number, len)).unwrap();
    }
}

/// Sums what all nodes say about origins.
fn origins(cluster: &Cluster, name: &str) -> u64 {
    let status = cluster.status();
    status["nodes"].as_array().unwrap().iter().map(|node| count(&node["origins"][name])).sum()
}

fn read(view: &View, number: usize, len: usize) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; len];
    let file = view.open(&path(number)).map_err(|error| error.to_string())?;
    view.read_at(&file, 0, &mut bytes).map(|_| bytes).map_err(|error| error.to_string())
}

/// Where a stage-in left a file of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Drive,
    Arena,
    Source,
}

fn place(view: &View, number: usize) -> Place {
    let sample = view.open(&path(number)).unwrap().sample();
    let dataset = dataset(view);
    let (_, blocks) = dataset.catalog().sample(sample).unwrap();
    match dataset.catalog().arrival(dayfly_meta::id::BlockId(blocks.start)).unwrap() {
        NOT_STORED => Place::Source,
        NOT_STORED_MIN.. => Place::Arena,
        _ => Place::Drive,
    }
}

/// Returns the numbers of the files that the stage-in left there.
fn files_in(at: Place, view: &View, lens: &[usize]) -> Vec<usize> {
    (0..lens.len()).filter(|&number| place(view, number) == at).collect()
}

fn assert_all_is_right(cluster: &Cluster, lens: &[usize]) {
    for node in 0..2 {
        let view = cluster.view(node);
        for (number, &len) in lens.iter().enumerate() {
            assert!(read(&view, number, len).unwrap() == content(number, len), "file {number} on node {node}");
        }
    }
}

/// SEMANTICS: "A dataset that is larger than the nodes' room is visible as a whole. A part of its blocks, chosen by hash, is stored.
/// The others are not stored: their owners read them from their sources whenever they are needed."
/// SEMANTICS: "An owner reads a block once for all readers that want it at the same time, and keeps it in its arena for those that
/// come soon after."
fn a_dataset_that_does_not_fit_is_readable_as_a_whole_and_a_part_is_stored() {
    let (ground, lens) = (Ground::new(), lens());
    make_files(&ground.at("tree"), &lens);
    pack(&ground.at("a.tar"), &ground.at("tree"), &["--format=pax"]);
    harness::tool(
        "python3",
        &[
            "-c".as_ref(),
            "import os, sys, zipfile
tree, file = sys.argv[1:]
with zipfile.ZipFile(file, 'w') as made:
    for number, name in enumerate(sorted(os.listdir(tree))):
        made.write(os.path.join(tree, name), name, zipfile.ZIP_DEFLATED if number % 2 else zipfile.ZIP_STORED)"
                .as_ref(),
            ground.at("tree").as_ref(),
            ground.at("a.zip").as_ref(),
        ],
    );
    // The arena is too small for what is not stored, so that another epoch reads the sources again.
    for source in ["tree", "a.tar", "a.zip"] {
        let cluster = Ground::new().up_with(2, &["--capacity", "10MiB", "--memory", "32MiB"]);
        cluster.stage(&[&ground.at(source)], "/dayfly/d");
        let unstored = origins(&cluster, "unstored_bytes");
        let all: u64 = lens.iter().map(|&len| len as u64).sum();
        assert!((all / 3..all * 2 / 3).contains(&unstored), "{source}: {unstored} of {all} bytes are not stored");
        let before = (origins(&cluster, "bytes"), origins(&cluster, "operations"));
        // Both nodes want the same blocks at the same time.
        std::thread::scope(|scope| {
            for node in 0..2 {
                let view = cluster.view(node);
                scope.spawn(move || read_epoch(&view, 0));
            }
        });
        let (bytes, operations) = (origins(&cluster, "bytes") - before.0, origins(&cluster, "operations") - before.1);
        assert!(bytes <= unstored && bytes > unstored / 2, "{source}: {bytes} of {unstored}");
        assert!(operations < lens.len() as u64, "{source}: {operations} operations");
        assert_all_is_right(&cluster, &lens);
        cluster.ok(&["verify", "--from-every-node"]);
        assert_eq!(origins(&cluster, "failures"), 0);
        cluster.down();
    }
}

fn events(cluster: &Cluster, arguments: &[&str]) -> Vec<Value> {
    let output = cluster.ok(&[&["stage-in", "--json"], arguments].concat());
    output.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// SEMANTICS: "Before it reads, `stage-in` says what share of the bytes it will store, and so what share of reads will find their
/// bytes on drives. Afterward it says what share it stored."
fn the_share_that_is_stored_is_told_before_and_after() {
    let (ground, lens) = (Ground::new(), vec![20_000; 2000]);
    make_files(&ground.at("tree"), &lens);
    pack(&ground.at("a.tar"), &ground.at("tree"), &[]);
    for source in ["tree", "a.tar"] {
        let cluster = Ground::new().up_with(2, &["--capacity", "12MiB"]);
        let events = events(&cluster, &[ground.at(source).to_str().unwrap(), "/dayfly/d"]);
        let event = |name: &str| events.iter().find(|event| event["event"] == name).unwrap();
        let (planned, done) = (event("planned"), event("staged-in"));
        assert_eq!(planned["all_fits"], false);
        let expected = count(&planned["expected_stored_permille"]);
        let stored = 1000 - count(&done["unstored_bytes"]) * 1000 / count(&done["bytes"]);
        assert!(expected.abs_diff(stored) < 60 && (450..700).contains(&stored), "{source}: {stored}, expected {expected}");
        cluster.down();
    }
    let cluster = ground.up_with(2, &["--capacity", "12MiB"]);
    let message = harness::text(&cluster.output(&["stage-in", "tree", "/dayfly/d"]).stderr);
    assert!(message.contains("not all samples fit") && message.contains("--require-fit"), "{message}");
    assert!(message.contains("found no room"), "{message}");
    cluster.down();
}

/// SEMANTICS: "With `--require-fit`, `stage-in` fails before it reads if not everything fits. If all nodes together have room, but large
/// samples do not fit onto single nodes, it fails when it comes to such a sample."
/// SEMANTICS: "Samples in compressed tars, and in archives within archives, must fit. A stage-in that finds no room for them fails,
/// and nothing of it is visible."
/// SEMANTICS: "If compressed tars tell their unpacked size (gzip up to 4 GiB, zstd, xz and lz4, if their writers stated it), a stage-in
/// that cannot fit fails before it reads. With `--include` or `--exclude`, or if a tar claims far more than its beginning suggests, it
/// fails when the room ends."
fn what_must_be_stored_and_does_not_fit_is_refused() {
    let (ground, lens) = (Ground::new(), vec![20_000; 2000]);
    make_files(&ground.at("tree"), &lens);
    pack(&ground.at("a.tar"), &ground.at("tree"), &[]);
    pack(&ground.at("a.tar.gz"), &ground.at("tree"), &[]);
    fs::create_dir(ground.at("outer")).unwrap();
    fs::copy(ground.at("a.tar.gz"), ground.at("outer/a.tar.gz")).unwrap();
    pack(&ground.at("outer.tar"), &ground.at("outer"), &[]);
    let cluster = ground.up_with(2, &["--capacity", "12MiB"]);
    for source in ["tree", "a.tar"] {
        let message = cluster.fails(1, &["stage-in", "--require-fit", source, "/dayfly/d"]);
        for words in ["the sources take at least", "free (node 0: ", "without --require-fit", "--capacity"] {
            assert!(message.contains(words), "{words}: {message}");
        }
    }
    for (arguments, words) in [
        (&["a.tar.gz"][..], "the sources take at least"),
        (&["--nested", "outer.tar"], "no node has room left for"),
        (&["--exclude", "none", "a.tar.gz"], "no node has room left for"),
    ] {
        let message = cluster.fails(1, &[&["stage-in"], arguments, &["/dayfly/d"]].concat());
        for words in [words, "--capacity", "free (node 0: ", "samples of compressed tars"] {
            assert!(message.contains(words), "{words}: {message}");
        }
    }
    // Together, the nodes have room for these files, but each has room for one of them.
    make_files(&cluster.at("large"), &[7_000_000; 3]);
    let message = cluster.fails(1, &["stage-in", "--require-fit", "large", "/dayfly/d"]);
    for words in ["no node has room left for", "must fit onto one node; without --require-fit"] {
        assert!(message.contains(words), "{words}: {message}");
    }
    assert_eq!(cluster.ok(&["ls"]), "");
    wait_until("the space is free again", || cluster.used_bytes() == 0);
    // What a pattern selects may fit although the tar does not.
    let other = Ground::new().up_with(1, &["--capacity", "12MiB"]);
    other.ok(&["stage-in", "--include", "7?", cluster.at("a.tar.gz").to_str().unwrap(), "/dayfly/few"]);
    assert_eq!(other.ok(&["ls", "/dayfly/few"]).lines().count(), 10);
    other.down();
    // Both together: the compressed samples are stored, and the others as far as they fit.
    let some: Vec<usize> = vec![20_000; 400];
    make_files(&cluster.at("some"), &some);
    pack(&cluster.at("some.tar.gz"), &cluster.at("some"), &[]);
    cluster.ok(&["stage-in", "--prefix-by-source", "a.tar", "some.tar.gz", "/dayfly/both"]);
    let view = cluster.view(1);
    let both = view.dataset_of(b"/dayfly/both").unwrap();
    let catalog = both.catalog();
    let mut unstored = 0;
    for sample in (0..catalog.header().samples).map(dayfly_meta::id::SampleId) {
        let (_, blocks) = catalog.sample(sample).unwrap();
        let is_stored = catalog.is_stored(dayfly_meta::id::BlockId(blocks.start));
        let path = harness::text(&catalog.path(&catalog.entry_of(sample).unwrap()));
        assert!(is_stored || !path.starts_with("some/"), "{path}");
        unstored += usize::from(!is_stored);
    }
    assert!((800..=2000).contains(&unstored), "{unstored}");
    cluster.ok(&["verify", "--from-every-node"]);
    cluster.down();
}

/// SEMANTICS: "A source must stay as it was while a dataset has blocks that are not stored. If its size or modification time has changed, or
/// it is gone, reads of those blocks that no arena holds fail with `EIO` and a message that names the source; they never return other bytes.
/// All other samples can be read. Once the source is as it was, so can these."
fn a_source_that_changed_is_an_error_of_the_samples_that_are_not_stored_and_of_no_others() {
    let (ground, lens) = (Ground::new(), vec![100_000; 600]);
    make_files(&ground.at("tree"), &lens);
    let cluster = ground.up_with(1, &["--capacity", "6MiB", "--memory", "32MiB"]);
    cluster.ok(&["stage-in", "tree", "/dayfly/d"]);
    let view = cluster.view(0);
    let [stored, kept, fresh] = [Place::Drive, Place::Arena, Place::Source].map(|place| files_in(place, &view, &lens));
    assert!(stored.len() > 30 && kept.len() > 200 && fresh.len() > 100, "{} {} {}", stored.len(), kept.len(), fresh.len());
    fs::rename(cluster.at("tree"), cluster.at("away")).unwrap();
    for (number, &len) in lens.iter().enumerate() {
        match read(&view, number, len) {
            Ok(bytes) => assert!(bytes == content(number, len) && !fresh.contains(&number), "file {number}"),
            Err(error) => {
                assert!(
                    !stored.contains(&number) && error.contains("does not exist anymore") && error.contains("tree"),
                    "{error}"
                );
            }
        }
    }
    fs::rename(cluster.at("away"), cluster.at("tree")).unwrap();
    let (changed, replaced) = (fresh[0], fresh[1]);
    fs::write(cluster.at(format!("tree/{changed}")), content(changed + 1, lens[changed])).unwrap();
    let file = cluster.at(format!("tree/{replaced}"));
    let time = fs::metadata(&file).unwrap().modified().unwrap();
    fs::write(&file, content(replaced + 1, lens[replaced])).unwrap();
    // Even the file's time is as before, so only the checksum shows the change.
    fs::File::options().write(true).open(&file).unwrap().set_modified(time).unwrap();
    for (number, &len) in lens.iter().enumerate() {
        match read(&view, number, len) {
            Ok(bytes) => assert!(bytes == content(number, len) && ![changed, replaced].contains(&number)),
            Err(error) if number == changed => assert!(error.contains("it was modified"), "{error}"),
            Err(error) => assert!(number == replaced && error.contains("other bytes"), "{number}: {error}"),
        }
    }
    cluster.down();
}

/// SEMANTICS: "An archive may be moved away and back, and `chmod` and `ln` change nothing; a copy in its place is another file. For files of
/// a directory only size and modification time count."
fn a_source_may_be_moved_away_and_back() {
    for is_archive in [true, false] {
        let (ground, lens) = (Ground::new(), vec![100_000; 600]);
        make_files(&ground.at("files"), &lens);
        if is_archive {
            pack(&ground.at("a.tar"), &ground.at("files"), &[]);
            fs::rename(ground.at("a.tar"), ground.at("source")).unwrap();
        } else {
            fs::rename(ground.at("files"), ground.at("source")).unwrap();
        }
        let cluster = ground.up_with(1, &["--capacity", "6MiB", "--memory", "32MiB"]);
        cluster.ok(&["stage-in", "source", "/dayfly/d"]);
        let view = cluster.view(0);
        let fresh = files_in(Place::Source, &view, &lens);
        assert!(fresh.len() > 100, "{}", fresh.len());
        let shell = |script: &str| {
            let done = harness::program("sh").args(["-ec", script]).current_dir(cluster.work.path()).status().unwrap();
            assert!(done.success(), "{script}");
        };
        let first = if is_archive { "source".to_owned() } else { format!("source/{}", fresh[0]) };
        shell(&format!("mv source away; chmod g+w away; mv away source; ln {first} other"));
        let (before, after) = fresh.split_at(50);
        for &number in before {
            assert!(read(&view, number, lens[number]).unwrap() == content(number, lens[number]), "{number}");
        }
        shell("cp -rp source copy; mv source old; mv copy source");
        for &number in after {
            match read(&view, number, lens[number]) {
                Ok(bytes) => assert!(!is_archive && bytes == content(number, lens[number]), "{number}"),
                Err(error) => assert!(is_archive && error.contains("was replaced by another file"), "{number}: {error}"),
            }
        }
        cluster.down();
    }
}

fn a_source_whose_reads_fail_for_a_while_fails_only_the_samples_that_are_not_stored_and_only_so_long() {
    if !strace::is_possible() {
        return;
    }
    let (ground, lens) = (Ground::new(), vec![100_000; 560]);
    make_files(&ground.at("tree"), &lens);
    pack(&ground.at("a.tar"), &ground.at("tree"), &[]);
    let cluster = ground.up_with(1, &["--capacity", "4MiB", "--memory", "32MiB"]);
    cluster.ok(&["stage-in", "a.tar", "/dayfly/d"]);
    let views = [cluster.view(0), cluster.view(0)];
    let [stored, unstored] = [Place::Drive, Place::Source].map(|place| files_in(place, &views[0], &lens));
    assert!(stored.len() > 20 && unstored.len() > 100, "{} are stored", stored.len());
    let all_are_right = |numbers: &[usize], view: &View| {
        for &number in numbers {
            assert!(read(view, number, lens[number]).unwrap() == content(number, lens[number]), "file {number}");
        }
    };
    // The files before the last ones have been read when the faults begin, and the last ones have not.
    let (before, fresh) = unstored.split_at(unstored.len() - 20);
    all_are_right(&before[..40], &views[0]);
    let file = cluster.at("a.tar");
    for errno in ["EIO", "ESTALE"] {
        let fault = format!("error={errno}");
        let inject = |pid: &i32| {
            Tracer::inject_at(std::slice::from_ref(&file), *pid, &[("pread64", &fault)], cluster.work.path()).unwrap()
        };
        let mut tracers: Vec<Tracer> = cluster.pids().values().map(inject).collect();
        let words = if errno == "EIO" { "Input/output error" } else { "Stale file handle" };
        for (number, view) in fresh.iter().zip(views.iter().cycle()).take(6) {
            let error = read(view, *number, lens[*number]).unwrap_err();
            assert!(error.contains(words) && error.contains("a.tar"), "{error}");
        }
        views.iter().for_each(|view| all_are_right(&stored, view));
        let injected: usize = tracers.iter_mut().map(Tracer::end).sum();
        // The first read on a node is repeated. The others are not, because the source is known to fail.
        assert!(injected >= 5 + dayfly_meta::limits::ORIGIN_ATTEMPTS_MAX as usize, "{injected} reads failed");
    }
    assert_eq!(origins(&cluster, "failures"), 12);
    views.iter().for_each(|view| all_are_right(&unstored, view));
    cluster.ok(&["verify", "--from-every-node"]);
    cluster.down();
}

/// SEMANTICS: "Blocks of up to 4 MiB that are not stored stay in the arena of the node that read them during the stage-in, as far as
/// the arena is free and until others need its room. The first epoch does not read them again."
fn what_fits_neither_on_drives_nor_in_memory_alone_is_read_once() {
    let (ground, lens) = (Ground::new(), vec![100_000; 300]);
    make_files(&ground.at("tree"), &lens);
    pack(&ground.at("a.tar"), &ground.at("tree"), &[]);
    for source in ["tree", "a.tar"] {
        let cluster = Ground::new().up_with(2, &["--capacity", "6MiB", "--memory", "32MiB"]);
        cluster.stage(&[&ground.at(source)], "/dayfly/d");
        let unstored = origins(&cluster, "unstored_bytes");
        assert!(unstored > 15 << 20, "{unstored}");
        for node in 0..2 {
            read_epoch(&cluster.view(node), 0);
        }
        assert_all_is_right(&cluster, &lens);
        assert_eq!((origins(&cluster, "bytes"), origins(&cluster, "operations")), (0, 0));
        cluster.ok(&["verify", "--from-every-node"]);
        cluster.down();
    }
}

fn cached_blocks_make_way_for_a_stage_in() {
    let (ground, lens) = (Ground::new(), vec![30_000; 1200]);
    make_files(&ground.at("tree"), &lens);
    make_files(&ground.at("more"), &vec![20_000; 800]);
    pack(&ground.at("more.tar.zst"), &ground.at("more"), &[]);
    let cluster = ground.up_with(2, &["--capacity", "32MiB", "--memory", "64MiB"]);
    cluster.ok(&["stage-in", "--require-fit", "tree", "/dayfly/d"]);
    for node in 0..2 {
        read_epoch(&cluster.view(node), 0);
    }
    let cached = || cluster.status()["nodes"].as_array().unwrap().iter().map(|node| count(&node["cached_bytes"])).sum::<u64>();
    wait_until("both nodes cache the blocks of the other", || cached() > 20 << 20);
    // Without the cached blocks, there are more than 20 MiB.
    cluster.ok(&["stage-in", "more.tar.zst", "/dayfly/more"]);
    cluster.ok(&["verify", "--from-every-node"]);
    cluster.down();
}

/// SEMANTICS: "Room that becomes free later is used: blocks that are not stored yet are stored when they are read from their sources, or in
/// the background if they are in the arena, before blocks of other nodes are cached."
fn room_that_becomes_free_is_used_for_blocks_that_are_not_stored() {
    let (ground, lens) = (Ground::new(), vec![100_000; 800]);
    make_files(&ground.at("tree"), &lens);
    make_files(&ground.at("other"), &vec![100_000; 350]);
    make_files(&ground.at("few"), &[1, 2, 3]);
    let cluster = ground.up_with(1, &["--capacity", "60MiB", "--memory", "32MiB"]);
    cluster.ok(&["stage-in", "--require-fit", "other", "/dayfly/other"]);
    cluster.ok(&["stage-in", "tree", "/dayfly/d"]);
    let unstored = origins(&cluster, "unstored_bytes");
    let beyond_arena = unstored.checked_sub(32 << 20).unwrap();
    assert!(beyond_arena > 10 << 20, "{unstored}");
    let view = cluster.view(0);
    let read_all = || {
        let before = origins(&cluster, "bytes");
        for (number, &len) in lens.iter().enumerate() {
            assert!(read(&view, number, len).unwrap() == content(number, len), "file {number}");
        }
        origins(&cluster, "bytes") - before
    };
    let before = read_all();
    assert!(before > 10 << 20, "{before}");
    cluster.ok(&["stage-in", "--replace", "few", "/dayfly/other"]);
    let cached = || cluster.status()["nodes"].as_array().unwrap().iter().map(|node| count(&node["cached_bytes"])).sum::<u64>();
    // What the arena has need not be stored.
    wait_until("the blocks that are not stored are stored", || read_all() < before / 2 && cached() >= beyond_arena);
    cluster.ok(&["verify", "--from-every-node"]);
    cluster.down();
}
