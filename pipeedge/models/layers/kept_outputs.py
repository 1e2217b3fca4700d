"""What a stage of a decoder has sent on, kept by the pages that its rows have in the cache.

    rows of a step ──> layers 1-8 ──> payload of the cut after layer 8 ──> next stage
                                            └──> page 4, places 0-31; page 0, places 0-6

After the loss of the layers behind the cut, they are computed again from it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pipeedge.models.architecture import Architecture
from pipeedge.models.cuts import step_shapes
from pipeedge.models.dtypes import dtype_name

__all__ = ["KeptOutputs"]


class KeptOutputs:
    """The payloads of a cut.

    The system provides the memory of pages that are written.

    Args:
        architecture: Dimensions of the model.
        cut: Number of layers before the cut.
        stream: Number type of payloads.
        places: Number of rows that there is room for.
    """

    def __init__(self, architecture: Architecture, cut: int, stream: torch.dtype, places: int) -> None:
        shapes = step_shapes(architecture, cut, rows=places, dtype=dtype_name(stream))
        self._kept = tuple(torch.empty(shape.shape, dtype=stream) for shape in shapes)

    def write(self, places: npt.NDArray[np.int64], payload: Sequence[torch.Tensor]) -> None:
        """Keep the rows of a payload, each in its place."""
        index = torch.from_numpy(places)
        for kept, tensor in zip(self._kept, payload, strict=True):
            kept[index] = tensor

    def read(self, places: npt.NDArray[np.int64]) -> tuple[torch.Tensor, ...]:
        """Return the payload that consists of the rows in some places."""
        index = torch.from_numpy(places)
        return tuple(kept[index] for kept in self._kept)
