//! The table under all kinds of interleaving (by shuttle), and what it evicts.

use shuttle::sync::{Condvar, Mutex};
use shuttle::thread;

use super::*;

struct Block {
    weight: u64,
    mark: std::sync::atomic::AtomicBool,
}

impl Resident for Block {
    fn weight(&self) -> u64 {
        self.weight
    }

    fn take_mark(&self) -> bool {
        self.mark.swap(false, std::sync::atomic::Ordering::Relaxed)
    }
}

fn block(weight: u64) -> Arc<Block> {
    Arc::new(Block { weight, mark: false.into() })
}

/// Tells those who wait that a load has ended, as the server's channel does.
struct Signal(Mutex<bool>, Condvar);

/// What a server does, with threads for its tasks.
struct Server {
    table: Mutex<Table<u32, Block, Arc<Signal>>>,
    loads: std::sync::atomic::AtomicUsize,
}

impl Server {
    fn new(capacity: u64) -> Arc<Self> {
        Arc::new(Self { table: Mutex::new(Table::new(capacity, 16)), loads: 0.into() })
    }

    /// Gets a block; whoever is told to load it may fail at it.
    fn read(&self, key: u32, fails: bool) -> Option<Arc<Block>> {
        loop {
            let mut table = self.table.lock().unwrap();
            match table.wish(&key) {
                Wish::Held(held) => return Some(held),
                Wish::Loading(signal) => {
                    drop(table);
                    let mut ended = signal.0.lock().unwrap();
                    while !*ended {
                        ended = signal.1.wait(ended).unwrap();
                    }
                }
                Wish::Absent => {
                    let signal = Arc::new(Signal(Mutex::new(false), Condvar::new()));
                    table.begin(key, signal.clone());
                    drop(table);
                    thread::yield_now();
                    let held = block(10);
                    let mut table = self.table.lock().unwrap();
                    if fails {
                        table.give_up(&key);
                    } else {
                        self.loads.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        drop(table.fill(key, held.clone()));
                    }
                    drop(table);
                    *signal.0.lock().unwrap() = true;
                    signal.1.notify_all();
                    return (!fails).then_some(held);
                }
            }
        }
    }
}

fn loads(server: &Server) -> usize {
    server.loads.load(std::sync::atomic::Ordering::Relaxed)
}

fn check(iterations: usize, body: impl Fn() + Send + Sync + 'static) {
    shuttle::check_random(body, iterations);
}

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
fn a_load_that_fails_passes_to_the_next_and_nobody_waits_for_ever() {
    check(1000, || {
        let server = Server::new(1000);
        let reader = |number| {
            let server = server.clone();
            thread::spawn(move || server.read(7, number < 2).is_some())
        };
        let readers: Vec<_> = (0..5).map(reader).collect();
        let got = readers.into_iter().filter(|_| true).map(|reader| reader.join().unwrap()).filter(|&got| got).count();
        assert!(got >= 3 && loads(&server) == 1, "{got} {}", loads(&server));
        assert!(server.table.lock().unwrap().loading.is_empty());
    });
}

#[test]
fn what_a_reader_has_is_never_evicted_whoever_else_loads() {
    check(500, || {
        let server = Server::new(30);
        let reader = |number| {
            let server = server.clone();
            thread::spawn(move || {
                for key in [number, number + 1, 7] {
                    let lease = server.read(key, false).unwrap();
                    thread::yield_now();
                    let table = server.table.lock().unwrap();
                    // It stays where it is found, so nobody loads it again and its room is not given away, until we let go.
                    assert!(table.peek(&key).is_some_and(|held| Arc::ptr_eq(&held, &lease)), "{key}");
                }
            })
        };
        let readers: Vec<_> = (0..4).map(reader).collect();
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        let mut table = server.table.lock().unwrap();
        table.evict(1000);
        assert_eq!(table.weight(), 0, "all leases ended, so all makes room");
    });
}

#[test]
fn a_scan_does_not_press_out_what_is_wished_for_again() {
    let mut table: Table<u32, Block, ()> = Table::new(1000, 100);
    let read = |table: &mut Table<u32, Block, ()>, key| match table.wish(&key) {
        Wish::Held(_) => true,
        _ => {
            table.begin(key, ());
            drop(table.fill(key, block(10)));
            false
        }
    };
    for _ in 0..3 {
        (0..20).for_each(|key| _ = read(&mut table, key));
    }
    for key in 100..2000 {
        read(&mut table, key);
        if key % 50 == 0 {
            (0..20).for_each(|hot| _ = read(&mut table, hot));
        }
    }
    let kept = (0..20).filter(|key| table.peek(key).is_some()).count();
    assert!(kept >= 18, "{kept} of 20 survive a scan of 19 times the room");
}

#[test]
fn pinned_ones_stay_marked_ones_are_spared_once_and_the_rest_makes_room() {
    let mut table: Table<u32, Block, ()> = Table::new(100, 10);
    let blocks: Vec<Arc<Block>> = (0..10).map(|_| block(10)).collect();
    for (key, block) in (0..).zip(&blocks) {
        table.begin(key, ());
        drop(table.fill(key, block.clone()));
    }
    assert!(table.evict(50).is_empty(), "all are pinned");
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
