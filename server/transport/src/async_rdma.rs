//! A second RDMA provider, built on the crate `async-rdma` and enabled by the feature of that name. `docs/DECISIONS.md` compares
//! the two providers.
//!
//! The crate cannot register memory that it did not allocate. Bytes therefore pass through buffers of the crate, and the asker
//! copies them one extra time. This module works around defects in the crate:
//! - Requests and answers go over the inner transport, which also detects lost peers. Only bulk bytes use the crate's WRITE and
//!   READ.
//! - A queue pair never gets as many operations as it has room for, because the crate leaks memory when a queue pair is full.
//! - A buffer serves one operation at a time, and every operation runs to its end in a task of its own.
//! - The crate may lose a wake-up. A short timeout makes this cost milliseconds instead of tenths of a second.
//!
//! One defect remains: the crate leaves completion events unread, and the kernel keeps memory for them until the queue pair is
//! destroyed.

mod buffer;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_rdma::{ConnectionType, MRManageStrategy, MTU, MrToken, QueuePairEndpoint, RdmaBuilder, RemoteMr};
use async_trait::async_trait;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::MESSAGE_LEN_MAX;
use dayfly_meta::wire::status::Network;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::contract::{Answer, Connection, Incoming, Landing, Piece, Pulled, Service, Serving, Transport, Unread};
use crate::error::{Refusal, TransportError};
use crate::rdma::{Choice, Found, find};
use crate::region::{Region, Slot};
use crate::selection::{Ability, Agreement};
use buffer::{BUFFER_LEN, Buffer, Buffers, Counters};

// The last byte of each message over the inner transport names its kind.

/// A message for the service above.
const FOR_SERVICE: u8 = 0;
/// A request to set up a queue pair.
const SET_UP: u8 = 1;
/// A pull with a buffer for its bytes.
const PULL: u8 = 2;
/// An offer of the bytes in a buffer.
const OFFER: u8 = 3;

/// The crate polls after this time, in case it lost a wake-up.
const WAKE_UP_TIMEOUT: Duration = Duration::from_millis(2);
/// Depth of a queue pair. A queue pair has fewer buffers than this, and thus fewer operations under way.
const SEND_DEPTH: u32 = 64;
/// Number of entries of the completion queue.
const COMPLETIONS: u32 = 256;

/// The asker's buffer for a request's bytes.
#[derive(Serialize, Deserialize)]
struct RemoteBuffer {
    buffer: MrToken,
    /// Length of each slot.
    lens: Vec<u64>,
}

/// Whether the card moved the bytes of a request.
#[derive(Serialize, Deserialize)]
enum Moved {
    /// The card moved them. There are this many bytes for each slot, back to back.
    Yes(Vec<u64>),
    /// The card did not move them. The request must go over the inner transport.
    No,
}

/// Appends this module's part, `ours`, and the kind to a message.
fn join(message: &[u8], ours: &impl Serialize, kind: u8) -> Vec<u8> {
    // Serialization fails only for maps whose keys are not strings, and these types have no maps.
    let ours = serde_json::to_vec(ours).unwrap_or_default();
    [message, &ours, &(ours.len() as u32).to_le_bytes(), &[kind]].concat()
}

/// Splits off the part that [`join`] appended.
fn split<T: DeserializeOwned>(message: &[u8]) -> Option<(&[u8], T)> {
    let (rest, len) = message.split_last_chunk::<4>()?;
    let (message, ours) = rest.split_at_checked(rest.len().checked_sub(u32::from_le_bytes(*len) as usize)?)?;
    Some((message, serde_json::from_slice(ours).ok()?))
}

/// A transport that moves bulk bytes with `async-rdma`, and everything else over `inner`.
pub struct AsyncRdma<T> {
    inner: T,
    found: Result<Found, String>,
    counters: Arc<Counters>,
    deadlines: Deadlines,
}

impl<T: Transport> AsyncRdma<T> {
    /// Looks for a card. If there is none, [`Transport::ability`] reports why.
    pub fn new(inner: T, choice: &Choice, deadlines: Deadlines) -> Self {
        let found = find(choice).map_err(|error| error.to_string());
        Self { inner, found, counters: Arc::default(), deadlines }
    }
}

/// Creates a queue pair that is not connected to its other end yet.
fn queue_pair(found: &Found) -> io::Result<async_rdma::Rdma> {
    let mtu = match found.packet_len {
        256 => MTU::MTU256,
        512 => MTU::MTU512,
        1024 => MTU::MTU1024,
        2048 => MTU::MTU2048,
        _ => MTU::MTU4096,
    };
    let builder = RdmaBuilder::default().set_conn_type(ConnectionType::RCIBV).set_raw(true).set_dev(&found.device);
    let builder = builder.set_port_num(found.port).set_gid_index(found.gid_index.into()).set_mtu(mtu);
    let builder = builder.set_mr_strategy(MRManageStrategy::Raw).set_cc_evnet_timeout(WAKE_UP_TIMEOUT);
    let builder = builder.set_qp_max_send_wr(SEND_DEPTH).set_cq_size(COMPLETIONS).set_max_cqe(64);
    builder.set_max_rd_atomic(4).set_max_dest_rd_atomic(4).set_timeout(18).set_retry_cnt(3).set_rnr_retry(6).build()
}

#[async_trait]
impl<T: Transport> Transport for AsyncRdma<T> {
    fn region(&self, len: u64) -> io::Result<Region> {
        self.inner.region(len)
    }

    async fn connect(&self, peer: NodeId, address: SocketAddr) -> Result<Arc<dyn Connection>, TransportError> {
        let inner = self.inner.connect(peer, address).await?;
        let refused = |refusal: Refusal| TransportError::Refused { peer, address, refusal };
        let found = self.found.as_ref().map_err(|why| refused(why.clone().into()))?;
        let mut rdma = queue_pair(found).map_err(|error| refused(Refusal::new(error)))?;
        let setting_up = join(&[], &rdma.get_qp_endpoint(), SET_UP);
        let answered = inner.pull(setting_up, Vec::new(), self.deadlines.request).await?;
        let far: QueuePairEndpoint = serde_json::from_slice(&answered.message)
            .map_err(|_| refused("it sent a malformed description of its queue pair".into()))?;
        rdma.ibv_connect(far).await.map_err(|error| refused(Refusal::new(error)))?;
        Ok(Arc::new(AsyncConnection { inner, address, buffers: Buffers::new(rdma, self.counters.clone()) }))
    }

    async fn serve(&self, service: Arc<dyn Service>) -> io::Result<Serving> {
        let (found, counters) = (self.found.clone(), self.counters.clone());
        self.inner
            .serve(Arc::new(AsyncService { found, counters, service, peers: Mutex::default(), deadlines: self.deadlines }))
            .await
    }

    fn ability(&self) -> Ability {
        Ability { rdma: self.found.as_ref().map(Found::to_port).map_err(Clone::clone) }
    }

    fn agree(&self, _agreement: Agreement) {}

    fn fallen_back(&self) -> Vec<(NodeId, String)> {
        Vec::new()
    }

    fn status(&self) -> Network {
        let detail = match &self.found {
            Ok(found) => format!("{} port {}, by async-rdma", found.device, found.port),
            Err(why) => why.clone(),
        };
        let Counters { written_bytes, read_bytes } = &*self.counters;
        let (written_bytes, read_bytes) = (written_bytes.load(Ordering::Relaxed), read_bytes.load(Ordering::Relaxed));
        Network { is_rdma: self.found.is_ok(), detail, written_bytes, read_bytes, ..Network::default() }
    }
}

struct AsyncConnection {
    inner: Arc<dyn Connection>,
    address: SocketAddr,
    buffers: Arc<Buffers>,
}

impl AsyncConnection {
    /// Takes a buffer for a request. Returns `None` if the request has no bytes or too many for a buffer, or if no buffer becomes
    /// free in time.
    async fn buffer(&self, len: u64, limit: Duration) -> Option<Buffer> {
        if len == 0 || len > BUFFER_LEN as u64 { None } else { self.buffers.take(limit).await }
    }

    fn refused(&self, reason: &str) -> TransportError {
        TransportError::Refused { peer: self.peer(), address: self.address, refusal: reason.into() }
    }

    async fn ask(&self, asking: Vec<u8>, buffer: &mut Buffer, limit: Duration) -> Result<(Vec<u8>, Moved), TransportError> {
        // The peer may write to the buffer until it has answered. If it never answers, nothing else may use the buffer.
        buffer.is_lent = true;
        let pulled = match self.inner.pull(asking, Vec::new(), limit).await {
            Err(error @ TransportError::Refused { .. }) => {
                buffer.is_lent = false;
                return Err(error);
            }
            pulled => pulled?,
        };
        buffer.is_lent = false;
        let (message, moved) = split(&pulled.message).ok_or_else(|| self.refused("its answer is malformed"))?;
        Ok((message.to_vec(), moved))
    }
}

#[async_trait]
impl Connection for AsyncConnection {
    fn peer(&self) -> NodeId {
        self.inner.peer()
    }

    fn is_lost(&self) -> bool {
        self.inner.is_lost()
    }

    fn quiet_for(&self) -> Duration {
        self.inner.quiet_for()
    }

    async fn pull(&self, mut message: Vec<u8>, mut slots: Vec<Slot>, limit: Duration) -> Result<Pulled, TransportError> {
        let lens: Vec<u64> = slots.iter().map(|slot| slot.len() as u64).collect();
        if message.len() < MESSAGE_LEN_MAX / 2
            && let Some(mut buffer) = self.buffer(lens.iter().sum(), limit).await
        {
            let remote = RemoteBuffer { buffer: buffer.token().ok_or_else(|| self.refused("no token"))?, lens };
            let (message, moved) = self.ask(join(&message, &remote, PULL), &mut buffer, limit).await?;
            if let Moved::Yes(mut lens) = moved {
                let fits = lens.len() <= slots.len() && lens.iter().zip(&slots).all(|(&len, slot)| len <= slot.len() as u64);
                if !fits {
                    return Err(self.refused("its answer is longer than the slots"));
                }
                let mut at = 0;
                for (slot, &len) in slots.iter_mut().zip(&lens) {
                    buffer.read(at, &mut slot[..len as usize]);
                    at += len as usize;
                }
                lens.resize(slots.len(), 0);
                return Ok(Pulled { message, slots, lens, unread: Unread::default() });
            }
        }
        if message.len() >= MESSAGE_LEN_MAX {
            return Err(TransportError::TooLong(message.len()));
        }
        message.push(FOR_SERVICE);
        self.inner.pull(message, slots, limit).await
    }

    async fn offer(
        &self,
        mut message: Vec<u8>,
        payload: &mut Option<Slot>,
        len: usize,
        limit: Duration,
    ) -> Result<Vec<u8>, TransportError> {
        let bytes = payload.as_ref().and_then(|payload| payload.get(..len)).ok_or(TransportError::TooLong(len))?;
        if message.len() < MESSAGE_LEN_MAX / 2
            && let Some(mut buffer) = self.buffer(len as u64, limit).await
        {
            buffer.write(0, bytes);
            let token = buffer.token().ok_or_else(|| self.refused("no token"))?;
            let remote = RemoteBuffer { buffer: token, lens: vec![len as u64] };
            let (message, moved) = self.ask(join(&message, &remote, OFFER), &mut buffer, limit).await?;
            if let Moved::Yes(_) = moved {
                return Ok(message);
            }
        }
        message.push(FOR_SERVICE);
        self.inner.offer(message, payload, len, limit).await
    }
}

/// The service that the inner transport sees. It handles messages about queue pairs and buffers, and passes all others on.
struct AsyncService {
    found: Result<Found, String>,
    counters: Arc<Counters>,
    service: Arc<dyn Service>,
    /// The latest queue pair of each peer, with its buffers.
    peers: Mutex<HashMap<NodeId, Arc<Buffers>>>,
    deadlines: Deadlines,
}

impl AsyncService {
    async fn set_up(&self, from: NodeId, message: &[u8]) -> Result<Vec<u8>, Refusal> {
        let (_, far) = split::<QueuePairEndpoint>(message).ok_or("the description of the queue pair is malformed")?;
        let mut rdma = queue_pair(self.found.as_ref().map_err(Clone::clone)?).map_err(Refusal::new)?;
        let end = serde_json::to_vec(&rdma.get_qp_endpoint()).map_err(Refusal::new)?;
        rdma.ibv_connect(far).await.map_err(Refusal::new)?;
        self.peers.lock().unwrap_or_else(PoisonError::into_inner).insert(from, Buffers::new(rdma, self.counters.clone()));
        Ok(end)
    }

    fn buffers(&self, from: NodeId) -> Result<Arc<Buffers>, Refusal> {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.get(&from).cloned().ok_or_else(|| "this node has set up no queue pair".into())
    }

    async fn pull(&self, from: NodeId, message: &[u8]) -> Result<Vec<u8>, Refusal> {
        let (message, remote) = split::<RemoteBuffer>(message).ok_or("the request is malformed")?;
        let buffers = self.buffers(from)?;
        let Answer { message, pieces } = self.service.pulled(from, message.to_vec(), remote.lens.clone()).await?;
        let lens: Vec<u64> = pieces.iter().map(Piece::len).collect();
        let fits = lens.len() <= remote.lens.len() && lens.iter().zip(&remote.lens).all(|(len, room)| len <= room);
        let total = lens.iter().sum::<u64>() as usize;
        if !fits || total > remote.buffer.len.min(BUFFER_LEN) {
            return Err("the answer does not fit".into());
        }
        let moved = match buffers.take(self.deadlines.request).await {
            Some(buffer) => {
                match buffer.fill(pieces).await {
                    Ok(filled) => filled.write_to(RemoteMr::new(remote.buffer), total).await.is_ok(),
                    // The asker sends the request again over the inner transport, where only the pieces that cannot be read fail.
                    Err(_) => false,
                }
            }
            None => false,
        };
        let mut answer = join(&message, &if moved { Moved::Yes(lens) } else { Moved::No }, 0);
        answer.pop();
        Ok(answer)
    }

    async fn offer(&self, from: NodeId, message: &[u8]) -> Result<Vec<u8>, Refusal> {
        let (message, remote) = split::<RemoteBuffer>(message).ok_or("the request is malformed")?;
        let len = remote.lens.first().copied().unwrap_or(0);
        let failed = Arc::new(Mutex::new(false));
        let landing =
            AsyncLanding { buffers: self.buffers(from)?, remote, failed: failed.clone(), timeout: self.deadlines.request };
        let answered = self.service.offered(from, message.to_vec(), Incoming::new(len, Box::new(landing))).await;
        let has_failed = *failed.lock().unwrap_or_else(PoisonError::into_inner);
        let (message, moved) = match answered {
            Ok(message) => (message, Moved::Yes(Vec::new())),
            // Nothing was taken, so the offer can be sent over the inner transport.
            Err(_) if has_failed => (Vec::new(), Moved::No),
            Err(refusal) => return Err(refusal),
        };
        let mut answer = join(&message, &moved, 0);
        answer.pop();
        Ok(answer)
    }
}

#[async_trait]
impl Service for AsyncService {
    async fn pulled(&self, from: NodeId, mut message: Vec<u8>, room: Vec<u64>) -> Result<Answer, Refusal> {
        let message = match message.pop() {
            Some(FOR_SERVICE) => return self.service.pulled(from, message, room).await,
            Some(SET_UP) => self.set_up(from, &message).await?,
            Some(PULL) => self.pull(from, &message).await?,
            Some(OFFER) => self.offer(from, &message).await?,
            _ => return Err("the message is malformed".into()),
        };
        Ok(Answer { message, pieces: Vec::new() })
    }

    async fn offered(&self, from: NodeId, mut message: Vec<u8>, incoming: Incoming) -> Result<Vec<u8>, Refusal> {
        message.pop();
        self.service.offered(from, message, incoming).await
    }
}

/// Reads offered bytes out of the asker's buffer.
struct AsyncLanding {
    buffers: Arc<Buffers>,
    remote: RemoteBuffer,
    failed: Arc<Mutex<bool>>,
    timeout: Duration,
}

#[async_trait]
impl Landing for AsyncLanding {
    async fn land(self: Box<Self>, mut slot: Slot) -> io::Result<Slot> {
        let len = self.remote.lens.first().copied().unwrap_or(0) as usize;
        let read = async {
            let buffer = self.buffers.take(self.timeout).await.ok_or(io::ErrorKind::TimedOut)?;
            buffer.read_from(RemoteMr::new(self.remote.buffer), len).await
        };
        match read.await {
            Ok(buffer) => {
                buffer.read(0, &mut slot[..len]);
                Ok(slot)
            }
            Err(error) => {
                *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = true;
                Err(error)
            }
        }
    }
}
