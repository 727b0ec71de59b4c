"""Announces the orders of epochs to the node's server."""

from __future__ import annotations

import warnings

from .. import Error, Order
from ..plain import AnyDataset, PlainOrder
from ..sharing import Ids


def announced(dataset: AnyDataset, ids: Ids) -> Order | PlainOrder | None:
    """Announces samples. Announcing only makes reads faster, so a failure is a warning."""
    try:
        return dataset.order(ids)
    except (Error, OSError) as error:
        warnings.warn(f"samples are not fetched ahead of their readers: {error}", RuntimeWarning, stacklevel=3)
        return None


class Announcer:
    """Keeps the orders of this epoch and the next one announced for one dataset."""

    def __init__(self, dataset: AnyDataset) -> None:
        self._dataset = dataset
        self._orders: dict[int, Order | PlainOrder] = {}

    def announce(self, epoch: int, ids: Ids, is_next: bool = False) -> None:
        """Announces the samples of an epoch. Ends the orders of all other epochs, unless this is the next one."""
        known = self._orders.pop(epoch, None)
        order = known if known is not None and len(known) == len(ids) else announced(self._dataset, ids)
        if order is not None:
            self._orders[epoch] = order
        if not is_next:
            self._orders = {number: order for number, order in self._orders.items() if number == epoch}

    def __getstate__(self) -> dict[str, object]:
        # An order belongs to the process that announced it.
        return {"_dataset": self._dataset, "_orders": {}}
