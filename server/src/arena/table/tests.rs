//! The table under random interleavings (explored with shuttle), and its eviction policy.

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use shuttle::sync::{Condvar, Mutex};
use shuttle::thread;

use super::*;

struct Block {
    weight: u64,
    is_from_origin: bool,
    chances: AtomicU8,
    mark: std::sync::atomic::AtomicBool,
}

impl Resident for Block {
    fn weight(&self) -> u64 {
        self.weight
    }

    fn is_from_origin(&self) -> bool {
        self.is_from_origin
    }

    fn set_mark(&self) {
        self.mark.store(true, std::sync::atomic::Ordering::Relaxed);
    }

    fn take_mark(&self) -> bool {
        self.mark.swap(false, std::sync::atomic::Ordering::Relaxed)
    }

    fn chances(&self) -> &AtomicU8 {
        &self.chances
    }
}

fn block(weight: u64) -> Arc<Block> {
    Arc::new(Block { weight, is_from_origin: false, chances: 0.into(), mark: false.into() })
}

/// Wakes the threads that wait for the end of a load, as the server's channel does.
struct Signal(Mutex<bool>, Condvar);

/// Uses the table as the server does, with threads in place of tasks.
struct Server {
    table: Mutex<Table<u32, Block, Arc<Signal>>>,
    loads: std::sync::atomic::AtomicUsize,
}

impl Server {
    fn new(capacity: u64) -> Arc<Self> {
        Arc::new(Self { table: Mutex::new(Table::new(capacity, 16)), loads: 0.into() })
    }

    /// Reads a block. If this caller has to load it and `fails` is set, the load fails.
    fn read(&self, key: u32, fails: bool) -> Option<Arc<Block>> {
        loop {
            let mut table = self.table.lock().unwrap();
            match table.look_up(&key) {
                Lookup::Resident(value) => return Some(value),
                Lookup::Loading(signal) => {
                    drop(table);
                    let mut ended = signal.0.lock().unwrap();
                    while !*ended {
                        ended = signal.1.wait(ended).unwrap();
                    }
                }
                Lookup::Absent => {
                    let signal = Arc::new(Signal(Mutex::new(false), Condvar::new()));
                    table.begin_load(key, signal.clone());
                    drop(table);
                    thread::yield_now();
                    let value = block(10);
                    let mut table = self.table.lock().unwrap();
                    if fails {
                        table.abandon_load(&key);
                    } else {
                        self.loads.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        drop(table.finish_load(key, value.clone()));
                    }
                    drop(table);
                    *signal.0.lock().unwrap() = true;
                    signal.1.notify_all();
                    return (!fails).then_some(value);
                }
            }
        }
    }
}

fn loads(server: &Server) -> usize {
    server.loads.load(std::sync::atomic::Ordering::Relaxed)
}

fn check(iterations: usize, body: impl Fn() + Send + Sync + 'static) {
    shuttle::check_random_with_seed(body, crate::test_seed::seed("SHUTTLE_RANDOM_SEED", 1), iterations);
}

/// SEMANTICS: "A block that another node owns comes through the node's server, in chunks of at most 4
/// MiB, into the arena, which all processes of the node share. Requests for one chunk are joined:
/// sixteen processes cause one transfer. While the chunk is in the arena, processes find it without
/// asking the server."
#[test]
fn sixteen_readers_of_one_block_load_it_once() {
    check(300, || {
        let server = Server::new(1000);
        let reader = |_| {
            let server = server.clone();
            thread::spawn(move || assert!(server.read(7, false).is_some()))
        };
        let readers: Vec<_> = (0..16).map(reader).collect();
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        assert_eq!(loads(&server), 1);
    });
}

#[test]
fn after_a_failed_load_the_next_reader_loads_the_block_and_nobody_waits_forever() {
    check(1000, || {
        let server = Server::new(1000);
        let reader = |number| {
            let server = server.clone();
            thread::spawn(move || server.read(7, number < 2).is_some())
        };
        let readers: Vec<_> = (0..5).map(reader).collect();
        let got = readers.into_iter().map(|reader| reader.join().unwrap()).filter(|&got| got).count();
        assert!(got >= 3 && loads(&server) == 1, "{got} {}", loads(&server));
        assert!(server.table.lock().unwrap().loading.is_empty());
    });
}

#[test]
fn a_leased_block_is_never_evicted_while_others_load() {
    check(500, || {
        let server = Server::new(30);
        let reader = |number| {
            let server = server.clone();
            thread::spawn(move || {
                for key in [number, number + 1, 7] {
                    let lease = server.read(key, false).unwrap();
                    thread::yield_now();
                    let table = server.table.lock().unwrap();
                    // The block stays in the table until we drop it, so nobody loads it again and its room is not reused.
                    assert!(table.peek(&key).is_some_and(|value| Arc::ptr_eq(&value, &lease)), "{key}");
                }
            })
        };
        let readers: Vec<_> = (0..4).map(reader).collect();
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        let mut table = server.table.lock().unwrap();
        table.evict(1000);
        assert_eq!(table.weight(), 0, "after the last lease ended, everything can be evicted");
    });
}

/// Reads a key, and loads its value if it is absent. Returns whether it was resident. Values of `room` bytes fit.
fn read(table: &mut Table<u32, Block, ()>, key: u32, room: u64) -> bool {
    match table.look_up(&key) {
        Lookup::Resident(_) => true,
        _ => {
            table.begin_load(key, ());
            if table.weight() + 10 > room {
                assert!(!table.evict(30).is_empty());
            }
            drop(table.finish_load(key, block(10)));
            false
        }
    }
}

/// Reads each of `keys` once, in an order that `seed` decides. Returns the share that was resident.
fn epoch(table: &mut Table<u32, Block, ()>, keys: std::ops::Range<u32>, seed: u64, room: u64) -> f64 {
    let mut order: Vec<u32> = keys.collect();
    order.shuffle(&mut StdRng::seed_from_u64(seed));
    order.iter().filter(|&&key| read(table, key, room)).count() as f64 / order.len() as f64
}

#[test]
fn what_fits_stays_from_epoch_to_epoch_and_other_data_take_its_place() {
    let cases = [10_000, 8_000, 5_000].into_iter().flat_map(|room| [1.1, 1.36, 2.0, 4.0].map(|times| (room, times)));
    for (room, times) in cases {
        let (values, best) = ((room as f64 / 10.0 * times) as u32, 1.0 / times);
        let mut table: Table<u32, Block, ()> = Table::new(10_000, 1000);
        assert!(table.evict(100).is_empty(), "there is nothing to evict");
        epoch(&mut table, 0..values, 0, room);
        let found: Vec<f64> = (1..9).map(|number| epoch(&mut table, 0..values, number, room)).collect();
        assert!(found.iter().all(|share| *share > best * 0.7), "{values} values, room {room}: {found:?}, at best {best}");
        // Other data are read from now on.
        let found: Vec<f64> = (0..30).map(|number| epoch(&mut table, 10_000..10_000 + values, number, room)).collect();
        assert!(found[29] > best * 0.7, "{values} values, room {room}: {found:?}, at best {best}");
    }
}

#[test]
fn a_scan_does_not_evict_blocks_that_are_read_again() {
    let mut table: Table<u32, Block, ()> = Table::new(1000, 100);
    for _ in 0..3 {
        (0..20).for_each(|key| _ = read(&mut table, key, 1000));
    }
    for key in 100..2000 {
        read(&mut table, key, 1000);
        if key % 50 == 0 {
            (0..20).for_each(|hot| _ = read(&mut table, hot, 1000));
        }
    }
    let survivors = (0..20).filter(|key| table.peek(key).is_some()).count();
    assert!(survivors >= 18, "{survivors} of 20 survive a scan of 19 times the capacity");
}

#[test]
fn eviction_never_takes_pinned_blocks_and_spares_marked_blocks_once() {
    let mut table: Table<u32, Block, ()> = Table::new(100, 10);
    let blocks: Vec<Arc<Block>> = (0..10).map(|_| block(10)).collect();
    for (key, block) in (0..).zip(&blocks) {
        table.begin_load(key, ());
        drop(table.finish_load(key, block.clone()));
    }
    assert!(table.evict(50).is_empty(), "every block is pinned");
    let pinned = blocks[3].clone();
    blocks[4].mark.store(true, std::sync::atomic::Ordering::Relaxed);
    drop(blocks);
    assert_eq!(table.evict(50).len(), 5);
    assert!(table.peek(&3).is_some() && table.peek(&4).is_some());
    table.evict(1000);
    assert_eq!(table.weight(), 10);
    assert_eq!(table.forget(|_| true).len(), 1);
    drop(pinned);
}

#[test]
fn values_that_only_the_file_system_has_take_the_place_of_values_that_other_nodes_have() {
    let mut table: Table<u32, Block, ()> = Table::new(3300, 100);
    // Two thirds of all values fit.
    let misses: Vec<usize> = (0..40)
        .map(|_| {
            let mut misses = 0;
            for (is_from_origin, key) in (0..250).flat_map(|number| [(true, number), (false, 1000 + number)]) {
                if matches!(table.look_up(&key), Lookup::Absent) {
                    misses += usize::from(is_from_origin);
                    if table.weight() + 10 > 3270 {
                        assert!(!table.evict(26).is_empty());
                    }
                    table.begin_load(key, ());
                    let block = Block { weight: 10, is_from_origin, chances: 0.into(), mark: false.into() };
                    drop(table.finish_load(key, Arc::new(block)));
                }
            }
            misses
        })
        .collect();
    assert!(misses[1] > 60 && misses[39] < 10, "{misses:?}");
    // Values that nobody reads any more make way for others, even if they are from the file system.
    let others: Vec<f64> = (0..300).map(|number| epoch(&mut table, 5000..5250, number, 3270)).collect();
    assert!(others[299] > 0.9, "{others:?}");
}
