//! The attached processes of a node. Each has a slot in the shared counters for as long as it has a connection.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::limits::CLIENTS_SHOWN_MAX;
use dayfly_meta::status_page::Counters;
use dayfly_meta::wire::status::{ClientStatus, Reads, SOURCES};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::unix::AsyncFd;

/// All processes that are attached to a node.
#[derive(Default)]
pub(crate) struct Processes {
    table: Mutex<ProcessTable>,
}

#[derive(Default)]
struct ProcessTable {
    attached: HashMap<i32, Process>,
    free_slots: Vec<u32>,
    next_slot: u32,
    /// The total of what was read by processes that are no longer attached.
    detached_reads: [Reads; SOURCES],
}

struct Process {
    slot: u32,
    connections: usize,
}

/// One connection of an attached process. The process keeps its slot until the last of its attachments is dropped.
pub(crate) struct Attachment {
    processes: Arc<Processes>,
    counters: Arc<Counters>,
    pid: i32,
    slot: u32,
}

impl Attachment {
    /// Returns the process's slot in the shared counters.
    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }
}

impl Processes {
    /// Records a connection of a process.
    pub(crate) fn attach(self: &Arc<Self>, counters: &Arc<Counters>, pid: i32) -> Attachment {
        let mut table = self.table();
        let ProcessTable { attached, free_slots, next_slot, .. } = &mut *table;
        let process = attached.entry(pid).or_insert_with(|| {
            let slot = free_slots.pop().unwrap_or_else(|| {
                *next_slot += 1;
                *next_slot - 1
            });
            counters.clear(slot);
            Process { slot, connections: 0 }
        });
        process.connections += 1;
        Attachment { processes: self.clone(), counters: counters.clone(), pid, slot: process.slot }
    }

    /// Returns how many processes are attached, the processes that have read most, and what all processes have read since the
    /// session began.
    pub(crate) fn status(&self, counters: &Counters) -> (u64, Vec<ClientStatus>, [Reads; SOURCES]) {
        let table = self.table();
        let mut all = table.detached_reads;
        let mut clients: Vec<ClientStatus> =
            table.attached.iter().map(|(&pid, process)| ClientStatus { pid, reads: counters.of(process.slot) }).collect();
        clients.iter().for_each(|client| add(&mut all, &client.reads));
        clients.sort_by_key(|client| (std::cmp::Reverse(client.all().bytes), client.pid));
        clients.truncate(CLIENTS_SHOWN_MAX);
        (table.attached.len() as u64, clients, all)
    }

    /// Returns whether any attached process reads bytes in place, in memory that the server would like to free.
    pub(crate) fn have_views(&self, counters: &Counters) -> bool {
        self.table().attached.values().any(|process| counters.has_views(process.slot))
    }

    fn table(&self) -> MutexGuard<'_, ProcessTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn add(all: &mut [Reads; SOURCES], more: &[Reads; SOURCES]) {
    all.iter_mut().zip(more).for_each(|(all, more)| all.add(*more));
}

impl Drop for Attachment {
    fn drop(&mut self) {
        let mut table = self.processes.table();
        let Some(process) = table.attached.get_mut(&self.pid) else { return };
        process.connections -= 1;
        if process.connections == 0 {
            table.attached.remove(&self.pid);
            add(&mut table.detached_reads, &self.counters.of(self.slot));
            table.free_slots.push(self.slot);
        }
    }
}

/// Waits until a process has exited. Waits forever if this server cannot see the process, for
/// example because it is in another container.
#[allow(deprecated, reason = "unsound only for types that close a descriptor they do not own; this one owns its descriptor")]
pub(crate) async fn exit_of(pid: i32) {
    let watched = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::NONBLOCK).ok());
    match watched.and_then(|watched| AsyncFd::new(watched).ok()) {
        Some(watched) => drop(watched.readable().await),
        None => std::future::pending().await,
    }
}
