//! `dayfly top`: shows what is being read, from where, and what slows readers down.

mod bottleneck;

use std::io::{IsTerminal, stdout};
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use dayfly_launch::units::counted;
use dayfly_meta::limits::CLIENTS_SHOWN_MAX;
use dayfly_meta::metrics::SOURCE_NAMES;
use dayfly_meta::wire::status::{ClientStatus, NodeStatus, Reads, SOURCES, Status, total};

use super::query;
use crate::args::TopArguments;
use crate::failure::{Failure, check_output, print_line};
use crate::size::show;
pub(super) use bottleneck::bottleneck;

/// Moves a terminal's cursor to the first line and clears the screen.
const CLEAR: &str = "\x1b[H\x1b[J";

pub(super) fn run(arguments: &TopArguments) -> Result<ExitCode, Failure> {
    let is_terminal = stdout().is_terminal();
    let mut left = arguments.count.or(if is_terminal { None } else { Some(1) });
    let (session, mut before) = query::status()?;
    let mut last = Instant::now();
    while left != Some(0) {
        sleep(Duration::from_secs_f64(arguments.interval));
        let (_, now) = query::status()?;
        let seconds = last.elapsed().as_secs_f64();
        last = Instant::now();
        let clear = if is_terminal { CLEAR } else { "" };
        print_line!("{clear}session {}, {}, over {seconds:.1} s", session.id(), counted(session.nodes().into(), "node"));
        show_nodes(&before, &now, seconds);
        print_line!("{}", bottleneck(&before, &now, seconds));
        check_output()?;
        before = now;
        left = left.map(|left| left - 1);
    }
    Ok(ExitCode::SUCCESS)
}

fn show_nodes(before: &Status, now: &Status, seconds: f64) {
    let [own, cached, arena, asked] = ["own", SOURCE_NAMES[1], SOURCE_NAMES[2], SOURCE_NAMES[3]];
    print_line!(
        "{:<12} {:>10} {:>10} {own:>6} {cached:>6} {arena:>6} {asked:>6} {:>10} {:>16} {:>22} {:>9} {:>7}",
        "node",
        "reads/s",
        "bytes/s",
        "remote/s",
        "wait p50/p99",
        "prefetch hit/late/lost",
        "ahead",
        "queued"
    );
    for (old, new) in before.nodes.iter().zip(&now.nodes) {
        let (Ok(old), Ok(status)) = (&old.status, &new.status) else {
            let state = if new.lost_for_ms.is_some() { "lost" } else { "does not answer" };
            print_line!("{:<12} {state}", new.node.to_string());
            continue;
        };
        let read = less(&status.reads, &old.reads);
        let remote = status.remote.bytes.saturating_sub(old.remote.bytes);
        let prefetch = status.prefetch;
        print_line!(
            "{} {:>10} {:>16} {:>22} {:>9} {:>7}",
            rates(&format!("{}", new.node), &read, seconds),
            show((remote as f64 / seconds) as u64),
            format!("{}/{} us", status.wait_us[0], status.wait_us[2]),
            format!(
                "{}/{}/{}",
                prefetch.hits - old.prefetch.hits.min(prefetch.hits),
                prefetch.late - old.prefetch.late.min(prefetch.late),
                prefetch.wasted - old.prefetch.wasted.min(prefetch.wasted)
            ),
            show(prefetch.depth_bytes),
            status.queued,
        );
        show_clients(old, status, seconds);
    }
}

fn show_clients(before: &NodeStatus, now: &NodeStatus, seconds: f64) {
    for client in &now.busiest {
        let old = match before.busiest.iter().find(|old| old.pid == client.pid) {
            Some(old) => *old,
            // A client may have existed before without being among the busiest, and then its
            // earlier counts are unknown.
            None if before.busiest.len() == CLIENTS_SHOWN_MAX => continue,
            None => ClientStatus::default(),
        };
        let read = less(&client.reads, &old.reads);
        if total(&read).count > 0 {
            print_line!("{}", rates(&format!("  pid {}", client.pid), &read, seconds));
        }
    }
}

/// Formats a line of rates, with the share of each source of reads.
fn rates(name: &str, read: &[Reads; SOURCES], seconds: f64) -> String {
    let all = total(read);
    let shares: Vec<String> =
        read.iter().map(|reads| format!("{:>5}%", (reads.bytes * 100).checked_div(all.bytes).unwrap_or(0))).collect();
    let bytes = show((all.bytes as f64 / seconds) as u64);
    format!("{name:<12} {:>10.0} {bytes:>10} {}", all.count as f64 / seconds, shares.join(" "))
}

fn less(now: &[Reads; SOURCES], before: &[Reads; SOURCES]) -> [Reads; SOURCES] {
    std::array::from_fn(|source| Reads {
        count: now[source].count.saturating_sub(before[source].count),
        bytes: now[source].bytes.saturating_sub(before[source].bytes),
    })
}
