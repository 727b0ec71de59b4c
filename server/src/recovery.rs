//! What this node does when the session loses a member, and when a lost member returns: it divides its room again, because it now
//! holds other blocks.

use std::sync::Arc;

use crate::peers::Peers;
use crate::room::Room;

/// Plans the cache again whenever a member is lost or returns. Ends with the peers.
pub(crate) async fn follow_roster(peers: Arc<Peers>, room: Arc<Room>) {
    let mut roster = peers.roster_changes();
    drop(peers);
    let mut lost = roster.borrow_and_update().lost();
    while roster.changed().await.is_ok() {
        let now_lost = roster.borrow_and_update().lost();
        if now_lost == lost {
            continue;
        }
        lost = now_lost;
        if let Err(error) = room.plan_cache().await {
            tracing::warn!(%error, "cannot plan again which blocks this node caches after the members have changed");
        }
    }
}
