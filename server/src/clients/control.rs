//! Command-line commands that concern the whole session.

use std::io;
use std::pin::pin;

use dayfly_meta::id::NodeId;
use dayfly_meta::wire::control::{Command, Event, StageInRequest};
use dayfly_meta::wire::local::FromServer;
use dayfly_meta::wire::peer::AdministrationRequest;
use dayfly_meta::wire::status::Policy;
use futures_util::future::join_all;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::{Client, ClientContext};
use crate::coordinator::{self, EVENTS_QUEUE_LEN};
use crate::membership::Ending;
use crate::peers::PeerError;

impl Client {
    /// Carries out a command and sends its events.
    pub(super) async fn control(&mut self, command: Command) -> io::Result<()> {
        match command {
            Command::Status => self.send_event(Event::Status(self.context.status.session_status().await)).await,
            Command::Tune(policy) => {
                let event = match tune_all(&self.context, policy).await {
                    Ok(policy) => Event::Tuned(policy),
                    Err(error) => {
                        Event::Failed { reason: format!("not all nodes have applied the policy: {error}"), can_restart: false }
                    }
                };
                self.send_event(event).await
            }
            Command::Rejoin { node, host } => {
                let membership = self.context.membership.clone();
                let mut rejoining = pin!(membership.rejoin(NodeId(node), host));
                // The client takes a long silence for a server that stands still.
                let event = loop {
                    match timeout(self.context.deadlines().request, &mut rejoining).await {
                        Ok(Ok(message)) => break Event::Rejoined(message),
                        Ok(Err(reason)) => break Event::Failed { reason, can_restart: false },
                        Err(_) => self.send_event(Event::Rejoining).await?,
                    }
                };
                self.send_event(event).await
            }
            Command::Down { except } => {
                let all = || (0..=u16::MAX).collect();
                let spared: Vec<u16> = except.unwrap_or_else(all);
                let Ending { nodes, freed_bytes, failures } = self.context.membership.end_others(&spared).await;
                let sent = self.send_event(Event::Down { nodes, freed_bytes, unreached: failures }).await;
                self.context.membership.end();
                sent
            }
            Command::StageIn(request) => self.stage_in(request).await,
        }
    }

    async fn stage_in(&mut self, request: StageInRequest) -> io::Result<()> {
        let (sender, mut events) = mpsc::channel(EVENTS_QUEUE_LEN);
        // The request runs on a task of its own, because that task must cancel the stage-in on the coordinator when the client
        // goes away.
        tokio::spawn(coordinator::stage_in(self.context.peers.clone(), request, sender));
        loop {
            tokio::select! {
                event = events.recv() => match event {
                    Some(event) => self.send_event(event).await?,
                    None => return Ok(()),
                },
                // While events are being sent, only the end of the connection may arrive from the client. Returning drops
                // `events`, which cancels the stage-in.
                _ = self.receiver.receive() => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
    }

    async fn send_event(&self, event: Event) -> io::Result<()> {
        self.sender.send(&FromServer::Event(event), &[]).await
    }
}

/// Applies a policy on all nodes. Returns this node's policy, with the unset fields filled in.
async fn tune_all(context: &ClientContext, policy: Policy) -> Result<Policy, PeerError> {
    let timeout = context.deadlines().request + context.deadlines().views;
    let asking =
        context.peers.live().into_iter().map(|node| context.peers.ask(node, AdministrationRequest::Tune(policy), timeout));
    for applied in join_all(asking).await {
        applied?;
    }
    Ok(context.prefetcher.policy())
}
