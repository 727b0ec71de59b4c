//! Computes orders in which to read samples. A global shuffle is a random order of the whole
//! dataset for each epoch, the same on every node. A local shuffle follows the order in which
//! samples lie on this node's drives. That order is also random, because the stage-in shuffled them.

use std::collections::HashMap;

use dayfly_meta::catalog::{Catalog, EntryId, EntryKind, Grouping};
use dayfly_meta::id::{BlockId, NodeId, SampleId};
use dayfly_meta::limits::BATCH_LEN_MAX;
use dayfly_meta::path::group;

use crate::Dataset;

/// Rounds of the permutation. Four make it random enough for anything but cryptography.
const ROUNDS: u64 = 4;

/// The samples of a dataset, ready to be put in order. Takes 4 bytes of memory for each sample, or
/// 12 if samples are grouped.
pub struct Samples {
    /// For each sample, the first entry of the catalog that names it.
    entries: Vec<EntryId>,
    groups: Option<Groups>,
}

/// Samples of one group are adjacent in `samples`.
struct Groups {
    samples: Vec<SampleId>,
    starts: Vec<u32>,
}

impl Samples {
    /// Collects the samples from the whole catalog, which is read once.
    pub fn of(catalog: &Catalog) -> Self {
        let mut entries = vec![EntryId(0); catalog.header().samples as usize];
        let names = (1..catalog.header().entries).filter_map(|id| catalog.entry(EntryId(id)));
        for entry in names.filter(|entry| entry.kind == EntryKind::File) {
            match entries.get_mut(entry.node as usize) {
                Some(first) if first.0 == 0 => *first = entry.id,
                _ => {}
            }
        }
        let groups = match catalog.header().group {
            Grouping::None => None,
            Grouping::Stem => Some(Groups::of(catalog, &entries)),
        };
        Self { entries, groups }
    }

    /// Returns the number of samples.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the first entry of the catalog that names a sample.
    pub fn entry(&self, sample: SampleId) -> Option<EntryId> {
        self.entries.get(sample.0 as usize).copied()
    }

    /// Returns all samples in the random order of `seed` and `epoch`, which is the same on every node. Grouped samples are
    /// adjacent. The iterator takes no memory.
    ///
    /// Several readers can share an epoch if each takes every n-th sample (`step_by`). That
    /// separates the samples of a group.
    pub fn epoch(&self, seed: u64, epoch: u64) -> impl Iterator<Item = SampleId> {
        let count = self.groups.as_ref().map_or(self.entries.len(), |groups| groups.starts.len());
        let permutation = Permutation::new(count as u64, seed, epoch);
        (0..count as u64).flat_map(move |at| {
            let chosen = permutation.at(at) as u32;
            let one = [SampleId(chosen)];
            let members = self.groups.as_ref().map_or(&[][..], |groups| groups.members(chosen as usize));
            let alone = self.groups.is_none().then_some(one).into_iter().flatten();
            alone.chain(members.iter().copied())
        })
    }

    /// Returns the samples that `node` owns, in the order in which they lie on its drives. Must be called on that node. Over all
    /// nodes, each sample appears once.
    ///
    /// Reading in this order is as fast as sequential reading. Large samples are inserted at random
    /// positions, because their position does not matter for speed. So are samples that are not on
    /// the drives: empty ones, and those that their owner reads from their origins.
    pub fn local(&self, dataset: &Dataset, node: NodeId, nodes: u16) -> Vec<SampleId> {
        let catalog = dataset.catalog();
        let mut positioned = Vec::new();
        let mut scattered = Vec::new();
        for sample in (0..self.entries.len() as u32).map(SampleId) {
            let Some((size, blocks)) = catalog.sample(sample) else { continue };
            let first = BlockId(blocks.start);
            if size == 0 {
                if sample.0 % u32::from(nodes.max(1)) == u32::from(node.0) {
                    scattered.push(sample);
                }
            } else if catalog.owner(first) == Some(node) {
                match dataset.drive_order(first) {
                    Some(position) if size <= BATCH_LEN_MAX as u64 => positioned.push((position, sample)),
                    _ => scattered.push(sample),
                }
            }
        }
        positioned.sort_unstable();
        let mut order: Vec<SampleId> = positioned.into_iter().map(|(_, sample)| sample).collect();
        scatter(&mut order, &scattered, catalog.header().seed ^ u64::from(node.0));
        match &self.groups {
            Some(groups) => groups.together(order),
            None => order,
        }
    }
}

impl Groups {
    fn of(catalog: &Catalog, entries: &[EntryId]) -> Self {
        // Groups are numbered by directory and stem, in the order in which they first appear.
        let mut numbers: HashMap<(EntryId, Vec<u8>), usize> = HashMap::new();
        let mut members: Vec<(usize, SampleId)> = Vec::with_capacity(entries.len());
        for (sample, &id) in (0..).map(SampleId).zip(entries) {
            let Some(entry) = catalog.entry(id) else { continue };
            let next = numbers.len();
            let number = *numbers.entry((entry.parent, group(entry.name).to_vec())).or_insert(next);
            members.push((number, sample));
        }
        drop(numbers);
        members.sort_unstable();
        let is_first = |at: usize| at == 0 || members[at - 1].0 != members[at].0;
        let starts = (0..members.len()).filter(|&at| is_first(at)).map(|at| at as u32).collect();
        Self { samples: members.into_iter().map(|(_, sample)| sample).collect(), starts }
    }

    fn members(&self, number: usize) -> &[SampleId] {
        let start = self.starts.get(number).map_or(0, |&start| start as usize);
        let end = self.starts.get(number + 1).map_or(self.samples.len(), |&end| end as usize);
        self.samples.get(start..end).unwrap_or_default()
    }

    /// Returns the same samples, with each group moved to the position of its first sample.
    fn together(&self, order: Vec<SampleId>) -> Vec<SampleId> {
        let mut group_of = HashMap::with_capacity(order.len());
        for number in 0..self.starts.len() {
            group_of.extend(self.members(number).iter().map(|&sample| (sample, number)));
        }
        let here: std::collections::HashSet<SampleId> = order.iter().copied().collect();
        let mut taken = vec![false; self.starts.len()];
        let mut grouped = Vec::with_capacity(order.len());
        for sample in order {
            let Some(&number) = group_of.get(&sample) else { continue };
            if !std::mem::replace(&mut taken[number], true) {
                grouped.extend(self.members(number).iter().copied().filter(|sample| here.contains(sample)));
            }
        }
        grouped
    }
}

/// Inserts `scattered` at random positions into `order`.
fn scatter(order: &mut Vec<SampleId>, scattered: &[SampleId], seed: u64) {
    if scattered.is_empty() {
        return;
    }
    let count = (order.len() + scattered.len()) as u64;
    let is_scattered = |at: u64, permutation: &Permutation| permutation.at(at) < scattered.len() as u64;
    let permutation = Permutation::new(count, seed, 0);
    let within = Permutation::new(scattered.len() as u64, seed, 1);
    let mut positioned = std::mem::take(order).into_iter();
    let mut next = 0;
    for at in 0..count {
        if is_scattered(at, &permutation) {
            order.push(scattered[within.at(next) as usize]);
            next += 1;
        } else {
            order.extend(positioned.next());
        }
    }
}

/// A random permutation of 0 to `count` - 1 that can compute each value without the others. It is a
/// Feistel network over the smallest even number of bits that can hold `count` - 1. The network is
/// applied again until the value is in range.
struct Permutation {
    count: u64,
    half_bits: u32,
    keys: [u64; ROUNDS as usize],
}

impl Permutation {
    fn new(count: u64, seed: u64, epoch: u64) -> Self {
        let bits = 64 - count.saturating_sub(1).leading_zeros();
        let key = |round: u64| mix(mix(seed ^ 0x6461_7966_6c79) ^ mix(epoch).wrapping_add(round));
        Self { count, half_bits: bits.div_ceil(2).max(1), keys: std::array::from_fn(|round| key(round as u64)) }
    }

    fn at(&self, position: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let mut value = position;
        loop {
            let (mut left, mut right) = (value >> self.half_bits, value & mask);
            for key in self.keys {
                (left, right) = (right, left ^ (mix(right ^ key) & mask));
            }
            value = left << self.half_bits | right;
            // The network permutes all numbers of that many bits. Applied again and again, it leads
            // back to `position`, which is in range, so the loop ends.
            if value < self.count || self.count == 0 {
                return value;
            }
        }
    }
}

/// The finalizer of SplitMix64.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SEMANTICS: "Global shuffling. `Samples::epoch` in Rust and `dayfly_epoch` in C return all
    /// samples in an order that seed and epoch determine. The order is the same on every node and takes
    /// no memory to compute; reader *r* of *n* takes every *n*-th sample."
    #[test]
    fn each_number_comes_once_and_epochs_differ() {
        for count in [0, 1, 2, 3, 7, 64, 1000, 4097] {
            let permutation = Permutation::new(count, 1, 2);
            let mut values: Vec<u64> = (0..count).map(|at| permutation.at(at)).collect();
            if count >= 64 {
                let others = Permutation::new(count, 1, 3);
                let same = (0..count).filter(|&at| values[at as usize] == others.at(at)).count();
                assert!(same < 12, "{same} of {count} are where they were");
                let adjacent = values.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count();
                assert!(adjacent < 12, "{adjacent} of {count} are still adjacent");
            }
            values.sort_unstable();
            assert!(values.iter().copied().eq(0..count), "{count}");
        }
    }

    /// SEMANTICS: "Global shuffling. `Samples::epoch` in Rust and `dayfly_epoch` in C return all
    /// samples in an order that seed and epoch determine. The order is the same on every node and takes
    /// no memory to compute; reader *r* of *n* takes every *n*-th sample."
    #[test]
    fn golden_order() {
        let permutation = Permutation::new(10, 7, 1);
        let order: Vec<u64> = (0..10).map(|at| permutation.at(at)).collect();
        assert_eq!(order, GOLDEN, "other builds and other nodes must compute the same order");
    }

    const GOLDEN: [u64; 10] = [9, 8, 6, 5, 7, 1, 0, 2, 4, 3];

    #[test]
    fn positions_are_uniform() {
        let mut counts = [0_u32; 16];
        (0..16_000).for_each(|epoch| counts[Permutation::new(100, 5, epoch).at(3) as usize * 16 / 100] += 1);
        assert!(counts.iter().all(|&count| (800..1250).contains(&count)), "{counts:?}");
    }

    #[test]
    fn scattered_samples_lie_among_the_others() {
        let mut order: Vec<SampleId> = (0..100).map(SampleId).collect();
        let scattered: Vec<SampleId> = (100..120).map(SampleId).collect();
        scatter(&mut order, &scattered, 1);
        let rest: Vec<u32> = order.iter().map(|sample| sample.0).filter(|&sample| sample < 100).collect();
        assert!(rest.into_iter().eq(0..100));
        let places: Vec<usize> = (0..120).filter(|&at| order[at].0 >= 100).collect();
        assert!(places.len() == 20 && places[0] < 30 && places[19] > 90, "{places:?}");
    }
}
