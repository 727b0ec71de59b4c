//! A read whose outcome several requests wait for. They are woken in the order in which they began to wait. A watch channel would
//! wake them in a random order, and a simulated session could not be repeated.

use std::sync::Arc;

use tokio::sync::SetOnce;

use crate::origins::OriginFailure;

/// The outcome of a read that several requests share.
pub(super) type SharedRead = Result<Arc<Vec<u8>>, OriginFailure>;

/// Waits for the outcome of a read.
#[derive(Clone)]
pub(super) struct JoinedRead(Arc<SetOnce<Option<SharedRead>>>);

/// Ends a read. If it is dropped before, the read was given up.
pub(super) struct OpenRead(Arc<SetOnce<Option<SharedRead>>>);

/// Returns both sides of a new read.
pub(super) fn open_read() -> (OpenRead, JoinedRead) {
    let outcome = Arc::new(SetOnce::new());
    (OpenRead(outcome.clone()), JoinedRead(outcome))
}

impl JoinedRead {
    /// Returns the outcome, or `None` if the read was given up.
    pub(super) async fn outcome(&self) -> Option<SharedRead> {
        self.0.wait().await.clone()
    }
}

impl OpenRead {
    pub(super) fn end(&self, outcome: SharedRead) {
        // Only the first outcome counts.
        let _ = self.0.set(Some(outcome));
    }

    /// Returns how many [`JoinedRead`]s there are.
    pub(super) fn joined(&self) -> usize {
        Arc::strong_count(&self.0) - 1
    }
}

impl Drop for OpenRead {
    fn drop(&mut self) {
        let _ = self.0.set(None);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_read_ends_once_or_is_given_up() {
        let (open, joined) = open_read();
        let outcome = || joined.clone().outcome().now_or_never();
        assert!(outcome().is_none());
        assert_eq!(open.joined(), 1);
        open.end(Ok(Arc::new(vec![1])));
        drop(open);
        assert!(matches!(outcome(), Some(Some(Ok(bytes))) if *bytes == [1]));
        let (open, joined) = open_read();
        drop(open);
        assert!(matches!(joined.outcome().now_or_never(), Some(None)));
    }
}
