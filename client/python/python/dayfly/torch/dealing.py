"""Computes the share of one rank, and keeps the state from which another run can continue."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from ..progress import Mask, Reading, packed, rest, union, unpacked
from ..samples import Samples
from ..sharing import Deal, Ids, homes_of, places_of, share_size, shares
from .ranks import nodes_of_ranks

VERSION = 2
"""The version of the state. A change of the rules by which samples are dealt needs a new one."""


class Dealing:
    """Deals the samples of one epoch after another to the ranks."""

    def __init__(self, samples: Samples, deal: Deal, rank: int, nodes: Sequence[int] | None) -> None:
        self.samples = samples
        self.rank = rank
        self.delivered = 0
        """How many samples of its share this rank has read."""
        self._deal = deal
        self._homes = self._places = None
        if deal.shuffle != "global":
            dataset, first_files = samples.dataset, samples.first_files()
            named, orders = nodes_of_ranks(dataset, nodes, deal.world, deal.shuffle == "local")
            self._homes = homes_of(np.asarray(dataset.owners())[first_files], named, deal.seed)
            if deal.shuffle == "local":
                self._places = places_of(len(dataset), orders)[first_files]
        arrays = [array.tobytes() for array in (self._homes, self._places) if array is not None]
        self._rules = hashlib.sha256(b"".join(arrays)).hexdigest()[:32] if arrays else ""
        """Differs if samples have other homes or places."""
        self._earlier: Mask | None = None
        """What was read in this epoch under other rules."""
        self._finished: dict[str, Any] | None = None
        """What this rank has read of the epoch before, until it begins the next one: other ranks may not have finished it."""
        self._dealt: list[Ids] | None = None
        self._read_by_all: Reading | None = None
        self._read_here: Reading | None = None

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._deal.epoch

    def use_batch_size(self, batch: int) -> None:
        """Sets the number of samples in a rank's batch. Nothing has been dealt yet."""
        self._deal = replace(self._deal, batch=batch)

    def restart(self, epoch: int) -> None:
        """Begins an epoch, of which nothing has been read."""
        self._begin(replace(self._deal, epoch=epoch), None, 0)

    def finish(self) -> None:
        """Begins the next epoch, because this rank has read all of its share."""
        finished = {"epoch": self.epoch, "delivered": len(self.share()), "read_here": self._bits_read_here(len(self.share()))}
        self.restart(self.epoch + 1)
        self._finished = finished

    def size(self) -> int:
        """Returns the length of the share of this rank."""
        if self._earlier is not None:
            return len(self.share())
        return share_size(len(self.samples), self._deal, self.rank) if len(self.samples) else 0

    def share(self) -> Ids:
        """Returns the items that this rank reads in this epoch, in their order."""
        return self._shares()[self.rank]

    def next_share(self) -> Ids:
        """Returns what this rank will read in the next epoch."""
        return self._dealt_by(replace(self._deal, epoch=self.epoch + 1), None)[self.rank]

    def state(self) -> dict[str, Any]:
        """Returns what `load` needs to continue after what was delivered, for all ranks if they have read equally much."""
        read = None
        # A global order can be computed again, in any session.
        if self._deal.shuffle != "global" and self.delivered > 0:
            if self._read_by_all is None:
                self._read_by_all = Reading(self._shares(), len(self.samples))
            read = _bits(self._read_by_all.mask([self.delivered] * self._deal.world))
        return {
            "rank": self.rank,
            "deal": asdict(self._deal),
            "rules": self._rules,
            "delivered": self.delivered,
            "earlier": _bits(self._earlier),
            "read": read,
            "read_here": self._bits_read_here(self.delivered),
            "finished": self._finished if self.delivered == 0 else None,
        }

    def merged(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns one state for those of all ranks."""
        whole = _merged([_decoded(state, len(self.samples)) for state in states])
        return {
            "rank": self.rank,
            "deal": asdict(whole.deal),
            "rules": whole.rules,
            "delivered": whole.counts,
            "earlier": _bits(whole.earlier),
            "read": _bits(whole.read),
            "read_here": None,
            "finished": None,
        }

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Continues from the state of one rank, or from those of all ranks, which may be of another session with other ranks."""
        before = _merged([_decoded(state, len(self.samples)) for state in states])
        deal = replace(self._deal, seed=before.deal.seed, epoch=before.deal.epoch, since=before.deal.since)
        # Ranks that have not read equally much would not end together. The rest is dealt anew to them.
        if (deal, self._rules) == (before.deal, before.rules) and len(set(before.counts)) == 1:
            self._begin(deal, before.earlier, before.counts[self.rank])
            return
        read = before.read
        if before.deal.shuffle == "global" and any(before.counts):
            dealt = shares(before.deal, rest(self._order(before.deal), before.earlier), None, None)
            read = Reading(dealt, len(self.samples)).mask(before.counts)
        self._begin(replace(deal, since=deal.epoch), union(before.earlier, read), 0)

    def _begin(self, deal: Deal, earlier: Mask | None, delivered: int) -> None:
        self._deal, self._earlier, self.delivered = deal, earlier, delivered
        self._dealt = self._read_by_all = self._read_here = self._finished = None

    def _bits_read_here(self, count: int) -> torch.Tensor | None:
        """Describes the first samples of the share of this rank. One rank alone needs no such description."""
        if self._deal.shuffle == "global" or self._deal.world == 1 or count == 0:
            return None
        if self._read_here is None:
            self._read_here = Reading([self.share()], len(self.samples))
        return _bits(self._read_here.mask([count]))

    def _shares(self) -> list[Ids]:
        if self._dealt is None:
            self._dealt = self._dealt_by(self._deal, self._earlier)
        return self._dealt

    def _dealt_by(self, deal: Deal, earlier: Mask | None) -> list[Ids]:
        return shares(deal, rest(self._order(deal), earlier), self._homes, self._places)

    def _order(self, deal: Deal) -> Ids:
        return self.samples.item_order(np.asarray(self.samples.dataset.epoch_ids(deal.seed, deal.epoch)))


@dataclass
class _State:
    """A state that has been checked."""

    rank: int
    deal: Deal
    rules: str
    counts: list[int]
    """How many samples each rank had read."""
    earlier: Mask | None
    read: Mask | None
    """What all ranks had read since, as far as `counts` is right."""
    read_here: Mask | None
    """What this rank had read of that."""
    finished: tuple[int, int, Mask | None] | None
    """The epoch that this rank had just finished, how much it had read in it, and what."""


def _merged(states: Sequence[_State]) -> _State:
    """Returns one state for those of all ranks."""
    if len(states) == 1:
        return states[0]
    epoch = min(state.deal.epoch for state in states)
    first = next(state for state in states if state.deal.epoch == epoch)
    states = [_before_its_end(state, first) for state in states]
    by_rank = {state.rank: state for state in states}
    if len(states) != first.deal.world or sorted(by_rank) != list(range(first.deal.world)):
        raise ValueError(f"state_dict must be of one rank, or of each of the {first.deal.world} ranks once")
    for state in states:
        if (state.deal, state.rules) != (first.deal, first.rules) or not _equal(state.earlier, first.earlier):
            raise ValueError("the states in state_dict are not those of the ranks of one run in one epoch")
    counts = [by_rank[rank].counts[rank] for rank in range(first.deal.world)]
    read = None
    for state in states:
        read = union(read, state.read_here)
    return replace(first, counts=counts, read=read)


def _before_its_end(state: _State, other: _State) -> _State:
    """Returns the state of a rank that has just finished the epoch in which another rank is as one in that epoch."""
    if state.finished is None or state.deal.epoch == other.deal.epoch:
        return state
    epoch, count, read_here = state.finished
    counts = [count] * state.deal.world
    return replace(state, deal=replace(state.deal, epoch=epoch), counts=counts, earlier=other.earlier, read_here=read_here)


def _equal(one: Mask | None, other: Mask | None) -> bool:
    return one is other if one is None or other is None else np.array_equal(one, other)


def _bits(mask: Mask | None) -> torch.Tensor | None:
    """Describes a mask with a type that `torch.load` accepts with `weights_only=True`."""
    return None if mask is None else torch.from_numpy(packed(mask))


def _decoded(value: dict[str, Any], count: int) -> _State:
    entries = _entry(value, "deal", dict)
    deal = Deal(**{field.name: _entry(entries, field.name) for field in fields(Deal)})
    delivered = _entry(value, "delivered")
    counts = [delivered] * deal.world if isinstance(delivered, int) else delivered
    if not isinstance(counts, list) or len(counts) != deal.world:
        raise TypeError(f"state_dict['delivered'] must be a number, or one for each of {deal.world} ranks")
    for number in counts:
        if not isinstance(number, int) or not 0 <= number <= count:
            raise ValueError(f"state_dict says that a rank has read {number} samples, but there are only {count}")
    rank = _entry(value, "rank", int)
    if not 0 <= rank < deal.world:
        raise ValueError(f"state_dict is of rank {rank}, but of only {deal.world} ranks; it is damaged")
    masks = {name: _mask(value, name, count) for name in ("earlier", "read", "read_here")}
    if deal.shuffle != "global" and any(counts) and masks["read"] is None:
        raise ValueError(f"state_dict does not say which samples were read, which shuffle={deal.shuffle!r} needs; it is damaged")
    entries = _entry(value, "finished")
    finished = None
    if entries is not None:
        if not isinstance(entries, dict):
            raise TypeError(f"state_dict['finished'] must be of type dict or None, not {type(entries).__name__}")
        finished = _entry(entries, "epoch", int), _entry(entries, "delivered", int), _mask(entries, "read_here", count)
        if not 0 <= finished[1] <= count:
            raise ValueError(f"state_dict says that a rank has read {finished[1]} samples, but there are only {count}")
    rules = _entry(value, "rules", str)
    return _State(rank, deal, rules, counts, masks["earlier"], masks["read"], masks["read_here"], finished)


def _mask(value: dict[str, Any], name: str, count: int) -> Mask | None:
    tensor = _entry(value, name)
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.uint8:
        raise TypeError(f"state_dict has no bits under {name!r}")
    if tensor.shape != (-(-count // 8),):
        raise ValueError(f"state_dict has {tensor.numel()} bytes of bits under {name!r}, but there are {count} samples")
    return unpacked(tensor.cpu().contiguous().numpy(), count)


def _entry(value: dict[str, Any], name: str, kind: type = object) -> Any:
    if name not in value:
        raise ValueError(f"state_dict has no entry {name!r}; it was not made by a dayfly.torch.Sampler")
    if not isinstance(value[name], kind):
        raise TypeError(f"state_dict[{name!r}] must be of type {kind.__name__}, not {type(value[name]).__name__}")
    return value[name]
