//! A second RDMA provider, on the crate `async-rdma`, behind the feature of that name: see `docs/DECISIONS.md` for how the two compare.
//!
//! The crate cannot register memory that others share, so bytes take their way through buffers of its own and are copied once more at
//! the asker. Its defects are fenced: what is asked and answered goes by the inner transport, which also shows who lives, and only bulk
//! by its WRITE and READ; operations on a queue pair stay below its depth, for a full one loses memory; a buffer serves one operation;
//! an operation runs to its end in a task of its own; its lost wake-ups cost milliseconds and not tenths of a second. That it leaves
//! completion events unread, for which the kernel keeps memory until a queue pair goes, cannot be mended from here.

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

use crate::rdma::{Choice, Found, find};
use crate::{
    Ability, Agreement, Answer, Connection, Incoming, Landing, Offered, Piece, Pulled, Refusal, Region, Service, Serving, Slot,
    Transport, TransportError, Unread,
};
use buffer::{BUFFER_LEN, Buffer, Buffers, Counters};

/// The last byte of each message of the inner transport: it is for the service above,
const FOR_SERVICE: u8 = 0;
/// or for us: a queue pair's end; a pull and an offer with a buffer for their bytes.
const SET_UP: u8 = 1;
const PULL: u8 = 2;
const OFFER: u8 = 3;

/// A lost wake-up of the crate is made up for after this.
const WAKE_UP_TIMEOUT: Duration = Duration::from_millis(2);
/// Room in a queue pair; buffers, and thus operations, are fewer.
const SEND_DEPTH: u32 = 64;
const COMPLETIONS: u32 = 256;

/// Where a request's bytes are, or go.
#[derive(Serialize, Deserialize)]
struct Place {
    buffer: MrToken,
    lens: Vec<u64>,
}

/// How it went.
#[derive(Serialize, Deserialize)]
enum Moved {
    /// So many bytes for each slot, one behind the other.
    Yes(Vec<u64>),
    /// The card did not move them: another way is to be taken.
    No,
}

/// A message with a part of ours behind it.
fn join(message: &[u8], ours: &impl Serialize, kind: u8) -> Vec<u8> {
    // Of plain data: it has no maps with strange keys, by which alone this fails.
    let ours = serde_json::to_vec(ours).unwrap_or_default();
    [message, &ours, &(ours.len() as u32).to_le_bytes(), &[kind]].concat()
}

fn split<T: DeserializeOwned>(message: &[u8]) -> Option<(&[u8], T)> {
    let (rest, len) = message.split_last_chunk::<4>()?;
    let (message, ours) = rest.split_at_checked(rest.len().checked_sub(u32::from_le_bytes(*len) as usize)?)?;
    Some((message, serde_json::from_slice(ours).ok()?))
}

/// A transport that moves bulk by `async-rdma`, and all else by `inner`.
pub struct AsyncRdma<T> {
    inner: T,
    found: Result<Found, String>,
    counters: Arc<Counters>,
    deadlines: Deadlines,
}

impl<T: Transport> AsyncRdma<T> {
    /// Looks for a card; that there is none is told in [`Transport::ability`].
    pub fn new(inner: T, choice: &Choice, deadlines: Deadlines) -> Self {
        let found = find(choice).map_err(|error| error.to_string());
        Self { inner, found, counters: Arc::default(), deadlines }
    }
}

/// A queue pair without its far end.
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
        let far: QueuePairEndpoint =
            serde_json::from_slice(&answered.message).map_err(|_| refused("its end of a queue pair makes no sense".into()))?;
        rdma.ibv_connect(far).await.map_err(|error| refused(Refusal::new(error)))?;
        Ok(Arc::new(AsyncConnection { inner, address, buffers: Buffers::new(rdma, self.counters.clone()) }))
    }

    async fn serve(&self, service: Arc<dyn Service>) -> io::Result<Serving> {
        let (found, counters) = (self.found.clone(), self.counters.clone());
        self.inner.serve(Arc::new(Welcome { found, counters, service, peers: Mutex::default(), deadlines: self.deadlines })).await
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
    /// A buffer for a request, unless it is too large for one, or none is free in time.
    async fn buffer(&self, len: u64, limit: Duration) -> Option<Buffer> {
        if len == 0 || len > BUFFER_LEN as u64 { None } else { self.buffers.take(limit).await }
    }

    fn refused(&self, reason: &str) -> TransportError {
        TransportError::Refused { peer: self.peer(), address: self.address, refusal: reason.into() }
    }

    async fn ask(&self, asking: Vec<u8>, buffer: &mut Buffer, limit: Duration) -> Result<(Vec<u8>, Moved), TransportError> {
        // Until it is answered the far side may write: without an answer nobody else may have the buffer.
        buffer.is_lent = true;
        let pulled = match self.inner.pull(asking, Vec::new(), limit).await {
            Err(error @ TransportError::Refused { .. }) => {
                buffer.is_lent = false;
                return Err(error);
            }
            pulled => pulled?,
        };
        buffer.is_lent = false;
        let (message, moved) = split(&pulled.message).ok_or_else(|| self.refused("its answer makes no sense"))?;
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

    async fn pull(&self, mut message: Vec<u8>, mut slots: Vec<Slot>, limit: Duration) -> Result<Pulled, TransportError> {
        let lens: Vec<u64> = slots.iter().map(|slot| slot.len() as u64).collect();
        if message.len() < MESSAGE_LEN_MAX / 2
            && let Some(mut buffer) = self.buffer(lens.iter().sum(), limit).await
        {
            let place = Place { buffer: buffer.token().ok_or_else(|| self.refused("no token"))?, lens };
            let (message, moved) = self.ask(join(&message, &place, PULL), &mut buffer, limit).await?;
            if let Moved::Yes(mut lens) = moved {
                let fits = lens.len() <= slots.len() && lens.iter().zip(&slots).all(|(&len, slot)| len <= slot.len() as u64);
                if !fits {
                    return Err(self.refused("it answers with more than there is room for"));
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

    async fn offer(&self, mut message: Vec<u8>, payload: Slot, len: usize, limit: Duration) -> Result<Offered, TransportError> {
        if len > payload.len() {
            return Err(TransportError::TooLong(len));
        }
        if message.len() < MESSAGE_LEN_MAX / 2
            && let Some(mut buffer) = self.buffer(len as u64, limit).await
        {
            buffer.write(0, &payload[..len]);
            let place = Place { buffer: buffer.token().ok_or_else(|| self.refused("no token"))?, lens: vec![len as u64] };
            let (message, moved) = self.ask(join(&message, &place, OFFER), &mut buffer, limit).await?;
            if let Moved::Yes(_) = moved {
                return Ok(Offered { message, payload });
            }
        }
        message.push(FOR_SERVICE);
        self.inner.offer(message, payload, len, limit).await
    }
}

/// The service that the inner transport sees.
struct Welcome {
    found: Result<Found, String>,
    counters: Arc<Counters>,
    service: Arc<dyn Service>,
    /// The queue pair that each peer has set up last.
    peers: Mutex<HashMap<NodeId, Arc<Buffers>>>,
    deadlines: Deadlines,
}

impl Welcome {
    async fn set_up(&self, from: NodeId, message: &[u8]) -> Result<Vec<u8>, Refusal> {
        let (_, far) = split::<QueuePairEndpoint>(message).ok_or("an end of a queue pair that makes no sense")?;
        let mut rdma = queue_pair(self.found.as_ref().map_err(Clone::clone)?).map_err(Refusal::new)?;
        let end = serde_json::to_vec(&rdma.get_qp_endpoint()).map_err(Refusal::new)?;
        rdma.ibv_connect(far).await.map_err(Refusal::new)?;
        self.peers.lock().unwrap_or_else(PoisonError::into_inner).insert(from, Buffers::new(rdma, self.counters.clone()));
        Ok(end)
    }

    fn buffers(&self, from: NodeId) -> Result<Arc<Buffers>, Refusal> {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.get(&from).cloned().ok_or_else(|| "it has set no queue pair up".into())
    }

    async fn pull(&self, from: NodeId, message: &[u8]) -> Result<Vec<u8>, Refusal> {
        let (message, place) = split::<Place>(message).ok_or("a request that makes no sense")?;
        let buffers = self.buffers(from)?;
        let Answer { message, pieces } = self.service.pulled(from, message.to_vec(), place.lens.clone()).await?;
        let lens: Vec<u64> = pieces.iter().map(Piece::len).collect();
        let fits = lens.len() <= place.lens.len() && lens.iter().zip(&place.lens).all(|(len, room)| len <= room);
        let total = lens.iter().sum::<u64>() as usize;
        if !fits || total > place.buffer.len.min(BUFFER_LEN) {
            return Err("the answer does not fit".into());
        }
        let moved = match buffers.take(self.deadlines.request).await {
            Some(buffer) => {
                match buffer.fill(pieces).await {
                    Ok(filled) => filled.write_to(RemoteMr::new(place.buffer), total).await.is_ok(),
                    // By the inner transport only those pieces fail that cannot be read.
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
        let (message, place) = split::<Place>(message).ok_or("a request that makes no sense")?;
        let len = place.lens.first().copied().unwrap_or(0);
        let failed = Arc::new(Mutex::new(false));
        let landing =
            AsyncLanding { buffers: self.buffers(from)?, place, failed: failed.clone(), patience: self.deadlines.request };
        let answered = self.service.offered(from, message.to_vec(), Incoming::new(len, Box::new(landing))).await;
        let has_failed = *failed.lock().unwrap_or_else(PoisonError::into_inner);
        let (message, moved) = match answered {
            Ok(message) => (message, Moved::Yes(Vec::new())),
            // Nothing was taken: it can be offered another way.
            Err(_) if has_failed => (Vec::new(), Moved::No),
            Err(refusal) => return Err(refusal),
        };
        let mut answer = join(&message, &moved, 0);
        answer.pop();
        Ok(answer)
    }
}

#[async_trait]
impl Service for Welcome {
    async fn pulled(&self, from: NodeId, mut message: Vec<u8>, room: Vec<u64>) -> Result<Answer, Refusal> {
        let message = match message.pop() {
            Some(FOR_SERVICE) => return self.service.pulled(from, message, room).await,
            Some(SET_UP) => self.set_up(from, &message).await?,
            Some(PULL) => self.pull(from, &message).await?,
            Some(OFFER) => self.offer(from, &message).await?,
            _ => return Err("a message that no peer sends".into()),
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
    place: Place,
    failed: Arc<Mutex<bool>>,
    patience: Duration,
}

#[async_trait]
impl Landing for AsyncLanding {
    async fn land(self: Box<Self>, mut slot: Slot) -> io::Result<Slot> {
        let len = self.place.lens.first().copied().unwrap_or(0) as usize;
        let read = async {
            let buffer = self.buffers.take(self.patience).await.ok_or(io::ErrorKind::TimedOut)?;
            buffer.read_from(RemoteMr::new(self.place.buffer), len).await
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
