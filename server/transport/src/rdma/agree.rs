//! What a session's nodes agree on before it begins: RDMA for all, or TCP for all, and why.

use serde::{Deserialize, Serialize};

/// What the user wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Preference {
    /// RDMA where every pair of nodes has it, else TCP.
    #[default]
    Auto,
    /// RDMA, or no session.
    Rdma,
    /// TCP.
    Tcp,
    /// RDMA by the second provider, or no session.
    #[cfg(feature = "async-rdma")]
    AsyncRdma,
}

/// What a node has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ability {
    /// Its port, or why there is none.
    pub rdma: Result<Port, String>,
}

/// A port that works.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// `NAME:PORT`.
    pub device: String,
    /// RoCE, or else InfiniBand.
    pub is_ethernet: bool,
    /// Largest packet in bytes.
    pub packet_len: u32,
    /// As people write it.
    pub address: String,
}

/// What all nodes do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Agreement {
    /// RDMA between all.
    Rdma {
        /// What is not as it should be.
        note: Option<String>,
    },
    /// TCP between all.
    Tcp {
        /// Why not RDMA.
        why: String,
    },
}

/// Finds what all nodes can do; `failed` are pairs that tried in vain, in words. An error is why what was insisted on cannot be.
pub fn agree(preference: Preference, nodes: &[Ability], failed: &[String]) -> Result<Agreement, String> {
    let without = nodes.iter().enumerate().find_map(|(node, ability)| {
        let why = ability.rdma.as_ref().err()?;
        Some(format!("node {node} has no RDMA: {why}"))
    });
    let ports: Vec<&Port> = nodes.iter().filter_map(|ability| ability.rdma.as_ref().ok()).collect();
    let differs = |is_other: &dyn Fn(&Port, &Port) -> bool| {
        let first = *ports.first()?;
        let node = ports.iter().position(|port| is_other(first, port))?;
        Some((node, first, ports[node]))
    };
    let mixed = differs(&|one, other| one.is_ethernet != other.is_ethernet).map(|(node, first, other)| {
        let kind = |port: &Port| if port.is_ethernet { "Ethernet" } else { "InfiniBand" };
        format!(
            "node 0's {} is {}, node {node}'s {} is {}: these do not reach each other; name cards that do with --rdma-device",
            first.device,
            kind(first),
            other.device,
            kind(other)
        )
    });
    let unreached = failed.first().map(|first| match failed.len() {
        1 => first.clone(),
        count => format!("{first} (and {} more pairs)", count - 1),
    });
    match (preference, without.or(mixed).or(unreached)) {
        (Preference::Tcp, _) => Ok(Agreement::Tcp { why: "TCP was asked for".to_owned() }),
        (Preference::Auto, Some(why)) => Ok(Agreement::Tcp { why }),
        (_, Some(why)) => Err(why),
        (_, None) => {
            let note = differs(&|one, other| one.packet_len != other.packet_len).map(|(node, first, other)| {
                format!(
                    "node 0's port sends packets of {} bytes, node {node}'s of {}: such pairs use the smaller; set the same MTU",
                    first.packet_len, other.packet_len
                )
            });
            Ok(Agreement::Rdma { note })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(is_ethernet: bool, packet_len: u32) -> Ability {
        Ability { rdma: Ok(Port { device: "mlx5_0:1".to_owned(), is_ethernet, packet_len, address: "10.0.0.1".to_owned() }) }
    }

    fn none() -> Ability {
        Ability { rdma: Err("there is no card".to_owned()) }
    }

    #[test]
    fn all_or_none_and_why() {
        use Preference::{Auto, Rdma, Tcp};
        let good = || port(true, 4096);
        let failed = ["node 1 cannot write to node 0".to_owned(), "another".to_owned()];
        let check = |preference, nodes: &[Ability], failed: &[String], expected: Result<Option<&str>, &str>| {
            let agreed = agree(preference, nodes, failed);
            let matches = match (&agreed, expected) {
                (Ok(Agreement::Rdma { note }), Ok(None)) => note.is_none(),
                (Ok(Agreement::Rdma { note: Some(words) } | Agreement::Tcp { why: words }), Ok(Some(expected))) => {
                    words.contains(expected)
                }
                (Err(words), Err(expected)) => words.contains(expected),
                _ => false,
            };
            assert!(matches, "{preference:?}: {agreed:?}, not {expected:?}");
        };
        check(Auto, &[good(), good()], &[], Ok(None));
        check(Rdma, &[good()], &[], Ok(None));
        check(Tcp, &[good(), good()], &[], Ok(Some("asked for")));
        check(Auto, &[good(), none()], &[], Ok(Some("node 1 has no RDMA: there is no card")));
        check(Rdma, &[good(), none()], &[], Err("node 1 has no RDMA"));
        check(Auto, &[good(), good(), port(false, 4096)], &[], Ok(Some("node 2's mlx5_0:1 is InfiniBand")));
        check(Rdma, &[good(), port(false, 4096)], &[], Err("InfiniBand"));
        check(Auto, &[good(), port(true, 1024)], &[], Ok(Some("node 1's of 1024")));
        check(Auto, &[good(), good()], &failed, Ok(Some("node 1 cannot write to node 0 (and 1 more pairs)")));
        check(Rdma, &[good(), good()], &failed[..1], Err("node 1 cannot write"));
    }
}
