//! The control channel: an encrypted connection for messages between two processes that hold the session's key. The supervisor
//! listens and the servers dial it, before and alongside their connections to each other.
//!
//! A channel carries no bulk bytes and is never replaced: when it fails, its user decides what that means.

use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{NodeId, SessionId};
use dayfly_meta::limits::CHANNEL_MESSAGE_LEN_MAX;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use crate::key::Key;
use crate::tcp::handshake_limiter::HandshakeLimiter;
use crate::tcp::seal::{Keys, ReadHalf, WriteHalf, split};
use crate::tcp::{Identity, Purpose, handshake};

/// Stands for the dialing end in the handshake, since a joining server has no node number yet. No node has this number.
const DIALER: NodeId = NodeId(u16::MAX);
/// Stands for the listening end in the handshake. No node has this number.
const LISTENER: NodeId = NodeId(u16::MAX - 1);

/// The head start of each address over the next one in the list.
const ADDRESS_INTERVAL: Duration = Duration::from_millis(200);

/// The sending half of a channel.
pub struct Sender {
    half: WriteHalf,
    /// The longest time that sending one message may take.
    timeout: Duration,
}

/// The receiving half of a channel.
pub struct Receiver(ReadHalf);

/// An established channel.
pub struct Channel {
    /// The half that sends.
    pub sender: Sender,
    /// The half that receives.
    pub receiver: Receiver,
    /// This end's address. Other nodes on the same network can reach this node at it.
    pub local: IpAddr,
    /// The other end's address.
    pub far: IpAddr,
}

impl Channel {
    fn new(stream: TcpStream, keys: Keys, deadlines: &Deadlines) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        // A listener for both IP versions reports IPv4 addresses as mapped ones.
        let (local, far) = (stream.local_addr()?.ip().to_canonical(), stream.peer_addr()?.ip().to_canonical());
        let (read, write) = split(stream, Some(keys));
        let sender = Sender { half: write, timeout: deadlines.peer_lost };
        Ok(Self { sender, receiver: Receiver(read), local, far })
    }
}

impl Sender {
    /// Sends one message.
    ///
    /// # Errors
    /// The message is too long, the other end takes no bytes in time, or the channel has failed.
    pub async fn send(&mut self, message: &[u8]) -> io::Result<()> {
        if message.len() > CHANNEL_MESSAGE_LEN_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the message is too long"));
        }
        let len = (message.len() as u32).to_le_bytes();
        let mut slices = [IoSlice::new(&len), IoSlice::new(message)];
        timeout(self.timeout, self.half.write_all(&mut slices)).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
    }
}

impl Receiver {
    /// Receives the next message. This is not cancellation-safe: dropping the future loses what it has read of the
    /// message.
    ///
    /// # Errors
    /// The channel has ended or failed, or the message is too long.
    pub async fn receive(&mut self) -> io::Result<Vec<u8>> {
        let mut len = [0; 4];
        self.0.read_exact(&mut len).await?;
        let len = u32::from_le_bytes(len) as usize;
        if len > CHANNEL_MESSAGE_LEN_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the other end sent a message that is too long"));
        }
        let mut message = vec![0; len];
        self.0.read_exact(&mut message).await?;
        Ok(message)
    }
}

/// Accepts channels from servers.
pub struct Listener {
    limiter: HandshakeLimiter<Channel>,
    identity: Identity,
}

impl Listener {
    /// Binds a listener at a free port of `address`, and returns the port.
    ///
    /// # Errors
    /// `address` is not an address of this machine.
    pub async fn bind(session: SessionId, key: Arc<Key>, deadlines: Deadlines, address: IpAddr) -> io::Result<(Self, u16)> {
        let listener = TcpListener::bind(SocketAddr::new(address, 0)).await?;
        let port = listener.local_addr()?.port();
        let identity = Identity { session, key, node: LISTENER, purpose: Purpose::Channel, deadlines };
        Ok((Self { limiter: HandshakeLimiter::new(listener, deadlines.handshake), identity }, port))
    }

    /// Waits for the next dialer that holds the key.
    pub async fn accept(&mut self) -> Channel {
        let identity = &self.identity;
        let shake = |mut stream: TcpStream| {
            let identity = identity.clone();
            async move {
                let (_, keys) = handshake::accept(&mut stream, &identity).await?;
                Channel::new(stream, keys, &identity.deadlines)
            }
        };
        self.limiter.accept(shake).await
    }
}

/// Dials a listener at the first of its addresses that answers.
///
/// # Errors
/// No address answers. The kind `ConnectionReset` means that a listener answered but ended the handshake: it has another key, or
/// too many handshakes are under way on it. The kind `ConnectionRefused` means that nothing listens at any of the addresses.
pub async fn dial(session: SessionId, key: &Arc<Key>, deadlines: Deadlines, addresses: &[SocketAddr]) -> io::Result<Channel> {
    let mut dialing = tokio::task::JoinSet::new();
    for (place, &address) in addresses.iter().enumerate() {
        let identity = Identity { session, key: key.clone(), node: DIALER, purpose: Purpose::Channel, deadlines };
        dialing.spawn(async move {
            // If several addresses answer, their order decides, so that all servers use the same network.
            sleep(ADDRESS_INTERVAL * place as u32).await;
            let at = |error: io::Error| io::Error::new(error.kind(), format!("{address}: {error}"));
            let late = |_| io::Error::from(io::ErrorKind::TimedOut);
            let connecting = timeout(deadlines.connect, TcpStream::connect(address)).await.map_err(late).flatten();
            let mut stream = connecting.map_err(at)?;
            let shaking =
                timeout(deadlines.handshake, handshake::dial(&mut stream, &identity, LISTENER)).await.map_err(late).flatten();
            Channel::new(stream, shaking.map_err(at)?, &deadlines)
        });
    }
    let (mut failed, mut kind, mut refused) = (Vec::new(), io::ErrorKind::NotConnected, 0);
    while let Some(dialed) = dialing.join_next().await {
        match dialed.map_err(io::Error::other).flatten() {
            Ok(channel) => return Ok(channel),
            Err(error) => {
                if handshake::is_pushed_out(&error) {
                    kind = io::ErrorKind::ConnectionReset;
                }
                refused += usize::from(error.kind() == io::ErrorKind::ConnectionRefused);
                failed.push(error.to_string());
            }
        }
    }
    if refused > 0 && refused == addresses.len() {
        kind = io::ErrorKind::ConnectionRefused;
    }
    Err(io::Error::new(kind, failed.join("; ")))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn listener(key: u8) -> (Listener, Vec<SocketAddr>) {
        let (listener, port) =
            Listener::bind(SessionId([1; 8]), Arc::new(Key::new([key; 32])), Deadlines::DEFAULT, IpAddr::from([127, 0, 0, 1]))
                .await
                .unwrap();
        // Nothing listens at the first address.
        (listener, vec!["127.0.0.2:1".parse().unwrap(), SocketAddr::from(([127, 0, 0, 1], port))])
    }

    #[tokio::test]
    async fn messages_of_any_length_arrive_until_the_channel_ends() {
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
    async fn a_dialer_with_another_key_is_rejected() {
        let (mut listener, addresses) = listener(1).await;
        let stranger = Arc::new(Key::new([2; 32]));
        let accepting = tokio::time::timeout(Duration::from_millis(500), listener.accept());
        let (dialed, accepted) = tokio::join!(dial(SessionId([1; 8]), &stranger, Deadlines::DEFAULT, &addresses), accepting);
        assert!(accepted.is_err());
        let why = dialed.err().unwrap().to_string();
        assert!(why.contains("127.0.0.2:1"), "every address is named: {why}");
    }

    /// The listener gives up the handshake of a slow dialer just before the dialer's last message.
    #[tokio::test]
    async fn a_handshake_that_the_listener_ends_at_any_time_may_be_repeated() {
        async fn forward(from: &mut TcpStream, to: &mut TcpStream) {
            let len = from.read_u16_le().await.unwrap();
            let mut message = vec![0; usize::from(len)];
            from.read_exact(&mut message).await.unwrap();
            to.write_u16_le(len).await.unwrap();
            to.write_all(&message).await.unwrap();
        }
        let (mut listener, addresses) = listener(1).await;
        let key = Arc::new(Key::new([1; 32]));
        let between = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = [between.local_addr().unwrap()];
        let abandoned = async {
            for _ in 0..20 {
                let mut dialer = between.accept().await.unwrap().0;
                let mut far = TcpStream::connect(addresses[1]).await.unwrap();
                forward(&mut dialer, &mut far).await;
                forward(&mut far, &mut dialer).await;
            }
        };
        let dialing = async {
            for _ in 0..20 {
                // The stream's end may be noticed later, too.
                if let Err(error) = dial(SessionId([1; 8]), &key, Deadlines::DEFAULT, &near).await {
                    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}");
                }
            }
        };
        tokio::select! {
            _ = async { tokio::join!(abandoned, dialing) } => {}
            _ = listener.accept() => panic!("a handshake is completed"),
        }
    }
}
