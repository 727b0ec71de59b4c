//! How a server divides its memory for stage-ins. The shares depend on the configuration alone, not on what is staged in.

use dayfly_meta::limits::{
    BATCH_LEN_MAX, BATCHES_LANDING_MAX, BATCHES_PER_WORKER_MAX, BATCHES_PER_WORKER_MIN, DECODED_AHEAD_MAX, PATHS_LEN_MIN,
    PATHS_SHARE, RUN_LEN_MAX, SHUFFLE_LEN_MAX, STAGE_IN_MEMORY_PER_WORKER_MIN, STAGE_INS_MAX,
};

/// The shares of one stage-in, in bytes unless stated otherwise.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryShares {
    /// The table of paths that this node needs as an owner of blocks.
    pub(super) paths_len: usize,
    /// Blocks that wait to be written in shuffled order.
    pub(super) shuffle_len: u64,
    /// Number of batches of each worker, open or on their way to other nodes.
    pub(super) batches: usize,
    /// Bytes of archive members that each worker has found and not yet put into a sorted run.
    pub(super) run_len: usize,
    /// Bytes that are decoded ahead for each worker, before the worker consumes them.
    pub(super) decoded_ahead_len: usize,
}

impl MemoryShares {
    /// Divides `total`, the memory for all stage-ins that may run at once.
    pub(super) fn divide(total: u64, workers: usize) -> Self {
        let share = (total / STAGE_INS_MAX as u64) as usize;
        let shuffle_len = (share / 4).clamp(BATCH_LEN_MAX, SHUFFLE_LEN_MAX);
        let paths_len = (share / PATHS_SHARE).max(PATHS_LEN_MIN);
        // The workers' minimum takes precedence over the table of paths, which shrinks at most to its own minimum.
        let minimum =
            shuffle_len + BATCHES_LANDING_MAX * BATCH_LEN_MAX + workers * STAGE_IN_MEMORY_PER_WORKER_MIN as usize / STAGE_INS_MAX;
        let paths_len = paths_len.min(share.saturating_sub(minimum)).max(PATHS_LEN_MIN);
        let rest = share.saturating_sub(paths_len + shuffle_len + BATCHES_LANDING_MAX * BATCH_LEN_MAX);
        let per_worker = rest / workers.max(1);
        let batches = (per_worker / 3 / BATCH_LEN_MAX).clamp(BATCHES_PER_WORKER_MIN, BATCHES_PER_WORKER_MAX);
        let third = (per_worker.saturating_sub(batches * BATCH_LEN_MAX) / 2).min(per_worker / 3).max(BATCH_LEN_MAX);
        Self {
            paths_len,
            shuffle_len: shuffle_len as u64,
            batches,
            run_len: third.min(RUN_LEN_MAX),
            decoded_ahead_len: third.min(DECODED_AHEAD_MAX),
        }
    }

    /// Returns the memory for batches that land on this node, and for blocks that wait to be written.
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
    fn the_shares_add_up_to_no_more_than_the_total() {
        let minima = (1..=WORKERS_MAX).map(|workers| (stage_in_memory_min(workers), workers));
        let maxima = [STAGE_IN_MEMORY_MIN, 300 << 20, STAGE_IN_MEMORY_DEFAULT].map(|total| (total, stage_in_workers_max(total)));
        for (total, workers) in minima.chain(maxima).chain([(STAGE_IN_MEMORY_DEFAULT, 1)]) {
            let shares = MemoryShares::divide(total, workers);
            let per_worker = shares.batches * BATCH_LEN_MAX + shares.run_len + shares.decoded_ahead_len;
            let used = shares.paths_len as u64 + shares.landing_len() + (workers * per_worker) as u64;
            assert!(used <= total / STAGE_INS_MAX as u64, "{total} for {workers} workers: {used}");
        }
    }
}
