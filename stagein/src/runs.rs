//! Runs: what workers found, sorted by path, in nameless files; and their merge.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::mem::take;
use std::os::unix::fs::FileExt;

use dayfly_meta::catalog::Member;
use dayfly_meta::catalog::member::{read_member, write_member};

/// Collects members and writes them out as a sorted run whenever enough have come together.
pub struct RunWriter {
    scratch: Box<dyn Fn() -> io::Result<File> + Send>,
    len_max: usize,
    pending: Vec<Member>,
    pending_len: usize,
    runs: Vec<(File, u64)>,
}

impl RunWriter {
    /// `scratch` gives nameless files; in memory there are at most `len_max` bytes of members.
    pub fn new(scratch: Box<dyn Fn() -> io::Result<File> + Send>, len_max: usize) -> Self {
        Self { scratch, len_max, pending: Vec::new(), pending_len: 0, runs: Vec::new() }
    }

    /// Bytes of members that may be in memory.
    pub(crate) fn len_max(&self) -> usize {
        self.len_max
    }

    /// A nameless file on the data dir.
    pub(crate) fn scratch(&self) -> io::Result<File> {
        (self.scratch)()
    }

    /// Takes a member.
    pub fn push(&mut self, member: Member) -> io::Result<()> {
        self.pending_len += member.memory_len();
        self.pending.push(member);
        if self.pending_len >= self.len_max { self.spill() } else { Ok(()) }
    }

    /// Calls `see` for every member so far, in no order.
    pub(crate) fn each(&self, see: &mut dyn FnMut(&Member)) -> io::Result<()> {
        self.pending.iter().for_each(&mut *see);
        for (file, len) in &self.runs {
            let mut run = BufReader::new(ReadAt { file, at: 0, len: *len });
            while let Some(member) = read_member(&mut run)? {
                see(&member);
            }
        }
        Ok(())
    }

    /// All runs, with their lengths in bytes.
    pub fn finish(mut self) -> io::Result<Vec<(File, u64)>> {
        self.spill()?;
        Ok(self.runs)
    }

    fn spill(&mut self) -> io::Result<()> {
        let mut members = take(&mut self.pending);
        self.pending_len = 0;
        if members.is_empty() {
            return Ok(());
        }
        members.sort_unstable_by(Member::run_order);
        let mut run = BufWriter::new((self.scratch)()?);
        members.iter().try_for_each(|member| write_member(&mut run, member))?;
        run.flush()?;
        let mut file = run.into_inner().map_err(io::IntoInnerError::into_error)?;
        let len = file.stream_position()?;
        self.runs.push((file, len));
        Ok(())
    }
}

/// Reads a file without moving where it is written.
struct ReadAt<'a> {
    file: &'a File,
    at: u64,
    len: u64,
}

impl Read for ReadAt<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let room = (self.len - self.at).min(out.len() as u64) as usize;
        let count = self.file.read_at(&mut out[..room], self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

/// Merges sorted runs into one stream in run order.
pub struct Merge<R> {
    runs: Vec<R>,
    heads: BinaryHeap<Reverse<Head>>,
    failure: Option<io::Error>,
}

struct Head {
    member: Member,
    run: usize,
}

impl<R: Read> Merge<R> {
    /// Reads the first member of each run.
    pub fn new(runs: Vec<R>) -> Self {
        let mut merge = Self { heads: BinaryHeap::with_capacity(runs.len()), runs, failure: None };
        (0..merge.runs.len()).for_each(|run| merge.advance(run));
        merge
    }

    fn advance(&mut self, run: usize) {
        match read_member(&mut self.runs[run]) {
            Ok(Some(member)) => self.heads.push(Reverse(Head { member, run })),
            Ok(None) => {}
            Err(error) => self.failure = Some(error),
        }
    }
}

impl<R: Read> Iterator for Merge<R> {
    type Item = io::Result<Member>;

    fn next(&mut self) -> Option<io::Result<Member>> {
        // A run that cannot be read ends everything: without it the merge would be of something else.
        if let Some(error) = self.failure.take() {
            self.heads.clear();
            return Some(Err(error));
        }
        let Reverse(Head { member, run }) = self.heads.pop()?;
        self.advance(run);
        Some(Ok(member))
    }
}

impl Ord for Head {
    fn cmp(&self, other: &Self) -> Ordering {
        self.member.run_order(&other.member)
    }
}

impl PartialOrd for Head {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Head {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Head {}

#[cfg(test)]
mod tests {
    use dayfly_meta::catalog::{MemberKey, MemberKind};

    use super::*;

    fn member(number: u64) -> Member {
        let path = format!("{}/{}", number % 7, number % 31).into_bytes();
        let key = MemberKey { source: 0, offset: number };
        Member { path, key, ticket: 0, mode: 0, mtime_s: 0, mtime_ns: 0, kind: MemberKind::Directory }
    }

    #[test]
    fn merged_runs_are_in_order_and_complete() {
        let runs = (0..4_u64).map(|run| {
            let mut writer = RunWriter::new(Box::new(tempfile::tempfile), 1 << 20);
            (0..500).filter(|number| number % 4 == run).for_each(|number| writer.push(member(number)).unwrap());
            let mut runs = writer.finish().unwrap();
            let (mut file, len) = runs.remove(0);
            let mut again = RunWriter::new(Box::new(tempfile::tempfile), 1 << 20);
            again.runs.push((file.try_clone().unwrap(), len));
            again.push(member(9)).unwrap();
            let mut seen = 0;
            again.each(&mut |_| seen += 1).unwrap();
            assert_eq!(seen, 126);
            file.rewind().unwrap();
            assert_eq!(file.metadata().unwrap().len(), len);
            file
        });
        let merged: Vec<Member> = Merge::new(runs.collect()).map(Result::unwrap).collect();
        assert_eq!(merged.len(), 500);
        assert!(merged.is_sorted_by(|left, right| left.run_order(right).is_lt()));
    }

    #[test]
    fn a_broken_run_is_an_error() {
        let mut run = Vec::new();
        write_member(&mut run, &member(1)).unwrap();
        write_member(&mut run, &member(1)).unwrap();
        run.pop();
        assert!(Merge::new(vec![run.as_slice()]).any(|member| member.is_err()));
    }
}
