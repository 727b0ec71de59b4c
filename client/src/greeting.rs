//! The first messages on a connection to a server.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dayfly_meta::wire::VERSION;
use dayfly_meta::wire::local::{FromClient, FromServer};

use crate::ClientError;
use crate::heartbeat::{Heartbeat, Timeouts};
use crate::socket::Socket;

/// Opens a connection and exchanges versions.
pub(crate) fn open(path: &Path, heartbeat: Option<Arc<Heartbeat>>) -> Result<(Socket, FromServer, Vec<File>), ClientError> {
    match greet(path, heartbeat.clone()) {
        // A server that does not understand the first message closes the connection. So does a server that dies, but that one
        // accepts no other connection.
        Err(ClientError::Server(error)) if error.kind() == ErrorKind::UnexpectedEof => match greet(path, heartbeat) {
            Err(ClientError::Server(error)) if error.kind() == ErrorKind::UnexpectedEof => Err(ClientError::OtherBuild),
            result => result,
        },
        result => result,
    }
}

fn greet(path: &Path, heartbeat: Option<Arc<Heartbeat>>) -> Result<(Socket, FromServer, Vec<File>), ClientError> {
    let mut socket = Socket::connect(path, heartbeat)?;
    socket.send(&FromClient::Hello { version: VERSION })?;
    let (answer, files) = socket.receive()?;
    match answer {
        FromServer::Refused { reason } => return Err(ClientError::Refused(reason)),
        FromServer::Welcome { slot, connection, server_timeout_ms, heartbeat_timeout_ms, .. } => {
            let [server, heartbeat] = [server_timeout_ms, heartbeat_timeout_ms].map(|ms| Duration::from_millis(ms.into()));
            socket.welcome(slot, connection, Timeouts { server, heartbeat })?;
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
            open(&path, None).err().unwrap()
        })
    }

    #[test]
    fn a_server_that_dies_is_not_called_another_build() {
        let error = open_to_server_that_closes(1);
        assert!(matches!(error, ClientError::Server(_)), "{error}");
        let error = open_to_server_that_closes(2);
        assert!(matches!(error, ClientError::OtherBuild), "{error}");
    }
}
