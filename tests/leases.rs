//! Leases: what becomes of a reader that stops, sleeps or holds on to what it has, and of those who wait for the room.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod harness;

use std::fs;
use std::time::Duration;

use dayfly_client::{Delivery, OnMissing, View};
use dayfly_meta::id::{NodeId, SampleId};
use dayfly_meta::limits::{ARENA_LEN_MIN, REQUEST_TIMEOUT};
use harness::samples::{content, dataset};
use harness::{Cluster, Ground, signal};
use nix::sys::signal::Signal;

const SMALL: usize = 600;
const LARGE: usize = 800;
const LARGE_LEN: usize = 150_000;

fn len(number: usize) -> usize {
    if number < SMALL { 2000 + number } else { LARGE_LEN }
}

/// Three nodes, the smallest arena, and files below a path so long that a few hundred errors fill a socket.
fn cluster_of_long_names() -> (Cluster, String) {
    let ground = Ground::new();
    fs::create_dir(ground.at("d")).unwrap();
    (0..SMALL + LARGE).for_each(|number| fs::write(ground.at(format!("d/{number}")), content(number, len(number))).unwrap());
    let cluster = ground.up_with(3, &["--memory", &ARENA_LEN_MIN.to_string()]);
    let target = format!("/dayfly{}", format!("/{}", "n".repeat(250)).repeat(8));
    cluster.stage(&[&cluster.at("d")], &target);
    cluster.ok(&["tune", "--cache", "off"]);
    (cluster, target)
}

/// Numbers and samples of the files of a range that a node owns.
fn owned_by(view: &View, target: &str, range: std::ops::Range<usize>, owner: u16) -> Vec<(usize, SampleId)> {
    let dataset = dataset(view);
    let sample = |number: usize| view.open(format!("{target}/{number}").as_bytes()).unwrap().sample();
    let is_owned = |sample: SampleId| {
        let (_, blocks) = dataset.catalog().sample(sample).unwrap();
        dataset.catalog().owner(dayfly_meta::id::BlockId(blocks.start)) == Some(NodeId(owner))
    };
    range.map(|number| (number, sample(number))).filter(|&(_, sample)| is_owned(sample)).collect()
}

/// Sends more through the arena than it holds.
fn churn(view: &View, others: &[(usize, SampleId)]) {
    let dataset = dataset(view);
    let mut buffer = vec![0; LARGE_LEN];
    for _ in 0..3 {
        for &(number, sample) in others {
            view.session().read_at(&dataset, sample, 0, &mut buffer, &mut None).unwrap();
            assert!(buffer == content(number, LARGE_LEN), "{number}");
        }
    }
}

#[test]
fn a_batch_whose_reader_slept_gives_right_bytes_after_its_leases_were_taken_back() {
    let (cluster, target) = cluster_of_long_names();
    let view = cluster.view(0);
    let alive = owned_by(&view, &target, 0..SMALL, 1);
    let stopped = owned_by(&view, &target, 0..SMALL, 2);
    let others = owned_by(&view, &target, SMALL..SMALL + LARGE, 1);
    assert!(others.len() as u64 * LARGE_LEN as u64 > ARENA_LEN_MIN && stopped.len() > 120);
    signal(cluster.pids()[&2], Signal::SIGSTOP);
    let samples: Vec<SampleId> = alive.iter().chain(&stopped).map(|&(_, sample)| sample).collect();
    let mut batch = view.session().read_many(&dataset(&view), &samples, Delivery::Arrival, OnMissing::Tell).unwrap();
    // What node 1 has comes at once; that node 2 does not answer is told later, in more bytes than the socket takes. The server then
    // waits for this process, which does not read.
    std::thread::sleep(2 * REQUEST_TIMEOUT + Duration::from_secs(3));
    churn(&cluster.view(0), &others);
    let (mut whole, mut wrong) = (0, 0);
    while let Some(delivered) = batch.next() {
        let Ok(delivered) = delivered else { break };
        if let Ok(bytes) = delivered.bytes {
            let (number, _) = alive[delivered.index];
            let is_right = bytes == content(number, len(number));
            (whole, wrong) = (whole + usize::from(is_right), wrong + usize::from(!is_right));
        }
    }
    assert!(wrong == 0, "{wrong} samples were wrong, and the batch says that it is good: {}", batch.is_good());
    assert_eq!(whole, alive.len(), "what was lost is read again");
}
