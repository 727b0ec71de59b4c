//! Writes the report of a stage-in: one self-contained HTML page, with plots of where the time went
//! and how the samples are spread.

mod plot;

use std::fmt::Write;

use dayfly_meta::path::display;
use dayfly_meta::text::without_os_numbers;
use dayfly_meta::wire::control::{ClassShare, NodeShare, Step, Summary};

use crate::size;
use plot::{Series, bars, escape, lines, stacks};

/// If there are more nodes than this, only their sum is drawn, because nobody could distinguish the
/// lines and colors.
const NODES_DRAWN_MAX: usize = 16;
/// How many classes are drawn, the largest first.
const CLASSES_DRAWN_MAX: usize = 60;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}\
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}table{border-collapse:collapse}td,th{padding:.15em 1em .15em 0;text-align:left}\
svg{width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#444}.note{color:#666;font-size:.9em}";

/// Returns the page as HTML.
pub(super) fn page(target: &str, summary: &Summary) -> String {
    let mut page = String::new();
    let title = format!("Stage-in of {}", escape(target));
    let _ = write!(
        page,
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"
    );
    page.push_str(&numbers(summary));
    section(&mut page, "Rate of reading", "Bytes of the sources that each node read per second, over time.", &rates(summary));
    let note = "Seconds that the threads of each node spent on each step, including waiting. The longest step is the bottleneck.";
    section(&mut page, "Time by step", note, &steps(summary));
    let note = "Bytes that each node owns; the line is the mean. Nodes with more space get more.";
    section(&mut page, "Balance of bytes", note, &balance(summary, |node| node.bytes, &|value| size::show(value as u64)));
    section(&mut page, "Balance of samples", note, &balance(summary, |node| node.samples, &|value| format!("{value:.0}")));
    section(&mut page, "Sizes", "Samples by size; each bar covers twice the range of the one before.", &sizes(summary));
    if !summary.classes.is_empty() {
        let note = "How the samples of each top-level directory are spread over the nodes, the largest directory first. The first bar shows \
                    all samples. If directories are classes, similar bars mean that every node has its share of each class.";
        section(&mut page, "Balance of classes", note, &classes(summary));
    }
    let left_out = summary.counts.notes.iter().chain(&summary.counts.skipped_notes);
    let notes: String = left_out.map(|note| format!("<li>{}</li>", escape(&without_os_numbers(note)))).collect();
    if !notes.is_empty() {
        let _ = write!(page, "<h2>Remarks</h2><ul>{notes}</ul>");
    }
    page.push_str("</html>\n");
    page
}

fn section(page: &mut String, title: &str, note: &str, plot: &str) {
    let _ = write!(page, "<h2>{title}</h2><p class=\"note\">{note}</p>{plot}");
}

fn numbers(summary: &Summary) -> String {
    let seconds = (summary.elapsed_ms as f64 / 1000.0).max(0.001);
    let shipped: u64 = summary.nodes.iter().map(|node| node.counted.shipped_bytes).sum();
    let rows = [
        ("samples", format!("{}", summary.samples)),
        ("bytes", size::show(summary.bytes)),
        ("directories and symbolic links", format!("{}", summary.others)),
        (
            "time",
            format!(
                "{seconds:.2} s: {:.0} samples/s, {}/s",
                summary.samples as f64 / seconds,
                size::show((summary.bytes as f64 / seconds) as u64)
            ),
        ),
        (
            "read from the sources",
            format!("{}, including {} read twice", size::show(summary.source_bytes), size::show(summary.redone_bytes)),
        ),
        ("sent to other nodes", size::show(shipped)),
        ("catalog on each node", size::show(summary.catalog_bytes)),
        ("fullest node", format!("{:.1} % over the mean", summary.imbalance_permille as f64 / 10.0)),
        ("bottleneck", summary.bottleneck().name().to_owned()),
        (
            "left out",
            format!(
                "{} unreadable, {} refused, {} replaced, {} special",
                summary.counts.skipped, summary.counts.refused, summary.counts.replaced, summary.counts.special
            ),
        ),
    ];
    let rows: String = rows.iter().map(|(name, value)| format!("<tr><th>{name}</th><td>{value}</td></tr>")).collect();
    format!("<table>{rows}</table>")
}

fn node_name(node: usize) -> String {
    format!("node {node}")
}

fn rates(summary: &Summary) -> String {
    let interval_s = summary.rate_interval_ms.max(1) as f64 / 1000.0;
    let len = summary.nodes.iter().map(|node| node.rates.len()).max().unwrap_or(0);
    let rate = |node: &NodeShare, at: usize| node.rates.get(at).copied().unwrap_or(0) as f64 / interval_s;
    let mut series = Vec::new();
    if summary.nodes.len() <= NODES_DRAWN_MAX {
        series.extend(
            summary
                .nodes
                .iter()
                .enumerate()
                .map(|(number, node)| Series { name: node_name(number), values: (0..len).map(|at| rate(node, at)).collect() }),
        );
    }
    if summary.nodes.len() > 1 {
        let values = (0..len).map(|at| summary.nodes.iter().map(|node| rate(node, at)).sum()).collect();
        series.push(Series { name: "all".to_owned(), values });
    }
    lines(&series, interval_s, &|value| format!("{}/s", size::show(value as u64)))
}

fn steps(summary: &Summary) -> String {
    let seconds = |node: &NodeShare, step: Step| node.counted.busy_ns[step as usize] as f64 / 1e9;
    let mut rows: Vec<(String, Vec<f64>)> = Vec::new();
    let sum = |step| summary.nodes.iter().map(|node| seconds(node, step)).sum();
    rows.push(("all".to_owned(), Step::ALL.iter().map(|&step| sum(step)).collect()));
    for (number, node) in summary.nodes.iter().enumerate().take(NODES_DRAWN_MAX) {
        rows.push((node_name(number), Step::ALL.iter().map(|&step| seconds(node, step)).collect()));
    }
    stacks(&rows, &Step::ALL.map(|step| step.name().to_owned()), false, &|value| format!("{value:.2} s"))
}

fn balance(summary: &Summary, value: impl Fn(&NodeShare) -> u64, show: &dyn Fn(f64) -> String) -> String {
    let values: Vec<(String, f64)> =
        summary.nodes.iter().enumerate().map(|(number, node)| (format!("{number}"), value(node) as f64)).collect();
    let mean = values.iter().map(|(_, value)| value).sum::<f64>() / values.len().max(1) as f64;
    bars(&values, Some(mean), show)
}

fn sizes(summary: &Summary) -> String {
    let first = summary.sizes.iter().position(|&count| count > 0).unwrap_or(0);
    let last = summary.sizes.iter().rposition(|&count| count > 0).unwrap_or(0);
    let name = |number: usize| match number {
        0 => "0".to_owned(),
        _ => size::show(1 << (number - 1)),
    };
    let counted = (first..=last).map(|number| (name(number), summary.sizes.get(number).copied().unwrap_or(0) as f64));
    bars(&counted.collect::<Vec<_>>(), None, &|value| format!("{value:.0}"))
}

fn classes(summary: &Summary) -> String {
    let all = ("(all)".to_owned(), summary.nodes.iter().map(|node| node.samples as f64).collect());
    let row = |class: &ClassShare| (display(&class.name), class.samples.iter().map(|&samples| samples as f64).collect());
    let rows: Vec<(String, Vec<f64>)> =
        std::iter::once(all).chain(summary.classes.iter().take(CLASSES_DRAWN_MAX).map(row)).collect();
    let names: Vec<String> = (0..summary.nodes.len()).map(node_name).collect();
    stacks(&rows, &names, true, &|value| format!("{value:.0}"))
}

#[cfg(test)]
mod tests {
    use dayfly_meta::wire::control::Counted;

    use super::*;

    #[test]
    fn the_page_is_complete_and_names_are_escaped() {
        let counted = Counted { busy_ns: [5, 4, 3, 2, 1], ..Counted::default() };
        let node = NodeShare { samples: 3, bytes: 300, unstored_bytes: 0, counted, rates: vec![100, 200] };
        let mut summary = Summary { samples: 6, nodes: vec![node; 2], rate_interval_ms: 200, ..Summary::default() };
        summary.sizes = vec![1, 0, 5];
        summary.classes = vec![ClassShare { name: b"<script>&\"".to_vec(), samples: vec![1, 2] }];
        summary.counts.skip("left <b>out</b>");
        let page = page("/dayfly/<x>", &summary);
        assert!(!page.contains("<script>") && !page.contains("<b>") && !page.contains("<x>"));
        assert!(!page.contains("http:") || !page.contains("src="), "nothing is loaded from elsewhere");
        assert!(!page.contains("NaN") && !page.contains("inf"));
        assert_eq!((page.matches("<svg").count(), page.matches("</svg>").count()), (6, 6));
        let empty = super::page("x", &Summary::default());
        assert!(!empty.contains("NaN") && !empty.contains("inf"));
    }
}
