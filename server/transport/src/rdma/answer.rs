//! Answers the peers' requests over queue pairs. Bytes are read into registered memory and written into the asker's memory. The
//! last write is the answer itself, which notifies the asker.

use std::any::Any;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use async_trait::async_trait;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::PAGE_SIZE;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinError, JoinSet};
use tokio::time::timeout;

use super::ask::PROGRESS;
use super::direct::{self, DirectFiles};
use super::engine::{Batch, Engine, Events, QueueId};
use super::message::{Ask, WireAnswer, WireRequest, answer_len};
use super::offers::OfferOutcomes;
use super::queue::{Action, Remote, Work};
use crate::contract::{Answer, Incoming, Landing, Piece, Service, Unread};
use crate::error::PieceError;
use crate::fair_queue::{FairPermit, FairQueue};
use crate::page_cache::{PageCacheLoader, is_cached, read_cached};
use crate::region::{Region, Slot};

/// The most operations that are posted together.
const WORKS_TOGETHER: usize = 64;
/// Reads of pieces that are at least this long bypass the page cache, if the pieces are not cached and their offsets allow it.
const DIRECT_LEN_MIN: u64 = 64 << 10;
/// One answer has at most this many reads under way that bypass the page cache.
const DIRECT_READS_MAX: usize = 8;
/// Number of small pieces that an answer waits for at a time.
const WAIT_TOGETHER: usize = 64;

/// Receives the requests of a queue pair, on the engine's thread.
pub(super) struct Requests(pub(super) Option<mpsc::Sender<WireRequest>>);

impl Events for Requests {
    fn on_message(&mut self, message: &[u8]) -> Result<(), &'static str> {
        let request = WireRequest::decode(message).ok_or("the peer's request is malformed")?;
        let requests = self.0.as_ref().ok_or("it has ended")?;
        requests.try_send(request).map_err(|_| "the peer sent more requests than its window allows")
    }

    fn on_completion(&mut self, _number: u32) -> Result<(), &'static str> {
        Err("the peer sent an answer on a queue pair on which it may only ask")
    }

    fn on_end(&mut self, _reason: &str) {
        // Dropping the sender ends the loop in `Answerer::run`.
        self.0 = None;
    }
}

/// Everything that answers need; clones share it.
#[derive(Clone)]
pub(super) struct Answerer {
    pub(super) engine: Arc<Engine>,
    /// The longest operation in bytes. Longer pieces are written by several operations.
    pub(super) write_len: u64,
    /// Registered memory through which the bytes of pieces pass.
    pub(super) staging: Region,
    /// Registered memory for the answers themselves.
    pub(super) answers: Region,
    pub(super) drive_readers: FairQueue,
    pub(super) direct: Arc<DirectFiles>,
    pub(super) service: Arc<dyn Service>,
    pub(super) outcomes: Arc<OfferOutcomes>,
    pub(super) deadlines: Deadlines,
}

impl Answerer {
    /// Answers requests until the queue pair has ended. Offers that are being taken are still completed then.
    pub(super) async fn run(self, (peer, nonce): (NodeId, u64), queue: QueueId, mut requests: mpsc::Receiver<WireRequest>) {
        let (mut pulls, mut offers) = (JoinSet::new(), JoinSet::new());
        while let Some(request) = requests.recv().await {
            while let Some(ended) = pulls.try_join_next().or_else(|| offers.try_join_next()) {
                self.end_if_failed(queue, ended);
            }
            let answerer = self.clone();
            match request.ask {
                Ask::Ping => drop(pulls.spawn(async move {
                    let pong = done(Vec::new());
                    answerer.finish(queue, &request, pong).await
                })),
                Ask::Pull => drop(pulls.spawn(async move { answerer.pull(peer, queue, request).await })),
                Ask::Offer => drop(offers.spawn(async move { answerer.offer(peer, queue, nonce, request).await })),
            }
        }
        pulls.abort_all();
        let _ = timeout(self.deadlines.landing, async { while offers.join_next().await.is_some() {} }).await;
    }

    /// Ends the queue pair if an answer panicked, because a request that is never answered keeps its asker's slots.
    fn end_if_failed(&self, queue: QueueId, ended: Result<bool, JoinError>) {
        if ended.is_err() {
            self.engine.end(queue, "a request could not be answered");
        }
    }

    async fn pull(&self, peer: NodeId, queue: QueueId, mut request: WireRequest) -> bool {
        let room: Vec<u64> = request.ranges.iter().map(|(_, len)| u64::from(*len)).collect();
        let message = std::mem::take(&mut request.message);
        let answered = match self.service.pulled(peer, message, room).await {
            Ok(answer) => self.write_pieces(peer, queue, &request, answer).await,
            Err(refusal) => WireAnswer::Refused(refusal),
        };
        self.finish(queue, &request, answered).await
    }

    /// Writes the pieces into the asker's memory. Returns the answer, which the caller sends after them.
    async fn write_pieces(&self, peer: NodeId, queue: QueueId, request: &WireRequest, answer: Answer) -> WireAnswer {
        let Answer { message, pieces } = answer;
        let fits = pieces.len() <= request.ranges.len()
            && pieces.iter().zip(&request.ranges).all(|(piece, (_, room))| piece.len() <= u64::from(*room));
        if !fits {
            return WireAnswer::Refused("the answer does not fit".into());
        }
        let lens: Vec<u32> = pieces.iter().map(|piece| piece.len() as u32).collect();
        // This is checked first, so that no bytes are moved for nothing.
        if answer_len(lens.len(), message.len()) > request.answer_len as usize {
            return WireAnswer::TooLong;
        }
        let mut gather = Gather {
            answerer: self,
            queue,
            request,
            loader: PageCacheLoader::new(&pieces, peer, &self.drive_readers, DIRECT_LEN_MIN - 1),
            left: lens.iter().map(|&len| u64::from(len)).sum(),
            chain: None,
            direct: None,
            loaded_until: 0,
            notified: Instant::now(),
            unread: Unread::default(),
        };
        match gather.send(&pieces).await {
            Ok(()) => WireAnswer::Done { lens, message, unread: gather.unread },
            Err(error) => {
                // No write may follow the answer, so reads that would still lead to writes are aborted.
                if let Some(DirectReads { mut reads, .. }) = gather.direct.take() {
                    reads.shutdown().await;
                }
                tracing::debug!(node = %peer, %error, "answer aborted");
                WireAnswer::Refused(format!("cannot send the answer: {error}").into())
            }
        }
    }

    async fn offer(&self, peer: NodeId, queue: QueueId, nonce: u64, mut request: WireRequest) -> bool {
        let Some(&(from, len)) = request.ranges.first() else { return false };
        let message = std::mem::take(&mut request.message);
        let is_incomplete = Arc::new(AtomicBool::new(false));
        let landing = RdmaLanding { answerer: self.clone(), queue, from, len, is_incomplete: is_incomplete.clone() };
        let incoming = Incoming::new(u64::from(len), Box::new(landing));
        let outcome = self.outcomes.begin(peer, nonce, request.number);
        let answered = self.service.offered(peer, message, incoming).await;
        // Bytes that did not land may land when the offer is sent again over another path, so this answer is not remembered.
        if !is_incomplete.load(Ordering::Relaxed) {
            outcome.end(answered.clone());
        }
        // If the answer does not fit, the asker sends the offer again over the inner transport.
        let fits = answered.as_ref().is_ok_and(|message| answer_len(0, message.len()) <= request.answer_len as usize);
        let answered = answered.map_or_else(WireAnswer::Refused, done);
        let has_arrived = self.finish(queue, &request, answered).await;
        if has_arrived && fits {
            outcome.forget();
        }
        has_arrived
    }

    /// Writes the answer and notifies the asker. Returns whether the answer arrived.
    async fn finish(&self, queue: QueueId, request: &WireRequest, answered: WireAnswer) -> bool {
        let bytes = answered.encode(request.answer_len as usize);
        // Answers have memory of their own, so that answers and the bytes of pieces never wait for each other.
        let slot = self.answers.slot_within(bytes.len() as u64, self.deadlines.request).await;
        let work = slot
            .as_ref()
            .and_then(|slot| work(slot, 0, bytes.len() as u32, Action::WriteAndNotify(request.answer, request.number)));
        let (Some(mut slot), Some(work)) = (slot, work) else {
            self.engine.end(queue, "there is no memory for an answer");
            return false;
        };
        slot[..bytes.len()].copy_from_slice(&bytes);
        self.post(queue, vec![work], slot).await.is_ok()
    }

    /// Allocates registered memory for the bytes of pieces.
    async fn slot(&self, len: u64) -> io::Result<Slot> {
        let slot = self.staging.slot_within(len, self.deadlines.request).await;
        slot.ok_or_else(|| io::Error::new(io::ErrorKind::TimedOut, "too many answers are under way"))
    }

    fn post(&self, queue: QueueId, works: Vec<Work>, slot: Slot) -> oneshot::Receiver<Box<dyn Any + Send>> {
        let (done, posted) = oneshot::channel();
        self.engine.post(queue, Batch { works, hold: Box::new(slot), done: Some(done) });
        posted
    }
}

fn work(slot: &Slot, at: u64, len: u32, action: Action) -> Option<Work> {
    Some(Work { action, address: slot.address() + at, len, local_key: slot.keys()?.local })
}

fn done(message: Vec<u8>) -> WireAnswer {
    WireAnswer::Done { lens: Vec::new(), message, unread: Unread::default() }
}

fn broken() -> io::Error {
    io::ErrorKind::BrokenPipe.into()
}

/// A series of write operations that will be posted together. All of their bytes are in one slot.
struct Chain {
    slot: Slot,
    used: usize,
    works: Vec<Work>,
}

/// The pieces of an answer that is being sent.
struct Gather<'a> {
    answerer: &'a Answerer,
    queue: QueueId,
    request: &'a WireRequest,
    loader: PageCacheLoader<'a>,
    /// Bytes that have not been added to a chain yet.
    left: u64,
    chain: Option<Chain>,
    direct: Option<DirectReads>,
    /// The answer has already waited for the small pieces whose numbers are lower than this.
    loaded_until: usize,
    /// The time at which the asker was last notified of progress.
    notified: Instant,
    unread: Unread,
}

/// The reads that bypass the page cache. Several run at a time, because a single read does not saturate a drive.
struct DirectReads {
    /// The number of the piece, and the result: the outer error is about the queue pair, the inner one about the piece.
    reads: JoinSet<(usize, io::Result<Result<(), PieceError>>)>,
    _permit: Option<Arc<FairPermit>>,
}

impl Gather<'_> {
    /// Writes all pieces. Pieces that cannot be read are named in the answer, and the others are written as usual.
    async fn send(&mut self, pieces: &[Piece]) -> io::Result<()> {
        for (at, piece) in pieces.iter().enumerate() {
            let mut from = 0;
            while from < piece.len() {
                let len = (piece.len() - from).min(self.answerer.write_len);
                let mut read = Ok(());
                if !self.send_direct(at, piece, from, len as usize).await? {
                    read = self.send_part(at, piece, from, len as usize).await?;
                }
                if let Err(error) = read {
                    self.left -= piece.len() - from;
                    self.fail(at, &error);
                    break;
                }
                self.left -= len;
                from += len;
            }
            if let Piece::File { revoked, .. } = piece
                && revoked.load(Ordering::Acquire)
            {
                self.fail(at, &PieceError::Revoked);
            }
        }
        self.flush();
        while self.next_direct().await? {}
        Ok(())
    }

    /// Records that a piece could not be read. Some of its bytes may have been written; the asker ignores them.
    fn fail(&mut self, piece: usize, error: &PieceError) {
        tracing::warn!(piece, %error, "cannot read a piece of an answer");
        self.unread.add(piece, error);
    }

    /// Waits for one of the reads that bypass the page cache. Returns `false` if there are none.
    async fn next_direct(&mut self) -> io::Result<bool> {
        let Some(DirectReads { reads, .. }) = &mut self.direct else { return Ok(false) };
        let Some(read) = reads.join_next().await else { return Ok(false) };
        let (piece, read) = read.map_err(io::Error::other)?;
        if let Err(error) = read? {
            self.fail(piece, &error);
        }
        self.notify_progress();
        Ok(true)
    }

    /// Sends a part of a piece with a read that bypasses the page cache, if the piece is large, the part is not cached, and the
    /// file system allows such reads. Otherwise sends nothing and returns `false`.
    async fn send_direct(&mut self, at: usize, piece: &Piece, from: u64, len: usize) -> io::Result<bool> {
        let Piece::File { file, offset, revoked, .. } = piece else { return Ok(false) };
        let offset = offset + from;
        if piece.len() < DIRECT_LEN_MIN || !offset.is_multiple_of(PAGE_SIZE) {
            return Ok(false);
        }
        let direct = self.answerer.direct.get(file, offset + len as u64);
        let Some(file) = direct.filter(|direct| !direct.is_cached(offset, len)) else { return Ok(false) };
        let to = self.target(at, from);
        // Posts the chain first: an answer that waits must not hold memory that others wait for.
        self.flush();
        let direct = match &mut self.direct {
            Some(direct) => direct,
            none => none.insert(DirectReads { reads: JoinSet::new(), _permit: self.loader.permit().await }),
        };
        if direct.reads.len() == DIRECT_READS_MAX {
            self.next_direct().await?;
        }
        let mut slot = self.answerer.slot(direct::slot_len(len)).await?;
        let (answerer, queue, revoked) = (self.answerer.clone(), self.queue, revoked.clone());
        let reading = async move {
            let reading = tokio::task::spawn_blocking(move || file.read(offset, len, &mut slot).map(|()| slot));
            let slot = match reading.await.map_err(io::Error::other)? {
                Ok(slot) => slot,
                Err(error) => return Ok(Err(error.into())),
            };
            if revoked.load(Ordering::Acquire) {
                return Ok(Err(PieceError::Revoked));
            }
            let start = direct::start(&slot) as u64;
            let work = work(&slot, start, len as u32, Action::Write(to)).ok_or_else(broken)?;
            // Nothing waits for this write: operations complete in order, so it has completed when the answer completes.
            drop(answerer.post(queue, vec![work], slot));
            Ok(Ok(()))
        };
        let Some(direct) = &mut self.direct else { return Err(broken()) };
        direct.reads.spawn(async move { (at, reading.await) });
        Ok(true)
    }

    /// Returns the asker's memory for the bytes of a piece, starting at offset `from`.
    fn target(&self, at: usize, from: u64) -> Remote {
        let (range, _) = self.request.ranges[at];
        Remote { address: range.address.wrapping_add(from), key: range.key }
    }

    /// Sends a part of a piece through the page cache. The outer error is about the queue pair, the inner one about the piece.
    async fn send_part(&mut self, at: usize, piece: &Piece, from: u64, len: usize) -> io::Result<Result<(), PieceError>> {
        let mut chain = self.room(len).await?;
        let mut start = chain.used;
        match piece {
            Piece::Bytes(bytes) => chain.slot[start..start + len].copy_from_slice(&bytes[from as usize..from as usize + len]),
            Piece::File { file, offset, .. } => {
                let offset = offset + from;
                let mut got = read_cached(file, offset, &mut chain.slot[start..start + len]);
                let is_new = piece.len() < DIRECT_LEN_MIN && at >= self.loaded_until;
                if got.as_ref().is_ok_and(|&got| got < len) && is_new && !is_cached(file, offset, len as u64) {
                    // Posts the chain first: an answer that waits must not hold memory that others wait for.
                    self.chain = Some(chain);
                    self.flush();
                    self.loaded_until = at + WAIT_TOGETHER;
                    self.loader.load(at, self.loaded_until).await;
                    chain = self.room(len).await?;
                    start = chain.used;
                    got = read_cached(file, offset, &mut chain.slot[start..start + len]);
                }
                let mut failure = self.loader.failure(at);
                match got {
                    Ok(got) if got < len && failure.is_none() => {
                        let (file, offset) = (file.clone(), offset + got as u64);
                        let reading = tokio::task::spawn_blocking(move || {
                            let read = file.read_exact_at(&mut chain.slot[start + got..start + len], offset);
                            (chain, read)
                        });
                        let (back, read) = reading.await.map_err(io::Error::other)?;
                        (chain, failure) = (back, read.err().map(PieceError::from));
                    }
                    Ok(_) => {}
                    Err(error) => failure = Some(error.into()),
                }
                if let Some(error) = failure {
                    self.chain = Some(chain);
                    return Ok(Err(error));
                }
            }
        }
        chain.used += len;
        let to = self.target(at, from);
        let next = work(&chain.slot, start as u64, len as u32, Action::Write(to)).ok_or_else(broken)?;
        // Writes whose bytes are adjacent in both nodes' memory become one operation.
        match chain.works.last_mut() {
            Some(Work { action: Action::Write(last), len: last_len, .. })
                if last.address.wrapping_add(u64::from(*last_len)) == to.address && last.key == to.key =>
            {
                *last_len += next.len;
            }
            _ => chain.works.push(next),
        }
        self.chain = Some(chain);
        self.notify_progress();
        Ok(Ok(()))
    }

    /// Takes the chain if it has room for `len` bytes and one more operation; otherwise posts the chain and starts another.
    async fn room(&mut self, len: usize) -> io::Result<Chain> {
        let has_room = |chain: &Chain| chain.works.len() < WORKS_TOGETHER && chain.used + len <= chain.slot.len();
        if self.chain.as_ref().is_some_and(|chain| !has_room(chain)) {
            self.flush();
        }
        if let Some(chain) = self.chain.take() {
            return Ok(chain);
        }
        let size = self.left.clamp(len as u64, self.answerer.write_len);
        let slot = self.answerer.slot(size).await?;
        Ok(Chain { slot, used: 0, works: Vec::with_capacity(WORKS_TOGETHER) })
    }

    /// Posts the chain and does not wait for it: operations complete in order, so the chain has completed when the answer
    /// completes.
    fn flush(&mut self) {
        if let Some(Chain { slot, works, .. }) = self.chain.take()
            && !works.is_empty()
        {
            drop(self.answerer.post(self.queue, works, slot));
        }
    }

    /// Notifies the asker now and then that the request is making progress, so that the asker does not give up.
    fn notify_progress(&mut self) {
        if self.notified.elapsed() < self.answerer.deadlines.ping_interval {
            return;
        }
        self.notified = Instant::now();
        let WireRequest { answer, number, .. } = *self.request;
        let works = vec![Work { action: Action::WriteAndNotify(answer, number | PROGRESS), address: 0, len: 0, local_key: 0 }];
        self.answerer.engine.post(self.queue, Batch { works, hold: Box::new(()), done: None });
    }
}

/// Reads offered bytes out of the asker's memory.
struct RdmaLanding {
    answerer: Answerer,
    queue: QueueId,
    from: Remote,
    len: u32,
    /// Set while bytes are missing.
    is_incomplete: Arc<AtomicBool>,
}

#[async_trait]
impl Landing for RdmaLanding {
    async fn land(self: Box<Self>, slot: Slot) -> io::Result<Slot> {
        self.is_incomplete.store(true, Ordering::Relaxed);
        let slot = self.read_all(slot).await?;
        self.is_incomplete.store(false, Ordering::Relaxed);
        Ok(slot)
    }
}

impl RdmaLanding {
    /// Reads all offered bytes into a slot.
    async fn read_all(&self, mut slot: Slot) -> io::Result<Slot> {
        let (len, step) = (u64::from(self.len), self.answerer.write_len);
        if slot.keys().is_some() {
            // Posts several operations together, as many as a batch may have.
            let together = step * WORKS_TOGETHER as u64;
            for at in (0..len).step_by(together as usize) {
                slot = self.read(slot, at, at, together.min(len - at)).await?;
            }
            return Ok(slot);
        }
        // The slot's memory is not registered, so the bytes pass through registered memory.
        for at in (0..len).step_by(step as usize) {
            let part = step.min(len - at);
            let staged = self.answerer.slot(part).await?;
            let staged = self.read(staged, 0, at, part).await?;
            slot[at as usize..(at + part) as usize].copy_from_slice(&staged[..part as usize]);
        }
        Ok(slot)
    }

    /// Reads `len` offered bytes, starting at offset `from`, into a slot at offset `at`.
    async fn read(&self, slot: Slot, at: u64, from: u64, len: u64) -> io::Result<Slot> {
        let step = self.answerer.write_len;
        let part = |done: u64| {
            let source = Remote { address: self.from.address.wrapping_add(from + done), key: self.from.key };
            work(&slot, at + done, step.min(len - done) as u32, Action::Read(source))
        };
        let works = (0..len).step_by(step as usize).map(part).collect::<Option<Vec<_>>>().ok_or_else(broken)?;
        let landed = self.answerer.post(self.queue, works, slot);
        // After a timeout the slot stays with the engine: bytes may still land in it until the queue pair ends.
        let landed =
            timeout(self.answerer.deadlines.request, landed).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
        let hold = landed.map_err(|_| io::Error::from(io::ErrorKind::ConnectionReset))?;
        hold.downcast::<Slot>().map(|slot| *slot).map_err(|_| broken())
    }
}
