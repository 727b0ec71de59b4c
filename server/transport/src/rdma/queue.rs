//! Queue pairs, the completion queue that reports their work, and the receives that they share.

use std::io;

use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::device::{Address, Device};
use super::error::RdmaError;
use super::verbs::{self, Sge, Wc, done, made};

/// The pause before a request that found no receive is sent again: the code for 40.96 ms.
const RECEIVER_NOT_READY_TIMER: u8 = 24;
/// Number of times that a request that found no receive is sent again.
const RECEIVER_NOT_READY_RETRIES: u8 = 6;
/// An unacknowledged packet is sent again after 4.096 us x 2^18, which is about 1.1 s. With [`RETRIES`], a dead peer is noticed
/// within 4.3 s, unless its TCP connection reveals it sooner. Shorter times ended queue pairs that were merely busy.
const ACKNOWLEDGE_TIMER: u8 = 18;
/// Number of times that an unacknowledged packet is sent again.
const RETRIES: u8 = 3;

/// A completion queue, with the descriptor that announces completions.
pub(super) struct Completions {
    device: Arc<Device>,
    channel: NonNull<verbs::CompChannel>,
    queue: NonNull<verbs::Cq>,
}

// SAFETY: the library's objects may be used from any thread.
unsafe impl Send for Completions {}
// SAFETY: as above.
unsafe impl Sync for Completions {}

impl Completions {
    pub(super) fn new(device: &Arc<Device>, entries: u32) -> Result<Self, RdmaError> {
        let verbs = device.verbs;
        // SAFETY: the device is open.
        let channel = made(unsafe { (verbs.create_comp_channel)(device.context()) }, "ibv_create_comp_channel")?;
        // SAFETY: as above; the channel was just created.
        let queue = unsafe { (verbs.create_cq)(device.context(), entries as i32, ptr::null_mut(), channel.as_ptr(), 0) };
        let queue = made(queue, "ibv_create_cq").inspect_err(|_| {
            // SAFETY: nothing uses the channel.
            unsafe { (verbs.destroy_comp_channel)(channel.as_ptr()) };
        })?;
        let completions = Self { device: device.clone(), channel, queue };
        let unblocked = fcntl(completions.descriptor(), FcntlArg::F_SETFL(OFlag::O_NONBLOCK));
        unblocked.map_err(|error| RdmaError::Call { call: "fcntl", error: error.into() })?;
        Ok(completions)
    }

    /// Returns the number of entries. More completions than that would make the queue unusable.
    pub(super) fn entries(&self) -> u32 {
        // SAFETY: the queue lives as long as `self`.
        u32::try_from(unsafe { self.queue.as_ref().cqe }).unwrap_or(0)
    }

    /// Returns a descriptor that becomes readable at the first completion after [`arm`](Self::arm).
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the channel's, which lives as long as `self`.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }

    /// Requests an event for the next completion.
    pub(super) fn arm(&self) -> Result<(), RdmaError> {
        // SAFETY: the queue lives as long as `self`, and its context has the library's table.
        let returned = unsafe { (*self.queue.as_ref().context).ops.req_notify_cq.map(|arm| arm(self.queue.as_ptr(), 0)) };
        done(returned.unwrap_or(nix::libc::ENOSYS), "ibv_req_notify_cq")
    }

    /// Takes completions from the queue, and returns how many it took.
    pub(super) fn poll(&self, into: &mut [Wc]) -> Result<usize, RdmaError> {
        // SAFETY: as above; `into` has room for as many completions as are asked for.
        let count = unsafe {
            (*self.queue.as_ref().context).ops.poll_cq.map(|poll| poll(self.queue.as_ptr(), into.len() as i32, into.as_mut_ptr()))
        };
        usize::try_from(count.unwrap_or(-1))
            .map_err(|_| RdmaError::Call { call: "ibv_poll_cq", error: io::Error::last_os_error() })
    }

    /// Takes and acknowledges all events of the descriptor. The kernel keeps memory for each event that is not taken.
    pub(super) fn take_events(&self) {
        let (mut queue, mut context, mut count) = (ptr::null_mut(), ptr::null_mut(), 0);
        // SAFETY: the channel lives as long as `self`, does not block, and both pointers are written.
        while unsafe { (self.device.verbs.get_cq_event)(self.channel.as_ptr(), &mut queue, &mut context) } == 0 {
            count += 1;
        }
        if count > 0 {
            // SAFETY: `count` events of this queue, which is the channel's only one, were taken and not yet acknowledged.
            unsafe { (self.device.verbs.ack_cq_events)(self.queue.as_ptr(), count) };
        }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        self.take_events();
        // SAFETY: all users of the queue held an `Arc` of it and are gone. All events are acknowledged; otherwise this call would
        // wait.
        unsafe {
            (self.device.verbs.destroy_cq)(self.queue.as_ptr());
            (self.device.verbs.destroy_comp_channel)(self.channel.as_ptr());
        }
    }
}

/// The shared receive queue. All queue pairs use it, so the number of receives does not grow with the number of peers.
pub(super) struct Receives {
    device: Arc<Device>,
    queue: NonNull<verbs::Srq>,
}

// SAFETY: the library's objects may be used from any thread.
unsafe impl Send for Receives {}
// SAFETY: as above.
unsafe impl Sync for Receives {}

impl Receives {
    pub(super) fn new(device: &Arc<Device>, count: u32) -> Result<Self, RdmaError> {
        let mut attributes = verbs::SrqInitAttr { srq_context: ptr::null_mut(), max_wr: count, max_sge: 1, srq_limit: 0 };
        // SAFETY: the domain lives as long as the device.
        let queue = unsafe { (device.verbs.create_srq)(device.pd(), &mut attributes) };
        Ok(Self { device: device.clone(), queue: made(queue, "ibv_create_srq")? })
    }

    /// Posts a receive into registered memory, which must not be touched until it completes.
    pub(super) fn post(&self, id: u64, address: u64, len: u32, local_key: u32) -> Result<(), RdmaError> {
        let mut part = Sge { addr: address, length: len, lkey: local_key };
        let mut work = verbs::RecvWr { wr_id: id, next: ptr::null_mut(), sg_list: &mut part, num_sge: 1 };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue lives as long as `self`, and the call copies its arguments. The card uses the key to
        // check that it writes only into registered memory.
        let returned = unsafe {
            (*self.queue.as_ref().context).ops.post_srq_recv.map(|post| post(self.queue.as_ptr(), &mut work, &mut bad))
        };
        done(returned.unwrap_or(nix::libc::ENOSYS), "ibv_post_srq_recv")
    }
}

impl Drop for Receives {
    fn drop(&mut self) {
        // SAFETY: all users of the queue held an `Arc` of it and are gone.
        unsafe { (self.device.verbs.destroy_srq)(self.queue.as_ptr()) };
    }
}

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Sends into a receive that the peer has posted.
    Send,
    /// Writes into the peer's memory.
    Write(Remote),
    /// Writes into the peer's memory, and then notifies the peer with this number.
    WriteAndNotify(Remote, u32),
    /// Reads the peer's memory.
    Read(Remote),
}

/// An address in the peer's memory, with the key that allows access to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Remote {
    pub(super) address: u64,
    pub(super) key: u32,
}

/// One operation on a range of this node's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Work {
    pub(super) action: Action,
    pub(super) address: u64,
    pub(super) len: u32,
    pub(super) local_key: u32,
}

/// One end of a queue pair, with the details that the other end needs to connect to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) queue: u32,
    /// Number of the first packet.
    pub(super) packet: u32,
    pub(super) address: Address,
    /// Number of reads that this end can serve at a time.
    pub(super) reads: u8,
}

/// One end of a reliable connection. Dropping this destroys the queue pair on the card.
pub(super) struct QueuePair {
    device: Arc<Device>,
    queue: NonNull<verbs::Qp>,
    first_packet: u32,
    depth: u32,
    _completions: Arc<Completions>,
    _receives: Arc<Receives>,
}

// SAFETY: the library's objects may be used from any thread.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// Creates a queue pair that is not connected to its other end yet.
    pub(super) fn new(
        device: &Arc<Device>,
        completions: &Arc<Completions>,
        receives: &Arc<Receives>,
        depth: u32,
    ) -> Result<Self, RdmaError> {
        let cap = verbs::QpCap { max_send_wr: depth + 1, max_recv_wr: 0, max_send_sge: 1, max_recv_sge: 0, max_inline_data: 0 };
        let mut attributes = verbs::QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: completions.queue.as_ptr(),
            recv_cq: completions.queue.as_ptr(),
            srq: receives.queue.as_ptr(),
            cap,
            qp_type: verbs::QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: the domain and the queues live as long as the queue pair, which holds them.
        let queue = made(unsafe { (device.verbs.create_qp)(device.pd(), &mut attributes) }, "ibv_create_qp")?;
        let mut random = [0; 4];
        getrandom::fill(&mut random).map_err(|error| RdmaError::Call { call: "getrandom", error: io::Error::other(error) })?;
        let pair = Self {
            device: device.clone(),
            queue,
            first_packet: u32::from_le_bytes(random) & 0xff_ffff,
            depth,
            _completions: completions.clone(),
            _receives: receives.clone(),
        };
        let mut attributes = pair.attributes(verbs::QPS_INIT);
        attributes.port_num = device.port;
        attributes.qp_access_flags = (verbs::ACCESS_REMOTE_WRITE | verbs::ACCESS_REMOTE_READ) as u32;
        pair.modify(&mut attributes, verbs::QP_STATE | verbs::QP_PKEY_INDEX | verbs::QP_PORT | verbs::QP_ACCESS_FLAGS)?;
        Ok(pair)
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: the queue lives as long as `self`.
        unsafe { self.queue.as_ref().qp_num }
    }

    /// Returns the number of operations that may be in flight, not counting the marker that is posted when the queue pair fails.
    pub(super) fn depth(&self) -> u32 {
        self.depth
    }

    /// Returns the description of this end.
    pub(super) fn endpoint(&self) -> Endpoint {
        let Device { address, limits, .. } = &*self.device;
        Endpoint { queue: self.number(), packet: self.first_packet, address: *address, reads: limits.reads }
    }

    /// Connects the queue pair to its other end. Afterward it can receive and send.
    pub(super) fn join(&self, far: &Endpoint) -> Result<(), RdmaError> {
        let ours = &self.device.address;
        let mut attributes = self.attributes(verbs::QPS_RTR);
        attributes.path_mtu = u32::from(ours.mtu.min(far.address.mtu));
        attributes.dest_qp_num = far.queue;
        attributes.rq_psn = far.packet;
        attributes.max_dest_rd_atomic = self.device.limits.reads;
        attributes.min_rnr_timer = RECEIVER_NOT_READY_TIMER;
        attributes.ah_attr.port_num = self.device.port;
        attributes.ah_attr.sl = self.device.service_level;
        attributes.ah_attr.dlid = far.address.lid;
        if ours.is_ethernet {
            attributes.ah_attr.is_global = 1;
            attributes.ah_attr.grh = verbs::GlobalRoute {
                dgid: far.address.gid,
                flow_label: 0,
                sgid_index: ours.gid_index,
                hop_limit: 64,
                traffic_class: self.device.traffic_class,
            };
        }
        let to_receive = verbs::QP_STATE | verbs::QP_AV | verbs::QP_PATH_MTU | verbs::QP_DEST_QPN | verbs::QP_RQ_PSN;
        self.modify(&mut attributes, to_receive | verbs::QP_MAX_DEST_RD_ATOMIC | verbs::QP_MIN_RNR_TIMER)?;
        let mut attributes = self.attributes(verbs::QPS_RTS);
        attributes.timeout = ACKNOWLEDGE_TIMER;
        attributes.retry_cnt = RETRIES;
        attributes.rnr_retry = RECEIVER_NOT_READY_RETRIES;
        attributes.sq_psn = self.first_packet;
        attributes.max_rd_atomic = self.device.limits.reads.min(far.reads);
        let to_send = verbs::QP_STATE | verbs::QP_TIMEOUT | verbs::QP_RETRY_CNT | verbs::QP_RNR_RETRY | verbs::QP_SQ_PSN;
        self.modify(&mut attributes, to_send | verbs::QP_MAX_QP_RD_ATOMIC)
    }

    /// Puts the queue pair into the error state. Unfinished work completes with an error.
    pub(super) fn fail(&self) -> Result<(), RdmaError> {
        self.modify(&mut self.attributes(verbs::QPS_ERR), verbs::QP_STATE)
    }

    /// Posts operations in order with one call. Only the last operation has a completion, which carries `id`.
    ///
    /// The card accesses memory only through registered keys. The caller must keep that memory until the completion has arrived
    /// or the queue pair has been dropped.
    ///
    /// # Errors
    /// The error, and the number of operations that were posted nevertheless.
    pub(super) fn post(&self, id: u64, works: &[Work]) -> Result<(), (RdmaError, usize)> {
        let mut parts: Vec<Sge> =
            works.iter().map(|work| Sge { addr: work.address, length: work.len, lkey: work.local_key }).collect();
        let mut chain: Vec<verbs::SendWr> = works.iter().map(|work| describe(id, work)).collect();
        let (first, parts) = (chain.as_mut_ptr(), parts.as_mut_ptr());
        for (at, work) in works.iter().enumerate() {
            // An operation without bytes has no memory range.
            chain[at].num_sge = i32::from(work.len > 0);
            chain[at].sg_list = parts.wrapping_add(at);
            chain[at].next = if at + 1 < works.len() { first.wrapping_add(at + 1) } else { ptr::null_mut() };
        }
        let Some(last) = chain.last_mut() else { return Ok(()) };
        last.send_flags = verbs::SEND_SIGNALED;
        let mut bad: *mut verbs::SendWr = ptr::null_mut();
        // SAFETY: the queue lives as long as `self`. The chain and its parts live during the call, which copies them.
        let returned =
            unsafe { (*self.queue.as_ref().context).ops.post_send.map(|post| post(self.queue.as_ptr(), first, &mut bad)) };
        done(returned.unwrap_or(nix::libc::ENOSYS), "ibv_post_send").map_err(|error| {
            let taken = (bad as usize).saturating_sub(first as usize) / size_of::<verbs::SendWr>();
            (error, taken.min(works.len()))
        })
    }

    fn attributes(&self, state: u32) -> verbs::QpAttr {
        // SAFETY: all fields are numbers, for which zero is a valid value.
        let mut attributes: verbs::QpAttr = unsafe { std::mem::zeroed() };
        attributes.qp_state = state;
        attributes
    }

    fn modify(&self, attributes: &mut verbs::QpAttr, mask: i32) -> Result<(), RdmaError> {
        // SAFETY: the queue lives as long as `self`, and the mask names only fields that were set.
        done(unsafe { (self.device.verbs.modify_qp)(self.queue.as_ptr(), attributes, mask) }, "ibv_modify_qp")
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: `self` is the only owner. Afterward the card no longer works for the queue pair.
        let returned = unsafe { (self.device.verbs.destroy_qp)(self.queue.as_ptr()) };
        if returned != 0 {
            tracing::warn!(returned, "cannot destroy a queue pair");
        }
    }
}

fn describe(id: u64, work: &Work) -> verbs::SendWr {
    let mut described = verbs::SendWr::zeroed();
    described.wr_id = id;
    let remote = match work.action {
        Action::Send => {
            described.opcode = verbs::WR_SEND;
            Remote { address: 0, key: 0 }
        }
        Action::Write(remote) => remote,
        Action::WriteAndNotify(remote, number) => {
            described.opcode = verbs::WR_RDMA_WRITE_WITH_IMM;
            described.imm_data = number.to_be();
            remote
        }
        Action::Read(remote) => {
            described.opcode = verbs::WR_RDMA_READ;
            remote
        }
    };
    (described.remote_addr, described.rkey) = (remote.address, remote.key);
    described
}
