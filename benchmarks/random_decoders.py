"""Decoders of public shapes with random weights: a Hugging Face directory, and a GGUF file for llama.cpp.

A GGUF file is a header, pairs of names and values, an index of tensors, and their data, each at a multiple of
32 bytes: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Ours has no vocabulary, which
``llama-bench`` does not need.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

__all__ = ["SHAPES", "DecoderShape", "write_directory", "write_gguf"]

_ALIGNMENT = 32
_UINT32, _FLOAT32, _STRING = 4, 6, 8
"""Types of values in a GGUF file."""
_F32_TENSOR = 0
_EPS, _ROTARY_BASE, _LONGEST = 1e-5, 500000.0, 8192


@dataclass(frozen=True)
class DecoderShape:
    """Dimensions of a decoder whose head is its table of words."""

    name: str
    kind: str
    """Model type, as both Hugging Face and GGUF call it; ``qwen2`` has biases of queries, keys and values."""
    blocks: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    head_width: int = 64

    @property
    def matrices(self) -> tuple[tuple[str, str, int, int], ...]:
        """Hugging Face's name, GGUF's, outputs and inputs of the matrices of a block."""
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        return (
            ("self_attn.q_proj", "attn_q", queries, self.hidden),
            ("self_attn.k_proj", "attn_k", keys, self.hidden),
            ("self_attn.v_proj", "attn_v", keys, self.hidden),
            ("self_attn.o_proj", "attn_output", self.hidden, queries),
            ("mlp.gate_proj", "ffn_gate", self.inner, self.hidden),
            ("mlp.up_proj", "ffn_up", self.inner, self.hidden),
            ("mlp.down_proj", "ffn_down", self.hidden, self.inner),
        )

    def tensors(self) -> Iterator[tuple[str, str, npt.NDArray[np.float32]]]:
        """Yield both names and the values of each tensor, the same in every call."""
        random = np.random.default_rng(0)

        def values(*shape: int) -> npt.NDArray[np.float32]:
            return random.standard_normal(shape, dtype=np.float32) * np.float32(0.02)

        ones = np.ones(self.hidden, np.float32)
        yield "model.embed_tokens.weight", "token_embd.weight", values(self.vocab, self.hidden)
        yield "model.norm.weight", "output_norm.weight", ones
        for block in range(self.blocks):
            ours, theirs = f"model.layers.{block}.", f"blk.{block}."
            yield ours + "input_layernorm.weight", theirs + "attn_norm.weight", ones
            yield ours + "post_attention_layernorm.weight", theirs + "ffn_norm.weight", ones
            for name, other, outputs, inputs in self.matrices:
                yield f"{ours}{name}.weight", f"{theirs}{other}.weight", values(outputs, inputs)
                if self.kind == "qwen2" and other in ("attn_q", "attn_k", "attn_v"):
                    yield f"{ours}{name}.bias", f"{theirs}{other}.bias", values(outputs)


SHAPES = {
    shape.name: shape
    for shape in (
        DecoderShape("qwen2.5-0.5b", "qwen2", 24, 896, 4864, 14, 2, 151936),
        DecoderShape("llama-3.2-1b", "llama", 16, 2048, 8192, 32, 8, 128256),
        DecoderShape("tinyllama-1.1b", "llama", 22, 2048, 5632, 32, 4, 32000),
        DecoderShape("smollm2-135m", "llama", 30, 576, 1536, 9, 3, 49152),
    )
}
"""Shapes by their names."""


def write_directory(shape: DecoderShape, directory: Path) -> None:
    """Write a configuration and weights in bfloat16, unless they are there."""
    if (directory / "config.json").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: torch.from_numpy(values).bfloat16() for name, _, values in shape.tensors()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": [{"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[shape.kind]],
        "model_type": shape.kind,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.blocks,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "vocab_size": shape.vocab,
        "max_position_embeddings": _LONGEST,
        "rms_norm_eps": _EPS,
        "rope_theta": _ROTARY_BASE,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _settings(shape: DecoderShape) -> bytes:
    numbers = {
        "block_count": shape.blocks,
        "context_length": _LONGEST,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.inner,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "rope.dimension_count": shape.head_width,
        "vocab_size": shape.vocab,
    }
    reals = {"attention.layer_norm_rms_epsilon": _EPS, "rope.freq_base": _ROTARY_BASE}
    texts = {"general.architecture": shape.kind, "tokenizer.ggml.model": "no_vocab"}
    pairs = [_text(name) + struct.pack("<I", _STRING) + _text(value) for name, value in texts.items()]
    for name, number in numbers.items():
        pairs.append(_text(f"{shape.kind}.{name}") + struct.pack("<II", _UINT32, number))
    for name, real in reals.items():
        pairs.append(_text(f"{shape.kind}.{name}") + struct.pack("<If", _FLOAT32, real))
    return struct.pack("<Q", len(pairs)) + b"".join(pairs)


def write_gguf(shape: DecoderShape, path: Path) -> None:
    """Write a GGUF file in float32, unless it is there."""
    if path.exists():
        return
    index, offset = [], 0
    for _, name, values in shape.tensors():
        sizes = values.shape[::-1]
        entry = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, _F32_TENSOR, offset)
        index.append(_text(name) + entry)
        offset += -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT
    settings = _settings(shape)
    head = b"GGUF" + struct.pack("<IQ", 3, len(index)) + settings + b"".join(index)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(head + bytes(-len(head) % _ALIGNMENT))
        for _, _, values in shape.tensors():
            file.write(values.tobytes() + bytes(-values.nbytes % _ALIGNMENT))
    part.rename(path)
