//! Stage-ins that were asked for on other nodes than the coordinator: such a node has the coordinator begin one, and asks how it goes until it ends.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::limits::FORWARDED_STAGE_INS_MAX;
use dayfly_meta::wire::control::{Event, StageInRequest};
use dayfly_meta::wire::peer::{Reply, Request};
use dayfly_transport::TransportError;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use super::{COORDINATOR, coordinate_one};
use crate::clients::EVENTS_QUEUE_LEN;
use crate::peers::PeerError;
use crate::server::Server;

/// What the coordinator has to tell other nodes, by the number that each was given.
#[derive(Default)]
pub(crate) struct Following {
    state: Mutex<State>,
    deadlines: Deadlines,
}

#[derive(Default)]
struct State {
    last: u64,
    followed: HashMap<u64, Arc<Followed>>,
}

struct Followed {
    telling: tokio::sync::Mutex<Telling>,
    asked_at: Mutex<Instant>,
}

struct Telling {
    events: mpsc::Receiver<Event>,
    /// How many were told,
    told: u64,
    /// and the last of them, which may not have been heard.
    last: Option<Event>,
}

impl Followed {
    fn asked_at(&self) -> MutexGuard<'_, Instant> {
        self.asked_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Following {
    pub(super) fn new(deadlines: Deadlines) -> Self {
        Self { state: Mutex::default(), deadlines }
    }

    /// Begins a stage-in on this node, the coordinator; its number here.
    pub(crate) fn begin(&self, server: &Arc<Server>, request: StageInRequest) -> Result<u64, String> {
        if server.config().node != COORDINATOR {
            return Err(format!("stage-ins are led by node {COORDINATOR}"));
        }
        let (sender, events) = mpsc::channel(EVENTS_QUEUE_LEN);
        let number = self.enter(events)?;
        let server = server.clone();
        // On a task of its own: if nobody asks any more, the stage-in must still undo what it did.
        tokio::spawn(async move {
            let watching = server.coordinator().following().watch(number);
            tokio::join!(coordinate_one(&server, request, sender), watching);
        });
        Ok(number)
    }

    fn enter(&self, events: mpsc::Receiver<Event>) -> Result<u64, String> {
        let telling = tokio::sync::Mutex::new(Telling { events, told: 0, last: None });
        let mut state = self.state();
        if state.followed.len() >= FORWARDED_STAGE_INS_MAX {
            return Err("too many stage-ins wait for their turn; ask again when some of them have ended".to_owned());
        }
        state.last += 1;
        let number = state.last;
        state.followed.insert(number, Arc::new(Followed { telling, asked_at: Mutex::new(Instant::now()) }));
        Ok(number)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Until it was left, or nobody has asked for too long: then it is, and so the stage-in is cancelled.
    async fn watch(&self, number: u64) {
        loop {
            sleep(self.deadlines.ping_interval).await;
            let mut state = self.state();
            match state.followed.get(&number) {
                Some(followed) if followed.asked_at().elapsed() > self.deadlines.node_silent => {
                    drop(state.followed.remove(&number))
                }
                Some(_) => continue,
                None => {}
            }
            return;
        }
    }

    /// What there is to tell after the first `heard` events, if that comes soon.
    pub(crate) async fn next(&self, number: u64, heard: u64) -> Result<Option<Event>, String> {
        let followed = self.state().followed.get(&number).cloned();
        let followed = followed.ok_or("cancelled, for it was not asked about for too long")?;
        *followed.asked_at() = Instant::now();
        // Well within the asker's patience.
        let next = timeout(self.deadlines.ping_interval, async {
            let mut telling = followed.telling.lock().await;
            if telling.told <= heard {
                telling.last = telling.events.recv().await;
                telling.told += 1;
            }
            telling.last.clone()
        });
        let next = next.await;
        *followed.asked_at() = Instant::now();
        match next {
            Ok(None) => Err("how it ended has been told already".to_owned()),
            Ok(event) => Ok(event),
            Err(_) => Ok(None),
        }
    }

    /// Nobody will ask any more; if it runs, it is cancelled.
    pub(crate) fn leave(&self, number: u64) {
        self.state().followed.remove(&number);
    }
}

/// Has the coordinator stage in, from another node. Tells `events` how it goes; their receiver's going away cancels it.
pub(super) async fn follow(server: &Arc<Server>, request: StageInRequest, events: mpsc::Sender<Event>) {
    let number = match server.ask(COORDINATOR, Request::StageIn(request), server.deadlines().request).await {
        Ok(Reply::Followed { number }) => number,
        other => {
            // Whoever asked may be gone; so also below.
            let _ = events.send(lost(other)).await;
            return;
        }
    };
    let end = tokio::select! {
        biased;
        end = tell(server, number, &events) => end,
        () = events.closed() => None,
    };
    if let Some(end) = end {
        let _ = events.send(end).await;
    }
    // If it does not hear this, it notices that nobody asks.
    let _ = server.ask(COORDINATOR, Request::Leave { number }, server.deadlines().request).await;
}

/// How it ends.
async fn tell(server: &Arc<Server>, number: u64, events: &mpsc::Sender<Event>) -> Option<Event> {
    let mut heard = 0;
    loop {
        let request = Request::Follow { number, heard };
        let mut told = server.ask(COORDINATOR, request.clone(), server.deadlines().request).await;
        if matches!(told, Err(PeerError::Transport(_))) {
            told = server.ask(COORDINATOR, request, server.deadlines().request).await;
        }
        match told {
            Ok(Reply::Told(None)) => {}
            Ok(Reply::Told(Some(event))) if matches!(*event, Event::Planned(_) | Event::Progress(_)) => {
                heard += 1;
                events.send(*event).await.ok()?;
            }
            Ok(Reply::Told(Some(event))) => return Some(*event),
            other => return Some(lost(other)),
        }
    }
}

/// The coordinator says no, or nothing that helps.
fn lost(answered: Result<Reply, PeerError>) -> Event {
    let reason = match answered {
        Err(PeerError::Failed { reason, .. }) => reason,
        Err(error @ PeerError::Transport(TransportError::TooLong(_))) => {
            format!("{error}: too many sources for one message; name them in a file, @LIST")
        }
        Err(error) => format!("{error}; 'dayfly ls' tells whether it came about all the same"),
        Ok(_) => PeerError::Invalid(COORDINATOR).to_string(),
    };
    Event::Failed { reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(reason: &str) -> Event {
        Event::Failed { reason: reason.to_owned() }
    }

    #[tokio::test]
    async fn what_was_not_heard_is_told_again() {
        let following = Following::default();
        let (sender, events) = mpsc::channel(2);
        let number = following.enter(events).unwrap();
        sender.send(failed("one")).await.unwrap();
        sender.send(failed("two")).await.unwrap();
        for (heard, expect) in [(0, "one"), (0, "one"), (1, "two"), (1, "two")] {
            assert_eq!(following.next(number, heard).await, Ok(Some(failed(expect))));
        }
        assert_eq!(following.next(number, 2).await, Ok(None), "it goes on");
        drop(sender);
        assert!(following.next(number, 2).await.unwrap_err().contains("told already"));
        following.leave(number);
        assert!(following.next(number, 2).await.unwrap_err().contains("cancelled"));
    }

    #[tokio::test(start_paused = true)]
    async fn what_nobody_follows_is_cancelled() {
        let following = Following::default();
        let (sender, events) = mpsc::channel(2);
        let number = following.enter(events).unwrap();
        let asking = async {
            loop {
                assert_eq!(following.next(number, 0).await, Ok(None));
            }
        };
        tokio::select! {
            _ = timeout(4 * Deadlines::DEFAULT.node_silent, asking) => assert!(!sender.is_closed(), "it is asked about often enough"),
            () = following.watch(number) => panic!("it was asked about"),
        }
        following.watch(number).await;
        assert!(sender.is_closed());
    }

    #[test]
    fn those_that_wait_are_bounded() {
        let following = Following::default();
        for _ in 0..FORWARDED_STAGE_INS_MAX {
            following.enter(mpsc::channel(1).1).unwrap();
        }
        assert!(following.enter(mpsc::channel(1).1).unwrap_err().contains("too many"));
    }
}
