"""Measures how fast one node's Python processes get samples.

Usage: items.py views DATASET | items.py pickles DATASET | items.py photos FOLDER [DATASET]
Prints one number: views per second in this process; samples per second from 4 workers, as views and as bytes; seconds of an epoch of
4 workers that decode JPEGs, from a folder or from the dataset with the same files.
"""

import io
import os
import sys
import time

import dayfly.torch
import numpy as np
import torch


def views(root):
    dataset = dayfly.attach().dataset(root)
    ids, seen = np.asarray(dataset.epoch_ids(seed=1, epoch=0)), 0
    start = time.monotonic()
    while time.monotonic() - start < 3:
        for first in range(0, len(ids), 128):
            for view in dataset.views(ids[first : first + 128]):
                bytes_of = memoryview(view)
                seen += bytes_of[0] >= 0 and bytes_of[-1] >= 0
    return seen / (time.monotonic() - start)




def identity(data):
    return data


def pickles(root, as_views):
    samples = dayfly.torch.Samples(root, transform=identity, views=as_views)
    loader = torch.utils.data.DataLoader(samples, 128, shuffle=True, num_workers=4, collate_fn=list)
    start, seen = time.monotonic(), 0
    for batch in loader:
        seen += sum(memoryview(item)[-1] >= 0 for item in batch)
    assert seen == len(samples)
    return seen / (time.monotonic() - start)


def decoded(data):
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return torch.from_numpy(np.array(image)).sum()


class Photos(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.paths = sorted(os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file:
            return decoded(file.read())


def photos(folder, root=None):
    data = dayfly.torch.Samples(root, transform=decoded) if root else Photos(folder)
    start = time.monotonic()
    torch.manual_seed(1)
    total = sum(int(batch.sum()) for batch in torch.utils.data.DataLoader(data, 64, shuffle=True, num_workers=4))
    return time.monotonic() - start, total


def main():
    what, *arguments = sys.argv[1:]
    if what == "views":
        print(f"{views(*arguments):.0f}")
    elif what == "pickles":
        print(*(f"{pickles(*arguments, as_views):.0f}" for as_views in (True, False)))
    else:
        print(*photos(*arguments))


if __name__ == "__main__":
    main()
