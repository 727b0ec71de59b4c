"""`Samples`: the samples of a dataset by number, for any framework."""

from __future__ import annotations

import copy
import operator
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from . import Session, View
from .plain import AnyDataset, PlainDataset, open_dataset
from .selection import NO_ITEM, Selection, select, split_name, subset
from .sharing import Ids

Bytes = bytes | View
Item = Bytes | dict[str, Any]


class Samples:
    """The samples of a dataset, or of one of its directories, by number.

    An item is what `transform` returns for the sample's bytes. With `labeled=True`, an item is a
    tuple of that and the sample's target. Without a transform, an item has the bytes themselves.

    With `group="stem"`, an item is made of all files of one directory whose names differ only after
    the last dot. `transform` then gets a dictionary from each ending (`jpg`, `json`) to the bytes of
    that file; `__key__` is the path of the group without an ending.

    With `views=True`, bytes are a `dayfly.View` instead of `bytes`, which avoids a copy. Do not change
    a tensor that was made of a view: its memory is read-only, so the process would crash.

    The object holds no list of paths. It can be pickled, and the process that unpickles it attaches
    to the same session.

    Without a session, `path` may be a folder or a plain tar, which is then read directly.
    """

    def __init__(
        self,
        path: str | bytes | os.PathLike[str] | os.PathLike[bytes],
        transform: Callable[[Any], Any] | None = None,
        *,
        labeled: bool = False,
        target_transform: Callable[[int], Any] | None = None,
        group: Literal["stem"] | None = None,
        views: bool = False,
        session: Session | None = None,
    ) -> None:
        if group not in (None, "stem"):
            raise ValueError(f"group must be None or 'stem', not {group!r}")
        for name, function in [("transform", transform), ("target_transform", target_transform)]:
            if function is not None and not callable(function):
                raise TypeError(f"{name} must be a function or None, not {type(function).__name__}")
        if target_transform is not None and not labeled:
            raise ValueError("target_transform has no effect without labeled=True")
        self.root = os.path.normpath(os.fsdecode(path))
        self.transform = transform
        self.target_transform = target_transform
        self.labeled = labeled
        self.group = group
        self.views = views
        self.dataset: AnyDataset = open_dataset(self.root, session)
        self._selection: Selection | None = None
        self._targets: NDArray[np.int64] | None = None
        self.meter: Any = None
        """What sums up the times of reads and transforms, see `dayfly.torch.Loader.stats`."""
        self._choice = ""
        """A text that tells apart what different calls of `filter` have left."""
        self._count = len(self.dataset) if self._whole else self.selection.count

    @property
    def selection(self) -> Selection:
        """Which files of the dataset make up each item. Computed when it is first needed."""
        if self._selection is None:
            self._selection = select(self.dataset, self.root, self.group)
        return self._selection

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Reads several items with one request for all that are not on this node."""
        numbers = [self._number(index) for index in indices]
        counts_before, began = self._counts(), time.perf_counter()
        items: Sequence[Item]
        if self.group is None:
            items = self._read(self.files(np.array(numbers, np.uint32)))
        else:
            items = list(self._read_groups(numbers))
        counts, read = self._counts(), time.perf_counter()
        results = [item if self.transform is None else self.transform(item) for item in items]
        if self.meter is not None:
            new = [after - before for after, before in zip(counts, counts_before)]
            self.meter.add(read - began, time.perf_counter() - read, len(numbers), new)
        if not self.labeled:
            return results
        targets = map(int, self.targets[numbers])
        if self.target_transform is not None:
            targets = map(self.target_transform, targets)
        return list(zip(results, targets))

    _getitems = __getitems__  # The name under which Grain looks for it.

    def filter(self, chosen: Any) -> Self:
        """Returns samples that consist of some of these items only, in the order in which they are here.

        `chosen` is an array of truth values, one for each item, or the numbers of the items. The classes
        and their numbers stay as they are.
        """
        items = _chosen_items(np.asarray(chosen), self._count)
        other = copy.copy(self)
        if len(items) < self._count:
            other._selection = subset(self.selection, items)
            other._choice = f":{other._selection.fingerprint()}"
            other._count = len(items)
        return other

    def measured_by(self, meter: Any) -> Self:
        """Returns the same samples, whose reads and transforms add their times to `meter`."""
        other = copy.copy(self)
        other._selection = self._selection
        other.meter = meter
        return other

    def _counts(self) -> list[int]:
        """Returns how many bytes this process has read so far, by place, if that is measured."""
        if self.meter is None:
            return []
        if isinstance(self.dataset, PlainDataset):
            return [0] * 4
        return [size for _, size in self.dataset.session.reads.values()]

    def files(self, items: Ids) -> Ids:
        """Returns the numbers in the dataset of all files of these items, item by item."""
        if self._whole:
            return items
        return self.selection.files_of(items)

    def item_order(self, ids: Ids) -> Ids:
        """Returns the items in the order in which their first files occur in `ids`."""
        if self._whole:
            return ids
        items = self.selection.item_of_first_file(len(self.dataset))[ids]
        chosen: Ids = items[items != NO_ITEM]
        return chosen

    def first_files(self) -> Ids:
        """Returns the number in the dataset of each item's first file."""
        if self._whole:
            return np.arange(self._count, dtype=np.uint32)
        return self.selection.first_files

    @property
    def fingerprint(self) -> str:
        """A text that differs for samples with different names or contents."""
        within = os.path.relpath(self.root, self.dataset.root)
        return f"{self.dataset.fingerprint}:{within}:{self.group or ''}{self._choice}"

    def has_items_of(self, other: Samples) -> bool:
        """Returns whether item k of the other samples consists of the same files as item k of these."""
        own, others = ((it.root, it.group, it._choice, it._count, it.dataset.root) for it in (self, other))
        return own == others

    @property
    def paths(self) -> Sequence[str]:
        """The path of each item's first file. Each path is looked up when it is asked for."""
        return _Paths(self)

    @property
    def sizes(self) -> NDArray[np.uint64]:
        """The number of bytes of each item."""
        sizes = np.asarray(self.dataset.sizes())
        if self._whole:
            return sizes
        return self.selection.sums(sizes)

    @property
    def classes(self) -> list[str]:
        """The sorted names of the directories directly below `root` that contain samples."""
        return self._classes_of_directories()[0]

    @property
    def targets(self) -> NDArray[np.int64]:
        """For each item the index in `classes` of its directory; -1 for files directly in `root`."""
        if self._targets is None:
            directory_of_file = np.asarray(self.dataset.directories()[0])
            class_of_directory = self._classes_of_directories()[1]
            self._targets = class_of_directory[directory_of_file[self.first_files()]]
            self._targets.setflags(write=False)
        return self._targets

    def _classes_of_directories(self) -> tuple[list[str], NDArray[np.int64]]:
        directories = self.dataset.directories()[1]
        within = os.path.relpath(self.root, self.dataset.root)
        start = "" if within == "." else within + "/"
        names = [name[len(start) :].partition("/")[0] if name.startswith(start) else "" for name in directories]
        classes = sorted(set(names) - {""})
        number = {name: at for at, name in enumerate(classes)}
        return classes, np.array([number.get(name, -1) for name in names], np.int64)

    @property
    def _whole(self) -> bool:
        """Whether item k is file k of the dataset."""
        return self.group is None and self.root == self.dataset.root and not self._choice

    def _number(self, index: int) -> int:
        number = operator.index(index)
        if not -self._count <= number < self._count:
            raise IndexError(f"there is no sample {number}; '{self.root}' has {self._count} samples")
        return number % self._count

    def _read(self, ids: Ids) -> Sequence[Bytes]:
        return self.dataset.views(ids) if self.views else self.dataset.read_each(ids)

    def _read_groups(self, numbers: list[int]) -> Iterable[dict[str, Any]]:
        items = np.array(numbers, np.uint32)
        ids = self.selection.files_of(items)
        contents = iter(zip(self.dataset.paths(ids), self._read(ids)))
        for length in self.selection.lengths_of(items):
            group: dict[str, Any] = {}
            for path, content in (next(contents) for _ in range(length)):
                folder, name = os.path.split(path)
                stem, ending = split_name(name)
                group["__key__"] = os.path.relpath(os.path.join(folder, stem), self.root)
                group[ending] = content
            yield group

    def __getstate__(self) -> dict[str, Any]:
        # The other process computes the rest again if it needs it. For groups that would take long, and what `filter` has left
        # cannot be computed.
        selection = self._selection if self.group or self._choice else None
        return {**self.__dict__, "_targets": None, "_selection": selection}

    def __repr__(self) -> str:
        return f"Samples({self.root!r}, {self._count} samples)"


def _chosen_items(chosen: NDArray[Any], count: int) -> Ids:
    """Returns the sorted numbers of the items that a caller has chosen."""
    if chosen.dtype == object:
        raise TypeError("expected an array or a list of truth values or of numbers of items")
    if chosen.ndim != 1:
        raise ValueError(f"expected a mask or numbers of items in one dimension, not in {chosen.ndim}")
    if chosen.dtype == bool:
        if len(chosen) != count:
            raise ValueError(f"the mask has {len(chosen)} values, but there are {count} samples")
        return np.flatnonzero(chosen).astype(np.uint32)
    if len(chosen) == 0:
        return np.zeros(0, np.uint32)
    if chosen.dtype.kind not in "iu":
        raise TypeError(f"expected a mask or numbers of items, not an array of {chosen.dtype}")
    items = np.unique(chosen)
    if chosen.dtype.kind == "i":
        # In 64 bits, because the number of samples may not fit into the type of the caller.
        signed = items.astype(np.int64)
        items = np.unique(np.where(signed < 0, signed + count, signed))
    wrong = next((int(item) for item in (items[0], items[-1]) if not 0 <= item < count), None)
    if wrong is not None:
        raise IndexError(f"there is no sample {wrong}; there are {count} samples")
    return items.astype(np.uint32)


class _Paths(Sequence[str]):
    """The paths of all items of `Samples`, as a sequence that takes no memory."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        samples = self._samples
        numbers = range(len(samples))[index]
        if isinstance(numbers, range):
            return samples.dataset.paths(samples.first_files()[np.arange(numbers.start, numbers.stop, numbers.step)])
        first = samples.files(np.array([numbers], np.uint32))[0]
        return samples.dataset.path_of(int(first))
