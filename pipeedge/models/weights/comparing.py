"""Comparing a weights file with the tensors that a model needs: names and shapes, without reading data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from pipeedge.base.errors import WeightsError
from pipeedge.base.shapes import Shape
from pipeedge.base.wording import count, excerpt
from pipeedge.models.architecture import LAYERS_PER_BLOCK, Architecture
from pipeedge.models.families.catalogue import family_of
from pipeedge.models.weights.files import WeightsFile
from pipeedge.models.weights.locating import Filling, qkv_bias, resolve, stray_block

if TYPE_CHECKING:
    import torch

__all__ = ["check_coding", "check_tensors", "end_tensors"]

_OWN_CODINGS = ("int8", "int4")
"""Forms of weights that were stored rounded, each for the number type of its name."""


class Placeholder:
    """A shape with the methods of a tensor by which layouts view one."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def t(self) -> Placeholder:
        """Return the transposed matrix."""
        return Placeholder(self.shape[::-1])

    def permute(self, *order: int) -> Placeholder:
        """Return the tensor with its dimensions in another order."""
        return Placeholder(tuple(self.shape[dim] for dim in order))

    def view(self, *sides: int) -> Placeholder:
        """Return the tensor in another shape, in which one side may be -1."""
        known = math.prod(side for side in sides if side >= 0)
        return Placeholder(
            tuple(side if side >= 0 else math.prod(self.shape) // max(known, 1) for side in sides)
        )

    def chunk(self, parts: int) -> tuple[Placeholder, ...]:
        """Return equal parts along the first dimension."""
        return tuple(Placeholder((self.shape[0] // parts, *self.shape[1:])) for _ in range(parts))


def end_tensors(architecture: Architecture) -> tuple[dict[str, torch.Tensor], ...]:
    """Return the tensors of the first and the last block, each with its end of the model.

    They are placeholders, under the names that a shard gives them.
    """
    ends = []
    for block in sorted({0, architecture.blocks - 1}):
        shapes = dict(family_of(architecture).shapes(architecture, block))
        if architecture.pooling is not None:
            width = len(architecture.pooling.modes) * architecture.hidden
            for number, one in enumerate(architecture.pooling.dense):
                shapes[f"head.layers.{number}.weight"] = (one.outputs, width)
                if one.bias:
                    shapes[f"head.layers.{number}.bias"] = (one.outputs,)
                width = one.outputs
        own = {
            name.replace("block.{n}", f"parts.{LAYERS_PER_BLOCK * block}"): shape
            for name, shape in shapes.items()
            if not (name.startswith("embeddings.") and block)
            and not (name.startswith("head.") and block < architecture.blocks - 1)
        }
        ends.append({name: cast("torch.Tensor", Placeholder(shape)) for name, shape in own.items()})
    return tuple(ends)


def check_tensors(
    parameters: Mapping[str, torch.Tensor], architecture: Architecture, file: WeightsFile
) -> tuple[Filling, ...]:
    """Find where in ``file`` each of ``parameters``, named as in a shard, is stored, in whatever number type.

    Raises:
        WeightsError: A tensor is missing or of another shape, the file belongs to a deeper model, or it has
            biases that the model lacks.
    """
    tables = family_of(architecture).dialects(architecture)
    # If a name is missing, the message quotes it in the dialect that matches most names of the file.
    best = max(
        tables, key=lambda table: sum(resolve(p, table, architecture, file.names)[1] for p in parameters)
    )
    fillings = []
    for parameter, tensor in parameters.items():
        for table in (best, *tables):
            sources, found = resolve(parameter, table, architecture, file.names)
            if sources and found == len(sources):
                break
        else:
            sources, _ = resolve(parameter, best, architecture, file.names)
            raise _lacks(file, Filling(parameter, sources), tensor, architecture)
        filling = Filling(parameter, sources)
        _check_shapes(file, filling, tensor, architecture)
        fillings.append(filling)
    _check_surplus(architecture, file)
    return tuple(fillings)


def _lacks(
    file: WeightsFile, filling: Filling, tensor: torch.Tensor, architecture: Architecture
) -> WeightsError:
    """Return the error for a file without all that fills a parameter."""
    names = [source.name for source in filling.sources]
    missing = next((name for name in names if name not in file.names), filling.parameter)
    shapes = dict(filling.views(tensor, architecture.heads)) if names else {}
    expected = f" (expected shape {list(shapes[missing].shape)})" if missing in shapes else ""
    return WeightsError(
        f"{file.path} has no tensor {missing}{expected}; "
        "is it of another model, or of another part of this one?"
    )


def _check_shapes(
    file: WeightsFile, filling: Filling, tensor: torch.Tensor, architecture: Architecture
) -> None:
    """Check that what fills a parameter has the shape that the model needs."""
    for name, view in filling.views(tensor, architecture.heads):
        entry = file.entry(name)
        if entry.shape != tuple(view.shape):
            raise WeightsError(
                f"{file.path}: {name} has shape {excerpt(list(entry.shape))}, "
                f"the model needs {list(view.shape)}; is it of another model?"
            )


def _check_surplus(architecture: Architecture, file: WeightsFile) -> None:
    """Check that a file has no tensor that shows that it belongs to another model."""
    stray = stray_block(architecture, file.names)
    if stray is not None:
        raise WeightsError(
            f"{file.path} is of a deeper model: it has {stray}, the model has "
            f"{count(architecture.blocks, 'block')}"
        )
    if not architecture.qkv_bias:
        bias = qkv_bias(architecture, file.names)
        if bias is not None:
            raise WeightsError(
                f"{file.path} has {bias}, but the model's qkv_bias is false: which of the two is right?"
            )


def check_coding(filling: Filling, file: WeightsFile, dtype: torch.dtype) -> None:
    """Check that weights that were rounded for one number type are not to be used in another.

    Raises:
        WeightsError: They are. The message says what would do.
    """
    needed = str(dtype).removeprefix("torch.")
    for source in filling.sources:
        coding = file.coding(source.name)
        if coding in _OWN_CODINGS and coding != needed:
            raise WeightsError(
                f"{file.path}: {source.name} is stored as {coding}, {needed} is needed; run with "
                f"--dtype {coding}, or with weights that are not rounded (-M)"
            )
