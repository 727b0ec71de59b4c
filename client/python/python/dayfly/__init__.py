"""Dayfly: an ad hoc distributed file system for deep-learning jobs.

`dayfly.session` starts a session or finds the one of this job; `dayfly.read`, `dayfly.stat` and
`dayfly.list` use the namespace without `dayfly exec`. `dayfly.Samples` has the samples of a dataset by
number, and `dayfly.torch` a sampler and a loader for PyTorch. `dayfly.fsspec` makes URLs like `dayfly:///dayfly/train/a.jpg` work in programs that use
fsspec. docs/PYTHON.md describes them all.

Importing this module loads neither PyTorch nor NumPy, and attaches to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .namespace import glob, list, prefetch, read, read_many, stat, walk
from .sessions import RunningSession, session

if TYPE_CHECKING:
    from .samples import Samples
    from ._dayfly import (
        NO_OWNER,
        Array,
        Dataset,
        DirEntry,
        Error,
        Order,
        Session,
        Stat,
        View,
        __version__,
        attach,
    )

__all__ = [
    "NO_OWNER",
    "Array",
    "Dataset",
    "DirEntry",
    "Error",
    "Order",
    "RunningSession",
    "Samples",
    "Session",
    "Stat",
    "View",
    "__version__",
    "attach",
    "glob",
    "list",
    "prefetch",
    "read",
    "read_many",
    "session",
    "stat",
    "walk",
]


def __getattr__(name: str) -> Any:
    """Loads the modules that need something else, NumPy for example, when one of their names is first used."""
    if name in ("fsspec", "torch"):
        return importlib.import_module(f"dayfly.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'dayfly' has no attribute {name!r}")
    source = "samples" if name == "Samples" else "_dayfly"
    value = getattr(importlib.import_module(f"dayfly.{source}"), name)
    globals()[name] = value
    return value
