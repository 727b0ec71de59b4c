//! Which processes are attached: each has a slot in the shared counters for as long as it has a connection, and is watched, so that
//! what it holds ends with it even where a forked child has inherited its connections.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::limits::CLIENTS_SHOWN_MAX;
use dayfly_meta::status_page::Counters;
use dayfly_meta::wire::status::{ClientStatus, Reads, SOURCES};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::unix::AsyncFd;

/// All processes of a node.
#[derive(Default)]
pub(crate) struct Processes {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    known: HashMap<i32, Process>,
    free_slots: Vec<u32>,
    next_slot: u32,
    /// What those have read that have ended.
    ended: [Reads; SOURCES],
}

struct Process {
    slot: u32,
    connections: usize,
}

/// A process's place, as long as one of its connections lives.
pub(super) struct Place {
    processes: Arc<Processes>,
    counters: Arc<Counters>,
    pid: i32,
    pub(super) slot: u32,
}

impl Processes {
    /// Notes a connection of a process.
    pub(super) fn enter(self: &Arc<Self>, counters: &Arc<Counters>, pid: i32) -> Place {
        let mut state = self.lock();
        let State { known, free_slots, next_slot, .. } = &mut *state;
        let process = known.entry(pid).or_insert_with(|| {
            let slot = free_slots.pop().unwrap_or_else(|| {
                *next_slot += 1;
                *next_slot - 1
            });
            counters.clear(slot);
            Process { slot, connections: 0 }
        });
        process.connections += 1;
        Place { processes: self.clone(), counters: counters.clone(), pid, slot: process.slot }
    }

    /// How many there are, those that read most, and what all together have read since the session began.
    pub(crate) fn status(&self, counters: &Counters) -> (u64, Vec<ClientStatus>, [Reads; SOURCES]) {
        let state = self.lock();
        let mut all = state.ended;
        let mut clients: Vec<ClientStatus> =
            state.known.iter().map(|(&pid, process)| ClientStatus { pid, reads: counters.of(process.slot) }).collect();
        clients.iter().for_each(|client| add(&mut all, &client.reads));
        clients.sort_by_key(|client| (std::cmp::Reverse(client.all().bytes), client.pid));
        clients.truncate(CLIENTS_SHOWN_MAX);
        (state.known.len() as u64, clients, all)
    }

    /// Whether any of them looks at bytes in place.
    pub(crate) fn have_views(&self, counters: &Counters) -> bool {
        self.lock().known.values().any(|process| counters.has_views(process.slot))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn add(all: &mut [Reads; SOURCES], more: &[Reads; SOURCES]) {
    all.iter_mut().zip(more).for_each(|(all, more)| all.add(*more));
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.processes.lock();
        let Some(process) = state.known.get_mut(&self.pid) else { return };
        process.connections -= 1;
        if process.connections == 0 {
            state.known.remove(&self.pid);
            add(&mut state.ended, &self.counters.of(self.slot));
            state.free_slots.push(self.slot);
        }
    }
}

/// Waits for a process's end; for ever where it cannot be seen, as in another container.
#[allow(deprecated, reason = "unsound only for types that close what they do not own; this one owns its descriptor")]
pub(super) async fn end_of(pid: i32) {
    let watched = Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::NONBLOCK).ok());
    match watched.and_then(|watched| AsyncFd::new(watched).ok()) {
        Some(watched) => drop(watched.readable().await),
        None => std::future::pending().await,
    }
}
