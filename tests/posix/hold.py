"""Opens views of files (its arguments), forks a child that inherits them, and sleeps, as the child does.

Prints "held", the number of bytes, and the child's process id.
"""

import ctypes, os, sys, time

dayfly = ctypes.CDLL(None, use_errno=True)


class View(ctypes.Structure):
    _fields_ = [("index", ctypes.c_size_t), ("bytes", ctypes.c_void_p), ("len", ctypes.c_uint64), ("error", ctypes.c_int)]


for name in ("dayfly_attach", "dayfly_batch_open"):
    getattr(dayfly, name).restype = ctypes.c_void_p
session = ctypes.c_void_p(dayfly.dayfly_attach())
paths = (ctypes.c_char_p * (len(sys.argv) - 1))(*[path.encode() for path in sys.argv[1:]])
batch = ctypes.c_void_p(dayfly.dayfly_batch_open(session, paths, ctypes.c_size_t(len(paths)), 0))
assert batch and dayfly.dayfly_batch_wait(batch) == 0, os.strerror(ctypes.get_errno())
view, total = View(), 0
for index in range(len(paths)):
    assert dayfly.dayfly_batch_get(batch, ctypes.c_size_t(index), ctypes.byref(view)) == 0
    total += len(ctypes.string_at(view.bytes, view.len))
assert dayfly.dayfly_batch_is_good(batch) == 1
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print("held", total, child, flush=True)
time.sleep(60)
