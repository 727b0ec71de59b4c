//! A sealed connection for messages between two that have the session's key: who starts servers, and the servers, before and beside
//! what these say to each other.

use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{NodeId, SessionId};
use dayfly_meta::limits::CHANNEL_MESSAGE_LEN_MAX;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use crate::Key;
use crate::tcp::door::Door;
use crate::tcp::seal::{Keys, ReadHalf, WriteHalf, split};
use crate::tcp::{Identity, Purpose, handshake, is_pushed_out};

/// Names of the two ends in the handshake; no node has them.
const GUEST: NodeId = NodeId(u16::MAX);
const HOST: NodeId = NodeId(u16::MAX - 1);

/// An address has so long before the next is tried beside it.
const ADDRESS_INTERVAL: Duration = Duration::from_millis(200);

/// Sends messages.
pub struct Sender(WriteHalf, Duration);

/// Receives messages.
pub struct Receiver(ReadHalf);

/// A connection just made.
pub struct Channel {
    /// To the far end.
    pub sender: Sender,
    /// From the far end.
    pub receiver: Receiver,
    /// Our address on it: others on its network reach us there.
    pub local: IpAddr,
    /// The far end's.
    pub far: IpAddr,
}

impl Channel {
    fn new(stream: TcpStream, keys: Keys, deadlines: &Deadlines) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        // As it is, where the listener takes both versions.
        let (local, far) = (stream.local_addr()?.ip().to_canonical(), stream.peer_addr()?.ip().to_canonical());
        let (read, write) = split(stream, Some(keys));
        Ok(Self { sender: Sender(write, deadlines.peer_lost), receiver: Receiver(read), local, far })
    }
}

impl Sender {
    /// Sends one message.
    pub async fn send(&mut self, message: &[u8]) -> io::Result<()> {
        if message.len() > CHANNEL_MESSAGE_LEN_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the message is too long"));
        }
        let len = (message.len() as u32).to_le_bytes();
        let mut slices = [IoSlice::new(&len), IoSlice::new(message)];
        timeout(self.1, self.0.write_all(&mut slices)).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }
}

impl Receiver {
    /// The next message; an error where there is none any more. To be awaited to its end: what was read of a message is lost otherwise.
    pub async fn receive(&mut self) -> io::Result<Vec<u8>> {
        let mut len = [0; 4];
        self.0.read_exact(&mut len).await?;
        let len = u32::from_le_bytes(len) as usize;
        if len > CHANNEL_MESSAGE_LEN_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "an overlong message"));
        }
        let mut message = vec![0; len];
        self.0.read_exact(&mut message).await?;
        Ok(message)
    }
}

/// Where guests come in.
pub struct Listener {
    door: Door<Channel>,
    identity: Identity,
}

impl Listener {
    /// Binds it, at any port.
    pub async fn bind(session: SessionId, key: Arc<Key>, deadlines: Deadlines, address: IpAddr) -> io::Result<(Self, u16)> {
        let listener = TcpListener::bind(SocketAddr::new(address, 0)).await?;
        let port = listener.local_addr()?.port();
        let identity = Identity { session, key, node: HOST, purpose: Purpose::Channel, deadlines };
        Ok((Self { door: Door::new(listener, deadlines.handshake), identity }, port))
    }

    /// The next guest who has the key.
    pub async fn accept(&mut self) -> Channel {
        let identity = &self.identity;
        let shake = |mut stream: TcpStream| {
            let identity = identity.clone();
            async move {
                let (_, keys) = handshake::accept(&mut stream, &identity).await?;
                Channel::new(stream, keys, &identity.deadlines)
            }
        };
        self.door.admit(shake).await
    }
}

/// Comes to a listener as a guest, at the first of its addresses at which it is to be found. An error of the kind `ConnectionReset` says
/// that there is one, which did not let us in: it has another key, or more guests than it can listen to at once.
pub async fn dial(session: SessionId, key: &Arc<Key>, deadlines: Deadlines, addresses: &[SocketAddr]) -> io::Result<Channel> {
    let mut dialling = tokio::task::JoinSet::new();
    for (place, &address) in addresses.iter().enumerate() {
        let identity = Identity { session, key: key.clone(), node: GUEST, purpose: Purpose::Channel, deadlines };
        dialling.spawn(async move {
            // In their order, if the first are there: so all guests come by the same network.
            sleep(ADDRESS_INTERVAL * place as u32).await;
            let at = |error: io::Error| io::Error::new(error.kind(), format!("{address}: {error}"));
            let late = |_| io::Error::from(io::ErrorKind::TimedOut);
            let connecting = timeout(deadlines.connect, TcpStream::connect(address)).await.map_err(late).flatten();
            let mut stream = connecting.map_err(at)?;
            let shaking =
                timeout(deadlines.handshake, handshake::dial(&mut stream, &identity, HOST)).await.map_err(late).flatten();
            Channel::new(stream, shaking.map_err(at)?, &deadlines)
        });
    }
    let (mut failed, mut kind) = (Vec::new(), io::ErrorKind::NotConnected);
    while let Some(dialled) = dialling.join_next().await {
        match dialled.map_err(io::Error::other).flatten() {
            Ok(channel) => return Ok(channel),
            Err(error) => {
                if is_pushed_out(&error) {
                    kind = io::ErrorKind::ConnectionReset;
                }
                failed.push(error.to_string());
            }
        }
    }
    Err(io::Error::new(kind, failed.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn listener(key: u8) -> (Listener, Vec<SocketAddr>) {
        let (listener, port) =
            Listener::bind(SessionId([1; 8]), Arc::new(Key::new([key; 32])), Deadlines::DEFAULT, IpAddr::from([127, 0, 0, 1]))
                .await
                .unwrap();
        // Nobody is at the first.
        (listener, vec!["127.0.0.2:1".parse().unwrap(), SocketAddr::from(([127, 0, 0, 1], port))])
    }

    #[tokio::test]
    async fn messages_of_any_length_come_through_and_end_with_the_channel() {
        let (mut listener, addresses) = listener(1).await;
        let key = Arc::new(Key::new([1; 32]));
        let (near, far) = tokio::join!(dial(SessionId([1; 8]), &key, Deadlines::DEFAULT, &addresses), listener.accept());
        let (mut near, mut far) = (near.unwrap(), far);
        let lens = [0, 1, 65_519, 65_520, 300_000, CHANNEL_MESSAGE_LEN_MAX];
        let sending = tokio::spawn(async move {
            for len in lens {
                near.sender.send(&vec![7; len]).await.unwrap();
            }
            near.sender.send(&vec![7; CHANNEL_MESSAGE_LEN_MAX + 1]).await.unwrap_err()
        });
        for len in lens {
            assert_eq!(far.receiver.receive().await.unwrap(), vec![7; len]);
        }
        assert_eq!(sending.await.unwrap().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(far.receiver.receive().await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn who_has_another_key_is_not_let_in() {
        let (mut listener, addresses) = listener(1).await;
        let stranger = Arc::new(Key::new([2; 32]));
        let accepting = tokio::time::timeout(Duration::from_millis(500), listener.accept());
        let (dialled, accepted) = tokio::join!(dial(SessionId([1; 8]), &stranger, Deadlines::DEFAULT, &addresses), accepting);
        assert!(accepted.is_err());
        let why = dialled.err().unwrap().to_string();
        assert!(why.contains("127.0.0.2:1"), "every address is told of: {why}");
    }
}
