//! Every bound, with its reason; deadlines are in [`crate::deadlines`]. A full queue pushes back; nothing grows without a line
//! here. Relations between bounds are asserted at compile time, at the end.

use std::time::Duration;

/// A block is the unit of placement: a larger sample is cut, so that one node's disk or link is not its bottleneck.
pub const BLOCK_SIZE_MAX: u64 = 64 << 20;
/// A sample's blocks and the checksums of its chunks are listed in memory while it is staged in: 8 and 4 bytes each.
pub const SAMPLE_SIZE_MAX: u64 = 64 << 40;
/// Blocks at least this long start on a page, so that they can be mapped in place and read with direct I/O.
pub const PAGE_BLOCK_SIZE_MIN: u64 = 64 << 10;
/// The page that such blocks, the catalog's columns and a segment's header keep to.
pub const PAGE_SIZE: u64 = 4096;

/// Blocks travel between nodes, and lie in the arena, in pieces of this: a reader uses the first while the next are under way.
pub const CHUNK_LEN: u64 = 4 << 20;

/// One name, as `NAME_MAX` of Linux: a longer one could not be exported.
pub const NAME_LEN_MAX: usize = 255;
/// One path within a dataset, as `PATH_MAX` of Linux.
pub const PATH_LEN_MAX: usize = 4096;
/// A symlink's target, as `PATH_MAX` of Linux.
pub const SYMLINK_LEN_MAX: usize = 4095;
/// Symlinks followed in one lookup, as Linux does before `ELOOP`.
pub const SYMLINKS_FOLLOWED_MAX: usize = 40;
/// A tar's extended header or long name: real ones are hundreds of bytes; more is an attack on our memory.
pub const TAR_EXTENSION_LEN_MAX: u64 = 1 << 20;
/// What global extended headers may say, for it goes from worker to worker with where they are in the archive.
pub const TAR_GLOBALS_LEN_MAX: usize = 16 << 10;
/// Memory that a decoder may take for its window, xz and zstd alike: `xz -9` needs 65 MiB, `zstd --long=27` 128 MiB.
pub const DECODER_MEMORY_MAX: u64 = 256 << 20;

/// Sources of one stage-in, which the coordinator keeps in memory, and the paths below one folder that a glob still has to look at.
pub const SOURCES_MAX: usize = 1 << 20;
/// The paths of those sources, in bytes.
pub const SOURCE_PATHS_LEN_MAX: usize = 256 << 20;
/// A `@LIST`: with real names it is shorter than this when it names as many sources as may be.
pub const LIST_LEN_MAX: u64 = 256 << 20;

/// Entries (names) of one dataset: they are numbered in 32 bits, and 0 stays free in the index.
pub const ENTRIES_MAX: u64 = (u32::MAX - 1) as u64;
/// What a hard link takes of the coordinator's memory while hard links are resolved, beside its name and its target, each of them three times.
pub const HARD_LINK_MEMORY: usize = 600;
/// Directories of one dataset, when `--max-directories` does not say: so many,
pub const DIRECTORIES_MAX_DEFAULT: u64 = 1_000_000;
/// and so many more for each file, for a small archive can make millions of them.
pub const DIRECTORIES_PER_FILE_MAX: u64 = 4;
/// Members below a path that is a directory in one place and something else in another: replayed in the coordinator's memory.
pub const CONTESTED_MEMBERS_MAX: usize = 1_000_000;
/// Names of skipped, refused or renamed members that a summary shows; all are counted.
pub const NOTES_SHOWN_MAX: usize = 20;
/// Members that `--keep-going` left out and that a summary names; all are counted.
pub const SKIPPED_SHOWN_MAX: usize = 500;
/// Characters of each note.
pub const NOTE_LEN_MAX: usize = 400;

/// Nodes of a session; catalogs name an owner in 16 bits.
pub const NODES_MAX: usize = 4096;
/// Virtual nodes of a node of mean capacity. Measured over 4 equal nodes: 160 gave 17 % over the mean, 512 10 %, 2,048 5 %.
pub const VIRTUAL_NODES: usize = 2048;
/// Datasets of a session: each costs every client a few descriptors.
pub const DATASETS_MAX: usize = 1024;
/// Drives (data dirs) of a node: a location names one in 8 bits.
pub const DRIVES_MAX: usize = 64;
/// Processes attached to one server.
pub const CLIENTS_MAX: usize = 4096;

/// A peer frame's body: liveness never waits longer than this many bytes behind bulk.
pub const FRAME_BODY_LEN_MAX: usize = 1 << 20;
/// A message's part of a frame body.
pub const MESSAGE_LEN_MAX: usize = FRAME_BODY_LEN_MAX - 64 * 1024;
/// A message on the local socket, either way.
pub const LOCAL_MESSAGE_LEN_MAX: usize = 1 << 20;
/// Blocks named in one request; 4 bytes each.
pub const BATCH_BLOCKS_MAX: usize = 1024;
/// Bytes that one shipped batch, or one piece of a large block, carries.
pub const BATCH_LEN_MAX: usize = 1 << 20;
/// A batch that arrives damaged is sent so often before the stage-in fails.
pub const SHIP_ATTEMPTS_MAX: usize = 3;
/// A chunk that arrives damaged is fetched so often before its read fails.
pub const FETCH_ATTEMPTS_MAX: usize = 2;
/// Chunks of which a process says in one request that its node's copies are bad: the server reads each of them again.
pub const RECHECKED_CHUNKS_MAX: usize = 16;
/// How often a process has its server look at a bad copy before its read fails.
pub const RECHECKS_MAX: usize = 2;
/// Stage-ins that run at once in a session; more wait.
pub const STAGE_INS_MAX: usize = 4;
/// Stage-ins that other nodes than the coordinator have asked for, those that wait among them.
pub const FORWARDED_STAGE_INS_MAX: usize = 64;
/// Memory of a server for all its stage-ins, when `--stage-in-memory` is not given.
pub const STAGE_IN_MEMORY_DEFAULT: u64 = 1 << 30;
/// The least of it: one worker of each stage-in that may run at once.
pub const STAGE_IN_MEMORY_MIN: u64 = 256 << 20;
/// See [`STAGE_IN_MEMORY_MIN`]: what each further worker of a server needs at least, for each of the stage-ins that may run at once: its
/// batches, the members that are not in a run yet, and what is decoded ahead.
pub const STAGE_IN_MEMORY_PER_WORKER_MIN: u64 = (STAGE_INS_MAX * (BATCHES_PER_WORKER_MIN + 2) * BATCH_LEN_MAX) as u64;
/// The least memory for stage-ins of a server that has so many workers.
pub const fn stage_in_memory_min(workers: usize) -> u64 {
    let shared = (STAGE_INS_MAX * (SHUFFLE_LEN_MAX + BATCHES_LANDING_MAX * BATCH_LEN_MAX + PATHS_LEN_MIN)) as u64;
    let all = shared + workers as u64 * STAGE_IN_MEMORY_PER_WORKER_MIN;
    if all > STAGE_IN_MEMORY_MIN { all } else { STAGE_IN_MEMORY_MIN }
}
/// The most workers for which so much memory is enough.
pub const fn stage_in_workers_max(memory: u64) -> usize {
    let mut workers = 1;
    while workers < WORKERS_MAX && stage_in_memory_min(workers + 1) <= memory {
        workers += 1;
    }
    workers
}
/// Batches of one stage-in worker, open or in flight, at most: with all taken, the worker waits for a slow owner.
pub const BATCHES_PER_WORKER_MAX: usize = 32;
/// And at least, however little memory there is.
pub const BATCHES_PER_WORKER_MIN: usize = 3;
/// Of those, in flight: the rest is being filled.
pub const BATCHES_IN_FLIGHT_MAX: usize = 8;
/// Batches that a server lands at once from all its peers, beside those that wait to be written.
pub const BATCHES_LANDING_MAX: usize = 16;
/// Blocks that wait in an owner's memory to be written in shuffled order, in bytes.
pub const SHUFFLE_LEN_MAX: usize = 16 << 20;
/// Room is set aside on a drive in steps of this, so that what has been taken in can always be written.
pub const RESERVATION_STEP: u64 = 16 << 20;
/// Room on a drive that copies of other nodes' blocks leave to what a stage-in writes beside blocks: this part of what the drive was
/// given, and at most [`HEADROOM_MAX`] bytes.
pub const HEADROOM_SHARE: u64 = 16;
/// See [`HEADROOM_SHARE`].
pub const HEADROOM_MAX: u64 = 256 << 20;
/// Bytes of a stage-in on their way to one drive, beyond which it waits for the drive: so the sync at its end is short, and the page
/// cache stays the job's.
pub const UNSYNCED_LEN_MAX: u64 = 64 << 20;
/// Stage-in workers of a server: each reads one unit at a time.
pub const WORKERS_MAX: usize = 16;
/// Threads that decode one compressed source: what they give is taken by one worker, which is no faster than a few of them.
pub const DECODERS_MAX: usize = 4;
/// Bytes of member records that a worker sorts in memory before it writes them out as a run.
pub const RUN_LEN_MAX: usize = 32 << 20;
/// Memory for the heads of all runs while they are merged; each has at most and at least this much.
pub const MERGE_MEMORY: u64 = 64 << 20;
/// See [`MERGE_MEMORY`].
pub const RUN_READ_AHEAD_MAX: u64 = 256 << 10;
/// See [`MERGE_MEMORY`].
pub const RUN_READ_AHEAD_MIN: u64 = 16 << 10;
/// A plain tar is cut into ranges of at least this: where one begins, up to a member is read twice.
pub const RANGE_LEN_MIN: u64 = 8 << 20;
/// And at most this, so that no one is left with much when the others are done.
pub const RANGE_LEN_MAX: u64 = 64 << 20;
/// So far before its range a worker begins to look for headers, for one that belongs to the next lies there.
pub const TAR_LOOK_BACK: u64 = 4 << 10;
/// Pieces of a sparse file in a tar, 16 bytes each in memory.
pub const SPARSE_PIECES_MAX: usize = 1 << 20;
/// A zip within an archive is put aside while it is read; a longer one stays a file.
pub const NESTED_ZIP_LEN_MAX: u64 = 1 << 30;
/// Memory of a decoder of a zip's member or of an archive within an archive: several may run at once.
pub const NESTED_DECODER_MEMORY_MAX: u64 = 64 << 20;
/// Archives within archives within archives: deeper ones stay files.
pub const NESTED_DEPTH_MAX: usize = 4;
/// Bytes that decoders may be ahead of the worker that takes their output, all of one source together.
pub const DECODED_AHEAD_MAX: usize = 32 << 20;
/// Entries and bytes of a directory tree that make one unit.
pub const UNIT_FILES_MAX: usize = 1024;
/// See [`UNIT_FILES_MAX`].
pub const UNIT_BYTES_MAX: u64 = 64 << 20;
/// Units that are no larger than this are handed out several at a time: what a worker has is shipped after the last.
pub const SMALL_UNIT_BYTES_MAX: u64 = 1 << 20;
/// So many.
pub const SMALL_UNITS_MAX: usize = 128;
/// Names in one unit: with records about them a unit must fit a message.
pub const UNIT_NAMES_LEN_MAX: usize = 256 << 10;

/// Requests that one peer may have open on one connection.
pub const PEER_REQUESTS_MAX: usize = 256;
/// Requests to one peer hold at most this part of the memory that their bytes land in, until nothing can land there any more.
pub const PEER_SHARE: u64 = 4;
/// A peer is stuck, and asked no more, while requests past their deadlines hold more than this part,
pub const STUCK_SHARE: u64 = 16;
/// or are so many.
pub const STUCK_REQUESTS_MAX: u32 = 16;
/// So often a pull is asked again on another link, when its own has ended.
pub const MOVES_MAX: u32 = 3;
/// Bulk connections from a server to each peer.
pub const BULK_LINKS: usize = 2;
/// Handshakes under way on a listener; with more, the oldest is given up: members speak at once, so it is a stranger's.
pub const HANDSHAKES_MAX: usize = 512;
/// A message between who starts servers and a server; the longest is the roster.
pub const CHANNEL_MESSAGE_LEN_MAX: usize = 1 << 20;
/// Arena of a server when `--memory` is not given.
pub const ARENA_LEN_DEFAULT: u64 = 256 << 20;
/// The arena gives out room in units of a cache line, so that neighbours never share one.
pub const ARENA_UNIT: u64 = 64;
/// The smallest arena: some chunks land while others are read.
pub const ARENA_LEN_MIN: u64 = 8 * CHUNK_LEN;
/// The leases of one process take at most this part of the arena, and all but this part of it those of all processes together. A
/// connection that wants more gives some back first. One without leases always gets a chunk.
pub const LEASE_SHARE: u64 = 4;
/// Bytes that one request to an owner asks for: what has come can be used while the next is under way.
pub const FETCH_PART_LEN: u64 = CHUNK_LEN;
/// What is fetched ahead takes at most this part of the arena, when `tune --prefetch-memory` says nothing else.
pub const PREFETCH_SHARE: u64 = 2;
/// Samples of all orders of a node together, 4 bytes each: an epoch of a large data set, or of a smaller one for each of many readers.
pub const ORDER_SAMPLES_MAX: usize = 1 << 27;
/// Samples in one message of an order.
pub const ORDER_PART_SAMPLES: usize = 64 << 10;
/// Orders that are read ahead at once on a node; more wait for those before them to end.
pub const ORDERS_MAX: usize = 64;
/// Requests for blocks that are fetched ahead, under way to one owner, at most.
pub const PREFETCH_REQUESTS_MAX: usize = 16;
/// Bytes on their way to be kept on local drives; what comes while so many wait is not kept this time.
pub const CACHE_QUEUE_LEN_MAX: u64 = 64 << 20;
/// Copies of other nodes' blocks are synced, and then found by processes, once there are so many bytes of them,
pub const CACHE_SYNC_LEN: u64 = 64 << 20;
/// or once the first of them is so old.
pub const CACHE_SYNC_INTERVAL: Duration = Duration::from_secs(1);
/// Bytes read ahead behind a reader that goes through a large file, at most.
pub const READ_AHEAD_LEN_MAX: u64 = 32 << 20;
/// Processes of a node that `status` names, those that read most; all are counted.
pub const CLIENTS_SHOWN_MAX: usize = 32;
/// Answers that read drives for peers at once; each peer has its turn.
pub const DRIVE_READERS_MAX: usize = 16;

/// Receives for messages that all of a card's queue pairs share; a message that finds none is sent again by the card.
pub const RDMA_RECEIVES: u32 = 512;
/// Longest request by RDMA: one for [`BATCH_BLOCKS_MAX`] blocks fits.
pub const RDMA_REQUEST_LEN_MAX: u32 = 32 << 10;
/// Completions that a card's queue has room for; work that could overflow it waits.
pub const RDMA_COMPLETIONS_MAX: u32 = 16 << 10;
/// Operations posted on one queue pair.
pub const RDMA_SEND_DEPTH: u32 = 128;
/// Longest operation: longer ones keep others of the card waiting.
pub const RDMA_WRITE_LEN_MAX: u32 = 1 << 20;
/// Bytes of the operations posted on one queue pair.
pub const RDMA_BYTES_IN_FLIGHT_MAX: u64 = 4 << 20;
/// Requests of one node that wait for another's answers by RDMA.
pub const RDMA_WINDOW: u32 = 64;
/// Registered memory that bytes take their way through from a file to the card.
pub const RDMA_STAGING_LEN: u64 = 32 << 20;
/// Registered memory for requests and their answers.
pub const RDMA_MESSAGES_LEN: u64 = 16 << 20;
/// A pair whose queue pairs failed so often in a row is told of as one that goes by TCP,
pub const RDMA_FAILURES_MAX: u32 = 3;
/// and tries again ever less often, in the end after this.
pub const RDMA_RETRY_INTERVAL: Duration = Duration::from_secs(60);
/// A process maps at most this much of its node's segments; the rest is `pread`. Page tables cost 2 MiB a mapped GiB.
pub const SEGMENT_MAP_BYTES_MAX: u64 = 4 << 30;
/// Segments are mapped piece by piece, as they are read.
pub const SEGMENT_WINDOW_LEN: u64 = 64 << 20;
/// Connections to its server that a process keeps for its next request; more are opened and closed as they are needed.
pub const IDLE_CONNECTIONS_MAX: usize = 4;
/// A file handed to a program that cannot use this library is copied into memory up to this size, else onto a data dir.
pub const MEMORY_COPY_LEN_MAX: u64 = 64 << 20;

/// The kernel asks a silent asker for a sign of life so often,
pub const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// and ends the connection after so many without an answer.
pub const KEEP_ALIVE_PROBES: u32 = 3;
/// A client that waits for its server looks up so often within the time that it waits for a heartbeat.
pub const HEARTBEAT_POLLS: u32 = 20;
/// All servers ready at `up`, when `--start-timeout` does not say.
pub const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Sessions of so many nodes try each pair of them at the start; of more, each node tries those 1, 2, 4, 8 ... places on.
pub const PAIRS_ALL_TRIED_NODES: usize = 16;
/// Nodes that a node tells who all are, and how to reach them; and servers that a server starts, where the launcher has no tree of its own.
pub const TREE_WIDTH: usize = 16;
/// Pairs that do not reach each other as they should, named at the start; all show in `status`.
pub const FALLEN_BACK_SHOWN_MAX: usize = 16;
/// Servers and supervisors look this often whether their files still have their names.
pub const FOLDER_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// And this often make them look young, for those who remove what looks old from `/tmp`: they count in days.
pub const FOLDER_TOUCH_INTERVAL: Duration = Duration::from_secs(3600);
/// What was started to start servers may take so long to end once they have.
pub const LAUNCHER_END_TIMEOUT: Duration = Duration::from_secs(5);
/// A server's way from `down` to its end.
pub const DOWN_TIMEOUT: Duration = Duration::from_secs(20);
/// Paths that two sources may have in common, of which the coordinator asks all workers in one stage-in: one that is confirmed ends it.
pub const QUESTIONS_MAX: usize = 64;
/// Of these, told by an owner at a time.
pub const SUSPECTS_REPORTED_MAX: usize = 16;
/// Answers to them that a node has to tell, and that the coordinator keeps for one of them.
pub const SIGHTINGS_MAX: usize = 16;
/// An owner's table of hashes of paths takes this part of a stage-in's share of the memory, and at least the second.
pub const PATHS_SHARE: usize = 16;
/// See [`PATHS_SHARE`].
pub const PATHS_LEN_MIN: usize = 1 << 20;
/// What a node waits for, when a stage-in stands still: so many things are told, [`NOTE_LEN_MAX`] characters each.
pub const WAITS_REPORTED_MAX: usize = 4;

const _: () = {
    // What a card is made to know beside the arena and stage-ins, whatever the number of peers.
    assert!(RDMA_STAGING_LEN + RDMA_MESSAGES_LEN + (RDMA_RECEIVES * RDMA_REQUEST_LEN_MAX) as u64 <= 64 << 20);
    // A queue pair's ring has at most 128 bytes an operation; each pair of nodes has two: one to ask by, one to answer by.
    assert!(NODES_MAX as u64 * (RDMA_WINDOW + RDMA_SEND_DEPTH + 2) as u64 * 128 <= 128 << 20);
    // Every queue pair's work may complete at once, as far as it was posted; work for which there is no room waits.
    assert!(RDMA_COMPLETIONS_MAX >= RDMA_RECEIVES + RDMA_SEND_DEPTH);
    assert!(BLOCK_SIZE_MAX.is_multiple_of(PAGE_SIZE) && PAGE_BLOCK_SIZE_MIN.is_multiple_of(PAGE_SIZE));
    assert!(BLOCK_SIZE_MAX.is_multiple_of(CHUNK_LEN) && BLOCK_SIZE_MAX / CHUNK_LEN <= 16, "its chunks fit a word's bits");
    assert!(CHUNK_LEN.is_multiple_of(PAGE_SIZE) && CHUNK_LEN >= PAGE_BLOCK_SIZE_MIN);
    assert!(CHUNK_LEN.is_multiple_of(BATCH_LEN_MAX as u64), "a piece of a large block lies in one chunk");
    assert!(RECHECKED_CHUNKS_MAX as u64 * CHUNK_LEN <= BLOCK_SIZE_MAX, "one request has at most a block read again");
    assert!(ARENA_LEN_MIN / LEASE_SHARE >= 2 * CHUNK_LEN, "a client reads one chunk while another lands");
    assert!(ORDER_PART_SAMPLES * 8 <= LOCAL_MESSAGE_LEN_MAX, "a part of an order fits a message");
    assert!(MESSAGE_LEN_MAX < FRAME_BODY_LEN_MAX);
    assert!(BATCH_BLOCKS_MAX * 64 <= MESSAGE_LEN_MAX, "a batch's table fits a message");
    assert!(BATCH_BLOCKS_MAX * 64 <= LOCAL_MESSAGE_LEN_MAX, "its answer too");
    assert!(BATCHES_PER_WORKER_MIN <= BATCHES_PER_WORKER_MAX);
    assert!(SIGHTINGS_MAX * (PATH_LEN_MAX + 64) + QUESTIONS_MAX * 16 < MESSAGE_LEN_MAX / 2, "a report fits a message");
    assert!(stage_in_workers_max(STAGE_IN_MEMORY_DEFAULT) == WORKERS_MAX && stage_in_memory_min(1) == STAGE_IN_MEMORY_MIN);
    assert!(SKIPPED_SHOWN_MAX * NOTE_LEN_MAX * 4 < LOCAL_MESSAGE_LEN_MAX, "a summary fits a message");
    assert!(RUN_READ_AHEAD_MAX < RUN_LEN_MAX as u64 && RUN_READ_AHEAD_MAX <= BATCH_LEN_MAX as u64);
    assert!(RANGE_LEN_MIN.is_multiple_of(512) && RANGE_LEN_MAX.is_multiple_of(512) && TAR_LOOK_BACK.is_multiple_of(512));
    assert!(RESERVATION_STEP.is_multiple_of(PAGE_SIZE));
    assert!(SMALL_UNIT_BYTES_MAX < RANGE_LEN_MIN, "a range is not small");
    assert!(UNIT_NAMES_LEN_MAX + UNIT_FILES_MAX * 128 <= MESSAGE_LEN_MAX, "a unit fits a message");
    assert!(FORWARDED_STAGE_INS_MAX * 2 <= PEER_REQUESTS_MAX, "those who only wait to be told leave room for other requests");
    assert!(NODES_MAX <= u16::MAX as usize && DRIVES_MAX <= 254);
    assert!(SEGMENT_WINDOW_LEN.is_multiple_of(BLOCK_SIZE_MAX) && SEGMENT_MAP_BYTES_MAX >= SEGMENT_WINDOW_LEN);
};
