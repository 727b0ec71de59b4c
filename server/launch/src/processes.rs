//! The processes that start servers: one of the manager's for all, or one a node, those in a tree.

use std::env;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use dayfly_meta::limits::TREE_WIDTH;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep_until};

use super::invitation::Invitation;
use super::launchers::{Input, Launcher, Start, fill};
use crate::failure::Failure;

/// Lines of output that wait to be shown.
const LINES_WAITING_MAX: usize = 256;
/// A longer line is cut.
const LINE_LEN_MAX: usize = 4096;
/// Last words of a process that are kept.
const LAST_LINES: usize = 5;

/// Processes that run, and what they say. Dropped, they are killed.
pub(crate) struct Processes {
    running: JoinSet<Ended>,
    lines: mpsc::Receiver<String>,
    sender: mpsc::Sender<String>,
    /// Whom each was to start.
    started: Vec<(Vec<String>, AbortHandle)>,
}

/// What one of them does.
pub(super) enum Event {
    /// It says this.
    Line(String),
    /// It has ended.
    Ended(Ended),
}

/// A process that has ended.
pub(super) struct Ended {
    /// Whose servers it started; of some, it may be none.
    pub(super) hosts: Vec<String>,
    /// How it ended, with its last words.
    pub(super) how: String,
}

/// As shells take it for one word.
fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

impl Processes {
    /// Starts what starts servers on `hosts`. `key_file` has the invitation where standard input does not reach all.
    pub(crate) fn start(
        &mut self,
        launcher: &Launcher,
        hosts: &[String],
        invitation: &Invitation,
        key_file: Option<&Path>,
    ) -> Result<(), Failure> {
        let program = env::current_exe()?.into_os_string().into_string();
        let program =
            program.map_err(|path| Failure::new(format!("the path '{}' of this program is not UTF-8", path.display())))?;
        let mut serve = vec![program, "serve".to_owned()];
        if let Some(path) = key_file {
            serve.extend(["--key-file".to_owned(), path.to_string_lossy().into_owned()]);
        }
        match launcher.start {
            Start::Once(words) => {
                let words = [fill(words, hosts, &invitation.launcher_args), serve].concat();
                self.spawn(launcher, words, hosts.to_vec(), invitation.clone())?;
            }
            Start::Each(words) | Start::EachByShell(words) => {
                let is_by_shell = matches!(launcher.start, Start::EachByShell(_));
                let serve: Vec<String> = serve.iter().map(|word| if is_by_shell { quote(word) } else { word.clone() }).collect();
                // On this machine a tree gains nothing.
                let width = if words.is_empty() { hosts.len() } else { TREE_WIDTH };
                for group in hosts.chunks(hosts.len().div_ceil(width).max(1)) {
                    let words = [fill(words, &group[..1], &invitation.launcher_args), serve.clone()].concat();
                    let invitation =
                        Invitation { host: Some(group[0].clone()), below: group[1..].to_vec(), ..invitation.clone() };
                    self.spawn(launcher, words, group.to_vec(), invitation)?;
                }
            }
            Start::ByHand => {}
        }
        Ok(())
    }

    fn spawn(
        &mut self,
        launcher: &Launcher,
        words: Vec<String>,
        hosts: Vec<String>,
        invitation: Invitation,
    ) -> Result<(), Failure> {
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        for name in launcher.without {
            command.env_remove(name);
        }
        // Where this runs within another session: a server sees that one's namespace no more than it needs to.
        command.env_remove(crate::preload::VARIABLE);
        // The servers are the session's, not of whatever job control started them.
        command.process_group(0).kill_on_drop(true);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if words.len() == 2 {
            // Our own; no job's folder stays busy.
            command.current_dir("/");
        }
        let cannot = |error| Failure::new(format!("cannot run '{}': {error}", words[0]));
        let mut child = command.spawn().map_err(cannot)?;
        let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let line = if launcher.input == Input::Standard { Some(invitation.to_line()?) } else { None };
        let (program, lines) = (words[0].rsplit('/').next().unwrap_or_default().to_owned(), self.sender.clone());
        let for_whom = hosts.clone();
        let started = self.running.spawn(async move {
            let telling = async move {
                if let (Some(mut input), Some(line)) = (input, line) {
                    // One that ends at once says why by itself. It hears nothing more: the end of its input ends nothing.
                    let _ = input.write_all(&line).await;
                }
            };
            let outputs = [
                output.map(|output| Box::new(BufReader::new(output)) as Box<dyn AsyncBufRead + Send + Unpin>),
                errors.map(|errors| Box::new(BufReader::new(errors)) as _),
            ];
            let mut reading = JoinSet::new();
            outputs.into_iter().flatten().for_each(|output| drop(reading.spawn(read(output, lines.clone()))));
            telling.await;
            let status = child.wait().await;
            // What it started may hold its output open.
            let mut last = Vec::new();
            let until = Instant::now() + Duration::from_millis(200);
            while let Some(Ok(lines)) = tokio::select! { read = reading.join_next() => read, () = sleep_until(until) => None } {
                last.extend(lines);
            }
            let status = status.map_or_else(|error| error.to_string(), |status| status.to_string());
            let how = if last.is_empty() { format!("{program}: {status}") } else { last.join("; ") };
            Ended { hosts, how }
        });
        self.started.push((for_whom, started));
        Ok(())
    }

    /// None.
    pub(crate) fn none() -> Self {
        let (sender, lines) = mpsc::channel(LINES_WAITING_MAX);
        Self { running: JoinSet::new(), lines, sender, started: Vec::new() }
    }

    /// What happens next; waits for ever if nothing will.
    pub(super) async fn next(&mut self) -> Event {
        loop {
            tokio::select! {
                Some(line) = self.lines.recv() => return Event::Line(line),
                Some(ended) = self.running.join_next() => {
                    if let Ok(ended) = ended {
                        return Event::Ended(ended);
                    }
                }
                else => return std::future::pending().await,
            }
        }
    }

    /// Kills those that started none but such hosts.
    pub(super) fn give_up(&mut self, is_given_up: impl Fn(&String) -> bool) {
        self.started.iter().filter(|(hosts, _)| hosts.iter().all(&is_given_up)).for_each(|(_, process)| process.abort());
    }

    /// Waits until all have ended.
    pub(crate) async fn all_ended(&mut self) {
        while self.running.join_next().await.is_some() {}
    }

    /// The next line that one of them says; waits for ever if none will.
    pub(crate) async fn line(&mut self) -> String {
        match self.lines.recv().await {
            Some(line) => line,
            None => std::future::pending().await,
        }
    }
}

/// Passes lines on to the end; the last few.
async fn read(mut output: Box<dyn AsyncBufRead + Send + Unpin>, lines: mpsc::Sender<String>) -> Vec<String> {
    let mut last: Vec<String> = Vec::new();
    while let Some(line) = next_line(&mut output).await {
        if last.len() == LAST_LINES {
            last.remove(0);
        }
        last.push(line.clone());
        // Nobody listens any more: then it is only to be taken in.
        let _ = lines.send(line).await;
    }
    last
}

/// The next line that is not empty, without its end; of a long one the beginning.
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
    fn lines_are_cut_and_words_are_quoted() {
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
}
