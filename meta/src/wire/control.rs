//! Commands of the command line, and what a server tells of their progress and end.

use rkyv::{Archive, Deserialize, Serialize};

use super::status::{Policy, Status};
pub use crate::catalog::Grouping;
use crate::limits::{NOTE_LEN_MAX, NOTES_SHOWN_MAX, SKIPPED_SHOWN_MAX};

/// A command.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum Command {
    /// Stage sources in. Events: `Planned`, `Progress`, at the end `StagedIn`. Closing the connection cancels it.
    StageIn(StageInRequest),
    /// Tell what all nodes hold and do. Event: `Status`.
    Status,
    /// Change how nodes read ahead and what they keep, on all of them. Event: `Tuned`.
    Tune(Policy),
    /// End the session on this node, and, if it says so, on those that are not in the list. Event: `Down`, then the server ends.
    Down {
        /// Nodes that are told by others; `None` if all are.
        but: Option<Vec<u16>>,
    },
}

/// What to stage in.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct StageInRequest {
    /// Absolute paths or globs, in order.
    pub sources: Vec<Vec<u8>>,
    /// The dataset's root, below the prefix.
    pub target: Vec<u8>,
    /// What to take of the sources.
    pub selection: Selection,
    /// Seed of the placement and of the order in which blocks are stored.
    pub seed: u64,
    /// Whether a dataset at the target makes way.
    pub replace: bool,
    /// Bytes of sources that all nodes together may read in a second.
    pub max_rate: Option<u64>,
}

/// What to take of the sources, and under which names.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Leading components to drop from each name.
    pub strip_components: u32,
    /// Globs of which a file's name must match one, if there are any.
    pub include: Vec<String>,
    /// Globs that a name, or a directory it lies in, must not match.
    pub exclude: Vec<String>,
    /// Archives stay files.
    pub no_unpack: bool,
    /// Archives within archives and trees become directories.
    pub nested: bool,
    /// What is kept together.
    pub group: Grouping,
    /// What becomes of samples of one path in several sources that one pattern or list names.
    pub on_conflict: OnConflict,
    /// Each archive is unpacked into a directory of its name.
    pub prefix_by_source: bool,
    /// Directories that the dataset may have, if not as many as go with its files.
    pub max_directories: Option<u64>,
    /// Members that cannot be read are left out and told of, rather than ending everything.
    pub keep_going: bool,
}

/// What becomes of samples of one path that differ, in several sources that one pattern or list names.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnConflict {
    /// They end the stage-in.
    #[default]
    Error,
    /// The later one stands.
    Replace,
}

/// What a command's server tells.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum Event {
    /// A stage-in is about to begin.
    Planned(StageInEstimate),
    /// How far it is.
    Progress(Progress),
    /// It is done: the dataset is visible on all nodes.
    StagedIn(Box<Summary>),
    /// How the session is.
    Status(Status),
    /// All nodes do as they were told; this is what holds now.
    Tuned(Policy),
    /// This node, and those that it was to tell, serve no longer.
    Down {
        /// How many they are.
        nodes: u16,
        /// Bytes given up on the data dirs.
        freed_bytes: u64,
        /// Those that could not be told, and why.
        untold: Vec<String>,
    },
    /// The command failed, and left nothing behind but what the reason says.
    Failed {
        /// For the user.
        reason: String,
    },
}

/// What a stage-in will take, against what is free.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct StageInEstimate {
    /// Sources after globs were expanded.
    pub sources: u64,
    /// Bytes of the sources as they lie on the PFS.
    pub source_bytes: u64,
    /// Files, where they are known before reading (directories and single files).
    pub known_files: u64,
    /// Whether that is all of them.
    pub files_are_all_known: bool,
    /// Bytes the samples take at least: what an archive holds is known only once it is read.
    pub least_bytes: u64,
    /// Bytes of the catalog on each node, as far as files are known.
    pub catalog_bytes: u64,
    /// Free room on all nodes.
    pub free_bytes: u64,
}

/// How far a stage-in is.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// What it is doing.
    pub phase: Phase,
    /// Bytes of the sources read so far.
    pub source_bytes: u64,
    /// Files found so far.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The same of each node.
    pub nodes: Vec<Counted>,
}

/// Counted on a node.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Bytes read from sources.
    pub source_bytes: u64,
    /// Files found.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes sent to other nodes.
    pub shipped_bytes: u64,
    /// How long its threads were busy with each [`Step`], in nanoseconds.
    pub busy_ns: [u64; STEPS],
    /// How often anything went forward that these do not count, a directory found for one. A reader that waits because `--max-rate`
    /// says so goes forward.
    pub steps: u64,
}

/// What the threads of a stage-in do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Step {
    /// Waiting for the sources' bytes.
    Reading,
    /// Decompressing.
    Decoding,
    /// Finding members in the bytes, hashing, copying them into batches.
    Placing,
    /// Waiting for owners to take batches.
    Shipping,
    /// Writing segments.
    Writing,
}

/// Number of [`Step`]s.
pub const STEPS: usize = 5;

impl Step {
    /// All, in order.
    pub const ALL: [Self; STEPS] = [Self::Reading, Self::Decoding, Self::Placing, Self::Shipping, Self::Writing];

    /// For the user.
    pub fn name(self) -> &'static str {
        ["reading", "decoding", "placing", "shipping", "writing"][self as usize]
    }
}

impl Counted {
    /// Adds what another counted.
    pub fn add(&mut self, more: &Self) {
        self.source_bytes += more.source_bytes;
        self.files += more.files;
        self.bytes += more.bytes;
        self.shipped_bytes += more.shipped_bytes;
        self.busy_ns.iter_mut().zip(more.busy_ns).for_each(|(all, more)| *all += more);
        self.steps += more.steps;
    }

    /// Whether nothing went forward.
    pub fn is_still(&self) -> bool {
        *self == Self::default()
    }
}

/// What a stage-in is doing.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Others run; it begins when one of them ends.
    Waiting,
    /// Finding sources and telling them apart.
    #[default]
    Planning,
    /// Reading sources and storing blocks.
    Reading,
    /// Merging what was found into the catalog.
    Merging,
    /// Giving all nodes the catalog.
    Publishing,
}

/// Counts of what a stage-in met.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Regular files read.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Devices, FIFOs and sockets, skipped.
    pub special: u64,
    /// Members refused: their names leave the tree or cannot be kept, or something stands in their place.
    pub refused: u64,
    /// Hard links.
    pub hard_links: u64,
    /// Absolute names made relative.
    pub made_relative: u64,
    /// Archives that end without their end mark.
    pub unmarked_ends: u64,
    /// Members left out because they cannot be read (`--keep-going`).
    pub skipped: u64,
    /// The first of these by name.
    pub skipped_notes: Vec<String>,
    /// Samples that a later one of their path, with other content, took the place of.
    pub replaced: u64,
    /// The first few of these by name.
    pub notes: Vec<String>,
}

impl Counts {
    /// Keeps a remark, if there are not enough of them; shortened, for a hostile name can be a megabyte long.
    pub fn note(&mut self, text: &str) {
        if self.notes.len() < NOTES_SHOWN_MAX {
            self.notes.push(text.chars().take(NOTE_LEN_MAX).collect());
        }
    }

    /// Counts a member that was left out.
    pub fn skip(&mut self, text: &str) {
        self.skipped += 1;
        if self.skipped_notes.len() < SKIPPED_SHOWN_MAX {
            self.skipped_notes.push(text.chars().take(NOTE_LEN_MAX).collect());
        }
    }

    /// Adds what another counted.
    pub fn add(&mut self, more: Self) {
        self.files += more.files;
        self.bytes += more.bytes;
        self.special += more.special;
        self.refused += more.refused;
        self.hard_links += more.hard_links;
        self.made_relative += more.made_relative;
        self.unmarked_ends += more.unmarked_ends;
        self.skipped += more.skipped;
        self.replaced += more.replaced;
        self.notes.extend(more.notes);
        self.notes.truncate(NOTES_SHOWN_MAX);
        self.skipped_notes.extend(more.skipped_notes);
        self.skipped_notes.truncate(SKIPPED_SHOWN_MAX);
    }
}

/// A finished stage-in.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Samples of the dataset.
    pub samples: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Directories and symlinks.
    pub others: u64,
    /// Samples that are archives by their names.
    pub archives: u64,
    /// Bytes of the catalog on each node.
    pub catalog_bytes: u64,
    /// Bytes of the sources read.
    pub source_bytes: u64,
    /// What was met on the way.
    pub counts: Counts,
    /// Milliseconds from the request to now.
    pub elapsed_ms: u64,
    /// Fullest node's share over the mean, in tenths of a percent.
    pub imbalance_permille: u64,
    /// Source bytes that were read a second time, for a range had been begun at a wrong place.
    pub redone_bytes: u64,
    /// What each node did and holds.
    pub nodes: Vec<NodeShare>,
    /// Samples by size: entry `n` counts those of 2^(n-1) to 2^n - 1 bytes; the first, the empty ones.
    pub sizes: Vec<u64>,
    /// How the largest top directories are spread.
    pub classes: Vec<ClassShare>,
    /// Milliseconds between two entries of [`NodeShare::rates`].
    pub rate_interval_ms: u64,
}

impl Summary {
    /// The step that kept the threads busy for longest.
    pub fn bottleneck(&self) -> Step {
        let mut all = Counted::default();
        self.nodes.iter().for_each(|node| all.add(&node.counted));
        Step::ALL.into_iter().max_by_key(|&step| all.busy_ns[step as usize]).unwrap_or(Step::Reading)
    }
}

/// A node's part in a finished stage-in.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeShare {
    /// Samples whose first block it owns.
    pub samples: u64,
    /// Bytes of the blocks that it owns.
    pub bytes: u64,
    /// What it did.
    pub counted: Counted,
    /// Source bytes that it read in each interval.
    pub rates: Vec<u64>,
}

/// How a top directory's samples are spread.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct ClassShare {
    /// The directory.
    pub name: Vec<u8>,
    /// Its samples on each node.
    pub samples: Vec<u64>,
}
