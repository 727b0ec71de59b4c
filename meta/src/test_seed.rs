//! Chooses the seed of a test with random inputs. Other crates include this file in their tests.

use std::hash::{BuildHasher, RandomState};

/// Returns the seed that the environment variable `variable` sets. Without it, returns a new seed if
/// `DAYFLY_TEST_FRESH_SEEDS` is set, and otherwise `fixed`. Prints the seed, so that the output of a
/// failed test says how to run it again.
pub(crate) fn seed(variable: &str, fixed: u64) -> u64 {
    let seed = match std::env::var(variable) {
        Ok(seed) => seed.parse::<u64>().expect("a seed is a whole number"),
        Err(_) if std::env::var_os("DAYFLY_TEST_FRESH_SEEDS").is_some() => RandomState::new().hash_one(fixed),
        Err(_) => fixed,
    };
    eprintln!("random inputs from {variable}={seed}");
    seed
}
