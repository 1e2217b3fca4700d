"""Create small decoders of transformers with random weights and configurations, as references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from models_oracle import scramble

_SMALL = {
    "vocab_size": 83,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "rms_norm_eps": 1e-5,
}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **more}}


@dataclass(frozen=True)
class DecoderCase:
    """A class of transformers, and its configuration besides the small sizes."""

    cls: str
    options: Mapping[str, Any]

    def model(self, seed: int = 0) -> transformers.PreTrainedModel:
        cls = getattr(transformers, self.cls)
        sizes = {} if self.cls == "GPT2LMHeadModel" else _SMALL
        built = cls(cls.config_class(**{**sizes, **self.options}))
        scramble(built, seed)
        built.config._attn_implementation = "eager"
        return built.eval()

    def save(self, directory: Path, seed: int = 0, *, parts: bool = False) -> transformers.PreTrainedModel:
        """Write the model to a directory, in one file or in several, and return it."""
        model = self.model(seed)
        model.save_pretrained(directory, max_shard_size="20kB" if parts else "1GB")
        return model


CASES: Mapping[str, DecoderCase] = {
    "llama2": DecoderCase("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama3": DecoderCase(
        "LlamaForCausalLM",
        {
            "tie_word_embeddings": True,
            "head_dim": 12,
            **_rope(
                "llama3",
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        },
    ),
    "llama-linear": DecoderCase(
        "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, **_rope("linear", factor=3.0)}
    ),
    "llama-dynamic": DecoderCase("LlamaForCausalLM", _rope("dynamic", factor=2.0)),
    "llama-yarn": DecoderCase(
        "LlamaForCausalLM", _rope("yarn", factor=4.0, original_max_position_embeddings=64)
    ),
    "mistral": DecoderCase("MistralForCausalLM", {"sliding_window": 40}),
    "ministral": DecoderCase(
        "MinistralForCausalLM", {"head_dim": 8, "sliding_window": 37, "layer_types": _KINDS}
    ),
    "ministral3": DecoderCase(
        "Ministral3ForCausalLM",
        {
            "head_dim": 16,
            **_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.1,
            ),
        },
    ),
    "qwen2": DecoderCase("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-window": DecoderCase(
        "Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1}
    ),
    "qwen3": DecoderCase("Qwen3ForCausalLM", {"head_dim": 24}),
    "gemma": DecoderCase("GemmaForCausalLM", {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": DecoderCase(
        "Gemma2ForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 33,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": DecoderCase(
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 34,
            "layer_types": _KINDS,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "phi3": DecoderCase("Phi3ForCausalLM", {"sliding_window": 50}),
    "phi3-long": DecoderCase(
        "Phi3ForCausalLM",
        {
            "head_dim": 8,
            "original_max_position_embeddings": 256,
            "max_position_embeddings": 512,
            "partial_rotary_factor": 0.75,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0, 1.1, 1.3],
                "long_factor": [1.5, 2.0, 4.0],
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "olmo2": DecoderCase("Olmo2ForCausalLM", {}),
    "olmo3": DecoderCase("Olmo3ForCausalLM", {"sliding_window": 36, "layer_types": _KINDS}),
    "smollm3": DecoderCase("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "granite": DecoderCase(
        "GraniteForCausalLM",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
        },
    ),
    "gpt2": DecoderCase(
        "GPT2LMHeadModel",
        {
            "vocab_size": 83,
            "n_embd": 32,
            "n_inner": 44,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": 1,
            "eos_token_id": None,
        },
    ),
}
"""Cases by name: at least one for each family, and one for each way of scaling rotations."""


def greedy(model: transformers.PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """Return what transformers generates, one token after the other."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None
        )
    return found[0, len(prompt) :].tolist()
