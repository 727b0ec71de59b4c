"""`Sampler`: deals samples to ranks, tells the order to the server, and continues interrupted epochs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import torch.utils.data

from ..sharing import Deal, Ids, Shuffle, Tail, whole
from .announcing import Announcer
from .dealing import VERSION, Dealing
from .ranks import gathered, rank_and_world
from ..samples import Samples
from .wrapping import Wrapping

LOOKAHEAD = 1000
"""The order of the next epoch is announced when this many samples of the current one are left."""
CHUNK = 1024
"""Items become Python integers this many at a time."""


class Sampler(torch.utils.data.Sampler[int]):
    """Yields the items that this rank reads in an epoch, and announces them to the node's server.

    `shuffle` is "global" (every rank reads any sample), "local" (each rank reads what its node stores,
    in the order in which it is stored), or "partial": most samples come from the rank's own node, and
    the part `q` of each batch of `batch_size` samples from others. `dayfly.torch.loader` tells the sampler
    its `batch_size`. With `migrate=True`, samples that
    change ranks do so for good instead of for one epoch.

    `tail` says what happens if the ranks cannot have equally many samples: with "wrap", fewer samples
    than there are ranks are repeated; with "drop", so many are left out; with "exact", each sample is
    read once and some ranks read one sample fewer.

    `rank` and `num_replicas` come from `torch.distributed`, or else from the variables `RANK` and
    `WORLD_SIZE`. `nodes` names the node of each rank; by default the ranks exchange that.

    With `sampler=`, the items come from that sampler instead, and this one only announces and counts
    them.

    Each iteration is one epoch, and the next iteration is the next epoch unless `set_epoch` says
    otherwise.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        shuffle: Shuffle = "global",
        seed: int = 0,
        tail: Tail = "wrap",
        q: float = 0.0,
        batch_size: int | None = None,
        migrate: bool = False,
        num_replicas: int | None = None,
        rank: int | None = None,
        nodes: Sequence[int] | None = None,
        sampler: torch.utils.data.Sampler[int] | None = None,
    ) -> None:
        if not isinstance(samples, Samples):
            raise TypeError(
                f"samples must be dayfly.Samples, not {type(samples).__name__}; "
                "for any other dataset, use dayfly.torch.prefetch(loader)"
            )
        rank, world = rank_and_world(rank, num_replicas)
        self.rank, self.num_replicas = rank, world
        self.samples = samples
        self.is_counted = False
        """Whether a `Loader` counts what was delivered. Otherwise, a sample counts when it is drawn."""
        self._is_begun = False
        self._start = 0
        self._needs_batch_size = False
        self._announcer = Announcer(samples.dataset)
        self._order: Dealing | Wrapping
        if sampler is not None:
            if not isinstance(sampler, Iterable) or not isinstance(sampler, Sized):
                raise TypeError(f"sampler must have a length and yield numbers of items, which {type(sampler).__name__} does not")
            if (shuffle, q, migrate, nodes) != ("global", 0.0, False, None):
                raise ValueError("shuffle, q, migrate and nodes have no effect together with sampler=; leave them out")
            self._order = Wrapping(samples, sampler, rank, world)
            return
        batch = batch_size if shuffle == "partial" and batch_size is not None else 1
        deal = Deal(world, shuffle, tail, q, batch, migrate, seed=seed)
        if shuffle != "partial" and (q or migrate):
            raise ValueError(f"q and migrate have an effect only with shuffle='partial', not with {shuffle!r}")
        self._needs_batch_size = shuffle == "partial" and q > 0 and batch_size is None and not migrate
        self._order = Dealing(samples, deal, rank, nodes)

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or that the next iteration reads."""
        return self._order.epoch

    def use_batch_size(self, batch_size: int) -> None:
        """Tells the sampler the batch size of its loader, if it needs that and does not know it. `dayfly.torch.loader` calls this."""
        if self._needs_batch_size and isinstance(self._order, Dealing):
            self._order.use_batch_size(batch_size)
            self._needs_batch_size = False

    def _check_batch_size(self) -> None:
        if self._needs_batch_size:
            raise ValueError(
                "shuffle='partial' needs batch_size=, the batch_size of the DataLoader; dayfly.torch.loader(...) tells it the sampler"
            )

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration read this epoch, from where `load_state_dict` left off or from its beginning."""
        epoch = whole("epoch", epoch)
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, but is {epoch}")
        if self._is_begun or epoch != self.epoch:
            self._restart(epoch)

    def __len__(self) -> int:
        """Returns how many items the iteration that is running, or else the next one, yields."""
        return max(self._order.size() - self._start, 0)

    def __iter__(self) -> Iterator[int]:
        self._check_batch_size()
        if self._is_begun:
            self._restart(self.epoch + 1)
        self._is_begun = True
        epoch, share = self.epoch, self._order.share()
        self._start = min(self._order.delivered, len(share))
        self._announcer.announce(epoch, self._files(share[self._start :]))
        announce_next_at = max(len(share) - LOOKAHEAD, self._start)
        for chunk in range(self._start, len(share), CHUNK):
            for at, item in enumerate(share[chunk : chunk + CHUNK].tolist(), chunk):
                if at == announce_next_at:
                    self._announce_next()
                if not self.is_counted:
                    self._order.delivered = at + 1
                yield item
        if not self.is_counted and epoch == self.epoch:
            self.finish()

    def deliver(self, count: int) -> None:
        """Counts samples that the training loop has received."""
        self._order.delivered = min(self._order.delivered + count, self._order.size())

    def finish(self) -> None:
        """Notes that the epoch has been read to its end."""
        self._order.finish()
        self._is_begun = False
        self._start = 0

    def state_dict(self) -> dict[str, Any]:
        """Returns a state with which another run, with any number of ranks, can go on. It has at most a few bits for each sample.

        The state counts what the training loop received if the loader is `dayfly.torch.loader(...)` or
        torchdata's `StatefulDataLoader`. A plain `DataLoader` draws items ahead, and they count as soon
        as they are drawn.

        The state of one rank is enough if all ranks have read equally many samples, as in training that
        averages gradients. Otherwise, use `gather_state`, or give `load_state_dict` the states of all ranks.
        """
        self._check_batch_size()
        return {"version": VERSION, "fingerprint": self.samples.fingerprint, **self._order.state()}

    def gather_state(self) -> dict[str, Any]:
        """Returns the state of all ranks, however many samples each has read. All ranks must call this at once.

        # Errors

        `ValueError` if there is no process group of `torch.distributed` to ask, or if ranks read different epochs.
        """
        if self.num_replicas == 1:
            return self.state_dict()
        states = gathered(self.rank, self.num_replicas, self.state_dict())
        return {**states[self.rank], **self._order.merged(states)}

    def load_state_dict(self, state_dict: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Continues after what was delivered when `state_dict` or `gather_state` was called. Takes one state, or a list with those of
        all ranks. All ranks must load the same.

        # Errors

        `ValueError` if the state is of another dataset, or of another version of Dayfly.
        """
        states = [state_dict] if isinstance(state_dict, dict) else state_dict
        if not isinstance(states, (list, tuple)) or not states or not all(isinstance(state, dict) for state in states):
            raise TypeError(f"state_dict must be a dictionary, or a list with those of all ranks, not {state_dict!r:.100}")
        for state in states:
            if state.get("version") != VERSION:
                raise ValueError(
                    f"state_dict has version {state.get('version')!r}, but this version of Dayfly reads version {VERSION}"
                )
            if state.get("fingerprint") != self.samples.fingerprint:
                raise ValueError(
                    f"state_dict is of other samples than those of '{self.samples.root}': names, contents, groups or what filter has left "
                    "differ, or one of both was read without a session"
                )
        self._check_batch_size()
        self._order.load(states)
        self._is_begun = False
        self._start = self._order.delivered

    def _restart(self, epoch: int) -> None:
        self._order.restart(epoch)
        self._is_begun = False
        self._start = 0

    def _announce_next(self) -> None:
        following = self._order.next_share()
        if following is not None:
            self._announcer.announce(self.epoch + 1, self._files(following), is_next=True)

    def _files(self, items: Ids) -> Ids:
        return self.samples.files(items)
