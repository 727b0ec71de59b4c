//! A reader reads the datasets that it sees and checks every byte. It is a separate process, so that it can be stopped and killed.
//! It logs the beginning and the end of each operation, so that the run notices an operation that hangs.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dayfly_client::locate::SessionFolder;
use dayfly_client::{Delivery, OnMissing, Samples, Session, View};
use dayfly_meta::id::NodeId;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::chaos::data::{Contents, Version};
use crate::chaos::schedule::Interface;

/// The variable that makes the test binary a reader.
pub(crate) const VARIABLE: &str = "DAYFLY_CHAOS_READER";
/// The pause between two operations, which limits the load on the machine.
const PAUSE: Duration = Duration::from_millis(4);

/// A reader's instructions, which it gets as JSON in [`VARIABLE`].
#[derive(Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Task {
    pub(crate) seed: u64,
    pub(crate) reader: usize,
    /// How many earlier processes had the number `reader`. A killed reader is replaced by its next incarnation.
    pub(crate) incarnation: u32,
    pub(crate) node: u16,
    /// `None` makes the reader read every file of every dataset once, and exit.
    pub(crate) interface: Option<Interface>,
    pub(crate) session: String,
    pub(crate) folder: PathBuf,
    pub(crate) log: PathBuf,
    /// The reader exits when this file exists.
    pub(crate) stop: PathBuf,
}

pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

pub(crate) fn main(task: &str) {
    let task: Task = serde_json::from_str(task).unwrap();
    let log = OpenOptions::new().create(true).append(true).open(&task.log).unwrap();
    let contents = Contents::new(task.seed);
    let random = StdRng::seed_from_u64(task.seed << 8 ^ (task.reader as u64) << 4 ^ u64::from(task.incarnation));
    Reader { task, log, contents, random, epoch: 0 }.run();
}

struct Reader {
    task: Task,
    log: File,
    contents: Contents,
    random: StdRng,
    epoch: u64,
}

/// An operation failed and its error was logged. The reader continues with another operation.
struct Logged;

impl Reader {
    fn run(&mut self) {
        let location = SessionFolder { session: self.task.session.parse().unwrap(), folder: self.task.folder.clone() };
        let node = NodeId(self.task.node);
        while !self.task.stop.exists() {
            let attached = self
                .operation("attach", || Session::attach_to(&location, node).map(View::new).map_err(|error| error.to_string()));
            let Ok(view) = attached else {
                std::thread::sleep(20 * PAUSE);
                continue;
            };
            let Some(interface) = self.task.interface else {
                self.read_all(&view);
                return;
            };
            // One attachment is used for many operations, even after errors, because an attachment must recover from errors.
            for _ in 0..40 {
                if self.task.stop.exists() || self.read(&view, interface).is_err() && view.session().is_gone() {
                    break;
                }
                std::thread::sleep(PAUSE);
            }
        }
    }

    fn log(&mut self, kind: char, words: &str) {
        let line = format!("{kind} {} {}\n", now_ms(), words.replace('\n', "\\n"));
        self.log.write_all(line.as_bytes()).unwrap();
    }

    /// Runs an operation, and logs its beginning, its end and its error.
    fn operation<T>(&mut self, what: &str, operate: impl FnOnce() -> Result<T, String>) -> Result<T, Logged> {
        self.log('B', what);
        match operate() {
            Ok(result) => {
                self.log('O', what);
                Ok(result)
            }
            Err(error) => {
                self.log('E', &format!("{what}: {error}"));
                Err(Logged)
            }
        }
    }

    /// Lists the versions that are visible on this node.
    fn visible(&mut self, view: &View) -> Result<Vec<Version>, Logged> {
        self.operation("list", || visible(view))
    }

    fn read(&mut self, view: &View, interface: Interface) -> Result<(), Logged> {
        let versions = self.visible(view)?;
        if versions.is_empty() {
            return Ok(());
        }
        let version = versions[self.random.random_range(0..versions.len())];
        match interface {
            Interface::Plain => self.read_plain(view, version),
            Interface::Batch => self.read_batch(view, version),
            Interface::Order => self.read_order(view, version),
            Interface::Preload => self.read_preload(version),
        }
    }

    /// Chooses a file. Most files are small, so it usually chooses a small one.
    fn any_file(&mut self, version: Version) -> usize {
        let count = self.contents.get(version).lens.len();
        self.random.random_range(0..count)
    }

    fn check(&mut self, version: Version, number: usize, offset: usize, bytes: &[u8], expected: usize) {
        let content = self.contents.get(version);
        let found = match content.difference(number, offset, bytes) {
            Some(at) => format!("differs at {}; {} bytes were read from {offset} on", at + offset, bytes.len()),
            None if bytes.len() != expected => format!("{} bytes instead of {expected} from {offset} on", bytes.len()),
            None => return,
        };
        self.log('W', &format!("{}: {found}", version.path(number)));
    }

    fn read_plain(&mut self, view: &View, version: Version) -> Result<(), Logged> {
        let number = self.any_file(version);
        let (path, len) = (version.path(number), self.contents.get(version).lens[number]);
        let file = self.operation(&format!("open {path}"), || view.open(path.as_bytes()).map_err(|error| error.to_string()))?;
        for _ in 0..4 {
            let offset = if self.random.random_ratio(1, 3) { 0 } else { self.random.random_range(0..=len) };
            let wanted = self.random.random_range(1..=6 << 20);
            let mut buffer = vec![0xAA; wanted.min(len - offset + 10)];
            let got = self.operation(&format!("read {path} at {offset}"), || {
                view.read_at(&file, offset as u64, &mut buffer).map_err(|error| error.to_string())
            })?;
            let expected = buffer.len().min(len - offset);
            self.check(version, number, offset, &buffer[..got], expected);
        }
        Ok(())
    }

    fn read_batch(&mut self, view: &View, version: Version) -> Result<(), Logged> {
        let numbers: Vec<usize> = (0..self.random.random_range(4..48)).map(|_| self.any_file(version)).collect();
        let paths: Vec<String> = numbers.iter().map(|&number| version.path(number)).collect();
        let paths: Vec<&[u8]> = paths.iter().map(|path| path.as_bytes()).collect();
        let all = version.path_of_all();
        let delivery = if self.random.random() { Delivery::InOrder } else { Delivery::AsAvailable };
        let begin = || view.read_many(&paths, delivery, OnMissing::Report).map_err(|error| error.to_string());
        let mut batch = self.operation(&format!("begin a batch of {all}"), begin)?;
        loop {
            let next = self.operation(&format!("next of a batch of {all}"), || match batch.next() {
                None => Ok(None),
                Some(Ok(delivered)) => match delivered.bytes {
                    Ok(_) => Ok(Some(delivered.index)),
                    Err(error) => Err(error.to_string()),
                },
                Some(Err(error)) => Err(format!("the batch: {error}")),
            });
            match next {
                Ok(None) => break,
                Ok(Some(_)) => {}
                // The batch continues after a sample that could not be read. After an error of the whole batch, `next` returns `None`.
                Err(Logged) => continue,
            }
        }
        // Check all delivered samples through their views. The result counts only if the batch is still good afterward.
        let mut wrong = Vec::new();
        for (index, &number) in numbers.iter().enumerate() {
            let content = self.contents.get(version);
            if let Some(bytes) = batch.get(index)
                && (bytes.len() != content.lens[number] || content.difference(number, 0, bytes).is_some())
            {
                wrong.push((number, bytes.to_vec()));
            }
        }
        if batch.is_good() {
            drop(batch);
            for (number, bytes) in wrong {
                let expected = self.contents.get(version).lens[number];
                self.check(version, number, 0, &bytes, expected);
            }
        }
        Ok(())
    }

    fn read_order(&mut self, view: &View, version: Version) -> Result<(), Logged> {
        let path = version.path(0);
        let dataset =
            self.operation(&format!("find {path}"), || view.dataset_of(path.as_bytes()).map_err(|error| error.to_string()))?;
        let samples = Samples::of(dataset.catalog());
        self.epoch += 1;
        let order: Vec<_> = samples.epoch(self.task.seed, self.epoch).collect();
        let submit = || view.session().submit(&dataset, order.iter().copied()).map_err(|error| error.to_string());
        let _order = self.operation(&format!("submit an order of {path}"), submit)?;
        for &sample in &order {
            let name = samples.entry(sample).and_then(|entry| dataset.catalog().entry(entry)).map(|entry| entry.name.to_vec());
            let Some(number) = name.and_then(|name| String::from_utf8(name).ok()?.parse::<usize>().ok()) else {
                self.log('W', &format!("sample {sample:?} has no name that is a number"));
                continue;
            };
            let len = self.contents.get(version).lens.get(number).copied().unwrap_or(0);
            let mut buffer = vec![0xAA; len + 10];
            let got = self.operation(&format!("read {path}, {sample:?} of its order"), || {
                view.session().read_at(&dataset, sample, 0, &mut buffer, &mut None).map_err(|error| error.to_string())
            })?;
            self.check(version, number, 0, &buffer[..got], len);
        }
        self.operation(&format!("epoch {} of {path}", self.epoch), || Ok(()))
    }

    fn read_preload(&mut self, version: Version) -> Result<(), Logged> {
        let number = self.any_file(version);
        let path = version.path(number);
        let mut command = Command::new(env!("CARGO_BIN_EXE_dayfly"));
        command.args(["exec", "--node", &self.task.node.to_string(), "--", "cat", &path]);
        command.env("DAYFLY_SESSION", &self.task.session).env("LC_ALL", "C").stdin(Stdio::null());
        let bytes = self.operation(&format!("cat {path}"), || {
            let output = command.output().map_err(|error| error.to_string())?;
            if output.status.success() {
                Ok(output.stdout)
            } else {
                Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim_end()))
            }
        })?;
        let expected = self.contents.get(version).lens[number];
        self.check(version, number, 0, &bytes, expected);
        Ok(())
    }

    fn read_all(&mut self, view: &View) {
        let Ok(versions) = self.visible(view) else { return };
        for version in versions {
            for number in 0..self.contents.get(version).lens.len() {
                let (path, len) = (version.path(number), self.contents.get(version).lens[number]);
                let mut buffer = vec![0xAA; len + 10];
                let got = self.operation(&format!("read {path}"), || {
                    let file = view.open(path.as_bytes()).map_err(|error| error.to_string())?;
                    view.read_at(&file, 0, &mut buffer).map_err(|error| error.to_string())
                });
                if let Ok(got) = got {
                    self.check(version, number, 0, &buffer[..got], len);
                }
            }
        }
        self.log('F', "");
    }
}

/// Lists the versions that are visible through `view`.
pub(crate) fn visible(view: &View) -> Result<Vec<Version>, String> {
    let names = |path: &str| -> Result<Vec<String>, String> {
        let directory = view.open_directory(path.as_bytes()).map_err(|error| format!("{path}: {error}"))?;
        Ok(directory.entries(0).map(|entry| String::from_utf8_lossy(entry.name).into_owned()).collect())
    };
    let mut found = Vec::new();
    for target in names("/dayfly")? {
        // The dataset may be replaced between the two listings; then the second one returns the new version.
        for inner in names(&format!("/dayfly/{target}"))? {
            let number = |name: &str, kind: char| name.strip_prefix(kind)?.parse::<u32>().ok();
            match (number(&target, 't'), number(&inner, 'g')) {
                (Some(tag), Some(generation)) => found.push(Version { tag: tag as u8, generation }),
                _ => return Err(format!("an unknown name: {target}/{inner}")),
            }
        }
    }
    Ok(found)
}
