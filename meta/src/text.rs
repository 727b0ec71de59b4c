//! Text in messages for users: sizes in binary units, and errors of the operating system.

use std::borrow::Cow;

const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/// Formats a number of bytes with one decimal and a binary unit.
///
/// ```
/// assert_eq!(dayfly_meta::text::show_bytes(1536), "1.5KiB");
/// assert_eq!(dayfly_meta::text::show_bytes(1023), "1023B");
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

/// What the standard library appends to each error of the operating system, before its number.
const NUMBER_START: &str = " (os error ";

/// Removes the numbers that the standard library appends to errors of the operating system, which
/// say nothing to users.
///
/// ```
/// let message = "cannot read 'a': No such file or directory (os error 2); skip it with --keep-going";
/// let plain = "cannot read 'a': No such file or directory; skip it with --keep-going";
/// assert_eq!(dayfly_meta::text::without_os_numbers(message), plain);
/// ```
pub fn without_os_numbers(message: &str) -> Cow<'_, str> {
    if !message.contains(NUMBER_START) {
        return Cow::Borrowed(message);
    }
    let mut parts = message.split(NUMBER_START);
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.split_once(')') {
            Some((number, rest)) if number.parse::<i32>().is_ok() => plain.push_str(rest),
            _ => plain.extend([NUMBER_START, part]),
        }
    }
    Cow::Owned(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_numbers_of_errors_are_removed() {
        let check = |message: &str, expect: &str| assert_eq!(without_os_numbers(message), expect);
        check(&std::io::Error::from_raw_os_error(13).to_string(), "Permission denied");
        check("a (os error 2): b (os error 5); c", "a: b; c");
        check("'a (os error x)' (os error ", "'a (os error x)' (os error ");
        check("none", "none");
    }
}
