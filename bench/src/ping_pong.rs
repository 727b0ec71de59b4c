//! Measures two hops without a file system: a request goes over a Unix socket to one thread and
//! then over TCP to another, and the bytes come back the same way.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use clap::Args;

use crate::measure::Failure;

/// Length of a request; a real request for one block has about this length.
const REQUEST_LEN: usize = 32;

/// Measure a bare two-hop ping-pong; prints nanoseconds per round
#[derive(Args)]
pub(crate) struct PingPong {
    /// Length of the answer in bytes
    len: usize,
    /// Number of rounds
    #[arg(long, default_value_t = 20_000)]
    rounds: u32,
}

pub(crate) fn run(arguments: &PingPong) -> Result<(), Failure> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut near = TcpStream::connect(listener.local_addr()?)?;
    let (mut far, _) = listener.accept()?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let (mut client, mut relay) = UnixStream::pair()?;
    let len = arguments.len;
    let owner = std::thread::spawn(move || -> std::io::Result<()> {
        let (mut request, answer) = ([0; REQUEST_LEN], vec![7; len]);
        loop {
            far.read_exact(&mut request)?;
            far.write_all(&answer)?;
        }
    });
    let relaying = std::thread::spawn(move || -> std::io::Result<()> {
        let (mut request, mut answer) = ([0; REQUEST_LEN], vec![0; len]);
        loop {
            relay.read_exact(&mut request)?;
            near.write_all(&request)?;
            near.read_exact(&mut answer)?;
            relay.write_all(&answer)?;
        }
    });
    let mut answer = vec![0; len];
    let mut start = Instant::now();
    for round in 0..arguments.rounds + arguments.rounds / 10 {
        if round == arguments.rounds / 10 {
            start = Instant::now();
        }
        client.write_all(&[1; REQUEST_LEN])?;
        client.read_exact(&mut answer)?;
    }
    println!("{:.0}", start.elapsed().as_nanos() as f64 / f64::from(arguments.rounds));
    // Both threads exit when their connections close.
    drop(client);
    drop((owner, relaying));
    Ok(())
}
