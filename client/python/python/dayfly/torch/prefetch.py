"""`prefetch`: announces the order of a loader that exists, with one line."""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from .. import Dataset, Order
from ..sharing import Ids
from .announcing import announced
from .drawing import foresee, is_known, unbatched
from .locating import Locator, Path, PathsOf, paths_of
from .sampler import LOOKAHEAD, Sampler
from ..samples import Samples

PART = 20_000
"""So many items are announced at a time. Looking up their paths takes less than a tenth of a second."""

BATCHES_AHEAD_MAX = 8
"""So many batches are announced at a time if nothing is foreseen. A node fetches along at most 64 orders at a time."""

Loader = TypeVar("Loader", bound="DataLoader[Any]")


def prefetch(loader: Loader, paths: Sequence[Path] | PathsOf | None = None) -> Loader:
    """Announces the order in which a loader reads, so that the node's server fetches samples ahead of it.

    Returns the same loader. Its workers, which may open files in any way, then find them on this node.

    `paths` is a list with the path of each item of the dataset, or a function from an item's number to
    its path or to several paths. Datasets like torchvision's `ImageFolder` need no `paths`.

    For the samplers of PyTorch, the whole epoch is announced when it begins, and the next one when this
    one ends, if its order is certain by then. For any other sampler, each batch is announced when the
    loader draws it. Either way, the program draws the same random numbers as without this function.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"loader must be a torch.utils.data.DataLoader, not {type(loader).__name__}")
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"loader has an iterable dataset ({type(dataset).__name__}), which has no indices; "
            "in its __iter__, call dayfly.prefetch(paths)"
        )
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    inner = getattr(loader, name)
    if isinstance(loader.sampler, Sampler) or isinstance(inner, _AnnouncingSampler):
        return loader  # It announces its order already.
    if isinstance(dataset, Samples) and paths is None:
        finder: _OfSamples | Locator = _OfSamples(dataset)
    else:
        count = len(dataset)  # type: ignore[arg-type]
        finder = Locator(count, paths_of(dataset, paths))
        probes = sorted({0, count // 2, count - 1}) if count else []
        if probes and not finder.locate(probes):
            example = os.fspath(_first(paths_of(dataset, paths)(0)))
            raise ValueError(f"none of the dataset's files is in the namespace; the first path is {example!r}")
    # A DataLoader refuses to have its samplers changed, because its iterators might not notice. This one behaves as the old one.
    object.__setattr__(loader, name, _AnnouncingSampler(inner, loader, finder))
    return loader


def _first(paths: Any) -> Any:
    return paths if isinstance(paths, (str, bytes, os.PathLike)) else next(iter(paths), "")


def _items_in(drawn: Any) -> list[int] | None:
    """Returns the items that a sampler has drawn: one, or a batch of any type. `None` if they are no indices, like pairs of an index
    and a size; then nothing is announced."""
    try:
        if hasattr(drawn, "__index__") and getattr(drawn, "ndim", 0) == 0:
            return [operator.index(drawn)]
        return [operator.index(item) for item in drawn] if hasattr(drawn, "__len__") else None
    except TypeError:
        return None


class _OfSamples:
    """Finds the files of items of `Samples`."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def locate(self, items: Sequence[int]) -> list[tuple[Dataset, Ids]]:
        return [(self._samples.dataset, self._samples.files(np.array(items, np.uint32)))]


class _AnnouncingSampler:
    """Yields what another sampler or batch sampler yields, and announces it. Everything else is as in the other one."""

    def __init__(self, inner: Any, loader: DataLoader[Any], finder: _OfSamples | Locator) -> None:
        self._inner = inner
        self._finder = finder
        # A loader that keeps its workers draws a seed only before the first epoch.
        self._seeding = None if loader.persistent_workers else loader.generator
        self._items = inner if loader.batch_sampler is None else unbatched(inner)
        self._batches_ahead = min(1 + loader.num_workers * (loader.prefetch_factor or 0), BATCHES_AHEAD_MAX)
        self._last_epoch: int | None = None
        self._orders: deque[list[Order]] = deque()

    def __iter__(self) -> _Announcements:
        return _Announcements(self, iter(self._inner))

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __getstate__(self) -> dict[str, Any]:
        # Orders belong to the process that announced them.
        return {**self.__dict__, "_orders": deque()}

    def _foresee(self) -> list[int] | None:
        """Returns what comes in the epoch that begins now, and in the next one if that is certain. `None` if nothing is."""
        if self._items is None or not is_known(self._items):
            return None
        epoch = getattr(self._items, "epoch", 0)
        # A program that has read two epochs without `set_epoch` will read the third one without it, too.
        epochs = 1 if self._last_epoch is None else epoch - self._last_epoch
        self._last_epoch = epoch
        this, following = foresee(self._items, self._seeding, epochs)
        if getattr(self._inner, "drop_last", False) and self._inner is not self._items:
            del this[len(this) // self._inner.batch_size * self._inner.batch_size :]
        return this + (following or [])

    def _announce(self, items: list[int], most: int) -> None:
        """Announces items. Withdraws earlier announcements, except for the last ones, so that there are at most `most`."""
        found = self._finder.locate(items)
        self._orders.append([order for dataset, ids in found if (order := announced(dataset, ids)) is not None])
        while len(self._orders) > most:
            self._orders.popleft()


class _Announcements(Iterator[Any]):
    """One iteration of an `_AnnouncingSampler`. Passes on the state of the other iterator, for torchdata's StatefulDataLoader."""

    def __init__(self, sampler: _AnnouncingSampler, inner: Iterator[Any]) -> None:
        self._sampler = sampler
        self._inner = inner
        self._is_begun = False
        self._foreseen: list[int] | None = None
        self._announced = 0
        self._drawn = 0

    def __next__(self) -> Any:
        sampler = self._sampler
        if not self._is_begun:
            # The other sampler draws its random numbers now, so now is the time to foresee them.
            self._is_begun = True
            self._foreseen = sampler._foresee()
            # Withdrawn only after the new announcement, so that the server keeps what it has fetched for this epoch.
            earlier, sampler._orders = sampler._orders, deque()
            self._announce_more()
            del earlier
        drawn = next(self._inner)
        items = _items_in(drawn)
        if items is not None:
            if self._foreseen is None:
                sampler._announce(items, sampler._batches_ahead)
            self._drawn += len(items)
        self._announce_more()
        return drawn

    def _announce_more(self) -> None:
        """Announces the next part of what is foreseen, if nearly everything that was announced has been drawn."""
        if self._foreseen is None or self._announced - self._drawn > LOOKAHEAD:
            return
        part = self._foreseen[self._announced : self._announced + PART]
        if part:
            self._sampler._announce(part, 2)
            self._announced += len(part)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)
