//! Parses sizes on the command line, such as `10GiB`.

pub(crate) use dayfly_launch::units::show_bytes as show;

/// Parses `10GiB` and `512M` (binary), `5GB` (decimal), or plain bytes.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let invalid = || format!("'{text}' is not a size; write it as 10GiB, 512MiB or plain bytes");
    let too_large = || format!("'{text}' is too large; a size is less than 16EiB");
    let text = text.trim();
    let digits = text.find(|character: char| !character.is_ascii_digit() && character != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim().to_ascii_lowercase();
    let power = |letter: &str| "bkmgtpe".find(letter).map(|power| power as u32);
    let factor = match unit.as_str() {
        "" | "b" => 1,
        _ if unit.len() == 3 && unit.ends_with("ib") => {
            1024_u64.pow(power(&unit[..1]).filter(|&power| power > 0).ok_or_else(invalid)?)
        }
        _ if unit.len() == 2 && unit.ends_with('b') => {
            1000_u64.pow(power(&unit[..1]).filter(|&power| power > 0).ok_or_else(invalid)?)
        }
        _ if unit.len() == 1 => 1024_u64.pow(power(&unit).ok_or_else(invalid)?),
        _ => return Err(invalid()),
    };
    match number.parse::<u64>() {
        Ok(number) => number.checked_mul(factor).ok_or_else(too_large),
        Err(_) => {
            let bytes = number.parse::<f64>().map_err(|_| invalid())? * factor as f64;
            if bytes.is_finite() && bytes < u64::MAX as f64 { Ok(bytes as u64) } else { Err(too_large()) }
        }
    }
}

/// Parses a size per second, with or without a trailing `/s`. A rate of 0 is refused, because a
/// stage-in would never finish.
pub(crate) fn parse_rate(text: &str) -> Result<u64, String> {
    let text = text.trim();
    match parse(text.strip_suffix("/s").unwrap_or(text))? {
        0 => Err("a stage-in at a rate of 0 would never finish".to_owned()),
        rate => Ok(rate),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_and_shown() {
        let check = |text, expect| assert_eq!(parse(text).ok(), expect, "{text}");
        check("0", Some(0));
        check("10GiB", Some(10 << 30));
        check("512M", Some(512 << 20));
        check("1.5k", Some(1536));
        check("2GB", Some(2_000_000_000));
        check("7 b", Some(7));
        check("15EiB", Some(15 << 60));
        for wrong in ["", "x", "-1", "1XiB", "1BiB", "99999999999PiB", "1.2.3G", "GiB"] {
            check(wrong, None);
        }
        for (text, word) in [("1XiB", "is not a size"), ("16EiB", "is too large"), ("99999999999PiB", "is too large")] {
            assert!(parse(text).unwrap_err().contains(word), "{text}");
        }
        assert_eq!((show(1023), show(1536), show(10 << 30)), ("1023B".into(), "1.5KiB".into(), "10.0GiB".into()));
    }
}
