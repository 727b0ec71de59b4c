//! The session's key.

use std::fmt;

use zeroize::Zeroizing;

/// 32 random bytes that only the servers of a session have. The key is never logged or shown, and is overwritten when dropped.
pub struct Key(Zeroizing<[u8; 32]>);

impl Key {
    /// Creates a key from these bytes. The caller should overwrite its own copy.
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Returns the secret bytes.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Key(hidden)")
    }
}
