//! Dials one link: connects, and performs the handshake.

use std::io;
use std::net::SocketAddr;
use std::time::Instant;

use dayfly_meta::id::NodeId;
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

use super::handshake::{self, is_pushed_out};
use super::identity::Identity;
use super::seal::{ReadHalf, WriteHalf, split};

/// The most attempts to dial a peer that aborts handshakes because too many are under way.
const DIAL_ATTEMPTS_MAX: u32 = 5;

/// The two halves of a link's stream.
pub(super) type Halves = (ReadHalf, WriteHalf);

/// Dials a link. The listener may have aborted the handshake because very many strangers, or all other members, dialed it at the
/// same time. Such a dial is repeated, with growing pauses.
pub(super) async fn dial_with_retries(identity: &Identity, peer: NodeId, address: SocketAddr) -> io::Result<Halves> {
    let start = Instant::now();
    let mut attempts = 0;
    loop {
        attempts += 1;
        match dial(identity, peer, address).await {
            Err(error)
                if is_pushed_out(&error)
                    && attempts < DIAL_ATTEMPTS_MAX
                    && (attempts == 1 || start.elapsed() < identity.deadlines.handshake) =>
            {
                sleep(identity.deadlines.look_interval * attempts).await;
            }
            dialed => return dialed,
        }
    }
}

async fn dial(identity: &Identity, peer: NodeId, address: SocketAddr) -> io::Result<Halves> {
    let late = |what: &'static str| move |_| io::Error::new(io::ErrorKind::TimedOut, what);
    let mut stream =
        timeout(identity.deadlines.connect, TcpStream::connect(address)).await.map_err(late("no connection in time"))??;
    stream.set_nodelay(true)?;
    let shaken = timeout(identity.deadlines.handshake, handshake::dial(&mut stream, identity, peer))
        .await
        .map_err(late("no handshake in time"))?;
    let keys = shaken.map_err(|error| io::Error::new(error.kind(), format!("the handshake failed: {error}")))?;
    Ok(split(stream, identity.purpose.seal(keys)))
}
