//! The first messages on a connection to a server.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dayfly_meta::wire::VERSION;
use dayfly_meta::wire::local::{FromClient, FromServer};

use crate::ClientError;
use crate::heartbeat::{Heartbeat, Patience, Timeouts};
use crate::socket::Socket;

/// A connection, the server's first answer, and the files that came with it.
type Opened = (Socket, FromServer, Vec<File>);

/// Whether this process's last attempt to attach has waited in vain. The next one then fails soon, unless the server runs again.
static HAS_WAITED: AtomicBool = AtomicBool::new(false);

/// Opens the first connection to a server.
pub(crate) fn open_first(path: &Path, patience: Patience) -> Result<Opened, ClientError> {
    let has_waited = patience == Patience::Long && HAS_WAITED.load(Ordering::Relaxed);
    let opened = open(path, None, if has_waited { Patience::Spent } else { patience });
    match &opened {
        Err(ClientError::Server(error)) if patience == Patience::Long && error.kind() == ErrorKind::TimedOut => {
            HAS_WAITED.store(true, Ordering::Relaxed);
        }
        Err(_) => {}
        Ok(_) => HAS_WAITED.store(false, Ordering::Relaxed),
    }
    opened
}

/// Opens a connection and exchanges versions.
pub(crate) fn open(path: &Path, heartbeat: Option<Arc<Heartbeat>>, patience: Patience) -> Result<Opened, ClientError> {
    match greet(path, heartbeat.clone(), patience) {
        // A server that does not understand the first message closes the connection. So does a server that dies, but that one
        // accepts no other connection.
        Err(ClientError::Server(error)) if error.kind() == ErrorKind::UnexpectedEof => match greet(path, heartbeat, patience) {
            Err(ClientError::Server(error)) if error.kind() == ErrorKind::UnexpectedEof => Err(ClientError::OtherBuild),
            result => result,
        },
        result => result,
    }
}

fn greet(path: &Path, heartbeat: Option<Arc<Heartbeat>>, patience: Patience) -> Result<Opened, ClientError> {
    let mut socket = Socket::connect(path, heartbeat, patience)?;
    socket.send(&FromClient::Hello { version: VERSION })?;
    let (answer, files) = socket.receive()?;
    match answer {
        FromServer::Refused { reason } => return Err(ClientError::Refused(reason)),
        FromServer::Welcome {
            slot,
            connection,
            server_timeout_ms,
            heartbeat_timeout_ms,
            silence_timeout_ms,
            deadlock_beats,
            ..
        } => {
            let timeouts = [server_timeout_ms, heartbeat_timeout_ms, silence_timeout_ms];
            let [server, heartbeat, silence] = timeouts.map(|ms| Duration::from_millis(ms.into()));
            socket.welcome(slot, connection, patience.of(Timeouts { server, heartbeat, silence, deadlock_beats }))?;
        }
        _ => (),
    }
    Ok((socket, answer, files))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Opens a connection. The server closes `connections` of them after the first message, and is gone when it closes the last one.
    fn open_to_server_that_closes(connections: usize) -> ClientError {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let accept = || {
                    let mut connection = listener.accept().unwrap().0;
                    assert_ne!(connection.read(&mut [0; 4096]).unwrap(), 0);
                    connection
                };
                (1..connections).for_each(|_| drop(accept()));
                let last = accept();
                drop(listener);
                drop(last);
            });
            open(&path, None, Patience::Short).err().unwrap()
        })
    }

    #[test]
    fn a_process_that_has_waited_in_vain_does_not_wait_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        // Nobody accepts, as if the server stood still.
        let _listener = UnixListener::bind(&path).unwrap();
        let start = std::time::Instant::now();
        let error = open(&path, None, Patience::Spent).err().unwrap();
        assert!(error.to_string().contains("no answer for 0.5 s"), "{error}");
        assert!(start.elapsed() < Timeouts::default().server, "{:?}", start.elapsed());
    }

    #[test]
    fn a_server_that_dies_is_not_called_another_build() {
        let error = open_to_server_that_closes(1);
        assert!(matches!(error, ClientError::Server(_)), "{error}");
        let error = open_to_server_that_closes(2);
        assert!(matches!(error, ClientError::OtherBuild), "{error}");
    }
}
