//! Formats the line that describes a session's settings for prefetch and cache.

use dayfly_launch::units::counted;
use dayfly_meta::wire::status::{CACHE_ALL_ROOM, Depth, Policy};

use crate::size::show;

/// Describes a policy in one line.
pub(super) fn describe(policy: &Policy) -> String {
    let depth = match policy.prefetch.unwrap_or_default() {
        Depth::Auto => "auto".to_owned(),
        Depth::Samples(0) => "off".to_owned(),
        Depth::Samples(samples) => counted(samples.into(), "sample"),
    };
    let memory = policy.prefetch_bytes.map_or_else(|| "half of the arena".to_owned(), show);
    let cache = match policy.cache_bytes.unwrap_or(CACHE_ALL_ROOM) {
        CACHE_ALL_ROOM => "all free space".to_owned(),
        0 => "off".to_owned(),
        bytes => show(bytes),
    };
    format!("prefetch: {depth}, in {memory}; cache: {cache}")
}
