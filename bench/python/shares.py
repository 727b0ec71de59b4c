"""Counts the samples that a rank reads from other nodes under partial local shuffling.

Usage: shares.py DATASET Q BATCH RANKS EPOCHS     (one process for each rank, with DAYFLY_NODE as its number)
Prints, as JSON, how many samples the rank read in each epoch, and how many of these other nodes owned.
"""

import json
import os
import sys

import dayfly.torch
import numpy as np
import torch


def main():
    dataset, q, batch, ranks, epochs = sys.argv[1], *map(float, sys.argv[2:6])
    rank, batch, ranks = int(os.environ["DAYFLY_NODE"]), int(batch), int(ranks)
    samples = dayfly.torch.Samples(dataset, transform=len)
    sampler = dayfly.torch.Sampler(
        samples, shuffle="partial", q=q, batch_size=batch, seed=1, tail="exact", num_replicas=ranks, rank=rank, nodes=range(ranks)
    )
    owners, sizes = np.asarray(samples.dataset.owners()), np.asarray(samples.sizes)
    counts = []
    for _ in range(int(epochs)):
        items = list(sampler)
        loader = torch.utils.data.DataLoader(samples, batch, sampler=items)
        assert torch.cat(list(loader)).tolist() == sizes[items].tolist()
        counts.append({"read": items, "remote": int((owners[items] != rank).sum())})
    print(json.dumps(counts))


main()
