//! A worker over a sink in memory: what comes out is what went in, also when nodes are full.

use std::collections::{HashMap, VecDeque};
use std::fs;
use std::io::Seek;
use std::os::unix::ffi::OsStrExt;

use dayfly_meta::catalog::member::read_member;
use dayfly_meta::limits::BATCHES_PER_WORKER;
use dayfly_meta::placement;

use super::*;
use crate::plan::plan;

type Key = (MemberKey, u32);

/// Nodes that store blocks in memory until they have no room.
struct MemorySink {
    room: Vec<u64>,
    stored: HashMap<Key, (NodeId, Vec<u8>)>,
    under_way: VecDeque<(NodeId, Batch<Vec<u8>>)>,
    lent: usize,
}

impl MemorySink {
    fn take(&mut self, owner: NodeId, batch: Batch<Vec<u8>>) -> Settled<Vec<u8>> {
        let new: u64 =
            batch.blocks().iter().filter(|block| u64::from(block.len) == block.block_len).map(|block| block.block_len).sum();
        let Some(left) = self.room[owner.index()].checked_sub(new) else { return Settled::Full(owner, batch) };
        self.room[owner.index()] = left;
        for (_, block, bytes) in batch.iter() {
            let whole = vec![0; block.block_len as usize];
            let (_, stored) = self.stored.entry((block.key, block.part)).or_insert((owner, whole));
            stored[block.offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        self.lent -= 1;
        Settled::Stored
    }
}

impl Sink for &mut MemorySink {
    type Buffer = Vec<u8>;

    fn buffer(&mut self) -> Option<Vec<u8>> {
        (self.lent < BATCHES_PER_WORKER).then(|| {
            self.lent += 1;
            vec![0; BATCH_LEN_MAX]
        })
    }

    fn ship(&mut self, owner: NodeId, batch: Batch<Vec<u8>>) -> Result<(), StageInError> {
        self.under_way.push_back((owner, batch));
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.under_way.len()
    }

    fn settle(&mut self) -> Result<Settled<Vec<u8>>, StageInError> {
        let (owner, batch) = self.under_way.pop_front().unwrap();
        let settled = self.take(owner, batch);
        if matches!(settled, Settled::Full(..)) {
            self.lent -= 1;
        }
        Ok(settled)
    }

    fn reserve(&mut self, owner: NodeId, key: MemberKey, part: u32, block_len: u64) -> Result<bool, StageInError> {
        let Some(left) = self.room[owner.index()].checked_sub(block_len) else { return Ok(false) };
        self.room[owner.index()] = left;
        self.stored.insert((key, part), (owner, vec![0; block_len as usize]));
        Ok(true)
    }
}

/// Stages a folder of `sizes` into nodes with `room`; returns each sample's bytes and how many blocks each node holds.
fn stage(sizes: &[u64], room: &[u64]) -> Result<Vec<usize>, StageInError> {
    let folder = tempfile::tempdir().unwrap();
    let content = |number: usize, size: u64| (0..size).map(|at| (at * 7 + number as u64) as u8).collect::<Vec<u8>>();
    for (number, &size) in sizes.iter().enumerate() {
        fs::write(folder.path().join(format!("f{number}")), content(number, size)).unwrap();
    }
    let mut sink = MemorySink { room: room.to_vec(), stored: HashMap::new(), under_way: VecDeque::new(), lent: 0 };
    let members: Vec<_> = (0..room.len() as u16).map(|node| placement::Member { node: NodeId(node), capacity: 1 }).collect();
    let placement = Arc::new(Placement::new(1, &members));
    let runs = RunWriter::new(Box::new(tempfile::tempfile));
    let mut worker = Worker::new(&mut sink, placement, runs, &Selection::default(), Arc::default())?;
    let patterns = [folder.path().as_os_str().as_bytes().to_vec()];
    let mut plan = plan(&patterns, &Selection::default(), tempfile::tempfile().unwrap(), &|| false)?;
    while let Some(unit) = plan.units.next_unit()? {
        worker.run(&unit)?;
    }
    let mut files = 0;
    let runs = worker.finish()?.finish().unwrap();
    for (mut run, _) in runs {
        run.rewind().unwrap();
        while let Some(member) = read_member(&mut run).unwrap() {
            let MemberKind::File { size, blocks } = member.kind else { continue };
            let number: usize = display(&member.path)[1..].parse().unwrap();
            let mut bytes = Vec::new();
            for (part, block) in blocks.iter().enumerate() {
                let (owner, stored) = &sink.stored[&(member.key, part as u32)];
                assert_eq!((block.owner, block.checksum), (*owner, crc32c::crc32c(stored)), "{number} part {part}");
                bytes.extend_from_slice(stored);
            }
            assert!(size == sizes[number] && bytes == content(number, size), "sample {number}");
            files += 1;
        }
    }
    assert_eq!(files, sizes.len());
    Ok((0..room.len()).map(|node| sink.stored.values().filter(|(owner, _)| owner.index() == node).count()).collect())
}

#[test]
fn all_sizes_arrive_whole() {
    let mega = 1 << 20;
    stage(&[0, 1, 65_536, mega - 1, mega, mega + 1, 3 * mega + 5, BLOCK_SIZE_MAX + 3], &[1 << 40; 3]).unwrap();
    stage(&[3000; 3000], &[1 << 40; 40]).unwrap();
}

#[test]
fn a_full_node_passes_blocks_on() {
    let held = stage(&[10_000; 900], &[1 << 40, 2 << 20, 0]).unwrap();
    assert!(held[0] > 500 && held[1] > 100 && held[2] == 0, "{held:?}");
    stage(&[5 << 20; 6], &[1 << 40, 6 << 20, 0]).unwrap();
}

#[test]
fn no_room_anywhere_is_an_error_that_names_the_sample() {
    for sizes in [&[10_000; 500][..], &[5 << 20; 3]] {
        let error = stage(sizes, &[1 << 20, 2 << 20]).unwrap_err();
        assert!(matches!(&error, StageInError::NoRoom { sample } if sample.starts_with('f')), "{error}");
    }
}

#[test]
fn a_source_that_changed_since_it_was_listed_is_named() {
    for (content, what) in [("other length", "size"), ("12345", "time")] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "54321").unwrap();
        fs::File::open(&path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        let patterns = [folder.path().as_os_str().as_bytes().to_vec()];
        let mut plan = plan(&patterns, &Selection::default(), tempfile::tempfile().unwrap(), &|| false).unwrap();
        fs::write(&path, content).unwrap();
        let mut sink = MemorySink { room: vec![1 << 20], stored: HashMap::new(), under_way: VecDeque::new(), lent: 0 };
        let placement = Arc::new(Placement::new(1, &[placement::Member { node: NodeId(0), capacity: 1 }]));
        let runs = RunWriter::new(Box::new(tempfile::tempfile));
        let mut worker = Worker::new(&mut sink, placement, runs, &Selection::default(), Arc::default()).unwrap();
        let unit = plan.units.next_unit().unwrap().unwrap();
        let error = worker.run(&unit).unwrap_err();
        assert!(matches!(&error, StageInError::Changed { path: named } if *named == path), "{what}: {error}");
    }
}
