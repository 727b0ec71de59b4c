"""Chooses which files of a dataset make up the items of `Samples`."""

from __future__ import annotations

import errno
import hashlib
import os
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .plain import AnyDataset
from .sharing import Ids

NO_ITEM = 0xFFFFFFFF
"""Stands for "no item" where an item's number is expected."""


class Selection:
    """The files of each item: those of item k are `files[starts[k]:starts[k + 1]]`."""

    def __init__(self, files: Ids, starts: NDArray[np.int64]) -> None:
        self.files = files
        self.starts = starts
        self._item_of: Ids | None = None

    @property
    def count(self) -> int:
        """Number of items."""
        return len(self.starts) - 1

    @property
    def first_files(self) -> Ids:
        """The first file of each item."""
        first: Ids = self.files[self.starts[:-1]]
        return first

    def lengths_of(self, items: Ids) -> NDArray[np.int64]:
        """Returns the number of files of each of these items."""
        return self.starts[items.astype(np.int64) + 1] - self.starts[items]

    def files_of(self, items: Ids) -> Ids:
        """Returns the files of these items, item by item."""
        lengths = self.lengths_of(items)
        ends = np.cumsum(lengths)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
        files: Ids = self.files[np.repeat(self.starts[items], lengths) + within]
        return files

    def item_of_first_file(self, files: int) -> Ids:
        """Returns for each of the `files` files of the dataset the item that begins with it, or `NO_ITEM`."""
        if self._item_of is None:
            self._item_of = np.full(files, NO_ITEM, np.uint32)
            self._item_of[self.first_files] = np.arange(self.count, dtype=np.uint32)
        return self._item_of

    def fingerprint(self) -> str:
        """Returns a text that differs for other files or other items."""
        hash = hashlib.sha256(self.files.astype("<u4").tobytes())
        hash.update(self.starts.astype("<i8").tobytes())
        return hash.hexdigest()[:16]

    def sums(self, values: NDArray[Any]) -> NDArray[Any]:
        """Returns for each item the sum of `values` over its files."""
        if self.count == 0:
            return np.zeros(0, values.dtype)
        return np.add.reduceat(values[self.files], self.starts[:-1])

    def __getstate__(self) -> dict[str, Any]:
        # The other process computes this again if it needs it.
        return {**self.__dict__, "_item_of": None}


def subset(selection: Selection, items: Ids) -> Selection:
    """Returns the selection that has only these items."""
    ends = np.cumsum(selection.lengths_of(items), dtype=np.int64)
    return Selection(selection.files_of(items), np.concatenate([np.zeros(1, np.int64), ends]))


def split_name(name: str) -> tuple[str, str]:
    """Splits a name at its last dot, as `dayfly stage-in --group stem` does. A name whose only dot comes first has no ending."""
    dot = name.rfind(".")
    return (name, "") if dot <= 0 else (name[:dot], name[dot + 1 :])


def select(dataset: AnyDataset, root: str, group: Literal["stem"] | None) -> Selection:
    """Returns the items below the directory `root`.

    # Errors

    An `OSError` if `root` is not a directory, or if no samples are in it.
    """
    directory_of_file, names = dataset.directories()
    directories = np.asarray(directory_of_file)
    within = os.path.relpath(root, dataset.root)
    if within == ".":
        files = np.arange(len(dataset), dtype=np.uint32)
    else:
        is_below = np.array([name == within or name.startswith(within + "/") for name in names], bool)
        files = np.flatnonzero(is_below[directories]).astype(np.uint32)
        if len(files) == 0:
            dataset.session.list(root)  # Says whether it exists and is a directory.
            raise FileNotFoundError(errno.ENOENT, "no samples in this directory", root)
    if group is None:
        return Selection(files, np.arange(len(files) + 1))
    numbers: dict[tuple[int, str], int] = {}
    group_of_file = np.empty(len(files), np.int64)
    for at, (directory, name) in enumerate(zip(directories[files].tolist(), dataset.names(files))):
        group_of_file[at] = numbers.setdefault((directory, split_name(name)[0]), len(numbers))
    by_group = np.argsort(group_of_file, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(group_of_file, minlength=len(numbers)))])
    return Selection(files[by_group], starts.astype(np.int64))
