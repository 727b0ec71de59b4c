//! A process that reads files on a node, and checks every byte.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use dayfly_meta::catalog::block_len;
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::BlockId;
use tokio::time::{Instant, sleep, timeout};

use super::net::Net;
use super::random::Random;
use super::session::Outcome;
use super::source::Files;
use crate::Node;
use crate::fetch::Fetched;
use crate::store::Dataset;

pub(super) fn dataset(server: &Node, target: &[u8]) -> Option<Arc<Dataset>> {
    server.parts.store.datasets().into_iter().find(|dataset| dataset.target() == target)
}

/// Reads files as a process of a node would.
pub(super) struct Reader {
    pub(super) net: Arc<Net>,
    pub(super) server: Arc<Node>,
    pub(super) report: Arc<Mutex<Outcome>>,
    /// How long a read may take.
    pub(super) limit: Duration,
}

impl Reader {
    pub(super) fn broken(&self, what: String) {
        self.net.note(&what);
        self.report.lock().unwrap().broken.push(what);
    }

    /// Reads from time to time while faults happen.
    pub(super) async fn read_some(self, mut random: Random, files: Files) {
        let files: Vec<_> = files.into_iter().collect();
        for _ in 0..12 {
            sleep(random.log_duration(Duration::from_millis(1), Duration::from_secs(3))).await;
            let wanted: Vec<_> = (0..1 + random.below(4)).map(|_| random.pick(&files)).collect();
            let wanted: Vec<_> = wanted.iter().map(|(path, expected)| (&path[..], &expected[..])).collect();
            for reason in self.read(b"first", &wanted).await {
                if !reason.contains("node ") {
                    self.broken(format!("the error of a read names no cause: {reason}"));
                }
                if ["cannot be reached", "did not answer within", "is stuck"].iter().any(|words| reason.contains(words)) {
                    self.broken(format!("a read failed because a node is absent, but others can read its blocks: {reason}"));
                }
            }
        }
    }

    /// Reads files in one request and compares their contents. Returns the errors of the files that could not be read.
    pub(super) async fn read(&self, target: &[u8], files: &[(&[u8], &[u8])]) -> Vec<String> {
        let (start, node) = (Instant::now(), self.server.parts.config.node);
        let paths: Vec<&[u8]> = files.iter().map(|(path, _)| *path).collect();
        // A read that takes longer than the deadline is reported below.
        let read = timeout(2 * self.limit, self.bytes(target, &paths)).await;
        let took = start.elapsed();
        if took > self.limit {
            self.broken(format!("a read on node {node} took {} s", took.as_secs()));
        }
        let read = match read {
            Ok(Ok(read)) => read,
            Ok(Err(reason)) => vec![Err(reason)],
            Err(_) => Vec::new(),
        };
        let mut reasons = Vec::new();
        self.report.lock().unwrap().reads += read.len() as u64;
        for (read, (path, expected)) in read.into_iter().zip(files) {
            let name = String::from_utf8_lossy(path);
            match read {
                Ok(bytes) if bytes == *expected => {}
                Ok(_) => self.broken(format!("wrong bytes in {name} on node {node}")),
                Err(reason) => {
                    self.net.note(&format!("node {node} cannot read {name}: {reason}"));
                    reasons.push(reason);
                }
            }
        }
        self.report.lock().unwrap().failed_reads += reasons.len() as u64;
        reasons
    }

    /// Returns the contents of each file, or the error of its read.
    async fn bytes(&self, target: &[u8], paths: &[&[u8]]) -> Result<Vec<Result<Vec<u8>, String>>, String> {
        let dataset = dataset(&self.server, target).ok_or("there is no such dataset")?;
        let mut chunks: Vec<(usize, Chunk)> = Vec::new();
        for (file, path) in paths.iter().enumerate() {
            let entry = dataset.catalog().find(path).ok_or("there is no such file")?;
            let (size, blocks) = entry.sample().and_then(|sample| dataset.catalog().sample(sample)).ok_or("it is not a file")?;
            let blocks = (0..).zip(blocks).flat_map(|(part, block)| Chunk::all(BlockId(block), block_len(size, part)));
            chunks.extend(blocks.map(|chunk| (file, chunk)));
        }
        let mut parts: Vec<Option<Result<Vec<u8>, String>>> = vec![None; chunks.len()];
        loop {
            let wanted: Vec<usize> = (0..chunks.len()).filter(|&at| parts[at].is_none()).collect();
            if wanted.is_empty() {
                break;
            }
            let named: Vec<Chunk> = wanted.iter().map(|&at| chunks[at].1).collect();
            let mut fetching = self.server.parts.fetcher.begin(&dataset, &named, self.server.parts.arena.len() / 4).await;
            while let Some(part) = fetching.next().await {
                for (at, fetched) in part {
                    let at = wanted[at as usize];
                    parts[at] = Some(match fetched {
                        Fetched::Leased(lease) => Ok(lease.bytes().to_vec()),
                        Fetched::Local => stored(&dataset, chunks[at].1).ok_or("cannot read a local block".to_owned()),
                        Fetched::Failed(error) => Err(error.to_string()),
                    });
                }
            }
        }
        let mut files = vec![Ok(Vec::new()); paths.len()];
        for ((file, _), part) in chunks.into_iter().zip(parts.into_iter().flatten()) {
            match (part, &mut files[file]) {
                (Ok(bytes), Ok(file)) => file.extend(bytes),
                (Err(reason), file) => *file = Err(reason),
                (Ok(_), Err(_)) => {}
            }
        }
        Ok(files)
    }
}

/// Reads a chunk from this node's drive.
fn stored(dataset: &Dataset, chunk: Chunk) -> Option<Vec<u8>> {
    use std::os::unix::fs::FileExt;
    let position = dataset.locations().find(chunk.block)?.position()?;
    let mut bytes = vec![0; dataset.chunk(chunk)?.len as usize];
    dataset.segments().file(position.drive)?.read_exact_at(&mut bytes, position.offset + chunk.start()).ok()?;
    Some(bytes)
}
