"""Weights of a ``pytorch_model.bin`` file, for the one old repository without safetensors."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch

from pipeedge.base.errors import WeightsError
from pipeedge.models.dtypes import dtype_name
from pipeedge.models.weights.files import TensorEntry, WeightsFile

__all__ = ["PickledWeights"]


class PickledWeights(WeightsFile):
    """A ``pytorch_model.bin`` file, all of which is held in memory.

    It is read with PyTorch's restricted unpickler, which creates only tensors and plain containers.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise WeightsError(f"{path} cannot be read as PyTorch weights") from error
        if not isinstance(tensors, dict):
            raise WeightsError(f"{path} does not contain a table of tensors")
        self._tensors = {
            str(name): tensor
            for name, tensor in tensors.items()
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
        }

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._tensors.keys()

    def entry(self, name: str) -> TensorEntry:
        """Return the shape and number type of one tensor."""
        tensor = self._tensors[name]
        return TensorEntry(tuple(tensor.shape), dtype_name(tensor.dtype), str(tensor.dtype))

    def identity(self) -> Iterator[bytes]:
        """Yield bytes that identify the content cheaply."""
        for name in sorted(self._tensors):
            yield f"{name} {tuple(self._tensors[name].shape)}".encode()

    def read_into(
        self, name: str, out: torch.Tensor, progress: Callable[[int], object] = lambda _: None
    ) -> None:
        """Copy a tensor into ``out``."""
        out.copy_(self._tensors[name])
        progress(out.numel())
