//! Files of the kernel in the node's data dir: copies that all processes of the node share, and files for one process.

use std::fs::File;
use std::time::Instant;

use dayfly_meta::limits::{SHARED_COPY_INTERVAL, SHARED_COPY_PATIENCE};
use dayfly_meta::wire::local::{CopyState, FromClient, FromServer, Original};

use crate::attach::unexpected;
use crate::attachment::Connection;
use crate::{ClientError, Dataset, Session, cancellation};

impl Session {
    /// Returns an unnamed file with room for `len` bytes in the node's data dir, for a program that
    /// needs a kernel file.
    ///
    /// # Errors
    ///
    /// If the data dir has no room, or the server does not answer.
    pub fn spill(&self, len: u64) -> Result<File, ClientError> {
        self.with_connection(&|| true, |Connection { socket, .. }| {
            socket.send(&FromClient::Spill { len })?;
            match socket.receive()? {
                (FromServer::Spill, files) => files.into_iter().next().ok_or(ClientError::Protocol("an answer without its file")),
                (FromServer::Refused { reason }, _) => Err(ClientError::NoCopy(reason)),
                (other, _) => Err(unexpected(other)),
            }
        })
    }

    /// Returns a file with a copy that all processes of this node share; it is open for reading only. If there is no copy yet, `fill`
    /// writes the bytes into a new file, from the beginning to the end. If another process does so, waits for it. `None` if the node
    /// has no such copy, for example for lack of room.
    ///
    /// # Errors
    ///
    /// The errors of `fill`.
    pub fn shared_copy<E>(
        &self,
        dataset: &Dataset,
        original: Original,
        fill: impl FnOnce(&File) -> Result<(), E>,
    ) -> Result<Option<File>, E> {
        let _whole = cancellation::Whole::begin();
        // Dropping a connection or a file closes a descriptor, where a thread may be canceled. Signals wait only while this process
        // waits for the server, and not while it copies.
        let _deferral = cancellation::defer();
        let taken = {
            let _uninterrupted = cancellation::uninterrupted();
            self.take_connection()
        };
        let Ok(mut connection) = taken else { return Ok(None) };
        // Another server may have given other numbers to its datasets.
        if !dataset.is_of(&connection.attachment) {
            return Ok(None);
        }
        let ask = |connection: &mut Connection, request: &FromClient| {
            let _uninterrupted = cancellation::uninterrupted();
            connection.socket.send(request)?;
            match connection.socket.receive()? {
                (FromServer::SharedCopy(state), files) => Ok((state, files.into_iter().next())),
                (other, _) => Err(unexpected(other)),
            }
        };
        let (mut deadline, mut filled_before) = (Instant::now() + SHARED_COPY_PATIENCE, 0);
        loop {
            // A failed connection is dropped, so that no later request mistakes a late answer for its own.
            let Ok((state, file)) = ask(&mut connection, &FromClient::ShareCopy { dataset: dataset.id(), original }) else {
                return Ok(None);
            };
            let file = match (state, file) {
                (CopyState::Whole, file) => file,
                (CopyState::Assigned, Some(file)) => {
                    // If this fails, the server gives the copy up, because the connection is dropped.
                    fill(&file)?;
                    // The kernel runs no file that somebody has open for writing.
                    drop(file);
                    match ask(&mut connection, &FromClient::CopyFilled) {
                        Ok((CopyState::Whole, file)) => file,
                        _ => return Ok(None),
                    }
                }
                (CopyState::Busy { filled }, _) if filled > filled_before || Instant::now() < deadline => {
                    if filled > filled_before {
                        (deadline, filled_before) = (Instant::now() + SHARED_COPY_PATIENCE, filled);
                    }
                    std::thread::sleep(SHARED_COPY_INTERVAL);
                    continue;
                }
                _ => None,
            };
            self.put_connection(connection);
            return Ok(file);
        }
    }
}
