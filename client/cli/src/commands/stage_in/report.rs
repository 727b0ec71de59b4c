//! How a stage-in looks to its user: a bar on a terminal, plain lines elsewhere, JSON for machines.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use dayfly_meta::path::display;
use dayfly_meta::wire::control::{Event, Phase, Plan, Progress, Summary};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;

use crate::failure::say;
use crate::size;

/// Where there is no terminal, a line this often.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// From so many samples on, how evenly the nodes share them is told.
const BALANCE_SAMPLES_MIN: u64 = 1000;

/// Shows events.
pub(super) struct Reporter {
    json: bool,
    target: String,
    bar: Option<ProgressBar>,
    last_line: Instant,
    start: Instant,
}

impl Reporter {
    pub(super) fn new(json: bool, target: &str) -> Self {
        let now = Instant::now();
        Self { json, target: target.to_owned(), bar: None, last_line: now, start: now }
    }

    pub(super) fn show(&mut self, event: &Event) {
        match event {
            _ if self.json => self.show_json(event),
            Event::Planned(plan) => self.show_plan(plan),
            Event::Progress(progress) => self.show_progress(progress),
            Event::StagedIn(summary) => self.show_summary(summary),
            Event::Failed { .. } | Event::Status(_) | Event::Down { .. } => self.clear(),
        }
    }

    fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn show_plan(&mut self, plan: &Plan) {
        let files = match plan.files_are_all_known {
            true => format!("{} files, a catalog of about {}", plan.known_files, size::show(plan.catalog_bytes)),
            false => "as many files as the archives hold".to_owned(),
        };
        eprintln!(
            "staging {} sources of {} into {}: {files}; {} are free on all nodes",
            plan.sources,
            size::show(plan.source_bytes),
            self.target,
            size::show(plan.free_bytes)
        );
        if io::stderr().is_terminal() {
            let bar = ProgressBar::with_draw_target(Some(plan.source_bytes), ProgressDrawTarget::stderr());
            // A template of our own, so it parses; without it the default style would serve.
            if let Ok(style) =
                ProgressStyle::with_template("{bar:30} {percent:>3}% of sources, {binary_bytes_per_sec}, {eta} left, {msg}")
            {
                bar.set_style(style);
            }
            self.bar = Some(bar);
        }
    }

    fn show_progress(&mut self, progress: &Progress) {
        let what = match progress.phase {
            Phase::Planning => "finding sources".to_owned(),
            Phase::Reading => format!("{} files, {}", progress.files, size::show(progress.bytes)),
            Phase::Merging => "merging the catalog".to_owned(),
            Phase::Publishing => "publishing the catalog".to_owned(),
        };
        if let Some(bar) = &self.bar {
            bar.set_position(progress.source_bytes);
            bar.set_message(what);
        } else if self.last_line.elapsed() >= LINE_INTERVAL {
            self.last_line = Instant::now();
            eprintln!(
                "{:.0} s: {} of sources read, {what}",
                self.start.elapsed().as_secs_f64(),
                size::show(progress.source_bytes)
            );
        }
    }

    fn show_summary(&mut self, summary: &Summary) {
        self.clear();
        // Of few samples nothing can be said.
        let balance = match summary.samples {
            0..BALANCE_SAMPLES_MIN => String::new(),
            _ => format!("; fullest node {:.1} % over the mean", summary.imbalance_permille as f64 / 10.0),
        };
        let seconds = (summary.elapsed_ms as f64 / 1000.0).max(0.001);
        eprintln!(
            "{}: {} samples, {}, in {seconds:.2} s ({:.0} files/s, {}/s); {} directories and symlinks, catalog {}{}",
            self.target,
            summary.samples,
            size::show(summary.bytes),
            summary.samples as f64 / seconds,
            size::show((summary.bytes as f64 / seconds) as u64),
            summary.others,
            size::show(summary.catalog_bytes),
            balance
        );
        if summary.samples == 0 {
            eprintln!("warning: the dataset is empty; do --include, --exclude or --strip-components leave everything out?");
        }
        let counts = &summary.counts;
        let remarks = [
            (counts.special, "devices, FIFOs or sockets skipped"),
            (counts.refused, "members refused"),
            (counts.made_relative, "absolute names made relative"),
            (counts.unmarked_ends, "archives without an end mark"),
        ];
        for (count, what) in remarks.iter().filter(|(count, _)| *count > 0) {
            eprintln!("warning: {count} {what}");
        }
        for note in &counts.notes {
            eprintln!("  {note}");
        }
    }

    fn show_json(&self, event: &Event) {
        let value = match event {
            Event::Planned(plan) => json!({
                "event": "planned", "sources": plan.sources, "source_bytes": plan.source_bytes,
                "known_files": plan.known_files, "files_are_all_known": plan.files_are_all_known,
                "least_bytes": plan.least_bytes, "catalog_bytes": plan.catalog_bytes, "free_bytes": plan.free_bytes,
            }),
            Event::Progress(progress) => json!({
                "event": "progress", "phase": format!("{:?}", progress.phase).to_lowercase(),
                "source_bytes": progress.source_bytes, "files": progress.files, "bytes": progress.bytes,
            }),
            Event::StagedIn(summary) => json!({
                "event": "staged-in", "target": self.target, "samples": summary.samples, "bytes": summary.bytes,
                "directories_and_symlinks": summary.others, "catalog_bytes": summary.catalog_bytes,
                "source_bytes": summary.source_bytes, "elapsed_ms": summary.elapsed_ms,
                "imbalance_permille": summary.imbalance_permille, "special_skipped": summary.counts.special,
                "refused": summary.counts.refused, "made_relative": summary.counts.made_relative,
                "unmarked_ends": summary.counts.unmarked_ends, "notes": summary.counts.notes,
            }),
            Event::Failed { reason } => json!({ "event": "failed", "reason": display(reason.as_bytes()) }),
            Event::Status(_) | Event::Down { .. } => return,
        };
        say!("{value}");
    }
}
