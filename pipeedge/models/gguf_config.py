"""The configuration of a decoder in a GGUF file, in the words of a Hugging Face ``config.json``.

llama.cpp names settings after the architecture: ``llama.block_count``. What it takes for granted of an
architecture, such as the scale of Gemma's attention, is stated here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pipeedge.base.errors import ModelError
from pipeedge.base.wording import excerpt
from pipeedge.models.weights.gguf_header import GgufHeader, Texts

__all__ = ["ARCHITECTURES", "config_of", "end_tokens"]

_WORDS = "token_embd.weight"
_DEFAULT_BASE = 10_000.0
_ROTATED_LATER = "rope_freqs.weight"
"""Divisors of the frequencies of Llama 3's rotations."""
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>")
)
"""Tokens that end an answer in files that do not say so."""
_CONTROL = 3
"""Type of tokens that are no text."""


@dataclass(frozen=True)
class _Settings:
    """Settings of one architecture, by their names without it.

    Every method raises ModelError if a value is missing or of another kind.
    """

    header: GgufHeader
    architecture: str

    def find(self, name: str) -> object:
        return self.header.settings.get(f"{self.architecture}.{name}")

    def count(self, name: str, default: int | None = None) -> int:
        value = self.find(name)
        if value is None and default is not None:
            return default
        if isinstance(value, tuple) and len(set(value)) == 1:  # one for each block
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.find(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(name, value, "a number")
        return float(value)

    def text(self, name: str, default: str) -> str:
        value = self.find(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, value, "a text")
        return default if value is None else value

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def _wrong(self, name: str, value: object, kind: str) -> ModelError:
        setting = f"{self.architecture}.{name}"
        if value is None:
            return ModelError(f"it has no setting {setting}")
        return ModelError(f"{setting} is {excerpt(repr(value))}; {kind} is needed")


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Return the content of the ``config.json`` of the model in a GGUF file.

    Raises:
        ModelError: It is of another architecture, has no settings, or is a part of a model.
    """
    name = header.settings.get("general.architecture")
    reader = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if not isinstance(name, str) or reader is None:
        supported = ", ".join(ARCHITECTURES)
        raise ModelError(
            f"the architecture {excerpt(repr(name))} is not supported; supported are {supported}"
        )
    parts = header.settings.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ModelError(
            f"it is one of {parts} parts of a model; join them first: llama-gguf-split --merge FIRST OUT.gguf"
        )
    settings = _Settings(header, name)
    if settings.count("expert_count", 0):
        raise ModelError("it is a mixture of experts, which is not supported")
    if not settings.has(_WORDS):
        raise ModelError(f"it has no tensor {_WORDS}")
    return reader(settings)


def end_tokens(header: GgufHeader) -> tuple[int, ...]:
    """Return the tokens that end an answer."""
    found = {header.settings.get(f"tokenizer.ggml.{name}") for name in _ENDS}
    kinds, texts = (header.settings.get(f"tokenizer.ggml.{name}") for name in ("token_type", "tokens"))
    if isinstance(kinds, tuple) and isinstance(texts, Texts):
        pairs = enumerate(zip(kinds, texts, strict=False))
        found |= {number for number, (kind, text) in pairs if kind == _CONTROL and text in _END_TEXTS}
    words = header.tensors[_WORDS].shape[0]
    return tuple(sorted(one for one in found if isinstance(one, int) and 0 <= one < words))


def _common(settings: _Settings, model_type: str, cls: str) -> dict[str, Any]:
    """Return what most architectures have."""
    heads, hidden = settings.count("attention.head_count"), settings.count("embedding_length")
    width = hidden // heads if heads > 0 else 0
    size = settings.count("attention.key_length", settings.count("rope.dimension_count", width))
    if settings.count("attention.value_length", size) != size:
        raise ModelError("its values are of another width than its keys, which is not supported")
    return {
        "model_type": model_type,
        "architectures": [cls],
        "hidden_size": hidden,
        "num_hidden_layers": settings.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.count("attention.head_count_kv", heads),
        "head_dim": size,
        "intermediate_size": settings.count("feed_forward_length"),
        "max_position_embeddings": settings.count("context_length"),
        "vocab_size": settings.header.tensors[_WORDS].shape[0],
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rotation(settings, size),
        "tie_word_embeddings": not settings.has("output.weight"),
        "attention_bias": settings.has("blk.0.attn_q.bias"),
        "mlp_bias": settings.has("blk.0.ffn_down.bias"),
    }


def _rotation(settings: _Settings, head_size: int) -> dict[str, Any]:
    """Return the rotary parameters."""
    found: dict[str, Any] = {"rope_theta": settings.number("rope.freq_base", _DEFAULT_BASE)}
    rotated = settings.count("rope.dimension_count", head_size)
    if rotated != head_size:
        found["partial_rotary_factor"] = rotated / head_size
    divisors = settings.header.floats(_ROTATED_LATER)
    if divisors is not None:
        return found | _divided(divisors, divisors, settings.count("context_length"), 1.0)
    long = settings.header.floats("rope_factors_long.weight")
    short = settings.header.floats("rope_factors_short.weight")
    if long is not None and short is not None:
        original = settings.count("rope.scaling.original_context_length", settings.count("context_length"))
        return found | _divided(short, long, original, settings.number("rope.scaling.attn_factor", 1.0))
    kind = settings.text("rope.scaling.type", "none")
    factor = settings.number("rope.scaling.factor", settings.number("rope.scale_linear", 1.0))
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return found | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        found |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": settings.count("rope.scaling.original_context_length"),
        }
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if settings.find(f"rope.scaling.{theirs}") is not None:
                found[ours] = settings.number(f"rope.scaling.{theirs}")
        return found
    if kind not in ("none", "longrope"):
        raise ModelError(f"the rotary scaling {excerpt(repr(kind))} is not supported")
    return found


def _divided(
    short: tuple[float, ...], long: tuple[float, ...], original: int, magnitude: float
) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": list(short),
        "long_factor": list(long),
        "original_max_position_embeddings": original,
        "attention_factor": magnitude,
    }


def _windows(settings: _Settings, period: int) -> dict[str, Any]:
    """Return the window of attention, and which blocks have it: all but every ``period``-th one."""
    window, blocks = settings.count("attention.sliding_window", 0), settings.count("block_count")
    pattern = settings.find("attention.sliding_window_pattern")
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        period, pattern = pattern, None
    if isinstance(pattern, tuple) and len(pattern) == blocks:
        limited = [bool(one) for one in pattern]
    else:
        limited = [bool((block + 1) % period) for block in range(blocks)]
    kinds = ["sliding_attention" if window and one else "full_attention" for one in limited]
    return {"sliding_window": window or None, "layer_types": kinds}


def _both_rotations(settings: _Settings, config: Mapping[str, Any], nearby: float) -> dict[str, Any]:
    """Return rotary parameters of which only those of attention to everything are scaled."""
    base = settings.number("rope.freq_base_swa", nearby)
    return {"full_attention": config["rope_parameters"], "sliding_attention": {"rope_theta": base}}


def _llama(settings: _Settings) -> dict[str, Any]:
    return _common(settings, "llama", "LlamaForCausalLM")


def _qwen2(settings: _Settings) -> dict[str, Any]:
    return _common(settings, "qwen2", "Qwen2ForCausalLM")


def _qwen3(settings: _Settings) -> dict[str, Any]:
    return _common(settings, "qwen3", "Qwen3ForCausalLM")


def _smollm3(settings: _Settings) -> dict[str, Any]:
    return _common(settings, "smollm3", "SmolLM3ForCausalLM") | {"no_rope_layer_interval": 4}


def _granite(settings: _Settings) -> dict[str, Any]:
    config = _common(settings, "granite", "GraniteForCausalLM")
    size = config["head_dim"]
    return config | {
        "attention_multiplier": settings.number("attention.scale", size**-0.5 if size > 0 else 1.0),
        "embedding_multiplier": settings.number("embedding_scale", 1.0),
        "residual_multiplier": settings.number("residual_scale", 1.0),
        "logits_scaling": settings.number("logit_scale", 1.0),
    }


def _olmo2(settings: _Settings) -> dict[str, Any]:
    if not settings.count("attention.sliding_window", 0):
        return _common(settings, "olmo2", "Olmo2ForCausalLM")
    config = _common(settings, "olmo3", "Olmo3ForCausalLM")
    base = config["rope_parameters"]["rope_theta"]
    return config | _windows(settings, 4) | {"rope_parameters": _both_rotations(settings, config, base)}


def _phi3(settings: _Settings) -> dict[str, Any]:
    config = _common(settings, "phi3", "Phi3ForCausalLM")
    original = config["rope_parameters"].get("original_max_position_embeddings")
    return config | {
        "head_dim": config["hidden_size"] // max(config["num_attention_heads"], 1),
        "sliding_window": settings.count("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original or config["max_position_embeddings"],
    }


def _gemma(settings: _Settings) -> dict[str, Any]:
    return _common(settings, "gemma", "GemmaForCausalLM") | {"hidden_act": "gelu_pytorch_tanh"}


def _gemma_scale(config: Mapping[str, Any], largest: int) -> int:
    """Return what the scale of attention is the inverse root of: another number in the largest model."""
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma2(settings: _Settings) -> dict[str, Any]:
    config = _common(settings, "gemma2", "Gemma2ForCausalLM")
    return config | {
        "query_pre_attn_scalar": _gemma_scale(config, 46),
        "attn_logit_softcapping": settings.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": settings.number("final_logit_softcapping", 30.0),
        **_windows(settings, 2),
    }


def _gemma3(settings: _Settings) -> dict[str, Any]:
    config = _common(settings, "gemma3_text", "Gemma3ForCausalLM")
    return config | {
        "query_pre_attn_scalar": _gemma_scale(config, 62),
        "final_logit_softcapping": settings.number("final_logit_softcapping", 0.0),
        **_windows(settings, 6),
        "rope_parameters": _both_rotations(settings, config, _DEFAULT_BASE),
    }


def _gpt2(settings: _Settings) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": settings.count("embedding_length"),
        "n_layer": settings.count("block_count"),
        "n_head": settings.count("attention.head_count"),
        "n_inner": settings.count("feed_forward_length"),
        "n_positions": settings.count("context_length"),
        "vocab_size": settings.header.tensors[_WORDS].shape[0],
        "layer_norm_epsilon": settings.number("attention.layer_norm_epsilon"),
        "tie_word_embeddings": not settings.has("output.weight"),
    }


ARCHITECTURES: Mapping[str, Callable[[_Settings], dict[str, Any]]] = MappingProxyType(
    {
        "llama": _llama,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        "gemma": _gemma,
        "gemma2": _gemma2,
        "gemma3": _gemma3,
        "phi3": _phi3,
        "olmo2": _olmo2,
        "smollm3": _smollm3,
        "granite": _granite,
        "gpt2": _gpt2,
    }
)
"""Readers of configurations by the architectures of files."""
