//! Records the current activity of each thread of a stage-in. While a stage-in is advancing, nothing reads the activities. When
//! the stage-in stalls, the error says what each thread is doing with which source or drive.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use dayfly_meta::limits::{NOTE_LEN_MAX, WAITS_REPORTED_MAX};
use dayfly_meta::path::display;
use dayfly_meta::wire::control::Step;

/// The current activity of one thread. Dropping it removes the thread from the list.
pub struct Activity(Arc<Mutex<Current>>);

#[derive(Default)]
struct Current {
    /// `None` while the thread is waiting for work.
    step: Option<Step>,
    /// Path of the source that is being read, or of the drive that is being written.
    path: Vec<u8>,
}

impl Activity {
    /// Records that the thread is starting a step on the source or drive at `path`.
    pub fn begin(&self, step: Step, path: &[u8]) {
        let mut current = lock(&self.0);
        current.step = Some(step);
        current.path.clear();
        current.path.extend_from_slice(path);
    }

    /// Records that the thread is starting another step on the same source or drive.
    pub fn switch_to(&self, step: Step) {
        lock(&self.0).step = Some(step);
    }

    /// Records that the thread has finished and is waiting for work.
    pub fn end(&self) {
        lock(&self.0).step = None;
    }
}

/// The activities of all registered threads.
#[derive(Default)]
pub(super) struct Activities(Mutex<Vec<Weak<Mutex<Current>>>>);

impl Activities {
    pub(super) fn register(&self) -> Activity {
        let current = Arc::default();
        let mut all = lock(&self.0);
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&current));
        Activity(current)
    }

    /// Describes the first [`WAITS_REPORTED_MAX`] different activities. Threads that do the same thing
    /// share one description.
    pub(super) fn describe(&self) -> Vec<String> {
        let mut descriptions = Vec::new();
        for current in lock(&self.0).iter().filter_map(Weak::upgrade) {
            let current = lock(&current);
            let Some(step) = current.step else { continue };
            let path = display(&current.path);
            let text: String = match step {
                Step::Reading | Step::Decoding | Step::Placing => format!("reading '{path}'"),
                Step::Shipping => format!("storing blocks of '{path}'"),
                Step::Writing => format!("writing to '{path}'"),
            };
            let text: String = text.chars().take(NOTE_LEN_MAX).collect();
            if descriptions.len() < WAITS_REPORTED_MAX && !descriptions.contains(&text) {
                descriptions.push(text);
            }
        }
        descriptions
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_busy_thread_is_described_until_it_ends() {
        let all = Activities::default();
        let (reader, writer, idle) = (all.register(), all.register(), all.register());
        reader.begin(Step::Reading, b"/pfs/a.tar");
        writer.begin(Step::Writing, b"/tmp/x");
        assert_eq!(all.describe(), ["reading '/pfs/a.tar'", "writing to '/tmp/x'"]);
        reader.switch_to(Step::Shipping);
        drop(writer);
        idle.begin(Step::Shipping, b"/pfs/a.tar");
        assert_eq!(all.describe(), ["storing blocks of '/pfs/a.tar'"], "equal descriptions appear once");
        reader.end();
        idle.end();
        assert!(all.describe().is_empty());
        let many: Vec<Activity> = (0..100).map(|_| all.register()).collect();
        many.iter().enumerate().for_each(|(at, one)| one.begin(Step::Reading, at.to_string().repeat(1000).as_bytes()));
        let descriptions = all.describe();
        assert!(descriptions.len() == WAITS_REPORTED_MAX && descriptions.iter().all(|text| text.chars().count() <= NOTE_LEN_MAX));
    }
}
