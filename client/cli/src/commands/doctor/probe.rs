//! Both ends of a network probe, and helpers that the single-node checks also use.

use std::future::Future;
use std::io::{self, BufRead, Write};
use std::net::{Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::process::ExitCode;
use std::time::Duration;

use dayfly_launch::chosen_data_dirs;
use dayfly_transport::{Choice, Options, Preference, probe};
use serde::Serialize;

use crate::args::DoctorArguments;
use crate::failure::{Failure, output};

/// How long a finished probe waits for blocking calls that have not returned.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs a future on a runtime of its own.
pub(super) fn block_on<T>(future: impl Future<Output = T>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let output = runtime.block_on(future);
    runtime.shutdown_timeout(SHUTDOWN_TIMEOUT);
    Ok(output)
}

/// Returns the network options that the arguments request.
pub(super) fn options(arguments: &DoctorArguments) -> Options {
    let near = chosen_data_dirs(&arguments.data_dir).into_iter().next();
    let choice = Choice { device: arguments.rdma_device.clone(), near, ..Choice::default() };
    Options { preference: Preference::Rdma, choice }
}

/// `--answer`: answers probes until standard input ends. The key is the first line of standard
/// input.
pub(super) fn answer(arguments: &DoctorArguments) -> Result<ExitCode, Failure> {
    let key = read_key()?;
    block_on(async {
        let listen = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
        let answering = match probe::answer(key, listen, &options(arguments)).await {
            // The kernel may lack IPv6.
            Err(_) => probe::answer(key, SocketAddr::from(([0, 0, 0, 0], 0)), &options(arguments)).await?,
            Ok(answering) => answering,
        };
        let (_answering, address) = answering;
        write_json(&address.port())?;
        tokio::task::spawn_blocking(|| io::copy(&mut io::stdin().lock(), &mut io::sink())).await.map_err(Failure::new)??;
        Ok(ExitCode::SUCCESS)
    })?
}

/// `--reach`: connects to the answering side, and probes it.
pub(super) fn reach(arguments: &DoctorArguments, address: &str) -> Result<ExitCode, Failure> {
    let key = read_key()?;
    let cannot = |error: io::Error| Failure::new(format!("cannot resolve '{address}': {error}"));
    let resolved: Vec<SocketAddr> = address.to_socket_addrs().map_err(cannot)?.collect();
    let best = resolved.iter().find(|address| address.is_ipv4()).or(resolved.first());
    let best = *best.ok_or_else(|| Failure::new(format!("'{address}' has no address")))?;
    let reached = block_on(async { probe::reach(key, best, &options(arguments)).await })?;
    write_json(&reached)?;
    Ok(ExitCode::SUCCESS)
}

fn read_key() -> Result<[u8; 32], Failure> {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    serde_json::from_str(&line)
        .map_err(|_| Failure::usage("only 'dayfly doctor --hosts' uses this option; it passes a key on standard input"))
}

/// Writes a line of JSON for another `dayfly doctor`.
fn write_json(value: &impl Serialize) -> Result<(), Failure> {
    let mut output = output();
    writeln!(output, "{}", serde_json::to_string(value).map_err(Failure::new)?)?;
    Ok(output.flush()?)
}
