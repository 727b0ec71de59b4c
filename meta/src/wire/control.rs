//! Command-line commands, and the events with which a server reports their progress and results.

use rkyv::{Archive, Deserialize, Serialize};

use super::status::{Policy, Status};
pub use crate::catalog::Grouping;
use crate::id::NodeId;
use crate::limits::{DECODER_MEMORY_DEFAULT, DECODER_MEMORY_MAX, NOTE_LEN_MAX, NOTES_SHOWN_MAX, SKIPPED_SHOWN_MAX};

/// A command that a client sends on its connection to the server.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum Command {
    /// Stages sources in. Events: `Planned`, `Progress`, and at the end `StagedIn`. Closing the
    /// connection cancels the stage-in.
    StageIn(StageInRequest),
    /// Reports what all nodes store and do. Event: `Status`.
    Status,
    /// Changes how all nodes prefetch and cache. Event: `Tuned`.
    Tune(Policy),
    /// Starts a new server in the place of a lost one. Events: `Rejoining`, and at the end `Rejoined`.
    Rejoin {
        /// The lost node.
        node: u16,
        /// The host on which the server is to run; `None` for the host of the lost server.
        host: Option<String>,
    },
    /// Ends the session on this node, and on other nodes unless `except` excludes them. Event: `Down`;
    /// then the server exits.
    Down {
        /// The nodes that this server must not contact, because other servers contact them. `None`: it contacts no node.
        except: Option<Vec<u16>>,
    },
}

/// The arguments of a stage-in.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct StageInRequest {
    /// Absolute paths or globs, in order.
    pub sources: Vec<Vec<u8>>,
    /// The path of the dataset's root, below the prefix.
    pub target: Vec<u8>,
    /// Which files of the sources are staged in, and under which names.
    pub selection: Selection,
    /// Seed of the placement and of the order in which blocks are stored.
    pub seed: u64,
    /// Whether the new dataset may replace one with the same target.
    pub replace: bool,
    /// Upper bound on the bytes of sources that all nodes together read per second.
    pub max_rate: Option<u64>,
    /// Whether the stage-in fails if not all samples fit. Otherwise some samples are left on the PFS, and
    /// read from there.
    pub require_fit: bool,
    /// How many nodes store each block.
    pub copies: Copies,
}

/// How many nodes store each block.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copies {
    /// This many. The stage-in fails if there is not enough room.
    Number(u16),
    /// Two if there is certainly enough room, else one.
    Auto,
}

impl Default for Copies {
    fn default() -> Self {
        Self::Number(1)
    }
}

/// Which files of the sources are staged in, and under which names.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Number of leading components to drop from each name.
    pub strip_components: u32,
    /// Globs. A file's name must match one of them, unless the list is empty.
    pub include: Vec<String>,
    /// Globs. A name is left out if one of them matches the name or a directory above it.
    pub exclude: Vec<String>,
    /// Whether archives are staged in as plain files.
    pub no_unpack: bool,
    /// Whether archives within archives and trees become directories.
    pub nested: bool,
    /// Whether symlinks in trees are followed.
    pub dereference: bool,
    /// Which files count as one sample.
    pub group: Grouping,
    /// How conflicts between rival sources are resolved.
    pub on_conflict: OnConflict,
    /// Whether each archive is unpacked into a directory that has the archive's name.
    pub prefix_by_source: bool,
    /// Upper bound on the dataset's directories; `None` derives one from the number of files.
    pub max_directories: Option<u64>,
    /// Whether members that cannot be read are left out and reported, instead of ending the
    /// stage-in.
    pub keep_going: bool,
    /// Bytes of memory that a decoder may take; `None` for the default.
    pub decoder_memory: Option<u64>,
}

impl Selection {
    /// Returns how many bytes of memory the decoder of an archive that is a source may take.
    pub fn decoder_memory_max(&self) -> u64 {
        self.decoder_memory.map_or(DECODER_MEMORY_DEFAULT, |wanted| wanted.min(DECODER_MEMORY_MAX))
    }
}

/// How a path conflict is resolved. In a path conflict, several sources of one pattern or list
/// contain different samples with the same path.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnConflict {
    /// The conflict ends the stage-in.
    #[default]
    Error,
    /// The sample of the later source replaces the others.
    Replace,
}

/// A report about a command.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, PartialEq)]
pub enum Event {
    /// A stage-in is about to begin.
    Planned(StageInEstimate),
    /// The progress of the stage-in.
    Progress(Progress),
    /// A node was lost. The stage-in goes on: other nodes read what it had read.
    WentOn {
        /// The lost node.
        node: NodeId,
    },
    /// A node was lost or did not answer, and the stage-in begins again.
    Restarted {
        /// What happened, for the user.
        reason: String,
    },
    /// The stage-in has succeeded, and the dataset is visible on all nodes.
    StagedIn(Box<Summary>),
    /// The state of the session.
    Status(Status),
    /// All nodes have changed their policy; this is the policy in force.
    Tuned(Policy),
    /// A new server is being started. This event repeats until the server is a member or has failed.
    Rejoining,
    /// The new server is a member of the session, or the user has to start it. The message says which.
    Rejoined(String),
    /// This node, and those that it had to contact, have stopped serving.
    Down {
        /// The number of nodes that stopped.
        nodes: u16,
        /// Bytes freed in the data dirs.
        freed_bytes: u64,
        /// Nodes that could not be reached, each with the reason.
        unreached: Vec<String>,
    },
    /// The command failed, and left nothing behind except what the reason names.
    Failed {
        /// A message for the user.
        reason: String,
        /// Whether a node was lost or did not answer, so that another attempt may succeed.
        can_restart: bool,
    },
}

impl Event {
    /// Returns whether no further event follows this one.
    pub fn is_last(&self) -> bool {
        let goes_on =
            matches!(self, Self::Planned(_) | Self::Progress(_) | Self::WentOn { .. } | Self::Restarted { .. } | Self::Rejoining);
        !goes_on
    }
}

/// An estimate of what a stage-in will need, and the space that is free.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct StageInEstimate {
    /// Number of sources after globs were expanded.
    pub sources: u64,
    /// Bytes of the sources as they lie on the PFS.
    pub source_bytes: u64,
    /// Number of files known before reading: those in directories, and single files.
    pub known_files: u64,
    /// Whether [`Self::known_files`] counts all files.
    pub files_are_all_known: bool,
    /// Lower bound on the bytes of all samples. What an archive contains is known only once it has
    /// been read.
    pub least_bytes: u64,
    /// Bytes of the catalog on each node, for the files known so far.
    pub catalog_bytes: u64,
    /// Free room on all nodes together, in bytes.
    pub free_bytes: u64,
    /// If not all samples fit: an estimate of their bytes, and of the share that is stored, in thousandths.
    pub partial: Option<(u64, u64)>,
    /// How many nodes will store each block.
    pub copies: u16,
}

/// The progress of a stage-in.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The phase of the stage-in.
    pub phase: Phase,
    /// Bytes of the sources read so far.
    pub source_bytes: u64,
    /// Number of files found so far.
    pub files: u64,
    /// Bytes of those files.
    pub bytes: u64,
    /// Bytes of the blocks that have been copied to further nodes.
    pub copied_bytes: u64,
    /// Bytes of all blocks that are copied, with those that have been copied.
    pub to_copy_bytes: u64,
    /// The progress of each node.
    pub nodes: Vec<Counted>,
}

/// A node's work in a stage-in so far.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Bytes read from sources.
    pub source_bytes: u64,
    /// Number of files found.
    pub files: u64,
    /// Bytes of those files.
    pub bytes: u64,
    /// Bytes sent to other nodes.
    pub shipped_bytes: u64,
    /// How long the node's threads were busy with each [`Step`], in nanoseconds.
    pub busy_ns: [u64; STEPS],
    /// Number of times that anything else made progress, for example when a directory was found. A
    /// reader that waits because of `--max-rate` counts as making progress.
    pub steps: u64,
}

/// The pipeline steps of a stage-in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Step {
    /// Waiting for the sources' bytes.
    Reading,
    /// Decompressing bytes that were read.
    Decoding,
    /// Finding members in the bytes, hashing them, and copying them into batches.
    Placing,
    /// Waiting for owners to accept batches.
    Shipping,
    /// Writing blocks into segments.
    Writing,
}

/// The number of [`Step`]s.
pub const STEPS: usize = 5;

impl Step {
    /// All steps, in order.
    pub const ALL: [Self; STEPS] = [Self::Reading, Self::Decoding, Self::Placing, Self::Shipping, Self::Writing];

    /// Returns the step's name for users.
    pub fn name(self) -> &'static str {
        ["reading", "decoding", "placing", "shipping", "writing"][self as usize]
    }
}

impl Counted {
    /// Adds another node's counts.
    pub fn add(&mut self, more: &Self) {
        self.source_bytes += more.source_bytes;
        self.files += more.files;
        self.bytes += more.bytes;
        self.shipped_bytes += more.shipped_bytes;
        self.busy_ns.iter_mut().zip(more.busy_ns).for_each(|(all, more)| *all += more);
        self.steps += more.steps;
    }

    /// Returns whether nothing made progress.
    pub fn is_still(&self) -> bool {
        *self == Self::default()
    }
}

/// The phase of a stage-in.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Other stage-ins are running. This one begins when one of them ends.
    Waiting,
    /// Finding the sources and detecting their kinds.
    #[default]
    Planning,
    /// Reading sources and storing blocks.
    Reading,
    /// Merging the members found into a catalog.
    Merging,
    /// Copying blocks to further nodes (`--copies`).
    Copying,
    /// Copying the catalog to all nodes and making the dataset visible.
    Publishing,
}

/// Counts of what a stage-in encountered.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of regular files read.
    pub files: u64,
    /// Bytes of those files.
    pub bytes: u64,
    /// Devices, FIFOs and sockets, which are skipped.
    pub special: u64,
    /// Members that were rejected: their names leave the tree or cannot be stored, or another entry
    /// has their path.
    pub refused: u64,
    /// Files that the selection leaves out, and directories of a tree that it leaves out as a whole.
    pub unselected: u64,
    /// Hard links in the sources.
    pub hard_links: u64,
    /// Absolute names that were made relative.
    pub made_relative: u64,
    /// Archives that end without an end marker.
    pub unmarked_ends: u64,
    /// Archives whose end marks other archives follow, which are left out.
    pub followed_ends: u64,
    /// Archives in which bytes that are not compressed follow the stream, which are left out.
    pub trailed_streams: u64,
    /// Members left out because they cannot be read (`--keep-going`).
    pub skipped: u64,
    /// The first few skipped members, as text with a reason.
    pub skipped_notes: Vec<String>,
    /// Samples that were replaced by a later one with the same path and different content.
    pub replaced: u64,
    /// Symlinks in the dataset.
    pub symlinks: u64,
    /// Those of them whose targets lie outside the dataset.
    pub symlinks_out: u64,
    /// The first one of these, as text with its target.
    pub symlink_out: Option<String>,
    /// Remarks about the first few members that were rejected, skipped or renamed.
    pub notes: Vec<String>,
}

impl Counts {
    /// Records a remark, unless the limit on remarks has been reached. The text is shortened,
    /// because a hostile name can be a megabyte long.
    pub fn note(&mut self, text: &str) {
        if self.notes.len() < NOTES_SHOWN_MAX {
            self.notes.push(text.chars().take(NOTE_LEN_MAX).collect());
        }
    }

    /// Counts a skipped member.
    pub fn skip(&mut self, text: &str) {
        self.skipped += 1;
        if self.skipped_notes.len() < SKIPPED_SHOWN_MAX {
            self.skipped_notes.push(text.chars().take(NOTE_LEN_MAX).collect());
        }
    }

    /// Adds another node's counts.
    pub fn add(&mut self, more: Self) {
        self.files += more.files;
        self.bytes += more.bytes;
        self.special += more.special;
        self.refused += more.refused;
        self.unselected += more.unselected;
        self.hard_links += more.hard_links;
        self.made_relative += more.made_relative;
        self.unmarked_ends += more.unmarked_ends;
        self.followed_ends += more.followed_ends;
        self.trailed_streams += more.trailed_streams;
        self.skipped += more.skipped;
        self.replaced += more.replaced;
        self.symlinks += more.symlinks;
        self.symlinks_out += more.symlinks_out;
        self.symlink_out = self.symlink_out.take().or(more.symlink_out);
        self.notes.extend(more.notes);
        self.notes.truncate(NOTES_SHOWN_MAX);
        self.skipped_notes.extend(more.skipped_notes);
        self.skipped_notes.truncate(SKIPPED_SHOWN_MAX);
    }
}

/// The result of a stage-in.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Number of samples in the dataset.
    pub samples: u64,
    /// Bytes of all samples.
    pub bytes: u64,
    /// Number of directories and symlinks.
    pub others: u64,
    /// Number of samples whose names have an archive's ending.
    pub archives: u64,
    /// Bytes of the catalog on each node.
    pub catalog_bytes: u64,
    /// Bytes read from the sources.
    pub source_bytes: u64,
    /// What the stage-in encountered.
    pub counts: Counts,
    /// Milliseconds from the request to this summary.
    pub elapsed_ms: u64,
    /// How much more than the mean of the nodes that took part the fullest one holds, in thousandths of the mean.
    pub imbalance_permille: u64,
    /// How many nodes store each block.
    pub copies: u16,
    /// Bytes of the blocks that were copied to further nodes, which have confirmed it and are not lost.
    pub copied_bytes: u64,
    /// Bytes of copies that are missing, because they found no room, or because a node was lost.
    pub uncopied_bytes: u64,
    /// Source bytes that were read a second time, because a worker had started its range at a wrong
    /// position.
    pub redone_bytes: u64,
    /// What each node did and stores.
    pub nodes: Vec<NodeShare>,
    /// Samples by size: entry `n` counts those of 2^(n-1) to 2^n - 1 bytes; the first entry counts
    /// empty samples.
    pub sizes: Vec<u64>,
    /// How the largest top-level directories are spread over the nodes.
    pub classes: Vec<ClassShare>,
    /// Milliseconds between two entries of [`NodeShare::rates`].
    pub rate_interval_ms: u64,
}

impl Summary {
    /// Returns the step that kept the threads busy for the longest time.
    pub fn bottleneck(&self) -> Step {
        let mut all = Counted::default();
        self.nodes.iter().for_each(|node| all.add(&node.counted));
        Step::ALL.into_iter().max_by_key(|&step| all.busy_ns[step as usize]).unwrap_or(Step::Reading)
    }
}

/// A node's part in a finished stage-in.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeShare {
    /// Number of samples whose first block the node owns.
    pub samples: u64,
    /// Bytes of the blocks that the node stores.
    pub bytes: u64,
    /// Bytes of the blocks that it owns but did not store.
    pub unstored_bytes: u64,
    /// What the node did.
    pub counted: Counted,
    /// Source bytes that the node read in each interval.
    pub rates: Vec<u64>,
}

/// How the samples of a top-level directory are spread.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct ClassShare {
    /// The directory's name.
    pub name: Vec<u8>,
    /// Number of its samples on each node.
    pub samples: Vec<u64>,
}
