//! Reads bytes of runs and catalogs. The checksum in the reply is the only check of these bytes.

use dayfly_meta::checksum::check;
use dayfly_meta::id::NodeId;
use dayfly_meta::limits::FETCH_ATTEMPTS_MAX;
use dayfly_meta::wire::peer::{ReadReply, ReadRequest};
use dayfly_meta::wire::status::Hop;

use super::{PeerError, Peers};

impl Peers {
    /// Reads at most `room` bytes from any node. Bytes that arrive damaged are read again a few times.
    pub(crate) async fn pull_bytes(&self, node: NodeId, request: ReadRequest, room: u64) -> Result<Vec<u8>, PeerError> {
        let timeout = self.deadlines.request;
        let mut attempts_left = FETCH_ATTEMPTS_MAX;
        loop {
            attempts_left -= 1;
            let slot = self.exchange_slot(room).await?;
            let (reply, pulled) = self.pull(node, request.clone(), vec![slot], timeout).await?;
            let (ReadReply::Bytes { checksum }, Some(slot), Some(&len)) = (reply, pulled.slots.first(), pulled.lens.first())
            else {
                return Err(PeerError::InvalidAnswer(node));
            };
            let bytes = slot.get(..len as usize).ok_or(PeerError::InvalidAnswer(node))?.to_vec();
            match check(&bytes, checksum) {
                Ok(()) => return Ok(bytes),
                Err(mismatch) => {
                    self.damage.record(Hop::Fetched, node, "a part of a catalog", mismatch);
                    if attempts_left == 0 {
                        return Err(PeerError::Damaged { node, mismatch });
                    }
                }
            }
        }
    }
}
