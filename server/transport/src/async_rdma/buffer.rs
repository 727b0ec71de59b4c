//! Buffers in memory that the crate `async-rdma` has registered. Each buffer serves one operation at a time.

use std::alloc::Layout;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_rdma::{LocalMr, LocalMrReadAccess, LocalMrWriteAccess, MrToken, Rdma, RemoteMr};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::contract::Piece;
use crate::error::PieceError;

/// Length of a buffer in bytes. Longer requests go over the inner transport.
pub(super) const BUFFER_LEN: usize = 8 << 20;
/// Alignment that the crate's allocator requires.
const BUFFER_ALIGN: usize = 2 << 20;
/// Number of buffers for each queue pair. This also bounds the number of operations under way on the queue pair.
const BUFFERS_MAX: usize = 8;
/// The longest operation in bytes.
const OPERATION_LEN_MAX: usize = 1 << 20;
/// How long the peer may use a buffer.
const TOKEN_TIMEOUT: Duration = Duration::from_secs(3600);

/// Counts the bytes that the card has moved.
#[derive(Default)]
pub(super) struct Counters {
    pub(super) written_bytes: AtomicU64,
    pub(super) read_bytes: AtomicU64,
}

/// A queue pair and its buffers.
pub(super) struct Buffers {
    free: Mutex<Vec<LocalMr>>,
    /// Buffers to which the peer may still write. They stay registered, and unused, as long as the queue pair lives.
    lent: Mutex<Vec<(LocalMr, OwnedSemaphorePermit)>>,
    permits: Arc<Semaphore>,
    counters: Arc<Counters>,
    rdma: Rdma,
}

/// A buffer in use. Dropping it makes the memory free for other operations, unless a peer may still write to that memory.
pub(super) struct Buffer {
    memory: Option<LocalMr>,
    home: Arc<Buffers>,
    pub(super) is_lent: bool,
    permit: Option<OwnedSemaphorePermit>,
}

impl Buffers {
    pub(super) fn new(rdma: Rdma, counters: Arc<Counters>) -> Arc<Self> {
        Arc::new(Self {
            free: Mutex::default(),
            lent: Mutex::default(),
            permits: Arc::new(Semaphore::new(BUFFERS_MAX)),
            counters,
            rdma,
        })
    }

    /// Takes a buffer, if one becomes free within `limit`.
    pub(super) async fn take(self: &Arc<Self>, limit: Duration) -> Option<Buffer> {
        if self.lent.lock().unwrap_or_else(PoisonError::into_inner).len() == BUFFERS_MAX {
            return None;
        }
        let permit = timeout(limit, self.permits.clone().acquire_owned()).await.ok()?.ok()?;
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let memory = match free {
            Some(memory) => memory,
            None => {
                let home = self.clone();
                let layout = Layout::from_size_align(BUFFER_LEN, BUFFER_ALIGN).ok()?;
                tokio::task::spawn_blocking(move || home.rdma.alloc_local_mr(layout)).await.ok()?.ok()?
            }
        };
        Some(Buffer { memory: Some(memory), home: self.clone(), is_lent: false, permit: Some(permit) })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let (Some(memory), Some(permit)) = (self.memory.take(), self.permit.take()) else { return };
        if self.is_lent {
            self.home.lent.lock().unwrap_or_else(PoisonError::into_inner).push((memory, permit));
        } else {
            self.home.free.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
        }
    }
}

impl Buffer {
    /// Returns the token with which the peer accesses the buffer.
    pub(super) fn token(&self) -> Option<MrToken> {
        self.memory.as_ref()?.token_with_timeout(TOKEN_TIMEOUT)
    }

    /// Copies bytes out of the buffer, which no operation is using.
    pub(super) fn read(&self, at: usize, into: &mut [u8]) {
        if let Some(memory) = &self.memory {
            into.copy_from_slice(&memory.as_slice()[at..at + into.len()]);
        }
    }

    /// Copies bytes into the buffer, which no operation is using.
    pub(super) fn write(&mut self, at: usize, bytes: &[u8]) {
        if let Some(memory) = &mut self.memory {
            memory.as_mut_slice()[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    /// Reads pieces into the buffer, back to back.
    pub(super) async fn fill(mut self, pieces: Vec<Piece>) -> io::Result<Self> {
        let filling = move || {
            let mut at = 0;
            for piece in pieces {
                let len = piece.len() as usize;
                match piece {
                    Piece::Bytes(bytes) => self.write(at, &bytes),
                    Piece::File { file, offset, revoked, .. } => {
                        if let Some(memory) = &mut self.memory {
                            file.read_exact_at(&mut memory.as_mut_slice()[at..at + len], offset)?;
                        }
                        if revoked.load(Ordering::Acquire) {
                            return Err(io::Error::other(PieceError::Revoked));
                        }
                    }
                }
                at += len;
            }
            Ok(self)
        };
        tokio::task::spawn_blocking(filling).await.map_err(io::Error::other)?
    }

    /// Writes the first `len` bytes of the buffer into the peer's buffer.
    pub(super) async fn write_to(self, mut far: RemoteMr, len: usize) -> io::Result<Self> {
        let moving = async move {
            if let Some(memory) = &self.memory {
                for at in (0..len).step_by(OPERATION_LEN_MAX) {
                    let range = at..len.min(at + OPERATION_LEN_MAX);
                    let part = memory.get(range.clone()).ok_or_else(out_of_range)?;
                    self.home.rdma.write(&part, &mut far.get_mut(range)?).await?;
                }
                self.home.counters.written_bytes.fetch_add(len as u64, Ordering::Relaxed);
            }
            Ok(self)
        };
        // The crate's operations must not be dropped before they end, so they run in a task, which the caller cannot drop.
        tokio::spawn(moving).await.map_err(io::Error::other)?
    }

    /// Reads `len` bytes of the peer's buffer into this one.
    pub(super) async fn read_from(mut self, far: RemoteMr, len: usize) -> io::Result<Self> {
        let moving = async move {
            let home = self.home.clone();
            if let Some(memory) = &mut self.memory {
                for at in (0..len).step_by(OPERATION_LEN_MAX) {
                    let range = at..len.min(at + OPERATION_LEN_MAX);
                    let mut part = memory.get_mut(range.clone()).ok_or_else(out_of_range)?;
                    home.rdma.read(&mut part, &far.get(range)?).await?;
                }
                home.counters.read_bytes.fetch_add(len as u64, Ordering::Relaxed);
            }
            Ok(self)
        };
        tokio::spawn(moving).await.map_err(io::Error::other)?
    }
}

fn out_of_range() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "the range is longer than the buffer")
}
