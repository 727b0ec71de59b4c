"""Tells which samples of an epoch have not been read yet, after any number of interruptions.

An epoch that is interrupted and resumed with other rules, for example with another number of ranks,
consists of several *legs*. Within a leg, each rank reads from the beginning of its share. All ranks
make the same number of steps, so the number of samples that each rank has read describes the whole
leg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .sharing import Deal, Ids, shares


@dataclass
class Leg:
    """A part of an epoch in which the rules stay the same."""

    deal: Deal
    homes: NDArray[np.uint16] | None
    """The home of each sample; `None` for a global shuffle."""
    places: Ids | None
    """The place of each sample in the order of its owner; only for a local shuffle."""
    delivered: int = 0
    """How many samples each rank has read. Ranks with a shorter share have read all of it."""

    def has_rules_of(self, other: Leg) -> bool:
        """Returns whether the other leg deals the same samples in the same way."""
        return (
            self.deal == other.deal and _equal(self.homes, other.homes) and _equal(self.places, other.places)
        )


def _equal(one: NDArray[np.generic] | None, other: NDArray[np.generic] | None) -> bool:
    return (one is None) == (other is None) and (one is None or np.array_equal(one, other))  # type: ignore[arg-type]


def remaining(order: Ids, legs: Sequence[Leg]) -> Ids:
    """Returns the samples of `order`, in that order, that no rank has read in one of the legs."""
    for leg in legs:
        is_read = np.zeros(int(order.max(initial=0)) + 1, bool)
        for share in shares(leg.deal, order, leg.homes, leg.places):
            is_read[share[: leg.delivered]] = True
        order = order[~is_read[order]]
    return order
