"""Shapes of the stored tensors that families have in common, by their names in ``weights.names``."""

from __future__ import annotations

from pipeedge.base.shapes import Shape
from pipeedge.models.architecture import Architecture

__all__ = [
    "block_shapes",
    "first_token_shapes",
    "linear_shapes",
    "norm_shapes",
    "patch_shapes",
    "word_shapes",
]


def linear_shapes(name: str, outputs: int, inputs: int, *, bias: bool = True) -> dict[str, Shape]:
    """Return the tensors of a linear layer."""
    return {f"{name}.weight": (outputs, inputs), **({f"{name}.bias": (outputs,)} if bias else {})}


def norm_shapes(name: str, width: int, *, bias: bool = True) -> dict[str, Shape]:
    """Return the tensors of a LayerNorm."""
    return {f"{name}.weight": (width,), **({f"{name}.bias": (width,)} if bias else {})}


def block_shapes(
    architecture: Architecture, *, norm_bias: bool = True, mlp_bias: bool = True, gated: bool = False
) -> dict[str, Shape]:
    """Return the tensors of a block: two norms, attention with biases as the architecture says, and MLP.

    Args:
        architecture: Dimensions of the model.
        norm_bias: Whether norms have biases.
        mlp_bias: Whether the linear layers of the MLP have biases.
        gated: Whether the MLP is gated.
    """
    hidden, inner = architecture.hidden, architecture.intermediate
    return {
        **norm_shapes("block.{n}.norm1", hidden, bias=norm_bias),
        **linear_shapes("block.{n}.qkv", 3 * hidden, hidden, bias=architecture.qkv_bias),
        **linear_shapes("block.{n}.proj", hidden, hidden),
        **norm_shapes("block.{n}.norm2", hidden, bias=norm_bias),
        **linear_shapes("block.{n}.up", (2 if gated else 1) * inner, hidden, bias=mlp_bias),
        **linear_shapes("block.{n}.down", hidden, inner, bias=mlp_bias),
    }


def patch_shapes(architecture: Architecture, *, bias: bool = True) -> dict[str, Shape]:
    """Return the tensors of the convolution that embeds patches."""
    image, hidden = architecture.image, architecture.hidden
    weight = {"embeddings.patch.weight": (hidden, image.channels, *image.patch_size)}
    return {**weight, **({"embeddings.patch.bias": (hidden,)} if bias else {})}


def word_shapes(architecture: Architecture, *, width: int | None = None, unused: int = 0) -> dict[str, Shape]:
    """Return the tensors of normalised embeddings of words, positions and token types.

    Args:
        architecture: Dimensions of the model.
        width: Width of the embeddings; None: that of the hidden state.
        unused: Number of rows of the position table in front of the first position.
    """
    width = architecture.hidden if width is None else width
    types = architecture.type_vocab
    return {
        "embeddings.word": (architecture.vocab, width),
        "embeddings.position": (unused + architecture.max_positions, width),
        **({"embeddings.token_type": (types, width)} if types else {}),
        **norm_shapes("embeddings.norm", width),
    }


def first_token_shapes(architecture: Architecture, *, pooler_size: int | None = None) -> dict[str, Shape]:
    """Return the tensors of a pooler and a classifier, as far as the model has them.

    Args:
        architecture: Dimensions of the model.
        pooler_size: Width of the pooler; None: that of the hidden state.
    """
    hidden, found = architecture.hidden, dict[str, Shape]()
    width = hidden
    if architecture.pooler and architecture.head != "tokens":
        width = hidden if pooler_size is None else pooler_size
        found |= linear_shapes("head.pooler", width, hidden)
    if architecture.head != "vector":
        found |= linear_shapes("head.classifier", architecture.num_labels, width)
    return found
