//! Lists of hosts, as managers and people write them.

use dayfly_meta::limits::NODES_MAX;

/// Hosts of a list such as `n[1-3,07],login,r[1-2]c[1-4]`, in order.
pub(super) fn expand(list: &str) -> Result<Vec<String>, String> {
    let mut hosts = Vec::new();
    for item in split(list) {
        expand_one(item, &mut hosts).ok_or_else(|| format!("'{list}' is no list of hosts"))?;
        if hosts.len() > NODES_MAX {
            return Err(format!("'{list}' names more than {NODES_MAX} hosts"));
        }
    }
    Ok(hosts)
}

/// Hosts of a file: the first word of each line, each host once, without `:slots`.
pub(super) fn of_file(content: &str) -> Result<Vec<String>, String> {
    let mut hosts: Vec<String> = Vec::new();
    for line in content.lines() {
        let word = line.split('#').next().unwrap_or_default().split_whitespace().next().unwrap_or_default();
        // `host:4` is four slots; `::1` is an address.
        let name = word.split_once(':').filter(|(_, slots)| slots.parse::<u32>().is_ok()).map_or(word, |(name, _)| name);
        for host in expand(name)? {
            if !hosts.contains(&host) {
                hosts.push(host);
            }
        }
    }
    Ok(hosts)
}

/// Parts a list at the commas and spaces that are in no brackets.
fn split(list: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0;
    let is_end = move |letter: char| {
        depth += i32::from(letter == '[') - i32::from(letter == ']');
        depth == 0 && (letter == ',' || letter.is_whitespace())
    };
    list.split(is_end).filter(|item| !item.is_empty())
}

fn expand_one(item: &str, hosts: &mut Vec<String>) -> Option<()> {
    let Some((before, rest)) = item.split_once('[') else {
        // A name that begins with a dash would be an option to whoever starts something there.
        let is_name =
            !item.starts_with('-') && item.chars().all(|letter| letter.is_ascii_alphanumeric() || "._-@:%".contains(letter));
        return is_name.then(|| hosts.push(item.to_owned()));
    };
    let (ranges, after) = rest.split_once(']')?;
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (from, to): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if to < from || (to - from) as usize >= NODES_MAX {
            return None;
        }
        for number in from..=to {
            expand_one(&format!("{before}{number:0width$}{after}", width = first.len()), hosts)?;
            if hosts.len() > NODES_MAX {
                return Some(());
            }
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_expanded_as_managers_mean_them() {
        let check = |list: &str, expect: Option<&str>| {
            let found = expand(list).ok().map(|hosts| hosts.join(" "));
            assert_eq!(found.as_deref(), expect, "{list}");
        };
        check("n[1-3,7],login", Some("n1 n2 n3 n7 login"));
        check("node[008-011].site", Some("node008.site node009.site node010.site node011.site"));
        check("r[1-2]c[1-2]", Some("r1c1 r1c2 r2c1 r2c2"));
        check("a b,c", Some("a b c"));
        check("10.0.0.1,user@host,fe80::1%eth0", Some("10.0.0.1 user@host fe80::1%eth0"));
        check("", Some(""));
        for wrong in ["n[1-", "n[3-1]", "n[x]", "-oProxyCommand=x", "a;b", "n[0-4294967295]", "$(id)"] {
            check(wrong, None);
        }
    }

    #[test]
    fn a_file_names_each_host_once() {
        let content = "# mine\nn1 slots=4\nn1\nn2:8\n\n  n[3-4] # two\n::1\n";
        assert_eq!(of_file(content).unwrap(), ["n1", "n2", "n3", "n4", "::1"]);
    }
}
