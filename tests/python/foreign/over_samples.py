"""A plugin for pytest: tests of other projects read samples of a session in place of their map-style datasets.

Each class below takes the place of the dataset of the same name in the modules that are tested, with the same arguments and items, which
are staged in when a test makes the dataset.
"""

import io
import itertools
import json
import tempfile
from pathlib import Path

import dayfly
import dayfly.torch
import torch

_session = None
_numbers = itertools.count()


def _stage(items):
    """Stages in one file for each item, in this order, and returns the path of the dataset."""
    with tempfile.TemporaryDirectory() as folder:
        for number, item in enumerate(items):
            Path(folder, f"{number:06}").write_bytes(item)
        target = f"/dayfly/{next(_numbers)}"
        _session.stage_in(folder, target)
    return target


def _tensors(data):
    return torch.load(io.BytesIO(data))


def _packed(tensors):
    packed = io.BytesIO()
    torch.save(tuple(tensor.clone() for tensor in tensors), packed)
    return packed.getvalue()


class TensorDataset(dayfly.torch.Samples):
    def __init__(self, *tensors):
        assert all(len(tensor) == len(tensors[0]) for tensor in tensors), "Size mismatch between tensors"
        self.tensors = tensors
        super().__init__(_stage(map(_packed, zip(*tensors))), transform=_tensors)


class CountingDataset(dayfly.torch.Samples):
    def __init__(self, n):
        self.n = n
        super().__init__(_stage(b"%d" % number for number in range(n)), transform=int)


class DummyMapDataset(dayfly.torch.Samples):
    """Its items are random if `shuffle` says so; its state is that of PyTorch's random numbers."""

    def __init__(self, size, shuffle, include_generator=True):
        self.size, self.shuffle, self.include_generator = size, shuffle, include_generator
        rows = [{"id": i, "strcol": f"strcol_{i}", "listcol": [i, i + 1, i + 2]} for i in range(size)]
        super().__init__(_stage(json.dumps(row).encode() for row in rows), transform=json.loads)
        self.data = rows

    def __getitems__(self, indices):
        if self.shuffle:
            indices = [torch.randint(self.size, (1,)).item() for _ in indices]
        return super().__getitems__(indices)

    def state_dict(self):
        return {"g": torch.get_rng_state()} if self.include_generator else {}

    def load_state_dict(self, state_dict):
        if self.include_generator:
            torch.set_rng_state(state_dict["g"])


class RangeDataSource(dayfly.Samples):
    def __init__(self, start, stop, step):
        self.range = (start, stop, step)
        super().__init__(_stage(b"%d" % number for number in range(start, stop, step)), transform=int)

    def __repr__(self):
        return "RangeDataSource(start=%d, stop=%d, step=%d)" % self.range


REPLACED = [TensorDataset, CountingDataset, DummyMapDataset, RangeDataSource]


def pytest_configure(config):
    global _session
    _session = dayfly.session(local=3, data_dir=tempfile.mkdtemp(), capacity="1GiB", memory="64MiB").__enter__()


def pytest_unconfigure(config):
    _session.__exit__(None, None, None)


def pytest_collection_modifyitems(items):
    for module in {item.module for item in items}:
        for dataset in REPLACED:
            if hasattr(module, dataset.__name__):
                print(f"{module.__name__}.{dataset.__name__}: over samples of a session")
                setattr(module, dataset.__name__, dataset)
