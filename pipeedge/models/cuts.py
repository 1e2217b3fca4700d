"""Payloads that cross the cuts of a model, by shape; ``shard`` draws where a block is cut."""

from __future__ import annotations

from pipeedge.base.shapes import TensorShape
from pipeedge.models.architecture import LAYERS_PER_BLOCK, Architecture
from pipeedge.models.family import Family

__all__ = ["payload_shapes", "step_shapes", "stream_type"]


def stream_type(dtype: str) -> str:
    """Return the name of the number type of hidden states for weights in ``dtype``: see ``dtypes``."""
    return "bfloat16" if dtype in ("int8", "int4") else dtype


def payload_shapes(
    family: Family, architecture: Architecture, after_layer: int, *, items: int, tokens: int, dtype: str
) -> tuple[TensorShape, ...]:
    """Return the payload that crosses the cut after ``after_layer`` layers (0: the model's input).

    Args:
        family: Family of the model.
        architecture: Dimensions of the model.
        after_layer: Number of layers before the cut.
        items: Number of items.
        tokens: Number of tokens of each.
        dtype: Name of the number type of hidden states.
    """
    shape = (items, tokens)
    if after_layer == 0:
        if architecture.takes_text:
            return tuple(TensorShape(shape, "int64") for _ in family.inputs(architecture))
        return (TensorShape((items, architecture.channels, *architecture.image_size), dtype),)
    if after_layer == architecture.n_layers:
        return (TensorShape(architecture.output_shape(items, tokens), "float32"),)
    hidden = TensorShape((*shape, architecture.hidden), dtype)
    inner = TensorShape((*shape, architecture.intermediate), dtype)
    state = ((hidden,), (hidden, hidden), (hidden,), (inner, hidden))[after_layer % LAYERS_PER_BLOCK]
    carried = family.crossing(architecture, after_layer)
    return (*state, *(each.shape(items, tokens) for each in carried))


def step_shapes(
    architecture: Architecture, after_layer: int, *, rows: int, dtype: str
) -> tuple[TensorShape, ...]:
    """Return the payload of a step of a decoder that crosses the cut after ``after_layer`` layers.

    Args:
        architecture: Dimensions of the model.
        after_layer: Number of layers before the cut; 0 and all for the hidden states of the data rank.
        rows: Number of tokens, of any sequences.
        dtype: Name of the number type of hidden states.
    """
    hidden = TensorShape((rows, architecture.hidden), dtype)
    context = TensorShape((rows, architecture.heads * architecture.width_of_head), dtype)
    inner = TensorShape((rows, architecture.intermediate), dtype)
    return ((hidden,), (context, hidden), (hidden,), (inner, hidden))[after_layer % LAYERS_PER_BLOCK]
