"""What several test files use."""

from dayfly.torch import Sampler


def first(items):
    """A collate function that workers can pickle."""
    return items


def ranks(samples, world, **arguments):
    """One sampler for each of `world` ranks, in this process."""
    nodes = {} if arguments.get("shuffle", "global") == "global" else {"nodes": [rank % 3 for rank in range(world)]}
    return [Sampler(samples, num_replicas=world, rank=rank, **nodes, **arguments) for rank in range(world)]
