//! Several nodes: each looked at by a `dayfly doctor` of its own, and each pair tried.

use std::future::Future;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use dayfly_transport::probe::{self, Reached, Speed};

use super::checks::{self, options};
use super::{Finding, Report, tell};
use crate::args::Doctor;
use crate::failure::Failure;
use crate::size::show;

/// Clocks that differ by more spoil the order of what nodes log.
const SKEW_MAX_S: f64 = 2.0;
/// A host that does not answer by then is not waited for.
const LOOK_TIMEOUT: Duration = Duration::from_secs(120);
/// Of more nodes not all pairs are tried, but each with the next.
const ALL_PAIRS_MAX: usize = 8;

/// Runs something that waits.
pub(super) fn block_on<T>(future: impl Future<Output = T>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let output = runtime.block_on(future);
    runtime.shutdown_timeout(Duration::from_secs(2));
    Ok(output)
}

/// `--answer`: the far side of a probe, until its standard input ends. The key comes in by that.
pub(super) fn answer(arguments: &Doctor) -> Result<ExitCode, Failure> {
    let key = read_key()?;
    block_on(async {
        let listen = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
        let answered = match probe::answer(key, listen, &options(arguments)).await {
            // A kernel without version 6.
            Err(_) => probe::answer(key, SocketAddr::from(([0, 0, 0, 0], 0)), &options(arguments)).await?,
            Ok(answered) => answered,
        };
        let (_answering, address) = answered;
        tell(&address.port())?;
        tokio::task::spawn_blocking(|| io::copy(&mut io::stdin().lock(), &mut io::sink())).await.map_err(Failure::new)??;
        Ok(ExitCode::SUCCESS)
    })?
}

/// `--reach`: the near side.
pub(super) fn reach(arguments: &Doctor, address: &str) -> Result<ExitCode, Failure> {
    let key = read_key()?;
    let cannot = |error: io::Error| Failure::new(format!("cannot find '{address}': {error}"));
    let resolved: Vec<SocketAddr> = address.to_socket_addrs().map_err(cannot)?.collect();
    let best = resolved.iter().find(|address| address.is_ipv4()).or(resolved.first());
    let best = *best.ok_or_else(|| Failure::new(format!("'{address}' has no address")))?;
    let reached = block_on(async { probe::reach(key, best, &options(arguments)).await })?;
    tell(&reached)?;
    Ok(ExitCode::SUCCESS)
}

fn read_key() -> Result<[u8; 32], Failure> {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    serde_json::from_str(&line)
        .map_err(|_| Failure::usage("this is for 'dayfly doctor --hosts', which gives a key on standard input"))
}

/// Looks at all hosts, and at pairs of them.
pub(super) fn all(arguments: &Doctor) -> Result<Vec<Report>, Failure> {
    let looking: Vec<_> = arguments.hosts.iter().map(|host| start_to_look(arguments, host)).collect();
    let deadline = Instant::now() + LOOK_TIMEOUT;
    let mut reports: Vec<Report> = looking
        .into_iter()
        .zip(&arguments.hosts)
        .map(|(looked, host)| {
            let late = |_| Failure::new(format!("{host} does not answer within {} s", LOOK_TIMEOUT.as_secs()));
            let found =
                looked.recv_timeout(deadline.saturating_duration_since(Instant::now())).map_err(late).and_then(|found| found);
            match found {
                Ok(report) => Report { host: host.clone(), ..report },
                Err(failure) => Report { host: host.clone(), findings: vec![unreachable(&failure)], clock: None },
            }
        })
        .collect();
    compare_clocks(&mut reports);
    let reachable: Vec<&String> = reports.iter().filter(|report| report.clock.is_some()).map(|report| &report.host).collect();
    let pairs = pairs(reachable.len());
    let findings: Vec<Finding> =
        pairs.into_iter().flat_map(|(from, to)| pair(arguments, reachable[from], reachable[to])).collect();
    if !findings.is_empty() {
        reports.push(Report { host: "between them".to_owned(), findings, clock: None });
    }
    Ok(reports)
}

/// Looks at a host on a thread of its own, which ends with the host's answer or with this process. The clock that comes out is by how
/// much the host's is ahead of ours.
fn start_to_look(arguments: &Doctor, host: &str) -> Receiver<Result<Report, Failure>> {
    let (sender, receiver) = channel();
    let remote = Remote::start(arguments, host, &["--json".to_owned()]);
    thread::spawn(move || {
        let looked = remote.and_then(Remote::output).and_then(|text| {
            let mut reports: Vec<Report> = serde_json::from_str(&text).map_err(Failure::new)?;
            let report = reports.pop().ok_or_else(|| Failure::new("it says nothing"))?;
            Ok(Report { clock: report.clock.map(|clock| clock - checks::now()), ..report })
        });
        let _ = sender.send(looked);
    });
    receiver
}

fn unreachable(failure: &Failure) -> Finding {
    Finding::missing("dayfly", failure, "it must be startable there by --ssh, under the same path as here").needed()
}

/// Which are tried: each way counts by itself only where cards are asymmetric, which the way back shows as well.
fn pairs(count: usize) -> Vec<(usize, usize)> {
    if count <= ALL_PAIRS_MAX {
        return (0..count).flat_map(|from| (from + 1..count).map(move |to| (from, to))).collect();
    }
    (0..count).map(|from| (from, (from + 1) % count)).collect()
}

fn compare_clocks(reports: &mut [Report]) {
    for report in reports {
        let Some(ahead) = report.clock.filter(|ahead| ahead.abs() > SKEW_MAX_S) else { continue };
        let detail = format!("its clock is {ahead:+.0} s off this machine's");
        report.findings.push(Finding::slow("time", detail, "run chrony or ntpd: times of samples and of logs will not agree"));
    }
}

/// One pair: the far side answers, the near side tries.
fn pair(arguments: &Doctor, from: &str, to: &str) -> Vec<Finding> {
    let what = format!("{from} -> {to}");
    let (sender, tried) = channel();
    // Ends with the pair's answers or with this process.
    thread::spawn({
        let (arguments, from, to) = (arguments.clone(), from.to_owned(), to.to_owned());
        move || sender.send(try_pair(&arguments, &from, &to))
    });
    let late = |_| Failure::new(format!("no answer within {} s", LOOK_TIMEOUT.as_secs()));
    match tried.recv_timeout(LOOK_TIMEOUT).map_err(late).and_then(|tried| tried) {
        Err(failure) => vec![Finding::missing(&what, &failure, "the port that a server listens at must be reachable").needed()],
        Ok(Reached { tcp, rdma }) => {
            let words = |speed: Speed| format!("{:.0} us, {}/s", speed.round_trip_us, show(speed.bytes_per_second as u64));
            let advice = "the port that a server listens at must be reachable: look at the nodes' firewalls";
            let tcp = match tcp {
                Ok(speed) => Finding::ok(&what, format!("TCP: {}", words(speed))),
                Err(why) => Finding::missing(&what, format!("TCP: {why}"), advice),
            };
            let rdma = match rdma {
                Ok(speed) => Finding::ok(&what, format!("RDMA: {}", words(speed))),
                Err(why) => Finding::missing(&what, format!("RDMA: {why}"), "sessions over both go by TCP"),
            };
            vec![tcp.needed(), rdma]
        }
    }
}

fn try_pair(arguments: &Doctor, from: &str, to: &str) -> Result<Reached, Failure> {
    let mut key = [0_u8; 32];
    getrandom::fill(&mut key).map_err(|error| Failure::new(format!("no randomness: {error}")))?;
    let key = serde_json::to_string(&key).map_err(Failure::new)?;
    let mut far = Remote::start(arguments, to, &["--answer".to_owned()])?;
    far.say(&key)?;
    let port: u16 = serde_json::from_str(&far.line()?).map_err(Failure::new)?;
    // By its name, as the roster of a session has it.
    let name = to.rsplit('@').next().unwrap_or(to);
    let mut near = Remote::start(arguments, from, &["--reach".to_owned(), format!("{name}:{port}")])?;
    near.say(&key)?;
    let reached = serde_json::from_str(&near.output()?).map_err(Failure::new)?;
    drop(far.input.take());
    far.output()?;
    Ok(reached)
}

/// A `dayfly doctor` on another host.
struct Remote {
    host: String,
    child: Child,
    input: Option<std::process::ChildStdin>,
    output: BufReader<std::process::ChildStdout>,
    errors: Option<thread::JoinHandle<String>>,
}

impl Remote {
    fn start(arguments: &Doctor, host: &str, more: &[String]) -> Result<Self, Failure> {
        let program = std::env::current_exe()?;
        let mut ssh = arguments.ssh.split_whitespace();
        let mut command = Command::new(ssh.next().unwrap_or("ssh"));
        command.args(ssh).arg(host).arg(program).arg("doctor").args(more);
        for path in &arguments.data_dir {
            command.arg("--data-dir").arg(path);
        }
        if let Some(device) = &arguments.rdma_device {
            command.arg("--rdma-device").arg(device);
        }
        let cannot = |error: io::Error| Failure::new(format!("cannot start '{}': {error}", arguments.ssh));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(cannot)?;
        let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let output = BufReader::new(output.ok_or_else(|| Failure::new("no standard output"))?);
        // Ends with the pipe.
        let errors = errors.map(|mut errors| {
            thread::spawn(move || {
                let mut text = String::new();
                let _ = errors.read_to_string(&mut text);
                text
            })
        });
        Ok(Self { host: host.to_owned(), child, input, output, errors })
    }

    fn say(&mut self, line: &str) -> Result<(), Failure> {
        let Some(input) = &mut self.input else { return Ok(()) };
        input.write_all(format!("{line}\n").as_bytes()).and_then(|()| input.flush()).map_err(|error| self.failure(&error))
    }

    fn line(&mut self) -> Result<String, Failure> {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(0) => Err(self.failure(&"it ended")),
            Ok(_) => Ok(line),
            Err(error) => Err(self.failure(&error)),
        }
    }

    /// All that it says until it ends.
    fn output(mut self) -> Result<String, Failure> {
        let mut text = String::new();
        self.output.read_to_string(&mut text)?;
        if text.is_empty() && !self.child.wait()?.success() { Err(self.failure(&"it failed")) } else { Ok(text) }
    }

    /// In its own last words, if it has any.
    fn failure(&mut self, reason: &dyn std::fmt::Display) -> Failure {
        let _ = self.child.kill();
        let words = self.errors.take().and_then(|errors| errors.join().ok()).unwrap_or_default();
        let last = words.lines().rev().find(|line| !line.trim().is_empty()).map_or_else(|| reason.to_string(), str::to_owned);
        Failure::new(format!("on {}: {last}", self.host))
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        drop(self.input.take());
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pairs_of_few_and_neighbours_of_many() {
        assert_eq!(pairs(3), [(0, 1), (0, 2), (1, 2)]);
        assert_eq!((pairs(1).len(), pairs(8).len(), pairs(9).len()), (0, 28, 9));
        assert_eq!(pairs(9)[8], (8, 0));
    }
}
