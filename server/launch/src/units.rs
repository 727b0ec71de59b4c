//! Quantities in messages: sizes in binary units, counted nouns with the right plural, and text cut
//! to a bounded length.

pub use dayfly_meta::text::show_bytes;

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
