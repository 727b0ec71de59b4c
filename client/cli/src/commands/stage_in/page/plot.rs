//! Draws plots as SVG: lines over time, bars, and stacked bars.

use std::fmt::Write;

/// Size of a plot, in pixels.
const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 240.0;
/// Margins for labels.
const LEFT: f64 = 90.0;
const BOTTOM: f64 = 24.0;
const TOP: f64 = 10.0;
/// Height of a row of stacked bars or of the legend.
const ROW: f64 = 18.0;

/// Colors that most people with color blindness can also distinguish.
const COLORS: [&str; 10] =
    ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c00", "#7f3c8d", "#666666", "#11a579"];

/// A named line of a plot.
pub(super) struct Series {
    pub(super) name: String,
    pub(super) values: Vec<f64>,
}

/// Escapes text for HTML.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn color(number: usize) -> &'static str {
    COLORS[number % COLORS.len()]
}

/// Returns the largest value, or a tiny positive number instead of zero, so that callers can divide
/// by it.
fn most(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(f64::MIN_POSITIVE, f64::max)
}

fn open(height: f64) -> String {
    format!("<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\">")
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, text: &str) {
    let _ = write!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>", escape(text));
}

/// Draws names next to their colors. Returns the y coordinate below them.
fn legend(svg: &mut String, names: &[String], y: f64) -> f64 {
    let (mut x, mut y) = (LEFT, y);
    for (number, name) in names.iter().enumerate() {
        let width = 26.0 + 7.0 * name.chars().count() as f64;
        if x + width > WIDTH {
            (x, y) = (LEFT, y + ROW);
        }
        let _ = write!(svg, "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"10\" height=\"10\" fill=\"{}\"/>", color(number));
        text(svg, (x + 14.0, y + 9.0), "start", name);
        x += width;
    }
    y + ROW
}

/// Draws an axis with the largest value, half of it, and zero.
fn axis(svg: &mut String, most: f64, show: &dyn Fn(f64) -> String) {
    for share in [0.0, 0.5, 1.0] {
        let y = HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP);
        let _ = write!(svg, "<line x1=\"{LEFT}\" x2=\"{WIDTH}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>");
        text(svg, (LEFT - 6.0, y + 4.0), "end", &show(share * most));
    }
}

/// Draws lines over time. Neighboring values are `interval_s` seconds apart.
pub(super) fn lines(series: &[Series], interval_s: f64, show: &dyn Fn(f64) -> String) -> String {
    let names: Vec<String> = series.iter().map(|line| line.name.clone()).collect();
    let mut labels = String::new();
    let end = legend(&mut labels, &names, HEIGHT + 4.0);
    let mut svg = open(end) + &labels;
    let highest = most(series.iter().flat_map(|line| line.values.iter().copied()));
    axis(&mut svg, highest, show);
    let count = series.iter().map(|line| line.values.len()).max().unwrap_or(0);
    let step = (WIDTH - LEFT) / count.max(1) as f64;
    for (number, line) in series.iter().enumerate() {
        let point = |(at, value): (usize, &f64)| {
            format!("{:.1},{:.1} ", LEFT + (at as f64 + 0.5) * step, HEIGHT - BOTTOM - value / highest * (HEIGHT - BOTTOM - TOP))
        };
        let points: String = line.values.iter().enumerate().map(point).collect();
        let _ = write!(svg, "<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"1.5\" points=\"{points}\"/>", color(number));
    }
    text(&mut svg, (LEFT, HEIGHT - 8.0), "start", "0 s");
    text(&mut svg, (WIDTH, HEIGHT - 8.0), "end", &format!("{:.1} s", count as f64 * interval_s));
    svg + "</svg>"
}

/// Draws vertical bars, and a horizontal line at the value `mark`.
pub(super) fn bars(values: &[(String, f64)], mark: Option<f64>, show: &dyn Fn(f64) -> String) -> String {
    let mut svg = open(HEIGHT);
    let highest = most(values.iter().map(|(_, value)| *value));
    axis(&mut svg, highest, show);
    let step = (WIDTH - LEFT) / values.len().max(1) as f64;
    // With many bars, only some labels fit.
    let labelled = values.len().div_ceil(20).max(1);
    for (number, (name, value)) in values.iter().enumerate() {
        let (x, height) = (LEFT + number as f64 * step, value / highest * (HEIGHT - BOTTOM - TOP));
        let (y, width, fill) = (HEIGHT - BOTTOM - height, step * 0.9, color(0));
        let title = escape(&format!("{name}: {}", show(*value)));
        let _ = write!(
            svg,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{fill}\"><title>{title}</title></rect>"
        );
        if number % labelled == 0 {
            text(&mut svg, (x + width / 2.0, HEIGHT - 8.0), "middle", name);
        }
    }
    if let Some(mark) = mark {
        let y = HEIGHT - BOTTOM - mark / highest * (HEIGHT - BOTTOM - TOP);
        let _ = write!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{WIDTH}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#d55e00\" stroke-dasharray=\"6 3\"/>"
        );
    }
    svg + "</svg>"
}

/// Draws horizontal stacked bars, each scaled to the full width (`as_shares`) or all to the same
/// scale.
pub(super) fn stacks(rows: &[(String, Vec<f64>)], parts: &[String], as_shares: bool, show: &dyn Fn(f64) -> String) -> String {
    let mut svg = String::new();
    let top = legend(&mut svg, parts, 0.0) + 4.0;
    let whole = |values: &[f64]| values.iter().sum::<f64>();
    let longest = most(rows.iter().map(|(_, values)| whole(values)));
    for (number, (name, values)) in rows.iter().enumerate() {
        let y = top + number as f64 * ROW;
        let scale = if as_shares { whole(values).max(f64::MIN_POSITIVE) } else { longest };
        let mut x = LEFT;
        let short: String = name.chars().take(12).collect();
        text(&mut svg, (LEFT - 6.0, y + 11.0), "end", &short);
        for (part, value) in values.iter().enumerate() {
            let (width, height, fill) = (value / scale * (WIDTH - LEFT), ROW - 4.0, color(part));
            let of = parts.get(part).map_or("", String::as_str);
            let title = escape(&format!("{name}, {of}: {}", show(*value)));
            let _ = write!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height}\" fill=\"{fill}\"><title>{title}</title></rect>"
            );
            x += width;
        }
    }
    open(top + rows.len() as f64 * ROW) + &svg + "</svg>"
}
