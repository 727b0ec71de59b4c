//! A session's key.

use std::fmt;

use zeroize::Zeroizing;

/// 32 random bytes that all servers of a session have and nobody else. Never logged, never shown, overwritten when it is dropped.
pub struct Key(Zeroizing<[u8; 32]>);

impl Key {
    /// Takes the bytes; the caller's own copy is the caller's to overwrite.
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Key(hidden)")
    }
}
