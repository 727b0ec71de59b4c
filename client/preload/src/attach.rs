//! This process's attachment to the session's server on its node.
//!
//! A process attaches on its first call into the namespace, so a program that never uses the namespace costs the server
//! nothing. The view is published once and lives as long as the process; [`view`] is one atomic load from then on. Nothing waits
//! for a thread that is attaching: a signal handler would wait forever if it has interrupted that very thread. So each caller
//! attaches by itself until a view is published, and all but one of these views go away.
//!
//! A `vfork` child that calls into the namespace before its parent has attached gets a view for that one call only: the view's
//! descriptors are in the child's table, and the parent, whose memory the child runs in, does not have them.

use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use dayfly_client::locate::SessionFolder;
use dayfly_client::reserved_fd::with_numbers;
use dayfly_client::{Session, View, cancellation, fault as bus_error};
use dayfly_meta::id::NodeId;

use crate::fault::{Fault, complain, log};
use crate::memory::FromC;
use crate::next::early;
use crate::setup::setup;
use crate::{next, placeholder, table, vfork};

static VIEW: AtomicPtr<View> = AtomicPtr::new(null_mut());

/// The view, for the duration of a call.
pub(crate) enum Attached {
    /// The process's own view.
    Own(&'static View),
    /// A view for a single call of a `vfork` child.
    Temporary(Box<View>),
}

impl Deref for Attached {
    type Target = View;

    fn deref(&self) -> &View {
        match self {
            Self::Own(view) => view,
            Self::Temporary(view) => view,
        }
    }
}

/// Returns the view. Attaches on the first call.
#[inline]
pub(crate) fn view() -> Result<Attached, Fault> {
    match known_view() {
        Some(view) => Ok(Attached::Own(view)),
        None => attach(),
    }
}

/// Returns the view, if this process has attached.
pub(crate) fn known_view() -> Option<&'static View> {
    let view = VIEW.load(Ordering::Acquire);
    // SAFETY: published once by `attach`, from a box that is never freed.
    (!view.is_null()).then(|| unsafe { &*view })
}

#[cold]
fn attach() -> Result<Attached, Fault> {
    let _deferral = cancellation::uninterrupted();
    // Another thread may fork while this one attaches. What the child calls then must not wait for the dynamic linker's lock, which
    // this thread may hold.
    early::look_up_all();
    let environment = &setup().ok_or(libc::EIO)?.environment;
    let location = environment.folder()?;
    let node = environment.node(&location)?;
    let socket = location.socket(node);
    if !socket.exists() {
        return Err(no_server(&location, node));
    }
    if vfork::child().is_some() {
        return Ok(Attached::Temporary(Box::new(View::new(Session::attach_to(&location, node)?))));
    }
    if let Err(error) = bus_error::install(next_sigaction) {
        log(&format!("cannot handle SIGBUS ({error}), so this process does not map segments"));
    }
    let session = Session::attach_to(&location, node)?;
    table::create()?;
    match with_numbers(|| placeholder::open(&socket), |&errno| errno == libc::EMFILE) {
        Ok(()) => {}
        // The server has ended since we attached. ENOENT would say that the program's file does not exist.
        Err(libc::ENOENT) => return Err(no_server(&location, node)),
        Err(errno) => return Err(errno.into()),
    }
    log(&format!("process {} attached to node {node} of session {}", std::process::id(), location.session));
    let view = Box::into_raw(Box::new(View::new(session)));
    if VIEW.compare_exchange(null_mut(), view, Ordering::AcqRel, Ordering::Acquire).is_err() {
        // Another thread attached first. SAFETY: created just above and not published.
        drop(unsafe { Box::from_raw(view) });
    }
    known_view().map(Attached::Own).ok_or(Fault::Errno(libc::EIO))
}

fn no_server(location: &SessionFolder, node: NodeId) -> Fault {
    let (session, socket) = (location.session, location.socket(node));
    complain(&format!(
        "the server of node {node} of session {session} no longer runs on this machine (no socket at '{}'); unless the session has ended, \
         run the program again once another server has taken its place ('dayfly rejoin' starts one)",
        socket.display()
    ));
    Fault::Errno(libc::EIO)
}

/// The `sigaction` behind our hook, which keeps the program's own handler for SIGBUS.
pub(crate) unsafe extern "C" fn next_sigaction(number: i32, new: *const libc::sigaction, old: *mut libc::sigaction) -> i32 {
    // SAFETY: the client library passes its own live structures.
    let (new, old) = unsafe { (FromC::new(new), FromC::new(old)) };
    next::sigaction(number, new, old)
}
