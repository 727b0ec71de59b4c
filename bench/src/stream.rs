//! Measures one TCP stream between two programs that do nothing else. All remote reads are compared
//! with it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

use clap::Args;

use crate::measure::Failure;

/// The number of bytes per call.
const CALL_LEN: usize = 1 << 20;

/// Copy bytes over one TCP stream, from memory to memory; prints bytes per second
#[derive(Args)]
pub(crate) struct Stream {
    /// Wait at this address for connections, and send to each until it closes
    #[arg(long, value_name = "ADDRESS", conflicts_with = "connect", required_unless_present = "connect")]
    listen: Option<SocketAddr>,
    /// Receive from this address
    #[arg(long, value_name = "ADDRESS")]
    connect: Option<SocketAddr>,
    /// Number of bytes
    #[arg(long, default_value_t = 2 << 30)]
    bytes: u64,
}

pub(crate) fn run(arguments: &Stream) -> Result<(), Failure> {
    if let Some(address) = arguments.listen {
        for stream in TcpListener::bind(address)?.incoming() {
            let mut stream = stream?;
            let bytes = vec![7; CALL_LEN];
            while stream.write_all(&bytes).is_ok() {}
        }
    }
    let Some(address) = arguments.connect else { return Ok(()) };
    let mut stream = TcpStream::connect(address)?;
    let mut buffer = vec![0; CALL_LEN];
    let (start, mut got) = (Instant::now(), 0_u64);
    while got < arguments.bytes {
        match stream.read(&mut buffer)? {
            0 => return Err("the sender closed the connection early".into()),
            count => got += count as u64,
        }
    }
    println!("{:.0}", got as f64 / start.elapsed().as_secs_f64());
    Ok(())
}
