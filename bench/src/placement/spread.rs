//! Measures by many blocks what cannot be computed: where blocks go whose owner is skipped.

use dayfly_meta::id::NodeId;
use dayfly_meta::placement::{Member, NodeSet, Placement};

use super::{extremes, unequal};
use crate::measure::Failure;

const NODES: u16 = 256;

pub(super) fn print(seed: u64, blocks: u64) -> Result<(), Failure> {
    for ratio in [1, 4] {
        let members = unequal(NODES, ratio);
        let placement = Placement::new(seed, &members);
        println!();
        println!("{NODES} nodes, capacities 1:{ratio}, {blocks} blocks");
        print_lost(&placement, &members, blocks)?;
        for kept in [192, 128, 64, 16] {
            // Pairs of a small and a large node are skipped together.
            let skipped: NodeSet = (0..NODES).filter(|node| node / 2 % (NODES / 2) >= kept / 2).map(NodeId).collect();
            let mut held = vec![0_u64; members.len()];
            for block in 0..blocks / 4 {
                held[placement.owner(&block.to_le_bytes(), 0, &skipped).ok_or("no members")?.index()] += 1;
            }
            let (most, least) = per_capacity(&held, &members, &skipped);
            println!("  {kept:3} of them left: max/mean {most:.3}, min/mean {least:.3}");
        }
    }
    Ok(())
}

/// Prints how the blocks of each lost node are spread over the others.
fn print_lost(placement: &Placement, members: &[Member], blocks: u64) -> Result<(), Failure> {
    let mut moved = vec![vec![0_u64; members.len()]; members.len()];
    for block in 0..blocks {
        let mut candidates = placement.candidates(&block.to_le_bytes(), 0);
        let (first, second) = candidates.next().zip(candidates.next()).ok_or("fewer than two members")?;
        moved[first.index()][second.index()] += 1;
    }
    let heirs = moved.iter().map(|to| to.iter().filter(|&&blocks| blocks > 0).count()).min().unwrap_or(0);
    let fewest = moved.iter().map(|to| to.iter().sum::<u64>()).min().unwrap_or(0);
    println!("  a lost node's blocks (at least {fewest}) go to at least {heirs} of the {} others", members.len() - 1);
    let second: Vec<u64> = (0..members.len()).map(|node| moved.iter().map(|to| to[node]).sum()).collect();
    let (most, least) = per_capacity(&second, members, &NodeSet::new());
    println!("  what a node gets of all lost nodes, in turn: max/mean {most:.3}, min/mean {least:.3}");
    // The most that one node gets of one lost node, of those that can be expected to get many.
    let total: f64 = members.iter().map(|member| member.capacity as f64).sum();
    let uneven = moved.iter().enumerate().flat_map(|(lost, to)| {
        let all = to.iter().sum::<u64>() as f64;
        let others = total - members[lost].capacity as f64;
        let expected = move |node: usize| all * members[node].capacity as f64 / others;
        to.iter().enumerate().filter(move |&(node, _)| node != lost).map(move |(node, &blocks)| (blocks as f64, expected(node)))
    });
    let pairs: Vec<(f64, f64)> = uneven.collect();
    let squares: f64 = pairs.iter().map(|(seen, expected)| (seen - expected) * (seen - expected) / expected).sum();
    println!(
        "  chi-square of pairs of lost node and heir, per degree of freedom: {:.2} (1: chance alone)",
        squares / pairs.len() as f64
    );
    Ok(())
}

/// Returns the most and the least that a node holds of what its capacity calls for.
fn per_capacity(held: &[u64], members: &[Member], skipped: &NodeSet) -> (f64, f64) {
    let left = || members.iter().filter(|member| !skipped.contains(member.node));
    let total: f64 = left().map(|member| member.capacity as f64).sum();
    let all = held.iter().sum::<u64>() as f64;
    extremes(left().map(|member| held[member.node.index()] as f64 / all * total / member.capacity as f64))
}
