//! New servers in the place of those that have died: when they are started, where, and what became of them.
//!
//! The supervisor starts a new server by itself when a server has died, a few times for each node, and whenever a user asks for one
//! with `dayfly rejoin`. It does not when a server is only silent: that server may return with its blocks. When the channel of a
//! silent server is closed, it has died, or its link has failed; it gets some time to dial again.

use std::collections::BTreeMap;
use std::time::Duration;

use dayfly_meta::id::NodeId;
use dayfly_meta::limits::REPLACEMENTS_MAX;
use tokio::time::Instant;

use super::start::StartRequest;
use crate::invitation::Invitation;
use crate::key_file::KeyFile;
use crate::launchers::Input;
use crate::processes::{Exit, LauncherProcesses};

/// The user's command that waits for a new server: on which node it was given, over which control channel, and its number there.
#[derive(Clone, Copy)]
pub(super) struct Asker {
    pub(super) node: NodeId,
    pub(super) channel: u64,
    pub(super) number: u64,
}

/// An answer to a user's command.
pub(super) struct Answer {
    pub(super) asker: Asker,
    /// A message, or the reason of a failure.
    pub(super) outcome: Result<String, String>,
}

/// A server that is being started.
struct Replacement {
    host: String,
    deadline: Instant,
    asker: Option<Asker>,
    /// How many processes had been started before. Those of an earlier server on this host may end later than that server.
    earlier_processes: usize,
    /// Why its process ended, and how many ticks ago.
    exit: Option<(String, u32)>,
    /// Removed when the server has joined or failed.
    _key_file: Option<KeyFile>,
}

/// A server says over its control channel why it ends, and its process ends at once. What it said is heard before so many ticks are over.
const TICKS_TO_HEAR: u32 = 2;

/// The new servers of a session.
pub(super) struct Replacements {
    request: StartRequest,
    /// The bytes that each node's first server was given in its data dirs.
    capacities: Vec<u64>,
    running: BTreeMap<NodeId, Replacement>,
    /// How many servers have been started, or were about to be, for a node without a user's command.
    attempts: BTreeMap<NodeId, u32>,
    /// When a server is to be started for a node, and on which host.
    due: BTreeMap<NodeId, (Instant, String)>,
}

impl Replacements {
    pub(super) fn new(request: StartRequest, capacities: Vec<u64>) -> Self {
        Self { request, capacities, running: BTreeMap::new(), attempts: BTreeMap::new(), due: BTreeMap::new() }
    }

    pub(super) fn request(&self) -> &StartRequest {
        &self.request
    }

    /// Plans a new server for a node whose server has died. It is dropped if the server returns within `grace`. After a few, says that
    /// no more are started.
    pub(super) fn lost(&mut self, node: NodeId, host: &str, grace: Duration) {
        if self.request.restarts_lost && self.request.allocation.launcher.is_manual() {
            self.request.notices.show(format_args!("'dayfly rejoin {node}' says how to start a new server for node {node}"));
        }
        if self.starts_servers() && self.attempts.get(&node).is_some_and(|attempts| *attempts >= REPLACEMENTS_MAX) {
            self.request.notices.show(format_args!(
                "the server of node {node} has died again, after {REPLACEMENTS_MAX} new ones; no more are started by themselves; \
                 'dayfly rejoin {node}' starts one"
            ));
        }
        self.plan(node, host, grace);
    }

    fn starts_servers(&self) -> bool {
        self.request.restarts_lost && !self.request.allocation.launcher.is_manual()
    }

    fn plan(&mut self, node: NodeId, host: &str, grace: Duration) {
        if !self.starts_servers() {
            return;
        }
        let attempts = self.attempts.entry(node).or_default();
        if *attempts >= REPLACEMENTS_MAX {
            return;
        }
        if self.running.contains_key(&node) || self.due.contains_key(&node) {
            return;
        }
        // A server that dies again and again, for example for lack of memory, is started at growing intervals.
        let pause = self.request.invitation.settings.deadlines.reconnect * (4_u32.pow(*attempts) - 1);
        *attempts += 1;
        self.due.insert(node, (Instant::now() + pause.max(grace), host.to_owned()));
    }

    /// Forgets a node whose place has been taken.
    pub(super) fn joined(&mut self, node: NodeId, name: &str) -> Option<Answer> {
        self.due.remove(&node);
        let asker = self.running.remove(&node)?.asker?;
        Some(Answer { asker, outcome: Ok(format!("{name} is a member again")) })
    }

    /// Starts the servers that are due, and gives up those that have not joined in time.
    pub(super) fn tick(&mut self, is_vacant: impl Fn(NodeId) -> bool, processes: &mut LauncherProcesses) -> Vec<Answer> {
        let now = Instant::now();
        // One that has joined may take longer to learn the datasets.
        let is_late = |node: NodeId, replacement: &Replacement| replacement.deadline < now && is_vacant(node);
        let late: Vec<NodeId> =
            self.running.iter().filter(|(node, replacement)| is_late(**node, replacement)).map(|(node, _)| *node).collect();
        let seconds = self.request.start_timeout.as_secs();
        let reason = format!("it did not join within {seconds} s (--start-timeout)");
        let mut answers: Vec<Answer> = late.into_iter().filter_map(|node| self.failed(node, &reason)).collect();
        for (node, reason) in self.ended_in_silence() {
            answers.extend(self.failed(node, &reason));
        }
        self.due.retain(|node, _| is_vacant(*node));
        let is_due = |(node, (at, host)): (&NodeId, &(Instant, String))| (*at <= now).then(|| (*node, host.clone()));
        let due: Vec<(NodeId, String)> = self.due.iter().filter_map(is_due).collect();
        for (node, host) in due {
            if self.needs_key_file() && !self.running.is_empty() {
                break;
            }
            self.due.remove(&node);
            if let Err(reason) = self.start(node, host, None, processes) {
                answers.extend(self.failed(node, &reason));
            }
        }
        answers
    }

    /// Starts a server for a user, on `host`. Returns an answer unless the user has to wait.
    pub(super) fn start_for(
        &mut self,
        asker: Asker,
        node: NodeId,
        host: String,
        processes: &mut LauncherProcesses,
    ) -> Option<Answer> {
        let answer = |outcome| Some(Answer { asker, outcome });
        if self.running.contains_key(&node) {
            return answer(Err(format!("a server for node {node} is being started already")));
        }
        if let Some(first) = self.running.keys().next().filter(|_| self.needs_key_file()) {
            return answer(Err(format!(
                "the new server of node {first} has to join first, because a key file is for one server"
            )));
        }
        self.due.remove(&node);
        match self.start(node, host, Some(asker), processes) {
            Ok(None) => None,
            // The user's next step is to start the server, so the command does not wait for it.
            Ok(Some(instruction)) => {
                self.running.entry(node).and_modify(|replacement| replacement.asker = None);
                answer(Ok(instruction))
            }
            Err(reason) => answer(Err(reason)),
        }
    }

    fn needs_key_file(&self) -> bool {
        self.request.allocation.launcher.input == Input::File
    }

    /// Starts a server. Returns an instruction if the user has to do it.
    fn start(
        &mut self,
        node: NodeId,
        host: String,
        asker: Option<Asker>,
        processes: &mut LauncherProcesses,
    ) -> Result<Option<String>, String> {
        let StartRequest { allocation, invitation, notices, key_file: path, start_timeout, .. } = &self.request;
        let launcher = allocation.launcher;
        let replaced_capacity = self.capacities.get(node.index()).copied().filter(|_| invitation.settings.servers_here > 1);
        let invitation = Invitation { replaces: Some(node.0), replaced_capacity, ..invitation.clone() };
        let earlier_processes = processes.started_count();
        let mut start = || {
            let key_file = match launcher.input {
                Input::File => Some(KeyFile::create(path, &invitation, notices.clone())?),
                Input::Standard => None,
            };
            let hosts = std::slice::from_ref(&host);
            processes.start(launcher, hosts, &invitation, key_file.is_some().then_some(path.as_path())).map(|()| key_file)
        };
        let key_file = start().map_err(|error| error.to_string())?;
        tracing::info!(%node, host, "starting a new server in the place of a lost one");
        let instruction = launcher.is_manual().then(|| {
            format!("now run on the node that takes the place of node {node}: dayfly serve --key-file {}", path.display())
        });
        let deadline = Instant::now() + *start_timeout;
        self.running.insert(node, Replacement { host, deadline, asker, earlier_processes, exit: None, _key_file: key_file });
        Ok(instruction)
    }

    /// Returns the host on which a server for this node is being started; empty if any will do.
    pub(super) fn host(&self, node: NodeId) -> Option<&str> {
        self.running.get(&node).map(|replacement| replacement.host.as_str())
    }

    /// Records the end of a process that was to start servers.
    pub(super) fn process_exited(&mut self, exit: &Exit) {
        let is_for = |replacement: &&mut Replacement| {
            exit.number > replacement.earlier_processes && exit.hosts.contains(&replacement.host)
        };
        if let Some(replacement) = self.running.values_mut().find(is_for) {
            replacement.exit = Some((exit.reason.clone(), 0));
        }
    }

    /// Lets a tick pass for servers whose processes have ended. Returns those that have not said why.
    fn ended_in_silence(&mut self) -> Vec<(NodeId, String)> {
        let exits = self.running.iter_mut().filter_map(|(node, replacement)| Some((*node, replacement.exit.as_mut()?)));
        let ended = exits.filter_map(|(node, (reason, ticks))| {
            *ticks += 1;
            (*ticks >= TICKS_TO_HEAR).then(|| (node, reason.clone()))
        });
        ended.collect()
    }

    /// Gives up the new server on one of `hosts`.
    pub(super) fn failed_on(&mut self, hosts: &[String], reason: &str) -> Option<Answer> {
        let node = *self.running.iter().find(|(_, replacement)| hosts.contains(&replacement.host))?.0;
        self.failed(node, reason)
    }

    /// Gives a new server up. Unless a user waits for it, another one may be started later.
    pub(super) fn failed(&mut self, node: NodeId, reason: &str) -> Option<Answer> {
        let replacement = self.running.remove(&node);
        tracing::warn!(%node, reason, "a new server did not start");
        if let Some(asker) = replacement.as_ref().and_then(|replacement| replacement.asker) {
            return Some(Answer { asker, outcome: Err(format!("{reason}; 'dayfly rejoin {node}' tries again")) });
        }
        if let Some(replacement) = replacement {
            self.plan(node, &replacement.host, Duration::ZERO);
        }
        if !self.due.contains_key(&node) {
            self.request.notices.show(format_args!(
                "cannot start a new server in the place of node {node}: {reason}; the session continues without it, and 'dayfly \
                 rejoin {node}' tries again"
            ));
        }
        None
    }
}
