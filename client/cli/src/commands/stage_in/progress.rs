//! Shows a stage-in to the user: bars on a terminal, plain lines elsewhere, and JSON for programs.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use dayfly_launch::units;
use dayfly_meta::path::display;
use dayfly_meta::text::without_os_numbers;
use dayfly_meta::wire::control::{Counted, Event, Phase, Progress, StageInEstimate, Step, Summary};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

use crate::args::StageInOptions;
use crate::failure::{complain, mention, print_line};
use crate::size;

/// Without a terminal, a line of progress is printed this often.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// With fewer samples than this, their balance between the nodes means little and is not shown.
const BALANCE_SAMPLES_MIN: u64 = 1000;

/// With more nodes than this, one bar covers all of them.
const NODE_BARS_MAX: usize = 16;

/// The bottleneck is shown only for stage-ins that took at least this long.
const BOTTLENECK_SHOWN_MS_MIN: u64 = 1000;

/// Shows the events of one stage-in.
pub(super) struct Reporter {
    json: bool,
    target: String,
    max_rate: Option<u64>,
    bars: Option<Bars>,
    last_line: Instant,
    start: Instant,
    phase: Phase,
    /// Whether the user has decided about archives within sources, with `--nested` or
    /// `--no-unpack`, and so needs no hint about them.
    has_decided_on_archives: bool,
    /// Whether symlinks in trees are followed.
    is_dereferenced: bool,
    /// Whether the stage-in goes on without a node, whose blocks are not stored.
    has_lost_nodes: bool,
}

/// Bars on a terminal: one for all nodes together, and one for each node if there are few.
struct Bars {
    all: MultiProgress,
    total: ProgressBar,
    nodes: Vec<ProgressBar>,
}

impl Bars {
    fn new(source_bytes: u64) -> Self {
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::stderr());
        let total = all.add(ProgressBar::new(source_bytes));
        total.set_style(style("{bar:30} {percent:>3}% of sources, {binary_bytes_per_sec}, {eta} left, {msg}"));
        Self { all, total, nodes: Vec::new() }
    }

    fn show(&mut self, progress: &Progress, what: String) {
        self.total.set_position(progress.source_bytes);
        self.total.set_message(what);
        if progress.nodes.len() > NODE_BARS_MAX {
            return;
        }
        while self.nodes.len() < progress.nodes.len() {
            // The bar shows the node's part of the total of all nodes, because the node's own total
            // is not known in advance.
            let bar = self.all.add(ProgressBar::new(self.total.length().unwrap_or(0)));
            bar.set_style(style("{bar:30} {prefix}: {binary_bytes} read, {binary_bytes_per_sec}, {msg}"));
            bar.set_prefix(format!("node {}", self.nodes.len()));
            self.nodes.push(bar);
        }
        for (bar, counted) in self.nodes.iter().zip(&progress.nodes) {
            bar.set_position(counted.source_bytes);
            bar.set_message(units::counted(counted.files, "file"));
        }
    }
}

fn directories_of(summary: &Summary) -> u64 {
    summary.others.saturating_sub(summary.counts.symlinks)
}

/// The templates are fixed, so they parse. If one did not, the default style would do.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

impl Reporter {
    pub(super) fn new(json: bool, target: &str, options: &StageInOptions) -> Self {
        let (max_rate, has_decided_on_archives) = (options.max_rate, options.nested || options.no_unpack);
        let now = Instant::now();
        let target = if json { target.to_owned() } else { display(target.as_bytes()) };
        Self {
            json,
            target,
            max_rate,
            bars: None,
            last_line: now,
            start: now,
            phase: Phase::Planning,
            has_decided_on_archives,
            is_dereferenced: options.dereference,
            has_lost_nodes: false,
        }
    }

    pub(super) fn show(&mut self, event: &Event) {
        match event {
            _ if self.json => {
                if let Event::Progress(progress) = event {
                    self.phase = progress.phase;
                }
                self.show_json(event);
            }
            Event::Planned(plan) => self.show_plan(plan),
            Event::Progress(progress) => self.show_progress(progress),
            Event::StagedIn(summary) => self.show_summary(summary),
            Event::WentOn { node } => {
                self.clear();
                self.has_lost_nodes = true;
                mention(format_args!("node {node} was lost; the stage-in goes on without it"));
            }
            Event::Restarted { reason } => {
                self.clear();
                self.has_lost_nodes = false;
                let reason = display(without_os_numbers(reason).as_bytes());
                mention(format_args!("{reason}; the stage-in begins again"));
            }
            Event::Failed { .. }
            | Event::Status(_)
            | Event::Tuned(_)
            | Event::Rejoining
            | Event::Rejoined(_)
            | Event::Down { .. } => self.clear(),
        }
    }

    /// Reports that the user interrupted the stage-in.
    pub(super) fn interrupt(&mut self) {
        self.clear();
        let reason = match self.phase {
            Phase::Publishing => "interrupted while it was being published; 'dayfly ls' shows whether the dataset exists",
            _ => "interrupted: nothing was staged in",
        };
        if self.json {
            self.show_json(&Event::Failed { reason: reason.to_owned(), can_restart: false });
        }
        complain(format_args!("'{}': {reason}", self.target));
    }

    fn clear(&mut self) {
        if let Some(bars) = self.bars.take() {
            bars.total.finish_and_clear();
            bars.nodes.iter().for_each(ProgressBar::finish_and_clear);
        }
    }

    fn show_plan(&mut self, plan: &StageInEstimate) {
        let files = match plan.files_are_all_known {
            true => {
                format!("{}, a catalog of about {}", units::counted(plan.known_files, "file"), size::show(plan.catalog_bytes))
            }
            false => "an unknown number of files in archives".to_owned(),
        };
        mention(format_args!(
            "staging in {} ({}) to {}: {files}; {} free on all nodes together",
            units::counted(plan.sources, "source"),
            size::show(plan.source_bytes),
            self.target,
            size::show(plan.free_bytes)
        ));
        if let Some((bytes, permille)) = plan.partial {
            let share = permille as f64 / 10.0;
            mention(format_args!(
                "not all samples fit: about {share:.1} % of {} will be stored, so about {share:.1} % of all reads will find their \
                 bytes on the nodes' drives; the other bytes stay in the sources, which must not change, and are read from there \
                 (--require-fit makes this an error)",
                size::show(bytes)
            ));
        }
        if plan.copies > 1 {
            mention(format_args!("{} nodes will store each block", plan.copies));
        }
        if io::stderr().is_terminal() {
            self.bars = Some(Bars::new(plan.source_bytes));
        }
    }

    fn show_progress(&mut self, progress: &Progress) {
        self.phase = progress.phase;
        let what = match progress.phase {
            Phase::Waiting => "waiting for other stage-ins, or for nodes or drives that are slow to answer".to_owned(),
            Phase::Planning => "finding sources".to_owned(),
            Phase::Reading => format!("{}, {}", units::counted(progress.files, "file"), size::show(progress.bytes)),
            Phase::Merging => "merging the catalog".to_owned(),
            Phase::Copying => {
                format!("copied {} of {} to further nodes", size::show(progress.copied_bytes), size::show(progress.to_copy_bytes))
            }
            Phase::Publishing => "publishing the catalog".to_owned(),
        };
        if let Some(bars) = &mut self.bars {
            bars.show(progress, what);
        } else if self.last_line.elapsed() >= LINE_INTERVAL {
            self.last_line = Instant::now();
            mention(format_args!(
                "{:.0} s: {} of the sources read, {what}",
                self.start.elapsed().as_secs_f64(),
                size::show(progress.source_bytes)
            ));
        }
    }

    fn show_summary(&mut self, summary: &Summary) {
        self.clear();
        let balance = match summary.samples {
            0..BALANCE_SAMPLES_MIN => String::new(),
            _ => format!("; the fullest node has {:.1} % more than the mean", summary.imbalance_permille as f64 / 10.0),
        };
        let seconds = (summary.elapsed_ms as f64 / 1000.0).max(0.001);
        mention(format_args!(
            "{}: {}, {}, in {seconds:.2} s ({:.0} files/s, {}/s); {}, {}, catalog {}{}",
            self.target,
            units::counted(summary.samples, "sample"),
            size::show(summary.bytes),
            summary.samples as f64 / seconds,
            size::show((summary.bytes as f64 / seconds) as u64),
            units::counted_as(directories_of(summary), "directory", "directories"),
            units::counted_as(summary.counts.symlinks, "symbolic link", "symbolic links"),
            size::show(summary.catalog_bytes),
            balance
        ));
        let unstored: u64 = summary.nodes.iter().map(|node| node.unstored_bytes).sum();
        if unstored > 0 {
            let stored = summary.bytes.saturating_sub(unstored);
            let why = if self.has_lost_nodes { "found no room, or lay on lost nodes," } else { "found no room" };
            mention(format_args!(
                "{} ({:.1} %) are stored; {} {why} and are read from their sources",
                size::show(stored),
                stored as f64 * 100.0 / summary.bytes.max(1) as f64,
                size::show(unstored)
            ));
        }
        if summary.copies > 1 {
            let most = if summary.uncopied_bytes > 0 { "at most " } else { "" };
            mention(format_args!(
                "{most}{} nodes store each block; the copies take {}",
                summary.copies,
                size::show(summary.copied_bytes)
            ));
        }
        if summary.uncopied_bytes > 0 {
            let uncopied = size::show(summary.uncopied_bytes);
            complain(format_args!("warning: copies of {uncopied} are missing: they found no room, or a node was lost"));
        }
        if summary.elapsed_ms >= BOTTLENECK_SHOWN_MS_MIN {
            let is_held_back = self.max_rate.is_some_and(|rate| summary.source_bytes as f64 / seconds > 0.8 * rate as f64);
            match is_held_back {
                true => mention("--max-rate was the bottleneck"),
                false => mention(format_args!("most of the time went into {}", explain(summary.bottleneck()))),
            }
        }
        if summary.samples == 0 {
            complain("warning: the dataset is empty, because the sources are");
        }
        if !self.has_decided_on_archives && summary.archives > 0 && summary.archives * 10 >= summary.samples * 9 {
            complain(format_args!(
                "hint: {} of {} samples have names of archives; --nested unpacks each into a directory, and --no-unpack silences this hint",
                summary.archives, summary.samples
            ));
        }
        let counts = &summary.counts;
        let remarks = [
            (counts.special, "device, FIFO or socket", "devices, FIFOs or sockets", "skipped"),
            (counts.refused, "archive member", "archive members", "refused"),
            (counts.made_relative, "absolute name", "absolute names", "made relative"),
            (counts.unmarked_ends, "archive", "archives", "without an end mark"),
            (counts.followed_ends, "archive", "archives", "followed by another one in the same file, which is left out"),
            (counts.trailed_streams, "archive", "archives", "followed by bytes that are not compressed, which are left out"),
            (
                counts.replaced,
                "sample",
                "samples",
                "replaced by later ones with the same path (--prefix-by-source keeps the files of several archives apart)",
            ),
            (counts.skipped, "unreadable archive member or source", "unreadable archive members or sources", "left out"),
        ];
        for (count, singular, plural, what) in remarks.into_iter().filter(|(count, ..)| *count > 0) {
            complain(format_args!("warning: {} {what}", units::counted_as(count, singular, plural)));
        }
        if let Some(first) = &counts.symlink_out {
            complain(format_args!(
                "warning: {} of {} lead out of the dataset ({}){}",
                counts.symlinks_out,
                units::counted_as(counts.symlinks, "symbolic link", "symbolic links"),
                display(first.as_bytes()),
                if self.is_dereferenced { "" } else { "; for a tree, stage in the folder above it, or use --dereference" }
            ));
        }
        for note in counts.notes.iter().chain(&counts.skipped_notes) {
            mention(format_args!("  {}", display(without_os_numbers(note).as_bytes())));
        }
    }

    fn show_json(&self, event: &Event) {
        let value = match event {
            Event::Planned(plan) => json!({
                "event": "planned", "sources": plan.sources, "source_bytes": plan.source_bytes,
                "known_files": plan.known_files, "files_are_all_known": plan.files_are_all_known,
                "least_bytes": plan.least_bytes, "catalog_bytes": plan.catalog_bytes, "free_bytes": plan.free_bytes,
                "all_fits": plan.partial.is_none(), "expected_bytes": plan.partial.map(|(bytes, _)| bytes),
                "expected_stored_permille": plan.partial.map_or(1000, |(_, permille)| permille), "copies": plan.copies,
            }),
            Event::Progress(progress) => json!({
                "event": "progress", "phase": format!("{:?}", progress.phase).to_lowercase(),
                "source_bytes": progress.source_bytes, "files": progress.files, "bytes": progress.bytes,
                "copied_bytes": progress.copied_bytes, "to_copy_bytes": progress.to_copy_bytes,
                "nodes": progress.nodes.iter().map(counted).collect::<Vec<_>>(),
            }),
            Event::StagedIn(summary) => json!({
                "event": "staged-in", "target": self.target, "samples": summary.samples, "bytes": summary.bytes,
                "directories": directories_of(summary), "symlinks": summary.counts.symlinks,
                "symlinks_out": summary.counts.symlinks_out, "catalog_bytes": summary.catalog_bytes,
                "source_bytes": summary.source_bytes, "elapsed_ms": summary.elapsed_ms,
                "imbalance_permille": summary.imbalance_permille, "special_skipped": summary.counts.special,
                "refused": summary.counts.refused, "made_relative": summary.counts.made_relative,
                "unmarked_ends": summary.counts.unmarked_ends, "followed_ends": summary.counts.followed_ends,
                "trailed_streams": summary.counts.trailed_streams, "notes": summary.counts.notes,
                "archives": summary.archives, "replaced": summary.counts.replaced, "skipped": summary.counts.skipped, "skipped_notes": summary.counts.skipped_notes,
                "redone_bytes": summary.redone_bytes, "copies": summary.copies, "copied_bytes": summary.copied_bytes,
                "uncopied_bytes": summary.uncopied_bytes,
                "unstored_bytes": summary.nodes.iter().map(|node| node.unstored_bytes).sum::<u64>(), "bottleneck": summary.bottleneck().name(),
                "nodes": summary.nodes.iter().map(|node| {
                    let mut value = counted(&node.counted);
                    value["owned_samples"] = node.samples.into();
                    value["owned_bytes"] = node.bytes.into();
                    value["unstored_bytes"] = node.unstored_bytes.into();
                    value
                }).collect::<Vec<_>>(),
            }),
            Event::WentOn { node } => json!({ "event": "went-on", "lost_node": node.0 }),
            Event::Restarted { reason } => {
                json!({ "event": "restarted", "reason": display(without_os_numbers(reason).as_bytes()) })
            }
            Event::Failed { reason, .. } => {
                json!({ "event": "failed", "reason": display(without_os_numbers(reason).as_bytes()) })
            }
            Event::Status(_) | Event::Tuned(_) | Event::Rejoining | Event::Rejoined(_) | Event::Down { .. } => return,
        };
        print_line!("{value}");
    }
}

/// Describes a step, and what would make it faster.
fn explain(step: Step) -> &'static str {
    match step {
        Step::Reading => "reading the sources: their file system is the bottleneck",
        Step::Decoding => {
            "decompressing: more sources, or sources compressed in several frames or blocks (zstd -B, xz -T, bgzip), would be decoded in parallel"
        }
        Step::Placing => "unpacking and hashing: more cores or nodes would help",
        Step::Shipping => "waiting for owners to receive blocks: the network or the owners' drives are the bottleneck",
        Step::Writing => "writing to the data dirs: their drives are the bottleneck",
    }
}

fn counted(counted: &Counted) -> serde_json::Value {
    let busy: serde_json::Map<String, serde_json::Value> =
        Step::ALL.iter().map(|&step| (step.name().to_owned(), (counted.busy_ns[step as usize] / 1_000_000).into())).collect();
    json!({
        "source_bytes": counted.source_bytes, "files": counted.files, "bytes": counted.bytes,
        "shipped_bytes": counted.shipped_bytes, "busy_ms": busy,
    })
}
