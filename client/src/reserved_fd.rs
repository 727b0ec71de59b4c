//! Descriptors that this library reserves for itself. They are close-on-exec and have high numbers,
//! away from the numbers that programs see. They are recorded, so that a program that closes all
//! descriptors does not close these.
//!
//! A program can still close them, with a system call that this library does not see, and the kernel
//! then gives the number to one of the program's own files. So a reserved descriptor remembers the
//! device and the inode of its file. [`ReservedFd::get`] compares them before each use. A number at
//! which another file is open by now is neither used nor closed.
//!
//! To the program, these descriptors look closed: if a call names one, the preload library does not pass the call on
//! ([`is_hidden`]). The exception is a thread that is using a reserved descriptor: it runs this library's code.
//!
//! The records lie in static memory, never move, and are changed without a lock.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dayfly_meta::deadlines::Deadlines;
use nix::libc;

use crate::raw_call::{descriptors_limit, duplicate_above, identity, replace_descriptors_limit};

/// Reserved descriptors lie just below this number, or below the process's limit. A higher ceiling
/// would slow down every fork, because the kernel copies the table up to its last descriptor.
const CEILING: u64 = 1024;
/// How many numbers below the ceiling are tried first.
const ROOM: u64 = 128;
/// Reserved descriptors with numbers below this are protected. A descriptor with a higher number
/// works, but the program can close it.
const WATCHED: usize = 1 << 16;
/// How many descriptors can be recorded at a time. Further descriptors work, but are not protected.
const RECORDS_MAX: usize = 4096;
/// How many times the move of a descriptor is tried while other threads change the limit.
const ATTEMPTS_MAX: u32 = 100;
/// How long [`give_way`] waits for threads that are using the number: as long as a live server may take to answer.
const PATIENCE: Duration = Deadlines::DEFAULT.request;
/// How long a thread waits until other threads have lowered the limit again. Each of them talks to the server meanwhile.
const TURN_PATIENCE: Duration = Duration::from_secs(20);
const TURN_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// For each descriptor number, the index of its record plus one; 0 if the number is not reserved.
static WATCH: [AtomicU32; WATCHED] = [const { AtomicU32::new(0) }; WATCHED];
static RECORDS: [Record; RECORDS_MAX] = [const { Record::new() }; RECORDS_MAX];
/// One more than the highest index of a record that was ever taken.
static RECORDS_USED: AtomicUsize = AtomicUsize::new(0);
/// The limit on descriptors before it was raised for a moment; [`NOT_RAISED`] when it is not raised.
static LIMIT_BEFORE: AtomicU64 = AtomicU64::new(NOT_RAISED);
const NOT_RAISED: u64 = u64::MAX;
/// Whether a thread has raised the limit.
static IS_RAISED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Whether this thread has raised the limit.
    static HAS_RAISED: Cell<bool> = const { Cell::new(false) };
    /// Number of reserved descriptors that this thread is using.
    static USES: Cell<u32> = const { Cell::new(0) };
}

/// A reserved descriptor's record.
struct Record {
    is_taken: AtomicBool,
    number: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
    /// Number of threads that are using the descriptor now.
    users: AtomicU32,
}

impl Record {
    const fn new() -> Self {
        Self {
            is_taken: AtomicBool::new(false),
            number: AtomicI32::new(-1),
            device: AtomicU64::new(0),
            inode: AtomicU64::new(0),
            users: AtomicU32::new(0),
        }
    }

    fn identity(&self) -> (u64, u64) {
        (self.device.load(Ordering::Acquire), self.inode.load(Ordering::Acquire))
    }

    /// Returns whether the record's file is still open at a number.
    fn is_at(&self, number: RawFd) -> bool {
        identity(number) == Some(self.identity())
    }
}

/// A file with a reserved descriptor.
pub struct ReservedFd {
    record: &'static Record,
    /// The record's index plus one. 0 means that the record is on the heap, because all records of the list were taken.
    index: u32,
}

/// A reserved descriptor that was just found to be intact, for one use by the thread that asked for it.
pub struct InUse<'a> {
    file: ManuallyDrop<File>,
    record: &'a Record,
    stays_in_thread: PhantomData<*const ()>,
}

impl InUse<'_> {
    /// Duplicates the descriptor, to the lowest free number. `File::try_clone` cannot do this: it calls functions that the
    /// preload library replaces, and to them reserved descriptors look closed.
    ///
    /// # Errors
    ///
    /// If the process has too many open files.
    pub fn duplicate(&self) -> io::Result<File> {
        let number = duplicate_above(self.as_raw_fd(), 0).map_err(io::Error::from_raw_os_error)?;
        // SAFETY: the kernel has just made this descriptor for us; nothing else owns it.
        Ok(File::from(unsafe { OwnedFd::from_raw_fd(number) }))
    }
}

impl Deref for InUse<'_> {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        USES.set(USES.get().saturating_sub(1));
        self.record.users.fetch_sub(1, Ordering::AcqRel);
    }
}

impl ReservedFd {
    /// Moves a file's descriptor to a high number, out of the program's way. If no high number is
    /// free, the descriptor stays where it is.
    pub fn new(file: File) -> Self {
        let take = |record: &Record| {
            let is_free = !record.is_taken.load(Ordering::Relaxed);
            is_free && record.is_taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let found = RECORDS.iter().enumerate().find(|(_, record)| take(record));
        let (record, index) = match found {
            Some((index, record)) => (record, index as u32 + 1),
            None => (&*Box::leak(Box::new(Record::new())), 0),
        };
        let (device, inode) = identity(file.as_raw_fd()).unwrap_or_default();
        RECORDS_USED.fetch_max(index as usize, Ordering::AcqRel);
        record.device.store(device, Ordering::Release);
        record.inode.store(inode, Ordering::Release);
        let number = moved_up(file).into_raw_fd();
        record.number.store(number, Ordering::Release);
        watch(number, index);
        Self { record, index }
    }

    /// Returns the descriptor's number. Another file may be open at this number by now.
    #[inline]
    pub fn number(&self) -> RawFd {
        self.record.number.load(Ordering::Acquire)
    }

    /// Returns the file for one use.
    ///
    /// # Errors
    ///
    /// If the program has closed the descriptor.
    pub fn get(&self) -> io::Result<InUse<'_>> {
        let record = self.record;
        // Counted before the number is read, so that either `give_way` waits for this use or this use sees the new number.
        record.users.fetch_add(1, Ordering::SeqCst);
        let number = record.number.load(Ordering::SeqCst);
        // SAFETY: the file is never closed through this value; whether the number is open is checked below.
        let file = ManuallyDrop::new(unsafe { File::from_raw_fd(number) });
        let in_use = InUse { file, record, stays_in_thread: PhantomData };
        USES.set(USES.get() + 1);
        if record.is_at(number) { Ok(in_use) } else { Err(io::Error::other("the program closed a descriptor of the library")) }
    }

    /// Returns whether the descriptor is still there.
    pub fn is_intact(&self) -> bool {
        self.record.is_at(self.number())
    }

    /// Returns device and inode of the file.
    pub fn identity(&self) -> (u64, u64) {
        self.record.identity()
    }

    /// If the program has closed the descriptor, puts `file` in its place, which must be the same file. Returns whether the
    /// descriptor is there now. Only the process that reserved the descriptor may call this, not its `vfork` child.
    pub fn restore(&self, file: File) -> bool {
        let (record, lost) = (self.record, self.number());
        if record.is_at(lost) {
            return true;
        }
        if identity(file.as_raw_fd()) != Some(record.identity()) {
            return false;
        }
        unwatch(lost, self.index);
        let number = moved_up(file).into_raw_fd();
        if record.number.compare_exchange(lost, number, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            watch(number, self.index);
        } else {
            // Another thread was faster. SAFETY: the descriptor was made just above, and nobody else knows it.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
        true
    }
}

impl Drop for ReservedFd {
    fn drop(&mut self) {
        let (record, number) = (self.record, self.number());
        unwatch(number, self.index);
        // If another file is open at this number by now, it is the program's and stays open.
        if record.is_at(number) {
            // SAFETY: the number still has our file, which nobody else closes.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
        record.number.store(-1, Ordering::Release);
        record.is_taken.store(false, Ordering::Release);
        if self.index == 0 {
            // SAFETY: the record was leaked in `new`. It is not in the list, so only this value refers to it.
            drop(unsafe { Box::from_raw(std::ptr::from_ref(record).cast_mut()) });
        }
    }
}

/// Moves a file to a high number, if one is free there.
fn moved_up(file: File) -> File {
    match high_copy(file.as_raw_fd()) {
        // SAFETY: the kernel has just made this descriptor for us; nothing else owns it.
        Some(high) => File::from(unsafe { OwnedFd::from_raw_fd(high) }),
        None => file,
    }
}

/// Duplicates a descriptor to a high number, if one is free there.
///
/// If the process has a low limit on descriptors and may raise it, the limit is raised for that moment. Otherwise the copy would
/// take one of the few numbers that the program has.
fn high_copy(number: RawFd) -> Option<RawFd> {
    for _ in 0..ATTEMPTS_MAX {
        let _raised = RaisedLimit::to(|soft, hard| soft.max(hard.min(CEILING)));
        let limit = descriptors_limit().map_or(CEILING, |(soft, _)| soft.min(CEILING));
        match duplicate_above(number, limit.saturating_sub(ROOM).max(limit / 2) as RawFd) {
            Ok(copy) => return Some(copy),
            // The numbers are above the limit, because another thread has lowered the limit since it was read.
            Err(libc::EINVAL) => {}
            Err(_) => return None,
        }
    }
    None
}

/// Runs `operation`. If it fails because the process has no numbers left for descriptors, as `is_scarce` says about the error, runs it
/// again while the limit is higher, if the process may raise it. Files that arrive from the server first get the lowest free
/// numbers, and the program may have used all of its own.
///
/// The limit is the whole process's, so other threads may notice.
///
/// # Errors
///
/// Those of `operation`.
pub fn with_numbers<T, E>(operation: impl Fn() -> Result<T, E>, is_scarce: impl Fn(&E) -> bool) -> Result<T, E> {
    match operation() {
        Err(error) if is_scarce(&error) => {
            let _raised = RaisedLimit::to(|soft, hard| soft.saturating_add(ROOM).max(CEILING).min(hard));
            operation()
        }
        result => result,
    }
}

/// While this value lives, the process may have more descriptors. Only one thread at a time has such a value.
struct RaisedLimit {
    before: u64,
    raised: u64,
    hard: u64,
    stays_in_thread: PhantomData<*const ()>,
}

impl RaisedLimit {
    /// Raises the soft limit to what `wanted` says about the limits, soft and hard. `None` if that is no more than the soft limit,
    /// if this thread has raised it already, or if the kernel refuses.
    fn to(wanted: impl Fn(u64, u64) -> u64) -> Option<Self> {
        let more = || descriptors_limit().filter(|&(soft, hard)| soft < wanted(soft, hard));
        more()?;
        if !take_turn() {
            return None;
        }
        // Another thread may have changed the limit in the meantime.
        let raise = |(before, hard): (u64, u64)| {
            let raised = wanted(before, hard);
            LIMIT_BEFORE.store(before, Ordering::Release);
            replace_descriptors_limit(raised, hard)?;
            Some(Self { before, raised, hard, stays_in_thread: PhantomData })
        };
        let raised = more().and_then(raise);
        if raised.is_none() {
            end_turn();
        }
        raised
    }
}

impl Drop for RaisedLimit {
    fn drop(&mut self) {
        let found = replace_descriptors_limit(self.before, self.hard);
        let is_expected = |&(soft, hard): &(u64, u64)| hard == self.hard && (soft == self.raised || soft == self.before);
        if let Some((soft, hard)) = found.filter(|found| !is_expected(found)) {
            // The program has set another limit in the meantime, which applies.
            replace_descriptors_limit(soft, hard);
        }
        end_turn();
    }
}

/// Waits until no other thread has raised the limit. Returns whether this thread may now: not if it has raised the limit itself, or
/// if another thread does not end in time.
fn take_turn() -> bool {
    let deadline = Instant::now() + TURN_PATIENCE;
    while IS_RAISED.swap(true, Ordering::AcqRel) {
        if HAS_RAISED.get() || Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(TURN_POLL_INTERVAL);
    }
    HAS_RAISED.set(true);
    true
}

fn end_turn() {
    LIMIT_BEFORE.store(NOT_RAISED, Ordering::Release);
    HAS_RAISED.set(false);
    IS_RAISED.store(false, Ordering::Release);
}

fn entry(number: RawFd) -> Option<&'static AtomicU32> {
    usize::try_from(number).ok().and_then(|number| WATCH.get(number))
}

fn watch(number: RawFd, index: u32) {
    if let Some(entry) = entry(number) {
        entry.store(index, Ordering::Release);
    }
}

fn unwatch(number: RawFd, index: u32) {
    if let Some(entry) = entry(number) {
        // Fails if the number has been reserved again since.
        let _ = entry.compare_exchange(index, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}

fn record_at(number: RawFd) -> Option<(&'static Record, u32)> {
    let index = entry(number)?.load(Ordering::Acquire);
    Some((RECORDS.get(index.checked_sub(1)? as usize)?, index))
}

/// Returns whether a descriptor is reserved by the library. For other descriptors, which are the usual case, this is one load.
#[inline]
pub fn is_reserved(number: RawFd) -> bool {
    is_watched(number) && is_still_reserved(number)
}

#[cold]
fn is_still_reserved(number: RawFd) -> bool {
    record_at(number).is_some_and(|(record, _)| record.number.load(Ordering::Acquire) == number && record.is_at(number))
}

/// Returns whether a number was reserved when this library last knew about it.
#[inline]
pub fn is_watched(number: RawFd) -> bool {
    entry(number).is_some_and(|entry| entry.load(Ordering::Acquire) != 0)
}

/// Returns whether a number must look closed to the caller: it is reserved, and this thread is not using a reserved descriptor, so
/// the caller is the program. For other numbers, which are the usual case, this is one load.
#[inline]
pub fn is_hidden(number: RawFd) -> bool {
    is_watched(number) && is_hidden_now(number)
}

#[cold]
fn is_hidden_now(number: RawFd) -> bool {
    USES.get() == 0 && is_still_reserved(number)
}

/// Iterates over the numbers that are reserved.
pub fn reserved_numbers() -> impl Iterator<Item = RawFd> {
    let used = RECORDS_USED.load(Ordering::Acquire).min(RECORDS_MAX);
    RECORDS[..used]
        .iter()
        .filter(|record| record.is_taken.load(Ordering::Acquire))
        .map(|record| record.number.load(Ordering::Acquire))
}

/// Learns that the kernel has just given a number to a file of the program. If the number was reserved, it no longer is. A
/// `vfork` child must not call this.
#[inline]
pub fn note_given(number: RawFd) {
    if let Some(entry) = entry(number).filter(|entry| entry.load(Ordering::Acquire) != 0) {
        entry.store(0, Ordering::Release);
    }
}

/// Moves a reserved descriptor to another number, because the program wants to open a file of its own at `number`. The old
/// descriptor stays open until the program's call replaces it. A `vfork` child must not call this.
///
/// # Errors
///
/// EBUSY if another thread uses the descriptor for too long, or if this thread uses one, which it cannot end in a signal handler. The
/// descriptor then keeps its number. EMFILE if no other number is free.
pub fn give_way(number: RawFd) -> Result<(), i32> {
    let Some((record, index)) = record_at(number).filter(|_| is_reserved(number)) else { return Ok(()) };
    if USES.get() > 0 && record.users.load(Ordering::SeqCst) > 0 {
        return Err(libc::EBUSY);
    }
    let other = high_copy(number).map_or_else(|| duplicate_above(number, 3), Ok)?;
    watch(other, index);
    if record.number.compare_exchange(number, other, Ordering::SeqCst, Ordering::Relaxed).is_err() {
        // The reserved descriptor was dropped in the meantime. SAFETY: `other` was made just above, and nobody else knows it.
        drop(unsafe { OwnedFd::from_raw_fd(other) });
        unwatch(other, index);
        return Ok(());
    }
    unwatch(number, index);
    let deadline = Instant::now() + PATIENCE;
    while record.users.load(Ordering::SeqCst) > 0 {
        if Instant::now() > deadline {
            // Both stay open, because threads may be using either. The other one is given up, and is closed with the process.
            if record.number.compare_exchange(other, number, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
                watch(number, index);
                unwatch(other, index);
            }
            return Err(libc::EBUSY);
        }
        std::thread::sleep(TURN_POLL_INTERVAL);
    }
    Ok(())
}

/// Restores the limit on descriptors if another thread of the parent had raised it for a moment at the time of the fork. A forked
/// child must call this.
pub fn restore_limit_after_fork() {
    let before = LIMIT_BEFORE.swap(NOT_RAISED, Ordering::AcqRel);
    end_turn();
    if before != NOT_RAISED
        && let Some((_, hard)) = descriptors_limit()
    {
        replace_descriptors_limit(before, hard);
    }
}

/// Forgets the threads that were using descriptors. A forked child, which has only one thread, must call this.
pub(crate) fn after_fork() {
    for record in RECORDS.iter().filter(|record| record.is_taken.load(Ordering::Acquire)) {
        record.users.store(0, Ordering::Release);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Mutex, MutexGuard, PoisonError};

    use super::*;

    /// Lets no other test of this process reserve a descriptor, which would get the number that one has just given up.
    pub(crate) fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        ALONE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes a number behind the library's back, and puts another file there.
    fn steal(number: RawFd, file: &File) {
        // SAFETY: both are open; the test owns what is replaced.
        assert_eq!(unsafe { libc::dup2(file.as_raw_fd(), number) }, number);
    }

    #[test]
    fn a_reserved_descriptor_is_high_and_known_until_it_is_dropped() {
        let _alone = alone();
        let reserved = ReservedFd::new(File::open("/dev/null").unwrap());
        let number = reserved.number();
        assert!(number >= 256, "{number}");
        assert!(is_reserved(number) && !is_reserved(0) && !is_reserved(-1) && !is_reserved(i32::MAX));
        assert!(is_hidden(number) && reserved_numbers().any(|reserved| reserved == number));
        let in_use = reserved.get().unwrap();
        assert!(!is_hidden(number) && std::thread::spawn(move || is_hidden(number)).join().unwrap());
        drop(in_use);
        assert!(is_hidden(number));
        drop(reserved);
        assert!(!is_reserved(number) && identity(number).is_none());
    }

    #[test]
    fn a_number_that_the_program_took_is_neither_used_nor_closed_and_the_descriptor_can_be_restored() {
        let _alone = alone();
        let (zero, null) = (File::open("/dev/zero").unwrap(), File::open("/dev/null").unwrap());
        let reserved = ReservedFd::new(zero.try_clone().unwrap());
        let number = reserved.number();
        steal(number, &null);
        assert!(reserved.get().is_err() && !reserved.is_intact() && !is_reserved(number));
        assert!(!reserved.restore(null.try_clone().unwrap()), "another file");
        assert!(reserved.restore(zero.try_clone().unwrap()) && reserved.get().is_ok() && reserved.number() != number);
        steal(reserved.number(), &null);
        let second = reserved.number();
        drop(reserved);
        for number in [number, second] {
            assert_eq!(identity(number), identity(null.as_raw_fd()), "the program's file was closed");
            // SAFETY: made by `steal`.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
    }

    #[test]
    fn a_reserved_descriptor_gives_way() {
        let _alone = alone();
        let reserved = ReservedFd::new(File::open("/dev/zero").unwrap());
        let number = reserved.number();
        give_way(number).unwrap();
        assert!(reserved.number() != number && reserved.is_intact() && is_reserved(reserved.number()) && !is_reserved(number));
        // SAFETY: nobody owns it anymore.
        drop(unsafe { OwnedFd::from_raw_fd(number) });
        // In a signal handler, this thread cannot end its own use.
        let (in_use, number, start) = (reserved.get().unwrap(), reserved.number(), Instant::now());
        assert_eq!(give_way(number), Err(libc::EBUSY));
        assert!(start.elapsed() < PATIENCE && reserved.number() == number && is_reserved(number));
        // Another thread waits for it.
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| give_way(number));
            std::thread::sleep(Duration::from_millis(100));
            assert!(!waiting.is_finished());
            drop(in_use);
            waiting.join().unwrap().unwrap();
        });
        assert!(reserved.number() != number && reserved.is_intact());
        // SAFETY: nobody owns it anymore.
        drop(unsafe { OwnedFd::from_raw_fd(number) });
    }
}
