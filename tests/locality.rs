//! Tests of everything that makes remote blocks local: caching on the node's drives, prefetching along orders, read-ahead, and
//! their counters.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use crate::harness::samples::{assert_accounts_are_settled, content, count, dataset, node, numbers, path, read_epoch, session};
use crate::harness::wait_until;
use dayfly_client::{Delivery, OnMissing, Samples};
use dayfly_meta::id::SampleId;

/// SEMANTICS: "Blocks that came from other nodes are cached on the node's drives where there is room,
/// so that they are local from the next epoch on."
#[test]
fn the_second_epoch_sends_no_request_to_peers_if_everything_fits() {
    let lens: Vec<usize> = (0..800).map(|number| 100 + number * 37 % 30_000).chain([9 << 20, 5 << 20, 70_000]).collect();
    let cluster = session(3, &[], &lens);
    let view = cluster.view(0);
    read_epoch(&view, 0);
    let all: u64 = lens.iter().map(|&len| len as u64).sum();
    wait_until("all fetched blocks are cached", || {
        let node = node(&cluster, 0);
        count(&node["held_bytes"]) + count(&node["cached_bytes"]) == all
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
    // `tune` drops cached blocks, and views of them stay correct.
    let mut views =
        view.session().read_many(&dataset(&view), &[SampleId(0), SampleId(1)], Delivery::InOrder, OnMissing::Fail).unwrap();
    views.wait().unwrap();
    let seen = [views.get(0).unwrap().to_vec(), views.get(1).unwrap().to_vec()];
    cluster.ok(&["tune", "--cache", "off"]);
    assert_eq!(count(&node(&cluster, 0)["cached_bytes"]), 0);
    assert!(views.get(0).unwrap() == seen[0] && views.get(1).unwrap() == seen[1], "views outlive the cached blocks");
    drop(views);
    read_epoch(&view, 2);
    cluster.ok(&["verify", "--from-every-node"]);
    cluster.down();
}

/// SEMANTICS: "Cached blocks make way for `tune --cache`; concurrent changes take effect one after
/// another."
#[test]
fn changes_to_the_cache_take_effect_one_at_a_time() {
    let cluster = session(3, &[], &[50_000; 300]);
    let view = cluster.view(0);
    read_epoch(&view, 0);
    for _ in 0..3 {
        // A batch holds views of cached blocks, so dropping them takes some time, and other changes arrive during that time.
        let samples: Vec<SampleId> = (0..300).map(SampleId).collect();
        let mut batch = view.session().read_many(&dataset(&view), &samples, Delivery::InOrder, OnMissing::Fail).unwrap();
        batch.wait().unwrap();
        std::thread::scope(|scope| {
            let tuning = ["all", "all", "30MiB"].map(|cache| {
                std::thread::sleep(Duration::from_millis(50));
                let cluster = &cluster;
                scope.spawn(move || cluster.ok(&["tune", "--cache", cache]))
            });
            std::thread::sleep(Duration::from_millis(300));
            drop(batch);
            tuning.into_iter().for_each(|tuned| drop(tuned.join().unwrap()));
        });
        for epoch in 1..3 {
            read_epoch(&view, epoch);
        }
        for number in 0..300 {
            let mut bytes = vec![0; 50_000];
            view.read_at(&view.open(&path(number)).unwrap(), 0, &mut bytes).unwrap();
            assert!(bytes == content(number, 50_000), "{number}");
        }
    }
    cluster.down();
}

/// SEMANTICS: "Orders: samples of an order that a client submits (`Session::submit`, `dayfly_order_*`)
/// are fetched ahead, whichever interface and whichever process of the node then reads them."
#[test]
fn ordered_samples_arrive_in_time_even_while_they_are_being_cached() {
    let cluster = session(3, &[], &[20_000; 1500]);
    let view = cluster.view(0);
    let dataset = dataset(&view);
    let samples: Vec<SampleId> = Samples::of(dataset.catalog()).epoch(1, 0).collect();
    let order = view.session().submit(&dataset, samples.iter().copied()).unwrap();
    wait_until("prefetching begins", || count(&node(&cluster, 0)["remote_reads"]) > 0);
    for samples in samples.chunks(64) {
        let mut batch = view.session().read_many(&dataset, samples, Delivery::InOrder, OnMissing::Fail).unwrap();
        batch.wait().unwrap();
        std::thread::sleep(Duration::from_millis(10));
    }
    let prefetch = node(&cluster, 0)["prefetch"].clone();
    assert!(count(&prefetch["hits"]) > 700 && count(&prefetch["late"]) < 150, "{prefetch}");
    drop(order);
    wait_until("the samples that were read are cached", || node(&cluster, 0)["cached_blocks"].as_u64().unwrap() > 800);
    cluster.down();
}

/// SEMANTICS: "Cached blocks make way for stage-ins."
#[test]
fn a_stage_in_gets_the_space_of_cached_blocks() {
    let lens = vec![100_000; 60];
    let cluster = session(2, &["--capacity", "8MiB"], &lens);
    let view = cluster.view(0);
    read_epoch(&view, 0);
    wait_until("some blocks are cached", || count(&node(&cluster, 0)["cached_bytes"]) > 2_000_000);
    fs::create_dir(cluster.at("more")).unwrap();
    (0..80).for_each(|number| fs::write(cluster.at(format!("more/{number}")), vec![number as u8; 100_000]).unwrap());
    cluster.stage(&[&cluster.at("more")], "/dayfly/more");
    read_epoch(&view, 1);
    cluster.ok(&["verify", "--from-every-node"]);
    cluster.down();
}

/// SEMANTICS: "Cached blocks make way for stage-ins. They make way as far as the stage-in needs their
/// space, and no further."
#[test]
fn a_stage_in_that_fits_leaves_cached_blocks_alone() {
    let cluster = session(2, &[], &[60_000; 200]);
    let view = cluster.view(0);
    read_epoch(&view, 0);
    let all = 200 * 60_000;
    let cached = || count(&node(&cluster, 0)["cached_bytes"]);
    wait_until("all is cached", || cached() + count(&node(&cluster, 0)["held_bytes"]) == all);
    let before = (cached(), node(&cluster, 0)["remote_reads"].clone());
    for name in ["x", "y"] {
        fs::write(cluster.at(name), b"hi").unwrap();
    }
    cluster.stage(&[&cluster.at("x"), &cluster.at("y")], "/dayfly/tiny");
    assert_eq!(cached(), before.0);
    read_epoch(&cluster.view(0), 1);
    assert_eq!(node(&cluster, 0)["remote_reads"], before.1, "the next epoch sends no request to a peer");
    cluster.ok(&["verify", "--from-every-node"]);
    cluster.down();
}

/// SEMANTICS: "Cached blocks make way for stage-ins. They make way as far as the stage-in needs their
/// space, and no further."
#[test]
fn a_stage_in_drops_only_as_many_cached_blocks_as_it_needs() {
    // Each node has 32 MiB of space: 10 MiB hold its own blocks, and 10 MiB hold cached blocks. A stage-in of 16 MiB per node
    // leaves 6 MiB for cached blocks.
    let cluster = session(2, &["--capacity", "32MiB"], &[100_000; 210]);
    let view = cluster.view(0);
    read_epoch(&view, 0);
    wait_until("all is cached", || {
        count(&node(&cluster, 0)["cached_bytes"]) + count(&node(&cluster, 0)["held_bytes"]) == 21_000_000
    });
    let before = count(&node(&cluster, 0)["cached_bytes"]);
    fs::create_dir(cluster.at("more")).unwrap();
    (0..300).for_each(|number| fs::write(cluster.at(format!("more/{number}")), content(number, 100_000)).unwrap());
    // During all of this a reader continues, and sees no wrong byte.
    std::thread::scope(|scope| {
        let staging = scope.spawn(|| cluster.stage(&[&cluster.at("more")], "/dayfly/more"));
        let mut bytes = vec![0; 100_000];
        let mut rounds = 0;
        while rounds < 2 || !staging.is_finished() {
            for number in 0..210 {
                let read = view.read_at(&view.open(&path(number)).unwrap(), 0, &mut bytes);
                assert!(read.unwrap() == 100_000 && bytes == content(number, 100_000), "{number}");
            }
            rounds += 1;
        }
        staging.join().unwrap();
    });
    let left = count(&node(&cluster, 0)["cached_bytes"]);
    assert!(left >= 2_000_000 && left < before, "{left} of {before} are left");
    cluster.ok(&["verify", "--from-every-node"]);
    cluster.down();
}

/// Returns the hit rate that an LRU cache of this many samples would have over the epochs after the first.
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

/// SEMANTICS: "If there is not room for all of them, a hash of the block selects the same ones in every
/// epoch: with room for four fifths, four fifths of each later epoch are local, where an LRU cache
/// would have fewer. `status` shows the predicted and the observed share."
#[test]
fn four_fifths_are_local_in_every_epoch_if_four_fifths_fit() {
    const FILES: usize = 1500;
    const LEN: usize = 20_000;
    // A node's capacity, which must also hold the node's own blocks, is four fifths of the dataset, plus a little for everything
    // else that the node needs.
    let capacity = (FILES * LEN * 4 / 5 + 300_000).to_string();
    let cluster = session(3, &["--capacity", &capacity], &[LEN; FILES]);
    let view = cluster.view(0);
    read_epoch(&view, 0);
    let cached = std::cell::Cell::new(0);
    wait_until("cached blocks are written", || {
        std::thread::sleep(Duration::from_millis(100));
        let now = count(&node(&cluster, 0)["cached_bytes"]);
        now > 0 && cached.replace(now) == now
    });
    let local = |node: &serde_json::Value| {
        let reads = &node["reads"];
        let bytes = |source: &str| count(&reads[source]["bytes"]) as f64;
        (bytes("segment") + bytes("cached"), bytes("segment") + bytes("cached") + bytes("arena") + bytes("asked"))
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
    // Compare with an LRU cache of the same size. Each epoch reads in another random order, so the LRU cache has some hits, but
    // far fewer.
    let names = Samples::of(dataset(&view).catalog());
    let epochs: Vec<Vec<SampleId>> = (0..5).map(|epoch| names.epoch(5, epoch).collect()).collect();
    let lru = lru_hits(&epochs, FILES * 4 / 5);
    println!("the share of an LRU cache is {lru:.3}");
    assert!(lru < room - 0.05, "{lru}");
    cluster.down();
}

/// SEMANTICS: "Orders: samples of an order that a client submits (`Session::submit`, `dayfly_order_*`)
/// are fetched ahead, whichever interface and whichever process of the node then reads them."
#[test]
fn ordered_samples_arrive_before_they_are_read() {
    let lens: Vec<usize> = (0..2000).map(|number| 2000 + number * 13 % 3000).collect();
    let cluster = session(3, &[], &lens);
    cluster.ok(&["tune", "--cache", "off"]);
    let view = cluster.view(0);
    let dataset = dataset(&view);
    let samples: Vec<SampleId> = Samples::of(dataset.catalog()).epoch(1, 0).collect();
    let order = view.session().submit(&dataset, samples.iter().copied()).unwrap();
    wait_until("prefetching begins", || count(&node(&cluster, 0)["remote_reads"]) > 0);
    let mut buffer = vec![0; 10_000];
    for (at, &sample) in samples.iter().enumerate() {
        let (size, _) = dataset.catalog().sample(sample).unwrap();
        assert_eq!(view.session().read_at(&dataset, sample, 0, &mut buffer[..size as usize], &mut None).unwrap() as u64, size);
        if at % 20 == 0 {
            // This is about the duration of a training step.
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    let node = node(&cluster, 0);
    let far = count(&node["reads"]["arena"]["count"]) + count(&node["reads"]["asked"]["count"]);
    assert!(far > 1000 && count(&node["reads"]["asked"]["count"]) < far / 10, "{node}");
    assert!(count(&node["prefetch"]["hits"]) > far * 8 / 10 && count(&node["prefetch"]["wasted"]) < far / 20, "{node}");
    drop(order);
    assert_accounts_are_settled(&cluster);
    // With prefetching off, an order fetches nothing.
    let printed = cluster.ok(&["tune", "--prefetch", "off", "--prefetch-memory", "10MiB"]);
    assert_eq!(printed.trim(), "prefetch: off, in 10.0MiB; cache: off");
    let other = cluster.view(1);
    let _order = other.session().submit(&dataset, samples).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let status = cluster.status();
    assert_eq!(status["nodes"][1]["remote_reads"], 0);
    assert_eq!(status["nodes"][1]["prefetch"]["orders"], 1);
    drop(other);
    cluster.down();
}

/// SEMANTICS: "A large file that a client reads sequentially, without an order, is read ahead."
#[test]
fn a_large_file_is_read_ahead_of_a_sequential_reader() {
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
    let fetched = count(&after["remote_bytes"]) - count(&before["remote_bytes"]);
    assert_eq!(fetched, len as u64, "each byte is fetched once");
    // A short read in the middle of another file fetches little.
    let other = numbers(&view, 6, false)[1];
    let opened = view.open(&path(other)).unwrap();
    assert_eq!(view.read_at(&opened, 20 << 20, &mut buffer[..100]).unwrap(), 100);
    let fetched = count(&node(&cluster, 0)["remote_bytes"]) - count(&after["remote_bytes"]);
    assert!(fetched <= 4 << 20, "{fetched}");
    cluster.down();
}

#[test]
fn counters_are_shown_in_every_form() {
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
    assert!(cluster.ok(&["status"]).contains("prefetch: auto, in half of the arena; cache: all free space"));
    cluster.fails(2, &["tune", "--prefetch", "fast"]);
    let status = node(&cluster, 0);
    assert_eq!(count(&status["busiest_clients"][0]["pid"]), u64::from(std::process::id()));
    drop(view);
    cluster.down();
}

#[test]
fn the_page_of_metrics_equals_the_output_of_the_program() {
    let page = fs::read_to_string(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("docs/METRICS.md")).unwrap();
    assert_eq!(page, dayfly_meta::metrics::page(), "dayfly metrics --describe > docs/METRICS.md");
}
