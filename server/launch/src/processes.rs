//! The processes that start servers: one command of the manager for all nodes, or one per node,
//! arranged in a tree.

use std::cmp::Ordering;
use std::env;
use std::future;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use dayfly_meta::limits::TREE_WIDTH;
use nix::sys::signal::Signal;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep_until};

use crate::error::LaunchError;
use crate::invitation::Invitation;
use crate::launchers::{Input, Launcher, Start, fill};
use crate::units::shortened;

/// Maximum number of lines of output that wait to be shown.
const LINES_WAITING_MAX: usize = 256;
/// The longest line; longer ones are cut.
const LINE_LEN_MAX: usize = 4096;
/// How many of a failed process's last lines are used to explain the failure.
const LAST_LINES: usize = 5;
/// Maximum length of an explanation, in characters.
pub(crate) const REASON_LEN_MAX: usize = 500;
/// Maximum number of a process's lines that are passed on in each [`ALLOWANCE_INTERVAL`].
const LINES_ALLOWED: usize = 100;
/// How often a process may write [`LINES_ALLOWED`] more lines.
const ALLOWANCE_INTERVAL: Duration = Duration::from_secs(60);
/// How long to wait for the rest of the output after a process has exited. Its children may hold
/// the pipe open.
const OUTPUT_TIMEOUT: Duration = Duration::from_millis(200);
/// The variable that loads the preload library into a program.
const PRELOAD_VARIABLE: &str = "LD_PRELOAD";

/// Running processes that start servers, and their output. Dropping this value kills the processes.
pub(crate) struct LauncherProcesses {
    running: JoinSet<Exit>,
    lines: mpsc::Receiver<String>,
    lines_sender: mpsc::Sender<String>,
    /// Every process ever started, with the hosts whose servers it starts.
    started: Vec<(Vec<String>, AbortHandle)>,
}

/// Something that a process did.
pub(crate) enum Event {
    /// The process wrote a line.
    Line(String),
    /// The process has exited.
    Exit(Exit),
}

/// The end of a process.
pub(crate) struct Exit {
    /// The number of the process: the first one has 1.
    pub(crate) number: usize,
    /// The hosts whose servers the process was to start. In a tree, it may have started only some of
    /// them.
    pub(crate) hosts: Vec<String>,
    /// The process's last lines of output, or its exit status if it wrote nothing; and what to do.
    pub(crate) reason: String,
    /// The signal that has ended the server. `None` if no signal has, or if the process is not the server itself.
    pub(crate) signal: Option<Signal>,
}

/// Quotes a word for a POSIX shell.
fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

impl LauncherProcesses {
    pub(crate) fn new() -> Self {
        let (lines_sender, lines) = mpsc::channel(LINES_WAITING_MAX);
        Self { running: JoinSet::new(), lines, lines_sender, started: Vec::new() }
    }

    /// Runs the commands that start servers on `hosts`. `key_file` holds the invitation if standard
    /// input does not reach all servers.
    pub(crate) fn start(
        &mut self,
        launcher: &Launcher,
        hosts: &[String],
        invitation: &Invitation,
        key_file: Option<&Path>,
    ) -> Result<(), LaunchError> {
        let program = env::current_exe().map_err(LaunchError::io("cannot find the path of this program"))?;
        let program = program.into_os_string().into_string();
        let program = program.map_err(|path| LaunchError::ProgramPath(path.into()))?;
        let mut serve = vec![program, "serve".to_owned()];
        if let Some(path) = key_file {
            serve.extend(["--key-file".to_owned(), path.to_string_lossy().into_owned()]);
        }
        match launcher.start {
            Start::Once(words) => {
                let words = [fill(words, hosts, &invitation.launcher_args), serve].concat();
                self.spawn(launcher, words, hosts.to_vec(), invitation.clone())
            }
            Start::EachByShell(words) => {
                let serve: Vec<String> = serve.iter().map(|word| quote(word)).collect();
                self.start_each(launcher, words, &serve, hosts, TREE_WIDTH, invitation)
            }
            // On one machine a tree gains nothing.
            Start::Local => self.start_each(launcher, &[], &serve, hosts, hosts.len(), invitation),
            Start::Manual => Ok(()),
        }
    }

    /// Divides the hosts into at most `width` groups, and runs one command for each group. The
    /// first server of a group starts the other servers of that group.
    fn start_each(
        &mut self,
        launcher: &Launcher,
        words: &[&str],
        serve: &[String],
        hosts: &[String],
        width: usize,
        invitation: &Invitation,
    ) -> Result<(), LaunchError> {
        for group in hosts.chunks(hosts.len().div_ceil(width.max(1)).max(1)) {
            let words = [&fill(words, &group[..1], &invitation.launcher_args)[..], serve].concat();
            let invitation = Invitation { host: Some(group[0].clone()), below: group[1..].to_vec(), ..invitation.clone() };
            self.spawn(launcher, words, group.to_vec(), invitation)?;
        }
        Ok(())
    }

    fn spawn(
        &mut self,
        launcher: &Launcher,
        words: Vec<String>,
        hosts: Vec<String>,
        invitation: Invitation,
    ) -> Result<(), LaunchError> {
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        for name in launcher.removed_variables {
            command.env_remove(name);
        }
        // This process may run within another session, whose namespace a server must not see.
        command.env_remove(PRELOAD_VARIABLE);
        // The servers belong to the session, so the shell that started this process must not signal
        // them with its jobs.
        command.process_group(0).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if launcher.is_local() {
            // A server does not need the working directory, and would keep its file system busy.
            command.current_dir("/");
        }
        let child = command.spawn().map_err(|source| {
            let way_out = launcher.advice;
            LaunchError::Command { command: words[0].clone(), source, way_out }
        })?;
        let line = if launcher.input == Input::Standard { Some(invitation.to_line()?) } else { None };
        let program = words[0].rsplit('/').next().unwrap_or_default().to_owned();
        let lines = self.lines_sender.clone();
        let all_hosts = hosts.clone();
        let (advice, is_server) = (launcher.advice, launcher.is_local());
        let number = self.started.len() + 1;
        let process = self.running.spawn(async move {
            let (reason, signal) = supervise(child, line.as_ref().map(|line| &line[..]), lines, &program, advice).await;
            Exit { number, hosts, reason, signal: signal.filter(|_| is_server) }
        });
        self.started.push((all_hosts, process));
        Ok(())
    }

    /// Returns how many processes have been started, including those that have ended.
    pub(crate) fn started_count(&self) -> usize {
        self.started.len()
    }

    /// Returns the next event. Waits forever if there will be none.
    pub(crate) async fn next(&mut self) -> Event {
        loop {
            tokio::select! {
                Some(line) = self.lines.recv() => return Event::Line(line),
                Some(exit) = self.running.join_next() => {
                    if let Ok(exit) = exit {
                        return Event::Exit(exit);
                    }
                }
                else => return future::pending().await,
            }
        }
    }

    /// Kills the processes whose hosts have all been given up on.
    pub(crate) fn kill_if_all(&mut self, is_given_up: impl Fn(&String) -> bool) {
        self.started.iter().filter(|(hosts, _)| hosts.iter().all(&is_given_up)).for_each(|(_, process)| process.abort());
    }

    /// Returns the hosts whose servers the processes that still run have started.
    pub(crate) fn running_on(&self) -> Vec<String> {
        let running = self.started.iter().filter(|(_, process)| !process.is_finished());
        running.flat_map(|(hosts, _)| hosts.iter().cloned()).collect()
    }

    /// Waits until all processes have exited.
    pub(crate) async fn all_exited(&mut self) {
        while self.running.join_next().await.is_some() {}
    }

    /// Returns the next line of output. Waits forever if there will be none.
    pub(crate) async fn line(&mut self) -> String {
        match self.lines.recv().await {
            Some(line) => line,
            None => future::pending().await,
        }
    }
}

/// Writes the invitation to a process, passes its output on, and returns why it exited, and the signal that has ended it.
async fn supervise(
    mut child: Child,
    line: Option<&[u8]>,
    lines: mpsc::Sender<String>,
    program: &str,
    advice: &str,
) -> (String, Option<Signal>) {
    let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let outputs = [
        output.map(|output| Box::new(BufReader::new(output)) as Box<dyn AsyncBufRead + Send + Unpin>),
        errors.map(|errors| Box::new(BufReader::new(errors)) as _),
    ];
    let mut readers = JoinSet::new();
    for output in outputs.into_iter().flatten() {
        readers.spawn(forward_lines(output, lines.clone(), program.to_owned()));
    }
    if let (Some(mut input), Some(line)) = (input, line) {
        // If the process exits at once, its output says why. Closing its input afterward does not
        // end the process.
        let _ = input.write_all(line).await;
    }
    let status = child.wait().await;
    let mut last = Vec::new();
    let until = Instant::now() + OUTPUT_TIMEOUT;
    while let Some(Ok(lines)) = tokio::select! { read = readers.join_next() => read, () = sleep_until(until) => None } {
        last.extend(lines);
    }
    let signal = status.as_ref().ok().and_then(|status| Signal::try_from(status.signal()?).ok());
    (exit_reason(program, status, &last, advice), signal)
}

/// Explains why a process exited: its last lines, or its status if there are none. A message from
/// our own server already says what to do.
fn exit_reason(program: &str, status: io::Result<ExitStatus>, last: &[String], advice: &str) -> String {
    if last.is_empty() {
        let status = status.map_or_else(|error| error.to_string(), |status| status.to_string());
        return format!("'{program}' ended without a message ({status}); {advice}");
    }
    let said = shortened(&last.join("; "), REASON_LEN_MAX);
    if last.iter().any(|line| line.contains("dayfly: ")) { said } else { format!("{said}; {advice}") }
}

/// Counts the lines that a process has written in the current interval. Those beyond the limit are
/// dropped, so that a process that writes without end floods neither the terminal nor the log.
struct Allowance {
    used: usize,
    renewal: Instant,
}

/// What happens to a line under an [`Allowance`].
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Pass,
    /// Say that lines are dropped from here on.
    DropFirst,
    Drop,
}

impl Allowance {
    fn new(now: Instant) -> Self {
        Self { used: 0, renewal: now + ALLOWANCE_INTERVAL }
    }

    fn spend(&mut self, now: Instant) -> Verdict {
        if now >= self.renewal {
            *self = Self::new(now);
        }
        self.used = self.used.saturating_add(1);
        match self.used.cmp(&(LINES_ALLOWED + 1)) {
            Ordering::Less => Verdict::Pass,
            Ordering::Equal => Verdict::DropFirst,
            Ordering::Greater => Verdict::Drop,
        }
    }
}

/// Passes lines on until the end of the output, and returns the last few.
async fn forward_lines(
    mut output: Box<dyn AsyncBufRead + Send + Unpin>,
    lines: mpsc::Sender<String>,
    program: String,
) -> Vec<String> {
    let mut last: Vec<String> = Vec::new();
    let mut allowance = Allowance::new(Instant::now());
    while let Some(line) = next_line(&mut output).await {
        if last.len() == LAST_LINES {
            last.remove(0);
        }
        last.push(line.clone());
        let line = match allowance.spend(Instant::now()) {
            Verdict::Pass => line,
            Verdict::DropFirst => format!(
                "'{program}' writes more than {LINES_ALLOWED} lines in {} s; the others are not shown",
                ALLOWANCE_INTERVAL.as_secs()
            ),
            Verdict::Drop => continue,
        };
        // Even if nobody listens anymore, the output must be drained, or the process would block.
        let _ = lines.send(line).await;
    }
    last
}

/// Returns the next line that is not blank, without its end and cut to [`LINE_LEN_MAX`].
async fn next_line(output: &mut (dyn AsyncBufRead + Send + Unpin)) -> Option<String> {
    let mut line = Vec::new();
    loop {
        let bytes = output.fill_buf().await.ok()?;
        if bytes.is_empty() && line.is_empty() {
            return None;
        }
        let end = bytes.iter().position(|&byte| byte == b'\n');
        let is_last = end.is_some() || bytes.is_empty();
        let content = &bytes[..end.unwrap_or(bytes.len())];
        line.extend_from_slice(&content[..content.len().min(LINE_LEN_MAX - line.len())]);
        let used = content.len() + usize::from(end.is_some());
        output.consume(used);
        if is_last && !line.iter().all(u8::is_ascii_whitespace) {
            return Some(String::from_utf8_lossy(&line).trim_end().to_owned());
        }
        if is_last {
            line.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_cut_and_words_are_quoted() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let text = format!("one\r\n\n{}\nlast", "x".repeat(5000));
            let mut output = BufReader::with_capacity(7, text.as_bytes());
            let mut lines = Vec::new();
            while let Some(line) = next_line(&mut output).await {
                lines.push(line);
            }
            assert_eq!(lines, ["one".to_owned(), "x".repeat(4096), "last".to_owned()]);
        });
        assert_eq!(quote("a b'c"), r"'a b'\''c'");
    }

    #[test]
    fn a_process_that_writes_without_end_is_cut_off_and_may_write_again_later() {
        let start = Instant::now();
        let mut allowance = Allowance::new(start);
        for _ in 0..2 {
            let verdicts: Vec<Verdict> = (0..1000).map(|_| allowance.spend(start)).collect();
            assert!(verdicts[..LINES_ALLOWED].iter().all(|verdict| *verdict == Verdict::Pass));
            assert_eq!(verdicts[LINES_ALLOWED], Verdict::DropFirst);
            assert!(verdicts[LINES_ALLOWED + 1..].iter().all(|verdict| *verdict == Verdict::Drop));
            allowance.renewal = start;
        }
    }

    #[test]
    fn the_reason_of_an_exit_says_what_to_do() {
        let reason = |last: &[&str]| {
            let last: Vec<String> = last.iter().map(|line| (*line).to_owned()).collect();
            exit_reason("ssh", Ok(ExitStatus::default()), &last, "try it")
        };
        assert_eq!(reason(&[]), "'ssh' ended without a message (exit status: 0); try it");
        assert_eq!(reason(&["no route", "to host"]), "no route; to host; try it");
        assert_eq!(reason(&["dayfly: another version; use the same"]), "dayfly: another version; use the same");
        assert!(reason(&[&"x".repeat(4096)]).len() < 600);
    }
}
