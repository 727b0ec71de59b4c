"""`dayfly://` for fsspec, and so for pandas, PyArrow, Zarr, Xarray and Hugging Face datasets.

A URL holds a path as programs see it: `dayfly:///dayfly/train/a.jpg`. Everything can be read and
nothing can be written.
"""

from __future__ import annotations

import datetime
import errno
import os
import posixpath
import stat
from typing import Any, NoReturn

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from . import Session, Stat
from .namespace import _attached

_BLOCK_SIZE = 4 << 20
"""How much is read ahead in an open file; the length of a chunk, which nodes send in one piece."""


class DayflyFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The namespace of the session that the environment names, or of the session with this id."""

    protocol = "dayfly"
    root_marker = "/"

    def __init__(self, session: str | None = None, node: int | None = None, **options: Any) -> None:
        super().__init__(session=session, node=node, **options)
        self._named = (session, node)

    @property
    def session(self) -> Session:
        """This process's attachment to the session."""
        return _attached(*self._named)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        text = os.fspath(path).removeprefix("dayfly://")
        return posixpath.normpath("/" + text.lstrip("/"))

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Returns size, type and times of a path. Follows symbolic links."""
        name = self._strip_protocol(path)
        if self._below_root(name) is not None:
            return {"name": name, "size": 0, "type": "directory"}
        return _described(name, self.session.stat(name))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """Lists a directory, or describes a file."""
        name = self._strip_protocol(path)
        below = self._below_root(name)
        if below is not None:
            found = [{"name": below, "size": 0, "type": "directory"}]
        else:
            session = self.session
            own = session.stat(name)
            found = [_described(name, own)] if not own.is_dir() else []
            for entry in session.list(name) if own.is_dir() else []:
                try:
                    found.append(_described(entry.path, session.stat(entry.path)))
                except FileNotFoundError:
                    # A symbolic link whose target is missing or outside of the namespace.
                    found.append({"name": entry.path, "size": 0, "type": "link"})
        return found if detail else [one["name"] for one in found]

    def _below_root(self, name: str) -> str | None:
        """Returns the only path in a directory above the namespace, such as `/`. `None` for all other paths."""
        prefix = self.session.prefix.rstrip("/")
        above = name.rstrip("/") + "/"
        if not prefix.startswith(above):
            return None
        return above + prefix[len(above) :].partition("/")[0]

    def modified(self, path: str) -> datetime.datetime:
        """Returns when a file was last modified, as its source says."""
        seconds = self.session.stat(self._strip_protocol(path)).st_mtime
        return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Returns the bytes of a file, or of a part of it. Negative positions count from the end."""
        name = self._strip_protocol(path)
        if start is None and end is None:
            return self.session.read(name)
        size = self.session.stat(name).st_size
        first, last, _step = slice(start, end).indices(size)
        return self.session.read_range(name, first, max(last - first, 0))

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **options: Any) -> Any:
        """Returns the bytes of one file, or a dictionary from paths to bytes. Reads many files with one request."""
        paths = self.expand_path(path, recursive=recursive)
        is_one = isinstance(path, str) and paths == [self._strip_protocol(path)]
        if is_one or on_error != "raise" or options:
            return super().cat(path, recursive=recursive, on_error=on_error, **options)
        files = [name for name in paths if not self.isdir(name)]
        return dict(zip(files, self.session.read_many(files)))

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **options: Any) -> DayflyFile:
        if mode != "rb":
            _refuse(path)
        if self.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        size = _BLOCK_SIZE if block_size in (None, "default") else block_size
        return DayflyFile(self, path, mode, block_size=size, **options)

    # What these would do, a namespace that is read-only refuses.
    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Fails with `EROFS`."""
        _refuse(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Fails with `EROFS`, unless the directory exists and may exist."""
        if not (exist_ok and self.isdir(path)):
            _refuse(path)

    def rmdir(self, path: str) -> None:
        """Fails with `EROFS`."""
        _refuse(path)

    def _rm(self, path: str) -> None:
        _refuse(path)

    def rm_file(self, path: str) -> None:
        """Fails with `EROFS`."""
        _refuse(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Fails with `EROFS`."""
        _refuse(path)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Fails with `EROFS`."""
        _refuse(path2)

    def mv(self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **_: Any) -> None:
        """Fails with `EROFS`."""
        _refuse(path1)

    def touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        """Fails with `EROFS`."""
        _refuse(path)


class DayflyFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file that is open for reading."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        session: Session = self.fs.session
        return session.read_range(self.path, start, end - start)


def _described(name: str, known: Stat) -> dict[str, Any]:
    is_directory = stat.S_ISDIR(known.st_mode)
    return {
        "name": name,
        "size": 0 if is_directory else known.st_size,
        "type": "directory" if is_directory else "file",
        "mode": known.st_mode,
        "mtime": known.st_mtime,
        "ino": known.st_ino,
        "nlink": known.st_nlink,
    }


def _refuse(path: Any) -> NoReturn:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), path if isinstance(path, str) else None)
