//! What a new coordinator does when it has ended the stage-ins of its predecessors, and when it cannot.

use dayfly_meta::id::NodeId;
use dayfly_meta::roster::Roster;

use super::{Shown, World};

/// A successor takes the dataset from a node that shows it, and asks the others to look for it.
pub(super) fn take_what_is_shown(world: &mut World, own: NodeId, roster: &Roster) {
    let is_shown = |node: NodeId| world.servers[node.index()].is_running && world.servers[node.index()].shows();
    if !roster.live().any(is_shown) {
        return;
    }
    for node in roster.live() {
        let server = &mut world.servers[node.index()];
        match server.shown {
            Shown::Nothing if node == own => server.shown = Shown::Settled,
            Shown::Nothing => server.has_to_look_again |= server.is_running,
            _ => {}
        }
    }
}

/// Notes that all servers that show what was published are lost or dead.
pub(super) fn note_if_gone(world: &mut World) {
    let roster = world.supervision.roster();
    let shows = |node: NodeId| world.servers[node.index()].is_running && world.servers[node.index()].shows();
    world.is_gone |= world.is_published && !roster.live().any(shows);
}
