//! Our peers' requests over queue pairs: bytes are read into registered memory, written into the asker's places, and the last write,
//! the answer itself, tells it.

use std::any::Any;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
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
use super::message::{Answered, Ask, Request, answer_len};
use super::outcomes::Outcomes;
use super::queue::{Action, Remote, Work};
use crate::cold::{Cold, is_cached, read_cached};
use crate::turns::{Turn, Turns};
use crate::{Answer, GIVEN_UP, Incoming, Landing, Piece, Region, Service, Slot, Unread, drive_failure};

/// Operations posted together.
const WORKS_TOGETHER: usize = 64;
/// Pieces of at least this that are not in the page cache are read past it, if their place allows.
const DIRECT_LEN_MIN: u64 = 64 << 10;
/// So many of these at a time, for one answer.
const DIRECT_READS_MAX: usize = 8;
/// Small cold pieces are waited for so many at a time.
const WAIT_TOGETHER: usize = 64;

/// What comes in on a queue pair, on the engine's thread.
pub(super) struct Requests(pub(super) Option<mpsc::Sender<Request>>);

impl Events for Requests {
    fn received(&mut self, message: &[u8]) -> Result<(), &'static str> {
        let request = Request::decode(message).ok_or("its request makes no sense")?;
        let requests = self.0.as_ref().ok_or("it has ended")?;
        requests.try_send(request).map_err(|_| "it asks more than was agreed")
    }

    fn told(&mut self, _number: u32) -> Result<(), &'static str> {
        Err("it writes where it asks")
    }

    fn ended(&mut self, _reason: &str) {
        // Ends the loop that answers.
        self.0 = None;
    }
}

/// What answering takes; clones share it.
#[derive(Clone)]
pub(super) struct Answerer {
    pub(super) engine: Arc<Engine>,
    /// Longest operation; a longer piece is written in several.
    pub(super) write_len: u64,
    /// Registered memory that bytes take their way through.
    pub(super) staging: Region,
    /// The same for answers.
    pub(super) answers: Region,
    pub(super) turns: Turns,
    pub(super) direct: Arc<DirectFiles>,
    pub(super) service: Arc<dyn Service>,
    pub(super) outcomes: Arc<Outcomes>,
    pub(super) deadlines: Deadlines,
}

impl Answerer {
    /// Answers what comes in until the queue pair has ended. Offers that are being taken are brought to their end even then.
    pub(super) async fn run(self, (peer, nonce): (NodeId, u64), queue: QueueId, mut requests: mpsc::Receiver<Request>) {
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

    /// A request that will never be answered keeps its asker's slots: better that the queue pair ends.
    fn end_if_failed(&self, queue: QueueId, ended: Result<bool, JoinError>) {
        if ended.is_err() {
            self.engine.end(queue, "a request could not be answered");
        }
    }

    async fn pull(&self, peer: NodeId, queue: QueueId, mut request: Request) -> bool {
        let room: Vec<u64> = request.places.iter().map(|(_, len)| u64::from(*len)).collect();
        let message = std::mem::take(&mut request.message);
        let answered = match self.service.pulled(peer, message, room).await {
            Ok(answer) => self.move_pieces(peer, queue, &request, answer).await,
            Err(refusal) => Answered::Refused(refusal),
        };
        self.finish(queue, &request, answered).await
    }

    /// Writes the pieces into their places; the answer goes behind them.
    async fn move_pieces(&self, peer: NodeId, queue: QueueId, request: &Request, answer: Answer) -> Answered {
        let Answer { message, pieces } = answer;
        let fits = pieces.len() <= request.places.len()
            && pieces.iter().zip(&request.places).all(|(piece, (_, room))| piece.len() <= u64::from(*room));
        if !fits {
            return Answered::Refused("the answer does not fit".into());
        }
        let lens: Vec<u32> = pieces.iter().map(|piece| piece.len() as u32).collect();
        // Told here, it need not be found out behind all the bytes.
        if answer_len(lens.len(), message.len()) > request.answer_len as usize {
            return Answered::TooLong;
        }
        let mut gather = Gather {
            answerer: self,
            queue,
            request,
            cold: Cold::new(&pieces, peer, &self.turns, DIRECT_LEN_MIN - 1),
            left: lens.iter().map(|&len| u64::from(len)).sum(),
            chain: None,
            direct: None,
            warm_until: 0,
            told: Instant::now(),
            unread: Unread::default(),
        };
        match gather.send(&pieces).await {
            Ok(()) => Answered::Done { lens, message, unread: gather.unread },
            Err(error) => {
                // Nothing may be written behind the answer.
                if let Some(Direct { mut reads, .. }) = gather.direct.take() {
                    reads.shutdown().await;
                }
                tracing::debug!(%peer, %error, "an answer is given up");
                Answered::Refused(format!("cannot send what it holds: {error}").into())
            }
        }
    }

    async fn offer(&self, peer: NodeId, queue: QueueId, nonce: u64, mut request: Request) -> bool {
        let Some(&(from, len)) = request.places.first() else { return false };
        let message = std::mem::take(&mut request.message);
        let landing = RdmaLanding { answerer: self.clone(), queue, from, len };
        let incoming = Incoming { len: u64::from(len), landing: Box::new(landing) };
        let outcome = self.outcomes.begin(peer, nonce, request.number);
        let answered = self.service.offered(peer, message, incoming).await;
        outcome.end(answered.clone());
        // An answer that does not fit is asked for again.
        let fits = answered.as_ref().is_ok_and(|message| answer_len(0, message.len()) <= request.answer_len as usize);
        let answered = answered.map_or_else(Answered::Refused, done);
        let has_arrived = self.finish(queue, &request, answered).await;
        if has_arrived && fits {
            outcome.forget();
        }
        has_arrived
    }

    /// Writes the answer and tells of it; whether it arrived.
    async fn finish(&self, queue: QueueId, request: &Request, answered: Answered) -> bool {
        let bytes = answered.encode(request.answer_len as usize);
        // Their own room: what bytes wait for must not keep answers waiting, nor the other way about.
        let slot = self.answers.slot_within(bytes.len() as u64, self.deadlines.request).await;
        let work = slot
            .as_ref()
            .and_then(|slot| work(slot, 0, bytes.len() as u32, Action::WriteAndTell(request.answer, request.number)));
        let (Some(mut slot), Some(work)) = (slot, work) else {
            self.engine.end(queue, "there is no room for an answer");
            return false;
        };
        slot[..bytes.len()].copy_from_slice(&bytes);
        self.post(queue, vec![work], slot).await.is_ok()
    }

    /// Room in registered memory.
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

fn done(message: Vec<u8>) -> Answered {
    Answered::Done { lens: Vec::new(), message, unread: Unread::default() }
}

fn broken() -> io::Error {
    io::ErrorKind::BrokenPipe.into()
}

/// Writes that will be posted together, out of one slot.
struct Chain {
    slot: Slot,
    used: usize,
    works: Vec<Work>,
}

/// An answer's pieces on their way.
struct Gather<'a> {
    answerer: &'a Answerer,
    queue: QueueId,
    request: &'a Request,
    cold: Cold<'a>,
    /// Bytes that are not in a chain yet.
    left: u64,
    chain: Option<Chain>,
    direct: Option<Direct>,
    /// Small pieces before this have been waited for.
    warm_until: usize,
    told: Instant,
    unread: Unread,
}

/// Reads past the page cache: many at a time, for no drive gives all that it can to one.
struct Direct {
    /// Of these pieces; a text tells why one could not be read.
    reads: JoinSet<(usize, io::Result<Option<String>>)>,
    _turn: Option<Arc<Turn>>,
}

impl Gather<'_> {
    /// Writes all pieces. One that cannot be read is named in the answer; the others are written as ever.
    async fn send(&mut self, pieces: &[Piece]) -> io::Result<()> {
        for (at, piece) in pieces.iter().enumerate() {
            let mut from = 0;
            while from < piece.len() {
                let len = (piece.len() - from).min(self.answerer.write_len);
                let mut failure = None;
                if !self.send_direct(at, piece, from, len as usize).await? {
                    failure = self.send_part(at, piece, from, len as usize).await?;
                }
                if let Some(reason) = failure {
                    self.left -= piece.len() - from;
                    self.fail(at, &reason);
                    break;
                }
                self.left -= len;
                from += len;
            }
            if let Piece::File { revoked, .. } = piece
                && revoked.load(Ordering::Acquire)
            {
                self.fail(at, GIVEN_UP);
            }
        }
        self.flush();
        while self.next_direct().await? {}
        Ok(())
    }

    /// Notes that a piece does not count. Some of its bytes may have been written: nobody looks at them.
    fn fail(&mut self, piece: usize, reason: &str) {
        tracing::warn!(piece, reason, "a block cannot be read");
        self.unread.add(piece, reason);
    }

    /// Waits for one of the reads past the page cache; `false` if there are none.
    async fn next_direct(&mut self) -> io::Result<bool> {
        let Some(Direct { reads, .. }) = &mut self.direct else { return Ok(false) };
        let Some(read) = reads.join_next().await else { return Ok(false) };
        let (piece, read) = read.map_err(io::Error::other)?;
        if let Some(reason) = read? {
            self.fail(piece, &reason);
        }
        self.tell_progress();
        Ok(true)
    }

    /// Sends a part past the page cache, if it is large, cold, and of a file that allows it.
    async fn send_direct(&mut self, at: usize, piece: &Piece, from: u64, len: usize) -> io::Result<bool> {
        let Piece::File { file, offset, revoked, .. } = piece else { return Ok(false) };
        let offset = offset + from;
        if piece.len() < DIRECT_LEN_MIN || !offset.is_multiple_of(PAGE_SIZE) {
            return Ok(false);
        }
        let second = self.answerer.direct.of(file, offset + len as u64);
        let Some(file) = second.filter(|second| !second.is_cached(offset, len)) else { return Ok(false) };
        let to = self.place(at, from);
        // Who waits holds no room that others wait for.
        self.flush();
        let direct = match &mut self.direct {
            Some(direct) => direct,
            none => none.insert(Direct { reads: JoinSet::new(), _turn: self.cold.turn().await }),
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
                Err(error) => return Ok(Some(drive_failure(&error))),
            };
            if revoked.load(Ordering::Acquire) {
                return Ok(Some(GIVEN_UP.to_owned()));
            }
            let start = direct::start(&slot) as u64;
            let work = work(&slot, start, len as u32, Action::Write(to)).ok_or_else(broken)?;
            // That it is done shows when the answer behind it is.
            drop(answerer.post(queue, vec![work], slot));
            Ok(None)
        };
        let Some(direct) = &mut self.direct else { return Err(broken()) };
        direct.reads.spawn(async move { (at, reading.await) });
        Ok(true)
    }

    /// Where a piece's bytes go.
    fn place(&self, at: usize, from: u64) -> Remote {
        let (place, _) = self.request.places[at];
        Remote { address: place.address.wrapping_add(from), key: place.key }
    }

    /// Sends a part by way of the page cache; tells why it could not be read.
    async fn send_part(&mut self, at: usize, piece: &Piece, from: u64, len: usize) -> io::Result<Option<String>> {
        let mut chain = self.room(len).await?;
        let mut start = chain.used;
        match piece {
            Piece::Bytes(bytes) => chain.slot[start..start + len].copy_from_slice(&bytes[from as usize..from as usize + len]),
            Piece::File { file, offset, .. } => {
                let offset = offset + from;
                let mut got = read_cached(file, offset, &mut chain.slot[start..start + len]);
                let is_new = piece.len() < DIRECT_LEN_MIN && at >= self.warm_until;
                if got.as_ref().is_ok_and(|&got| got < len) && is_new && !is_cached(file, offset, len as u64) {
                    // Who waits holds no room that others wait for.
                    self.chain = Some(chain);
                    self.flush();
                    self.warm_until = at + WAIT_TOGETHER;
                    self.cold.warm(at, self.warm_until).await;
                    chain = self.room(len).await?;
                    start = chain.used;
                    got = read_cached(file, offset, &mut chain.slot[start..start + len]);
                }
                let mut failure = self.cold.failure(at);
                match got {
                    Ok(got) if got < len && failure.is_none() => {
                        let (file, offset) = (file.clone(), offset + got as u64);
                        let reading = tokio::task::spawn_blocking(move || {
                            let read = file.read_exact_at(&mut chain.slot[start + got..start + len], offset);
                            (chain, read)
                        });
                        let (back, read) = reading.await.map_err(io::Error::other)?;
                        (chain, failure) = (back, read.err().map(|error| drive_failure(&error)));
                    }
                    Ok(_) => {}
                    Err(error) => failure = Some(drive_failure(&error)),
                }
                if failure.is_some() {
                    self.chain = Some(chain);
                    return Ok(failure);
                }
            }
        }
        chain.used += len;
        let to = self.place(at, from);
        let next = work(&chain.slot, start as u64, len as u32, Action::Write(to)).ok_or_else(broken)?;
        // What lies together on both sides is one operation.
        match chain.works.last_mut() {
            Some(Work { action: Action::Write(last), len: last_len, .. })
                if last.address.wrapping_add(u64::from(*last_len)) == to.address && last.key == to.key =>
            {
                *last_len += next.len;
            }
            _ => chain.works.push(next),
        }
        self.chain = Some(chain);
        self.tell_progress();
        Ok(None)
    }

    /// Takes the chain if it has room for so many bytes and one more operation; else posts it and begins another.
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

    /// Posts the chain. That it is done shows when the answer behind it is.
    fn flush(&mut self) {
        if let Some(Chain { slot, works, .. }) = self.chain.take()
            && !works.is_empty()
        {
            drop(self.answerer.post(self.queue, works, slot));
        }
    }

    fn tell_progress(&mut self) {
        if self.told.elapsed() < self.answerer.deadlines.ping_interval {
            return;
        }
        self.told = Instant::now();
        let Request { answer, number, .. } = *self.request;
        let works = vec![Work { action: Action::WriteAndTell(answer, number | PROGRESS), address: 0, len: 0, local_key: 0 }];
        self.answerer.engine.post(self.queue, Batch { works, hold: Box::new(()), done: None });
    }
}

/// Reads offered bytes out of the asker's memory.
struct RdmaLanding {
    answerer: Answerer,
    queue: QueueId,
    from: Remote,
    len: u32,
}

#[async_trait]
impl Landing for RdmaLanding {
    async fn land(self: Box<Self>, mut slot: Slot) -> io::Result<Slot> {
        let (len, step) = (u64::from(self.len), self.answerer.write_len);
        if slot.keys().is_some() {
            // Several operations together, as many as there is room for.
            let together = step * WORKS_TOGETHER as u64;
            for at in (0..len).step_by(together as usize) {
                slot = self.read(slot, at, at, together.min(len - at)).await?;
            }
            return Ok(slot);
        }
        // Memory that the card does not know: by way of some that it does.
        for at in (0..len).step_by(step as usize) {
            let part = step.min(len - at);
            let staged = self.answerer.slot(part).await?;
            let staged = self.read(staged, 0, at, part).await?;
            slot[at as usize..(at + part) as usize].copy_from_slice(&staged[..part as usize]);
        }
        Ok(slot)
    }
}

impl RdmaLanding {
    /// Reads bytes from `from` on into a slot, from `at` on.
    async fn read(&self, slot: Slot, at: u64, from: u64, len: u64) -> io::Result<Slot> {
        let step = self.answerer.write_len;
        let part = |done: u64| {
            let place = Remote { address: self.from.address.wrapping_add(from + done), key: self.from.key };
            work(&slot, at + done, step.min(len - done) as u32, Action::Read(place))
        };
        let works = (0..len).step_by(step as usize).map(part).collect::<Option<Vec<_>>>().ok_or_else(broken)?;
        let landed = self.answerer.post(self.queue, works, slot);
        // On a deadline the slot stays with the engine: bytes may still land in it, until the queue pair ends.
        let landed =
            timeout(self.answerer.deadlines.request, landed).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
        let hold = landed.map_err(|_| io::Error::from(io::ErrorKind::ConnectionReset))?;
        hold.downcast::<Slot>().map(|slot| *slot).map_err(|_| broken())
    }
}
