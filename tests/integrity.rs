//! One bit flips at each place where a sample's bytes rest or travel, and it is seen who notices: `docs/SEMANTICS.md`, "Checksums,
//! hop by hop".

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod harness;

use std::collections::HashSet;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dayfly_client::{Delivery, OnMissing, View};
use dayfly_meta::chunk::Chunk;
use dayfly_meta::id::BlockId;
use dayfly_meta::limits::{CHUNK_LEN, RECHECKED_CHUNKS_MAX};
use dayfly_meta::wire::local::{FetchedChunk, FromClient, FromServer};
use dayfly_meta::wire::peer::Request;
use dayfly_meta::wire::status::Hop;
use dayfly_meta::wire::{VERSION, decode, decode_sealed, encode};
use dayfly_transport::fault::{Fault, OutgoingRequest};
use harness::inside::{Inside, Rest};
use harness::samples::{content, dataset, numbers, path};
use harness::wait_until;

/// Samples of none, one and several batches, pieces and chunks. None is longer than what may wait to be kept (an eighth of the
/// arena), or a loaded machine would not keep it the first time.
const LENS: [usize; 12] =
    [0, 1, 1000, 70_000, 1 << 20, (1 << 20) + 1, 4 << 20, (4 << 20) + 1, 8_000_000, 300, 2_000_000, 5_000_000];

fn asks(seen: &OutgoingRequest<'_>, is_meant: impl Fn(&Request) -> bool) -> bool {
    decode_sealed::<Request>(seen.message).is_ok_and(|request| is_meant(&request))
}

fn ships(seen: &OutgoingRequest<'_>) -> bool {
    asks(seen, |request| matches!(request, Request::Ship { .. } | Request::ShipPiece { .. }))
}

fn reads(seen: &OutgoingRequest<'_>) -> bool {
    asks(seen, |request| matches!(request, Request::Read { .. }))
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

/// A session of two nodes in which all is staged in.
fn staged(verify_reads: bool) -> Inside {
    let session = Inside::new(2, verify_reads);
    session.stage(&session.write(&LENS)).unwrap();
    session
}

/// A file of more than 64 bytes that another node owns, and one whose blocks are the node's own.
fn far_and_near(view: &View) -> (usize, usize) {
    let one = |is_here| numbers(view, LENS.len(), is_here).into_iter().find(|&number| LENS[number] >= 300).unwrap();
    (one(false), one(true))
}

fn wait_until_kept(view: &View, number: usize) {
    let dataset = dataset(view);
    let file = view.open(&path(number)).unwrap();
    let (_, blocks) = dataset.catalog().sample(file.sample()).unwrap();
    wait_until("it is kept", || blocks.clone().all(|block| dataset.is_here(BlockId(block))));
}

#[test]
fn a_bit_that_flips_on_the_way_to_its_owner_is_sent_again() {
    let session = Inside::new(3, false);
    // Every batch and piece, when it is sent for the first time.
    let flipped = Mutex::new(HashSet::new());
    session.meddle(move |seen| {
        let is_meant = ships(seen) && flipped.lock().unwrap().insert(seen.message.to_vec());
        is_meant.then_some(Fault::FlipOnWire)
    });
    session.stage(&session.write(&LENS)).unwrap();
    assert!(found(&session, Hop::Shipped) > 0);
    session.leave_alone();
    assert_all_is_right(&session, 3);
    assert_eq!(found(&session, Hop::Fetched), 0);
}

#[test]
fn a_way_that_damages_every_batch_ends_the_stage_in_and_is_named() {
    let session = Inside::new(2, false);
    session.meddle(|seen| ships(seen).then_some(Fault::FlipOnWire));
    let reason = session.stage(&session.write(&LENS)).unwrap_err();
    assert!(reason.contains("damaged 3 times") && reason.contains("node"), "{reason}");
    session.leave_alone();
    assert!(session.view(1).session().datasets().unwrap().is_empty());
}

#[test]
fn a_bit_that_flips_in_a_workers_buffer_ends_the_stage_in_and_names_the_node() {
    let session = Inside::new(2, false);
    let shipped = AtomicU64::new(0);
    session.meddle(move |seen| {
        let is_first = ships(seen) && shipped.fetch_add(1, Ordering::Relaxed) == 0;
        is_first.then_some(Fault::FlipInBuffer)
    });
    let reason = session.stage(&session.write(&LENS)).unwrap_err();
    assert!(reason.contains("changed in the memory of node"), "{reason}");
}

#[test]
fn a_bit_that_flips_on_the_way_to_its_reader_is_fetched_again() {
    let session = staged(false);
    // The first chunk of each answer, when it comes for the first time.
    let flipped = Mutex::new(HashSet::new());
    session.meddle(move |seen| match decode_sealed::<Request>(seen.message) {
        Ok(Request::Read { chunks, .. }) if flipped.lock().unwrap().insert(chunks[0]) => Some(Fault::FlipOnWire),
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

/// On 2d0daba such bytes were read as good, and kept.
#[test]
fn a_way_that_damages_every_answer_gives_eio_that_names_the_owner_and_nothing_is_kept() {
    let session = staged(false);
    session.meddle(|request| reads(request).then_some(Fault::FlipOnWire));
    let view = session.view(0);
    for number in numbers(&view, LENS.len(), false) {
        let reason = read(&view, number).unwrap_err();
        assert!(reason.contains("node 1") && reason.contains("damaged 2 times") && reason.contains("checksum"), "{reason}");
        let samples = [view.open(&path(number)).unwrap().sample()];
        let mut batch = view.session().read_many(&dataset(&view), &samples, Delivery::Given, OnMissing::Tell).unwrap();
        assert!(batch.next().unwrap().unwrap().bytes.is_err());
    }
    assert_eq!(session.status()[0].kept.count, 0);
    session.leave_alone();
    assert_all_is_right(&session, 2);
}

#[test]
fn a_bit_that_flips_in_the_arena_is_seen_before_it_is_kept_and_by_verified_reads() {
    let session = staged(true);
    // What is prefetched is not kept before it is read; here nothing may be kept at all, so that the arena is what is read.
    tune_cache(&session, 0);
    let view = session.view(0);
    let (far, _) = far_and_near(&view);
    let expected = content(far, LENS[far]);
    assert!(read(&view, far).unwrap() == expected);
    assert!(session.flip(Rest::Arenas, &expected) > 0);
    assert!(read(&view, far).unwrap() == expected, "it was fetched again");
    assert_eq!(found(&session, Hop::Arena), 1);
    // Views of many samples are compared too.
    assert!(session.flip(Rest::Arenas, &expected) > 0);
    let samples = [view.open(&path(far)).unwrap().sample()];
    let mut batch = view.session().read_many(&dataset(&view), &samples, Delivery::Given, OnMissing::Fail).unwrap();
    assert!(batch.next().unwrap().unwrap().bytes.unwrap() == expected);
}

#[test]
fn a_bit_that_flips_in_a_segment_is_seen_by_readers_on_other_nodes_and_by_verified_reads() {
    for verify_reads in [false, true] {
        let session = staged(verify_reads);
        let (here, there) = (session.view(0), session.view(1));
        let (_, near) = far_and_near(&here);
        let expected = content(near, LENS[near]);
        assert_eq!(session.flip(Rest::Segments(session.data_dir(0)), &expected), 1);
        let reason = read(&there, near).unwrap_err();
        assert!(reason.contains("node 0 sent it damaged"), "{reason}");
        let read_here = read(&here, near);
        match verify_reads {
            // The tenet's one exception, of which SEMANTICS tells: its own drive is believed, unless it is told not to be.
            false => assert!(read_here.is_ok_and(|bytes| bytes != expected)),
            true => {
                let reason = read_here.unwrap_err();
                assert!(reason.contains("node 0, which owns it, has a bad copy"), "{reason}");
                assert_eq!(session.status()[0].damaged[Hop::Owned as usize], 1);
            }
        }
        let verified = here.session().read_blocks(&dataset(&here), &all_blocks(&here), &mut |_| Ok(()));
        assert!(verified.unwrap_err().to_string().contains("has a bad copy"));
    }
}

/// On 2d0daba a verified read of a bad kept copy was EIO for ever.
#[test]
fn a_bad_kept_copy_is_given_up_and_fetched_from_its_owner() {
    let session = staged(true);
    let view = session.view(0);
    for number in numbers(&view, LENS.len(), false).into_iter().filter(|&number| LENS[number] >= 300) {
        let expected = content(number, LENS[number]);
        assert!(read(&view, number).unwrap() == expected);
        wait_until_kept(&view, number);
        let before = found(&session, Hop::Cached);
        assert_eq!(session.flip(Rest::Segments(session.data_dir(0)), &expected), 1);
        assert!(read(&view, number).unwrap() == expected, "file {number}");
        assert_eq!(found(&session, Hop::Cached), before + 1);
        if LENS[number] as u64 <= CHUNK_LEN {
            // A larger one is kept again at once only where all of its chunks are in the arena still.
            wait_until_kept(&view, number);
        }
        assert!(read(&view, number).unwrap() == expected, "file {number}, kept again");
        assert_eq!(found(&session, Hop::Cached), before + 1);
    }
}

/// `verify` reads through this.
#[test]
fn reading_whole_blocks_finds_bad_kept_copies_and_replaces_them() {
    let session = staged(false);
    let view = session.view(0);
    let (far, _) = far_and_near(&view);
    assert!(read(&view, far).unwrap() == content(far, LENS[far]));
    wait_until_kept(&view, far);
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

#[test]
fn a_kept_copy_that_cannot_be_read_is_fetched_from_its_owner() {
    let session = staged(false);
    let view = session.view(0);
    let (far, _) = far_and_near(&view);
    let expected = content(far, LENS[far]);
    assert!(read(&view, far).unwrap() == expected);
    wait_until_kept(&view, far);
    // Its bytes are gone from the file: for a reader that is a drive's error.
    session.cut(session.data_dir(0), &expected);
    assert!(read(&session.view(0), far).unwrap() == expected);
    assert_eq!(found(&session, Hop::Cached), 1);
}

/// A process whose own memory is bad costs nobody a good copy: the server looks for itself.
#[test]
fn a_good_copy_that_a_process_calls_bad_stays() {
    let session = staged(true);
    let view = session.view(0);
    let (far, near) = far_and_near(&view);
    assert!(read(&view, far).unwrap() == content(far, LENS[far]));
    wait_until_kept(&view, far);
    let dataset = dataset(&view);
    let blocks = [far, near].map(|number| {
        let sample = view.open(&path(number)).unwrap().sample();
        BlockId(dataset.catalog().sample(sample).unwrap().1.start)
    });
    let mut socket = UnixStream::connect(session.socket(0)).unwrap();
    tell(&mut socket, &FromClient::Hello { version: VERSION });
    assert!(matches!(hear(&mut socket), FromServer::Welcome { .. }));
    let chunks: Vec<Chunk> = blocks.iter().map(|&block| Chunk { block, index: 0 }).collect();
    tell(&mut socket, &FromClient::Fetch { dataset: dataset.id(), chunks, recheck: true });
    let FromServer::Fetched { chunks, is_last: true, .. } = hear(&mut socket) else { panic!("not all at once") };
    assert_eq!(chunks, [(0, FetchedChunk::Here), (1, FetchedChunk::Here)]);
    // Nor can one message have much read again.
    let chunks = vec![Chunk { block: blocks[0], index: 0 }; RECHECKED_CHUNKS_MAX + 1];
    tell(&mut socket, &FromClient::Fetch { dataset: dataset.id(), chunks, recheck: true });
    assert!(matches!(hear(&mut socket), FromServer::Refused { .. }));
    assert!(blocks.iter().all(|&block| dataset.is_here(block)));
    assert_eq!((found(&session, Hop::Cached), found(&session, Hop::Owned)), (0, 0));
}

/// Promise: "while it is being shown, for some milliseconds one node may show it before another". Whoever it is shown to can read it.
#[test]
fn a_dataset_can_be_read_where_it_is_shown_before_its_owner_shows_it() {
    let session = Arc::new(Inside::new(3, false));
    let folder = session.write(&LENS);
    let held = Arc::new(AtomicUsize::new(0));
    let count = held.clone();
    session.meddle(move |seen| {
        let is_late = seen.peer.0 != 0 && asks(seen, |request| matches!(request, Request::Commit { .. }));
        count.fetch_add(usize::from(is_late), Ordering::SeqCst);
        is_late.then_some(Fault::Delay(Duration::from_secs(4)))
    });
    let staging = std::thread::spawn({
        let session = session.clone();
        move || session.stage(&folder).map(drop)
    });
    let view = session.view(0);
    wait_until("node 0 shows it", || !view.session().datasets().unwrap().is_empty());
    let shown = Instant::now();
    for (number, &len) in LENS.iter().enumerate() {
        let bytes = read(&view, number).unwrap_or_else(|reason| panic!("file {number}: {reason}"));
        assert!(bytes == content(number, len), "file {number}");
    }
    // If this took longer than the others were held back, nothing was seen; the machine is too slow to tell.
    assert_eq!(held.load(Ordering::SeqCst), 2);
    if shown.elapsed() < Duration::from_secs(4) {
        assert!(session.view(1).session().datasets().unwrap().is_empty(), "node 1 has not shown it yet");
    }
    staging.join().unwrap().unwrap();
}

/// Until a node shows the new dataset it reads the old one, also what lies on nodes that show the new one already.
#[test]
fn a_dataset_that_is_being_replaced_can_be_read_where_it_is_still_shown() {
    let session = Arc::new(Inside::new(3, false));
    session.stage(&session.write(&LENS)).unwrap();
    let other = session.write_in("other", &LENS, 100);
    session.meddle(|seen| {
        let is_late = seen.peer.0 != 0 && asks(seen, |request| matches!(request, Request::Commit { .. }));
        is_late.then_some(Fault::Delay(Duration::from_secs(4)))
    });
    let first = session.view(0);
    let old = dataset(&first).id();
    let staging = std::thread::spawn({
        let session = session.clone();
        move || session.stage_over(&other, true).map(drop)
    });
    wait_until("node 0 shows the new one", || {
        first.session().datasets().unwrap().first().is_some_and(|dataset| dataset.id() != old)
    });
    let late = session.view(1);
    for (number, &len) in LENS.iter().enumerate() {
        let bytes = read(&late, number);
        if late.session().datasets().unwrap().first().is_none_or(|dataset| dataset.id() != old) {
            // A machine so slow that the new one is shown meanwhile tells nothing.
            break;
        }
        assert!(bytes.unwrap_or_else(|reason| panic!("file {number}: {reason}")) == content(number, len), "file {number}");
    }
    staging.join().unwrap().unwrap();
    for (number, &len) in LENS.iter().enumerate() {
        assert!(read(&session.view(1), number).unwrap() == content(100 + number, len), "file {number}");
    }
}

/// A dataset that one node has shown and that is then undone: errors, never other bytes.
#[test]
fn a_dataset_that_is_undone_after_some_have_shown_it_gives_errors_and_no_wrong_bytes() {
    let session = Arc::new(Inside::new(3, false));
    let folder = session.write(&LENS);
    session.meddle(|seen| {
        let is_commit = asks(seen, |request| matches!(request, Request::Commit { .. }));
        match seen.peer.0 {
            1 if is_commit => Some(Fault::Delay(Duration::from_secs(1))),
            2 if is_commit => Some(Fault::Refuse),
            _ => None,
        }
    });
    let staging = std::thread::spawn({
        let session = session.clone();
        move || session.stage(&folder).map(drop)
    });
    let view = session.view(0);
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
    assert_eq!(wrong, 0, "beside {right} that were right");
    assert!(staging.join().unwrap().is_err());
    assert!(view.session().datasets().unwrap().is_empty());
}

fn tell(socket: &mut UnixStream, message: &FromClient) {
    let bytes = encode(message);
    socket.write_all(&(bytes.len() as u32).to_le_bytes()).unwrap();
    socket.write_all(&bytes).unwrap();
}

fn hear(socket: &mut UnixStream) -> FromServer {
    let mut len = [0; 4];
    socket.read_exact(&mut len).unwrap();
    let mut bytes = vec![0; u32::from_le_bytes(len) as usize];
    socket.read_exact(&mut bytes).unwrap();
    decode(&bytes).unwrap()
}

fn all_blocks(view: &View) -> Vec<BlockId> {
    (0..dataset(view).catalog().header().blocks).map(BlockId).collect()
}

fn tune_cache(session: &Inside, bytes: u64) {
    use dayfly_meta::wire::control::Command;
    use dayfly_meta::wire::status::Policy;
    let policy = Policy { cache_bytes: Some(bytes), ..Policy::default() };
    session.view(0).session().control(Command::Tune(policy), &mut drop).unwrap();
}
