"""Measures what the time of a loader goes into, in all of its processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.data

SOURCES = ("drive", "cached", "memory", "server")
"""Where bytes were when they were read, in the order of `Session.reads`."""
_FIELDS = 3 + len(SOURCES)

_log = logging.getLogger("dayfly")


@dataclass(frozen=True)
class EpochStats:
    """What one epoch of a loader took. Times are in seconds; those of workers are the sums over all of them."""

    epoch: int
    samples: int
    """Samples that were read, also if the training loop has not received them."""
    elapsed_s: float
    waited_s: float
    """How long the training loop has waited for batches."""
    read_s: float
    """How long workers have waited for bytes."""
    transform_s: float
    """How long workers have spent in transforms."""
    bytes: dict[str, int] = field(default_factory=dict)
    """Bytes by where they were: on this node's drives as its own ("drive") or "cached", in its "memory", where an earlier read or
    the prefetcher had put them, or with the "server", which had to get them from another node or from their source first."""

    @property
    def limit(self) -> str:
        """What the training loop waited for most: "training" if for next to nothing, "storage", "transform" or "transport"."""
        if self.waited_s <= 0.05 * self.elapsed_s:
            return "training"
        if max(self.read_s, self.transform_s) < 0.5 * self.waited_s:
            return "transport"
        return "storage" if self.read_s > self.transform_s else "transform"

    def __str__(self) -> str:
        total = sum(self.bytes.values()) or 1
        shares = ", ".join(f"{name} {100 * count / total:.0f} %" for name, count in self.bytes.items())
        limits = {
            "training": "storage is not the limit",
            "storage": "storage is the limit",
            "transform": "transforms are the limit: use more workers, or a faster transform",
            "transport": "what workers send is the limit: collate less, or send views",
        }
        return (
            f"epoch {self.epoch}: {self.samples} samples in {self.elapsed_s:.1f} s; the loop waited {self.waited_s:.1f} s, workers "
            f"{self.read_s:.1f} s for bytes and {self.transform_s:.1f} s in transforms; bytes by place: {shares or 'none'}; "
            f"{limits[self.limit]}"
        )


class Meter:
    """Sums of what the processes of one loader have measured. Each process has a row of its own."""

    def __init__(self, workers: int) -> None:
        self._rows = torch.zeros(workers + 1, _FIELDS, dtype=torch.float64).share_memory_()

    def add(self, read_s: float, transform_s: float, samples: int, counts: list[int]) -> None:
        """Adds what this process has measured."""
        worker = torch.utils.data.get_worker_info()
        row = 0 if worker is None else worker.id + 1
        self._rows[row] += torch.tensor([read_s, transform_s, samples, *counts], dtype=torch.float64)

    def sums(self) -> list[float]:
        """Returns the sums over all processes."""
        sums: list[float] = self._rows.sum(0).tolist()
        return sums


class Watch:
    """Measures one epoch of a loader."""

    def __init__(self, meter: Meter, epoch: int) -> None:
        self._meter = meter
        self._epoch = epoch
        self._before = meter.sums()
        self._began = time.perf_counter()
        self._waited_s = 0.0

    def batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the same batches."""
        while True:
            asked = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._waited_s += time.perf_counter() - asked
            yield batch

    def stats(self) -> EpochStats:
        """Returns what the epoch has taken so far."""
        read_s, transform_s, samples, *counts = (
            after - before for after, before in zip(self._meter.sums(), self._before)
        )
        by_place = {name: int(count) for name, count in zip(SOURCES, counts)}
        elapsed_s = time.perf_counter() - self._began
        return EpochStats(self._epoch, int(samples), elapsed_s, self._waited_s, read_s, transform_s, by_place)


def log(stats: EpochStats) -> None:
    """Tells a program that listens to the logger `dayfly` what an epoch took."""
    _log.info("%s", stats)
