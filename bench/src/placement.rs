//! Measures placement: the time and memory to build it, the time to ask it, and how evenly it
//! spreads blocks.

mod plot;
mod spread;

use std::fs;
use std::hint::black_box;

use clap::Args;
use dayfly_meta::id::NodeId;
use dayfly_meta::placement::{Member, NodeSet, Placement};

use crate::measure::{Failure, median, time};

/// Paths that a timed round asks for.
const PATHS: usize = 100_000;
const ROUNDS: usize = 5;

/// Print the time and memory that a placement takes, and how evenly it spreads blocks
#[derive(Args)]
pub(crate) struct Measure {
    /// Seed of the placement
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Blocks to place where shares cannot be computed
    #[arg(long, default_value_t = 8_000_000)]
    blocks: u64,
    /// Print, as SVG, how many samples of a class lie on a node, for 1,000 classes of 100 samples on
    /// 8 nodes
    #[arg(long)]
    plot: bool,
}

pub(crate) fn run(arguments: &Measure) -> Result<(), Failure> {
    if arguments.plot {
        return plot::print(arguments.seed);
    }
    let before_kib = peak_resident_kib()?;
    let largest = Placement::new(arguments.seed, &equal(4096));
    let after_kib = peak_resident_kib()?;
    println!("peak resident memory while 4096 nodes are placed: +{} KiB", after_kib - before_kib);
    drop(largest);
    print_builds(arguments.seed);
    spread::print(arguments.seed, arguments.blocks)
}

fn equal(nodes: u16) -> Vec<Member> {
    (0..nodes).map(|node| Member { node: NodeId(node), capacity: 1 << 40 }).collect()
}

/// Returns members of which every second one has `ratio` times as much room as the others.
fn unequal(nodes: u16, ratio: u64) -> Vec<Member> {
    let capacity = |node| if node % 2 == 0 { 1 << 40 } else { ratio << 40 };
    (0..nodes).map(|node| Member { node: NodeId(node), capacity: capacity(node) }).collect()
}

/// Prints a row for each session: what its placement costs, and the exact shares of its nodes per
/// unit of capacity.
fn print_builds(seed: u64) {
    println!();
    println!("nodes capacities  build ms  memory KiB  owner ns  max/mean  min/mean   owner ns, skipped: half  all but 1   all");
    for nodes in [4, 16, 256, 1024, 4096] {
        for ratio in [1, 4, 100] {
            let members = unequal(nodes, ratio);
            let build_s = median((0..ROUNDS).map(|_| time(|| black_box(Placement::new(seed, &members))).0).collect());
            let placement = Placement::new(seed, &members);
            let shares = placement.shares();
            let total: f64 = members.iter().map(|member| member.capacity as f64).sum();
            let per_capacity = |member: &Member| shares.get(&member.node).unwrap_or(&0.0) * total / member.capacity as f64;
            let (most, least) = extremes(members.iter().map(per_capacity));
            let skip = |is_skipped: fn(u16) -> bool| (0..nodes).filter(|&node| is_skipped(node)).map(NodeId).collect::<NodeSet>();
            // The halves hold as many small nodes as large ones.
            let sets = [skip(|_| false), skip(|node| node % 4 < 2), skip(|node| node > 0), skip(|_| true)];
            let [all, half, one, none] = sets.map(|skipped| owner_ns(&placement, &skipped));
            println!(
                "{nodes:5} {:>10} {:9.3} {:11} {all:9.0} {most:9.4} {least:9.4} {half:25.0} {one:10.0} {none:5.0}",
                format!("1:{ratio}"),
                build_s * 1e3,
                placement.memory_len() >> 10,
            );
        }
    }
}

fn extremes(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((0.0, f64::INFINITY), |(most, least), value| (value.max(most), value.min(least)))
}

fn owner_ns(placement: &Placement, skipped: &NodeSet) -> f64 {
    let paths: Vec<String> = (0..PATHS).map(|at| format!("n{:08}/n{:08}_{at}.JPEG", at % 1000, at % 1000)).collect();
    let ask_all = || {
        paths.iter().for_each(|path| {
            black_box(placement.owner(path.as_bytes(), 0, skipped));
        });
    };
    median((0..ROUNDS).map(|_| time(ask_all).0).collect()) * 1e9 / PATHS as f64
}

fn peak_resident_kib() -> Result<u64, Failure> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("/proc/self/status has no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
