"""Tells which samples of an epoch have been read, one bit for each.

An epoch may be interrupted and go on with other rules, for example with another number of ranks.
Each rank reads from the beginning of its share, so its share and a number tell what it has read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .sharing import Ids

Mask = NDArray[np.bool_]
"""Whether each sample has been read."""


def rest(order: Ids, read: Mask | None) -> Ids:
    """Returns the samples of `order`, in that order, that have not been read."""
    return order if read is None else order[~read[order]]


def union(one: Mask | None, other: Mask | None) -> Mask | None:
    """Returns which samples at least one of two masks has; `None` is a mask without any."""
    if one is None or other is None:
        return one if other is None else other
    return one | other


class Reading:
    """What ranks have read of their shares. Cheap to ask again and again, because only what is new is looked at."""

    def __init__(self, shares: Sequence[Ids], count: int) -> None:
        self._shares = shares
        self._counts = [0] * len(shares)
        self._mask = np.zeros(count, bool)

    def mask(self, counts: Sequence[int]) -> Mask:
        """Returns which samples are among the first of each share; `counts` says how many. Do not change the result."""
        if any(new < old for new, old in zip(counts, self._counts)):
            self._mask[:] = False
            self._counts = [0] * len(self._shares)
        for share, old, new in zip(self._shares, self._counts, counts):
            self._mask[share[old:new]] = True
        self._counts = list(counts)
        return self._mask


def packed(mask: Mask) -> NDArray[np.uint8]:
    """Returns a mask as bits, eight in each byte."""
    return np.packbits(mask, bitorder="little")


def unpacked(bits: NDArray[np.uint8], count: int) -> Mask:
    """Returns the mask of `count` samples whose bits these are."""
    return np.unpackbits(bits, count=count, bitorder="little").astype(bool)
