//! Every bound of Dayfly, with its reason. Deadlines are in [`crate::deadlines`].
//! A full queue pushes back on its producers. Nothing may grow without a bound on this page. The
//! block at the end of the file asserts the relations between bounds at compile time.

use std::time::Duration;

/// A block is the unit of placement. A larger sample is cut into blocks, so that the disk or link
/// of one node is not its bottleneck.
pub const BLOCK_SIZE_MAX: u64 = 64 << 20;
/// While a sample is staged in, memory holds a list of its blocks (8 bytes each) and of the
/// checksums of its chunks (4 bytes each).
pub const SAMPLE_SIZE_MAX: u64 = 64 << 40;
/// Blocks of at least this length start on a page, so that they can be mapped in place and read
/// with direct I/O.
pub const PAGE_BLOCK_SIZE_MIN: u64 = 64 << 10;
/// The page to which such blocks, the columns of a catalog, and the header of a segment are
/// aligned.
pub const PAGE_SIZE: u64 = 4096;

/// Blocks travel between nodes and lie in the arena in chunks of this length. A reader can use the
/// first chunk while the next ones are on their way.
pub const CHUNK_LEN: u64 = 4 << 20;

/// Length of one name. It equals Linux's `NAME_MAX`, because a longer name could not be exported.
pub const NAME_LEN_MAX: usize = 255;
/// Length of one path within a dataset. It equals Linux's `PATH_MAX`.
pub const PATH_LEN_MAX: usize = 4096;
/// Length of a symlink's target. It equals Linux's `PATH_MAX` without the final NUL.
pub const SYMLINK_LEN_MAX: usize = 4095;
/// Symlinks followed in one lookup. Linux follows the same number before it fails with `ELOOP`.
pub const SYMLINKS_FOLLOWED_MAX: usize = 40;
/// Length of an extended header or a long name in a tar. Real headers take hundreds of bytes. A
/// header beyond this bound is an attack on our memory.
pub const TAR_EXTENSION_LEN_MAX: u64 = 1 << 20;
/// Zeros after the end mark of a plain tar that are passed over in the search for another archive. Tar pads its output to records, which
/// nearly always take far less.
pub const TAR_PADDING_LEN_MAX: usize = 16 << 20;
/// Length of the global extended headers of a tar. Workers pass them on together with their
/// position in the archive.
pub const TAR_GLOBALS_LEN_MAX: usize = 16 << 10;
/// Memory that a decoder may take for its window, for xz and zstd alike, if a stage-in does not allow more: `xz -9` needs 65 MiB,
/// `zstd --long=27` 128 MiB.
pub const DECODER_MEMORY_DEFAULT: u64 = 256 << 20;
/// The most that a stage-in may allow: the largest window of xz. That of zstd is half as large.
pub const DECODER_MEMORY_MAX: u64 = 4 << 30;

/// Sources of one stage-in, all of which the coordinator holds in memory. The same bound applies to
/// the paths that a glob has found and has yet to look at.
pub const SOURCES_MAX: usize = 1 << 20;
/// Total length of the paths of all sources of one stage-in, in bytes.
pub const SOURCE_PATHS_LEN_MAX: usize = 256 << 20;
/// Length of a `@LIST` file. With real names, a list of [`SOURCES_MAX`] sources is shorter than
/// this.
pub const LIST_LEN_MAX: u64 = 256 << 20;

/// Entries (names) of one dataset. Entries are numbered in 32 bits, and the index uses 0 for free slots.
pub const ENTRIES_MAX: u64 = (u32::MAX - 1) as u64;
/// Memory that the coordinator needs to resolve one hard link, in bytes, not counting three copies
/// of its name and of its target.
pub const HARD_LINK_MEMORY: usize = 600;
/// Directories in one dataset if `--max-directories` is not given: this many, plus
/// [`DIRECTORIES_PER_FILE_MAX`] for each file. A small archive could otherwise create millions of
/// directories on every node.
pub const DIRECTORIES_MAX_DEFAULT: u64 = 1_000_000;
/// Further directories that each file of a dataset allows; see [`DIRECTORIES_MAX_DEFAULT`].
pub const DIRECTORIES_PER_FILE_MAX: u64 = 4;
/// Archive members below a path that is a directory in one source and something else in another.
/// The coordinator replays them in memory.
pub const CONTESTED_MEMBERS_MAX: usize = 1_000_000;
/// Skipped, rejected or renamed members that a summary names. All of them are counted.
pub const NOTES_SHOWN_MAX: usize = 20;
/// Members left out by `--keep-going` that a summary names. All of them are counted.
pub const SKIPPED_SHOWN_MAX: usize = 500;
/// Length of each note in a summary, in characters.
pub const NOTE_LEN_MAX: usize = 400;

/// Nodes in a session. Catalogs name the owner of a block in 16 bits.
pub const NODES_MAX: usize = 4096;
/// Virtual nodes on the placement ring for a member of mean capacity. More make the shares of small arcs more even and lookups
/// slower.
pub const VIRTUAL_NODES_PER_MEMBER: usize = 6;
/// Virtual nodes on the placement ring for a member of little capacity. With fewer, some members' arcs are too short for their
/// share.
pub const VIRTUAL_NODES_PER_MEMBER_MIN: usize = 4;
/// Virtual nodes on the placement ring of a session with few members.
pub const VIRTUAL_NODES_MIN: usize = 4096;
/// Points of the placement ring that a block looks at in a round.
pub const PROBES: u32 = 16;
/// Rounds in which a block looks for members on the placement ring. The members that it does not find follow in an order that the
/// block's hash chooses.
pub const PROBE_ROUNDS: u32 = 4;
/// Datasets in a session. Each one costs every client a few descriptors.
pub const DATASETS_MAX: usize = 1024;
/// Drives (data dirs) of a node. A location names its drive in 8 bits.
pub const DRIVES_MAX: usize = 64;
/// Open files that a server must be allowed to have. With 16 nodes and nothing to do it has 114, and each client and each dataset
/// takes a few more.
pub const SERVER_DESCRIPTORS_MIN: u64 = 256;
/// Processes attached to one server.
pub const CLIENTS_MAX: usize = 4096;

/// Length of the body of a peer frame. A ping never waits behind more bulk bytes than this.
pub const FRAME_BODY_LEN_MAX: usize = 1 << 20;
/// Length of the message in the body of a peer frame.
pub const MESSAGE_LEN_MAX: usize = FRAME_BODY_LEN_MAX - 64 * 1024;
/// Length of a message on the local socket, in either direction.
pub const LOCAL_MESSAGE_LEN_MAX: usize = 1 << 20;
/// Blocks or chunks that one request may name.
pub const BATCH_BLOCKS_MAX: usize = 1024;
/// Length of one shipped batch, or of one piece of a large block, in bytes.
pub const BATCH_LEN_MAX: usize = 1 << 20;
/// How many times a batch that arrives damaged is sent before the stage-in fails.
pub const SHIP_ATTEMPTS_MAX: usize = 3;
/// How many times a chunk that arrives damaged is fetched before its read fails.
pub const FETCH_ATTEMPTS_MAX: usize = 2;
/// Chunks that a process may report as bad copies in one request. The server reads each of them
/// again.
pub const RECHECKED_CHUNKS_MAX: usize = 16;
/// How many times a process asks its server to examine a bad copy before the read fails.
pub const RECHECKS_MAX: usize = 2;
/// Stage-ins that run at once in a session. Further ones wait.
pub const STAGE_INS_MAX: usize = 4;
/// Stage-ins requested on nodes other than the coordinator's, including those that wait.
pub const FORWARDED_STAGE_INS_MAX: usize = 64;
/// Memory of a server for all its stage-ins if `--stage-in-memory` is not given.
pub const STAGE_IN_MEMORY_DEFAULT: u64 = 1 << 30;
/// The least memory for stage-ins: enough for one worker of each stage-in that may run at once.
pub const STAGE_IN_MEMORY_MIN: u64 = 256 << 20;
/// The least memory that each further worker of a server needs, summed over the stage-ins that may
/// run at once: its batches, the members that are not in a run yet, and the bytes decoded ahead.
pub const STAGE_IN_MEMORY_PER_WORKER_MIN: u64 = (STAGE_INS_MAX * (BATCHES_PER_WORKER_MIN + 2) * BATCH_LEN_MAX) as u64;
/// Returns the least memory for stage-ins on a server with this many workers, in bytes.
pub const fn stage_in_memory_min(workers: usize) -> u64 {
    let shared = (STAGE_INS_MAX * (SHUFFLE_LEN_MAX + BATCHES_LANDING_MAX * BATCH_LEN_MAX + PATHS_LEN_MIN)) as u64;
    let all = shared + workers as u64 * STAGE_IN_MEMORY_PER_WORKER_MIN;
    if all > STAGE_IN_MEMORY_MIN { all } else { STAGE_IN_MEMORY_MIN }
}
/// Returns the largest number of workers for which this much memory is enough.
pub const fn stage_in_workers_max(memory: u64) -> usize {
    let mut workers = 1;
    while workers < WORKERS_MAX && stage_in_memory_min(workers + 1) <= memory {
        workers += 1;
    }
    workers
}
/// The most batches that one stage-in worker may have, open or in flight. While all of them are
/// taken, the worker waits for a slow owner.
pub const BATCHES_PER_WORKER_MAX: usize = 32;
/// The fewest batches that one stage-in worker may have, however little memory there is.
pub const BATCHES_PER_WORKER_MIN: usize = 3;
/// Batches of one worker that may be in flight. The rest are being filled.
pub const BATCHES_IN_FLIGHT_MAX: usize = 8;
/// Batches that a server receives at once from all its peers, not counting those that wait to be
/// written.
pub const BATCHES_LANDING_MAX: usize = 16;
/// Bytes of blocks that wait in an owner's memory to be written in shuffled order.
pub const SHUFFLE_LEN_MAX: usize = 16 << 20;
/// Space on a drive is reserved in steps of this many bytes, so that blocks a server has accepted
/// can always be written.
pub const RESERVATION_STEP: u64 = 16 << 20;
/// The part of a drive's capacity that cached blocks leave free: 1 / `HEADROOM_SHARE`, but at most
/// [`HEADROOM_MAX`] bytes. A stage-in uses this room for catalogs and runs, which it writes in
/// addition to blocks.
pub const HEADROOM_SHARE: u64 = 16;
/// The part of a drive's capacity that the blocks of a stage-in which does not fit leave to the catalogs
/// of later stage-ins: 1 / `CATALOGS_SHARE`, but at least [`CATALOGS_LEN_MIN`] and at most
/// [`CATALOGS_LEN_MAX`] bytes.
pub const CATALOGS_SHARE: u64 = 64;
/// Lower bound on this part in bytes, except on tiny drives; see [`CATALOGS_SHARE`].
pub const CATALOGS_LEN_MIN: u64 = 1 << 20;
/// Upper bound on this part in bytes; see [`CATALOGS_SHARE`].
pub const CATALOGS_LEN_MAX: u64 = 64 << 20;
/// Returns the bytes that such blocks leave free on a drive, or on all drives of a node, of this capacity.
pub const fn left_for_catalogs(capacity: u64) -> u64 {
    let least = if capacity / 16 < CATALOGS_LEN_MIN { capacity / 16 } else { CATALOGS_LEN_MIN };
    let share = capacity / CATALOGS_SHARE;
    if share < least {
        least
    } else if share > CATALOGS_LEN_MAX {
        CATALOGS_LEN_MAX
    } else {
        share
    }
}
/// Upper bound on the headroom in bytes; see [`HEADROOM_SHARE`].
pub const HEADROOM_MAX: u64 = 256 << 20;
/// Bytes of a stage-in that may be on their way to one drive. With more, the stage-in waits for the
/// drive.
/// This keeps the sync at the end of the stage-in short, and leaves the page cache to the job.
pub const UNSYNCED_LEN_MAX: u64 = 64 << 20;
/// Stage-in workers of a server. Each reads one unit at a time.
pub const WORKERS_MAX: usize = 16;
/// Threads that decode one compressed source. One worker takes their output, and a few decoders are
/// as fast as one worker.
pub const DECODERS_MAX: usize = 4;
/// Bytes of member records that a worker sorts in memory before it writes them out as a run.
pub const RUN_LEN_MAX: usize = 32 << 20;
/// Memory for reading ahead in all runs while they are merged. Each run gets between
/// [`RUN_READ_AHEAD_MIN`] and [`RUN_READ_AHEAD_MAX`] of it.
pub const MERGE_MEMORY: u64 = 64 << 20;
/// The most memory for reading ahead in one run; see [`MERGE_MEMORY`].
pub const RUN_READ_AHEAD_MAX: u64 = 256 << 10;
/// The least memory for reading ahead in one run; see [`MERGE_MEMORY`].
pub const RUN_READ_AHEAD_MIN: u64 = 16 << 10;
/// The least length of the ranges that a plain tar is cut into. Up to one member is read twice at
/// the start of each range.
pub const RANGE_LEN_MIN: u64 = 8 << 20;
/// The greatest length of those ranges, chosen so that no worker has much left to do when the
/// others have finished.
pub const RANGE_LEN_MAX: u64 = 64 << 20;
/// How far before its range a worker begins to look for headers, because a header that belongs to
/// the first member of the range may lie there.
pub const TAR_LOOK_BACK: u64 = 4 << 10;
/// Pieces of a sparse file in a tar. Each takes 16 bytes of memory.
pub const SPARSE_PIECES_MAX: usize = 1 << 20;
/// Length of a zip within an archive. Such a zip is copied to scratch space while it is read; a longer one stays a file.
pub const NESTED_ZIP_LEN_MAX: u64 = 1 << 30;
/// Memory of a decoder of a zip member or of an archive within an archive. Several may run at once.
pub const NESTED_DECODER_MEMORY_MAX: u64 = 64 << 20;
/// Levels of archives within archives. Archives below the last level stay files.
pub const NESTED_DEPTH_MAX: usize = 4;
/// Bytes that all decoders of one source together may be ahead of the worker that takes their
/// output.
pub const DECODED_AHEAD_MAX: usize = 32 << 20;
/// Entries of a directory tree that make one unit.
pub const UNIT_FILES_MAX: usize = 1024;
/// Bytes of a directory tree that make one unit.
pub const UNIT_BYTES_MAX: u64 = 64 << 20;
/// Units of at most this many bytes are assigned several at a time, because a worker ships its
/// partly filled batches after the last unit of each assignment. With one small unit at a time,
/// batches would be nearly empty.
pub const SMALL_UNIT_BYTES_MAX: u64 = 1 << 20;
/// Small units assigned at a time; see [`SMALL_UNIT_BYTES_MAX`].
pub const SMALL_UNITS_MAX: usize = 128;
/// Length of all names in one unit. A unit has to fit into a message, together with the records
/// about its names.
pub const UNIT_NAMES_LEN_MAX: usize = 256 << 10;

/// Paths of a tree that a plan asks the file system about at the same time, each on a thread.
pub const STAT_THREADS: usize = 16;
/// There is one of these threads for so many paths.
pub const STAT_PATHS_MIN: usize = 8;
/// Paths that these threads share before the plan goes on.
pub const STAT_BATCH_LEN: usize = 512;
/// Compressed tars that a plan looks into, to learn what they unpack to.
pub const COMPRESSED_LOOKS_MAX: usize = 1000;
/// Bytes at the beginning of a compressed tar that a plan decodes. A block of lz4 has up to 4 MiB.
pub const COMPRESSED_HEAD_LEN: u64 = 8 << 20;
/// Compressed tars whose beginning a plan decodes. The others count as the mean of these.
pub const COMPRESSED_HEADS_MAX: u32 = 64;
/// A compressed tar that claims to unpack to so many times more than its beginning suggests counts as if it claimed nothing: it
/// may be cut off, or have zeros at its end.
pub const COMPRESSED_CLAIM_MAX: u64 = 3;
/// Small reads of one compressed tar with which a plan finds out what it unpacks to.
pub const COMPRESSED_READS_MAX: u32 = 256;
/// The same of all compressed tars together.
pub const COMPRESSED_READS_SUM_MAX: u32 = 16 << 10;
/// However many tars there are, each that is looked into may be read so often.
pub const COMPRESSED_READS_MIN: u32 = 8;
/// Bytes that such a read takes. Parallel file systems do not read less than a page.
pub const COMPRESSED_READ_LEN: u64 = 4096;
/// A frame whose length can be that of the whole rest of the file is taken for the last one without
/// a look at its blocks, if its content is longer than this. Otherwise a large file would cost one
/// read for each block, only to learn that nothing follows.
pub const CHECKED_CONTENT_MAX: u64 = 8 << 20;
/// Length of the index of an xz file that a plan reads.
pub const XZ_INDEX_LEN_MAX: u64 = 4 << 20;
/// Windows in which a plan looks for headers, to estimate what plain tars contain.
pub const TAR_WINDOWS_MAX: u64 = 64;
/// Length of such a window.
pub const TAR_WINDOW_LEN: u64 = 256 << 10;
/// If fewer members than this begin in all windows, their mean size says better than the windows how
/// many members there are.
pub const TAR_MEMBERS_MIN: u64 = 64;
/// A compressed source that does not tell its unpacked size is expected to grow by this factor. This
/// only decides how much room the samples of other sources leave it.
pub const ARCHIVE_GROWTH_GUESS: u64 = 4;

/// The most reads of single samples that a node has under way on the parallel file system, unless the
/// user sets another number.
pub const PFS_STREAMS_DEFAULT: u16 = 16;
/// The most that the user may set. Each takes a thread.
pub const PFS_STREAMS_MAX: u16 = 256;
/// Different reasons in one answer to a request for chunks. Further chunks get the last of them.
pub const MISSING_REASONS_MAX: usize = 32;
/// A node that does not answer is asked at longer and longer intervals, at most this long.
pub const SUSPECT_ASKED_INTERVAL_MAX: Duration = Duration::from_secs(8);
/// The range of `--lost-after`, in seconds. Below it, a short pause of a server would count as its loss.
pub const LOST_AFTER_MIN_S: u64 = 6;
/// See [`LOST_AFTER_MIN_S`].
pub const LOST_AFTER_MAX_S: u64 = 3600;
/// How often a node that catches up reads a part of a catalog again when the connection breaks.
pub const CATALOG_READS_RETRIED: u32 = 8;
/// How often a stage-in begins again after a node was lost or did not answer.
pub const STAGE_IN_RESTARTS_MAX: u32 = 16;
/// Bytes per second that each node reads to recover the blocks of lost nodes, unless the user sets another rate.
pub const RECOVERY_RATE_DEFAULT: u64 = 128 << 20;
/// Bytes of the blocks that recovery has in memory at once. A larger block is in memory alone.
pub const RECOVERY_BATCH_LEN_MAX: u64 = 16 << 20;
/// With a low rate, recovery has fewer bytes in memory at once, but up to this many.
pub const RECOVERY_BATCH_LEN_MIN: u64 = 1 << 20;
/// The most blocks that recovery reads at once.
pub const RECOVERY_BATCH_BLOCKS_MAX: usize = 4096;
/// Blocks that recovery sorts by their origins at once. Up to twice as many positions, of 16 bytes, are in memory during a scan.
pub const RECOVERY_WINDOW_BLOCKS: usize = 1 << 20;
/// Recovered bytes that are written to a drive at once, if it has room for all of them.
pub const RECOVERY_WRITE_LEN: usize = 4 << 20;
/// How often recovery that waits for a stage-in, or that has nothing to do, looks whether it can go on.
pub const RECOVERY_LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// How long recovery waits before it tries again to read blocks that could not be read.
pub const RECOVERY_PAUSE_MIN: Duration = Duration::from_secs(10);
/// Each such wait is twice as long as the one before, up to this.
pub const RECOVERY_PAUSE_MAX: Duration = Duration::from_secs(300);
/// How long recovery waits at a time while readers use all streams to the parallel file system.
pub const RECOVERY_YIELD: Duration = Duration::from_millis(20);
/// After this time recovery goes on although readers use all streams.
pub const RECOVERY_YIELD_MAX: Duration = Duration::from_secs(2);
/// Recovery uses one in this many of the streams to the parallel file system, and at least one.
pub const RECOVERY_STREAMS_SHARE: usize = 4;
/// The most nodes that store each block of a dataset.
pub const COPIES_MAX: u16 = 16;
/// Blocks that are placed in thought, to find how many copies each node will hold.
pub const COPIES_TRIED: u32 = 20_000;
/// Bytes of the chunks that a node requests at once from the holder of a copy, unless one chunk is longer. All such requests of a
/// node together must fit into the memory that their bytes land in.
pub const COPY_PART_LEN: u64 = 512 << 10;
/// Such requests of one stage-in, or of recovery, that a node has under way.
pub const COPY_REQUESTS: usize = 2;
/// Blocks that a node sorts at once to copy them in the order in which they lie on their owners' drives.
pub const COPY_WINDOW_BLOCKS: usize = 4 << 20;
/// How long a node does not ask a holder again for a block of which that holder had no good copy. Longer than any request.
pub const BAD_HOLDER_PAUSE: Duration = Duration::from_secs(60);
/// Nodes that did not have a block of which they are holders: so many are remembered, and are not asked for that block again.
pub const BAD_HOLDERS_MAX: usize = 64 << 10;
/// How long a node asks others for the blocks of a peer that has answered that it does not know the dataset.
pub const UNAWARE_PAUSE: Duration = Duration::from_secs(1);
/// Peers that did not know a dataset: so many are remembered.
pub const UNAWARE_MAX: usize = 64 << 10;
/// Samples of a dataset that a node looks at to find how many bytes of lost nodes' blocks it takes over. Of a larger dataset it
/// looks at a part.
pub const TAKEN_OVER_SAMPLES_MAX: u32 = 1 << 20;
/// How often a read that the parallel file system fails is made.
pub const ORIGIN_ATTEMPTS_MAX: u32 = 4;
/// For how long reads of a source are not repeated after all attempts of one read have failed.
pub const ORIGIN_FAILING: Duration = Duration::from_secs(2);
/// Sources whose state a node remembers, besides those that are being read.
pub const ORIGIN_SOURCES_MAX: usize = 4096;
/// How long to wait before such a read is made for the second time.
pub const ORIGIN_PAUSE: Duration = Duration::from_millis(50);
/// How many times longer each further wait is.
pub const ORIGIN_PAUSE_GROWTH: u32 = 5;
/// Bytes of the chunks that a node reads from origins for its peers while its arena has no room. Answers that are being sent and
/// reads of several samples at once take copies.
pub const WITHOUT_ARENA_LEN_MAX: u64 = 32 << 20;
/// Descriptors of sources that a node keeps open for the next reads of samples from their sources.
pub const ORIGIN_FILES_MAX: usize = 64;
/// Bytes of a record that are read at once while its sample is unpacked.
pub const ORIGIN_READ_LEN_MAX: u64 = 4 << 20;
/// Samples that are wanted together are read from their source in one piece if at most this many
/// bytes lie between them. Reading so few bytes costs a parallel file system less than another
/// request does.
pub const ORIGIN_GAP_MAX: u64 = 64 << 10;
/// Length of such a piece. It is in memory as a whole.
pub const ORIGIN_MERGED_LEN_MAX: u64 = 16 << 20;

/// Requests that one peer may have open on one connection.
pub const PEER_REQUESTS_MAX: usize = 256;
/// Requests to one peer may hold 1 / `PEER_SHARE` of the memory that their bytes land in. Memory
/// counts as held until nothing can land in it anymore.
pub const PEER_SHARE: u64 = 4;
/// Bounds the requests to a peer that are past their deadlines. A server sends the peer no further
/// requests while such requests hold more than 1 / `STUCK_SHARE` of the memory that their bytes
/// land in, or while there are [`STUCK_REQUESTS_MAX`] of them.
pub const STUCK_SHARE: u64 = 16;
/// Requests past their deadlines after which a peer counts as stuck; see [`STUCK_SHARE`].
pub const STUCK_REQUESTS_MAX: u32 = 16;
/// How many times a pull whose link has failed is repeated on another link.
pub const MOVES_MAX: u32 = 3;
/// Links for bulk data from a server to each peer.
pub const BULK_LINKS: usize = 2;
/// Handshakes in progress on a listener. If there are more, the oldest is dropped: members send
/// without delay, so the oldest handshake belongs to a stranger.
pub const HANDSHAKES_MAX: usize = 512;
/// Length of a message between the supervisor and a server. The longest message is the roster.
pub const CHANNEL_MESSAGE_LEN_MAX: usize = 1 << 20;
/// Length of a file that lists hosts. A manager may list a host of [`NODES_MAX`] once for each of its
/// cores.
pub const HOSTS_FILE_LEN_MAX: u64 = 64 << 20;
/// Size of a server's arena if `--memory` is not given.
pub const ARENA_LEN_DEFAULT: u64 = 256 << 20;
/// The arena allocates in units of one cache line, so that neighboring chunks never share a line.
pub const ARENA_UNIT: u64 = 64;
/// Size of the smallest arena: some chunks arrive while others are read.
pub const ARENA_LEN_MIN: u64 = 8 * CHUNK_LEN;
/// Size of the largest arena: its units are counted in 32 bits.
pub const ARENA_LEN_MAX: u64 = 255 << 30;
/// The leases of one process take at most 1 / `LEASE_SHARE` of the arena, and the leases of all
/// processes together leave at least that much of it free. A connection that wants more has to
/// release leases first; one without leases always gets a chunk.
pub const LEASE_SHARE: u64 = 4;
/// Bytes that one request to an owner asks for. The server can use them while the next request is
/// under way.
pub const FETCH_PART_LEN: u64 = CHUNK_LEN;
/// Prefetched chunks take at most 1 / `PREFETCH_SHARE` of the arena, unless `tune
/// --prefetch-memory` sets another bound.
pub const PREFETCH_SHARE: u64 = 2;
/// Samples in all orders of a node together, at 4 bytes of memory each. This is enough for one
/// epoch of a large dataset. With a smaller dataset, it is enough for many readers with an epoch
/// each.
pub const ORDER_SAMPLES_MAX: usize = 1 << 27;
/// Samples in one message of an order.
pub const ORDER_PART_SAMPLES: usize = 64 << 10;
/// Orders that a node prefetches at once. Further ones wait until one of them is dropped.
pub const ORDERS_MAX: usize = 64;
/// Prefetch requests in flight to one owner.
pub const PREFETCH_REQUESTS_MAX: usize = 16;
/// Bytes of blocks that wait to be cached on local drives. Blocks that arrive while the queue is
/// full are not cached this time.
pub const CACHE_QUEUE_LEN_MAX: u64 = 64 << 20;
/// Cached blocks are synced, and become visible to processes, once this many bytes of them are
/// waiting or once the first of them is [`CACHE_SYNC_INTERVAL`] old.
pub const CACHE_SYNC_LEN: u64 = 64 << 20;
/// How long to wait before more is cached, while as much waits to be written as may.
pub const CACHE_PAUSE: Duration = Duration::from_millis(20);
/// Age at which a cached block is synced; see [`CACHE_SYNC_LEN`].
pub const CACHE_SYNC_INTERVAL: Duration = Duration::from_secs(1);
/// Bytes of read-ahead for a process that reads a large file sequentially.
pub const READ_AHEAD_LEN_MAX: u64 = 32 << 20;
/// How many processes of a node `status` names: the ones that read most. All processes are counted.
pub const CLIENTS_SHOWN_MAX: usize = 32;
/// How many answers to peers may be read from drives at once. Peers take turns.
pub const DRIVE_READERS_MAX: usize = 16;

/// Receive buffers that all queue pairs of a card share. If no buffer is free for a message, the
/// sender's card sends the message again.
pub const RDMA_RECEIVES: u32 = 512;
/// Length of the longest request over RDMA. A request for [`BATCH_BLOCKS_MAX`] blocks fits.
pub const RDMA_REQUEST_LEN_MAX: u32 = 32 << 10;
/// Completions that fit into a card's completion queue. Work that could overflow it waits.
pub const RDMA_COMPLETIONS_MAX: u32 = 16 << 10;
/// Operations posted on one queue pair.
pub const RDMA_SEND_DEPTH: u32 = 128;
/// Length of the longest operation. A longer one would keep the other operations of the card
/// waiting.
pub const RDMA_WRITE_LEN_MAX: u32 = 1 << 20;
/// Bytes of all operations posted on one queue pair.
pub const RDMA_BYTES_IN_FLIGHT_MAX: u64 = 4 << 20;
/// Requests of one node that wait for another node's answers over RDMA.
pub const RDMA_WINDOW: u32 = 64;
/// Registered memory through which bytes pass on their way from a file to the card.
pub const RDMA_STAGING_LEN: u64 = 32 << 20;
/// Registered memory for requests and their answers.
pub const RDMA_MESSAGES_LEN: u64 = 16 << 20;
/// After a pair of nodes has had this many failed queue pairs in a row, `status` reports that the pair uses TCP.
pub const RDMA_FAILURES_MAX: u32 = 3;
/// A pair of nodes that has fallen back to TCP tries RDMA again at growing intervals, up to this one.
pub const RDMA_RETRY_INTERVAL: Duration = Duration::from_secs(60);
/// The most bytes of the node's segments that one process maps. The process reads the rest with
/// `pread`. Page tables cost 2 MiB for each mapped GiB.
pub const SEGMENT_MAP_BYTES_MAX: u64 = 4 << 30;
/// Segments are mapped in windows of this length, as they are read.
pub const SEGMENT_WINDOW_LEN: u64 = 64 << 20;
/// Idle connections to its server that a process holds for its next requests. Further ones are opened and closed as needed.
pub const IDLE_CONNECTIONS_MAX: usize = 4;
/// Size up to which a file is copied into memory for a program that cannot use the preload library. Larger files are copied to a
/// data dir.
pub const MEMORY_COPY_LEN_MAX: u64 = 64 << 20;
/// A mapping needs at least this many bytes of a block before all processes of the node share one copy of the block. Fewer bytes
/// are copied for each process.
pub const SHARED_COPY_LEN_MIN: u64 = 1 << 20;
/// A mapping that needs less than one part in this many of a block does not bring in all of the block.
pub const SHARED_COPY_PARTS: u64 = 4;
/// The most copies that a server keeps for processes to share. Each costs it a descriptor.
pub const SHARED_COPIES_MAX: usize = 1024;
/// How long a process waits for another one that makes a copy, from when the copy has last grown. Then it makes a copy of its own.
pub const SHARED_COPY_PATIENCE: Duration = Duration::from_secs(10);
/// How often it asks whether the copy is complete.
pub const SHARED_COPY_INTERVAL: Duration = Duration::from_millis(5);
/// How often a server looks for shared copies that nobody uses. It drops those that were idle in two looks.
pub const SHARED_COPY_LOOK_INTERVAL: Duration = Duration::from_secs(15);

/// The kernel probes a silent connection at this interval.
pub const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// The kernel closes a silent connection after this many probes without an answer.
pub const KEEP_ALIVE_PROBES: u32 = 3;
/// The kernel closes a connection whose other end has answered nothing for this long, also if bytes wait to be confirmed.
pub const KEEP_ALIVE_MAX: Duration = KEEP_ALIVE_INTERVAL.saturating_mul(1 + KEEP_ALIVE_PROBES);
/// How many times a client that waits for its server looks at the heartbeat before the heartbeat's deadline passes.
pub const HEARTBEAT_POLLS: u32 = 20;
/// A deadlocked server ends itself after `--lost-after`, but not before this.
pub const DEADLOCK_TIMEOUT_MIN: Duration = Duration::from_secs(10);
/// Time within which all servers must be ready after `up`, if `--start-timeout` is not given.
pub const START_TIMEOUT: Duration = Duration::from_secs(60);
/// How long readers wait for blocks of compressed tars that are read again after the loss of a node, unless `--recovery-timeout` says
/// otherwise.
pub const RECOVERY_TIMEOUT_DEFAULT: Duration = Duration::from_secs(600);
/// Blocks of one compressed tar that a node reads again at once. Each takes 16 bytes of memory meanwhile.
pub const STREAM_BLOCKS_MAX: usize = 16 << 20;
/// Parts of a compressed tar, of about [`RECOVERY_WRITE_LEN`] bytes each, that wait to be stored.
pub const STREAM_PARTS_WAITING_MAX: usize = 2;
/// Threads of a node that read compressed tars again at the same time, with those whose reads have timed out and hang in the kernel.
pub const STREAM_READERS_MAX: usize = 16;
/// How often a node asks at first, and at most, whether a block of a compressed tar is there.
pub const STREAM_ASKED_INTERVAL_MIN: Duration = Duration::from_millis(100);
/// How often a node asks after a while.
pub const STREAM_ASKED_INTERVAL_MAX: Duration = Duration::from_secs(1);
/// Compressed tars whose state a node remembers.
pub const STREAMS_MAX: usize = 64 << 10;
/// How often the supervisor starts a new server for a node whose server has died, before it leaves that to the user.
pub const REPLACEMENTS_MAX: u32 = 3;
/// If all servers of a session stood still together, those that were lost and continue wait for the others so many times as long as it
/// takes to declare a node lost.
pub const LAST_MEMBERS_PATIENCE: u32 = 10;
/// Requests for new servers that wait to be sent to the supervisor.
pub const REJOINS_WAITING_MAX: usize = 8;
/// A session with at most this many nodes tries every pair of them at its start. In larger sessions
/// each node tries the nodes that come 1, 2, 4, 8 ... places after it in the roster.
pub const PAIRS_ALL_TRIED_NODES: usize = 16;
/// Children of a node in the tree along which the roster travels, and servers that a server starts
/// if the launcher has no tree of its own.
pub const TREE_WIDTH: usize = 16;
/// The supervisor of a larger session renews leases along a tree of its servers.
pub const LEASE_TREE_NODES: usize = 1024;
/// A server that such a tree has not reached in this many intervals of the lease contacts the supervisor itself.
pub const LEASE_TREE_PATIENCE: u32 = 3;
/// How many pairs of nodes that fell back to TCP are named when the session starts. `status` names
/// all of them.
pub const FALLEN_BACK_SHOWN_MAX: usize = 16;
/// How often servers and supervisors check that their files still have their names, and supervisors whether somebody has ended the
/// session.
pub const FOLDER_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How often servers and supervisors refresh the times of their files, because programs that clean
/// up `/tmp` remove files that have not been used for days.
pub const FOLDER_TOUCH_INTERVAL: Duration = Duration::from_secs(3600);
/// How long the launcher's processes may take to exit once the servers have.
pub const LAUNCHER_END_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a server may take from `down` to its exit.
pub const DOWN_TIMEOUT: Duration = Duration::from_secs(20);
/// Suspected path conflicts that the coordinator asks all workers about in one stage-in. The first
/// confirmed conflict ends the stage-in.
pub const SUSPECT_PATHS_MAX: usize = 64;
/// Suspected path conflicts that an owner reports at a time.
pub const SUSPECTS_REPORTED_MAX: usize = 16;
/// Answers about suspected path conflicts: a node holds up to this many until its next report, and the coordinator holds up to this
/// many for each conflict.
pub const SIGHTINGS_MAX: usize = 16;
/// An owner's table of path hashes takes 1 / `PATHS_SHARE` of the stage-in's memory, and at least
/// [`PATHS_LEN_MIN`].
pub const PATHS_SHARE: usize = 16;
/// The least memory for an owner's table of path hashes, in bytes.
pub const PATHS_LEN_MIN: usize = 1 << 20;
/// When a stage-in makes no progress, each node reports at most this many things that it waits for,
/// of at most [`NOTE_LEN_MAX`] characters each.
pub const WAITS_REPORTED_MAX: usize = 4;

const _: () = {
    // The memory that a card registers in addition to the arena and stage-ins, whatever the number of
    // peers.
    assert!(RDMA_STAGING_LEN + RDMA_MESSAGES_LEN + (RDMA_RECEIVES * RDMA_REQUEST_LEN_MAX) as u64 <= 64 << 20);
    // A queue pair's ring takes at most 128 bytes for each operation. Each pair of nodes has two
    // queue pairs: one for requests, one for answers.
    assert!(NODES_MAX as u64 * (RDMA_WINDOW + RDMA_SEND_DEPTH + 2) as u64 * 128 <= 128 << 20);
    // All work posted on one queue pair may complete at once. Further work waits for room in the
    // completion queue.
    assert!(RDMA_COMPLETIONS_MAX >= RDMA_RECEIVES + RDMA_SEND_DEPTH);
    assert!(BLOCK_SIZE_MAX.is_multiple_of(PAGE_SIZE) && PAGE_BLOCK_SIZE_MIN.is_multiple_of(PAGE_SIZE));
    assert!(
        BLOCK_SIZE_MAX.is_multiple_of(CHUNK_LEN) && BLOCK_SIZE_MAX / CHUNK_LEN <= 16,
        "the chunks of a block fit into the bits of a word"
    );
    assert!(CHUNK_LEN.is_multiple_of(PAGE_SIZE) && CHUNK_LEN >= PAGE_BLOCK_SIZE_MIN);
    assert!(CHUNK_LEN.is_multiple_of(BATCH_LEN_MAX as u64), "a piece of a large block lies in one chunk");
    assert!(
        RECHECKED_CHUNKS_MAX as u64 * CHUNK_LEN <= BLOCK_SIZE_MAX,
        "one request makes the server read at most one block again"
    );
    assert!(ARENA_LEN_MAX / ARENA_UNIT <= u32::MAX as u64, "an arena's units are counted in 32 bits");
    assert!(ARENA_LEN_MIN / LEASE_SHARE >= 2 * CHUNK_LEN, "a client can read one chunk while another arrives");
    assert!(ORDER_PART_SAMPLES * 8 <= LOCAL_MESSAGE_LEN_MAX, "a part of an order fits into a message");
    assert!(MESSAGE_LEN_MAX < FRAME_BODY_LEN_MAX);
    assert!(BATCH_BLOCKS_MAX * 64 <= MESSAGE_LEN_MAX, "a batch's table fits into a message");
    assert!(BATCH_BLOCKS_MAX * 64 <= LOCAL_MESSAGE_LEN_MAX, "the answer to a batch fits into a message");
    assert!(BATCHES_PER_WORKER_MIN <= BATCHES_PER_WORKER_MAX);
    assert!(SIGHTINGS_MAX * (PATH_LEN_MAX + 64) + SUSPECT_PATHS_MAX * 16 < MESSAGE_LEN_MAX / 2, "a report fits into a message");
    assert!(stage_in_workers_max(STAGE_IN_MEMORY_DEFAULT) == WORKERS_MAX && stage_in_memory_min(1) == STAGE_IN_MEMORY_MIN);
    assert!(SKIPPED_SHOWN_MAX * NOTE_LEN_MAX * 4 < LOCAL_MESSAGE_LEN_MAX, "a summary fits into a message");
    assert!(RUN_READ_AHEAD_MAX < RUN_LEN_MAX as u64 && RUN_READ_AHEAD_MAX <= BATCH_LEN_MAX as u64);
    assert!(RANGE_LEN_MIN.is_multiple_of(512) && RANGE_LEN_MAX.is_multiple_of(512) && TAR_LOOK_BACK.is_multiple_of(512));
    assert!(RESERVATION_STEP.is_multiple_of(PAGE_SIZE));
    assert!(SMALL_UNIT_BYTES_MAX < RANGE_LEN_MIN, "a range is not small");
    assert!(UNIT_NAMES_LEN_MAX + UNIT_FILES_MAX * 128 <= MESSAGE_LEN_MAX, "a unit fits into a message");
    assert!(FORWARDED_STAGE_INS_MAX * 2 <= PEER_REQUESTS_MAX, "waiting for stage-ins leaves room for other requests");
    assert!(NODES_MAX <= u16::MAX as usize && DRIVES_MAX <= 254);
    assert!(NODES_MAX.is_multiple_of(64), "a set of nodes fills its words");
    assert!(
        VIRTUAL_NODES_MIN + (VIRTUAL_NODES_PER_MEMBER + VIRTUAL_NODES_PER_MEMBER_MIN) * NODES_MAX <= 1 << 16,
        "a placement ring is small, and weights of virtual nodes do not overflow"
    );
    assert!(SEGMENT_WINDOW_LEN.is_multiple_of(BLOCK_SIZE_MAX) && SEGMENT_MAP_BYTES_MAX >= SEGMENT_WINDOW_LEN);
};
