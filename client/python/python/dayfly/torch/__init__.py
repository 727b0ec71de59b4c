"""Dayfly for PyTorch.

`Samples` is `dayfly.Samples` with the type of PyTorch's map-style datasets, `Sampler` deals its samples to ranks and continues interrupted
epochs, and `loader` makes a DataLoader of both. `prefetch` speeds up any DataLoader that exists.
"""

from typing import Any

import torch.utils.data

from ..samples import Samples as _Samples
from .loader import Loader, loader
from .prefetch import prefetch
from .sampler import Sampler
from .statistics import EpochStats


class Samples(_Samples, torch.utils.data.Dataset[Any]):
    """`dayfly.Samples` as a dataset of PyTorch. Both work everywhere; type checkers and `samples + others` want this one."""


__all__ = ["EpochStats", "Loader", "Sampler", "Samples", "loader", "prefetch"]
