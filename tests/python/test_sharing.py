"""Shares of samples: sizes, completeness, the remote part of batches, and interrupted epochs."""

import math
import random
import subprocess
import sys

import numpy as np
import pytest
from dayfly.progress import Reading, packed, rest, union, unpacked
from dayfly.sharing import (
    NO_RANK,
    Deal,
    balanced,
    homes_of,
    permuted,
    share_size,
    shares,
)

SHUFFLES = ["global", "local", "partial"]
ROUNDS = 60


def some_owners(rng, count, nodes):
    """Owners of samples; the nodes have very different numbers of samples, and some samples no owner."""
    weights = [rng.random() ** 3 + 0.01 for _ in range(nodes)] + [0.02]
    return np.array(rng.choices([*range(nodes), NO_RANK], weights, k=count), np.uint16)


def some_case(rng, count=None, world=None, shuffle=None, tail=None):
    """A deal with its samples, homes and places."""
    count = rng.choice([0, 1, 2, 7, 100, 1000]) if count is None else count
    world = rng.choice([1, 2, 3, 5, 8]) if world is None else world
    deal = Deal(
        world=world,
        shuffle=shuffle or rng.choice(SHUFFLES),
        tail=tail or rng.choice(["exact", "drop", "wrap"]),
        q=rng.choice([0, 0.1, 0.3, 0.5, 1.0]),
        batch=rng.choice([1, 2, 10, 32]),
        migrate=rng.random() < 0.3,
        seed=rng.randrange(2**64),
        epoch=rng.randrange(5),
    )
    order = permuted(np.arange(count, dtype=np.uint32), deal.seed, deal.epoch, 99)
    nodes = rng.randint(1, world)
    node_of_rank = [rng.randrange(nodes) for _ in range(world)]
    homes = homes_of(some_owners(rng, count, nodes), node_of_rank, 1)
    places = rng.sample(range(count), count)
    if deal.shuffle == "global":
        return deal, order, None, None
    return deal, order, homes, np.array(places, np.uint32) if deal.shuffle == "local" else None


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_each_sample_is_dealt_once_and_sizes_differ_by_at_most_one(seed):
    rng = random.Random(seed)
    for tail in ["exact", "drop", "wrap"]:
        deal, order, homes, places = some_case(rng, tail=tail)
        dealt = shares(deal, order, homes, places)
        lengths = [len(share) for share in dealt]
        count, world = len(order), deal.world
        expected = [share_size(count, deal, rank) for rank in range(world)]
        assert lengths == (expected if count else [0] * world)
        assert max(lengths) - min(lengths) <= (1 if tail == "exact" else 0)
        seen = np.bincount(np.concatenate(dealt), minlength=count)
        if tail == "exact":
            assert (seen == 1).all()
        elif tail == "drop":
            assert (seen <= 1).all() and count - seen.sum() < world
        else:
            assert (seen >= 1).all() and seen.sum() - count < world


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_shares_do_not_depend_on_the_process_or_on_the_order_of_the_pool(shuffle):
    deal, order, homes, places = some_case(random.Random(5), 500, 4, shuffle)
    first = shares(deal, order, homes, places)
    if shuffle != "global":
        again = shares(deal, order[::-1], homes, places)
        assert all(np.array_equal(one, other) for one, other in zip(first, again))
    code = (
        "import random, sys; sys.path.insert(0, sys.argv[1]); from test_sharing import *;"
        f"case = some_case(random.Random(5), 500, 4, {shuffle!r});"
        "print([share.tolist() for share in shares(*case)])"
    )
    printed = subprocess.check_output([sys.executable, "-c", code, __file__.rsplit("/", 1)[0]], text=True)
    assert printed.strip() == str([share.tolist() for share in first])


def test_balance_moves_only_the_surplus():
    homes = np.array([0] * 70 + [1] * 20 + [2] * 10, np.uint16)
    dealt = balanced(Deal(world=3, shuffle="partial"), np.arange(100, dtype=np.uint32), homes, 0)
    at_home = [int((homes[share] == rank).sum()) for rank, share in enumerate(dealt)]
    assert at_home == [34, 20, 10]
    assert [len(share) for share in dealt] == [34, 33, 33]


def test_samples_of_nodes_without_ranks_are_spread_over_all_ranks():
    owners = np.array([0, 1, 7, NO_RANK] * 1000, np.uint16)
    homes = homes_of(owners, [0, 1, 1, 0], 3)
    assert set(homes[owners == 0]) == {0, 3} and set(homes[owners == 1]) == {1, 2}
    homeless = np.bincount(homes[owners > 1], minlength=4)
    assert homeless.sum() == 2000 and homeless.min() > 400


def test_a_local_share_is_in_stored_order():
    deal, order, homes, places = some_case(random.Random(1), 1000, 4, "local", "exact")
    deal = Deal(world=4, shuffle="local")
    for share in shares(deal, order, homes, places):
        assert (np.diff(places[share].astype(np.int64)) > 0).all()


@pytest.mark.parametrize("q", [0, 0.1, 0.3, 0.5, 1])
def test_the_remote_part_of_partial_batches_is_q_times_one_minus_one_by_the_number_of_ranks(q):
    world, batch, count = 8, 50, 80_000
    homes = (np.arange(count) % world).astype(np.uint16)
    expected = math.floor(q * batch + 1e-9) / batch * (1 - 1 / world)
    orders = []
    for epoch in range(3):
        deal = Deal(world=world, shuffle="partial", q=q, batch=batch, seed=4, epoch=epoch)
        dealt = shares(deal, np.arange(count, dtype=np.uint32), homes, None)
        remote = np.array([(homes[share] != rank).mean() for rank, share in enumerate(dealt)])
        sigma = math.sqrt(expected * (1 - expected) / count)
        assert abs(remote.mean() - expected) <= 3 * sigma
        per_batch = (homes[dealt[0][:batch]] != 0).sum()
        assert per_batch <= math.floor(q * batch + 1e-9)
        orders.append(dealt[0])
    assert (orders[0] != orders[1]).mean() > 0.99, "each epoch has a new order"


def test_migration_moves_samples_for_good():
    world, count = 4, 4000
    homes = (np.arange(count) % world).astype(np.uint16)
    remote = []
    for epoch in range(12):
        deal = Deal(world=world, shuffle="partial", q=0.2, migrate=True, seed=9, epoch=epoch)
        dealt = shares(deal, np.arange(count, dtype=np.uint32), homes, None)
        assert np.array_equal(np.sort(np.concatenate(dealt)), np.arange(count))
        remote.append(np.mean([(homes[share] != rank).mean() for rank, share in enumerate(dealt)]))
    assert remote[0] == 0
    # A sample leaves its rank with the probability 0.2 * 3/4 an epoch, and rarely comes back at first.
    assert remote[1] == pytest.approx(0.15, abs=0.02) and 0.55 < remote[11] < 0.75


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("world", range(1, 8))
def test_an_epoch_goes_on_from_each_of_its_steps_with_any_number_of_ranks(shuffle, world):
    count, rng = 61, random.Random(world)
    deal, order, homes, places = some_case(rng, count, world, shuffle, "exact")
    dealt = shares(deal, order, homes, places)
    reading = Reading(dealt, count)
    for step in range(max(map(len, dealt)) + 1):
        left = rest(order, reading.mask([min(step, len(share)) for share in dealt]))
        for others in range(1, 8):
            other, _, homes, places = some_case(rng, count, others, None, "exact")
            again = shares(other, left, homes, places)
            lengths = [len(share) for share in again]
            assert max(lengths) - min(lengths) <= 1
            assert sorted(np.concatenate([share[:step] for share in dealt] + again)) == list(range(count))


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_an_epoch_that_is_interrupted_many_times_reads_each_sample_once(seed):
    rng = random.Random(1000 + seed)
    count = rng.choice([1, 50, 997])
    order = permuted(np.arange(count, dtype=np.uint32), 3, 0, 99)
    mask, read = None, []
    for _ in range(rng.randint(1, 4)):
        deal, _, homes, places = some_case(rng, count, tail="exact")
        dealt = shares(deal, rest(order, mask), homes, places)
        reading = Reading(dealt, count)
        for _ in range(3):
            # Ranks need not read equally much, and a count may be corrected.
            counts = [rng.randint(0, len(share)) for share in dealt]
            now = reading.mask(counts)
        read += [share[:number] for share, number in zip(dealt, counts)]
        mask = union(mask, unpacked(packed(now), count))
    read.append(rest(order, mask))
    assert np.array_equal(np.sort(np.concatenate(read)), np.arange(count))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"world": 0}, ValueError, "num_replicas must be a number from 1"),
        ({"world": "2"}, TypeError, "num_replicas must be a whole number, not str"),
        ({"world": 2, "shuffle": "all"}, ValueError, "shuffle must be one of 'global', 'local', 'partial', not 'all'"),
        ({"world": 2, "shuffle": True}, ValueError, "shuffle must be one of"),
        ({"world": 2, "tail": None}, ValueError, "tail must be one of 'exact', 'drop', 'wrap'"),
        ({"world": 2, "q": 1.5}, ValueError, "q must be a number from 0 to 1, not 1.5"),
        ({"world": 2, "q": float("nan")}, ValueError, "q must be a number from 0 to 1"),
        ({"world": 2, "q": "half"}, TypeError, "q must be a number from 0 to 1, not str"),
        ({"world": 2, "batch": 0}, ValueError, "batch_size must be a number from 1"),
        ({"world": 2, "seed": -1}, ValueError, "seed must be a number from 0"),
        ({"world": 2, "migrate": 1}, TypeError, "migrate must be True or False, not int"),
        ({"world": 2, "epoch": True}, TypeError, "epoch must be a whole number, not bool"),
    ],
)
def test_bad_rules_are_refused_with_the_name_of_the_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        Deal(**arguments)
