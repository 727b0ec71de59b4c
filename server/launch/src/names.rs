//! Who is who: nodes go by the names that their manager lists, and by addresses, never by a machine's identity.

use std::net::{IpAddr, ToSocketAddrs};

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

use crate::failure::Failure;

/// Nodes that are named when there are many.
const NAMED_MAX: usize = 8;

/// Addresses at which other machines may find this one; those of one interface, if it is named.
pub(crate) fn own_addresses(interface: Option<&str>) -> Result<Vec<IpAddr>, Failure> {
    let mut addresses = Vec::new();
    for found in getifaddrs().map_err(std::io::Error::from)? {
        let is_meant = match interface {
            Some(name) => found.interface_name == name,
            None => !found.flags.contains(InterfaceFlags::IFF_LOOPBACK),
        };
        let Some(address) =
            found.address.filter(|_| is_meant && found.flags.contains(InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING))
        else {
            continue;
        };
        let version_4 = address.as_sockaddr_in().map(|address| IpAddr::from(address.ip()));
        let version_6 = address.as_sockaddr_in6().map(|address| address.ip()).filter(|address| !address.is_unicast_link_local());
        addresses.extend(version_4.or(version_6.map(IpAddr::from)));
    }
    // Version 4 first: it is what is most surely routed.
    addresses.sort_by_key(IpAddr::is_ipv6);
    match (addresses.is_empty(), interface) {
        (false, _) => Ok(addresses),
        (true, Some(name)) => {
            Err(Failure::new(format!("the network interface '{name}' is not there, or down, or has no address")))
        }
        (true, None) => Ok(vec![IpAddr::from([127, 0, 0, 1])]),
    }
}

/// Whose place in the list it is: by name whole, by the name's first part, by address; else the first free one that has no name.
pub(super) fn place(hosts: &[String], names: &[String], addresses: &[IpAddr], is_free: &dyn Fn(usize) -> bool) -> Option<usize> {
    let host = |host: &str| host.rsplit('@').next().unwrap_or_default().to_owned();
    let by = |test: &dyn Fn(&str) -> bool| hosts.iter().position(|listed| !listed.is_empty() && test(&host(listed)));
    by(&|listed| names.iter().any(|name| name == listed))
        .or_else(|| by(&|listed| names.iter().any(|name| same_name(name, listed))))
        .or_else(|| by(&|listed| listed.parse().is_ok_and(|address: IpAddr| addresses.contains(&address))))
        .or_else(|| by(&|listed| !addresses.is_empty() && resolve(listed).iter().any(|address| addresses.contains(address))))
        .or_else(|| hosts.iter().enumerate().position(|(place, listed)| listed.is_empty() && is_free(place)))
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

/// Whether two names, one perhaps with its domain, are of one host.
pub(super) fn same_name(one: &str, other: &str) -> bool {
    let short = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
    !one.is_empty()
        && one.parse::<IpAddr>().is_err()
        && short(one) == short(other)
        && (one == other || !one.contains('.') || !other.contains('.'))
}

/// Names, some of them if they are many.
pub(super) fn few(names: &[String]) -> String {
    let shown = names[..names.len().min(NAMED_MAX)].join(", ");
    if names.len() > NAMED_MAX { format!("{shown} and {} more", names.len() - NAMED_MAX) } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_seated_by_name_or_address() {
        let hosts = ["n1.site", "n2", "user@n3", "10.0.0.4", "a.x", "a.y", ""].map(str::to_owned);
        let check = |names: &[&str], addresses: &[&str], expect| {
            let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            let addresses: Vec<_> = addresses.iter().map(|address| address.parse().unwrap()).collect();
            assert_eq!(place(&hosts[..6], &names, &addresses, &|_| true), expect, "{names:?}");
        };
        check(&["n1"], &[], Some(0));
        check(&["n2.site"], &[], Some(1));
        check(&["n3"], &[], Some(2));
        check(&["vm"], &["192.168.0.1", "10.0.0.4"], Some(3));
        check(&["a.y"], &[], Some(5));
        check(&["n4"], &["10.0.0.5"], None);
        assert_eq!(place(&hosts, &["n4".to_owned()], &[], &|place| place == 6), Some(6), "whoever");
        assert_eq!(few(&hosts[..2]), "n1.site, n2");
    }
}
