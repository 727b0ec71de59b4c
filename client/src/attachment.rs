//! One server that this process is attached to, or was attached to: the memory that the server shares with it, and idle connections.
//!
//! A server that dies may be replaced. The process then attaches to the new server by itself. What belongs to the old server stays
//! usable as long as something refers to it: blocks that lie in its segments and in its arena never change again, so open files
//! still read them. Locations, leases and counters mean nothing to another server, so each dataset, batch and connection refers to
//! the attachment it came from.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use dayfly_meta::limits::LEASE_SHARE;
use dayfly_meta::status_page::{Counters, StatusPage, Tally};
use dayfly_meta::wire::local::FromServer;
use dayfly_meta::wire::status::{Reads, Source};

use crate::ClientError;
use crate::arena::Arena;
use crate::cancellation;
use crate::heartbeat::{Heartbeat, coarse_ms};
use crate::locate::process_of_lock;
use crate::pool::Pool;
use crate::socket::Socket;

/// What a process shares with one server.
pub(crate) struct Attachment {
    heartbeat: Arc<Heartbeat>,
    /// Identifies the server, because each has a status page of its own.
    status_page_inode: u64,
    /// The process of the server, as its lock names it.
    server: Option<i32>,
    lock_path: PathBuf,
    counters: Counters,
    /// This process's slot in the counters. A forked child counts in its parent's until it asks the server for something.
    slot: AtomicU32,
    tally: Arc<Tally>,
    pub(crate) arena: Arena,
    /// How much of the arena the batches of this process lease.
    leased_bytes: AtomicU64,
    idle: Pool<Socket>,
    /// Whether this process is attached to another server now.
    is_replaced: AtomicBool,
    /// When an attempt to attach to this server's successor took so long that none is made for a while, in milliseconds of a
    /// coarse clock; 0 if none did.
    waited_at_ms: AtomicU64,
    /// When this process has looked for a successor in vain, by the same clock.
    looked_at_ms: AtomicU64,
}

/// A connection, with the attachment that it belongs to.
pub(crate) struct Connection {
    pub(crate) socket: Box<Socket>,
    pub(crate) attachment: Arc<Attachment>,
}

impl Attachment {
    /// Maps the files that came with a server's welcome, and keeps the connection.
    pub(crate) fn new(
        socket_path: &Path,
        mut socket: Socket,
        welcome: &FromServer,
        files: Vec<File>,
        tally: Arc<Tally>,
    ) -> Result<Self, ClientError> {
        let &FromServer::Welcome { arena_len, slot, .. } = welcome else {
            return Err(ClientError::Protocol("the first answer is not a welcome"));
        };
        let [status_page, counters, arena, marks]: [File; 4] =
            files.try_into().map_err(|_| ClientError::Protocol("a welcome without its files"))?;
        let lock_path = socket_path.with_extension("lock");
        let attachment = Self {
            heartbeat: Arc::new(Heartbeat::new(StatusPage::map(&status_page, false)?, socket.timeouts())),
            status_page_inode: status_page.metadata()?.ino(),
            server: process_of_lock(&lock_path),
            lock_path,
            counters: Counters::map(&counters)?,
            slot: AtomicU32::new(slot),
            tally,
            arena: Arena::map(&arena, &marks, arena_len)?,
            leased_bytes: AtomicU64::new(0),
            idle: Pool::new(),
            is_replaced: AtomicBool::new(false),
            waited_at_ms: AtomicU64::new(0),
            looked_at_ms: AtomicU64::new(0),
        };
        socket.watch(attachment.heartbeat.clone());
        attachment.idle.put(Box::new(socket));
        Ok(attachment)
    }

    /// Returns whether the files of a welcome come from the server of this attachment.
    pub(crate) fn is_of_same_server(&self, files: &[File]) -> bool {
        let inode = files.first().and_then(|status_page| status_page.metadata().ok()).map(|metadata| metadata.ino());
        inode == Some(self.status_page_inode)
    }

    pub(crate) fn heartbeat(&self) -> &Arc<Heartbeat> {
        &self.heartbeat
    }

    /// Returns the server's status page.
    pub(crate) fn status_page(&self) -> &StatusPage {
        self.heartbeat.status_page()
    }

    /// Returns whether the session has ended, as far as this server has said.
    pub(crate) fn is_gone(&self) -> bool {
        self.status_page().is_gone()
    }

    /// Returns whether this process is attached to another server now.
    pub(crate) fn is_replaced(&self) -> bool {
        self.is_replaced.load(Ordering::Acquire)
    }

    /// Records that this process is attached to another server now, and closes the idle connections.
    pub(crate) fn set_replaced(&self) {
        self.is_replaced.store(true, Ordering::Release);
        self.close_idle();
    }

    /// Returns whether another server runs on the node now. Reads the lock of the node's server, unless this process has read it in vain
    /// a few milliseconds ago: a server that starts finds the lock taken while another process reads it.
    pub(crate) fn has_successor(&self) -> bool {
        let now_ms = coarse_ms();
        if self.looked_at_ms.load(Ordering::Relaxed) == now_ms {
            return false;
        }
        let _deferral = cancellation::uninterrupted();
        let has_successor = process_of_lock(&self.lock_path).is_some_and(|now| Some(now) != self.server);
        if !has_successor {
            self.looked_at_ms.store(now_ms, Ordering::Relaxed);
        }
        has_successor
    }

    /// Lets the next attempt to attach to the successor be made at once.
    pub(crate) fn attempt_at_once(&self) {
        self.waited_at_ms.store(0, Ordering::Relaxed);
    }

    /// Runs an attempt to attach to the successor, unless an earlier one has waited in vain a moment ago: the successor stands still, or
    /// still learns which datasets exist. So a program that reads many samples waits once, and not once for each.
    pub(crate) fn attempt<T>(&self, attach: impl FnOnce() -> Option<T>) -> Option<T> {
        let pause_ms = self.heartbeat.timeouts().heartbeat.as_millis() as u64;
        let (begun_ms, last_ms) = (coarse_ms(), self.waited_at_ms.load(Ordering::Relaxed));
        if last_ms > 0 && begun_ms < last_ms + pause_ms {
            return None;
        }
        let attached = attach();
        if attached.is_none() && coarse_ms() > begun_ms + pause_ms / 2 {
            self.waited_at_ms.store(coarse_ms(), Ordering::Relaxed);
        }
        attached
    }

    /// Records that a batch leases more of the arena. Returns whether the batches of this process lease no more than their share.
    pub(crate) fn lease(&self, bytes: u64) -> bool {
        let before = self.leased_bytes.fetch_add(bytes, Ordering::Relaxed);
        before + bytes <= self.arena.len() / LEASE_SHARE
    }

    /// Records that a batch has released what it leased.
    pub(crate) fn release(&self, bytes: u64) {
        self.leased_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Forgets the parent's leases in a forked child, and closes its copies of the parent's idle connections.
    pub(crate) fn after_fork(&self) {
        self.leased_bytes.store(0, Ordering::Relaxed);
        self.close_idle();
    }

    pub(crate) fn take_idle(&self) -> Option<Box<Socket>> {
        self.idle.take()
    }

    pub(crate) fn put_idle(&self, socket: Box<Socket>) {
        self.idle.put(socket);
    }

    fn close_idle(&self) {
        while let Some(socket) = self.idle.take() {
            drop(socket);
        }
    }

    pub(crate) fn set_slot(&self, slot: u32) {
        self.slot.store(slot, Ordering::Relaxed);
    }

    /// Adds reads to this process's counters and to its session's tally.
    pub(crate) fn count(&self, source: Source, count: u64, bytes: u64) {
        let reads = Reads { count, bytes };
        self.counters.count(self.slot.load(Ordering::Relaxed), source, reads);
        self.tally.count(source, reads);
    }

    /// Keeps the cached blocks of this node in place until the result is dropped.
    pub(crate) fn begin_views(self: &Arc<Self>, slot: u32) -> Views {
        self.counters.begin_view(slot);
        Views { attachment: self.clone(), slot }
    }
}

impl Views {
    /// Returns whether the cached blocks of a server stay in place: only those of the one that knows of these views.
    pub(crate) fn are_at(&self, attachment: &Arc<Attachment>) -> bool {
        Arc::ptr_eq(&self.attachment, attachment)
    }
}

/// When dropped, ends the view that [`Attachment::begin_views`] began.
pub(crate) struct Views {
    attachment: Arc<Attachment>,
    slot: u32,
}

impl Drop for Views {
    fn drop(&mut self) {
        self.attachment.counters.end_view(self.slot);
    }
}
