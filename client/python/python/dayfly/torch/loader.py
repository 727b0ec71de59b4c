"""`loader`: a DataLoader that counts what the training loop has received."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.utils.data

from .sampler import Sampler
from .statistics import EpochStats, Meter, Watch, log
from ..samples import Samples


class Loader(torch.utils.data.DataLoader[Any]):
    """A DataLoader whose state says which samples the training loop has received. Made by `loader`."""

    sampler: Sampler
    dataset: Samples
    _last: EpochStats | None = None

    _watch: Watch | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        size = self.batch_size or 1
        watch = Watch(self.dataset.meter, self.sampler.epoch)
        self._watch = watch
        for batch in watch.batches(super().__iter__()):
            self.sampler.deliver(size)
            yield batch
        self.sampler.finish()
        self._last = watch.stats()
        log(self._last)
        self._watch = None

    def stats(self) -> EpochStats | None:
        """Returns what the epoch that is being read, or else the last one, has taken; `None` before the first one. The logger `dayfly`
        gets this as a line at the end of each epoch."""
        return self._last if self._watch is None else self._watch.stats()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the sampler, see `Sampler.state_dict`."""
        return self.sampler.state_dict()

    def gather_state(self) -> dict[str, Any]:
        """Returns the state of the samplers of all ranks, see `Sampler.gather_state`."""
        return self.sampler.gather_state()

    def load_state_dict(self, state_dict: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Makes the next iteration go on after what was delivered, see `Sampler.load_state_dict`."""
        self.sampler.load_state_dict(state_dict)


def loader(samples: Samples, sampler: Sampler | None = None, batch_size: int | None = 1, **arguments: Any) -> Loader:
    """Returns a DataLoader over `samples` whose `state_dict` counts what the training loop has received.

    The other arguments are those of `torch.utils.data.DataLoader`. Without a sampler, the loader has
    `Sampler(samples)`.
    """
    if sampler is None:
        sampler = Sampler(samples)
    if not isinstance(sampler, Sampler):
        raise TypeError(
            f"sampler must be a dayfly.torch.Sampler, not {type(sampler).__name__}; wrap it: Sampler(samples, sampler=...)"
        )
    if not sampler.samples.has_items_of(samples):
        raise ValueError(f"sampler is of other samples: {sampler.samples!r}, not {samples!r}")
    for name in ("shuffle", "batch_sampler"):
        if arguments.pop(name, None):
            raise ValueError(f"{name} cannot be combined with a dayfly.torch.Sampler; leave it out")
    if not arguments.get("in_order", True):
        raise ValueError("in_order must be True, because the state counts batches in their order")
    sampler.is_counted = True
    sampler.use_batch_size(batch_size or 1)
    measured = samples.measured_by(Meter(arguments.get("num_workers", 0)))
    return Loader(measured, batch_size=batch_size, sampler=sampler, **arguments)
