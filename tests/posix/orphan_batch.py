"""Forks while it has views of files (its arguments), and waits to be killed. The child looks at the inherited views again for
each line on standard input. It prints the number of files with the right bytes, the number with wrong bytes, and the result of
dayfly_batch_is_good.
"""

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


def report():
    right = sum(ctypes.string_at(view.bytes, view.len) == bytes for view, bytes in zip(views, before))
    print(right, len(views) - right, dayfly.dayfly_batch_is_good(batch), flush=True)


if os.fork() > 0:
    signal.pause()
report()
for _ in sys.stdin:
    report()
