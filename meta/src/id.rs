//! Identifiers of nodes, datasets, samples, blocks and sessions. Each is a type of its own, so that
//! the compiler keeps a node's number from being used as a dataset's.

use std::fmt;
use std::str::FromStr;

use rkyv::{Archive, Deserialize, Serialize};

/// A node's index in the session's roster, from 0.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u16);

/// A dataset's number in its session, from 1. No number is ever used twice.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DatasetId(pub u32);

/// A sample's number within its dataset, dense from 0.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SampleId(pub u32);

/// A block's number within its dataset, dense from 0: first the blocks of sample 0, then those of
/// sample 1, and so on.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl fmt::Display for NodeId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.0)
    }
}

impl NodeId {
    /// Returns the index of the node's row in tables that have one row per node.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// A session's public name: 8 random bytes, written as 16 hexadecimal digits.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub [u8; 8]);

impl fmt::Display for SessionId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
    }
}

/// Text that is not a session id.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("a session id is 16 hexadecimal digits")]
pub struct InvalidSessionId;

impl FromStr for SessionId {
    type Err = InvalidSessionId;

    fn from_str(text: &str) -> Result<Self, InvalidSessionId> {
        let lower_hex = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if text.len() != 16 || !text.as_bytes().iter().all(lower_hex) {
            return Err(InvalidSessionId);
        }
        u64::from_str_radix(text, 16).map(|number| Self(number.to_be_bytes())).map_err(|_| InvalidSessionId)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_session_id_parses_to_the_same_id_and_other_text_is_rejected() {
        let id = SessionId([0, 1, 2, 3, 0xfc, 0xfd, 0xfe, 0xff]);
        assert_eq!(id.to_string(), "00010203fcfdfeff");
        assert_eq!(id.to_string().parse(), Ok(id));
        for wrong in ["", "../..", "0001020", "00010203fcfdfeFF", "+0010203fcfdfeff", "00010203fcfdfeff0"] {
            assert_eq!(wrong.parse::<SessionId>(), Err(InvalidSessionId), "{wrong}");
        }
    }
}
