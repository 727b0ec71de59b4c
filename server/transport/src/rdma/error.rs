//! Why a node cannot use RDMA. The messages name the cause and what to do about it, because users see them in `dayfly status` and
//! `dayfly doctor`.

use std::io;
use std::sync::Arc;

/// Why there is no RDMA on this node.
#[derive(Debug, thiserror::Error)]
pub enum RdmaError {
    /// The user asked for TCP.
    #[error("TCP was asked for")]
    Declined,
    /// RDMA and encryption exclude each other.
    #[error("--encrypt encrypts every byte between nodes, and a card sends bytes as they are")]
    Sealed,
    /// The library that drives RDMA cards cannot be loaded.
    #[error("libibverbs.so.1 cannot be opened ({0}): install rdma-core (Debian: libibverbs1 and ibverbs-providers)")]
    NoLibrary(#[source] Arc<dyn std::error::Error + Send + Sync>),
    /// The kernel has no card.
    #[error("there is no RDMA device: /sys/class/infiniband is empty; is the card's driver loaded?")]
    NoDevice,
    /// The card that the user named does not exist.
    #[error("there is no RDMA device '{name}'; this node has {known}", known = if known.is_empty() { "none".to_owned() } else { known.join(", ") })]
    NoSuchDevice {
        /// The device that the user named, with its port if one was named.
        name: String,
        /// The devices that the kernel has.
        known: Vec<String>,
    },
    /// The kernel has the card, but the library has no provider for it.
    #[error("no provider library drives {0}: install the card's provider (Debian: ibverbs-providers)")]
    NoProvider(String),
    /// The device file through which programs use the card cannot be opened.
    #[error(
        "{device} has no file below /dev/infiniband that may be opened ({error}): load ib_uverbs; in a container, pass \
         /dev/infiniband through"
    )]
    NoDeviceFile {
        /// Name of the card.
        device: String,
        /// The kernel's error.
        #[source]
        error: io::Error,
    },
    /// The port has no cable, or its subnet has no subnet manager.
    #[error(
        "port {port} of {device} is not active (it is '{state}'): check its cable and, for InfiniBand, the subnet manager (ibstat)"
    )]
    PortDown {
        /// Name of the card.
        device: String,
        /// Number of the port.
        port: u8,
        /// The port's state as the kernel names it.
        state: String,
    },
    /// The port has no RoCE version 2 address.
    #[error("port {port} of {device} has no RoCE version 2 address: give its network interface an IP address")]
    NoGid {
        /// Name of the card.
        device: String,
        /// Number of the port.
        port: u8,
    },
    /// Memory cannot be registered, because the limit on locked memory is too low.
    #[error(
        "cannot register {bytes} bytes of memory ({error}); locked memory is limited to {limit}: raise the limit with 'ulimit -l \
         unlimited' (in Slurm, with PropagateResourceLimitsExcept=MEMLOCK and LimitMEMLOCK=infinity for slurmd), or use a \
         smaller --memory",
        limit = limit.map_or_else(|| "the memory of this node".to_owned(), |limit| format!("{limit} bytes"))
    )]
    Memory {
        /// Number of bytes that were to be registered.
        bytes: u64,
        /// The soft limit on locked memory in bytes, if there is one.
        limit: Option<u64>,
        /// The kernel's error.
        #[source]
        error: io::Error,
    },
    /// A call of the library or the kernel failed for any other reason.
    #[error("{call} failed: {error}")]
    Call {
        /// Name of the function.
        call: &'static str,
        /// The error that it returned.
        #[source]
        error: io::Error,
    },
}
