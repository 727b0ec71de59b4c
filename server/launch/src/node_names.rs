//! Names and addresses of nodes.
//!
//! A node is known by the name that its manager lists, or by an address, and never by a machine's
//! identity: several users and jobs may run the same program on one node.

use std::net::{IpAddr, ToSocketAddrs};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::unistd::gethostname;

use crate::error::LaunchError;

/// Maximum number of names that a message lists.
const LISTED_NAMES_MAX: usize = 8;

/// Returns the addresses at which other machines may find this one. With `interface`, returns only
/// the addresses of that interface. IPv4 addresses come first.
pub(crate) fn own_addresses(interface: Option<&str>) -> Result<Vec<IpAddr>, LaunchError> {
    let mut addresses = Vec::new();
    for found in getifaddrs().map_err(LaunchError::io("cannot list the network interfaces"))? {
        let is_wanted = match interface {
            Some(name) => found.interface_name == name,
            None => !found.flags.contains(InterfaceFlags::IFF_LOOPBACK),
        };
        let is_up = found.flags.contains(InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING);
        let Some(address) = found.address.filter(|_| is_wanted && is_up) else { continue };
        let version_4 = address.as_sockaddr_in().map(|address| IpAddr::from(address.ip()));
        let version_6 = address.as_sockaddr_in6().map(|address| address.ip()).filter(|address| !address.is_unicast_link_local());
        addresses.extend(version_4.or(version_6.map(IpAddr::from)));
    }
    // IPv4 is more likely to be routed.
    addresses.sort_by_key(IpAddr::is_ipv6);
    match (addresses.is_empty(), interface) {
        (false, _) => Ok(addresses),
        (true, Some(name)) => Err(LaunchError::Interface { name: name.to_owned() }),
        (true, None) => Ok(vec![IpAddr::from([127, 0, 0, 1])]),
    }
}

/// Returns this machine's host name, or an empty string if there is none or it is not UTF-8.
pub(crate) fn own_host_name() -> String {
    gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default()
}

/// Finds a joining server's index in the list of hosts.
///
/// A match of the whole name takes precedence over a match of its first part, and both take
/// precedence over a match of an address. If nothing matches, the server gets the first free index
/// that has no name, as with `--launcher manual`.
pub(crate) fn host_index(
    hosts: &[String],
    names: &[String],
    addresses: &[IpAddr],
    is_free: &dyn Fn(usize) -> bool,
) -> Option<usize> {
    let without_user = |host: &str| host.rsplit('@').next().unwrap_or_default().to_owned();
    let find = |test: &dyn Fn(&str) -> bool| hosts.iter().position(|listed| !listed.is_empty() && test(&without_user(listed)));
    find(&|listed| names.iter().any(|name| name == listed))
        .or_else(|| find(&|listed| names.iter().any(|name| is_same_host(name, listed))))
        .or_else(|| find(&|listed| listed.parse().is_ok_and(|address: IpAddr| addresses.contains(&address))))
        .or_else(|| find(&|listed| !addresses.is_empty() && resolve(listed).iter().any(|address| addresses.contains(address))))
        .or_else(|| hosts.iter().enumerate().position(|(index, listed)| listed.is_empty() && is_free(index)))
}

fn resolve(host: &str) -> Vec<IpAddr> {
    (host, 0)
        .to_socket_addrs()
        .into_iter()
        .flatten()
        .map(|address| address.ip())
        .filter(|address| !address.is_loopback())
        .collect()
}

/// Returns whether two names refer to the same host, even if one lacks its domain.
pub(crate) fn is_same_host(one: &str, other: &str) -> bool {
    let short = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
    !one.is_empty()
        && one.parse::<IpAddr>().is_err()
        && short(one) == short(other)
        && (one == other || !one.contains('.') || !other.contains('.'))
}

/// Lists names for a message, and shortens a long list.
pub(crate) fn shortened_list(names: &[String]) -> String {
    let shown = names[..names.len().min(LISTED_NAMES_MAX)].join(", ");
    if names.len() > LISTED_NAMES_MAX { format!("{shown} and {} more", names.len() - LISTED_NAMES_MAX) } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_joining_server_is_matched_by_name_or_address() {
        let hosts = ["n1.site", "n2", "user@n3", "10.0.0.4", "a.x", "a.y", ""].map(str::to_owned);
        let check = |names: &[&str], addresses: &[&str], expect| {
            let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            let addresses: Vec<_> = addresses.iter().map(|address| address.parse().unwrap()).collect();
            assert_eq!(host_index(&hosts[..6], &names, &addresses, &|_| true), expect, "{names:?}");
        };
        check(&["n1"], &[], Some(0));
        check(&["n2.site"], &[], Some(1));
        check(&["n3"], &[], Some(2));
        check(&["vm"], &["192.168.0.1", "10.0.0.4"], Some(3));
        check(&["a.y"], &[], Some(5));
        check(&["n4"], &["10.0.0.5"], None);
        assert_eq!(host_index(&hosts, &["n4".to_owned()], &[], &|index| index == 6), Some(6), "any server fits a nameless host");
        assert_eq!(shortened_list(&hosts[..2]), "n1.site, n2");
    }
}
