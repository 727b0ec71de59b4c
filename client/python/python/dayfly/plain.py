"""Folders and plain tars that are read directly, so that a script runs where there is no session.

`PlainDataset` has the methods of `Dataset` that `Samples` and `dayfly.torch` use. All its samples
are "on this node".
"""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
import stat
import tarfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import Dataset, Error, Session, attach
from .sharing import PLAIN_ORDER, Ids, permuted


_INCREMENTAL = b"D"
"""The type of a directory in a tar of `tar -g`. Python misreads the names of members of such tars."""


@dataclass(frozen=True)
class _File:
    """Where a sample lies."""

    name: str
    """Its path below the root."""
    size: int
    container: str
    """The file that holds its bytes, from `offset` on."""
    offset: int
    identity: tuple[int, int]
    """The same for all names of one file."""


@dataclass(frozen=True)
class PlainSession:
    """Stands for the session: one node, which is this machine."""

    node: int = 0


class PlainView(np.ndarray[Any, Any]):
    """The bytes of a sample, with the methods of a `View`. It is a copy."""

    is_good = True

    def release(self) -> None:
        """Does nothing. The memory is freed with the object."""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class PlainOrder:
    """Stands for an announced order. Nothing is fetched ahead."""

    def __init__(self, count: int) -> None:
        self._count = count

    def end(self) -> None:
        """Does nothing."""

    def __len__(self) -> int:
        return self._count

    def __enter__(self) -> PlainOrder:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class PlainDataset:
    """The files of a folder, or of a plain tar, as a dataset."""

    session = PlainSession()

    def __init__(self, root: str) -> None:
        self.root = root
        found = _files_of_tar(root) if os.path.isfile(root) else _files_of_folder(root)
        first_names: dict[tuple[int, int], _File] = {}
        for file in sorted(found, key=lambda file: file.name.split("/")):
            first_names.setdefault(file.identity, file)
        self._files = list(first_names.values())
        self._tar = _state(root) if os.path.isfile(root) else None
        """What changes if the tar is written to."""
        self._fingerprint: str | None = None

    @property
    def fingerprint(self) -> str:
        """A text that depends on the names and sizes of all samples."""
        if self._fingerprint is None:
            lines = (f"{file.name}\0{file.size}\0".encode(errors="surrogateescape") for file in self._files)
            self._fingerprint = "plain-" + hashlib.sha256(b"".join(lines)).hexdigest()[:32]
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._files)

    def path_of(self, number: int) -> str:
        """Returns the full path of a sample."""
        return os.path.join(self.root, self._files[number].name)

    def paths(self, ids: Ids) -> list[str]:
        """Returns full paths."""
        return [self.path_of(number) for number in ids]

    def names(self, ids: Ids) -> list[str]:
        """Returns the last components of the samples' paths."""
        return [posixpath.basename(self._files[number].name) for number in ids]

    def sizes(self) -> NDArray[np.uint64]:
        """Returns the size of each sample in bytes."""
        sizes = np.array([file.size for file in self._files], np.uint64)
        sizes.setflags(write=False)
        return sizes

    def owners(self) -> NDArray[np.uint16]:
        """Returns the node of each sample."""
        return np.zeros(len(self), np.uint16)

    def directories(self) -> tuple[Ids, list[str]]:
        """Returns for each sample the index of its directory, and the directories' paths below the root."""
        directories = [posixpath.dirname(file.name) for file in self._files]
        names = sorted(set(directories))
        number = {name: at for at, name in enumerate(names)}
        return np.array([number[name] for name in directories], np.uint32), names

    def epoch_ids(self, seed: int, epoch: int) -> Ids:
        """Returns all samples in the shuffled order of an epoch. In a session, the order is another one."""
        return permuted(np.arange(len(self), dtype=np.uint32), seed, epoch, PLAIN_ORDER)

    def local_ids(self, node: int = 0) -> Ids:
        """Returns the samples of a node."""
        return np.arange(len(self) if node == self.session.node else 0, dtype=np.uint32)

    def read_one(self, number: int) -> bytes:
        """Reads one sample. Fails with ESTALE if it is not what was listed."""
        file = self._files[number]
        with open(file.container, "rb", opener=_open_at_once) as opened:
            if self._tar is not None and _state(opened.fileno()) != self._tar:
                raise OSError(errno.ESTALE, "the tar has changed since it was listed", self.root)
            if self._tar is not None:
                opened.seek(file.offset)
            # One byte more, to see whether a file has grown.
            data = opened.read(file.size + (self._tar is None))
        if len(data) != file.size:
            raise OSError(errno.ESTALE, "the file has another size than when it was listed", self.path_of(number))
        return data

    def read_each(self, ids: Ids) -> list[bytes]:
        """Reads samples."""
        return [self.read_one(number) for number in ids]

    def views(self, ids: Ids) -> list[PlainView]:
        """Reads samples. As opposed to those of a session, these may be changed."""
        return [np.frombuffer(bytearray(data), np.uint8).view(PlainView) for data in self.read_each(ids)]

    def order(self, ids: Sequence[int] | Ids) -> PlainOrder:
        """Announces nothing."""
        return PlainOrder(len(ids))


AnyDataset = Dataset | PlainDataset


def open_dataset(root: str, session: Session | None) -> AnyDataset:
    """Returns the dataset to which a path belongs. Without a session, or outside its namespace, reads a folder or tar directly.

    # Errors

    `Error` if there is no session, and nothing under this path either.
    """
    if session is not None:
        return session.dataset(root)
    try:
        session = attach()
    except Error as error:
        if not os.path.exists(root):
            raise Error(f"'{root}' does not exist here, and there is no session to read it from: {error}") from error
        reason = str(error)
    else:
        prefix = session.prefix.rstrip("/")
        if root == prefix or root.startswith(prefix + "/") or not os.path.exists(root):
            return session.dataset(root)
        reason = f"it is not below {prefix}"
    warnings.warn(f"'{root}' is read directly, and not through Dayfly: {reason}", RuntimeWarning, stacklevel=3)
    return PlainDataset(root)


def _open_at_once(path: str, flags: int) -> int:
    # What has become a FIFO must not make the program wait for a writer.
    return os.open(path, flags | os.O_NONBLOCK)


def _state(file: str | int) -> tuple[int, ...]:
    entry = os.stat(file)
    return entry.st_dev, entry.st_ino, entry.st_size, entry.st_mtime_ns


def _files_of_folder(root: str) -> Iterator[_File]:
    """Finds the regular files. As for `dayfly stage-in`, symbolic links are no samples."""
    # The program may change its working folder, and workers may have another one.
    root = os.path.abspath(root)

    def fail(error: OSError) -> None:
        raise error

    for folder, _, names in os.walk(root, onerror=fail):
        for name in names:
            path = os.path.join(folder, name)
            entry = os.lstat(path)
            if stat.S_ISREG(entry.st_mode):
                yield _File(os.path.relpath(path, root), entry.st_size, path, 0, (entry.st_dev, entry.st_ino))


def _files_of_tar(path: str) -> Iterator[_File]:
    """Finds the regular files of a plain tar, also under the names of hard links. Of several members with one name, the last one counts."""
    path = os.path.abspath(path)
    files: dict[str, _File | None] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                name = _name_in_tar(path, member.name)
                if member.issparse() or member.type == _INCREMENTAL:
                    kind = "sparse members" if member.issparse() else "members of an incremental backup"
                    raise Error(f"'{path}' has {kind}, which are read in a session only: start one with dayfly.session(local=1)")
                files[name] = None
                if member.isreg():
                    files[name] = _File(name, member.size, path, member.offset_data, (0, member.offset_data))
                elif member.islnk() and (target := files.get(_name_in_tar(path, member.linkname))) is not None:
                    files[name] = replace(target, name=name)
            # `tarfile` takes a damaged header for the end.
            with open(path, "rb") as opened:
                opened.seek(archive.offset)
                if opened.read(tarfile.BLOCKSIZE).strip(b"\0"):
                    raise Error(f"'{path}' is damaged at byte {archive.offset}: this is neither a header nor the end")
    except tarfile.ReadError as error:
        raise Error(
            f"'{path}' is neither a folder nor a plain tar ({error}); "
            "compressed tars and zips are read in a session only: start one with dayfly.session(local=1)"
        ) from error
    return (file for file in files.values() if file is not None)


def _name_in_tar(path: str, name: str) -> str:
    inner = posixpath.normpath(name).lstrip("/")
    if inner == ".." or inner.startswith("../"):
        raise Error(f"'{path}' has a member outside of it: {name!r}")
    return inner
