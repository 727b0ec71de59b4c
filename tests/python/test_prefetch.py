"""`prefetch(loader)`: what it announces, and that a program behaves as without it."""

import json
import os
import random
import subprocess
import sys
import time

import dayfly
import dayfly.torch
import numpy as np
import pytest
import torch
from dayfly.torch.drawing import foresee
from dayfly.torch.locating import Locator, paths_of
from dayfly.torch.prefetch import prefetch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader


class Folder(Dataset):
    """A dataset like torchvision's ImageFolder, which reads its files through the session."""

    def __init__(self, root="/dayfly/train"):
        self.samples = [(path, 0) for path in dayfly.glob(root + "/**/*.bin")]
        self.imgs = self.samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return index, len(dayfly.read(self.samples[index][0]))


class Reversed(Sampler):
    """A sampler that this package does not know. Draws from the program's random numbers as it goes."""

    def __init__(self, data):
        self.count = len(data)

    def __iter__(self):
        for index in reversed(range(self.count)):
            random.random(), np.random.random(), torch.rand(1)
            yield index

    def __len__(self):
        return self.count


SAMPLERS = {
    "sequential": lambda data: {"shuffle": False},
    "random": lambda data: {"shuffle": True},
    "random with a generator": lambda data: {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "replacement": lambda data: {"sampler": RandomSampler(data, replacement=True, num_samples=100)},
    "replacement with a generator": lambda data: {
        "sampler": RandomSampler(data, replacement=True, num_samples=100, generator=torch.Generator().manual_seed(5))
    },
    "subset": lambda data: {"sampler": SubsetRandomSampler(range(0, len(data), 2))},
    "weighted": lambda data: {"sampler": WeightedRandomSampler([1.0] * len(data), 200)},
    "distributed": lambda data: {"sampler": DistributedSampler(data, 4, 1, seed=3)},
    "batch sampler": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 7, drop_last=True), "batch_size": 1},
    "no batches": lambda data: {"shuffle": True, "batch_size": None},
    "unknown": lambda data: {"sampler": Reversed(data)},
    "batches of an unknown kind": lambda data: {"batch_sampler": [[0, 1], [5, 3, 2]], "batch_size": 1},
}


def run_program(kind, workers, with_prefetch):
    """A program with two epochs that uses random numbers of its own. Returns all that it read and drew."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    data = Folder()
    arguments = {"batch_size": 16, "num_workers": workers} | SAMPLERS[kind](data)
    batches = DataLoader(data, **arguments)
    if with_prefetch:
        assert prefetch(batches) is batches
    seen = [len(batches)]
    for epoch in range(2):
        if hasattr(batches.sampler, "set_epoch"):
            batches.sampler.set_epoch(epoch)
        for numbers, sizes in batches:
            seen.append((torch.as_tensor(numbers).tolist(), torch.as_tensor(sizes).tolist()))
            seen.append((random.random(), np.random.random(), torch.rand(1).item()))
    return seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_program_reads_and_draws_the_same_with_and_without_prefetch(session, kind, workers):
    assert run_program(kind, workers, with_prefetch=True) == run_program(kind, workers, with_prefetch=False)


@pytest.mark.parametrize("kind", [kind for kind in SAMPLERS if "unknown" not in kind])
def test_the_epoch_is_foreseen_before_it_is_drawn(session, kind):
    data = range(300)
    batches = DataLoader(data, **{"batch_size": 16} | SAMPLERS[kind](data))
    sampler = batches.batch_sampler.sampler if batches.batch_sampler is not None else batches.sampler
    foreseen = []
    for epoch in range(2):
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        iterator = iter(batches)
        this, following = foresee(sampler, batches.generator, 1)
        assert following is None or epoch == 0 or foreseen[0][1] == this
        foreseen.append((this, following))
        drawn = torch.cat([torch.as_tensor(batch).reshape(-1) for batch in iterator]).tolist()
        assert drawn == this[: len(drawn)] and len(this) - len(drawn) < 7
    is_certain = kind in ("sequential", "distributed") or "generator" in kind
    assert (foreseen[0][1] is not None) == is_certain


def hits(node=0):
    """How many samples a node's server had fetched by the time that they were read."""
    printed = subprocess.check_output([os.environ.get("DAYFLY_PROGRAM", "dayfly"), "status", "--json"], text=True)
    prefetched = json.loads(printed)["nodes"][node]["prefetch"]
    return prefetched["hits"] + prefetched["late"]


PROGRAM = """
import sys, torch, dayfly, dayfly.torch
sys.path.insert(0, sys.argv[1])
from test_prefetch import Folder
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(
        Folder(sys.argv[3]), batch_size=8, shuffle=True, num_workers=2, multiprocessing_context=sys.argv[2]
    )
    loader = dayfly.torch.prefetch(loader)
    print(sum(len(numbers) for numbers, sizes in loader), flush=True)
    input()
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_server_fetches_ahead_of_workers(session, under, tmp_path, method):
    # A dataset of its own, because samples that were read before are on the node's drive.
    for number in range(200):
        (tmp_path / f"{number}.bin").write_bytes(random.Random(number).randbytes(3000))
    target = f"/dayfly/ahead-{method}"
    session.stage_in(tmp_path, target)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    before = hits()
    command = [sys.executable, program, os.path.dirname(__file__), method, target]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline() == "200\n"
        # The server counts a while later, and no longer when the program has ended.
        deadline = time.monotonic() + 60
        while hits() - before <= 50:
            assert time.monotonic() < deadline, "two of three samples are on other nodes"
            time.sleep(0.1)
        running.stdin.write("\n")
    assert running.returncode == 0


@pytest.mark.parametrize(
    ("paths", "per_item"),
    [
        (None, 1),
        ("list", 1),
        ("function", 1),
        ("several", 2),
    ],
)
def test_paths_can_be_a_list_or_a_function(session, under, paths, per_item):
    data = Folder()
    names = [path for path, _ in data.samples]
    given = {
        None: None,
        "list": names,
        "function": lambda index: names[index].encode(),
        "several": lambda index: [names[index], "/elsewhere/label.txt", names[0]],
    }[paths]
    locator = Locator(len(data), paths_of(data, given))
    for _ in range(2):
        ((dataset, ids),) = locator.locate([5, 2, 9])
        located = dataset.paths(ids)
        assert located[::per_item] == [names[5], names[2], names[9]] and len(located) == 3 * per_item


class Drawn:
    def __init__(self, *drawn):
        self.drawn = drawn

    def __iter__(self):
        return iter(self.drawn)

    def __len__(self):
        return len(self.drawn)


@pytest.mark.parametrize("of", ["Folder", "Samples"])
@pytest.mark.parametrize("batch", [list, tuple, np.array, torch.tensor, lambda items: np.array(items, np.uint8)])
def test_batches_may_be_of_any_type(session, under, of, batch):
    data = Folder() if of == "Folder" else dayfly.torch.Samples("/dayfly/train")
    drawn = Drawn(batch([3, 1]), batch([2]))
    plain = list(DataLoader(data, batch_sampler=drawn, collate_fn=list))
    assert list(prefetch(DataLoader(data, batch_sampler=drawn, collate_fn=list))) == plain
    items = Drawn(np.int64(3), 1, torch.tensor(2))
    assert len(list(prefetch(DataLoader(data, sampler=items, collate_fn=list)))) == 3


def test_what_is_no_index_is_not_announced(session, under):
    class Scaled(Folder):
        def __getitem__(self, item):
            return super().__getitem__(item[0]), item[1]

    drawn = Drawn([(3, 224), (1, 224)], [(2, 160)])
    assert [scale for batch in prefetch(DataLoader(Scaled(), batch_sampler=drawn, collate_fn=list)) for _, scale in batch] == [
        224,
        224,
        160,
    ]


def test_subsets_and_concatenations_are_resolved(session):
    parts = [Folder("/dayfly/train/ant"), dayfly.torch.Samples("/dayfly/pairs")]
    data = Subset(ConcatDataset(parts), [0, len(parts[0]), len(parts[0]) + 1])
    found = Locator(len(data), paths_of(data, None)).locate(range(3))
    assert [dataset.root for dataset, _ in found] == ["/dayfly/train", "/dayfly/pairs"]
    assert found[0][0].paths(found[0][1]) == [parts[0].samples[0][0]]
    assert found[1][1].tolist() == [0, 1]


def test_what_cannot_be_announced_is_refused(session):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    data = Folder()
    with pytest.raises(TypeError, match="loader must be a torch.utils.data.DataLoader, not Folder"):
        prefetch(data)
    with pytest.raises(TypeError, match="loader has an iterable dataset"):
        prefetch(DataLoader(Stream()))
    with pytest.raises(ValueError, match="range has no list of paths.*pass paths="):
        prefetch(DataLoader(range(5)))
    with pytest.raises(ValueError, match="paths must have a path for each of the 5 items, but has 1"):
        prefetch(DataLoader(range(5)), ["/dayfly/train/a"])
    with pytest.raises(TypeError, match="not one path"):
        prefetch(DataLoader(range(5)), "/dayfly/train/a")
    with pytest.raises(TypeError, match="paths must lead to a path or to several paths, not to int"):
        prefetch(DataLoader(range(5)), lambda index: [index])
    for wrong in ("/tmp/", "/dayfly/train/none", "/dayfly/none/"):
        with pytest.raises(ValueError, match=f"none of the dataset's files is in the namespace; the first path is '{wrong}0'"):
            prefetch(DataLoader(data), lambda index, start=wrong: f"{start}{index}")


def test_a_loader_that_announces_already_stays_as_it_is(session):
    samples = dayfly.torch.Samples("/dayfly/train")
    own = dayfly.torch.loader(samples)
    before = own.batch_sampler
    assert prefetch(own).batch_sampler is before
    other = prefetch(DataLoader(samples, sampler=SequentialSampler(samples)))
    before = other.batch_sampler
    assert prefetch(other).batch_sampler is before
    assert other.batch_sampler.drop_last is False and other.batch_sampler.batch_size == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_saves_and_loads_its_state_as_without_prefetch(session, workers):
    def run(with_prefetch):
        torch.manual_seed(1)
        data, seen, state = Folder(), [], None
        for _ in range(2):
            batches = StatefulDataLoader(data, batch_size=16, shuffle=True, num_workers=workers)
            if with_prefetch:
                prefetch(batches)
            if state is not None:
                batches.load_state_dict(state)
            for number, (numbers, _) in enumerate(batches):
                seen.append(numbers.tolist())
                if len(seen) == 10:
                    state = batches.state_dict()
                    break
        return seen

    assert run(with_prefetch=True) == run(with_prefetch=False)
