//! The sessions of this process, and what happens to them in a forked child.
//!
//! A child that was forked, by Python or by a library, goes on to use its parent's sessions, each with a connection of its own. The
//! handlers belong to the C library, because `os.register_at_fork` does not see the forks of libraries.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use dayfly_client::{View, cancellation, fork, reserved_fd};
use dayfly_meta::id::{NodeId, SessionId};

/// All sessions that this process has attached to. The lock is held for a moment only, and never across a fork: whoever takes it
/// holds the fork lock, too.
static SESSIONS: Mutex<Vec<Weak<View>>> = Mutex::new(Vec::new());

/// Returns this process's attachment to a node of a session. One whose session has ended there does not count: another server may
/// have taken its place.
pub(crate) fn known(session: SessionId, node: NodeId) -> Option<Arc<View>> {
    let _no_fork = fork::lock();
    let sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
    let is_it = |view: &Arc<View>| {
        let known = view.session();
        known.id() == session && known.node() == node && !known.is_gone()
    };
    sessions.iter().filter_map(Weak::upgrade).find(is_it)
}

/// Records an attachment. If another thread has made one to the same node meanwhile, returns that one.
pub(crate) fn record(new: View) -> Arc<View> {
    if let Some(known) = known(new.session().id(), new.session().node()) {
        return known;
    }
    let new = Arc::new(new);
    let _no_fork = fork::lock();
    let mut sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
    sessions.retain(|view| view.strong_count() > 0);
    sessions.push(Arc::downgrade(&new));
    new
}

/// Registers the handlers, once.
pub(crate) fn register() {
    static IS_REGISTERED: std::sync::Once = std::sync::Once::new();
    // SAFETY: three functions of a library that the interpreter never unloads.
    IS_REGISTERED.call_once(|| unsafe {
        libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child));
    });
}

extern "C" fn before() {
    fork::acquire();
}

extern "C" fn after_in_parent() {
    fork::release();
}

extern "C" fn after_in_child() {
    let _deferral = cancellation::defer();
    fork::release();
    reserved_fd::restore_limit_after_fork();
    let sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
    sessions.iter().filter_map(Weak::upgrade).for_each(|view| view.session().after_fork());
}
