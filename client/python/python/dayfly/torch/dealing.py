"""Computes the share of one rank, and keeps the state from which another run can continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..progress import Leg, remaining
from ..sharing import Deal, Ids, homes_of, places_of, share_size, shares
from .ranks import nodes_of_ranks
from ..samples import Samples

VERSION = 1
"""The version of the state. A change of the rules by which samples are dealt needs a new one."""


class Dealing:
    """Deals the samples of one epoch after another to the ranks."""

    def __init__(self, samples: Samples, deal: Deal, rank: int, nodes: Sequence[int] | None) -> None:
        self.samples = samples
        self.rank = rank
        self._earlier: list[Leg] = []
        homes = places = None
        if deal.shuffle != "global":
            dataset, first_files = samples.dataset, samples.first_files()
            named, orders = nodes_of_ranks(dataset, nodes, deal.world, deal.shuffle == "local")
            homes = homes_of(np.asarray(dataset.owners())[first_files], named, deal.seed)
            if deal.shuffle == "local":
                places = places_of(len(dataset), orders)[first_files]
        self._leg = Leg(deal, homes, places)
        self._share: Ids | None = None

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self._leg.deal.epoch

    @property
    def delivered(self) -> int:
        """How many samples of its share each rank has read."""
        return self._leg.delivered

    @delivered.setter
    def delivered(self, count: int) -> None:
        self._leg.delivered = count

    def use_batch_size(self, batch: int) -> None:
        """Sets the number of samples in a rank's batch. Nothing has been dealt yet."""
        self._leg.deal = replace(self._leg.deal, batch=batch)

    def restart(self, epoch: int) -> None:
        """Begins an epoch, of which nothing has been read."""
        self._leg = self._leg_of(epoch)
        self._earlier = []
        self._share = None

    def size(self) -> int:
        """Returns the length of the share of this rank."""
        if self._earlier:
            return len(self.share())
        return share_size(len(self.samples), self._leg.deal, self.rank) if len(self.samples) else 0

    def share(self) -> Ids:
        """Returns the items that this rank reads in this epoch, in their order."""
        if self._share is None:
            self._share = self._share_of(self._leg, self._earlier)
        return self._share

    def next_share(self) -> Ids:
        """Returns what this rank will read in the next epoch."""
        return self._share_of(self._leg_of(self.epoch + 1), [])

    def state(self) -> dict[str, Any]:
        """Returns what `load` needs to continue after what was delivered."""
        return {"legs": [_encoded(leg) for leg in [*self._earlier, self._leg]]}

    def load(self, state: dict[str, Any]) -> None:
        """Continues from a state, which may be of another session with other ranks."""
        legs = [_decoded(leg, len(self.samples)) for leg in _entry(state, "legs", list)]
        if not legs:
            raise ValueError("state_dict has no legs; it was not made by a dayfly.torch.Sampler")
        last = legs[-1]
        if any((leg.deal.seed, leg.deal.epoch) != (last.deal.seed, last.deal.epoch) for leg in legs):
            raise ValueError("state_dict mixes several seeds or epochs; it is damaged")
        own = replace(self._leg.deal, seed=last.deal.seed, epoch=last.deal.epoch, since=last.deal.since)
        self._leg = Leg(own, self._leg.homes, self._leg.places)
        if last.has_rules_of(self._leg):
            self._leg.delivered = last.delivered
            legs.pop()
        else:
            self._leg.deal = replace(own, since=own.epoch)
        self._earlier = [leg for leg in legs if leg.delivered > 0]
        self._share = None

    def _leg_of(self, epoch: int) -> Leg:
        return Leg(replace(self._leg.deal, epoch=epoch), self._leg.homes, self._leg.places)

    def _share_of(self, leg: Leg, earlier: list[Leg]) -> Ids:
        deal = leg.deal
        order = self.samples.item_order(np.asarray(self.samples.dataset.epoch_ids(deal.seed, deal.epoch)))
        return shares(deal, remaining(order, earlier), leg.homes, leg.places)[self.rank]


def _encoded(leg: Leg) -> dict[str, Any]:
    """Describes a leg with types that `torch.load` accepts with `weights_only=True`. Copies no array."""
    return {
        **asdict(leg.deal),
        "delivered": leg.delivered,
        "homes": None if leg.homes is None else torch.from_numpy(leg.homes.view(np.int16)),
        "places": None if leg.places is None else torch.from_numpy(leg.places.view(np.int32)),
    }


def _decoded(value: Any, count: int) -> Leg:
    if not isinstance(value, dict):
        raise TypeError(f"state_dict['legs'] must hold dictionaries, not {type(value).__name__}")
    deal = Deal(**{field.name: _entry(value, field.name) for field in fields(Deal)})
    delivered = _entry(value, "delivered", int)
    if not 0 <= delivered <= count:
        raise ValueError(f"state_dict says that each rank has read {delivered} samples, but there are only {count}")
    homes = _array(value, "homes", np.uint16, count)
    places = _array(value, "places", np.uint32, count)
    if (deal.shuffle != "global") != (homes is not None) or (deal.shuffle == "local") != (places is not None):
        raise ValueError(f"state_dict does not have the homes and places that shuffle={deal.shuffle!r} needs")
    if homes is not None and count and int(homes.max()) >= deal.world:
        raise ValueError(f"state_dict has a home that is none of its {deal.world} ranks; it is damaged")
    return Leg(deal, homes, places, delivered)


def _array(value: dict[str, Any], name: str, dtype: type[np.generic], count: int) -> NDArray[Any] | None:
    tensor = _entry(value, name)
    if tensor is None:
        return None
    if not isinstance(tensor, torch.Tensor) or tensor.element_size() != np.dtype(dtype).itemsize:
        raise TypeError(f"state_dict has no array of {np.dtype(dtype).name} under {name!r}")
    if tensor.shape != (count,):
        raise ValueError(f"state_dict has {tensor.numel()} values under {name!r}, but there are {count} samples")
    return tensor.cpu().contiguous().numpy().view(dtype)


def _entry(value: dict[str, Any], name: str, kind: type = object) -> Any:
    if name not in value:
        raise ValueError(f"state_dict has no entry {name!r}; it was not made by a dayfly.torch.Sampler")
    if not isinstance(value[name], kind):
        raise TypeError(f"state_dict[{name!r}] must be of type {kind.__name__}, not {type(value[name]).__name__}")
    return value[name]
