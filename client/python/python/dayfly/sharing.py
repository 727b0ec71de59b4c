"""Decides which rank reads which samples in an epoch, and in which order.

All functions are pure: they depend on their arguments only. So all ranks compute the same shares
without a message, and a later run can compute the shares of an earlier one again.

A *share* is the list of the samples of one rank, in the order in which the rank reads them. The
*home* of a sample is the rank that runs on the sample's owner, the node that stores the sample.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint32]
Shuffle = Literal["global", "local", "partial"]
Tail = Literal["exact", "drop", "wrap"]

NO_RANK = 0xFFFF
"""The home of a sample whose owner runs no rank."""

RANKS_MAX = NO_RANK
"""With this many ranks, the number of each fits into the two bytes of a home."""

# These keep apart the random decisions that are made with the same seed and epoch.
_HOMELESS, _SURPLUS, _ORDER, _GUESTS, _MIGRATION_ORDER, _MIGRATION_RANKS, _PLACES, PLAIN_ORDER = range(8)


@dataclass(frozen=True)
class Deal:
    """The rules by which samples are dealt to ranks in one epoch."""

    world: int
    """Number of ranks."""
    shuffle: Shuffle = "global"
    tail: Tail = "exact"
    """What happens if the ranks cannot have equally many samples: with "exact", some ranks have one
    sample fewer; with "drop", some samples are left out; with "wrap", some samples are repeated."""
    q: float = 0.0
    """The part of each batch that "partial" gets from other ranks, from 0 to 1."""
    batch: int = 1
    """Number of samples in a rank's batch. Only "partial" uses it."""
    migrate: bool = False
    """Whether "partial" moves samples to other ranks for good, instead of for one epoch."""
    since: int = 0
    """With `migrate`, the epoch in which all samples were at home."""
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        _check_choice("shuffle", self.shuffle, get_args(Shuffle))
        _check_choice("tail", self.tail, get_args(Tail))
        for field, name, least, most in [
            ("world", "num_replicas", 1, RANKS_MAX),
            ("batch", "batch_size", 1, 2**32 - 1),
            ("seed", "seed", 0, 2**64 - 1),
            ("epoch", "epoch", 0, 2**64 - 1),
            ("since", "since", 0, 2**64 - 1),
        ]:
            value = whole(name, getattr(self, field))
            if not least <= value <= most:
                raise ValueError(f"{name} must be a number from {least} to {most}, not {value}")
            object.__setattr__(self, field, value)
        if not isinstance(self.migrate, bool):
            raise TypeError(f"migrate must be True or False, not {type(self.migrate).__name__}")
        if isinstance(self.q, bool) or not isinstance(self.q, numbers.Real):
            raise TypeError(f"q must be a number from 0 to 1, not {type(self.q).__name__}")
        object.__setattr__(self, "q", float(self.q))
        if not 0 <= self.q <= 1:
            raise ValueError(f"q must be a number from 0 to 1, not {self.q}")


def whole(name: str, value: Any) -> int:
    """Returns a whole number of any library as one of Python."""
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, not {type(value).__name__}")
    return operator.index(value)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def shares(deal: Deal, pool: Ids, homes: NDArray[np.uint16] | None, places: Ids | None) -> list[Ids]:
    """Deals the samples of `pool` to the ranks.

    For "global", the order of `pool` is the order of the epoch. For the others, `homes` has the home
    of every sample of the dataset, and the order of `pool` does not matter. For "local", `places`
    has each sample's place in the order in which its owner stores its samples.
    """
    if deal.shuffle == "global":
        return [_padded(pool[rank :: deal.world], pool, deal, rank) for rank in range(deal.world)]
    assert homes is not None, "the home of each sample is known"
    if deal.migrate:
        dealt = _migrated(deal, balanced(deal, pool, homes, deal.since))
    else:
        dealt = balanced(deal, pool, homes, deal.epoch)
        if places is not None:
            dealt = [share[np.argsort(places[share], kind="stable")] for share in dealt]
        else:
            dealt = [permuted(share, deal.seed, deal.epoch, _ORDER) for share in dealt]
            _lend(deal, dealt)
    return [_padded(share, pool, deal, rank) for rank, share in enumerate(dealt)]


def sizes(count: int, world: int) -> NDArray[np.int64]:
    """Returns how many of `count` samples each rank gets. The numbers differ by at most 1."""
    return count // world + (np.arange(world) < count % world)


def share_size(count: int, deal: Deal, rank: int) -> int:
    """Returns the length of a rank's share of `count` samples."""
    if deal.tail == "exact":
        return count // deal.world + (rank < count % deal.world)
    return count // deal.world if deal.tail == "drop" else -(-count // deal.world)


def homes_of(owners: NDArray[np.uint16], node_of_rank: Sequence[int], seed: int) -> NDArray[np.uint16]:
    """Returns the home of each sample, given the number of the node that owns it.

    Ranks on one node share the samples of the node. A sample whose owner runs no rank gets a home by
    a hash of its number.
    """
    world = len(node_of_rank)
    homes = np.full(len(owners), NO_RANK, np.uint16)
    for node in sorted(set(node_of_rank)):
        ranks = np.array([rank for rank, at in enumerate(node_of_rank) if at == node], np.uint16)
        owned = np.flatnonzero(owners == node)
        homes[owned] = ranks[np.arange(len(owned)) % len(ranks)]
    homeless = np.flatnonzero(homes == NO_RANK)
    homes[homeless] = _hash(homeless, seed, 0, _HOMELESS) % np.uint64(world)
    return homes


def places_of(count: int, orders: Mapping[int, Ids]) -> Ids:
    """Returns the place of each of `count` samples in the order of its node. Samples of other nodes get random places among them."""
    others = count // max(len(orders), 1) + 1
    places = (_hash(np.arange(count), 0, 0, _PLACES) % np.uint64(others)).astype(np.uint32)
    for ids in orders.values():
        places[ids] = np.arange(len(ids), dtype=np.uint32)
    return places


def balanced(deal: Deal, pool: Ids, homes: NDArray[np.uint16], epoch: int) -> list[Ids]:
    """Returns shares of nearly equal size, in no particular order.

    A rank keeps as many samples of its own as fit into its share. The others are its surplus. The
    surplus of all ranks, in the order of the ranks, fills the shares of the ranks that have too few
    samples of their own, again in the order of the ranks.
    """
    world = deal.world
    mixed = permuted(pool, deal.seed, epoch, _SURPLUS)
    by_home = np.argsort(homes[mixed], kind="stable")
    mixed, home = mixed[by_home], homes[mixed][by_home].astype(np.int64)
    counts = np.bincount(home, minlength=world)
    room = np.full(world, len(pool) // world) if deal.tail == "drop" else sizes(len(pool), world)
    index_at_home = np.arange(len(mixed)) - (np.cumsum(counts) - counts)[home]
    is_surplus = index_at_home >= room[home]
    surplus = mixed[is_surplus]
    needed = np.maximum(room - counts, 0)
    ends = np.cumsum(needed)
    kept = np.split(mixed[~is_surplus], np.cumsum(np.minimum(counts, room))[:-1])
    return [np.concatenate([kept[rank], surplus[ends[rank] - needed[rank] : ends[rank]]]) for rank in range(world)]


def _padded(share: Ids, pool: Ids, deal: Deal, rank: int) -> Ids:
    """Returns a share with the length that `deal.tail` asks for."""
    size = share_size(len(pool), deal, rank)
    if len(share) >= size:
        return share[:size]
    # One sample is repeated: one of the rank's own, or if it has none, one of the others.
    return np.concatenate([share, share[:1] if len(share) else pool[rank % len(pool)][None]])


def _lend(deal: Deal, dealt: list[Ids]) -> None:
    """Exchanges the first part of each batch between the ranks, by a random permutation for each
    batch. A sample of an incomplete batch that other ranks do not have stays at home."""
    least = min(map(len, dealt))
    for start, batches, size in [
        (0, least // deal.batch, deal.batch),
        (least - least % deal.batch, 1, least % deal.batch),
    ]:
        lent = _part(deal.q, size)
        if lent == 0 or batches == 0:
            continue
        end = start + batches * size
        slots = np.stack([share[start:end].reshape(batches, size)[:, :lent] for share in dealt], axis=1)
        rows = slots.reshape(batches, deal.world * lent)
        # A sample occurs once in an epoch, so hashes of samples are random numbers without ties.
        keys = _hash(rows, deal.seed, deal.epoch, _GUESTS)
        rows = np.take_along_axis(rows, np.argsort(keys, axis=1), axis=1)
        for rank, received in enumerate(np.moveaxis(rows.reshape(slots.shape), 1, 0)):
            dealt[rank][start:end].reshape(batches, size)[:, :lent] = received


def _migrated(deal: Deal, dealt: list[Ids]) -> list[Ids]:
    """Replays the exchanges of all epochs before this one.

    After each epoch, all ranks put their samples into the same random order, and exchange the first
    part of them: for each place in that order, a random permutation of the ranks says which rank
    gets whose sample.
    """
    least = min(map(len, dealt))
    held = np.stack([share[:least] for share in dealt])
    moved = _part(deal.q, least)
    for epoch in range(deal.since, deal.epoch):
        places = _migration_order(deal, least, epoch)[:moved]
        keys = _hash(np.arange(moved * deal.world), deal.seed, epoch, _MIGRATION_RANKS)
        givers = np.argsort(keys.reshape(deal.world, moved), axis=0)
        held[:, places] = np.take_along_axis(held[:, places], givers, axis=0)
    order = _migration_order(deal, least, deal.epoch)
    return [np.concatenate([own[order], share[least:]]) for own, share in zip(held, dealt)]


def _migration_order(deal: Deal, count: int, epoch: int) -> Ids:
    return permuted(np.arange(count, dtype=np.uint32), deal.seed, epoch, _MIGRATION_ORDER)


def _part(q: float, count: int) -> int:
    """Returns the largest whole number that is not above q * count. Tolerates that 0.3 * 10 is
    slightly less than 3 in floating point."""
    return min(int(q * count + 1e-9), count)


def permuted(ids: Ids, seed: int, epoch: int, purpose: int) -> Ids:
    """Returns the same samples in a random order, which does not depend on their order before."""
    return ids[np.argsort(_hash(ids, seed, epoch, purpose))]


def _hash(numbers: NDArray[Any], seed: int, epoch: int, purpose: int) -> NDArray[np.uint64]:
    """Returns a different 64-bit number for each different number."""
    key = np.array([seed, epoch, purpose], np.uint64)
    first, second, third = _mix(key)
    return _mix(_mix(numbers.astype(np.uint64) ^ first) ^ _mix(_mix(second[None]) ^ third))


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
