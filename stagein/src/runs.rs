//! Writes sorted runs of members, and merges them.
//!
//! A worker finds members in the order of its sources, but a catalog is in the order of paths, and
//! a dataset can have more members than fit in memory. So each worker collects members in a
//! [`RunWriter`], which sorts them and writes a run to a temporary file whenever its memory is
//! full. The coordinator reads the runs of all nodes through one [`Merge`].
//!
//! Every record in a run has a checksum, so a run that a drive damages causes an error and never a
//! wrong catalog.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::mem::take;
use std::os::unix::fs::FileExt;

use dayfly_meta::catalog::Member;
use dayfly_meta::catalog::member::{read_member, write_member};

/// Collects members, and writes them out as a sorted run whenever they fill its memory.
pub struct RunWriter {
    temp_file: Box<dyn Fn() -> io::Result<File> + Send>,
    len_max: usize,
    /// Members that are not in a run yet.
    pending: Vec<Member>,
    /// Memory used by `pending`, in bytes.
    pending_len: usize,
    /// The runs with their lengths in bytes.
    runs: Vec<(File, u64)>,
}

impl RunWriter {
    /// Creates a writer that holds at most about `len_max` bytes of members in memory. `temp_file`
    /// creates the files for runs, which should have no name, so that nothing is left behind.
    pub fn new(temp_file: Box<dyn Fn() -> io::Result<File> + Send>, len_max: usize) -> Self {
        Self { temp_file, len_max, pending: Vec::new(), pending_len: 0, runs: Vec::new() }
    }

    /// Returns how many bytes of members may be held in memory.
    pub(crate) fn len_max(&self) -> usize {
        self.len_max
    }

    /// Creates a temporary file in the place where runs are created.
    pub(crate) fn temp_file(&self) -> io::Result<File> {
        (self.temp_file)()
    }

    /// Adds a member.
    ///
    /// # Errors
    ///
    /// Fails if a run cannot be written.
    pub fn push(&mut self, member: Member) -> io::Result<()> {
        self.pending_len += member.memory_len();
        self.pending.push(member);
        if self.pending_len >= self.len_max { self.spill() } else { Ok(()) }
    }

    /// Calls `visit` for every member added so far, in no particular order.
    pub(crate) fn for_each(&self, visit: &mut dyn FnMut(&Member)) -> io::Result<()> {
        self.pending.iter().for_each(&mut *visit);
        for (file, len) in &self.runs {
            let mut run = BufReader::new(RunReader { file, at: 0, len: *len });
            while let Some(member) = read_member(&mut run)? {
                visit(&member);
            }
        }
        Ok(())
    }

    /// Writes the remaining members and returns all runs with their lengths in bytes.
    ///
    /// # Errors
    ///
    /// Fails if the last run cannot be written.
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
        let mut run = BufWriter::new((self.temp_file)()?);
        members.iter().try_for_each(|member| write_member(&mut run, member))?;
        run.flush()?;
        let mut file = run.into_inner().map_err(io::IntoInnerError::into_error)?;
        let len = file.stream_position()?;
        self.runs.push((file, len));
        Ok(())
    }
}

/// Reads a run without moving the file's position.
struct RunReader<'a> {
    file: &'a File,
    at: u64,
    len: u64,
}

impl Read for RunReader<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let room = (self.len - self.at).min(out.len() as u64) as usize;
        let count = self.file.read_at(&mut out[..room], self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

/// Merges sorted runs into one sorted stream of members. The stream ends after the first error.
pub struct Merge<R> {
    runs: Vec<R>,
    heads: BinaryHeap<Reverse<Head>>,
    failure: Option<io::Error>,
}

/// A run's first member that has not been returned yet.
struct Head {
    member: Member,
    run: usize,
}

impl<R: Read> Merge<R> {
    /// Starts a merge by reading the first member of each run.
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
        // The stream ends here. If it continued without the rest of the damaged run, members would
        // silently be missing.
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
    fn a_merge_is_sorted_and_complete() {
        let runs = (0..4_u64).map(|run| {
            let mut writer = RunWriter::new(Box::new(tempfile::tempfile), 1 << 20);
            (0..500).filter(|number| number % 4 == run).for_each(|number| writer.push(member(number)).unwrap());
            let mut runs = writer.finish().unwrap();
            let (mut file, len) = runs.remove(0);
            let mut again = RunWriter::new(Box::new(tempfile::tempfile), 1 << 20);
            again.runs.push((file.try_clone().unwrap(), len));
            again.push(member(9)).unwrap();
            let mut seen = 0;
            again.for_each(&mut |_| seen += 1).unwrap();
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
    fn a_truncated_run_is_an_error() {
        let mut run = Vec::new();
        write_member(&mut run, &member(1)).unwrap();
        write_member(&mut run, &member(1)).unwrap();
        run.pop();
        assert!(Merge::new(vec![run.as_slice()]).any(|member| member.is_err()));
    }
}
