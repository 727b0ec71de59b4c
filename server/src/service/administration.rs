//! Administration: membership, status, policy and the end of the session.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use dayfly_meta::wire::peer::{AdministrationReply, AdministrationRequest, Answered, Rejection, RejectionKind};

use crate::catch_up::CatchUp;
use crate::membership::{Membership, from_wire};
use crate::room::Room;
use crate::status::StatusReporter;

/// Answers requests to this node as a member of the session.
pub(crate) struct Administration {
    pub(crate) membership: Arc<Membership>,
    pub(crate) status: Arc<StatusReporter>,
    pub(crate) room: Arc<Room>,
    pub(crate) catch_up: Arc<CatchUp>,
    /// How long the last answer may take to go out before the server exits.
    pub(crate) last_answer: Duration,
}

impl Administration {
    pub(super) async fn answer(&self, request: AdministrationRequest) -> Answered<AdministrationReply> {
        match request {
            AdministrationRequest::Status => {
                let status = self.status.node_status().await;
                Ok(AdministrationReply::Status(Box::new(status.map_err(|lost| Rejection::new(RejectionKind::Failed, lost))?)))
            }
            AdministrationRequest::Tune(policy) => {
                self.room.set_policy(policy).await?;
                Ok(AdministrationReply::Done)
            }
            AdministrationRequest::Join { addresses, network } => {
                let parsed: Result<Vec<SocketAddr>, _> = addresses.iter().map(|address| address.parse()).collect();
                let invalid =
                    |error| Rejection::new(RejectionKind::Invalid, format!("an address in the roster is invalid: {error}"));
                let fallen_back = self.membership.join(&parsed.map_err(invalid)?, from_wire(network)).await?;
                Ok(AdministrationReply::Joined { fallen_back })
            }
            AdministrationRequest::Agree(network) => {
                self.membership.agree(from_wire(network)).await?;
                Ok(AdministrationReply::Done)
            }
            AdministrationRequest::CatchUp => {
                self.catch_up.look_again().await?;
                Ok(AdministrationReply::Done)
            }
            AdministrationRequest::HasCopies { dataset } => {
                let has_copies = self.room.has_copies(dataset).await;
                Ok(AdministrationReply::HasCopies(has_copies.map_err(|error| Rejection::new(RejectionKind::Failed, error))?))
            }
            AdministrationRequest::Renew(round) => Ok(AdministrationReply::Heard(self.membership.take_round(&round))),
            AdministrationRequest::End => {
                let freed_bytes = match self.membership.free_all().await {
                    Ok(freed_bytes) => freed_bytes,
                    // Another command has ended the session here, and that has freed everything.
                    Err(_) if self.membership.has_ended() => 0,
                    Err(error) => return Err(Rejection::new(RejectionKind::Failed, error)),
                };
                let (membership, delay) = (self.membership.clone(), self.last_answer);
                // The session ends on a task of its own, because this answer has to go out first.
                tokio::spawn(async move {
                    tokio::time::sleep(delay).await;
                    membership.end();
                });
                Ok(AdministrationReply::Ended { freed_bytes })
            }
        }
    }
}
