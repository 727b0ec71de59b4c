"""Functions over the namespace of the session that the environment names."""

from __future__ import annotations

import builtins
import fnmatch
import os
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._dayfly import Dataset, DirEntry, IdsLike, Order, Path, Session, Stat

_WILDCARD = re.compile(r"[*?\[]")


_last: Session | None = None
"""The session that was used last. It is kept, because to attach costs as much as many reads."""


def _attached(session: str | None = None, node: int | None = None) -> Session:
    from ._dayfly import attach

    global _last
    _last = attach(session, node)
    return _last


def read(path: Path) -> bytes:
    """Returns the bytes of a file."""
    return _attached().read(path)


def read_many(paths: Iterable[Path]) -> builtins.list[bytes]:
    """Returns the bytes of several files. All that are not on this node come with one request."""
    return _attached().read_many(paths)


def stat(path: Path, *, follow_symlinks: bool = True) -> Stat:
    """Returns what is known about a path, as `os.stat` does."""
    return _attached().stat(path, follow_symlinks=follow_symlinks)


def list(path: Path) -> builtins.list[DirEntry]:
    """Returns the entries of a directory, sorted by name."""
    return _attached().list(path)


def walk(path: Path) -> Iterator[tuple[str, builtins.list[str], builtins.list[str]]]:
    """Yields for each directory from `path` on its path, the names of the directories in it, and all
    other names in it, as `os.walk` does. Does not follow symbolic links.

    The program may remove names from the list of directories; those are not visited.
    """
    session = _attached()
    waiting = [os.fsdecode(path)]
    while waiting:
        here = waiting.pop()
        entries = session.list(here)
        directories = [entry.name for entry in entries if entry.is_dir()]
        yield here, directories, [entry.name for entry in entries if not entry.is_dir()]
        waiting.extend(os.path.join(here, name) for name in reversed(directories))


def glob(pattern: Path) -> builtins.list[str]:
    """Returns the sorted paths that match a pattern.

    `*`, `?` and `[...]` match within a name, and `**` matches any number of directories. A wildcard
    does not match a leading dot.
    """
    text = os.path.normpath(os.fsdecode(pattern))
    if not os.path.isabs(text):
        raise ValueError(f"pattern must be an absolute path such as '/dayfly/train/*.jpg', not {text!r}")
    parts = text.split("/")[1:]
    first = next((at for at, part in enumerate(parts) if _WILDCARD.search(part)), len(parts))
    session = _attached()
    found: set[str] = set()
    _match(session, "/" + "/".join(parts[:first]), parts[first:], found)
    return sorted(found)


def _match(session: Session, path: str, parts: builtins.list[str], found: set[str]) -> None:
    """Adds the paths below `path` that match `parts`."""
    if not parts:
        try:
            session.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        found.add(path)
        return
    part, rest = parts[0], parts[1:]
    if part == "**":
        _match(session, path, rest or ["*"], found)
    elif not _WILDCARD.search(part):
        _match(session, os.path.join(path, part), rest, found)
        return
    try:
        entries = session.list(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name.startswith(".") and not part.startswith("."):
            continue
        if part == "**":
            if entry.is_dir():
                _match(session, entry.path, parts, found)
        elif fnmatch.fnmatchcase(entry.name, part):
            _match(session, entry.path, rest, found)


def prefetch(samples: Iterable[Path] | IdsLike, dataset: Path | Dataset | None = None) -> Order:
    """Tells the node's server which samples will be read next, in this sequence.

    The server fetches them ahead of their readers, which may be any processes on this node. `samples`
    are paths; with `dataset`, they are the numbers of samples in this dataset. The order lasts as long
    as the result: keep it while you read.
    """
    session = _attached()
    if dataset is None:
        paths = [*samples]  # type: ignore[misc]
        wrong = next((path for path in paths if not isinstance(path, (str, bytes, os.PathLike))), None)
        if wrong is not None:
            raise TypeError(
                f"samples must be paths, not {type(wrong).__name__}; to pass numbers of samples, also pass dataset="
            )
        return session.order_paths(paths)
    if isinstance(dataset, (str, bytes, os.PathLike)):
        dataset = session.dataset(dataset)
    return dataset.order(samples)  # type: ignore[arg-type]
