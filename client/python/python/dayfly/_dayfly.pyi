"""The native half of the package: attaches to a session, looks up names, and reads samples.

A path is a `str`, `bytes` or `os.PathLike` below the session's prefix (`/dayfly`). Paths that are
returned are `str`, decoded as `os.fsdecode` does. Ids of samples are the numbers 0, 1, ... of a
dataset. Functions that take ids accept any integer array with one dimension (NumPy, PyTorch,
`array.array`, `memoryview`, `Array`) and any iterable of integers.

Every call that may wait releases the GIL, and Ctrl-C interrupts it. A failure about a file is an
`OSError` of the right subclass, with `errno`, `strerror` and `filename`; any other is `Error`.
"""

import builtins
import os
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Literal, TypeAlias, final

from typing_extensions import Buffer

Path: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
IdsLike: TypeAlias = Buffer | Iterable[int]

#: The version of Dayfly, which is the version of the package.
__version__: str

#: The owner of a sample that no live node owns.
NO_OWNER: int

class Error(Exception):
    """A failure that is not about a file: no session, a session that has ended, a closed handle."""

def attach(session: str | None = None, node: int | None = None) -> Session:
    """Attaches this process to a session on this machine.

    Without arguments, uses `DAYFLY_SESSION` and `DAYFLY_NODE` as `dayfly exec` sets them, or the only
    session on this machine and its lowest node here. `session` is an id as `dayfly up` prints it, or the folder of
    a session. A process that attaches to one session and node twice uses the same attachment: the results are
    equal.
    """

@final
class Array:
    """A read-only array of integers with the buffer protocol: `numpy.asarray(a)` and `memoryview(a)` copy nothing."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    #: The type of the numbers as `struct` and `array.array` spell it: "H" (16 bits), "I" (32) or "L" (64).
    @property
    def typecode(self) -> Literal["H", "I", "L"]: ...
    def tolist(self) -> list[int]: ...

@final
class Stat:
    """What is known about a file, directory or symbolic link; the names are those of `os.stat_result`."""

    @property
    def st_mode(self) -> int: ...
    @property
    def st_ino(self) -> int: ...
    @property
    def st_dev(self) -> int: ...
    @property
    def st_nlink(self) -> int: ...
    @property
    def st_uid(self) -> int: ...
    @property
    def st_gid(self) -> int: ...
    @property
    def st_size(self) -> int: ...
    @property
    def st_blocks(self) -> int: ...
    @property
    def st_blksize(self) -> int: ...
    @property
    def st_atime(self) -> float: ...
    @property
    def st_mtime(self) -> float: ...
    @property
    def st_ctime(self) -> float: ...
    @property
    def st_mtime_ns(self) -> int: ...
    def is_file(self) -> bool: ...
    def is_dir(self) -> bool: ...
    def is_symlink(self) -> bool: ...

@final
class DirEntry(os.PathLike[str]):
    """An entry of a directory, without `.` and `..`."""

    def __fspath__(self) -> str: ...

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...
    def is_file(self) -> bool: ...
    def is_dir(self) -> bool: ...
    def is_symlink(self) -> bool: ...

@final
class Session:
    """A process's attachment to a session.

    It works in forked children, and pickles as the session's id: the process that unpickles it attaches by itself. A
    process on another machine attaches to a node of the same session there.
    """

    @property
    def id(self) -> str: ...
    #: This process's node, and how many nodes the session has.
    @property
    def node(self) -> int: ...
    @property
    def nodes(self) -> int: ...
    #: The path below which the namespace appears, for example "/dayfly".
    @property
    def prefix(self) -> str: ...
    #: Whether the session has ended.
    @property
    def is_gone(self) -> bool: ...
    #: How many reads this process has made in the session, and of how many bytes, by where these were: on this node's drives as its
    #: own ("drive") or as "cached", in its "memory", or with the "server", which got them from another node or a source. A forked
    #: child goes on from its parent's numbers.
    @property
    def reads(self) -> dict[str, tuple[int, int]]: ...
    def stat(self, path: Path, *, follow_symlinks: bool = True) -> Stat: ...
    def lstat(self, path: Path) -> Stat: ...
    def readlink(self, path: Path) -> str: ...
    def list(self, path: Path) -> builtins.list[DirEntry]: ...
    def read(self, path: Path) -> bytes:
        """Reads a whole file."""
    def read_range(self, path: Path, start: int, length: int) -> bytes:
        """Reads at most `length` bytes from `start` on. Fewer only at the end of the file."""
    def read_many(self, paths: Iterable[Path]) -> builtins.list[bytes]:
        """Reads whole files with one request for all that are not on this node. Fails with the first that fails."""
    def datasets(self) -> builtins.list[str]:
        """Returns the paths of the datasets: the targets of the stage-ins."""
    def dataset(self, path: Path) -> Dataset:
        """Returns the dataset that `path` belongs to, which may be a path inside it."""
    def order_paths(self, paths: Iterable[Path]) -> Order:
        """Announces the files that this process will read, in this sequence; all in one dataset."""
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Dataset:
    """A dataset, whose samples have the ids 0, 1, ... in the order of a walk of its directories, sorted by name.

    It pickles as its session and path. If another stage-in replaces the dataset, this object goes on to mean
    the earlier one, and reading fails with EIO.
    """

    @property
    def session(self) -> Session: ...
    #: The full path of the dataset, for example "/dayfly/train".
    @property
    def root(self) -> str: ...
    #: The number of the dataset in its session.
    @property
    def id(self) -> int: ...
    #: 32 hexadecimal digits that depend on the names, sizes and contents of all samples and on nothing else.
    @property
    def fingerprint(self) -> str: ...
    #: The number of bytes of all samples.
    @property
    def total_size(self) -> int: ...
    #: Whether the dataset was replaced, or its session has ended.
    @property
    def is_gone(self) -> bool: ...
    def __len__(self) -> int: ...
    def id_of(self, path: Path) -> int:
        """Returns the id of a path, which may be relative to `root`. Hard links share one id."""
    def path_of(self, id: int) -> str:
        """Returns the full path of a sample."""
    def paths(self, ids: IdsLike | None = None) -> list[str]:
        """Returns full paths, of all samples or of these."""
    def sizes(self, ids: IdsLike | None = None) -> Array:
        """Returns the sizes in bytes ("L")."""
    def owners(self) -> Array:
        """Returns the node that owns each sample ("H"), as the catalog has it: also if that node was lost since. Samples without
        bytes are dealt to the nodes. `NO_OWNER` if the catalog is damaged."""
    def is_here(self, ids: IdsLike | None = None) -> bytes:
        """Returns one byte for each sample: 1 if all of it is on this node's drives, else 0."""
    def epoch_ids(self, seed: int, epoch: int) -> Array:
        """Returns all ids in the shuffled order of an epoch ("I"). All processes get the same order."""
    def local_ids(self, node: int | None = None) -> Array:
        """Returns the ids that a node owns ("I"); this process's node if none is given. The ids of this process's node are in the
        order in which they lie on its drives. Each sample belongs to exactly one node."""
    def directories(self) -> tuple[Array, list[str]]:
        """Returns for each sample the index of its directory ("I"), and the directories' paths relative to `root`, sorted ("" is
        `root` itself). Only directories that hold samples are named."""
    def names(self, ids: IdsLike | None = None) -> list[str]:
        """Returns the last components of the samples' paths."""
    def read(self, ids: IdsLike, into: Buffer | None = None) -> tuple[Any, Array]:
        """Reads samples into one buffer, one after another. Returns the buffer and len(ids) + 1 offsets ("L"): sample k is
        `buffer[offsets[k]:offsets[k + 1]]`. The buffer is `into`, which must be writable, contiguous and large enough (else
        `ValueError`; other threads must not use it meanwhile), or a new `bytearray`."""
    def read_each(self, ids: IdsLike) -> list[bytes]:
        """Reads samples, each into a `bytes` of its own."""
    def read_one(self, id: int) -> bytes:
        """Reads one sample."""
    def views(self, ids: IdsLike) -> list[View]:
        """Lends samples in place where that is possible. Waits until all have arrived."""
    def order(self, ids: IdsLike) -> Order:
        """Announces the samples that processes of this node will read, in this sequence. The server fetches ahead."""
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class View:
    """The bytes of one sample, read-only and in place: in a mapped file or in the memory of the node's server.

    The bytes stay in place as long as this object or an object made from it by the buffer protocol or by DLPack lives.
    Note that `torch.frombuffer(memoryview(view))` keeps nothing alive; use `torch.from_dlpack(view)`. PyTorch does not
    know that the bytes are read-only: an operation in place on such a tensor ends the process. The server may take back memory
    that a view has shown if other requests wait for it for seconds; then `is_good` is false.

    A view pickles as session, dataset and id, so that sending one to another process on the same node costs little. The
    other process reads the sample again, in place.
    """

    @property
    def id(self) -> int: ...
    @property
    def dataset(self) -> Dataset: ...
    #: Whether the bytes are valid. A reader that wants to be sure asks after it has used them.
    @property
    def is_good(self) -> bool: ...
    def release(self) -> None:
        """Gives the bytes up now. `BufferError` if a `memoryview` or tensor made from the view still lives."""
    def tobytes(self) -> bytes: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __enter__(self) -> View: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Order:
    """An order that the node's server knows. It ends with `end`, at the end of a `with`, or with the object."""

    def end(self) -> None: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> Order: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...
