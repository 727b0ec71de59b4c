//! Follows the log of a reader while it grows.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// A line of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// An operation finished, with success or with an error.
    Done { what: String, begin_ms: u64, end_ms: u64, error: Option<String> },
    /// A read returned wrong bytes.
    Wrong { at_ms: u64, what: String },
    /// The reader has read everything that it was told to read.
    Finished,
}

/// Follows one log.
pub(crate) struct Follower {
    file: Option<File>,
    partial: Vec<u8>,
    /// The start time and the name of the current operation.
    pub(crate) under_way: Option<(u64, String)>,
}

impl Follower {
    pub(crate) fn new() -> Self {
        Self { file: None, partial: Vec::new(), under_way: None }
    }

    /// Returns the lines that have been completed since the last call.
    pub(crate) fn read(&mut self, path: &Path) -> Vec<Line> {
        if self.file.is_none() {
            // The reader may not have created the log yet.
            self.file = File::open(path).ok();
        }
        let Some(file) = &mut self.file else { return Vec::new() };
        file.read_to_end(&mut self.partial).unwrap();
        let Some(end) = self.partial.iter().rposition(|&byte| byte == b'\n') else { return Vec::new() };
        let whole: Vec<u8> = self.partial.drain(..=end).collect();
        String::from_utf8_lossy(&whole).lines().filter_map(|line| self.take(line)).collect()
    }

    fn take(&mut self, line: &str) -> Option<Line> {
        let mut words = line.splitn(3, ' ');
        let (kind, at_ms, what) = (words.next()?, words.next()?.parse().ok()?, words.next()?.to_owned());
        match kind {
            "B" => {
                self.under_way = Some((at_ms, what));
                None
            }
            "O" | "E" => {
                let (begin_ms, begun) = self.under_way.take()?;
                let error = (kind == "E").then_some(what);
                Some(Line::Done { what: begun, begin_ms, end_ms: at_ms, error })
            }
            "W" => Some(Line::Wrong { at_ms, what }),
            _ => Some(Line::Finished),
        }
    }
}

#[test]
fn a_line_that_is_written_in_two_parts_is_returned_when_it_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("log");
    let mut follower = Follower::new();
    assert_eq!(follower.read(&path), []);
    std::fs::write(&path, "B 5 read x\nE 9 read x: node 1 is l").unwrap();
    assert_eq!(follower.read(&path), []);
    assert_eq!(follower.under_way, Some((5, "read x".to_owned())));
    let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
    std::io::Write::write_all(&mut file, b"ost\nW 10 y differs\n").unwrap();
    let error = Some("read x: node 1 is lost".to_owned());
    let expected = [
        Line::Done { what: "read x".into(), begin_ms: 5, end_ms: 9, error },
        Line::Wrong { at_ms: 10, what: "y differs".into() },
    ];
    assert_eq!(follower.read(&path), expected);
    assert_eq!(follower.under_way, None);
}
