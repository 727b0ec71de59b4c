//! Measures, for `dayfly doctor`, the networks between two nodes. It uses the transports that a session would use.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::{NodeId, SessionId};
use dayfly_meta::limits::CHUNK_LEN;
use serde::{Deserialize, Serialize};

use crate::contract::{Answer, Connection, Incoming, Piece, Service, Serving, Transport};
use crate::error::Refusal;
use crate::key::Key;
use crate::open::{Options, open};
use crate::region::Region;
use crate::selection::Preference;
use crate::tcp::{Identity, Purpose};

/// Number of small requests that are timed.
const PINGS: usize = 50;
/// Number of large requests that are timed.
const BULKS: usize = 16;
/// The most bytes that the answering side sends for one request.
const ROOM_MAX: u64 = 4 * CHUNK_LEN;

/// The performance of a network between two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// Median time of a small request, in microseconds.
    pub round_trip_us: f64,
    /// Throughput of large requests, one at a time.
    pub bytes_per_second: f64,
}

/// The result of a probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reached {
    /// The speed of TCP, or why the peer cannot be reached over it.
    pub tcp: Result<Speed, String>,
    /// The speed of RDMA, or why the peer cannot be reached over it.
    pub rdma: Result<Speed, String>,
}

/// The answering side of a probe, which answers until it is dropped.
pub struct Answering {
    _serving: Serving,
    _transport: Arc<dyn Transport>,
}

struct Zeros;

#[async_trait]
impl Service for Zeros {
    async fn pulled(&self, _from: NodeId, _message: Vec<u8>, room: Vec<u64>) -> Result<Answer, Refusal> {
        if room.iter().sum::<u64>() > ROOM_MAX {
            return Err("more than a probe asks for".into());
        }
        Ok(Answer { message: Vec::new(), pieces: room.iter().map(|&len| Piece::Bytes(vec![0; len as usize])).collect() })
    }

    async fn offered(&self, _from: NodeId, _message: Vec<u8>, _incoming: Incoming) -> Result<Vec<u8>, Refusal> {
        Err("a probe offers nothing".into())
    }
}

fn identity(key: [u8; 32], node: u16) -> Identity {
    let (session, purpose, deadlines) = (SessionId(*b"doctor\0\0"), Purpose::Peer, Deadlines::DEFAULT);
    Identity { session, key: Arc::new(Key::new(key)), node: NodeId(node), purpose, deadlines }
}

/// Answers probes from nodes that hold the key, at the returned address.
///
/// # Errors
/// `listen` is in use or is not an address of this machine.
pub async fn answer(key: [u8; 32], listen: SocketAddr, options: &Options) -> io::Result<(Answering, SocketAddr)> {
    let (transport, address) = open(identity(key, 1), listen, options).await?;
    let serving = transport.serve(Arc::new(Zeros)).await?;
    Ok((Answering { _serving: serving, _transport: transport }, address))
}

/// Probes the answering side at `address`, over TCP and over the network of `options`.
pub async fn reach(key: [u8; 32], address: SocketAddr, options: &Options) -> Reached {
    let tcp = Options { preference: Preference::Tcp, ..options.clone() };
    Reached { tcp: try_one(key, address, &tcp).await, rdma: try_one(key, address, options).await }
}

async fn try_one(key: [u8; 32], address: SocketAddr, options: &Options) -> Result<Speed, String> {
    let any = SocketAddr::new(if address.is_ipv4() { [0, 0, 0, 0].into() } else { [0_u16; 8].into() }, 0);
    let (transport, _) = open(identity(key, 0), any, options).await.map_err(|error| error.to_string())?;
    if options.preference != Preference::Tcp {
        transport.ability().rdma?;
    }
    let region = transport.region(2 * CHUNK_LEN).map_err(|error| error.to_string())?;
    let connection = transport.connect(NodeId(1), address).await.map_err(|error| error.to_string())?;
    if let Some((_, why)) = transport.fallen_back().pop() {
        return Err(why);
    }
    let mut pings = Vec::with_capacity(PINGS);
    for _ in 0..PINGS {
        pings.push(pull(&connection, &region, 8).await?.as_secs_f64() * 1e6);
    }
    pings.sort_by(f64::total_cmp);
    let mut took = Duration::ZERO;
    for _ in 0..BULKS {
        took += pull(&connection, &region, CHUNK_LEN).await?;
    }
    Ok(Speed { round_trip_us: pings[PINGS / 2], bytes_per_second: (BULKS as u64 * CHUNK_LEN) as f64 / took.as_secs_f64() })
}

async fn pull(connection: &Arc<dyn Connection>, region: &Region, len: u64) -> Result<Duration, String> {
    let slot = region.slot_within(len, Deadlines::DEFAULT.request).await.ok_or("no memory for an answer")?;
    let start = Instant::now();
    let pulled = connection.pull(Vec::new(), vec![slot], Deadlines::DEFAULT.request).await.map_err(|error| error.to_string())?;
    if pulled.lens != [len] { Err("the answer is too short".to_owned()) } else { Ok(start.elapsed()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_probe_measures_the_networks_that_exist() {
        let listen = "127.0.0.1:0".parse().unwrap();
        let (answering, address) = answer([1; 32], listen, &Options::default()).await.unwrap();
        let reached = reach([1; 32], address, &Options::default()).await;
        assert!(reached.tcp.is_ok_and(|speed| speed.round_trip_us > 0.0 && speed.bytes_per_second > 1e6));
        assert_eq!(reached.rdma.is_ok(), crate::rdma::tests::has_card());
        assert!(reach([2; 32], address, &Options::default()).await.tcp.is_err(), "the key differs");
        drop(answering);
        assert!(reach([1; 32], address, &Options::default()).await.tcp.is_err(), "nothing listens there anymore");
    }
}
