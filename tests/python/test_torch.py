"""`Samples` and `Sampler` with real PyTorch and a real session."""

import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from dayfly.torch import Sampler, Samples
from helpers import first, ranks
from torch.utils.data import DataLoader, RandomSampler

METHODS = ["fork", "spawn", "forkserver"]


# ---- Samples ----


def test_items_are_the_bytes_of_the_files(session, under):
    files = under("/dayfly/train")
    samples = Samples("/dayfly/train")
    assert len(samples) == len(files) == len(samples.paths)
    assert list(samples.paths) == samples.paths[:] and sorted(samples.paths) == sorted(files)
    assert [samples[index] for index in range(10)] == [files[path] for path in samples.paths[:10]]
    assert samples[-1] == files[samples.paths[-1]]
    mixed = [5, 3, 500, 3]
    assert samples.__getitems__(mixed) == samples._getitems(mixed) == [files[samples.paths[index]] for index in mixed]
    assert samples.sizes.tolist() == [len(files[path]) for path in samples.paths]
    for index in (len(files), -len(files) - 1):
        with pytest.raises(IndexError, match=f"there is no sample {index}"):
            samples[index]
    with pytest.raises(TypeError):
        samples["0"]


def test_classes_are_the_directories_below_the_root(session):
    samples = Samples("/dayfly/train", transform=len, labeled=True, target_transform=lambda target: target * 10)
    assert samples.classes == ["ant", "bee", "cicada", "dayfly"]
    targets = samples.targets
    assert isinstance(targets, np.ndarray) and len(targets) == len(samples)
    for index, path in enumerate(samples.paths):
        expected = -1 if path.endswith("readme.txt") else samples.classes.index(path.split("/")[3])
        assert targets[index] == expected
        if index % 50 == 0:
            assert samples[index] == (samples.sizes[index], expected * 10)


def test_a_directory_of_a_dataset_can_be_read_by_itself(session, under):
    files = under("/dayfly/train/dayfly")
    samples = Samples("/dayfly/train/dayfly/")
    assert sorted(samples.paths) == sorted(files) and samples.classes == ["a", "b"]
    assert [samples[index] for index in range(len(samples))] == [files[path] for path in samples.paths]
    sampler = Sampler(samples, tail="exact")
    assert sorted(sampler) == list(range(len(files)))
    with pytest.raises(FileNotFoundError):
        Samples("/dayfly/train/none")
    with pytest.raises(NotADirectoryError):
        Samples("/dayfly/train/readme.txt")
    with pytest.raises(FileNotFoundError):
        Samples("/dayfly/none")


def test_files_with_one_stem_are_one_item(session, under):
    files = under("/dayfly/pairs")
    samples = Samples("/dayfly/pairs", group="stem")
    assert len(samples) == 51 and samples.sizes.sum() == sum(map(len, files.values()))
    items = {item["__key__"]: item for item in map(samples.__getitem__, range(51))}
    assert set(items) == {f"x/{number:03}" for number in range(50)} | {"x/big"}
    for number in range(50):
        stem = f"/dayfly/pairs/x/{number:03}"
        assert items[f"x/{number:03}"] == {"__key__": f"x/{number:03}", "jpg": files[stem + ".jpg"], "json": files[stem + ".json"]}
    assert sorted(Sampler(samples, tail="exact")) == list(range(51))
    copy = pickle.loads(pickle.dumps(samples))
    assert copy[3] == samples[3]


def test_views_hold_the_same_bytes(session):
    plain, views = Samples("/dayfly/train"), Samples("/dayfly/train", views=True)
    for index in (0, 100, 599):
        assert bytes(views[index]) == plain[index]


def test_samples_are_pickled_by_session_and_path(session):
    samples = Samples("/dayfly/train", transform=len)
    assert samples.targets is not None
    pickled = pickle.dumps(samples)
    assert len(pickled) < 1000
    code = "import pickle, sys; samples = pickle.load(sys.stdin.buffer); print(samples[3], len(samples))"
    printed = subprocess.check_output([sys.executable, "-c", code], input=pickled)
    assert printed.split() == [b"%d" % samples[3], b"%d" % len(samples)]


@pytest.mark.parametrize("method", METHODS)
def test_workers_read_every_sample_once_with_any_start_method(session, under, method):
    files = under("/dayfly/train")
    samples = Samples("/dayfly/train")
    sampler = Sampler(samples, tail="exact", seed=2)
    batches = DataLoader(
        samples, batch_size=32, sampler=sampler, num_workers=2, multiprocessing_context=method, collate_fn=first
    )
    for _epoch in range(2):
        read = [data for batch in batches for data in batch]
        assert sorted(read) == sorted(files.values())


class DieWhenTold:
    """A transform that ends its process once a file exists."""

    def __init__(self, told):
        self.told = told

    def __call__(self, data):
        while not self.told.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("method", METHODS)
def test_killed_workers_do_no_harm(session, method, tmp_path):
    told = tmp_path / "told"
    samples = Samples("/dayfly/train", transform=DieWhenTold(told))
    arguments = {"batch_size": 32, "multiprocessing_context": method, "collate_fn": first}
    # PyTorch's handler of SIGCHLD raises wherever this process is. Within `put` of a queue that would leave a lock taken, and PyTorch
    # would wait for it forever. So the only worker dies while this process just waits.
    batches = iter(DataLoader(samples, sampler=Sampler(samples), num_workers=1, **arguments))
    # Which of the two PyTorch says depends on whether its handler of SIGCHLD or its look at the workers is first.
    with pytest.raises(RuntimeError, match="exited unexpectedly|killed by signal: Killed"):
        told.touch()
        next(batches)
    del batches
    samples = Samples("/dayfly/train")
    assert sum(map(len, DataLoader(samples, sampler=Sampler(samples), num_workers=2, **arguments))) == len(samples)


# ---- Sampler ----


@pytest.mark.parametrize("shuffle", ["global", "local", "partial"])
@pytest.mark.parametrize("tail", ["exact", "drop", "wrap"])
def test_ranks_share_an_epoch(session, shuffle, tail):
    samples = Samples("/dayfly/train")
    more = {"q": 0.3, "batch_size": 10} if shuffle == "partial" else {}
    samplers = ranks(samples, 4, shuffle=shuffle, tail=tail, **more)
    shares = [list(sampler) for sampler in samplers]
    fresh = ranks(samples, 4, shuffle=shuffle, tail=tail, **more)
    assert [len(sampler) for sampler in fresh] == [len(share) for share in shares]
    seen = np.bincount(np.concatenate(shares), minlength=len(samples))
    expected = {"exact": (1, 1), "drop": (0, 1), "wrap": (1, 2)}[tail]
    assert (seen.min(), seen.max()) == expected
    assert all(sampler.epoch == 1 for sampler in samplers)
    second = [list(sampler) for sampler in samplers]
    assert shuffle == "local" or second != shares


def test_a_local_share_is_on_the_node_of_its_rank(session):
    samples = Samples("/dayfly/train")
    owners = np.asarray(samples.dataset.owners())
    for rank, sampler in enumerate(ranks(samples, 3, shuffle="local", tail="exact")):
        share = np.array(list(sampler))
        assert (owners[share] == rank).mean() > 0.8
        if rank == 0:
            stored = [item for item in np.asarray(samples.dataset.local_ids()).tolist() if item in set(share.tolist())]
            assert [item for item in share.tolist() if item in set(stored)] == stored


def test_epochs_follow_each_other_or_set_epoch(session):
    samples = Samples("/dayfly/train")
    sampler = Sampler(samples, seed=5)
    epochs = [list(sampler) for _ in range(3)]
    sampler.set_epoch(1)
    assert list(sampler) == epochs[1] and epochs[0] != epochs[1]
    sampler.set_epoch(2)
    assert list(sampler) == epochs[2]
    iterator = iter(sampler)
    next(iterator)
    sampler.set_epoch(2)
    assert list(sampler) == epochs[2], "set_epoch begins an interrupted epoch again"
    for wrong, error in [(-1, ValueError), ("1", TypeError), (1.0, TypeError)]:
        with pytest.raises(error, match="epoch must"):
            sampler.set_epoch(wrong)


def test_another_sampler_can_be_wrapped(session):
    samples = Samples("/dayfly/train")
    plain = RandomSampler(samples, generator=torch.Generator().manual_seed(3))
    expected = [list(plain), list(plain)]
    wrapped = Sampler(samples, sampler=RandomSampler(samples, generator=torch.Generator().manual_seed(3)))
    assert [list(wrapped), list(wrapped)] == expected and len(wrapped) == len(samples)
    iterator = iter(Sampler(samples, sampler=range(10)))
    assert list(iterator) == list(range(10))
    with pytest.raises(IndexError, match="the sampler drew 601, but there are only 601 samples"):
        list(Sampler(samples, sampler=[601]))
    with pytest.raises(ValueError, match="have no effect together with sampler="):
        Sampler(samples, sampler=range(10), shuffle="local")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"shuffle": "local", "num_replicas": 2, "rank": 0}, ValueError, "init_process_group before, or pass nodes="),
        ({"shuffle": "local", "num_replicas": 2, "rank": 0, "nodes": [0, 7]}, ValueError, "must ask node 7 for the order"),
        ({"shuffle": "local", "num_replicas": 2, "rank": 0, "nodes": [0]}, ValueError, "nodes must name one node for each of 2 ranks"),
        ({"q": 0.3}, ValueError, "q and migrate have an effect only with shuffle='partial'"),
        ({"rank": 2, "num_replicas": 2}, ValueError, "rank must be a number from 0 to 1, not 2"),
        ({"rank": 2}, ValueError, "rank and num_replicas must be given together"),
        ({"shuffle": True}, ValueError, "shuffle must be one of"),
    ],
)
def test_bad_arguments_are_refused(session, arguments, error, message):
    with pytest.raises(error, match=message):
        Sampler(Samples("/dayfly/train"), **arguments)


def test_other_datasets_are_referred_to_prefetch():
    with pytest.raises(TypeError, match="use dayfly.torch.prefetch"):
        Sampler([1, 2, 3])


def test_ranks_come_from_the_environment(session, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    sampler = Sampler(Samples("/dayfly/train"))
    assert (sampler.rank, sampler.num_replicas) == (1, 3)
    monkeypatch.setenv("WORLD_SIZE", "three")
    with pytest.raises(ValueError, match="RANK='1' and WORLD_SIZE='three', but both must be whole numbers"):
        Sampler(Samples("/dayfly/train"))
