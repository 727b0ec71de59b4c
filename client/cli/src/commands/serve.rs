//! `dayfly serve`: the daemon. Started by `up`, which speaks with it over standard input and output; not by hand.

use std::io::{self, BufRead, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use dayfly_client::locate::Location;
use dayfly_meta::id::NodeId;
use dayfly_server::{Choice, Config, Options, Server};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tracing_subscriber::EnvFilter;

use crate::failure::Failure;
use crate::launch::{self, Hello, Orders, Ready, Roster};

/// Threads that move messages; the rest is done on threads for blocking work.
const RUNTIME_THREADS_MAX: usize = 4;
/// After `down`, its answer is on its way for so long.
const LAST_WORDS_TIMEOUT: Duration = Duration::from_millis(30);

pub(super) fn run() -> Result<ExitCode, Failure> {
    let filter = EnvFilter::try_from_env("DAYFLY_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).with_ansi(false).init();
    let orders: Orders = serde_json::from_str(&read_line()?).map_err(|_| {
        Failure::usage("'dayfly serve' is started by 'dayfly up', which tells it what to serve on standard input")
    })?;
    let session = orders.session.parse().map_err(Failure::new)?;
    let location = Location { session, folder: orders.folder.clone() };
    let node = NodeId(orders.node);
    let _lock = launch::lock_node(&location, node)?;
    let _data_dirs = launch::take_data_dirs(&orders.data_dirs)?;
    raise_descriptor_limit();
    let (is_tethered, threads) = (orders.is_tethered, orders.workers.clamp(1, RUNTIME_THREADS_MAX));
    let config = Config {
        session,
        key: Arc::new(orders.key),
        node,
        listen: orders.listen,
        network: Options {
            preference: orders.transport,
            choice: Choice {
                device: orders.rdma_device,
                near: orders.data_dirs.first().cloned(),
                service_level: orders.service_level,
                traffic_class: orders.traffic_class,
            },
        },
        runtime_dir: orders.folder,
        data_dirs: orders.data_dirs,
        capacity: orders.capacity,
        memory: orders.memory,
        prefix: orders.prefix,
        verify_reads: orders.verify_reads,
        workers: orders.workers,
        decoders: orders.decoders,
        stage_memory: orders.stage_memory,
    };
    // As many as this server's share of the cores: a message handed to a sleeping thread costs more than what is done with it.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    runtime.block_on(serve(config, is_tethered))?;
    // What still blocks is of no use to anyone any more.
    runtime.shutdown_background();
    Ok(ExitCode::SUCCESS)
}

async fn serve(config: Config, is_tethered: bool) -> Result<(), Failure> {
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let _hangups_do_not_end_us = signal(SignalKind::hangup())?;
    let server = Server::start(config).await.map_err(Failure::new)?;
    tell(&Hello { address: server.address(), ability: server.ability() })?;
    let roster: Roster = hear()?;
    server.agree(roster.agreement);
    server.join(&roster.addresses).await.map_err(Failure::new)?;
    tell(&Ready { fallen_back: server.fallen_back() })?;
    server.agree(hear()?);
    let untethered = watch_tether(is_tethered);
    tokio::select! {
        () = server.ended() => {}
        _ = terminate.recv() => drop(server.end()),
        _ = interrupt.recv() => drop(server.end()),
        () = untethered => drop(server.end()),
    }
    tokio::time::sleep(LAST_WORDS_TIMEOUT).await;
    server.close();
    tracing::info!("the session has ended here");
    Ok(())
}

fn read_line() -> Result<String, Failure> {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    Ok(line)
}

/// What `up` says next.
fn hear<T: DeserializeOwned>() -> Result<T, Failure> {
    serde_json::from_str(&read_line()?).map_err(|_| Failure::new("no word came from 'dayfly up', which was ended"))
}

fn tell(what: &impl Serialize) -> Result<(), Failure> {
    let line = serde_json::to_string(what).map_err(Failure::new)?;
    let mut output = io::stdout().lock();
    writeln!(output, "{line}")?;
    Ok(output.flush()?)
}

/// Ends when whoever holds our standard input is gone; never, if we are not tethered to it.
async fn watch_tether(is_tethered: bool) {
    if !is_tethered {
        return std::future::pending().await;
    }
    let (sender, cut) = oneshot::channel::<()>();
    // Ends with the process: a blocking read of standard input cannot be called off.
    std::thread::spawn(move || {
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        drop(sender);
    });
    let _ = cut.await;
}

/// Clients and peers each cost descriptors; the soft limit is often far below what is allowed.
fn raise_descriptor_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE).and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}
