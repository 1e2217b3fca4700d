"""A model that only the scheduler's files describe, for planning runs that cannot start here. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pipeedge.base.shapes import TensorShape
from pipeedge.models.cuts import stream_type
from pipeedge.plan.specs import ModelSpec

__all__ = ["ListedModel"]


@dataclass(frozen=True)
class ListedModel:
    """A model as ``models.yml`` lists it, in the place of an ``Outline``."""

    name: str
    spec: ModelSpec

    @property
    def decodes(self) -> bool:
        """Whether it generates text."""
        return self.spec.context is not None

    @property
    def max_tokens(self) -> int:
        """Longest text of a decoder in tokens."""
        return self.spec.context or 0

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return self.spec.layers

    def input_bytes(
        self, tokens: int | None = None, dtype: str = "float32", *, eight_bit: bool = True
    ) -> int | None:
        """Return None: nothing but its number of elements is known of the input."""

    def payload_shapes(
        self, after_layer: int, items: int, tokens: int | None = None, dtype: str = "float32"
    ) -> tuple[TensorShape, ...]:
        """Return the payload after ``after_layer`` layers as one tensor with a row for each item.

        Args:
            after_layer: 0 for the model's input, ``n_layers`` for its output.
            items: Number of items in the microbatch.
            tokens: Sentence length in tokens; None for the listed one.
            dtype: Name of the number type of the values.
        """
        spec = self.spec if tokens is None else self.spec.at_tokens(tokens)
        elements = spec.elements_out[after_layer - 1] if after_layer else spec.elements_in
        return (TensorShape((items, round(elements)), stream_type(dtype)),)
