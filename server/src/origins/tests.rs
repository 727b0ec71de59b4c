//! Origins on a parallel file system that fails.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Condvar, Mutex, PoisonError};

use dayfly_meta::catalog::{NOT_STORED, StoredBlock, Version};
use dayfly_meta::id::{BlockId, NodeId};
use dayfly_stagein::origin::{FileState, SourceFiles};
use futures_util::future::join_all;
use nix::errno::Errno;

use super::*;
use crate::blocking::Threads;
use crate::store::Drive;
use crate::store::testing::dataset;

/// What a read of the source does.
#[derive(Clone, Copy, Debug)]
enum Fault {
    None,
    Error(Errno),
    /// At most this many bytes at a time.
    Short(usize),
    /// No byte, although the file's size promises some.
    Truncated,
    OtherBytes,
    OtherTime,
    Stall(Duration),
    /// Stands still until the gate is opened.
    Hang,
}

/// The source, in memory. Each read takes the next fault; the last one stays.
struct FaultyFiles {
    bytes: Vec<u8>,
    faults: Mutex<VecDeque<Fault>>,
    /// Reads under way, and the most at a time.
    under_way: Mutex<(usize, usize)>,
    gate: Gate,
}

/// Holds reads back until it is open.
#[derive(Default)]
struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    fn pass(&self) {
        drop(self.opened.wait_while(self.is_open.lock().unwrap(), |is_open| !*is_open).unwrap());
    }
}

impl FaultyFiles {
    fn set(&self, faults: &[Fault]) {
        *self.faults.lock().unwrap() = faults.iter().copied().collect();
    }

    fn next(&self) -> Fault {
        let mut faults = self.faults.lock().unwrap();
        if faults.len() > 1 { faults.pop_front().unwrap() } else { faults[0] }
    }

    fn most_at_a_time(&self) -> usize {
        self.under_way.lock().unwrap().1
    }
}

impl SourceFiles for FaultyFiles {
    /// Stands for the source.
    type File = File;

    fn open(&self, _: &Path) -> io::Result<File> {
        File::open("/dev/null")
    }

    fn open_directory(&self, _: &Path) -> io::Result<File> {
        File::open("/dev/null")
    }

    fn open_below(&self, _: &File, _: &Path) -> io::Result<File> {
        File::open("/dev/null")
    }

    fn state(&self, _: &File) -> io::Result<FileState> {
        let is_other = matches!(self.faults.lock().unwrap()[0], Fault::OtherTime);
        let version = Version { size: 1 << 40, mtime_s: i64::from(is_other), ..Version::default() };
        Ok(FileState { version, inode: 0, is_file: true })
    }

    fn read_at(&self, _: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        {
            let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
            under_way.0 += 1;
            under_way.1 = under_way.1.max(under_way.0);
        }
        let len = buffer.len();
        let from = &self.bytes[offset as usize..][..len];
        let result = match self.next() {
            Fault::Error(errno) => Err(errno.into()),
            Fault::Truncated => Ok(0),
            Fault::Short(most) => {
                let len = len.min(most);
                buffer[..len].copy_from_slice(&from[..len]);
                Ok(len)
            }
            fault => {
                match fault {
                    Fault::Stall(time) => std::thread::sleep(time),
                    Fault::Hang => self.gate.pass(),
                    _ => {}
                }
                buffer.copy_from_slice(from);
                buffer[0] ^= u8::from(matches!(fault, Fault::OtherBytes));
                Ok(len)
            }
        };
        self.under_way.lock().unwrap().0 -= 1;
        result
    }
}

struct Fixture {
    origins: Arc<Origins>,
    files: Arc<FaultyFiles>,
    dataset: Arc<Dataset>,
    contents: Vec<Vec<u8>>,
    _folder: tempfile::TempDir,
}

/// Samples of this length, of which none is stored.
const LEN: usize = 1000;

impl Fixture {
    fn new(streams: usize, timeout: Duration) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let drives = Drive::open_all(&[folder.path().to_owned()], 1 << 20).unwrap();
        let contents: Vec<Vec<u8>> = (0..48_usize).map(|number| (0..LEN).map(|at| (number * 7 + at) as u8).collect()).collect();
        let block = |_| StoredBlock { owner: NodeId(0), arrival: NOT_STORED };
        let dataset = Arc::new(dataset(&drives, &contents, block));
        let bytes = [vec![0; 512], contents.concat()].concat();
        let files =
            FaultyFiles { bytes, faults: Mutex::new([Fault::None].into()), under_way: Mutex::default(), gate: Gate::default() };
        let files = Arc::new(files);
        let origins = Arc::new(Origins::new(files.clone(), Arc::new(Threads), streams, timeout));
        Self { origins, files, dataset, contents, _folder: folder }
    }

    fn start(&self, blocks: &[u32]) -> Vec<impl Future<Output = ReadChunks<Vec<u8>>> + Send + use<>> {
        let chunks: Vec<Chunk> = blocks.iter().map(|&block| Chunk { block: BlockId(block), index: 0 }).collect();
        self.origins.read(&self.dataset, &chunks, vec![vec![0; LEN]; chunks.len()])
    }

    /// Reads blocks. Returns the first failure; every block that was read must be right.
    async fn read(&self, blocks: &[u32]) -> Result<(), String> {
        let done: ReadChunks<Vec<u8>> = join_all(self.start(blocks)).await.into_iter().flatten().collect();
        assert_eq!(done.len(), blocks.len());
        let mut failure = Ok(());
        for (index, result) in done {
            match result {
                Ok(bytes) => assert!(bytes == self.contents[blocks[index] as usize], "block {}", blocks[index]),
                Err(error) => failure = Err(error.to_string()),
            }
        }
        failure
    }
}

/// SEMANTICS: "A read of a source that the file system fails is made up to four times within about two seconds. A file system that
/// does not answer at all is waited for up to 100 s. Then the read fails with `EIO`, and later reads try again."
#[tokio::test]
async fn each_fault_gives_the_right_bytes_or_a_clear_error_and_then_it_recovers() {
    use Fault::{Error, Hang, None, OtherBytes, OtherTime, Short, Stall, Truncated};
    let (eio, stale) = (Error(Errno::EIO), Error(Errno::ESTALE));
    let table: Vec<(Vec<Fault>, Option<&str>, u64)> = vec![
        (vec![None], Option::None, 1),
        (vec![eio, None], Option::None, 2),
        (vec![eio, eio, eio, None], Option::None, 4),
        (vec![eio], Some("Input/output error"), 4),
        // The reader opens a file again that the file system has forgotten.
        (vec![stale, None], Option::None, 1),
        (vec![stale], Some("Stale file handle"), 4),
        (vec![Short(7)], Option::None, 1),
        (vec![Short(7), Truncated, None], Option::None, 2),
        (vec![Truncated], Some("although its size promises"), 4),
        (vec![OtherBytes], Some("other bytes"), 1),
        (vec![OtherTime], Some("it was modified"), 1),
        (vec![Stall(Duration::from_millis(50))], Option::None, 1),
        (vec![Hang], Some("did not answer within 5 s"), 1),
    ];
    let check = |(faults, expected, operations): (Vec<Fault>, Option<&'static str>, u64)| async move {
        // Only what hangs is not answered in time.
        let timeout = Duration::from_secs(if matches!(faults[..], [Hang]) { 5 } else { 60 });
        let fixture = Fixture::new(4, timeout);
        fixture.files.set(&faults);
        let start = Instant::now();
        let result = fixture.read(&[3]).await;
        assert!(start.elapsed() < Duration::from_secs(30), "{faults:?}");
        match (expected, result) {
            (Option::None, result) => result.unwrap_or_else(|error| panic!("{faults:?}: {error}")),
            (Some(words), result) => {
                let error = result.expect_err("a fault that lasts is an error");
                assert!(error.contains(words), "{faults:?}: {error}");
            }
        }
        let status = fixture.origins.status();
        assert_eq!((status.operations, status.failures), (operations, u64::from(expected.is_some())), "{faults:?}");
        fixture.files.set(&[None]);
        fixture.files.gate.open();
        fixture.read(&[3, 5]).await.unwrap();
    };
    join_all(table.into_iter().map(check)).await;
}

/// SEMANTICS: "A server has at most `--pfs-streams` reads of sources under way at a time, even if readers have given up."
#[tokio::test(flavor = "multi_thread")]
async fn a_bounded_number_of_reads_is_under_way_even_if_readers_gave_up() {
    // One source has one stream less.
    let fixture = Fixture::new(3, Duration::from_secs(60));
    fixture.files.set(&[Fault::Hang]);
    // No two of these blocks are worth a common read.
    let blocks: Vec<u32> = (0..48).step_by(4).collect();
    for _ in 0..4 {
        let reading = join_all(fixture.start(&blocks));
        assert!(tokio::time::timeout(Duration::from_millis(30), reading).await.is_err());
    }
    fixture.files.gate.open();
    fixture.read(&blocks).await.unwrap();
    assert_eq!(fixture.files.most_at_a_time(), 2);
}

#[tokio::test]
async fn neighbors_are_read_together_and_one_bad_sample_fails_alone() {
    let fixture = Fixture::new(2, Duration::from_secs(5));
    let all: Vec<u32> = (0..48).rev().collect();
    fixture.read(&all).await.unwrap();
    assert_eq!(fixture.origins.status().operations, 1);
    // The first byte of the read belongs to block 0.
    fixture.files.set(&[Fault::OtherBytes]);
    assert!(fixture.read(&all).await.unwrap_err().contains("other bytes"));
    let status = fixture.origins.status();
    assert_eq!((status.operations, status.failures, status.reads.count), (2, 1, 48 + 47));
}
