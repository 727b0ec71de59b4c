"""Takes the order of an epoch from any other sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.utils.data

from ..sharing import Ids, whole
from .drawing import foresee, is_known
from ..samples import Samples


class Wrapping:
    """Another sampler, which is drawn for a whole epoch at once."""

    def __init__(self, samples: Samples, sampler: torch.utils.data.Sampler[int], rank: int, world: int) -> None:
        self.samples = samples
        self.sampler = sampler
        self.epoch = 0
        self.delivered = 0
        self._rank, self._world = rank, world
        self._following: list[int] | None = None

    def restart(self, epoch: int) -> None:
        """Begins an epoch, of which nothing has been read."""
        self.epoch = epoch
        self.delivered = 0
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def size(self) -> int:
        """Returns the length of the epoch."""
        return len(self.sampler)  # type: ignore[arg-type]

    def share(self) -> Ids:
        """Draws the other sampler."""
        self._following = foresee(self.sampler, None, 1)[1] if is_known(self.sampler) else None
        return self._as_items(list(self.sampler))

    def next_share(self) -> Ids | None:
        """Returns the order of the next epoch if it is certain already."""
        return None if self._following is None else self._as_items(self._following)

    def finish(self) -> None:
        """Begins the next epoch."""
        self.restart(self.epoch + 1)

    def state(self) -> dict[str, Any]:
        """Returns what `load` needs to continue after what was delivered."""
        return {
            "sampler": type(self.sampler).__name__,
            "world": self._world,
            "rank": self._rank,
            "epoch": self.epoch,
            "delivered": self.delivered,
        }

    def merged(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns one state for those of all ranks, each of which goes on where it was."""
        own = self.state()
        return {**own, "epoch": [state["epoch"] for state in states], "delivered": [state["delivered"] for state in states]}

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Continues from states of the same sampler with the same number of ranks."""
        own = self.state()
        for state in states:
            if not state.keys() >= own.keys():
                raise ValueError(f"state_dict is not that of a dayfly.torch.Sampler with sampler={own['sampler']}")
            for name in ("sampler", "world"):
                if state[name] != own[name]:
                    raise ValueError(
                        f"state_dict has {name} {state[name]!r}, but this one has {own[name]!r}; "
                        "only a sampler that deals the samples itself can continue with another number of ranks"
                    )
        state = next((state for state in states if state["rank"] == self._rank), states[0])
        epoch, delivered = (
            value[self._rank] if isinstance(value, list) else value for value in (state["epoch"], state["delivered"])
        )
        self.restart(epoch)
        self.delivered = delivered

    def _as_items(self, drawn: list[int]) -> Ids:
        items = [whole("each item that the sampler draws", item) for item in drawn]
        wrong = next((item for item in items if not 0 <= item < len(self.samples)), None)
        if wrong is not None:
            raise IndexError(f"the sampler drew {wrong}, but there are only {len(self.samples)} samples")
        return np.array(items, np.uint32)
