//! Plots how classes are spread over nodes, compared with chance alone. The plot is
//! `docs/placement.svg`.

use std::fmt::Write;

use dayfly_meta::placement::{NodeSet, Placement};

use super::equal;
use crate::measure::Failure;

const CLASSES: usize = 1000;
const SAMPLES: usize = 100;
const NODES: u16 = 8;
const MOST: usize = 30;

pub(super) fn print(seed: u64) -> Result<(), Failure> {
    let placement = Placement::new(seed, &equal(NODES));
    let mut cells = vec![[0_usize; NODES as usize]; CLASSES];
    for (class, counts) in cells.iter_mut().enumerate() {
        for sample in 0..SAMPLES {
            let path = format!("n{class:08}/n{class:08}_{sample}.JPEG");
            counts[placement.owner(path.as_bytes(), 0, &NodeSet::new()).ok_or("no members")?.index()] += 1;
        }
    }
    let shares: Vec<f64> = (0..NODES as usize)
        .map(|node| cells.iter().map(|counts| counts[node]).sum::<usize>() as f64 / (CLASSES * SAMPLES) as f64)
        .collect();
    let mut seen = [0.0; MOST];
    cells.iter().flatten().for_each(|&count| seen[count.min(MOST - 1)] += 1.0);
    let chance = |count: usize| CLASSES as f64 * shares.iter().map(|&share| binomial(SAMPLES, count, share)).sum::<f64>();
    println!("{}", draw(&seen, &chance, &shares));
    Ok(())
}

/// Returns the probability of `count` successes in `of` trials, each of which succeeds with `probability`.
fn binomial(of: usize, count: usize, probability: f64) -> f64 {
    let ways = (0..count).map(|at| ((of - at) as f64).ln() - ((at + 1) as f64).ln()).sum::<f64>();
    (ways + count as f64 * probability.ln() + (of - count) as f64 * (1.0 - probability).ln()).exp()
}

fn draw(seen: &[f64; MOST], chance: &dyn Fn(usize) -> f64, shares: &[f64]) -> String {
    let highest = seen.iter().copied().fold(1.0, f64::max) * 1.1;
    let (x, y) = (|count: usize| 40.0 + 24.0 * count as f64, |value: f64| 250.0 - 220.0 * value / highest);
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 780 310\" font-family=\"sans-serif\" font-size=\"11\">",
    );
    let mut points = String::new();
    for (count, &value) in seen.iter().enumerate() {
        let (left, top) = (x(count), y(value));
        let _ = write!(svg, "<rect x=\"{left:.0}\" y=\"{top:.1}\" width=\"18\" height=\"{:.1}\" fill=\"#56b4e9\"/>", 250.0 - top);
        let _ = write!(svg, "<text x=\"{:.0}\" y=\"264\" text-anchor=\"middle\">{count}</text>", left + 9.0);
        let _ = write!(points, "{:.0},{:.1} ", left + 9.0, y(chance(count)));
    }
    let _ = write!(svg, "<polyline points=\"{points}\" fill=\"none\" stroke=\"#d55e00\" stroke-width=\"2\"/>");
    let shares: Vec<String> = shares.iter().map(|share| format!("{:.1} %", share * 100.0)).collect();
    let _ = write!(
        svg,
        "<text x=\"40\" y=\"284\">samples of a class on a node (bars: pairs of class and node; line: chance alone, given the shares of the nodes)</text>\
         <text x=\"40\" y=\"302\">shares of the 8 nodes: {}</text></svg>",
        shares.join(", ")
    );
    svg
}
