"""Heads of sentence embeddings, https://arxiv.org/abs/1908.10084: positions of padding take no part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from pipeedge.models.architecture import Architecture
from pipeedge.models.layers.parts import FamilyLayers
from pipeedge.models.linear import Linear
from pipeedge.models.pooling import Pooling

__all__ = ["SentenceHead", "pool"]

_LEAST_COUNT = 1e-9


class SentenceHead(nn.Module):
    """Final norm of the family, pooling, dense layers and normalisation; pooled in float32."""

    def __init__(self, layers: FamilyLayers, architecture: Architecture, pooling: Pooling) -> None:
        super().__init__()
        self.pooling = pooling
        self.norm = None if layers.final_norm is None else layers.final_norm(architecture)
        self.layers = nn.ModuleList()
        width = len(pooling.modes) * architecture.hidden
        for one in pooling.dense:
            self.layers.append(Linear(width, one.outputs, bias=one.bias, activation=one.activation))
            width = one.outputs

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Compute [N, T, D] and a mask [N, T], unless padding makes no difference, -> [N, output]."""
        if self.norm is not None:
            hidden = self.norm(hidden)
        if mask is None:
            mask = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        vector = pool(hidden.float(), mask, self.pooling.modes)
        for layer in self.layers:
            vector = layer(vector.to(hidden.dtype)).float()
        return F.normalize(vector) if self.pooling.normalize else vector


def pool(hidden: torch.Tensor, mask: torch.Tensor, modes: Sequence[str]) -> torch.Tensor:
    """Return the vectors of hidden states [N, T, D] in each of ``modes``, side by side.

    Args:
        hidden: Final hidden states.
        mask: True for tokens and false for padding, [N, T].
        modes: Ways of pooling.
    """
    vectors = []
    for mode in modes:
        weight = mask[:, :, None].to(hidden.dtype)
        if mode == "cls":
            vectors.append(hidden[:, 0])
        elif mode == "max":
            vectors.append(hidden.masked_fill(~mask[:, :, None], -(_LEAST_COUNT**-1)).amax(1))
        elif mode == "lasttoken":
            places = torch.arange(mask.shape[1], device=mask.device)
            last = (mask * places).amax(1)
            vectors.append(hidden[torch.arange(len(hidden), device=mask.device), last])
        else:
            if mode == "weightedmean":
                places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
                weight = weight * places[None, :, None]
            total = weight.sum(1).clamp_(min=_LEAST_COUNT)
            vectors.append((hidden * weight).sum(1) / (total.sqrt() if "sqrt" in mode else total))
    return torch.cat(vectors, 1)
