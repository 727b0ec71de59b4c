//! Notices servers that the machine gave no processor for so long that they could not keep their deadlines. Sessions run with a tenth
//! of the default deadlines, so on a busy machine that happens; whatever it causes is not a fault of the servers. The measurements
//! are those of the harness, which are tested here.

use std::time::{Duration, Instant};

use dayfly_client::locate::SessionFolder;

use crate::chaos::deadlines;
use crate::harness::witness::{self, Waits};

/// How often a run looks whether the machine is too busy to run the servers.
pub(crate) const INTERVAL: Duration = Duration::from_millis(100);

/// What the last look at a session's servers has found.
pub(crate) struct Starvation {
    waits: Waits,
    late: Duration,
    looked: Instant,
}

impl Starvation {
    pub(crate) fn new() -> Self {
        Self { waits: Waits::default(), late: witness::lateness(), looked: Instant::now() }
    }

    /// Returns the nodes whose servers have been starved since the last look, each with the time since that may have begun. Looks at
    /// most once in [`INTERVAL`].
    pub(crate) fn look(&mut self, session: &SessionFolder) -> Vec<(u16, Duration)> {
        let since = self.looked.elapsed();
        if since < INTERVAL {
            return Vec::new();
        }
        self.looked = Instant::now();
        let late_before = std::mem::replace(&mut self.late, witness::lateness());
        let late = self.late.saturating_sub(late_before);
        let mut starved = Vec::new();
        for node in session.live_nodes() {
            let Some(pid) = session.pid(node) else { continue };
            let waited = self.waits.longest(pid);
            // If the whole machine stood still, no thread waited for a processor. All servers missed the same time.
            if waited >= deadlines::of_starvation() || late >= deadlines::of_standstill() {
                starved.push((node.0, waited.max(late) + since));
            }
        }
        starved
    }
}

mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

    use crate::harness::Ground;
    use crate::harness::permits::{collect, servers_of};
    use crate::harness::witness::Waits;

    const SOON: Duration = Duration::from_secs(30);

    #[test]
    fn a_thread_that_waits_for_a_processor_is_noticed() {
        let (is_over, begin, mut longest) = (AtomicBool::new(false), Instant::now(), Duration::ZERO);
        std::thread::scope(|scope| {
            // One thread more than there are processors.
            for _ in 0..=std::thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            while longest == Duration::ZERO && begin.elapsed() < SOON {
                std::thread::sleep(Duration::from_millis(10));
                longest = Waits::default().longest(std::process::id() as i32);
            }
            is_over.store(true, Ordering::Relaxed);
        });
        assert!(longest > Duration::ZERO);
    }

    /// `.ci/test` reads this line.
    #[test]
    fn the_witness_prints_one_line_with_the_time_that_was_starved() {
        let line = Ground::new().witness.to_string();
        let starved = line.split(" starved_s=").nth(1).and_then(|rest| rest.split(' ').next());
        let is_number = starved.is_some_and(|starved| starved.parse::<f64>().is_ok());
        assert!(line.starts_with("WITNESS test=") && is_number && !line.contains('\n'), "{line}");
    }

    #[test]
    fn a_session_gets_all_of_its_permits_or_none() {
        let folder = tempfile::tempdir().unwrap();
        let take = |wanted, limit| collect(folder.path(), 3, wanted, limit).unwrap();
        let two = take(2, SOON).expect("three are free");
        assert_eq!(two.len(), 2);
        assert!(take(2, Duration::from_millis(50)).is_none(), "one is free");
        let one = take(1, SOON).expect("the attempt to take two has returned the one that is free");
        drop((one, two));
        assert_eq!(take(7, SOON).expect("a session that is larger than the bound takes all").len(), 3);
    }

    #[test]
    fn only_commands_that_start_servers_need_permits() {
        assert_eq!(servers_of(&["up", "--memory", "32MiB", "--local", "3"]), 3);
        assert_eq!(servers_of(&["run", "--", "sh", "--local", "3"]), 1);
        assert_eq!(servers_of(&["up", "--hosts", "a,b"]), 2);
        assert_eq!(servers_of(&["status"]), 0);
        assert_eq!(servers_of(&[]), 0);
    }
}
