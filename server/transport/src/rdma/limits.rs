//! Bounds on the work that a card is given.

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::limits;

use super::device::DeviceLimits;

/// Bounds on the work that a card is given. The defaults are those of `dayfly_meta::limits`; tests use smaller ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Number of receives that are posted to the shared receive queue.
    pub(crate) receives: u32,
    /// The longest request in bytes.
    pub(crate) request_len: u32,
    /// Number of entries of the completion queue.
    pub(crate) completions: u32,
    /// Number of operations that may be under way on a queue pair on which this node answers.
    pub(crate) send_depth: u32,
    /// Number of bytes that may be under way on a queue pair.
    pub(crate) bytes_in_flight: u64,
    /// The longest single operation in bytes.
    pub(crate) write_len: u32,
    /// Number of requests that may be under way on a queue pair on which this node asks.
    pub(crate) window: u32,
    /// Length of the registered memory for the bytes of answers.
    pub(crate) staging_len: u64,
    /// Length of the registered memory for requests and for the messages of answers.
    pub(crate) messages_len: u64,
    pub(crate) deadlines: Deadlines,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            receives: limits::RDMA_RECEIVES,
            request_len: limits::RDMA_REQUEST_LEN_MAX,
            completions: limits::RDMA_COMPLETIONS_MAX,
            send_depth: limits::RDMA_SEND_DEPTH,
            bytes_in_flight: limits::RDMA_BYTES_IN_FLIGHT_MAX,
            write_len: limits::RDMA_WRITE_LEN_MAX,
            window: limits::RDMA_WINDOW,
            staging_len: limits::RDMA_STAGING_LEN,
            messages_len: limits::RDMA_MESSAGES_LEN,
            deadlines: Deadlines::DEFAULT,
        }
    }
}

impl Limits {
    /// Lowers the limits to those of a card.
    pub(super) fn within(self, device: &DeviceLimits) -> Self {
        Self {
            receives: self.receives.min(device.receives),
            completions: self.completions.min(device.completions),
            // One entry of the queue is reserved for the marker after the work of a failed queue pair.
            send_depth: self.send_depth.min(device.send_depth.saturating_sub(1)),
            write_len: self.write_len.min(device.message_len),
            ..self
        }
    }
}
