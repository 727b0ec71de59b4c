//! The read path: batches, orders, what is kept, who waits for whom, and what is left of it all when processes are killed.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod harness;

use std::collections::HashSet;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dayfly_client::{ClientError, Dataset, Delivery, OnMissing, Samples, View};
use dayfly_meta::id::{BlockId, SampleId};
use dayfly_meta::limits::ARENA_LEN_MIN;
use harness::{Cluster, Ground, wait_until};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// The content of the file of this number.
fn content(number: usize, len: usize) -> Vec<u8> {
    let mut state = number as u64 + 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A session with files `d/0`, `d/1` … of these lengths.
fn session(nodes: u16, options: &[&str], lens: &[usize]) -> Cluster {
    let ground = Ground::new();
    fs::create_dir(ground.at("d")).unwrap();
    for (number, &len) in lens.iter().enumerate() {
        fs::write(ground.at(format!("d/{number}")), content(number, len)).unwrap();
    }
    let cluster = ground.up_with(nodes, options);
    cluster.stage(&[&cluster.at("d")], "/dayfly/d");
    cluster
}

fn path(number: usize) -> Vec<u8> {
    format!("/dayfly/d/{number}").into_bytes()
}

fn dataset(view: &View) -> Arc<Dataset> {
    view.session().datasets().unwrap().first().unwrap().clone()
}

/// Numbers of the files whose first block is, or is not, on the view's node.
fn numbers(view: &View, count: usize, is_here: bool) -> Vec<usize> {
    let dataset = dataset(view);
    let is_meant = |&number: &usize| {
        let file = view.open(&path(number)).unwrap();
        let (size, blocks) = dataset.catalog().sample(file.sample()).unwrap();
        size > 0 && dataset.is_here(BlockId(blocks.start)) == is_here
    };
    (0..count).filter(is_meant).collect()
}

fn node(cluster: &Cluster, number: usize) -> serde_json::Value {
    cluster.status()["nodes"][number].clone()
}

fn count(value: &serde_json::Value) -> u64 {
    value.as_u64().unwrap()
}

/// What is leased, or waited for, by anyone: nothing, after a moment.
fn assert_accounts_are_settled(cluster: &Cluster) {
    wait_until("all leases have ended", || {
        let status = cluster.status();
        let nodes = status["nodes"].as_array().unwrap();
        nodes.iter().all(|node| ["leases", "asking", "queued"].iter().all(|account| node[account] == 0))
    });
}

const CHILD: &str = "DAYFLY_TEST_READ_PATH_CHILD";

/// This program again, as a process that does what `child` says; `words` are its orders.
fn child(cluster: &Cluster, words: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_of_the_read_path", "--nocapture"])
        .env(CHILD, words)
        .env("DAYFLY_RUNTIME_DIR", cluster.runtime.path())
        .env("DAYFLY_SESSION", &cluster.id)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Does nothing, but in the processes that the other tests start.
#[test]
fn child_of_the_read_path() {
    let Ok(words) = std::env::var(CHILD) else { return };
    let words: Vec<&str> = words.split(' ').collect();
    let location = dayfly_client::locate::find().unwrap();
    let session = dayfly_client::Session::attach_to(&location, dayfly_meta::id::NodeId(words[1].parse().unwrap())).unwrap();
    let view = View::new(session);
    let number = |at: usize| words[at].parse::<usize>().unwrap();
    match words[0] {
        "read" => {
            let (file, len) = (number(2), number(3));
            let mut buffer = vec![0; len];
            // All at once, as far as that goes.
            while !std::path::Path::new(words[4]).exists() {
                std::thread::yield_now();
            }
            let opened = view.open(&path(file)).unwrap();
            assert_eq!(view.read_at(&opened, 0, &mut buffer).unwrap(), len);
            assert!(buffer == content(file, len));
        }
        "stress" => stress(&view, number(2), number(3) as u64, Duration::from_secs(number(4) as u64)),
        other => panic!("{other}"),
    }
}

/// Reads files at random, alone and in batches, and checks every byte, until the time is over.
fn stress(view: &View, files: usize, seed: u64, duration: Duration) {
    let mut random = StdRng::seed_from_u64(seed);
    let dataset = dataset(view);
    let names = Samples::of(dataset.catalog());
    let until = Instant::now() + duration;
    let mut order = None;
    while Instant::now() < until {
        match random.random_range(0..4) {
            0 => {
                let number = random.random_range(0..files);
                let file = view.open(&path(number)).unwrap();
                let mut buffer = vec![0; file.stat().size as usize];
                let from = random.random_range(0..=buffer.len());
                let got = view.read_at(&file, from as u64, &mut buffer[from..]).unwrap();
                assert!(buffer[from..from + got] == content(number, buffer.len())[from..], "file {number} from {from}");
            }
            1 => {
                let epoch = random.random();
                let samples: Vec<SampleId> = names.epoch(seed, epoch).take(500).collect();
                order = Some(view.session().submit(&dataset, samples).unwrap());
            }
            _ => {
                let numbers: Vec<usize> = (0..random.random_range(1..200)).map(|_| random.random_range(0..files)).collect();
                let paths: Vec<Vec<u8>> = numbers.iter().map(|&number| path(number)).collect();
                let paths: Vec<&[u8]> = paths.iter().map(Vec::as_slice).collect();
                let delivery = if random.random() { Delivery::Given } else { Delivery::Arrival };
                let mut batch = view.read_many(&paths, delivery, OnMissing::Fail).unwrap();
                let mut seen = 0;
                while let Some(delivered) = batch.next() {
                    let delivered = delivered.unwrap();
                    let bytes = delivered.bytes.unwrap();
                    assert!(bytes == content(numbers[delivered.index], bytes.len()), "file {}", numbers[delivered.index]);
                    seen += 1;
                    if random.random_range(0..500) == 0 {
                        break;
                    }
                }
                assert!(seen > 0);
            }
        }
    }
    drop(order);
}

fn finish(child: Child) {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}{}", harness::text(&output.stdout), harness::text(&output.stderr));
}

#[test]
fn sixteen_processes_that_want_one_block_cause_one_transfer() {
    let lens: Vec<usize> = (0..40).map(|number| 3_500_000 + number).collect();
    let cluster = session(3, &[], &lens);
    let view = cluster.view(0);
    let far = numbers(&view, lens.len(), false);
    let before = count(&node(&cluster, 0)["remote_reads"]);
    for &file in &far[..3] {
        let go = cluster.at(format!("go-{file}"));
        let words = format!("read 0 {file} {} {}", lens[file], go.display());
        let readers: Vec<Child> = (0..16).map(|_| child(&cluster, &words)).collect();
        std::thread::sleep(Duration::from_millis(300));
        fs::write(&go, "").unwrap();
        readers.into_iter().for_each(finish);
    }
    assert_eq!(count(&node(&cluster, 0)["remote_reads"]) - before, 3);
    assert_accounts_are_settled(&cluster);
    cluster.down();
}

#[test]
fn a_batch_is_delivered_in_the_order_asked_for_or_as_it_comes() {
    let lens: Vec<usize> = (0..400).map(|number| number * number % 9001).chain([5 << 20, 9 << 20]).collect();
    let cluster = session(3, &["--verify-reads"], &lens);
    cluster.ok(&["tune", "--cache", "off"]);
    let view = cluster.view(1);
    let mut wanted: Vec<usize> = (0..lens.len()).chain([7, 7, 399]).collect();
    wanted.shuffle(&mut StdRng::seed_from_u64(3));
    let paths: Vec<Vec<u8>> = wanted.iter().map(|&number| path(number)).collect();
    let paths: Vec<&[u8]> = paths.iter().map(Vec::as_slice).collect();
    for delivery in [Delivery::Given, Delivery::Arrival] {
        let mut batch = view.read_many(&paths, delivery, OnMissing::Fail).unwrap();
        let mut seen = Vec::new();
        while let Some(delivered) = batch.next() {
            let delivered = delivered.unwrap();
            let number = wanted[delivered.index];
            assert!(delivered.bytes.unwrap() == content(number, lens[number]), "{number}");
            seen.push(delivered.index);
        }
        // Until the batch ends they can be looked at again.
        assert!(wanted.iter().enumerate().all(|(index, &number)| batch.get(index).unwrap() == content(number, lens[number])));
        assert!(batch.is_good() && batch.get(wanted.len()).is_none());
        let in_order = seen.is_sorted();
        assert_eq!(in_order, delivery == Delivery::Given, "this node's samples come first, if they may");
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..wanted.len()), "each once");
    }
    // Into buffers; one too short is filled as far as it reaches.
    let mut room: Vec<Vec<u8>> = wanted.iter().map(|&number| vec![1; if number == 398 { 5 } else { lens[number] }]).collect();
    let mut buffers: Vec<&mut [u8]> = room.iter_mut().map(Vec::as_mut_slice).collect();
    let sizes = view.read_many_into(&paths, &mut buffers, OnMissing::Fail).unwrap();
    for ((&number, size), bytes) in wanted.iter().zip(sizes).zip(room) {
        assert!(size.unwrap() == lens[number] as u64 && bytes == content(number, lens[number])[..bytes.len()], "{number}");
    }
    assert_accounts_are_settled(&cluster);
    cluster.down();
}

#[test]
fn what_is_missing_ends_the_batch_or_is_told() {
    let cluster = session(2, &[], &[100; 60]);
    let view = cluster.view(0);
    let names: Vec<Vec<u8>> =
        (0..50).map(path).chain([b"/dayfly/d/none".to_vec(), b"/dayfly/d".to_vec()]).chain((50..60).map(path)).collect();
    let names: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
    let mut batch = view.read_many(&names, Delivery::Given, OnMissing::Fail).unwrap();
    let failed = std::iter::from_fn(|| batch.next().map(|delivered| delivered.err())).flatten().next().unwrap();
    assert!(matches!(&failed, ClientError::Path { path, errno, .. } if path == "/dayfly/d/none" && *errno == nix::libc::ENOENT));
    assert!(batch.next().is_none(), "that was the end");
    drop(batch);
    let mut batch = view.read_many(&names, Delivery::Arrival, OnMissing::Tell).unwrap();
    let (mut whole, mut missing) = (0, Vec::new());
    while let Some(delivered) = batch.next() {
        let delivered = delivered.unwrap();
        match delivered.bytes {
            Ok(bytes) => whole += usize::from(bytes.len() == 100),
            Err(_) => missing.push(delivered.index),
        }
    }
    drop(batch);
    assert_eq!((whole, missing), (60, vec![50, 51]));
    let mut room = vec![vec![0; 100]; names.len()];
    let mut buffers: Vec<&mut [u8]> = room.iter_mut().map(Vec::as_mut_slice).collect();
    assert!(view.read_many_into(&names, &mut buffers, OnMissing::Fail).is_err());
    let sizes = view.read_many_into(&names, &mut buffers, OnMissing::Tell).unwrap();
    assert_eq!(sizes.iter().filter(|size| size.is_err()).count(), 2);
    // A node that has died is the same to those of its samples that are not here.
    cluster.ok(&["tune", "--cache", "off"]);
    let far: Vec<SampleId> =
        numbers(&view, 60, false).into_iter().map(|number| view.open(&path(number)).unwrap().sample()).collect();
    cluster.kill(1);
    let fresh = cluster.view(0);
    let samples: Vec<SampleId> = (0..60).map(SampleId).collect();
    let mut batch = fresh.session().read_many(&dataset(&fresh), &samples, Delivery::Arrival, OnMissing::Tell).unwrap();
    let mut errors = HashSet::new();
    while let Some(delivered) = batch.next() {
        let delivered = delivered.unwrap();
        if let Err(error) = delivered.bytes {
            assert!(error.to_string().contains("node 1"), "{error}");
            errors.insert(samples[delivered.index]);
        }
    }
    // Some of them the arena may have had.
    assert!(errors.iter().all(|sample| far.contains(sample)));
}

#[test]
fn batches_larger_than_the_arena_are_served_in_parts_and_nobody_starves() {
    let memory = ARENA_LEN_MIN.to_string();
    let lens: Vec<usize> = (0..120).map(|number| 1_000_000 + number * 1000).chain([70 << 20]).collect();
    let cluster = session(2, &["--memory", &memory], &lens);
    cluster.ok(&["tune", "--cache", "off"]);
    // Four threads with all of it each, one that reads one file after another: all at once, on an arena a quarter of one of them.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let view = cluster.view(0);
                let samples: Vec<SampleId> = (0..lens.len() as u32).map(SampleId).collect();
                let dataset = dataset(&view);
                let sizes: u64 = samples.iter().map(|&sample| dataset.catalog().sample(sample).unwrap().0).sum();
                for _ in 0..2 {
                    let mut batch = view.session().read_many(&dataset, &samples, Delivery::Given, OnMissing::Fail).unwrap();
                    batch.wait().unwrap();
                    let all: u64 = (0..samples.len()).map(|index| batch.get(index).unwrap().len() as u64).sum();
                    assert_eq!(all, sizes);
                }
            });
        }
        let view = cluster.view(0);
        let mut longest = Duration::ZERO;
        for (number, &len) in lens.iter().enumerate() {
            let start = Instant::now();
            let file = view.open(&path(number)).unwrap();
            let mut buffer = vec![0; len];
            assert_eq!(view.read_at(&file, 0, &mut buffer).unwrap(), len);
            assert!(buffer == content(number, len), "{number}");
            longest = longest.max(start.elapsed());
        }
        assert!(longest < Duration::from_secs(12), "{longest:?}: the wait for room has a deadline that nobody should meet");
    });
    assert_accounts_are_settled(&cluster);
    cluster.down();
}

#[test]
fn leases_end_with_their_process_whoever_has_inherited_its_connections() {
    let cluster = session(2, &[], &[200_000; 60]);
    cluster.ok(&["tune", "--cache", "off"]);
    let far = numbers(&cluster.view(0), 60, false);
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/posix/hold.py");
    let mut command = cluster.dayfly();
    command.args(["exec", "--node", "0", "--", "python3"]).arg(script);
    command.args(far.iter().map(|&number| String::from_utf8(path(number)).unwrap()));
    let mut holder = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(holder.stdout.take().unwrap()), &mut line).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!((words[0], words[1].parse().unwrap_or(0)), ("held", 200_000 * far.len()));
    assert!(count(&node(&cluster, 0)["leases"]) >= far.len() as u64);
    holder.kill().unwrap();
    assert_eq!(holder.wait().unwrap().signal(), Some(9));
    assert_accounts_are_settled(&cluster);
    // The child still lives, and has all that its parent had open.
    harness::signal(words[2].parse().unwrap(), nix::sys::signal::Signal::SIGKILL);
    cluster.down();
}

/// Reads everything in the order of an epoch, and checks it.
fn read_epoch(view: &View, epoch: u64) {
    let dataset = dataset(view);
    let order: Vec<SampleId> = Samples::of(dataset.catalog()).epoch(5, epoch).collect();
    for samples in order.chunks(64) {
        let mut batch = view.session().read_many(&dataset, samples, Delivery::Arrival, OnMissing::Fail).unwrap();
        batch.wait().unwrap();
        assert!(batch.is_good());
    }
}

#[test]
fn with_room_for_all_the_second_epoch_asks_nobody() {
    let lens: Vec<usize> = (0..800).map(|number| 100 + number * 37 % 30_000).chain([9 << 20, 5 << 20, 70_000]).collect();
    let cluster = session(3, &[], &lens);
    let view = cluster.view(0);
    read_epoch(&view, 0);
    let all: u64 = lens.iter().map(|&len| len as u64).sum();
    wait_until("what came is kept", || {
        let node = node(&cluster, 0);
        count(&node["held_bytes"]) + count(&node["kept_bytes"]) == all
    });
    let before = node(&cluster, 0);
    assert!(before["predicted_local_percent"].as_f64().unwrap() > 99.0);
    read_epoch(&cluster.view(0), 1);
    let after = node(&cluster, 0);
    for source in ["asked", "arena"] {
        assert_eq!(before["reads"][source], after["reads"][source], "{source}");
    }
    assert_eq!(before["remote_reads"], after["remote_reads"]);
    for (number, &len) in lens.iter().enumerate() {
        let mut bytes = vec![0; len];
        let opened = view.open(&path(number)).unwrap();
        assert!(view.read_at(&opened, 0, &mut bytes).unwrap() == len && bytes == content(number, len), "{number}");
    }
    // A stage-in comes before what is only kept, and `tune` gives it up; what is read meanwhile is right all the same.
    let mut views =
        view.session().read_many(&dataset(&view), &[SampleId(0), SampleId(1)], Delivery::Given, OnMissing::Fail).unwrap();
    views.wait().unwrap();
    let seen = [views.get(0).unwrap().to_vec(), views.get(1).unwrap().to_vec()];
    cluster.ok(&["tune", "--cache", "off"]);
    assert_eq!(count(&node(&cluster, 0)["kept_bytes"]), 0);
    assert!(views.get(0).unwrap() == seen[0] && views.get(1).unwrap() == seen[1], "views outlive what is given up");
    drop(views);
    read_epoch(&view, 2);
    cluster.ok(&["verify", "--from-every-node"]);
    cluster.down();
}

#[test]
fn a_stage_in_gets_the_room_of_what_is_only_kept() {
    let lens = vec![100_000; 60];
    let cluster = session(2, &["--capacity", "8MiB"], &lens);
    let view = cluster.view(0);
    read_epoch(&view, 0);
    wait_until("something is kept", || count(&node(&cluster, 0)["kept_bytes"]) > 2_000_000);
    fs::create_dir(cluster.at("more")).unwrap();
    (0..80).for_each(|number| fs::write(cluster.at(format!("more/{number}")), vec![number as u8; 100_000]).unwrap());
    cluster.stage(&[&cluster.at("more")], "/dayfly/more");
    read_epoch(&view, 1);
    cluster.ok(&["verify", "--from-every-node"]);
    cluster.down();
}

/// Share of an LRU's hits over cyclic epochs: what keeping would give if it were one.
fn lru_hits(epochs: &[Vec<SampleId>], room: usize) -> f64 {
    let (mut held, mut clock) = (std::collections::HashMap::new(), 0_u64);
    let (mut hits, mut all) = (0, 0);
    for (number, epoch) in epochs.iter().enumerate() {
        for &sample in epoch {
            clock += 1;
            let is_hit = held.insert(sample, clock).is_some();
            if held.len() > room {
                let oldest = held.iter().min_by_key(|(_, used)| **used).map(|(&sample, _)| sample).unwrap();
                held.remove(&oldest);
            }
            if number > 0 {
                all += 1;
                hits += usize::from(is_hit);
            }
        }
    }
    hits as f64 / all as f64
}

#[test]
fn with_room_for_four_fifths_four_fifths_are_local_in_every_epoch() {
    const FILES: usize = 1500;
    const LEN: usize = 20_000;
    // All the room of a node, its own part included, is four fifths of the data set, and little for what else it needs.
    let capacity = (FILES * LEN * 4 / 5 + 300_000).to_string();
    let cluster = session(3, &["--capacity", &capacity], &[LEN; FILES]);
    let view = cluster.view(0);
    read_epoch(&view, 0);
    let kept = std::cell::Cell::new(0);
    wait_until("what is kept is written", || {
        std::thread::sleep(Duration::from_millis(100));
        let now = count(&node(&cluster, 0)["kept_bytes"]);
        now > 0 && kept.replace(now) == now
    });
    let local = |node: &serde_json::Value| {
        let reads = &node["reads"];
        let bytes = |source: &str| count(&reads[source]["bytes"]) as f64;
        (bytes("segment") + bytes("kept"), bytes("segment") + bytes("kept") + bytes("arena") + bytes("asked"))
    };
    let room = 0.8;
    let mut before = local(&node(&cluster, 0));
    for epoch in 1..5 {
        read_epoch(&view, epoch);
        let after = local(&node(&cluster, 0));
        let share = (after.0 - before.0) / (after.1 - before.1);
        println!("epoch {epoch}: {share:.3} of the bytes were local");
        assert!((share - room).abs() < 0.05, "epoch {epoch}: {share}");
        before = after;
    }
    let predicted = node(&cluster, 0)["predicted_local_percent"].as_f64().unwrap();
    assert!((predicted / 100.0 - room).abs() < 0.05, "{predicted}");
    // Beside it, what an LRU of the same room gives: the order of epochs is random, so it is not nothing, but far less.
    let names = Samples::of(dataset(&view).catalog());
    let epochs: Vec<Vec<SampleId>> = (0..5).map(|epoch| names.epoch(5, epoch).collect()).collect();
    let lru = lru_hits(&epochs, FILES * 4 / 5);
    println!("an LRU's share is {lru:.3}");
    assert!(lru < room - 0.05, "{lru}");
    cluster.down();
}

#[test]
fn what_is_ordered_is_there_before_it_is_read() {
    let lens: Vec<usize> = (0..2000).map(|number| 2000 + number * 13 % 3000).collect();
    let cluster = session(3, &[], &lens);
    cluster.ok(&["tune", "--cache", "off"]);
    let view = cluster.view(0);
    let dataset = dataset(&view);
    let samples: Vec<SampleId> = Samples::of(dataset.catalog()).epoch(1, 0).collect();
    let order = view.session().submit(&dataset, samples.iter().copied()).unwrap();
    wait_until("it begins", || count(&node(&cluster, 0)["remote_reads"]) > 0);
    let mut buffer = vec![0; 10_000];
    for (at, &sample) in samples.iter().enumerate() {
        let (size, _) = dataset.catalog().sample(sample).unwrap();
        assert_eq!(view.session().read_at(&dataset, sample, 0, &mut buffer[..size as usize], &mut None).unwrap() as u64, size);
        if at % 20 == 0 {
            // As long as a step of training.
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    let node = node(&cluster, 0);
    let far = count(&node["reads"]["arena"]["count"]) + count(&node["reads"]["asked"]["count"]);
    assert!(far > 1000 && count(&node["reads"]["asked"]["count"]) < far / 10, "{node}");
    assert!(count(&node["prefetch"]["hits"]) > far * 8 / 10 && count(&node["prefetch"]["wasted"]) < far / 20, "{node}");
    drop(order);
    assert_accounts_are_settled(&cluster);
    // Told not to, it does not.
    let told = cluster.ok(&["tune", "--prefetch", "off", "--prefetch-memory", "10MiB"]);
    assert_eq!(told.trim(), "prefetch off, in 10.0MiB; cache: off");
    let other = cluster.view(1);
    let _order = other.session().submit(&dataset, samples).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let status = cluster.status();
    assert_eq!(status["nodes"][1]["remote_reads"], 0);
    assert_eq!(status["nodes"][1]["prefetch"]["orders"], 1);
    drop(other);
    cluster.down();
}

#[test]
fn a_large_file_is_read_ahead_of_who_goes_through_it() {
    let len = 40 << 20;
    let cluster = session(4, &[], &[len; 6]);
    cluster.ok(&["tune", "--cache", "off"]);
    let view = cluster.view(0);
    let far = numbers(&view, 6, false)[0];
    let file = view.open(&path(far)).unwrap();
    let expected = content(far, len);
    let mut buffer = vec![0; 300_000];
    let before = node(&cluster, 0);
    let mut at = 0;
    while at < len {
        let got = view.read_at(&file, at as u64, &mut buffer).unwrap();
        assert!(buffer[..got] == expected[at..at + got], "at {at}");
        at += got;
    }
    let after = node(&cluster, 0);
    let came = count(&after["remote_bytes"]) - count(&before["remote_bytes"]);
    assert_eq!(came, len as u64, "each byte once");
    // A look into another's middle fetches little.
    let other = numbers(&view, 6, false)[1];
    let opened = view.open(&path(other)).unwrap();
    assert_eq!(view.read_at(&opened, 20 << 20, &mut buffer[..100]).unwrap(), 100);
    let looked = count(&node(&cluster, 0)["remote_bytes"]) - count(&after["remote_bytes"]);
    assert!(looked <= 4 << 20, "{looked}");
    cluster.down();
}

#[test]
fn counters_are_told_in_every_form() {
    let cluster = session(2, &[], &[5000; 300]);
    let view = cluster.view(0);
    read_epoch(&view, 0);
    let metrics = cluster.ok(&["metrics"]);
    let value = |name: &str| -> f64 {
        let line = metrics.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {metrics}"));
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    };
    let far = value("dayfly_reads_total{node=\"0\",source=\"asked\"}");
    assert!(far > 50.0 && value("dayfly_reads_total{node=\"0\",source=\"segment\"}") == 300.0 - far, "{metrics}");
    assert_eq!(value("dayfly_owner_bytes_total{node=\"0\",owner=\"1\"}"), far * 5000.0);
    assert!(value("dayfly_wait_seconds{node=\"0\",quantile=\"0.99\"}") > 0.0);
    assert!(cluster.ok(&["metrics", "--all-nodes"]).contains("dayfly_clients{node=\"1\"}"));
    let top = cluster.ok(&["top", "--interval", "0.1", "--count", "2"]);
    assert_eq!(top.matches("bottleneck: ").count(), 2, "{top}");
    assert!(cluster.ok(&["status"]).contains("prefetch auto, in half of the arena; cache: all free room"));
    cluster.fails(2, &["tune", "--prefetch", "fast"]);
    let status = node(&cluster, 0);
    assert_eq!(count(&status["busiest_clients"][0]["pid"]), u64::from(std::process::id()));
    drop(view);
    cluster.down();
}

#[test]
fn the_page_of_metrics_is_what_the_program_tells() {
    let page = fs::read_to_string(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("docs/METRICS.md")).unwrap();
    assert_eq!(page, dayfly_meta::metrics::page(), "dayfly metrics --describe > docs/METRICS.md");
}

#[test]
fn clients_killed_at_random_leave_no_lease_and_see_no_wrong_byte() {
    let seconds = std::env::var("DAYFLY_STRESS_SECONDS").map_or(6, |seconds| seconds.parse().unwrap());
    let lens: Vec<usize> = (0..600).map(|number| 10 + number * number * 7 % 90_000).chain([6 << 20; 4]).collect();
    let memory = (4 * ARENA_LEN_MIN).to_string();
    let cluster = session(3, &["--memory", &memory], &lens);
    let mut random = StdRng::seed_from_u64(11);
    let start = |cluster: &Cluster, seed: u64| {
        let node = seed % 3;
        child(cluster, &format!("stress {node} {} {seed} {}", lens.len(), seconds + 60))
    };
    let mut clients: Vec<Child> = (0..8).map(|seed| start(&cluster, seed)).collect();
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut seed = 8;
    while Instant::now() < until {
        std::thread::sleep(Duration::from_millis(random.random_range(20..300)));
        let which = random.random_range(0..clients.len());
        if random.random_range(0..10) == 0 {
            // What is kept comes and goes under their feet.
            cluster.ok(&["tune", "--cache", ["off", "all", "2MiB"][which % 3]]);
        }
        let killed = std::mem::replace(&mut clients[which], start(&cluster, seed));
        seed += 1;
        end(killed);
    }
    clients.into_iter().for_each(end);
    println!("{seed} clients were killed");
    assert_accounts_are_settled(&cluster);
    cluster.ok(&["verify", "--from-every-node"]);
    cluster.down();
}

/// Kills a client that must live.
fn end(mut client: Child) {
    if client.try_wait().unwrap().is_some() {
        let output = client.wait_with_output().unwrap();
        panic!("a client ended by itself: {}{}", harness::text(&output.stdout), harness::text(&output.stderr));
    }
    client.kill().unwrap();
    client.wait().unwrap();
}
