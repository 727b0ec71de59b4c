//! The handshake, with which both ends prove that they hold the session's key before anything else is sent. It is Noise NNpsk0 with
//! a third message, which shows that the dialer's first message was not a recording.
//!
//! A stranger's first message costs one hash, one cipher operation and no curve operation before it fails, and gets no answer. The
//! purpose of the connection is the handshake's prologue, so a message for one purpose is invalid for another. After the handshake
//! the stream is plain, or sealed with the resulting keys.

use std::io;

use dayfly_meta::id::{NodeId, SessionId};
use dayfly_meta::wire::VERSION;
use snow::{Builder, HandshakeState};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::identity::Identity;
use super::seal::Keys;

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// The longest handshake message in bytes. A key, a tag and a hello together take fewer than 100 bytes.
const MESSAGE_LEN_MAX: usize = 256;

/// The encrypted payload, with which each end identifies itself and the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Hello {
    session: SessionId,
    from: NodeId,
    to: NodeId,
}

const HELLO_LEN: usize = 20;

impl Hello {
    fn encode(self) -> [u8; HELLO_LEN] {
        let mut bytes = [0; HELLO_LEN];
        bytes[..4].copy_from_slice(b"DFLY");
        bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.session.0);
        bytes[16..18].copy_from_slice(&self.from.0.to_le_bytes());
        bytes[18..].copy_from_slice(&self.to.0.to_le_bytes());
        bytes
    }
}

/// Performs the dialer's side of the handshake.
pub(crate) async fn dial(stream: &mut TcpStream, identity: &Identity, peer: NodeId) -> io::Result<Keys> {
    let mut noise = builder(identity)?.build_initiator().map_err(refused)?;
    let hello = Hello { session: identity.session, from: identity.node, to: peer };
    send(stream, &mut noise, &hello.encode()).await?;
    let answer = receive(stream, &mut noise).await?;
    let expected = Hello { from: peer, to: identity.node, ..hello };
    if answer != expected.encode() {
        return Err(refused("the peer belongs to another session or has another version"));
    }
    let noise = noise.into_stateless_transport_mode().map_err(refused)?;
    let mut message = [0; MESSAGE_LEN_MAX];
    let len = noise.write_message(0, &hello.encode(), &mut message).map_err(refused)?;
    write(stream, &message[..len]).await?;
    Ok(Keys { noise, sent: 1, received: 0 })
}

/// Performs the listener's side of the handshake. Returns the node that dialed.
pub(crate) async fn accept(stream: &mut TcpStream, identity: &Identity) -> io::Result<(NodeId, Keys)> {
    let mut noise = builder(identity)?.build_responder().map_err(refused)?;
    let hello = receive(stream, &mut noise).await?;
    let from = hello.get(16..18).map_or(NodeId(0), |bytes| NodeId(u16::from_le_bytes([bytes[0], bytes[1]])));
    let expected = Hello { session: identity.session, from, to: identity.node };
    if hello != expected.encode() || from == identity.node {
        return Err(refused("the hello is for another session, version or node"));
    }
    let answer = Hello { from: identity.node, to: from, ..expected };
    send(stream, &mut noise, &answer.encode()).await?;
    let noise = noise.into_stateless_transport_mode().map_err(refused)?;
    let message = read(stream).await?;
    let mut proof = [0; MESSAGE_LEN_MAX];
    let len = noise.read_message(0, &message, &mut proof).map_err(refused)?;
    if proof[..len] != expected.encode() {
        return Err(refused("the hello was replayed"));
    }
    Ok((from, Keys { noise, sent: 0, received: 1 }))
}

fn builder(identity: &Identity) -> io::Result<Builder<'_>> {
    let pattern = PATTERN.parse().map_err(refused)?;
    Builder::new(pattern)
        .psk(0, identity.key.bytes())
        .and_then(|builder| builder.prologue(identity.purpose.name()))
        .map_err(refused)
}

async fn send(stream: &mut TcpStream, noise: &mut HandshakeState, payload: &[u8]) -> io::Result<()> {
    let mut message = [0; MESSAGE_LEN_MAX];
    let len = noise.write_message(payload, &mut message).map_err(refused)?;
    write(stream, &message[..len]).await
}

async fn receive(stream: &mut TcpStream, noise: &mut HandshakeState) -> io::Result<Vec<u8>> {
    let message = read(stream).await?;
    let mut payload = [0; MESSAGE_LEN_MAX];
    let len = noise.read_message(&message, &mut payload).map_err(refused)?;
    Ok(payload[..len].to_vec())
}

async fn write(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    let mut bytes = (message.len() as u16).to_le_bytes().to_vec();
    bytes.extend_from_slice(message);
    stream.write_all(&bytes).await
}

async fn read(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let len = usize::from(stream.read_u16_le().await?);
    if len > MESSAGE_LEN_MAX {
        return Err(refused("the handshake message is too long"));
    }
    let mut message = vec![0; len];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

/// Returns whether a handshake that failed with this error may have been aborted by the listener to make room for newer ones.
pub(crate) fn is_pushed_out(error: &io::Error) -> bool {
    // A stream that was reset after the last write is not connected.
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected, TimedOut, UnexpectedEof};
    [BrokenPipe, ConnectionReset, NotConnected, TimedOut, UnexpectedEof].contains(&error.kind())
}

fn refused(reason: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, reason.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dayfly_meta::deadlines::Deadlines;
    use tokio::net::TcpListener;

    use super::*;
    use crate::key::Key;
    use crate::tcp::Purpose;

    fn identity(session: u8, key: u8, node: u16) -> Identity {
        Identity {
            session: SessionId([session; 8]),
            key: Arc::new(Key::new([key; 32])),
            node: NodeId(node),
            purpose: Purpose::Peer,
            deadlines: Deadlines::DEFAULT,
        }
    }

    async fn shake(dialer: Identity, peer: u16, listener: Identity) -> (io::Result<Keys>, io::Result<(NodeId, Keys)>) {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let accepting = tokio::spawn(async move { accept(&mut socket.accept().await.unwrap().0, &listener).await });
        let mut stream = TcpStream::connect(address).await.unwrap();
        let dialed = dial(&mut stream, &dialer, NodeId(peer)).await;
        (dialed, accepting.await.unwrap())
    }

    #[tokio::test]
    async fn members_connect_and_strangers_are_rejected() {
        let (dialed, accepted) = shake(identity(1, 1, 0), 1, identity(1, 1, 1)).await;
        assert!(dialed.is_ok());
        assert_eq!(accepted.unwrap().0, NodeId(0));
        let strangers = [
            (identity(1, 2, 0), 1, "another key"),
            (identity(2, 1, 0), 1, "another session"),
            (identity(1, 1, 0), 2, "meant for another node"),
            (identity(1, 1, 1), 1, "a reflection"),
            (Identity { purpose: Purpose::Channel, ..identity(1, 1, 0) }, 1, "another purpose"),
            (Identity { purpose: Purpose::SealedPeer, ..identity(1, 1, 0) }, 1, "sealed where the other is plain"),
        ];
        for (dialer, peer, what) in strangers {
            let (dialed, accepted) = shake(dialer, peer, identity(1, 1, 1)).await;
            assert!(dialed.is_err() && accepted.is_err(), "{what}");
        }
    }

    #[tokio::test]
    async fn a_recorded_hello_does_not_connect_and_random_bytes_get_no_answer() {
        let (dialer, listener) = (identity(1, 1, 0), identity(1, 1, 1));
        let mut noise = builder(&dialer).unwrap().build_initiator().unwrap();
        let hello = Hello { session: dialer.session, from: NodeId(0), to: NodeId(1) };
        let mut message = [0; MESSAGE_LEN_MAX];
        let len = noise.write_message(&hello.encode(), &mut message).unwrap();
        let recorded = message[..len].to_vec();
        for (first, second, answered) in
            [(recorded.clone(), recorded, true), (vec![7; 80], vec![], false), (vec![0; 300], vec![], false)]
        {
            let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = socket.local_addr().unwrap();
            let listener = listener.clone();
            let accepting = tokio::spawn(async move { accept(&mut socket.accept().await.unwrap().0, &listener).await });
            let mut stream = TcpStream::connect(address).await.unwrap();
            write(&mut stream, &first).await.unwrap();
            let answer = read(&mut stream).await;
            assert_eq!(answer.is_ok(), answered);
            let _ = write(&mut stream, &second).await;
            assert!(accepting.await.unwrap().is_err());
        }
    }
}
