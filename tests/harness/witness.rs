//! The witness of starvation: measures whether the machine gave a test and its servers the processor time that they needed.
//!
//! A thread of each test process sleeps for 50 ms, again and again, and measures how late it wakes up. Every 200 ms it also reads how
//! long each thread of each server has waited for a processor. From these the witness of a [`super::Ground`] computes one number for
//! the time since that ground was made:
//!
//! > `starved_s` is the larger of two sums: the times by which the witness's thread woke up late, if it was at least 50 ms late; and,
//! > for the one thread of a server that waited most, its waits for a processor, if they were at least 100 ms between two looks.
//!
//! From one second on, the test counts as starved. A test that fails, or that was starved, prints one line, which `.ci/test` reads:
//!
//! ```text
//! WITNESS test=NAME starved_s=2.3 late_s=0.4 run_delay_s=2.3 cpu_pressure_s=3.1 steal_s=0.0
//! ```
//!
//! The last two are measurements of the whole machine, and only information: the time during which some task waited for a processor
//! (from `/proc/pressure/cpu`), and the time that the hypervisor gave to others (from `/proc/stat`, the sum of all processors).
//!
//! The witness does not see the commands that a test runs, servers on other machines, and servers that the test starts outside the
//! ground's runtime folder.

use std::collections::HashMap;
use std::fmt::{self, Display, Formatter};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

const SLEEP: Duration = Duration::from_millis(50);
/// A wake-up that is later than this counts as late.
const LATE_MIN: Duration = Duration::from_millis(50);
/// How often the servers' threads are read.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// Waits of a thread between two looks count if they are this long together.
const WAIT_MIN: Duration = Duration::from_millis(100);
/// A test that was starved for this long counts as starved.
const STARVED_MIN: Duration = Duration::from_secs(1);
/// The kernel adds a thread's wait to its statistics only when the wait is over. A test that has failed gives it this long.
const LAST_WAITS: Duration = Duration::from_millis(500);

/// When the witness's thread woke up late, and by how much.
static LATE: Mutex<Vec<(Instant, Duration)>> = Mutex::new(Vec::new());
/// The servers of all grounds of this process.
static ALL_SERVERS: Mutex<Vec<Weak<Servers>>> = Mutex::new(Vec::new());

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns how late the witness's thread has woken up, in sum, since it was started with the first [`super::Ground`].
pub(crate) fn lateness() -> Duration {
    locked(&LATE).iter().map(|(_, late)| *late).sum()
}

/// Returns how late the witness's thread has woken up, in sum, since `start`.
pub(crate) fn lateness_since(start: Instant) -> Duration {
    locked(&LATE).iter().rev().take_while(|(at, _)| *at >= start).map(|(_, late)| *late).sum()
}

/// How long each thread of some processes has waited for a processor.
#[derive(Default)]
pub(crate) struct Waits {
    nanos: HashMap<i32, u64>,
}

impl Waits {
    /// Returns the threads of a process, each with the time that it has waited for a processor since the last call.
    pub(crate) fn since_last(&mut self, pid: i32) -> Vec<(i32, Duration)> {
        let mut waits = Vec::new();
        for folder in entries(format!("/proc/{pid}/task").into()) {
            // "<time on a processor> <time waiting for one> <time slices>", in nanoseconds. The process may end meanwhile.
            let Ok(times) = fs::read_to_string(folder.join("schedstat")) else { continue };
            let Some(nanos) = times.split_whitespace().nth(1).and_then(|time| time.parse().ok()) else { continue };
            let Some(thread) = number_in(&folder, "", "") else { continue };
            let before = self.nanos.insert(thread, nanos).unwrap_or(0);
            waits.push((thread, Duration::from_nanos(nanos.saturating_sub(before))));
        }
        waits
    }

    /// Returns the longest time that a thread of the process has waited for a processor since the last call.
    pub(crate) fn longest(&mut self, pid: i32) -> Duration {
        self.since_last(pid).into_iter().map(|(_, wait)| wait).max().unwrap_or_default()
    }
}

/// The servers of one ground.
struct Servers {
    runtime: PathBuf,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    waits: Waits,
    /// The sum of the waits of each thread that count.
    starved: HashMap<i32, Duration>,
}

impl Servers {
    fn look(&self) {
        let mut seen = locked(&self.seen);
        let Seen { waits, starved } = &mut *seen;
        for lock in files_of_sessions(&self.runtime).filter(|path| number_in(path, "node-", ".lock").is_some()) {
            // The server has written its process id into the lock's file. Whether the lock is held is not checked, because the check
            // takes the lock for a moment.
            let Some(pid) = fs::read_to_string(lock).ok().and_then(|pid| pid.trim().parse().ok()) else { continue };
            for (thread, wait) in waits.since_last(pid).into_iter().filter(|(_, wait)| *wait >= WAIT_MIN) {
                *starved.entry(thread).or_default() += wait;
            }
        }
    }

    /// Returns the lines about panics in the logs of the sessions that have not ended.
    fn panics(&self) -> Vec<String> {
        let logs = files_of_sessions(&self.runtime).filter(|path| path.extension().is_some_and(|kind| kind == "log"));
        let texts = logs.map(|log| String::from_utf8_lossy(&fs::read(log).unwrap_or_default()).into_owned());
        let lines = texts.flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>());
        lines.filter(|line| line.contains(" panicked at ")).collect()
    }
}

fn entries(folder: PathBuf) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path())
}

/// Returns the files in the folders of all sessions: `RUNTIME/USER/SESSION/FILE`.
fn files_of_sessions(runtime: &Path) -> impl Iterator<Item = PathBuf> {
    entries(runtime.to_owned()).flat_map(entries).flat_map(entries)
}

/// Returns the number in a file's name between a prefix and a suffix.
fn number_in(path: &Path, prefix: &str, suffix: &str) -> Option<i32> {
    path.file_name()?.to_str()?.strip_prefix(prefix)?.strip_suffix(suffix)?.parse().ok()
}

/// Measures this machine and the servers of one ground for as long as it lives.
pub(crate) struct Witness {
    servers: Arc<Servers>,
    late_before: Duration,
    pressure_before: Option<Duration>,
    steal_before: Option<Duration>,
    has_testified: AtomicBool,
}

impl Witness {
    pub(crate) fn new(runtime: &Path) -> Self {
        static STARTED: Once = Once::new();
        STARTED.call_once(|| {
            thread::Builder::new().name("witness".to_owned()).spawn(watch).unwrap();
        });
        let servers = Arc::new(Servers { runtime: runtime.to_owned(), seen: Mutex::default() });
        locked(&ALL_SERVERS).push(Arc::downgrade(&servers));
        Self {
            servers,
            late_before: lateness(),
            pressure_before: pressure(),
            steal_before: steal(),
            has_testified: AtomicBool::new(false),
        }
    }

    fn late(&self) -> Duration {
        lateness().saturating_sub(self.late_before)
    }

    /// Returns how long each thread of the servers has waited for a processor.
    pub(crate) fn run_delays(&self) -> HashMap<i32, Duration> {
        locked(&self.servers.seen).starved.clone()
    }

    /// Returns the longest time that one of these threads has waited since [`Self::run_delays`] returned `before`.
    pub(crate) fn run_delay_since(&self, before: &HashMap<i32, Duration>) -> Duration {
        let waits = |(thread, wait): (&i32, &Duration)| wait.saturating_sub(before.get(thread).copied().unwrap_or_default());
        locked(&self.servers.seen).starved.iter().map(waits).max().unwrap_or_default()
    }

    fn run_delay(&self) -> Duration {
        self.run_delay_since(&HashMap::new())
    }

    /// Prints the measurements, and panics of the servers, if the test fails or was starved. The lines come only once.
    pub(crate) fn testify(&self) {
        let is_failing = thread::panicking();
        let is_needed = is_failing || self.late().max(self.run_delay()) >= STARVED_MIN;
        if !is_needed || self.has_testified.swap(true, Ordering::Relaxed) {
            return;
        }
        if is_failing {
            thread::sleep(LAST_WAITS);
        }
        // Rust's test harness shows these lines with the test's output.
        eprintln!("{self}");
        self.servers.panics().iter().for_each(|line| eprintln!("a server panicked: {line}"));
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.testify();
    }
}

impl Display for Witness {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        let (late, run_delay) = (self.late(), self.run_delay());
        write!(formatter, "WITNESS test={}", thread::current().name().unwrap_or("unknown"))?;
        for (name, time) in [("starved_s", late.max(run_delay)), ("late_s", late), ("run_delay_s", run_delay)] {
            write!(formatter, " {name}={:.1}", time.as_secs_f64())?;
        }
        let of_machine = [("cpu_pressure_s", self.pressure_before, pressure()), ("steal_s", self.steal_before, steal())];
        for (name, before, now) in of_machine {
            match before.zip(now) {
                Some((before, now)) => write!(formatter, " {name}={:.1}", now.saturating_sub(before).as_secs_f64())?,
                None => write!(formatter, " {name}=unknown")?,
            }
        }
        Ok(())
    }
}

/// Returns how long some task has waited for a processor, if the kernel says so.
fn pressure() -> Option<Duration> {
    let text = fs::read_to_string("/proc/pressure/cpu").ok()?;
    let micros = text.lines().next()?.strip_prefix("some ")?.split("total=").nth(1)?.trim().parse().ok()?;
    Some(Duration::from_micros(micros))
}

/// Returns the time that the hypervisor gave to others.
fn steal() -> Option<Duration> {
    // "cpu  user nice system idle iowait irq softirq steal ...", in hundredths of a second.
    let text = fs::read_to_string("/proc/stat").ok()?;
    let ticks: u64 = text.lines().next()?.split_whitespace().nth(8)?.parse().ok()?;
    Some(Duration::from_millis(ticks * 10))
}

/// Measures for as long as the process lives.
fn watch() {
    let mut looked = Instant::now();
    loop {
        let begin = Instant::now();
        thread::sleep(SLEEP);
        let late = begin.elapsed().saturating_sub(SLEEP);
        if late >= LATE_MIN {
            locked(&LATE).push((Instant::now(), late));
        }
        if looked.elapsed() >= LOOK_INTERVAL {
            looked = Instant::now();
            let servers: Vec<Arc<Servers>> = {
                let mut all = locked(&ALL_SERVERS);
                all.retain(|servers| servers.strong_count() > 0);
                all.iter().filter_map(Weak::upgrade).collect()
            };
            servers.iter().for_each(|servers| servers.look());
        }
    }
}
