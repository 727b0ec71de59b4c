//! The start of a session: servers join, get their node numbers, and connect to each other.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dayfly_meta::id::SessionId;
use dayfly_server::channel::{Channel, Listener, Receiver, Sender};
use dayfly_server::{Ability, Agreement, Key, Preference, agree};
use futures_util::StreamExt;
use futures_util::future::try_join_all;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use crate::allocation::Allocation;
use crate::control::{self, ControlError, FromServer, FromSupervisor};
use crate::error::LaunchError;
use crate::invitation::Invitation;
use crate::key_file::KeyFile;
use crate::launchers::{Input, Start};
use crate::node_names::{host_index, is_same_host, own_addresses, own_host_name, shortened_list};
use crate::notices::Notices;
use crate::processes::{Event, LauncherProcesses};
use crate::units::counted;

/// When the user is told which nodes have not joined: once the first interval has passed, and then
/// again each time the second one has passed.
const WAITING_NOTICE_INTERVALS: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(10)];
/// Maximum number of hellos that wait to be read.
const HELLOS_WAITING_MAX: usize = 64;
/// How long the supervisor waits for the report of a server that failed, after node 0 has reported that it cannot reach that server.
const OWN_REPORT_WAIT: Duration = Duration::from_secs(1);

/// The information that a supervisor needs to start a session.
pub(crate) struct StartRequest {
    pub(crate) allocation: Allocation,
    pub(crate) session: SessionId,
    pub(crate) key: Arc<Key>,
    /// The supervisor's addresses are filled in once it listens.
    pub(crate) invitation: Invitation,
    /// Where the key file goes, if the launcher needs one.
    pub(crate) key_file: PathBuf,
    /// The session starts if at least this many nodes join.
    pub(crate) min_nodes: usize,
    /// The time allowed for joining, and then the same time again for connecting.
    pub(crate) start_timeout: Duration,
    /// Whether a new server starts in the place of one that has died.
    pub(crate) restarts_lost: bool,
    /// The width of the tree along which leases are renewed; `None` for a tree only if there are many nodes.
    pub(crate) lease_tree_width: Option<u16>,
    pub(crate) notices: Notices,
}

/// A server that has said hello but has no node number yet.
struct JoiningServer {
    /// The index of its host in the list of hosts.
    index: usize,
    host: String,
    /// Whether the server runs on this machine.
    is_here: bool,
    sender: Sender,
    receiver: Receiver,
    /// This end of the server's control channel.
    local: IpAddr,
    /// The server's end of that channel.
    remote: IpAddr,
}

/// A server that has its node number.
pub(super) struct Member {
    /// `node 3`, with the host's name unless all servers are on one machine.
    pub(super) name: String,
    /// The host as the list of hosts names it.
    pub(super) host: String,
    /// The bytes that it may take in its data dirs.
    pub(super) capacity: u64,
    pub(super) sender: Sender,
    pub(super) receiver: Receiver,
}

/// A session that has begun.
pub(super) struct StartedSession {
    pub(super) members: Vec<Member>,
    /// Where peers reach the members, in the same order.
    pub(super) addresses: Vec<SocketAddr>,
    /// The listener that the servers have dialed, and dial again if their control channels break.
    pub(super) listener: Listener,
    /// The network that all nodes have agreed on.
    pub(super) agreement: Agreement,
    /// The address at which servers on this machine listen for peers; `None` for the one that they would choose.
    pub(super) own_address: Option<IpAddr>,
}

/// The report of a server once it listens for peers.
struct StartedServer {
    address: SocketAddr,
    ability: Ability,
}

async fn send(sender: &mut Sender, message: &FromSupervisor) -> Result<(), String> {
    control::send(sender, message).await.map_err(|error| error.to_string())
}

/// Receives a message. If none will come, the error tells the user why.
pub(super) async fn receive_from_server(receiver: &mut Receiver) -> Result<FromServer, String> {
    control::receive(receiver).await.map_err(|error| match error {
        ControlError::Channel(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            "its server ended without a message; it was probably killed".to_owned()
        }
        ControlError::Channel(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {
            "the connection to its server was reset; the server was probably killed".to_owned()
        }
        ControlError::Channel(error) => error.to_string(),
        ControlError::Decode(_) => unexpected_message(),
    })
}

/// Explains a message that this version does not expect.
pub(super) fn unexpected_message() -> String {
    let version = env!("CARGO_PKG_VERSION");
    format!("its build of dayfly differs from this one (version {version}); use the same dayfly binary on all nodes")
}

/// Receives the next message that is not a heartbeat.
pub(super) async fn receive_answer(receiver: &mut Receiver) -> Result<FromServer, String> {
    loop {
        match receive_from_server(receiver).await? {
            FromServer::Alive => {}
            answer => return Ok(answer),
        }
    }
}

/// A session that is being started. Vectors are indexed like the list of hosts.
pub(super) struct SessionStart {
    request: StartRequest,
    processes: LauncherProcesses,
    deadline: Instant,
    joined: Vec<Option<JoiningServer>>,
    /// The reason why a host's server will not join.
    failed: Vec<Option<String>>,
    /// Output of the launcher. It is shown if the start takes a long time or succeeds; after a
    /// failure the error contains what matters.
    pending_lines: Vec<String>,
    takes_long: bool,
}

impl SessionStart {
    pub(super) fn new(request: StartRequest) -> Self {
        let count = request.allocation.hosts.len();
        let deadline = Instant::now() + request.start_timeout;
        Self {
            request,
            processes: LauncherProcesses::new(),
            deadline,
            joined: (0..count).map(|_| None).collect(),
            failed: vec![None; count],
            pending_lines: Vec::new(),
            takes_long: false,
        }
    }

    /// Closes all control channels that belong to no member. Returns the processes, and what is needed to start more of them.
    pub(super) fn into_parts(self) -> (LauncherProcesses, StartRequest) {
        (self.processes, self.request)
    }

    /// Starts all servers and makes them one session.
    pub(super) async fn run(&mut self) -> Result<StartedSession, LaunchError> {
        let is_local = self.request.allocation.launcher.is_local();
        let (mut listener, port) = self.listen(is_local).await?;
        let addresses = if is_local {
            vec![IpAddr::from([127, 0, 0, 1])]
        } else {
            own_addresses(self.request.invitation.settings.interface.as_deref())?
        };
        self.request.invitation.supervisor = addresses.into_iter().map(|address| (address, port).into()).collect();
        let key_file = self.start_processes()?;
        self.gather(&mut listener).await?;
        drop(key_file);
        let (hosts, failed) = (&self.request.allocation.hosts, &self.failed);
        self.processes
            .kill_if_all(|host| hosts.iter().position(|listed| listed == host).is_some_and(|index| failed[index].is_some()));
        // Waiting for servers that never joined must not shorten the time for the others to
        // connect.
        self.deadline = Instant::now() + self.request.start_timeout;
        let preference = self.request.invitation.settings.transport;
        let (mut members, started, own_address) = self.assign_nodes(is_local).await?;
        let addresses = started.iter().map(|server| server.address).collect();
        let agreement = self.connect(&mut members, started, preference).await?;
        self.show_pending_lines();
        Ok(StartedSession { members, addresses, listener, agreement, own_address })
    }

    async fn listen(&self, is_local: bool) -> Result<(Listener, u16), LaunchError> {
        let StartRequest { session, key, invitation, .. } = &self.request;
        let deadlines = invitation.settings.deadlines;
        let any = if is_local { IpAddr::from([127, 0, 0, 1]) } else { IpAddr::from([0_u16; 8]) };
        let bound = match Listener::bind(*session, key.clone(), deadlines, any).await {
            // The kernel may lack IPv6.
            Err(_) if !is_local => Listener::bind(*session, key.clone(), deadlines, IpAddr::from([0, 0, 0, 0])).await,
            bound => bound,
        };
        bound.map_err(LaunchError::io("cannot listen for servers"))
    }

    fn start_processes(&mut self) -> Result<Option<KeyFile>, LaunchError> {
        let StartRequest { allocation, invitation, notices, key_file: path, .. } = &self.request;
        let Allocation { launcher, hosts, .. } = allocation;
        let key_file = match launcher.input {
            Input::File => Some(KeyFile::create(path, invitation, notices.clone())?),
            Input::Standard => None,
        };
        if launcher.is_manual() {
            let program = std::env::current_exe().map_err(LaunchError::io("cannot find the path of this program"))?;
            notices.show(format_args!(
                "now run on each of {}: {} serve --key-file {}",
                counted(hosts.len() as u64, "node"),
                program.display(),
                path.display()
            ));
        }
        self.processes.start(launcher, hosts, invitation, key_file.is_some().then_some(path.as_path()))?;
        Ok(key_file)
    }

    /// Waits until each host's server has joined or failed.
    async fn gather(&mut self, listener: &mut Listener) -> Result<(), LaunchError> {
        let (hello_sender, mut hellos) = mpsc::channel(HELLOS_WAITING_MAX);
        let mut receivers = JoinSet::new();
        let mut shown_warnings = BTreeSet::new();
        let mut next_notice = Instant::now() + WAITING_NOTICE_INTERVALS[0];
        let deadline = self.deadline;
        while self.awaited().next().is_some() {
            tokio::select! {
                channel = listener.accept() => {
                    let hello_sender = hello_sender.clone();
                    receivers.spawn(async move {
                        let Channel { sender, mut receiver, local, far: remote } = channel;
                        // The server examines its node first, whose drives may be slow.
                        let hello = timeout_at(deadline, receive_from_server(&mut receiver)).await;
                        let hello = hello.unwrap_or_else(|_| Err("its server connected and sent nothing".to_owned()));
                        let _ = hello_sender.send((sender, receiver, local, remote, hello)).await;
                    });
                    while receivers.try_join_next().is_some() {}
                }
                Some((sender, receiver, local, remote, hello)) = hellos.recv() => match hello {
                    Ok(FromServer::Hello { names, addresses, warnings, .. }) => {
                        let host = names.first().cloned().unwrap_or_default();
                        let listed = self.host_index(&names, &addresses).map(|index| self.host_name(index));
                        for warning in warnings {
                            if shown_warnings.insert(warning.clone()) {
                                let name = listed.as_ref().unwrap_or(&host);
                                self.request.notices.show(format_args!("warning: {name}: {warning}"));
                            }
                        }
                        let is_here = remote.is_loopback() || remote == local;
                        let server = JoiningServer { index: 0, host, is_here, sender, receiver, local, remote };
                        self.accept(&names, &addresses, server).await;
                    }
                    Ok(FromServer::Failed { names, reason }) => match self.host_index(&names, &[]) {
                        Some(index) => self.fail(index, reason)?,
                        None => self.request.notices.show(format_args!("{}: {reason}", names.join(", "))),
                    },
                    // A server may have connected to two of our addresses at once. It keeps the
                    // other connection.
                    Err(reason) => tracing::debug!(%remote, reason, "a connection closed before its server joined"),
                    Ok(_) => {}
                },
                event = self.processes.next() => match event {
                    Event::Line(line) => {
                        self.pending_lines.push(line);
                        if self.takes_long {
                            self.show_pending_lines();
                        }
                    }
                    Event::Exit(exit) => self.process_exited(&exit.hosts, &exit.reason)?,
                },
                () = sleep_until(next_notice) => {
                    next_notice += WAITING_NOTICE_INTERVALS[1];
                    self.takes_long = true;
                    self.show_pending_lines();
                    let awaited: Vec<_> = self.awaited().map(|index| self.host_name(index)).collect();
                    let all = counted(self.joined.len() as u64, "node");
                    let names = shortened_list(&awaited);
                    self.request.notices.show(format_args!("waiting for {} of {all}: {names}", awaited.len()));
                }
                () = sleep_until(self.deadline) => {
                    let awaited: Vec<_> = self.awaited().collect();
                    let reason = format!("its server did not join within {} s (--start-timeout)", self.request.start_timeout.as_secs());
                    for index in awaited {
                        self.fail(index, reason.clone())?;
                    }
                }
            }
        }
        Ok(())
    }

    fn show_pending_lines(&mut self) {
        for line in self.pending_lines.drain(..) {
            self.request.notices.show(line);
        }
    }

    /// Returns the hosts whose servers have neither joined nor failed.
    fn awaited(&self) -> impl Iterator<Item = usize> {
        (0..self.joined.len()).filter(|&index| self.joined[index].is_none() && self.failed[index].is_none())
    }

    /// Returns a host's name for the user.
    fn host_name(&self, index: usize) -> String {
        match &self.request.allocation.hosts[index] {
            host if host.is_empty() => format!("node {index}"),
            host if self.request.allocation.launcher.is_local() => format!("node {host}"),
            host => host.clone(),
        }
    }

    fn host_index(&self, names: &[String], addresses: &[IpAddr]) -> Option<usize> {
        host_index(&self.request.allocation.hosts, names, addresses, &|index| self.joined[index].is_none())
    }

    /// Accepts a joining server, unless its host is not listed or already has a server.
    async fn accept(&mut self, names: &[String], addresses: &[IpAddr], mut server: JoiningServer) {
        let Some(index) = self.host_index(names, addresses) else {
            let listed = shortened_list(&self.request.allocation.hosts);
            let names = names.join("', '");
            self.request.notices.show(format_args!(
                "a server on '{names}' tried to join, but the list of nodes has only {listed}; this server is ignored"
            ));
            return;
        };
        if self.joined[index].is_some() {
            // The launcher probably started one server for each slot of a node.
            let _ = send(&mut server.sender, &FromSupervisor::Surplus).await;
            return;
        }
        self.failed[index] = None;
        server.index = index;
        self.joined[index] = Some(server);
    }

    /// Records that a host's server will not join. Fails if the session cannot start without it.
    fn fail(&mut self, index: usize, reason: String) -> Result<(), LaunchError> {
        if self.joined[index].is_some() {
            return Ok(());
        }
        let message = format!("{}: {reason}", self.host_name(index));
        tracing::warn!(host = self.host_name(index), reason, "a server did not join");
        self.failed[index] = Some(reason);
        let failed = self.failed.iter().flatten().count();
        if self.joined.len() - failed < self.request.min_nodes {
            let joined = self.joined.iter().flatten().count();
            let others = if failed > 1 { format!(" ({} more did not join either)", failed - 1) } else { String::new() };
            let wanted = if self.request.min_nodes < self.joined.len() {
                format!("; {joined} joined, and --min-nodes asks for {}", self.request.min_nodes)
            } else {
                String::new()
            };
            return Err(LaunchError::TooFewNodes(format!("{message}{others}{wanted}")));
        }
        self.request.notices.show(format_args!("continuing without {message}"));
        Ok(())
    }

    /// Handles the exit of a process that was to start servers on `hosts`.
    fn process_exited(&mut self, hosts: &[String], reason: &str) -> Result<(), LaunchError> {
        let Allocation { launcher, hosts: all, .. } = &self.request.allocation;
        let mut missing: Vec<_> = self.awaited().filter(|&index| hosts.contains(&all[index])).collect();
        if !matches!(launcher.start, Start::Once(_)) && hosts.len() > 1 {
            // The first host's server was to start the others, so this process starts them now.
            let below: Vec<_> = missing.extract_if(.., |index| all[*index] != hosts[0]).collect();
            let below: Vec<_> = below.into_iter().map(|index| all[index].clone()).collect();
            if !below.is_empty() {
                self.processes.start(launcher, &below, &self.request.invitation, None)?;
            }
        }
        for index in missing {
            self.fail(index, format!("its server did not start: {reason}"))?;
        }
        Ok(())
    }

    /// Gives each server its node number, and collects the addresses at which they listen.
    async fn assign_nodes(&mut self, is_local: bool) -> Result<(Vec<Member>, Vec<StartedServer>, Option<IpAddr>), LaunchError> {
        let mut servers: Vec<JoiningServer> = self.joined.iter_mut().filter_map(Option::take).collect();
        // A server on this machine becomes node 0, so that commands from here reach the coordinator
        // directly. The others keep the order of the list.
        let own = own_host_name();
        if let Some(here) = servers.iter().position(|server| server.is_here && (is_local || is_same_host(&server.host, &own))) {
            servers[..=here].rotate_right(1);
        }
        if self.request.allocation.launcher.is_manual() {
            servers[1..].sort_by(|one, other| one.host.cmp(&other.host).then(one.remote.cmp(&other.remote)));
        }
        let deadline = self.deadline;
        // A server on this machine may have connected to any of our addresses, so it listens at the
        // one that others connected to.
        let address_for_others = servers.iter().find(|server| !server.is_here).map(|server| server.local);
        let hosts = &self.request.allocation.hosts;
        let starts = servers.into_iter().enumerate().map(|(node, server)| async move {
            let name = if is_local { format!("node {node}") } else { format!("node {node} ({})", server.host) };
            let host = hosts[server.index].clone();
            let mut member = Member { name, host, capacity: 0, sender: server.sender, receiver: server.receiver };
            // Local nodes differ by their loopback addresses, as nodes of a cluster differ by
            // theirs.
            let listen = if is_local { Some(local_address(node)) } else { address_for_others.filter(|_| server.is_here) };
            let start = async {
                send(&mut member.sender, &FromSupervisor::JoinAs { node: node as u16, listen }).await?;
                match receive_answer(&mut member.receiver).await? {
                    FromServer::Started { address, ability, capacity } => {
                        member.capacity = capacity;
                        Ok(StartedServer { address, ability })
                    }
                    FromServer::Failed { reason, .. } => Err(reason),
                    _ => Err(unexpected_message()),
                }
            };
            let started = timeout_at(deadline, start).await;
            let started = started.unwrap_or_else(|_| Err("it was not ready within --start-timeout".to_owned()));
            started.map_err(|reason| server_failed(&member, reason)).map(|started| (member, started))
        });
        let (members, started) = try_join_all(starts).await?.into_iter().unzip();
        Ok((members, started, address_for_others))
    }

    /// Has node 0 connect all servers, and agrees with them on the transport.
    async fn connect(
        &mut self,
        members: &mut [Member],
        started: Vec<StartedServer>,
        preference: Preference,
    ) -> Result<Agreement, LaunchError> {
        let (addresses, abilities): (Vec<_>, Vec<Ability>) =
            started.into_iter().map(|server| (server.address, server.ability)).unzip();
        let agreement = |fallen_back: &[String]| agree(preference, &abilities, fallen_back).map_err(LaunchError::NoRdma);
        let roster = FromSupervisor::Roster { addresses, agreement: agreement(&[])? };
        let Some(coordinator) = members.first_mut() else {
            return Err(LaunchError::TooFewNodes("no server joined".to_owned()));
        };
        let meeting = async {
            let answer = ask(coordinator, &roster).await?;
            let FromServer::Met { fallen_back } = answer else { return Err(server_failed(coordinator, unexpected_message())) };
            let agreement = agreement(&fallen_back)?;
            match ask(coordinator, &FromSupervisor::Agree(agreement.clone())).await? {
                FromServer::Ready => Ok(agreement),
                _ => Err(server_failed(coordinator, unexpected_message())),
            }
        };
        let late = |_| Err(LaunchError::ConnectTimeout { seconds: self.request.start_timeout.as_secs() });
        match timeout_at(self.deadline, meeting).await.unwrap_or_else(late) {
            Err(LaunchError::CannotConnect(reason)) => {
                Err(LaunchError::CannotConnect(failure_of_any(members).await.unwrap_or(reason)))
            }
            result => result,
        }
    }
}

/// Returns the address of a node of a local session.
pub(super) fn local_address(node: usize) -> IpAddr {
    IpAddr::from([127, 0, 0, (node + 1) as u8])
}

/// Returns the first failure that a server reports about itself; `None` if no server reports one in time.
///
/// A server that fails closes its connections, and node 0 can say no more than that. The server's own report is the cause.
async fn failure_of_any(members: &mut [Member]) -> Option<String> {
    let reports = members.iter_mut().map(|member| async {
        let answer = timeout(OWN_REPORT_WAIT, receive_answer(&mut member.receiver)).await;
        let Ok(Ok(FromServer::Failed { reason, .. })) = answer else { return None };
        Some(format!("{}: {reason}", member.name))
    });
    let mut reports: FuturesUnordered<_> = reports.collect();
    while let Some(report) = reports.next().await {
        if report.is_some() {
            return report;
        }
    }
    None
}

/// Sends node 0 a request, and returns the answer. An answer that reports a failure becomes an error.
async fn ask(coordinator: &mut Member, request: &FromSupervisor) -> Result<FromServer, LaunchError> {
    if let Err(reason) = send(&mut coordinator.sender, request).await {
        return Err(server_failed(coordinator, reason));
    }
    match receive_answer(&mut coordinator.receiver).await {
        Ok(FromServer::Failed { reason, .. }) => Err(LaunchError::CannotConnect(reason)),
        Ok(answer) => Ok(answer),
        Err(reason) => Err(server_failed(coordinator, reason)),
    }
}

fn server_failed(member: &Member, reason: String) -> LaunchError {
    LaunchError::ServerFailed { member: member.name.clone(), reason }
}

#[cfg(test)]
mod tests {
    use dayfly_meta::deadlines::Deadlines;
    use dayfly_server::channel::dial;

    use super::*;

    #[tokio::test]
    async fn the_report_of_the_server_that_failed_is_found_among_heartbeats() {
        let (session, key) = (SessionId([1; 8]), Arc::new(Key::new([1; 32])));
        let here = IpAddr::from([127, 0, 0, 1]);
        let (mut listener, port) = Listener::bind(session, key.clone(), Deadlines::DEFAULT, here).await.unwrap();
        let address = [SocketAddr::new(here, port)];
        let (mut members, mut servers) = (Vec::new(), Vec::new());
        for node in 0..3 {
            let (server, member) = tokio::join!(dial(session, &key, Deadlines::DEFAULT, &address), listener.accept());
            servers.push(server.unwrap());
            members.push(Member {
                name: format!("node {node}"),
                host: String::new(),
                capacity: 0,
                sender: member.sender,
                receiver: member.receiver,
            });
        }
        for server in &mut servers {
            control::send(&mut server.sender, &FromServer::Alive).await.unwrap();
        }
        let failed = FromServer::Failed { names: Vec::new(), reason: "its folder is gone".to_owned() };
        control::send(&mut servers[1].sender, &failed).await.unwrap();
        assert_eq!(failure_of_any(&mut members).await.as_deref(), Some("node 1: its folder is gone"));
        assert_eq!(failure_of_any(&mut members[..1]).await, None);
    }
}
