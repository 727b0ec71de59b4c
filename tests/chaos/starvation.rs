//! Notices servers that the machine gave no processor for so long that they could not keep their deadlines. Sessions run with a tenth
//! of the default deadlines, so on a busy machine that happens; whatever it causes is not a fault of the servers.

use std::collections::HashMap;
use std::fs;
use std::time::Duration;

/// How long each thread has waited for a processor.
#[derive(Default)]
pub(crate) struct Starvation {
    waited: HashMap<i32, u64>,
}

impl Starvation {
    /// Returns the longest time that a thread of the process has waited for a processor since the last call.
    pub(crate) fn longest_wait(&mut self, pid: i32) -> Duration {
        let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let mut longest = 0;
        for thread in threads {
            // "<time on a processor> <time waiting for one> <time slices>", in nanoseconds. The process may end meanwhile.
            let Ok(times) = fs::read_to_string(thread.path().join("schedstat")) else { continue };
            let Some(waited) = times.split_whitespace().nth(1).and_then(|time| time.parse::<u64>().ok()) else { continue };
            let Some(thread) = thread.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let before = self.waited.insert(thread, waited).unwrap_or(0);
            longest = longest.max(waited.saturating_sub(before));
        }
        Duration::from_nanos(longest)
    }
}

#[test]
fn a_process_that_waits_for_a_processor_is_noticed() {
    let mut starvation = Starvation::default();
    let own = std::process::id() as i32;
    starvation.longest_wait(own);
    assert!(!starvation.waited.is_empty());
    // Pretend that no thread had waited before.
    let total: u64 = *starvation.waited.values().max().unwrap();
    starvation.waited.values_mut().for_each(|waited| *waited = 0);
    assert!(starvation.longest_wait(own) >= Duration::from_nanos(total));
}
