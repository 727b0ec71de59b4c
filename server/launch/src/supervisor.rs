//! The supervisor of a session: has its servers started, makes them one session, and tells them, as long as it lives, that it goes on. When
//! it ends, however it does, they end: at once where the kernel closes its connections, else when its word has not come for a while.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use dayfly_client::locate::Watch;
use dayfly_meta::deadlines::Deadlines;
use dayfly_meta::id::SessionId;
use dayfly_meta::limits::LAUNCHER_END_TIMEOUT;
use dayfly_server::channel::{Channel, Listener, Receiver, Sender};
use dayfly_server::{Ability, Key, Preference, agree};
use futures_util::future::{join_all, try_join_all};
use nix::unistd::gethostname;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout, timeout_at};

use super::invitation::{FromServer, FromSupervisor, Invitation};
use super::key_file::Written;
use super::launchers::{Chosen, Input, Start};
use super::names::{few, own_addresses, place, same_name};
use super::processes::{Event, Processes};
use super::watch::{gone_message, until_gone};
use crate::failure::{Failure, complain};

/// After so long, and then ever again, the user is told who is waited for.
const PATIENCE: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(10)];

/// What is to be done.
pub(super) struct Plan {
    pub(super) chosen: Chosen,
    pub(super) session: SessionId,
    pub(super) key: Arc<Key>,
    /// Where the supervisor is, is filled in.
    pub(super) invitation: Invitation,
    pub(super) key_file: Option<PathBuf>,
    pub(super) min_nodes: usize,
    pub(super) start_timeout: Duration,
}

/// A supervisor at work, on a thread of its own. Dropped, it ends the session.
pub(crate) struct Supervisor {
    end: Option<oneshot::Sender<()>>,
    loss: Option<oneshot::Receiver<String>>,
    thread: Option<JoinHandle<()>>,
}

impl Supervisor {
    /// Starts all servers and waits until they are ready, or until `cancelled`. Ends the session when what is watched is gone.
    pub(super) fn start(plan: Plan, watch: Watch, cancelled: oneshot::Receiver<()>) -> Result<Self, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (end, ending) = oneshot::channel();
        let (losing, loss) = oneshot::channel();
        let (told, tells) = std::sync::mpsc::channel();
        let thread = thread::Builder::new().name("supervisor".to_owned()).spawn(move || {
            runtime.block_on(async {
                let cancelled = async { drop(cancelled.await) };
                let deadlines = plan.invitation.settings.deadlines;
                let mut start = Starting::new(plan);
                let mut gone = pin!(until_gone(watch));
                let came = tokio::select! {
                    came = start.all() => came,
                    () = cancelled => Err(Failure::new("interrupted")),
                    path = &mut gone => Err(Failure::new(gone_message(&path))),
                };
                match came {
                    Ok(members) => {
                        // Who asked for it waits for this word.
                        let _ = told.send(Ok(()));
                        if let Some(reason) = keep(members, &mut start.processes, deadlines, ending, gone).await {
                            // Where nobody waits for it, the session's end is all that can be done.
                            let _ = losing.send(reason);
                        }
                        start.processes.wind_down().await;
                    }
                    Err(failure) => {
                        // Servers that are there find their channels closed.
                        let mut processes = start.close();
                        processes.wind_down().await;
                        let _ = told.send(Err(failure));
                    }
                }
            });
            // A look at a folder may still wait for its file system.
            runtime.shutdown_background();
        })?;
        let supervisor = Self { end: Some(end), loss: Some(loss), thread: Some(thread) };
        tells.recv().map_err(|_| Failure::new("the supervisor ended"))??;
        Ok(supervisor)
    }

    /// Waits until all servers have ended.
    pub(crate) fn wait(&mut self) {
        if let Some(thread) = self.thread.take() {
            // Its panic has been told.
            let _ = thread.join();
        }
    }

    /// What tells why the session is lost; dropped without a word where it ends otherwise.
    pub(crate) fn loss(&mut self) -> Option<oneshot::Receiver<String>> {
        self.loss.take()
    }

    /// What ends the session when it is sent or dropped.
    pub(crate) fn end_handle(&mut self) -> Option<oneshot::Sender<()>> {
        self.end.take()
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        drop(self.end.take());
        self.wait();
    }
}

impl Processes {
    /// Lets all end, as they do when their servers have; kills those that do not.
    async fn wind_down(&mut self) {
        if timeout(LAUNCHER_END_TIMEOUT, self.all_ended()).await.is_err() {
            complain("what started the servers does not end; it is killed");
        }
    }
}

/// A server that said hello.
struct Guest {
    host: String,
    /// On this machine.
    is_here: bool,
    sender: Sender,
    receiver: Receiver,
    /// Of its channel: ours, and its own.
    local: IpAddr,
    far: IpAddr,
}

/// One that has its place.
struct Member {
    name: String,
    sender: Sender,
    receiver: Receiver,
}

async fn say(sender: &mut Sender, message: &FromSupervisor) -> Result<(), String> {
    let message = serde_json::to_vec(message).map_err(|error| error.to_string())?;
    sender.send(&message).await.map_err(|error| error.to_string())
}

async fn hear(receiver: &mut Receiver) -> Result<FromServer, String> {
    let message = receiver.receive().await.map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => "its server ended without a word, killed most likely".to_owned(),
        _ => error.to_string(),
    })?;
    serde_json::from_slice(&message).map_err(|_| unexpected())
}

/// What a server says that nobody expects.
fn unexpected() -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!("its build of dayfly differs from this one (version {version}); use the same one on all nodes")
}

/// The next that is no mere sign of life.
async fn hear_answer(receiver: &mut Receiver) -> Result<FromServer, String> {
    loop {
        match hear(receiver).await? {
            FromServer::Alive => {}
            answer => return Ok(answer),
        }
    }
}

struct Starting {
    plan: Plan,
    processes: Processes,
    deadline: Instant,
    /// By place in the list.
    guests: Vec<Option<Guest>>,
    /// Why some will not come.
    failed: Vec<Option<String>>,
    /// Lines of what starts servers: told when it takes long or all goes well; else the failure has them.
    unsaid: Vec<String>,
    is_long: bool,
}

impl Starting {
    fn new(plan: Plan) -> Self {
        let count = plan.chosen.hosts.len();
        let deadline = Instant::now() + plan.start_timeout;
        let guests = (0..count).map(|_| None).collect();
        Self {
            plan,
            processes: Processes::none(),
            deadline,
            guests,
            failed: vec![None; count],
            unsaid: Vec::new(),
            is_long: false,
        }
    }

    /// Closes all channels.
    fn close(self) -> Processes {
        self.processes
    }

    /// Has all servers started and made one session.
    async fn all(&mut self) -> Result<Vec<Member>, Failure> {
        let is_local = self.plan.chosen.launcher.is_local();
        let (session, loopback) = (self.plan.session, IpAddr::from([127, 0, 0, 1]));
        let any = if is_local { loopback } else { IpAddr::from([0_u16; 8]) };
        let deadlines = self.plan.invitation.settings.deadlines;
        let (mut listener, port) = match Listener::bind(session, self.plan.key.clone(), deadlines, any).await {
            // A kernel without version 6.
            Err(_) if !is_local => Listener::bind(session, self.plan.key.clone(), deadlines, IpAddr::from([0, 0, 0, 0])).await?,
            bound => bound?,
        };
        let addresses =
            if is_local { vec![loopback] } else { own_addresses(self.plan.invitation.settings.interface.as_deref())? };
        self.plan.invitation.supervisor = addresses.into_iter().map(|address| (address, port).into()).collect();
        let written = self.start_processes()?;
        self.gather(&mut listener).await?;
        drop(written);
        let (hosts, failed) = (&self.plan.chosen.hosts, &self.failed);
        self.processes
            .give_up(|host| hosts.iter().position(|listed| listed == host).is_some_and(|place| failed[place].is_some()));
        // Who waited for those that never came has time all the same.
        self.deadline = Instant::now() + self.plan.start_timeout;
        let preference = self.plan.invitation.settings.transport;
        let (mut members, starts) = self.give_places(is_local).await?;
        self.meet(&mut members, starts, preference).await?;
        self.say_all();
        Ok(members)
    }

    fn start_processes(&mut self) -> Result<Option<Written>, Failure> {
        let Chosen { launcher, hosts, .. } = &self.plan.chosen;
        let path = (launcher.input == Input::File).then_some(self.plan.key_file.as_ref()).flatten();
        let written = path.map(|path| Written::new(path, &self.plan.invitation)).transpose()?;
        if let (Start::ByHand, Some(path)) = (&launcher.start, path) {
            let program = std::env::current_exe()?;
            complain(format_args!(
                "now start on each of {} nodes: {} serve --key-file {}",
                hosts.len(),
                program.display(),
                path.display()
            ));
        }
        self.processes.start(launcher, hosts, &self.plan.invitation, path.map(PathBuf::as_path))?;
        Ok(written)
    }

    /// Waits for everyone's hello, or for the end of it.
    async fn gather(&mut self, listener: &mut Listener) -> Result<(), Failure> {
        let (said, mut hellos) = mpsc::channel(64);
        let mut listening = JoinSet::new();
        let mut warned = BTreeSet::new();
        let mut telling = Instant::now() + PATIENCE[0];
        let Deadlines { handshake, .. } = self.plan.invitation.settings.deadlines;
        while self.waited_for().next().is_some() {
            tokio::select! {
                channel = listener.accept() => {
                    let said = said.clone();
                    listening.spawn(async move {
                        let Channel { sender, mut receiver, local, far } = channel;
                        // It says it once it has looked at its node, which takes no time.
                        let first = timeout(handshake * 5, hear(&mut receiver)).await;
                        let first = first.unwrap_or_else(|_| Err("its server connected and said nothing".to_owned()));
                        let _ = said.send((sender, receiver, local, far, first)).await;
                    });
                    while listening.try_join_next().is_some() {}
                }
                Some((sender, receiver, local, far, first)) = hellos.recv() => match first {
                    Ok(FromServer::Hello { names, addresses, warnings }) => {
                        for warning in warnings {
                            if warned.insert(warning.clone()) {
                                complain(format_args!("warning: {}: {warning}", names.first().map_or("a node", String::as_str)));
                            }
                        }
                        let is_here = far.is_loopback() || far == local;
                        self.seat(&names, &addresses, Guest { host: String::new(), is_here, sender, receiver, local, far }).await?;
                    }
                    Ok(FromServer::Failed { names, reason }) => match self.place(&names, &[]) {
                        Some(place) => self.fail(place, reason)?,
                        None => complain(format_args!("{}: {reason}", names.join(", "))),
                    },
                    // Of one that was asked twice by way of two of our addresses; it comes by the other.
                    Err(reason) => tracing::debug!(reason, "a guest left"),
                    Ok(_) => {}
                },
                event = self.processes.next() => match event {
                    Event::Line(line) => {
                        self.unsaid.push(line);
                        if self.is_long {
                            self.say_all();
                        }
                    }
                    Event::Ended(ended) => self.missed(&ended.hosts, &ended.how)?,
                },
                () = sleep_until(telling) => {
                    telling += PATIENCE[1];
                    self.is_long = true;
                    self.say_all();
                    let waited_for: Vec<_> = self.waited_for().map(|place| self.name(place)).collect();
                    complain(format_args!("waiting for {} of {} nodes: {}", waited_for.len(), self.guests.len(), few(&waited_for)));
                }
                () = sleep_until(self.deadline) => {
                    let waited_for: Vec<_> = self.waited_for().collect();
                    let reason = format!(
                        "no server came from it within {} s (--start-timeout)",
                        self.plan.start_timeout.as_secs()
                    );
                    for place in waited_for {
                        self.fail(place, reason.clone())?;
                    }
                }
            }
        }
        Ok(())
    }

    fn say_all(&mut self) {
        self.unsaid.drain(..).for_each(complain);
    }

    /// Those of whom nothing is known yet.
    fn waited_for(&self) -> impl Iterator<Item = usize> {
        (0..self.guests.len()).filter(|&place| self.guests[place].is_none() && self.failed[place].is_none())
    }

    fn name(&self, place: usize) -> String {
        match &self.plan.chosen.hosts[place] {
            host if host.is_empty() => format!("node {place}"),
            host if self.plan.chosen.launcher.is_local() => format!("node {host}"),
            host => host.clone(),
        }
    }

    /// The place in the list of who goes by these names and addresses.
    fn place(&self, names: &[String], addresses: &[IpAddr]) -> Option<usize> {
        place(&self.plan.chosen.hosts, names, addresses, &|place| self.guests[place].is_none())
    }

    async fn seat(&mut self, names: &[String], addresses: &[IpAddr], mut guest: Guest) -> Result<(), Failure> {
        let name = names.first().cloned().unwrap_or_default();
        let Some(place) = self.place(names, addresses) else {
            let listed = few(&self.plan.chosen.hosts);
            complain(format_args!("a server came from '{}', which is none of {listed}", names.join("', '")));
            return Ok(());
        };
        if self.guests[place].is_some() {
            // One for each slot of a node, most likely.
            let _ = say(&mut guest.sender, &FromSupervisor::Surplus).await;
            return Ok(());
        }
        self.failed[place] = None;
        self.guests[place] = Some(Guest { host: name, ..guest });
        Ok(())
    }

    /// Takes note that a node will not come; an error, if it has to.
    fn fail(&mut self, place: usize, reason: String) -> Result<(), Failure> {
        if self.guests[place].is_some() {
            return Ok(());
        }
        let message = format!("{}: {reason}", self.name(place));
        self.failed[place] = Some(reason);
        let failed = self.failed.iter().flatten().count();
        if self.guests.len() - failed < self.plan.min_nodes {
            let came = self.guests.iter().flatten().count();
            let others = if failed > 1 { format!(" ({} more did not come either)", failed - 1) } else { String::new() };
            let wanted = if self.plan.min_nodes < self.guests.len() {
                format!("; {came} came, --min-nodes {}", self.plan.min_nodes)
            } else {
                String::new()
            };
            return Err(Failure::new(format!("no session: {message}{others}{wanted}")));
        }
        complain(format_args!("going on without {message}"));
        Ok(())
    }

    /// What was to start servers has ended.
    fn missed(&mut self, hosts: &[String], how: &str) -> Result<(), Failure> {
        let launcher = self.plan.chosen.launcher;
        let mut places: Vec<_> = self.waited_for().filter(|&place| hosts.contains(&self.plan.chosen.hosts[place])).collect();
        if !matches!(launcher.start, Start::Once(_)) && hosts.len() > 1 {
            // The first of them was to start the others.
            let below: Vec<_> = places.extract_if(.., |place| self.plan.chosen.hosts[*place] != hosts[0]).collect();
            let below: Vec<_> = below.into_iter().map(|place| self.plan.chosen.hosts[place].clone()).collect();
            if !below.is_empty() {
                self.processes.start(launcher, &below, &self.plan.invitation, None)?;
            }
        }
        for place in places {
            self.fail(place, format!("its server did not start: {how}"))?;
        }
        Ok(())
    }

    /// Tells all who came which node they are, and hears where they listen.
    async fn give_places(&mut self, is_local: bool) -> Result<(Vec<Member>, Vec<Placed>), Failure> {
        let mut guests: Vec<Guest> = self.guests.iter_mut().filter_map(Option::take).collect();
        // Commands of who is on this machine go to node 0 without a detour, then; the others stay in the list's order.
        let own = gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default();
        if let Some(here) = guests.iter().position(|guest| guest.is_here && (is_local || same_name(&guest.host, &own))) {
            guests[..=here].rotate_right(1);
        }
        if matches!(self.plan.chosen.launcher.start, Start::ByHand) {
            guests[1..].sort_by(|one, other| one.host.cmp(&other.host).then(one.far.cmp(&other.far)));
        }
        let deadline = self.deadline;
        // A server on this machine finds us at any of our addresses; it listens at the one by which others came.
        let by_others = guests.iter().find(|guest| !guest.is_here).map(|guest| guest.local);
        let placing = guests.into_iter().enumerate().map(|(node, guest)| async move {
            let name = if is_local { format!("node {node}") } else { format!("node {node} ({})", guest.host) };
            let mut member = Member { name, sender: guest.sender, receiver: guest.receiver };
            // Nodes of one machine differ by their loopback address, as nodes of a cluster differ by theirs.
            let listen =
                if is_local { Some(IpAddr::from([127, 0, 0, (node + 1) as u8])) } else { by_others.filter(|_| guest.is_here) };
            let starting = async {
                say(&mut member.sender, &FromSupervisor::Orders { node: node as u16, listen }).await?;
                match hear_answer(&mut member.receiver).await? {
                    FromServer::Started { address, ability } => Ok(Placed { address, ability }),
                    FromServer::Failed { reason, .. } => Err(reason),
                    _ => Err(unexpected()),
                }
            };
            let started = timeout_at(deadline, starting).await.unwrap_or_else(|_| Err("it is not ready in time".to_owned()));
            started.map_err(|reason| did_not_start(&member.name, &reason)).map(|placed| (member, placed))
        });
        Ok(try_join_all(placing).await?.into_iter().unzip())
    }

    /// Makes them one session.
    async fn meet(&mut self, members: &mut [Member], starts: Vec<Placed>, preference: Preference) -> Result<(), Failure> {
        let (addresses, abilities): (Vec<_>, Vec<Ability>) =
            starts.into_iter().map(|start| (start.address, start.ability)).unzip();
        let agreed = |failed: &[String]| {
            agree(preference, &abilities, failed)
                .map_err(|why| Failure::new(format!("no session by RDMA, as --transport rdma demands: {why}")))
        };
        let roster = FromSupervisor::Roster { addresses, agreement: agreed(&[])? };
        let coordinator = members.first_mut().ok_or_else(|| Failure::new("no node came"))?;
        let meeting = async {
            let failed = |reason: String| did_not_start(&coordinator.name, &reason);
            say(&mut coordinator.sender, &roster).await.map_err(failed)?;
            let fallen_back = match hear_answer(&mut coordinator.receiver).await.map_err(failed)? {
                FromServer::Met { fallen_back } => fallen_back,
                FromServer::Failed { reason, .. } => return Err(Failure::new(format!("no session: {reason}"))),
                _ => return Err(failed(unexpected())),
            };
            say(&mut coordinator.sender, &FromSupervisor::Agree(agreed(&fallen_back)?)).await.map_err(failed)?;
            match hear_answer(&mut coordinator.receiver).await.map_err(failed)? {
                FromServer::Ready => Ok(()),
                FromServer::Failed { reason, .. } => Err(Failure::new(format!("no session: {reason}"))),
                _ => Err(failed(unexpected())),
            }
        };
        let late = |_| {
            Err(Failure::new(format!(
                "not all nodes reach each other within {} s (--start-timeout); 'dayfly doctor --hosts ...' tells which do not",
                self.plan.start_timeout.as_secs()
            )))
        };
        timeout_at(self.deadline, meeting).await.unwrap_or_else(late)
    }
}

/// What a server says once it listens.
struct Placed {
    address: std::net::SocketAddr,
    ability: Ability,
}

fn did_not_start(name: &str, reason: &str) -> Failure {
    Failure::new(format!("the server of {name} did not start: {reason}"))
}

/// Tells the servers that the session goes on, until they have ended or are to. Returns why they are to, where it is for lack of
/// what a session needs: here, as `gone` tells, or on a node.
async fn keep(
    members: Vec<Member>,
    processes: &mut Processes,
    deadlines: Deadlines,
    mut ending: oneshot::Receiver<()>,
    mut gone: impl Future<Output = PathBuf> + Unpin,
) -> Option<String> {
    let (mut kept, mut listening) = (Vec::new(), JoinSet::new());
    for Member { name, sender, mut receiver } in members {
        let is_heard = Arc::new(AtomicBool::new(true));
        let (place, heard) = (kept.len(), is_heard.clone());
        kept.push(Some(Kept { name, sender, is_heard, silent: 0 }));
        listening.spawn(async move {
            loop {
                match hear(&mut receiver).await {
                    Ok(FromServer::Ended) => return (place, Departure::Meant),
                    Ok(FromServer::Failed { reason, .. }) => return (place, Departure::Failed(reason)),
                    Ok(_) => heard.store(true, Ordering::Relaxed),
                    Err(reason) => return (place, Departure::Lost(reason)),
                }
            }
        });
    }
    let mut ticks = interval(deadlines.lease_interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while kept.iter().any(Option::is_some) {
        tokio::select! {
            _ = &mut ending => {
                end_all(&mut kept, &deadlines).await;
                return None;
            }
            path = &mut gone => {
                end_all(&mut kept, &deadlines).await;
                return Some(gone_message(&path));
            }
            Some(Ok((place, parting))) = listening.join_next() => match (kept[place].take(), parting) {
                (Some(left), Departure::Lost(reason)) => complain(format_args!("{} is lost: {reason}", left.name)),
                (Some(left), Departure::Failed(reason)) => {
                    end_all(&mut kept, &deadlines).await;
                    return Some(format!("{}: {reason}", left.name));
                }
                _ => {}
            },
            _ = ticks.tick() => {
                for place in &mut kept {
                    if let Some(silent) = place.take_if(|kept| kept.is_silent(&deadlines)) {
                        complain(format_args!("{} is lost: nothing was heard of it for {} s", silent.name, deadlines.lease.as_secs_f64()));
                    }
                }
                // One that takes no bytes is found by its silence.
                let renewing = kept.iter_mut().flatten().map(|kept| timeout(deadlines.lease_interval, say(&mut kept.sender, &FromSupervisor::Renew)));
                drop(join_all(renewing).await);
            }
            line = processes.line() => complain(line),
        }
    }
    None
}

/// How a server leaves.
enum Departure {
    /// As it was told to.
    Meant,
    /// Since it cannot go on, nor can the session without what it lacks.
    Failed(String),
    /// Without a word.
    Lost(String),
}

/// Tells all that are there to end.
async fn end_all(kept: &mut [Option<Kept>], deadlines: &Deadlines) {
    let telling =
        kept.iter_mut().flatten().map(|kept| timeout(deadlines.lease_interval, say(&mut kept.sender, &FromSupervisor::End)));
    drop(join_all(telling).await);
}

/// A server that lives.
struct Kept {
    name: String,
    sender: Sender,
    is_heard: Arc<AtomicBool>,
    /// Ticks since it was heard: they do not come while this process is stopped, as a suspended job's is.
    silent: u128,
}

impl Kept {
    fn is_silent(&mut self, deadlines: &Deadlines) -> bool {
        self.silent = if self.is_heard.swap(false, Ordering::Relaxed) { 0 } else { self.silent + 1 };
        self.silent >= deadlines.lease.as_millis() / deadlines.lease_interval.as_millis()
    }
}
