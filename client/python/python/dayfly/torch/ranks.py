"""Finds out how many ranks there are, which of them this process is, and on which node each runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed

from .. import Error, attach
from ..plain import AnyDataset, PlainDataset
from ..sharing import RANKS_MAX, Ids, whole


def rank_and_world(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    """Returns the number of this rank and the number of ranks.

    The arguments count, then the process group of `torch.distributed`, then the variables `RANK` and
    `WORLD_SIZE` that `torchrun` sets. Without any of them, this process is alone.
    """
    if (rank is None) != (num_replicas is None):
        raise ValueError("rank and num_replicas must be given together")
    names = ("rank", "num_replicas")
    if rank is None or num_replicas is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        names = ("RANK", "WORLD_SIZE")
        values = [os.environ.get(name) for name in names]
        if values == [None, None]:
            return 0, 1
        try:
            rank, num_replicas = (int(value or "") for value in values)
        except ValueError:
            shown = " and ".join(f"{name}={value!r}" for name, value in zip(names, values))
            raise ValueError(
                f"the environment has {shown}, but both must be whole numbers; pass rank= and num_replicas= instead"
            ) from None
    for name, value in zip(names, (rank, num_replicas)):
        whole(name, value)
    if not 1 <= num_replicas <= RANKS_MAX:
        raise ValueError(f"{names[1]} must be a number from 1 to {RANKS_MAX}, not {num_replicas}")
    if not 0 <= rank < num_replicas:
        raise ValueError(f"{names[0]} must be a number from 0 to {num_replicas - 1}, not {rank}")
    return int(rank), int(num_replicas)


def gathered(rank: int, world: int, own: Any) -> list[Any]:
    """Returns what each rank has passed to this function, in the order of the ranks.

    # Errors

    `ValueError` if there is no process group of these ranks.
    """
    is_there = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not is_there or torch.distributed.get_world_size() != world:
        raise ValueError(
            f"the other {world - 1} ranks cannot be asked: call torch.distributed.init_process_group before, "
            "or pass the states of all ranks to load_state_dict as a list"
        )
    found: list[Any] = [None] * world
    torch.distributed.all_gather_object(found, (rank, own))
    by_rank = dict(found)
    if sorted(by_rank) != list(range(world)):
        raise ValueError(f"the ranks of the process group do not have the numbers 0 to {world - 1}, but {sorted(by_rank)}")
    return [by_rank[number] for number in range(world)]


def nodes_of_ranks(
    dataset: AnyDataset, nodes: Sequence[int] | None, world: int, wants_orders: bool
) -> tuple[list[int], dict[int, Ids]]:
    """Returns the node of each rank, and if wanted, the ids that each of these nodes stores, in the order in which it stores them.

    Asks all ranks through `torch.distributed`, unless `nodes` is given or this process is alone.

    # Errors

    `ValueError` if there is nobody to ask.
    """
    own = dataset.session.node
    order = np.array(dataset.local_ids(), np.uint32) if wants_orders else None
    if nodes is not None:
        if len(nodes) != world:
            raise ValueError(f"nodes must name one node for each of {world} ranks, not {len(nodes)}")
        named = [int(node) for node in nodes]
        orders = {} if order is None else {node: order if node == own else _order_on(dataset, node) for node in named}
        return named, orders
    if world == 1:
        return [own], {} if order is None else {own: order}
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise ValueError(
            "shuffle='local' and 'partial' need to know the node of each rank: call "
            "torch.distributed.init_process_group before, or pass nodes=, for example [0, 0, 1, 1]"
        )
    found: list[Any] = [None] * world
    torch.distributed.all_gather_object(found, (own, order))
    return [node for node, _ in found], dict(found) if wants_orders else {}


def _order_on(dataset: AnyDataset, node: int) -> Ids:
    """Asks another node on this machine for the order in which it stores its samples. Only the node itself knows this order."""
    if isinstance(dataset, PlainDataset):
        return dataset.local_ids(node)
    try:
        there = attach(dataset.session.id, node).dataset(dataset.root)
    except Error as error:
        raise ValueError(
            f"shuffle='local' must ask node {node} for the order in which it stores its samples, which failed ({error}); "
            "leave out nodes=, and call torch.distributed.init_process_group before"
        ) from error
    return np.array(there.local_ids(), np.uint32)
