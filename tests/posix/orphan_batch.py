"""Forks while it has views of files (its arguments) and is killed; the child keeps looking at what it has inherited, and tells what it
finds: each line names the number of files that are right, that are wrong, and whether the batch says that it is good."""

import ctypes, os, signal, sys

dayfly = ctypes.CDLL(None, use_errno=True)


class View(ctypes.Structure):
    _fields_ = [("index", ctypes.c_size_t), ("bytes", ctypes.c_void_p), ("len", ctypes.c_uint64), ("error", ctypes.c_int)]


for name in ("dayfly_attach", "dayfly_batch_open"):
    getattr(dayfly, name).restype = ctypes.c_void_p
session = ctypes.c_void_p(dayfly.dayfly_attach())
paths = (ctypes.c_char_p * (len(sys.argv) - 1))(*[path.encode() for path in sys.argv[1:]])
batch = ctypes.c_void_p(dayfly.dayfly_batch_open(session, paths, ctypes.c_size_t(len(paths)), 0))
assert batch and dayfly.dayfly_batch_wait(batch) == 0, os.strerror(ctypes.get_errno())
views = [View() for _ in range(len(paths))]
for index, view in enumerate(views):
    assert dayfly.dayfly_batch_get(batch, ctypes.c_size_t(index), ctypes.byref(view)) == 0
before = [ctypes.string_at(view.bytes, view.len) for view in views]


def tell():
    right = sum(ctypes.string_at(view.bytes, view.len) == bytes for view, bytes in zip(views, before))
    print(right, len(views) - right, dayfly.dayfly_batch_is_good(batch), flush=True)


if os.fork() > 0:
    signal.pause()
tell()
for _ in sys.stdin:
    tell()
