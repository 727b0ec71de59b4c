//! Quantities in messages: sizes in binary units, counted nouns with the right plural, and text cut
//! to a bounded length.

const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/// Formats a number of bytes with one decimal and a binary unit.
///
/// ```
/// assert_eq!(dayfly_launch::units::show_bytes(1536), "1.5KiB");
/// assert_eq!(dayfly_launch::units::show_bytes(1023), "1023B");
/// ```
pub fn show_bytes(bytes: u64) -> String {
    let mut unit = 0;
    let mut value = bytes as f64;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes}B") } else { format!("{value:.1}{}", UNITS[unit]) }
}

/// Formats a count with its noun, which is given in the singular.
///
/// ```
/// assert_eq!(dayfly_launch::units::counted(1, "node"), "1 node");
/// assert_eq!(dayfly_launch::units::counted(2, "directory"), "2 directories");
/// assert_eq!(dayfly_launch::units::counted(0, "bad copy"), "0 bad copies");
/// ```
pub fn counted(count: u64, noun: &str) -> String {
    match noun.strip_suffix('y').filter(|stem| !stem.ends_with(['a', 'e', 'i', 'o', 'u'])) {
        Some(stem) => counted_as(count, noun, &format!("{stem}ies")),
        None => counted_as(count, noun, &format!("{noun}s")),
    }
}

/// Like [`counted`], for nouns with an unusual plural.
///
/// ```
/// assert_eq!(dayfly_launch::units::counted_as(2, "leaf", "leaves"), "2 leaves");
/// ```
pub fn counted_as(count: u64, singular: &str, plural: &str) -> String {
    format!("{count} {}", if count == 1 { singular } else { plural })
}

/// Returns at most `len_max` characters of a text, with an ellipsis if any are missing.
pub(crate) fn shortened(text: &str, len_max: usize) -> String {
    match text.char_indices().nth(len_max) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
