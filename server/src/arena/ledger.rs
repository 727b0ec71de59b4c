//! Records how many leases each process holds. A lease belongs to a connection, but leases are counted by process, so that a
//! process cannot take more of the arena by opening more connections.
//!
//! A lease ends when its client releases it, when its connection ends, or when the server revokes it. The server revokes leases
//! if the client takes no messages for too long, or if other requests have waited for room too long.
//!
//! Invariant: before a lease ends in any way other than a release, the token of its connection on
//! the status page changes. A client that still relies on such a lease checks the token after it
//! has copied, so it never mistakes other bytes for the leased ones.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::limits::{CHUNK_LEN, LEASE_SHARE};
use dayfly_meta::status_page::StatusPage;
use tokio::time::{Duration, Instant};

/// A lease as the ledger sees it. The ledger owns the lease until the lease ends.
pub(crate) trait Leased: Send {
    /// Bytes of the arena that the lease pins.
    fn weight(&self) -> u64;
}

/// The leases of all connections to this node's server.
pub(crate) struct LeaseLedger<L> {
    status_page: Arc<StatusPage>,
    /// Bytes that one process may lease.
    process_max: u64,
    /// Bytes that all processes together may lease.
    total_max: u64,
    /// How long a request waits for room before clients are asked to release leases ([`Deadlines`]).
    recall_after: Duration,
    /// How long a client then has before its leases are revoked ([`Deadlines`]).
    recall: Duration,
    accounts: Mutex<Accounts<L>>,
}

struct Accounts<L> {
    connections: HashMap<u32, Account<L>>,
    /// Bytes that each process has leased or reserved, through all of its connections.
    processes: HashMap<i64, u64>,
    total: u64,
    /// Connection numbers that can be used again.
    free: Vec<u32>,
    next: u32,
}

struct Account<L> {
    /// The process id or, if the id is unknown, a negative number that no other connection has.
    process: i64,
    leases: HashMap<u64, Vec<L>>,
    last_lease: u64,
    /// Bytes of the leases.
    leased: u64,
    /// Bytes that a request in flight will lease.
    reserved: u64,
    /// When the client was asked to release its leases, if it was.
    recalled_at: Option<Instant>,
}

/// The right of a connection to hold leases. Dropping it revokes the connection's leases.
pub(crate) struct LeaseHolder<L: Leased> {
    ledger: Arc<LeaseLedger<L>>,
    connection: u32,
}

/// How much a connection may lease now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    pub(crate) bytes: u64,
    /// Whether the connection holds no lease. Only then may the connection wait for room, because no other request can be
    /// waiting for its leases.
    pub(crate) may_wait: bool,
}

impl<L: Leased> LeaseLedger<L> {
    /// Creates a ledger for an arena of `len` bytes.
    pub(crate) fn new(status_page: Arc<StatusPage>, len: u64, deadlines: &Deadlines) -> Self {
        let accounts = Accounts { connections: HashMap::new(), processes: HashMap::new(), total: 0, free: Vec::new(), next: 0 };
        let process_max = len / LEASE_SHARE;
        let Deadlines { recall_after, recall, .. } = *deadlines;
        let accounts = Mutex::new(accounts);
        Self { status_page, process_max, total_max: len - process_max, recall_after, recall, accounts }
    }

    /// Opens an account for a connection. `pid` is 0 when the process is unknown, for instance because it runs in another
    /// container.
    pub(crate) fn open(self: &Arc<Self>, pid: i32) -> LeaseHolder<L> {
        let mut accounts = self.accounts();
        let connection = accounts.free.pop().unwrap_or(accounts.next);
        accounts.next = accounts.next.max(connection + 1);
        // Each connection of an unknown process counts as a process of its own.
        let process = if pid > 0 { i64::from(pid) } else { -1 - i64::from(connection) };
        let account = Account { process, leases: HashMap::new(), last_lease: 0, leased: 0, reserved: 0, recalled_at: None };
        accounts.connections.insert(connection, account);
        LeaseHolder { ledger: self.clone(), connection }
    }

    /// Helps a request that has `waited` for room: asks every client to release its leases. If connections did not do so in
    /// time, it picks one of them that belongs to the process with the most leases, and revokes the leases of that connection.
    /// Returns whether it revoked any leases; if so, the request tries again.
    pub(super) fn recall(&self, waited: Duration) -> bool {
        if waited < self.recall_after {
            return false;
        }
        let mut accounts = self.accounts();
        let now = Instant::now();
        for (&connection, account) in accounts.connections.iter_mut().filter(|(_, account)| account.leased > 0) {
            if account.recalled_at.is_none() {
                account.recalled_at = Some(now);
                self.status_page.set_recalled(connection, true);
            }
        }
        let is_late = |account: &Account<L>| account.recalled_at.is_some_and(|asked| now - asked >= self.recall);
        let late = accounts.connections.iter().filter(|(_, account)| account.leased > 0 && is_late(account));
        let largest = late.max_by_key(|(_, account)| (accounts.processes.get(&account.process), account.leased));
        let Some((&connection, account)) = largest else { return false };
        tracing::info!(process = account.process, bytes = account.leased, "leases revoked: other requests need their room");
        let revoked = accounts.revoke(&self.status_page, connection);
        drop(accounts);
        drop(revoked);
        true
    }

    /// Stops asking clients to release leases, because no request waits for room anymore.
    pub(super) fn end_recall(&self) {
        for (&connection, account) in &mut self.accounts().connections {
            if account.recalled_at.take().is_some() {
                self.status_page.set_recalled(connection, false);
            }
        }
    }

    fn accounts(&self) -> MutexGuard<'_, Accounts<L>> {
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<L: Leased> Accounts<L> {
    /// Invalidates a connection's token on the status page, then removes its leases. The leases end when the result is dropped.
    #[must_use = "the leases end when the result is dropped, which takes other locks"]
    fn revoke(&mut self, status_page: &StatusPage, connection: u32) -> Vec<Vec<L>> {
        let Some(account) = self.connections.get_mut(&connection) else { return Vec::new() };
        status_page.revoke(connection);
        account.recalled_at = None;
        let (process, leased) = (account.process, std::mem::take(&mut account.leased));
        let revoked = std::mem::take(&mut account.leases).into_values().collect();
        self.count(process, 0, leased);
        revoked
    }

    /// Adds and subtracts bytes that a process leases.
    fn count(&mut self, process: i64, more: u64, less: u64) {
        self.total = (self.total + more).saturating_sub(less);
        let bytes = self.processes.entry(process).or_default();
        *bytes = (*bytes + more).saturating_sub(less);
        if *bytes == 0 {
            self.processes.remove(&process);
        }
    }
}

impl<L: Leased> LeaseHolder<L> {
    /// Returns the number that identifies the connection on the status page.
    pub(crate) fn connection(&self) -> u32 {
        self.connection
    }

    /// Returns how much the connection may lease now; `None` if its process has to release leases first.
    pub(crate) fn budget(&self) -> Option<Budget> {
        let accounts = self.ledger.accounts();
        let account = accounts.connections.get(&self.connection)?;
        let process_bytes = accounts.processes.get(&account.process).copied().unwrap_or(0);
        let left =
            self.ledger.process_max.saturating_sub(process_bytes).min(self.ledger.total_max.saturating_sub(accounts.total));
        match account.leased {
            // The connection always gets one chunk, whatever the other connections of its process hold, so that it makes progress.
            0 => Some(Budget { bytes: left.max(CHUNK_LEN), may_wait: true }),
            _ => (left > 0).then_some(Budget { bytes: left, may_wait: false }),
        }
    }

    /// Counts `bytes` that a request in flight will lease, until they are granted. 0 ends the reservation.
    pub(crate) fn reserve(&self, bytes: u64) {
        let mut accounts = self.ledger.accounts();
        let Some(account) = accounts.connections.get_mut(&self.connection) else { return };
        let before = std::mem::replace(&mut account.reserved, bytes);
        let process = account.process;
        accounts.count(process, bytes, before);
    }

    /// Records leases. Returns the number with which the client releases them, and the token under which they hold.
    pub(crate) fn grant(&self, leases: Vec<L>) -> (u64, u64) {
        let mut accounts = self.ledger.accounts();
        let token = self.ledger.status_page.token(self.connection);
        let Some(account) = accounts.connections.get_mut(&self.connection).filter(|_| !leases.is_empty()) else {
            return (0, token);
        };
        let bytes: u64 = leases.iter().map(Leased::weight).sum();
        account.last_lease += 1;
        let number = account.last_lease;
        account.leases.insert(number, leases);
        account.leased += bytes;
        let expected = account.reserved.min(bytes);
        account.reserved -= expected;
        let process = account.process;
        accounts.count(process, bytes, expected);
        (number, token)
    }

    /// Ends leases that the client releases. Unknown numbers are leases that have already been revoked.
    pub(crate) fn release(&self, numbers: &[u64]) {
        let mut accounts = self.ledger.accounts();
        let Some(account) = accounts.connections.get_mut(&self.connection) else { return };
        let released: Vec<Vec<L>> = numbers.iter().filter_map(|number| account.leases.remove(number)).collect();
        let bytes: u64 = released.iter().flatten().map(Leased::weight).sum();
        account.leased -= bytes;
        let process = account.process;
        if account.leases.is_empty() && account.recalled_at.take().is_some() {
            self.ledger.status_page.set_recalled(self.connection, false);
        }
        accounts.count(process, 0, bytes);
        drop(accounts);
        drop(released);
    }

    /// Revokes all leases of the connection.
    pub(crate) fn revoke(&self) {
        let revoked = self.ledger.accounts().revoke(&self.ledger.status_page, self.connection);
        drop(revoked);
    }
}

impl<L: Leased> Drop for LeaseHolder<L> {
    fn drop(&mut self) {
        self.reserve(0);
        let mut accounts = self.ledger.accounts();
        let revoked = accounts.revoke(&self.ledger.status_page, self.connection);
        accounts.connections.remove(&self.connection);
        accounts.free.push(self.connection);
        drop(accounts);
        drop(revoked);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_meta::status_page::FILE_LEN;

    /// A lease that checks, when it ends, that its token was invalidated beforehand.
    struct Spy {
        bytes: u64,
        status_page: Arc<StatusPage>,
        granted: Option<(u32, u64)>,
    }

    impl Leased for Spy {
        fn weight(&self) -> u64 {
            self.bytes
        }
    }

    impl Drop for Spy {
        fn drop(&mut self) {
            if let Some((connection, token)) = self.granted {
                assert!(!self.status_page.holds(connection, token), "a lease ended while its token still held");
            }
        }
    }

    const MIB: u64 = 1 << 20;

    fn ledger() -> (Arc<LeaseLedger<Spy>>, Arc<StatusPage>) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(FILE_LEN).unwrap();
        let status_page = Arc::new(StatusPage::map(&file, true).unwrap());
        (Arc::new(LeaseLedger::new(status_page.clone(), 32 * MIB, &Deadlines::DEFAULT)), status_page)
    }

    fn grant(holder: &LeaseHolder<Spy>, status_page: &Arc<StatusPage>, bytes: u64) -> (u64, u64) {
        let granted = Some((holder.connection(), status_page.token(holder.connection())));
        holder.grant(vec![Spy { bytes, status_page: status_page.clone(), granted }])
    }

    /// SEMANTICS: "All batches of one process together lease at most a quarter of the arena, and all processes together at most
    /// three quarters, except for one chunk that each connection gets."
    #[test]
    fn the_connections_of_a_process_share_one_budget() {
        let (ledger, status_page) = ledger();
        let free = |bytes| Some(Budget { bytes, may_wait: true });
        let (one, two, other) = (ledger.open(7), ledger.open(7), ledger.open(8));
        assert_eq!(one.budget(), free(8 * MIB));
        one.reserve(6 * MIB);
        assert_eq!((two.budget(), other.budget()), (free(CHUNK_LEN), free(8 * MIB)));
        let (_, token) = grant(&one, &status_page, 6 * MIB);
        one.reserve(0);
        assert_eq!(one.budget(), Some(Budget { bytes: 2 * MIB, may_wait: false }));
        grant(&two, &status_page, 4 * MIB);
        assert_eq!((one.budget(), two.budget()), (None, None), "10 MiB of 8 MiB are leased");
        assert!(status_page.holds(one.connection(), token));
        // Unknown processes do not share a budget, but the limit for all processes applies to them too.
        let unknown: Vec<LeaseHolder<Spy>> = (0..3).map(|_| ledger.open(0)).collect();
        for holder in &unknown {
            grant(holder, &status_page, 4 * MIB);
        }
        assert_eq!(unknown[0].budget(), Some(Budget { bytes: 2 * MIB, may_wait: false }), "22 MiB of 24 MiB are leased");
        drop(two);
        assert_eq!(one.budget(), Some(Budget { bytes: 2 * MIB, may_wait: false }));
    }

    /// SEMANTICS: "A request that has waited for room for 0.5 s makes the server ask all lease holders to release theirs. A batch
    /// that is asked releases its leases at its next call and keeps copies. Processes that make no call for 5 s after that lose
    /// their leases, the largest holder first."
    #[tokio::test(start_paused = true)]
    async fn clients_are_asked_to_release_leases_before_the_largest_loses_its_own() {
        let (ledger, status_page) = ledger();
        let (large, small) = (ledger.open(1), ledger.open(2));
        let (_, large_token) = grant(&large, &status_page, 6 * MIB);
        let (number, small_token) = grant(&small, &status_page, MIB);
        assert!(!ledger.recall(Deadlines::DEFAULT.recall_after / 2) && !status_page.is_recalled(large.connection()));
        assert!(!ledger.recall(Deadlines::DEFAULT.recall_after), "clients are asked first");
        assert!(status_page.is_recalled(large.connection()) && status_page.is_recalled(small.connection()));
        tokio::time::advance(Deadlines::DEFAULT.recall).await;
        assert!(ledger.recall(Deadlines::DEFAULT.recall));
        assert!(!status_page.holds(large.connection(), large_token) && status_page.holds(small.connection(), small_token));
        // The revoked client is no longer asked to release, and may lease again.
        assert!(!status_page.is_recalled(large.connection()) && large.budget().is_some_and(|budget| budget.may_wait));
        // A release does not invalidate the token, so this spy must not check it.
        ledger.accounts().connections.get_mut(&small.connection()).unwrap().leases.get_mut(&number).unwrap()[0].granted = None;
        small.release(&[number, 99]);
        assert!(!status_page.is_recalled(small.connection()) && !ledger.recall(Deadlines::DEFAULT.recall));
        grant(&small, &status_page, MIB);
        assert!(!ledger.recall(Deadlines::DEFAULT.recall) && status_page.is_recalled(small.connection()));
        ledger.end_recall();
        assert!(!status_page.is_recalled(small.connection()));
        tokio::time::advance(Deadlines::DEFAULT.recall).await;
        assert!(!ledger.recall(Deadlines::DEFAULT.recall), "the client is asked again, and has time again");
        drop(small);
        let next = ledger.open(3);
        assert!(next.connection() < 2 && !status_page.holds(next.connection(), small_token));
    }
}
