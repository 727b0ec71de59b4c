//! Starts sessions with files whose numbers determine their contents.

use std::fs;
use std::sync::Arc;

use dayfly_client::{Dataset, Delivery, OnMissing, Samples, View};
use dayfly_meta::id::{BlockId, SampleId};

use super::{Cluster, Ground, wait_until};

/// Returns the content of a file.
pub(crate) fn content(number: usize, len: usize) -> Vec<u8> {
    let mut state = number as u64 + 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Starts a session, and stages in the files `d/0`, `d/1` … with these lengths.
pub(crate) fn session(nodes: u16, options: &[&str], lens: &[usize]) -> Cluster {
    let cluster = session_with_files(nodes, options, lens);
    cluster.stage(&[&cluster.at("d")], "/dayfly/d");
    cluster
}

/// Like [`session`], but only the owner of a block can serve the block.
pub(crate) fn session_without_origins(nodes: u16, options: &[&str], lens: &[usize]) -> Cluster {
    let cluster = session_with_files(nodes, options, lens);
    cluster.stage_compressed("d", "/dayfly/d");
    cluster
}

fn session_with_files(nodes: u16, options: &[&str], lens: &[usize]) -> Cluster {
    let ground = Ground::new();
    fs::create_dir(ground.at("d")).unwrap();
    for (number, &len) in lens.iter().enumerate() {
        fs::write(ground.at(format!("d/{number}")), content(number, len)).unwrap();
    }
    ground.up_with(nodes, options)
}

pub(crate) fn path(number: usize) -> Vec<u8> {
    format!("/dayfly/d/{number}").into_bytes()
}

pub(crate) fn dataset(view: &View) -> Arc<Dataset> {
    view.session().datasets().unwrap().first().unwrap().clone()
}

/// Returns the numbers of all files that are not empty and have their first block on the view's node or, if `is_here` is false,
/// on another node.
pub(crate) fn numbers(view: &View, count: usize, is_here: bool) -> Vec<usize> {
    let dataset = dataset(view);
    let is_meant = |&number: &usize| {
        let file = view.open(&path(number)).unwrap();
        let (size, blocks) = dataset.catalog().sample(file.sample()).unwrap();
        size > 0 && dataset.is_here(BlockId(blocks.start)) == is_here
    };
    (0..count).filter(is_meant).collect()
}

pub(crate) fn node(cluster: &Cluster, number: usize) -> serde_json::Value {
    cluster.status()["nodes"][number].clone()
}

pub(crate) fn count(value: &serde_json::Value) -> u64 {
    value.as_u64().unwrap()
}

/// Asserts that, after a short wait, no node has a lease or a waiting request left.
pub(crate) fn assert_accounts_are_settled(cluster: &Cluster) {
    wait_until("all leases have ended", || {
        let status = cluster.status_on(0);
        let nodes = status["nodes"].as_array().unwrap();
        nodes.iter().all(|node| ["leases", "asking", "queued"].iter().all(|account| node[account] == 0))
    });
}

/// Reads all samples in batches, in an epoch's order.
pub(crate) fn read_epoch(view: &View, epoch: u64) {
    let dataset = dataset(view);
    let order: Vec<SampleId> = Samples::of(dataset.catalog()).epoch(5, epoch).collect();
    for samples in order.chunks(64) {
        let mut batch = view.session().read_many(&dataset, samples, Delivery::AsAvailable, OnMissing::Fail).unwrap();
        batch.wait().unwrap();
        assert!(batch.is_good());
    }
}
