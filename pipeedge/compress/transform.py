"""The randomised Hadamard transform of rows before they are quantised.

A few channels of a transformer's hidden state are many times as large as the others. They determine the range
of a row, so that its levels are far apart for all other values. Multiplied by an orthogonal matrix whose
entries are all of one size, with random signs, every value becomes a sum of many, and none is much larger
than the others. The receiver multiplies by the inverse. The sum of squared errors is the same before and
after the inverse. ``src-native/codec/hadamard.inc`` draws and computes it.

With the Hadamard matrix H of order n and random signs D, ``y = H D x / sqrt(n)`` takes n log2(n) additions.
Whatever x is, any |y| exceeds ``||x|| sqrt(2 ln(2 n / p) / n)`` with a probability of at most p. Hoeffding's
inequality for each of the n sums gives this, the argument of Ailon and Chazelle.

References:
    QuaRot: S. Ashkboos, A. Mohtashami, M. L. Croci, B. Li, P. Cameron, M. Jaggi, D. Alistarh, T. Hoefler,
    J. Hensman, "QuaRot: outlier-free 4-bit inference in rotated LLMs", NeurIPS 2024.
    N. Ailon, B. Chazelle, "Approximate nearest neighbors and the fast Johnson-Lindenstrauss transform",
    STOC 2006.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeedge import _native as native

__all__ = ["HADAMARD_BLOCKS", "MAX_SEED", "Transform", "hadamard"]

HADAMARD_BLOCKS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Possible lengths of a block."""
MAX_SEED = 2**63 - 1
"""Largest seed, which a column of the wire form can hold."""
_LEAST_BLOCK = 64
_SEED = 20240404
"""Signs that no model was made for; any other number would do."""


@dataclass(frozen=True)
class Transform:
    """A Hadamard transform of each row."""

    block: int
    """Length of the blocks that a row is cut into; halved for rows that are shorter."""
    seed: int
    """Seed of the signs."""

    def __post_init__(self) -> None:
        if self.block not in HADAMARD_BLOCKS:
            raise ValueError(f"a block of {self.block} values is not one of {HADAMARD_BLOCKS}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"the seed {self.seed} is not from 0 to {MAX_SEED}")

    def rows(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return the transform of the rows ``values``, float32 or the bits of bfloat16 as uint16."""
        return native.transform_rows(values=values, rows=values.shape[0], block=self.block, seed=self.seed)


def hadamard(length: int) -> Transform:
    """Return the transform for rows of ``length``.

    The block is the largest that divides the row, such as 256 for 768 and 1024 for 3072, because blocks that
    overlap take longer for about the same error. If that is less than 64, it is the largest that fits.
    """
    fitting = [block for block in HADAMARD_BLOCKS if block <= max(length, HADAMARD_BLOCKS[0])]
    dividing = [block for block in fitting if block >= _LEAST_BLOCK and length % block == 0]
    return Transform((dividing or fitting)[-1], _SEED)
