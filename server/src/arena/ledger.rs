//! Who holds which leases: by connection, and counted by process, so that no process takes the arena from all others by opening
//! more connections. Leases end when they are released, when their connection ends, or when they are revoked: because their holder
//! takes no bytes, or because others have waited for room too long.
//!
//! Before any lease of a connection ends by anything but a release, the connection's token in the status page is changed. Whoever still
//! believes in such a lease looks there after it has copied, and so never takes other bytes for those that were leased.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::limits::{CHUNK_LEN, LEASE_SHARE};
use dayfly_meta::status_page::StatusPage;
use tokio::time::{Duration, Instant};

/// What the ledger counts and keeps until it ends.
pub(crate) trait Leased: Send {
    /// Bytes of the arena that it pins.
    fn weight(&self) -> u64;
}

/// The leases of all connections of a node.
pub(crate) struct LeaseLedger<L> {
    status_page: Arc<StatusPage>,
    /// Bytes that one process, and all together, may have.
    share: u64,
    ceiling: u64,
    /// See [`Deadlines`].
    recall_after: Duration,
    recall: Duration,
    books: Mutex<Books<L>>,
}

struct Books<L> {
    connections: HashMap<u32, Account<L>>,
    /// Bytes of each process's connections together.
    processes: HashMap<i64, u64>,
    total: u64,
    free: Vec<u32>,
    next: u32,
}

struct Account<L> {
    process: i64,
    leases: HashMap<u64, Vec<L>>,
    last_lease: u64,
    leased: u64,
    /// What is on its way for it.
    reserved: u64,
    recalled_at: Option<Instant>,
}

/// A connection's account. When it is dropped its leases are revoked.
pub(crate) struct LeaseHolder<L: Leased> {
    ledger: Arc<LeaseLedger<L>>,
    connection: u32,
}

/// What a connection may lease now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Budget {
    pub(crate) bytes: u64,
    /// Whether it holds nothing, and so may wait for room without keeping others from theirs.
    pub(crate) may_wait: bool,
}

impl<L: Leased> LeaseLedger<L> {
    /// Of an arena of `len` bytes.
    pub(crate) fn new(status_page: Arc<StatusPage>, len: u64, deadlines: &Deadlines) -> Self {
        let books = Books { connections: HashMap::new(), processes: HashMap::new(), total: 0, free: Vec::new(), next: 0 };
        let share = len / LEASE_SHARE;
        let Deadlines { recall_after, recall, .. } = *deadlines;
        Self { status_page, share, ceiling: len - share, recall_after, recall, books: Mutex::new(books) }
    }

    /// Opens an account for a connection of a process; of an unknown one, in another container perhaps, by the number 0.
    pub(crate) fn open(self: &Arc<Self>, pid: i32) -> LeaseHolder<L> {
        let mut books = self.books();
        let connection = books.free.pop().unwrap_or(books.next);
        books.next = books.next.max(connection + 1);
        // Unknown processes are told apart by their connections.
        let process = if pid > 0 { i64::from(pid) } else { -1 - i64::from(connection) };
        let account = Account { process, leases: HashMap::new(), last_lease: 0, leased: 0, reserved: 0, recalled_at: None };
        books.connections.insert(connection, account);
        LeaseHolder { ledger: self.clone(), connection }
    }

    /// Makes room for a request that has waited for so long: asks all who have leases to give them back, and revokes those of
    /// the largest process that was asked in vain. Says whether anything was revoked, so that room is worth another look.
    pub(super) fn recall(&self, waited: Duration) -> bool {
        if waited < self.recall_after {
            return false;
        }
        let mut books = self.books();
        let now = Instant::now();
        for (&connection, account) in books.connections.iter_mut().filter(|(_, account)| account.leased > 0) {
            if account.recalled_at.is_none() {
                account.recalled_at = Some(now);
                self.status_page.set_recalled(connection, true);
            }
        }
        let is_late = |account: &Account<L>| account.recalled_at.is_some_and(|asked| now - asked >= self.recall);
        let late = books.connections.iter().filter(|(_, account)| account.leased > 0 && is_late(account));
        let largest = late.max_by_key(|(_, account)| (books.processes.get(&account.process), account.leased));
        let Some((&connection, account)) = largest else { return false };
        tracing::info!(process = account.process, bytes = account.leased, "leases are revoked, for others wait for their room");
        let revoked = books.revoke(&self.status_page, connection);
        drop(books);
        drop(revoked);
        true
    }

    /// Nobody waits for room any more: nobody is asked for his.
    pub(super) fn end_recall(&self) {
        for (&connection, account) in &mut self.books().connections {
            if account.recalled_at.take().is_some() {
                self.status_page.set_recalled(connection, false);
            }
        }
    }

    fn books(&self) -> MutexGuard<'_, Books<L>> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<L: Leased> Books<L> {
    /// Takes a connection's leases out, of which the status page has told first. They end when the result is dropped.
    #[must_use = "the leases end when it is dropped, which takes other locks"]
    fn revoke(&mut self, status_page: &StatusPage, connection: u32) -> Vec<Vec<L>> {
        let Some(account) = self.connections.get_mut(&connection) else { return Vec::new() };
        status_page.revoke(connection);
        account.recalled_at = None;
        let (process, leased) = (account.process, std::mem::take(&mut account.leased));
        let revoked = std::mem::take(&mut account.leases).into_values().collect();
        self.count(process, 0, leased);
        revoked
    }

    /// Counts bytes that a process has more, and less.
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
    /// The connection's number, by which the status page tells of it.
    pub(crate) fn connection(&self) -> u32 {
        self.connection
    }

    /// What may be leased now; nothing where something has to be given back first.
    pub(crate) fn budget(&self) -> Option<Budget> {
        let books = self.ledger.books();
        let account = books.connections.get(&self.connection)?;
        let of_process = books.processes.get(&account.process).copied().unwrap_or(0);
        let left = self.ledger.share.saturating_sub(of_process).min(self.ledger.ceiling.saturating_sub(books.total));
        match account.leased {
            // Others of its process may hold what they like: it must get on.
            0 => Some(Budget { bytes: left.max(CHUNK_LEN), may_wait: true }),
            _ => (left > 0).then_some(Budget { bytes: left, may_wait: false }),
        }
    }

    /// Counts what a request will lease, until it is granted or the request is over.
    pub(crate) fn reserve(&self, bytes: u64) {
        let mut books = self.ledger.books();
        let Some(account) = books.connections.get_mut(&self.connection) else { return };
        let before = std::mem::replace(&mut account.reserved, bytes);
        let process = account.process;
        books.count(process, bytes, before);
    }

    /// Enters leases into the books. Their number, by which they are released, and the token under which they hold.
    pub(crate) fn grant(&self, leases: Vec<L>) -> (u64, u64) {
        let mut books = self.ledger.books();
        let token = self.ledger.status_page.token(self.connection);
        let Some(account) = books.connections.get_mut(&self.connection).filter(|_| !leases.is_empty()) else { return (0, token) };
        let bytes: u64 = leases.iter().map(Leased::weight).sum();
        account.last_lease += 1;
        let number = account.last_lease;
        account.leases.insert(number, leases);
        account.leased += bytes;
        let expected = account.reserved.min(bytes);
        account.reserved -= expected;
        let process = account.process;
        books.count(process, bytes, expected);
        (number, token)
    }

    /// Ends leases, by their numbers. Those that are unknown were revoked.
    pub(crate) fn release(&self, numbers: &[u64]) {
        let mut books = self.ledger.books();
        let Some(account) = books.connections.get_mut(&self.connection) else { return };
        let released: Vec<Vec<L>> = numbers.iter().filter_map(|number| account.leases.remove(number)).collect();
        let bytes: u64 = released.iter().flatten().map(Leased::weight).sum();
        account.leased -= bytes;
        let process = account.process;
        if account.leases.is_empty() && account.recalled_at.take().is_some() {
            self.ledger.status_page.set_recalled(self.connection, false);
        }
        books.count(process, 0, bytes);
        drop(books);
        drop(released);
    }

    /// Takes all its leases back.
    pub(crate) fn revoke(&self) {
        let revoked = self.ledger.books().revoke(&self.ledger.status_page, self.connection);
        drop(revoked);
    }
}

impl<L: Leased> Drop for LeaseHolder<L> {
    fn drop(&mut self) {
        self.reserve(0);
        let mut books = self.ledger.books();
        let revoked = books.revoke(&self.ledger.status_page, self.connection);
        books.connections.remove(&self.connection);
        books.free.push(self.connection);
        drop(books);
        drop(revoked);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dayfly_meta::status_page::FILE_LEN;

    /// Looks into the status page when it ends: by then its token must not hold any more.
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
                assert!(!self.status_page.holds(connection, token), "a lease ended before the status_page told of it");
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
        assert_eq!((one.budget(), two.budget()), (None, None), "10 MiB of 8");
        assert!(status_page.holds(one.connection(), token));
        // Unknown processes do not share, and all together leave room.
        let unknown: Vec<LeaseHolder<Spy>> = (0..3).map(|_| ledger.open(0)).collect();
        for holder in &unknown {
            grant(holder, &status_page, 4 * MIB);
        }
        assert_eq!(unknown[0].budget(), Some(Budget { bytes: 2 * MIB, may_wait: false }), "22 MiB of 24");
        drop(two);
        assert_eq!(one.budget(), Some(Budget { bytes: 2 * MIB, may_wait: false }));
    }

    #[tokio::test(start_paused = true)]
    async fn holders_are_asked_first_and_the_largest_loses_its_leases() {
        let (ledger, status_page) = ledger();
        let (large, small) = (ledger.open(1), ledger.open(2));
        let (_, large_token) = grant(&large, &status_page, 6 * MIB);
        let (number, small_token) = grant(&small, &status_page, MIB);
        assert!(!ledger.recall(Deadlines::DEFAULT.recall_after / 2) && !status_page.is_recalled(large.connection()));
        assert!(!ledger.recall(Deadlines::DEFAULT.recall_after), "asked first");
        assert!(status_page.is_recalled(large.connection()) && status_page.is_recalled(small.connection()));
        tokio::time::advance(Deadlines::DEFAULT.recall).await;
        assert!(ledger.recall(Deadlines::DEFAULT.recall));
        assert!(!status_page.holds(large.connection(), large_token) && status_page.holds(small.connection(), small_token));
        // Who was revoked is told once, and may lease again.
        assert!(!status_page.is_recalled(large.connection()) && large.budget().is_some_and(|budget| budget.may_wait));
        // The spy must not find that its own release was not told of: only revoking is.
        ledger.books().connections.get_mut(&small.connection()).unwrap().leases.get_mut(&number).unwrap()[0].granted = None;
        small.release(&[number, 99]);
        assert!(!status_page.is_recalled(small.connection()) && !ledger.recall(Deadlines::DEFAULT.recall));
        grant(&small, &status_page, MIB);
        assert!(!ledger.recall(Deadlines::DEFAULT.recall) && status_page.is_recalled(small.connection()));
        ledger.end_recall();
        assert!(!status_page.is_recalled(small.connection()));
        tokio::time::advance(Deadlines::DEFAULT.recall).await;
        assert!(!ledger.recall(Deadlines::DEFAULT.recall), "asked anew");
        drop(small);
        let next = ledger.open(3);
        assert!(next.connection() < 2 && !status_page.holds(next.connection(), small_token));
    }
}
