//! What each thread of a stage-in does now. Nobody asks while anything goes forward; when nothing does any more, this says what
//! for, and with which source, each thread waits.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use dayfly_meta::limits::{NOTE_LEN_MAX, WAITS_REPORTED_MAX};
use dayfly_meta::path::display;
use dayfly_meta::wire::control::Step;

/// What one thread does; nothing, once this is dropped.
pub struct Activity(Arc<Mutex<Doing>>);

#[derive(Default)]
struct Doing {
    step: Option<Step>,
    /// A path: of the source, or of the drive.
    what: Vec<u8>,
}

impl Activity {
    /// The thread begins a step with a source or a drive.
    pub fn begin(&self, step: Step, what: &[u8]) {
        let mut doing = lock(&self.0);
        doing.step = Some(step);
        doing.what.clear();
        doing.what.extend_from_slice(what);
    }

    /// The thread begins another step with the same source.
    pub fn go_on(&self, step: Step) {
        lock(&self.0).step = Some(step);
    }

    /// The thread waits for work.
    pub fn end(&self) {
        lock(&self.0).step = None;
    }
}

/// The activities of all threads.
#[derive(Default)]
pub(super) struct Activities(Mutex<Vec<Weak<Mutex<Doing>>>>);

impl Activities {
    pub(super) fn enter(&self) -> Activity {
        let doing = Arc::default();
        let mut all = lock(&self.0);
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&doing));
        Activity(doing)
    }

    /// In words, each once, the first few.
    pub(super) fn told(&self) -> Vec<String> {
        let mut told = Vec::new();
        for doing in lock(&self.0).iter().filter_map(Weak::upgrade) {
            let doing = lock(&doing);
            let Some(step) = doing.step else { continue };
            let what = display(&doing.what);
            let text: String = match step {
                Step::Reading | Step::Decoding | Step::Placing => format!("reading '{what}'"),
                Step::Shipping => format!("storing blocks of '{what}'"),
                Step::Writing => format!("writing to '{what}'"),
            };
            let text: String = text.chars().take(NOTE_LEN_MAX).collect();
            if told.len() < WAITS_REPORTED_MAX && !told.contains(&text) {
                told.push(text);
            }
        }
        told
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_each_thread_waits_for_is_told_until_it_ends() {
        let all = Activities::default();
        let (reader, writer, idle) = (all.enter(), all.enter(), all.enter());
        reader.begin(Step::Reading, b"/pfs/a.tar");
        writer.begin(Step::Writing, b"/tmp/x");
        assert_eq!(all.told(), ["reading '/pfs/a.tar'", "writing to '/tmp/x'"]);
        reader.go_on(Step::Shipping);
        drop(writer);
        idle.begin(Step::Shipping, b"/pfs/a.tar");
        assert_eq!(all.told(), ["storing blocks of '/pfs/a.tar'"], "each once");
        reader.end();
        idle.end();
        assert!(all.told().is_empty());
        let many: Vec<Activity> = (0..100).map(|_| all.enter()).collect();
        many.iter().enumerate().for_each(|(at, one)| one.begin(Step::Reading, at.to_string().repeat(1000).as_bytes()));
        assert!(all.told().len() == WAITS_REPORTED_MAX && all.told().iter().all(|text| text.chars().count() <= NOTE_LEN_MAX));
    }
}
