"""Measures how fast one node's Python processes get samples.

Usage: items.py views DATASET | items.py pickles DATASET | items.py photos FOLDER [DATASET] | items.py threads DATASET
       items.py begin DATASET | items.py told DATASET process|open|items
Prints numbers: views per second in this process; samples per second from 4 workers, as views and as bytes; seconds of an epoch of
4 workers that decode JPEGs, from a folder or from the dataset with the same files; samples per second by 4 threads, and by 4 forked
workers; milliseconds until the length and the first item of `Samples` are there; samples of other nodes per second in an epoch whose
order was told, in this process, or by two forked workers with `open`, or with `Samples`.
"""

import io
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import dayfly
import numpy as np


BATCH = 128


def views(root):
    dataset = dayfly.attach().dataset(root)
    ids, seen = np.asarray(dataset.epoch_ids(seed=1, epoch=0)), 0
    start = time.monotonic()
    while time.monotonic() - start < 3:
        for first in range(0, len(ids), BATCH):
            for view in dataset.views(ids[first : first + BATCH]):
                bytes_of = memoryview(view)
                seen += bytes_of[0] >= 0 and bytes_of[-1] >= 0
    return seen / (time.monotonic() - start)


def identity(data):
    return data


def pickles(root, as_views):
    import torch

    samples = dayfly.Samples(root, transform=identity, views=as_views)
    loader = torch.utils.data.DataLoader(samples, BATCH, shuffle=True, num_workers=4, collate_fn=list)
    start, seen = time.monotonic(), 0
    for batch in loader:
        seen += sum(memoryview(item)[-1] >= 0 for item in batch)
    assert seen == len(samples)
    return seen / (time.monotonic() - start)


def decoded(data):
    import torch
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return torch.from_numpy(np.array(image)).sum()


class Photos:
    def __init__(self, folder):
        self.paths = sorted(os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file:
            return decoded(file.read())


def photos(folder, root=None):
    import torch

    data = dayfly.Samples(root, transform=decoded) if root else Photos(folder)
    start = time.monotonic()
    torch.manual_seed(1)
    total = sum(int(batch.sum()) for batch in torch.utils.data.DataLoader(data, 64, shuffle=True, num_workers=4))
    return time.monotonic() - start, total


def threads(root):
    """Samples per second by 4 threads of this process, then by 4 forked workers that send only lengths."""
    import torch

    samples = dayfly.Samples(root, transform=len)
    order = np.array_split(np.random.default_rng(1).permutation(len(samples)), len(samples) // BATCH)
    with ThreadPoolExecutor(4) as pool:
        start = time.monotonic()
        seen = sum(map(sum, pool.map(samples.__getitems__, order)))
        by_threads = len(samples) / (time.monotonic() - start)
    loader = torch.utils.data.DataLoader(samples, batch_sampler=order, num_workers=4, multiprocessing_context="fork", collate_fn=sum)
    start = time.monotonic()
    assert sum(loader) == seen
    return by_threads, len(samples) / (time.monotonic() - start)


def begin(root):
    start = time.monotonic()
    samples = dayfly.Samples(root)
    assert len(samples) > 0 and samples[0] is not None
    return (time.monotonic() - start) * 1000


class Paths:
    """What a program that knows nothing of Dayfly has: a list of paths."""

    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file:
            return len(file.read())


def told(root, way):
    samples = dayfly.Samples(root, transform=len)
    owners = np.asarray(samples.dataset.owners())
    remote = samples.filter(owners != samples.dataset.session.node)
    sizes = int(remote.sizes.sum())
    if way == "process":
        order = np.random.default_rng(1).permutation(len(remote)).astype(np.uint32)
        start = time.monotonic()
        with dayfly.prefetch(remote.files(order), dataset=samples.dataset):
            seen = sum(sum(remote.__getitems__(order[at : at + BATCH])) for at in range(0, len(order), BATCH))
    else:
        import dayfly.torch
        import torch

        arguments = {"batch_size": BATCH, "num_workers": 2, "multiprocessing_context": "fork", "collate_fn": sum}
        if way == "open":
            loader = torch.utils.data.DataLoader(Paths(list(remote.paths)), shuffle=True, **arguments)
            loader = dayfly.torch.prefetch(loader)
        else:
            loader = dayfly.torch.loader(remote, **arguments)
        start = time.monotonic()
        seen = sum(loader)
    took = time.monotonic() - start
    assert seen == sizes
    return len(remote) / took


def main():
    what, *arguments = sys.argv[1:]
    if what == "views":
        print(f"{views(*arguments):.0f}")
    elif what == "pickles":
        print(*(f"{pickles(*arguments, as_views):.0f}" for as_views in (True, False)))
    elif what == "threads":
        print(*map("{:.0f}".format, threads(*arguments)))
    elif what == "begin":
        print(f"{begin(*arguments):.1f}")
    elif what == "told":
        print(f"{told(*arguments):.0f}")
    else:
        print(*photos(*arguments))


if __name__ == "__main__":
    main()
