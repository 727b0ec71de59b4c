"""Dayfly for PyTorch.

`Samples` is a map-style dataset, `Sampler` deals its samples to ranks and continues interrupted
epochs, and `loader` makes a DataLoader of both. `prefetch` speeds up any DataLoader that exists.
"""

from .loader import Loader, loader
from .prefetch import prefetch
from .sampler import Sampler
from .samples import Samples

__all__ = ["Loader", "Sampler", "Samples", "loader", "prefetch"]
