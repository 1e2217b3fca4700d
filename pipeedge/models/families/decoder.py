"""What all families of decoders have in common: one set of options serves them all.

A block is RMSNorm or LayerNorm, attention of grouped heads to what came before, and an MLP, gated or not.
Families differ in which norms there are, in biases, windows, rotations and factors, and in the names of
their tensors.

    norms before           x + proj(attention(norm(x)))              Llama, Qwen, Phi-3, Granite, SmolLM3,
    GPT-2
    norms after            x + norm(proj(attention(x)))              OLMo 2
    before and after       x + norm(proj(attention(norm(x))))        Gemma 2 and 3
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeedge.base.errors import ModelError
from pipeedge.base.shapes import Shape
from pipeedge.base.wording import excerpt
from pipeedge.models.architecture import Architecture, FamilyOptions, TextInput, check_range
from pipeedge.models.family import Head, ModelClass
from pipeedge.models.hub_config import HubConfig
from pipeedge.models.shapes import linear_shapes, norm_shapes
from pipeedge.models.weights.names import Dialect, modules, tensors

__all__ = [
    "FULL",
    "NATIVE_ACTIVATIONS",
    "SLIDING",
    "DecoderOptions",
    "Rotary",
    "causal_class",
    "decoder_names",
    "decoder_shapes",
    "gguf_names",
    "layer_kinds",
    "read_decoder",
    "read_rotary",
]

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of attention in ``layer_types``."""
NATIVE_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Activations of decoders, and what native code calls them."""
_SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_MOST_WINDOW = 1 << 24
_MOST_HEAD = 1 << 10


@dataclass(frozen=True)
class Rotary:
    """Rotary positions of queries and keys, https://arxiv.org/abs/2104.09864, and how they are scaled."""

    base: float
    rotated: int
    """Number of values of a head that are rotated, an even number."""
    scaling: str = "default"
    """Name of the scaling, as in ``rope_type``."""
    factor: float = 1.0
    """Factor by which positions are stretched."""
    original: int = 0
    """Number of positions that the model was trained with before it was stretched."""
    low: float = 1.0
    high: float = 1.0
    """Factors of low and of high frequencies (llama3), or the slow and the fast limit in rotations (yarn)."""
    truncate: bool = True
    """Whether the limits are rounded to whole frequencies (yarn)."""
    magnitude: float = 1.0
    """Factor of sines and cosines."""
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    """Divisors of frequencies, in contexts of up to ``original`` positions and in longer ones (longrope)."""

    def __post_init__(self) -> None:
        if self.scaling not in _SCALINGS:
            supported = ", ".join(_SCALINGS)
            raise ModelError(
                f"rope_type {excerpt(repr(self.scaling))} is not supported; supported are {supported}"
            )
        if not 1 < self.base < math.inf:
            raise ModelError(f"rope_theta {self.base} is not a base of wave lengths; it must be above 1")
        if not 0 < self.factor < math.inf or not 0 < self.magnitude < math.inf:
            raise ModelError(f"the factor of the rotary scaling is {self.factor}; it must be above 0")
        if self.rotated < 2 or self.rotated % 2:
            raise ModelError(f"{self.rotated} values of a head cannot be rotated in pairs")
        if self.scaling == "dynamic" and self.rotated == 2:
            raise ModelError("dynamic scaling needs more than one pair of values to rotate")
        if self.scaling == "llama3" and not 0 < self.low < self.high:
            raise ModelError(f"low_freq_factor {self.low} is not below high_freq_factor {self.high}")
        if self.scaling == "yarn" and not (self.low > 0 and self.high > 0):
            raise ModelError(f"beta_slow {self.low} and beta_fast {self.high} must be above 0")
        if self.scaling in ("dynamic", "llama3", "yarn", "longrope"):
            check_range("original_max_position_embeddings", self.original, _MOST_WINDOW)
        if self.scaling == "longrope":
            for name, factors in (("short_factor", self.short), ("long_factor", self.long)):
                if len(factors) != self.rotated // 2 or not all(0 < one < math.inf for one in factors):
                    raise ModelError(f"{name} must list {self.rotated // 2} numbers above 0")


@dataclass(frozen=True)
class DecoderOptions(FamilyOptions):
    """Options of decoders."""

    kv_heads: int
    """Number of heads of keys and values, which divides that of queries."""
    rotary: tuple[Rotary, ...]
    """Rotations that blocks have."""
    rotation: tuple[int, ...]
    """Number of the rotation of each block, or -1 for a block whose queries and keys are not rotated."""
    windows: tuple[int, ...]
    """Number of positions that a query of each block reaches, including its own, or 0 for all."""
    scale: float
    """Factor of the scores of attention."""
    tied: bool = False
    """Whether the head is the table of words."""
    layer_norm: bool = False
    """Whether norms are LayerNorms with biases, rather than RMSNorms."""
    norm_offset: bool = False
    """Whether the weights of norms are stored minus 1."""
    norms: str = "before"
    """``before``, ``after`` or ``both``: norms before, behind, or around attention and MLP."""
    head_norm: str = "none"
    """Norm of queries and keys: ``each`` of each head, ``all`` of all heads together, or ``none``."""
    proj_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    """Whether the MLP multiplies the activation of one layer by another one."""
    fused: bool = False
    """Whether files hold queries, keys and values, and both layers of a gated MLP, as one tensor each."""
    score_cap: float = 0.0
    """Bound of the scores of attention, or 0."""
    logit_cap: float = 0.0
    """Bound of the scores of tokens, or 0."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of what is added to the hidden state."""
    logit_scale: float = 1.0
    learned_positions: bool = False
    """Whether positions have embeddings of their own."""
    temper: float = 0.0
    temper_from: int = 0
    """Queries grow by ``temper`` times log(1 + position // ``temper_from``), unless it is 0."""

    def __post_init__(self) -> None:
        for window in self.windows:
            check_range("sliding_window", window, _MOST_WINDOW, least=0)
        for name in ("scale", "embedding_scale", "residual_scale", "logit_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ModelError(f"the {name.replace('_', ' ')} is {getattr(self, name)}; it must be above 0")
        for name in ("score_cap", "logit_cap"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ModelError(
                    f"the {name.replace('_', ' ')} is {getattr(self, name)}; it must not be negative"
                )


def causal_class(name: str) -> dict[str, ModelClass]:
    """Return the class of a family that scores next tokens, by its name."""
    return {name: ModelClass("next", sign="model.embed_tokens.weight")}


# The configuration ------------------------------------------------------------------------------------


def _numbers(config: HubConfig, key: str) -> tuple[float, ...]:
    values = config.values.get(key)
    if not isinstance(values, list) or not all(
        isinstance(one, (int, float)) and not isinstance(one, bool) for one in values
    ):
        raise ModelError(f"{key} must be a list of numbers")
    return tuple(map(float, values))


def _yarn_magnitude(scale: float, times: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * times * math.log(scale) + 1.0


def read_rotary(
    config: HubConfig,
    head_size: int,
    *,
    base: float = 10_000.0,
    base_key: str = "rope_theta",
    kind: str | None = None,
    scaled: bool = True,
) -> Rotary:
    """Return the rotation that a ``config.json`` describes, in the form of this or of earlier transformers.

    Args:
        config: The whole file.
        head_size: Width of a head.
        base: Base of wave lengths if the file does not say.
        base_key: Key of the base in the earlier form.
        kind: Kind of attention whose rotation it is, if the file may have one for each.
        scaled: Whether scaling in the earlier form is that of this kind of attention.

    Raises:
        ModelError: The scaling is not supported, or a value is invalid.
    """
    named = config.section("rope_parameters")
    if kind is not None and isinstance(named.values.get(kind), dict):
        named = named.section(kind)
    elif FULL in named.values or SLIDING in named.values:
        named = HubConfig({})
    earlier = config.section("rope_scaling") if scaled else HubConfig({})
    own = HubConfig({**earlier.values, **named.values})
    scaling = own.text("rope_type", own.text("type", "default"))
    if scaling == "su":  # the first name of it
        scaling = "longrope"
    part = own.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if not 0 < part <= 1:
        raise ModelError(f"partial_rotary_factor {part} is not above 0 and up to 1")
    positions = config.integer("max_position_embeddings", 2048)
    original = own.integer("original_max_position_embeddings", positions)
    if scaling in ("llama3", "yarn", "longrope"):
        original = config.integer("original_max_position_embeddings", original)
    elif scaling == "dynamic":
        original = positions
    check_range("original_max_position_embeddings", original, _MOST_WINDOW)
    stretched = max(positions, 1) / original
    factor = own.number("factor", stretched if scaling in ("yarn", "longrope") else 1.0)
    magnitude, low, high = 1.0, 1.0, 1.0
    if scaling == "yarn":
        low, high = own.number("beta_slow", 1.0) or 1.0, own.number("beta_fast", 32.0) or 32.0
        times, all_times = own.number("mscale", 0.0), own.number("mscale_all_dim", 0.0)
        if times and all_times:
            magnitude = _yarn_magnitude(factor, times) / _yarn_magnitude(factor, all_times)
        else:
            magnitude = _yarn_magnitude(factor)
    elif scaling == "longrope" and factor > 1 and original > 1:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original))
    elif scaling == "llama3":
        low, high = own.number("low_freq_factor", 1.0), own.number("high_freq_factor", 4.0)
    if scaling in ("yarn", "longrope"):
        magnitude = own.number("attention_factor", magnitude)
    return Rotary(
        base=own.number("rope_theta", config.number(base_key, base)),
        rotated=int(head_size * part),
        scaling=scaling,
        factor=factor,
        original=original if scaling not in ("default", "linear") else 0,
        low=low,
        high=high,
        truncate=own.flag("truncate", True),
        magnitude=magnitude,
        short=_numbers(own, "short_factor") if scaling == "longrope" else (),
        long=_numbers(own, "long_factor") if scaling == "longrope" else (),
    )


def layer_kinds(config: HubConfig, blocks: int, default: Sequence[str]) -> tuple[str, ...]:
    """Return the kind of attention of each block: as listed, or ``default``.

    Raises:
        ModelError: A block has another kind, such as a recurrent one, or the list has another length.
    """
    kinds = config.values.get("layer_types")
    if kinds is None:
        return tuple(default)
    if not isinstance(kinds, list) or len(kinds) != blocks:
        raise ModelError(f"layer_types must list the kind of attention of each of {blocks} blocks")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise ModelError(
                f"layer_types has {excerpt(repr(kind))}; {FULL} and {SLIDING} are supported, "
                "recurrent layers are not"
            )
    return tuple(kinds)


def read_decoder(
    family: str,
    config: HubConfig,
    head: Head,
    *,
    rotary: Sequence[Rotary] | None = None,
    rotation: Sequence[int] | None = None,
    windows: Sequence[int] | None = None,
    qkv_bias: bool = False,
    head_size: int | None = None,
    base: float = 10_000.0,
    activation: str | None = None,
    tied: bool = False,
    kv_heads: int | None = None,
    **options: Any,
) -> Architecture:
    """Return the architecture of a decoder from the keys that most families have.

    Args:
        family: Name of the family.
        config: The ``config.json``.
        head: Head found in it.
        rotary: Rotations, or None for the one that the file describes.
        rotation: Number of the rotation of each block, or None for the first one in all.
        windows: Window of each block, or None for none.
        qkv_bias: Whether queries, keys and values have biases.
        head_size: Width of a head, or None for ``head_dim``.
        base: Base of the rotation if the file does not say.
        activation: Activation of the MLP, or None for ``hidden_act``.
        tied: Whether the head is the table of words if the file does not say.
        kv_heads: Number of heads of keys and values if the file does not say; None: that of queries.
        options: Other fields of ``DecoderOptions``.

    Raises:
        ModelError: A value is invalid or not supported.
    """
    heads = config.integer("num_attention_heads", 32)
    hidden, blocks = config.integer("hidden_size", 4096), config.integer("num_hidden_layers", 32)
    check_range("blocks", blocks, 1000)
    check_range("heads", heads, 1 << 12)
    if head_size is None:
        head_size = config.integer("head_dim", hidden // heads)
    check_range("head_dim", head_size, _MOST_HEAD)
    groups = config.integer("num_key_value_heads", heads if kv_heads is None else kv_heads)
    check_range("num_key_value_heads", groups, heads)
    if heads % groups:
        raise ModelError(f"{heads} attention heads are not a multiple of num_key_value_heads {groups}")
    activation = activation or config.text("hidden_act", "silu")
    if activation not in NATIVE_ACTIVATIONS:
        supported = ", ".join(NATIVE_ACTIVATIONS)
        raise ModelError(
            f"the activation {excerpt(repr(activation))} is not supported; supported are {supported}"
        )
    if rotary is None:
        rotary = (read_rotary(config, head_size, base=base),)
    vocab = config.integer("vocab_size", 32_000)
    options.setdefault("scale", head_size**-0.5)
    return Architecture(
        family=family,
        hidden=hidden,
        blocks=blocks,
        heads=heads,
        intermediate=config.integer("intermediate_size", 11_008),
        eps=config.number("rms_norm_eps", 1e-6),
        input=TextInput(vocab, config.integer("max_position_embeddings", 2048)),
        head=head.kind,
        activation=activation,
        qkv_bias=qkv_bias,
        num_labels=vocab,
        head_size=head_size,
        options=DecoderOptions(
            kv_heads=groups,
            rotary=tuple(rotary),
            rotation=(0,) * blocks if rotation is None else tuple(rotation),
            windows=(0,) * blocks if windows is None else tuple(windows),
            tied=config.flag("tie_word_embeddings", tied),
            **options,
        ),
    )


# Tensors ----------------------------------------------------------------------------------------------


def decoder_shapes(architecture: Architecture, _block: int) -> dict[str, Shape]:
    """Return the shapes of the stored tensors of a decoder: ends and a block."""
    options = architecture.own(DecoderOptions)
    hidden, inner, size = architecture.hidden, architecture.intermediate, architecture.width_of_head
    queries, keys = architecture.heads * size, options.kv_heads * size
    found: dict[str, Shape] = {"embeddings.word": (architecture.vocab, hidden)}
    if options.learned_positions:
        found["embeddings.position"] = (architecture.max_positions, hidden)
    for place, wanted in (("norm", ("before", "both")), ("end", ("after", "both"))):
        if options.norms in wanted:
            for number in (1, 2):
                found |= norm_shapes(f"block.{{n}}.{place}{number}", hidden, bias=options.layer_norm)
    bias = architecture.qkv_bias
    if options.fused:
        found |= linear_shapes("block.{n}.qkv", queries + 2 * keys, hidden, bias=bias)
    else:
        for name, outputs in (("q", queries), ("k", keys), ("v", keys)):
            found |= linear_shapes(f"block.{{n}}.{name}", outputs, hidden, bias=bias)
    if options.head_norm != "none":
        each = options.head_norm == "each"
        found["block.{n}.q_norm.weight"] = (size if each else queries,)
        found["block.{n}.k_norm.weight"] = (size if each else keys,)
    found |= linear_shapes("block.{n}.proj", hidden, queries, bias=options.proj_bias)
    if options.gated and options.fused:
        found |= linear_shapes("block.{n}.gate_up", 2 * inner, hidden, bias=options.mlp_bias)
    else:
        if options.gated:
            found |= linear_shapes("block.{n}.gate", inner, hidden, bias=options.mlp_bias)
        found |= linear_shapes("block.{n}.up", inner, hidden, bias=options.mlp_bias)
    found |= linear_shapes("block.{n}.down", hidden, inner, bias=options.mlp_bias)
    found |= norm_shapes("head.norm", hidden, bias=options.layer_norm)
    if not options.tied:
        found["head.scores.weight"] = (architecture.num_labels, hidden)
    return found


def decoder_names(*, norm2: str = "post_attention_layernorm", **others: str) -> Dialect:
    """Return the names of tensors in files of Llama and most others.

    Args:
        norm2: Name of the norm before the MLP.
        others: Names of other modules of a block.
    """
    block = {
        "norm1": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "proj": "self_attn.o_proj",
        "norm2": norm2,
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        **others,
    }
    return {
        **tensors({"embeddings.word": "embed_tokens.weight", "head.scores.weight": "lm_head.weight"}),
        **modules({f"block.{{n}}.{ours}": (f"layers.{{n}}.{theirs}",) for ours, theirs in block.items()}),
        **modules({"head.norm": ("norm",)}),
    }


def gguf_names(*, norm2: str = "ffn_norm", **others: str) -> Dialect:
    """Return the names of tensors in GGUF files.

    Args:
        norm2: Name of the norm before the MLP.
        others: Names of other modules of a block.
    """
    block = {
        "norm1": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "proj": "attn_output",
        "norm2": norm2,
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
        **others,
    }
    ends = {
        "embeddings.word": "token_embd.weight",
        "embeddings.position": "position_embd.weight",
        "head.scores.weight": "output.weight",
    }
    return {
        **tensors(ends),
        **modules({f"block.{{n}}.{ours}": (f"blk.{{n}}.{theirs}",) for ours, theirs in block.items()}),
        **modules({"head.norm": ("output_norm",)}),
    }
