//! Silent peers, found by the rules of the TCP transport.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dayfly_meta::id::NodeId;
use dayfly_transport::silence::{Moved, SilenceWatch};
use dayfly_transport::{Connection, LossCause};
use tokio::time::{Instant, sleep};

use super::Net;

impl Net {
    /// Waits until a node does not stand still.
    async fn awake(&self, node: NodeId) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if !self.health(node).is_frozen {
                return;
            }
            changed.await;
        }
    }

    /// Ends each connection on which nothing gets through for too long, by the rules of the TCP transport. A node that stands still
    /// looks when it continues.
    pub(super) fn watch(self: &Arc<Self>) {
        for connection in self.live() {
            if self.is_open(connection.from, connection.peer)
                || connection.is_lost()
                || connection.is_watched.swap(true, Ordering::Relaxed)
            {
                continue;
            }
            let net = self.clone();
            tokio::spawn(async move {
                let opened = async {
                    while !net.is_open(connection.from, connection.peer) && !connection.is_lost() {
                        net.changed.notified().await;
                    }
                };
                // The time since the last ping is random.
                let ago = net.state().random.duration(Duration::ZERO, net.deadlines.ping_interval);
                let (start, links) = (Instant::now(), [Some(Moved::default())]);
                let lost = async {
                    let mut silence = SilenceWatch::new(net.deadlines, links.len());
                    loop {
                        let (asleep, meant) = (Instant::now(), silence.pause(ago + start.elapsed(), &links));
                        sleep(meant).await;
                        net.awake(connection.from).await;
                        if silence.look(ago + start.elapsed(), (meant, asleep.elapsed()), &links).is_peer {
                            return;
                        }
                    }
                };
                tokio::select! {
                    biased;
                    () = opened => {}
                    () = lost => connection.lose(LossCause::Silent(net.deadlines.peer_lost)),
                }
                connection.is_watched.store(false, Ordering::Relaxed);
            });
        }
    }
}
