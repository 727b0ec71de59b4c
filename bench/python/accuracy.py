"""Trains a small network with partial local shuffling, and prints the accuracy for each way to shuffle.

Usage: accuracy.py [EPOCHS [SEEDS]]     needs scikit-learn, for its data set of 1,797 handwritten digits

Eight workers each compute the gradient of a batch of their own share, with batch normalization over that batch alone, as data-
parallel training does. Their gradients are averaged. At the end, the statistics of batch normalization are averaged too. The shares
are those of `dayfly.torch.Sampler`. `hashed` homes are what Dayfly has; with `sorted` homes, each worker owns one or two classes,
the worst case.
"""

import copy
import statistics
import sys

import numpy as np
import torch
from dayfly.sharing import Deal, shares
from sklearn.datasets import load_digits
from torch import nn

WORKERS, BATCH, RATE = 8, 16, 0.1


def data(seed):
    inputs, targets = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(inputs))
    inputs = torch.tensor(inputs[order] / 16, dtype=torch.float32)
    targets = torch.tensor(targets[order])
    return inputs[:1440], targets[:1440], inputs[1440:], targets[1440:]


def network():
    def layer(inputs, outputs):
        return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]

    return nn.Sequential(*layer(64, 96), *layer(96, 96), nn.Linear(96, 10))


def train(shuffle, q, homes_are_sorted, seed, epochs):
    inputs, targets, test_inputs, test_targets = data(seed)
    count = len(inputs)
    homes = np.random.default_rng(seed).permutation(count) % WORKERS
    if homes_are_sorted:
        homes = np.argsort(np.argsort(targets.numpy(), kind="stable")) * WORKERS // count
    torch.manual_seed(seed)
    model = network()
    replicas = [copy.deepcopy(model) for _ in range(WORKERS)]
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    pool = np.arange(count, dtype=np.uint32)
    for epoch in range(epochs):
        deal = Deal(WORKERS, shuffle, "drop", q, BATCH, seed=seed, epoch=epoch)
        mixed = np.random.default_rng([seed, epoch]).permutation(pool)
        dealt = shares(deal, mixed, homes.astype(np.uint16), None)
        for start in range(0, len(dealt[0]) - BATCH + 1, BATCH):
            gradients = []
            for replica, share in zip(replicas, dealt):
                items = torch.from_numpy(share[start : start + BATCH].astype(np.int64))
                with torch.no_grad():
                    for own, shared in zip(replica.parameters(), model.parameters()):
                        own.copy_(shared)
                loss = nn.functional.cross_entropy(replica(inputs[items]), targets[items])
                gradients.append(torch.autograd.grad(loss, list(replica.parameters())))
            for parameter, *of_workers in zip(model.parameters(), *gradients):
                parameter.grad = torch.stack(of_workers).mean(0)
            optimizer.step()
        schedule.step()
    for shared, *of_workers in zip(model.buffers(), *(replica.buffers() for replica in replicas)):
        shared.copy_(torch.stack([buffer.double() for buffer in of_workers]).mean(0).to(shared.dtype))
    model.eval()
    with torch.no_grad():
        return (model(test_inputs).argmax(1) == test_targets).float().mean().item()


def main():
    epochs, seeds = [*map(int, sys.argv[1:]), *(30, 3)[len(sys.argv) - 1 :]]
    torch.set_num_threads(1)
    print(f"accuracy on the test set, percent: median (least to greatest) of {seeds} seeds, {epochs} epochs")
    for name, homes_are_sorted in ("hashed", False), ("sorted", True):
        for shuffle, q in ("global", 0.0), ("local", 0.0), ("partial", 0.1), ("partial", 0.3), ("partial", 0.5), ("partial", 1.0):
            # Local shuffling in a new order for each epoch is partial shuffling without guests.
            rule = "partial" if shuffle == "local" else shuffle
            found = [100 * train(rule, q, homes_are_sorted, seed, epochs) for seed in range(seeds)]
            label = f"q = {q}" if shuffle == "partial" else shuffle
            print(f"  {name:7} {label:8} {statistics.median(found):6.2f} ({min(found):.2f} to {max(found):.2f})", flush=True)


main()
