"""ModernBERT, https://arxiv.org/abs/2412.13663: norms come first, positions are rotations, MLPs are gated.

Most blocks attend only to tokens nearby, with a base of rotations of their own; the first block has no norm.
The mask travels, at a byte a token; each stage computes rotations and biases.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pipeedge.base.errors import ModelError
from pipeedge.base.shapes import Shape
from pipeedge.base.wording import excerpt
from pipeedge.models.architecture import ACTIVATION_NAMES, Architecture, FamilyOptions, TextInput, check_range
from pipeedge.models.family import MASK, Family, Head, ModelClass, classes_of, pools_tokens
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.shapes import block_shapes, linear_shapes, norm_shapes
from pipeedge.models.weights.names import Dialect, modules, tensors

__all__ = ["MODERNBERT", "ModernBertOptions"]

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
        if self.head_activation not in ACTIVATION_NAMES:
            raise ModelError(f"classifier_activation {excerpt(repr(self.head_activation))} is not supported")


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


def _shapes(architecture: Architecture, block: int) -> dict[str, Shape]:
    hidden, options = architecture.hidden, architecture.own(ModernBertOptions)
    layers = block_shapes(architecture, norm_bias=options.norm_bias, mlp_bias=options.mlp_bias, gated=True)
    absent = set() if block else {"block.{n}.norm1.weight", "block.{n}.norm1.bias"}
    absent |= set() if architecture.qkv_bias else {"block.{n}.proj.bias"}
    head = norm_shapes("head.norm", hidden, bias=options.norm_bias)
    if architecture.head != "vector":
        head |= linear_shapes("head.dense", hidden, hidden, bias=options.head_bias)
        head |= norm_shapes("head.dense_norm", hidden, bias=options.norm_bias)
        head |= linear_shapes("head.classifier", architecture.num_labels, hidden)
    return {
        "embeddings.word": (architecture.vocab, hidden),
        **norm_shapes("embeddings.norm", hidden, bias=options.norm_bias),
        **{name: shape for name, shape in layers.items() if name not in absent},
        **head,
    }


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
    shapes=_shapes,
    prefix="model.",
    unprefixed=("head.", "classifier"),
    carried=(dataclasses.replace(MASK, head=_means),),
)
