//! The exact part of all blocks that each member owns.

use std::collections::BTreeMap;

use super::Placement;
use super::ring::SCALE_ONE;
use crate::id::NodeId;
use crate::limits::PROBES;

/// A virtual node's arc.
struct Arc {
    node: NodeId,
    /// The reciprocal of the scale: how fast the arc is used up as the scaled distance grows.
    speed: f64,
    /// The scaled distance at which all of the arc is used up.
    end: f64,
}

impl Placement {
    /// Returns the part of all blocks that each member on the ring owns if nobody is
    /// skipped. The parts are exact, up to rounding, for blocks whose points are uniform.
    ///
    /// A virtual node owns a block if one of the block's points is at a scaled distance `y` before
    /// it, and no other point is nearer to its own virtual node. With `F(y)` for the part of the
    /// ring within the scaled distance `y`, that has the density `PROBES * speed * (1 -
    /// F(y))^(PROBES - 1)` up to the length of the arc. `F` is linear between the ends of arcs.
    pub fn shares(&self) -> BTreeMap<NodeId, f64> {
        let positions: Vec<(u64, NodeId, u64)> = self.ring.positions().collect();
        let before = positions.iter().cycle().skip(positions.len().saturating_sub(1));
        let arc = |(&(position, node, scale), &(last, ..)): (&(u64, NodeId, u64), &(u64, NodeId, u64))| {
            let speed = SCALE_ONE as f64 / scale as f64;
            // A single virtual node has the whole ring.
            let len = if positions.len() == 1 { 1.0 } else { position.wrapping_sub(last) as f64 / 2_f64.powi(64) };
            Arc { node, speed, end: len / speed }
        };
        let mut arcs: Vec<Arc> = positions.iter().zip(before).map(arc).collect();
        arcs.sort_by(|one, other| one.end.total_cmp(&other.end));
        let mut shares = BTreeMap::new();
        let mut speed: f64 = arcs.iter().map(|arc| arc.speed).sum();
        let (mut at, mut outside, mut sum) = (0.0, 1.0_f64, 0.0);
        for arc in &arcs {
            let left = (outside - (arc.end - at) * speed).max(0.0);
            // When the last arcs end, nothing of the ring is left, and neither is any speed.
            if speed > 0.0 {
                sum += (outside.powi(PROBES as i32) - left.powi(PROBES as i32)) / speed;
            }
            *shares.entry(arc.node).or_insert(0.0) += arc.speed * sum;
            (at, outside) = (arc.end, left);
            speed -= arc.speed;
        }
        shares
    }
}
