import ctypes, os, sys

# dayfly.h describes the functions that follow. `dayfly exec` and `dayfly run` load their library.
dayfly = ctypes.CDLL(None)
if not hasattr(dayfly, "dayfly_attach"):
    sys.exit("run this as: dayfly exec -- python3 read_samples.py DATASET SEED EPOCH")
dayfly.dayfly_attach.restype = dayfly.dayfly_order_epoch.restype = ctypes.c_void_p
see_sample = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_void_p)


def samples(session, dataset, seed, epoch, rank, ranks):
    """Yields (path, bytes) for each sample of this rank. Each epoch has a new order."""
    paths = []
    collect = see_sample(lambda path, size, context: paths.append(path) or 0)
    number = [ctypes.c_uint64(seed), ctypes.c_uint64(epoch)]
    if dayfly.dayfly_epoch(session, dataset, *number, collect, None) != 0:
        raise OSError(f"no dataset at {dataset.decode()}")
    if not all(path.startswith(os.path.join(os.path.abspath(dataset), b"")) for path in paths):
        raise ValueError(f"{dataset.decode()} is only a part of a dataset; an epoch covers the whole dataset")
    # The server now fetches ahead of this loop.
    order = ctypes.c_void_p(dayfly.dayfly_order_epoch(session, dataset, *number, rank, ranks))
    try:
        for path in paths[rank::ranks]:
            with open(path, "rb") as file:
                yield path.decode(), file.read()
    finally:
        dayfly.dayfly_order_end(order)


session = ctypes.c_void_p(dayfly.dayfly_attach())
if not session:
    sys.exit("cannot attach to a Dayfly session")
dataset, seed, epoch = sys.argv[1].encode(), int(sys.argv[2]), int(sys.argv[3])
for path, data in samples(session, dataset, seed, epoch, rank=0, ranks=1):
    print("sample", path, len(data), sum(data))
