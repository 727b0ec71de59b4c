//! How a server's memory for stage-ins is parted. It does not depend on what is staged in.

use dayfly_meta::limits::{
    BATCH_LEN_MAX, BATCHES_LANDING_MAX, BATCHES_PER_WORKER_MAX, BATCHES_PER_WORKER_MIN, DECODED_AHEAD_MAX, PATHS_LEN_MIN,
    PATHS_SHARE, RUN_LEN_MAX, SHUFFLE_LEN_MAX, STAGE_IN_MEMORY_PER_WORKER_MIN, STAGE_INS_MAX,
};

/// The parts of one stage-in's share, in bytes where nothing else is said.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    /// An owner's table of paths.
    pub(super) paths_len: usize,
    /// Blocks that wait to be written.
    pub(super) shuffle_len: u64,
    /// Number of batches of each worker, open or on their way to other nodes.
    pub(super) batches: usize,
    /// Members of each worker that are not in a run yet.
    pub(super) run_len: usize,
    /// Of each worker, what is decoded and not taken yet.
    pub(super) decoded_ahead_len: usize,
}

impl Memory {
    /// Parts the memory of all stage-ins that may run at once.
    pub(super) fn part(all: u64, workers: usize) -> Self {
        let share = (all / STAGE_INS_MAX as u64) as usize;
        let shuffle_len = (share / 4).clamp(BATCH_LEN_MAX, SHUFFLE_LEN_MAX);
        let paths_len = (share / PATHS_SHARE).max(PATHS_LEN_MIN);
        // Where each worker has only the least, the table has it too.
        let least =
            shuffle_len + BATCHES_LANDING_MAX * BATCH_LEN_MAX + workers * STAGE_IN_MEMORY_PER_WORKER_MIN as usize / STAGE_INS_MAX;
        let paths_len = paths_len.min(share.saturating_sub(least)).max(PATHS_LEN_MIN);
        let rest = share.saturating_sub(paths_len + shuffle_len + BATCHES_LANDING_MAX * BATCH_LEN_MAX);
        let of_worker = rest / workers.max(1);
        let batches = (of_worker / 3 / BATCH_LEN_MAX).clamp(BATCHES_PER_WORKER_MIN, BATCHES_PER_WORKER_MAX);
        let third = (of_worker.saturating_sub(batches * BATCH_LEN_MAX) / 2).min(of_worker / 3).max(BATCH_LEN_MAX);
        Self {
            paths_len,
            shuffle_len: shuffle_len as u64,
            batches,
            run_len: third.min(RUN_LEN_MAX),
            decoded_ahead_len: third.min(DECODED_AHEAD_MAX),
        }
    }

    /// For what comes from other nodes, and what waits to be written.
    pub(super) fn landing_len(&self) -> u64 {
        self.shuffle_len + (BATCHES_LANDING_MAX * BATCH_LEN_MAX) as u64
    }
}

#[cfg(test)]
mod tests {
    use dayfly_meta::limits::{
        STAGE_IN_MEMORY_DEFAULT, STAGE_IN_MEMORY_MIN, WORKERS_MAX, stage_in_memory_min, stage_in_workers_max,
    };

    use super::*;

    #[test]
    fn the_parts_are_no_more_than_the_whole() {
        let least = (1..=WORKERS_MAX).map(|workers| (stage_in_memory_min(workers), workers));
        let most = [STAGE_IN_MEMORY_MIN, 300 << 20, STAGE_IN_MEMORY_DEFAULT].map(|all| (all, stage_in_workers_max(all)));
        for (all, workers) in least.chain(most).chain([(STAGE_IN_MEMORY_DEFAULT, 1)]) {
            let memory = Memory::part(all, workers);
            let of_worker = memory.batches * BATCH_LEN_MAX + memory.run_len + memory.decoded_ahead_len;
            let used = memory.paths_len as u64 + memory.landing_len() + (workers * of_worker) as u64;
            assert!(used <= all / STAGE_INS_MAX as u64, "{all} by {workers}: {used}");
        }
    }
}
