"""Learns what a sampler will yield, without a change of any random stream of the program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

_KNOWN = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Samplers of PyTorch that draw random numbers only from PyTorch's generator or their own, and that
iteration does not change."""


def is_known(sampler: Any) -> bool:
    """Returns whether `foresee` can tell what the sampler will yield."""
    return any(type(sampler).__iter__ is known.__iter__ for known in _KNOWN)


def unbatched(sampler: Any) -> Any:
    """Returns the sampler from which a batch sampler of PyTorch or torchdata takes its items."""
    is_batching = isinstance(sampler, BatchSampler) and type(sampler).__module__.startswith(("torch.", "torchdata."))
    return sampler.sampler if is_batching else None


def foresee(sampler: Any, seeding: torch.Generator | None, epochs: int) -> tuple[list[int], list[int] | None]:
    """Returns what a known sampler yields if it is drawn now, and in the epoch after that.

    The second list is `None` if it depends on random numbers that the program may use too. `seeding` is
    the generator from which the loader draws a seed before each epoch. `epochs` is by how much the
    number of the epoch grows from one epoch to the next, for samplers with `set_epoch`.
    """
    with _unchanged(sampler):
        this = list(sampler)
        if isinstance(sampler, DistributedSampler):
            sampler.epoch += epochs
        elif not isinstance(sampler, SequentialSampler):
            generator = sampler.generator
            if generator is None:
                return this, None
            if generator is seeding:
                torch.empty((), dtype=torch.int64).random_(generator=generator)
        return this, list(sampler)


@contextlib.contextmanager
def _unchanged(sampler: Any) -> Iterator[None]:
    """Restores the state of the sampler and of its source of random numbers."""
    generator = getattr(sampler, "generator", None) or torch.default_generator
    state, epoch = generator.get_state(), getattr(sampler, "epoch", None)
    try:
        yield
    finally:
        generator.set_state(state)
        if epoch is not None:
            sampler.epoch = epoch
