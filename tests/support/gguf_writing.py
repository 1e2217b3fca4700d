"""Write GGUF files of transformers models as llama.cpp's converter does, to read them back."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import transformers

ALIGNMENT = 32
FORMS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "BF16": 30}
"""Forms that can be written, and their numbers."""
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_NORMS = {
    "gemma": {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
    "gemma2": {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "olmo2": {
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
_MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GPT2_MODULES = {
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    "transformer.ln_f.weight": "output_norm.weight",
    "transformer.ln_f.bias": "output_norm.bias",
}

Tensor = tuple[str, npt.NDArray[np.float32], str]
"""Name, values and form of a tensor."""


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> tuple[int, bytes]:
    """Return the type of a setting and its bytes."""
    if isinstance(value, bool):
        return _BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return _UINT32, struct.pack("<I", value)
    if isinstance(value, float):
        return _FLOAT32, struct.pack("<f", value)
    if isinstance(value, str):
        return _STRING, _text(value)
    parts = [_value(one) for one in value]
    kind = _INT32 if parts and parts[0][0] == _UINT32 else parts[0][0] if parts else _STRING
    return _ARRAY, struct.pack("<IQ", kind, len(parts)) + b"".join(part for _, part in parts)


def encoded(values: npt.NDArray[np.float32], form: str) -> bytes:
    """Return values in a form, with the rounding of llama.cpp."""
    if form == "F32":
        return values.astype("<f4").tobytes()
    if form == "F16":
        return values.astype("<f2").tobytes()
    if form == "BF16":
        bits = values.astype("<f4").view("<u4")
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    groups = values.reshape(-1, 32).astype(np.float32)
    if form == "Q8_0":
        scale = np.abs(groups).max(1) / np.float32(127)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
        codes = np.round(groups * inverse[:, None]).astype(np.int8).view(np.uint8)
        return np.concatenate([scale.astype("<f2").view(np.uint8).reshape(-1, 2), codes], 1).tobytes()
    largest = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)[:, 0]
    scale = largest / np.float32(-8)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    codes = np.clip(groups * inverse[:, None] + np.float32(8.5), 0, 15).astype(np.uint8)
    both = codes[:, :16] | codes[:, 16:] << 4
    return np.concatenate([scale.astype("<f2").view(np.uint8).reshape(-1, 2), both], 1).tobytes()


def write_gguf(path: Path, settings: Mapping[str, Any], tensors: Iterable[Tensor]) -> Path:
    """Write a GGUF file."""
    pairs = []
    for name, value in settings.items():
        kind, data = _value(value)
        pairs.append(_text(name) + struct.pack("<I", kind) + data)
    index, blobs, offset = [], [], 0
    for name, values, form in tensors:
        sizes = values.shape[::-1]
        entry = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, FORMS[form], offset)
        index.append(_text(name) + entry)
        blob = encoded(values, form)
        blobs.append(blob + bytes(-len(blob) % ALIGNMENT))
        offset += len(blobs[-1])
    head = b"GGUF" + struct.pack("<IQQ", 3, len(index), len(pairs)) + b"".join(pairs) + b"".join(index)
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + b"".join(blobs))
    return path


def model_settings(model: transformers.PreTrainedModel) -> dict[str, Any]:
    """Return the settings of a model, without a vocabulary."""
    config = model.config
    kind = {"gemma3_text": "gemma3", "olmo3": "olmo2", "mistral": "llama"}.get(
        config.model_type, config.model_type
    )
    if kind == "gpt2":
        own = {
            "block_count": config.n_layer,
            "context_length": config.n_positions,
            "embedding_length": config.n_embd,
            "feed_forward_length": config.n_inner or 4 * config.n_embd,
            "attention.head_count": config.n_head,
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    else:
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rope = config.rope_parameters
        everywhere = rope.get("full_attention", rope)
        own = {
            "block_count": config.num_hidden_layers,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.key_length": size,
            "attention.value_length": size,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "rope.freq_base": float(everywhere["rope_theta"]),
            "rope.dimension_count": int(size * everywhere.get("partial_rotary_factor", 1.0)),
            "vocab_size": config.vocab_size,
        }
        if everywhere.get("rope_type") in ("linear", "yarn"):
            own["rope.scaling.type"] = everywhere["rope_type"]
            own["rope.scaling.factor"] = float(everywhere["factor"])
            if everywhere["rope_type"] == "yarn":
                own["rope.scaling.original_context_length"] = everywhere["original_max_position_embeddings"]
        if getattr(config, "sliding_window", None) and kind in ("gemma2", "gemma3", "olmo2", "phi3"):
            own["attention.sliding_window"] = config.sliding_window
            if kind in ("gemma3", "olmo2"):
                own["attention.sliding_window_pattern"] = [
                    one == "sliding_attention" for one in config.layer_types
                ]
        if kind == "gemma2":
            own["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
            own["final_logit_softcapping"] = float(config.final_logit_softcapping)
        if kind == "granite":
            own |= {
                "attention.scale": config.attention_multiplier,
                "embedding_scale": config.embedding_multiplier,
                "residual_scale": config.residual_multiplier,
                "logit_scale": config.logits_scaling,
            }
    return {"general.architecture": kind, **{f"{kind}.{name}": value for name, value in own.items()}}


def model_tensors(model: transformers.PreTrainedModel, form: str = "F32") -> list[Tensor]:
    """Return the tensors of a model, matrices in ``form`` where their rows have whole groups."""
    config = model.config
    kind, found = config.model_type, list[Tensor]()
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name in _ENDS:
            theirs = _ENDS[name]
        else:
            parts = name.split(".")
            module = ".".join(parts[3:-1])
            names = _GPT2_MODULES if kind == "gpt2" else {**_MODULES, **_norms(kind)}
            theirs = f"blk.{parts[2]}.{names[module]}.{parts[-1]}"
            if kind == "gpt2" and values.ndim == 2:
                values = values.T
        if kind in ("llama", "granite", "smollm3", "mistral") and (
            ".attn_q." in theirs or ".attn_k." in theirs
        ):
            heads = config.num_attention_heads if ".attn_q." in theirs else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if kind.startswith("gemma") and theirs.endswith("norm.weight"):
            values = values + np.float32(1)
        own = (
            form
            if values.ndim == 2 and values.shape[1] % 32 == 0 and theirs != "position_embd.weight"
            else "F32"
        )
        found.append((theirs, np.ascontiguousarray(values), own))
    rope = {} if kind == "gpt2" else config.rope_parameters
    if rope.get("rope_type") == "llama3":
        found.append(("rope_freqs.weight", _llama3_divisors(rope, config.head_dim), "F32"))
    for length in ("short", "long"):
        if rope.get("rope_type") == "longrope":
            factors = np.array(rope[f"{length}_factor"], np.float32)
            found.append((f"rope_factors_{length}.weight", factors, "F32"))
    return found


def _norms(kind: str) -> Mapping[str, str]:
    if kind in ("gemma2", "gemma3_text"):
        return _NORMS["gemma2"]
    return _NORMS["olmo2" if kind.startswith("olmo") else "gemma"]


def _llama3_divisors(rope: Mapping[str, Any], size: int) -> npt.NDArray[np.float32]:
    """Return what the frequencies of Llama 3's rotation are divided by."""
    lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((original / lengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def save_gguf(
    model: transformers.PreTrainedModel,
    path: Path,
    form: str = "F32",
    vocabulary: Mapping[str, Any] | None = None,
    also: Sequence[Tensor] = (),
) -> Path:
    """Write a model to a GGUF file, with a vocabulary if one is given."""
    settings = model_settings(model) | dict(vocabulary or {"tokenizer.ggml.model": "no_vocab"})
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        kind, config = settings["general.architecture"], model.config
        original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        stretch = config.max_position_embeddings / original
        magnitude = 1.0 if stretch <= 1 else float(np.sqrt(1 + np.log(stretch) / np.log(original)))
        settings[f"{kind}.rope.scaling.original_context_length"] = original
        settings[f"{kind}.rope.scaling.attn_factor"] = magnitude
    return write_gguf(path, settings, [*model_tensors(model, form), *also])


def tokenizer_settings(tokenizer: transformers.PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the settings of a byte-level tokenizer and its chat template."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {one["id"]: one for one in backend["added_tokens"]}
    texts = [text for text, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": [3 if number in added else 1 for number in range(len(texts))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in backend["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
    }
    return found | ({"tokenizer.chat_template": tokenizer.chat_template} if tokenizer.chat_template else {})
