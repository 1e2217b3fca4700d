"""Weights under the names of other projects."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Arrays = dict[str, np.ndarray]


def without_prefix(arrays: Mapping[str, np.ndarray]) -> Arrays:
    return {
        name.removeprefix("vit.").removeprefix("deit.").removeprefix("bert."): a for name, a in arrays.items()
    }


def as_google(hub: Mapping[str, np.ndarray], blocks: int, heads: int) -> Arrays:
    """Return tensors with vision_transformer's names and layouts: kernels are [in, out], heads an axis."""
    hub = without_prefix(hub)
    out = {
        "cls": hub["embeddings.cls_token"],
        "Transformer/posembed_input/pos_embedding": hub["embeddings.position_embeddings"],
        "embedding/kernel": np.einsum("oihw->hwio", hub["embeddings.patch_embeddings.projection.weight"]),
        "embedding/bias": hub["embeddings.patch_embeddings.projection.bias"],
        "Transformer/encoder_norm/scale": hub["layernorm.weight"],
        "Transformer/encoder_norm/bias": hub["layernorm.bias"],
        "head/kernel": hub["classifier.weight"].T,
        "head/bias": hub["classifier.bias"],
    }
    for n in range(blocks):
        old, new = f"encoder.layer.{n}", f"Transformer/encoderblock_{n}"
        for part in ("query", "key", "value"):
            kernel = hub[f"{old}.attention.attention.{part}.weight"]
            bias = hub[f"{old}.attention.attention.{part}.bias"]
            attention = f"{new}/MultiHeadDotProductAttention_1/{part}"
            out[f"{attention}/kernel"] = kernel.T.reshape(kernel.shape[1], heads, -1)
            out[f"{attention}/bias"] = bias.reshape(heads, -1)
        kernel = hub[f"{old}.attention.output.dense.weight"]
        out[f"{new}/MultiHeadDotProductAttention_1/out/kernel"] = kernel.T.reshape(heads, -1, kernel.shape[0])
        out[f"{new}/MultiHeadDotProductAttention_1/out/bias"] = hub[f"{old}.attention.output.dense.bias"]
        for ours, theirs in (("intermediate", "Dense_0"), ("output", "Dense_1")):
            out[f"{new}/MlpBlock_3/{theirs}/kernel"] = hub[f"{old}.{ours}.dense.weight"].T
            out[f"{new}/MlpBlock_3/{theirs}/bias"] = hub[f"{old}.{ours}.dense.bias"]
        for ours, theirs in (("before", "LayerNorm_0"), ("after", "LayerNorm_2")):
            out[f"{new}/{theirs}/scale"] = hub[f"{old}.layernorm_{ours}.weight"]
            out[f"{new}/{theirs}/bias"] = hub[f"{old}.layernorm_{ours}.bias"]
    return out
