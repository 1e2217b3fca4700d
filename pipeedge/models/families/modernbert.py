"""ModernBERT, https://arxiv.org/abs/2412.13663: norms come first, positions are rotations, MLPs are gated.

Most blocks attend only to tokens nearby, with a base of rotations of their own; the first block has no norm.
The mask travels, at a byte a token; each stage computes rotations and biases.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from pipeedge.base.errors import ModelError
from pipeedge.base.wording import excerpt
from pipeedge.models.activations import ACTIVATIONS
from pipeedge.models.architecture import (
    LAYERS_PER_BLOCK,
    Architecture,
    FamilyOptions,
    TextInput,
    check_range,
)
from pipeedge.models.attention import MASK, MaskBias, attend, pools_tokens
from pipeedge.models.family import Family, Head, ModelClass, classes_of
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.linear import Linear
from pipeedge.models.rotary import Rotation, rotation_by_position
from pipeedge.models.weights.names import Dialect, modules, tensors

__all__ = ["MODERNBERT"]

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_MOST_REACH = 1 << 20


@dataclass(frozen=True)
class ModernBertOptions(FamilyOptions):
    """Options of ModernBERT."""

    near: tuple[bool, ...]
    """Whether each block attends only to tokens nearby."""
    reach: int
    """Largest distance between a token and one nearby."""
    global_base: float
    local_base: float
    """Bases of the wave lengths of rotations, in blocks that attend to all tokens and in the others."""
    norm_bias: bool
    mlp_bias: bool
    head_bias: bool
    head_activation: str
    mean_pooling: bool
    """Whether the classifier takes the mean of all tokens, rather than the first one."""

    def __post_init__(self) -> None:
        check_range("local_attention", 2 * self.reach, _MOST_REACH, least=0)
        for base in (self.global_base, self.local_base):
            if not 1 <= base < float("inf"):
                raise ModelError(f"rope_theta {base} is not a base of wave lengths; it must be at least 1")
        if self.head_activation not in ACTIVATIONS:
            raise ModelError(f"classifier_activation {excerpt(repr(self.head_activation))} is not supported")


def _norm(architecture: Architecture) -> nn.LayerNorm:
    bias = architecture.own(ModernBertOptions).norm_bias
    return nn.LayerNorm(architecture.hidden, eps=architecture.eps, bias=bias, device="meta")


class WordEmbeddings(nn.Module):
    """Embeddings of words, normalised."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.word = nn.Parameter(torch.empty(architecture.vocab, architecture.hidden, device="meta"))
        self.norm = _norm(architecture)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Embed inputs [N, T] -> [N, T, D], mask [N, T]."""
        return self.norm(F.embedding(input_ids, self.word)), attention_mask != 0


@dataclass(frozen=True)
class AttentionInputs:
    """What the attentions of a stage need besides their own queries, keys and values."""

    everywhere: Rotation
    nearby: Rotation
    bias: torch.Tensor | None
    """Bias on the scores of padding, [N, 1, 1, T], or None if nothing is padding."""


class SharedInputs(nn.Module):
    """Rotations and biases for the length of a microbatch."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        options = architecture.own(ModernBertOptions)
        self.width = architecture.hidden // architecture.heads
        self.bases = options.global_base, options.local_base
        self.padding = MaskBias(architecture)

    def forward(self, state: torch.Tensor, mask: torch.Tensor) -> AttentionInputs:
        """Compute them from the hidden state [N, T, D] and the mask [N, T]."""
        everywhere, nearby = (
            rotation_by_position(state.shape[1], self.width, base, state.device) for base in self.bases
        )
        return AttentionInputs(everywhere, nearby, self.padding(state, mask))


class ModernBertAttention(nn.Module):
    """Part 0: norm unless in the first block, queries, keys and values in one product, then attention."""

    def __init__(self, architecture: Architecture, block: int) -> None:
        super().__init__()
        options = architecture.own(ModernBertOptions)
        hidden = architecture.hidden
        self.heads = architecture.heads
        self.reach = options.reach if options.near[block] else None
        self.norm1 = _norm(architecture) if block else None
        self.qkv = Linear(hidden, 3 * hidden, bias=architecture.qkv_bias)

    def forward(self, hidden: torch.Tensor, around: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute [N, T, D] -> context [N, T, D], skip [N, T, D]."""
        qkv = self.qkv(hidden, norm=self.norm1)
        rotation = around.everywhere if self.reach is None else around.nearby
        return attend(qkv, self.heads, around.bias, rotation=rotation, reach=self.reach), hidden


class ModernBertProjection(nn.Module):
    """Part 1: projection of the heads' outputs, and the residual."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.proj = Linear(architecture.hidden, architecture.hidden, bias=architecture.qkv_bias)

    def forward(self, context: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor]:
        """Compute context [N, T, D], skip [N, T, D] -> [N, T, D]."""
        return (self.proj(context, residual=skip),)


class ModernBertExpansion(nn.Module):
    """Part 2: norm, then the upper half of a gated MLP, https://arxiv.org/abs/2002.05202."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        bias = architecture.own(ModernBertOptions).mlp_bias
        self.activation = ACTIVATIONS[architecture.activation]
        self.norm2 = _norm(architecture)
        self.up = Linear(architecture.hidden, 2 * architecture.intermediate, bias=bias)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute [N, T, D] -> inner [N, T, I], skip [N, T, D]."""
        inner, gate = self.up(hidden, norm=self.norm2).chunk(2, -1)
        return self.activation(inner.clone(memory_format=torch.contiguous_format)).mul_(gate), hidden


class ModernBertContraction(nn.Module):
    """Part 3: the lower half of the MLP, and the residual."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        bias = architecture.own(ModernBertOptions).mlp_bias
        self.down = Linear(architecture.intermediate, architecture.hidden, bias=bias)

    def forward(self, inner: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor]:
        """Compute inner [N, T, I], skip [N, T, D] -> [N, T, D]."""
        return (self.down(inner, residual=skip),)


def _part(architecture: Architecture, layer: int) -> nn.Module:
    block, part = divmod(layer, LAYERS_PER_BLOCK)
    if part == 0:
        return ModernBertAttention(architecture, block)
    return (ModernBertProjection, ModernBertExpansion, ModernBertContraction)[part - 1](architecture)


class ModernBertHead(nn.Module):
    """Final norm, then the first token itself, or a dense layer, an activation, a norm and the classes.

    The classes are those of the first token, of the mean of all tokens, or of each token.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        options, hidden = architecture.own(ModernBertOptions), architecture.hidden
        self.each = architecture.head == "tokens"
        self.norm = _norm(architecture)
        self.activation = ACTIVATIONS[options.head_activation]
        self.classifier = None
        if architecture.head != "vector":
            self.dense = Linear(hidden, hidden, bias=options.head_bias)
            self.dense_norm = _norm(architecture)
            self.classifier = Linear(hidden, architecture.num_labels)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Compute [N, T, D] and the mask [N, T], for a mean -> [N, classes], [N, T, classes] or [N, D]."""
        if mask is not None:
            weight = mask[:, :, None].to(hidden.dtype)
            hidden = (self.norm(hidden) * weight).sum(1) / weight.sum(1)
        else:
            hidden = self.norm(hidden if self.each else hidden[:, 0].contiguous())
        if self.classifier is not None:
            hidden = self.classifier(self.dense_norm(self.activation(self.dense(hidden))))
        return hidden.float()


# The configuration ------------------------------------------------------------------------------------


def _bases(config: HubConfig) -> tuple[float, float]:
    """Return the bases of rotations of blocks that attend everywhere, and nearby.

    Raises:
        ModelError: Rotations are scaled, which is not supported.
    """
    named, found = config.section("rope_parameters"), []
    if config.values.get("rope_scaling"):
        raise ModelError("rope_scaling is set: scaled rotary positions are not supported")
    for kind, older, default in ((_GLOBAL, "global", 160_000.0), (_LOCAL, "local", 10_000.0)):
        own = named.section(kind)
        scaling = own.text("rope_type", "default")
        if scaling != "default":
            raise ModelError(f"rope_type {excerpt(repr(scaling))} is not supported; 'default' is")
        found.append(own.number("rope_theta", config.number(f"{older}_rope_theta", default)))
    return found[0], found[1]


def _near(config: HubConfig, blocks: int) -> tuple[bool, ...]:
    """Return whether each block attends nearby: as listed, or all but every third."""
    kinds = config.values.get("layer_types")
    if kinds is None:
        period = config.integer("global_attn_every_n_layers", 3)
        check_range("global_attn_every_n_layers", period, _MOST_REACH)
        return tuple(block % period != 0 for block in range(blocks))
    known = isinstance(kinds, list) and all(kind in (_GLOBAL, _LOCAL) for kind in kinds)
    if not known or len(kinds) != blocks:
        raise ModelError(f"layer_types must list {_GLOBAL} or {_LOCAL} for each of {blocks} blocks")
    return tuple(kind == _LOCAL for kind in kinds)


def _read(config: HubConfig, head: Head) -> Architecture:
    pooling = config.text("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise ModelError(f"classifier_pooling {excerpt(repr(pooling))} is not supported; cls and mean are")
    sizes = config.block_sizes(intermediate=1152)
    blocks = config.integer("num_hidden_layers", 22)
    check_range("blocks", blocks, _MOST_REACH)
    global_base, local_base = _bases(config)
    architecture = Architecture(
        family="modernbert",
        **{
            **sizes,
            "blocks": blocks,
            "eps": config.number("norm_eps", 1e-5),
            "activation": config.text("hidden_activation", "gelu"),
        },
        input=TextInput(config.integer("vocab_size", 50368), config.integer("max_position_embeddings", 8192)),
        head=head.kind,
        qkv_bias=config.flag("attention_bias", False),
        num_labels=head.num_labels,
        options=ModernBertOptions(
            near=_near(config, blocks),
            reach=config.integer("local_attention", 128) // 2,
            global_base=global_base,
            local_base=local_base,
            norm_bias=config.flag("norm_bias", False),
            mlp_bias=config.flag("mlp_bias", False),
            head_bias=config.flag("classifier_bias", False),
            head_activation=config.text("classifier_activation", "gelu"),
            mean_pooling=pooling == "mean",
        ),
    )
    if architecture.hidden // architecture.heads % 2:
        raise ModelError(
            f"heads of {architecture.hidden // architecture.heads} values cannot be rotated in pairs"
        )
    return architecture


# Names in files ---------------------------------------------------------------------------------------

_NAMES: Dialect = {
    **tensors({"embeddings.word": "embeddings.tok_embeddings.weight"}),
    **modules(
        {
            "embeddings.norm": ("embeddings.norm",),
            "block.{n}.norm1": ("layers.{n}.attn_norm",),
            "block.{n}.qkv": ("layers.{n}.attn.Wqkv",),
            "block.{n}.proj": ("layers.{n}.attn.Wo",),
            "block.{n}.norm2": ("layers.{n}.mlp_norm",),
            "block.{n}.up": ("layers.{n}.mlp.Wi",),
            "block.{n}.down": ("layers.{n}.mlp.Wo",),
            "head.norm": ("final_norm",),
            "head.dense": ("head.dense",),
            "head.dense_norm": ("head.norm",),
            "head.classifier": ("classifier",),
        }
    ),
}


def _means(architecture: Architecture) -> bool:
    """Return whether the head takes a mean, which depends on the mask."""
    own_mean = architecture.head == "classifier" and architecture.own(ModernBertOptions).mean_pooling
    return own_mean or pools_tokens(architecture)


MODERNBERT = Family(
    name="modernbert",
    model_types=("modernbert",),
    classes=classes_of(
        "ModernBert",
        {
            "ForSequenceClassification": ModelClass("classifier", sign="classifier.weight"),
            "ForTokenClassification": ModelClass("tokens"),
            "Model": ModelClass("vector"),
            "ForMaskedLM": ModelClass("vector"),
        },
    ),
    read=_read,
    dialects=lambda _: (_NAMES,),
    embeddings=WordEmbeddings,
    part=_part,
    head=ModernBertHead,
    prefix="model.",
    unprefixed=("head.", "classifier"),
    carried=(dataclasses.replace(MASK, head=_means),),
    shared=SharedInputs,
    final_norm=_norm,
)
