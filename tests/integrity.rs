//! Flips one bit at each place where a sample's bytes are stored or sent, and checks who detects it: see "Checksums, hop by hop"
//! in `docs/SEMANTICS.md`.

use std::collections::HashSet;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::harness::inside::{Inside, Rest};
use crate::harness::samples::{content, dataset, numbers, path};
use crate::harness::wait_until;
use dayfly_client::{Delivery, OnMissing, View};
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::BlockId;
use dayfly_meta::limits::{CHUNK_LEN, RECHECKED_CHUNKS_MAX};
use dayfly_meta::wire::control::Copies;
use dayfly_meta::wire::local::{FetchedChunk, FromClient, FromServer};
use dayfly_meta::wire::peer::{NodeStageInRequest, OfferRequest, ReadRequest, Request};
use dayfly_meta::wire::status::Hop;
use dayfly_meta::wire::{VERSION, decode, decode_sealed, encode};
use dayfly_transport::fault::{Fault, OutgoingRequest};

/// Samples of zero, one and several batches, pieces and chunks. At most an eighth of the arena may wait to be cached.
/// No sample is longer than that eighth, because a busy machine would not cache a longer one the first time.
const LENS: [usize; 12] =
    [0, 1, 1000, 70_000, 1 << 20, (1 << 20) + 1, 4 << 20, (4 << 20) + 1, 8_000_000, 300, 2_000_000, 5_000_000];

fn asks(seen: &OutgoingRequest<'_>, is_meant: impl Fn(&Request) -> bool) -> bool {
    decode_sealed::<Request>(seen.message).is_ok_and(|request| is_meant(&request))
}

fn ships(seen: &OutgoingRequest<'_>) -> bool {
    // A pull's message may happen to decode as an offer, so the offered bytes must match too.
    match decode_sealed::<OfferRequest>(seen.message) {
        Ok(OfferRequest::Batch { blocks, .. }) => {
            !blocks.is_empty() && blocks.iter().map(|block| u64::from(block.len)).sum::<u64>() == seen.bulk_len
        }
        Ok(OfferRequest::Piece { stage_in, .. }) => (1..100).contains(&stage_in) && seen.bulk_len > 0,
        Err(_) => false,
    }
}

fn reads(seen: &OutgoingRequest<'_>) -> bool {
    asks(seen, |request| matches!(request, Request::Read(ReadRequest::Chunks { .. })))
}

fn found(session: &Inside, hop: Hop) -> u64 {
    session.status().iter().map(|node| node.damaged[hop as usize]).sum()
}

fn read(view: &View, number: usize) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; LENS[number]];
    let file = view.open(&path(number)).map_err(|error| error.to_string())?;
    view.read_at(&file, 0, &mut bytes).map(|_| bytes).map_err(|error| error.to_string())
}

fn assert_all_is_right(session: &Inside, nodes: u16) {
    for node in 0..nodes {
        let view = session.view(node);
        for (number, &len) in LENS.iter().enumerate() {
            assert!(read(&view, number).unwrap() == content(number, len), "file {number} on node {node}");
        }
    }
}

/// A session of two nodes with all samples staged in.
fn staged(verify_reads: bool) -> Inside {
    let session = Inside::new(2, verify_reads);
    session.stage(&session.write(&LENS)).unwrap();
    session
}

/// Returns a file of more than 64 bytes that another node owns, and one that this node owns.
fn far_and_near(view: &View) -> (usize, usize) {
    let one = |is_here| numbers(view, LENS.len(), is_here).into_iter().find(|&number| LENS[number] >= 300).unwrap();
    (one(false), one(true))
}

fn wait_until_cached(view: &View, number: usize) {
    let dataset = dataset(view);
    let file = view.open(&path(number)).unwrap();
    let (_, blocks) = dataset.catalog().sample(file.sample()).unwrap();
    wait_until("it is cached", || blocks.clone().all(|block| dataset.is_here(BlockId(block))));
}

/// SEMANTICS: "A batch that arrives damaged is sent again; the third time, the stage-in ends."
/// SEMANTICS: "All detected damage is counted in `dayfly_damaged_total`"
#[test]
fn a_batch_that_is_damaged_on_the_way_to_an_owner_is_sent_again() {
    let session = Inside::new(3, false);
    // Damage every batch and piece when it is sent for the first time.
    let flipped = Mutex::new(HashSet::new());
    session.inject(move |seen| {
        let is_meant = ships(seen) && flipped.lock().unwrap().insert(seen.message.to_vec());
        is_meant.then_some(Fault::FlipOnWire)
    });
    session.stage(&session.write(&LENS)).unwrap();
    assert!(found(&session, Hop::Shipped) > 0);
    session.leave_alone();
    assert_all_is_right(&session, 3);
    assert_eq!(found(&session, Hop::Fetched), 0);
}

/// SEMANTICS: "A batch that arrives damaged is sent again; the third time, the stage-in ends."
#[test]
fn a_connection_that_damages_every_batch_ends_the_stage_in_and_is_named() {
    let session = Inside::new(2, false);
    session.inject(|seen| ships(seen).then_some(Fault::FlipOnWire));
    let reason = session.stage(&session.write(&LENS)).unwrap_err();
    assert!(reason.contains("damaged 3 times") && reason.contains("node"), "{reason}");
    session.leave_alone();
    assert!(session.view(1).session().datasets().unwrap().is_empty());
}

/// SEMANTICS: "A worker whose own memory has changed ends the stage-in too. Both errors name the node."
#[test]
fn a_bit_that_flips_in_a_workers_buffer_ends_the_stage_in_and_names_the_node() {
    let session = Inside::new(2, false);
    let shipped = AtomicU64::new(0);
    session.inject(move |seen| {
        let is_first = ships(seen) && shipped.fetch_add(1, Ordering::Relaxed) == 0;
        is_first.then_some(Fault::FlipInBuffer)
    });
    let reason = session.stage(&session.write(&LENS)).unwrap_err();
    assert!(reason.contains("changed in the memory of node"), "{reason}");
}

/// SEMANTICS: "The reader's server checks every chunk before a process can see it or it is cached. A
/// bad chunk is fetched once more."
#[test]
fn a_chunk_that_is_damaged_on_the_way_to_a_reader_is_fetched_again() {
    let session = staged(false);
    // Damage the first chunk of each answer when it is sent for the first time.
    let flipped = Mutex::new(HashSet::new());
    session.inject(move |seen| match decode_sealed::<Request>(seen.message) {
        Ok(Request::Read(ReadRequest::Chunks { chunks, .. })) if flipped.lock().unwrap().insert(chunks[0]) => {
            Some(Fault::FlipOnWire)
        }
        _ => None,
    });
    let view = session.view(0);
    for number in numbers(&view, LENS.len(), false) {
        assert!(read(&view, number).unwrap() == content(number, LENS[number]), "file {number}");
    }
    assert!(found(&session, Hop::Fetched) > 0);
    session.leave_alone();
    assert_all_is_right(&session, 2);
}

/// Commit 2d0daba accepted bytes that had been damaged on the way, and cached them.
///
/// SEMANTICS: "If it is bad again, the read fails with EIO, and the message names the owner, the block and both checksums."
#[test]
fn a_connection_that_damages_every_answer_gives_eio_that_names_the_owner_and_nothing_is_cached() {
    let session = staged(false);
    session.inject(|request| reads(request).then_some(Fault::FlipOnWire));
    let view = session.view(0);
    for number in numbers(&view, LENS.len(), false) {
        let reason = read(&view, number).unwrap_err();
        assert!(reason.contains("node 1") && reason.contains("damaged bytes 2 times") && reason.contains("checksum"), "{reason}");
        let samples = [view.open(&path(number)).unwrap().sample()];
        let mut batch = view.session().read_many(&dataset(&view), &samples, Delivery::InOrder, OnMissing::Report).unwrap();
        assert!(batch.next().unwrap().unwrap().bytes.is_err());
    }
    assert_eq!(session.status()[0].cached.count, 0);
    session.leave_alone();
    assert_all_is_right(&session, 2);
}

/// SEMANTICS: "A bad chunk is dropped and fetched again."
#[test]
fn a_bit_that_flips_in_the_arena_is_detected_by_verified_reads() {
    let session = staged(true);
    // Nothing may be cached, so that reads are served from the arena.
    session.tune_cache(0);
    let view = session.view(0);
    let (far, _) = far_and_near(&view);
    let expected = content(far, LENS[far]);
    assert!(read(&view, far).unwrap() == expected);
    assert!(session.flip(Rest::Arenas, &expected) > 0);
    assert!(read(&view, far).unwrap() == expected, "it was fetched again");
    assert_eq!(found(&session, Hop::Arena), 1);
    // Views of a batch are checked too.
    assert!(session.flip(Rest::Arenas, &expected) > 0);
    let samples = [view.open(&path(far)).unwrap().sample()];
    let mut batch = view.session().read_many(&dataset(&view), &samples, Delivery::InOrder, OnMissing::Fail).unwrap();
    assert!(batch.next().unwrap().unwrap().bytes.unwrap() == expected);
}

/// SEMANTICS: "The chunk is checked again just before it is written to the drive; a bad chunk is
/// dropped."
#[test]
fn a_bit_that_flips_in_the_arena_is_detected_before_the_chunk_is_cached() {
    let session = staged(false);
    let view = session.view(0);
    let (far, _) = far_and_near(&view);
    let expected = content(far, LENS[far]);
    // A chunk that was fetched ahead is not cached before it is read.
    let sample = view.open(&path(far)).unwrap().sample();
    let order = view.session().submit(&dataset(&view), [sample]).unwrap();
    wait_until("it is fetched ahead", || session.status()[0].remote.count > 0);
    // The server checks the chunk when it arrives. That check must be over before the bit flips.
    std::thread::sleep(Duration::from_millis(300));
    assert!(session.flip(Rest::Arenas, &expected) > 0);
    assert!(read(&view, far).unwrap() != expected, "without `--verify-reads`, a node trusts its memory");
    wait_until("the damage is detected", || found(&session, Hop::Arena) == 1);
    wait_until("the chunk is fetched again", || read(&view, far).unwrap() == expected);
    wait_until_cached(&view, far);
    assert!(read(&view, far).unwrap() == expected);
    drop(order);
}

/// SEMANTICS: "Every reader detects it. The bad copy is dropped, and the reader gets the bytes from the block's origin. If the origin
/// cannot be read by itself, is gone, or has changed, the read fails with EIO, and the message names the block and the node."
/// SEMANTICS: "--verify-reads checks the chunks that a read touches."
#[test]
fn a_bit_that_flips_in_a_segment_is_detected_by_readers_on_other_nodes_and_by_verified_reads() {
    for (verify_reads, has_origin) in [(false, true), (false, false), (true, true), (true, false)] {
        let session = Inside::new(2, verify_reads);
        let source = session.write(&LENS);
        session.stage(&source).unwrap();
        let (here, there) = (session.view(0), session.view(1));
        let (_, near) = far_and_near(&here);
        let expected = content(near, LENS[near]);
        if !has_origin {
            std::fs::remove_dir_all(&source).unwrap();
        }
        assert_eq!(session.flip(Rest::Segments(session.data_dir(0)), &expected), 1);
        if !verify_reads {
            // The one exception to tenet 1 in SEMANTICS.md: without `--verify-reads`, a node trusts its own drive.
            assert!(read(&here, near).is_ok_and(|bytes| bytes != expected));
        }
        for view in if verify_reads { [&here, &there] } else { [&there, &here] } {
            match has_origin {
                true => assert!(read(view, near).unwrap() == expected),
                false => {
                    let reason = read(view, near).unwrap_err();
                    assert!(reason.contains("does not exist anymore"), "{reason}");
                }
            }
        }
        assert_eq!(session.status()[0].damaged[Hop::Owned as usize], 1);
        let verified = here.session().read_blocks(&dataset(&here), &all_blocks(&here), &mut |_| Ok(()));
        assert_eq!(verified.is_ok(), has_origin, "{verified:?}");
    }
}

/// In commit 2d0daba, a verified read of a bad cached block returned EIO forever.
///
/// SEMANTICS: "A bad cached block is dropped, and its reader gets the owner's bytes."
/// SEMANTICS: "All detected damage is counted in `dayfly_damaged_total`"
#[test]
fn a_bad_cached_block_is_dropped_and_fetched_from_its_owner() {
    let session = staged(true);
    let view = session.view(0);
    for number in numbers(&view, LENS.len(), false).into_iter().filter(|&number| LENS[number] >= 300) {
        let expected = content(number, LENS[number]);
        assert!(read(&view, number).unwrap() == expected);
        wait_until_cached(&view, number);
        let before = found(&session, Hop::Cached);
        assert_eq!(session.flip(Rest::Segments(session.data_dir(0)), &expected), 1);
        assert!(read(&view, number).unwrap() == expected, "file {number}");
        assert_eq!(found(&session, Hop::Cached), before + 1);
        if LENS[number] as u64 <= CHUNK_LEN {
            // A larger block is cached again at once only if all of its chunks are still in the arena.
            wait_until_cached(&view, number);
        }
        assert!(read(&view, number).unwrap() == expected, "file {number}, cached again");
        assert_eq!(found(&session, Hop::Cached), before + 1);
    }
}

/// `dayfly verify` uses `read_blocks`, which this test calls.
///
/// SEMANTICS: "`dayfly verify` checks everything, and replaces bad cached blocks."
#[test]
fn reading_whole_blocks_finds_bad_cached_blocks_and_replaces_them() {
    let session = staged(false);
    let view = session.view(0);
    let (far, _) = far_and_near(&view);
    assert!(read(&view, far).unwrap() == content(far, LENS[far]));
    wait_until_cached(&view, far);
    assert_eq!(session.flip(Rest::Segments(session.data_dir(0)), &content(far, LENS[far])), 1);
    let mut bad = 0;
    let mut see = |data: dayfly_client::BlockData<'_>| {
        bad += usize::from(data.was_bad);
        Ok(())
    };
    view.session().read_blocks(&dataset(&view), &all_blocks(&view), &mut see).unwrap();
    assert_eq!(bad, 1);
    assert_all_is_right(&session, 2);
}

/// SEMANTICS: "A cached block that cannot be read is dropped, and its reader gets the owner's bytes."
#[test]
fn a_cached_block_that_cannot_be_read_is_fetched_from_its_owner() {
    let session = staged(false);
    let view = session.view(0);
    let (far, _) = far_and_near(&view);
    let expected = content(far, LENS[far]);
    assert!(read(&view, far).unwrap() == expected);
    wait_until_cached(&view, far);
    // Truncate the file before these bytes. To a reader this looks like a drive error.
    session.cut(session.data_dir(0), &expected);
    assert!(read(&session.view(0), far).unwrap() == expected);
    assert_eq!(found(&session, Hop::Cached), 1);
}

/// SEMANTICS: "A process that finds a cached block bad reports it to its server, and the server reads
/// the block itself before it drops it. So a process with bad memory costs other processes nothing."
#[test]
fn a_good_cached_block_stays_even_if_a_process_calls_it_bad() {
    let session = staged(true);
    let view = session.view(0);
    let (far, near) = far_and_near(&view);
    assert!(read(&view, far).unwrap() == content(far, LENS[far]));
    wait_until_cached(&view, far);
    let dataset = dataset(&view);
    let blocks = [far, near].map(|number| {
        let sample = view.open(&path(number)).unwrap().sample();
        BlockId(dataset.catalog().sample(sample).unwrap().1.start)
    });
    let mut socket = UnixStream::connect(session.socket(0)).unwrap();
    send(&mut socket, &FromClient::Hello { version: VERSION });
    assert!(matches!(receive(&mut socket), FromServer::Welcome { .. }));
    let chunks: Vec<Chunk> = blocks.iter().map(|&block| Chunk { block, index: 0 }).collect();
    send(&mut socket, &FromClient::Fetch { dataset: dataset.id(), chunks, recheck: true });
    let FromServer::Fetched { chunks, is_last: true, .. } = receive(&mut socket) else { panic!("the answer came in parts") };
    assert_eq!(chunks, [(0, FetchedChunk::Here), (1, FetchedChunk::Here)]);
    // One message cannot make the server reread more than `RECHECKED_CHUNKS_MAX` chunks.
    let chunks = vec![Chunk { block: blocks[0], index: 0 }; RECHECKED_CHUNKS_MAX + 1];
    send(&mut socket, &FromClient::Fetch { dataset: dataset.id(), chunks, recheck: true });
    assert!(matches!(receive(&mut socket), FromServer::Refused { .. }));
    assert!(blocks.iter().all(|&block| dataset.is_here(block)));
    assert_eq!((found(&session, Hop::Cached), found(&session, Hop::Owned)), (0, 0));
}

/// SEMANTICS: "A node on which a dataset is visible can read all of it, even from owners on which it is not yet visible."
#[test]
fn a_visible_dataset_can_be_read_before_it_is_visible_on_its_owners() {
    let session = Arc::new(Inside::new(3, false));
    let folder = session.write(&LENS);
    let held = Arc::new(AtomicUsize::new(0));
    let count = held.clone();
    session.inject(move |seen| {
        let is_late =
            seen.peer.0 == 2 && asks(seen, |request| matches!(request, Request::NodeStageIn(NodeStageInRequest::Commit { .. })));
        count.fetch_add(usize::from(is_late), Ordering::SeqCst);
        is_late.then_some(Fault::Delay(Duration::from_secs(4)))
    });
    let staging = std::thread::spawn({
        let session = session.clone();
        move || session.stage(&folder).map(drop)
    });
    // The coordinator shows it last.
    let view = session.view(1);
    wait_until("it is visible on node 1", || !view.session().datasets().unwrap().is_empty());
    let visible_since = Instant::now();
    for (number, &len) in LENS.iter().enumerate() {
        let bytes = read(&view, number).unwrap_or_else(|reason| panic!("file {number}: {reason}"));
        assert!(bytes == content(number, len), "file {number}");
    }
    // If the reads took longer than the delay of the commits, the machine is too slow to prove anything.
    assert_eq!(held.load(Ordering::SeqCst), 1);
    if visible_since.elapsed() < Duration::from_secs(4) {
        assert!(session.view(0).session().datasets().unwrap().is_empty(), "it is not visible on node 0 yet");
        assert!(session.view(2).session().datasets().unwrap().is_empty(), "it is not visible on node 2 yet");
    }
    staging.join().unwrap().unwrap();
}

/// SEMANTICS: "A node that answers, but does not know the dataset (yet, or any longer), is treated like one that does not answer."
#[test]
fn a_dataset_can_be_read_although_an_owner_does_not_know_it() {
    for copies in [Copies::Number(1), Copies::Number(2)] {
        let mut session = Inside::new(3, false);
        session.copies = copies;
        session.stage(&session.write(&LENS)).unwrap();
        let view = session.view(1);
        session.forget_all(2);
        for (number, &len) in LENS.iter().enumerate() {
            let bytes = read(&view, number).unwrap_or_else(|reason| panic!("file {number}, {copies:?}: {reason}"));
            assert!(bytes == content(number, len), "file {number}, {copies:?}");
        }
    }
}

/// SEMANTICS: "A dataset is replaced node by node: on a node where the old dataset is still visible, all of it can be read."
#[test]
fn a_dataset_that_is_being_replaced_can_be_read_where_it_is_still_visible() {
    let session = Arc::new(Inside::new(3, false));
    session.stage(&session.write(&LENS)).unwrap();
    let other = session.write_in("other", &LENS, 100);
    session.inject(|seen| {
        let is_late =
            seen.peer.0 == 2 && asks(seen, |request| matches!(request, Request::NodeStageIn(NodeStageInRequest::Commit { .. })));
        is_late.then_some(Fault::Delay(Duration::from_secs(4)))
    });
    let first = session.view(1);
    let old = dataset(&first).id();
    let staging = std::thread::spawn({
        let session = session.clone();
        move || session.stage_over(&other, true).map(drop)
    });
    wait_until("the new dataset is visible on node 1", || {
        first.session().datasets().unwrap().first().is_some_and(|dataset| dataset.id() != old)
    });
    let late = session.view(2);
    for (number, &len) in LENS.iter().enumerate() {
        let bytes = read(&late, number);
        if late.session().datasets().unwrap().first().is_none_or(|dataset| dataset.id() != old) {
            // The new version is already visible, so the machine is too slow to prove anything.
            break;
        }
        assert!(bytes.unwrap_or_else(|reason| panic!("file {number}: {reason}")) == content(number, len), "file {number}");
    }
    staging.join().unwrap().unwrap();
    for (number, &len) in LENS.iter().enumerate() {
        assert!(read(&session.view(2), number).unwrap() == content(100 + number, len), "file {number}");
    }
}

/// SEMANTICS: "If one node fails to make a dataset visible, the dataset is withdrawn from all nodes. Until then, reads return its
/// bytes or `EIO`."
#[test]
fn a_dataset_withdrawn_while_partly_visible_gives_errors_and_no_wrong_bytes() {
    let session = Arc::new(Inside::new(3, false));
    let folder = session.write(&LENS);
    session.inject(|seen| {
        let is_commit = asks(seen, |request| matches!(request, Request::NodeStageIn(NodeStageInRequest::Commit { .. })));
        match seen.peer.0 {
            2 if is_commit => Some(Fault::Refuse),
            _ => None,
        }
    });
    let staging = std::thread::spawn({
        let session = session.clone();
        move || session.stage(&folder).map(drop)
    });
    let view = session.view(1);
    let (mut right, mut wrong) = (0, 0);
    while !staging.is_finished() {
        for (number, &len) in LENS.iter().enumerate() {
            match read(&view, number) {
                Ok(bytes) if bytes == content(number, len) => right += 1,
                Ok(_) => wrong += 1,
                Err(_) => {}
            }
        }
    }
    assert_eq!(wrong, 0, "besides {right} reads with the right bytes");
    assert!(staging.join().unwrap().is_err());
    assert!(view.session().datasets().unwrap().is_empty());
}

fn send(socket: &mut UnixStream, message: &FromClient) {
    let bytes = encode(message);
    socket.write_all(&(bytes.len() as u32).to_le_bytes()).unwrap();
    socket.write_all(&bytes).unwrap();
}

fn receive(socket: &mut UnixStream) -> FromServer {
    let mut len = [0; 4];
    socket.read_exact(&mut len).unwrap();
    let mut bytes = vec![0; u32::from_le_bytes(len) as usize];
    socket.read_exact(&mut bytes).unwrap();
    decode(&bytes).unwrap()
}

fn all_blocks(view: &View) -> Vec<BlockId> {
    (0..dataset(view).catalog().header().blocks).map(BlockId).collect()
}
