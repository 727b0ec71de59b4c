"""Repeats PRISMA's experiment: a training loop over many small files, with an unmodified reader or with Dayfly's integration.

Usage: training.py pytorch|tensorflow FOLDER EPOCHS WORKERS SECONDS_PER_BATCH [integrated]
Prints the seconds that each epoch took. A model is a pause of fixed length for each batch of 128. The lines between BEGIN and END
are all that `integrated` adds.
"""

import os
import random
import sys
import time

BATCH = 128


def files_below(folder):
    return sorted(os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)


def pytorch(folder, workers, is_integrated):
    import torch

    class Files(torch.utils.data.Dataset):
        def __init__(self):
            self.paths = files_below(folder)

        def __len__(self):
            return len(self.paths)

        def __getitem__(self, index):
            with open(self.paths[index], "rb") as file:
                return len(file.read())

    torch.manual_seed(1)
    loader = torch.utils.data.DataLoader(Files(), BATCH, shuffle=True, num_workers=workers)
    if is_integrated:
        # BEGIN
        import dayfly.torch
        loader = dayfly.torch.prefetch(loader)
        # END
    while True:
        yield loader


def tensorflow(folder, workers, is_integrated):
    import tensorflow as tf

    paths = files_below(folder)
    epoch = 0
    while True:
        order = random.Random(epoch).sample(paths, len(paths))
        if is_integrated:
            # BEGIN
            import dayfly
            announced = dayfly.prefetch(order)  # noqa: F841  the order is announced as long as this lives
            # END
        read = tf.data.Dataset.from_tensor_slices(order)
        sizes = read.map(lambda path: tf.strings.length(tf.io.read_file(path)), num_parallel_calls=workers or None)
        yield sizes.batch(BATCH)
        epoch += 1


def main():
    framework, folder = sys.argv[1:3]
    epochs, workers, pause = int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
    loaders = {"pytorch": pytorch, "tensorflow": tensorflow}[framework](folder, workers, sys.argv[6:] == ["integrated"])
    expected = sum(map(os.path.getsize, files_below(folder)))
    times = []
    for _ in range(epochs):
        start, total = time.monotonic(), 0
        for sizes in next(loaders):
            total += int(sizes.numpy().sum())
            time.sleep(pause)
        times.append(time.monotonic() - start)
        assert total == expected, f"{total} bytes were read, not {expected}"
    print(*(f"{seconds:.2f}" for seconds in times))


main()
