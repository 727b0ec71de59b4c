"""Finds the files in the namespace that belong to the items of any map-style dataset."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from .. import Dataset, Session, attach
from ..sharing import Ids
from ..samples import Samples

Path = str | bytes | os.PathLike[Any]
PathsOf = Callable[[int], "Path | Iterable[Path]"]

_ATTRIBUTES = ("samples", "imgs", "paths", "image_paths", "filenames", "files")
"""Names under which datasets keep their paths; torchvision uses the first two."""

_OUTSIDE = -1
_UNKNOWN = -2
_SEVERAL = -3


def paths_of(dataset: Any, paths: Sequence[Path] | PathsOf | None) -> PathsOf:
    """Returns a function from the number of an item to the path of its file, or to several paths.

    # Errors

    `ValueError` if `paths` is `None` and the dataset has no list of paths.
    """
    if callable(paths):
        return paths
    if isinstance(paths, (str, bytes)):
        raise TypeError("paths must be a list with a path for each item, or a function, not one path")
    if paths is not None:
        if len(paths) != len(dataset):
            raise ValueError(f"paths must have a path for each of the {len(dataset)} items, but has {len(paths)}")
        return paths.__getitem__
    if isinstance(dataset, Samples):
        return lambda index: dataset.dataset.paths(dataset.files(np.array([index], np.uint32)))
    if isinstance(dataset, Subset):
        inner, indices = paths_of(dataset.dataset, None), dataset.indices
        return lambda index: inner(indices[index])
    if isinstance(dataset, ConcatDataset):
        parts, ends = [paths_of(part, None) for part in dataset.datasets], dataset.cumulative_sizes

        def of_part(index: int) -> Path | Iterable[Path]:
            part = bisect.bisect_right(ends, index)
            return parts[part](index - (ends[part - 1] if part else 0))

        return of_part
    for name in _ATTRIBUTES:
        values = getattr(dataset, name, None)
        if isinstance(values, (Sequence, np.ndarray)) and len(values) == len(dataset) > 0 and _path_in(values[0]) is not None:
            return lambda index: _path_in(values[index])  # type: ignore[return-value]
    raise ValueError(
        f"{type(dataset).__name__} has no list of paths in {', '.join(_ATTRIBUTES)}; "
        "pass paths=, a list of paths or a function from an index to a path or several paths"
    )


def _path_in(value: Any) -> Path | None:
    """Returns the value, or the first part of a tuple, if that is a path."""
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    return value if isinstance(value, (str, bytes, os.PathLike)) else None


class Locator:
    """Translates numbers of items to numbers of files in the datasets of a session. Remembers what it has looked up, 8 bytes
    for each item."""

    def __init__(self, count: int, paths: PathsOf, session: Session | None = None) -> None:
        self._session = session or attach()
        self._paths = paths
        self._known = np.full(count, _UNKNOWN, np.int64)
        self._several: dict[int, list[int]] = {}
        self._datasets: list[Dataset] = []

    def locate(self, items: Iterable[int]) -> list[tuple[Dataset, Ids]]:
        """Returns the files of these items, in this sequence, for each dataset. Leaves out what is no file of the namespace."""
        found: list[int] = []
        for item in items:
            key = int(self._known[item])
            if key == _UNKNOWN:
                key = self._look_up(item)
            if key == _SEVERAL:
                found += self._several[item]
            elif key != _OUTSIDE:
                found.append(key)
        keys = np.array(found, np.int64)
        numbers, ids = keys >> 32, (keys & 0xFFFFFFFF).astype(np.uint32)
        return [(self._datasets[number], ids[numbers == number]) for number in dict.fromkeys(numbers.tolist())]

    def _look_up(self, item: int) -> int:
        paths = self._paths(item)
        if isinstance(paths, (str, bytes, os.PathLike)):
            key = self._key_of(paths)
        else:
            self._several[item] = [key for path in paths if (key := self._key_of(path)) != _OUTSIDE]
            key = _SEVERAL
        self._known[item] = key
        return key

    def _key_of(self, path: Path) -> int:
        """Returns the number of the dataset above the number of the file, or `_OUTSIDE`."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            raise TypeError(f"paths must lead to a path or to several paths, not to {type(path).__name__}")
        name = os.path.abspath(os.fsdecode(path))
        if not name.startswith(self._session.prefix.rstrip("/") + "/"):
            return _OUTSIDE
        try:
            for number, dataset in enumerate(self._datasets):
                if name.startswith(dataset.root + "/"):
                    return number << 32 | dataset.id_of(name)
            dataset = self._session.dataset(name)
            self._datasets.append(dataset)
            return len(self._datasets) - 1 << 32 | dataset.id_of(name)
        except OSError:
            # The program gets this error when it reads the file, if it reads it at all.
            return _OUTSIDE
