"""Random weights for benchmarks: the same for each tensor, whatever the cut, the machine and the version.

Each tensor has its own generator, seeded by its name, whose integers are turned into floats by exact
operations only. A shard only needs to draw its own tensors.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from pipeedge.models.weights.files import TensorEntry, WeightsFile

__all__ = ["RandomWeights"]

_CHUNK = 1 << 18
_STD = 0.02
"""Standard deviation that most families are initialised with; keeps activations of order one."""
_NORM = re.compile(r"(norm(_before|_after|_?\d+)?\.weight|\.lambda1)$")
"""Ends of the names of norms' weights, in lower case."""


class RandomWeights(WeightsFile):
    """Tensors under the given names, uniform with a standard deviation of 0.02; norms are around one."""

    def __init__(self, shapes: Mapping[str, torch.Size], seed: int) -> None:
        super().__init__(Path(f"random weights, seed {seed}"))
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._seed = seed

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._shapes.keys()

    def entry(self, name: str) -> TensorEntry:
        """Return the shape and number type of one tensor."""
        return TensorEntry(self._shapes[name], "float32", "float32")

    def identity(self) -> Iterator[bytes]:
        """Yield bytes that identify the seed and the shapes."""
        yield f"{self._seed} {sorted(self._shapes.items())}".encode()

    def read_into(
        self, name: str, out: torch.Tensor, progress: Callable[[int], object] = lambda _: None
    ) -> None:
        """Draw the tensor's values into ``out``."""
        flat = out.view(-1) if out.is_contiguous() else torch.empty(out.numel())
        generator = np.random.Generator(np.random.SFC64([self._seed, zlib.crc32(name.encode())]))
        centre = 1.0 if _NORM.search(name.lower()) else 0.0
        width = np.float32(_STD * math.sqrt(12))
        for start in range(0, flat.numel(), _CHUNK):
            part = flat[start : start + _CHUNK]
            values = generator.random(part.numel(), dtype=np.float32)
            values -= np.float32(0.5)
            values *= width
            values += np.float32(centre)
            part.copy_(torch.from_numpy(values))
            progress(part.numel())
        if not out.is_contiguous():
            out.copy_(flat.view(out.shape))
