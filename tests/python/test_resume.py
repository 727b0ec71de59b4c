"""Epochs that are interrupted and go on, with other ranks, other workers and other loaders."""

import itertools
import os
import random
import subprocess
import sys

import dayfly
import numpy as np
import pytest
import torch
from dayfly.torch import Sampler, Samples, loader
from helpers import first, ranks
from torchdata.stateful_dataloader import StatefulDataLoader

RANK_PROGRAM = """
import itertools, os, sys, torch
from dayfly.torch import Sampler, Samples
meeting, rank, world, shuffle, steps, state = sys.argv[1:]
torch.distributed.init_process_group("gloo", init_method=meeting, rank=int(rank), world_size=int(world))
more = {"q": 0.5, "batch_size": 8} if shuffle == "partial" else {}
sampler = Sampler(Samples("/dayfly/train"), shuffle=shuffle, tail="exact", **more)
if os.path.exists(state):
    sampler.load_state_dict(torch.load(state))
torch.distributed.barrier()
print(*itertools.islice(sampler, int(steps)))
if int(rank) == 0:
    torch.save(sampler.state_dict(), state)
torch.distributed.destroy_process_group()
"""


def run_ranks(meeting, nodes, shuffle, steps, state):
    """Runs a process for each rank, on these nodes, and returns what each has read."""
    world = len(nodes)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM, f"file://{meeting}", str(rank), str(world), shuffle, str(steps), state],
            stdout=subprocess.PIPE,
            env={**os.environ, "DAYFLY_NODE": str(node)},
        )
        for rank, node in enumerate(nodes)
    ]
    return [[int(item) for item in process.communicate()[0].split()] for process in processes]


@pytest.mark.parametrize("shuffle", ["local", "partial"])
def test_ranks_on_different_nodes_agree_and_go_on_with_others(session, tmp_path, shuffle):
    nodes, state = [1, 2, 0], tmp_path / "state.pt"
    begin = run_ranks(tmp_path / "first", nodes, shuffle, 70, state)
    samples = Samples("/dayfly/train")
    owners = np.asarray(samples.dataset.owners())
    for node, share in zip(nodes, begin):
        assert (owners[share] == node).mean() > (0.8 if shuffle == "local" else 0.5)
        if shuffle == "local":
            stored = dayfly.attach(session.id, node).dataset("/dayfly/train").local_ids().tolist()
            own = [item for item in share if item in set(stored)]
            assert own == sorted(own, key=stored.index), "a rank reads what its node stores in stored order"
    rest = run_ranks(tmp_path / "second", [2, 0], shuffle, len(samples), state)
    assert sorted(itertools.chain(*begin, *rest)) == list(range(len(samples)))


@pytest.mark.parametrize("seed", range(12))
def test_an_interrupted_epoch_goes_on_with_other_ranks_and_reads_each_sample_once(session, seed, tmp_path):
    samples = Samples("/dayfly/train")
    rng = random.Random(seed)
    read, state = [], None
    for leg in range(3):
        world = rng.randint(1, 4)
        shuffle = rng.choice(["global", "local", "partial"])
        more = {"q": rng.choice([0.1, 1.0]), "batch_size": 8} if shuffle == "partial" else {}
        more["migrate"] = shuffle == "partial" and rng.random() < 0.3
        samplers = ranks(samples, world, shuffle=shuffle, tail="exact", seed=seed, **more)
        if state is not None:
            for sampler in samplers:
                sampler.load_state_dict(torch.load(tmp_path / "state.pt"))
                sampler.set_epoch(sampler.epoch)
        steps = rng.randint(0, len(samplers[-1])) if leg < 2 else len(samples)
        for sampler in samplers:
            read += itertools.islice(sampler, steps)
        state = samplers[0].state_dict()
        torch.save(state, tmp_path / "state.pt")
    assert sorted(read) == list(range(len(samples)))


@pytest.mark.parametrize("shuffle", ["global", "local", "partial"])
@pytest.mark.parametrize("world", range(1, 8))
def test_ranks_that_have_read_unequally_much_go_on_from_the_states_of_all(session, shuffle, world, tmp_path):
    samples = Samples("/dayfly/train")
    rng = random.Random(world)
    more = {"q": 0.3, "batch_size": 8} if shuffle == "partial" else {}
    read, states = [], None
    for leg in range(3):
        samplers = ranks(samples, world, shuffle=shuffle, tail="exact", seed=5, **more)
        for sampler in samplers if states else []:
            sampler.load_state_dict(torch.load(tmp_path / "states.pt"))
        iterators = [iter(sampler) for sampler in samplers]
        for iterator, sampler in zip(iterators, samplers):
            # All but the first rank may end the epoch.
            most = max(len(sampler) - 1, 0) if sampler is samplers[0] else len(sampler) + 1
            read += itertools.islice(iterator, rng.choice([rng.randint(0, most), most]) if leg < 2 else len(samples))
        states = [sampler.state_dict() for sampler in samplers]
        torch.save(rng.sample(states, world), tmp_path / "states.pt")
        # The second leg has the same ranks, and the third one others.
        world = world if leg == 0 else rng.randint(1, 7)
    assert sorted(read) == list(range(len(samples)))


def test_ranks_that_have_read_unequally_much_end_together(session):
    samples = Samples("/dayfly/train")
    states = []
    for sampler, steps in zip(ranks(samples, 3, tail="drop"), (10, 30, 200)):
        assert len(list(itertools.islice(sampler, steps))) == steps
        states.append(sampler.state_dict())
    resumed = ranks(samples, 3, tail="drop")
    for sampler in resumed:
        sampler.load_state_dict(states)
    assert [len(list(sampler)) for sampler in resumed] == [(601 - 240) // 3] * 3
    with pytest.raises(ValueError, match="of each of the 3 ranks once"):
        resumed[0].load_state_dict(states[:2])
    with pytest.raises(ValueError, match="not those of the ranks of one run"):
        resumed[0].load_state_dict([*states[:2], {**states[2], "deal": {**states[2]["deal"], "seed": 5}}])


@pytest.mark.parametrize("shuffle", ["global", "local", "partial"])
def test_a_state_has_a_few_bits_for_each_sample(session, shuffle):
    samples = Samples("/dayfly/train")
    more = {"q": 0.3, "batch_size": 8} if shuffle == "partial" else {}
    sampler = ranks(samples, 2, shuffle=shuffle, **more)[1]
    iterator = iter(sampler)
    for _ in range(100):
        next(iterator)
    bits = [value for value in sampler.state_dict().values() if isinstance(value, torch.Tensor)]
    assert sum(value.numel() for value in bits) == (0 if shuffle == "global" else 2 * 76)


@pytest.mark.parametrize("shuffle", ["global", "partial"])
def test_ranks_gather_their_state(session, tmp_path, shuffle):
    program = """
import itertools, sys, torch
from dayfly.torch import Sampler, Samples
folder, rank, shuffle = sys.argv[1:]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=int(rank), world_size=3)
samples = Samples("/dayfly/train")
more = {"q": 0.5, "batch_size": 8} if shuffle == "partial" else {}
sampler = Sampler(samples, shuffle=shuffle, tail="exact", **more)
read = list(itertools.islice(iter(sampler), 20 + 10 * int(rank)))
state = sampler.gather_state()
sampler = Sampler(samples, shuffle=shuffle, tail="exact", **more)
sampler.load_state_dict(state)
read += itertools.islice(iter(sampler), 5 + int(rank))
torch.save((read, sampler.gather_state()), f"{folder}/{rank}")
torch.distributed.destroy_process_group()
"""
    processes = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(rank), shuffle]) for rank in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    # What the ranks have not read is dealt anew, so that they end together.
    parts, states = zip(*(torch.load(tmp_path / str(rank)) for rank in range(3)))
    read = [item for part in parts for item in part]
    samples = Samples("/dayfly/train")
    for sampler in ranks(samples, 2, shuffle="local", tail="exact"):
        sampler.load_state_dict(states[1])
        read += sampler
    assert sorted(read) == list(range(len(samples)))
    with pytest.raises(ValueError, match="the other 2 ranks cannot be asked"):
        ranks(samples, 3)[0].gather_state()


def test_without_a_change_the_order_goes_on_as_if_it_had_not_been_interrupted(session):
    samples = Samples("/dayfly/train")
    whole = list(Sampler(samples, seed=1, tail="exact"))
    sampler = Sampler(samples, seed=1, tail="exact")
    iterator = iter(sampler)
    begin = [next(iterator) for _ in range(100)]
    resumed = Sampler(samples, tail="exact")
    resumed.load_state_dict(sampler.state_dict())
    assert len(resumed) == len(whole) - 100
    assert begin + list(resumed) == whole
    assert resumed.epoch == 1 and list(resumed) == list(sampler), "the seed is part of the state"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_counts_what_the_training_loop_has_received(session, workers):
    samples = Samples("/dayfly/train", transform=len)
    batches = loader(samples, Sampler(samples, seed=4, tail="exact"), batch_size=16, num_workers=workers, collate_fn=first)
    whole = list(Sampler(samples, seed=4, tail="exact"))
    received = []
    for number, batch in enumerate(batches):
        received += batch
        if number == 9:
            state = batches.state_dict()
            break
    assert state["delivered"] == 160
    resumed = loader(samples, Sampler(samples, tail="exact"), batch_size=16, num_workers=2 - workers, collate_fn=first)
    resumed.load_state_dict(state)
    for batch in resumed:
        received += batch
    assert received == samples.__getitems__(whole)
    assert resumed.state_dict()["deal"]["epoch"] == 1


def test_workers_that_stay_go_on_with_the_next_epoch_after_a_break(session):
    samples = Samples("/dayfly/train", transform=len)
    sampler = Sampler(samples, tail="exact")
    batches = loader(samples, sampler, batch_size=16, num_workers=2, persistent_workers=True, collate_fn=first)
    for _ in range(2):
        for number, _ in enumerate(batches):
            if number == 3:
                break
        assert sampler.state_dict()["delivered"] == 64
    assert sampler.epoch == 1
    assert sorted(size for batch in batches for size in batch) == sorted(samples.sizes)
    assert (sampler.epoch, sampler.state_dict()["delivered"]) == (3, 0)


def test_a_damaged_or_foreign_state_is_refused(session):
    samples = Samples("/dayfly/train")
    sampler = Sampler(samples)
    state, deal = sampler.state_dict(), sampler.state_dict()["deal"]
    bits = torch.zeros(76, dtype=torch.uint8)
    for wrong, error, message in [
        (None, TypeError, "state_dict must be a dictionary, or a list"),
        ([], TypeError, "state_dict must be a dictionary, or a list"),
        ([state, None], TypeError, "state_dict must be a dictionary, or a list"),
        ([state, state], ValueError, "must be of one rank, or of each of the 1 ranks once"),
        ({}, ValueError, "has version None"),
        ({**state, "fingerprint": "other"}, ValueError, "is of other samples than those of"),
        ({**state, "deal": None}, TypeError, "must be of type dict, not NoneType"),
        ({**state, "delivered": -1}, ValueError, "a rank has read -1 samples"),
        ({**state, "delivered": [602]}, ValueError, "a rank has read 602 samples"),
        ({**state, "delivered": [1, 1]}, TypeError, "must be a number, or one for each of 1 ranks"),
        ({**state, "delivered": None}, TypeError, "must be a number, or one for each of 1 ranks"),
        ({**state, "rank": 1}, ValueError, "is of rank 1, but of only 1 ranks"),
        ({**state, "deal": {**deal, "world": 0}}, ValueError, "num_replicas must be"),
        ({**state, "deal": {**deal, "shuffle": "local"}, "delivered": 1}, ValueError, "does not say which samples were read"),
        ({**state, "finished": {"epoch": 0}}, ValueError, "has no entry 'delivered'"),
        ({**state, "earlier": bits[1:]}, ValueError, "has 75 bytes of bits under 'earlier'"),
        ({**state, "read": bits.to(torch.int16)}, TypeError, "has no bits under 'read'"),
        ({key: value for key, value in state.items() if key != "deal"}, ValueError, "has no entry 'deal'"),
    ]:
        with pytest.raises(error, match=message):
            sampler.load_state_dict(wrong)
    wrapping = Sampler(samples, sampler=torch.utils.data.SequentialSampler(samples))
    with pytest.raises(ValueError, match="not that of a dayfly.torch.Sampler with sampler=SequentialSampler"):
        wrapping.load_state_dict(state)
    with pytest.raises(ValueError, match="has no entry 'deal'"):
        sampler.load_state_dict(wrapping.state_dict())
    assert len(list(sampler)) == len(samples), "a refused state changes nothing"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shuffle": True}, "shuffle cannot be combined"),
        ({"batch_sampler": [[0]]}, "batch_sampler cannot be combined"),
        ({"in_order": False}, "in_order must be True"),
    ],
)
def test_arguments_that_a_loader_cannot_count_with_are_refused(session, arguments, message):
    with pytest.raises(ValueError, match=message):
        loader(Samples("/dayfly/train"), **arguments)


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_counts_and_saves_the_state_of_the_sampler(session, workers):
    samples = Samples("/dayfly/train")

    def batches():
        sampler = Sampler(samples, seed=6, tail="exact")
        return StatefulDataLoader(samples, batch_size=16, sampler=sampler, num_workers=workers, collate_fn=first)

    begun = batches()
    received = []
    for number, batch in enumerate(begun):
        received += batch
        if number == 9:
            state = begun.state_dict()
            break
    resumed = batches()
    resumed.load_state_dict(state)
    for batch in resumed:
        received += batch
    assert received == samples.__getitems__(list(Sampler(samples, seed=6, tail="exact")))
