//! What `docs/SEMANTICS.md` promises about reads while nodes are lost.

use std::collections::{BTreeMap, BTreeSet};

use crate::chaos::data::Version;
use crate::chaos::schedule::{Form, StageIn, Twist};

/// A dataset, or a stage-in that may become one.
struct Staged {
    plan: StageIn,
    /// Whether nodes may have no room for samples that they read again.
    limits_room: bool,
    /// The nodes that have been out of reach since the stage-in began. Those that returned with their blocks have a time in
    /// milliseconds after which they no longer count.
    out_of_reach: BTreeMap<u16, Option<u64>>,
    /// The nodes whose servers have died since the stage-in began, together with their blocks.
    bereft: BTreeSet<u16>,
}

/// The datasets of a run, and which nodes have been out of reach since they were staged in.
#[derive(Default)]
pub(crate) struct Promises {
    staged: BTreeMap<Version, Staged>,
    /// Whether a drive has failed or filled up, so that blocks may be bad, or may not have been stored.
    have_drives_failed: bool,
}

impl Promises {
    pub(crate) fn stage_in(&mut self, plan: StageIn, limits_room: bool) {
        self.staged.insert(plan.version, Staged { plan, limits_room, out_of_reach: BTreeMap::new(), bereft: BTreeSet::new() });
    }

    /// Other nodes may have to do without these nodes' blocks from now on.
    pub(crate) fn lose(&mut self, nodes: &[u16]) {
        for staged in self.staged.values_mut() {
            staged.out_of_reach.extend(nodes.iter().map(|&node| (node, None)));
        }
    }

    /// These nodes' servers have died. New ones have no blocks.
    pub(crate) fn lose_blocks(&mut self, nodes: &[u16]) {
        self.staged.values_mut().for_each(|staged| staged.bereft.extend(nodes));
    }

    /// These nodes are back, with their blocks. Reads that begin after `at_ms` do not notice that they were out of reach.
    pub(crate) fn regain(&mut self, nodes: &[u16], at_ms: u64) {
        for node in nodes {
            for lost in self.staged.values_mut().filter_map(|staged| staged.out_of_reach.get_mut(node)) {
                *lost = lost.or(Some(at_ms));
            }
        }
    }

    /// Returns whether an operation that began at this time may not fail because of other nodes. Only reads can fail for that reason.
    pub(crate) fn holds_for(&self, what: &str, begin_ms: u64) -> bool {
        let mut read = self.read_by(what);
        !is_read(what) || read.any(|staged| !staged.is_excepted(begin_ms))
    }

    /// A drive fails or fills up from now on.
    pub(crate) fn fail_drives(&mut self) {
        self.have_drives_failed = true;
    }

    /// Returns whether an operation that began at this time may need the sources: samples that healthy drives of enough reachable
    /// nodes have stored are read from these drives only.
    pub(crate) fn may_read_sources(&self, what: &str, begin_ms: u64) -> bool {
        let mut read = self.read_by(what);
        !is_read(what) || self.have_drives_failed || read.all(|staged| staged.lost(begin_ms) >= staged.copies())
    }

    /// Returns the datasets that an operation reads.
    fn read_by(&self, what: &str) -> impl Iterator<Item = &Staged> {
        self.staged.iter().filter(move |(version, _)| what.contains(&version.path_of_all())).map(|(_, staged)| staged)
    }
}

fn is_read(what: &str) -> bool {
    ["read ", "next of a batch ", "cat "].iter().any(|start| what.starts_with(start))
}

impl Staged {
    /// Returns how many nodes were out of reach at a time, or have lost their blocks before.
    fn lost(&self, begin_ms: u64) -> usize {
        let out_of_reach = self.out_of_reach.iter().filter(|(_, back_ms)| back_ms.is_none_or(|back_ms| begin_ms <= back_ms));
        let lost: BTreeSet<u16> = out_of_reach.map(|(node, _)| *node).chain(self.bereft.iter().copied()).collect();
        lost.len()
    }

    /// Returns the number of copies. `auto` promises nothing about it.
    fn copies(&self) -> usize {
        if self.plan.copies == "2" { 2 } else { 1 }
    }

    /// The exceptions from the promise that no read on a live node fails because of others, if as many nodes are out of reach as had
    /// copies: a source that is gone is not a source, and samples of compressed tars must be kept when they are read again.
    fn is_excepted(&self, begin_ms: u64) -> bool {
        let has_source = !matches!(self.plan.twist, Twist::SourceVanishes(_) | Twist::SourceShrinks(_));
        (self.plan.form == Form::TarGz && self.limits_room || !has_source) && self.lost(begin_ms) >= self.copies()
    }
}

#[test]
fn only_samples_that_lie_nowhere_else_are_excepted() {
    let version = Version { tag: 1, generation: 2 };
    let plan = StageIn { version, form: Form::Tar, node: 0, copies: "1", rate: None, twist: Twist::None };
    let read = "read /dayfly/t1/g2/7 at 0";
    let holds = |plan: StageIn, limits_room: bool, lost: &[u16]| {
        let mut promises = Promises::default();
        promises.stage_in(plan, limits_room);
        promises.lose(lost);
        promises.holds_for(read, 5)
    };
    assert!(holds(plan, true, &[1, 2]));
    let compressed = StageIn { form: Form::TarGz, ..plan };
    assert!(holds(compressed, true, &[]));
    assert!(holds(compressed, false, &[1]), "it is read again");
    assert!(!holds(compressed, true, &[1]), "it may be read again and not kept");
    assert!(!holds(StageIn { twist: Twist::SourceVanishes(1), ..plan }, false, &[1]));
    let with_copies = StageIn { copies: "2", ..compressed };
    assert!(holds(with_copies, true, &[1]));
    assert!(!holds(with_copies, true, &[1, 2]));
    let mut promises = Promises::default();
    promises.stage_in(compressed, true);
    promises.lose(&[3]);
    promises.regain(&[3], 100);
    assert!(!promises.holds_for("cat /dayfly/t1/g2/7", 90));
    assert!(promises.holds_for("cat /dayfly/t1/g2/7", 110));
    promises.lose_blocks(&[2]);
    promises.lose(&[2]);
    promises.regain(&[2], 120);
    assert!(!promises.holds_for("cat /dayfly/t1/g2/7", 130), "the node is back without its blocks");
    assert!(promises.holds_for("list", 90));
    assert!(!promises.holds_for("read /dayfly/t9/g9/1", 90), "an unknown dataset");
}

#[test]
fn only_lost_nodes_and_bad_drives_explain_reads_of_sources() {
    let version = Version { tag: 1, generation: 2 };
    let plan = StageIn { version, form: Form::Tar, node: 0, copies: "1", rate: None, twist: Twist::None };
    let mut promises = Promises::default();
    promises.stage_in(plan, false);
    let read = "next of a batch of /dayfly/t1/g2/";
    assert!(!promises.may_read_sources(read, 5));
    assert!(promises.may_read_sources("", 5), "a command");
    promises.lose(&[1]);
    assert!(promises.may_read_sources(read, 5));
    promises.regain(&[1], 100);
    assert!(!promises.may_read_sources(read, 110));
    promises.fail_drives();
    assert!(promises.may_read_sources(read, 110));
}
