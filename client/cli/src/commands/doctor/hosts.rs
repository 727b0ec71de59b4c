//! Checks several nodes: runs `dayfly doctor` on each, and then checks pairs of nodes.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use dayfly_launch::expand_host_list;
use dayfly_transport::probe::{Reached, Speed};
use serde::de::DeserializeOwned;

use super::checks::now;
use super::finding::{Finding, Report};
use crate::args::DoctorArguments;
use crate::failure::Failure;
use crate::size::show;

/// Clocks that differ by more than this put log lines from several nodes out of order.
const SKEW_MAX_S: f64 = 2.0;
/// A host that has not answered within this time is reported as unreachable.
const HOST_TIMEOUT: Duration = Duration::from_secs(120);
/// If an answer makes no sense, at most this many of its characters are shown.
const SHOWN_CHARS_MAX: usize = 80;
/// With more nodes than this, each is paired only with the next.
const ALL_PAIRS_MAX: usize = 8;

/// Checks all hosts, and pairs of them.
pub(super) fn check_all(arguments: &DoctorArguments) -> Result<Vec<Report>, Failure> {
    let hosts = expand_host_list(&arguments.hosts.join(","));
    let hosts = hosts.map_err(|error| Failure::usage(format!("cannot use the list of hosts in --hosts: {error}")))?;
    if hosts.is_empty() {
        return Err(Failure::usage("--hosts names no host; write it as n1,n2 or n[1-8]"));
    }
    let running: Vec<_> = hosts.iter().map(|host| start_check(arguments, host)).collect();
    let deadline = Instant::now() + HOST_TIMEOUT;
    let mut reports: Vec<Report> = running
        .into_iter()
        .zip(&hosts)
        .map(|(result, host)| {
            let late = |_| Failure::new(format!("{host} did not answer within {} s", HOST_TIMEOUT.as_secs()));
            let left = deadline.saturating_duration_since(Instant::now());
            match result.recv_timeout(left).map_err(late).and_then(|report| report) {
                Ok(report) => Report { host: host.clone(), ..report },
                Err(failure) => Report { host: host.clone(), findings: vec![unreachable(&failure)], clock: None },
            }
        })
        .collect();
    compare_clocks(&mut reports);
    let reachable: Vec<&String> = reports.iter().filter(|report| report.clock.is_some()).map(|report| &report.host).collect();
    let pairs = pairs(reachable.len());
    let findings: Vec<Finding> =
        pairs.into_iter().flat_map(|(from, to)| check_pair(arguments, reachable[from], reachable[to])).collect();
    if !findings.is_empty() {
        reports.push(Report { host: "between them".to_owned(), findings, clock: None });
    }
    Ok(reports)
}

/// Checks a host on a thread of its own. The thread ends when the host answers or when this process
/// exits. The report's clock is the difference from this machine's clock.
fn start_check(arguments: &DoctorArguments, host: &str) -> Receiver<Result<Report, Failure>> {
    let (sender, receiver) = channel();
    let remote = Remote::start(arguments, host, &["--json".to_owned()]);
    let host = host.to_owned();
    thread::spawn(move || {
        let report = remote.and_then(Remote::output).and_then(|text| {
            let mut reports: Vec<Report> = decode(&host, &text)?;
            let report = reports.pop().ok_or_else(|| Failure::new("it sent no report"))?;
            Ok(Report { clock: report.clock.map(|clock| clock - now()), ..report })
        });
        let _ = sender.send(report);
    });
    receiver
}

fn unreachable(failure: &Failure) -> Finding {
    let advice = "dayfly must be installed there under the same path as here, and --ssh must be able to start it";
    Finding::missing("dayfly", failure, advice).needed()
}

/// Chooses the pairs. One direction is enough, because a probe's answers use the other direction.
fn pairs(count: usize) -> Vec<(usize, usize)> {
    if count <= ALL_PAIRS_MAX {
        return (0..count).flat_map(|from| (from + 1..count).map(move |to| (from, to))).collect();
    }
    (0..count).map(|from| (from, (from + 1) % count)).collect()
}

fn compare_clocks(reports: &mut [Report]) {
    for report in reports {
        let Some(ahead) = report.clock.filter(|ahead| ahead.abs() > SKEW_MAX_S) else { continue };
        let detail = format!("its clock differs from this machine's by {ahead:+.0} s");
        let advice = "run chrony or ntpd; otherwise times in logs of different nodes do not agree";
        report.findings.push(Finding::slow("time", detail, advice));
    }
}

/// Checks a pair: `to` answers, and `from` connects to it.
fn check_pair(arguments: &DoctorArguments, from: &str, to: &str) -> Vec<Finding> {
    let what = format!("{from} -> {to}");
    let advice = "servers listen at ports that the kernel chooses; the nodes' firewalls must not block them";
    let (sender, receiver) = channel();
    // The thread ends when the pair answers or when this process exits.
    thread::spawn({
        let (arguments, from, to) = (arguments.clone(), from.to_owned(), to.to_owned());
        move || sender.send(probe_pair(&arguments, &from, &to))
    });
    let late = |_| Failure::new(format!("no answer within {} s", HOST_TIMEOUT.as_secs()));
    match receiver.recv_timeout(HOST_TIMEOUT).map_err(late).and_then(|reached| reached) {
        Err(failure) => vec![Finding::missing(&what, &failure, advice).needed()],
        Ok(Reached { tcp, rdma }) => {
            let describe = |speed: Speed| format!("{:.0} us, {}/s", speed.round_trip_us, show(speed.bytes_per_second as u64));
            let tcp = match tcp {
                Ok(speed) => Finding::ok(&what, format!("TCP: {}", describe(speed))),
                Err(why) => Finding::missing(&what, format!("TCP: {why}"), advice),
            };
            let rdma = match rdma {
                Ok(speed) => Finding::ok(&what, format!("RDMA: {}", describe(speed))),
                Err(why) => Finding::missing(&what, format!("RDMA: {why}"), "sessions with both of these nodes use TCP"),
            };
            vec![tcp.needed(), rdma]
        }
    }
}

fn probe_pair(arguments: &DoctorArguments, from: &str, to: &str) -> Result<Reached, Failure> {
    let mut key = [0_u8; 32];
    getrandom::fill(&mut key).map_err(|error| Failure::new(format!("cannot get random bytes for a key: {error}")))?;
    let key = serde_json::to_string(&key).map_err(Failure::new)?;
    let mut answering = Remote::start(arguments, to, &["--answer".to_owned()])?;
    answering.write_line(&key)?;
    let port: u16 = decode(to, &answering.read_line()?)?;
    // Uses the host's name without a user name.
    let name = to.rsplit('@').next().unwrap_or(to);
    let mut reaching = Remote::start(arguments, from, &["--reach".to_owned(), format!("{name}:{port}")])?;
    reaching.write_line(&key)?;
    let reached = decode(from, &reaching.output()?)?;
    // The other side exits when its input ends.
    drop(answering.input.take());
    answering.output()?;
    Ok(reached)
}

/// Decodes what a `dayfly doctor` on another host printed.
fn decode<T: DeserializeOwned>(host: &str, text: &str) -> Result<T, Failure> {
    serde_json::from_str(text).map_err(|_| {
        let start: String = text.lines().next().unwrap_or_default().chars().take(SHOWN_CHARS_MAX).collect();
        Failure::new(format!(
            "on {host}: '{start}' is not an answer of this version of 'dayfly doctor'; a start-up file of the shell may have printed it"
        ))
    })
}

/// A `dayfly doctor` on another host.
struct Remote {
    host: String,
    child: Child,
    input: Option<std::process::ChildStdin>,
    output: BufReader<std::process::ChildStdout>,
    /// A thread that collects the remote program's standard error.
    errors: Option<thread::JoinHandle<String>>,
}

impl Remote {
    fn start(arguments: &DoctorArguments, host: &str, more: &[String]) -> Result<Self, Failure> {
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
        let cannot = |error: io::Error| Failure::new(format!("cannot run '{}': {error}", arguments.ssh));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(cannot)?;
        let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let output = BufReader::new(output.ok_or_else(|| Failure::new("the child has no standard output"))?);
        // The thread ends when the pipe is closed.
        let errors = errors.map(|mut errors| {
            thread::spawn(move || {
                let mut text = Vec::new();
                let _ = errors.read_to_end(&mut text);
                String::from_utf8_lossy(&text).into_owned()
            })
        });
        Ok(Self { host: host.to_owned(), child, input, output, errors })
    }

    fn write_line(&mut self, line: &str) -> Result<(), Failure> {
        let Some(input) = &mut self.input else { return Ok(()) };
        input.write_all(format!("{line}\n").as_bytes()).and_then(|()| input.flush()).map_err(|error| self.failure(&error))
    }

    fn read_line(&mut self) -> Result<String, Failure> {
        let mut line = Vec::new();
        match self.output.read_until(b'\n', &mut line) {
            Ok(0) => Err(self.failure(&"it ended without an answer")),
            Ok(_) => Ok(String::from_utf8_lossy(&line).into_owned()),
            Err(error) => Err(self.failure(&error)),
        }
    }

    /// Waits until the remote program ends, and returns its whole output.
    fn output(mut self) -> Result<String, Failure> {
        let mut text = Vec::new();
        self.output.read_to_end(&mut text)?;
        match text.is_empty().then(|| self.child.wait()).transpose()? {
            Some(status) if !status.success() => Err(self.failure(&format_args!("it ended without an answer ({status})"))),
            _ => Ok(String::from_utf8_lossy(&text).into_owned()),
        }
    }

    /// Explains a failure with the last line of the remote program's standard error, or with
    /// `reason` if there is no such line.
    fn failure(&mut self, reason: &dyn std::fmt::Display) -> Failure {
        let _ = self.child.kill();
        let errors = self.errors.take().and_then(|errors| errors.join().ok()).unwrap_or_default();
        let last = errors.lines().rev().find(|line| !line.trim().is_empty());
        Failure::new(format!("on {}: {}", self.host, last.map_or_else(|| reason.to_string(), str::to_owned)))
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        drop(self.input.take());
        // It may have exited on its own.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_nodes_are_paired_with_all_and_many_with_their_neighbors() {
        assert_eq!(pairs(3), [(0, 1), (0, 2), (1, 2)]);
        assert_eq!((pairs(1).len(), pairs(8).len(), pairs(9).len()), (0, 28, 9));
        assert_eq!(pairs(9)[8], (8, 0));
    }
}
