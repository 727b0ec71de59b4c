"""Forks while it has a batch and an order. What the child does with its copies must not affect the parent.

Arguments: files. Each is named by a number, which determines the one byte that fills the file. The parent keeps views of the
first half open; parent and child read the second half. Prints "ended" after the parent has closed its batch and its order, and
waits for the end of standard input.
"""

import ctypes, os, sys

dayfly = ctypes.CDLL(None, use_errno=True)


class View(ctypes.Structure):
    _fields_ = [("index", ctypes.c_size_t), ("bytes", ctypes.c_void_p), ("len", ctypes.c_uint64), ("error", ctypes.c_int)]


for name in ("dayfly_attach", "dayfly_batch_open", "dayfly_order_files"):
    getattr(dayfly, name).restype = ctypes.c_void_p
session = ctypes.c_void_p(dayfly.dayfly_attach())
held, others = sys.argv[1 : len(sys.argv) // 2], sys.argv[len(sys.argv) // 2 :]


def open_batch(names):
    paths = (ctypes.c_char_p * len(names))(*[name.encode() for name in names])
    return ctypes.c_void_p(dayfly.dayfly_batch_open(session, paths, ctypes.c_size_t(len(names)), 0)), paths


def check(batch, names):
    view = View()
    for index, name in enumerate(names):
        assert dayfly.dayfly_batch_get(batch, ctypes.c_size_t(index), ctypes.byref(view)) == 0
        content = ctypes.string_at(view.bytes, view.len)
        assert content == bytes([int(os.path.basename(name)) % 251]) * len(content), name
    assert dayfly.dayfly_batch_is_good(batch) == 1


batch, _paths = open_batch(held)
assert batch and dayfly.dayfly_batch_wait(batch) == 0
order_paths = (ctypes.c_char_p * len(others))(*[name.encode() for name in others])
order = ctypes.c_void_p(dayfly.dayfly_order_files(session, order_paths, ctypes.c_size_t(len(others))))
assert order
lives, ends = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    # Close the copies, read independently, and stay until the parent is done.
    dayfly.dayfly_batch_close(batch)
    own, _own_paths = open_batch(others)
    assert dayfly.dayfly_batch_wait(own) == 0
    check(own, others)
    dayfly.dayfly_batch_close(own)
    os.write(lives[1], b"x")
    os.read(ends[0], 1)
    os._exit(0)
os.read(lives[0], 1)
for _ in range(3):
    again, _again_paths = open_batch(others)
    assert dayfly.dayfly_batch_wait(again) == 0
    check(again, others)
    dayfly.dayfly_batch_close(again)
check(batch, held)
dayfly.dayfly_batch_close(batch)
dayfly.dayfly_order_end(order)
print("ended", flush=True)
sys.stdin.read()
os.write(ends[1], b"x")
assert os.waitpid(child, 0)[1] == 0
