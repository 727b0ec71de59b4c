//! Tests of workers with a sink in memory. The stored bytes must equal those of the sources, even
//! if nodes are full, and however an archive is split.

mod adversary;
mod nested;
mod strange;
mod trailing;
mod unstored;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs;
use std::io::Seek;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::rc::Rc;

use dayfly_meta::catalog::member::read_member;
use dayfly_meta::catalog::{MemberKey, NOT_STORED, Place, StoredBlock};
use dayfly_meta::checksum::checksum;
use dayfly_meta::limits::{BATCH_LEN_MAX, BATCHES_PER_WORKER_MAX, BLOCK_SIZE_MAX, CHUNK_LEN};
use dayfly_meta::path::display;
use dayfly_meta::placement;
use dayfly_meta::wire::control::Grouping;
use dayfly_meta::wire::peer::Rival;

use super::*;
use crate::plan::{PlanRequest, StageInPlan, plan_sources};
use crate::unit_ledger::{NextUnits, UnitLedger, WorkerId};

/// Nodes that store blocks in memory until they have no room.
struct MemorySink {
    /// Bytes that each node has left.
    room: Vec<u64>,
    /// Blocks by owner and number.
    stored: HashMap<(NodeId, u32), Vec<u8>>,
    in_flight: VecDeque<Shipment>,
    /// Its reference count is one more than the number of buffers that are lent.
    lent: Rc<()>,
    buffers: usize,
    /// Number of the next block.
    next_arrival: u32,
    /// What the worker is told to store.
    stored_share: Option<StoredShare>,
}

/// A buffer that counts as lent until it is dropped.
struct LentBuffer(Vec<u8>, #[expect(dead_code, reason = "only its reference count is used")] Rc<()>);

impl std::ops::Deref for LentBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl std::ops::DerefMut for LentBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

enum Shipment {
    Batch(NodeId, Batch<LentBuffer>),
    Piece(NodeId, BlockPiece<LentBuffer>),
}

impl MemorySink {
    fn new(room: &[u64]) -> Self {
        Self {
            room: room.to_vec(),
            stored: HashMap::new(),
            in_flight: VecDeque::new(),
            lent: Rc::default(),
            buffers: BATCHES_PER_WORKER_MAX,
            next_arrival: 0,
            stored_share: None,
        }
    }

    fn take(&mut self, owner: NodeId, batch: Batch<LentBuffer>) -> Delivery<LentBuffer> {
        let Some(left) = self.room[owner.index()].checked_sub(batch.len() as u64) else { return Delivery::Full(owner, batch) };
        self.room[owner.index()] = left;
        let first = self.next_arrival;
        for (_, block, bytes) in batch.iter() {
            assert_eq!(block.checksum, checksum(bytes), "a block travels with its checksum");
            self.stored.insert((owner, self.next_arrival), bytes.to_vec());
            self.next_arrival += 1;
        }
        Delivery::Stored(first, batch.into_parts().1)
    }
}

impl Sink for &mut MemorySink {
    type Buffer = LentBuffer;

    fn buffer(&mut self, _owner: NodeId) -> Result<Option<LentBuffer>, StageInError> {
        let is_left = Rc::strong_count(&self.lent) <= self.buffers;
        Ok(is_left.then(|| LentBuffer(vec![0; BATCH_LEN_MAX], self.lent.clone())))
    }

    fn ship(&mut self, owner: NodeId, batch: Batch<LentBuffer>) -> Result<(), StageInError> {
        self.in_flight.push_back(Shipment::Batch(owner, batch));
        Ok(())
    }

    fn ship_piece(&mut self, owner: NodeId, piece: BlockPiece<LentBuffer>) -> Result<(), StageInError> {
        self.in_flight.push_back(Shipment::Piece(owner, piece));
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    fn next_delivery(&mut self) -> Result<Delivery<LentBuffer>, StageInError> {
        match self.in_flight.pop_front().unwrap() {
            Shipment::Batch(owner, batch) => Ok(self.take(owner, batch)),
            Shipment::Piece(owner, piece) => {
                assert_eq!(piece.checksum, checksum(&piece.buffer[..piece.len]), "a piece travels with its checksum");
                let block = self.stored.get_mut(&(owner, piece.arrival)).unwrap();
                block[piece.offset as usize..][..piece.len].copy_from_slice(&piece.buffer[..piece.len]);
                Ok(Delivery::Piece)
            }
        }
    }

    fn reserve(&mut self, owner: NodeId, block_len: u64, _: Rival) -> Result<Reserved, StageInError> {
        let Some(left) = self.room[owner.index()].checked_sub(block_len) else { return Ok(Reserved::Full) };
        self.room[owner.index()] = left;
        self.next_arrival += 1;
        self.stored.insert((owner, self.next_arrival - 1), vec![0; block_len as usize]);
        Ok(Reserved::At(self.next_arrival - 1))
    }
}

pub(crate) fn placement(nodes: usize) -> Arc<Placement> {
    let members: Vec<_> = (0..nodes as u16).map(|node| placement::Member { node: NodeId(node), capacity: 1 }).collect();
    Arc::new(Placement::new(1, &members))
}

pub(crate) fn planned(paths: &[&Path], selection: &Selection) -> Result<StageInPlan, StageInError> {
    let patterns: Vec<Vec<u8>> = paths.iter().map(|path| path.as_os_str().as_bytes().to_vec()).collect();
    let request = PlanRequest { patterns: &patterns, selection, seed: 3, workers: 4 };
    plan_sources(&request, tempfile::tempfile().unwrap(), &ProgressMonitor::default())
}

/// The result of a stage-in.
#[derive(Default)]
pub(crate) struct Staged {
    /// The accepted members, with their bytes.
    pub(crate) members: BTreeMap<MemberKey, (Member, Vec<u8>)>,
    counts: Counts,
    /// Number of rejected tickets.
    rejected: usize,
    source_bytes: u64,
}

impl Staged {
    /// Returns the dataset by path. A later member replaces an earlier one.
    fn tree(&self) -> BTreeMap<String, (MemberKind, Vec<u8>)> {
        let entry = |(member, bytes): &(Member, Vec<u8>)| {
            let mut kind = member.kind.clone();
            if let MemberKind::File { blocks, place, .. } = &mut kind {
                blocks.clear();
                *place = Place::Tree;
            }
            (display(&member.path), (kind, bytes.clone()))
        };
        self.members.values().map(entry).collect()
    }
}

/// Runs a plan as several workers with one unit each would. Among the finished units that are not
/// recorded yet, `pick` chooses the next one to record.
pub(crate) fn run(
    plan: StageInPlan,
    selection: &Selection,
    room: &[u64],
    workers: usize,
    pick: &mut dyn FnMut(usize) -> usize,
) -> Result<Staged, StageInError> {
    run_within(plan, selection, MemorySink::new(room), 1 << 20, workers, pick)
}

/// Like [`run`], with a given sink and `run_len` bytes of memory for members.
fn run_within(
    plan: StageInPlan,
    selection: &Selection,
    mut sink: MemorySink,
    run_len: usize,
    workers: usize,
    pick: &mut dyn FnMut(usize) -> usize,
) -> Result<Staged, StageInError> {
    let room = sink.room.clone();
    let runs = RunWriter::new(Box::new(tempfile::tempfile), run_len);
    let decoders = DecoderLimits { threads: 2, ahead_len: 4 << 20, memory_max: selection.decoder_memory_max() };
    let (placement, suspect_paths, stored_share) = (placement(room.len()), Arc::default(), sink.stored_share);
    let config = WorkerConfig { placement, selection, seed: 1, decoders, suspect_paths, stored_share };
    let monitor: Arc<ProgressMonitor> = Arc::default();
    let mut worker = Worker::new(&mut sink, runs, config, monitor.clone())?;
    let mut ledger = UnitLedger::new(plan.units, plan.split_tars);
    let mut staged = Staged::default();
    let mut finished = Vec::new();
    loop {
        let worker_id = WorkerId { node: NodeId(0), number: 0 };
        let next = if finished.len() < workers { ledger.assign_next(worker_id)? } else { NextUnits::NoneYet };
        match next {
            NextUnits::Assigned(units) => finished.extend(worker.run(&units)?),
            NextUnits::NoneYet => {
                let report = finished.swap_remove(pick(finished.len()));
                let verdict = ledger.record(report);
                verdict.accepted.into_iter().for_each(|(_, counts)| staged.counts.add(counts));
                if let Some(reason) = verdict.failure {
                    let (path, offset) = (Path::new("failed").to_owned(), 0);
                    return Err(StageInError::Damaged { path, offset, is_decompressed: false, reason });
                }
            }
            NextUnits::Finished => break,
        }
    }
    let rejected = ledger.rejected_tickets().clone();
    for (mut run, _) in worker.finish()?.finish().unwrap() {
        run.rewind().unwrap();
        while let Some(member) = read_member(&mut run).unwrap() {
            if rejected.contains(&member.ticket) {
                continue;
            }
            let mut bytes = Vec::new();
            if let MemberKind::File { size, blocks, checksums, .. } = &member.kind {
                let is_stored = |block: &&StoredBlock| block.arrival != NOT_STORED;
                for block in blocks.iter().filter(is_stored) {
                    bytes.extend_from_slice(&sink.stored[&(block.owner, block.arrival)]);
                }
                if blocks.iter().filter(is_stored).count() == blocks.len() {
                    assert_eq!(bytes.len() as u64, *size);
                    let expected: Vec<u32> = bytes.chunks(CHUNK_LEN as usize).map(checksum).collect();
                    assert_eq!(*checksums, expected, "{}", display(&member.path));
                }
            }
            assert!(staged.members.insert(member.key, (member, bytes)).is_none(), "every key occurs once");
        }
    }
    staged.rejected = rejected.len();
    staged.source_bytes = monitor.take_counted().source_bytes;
    assert_eq!((sink.in_flight.len(), Rc::strong_count(&sink.lent)), (0, 1), "nothing is left in flight");
    Ok(staged)
}

fn run_simply(paths: &[&Path], selection: &Selection) -> Result<Staged, StageInError> {
    run(planned(paths, selection)?, selection, &[1 << 40; 3], 1, &mut |_| 0)
}

/// Stages in a folder with files of these `sizes` on nodes with this `room`, and checks the bytes.
/// Returns how many blocks each node has.
fn stage_in_files(sizes: &[u64], room: &[u64]) -> Result<Vec<usize>, StageInError> {
    let folder = tempfile::tempdir().unwrap();
    let content = |number: usize, size: u64| (0..size).map(|at| (at * 7 + number as u64) as u8).collect::<Vec<u8>>();
    for (number, &size) in sizes.iter().enumerate() {
        fs::write(folder.path().join(format!("f{number}")), content(number, size)).unwrap();
    }
    let selection = Selection::default();
    let staged = run(planned(&[folder.path()], &selection)?, &selection, room, 1, &mut |_| 0)?;
    let mut held = vec![0; room.len()];
    let mut files = 0;
    for (member, bytes) in staged.members.values() {
        let MemberKind::File { blocks, .. } = &member.kind else { continue };
        let number: usize = display(&member.path)[1..].parse().unwrap();
        assert!(*bytes == content(number, sizes[number]), "sample {number}");
        blocks.iter().for_each(|block| held[block.owner.index()] += 1);
        files += 1;
    }
    assert_eq!(files, sizes.len());
    Ok(held)
}

#[test]
fn samples_of_all_sizes_arrive_unchanged() {
    let mega = 1 << 20;
    stage_in_files(&[0, 1, 65_536, mega - 1, mega, mega + 1, 3 * mega + 5, BLOCK_SIZE_MAX + 3], &[1 << 40; 3]).unwrap();
    stage_in_files(&[3000; 3000], &[1 << 40; 40]).unwrap();
}

#[test]
fn blocks_of_a_full_node_go_to_the_next_node() {
    let held = stage_in_files(&[10_000; 900], &[1 << 40, 2 << 20, 0]).unwrap();
    assert!(held[0] > 500 && held[1] > 100 && held[2] == 0, "{held:?}");
    stage_in_files(&[5 << 20; 6], &[1 << 40, 6 << 20, 0]).unwrap();
}

#[test]
fn batches_that_come_back_all_at_once_are_placed_again() {
    let folder = tempfile::tempdir().unwrap();
    (0..400).for_each(|number| fs::write(folder.path().join(format!("f{number}")), vec![number as u8; 60_000]).unwrap());
    let selection = Selection::default();
    for buffers in [3, 4, 9] {
        let mut room = vec![1 << 20; 6];
        room[5] = 1 << 40;
        let sink = MemorySink { buffers, ..MemorySink::new(&room) };
        let plan = planned(&[folder.path()], &selection).unwrap();
        let staged = run_within(plan, &selection, sink, 1 << 20, 1, &mut |_| 0).unwrap();
        assert_eq!(staged.members.len(), 401, "with {buffers} buffers");
    }
}

#[test]
fn no_room_anywhere_is_an_error_that_names_the_sample() {
    for sizes in [&[10_000; 500][..], &[5 << 20; 3]] {
        let error = stage_in_files(sizes, &[1 << 20, 2 << 20]).unwrap_err();
        assert!(
            matches!(&error, StageInError::NoRoom { sample, size } if sample.starts_with('f') && *size == sizes[0]),
            "{error}"
        );
    }
}

#[test]
fn files_with_one_stem_have_one_owner() {
    let folder = tempfile::tempdir().unwrap();
    for number in 0..200 {
        for ending in ["jpg", "json", "txt"] {
            fs::write(folder.path().join(format!("{number}.{ending}")), ending).unwrap();
        }
    }
    let selection = Selection { group: Grouping::Stem, ..Selection::default() };
    let staged = run(planned(&[folder.path()], &selection).unwrap(), &selection, &[1 << 40; 4], 1, &mut |_| 0).unwrap();
    let mut owners: BTreeMap<String, NodeId> = BTreeMap::new();
    for (path, owner) in staged.members.values().filter_map(|(member, _)| match &member.kind {
        MemberKind::File { blocks, .. } => Some((display(&member.path), blocks[0].owner)),
        _ => None,
    }) {
        let stem = path.split('.').next().unwrap().to_owned();
        assert_eq!(*owners.entry(stem).or_insert(owner), owner, "{path}");
    }
    assert_eq!(owners.len(), 200);
    assert!((0..4).all(|node| owners.values().any(|&owner| owner == NodeId(node))));
}

/// SEMANTICS: "A source that has changed since it was listed causes an error that names it."
#[test]
fn a_source_that_changed_since_planning_is_an_error_that_names_it() {
    for (content, what) in [("other length", "size"), ("12345", "time")] {
        for keep_going in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("file");
            fs::write(&path, "54321").unwrap();
            fs::File::open(&path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
            let selection = Selection { keep_going, ..Selection::default() };
            let plan = planned(&[folder.path()], &selection).unwrap();
            fs::write(&path, content).unwrap();
            match run(plan, &selection, &[1 << 20], 1, &mut |_| 0) {
                Err(error) => {
                    assert!(matches!(&error, StageInError::Changed { path: named } if *named == path), "{what}: {error}");
                    assert!(!keep_going);
                }
                Ok(staged) => {
                    assert!(keep_going && staged.counts.skipped == 1, "{what}");
                    assert!(staged.counts.skipped_notes[0].contains("changed"), "{:?}", staged.counts.skipped_notes);
                    assert_eq!(staged.tree().len(), 1, "only the directory");
                }
            }
        }
    }
}
