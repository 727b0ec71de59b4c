//! The connection of a node to itself. It calls the local service directly and copies the answer's bytes into the slots.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use dayfly_meta::id::NodeId;
use dayfly_transport::{
    Answer, Connection, Incoming, Landing, LossCause, Piece, Pulled, Refusal, Service, Slot, TransportError, Unread,
};
use tokio::time::timeout;

use crate::blocking::Blocking;

/// A request's deadline is divided into so many ticks.
const WAIT_TICKS: u32 = 16;

/// A connection to the service of this node. Deadlines hold as for any peer.
pub(super) struct Loopback {
    node: NodeId,
    address: SocketAddr,
    /// Weak, to avoid a cycle: the service holds parts of the node, and these parts hold this connection.
    service: Weak<dyn Service>,
    blocking: Arc<dyn Blocking>,
}

impl Loopback {
    pub(super) fn new(node: NodeId, address: SocketAddr, service: Weak<dyn Service>, blocking: Arc<dyn Blocking>) -> Self {
        Self { node, address, service, blocking }
    }

    fn service(&self) -> Result<Arc<dyn Service>, TransportError> {
        let closed = TransportError::Lost { peer: self.node, address: self.address, cause: LossCause::Closed };
        self.service.upgrade().ok_or(closed)
    }

    fn refused(&self, refusal: Refusal) -> TransportError {
        TransportError::Refused { peer: self.node, address: self.address, refusal }
    }

    async fn within<T>(
        &self,
        limit: Duration,
        work: impl Future<Output = Result<T, TransportError>>,
    ) -> Result<T, TransportError> {
        let mut work = pin!(work);
        // If this node stands still, that counts as one tick at most.
        for _ in 0..WAIT_TICKS {
            if let Ok(done) = timeout(limit / WAIT_TICKS, &mut work).await {
                return done;
            }
        }
        Err(TransportError::Timeout { peer: self.node, address: self.address, timeout: limit })
    }
}

#[async_trait]
impl Connection for Loopback {
    fn peer(&self) -> NodeId {
        self.node
    }

    fn is_lost(&self) -> bool {
        self.service.strong_count() == 0
    }

    async fn pull(&self, message: Vec<u8>, slots: Vec<Slot>, limit: Duration) -> Result<Pulled, TransportError> {
        let service = self.service()?;
        self.within(limit, async move {
            let room = slots.iter().map(|slot| slot.len() as u64).collect();
            let answered = service.pulled(self.node, message, room).await;
            let Answer { message, pieces } = answered.map_err(|refusal| self.refused(refusal))?;
            let reads_files = pieces.iter().any(|piece| matches!(piece, Piece::File { .. }));
            let fill = move || fill(&pieces, slots);
            // A drive may take long, so files are not read on a runtime thread.
            let filled = match reads_files {
                true => self.blocking.run(fill).await.map_err(|error| self.refused(Refusal::new(error)))?,
                false => fill(),
            };
            let Filled { slots, lens, unread } = filled.map_err(|reason| self.refused(reason.into()))?;
            Ok(Pulled { message, slots, lens, unread })
        })
        .await
    }

    async fn offer(
        &self,
        message: Vec<u8>,
        payload: &mut Option<Slot>,
        len: usize,
        limit: Duration,
    ) -> Result<Vec<u8>, TransportError> {
        let service = self.service()?;
        let offered = Arc::new(Mutex::new(payload.take()));
        let landing = LoopbackLanding { payload: offered.clone(), len };
        let answering = service.offered(self.node, message, Incoming::new(len as u64, Box::new(landing)));
        let answered = self.within(limit, async { answering.await.map_err(|refusal| self.refused(refusal)) }).await;
        *payload = offered.lock().unwrap_or_else(PoisonError::into_inner).take();
        answered
    }
}

struct Filled {
    slots: Vec<Slot>,
    lens: Vec<u64>,
    unread: Unread,
}

/// Copies each piece of an answer into its slot. Blocks while a piece is read from a file.
fn fill(pieces: &[Piece], mut slots: Vec<Slot>) -> Result<Filled, &'static str> {
    let (mut lens, mut unread) = (Vec::with_capacity(pieces.len()), Unread::default());
    if pieces.len() > slots.len() {
        return Err("the answer has more pieces than there are slots");
    }
    for (number, (piece, slot)) in (0..).zip(pieces.iter().zip(&mut slots)) {
        let room = slot.get_mut(..piece.len() as usize).ok_or("a piece of the answer does not fit in its slot")?;
        if let Err(error) = copy(piece, room) {
            if unread.pieces.is_empty() {
                unread.reason = format!("its drive cannot be read: {error}");
            }
            unread.pieces.push(number);
        }
        lens.push(piece.len());
    }
    Ok(Filled { slots, lens, unread })
}

fn copy(piece: &Piece, room: &mut [u8]) -> io::Result<()> {
    match piece {
        Piece::Bytes(bytes) => room.copy_from_slice(bytes),
        Piece::File { file, offset, revoked, .. } => {
            file.read_exact_at(room, *offset)?;
            if revoked.load(Ordering::Acquire) {
                return Err(io::Error::other("the bytes were freed while they were read"));
            }
        }
    }
    Ok(())
}

/// Lands offered bytes by copying them. A worker's batches for its own node do not come this way.
struct LoopbackLanding {
    payload: Arc<Mutex<Option<Slot>>>,
    len: usize,
}

#[async_trait]
impl Landing for LoopbackLanding {
    async fn land(self: Box<Self>, mut slot: Slot) -> io::Result<Slot> {
        let payload = self.payload.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = payload.as_ref().and_then(|payload| payload.get(..self.len)).ok_or(io::ErrorKind::ConnectionReset)?;
        slot[..self.len].copy_from_slice(bytes);
        Ok(slot)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::atomic::AtomicBool;

    use dayfly_transport::Region;

    use super::*;
    use crate::blocking::Threads;

    /// Answers a pull with a part of a file and with the pull's message, answers an offer with the offered bytes, and never
    /// answers the message "hang".
    struct Echo {
        file: Arc<std::fs::File>,
        region: Region,
        is_revoked: bool,
    }

    #[async_trait]
    impl Service for Echo {
        async fn pulled(&self, from: NodeId, message: Vec<u8>, _room: Vec<u64>) -> Result<Answer, Refusal> {
            match &message[..] {
                b"hang" => std::future::pending().await,
                b"reject" => Err(format!("node {from} may not").into()),
                _ => {
                    let revoked = Arc::new(AtomicBool::new(self.is_revoked));
                    let file = Piece::File { file: self.file.clone(), offset: 1, len: 3, revoked };
                    Ok(Answer { pieces: vec![file, Piece::Bytes(message.clone())], message })
                }
            }
        }

        async fn offered(&self, _from: NodeId, _message: Vec<u8>, incoming: Incoming) -> Result<Vec<u8>, Refusal> {
            let len = incoming.len();
            let slot = incoming.land(self.region.slot(len).unwrap()).await.map_err(Refusal::new)?;
            Ok(slot[..len as usize].to_vec())
        }
    }

    fn loopback(is_revoked: bool) -> (Arc<dyn Service>, Loopback, Region) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"abcd").unwrap();
        let region = Region::new(1 << 20).unwrap();
        let service: Arc<dyn Service> = Arc::new(Echo { file: Arc::new(file), region: region.clone(), is_revoked });
        let address = "127.0.0.1:1".parse().unwrap();
        let loopback = Loopback::new(NodeId(7), address, Arc::downgrade(&service), Arc::new(Threads));
        (service, loopback, region)
    }

    const LIMIT: Duration = Duration::from_secs(30);

    #[tokio::test]
    async fn a_node_that_asks_itself_gets_files_and_bytes_and_lands_offers() {
        let (_service, loopback, region) = loopback(false);
        let slots = || vec![region.slot(3).unwrap(), region.slot(8).unwrap()];
        let pulled = loopback.pull(b"hello".to_vec(), slots(), LIMIT).await.unwrap();
        assert_eq!((&pulled.message[..], &pulled.lens[..]), (&b"hello"[..], &[3, 5][..]));
        assert_eq!((&pulled.slots[0][..3], &pulled.slots[1][..5]), (&b"bcd"[..], &b"hello"[..]));
        assert!(pulled.unread.pieces.is_empty());
        let mut payload = region.slot(4);
        payload.as_mut().unwrap()[..4].copy_from_slice(b"wxyz");
        let answer = loopback.offer(Vec::new(), &mut payload, 4, LIMIT).await.unwrap();
        assert_eq!((&answer[..], &payload.unwrap()[..4]), (&b"wxyz"[..], &b"wxyz"[..]));
    }

    #[tokio::test]
    async fn a_node_that_asks_itself_meets_deadlines_refusals_and_freed_bytes_like_any_peer() {
        let (service, loopback, region) = loopback(true);
        let late = loopback.pull(b"hang".to_vec(), Vec::new(), Duration::from_millis(1)).await.err();
        assert!(matches!(late, Some(TransportError::Timeout { peer: NodeId(7), .. })));
        let refused = loopback.pull(b"reject".to_vec(), Vec::new(), LIMIT).await.err();
        assert!(matches!(refused, Some(TransportError::Refused { refusal, .. }) if refusal.to_string().contains("may not")));
        let short = loopback.pull(b"hello".to_vec(), vec![region.slot(3).unwrap()], LIMIT).await.err();
        assert!(matches!(short, Some(TransportError::Refused { .. })));
        let slots = vec![region.slot(3).unwrap(), region.slot(5).unwrap()];
        assert_eq!(loopback.pull(b"hello".to_vec(), slots, LIMIT).await.unwrap().unread.pieces, [0]);
        drop(service);
        assert!(loopback.is_lost());
        assert!(matches!(loopback.pull(Vec::new(), Vec::new(), LIMIT).await.err(), Some(TransportError::Lost { .. })));
    }
}
