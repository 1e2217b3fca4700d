"""Pooling of the final hidden states of a sentence into one vector, as sentence-transformers describes it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DenseModule", "Pooling"]


@dataclass(frozen=True)
class DenseModule:
    """A linear layer on the pooled vector."""

    path: str
    """Name of its directory, which also begins the names of its weights."""
    outputs: int
    bias: bool
    activation: str
    """Name of its activation, one of ``activations.ACTIVATIONS``."""


@dataclass(frozen=True)
class Pooling:
    """How the final hidden states of a sentence become one vector."""

    modes: tuple[str, ...]
    """Ways of pooling, whose vectors are joined in this order."""
    dense: tuple[DenseModule, ...] = ()
    normalize: bool = False
    """Whether the vector is scaled to length 1."""

    @property
    def needs_mask(self) -> bool:
        """Whether the result depends on which positions are padding."""
        return self.modes != ("cls",)

    def output_size(self, hidden: int) -> int:
        """Return the width of the vector for hidden states of width ``hidden``."""
        return self.dense[-1].outputs if self.dense else len(self.modes) * hidden
