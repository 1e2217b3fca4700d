"""Weights of small models in every format, under the names of several libraries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from dialects import Arrays, without_prefix
from models_oracle import Case, save
from safetensors.torch import load_file, save_file

from pipeedge.models import Model, find_model

IMAGE_OPTIONS = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "image_size": [8, 12],
    "patch_size": [4, 3],
    "num_channels": 2,
    "num_labels": 5,
}
BERT_OPTIONS = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "vocab_size": 30,
    "max_position_embeddings": 9,
    "type_vocab_size": 2,
    "num_labels": 3,
}

Saved = Callable[[str], tuple[Case, Model]]


def case(cls: str, **changes: object) -> Case:
    options = BERT_OPTIONS if cls.startswith("Bert") else IMAGE_OPTIONS
    lengths = (9, 4) if cls.startswith("Bert") else ()
    return Case(cls, tuple({**options, **changes}.items()), 7, 2, lengths)


def saved_in(make_directory: Callable[[str], Path]) -> Saved:
    """Return a function that saves a case of the named class as a Hugging Face directory, once."""

    @functools.cache
    def get(cls: str) -> tuple[Case, Model]:
        return case(cls), find_model(save(case(cls).model(), make_directory(cls)))

    return get


def on_disk(model: Model) -> Arrays:
    """Return the tensors of the file that transformers wrote, with names as on the hub."""
    assert model.directory is not None
    return {name: tensor.numpy() for name, tensor in load_file(model.directory / "model.safetensors").items()}


def as_timm(hub: Mapping[str, np.ndarray], blocks: int) -> Arrays:
    hub = without_prefix(hub)
    out = {
        "cls_token": hub["embeddings.cls_token"],
        "pos_embed": hub["embeddings.position_embeddings"],
    }
    if "embeddings.distillation_token" in hub:
        out["dist_token"] = hub["embeddings.distillation_token"]
    pairs = {
        "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "norm": "layernorm",
        "head": "cls_classifier" if "cls_classifier.weight" in hub else "classifier",
    }
    if "distillation_classifier.weight" in hub:
        pairs["head_dist"] = "distillation_classifier"
    for n in range(blocks):
        old, new = f"encoder.layer.{n}", f"blocks.{n}"
        pairs |= {
            f"{new}.norm1": f"{old}.layernorm_before",
            f"{new}.norm2": f"{old}.layernorm_after",
            f"{new}.attn.proj": f"{old}.attention.output.dense",
            f"{new}.mlp.fc1": f"{old}.intermediate.dense",
            f"{new}.mlp.fc2": f"{old}.output.dense",
        }
        for leaf in ("weight", "bias"):
            out[f"{new}.attn.qkv.{leaf}"] = np.concatenate(
                [hub[f"{old}.attention.attention.{part}.{leaf}"] for part in ("query", "key", "value")]
            )
    for new, old in pairs.items():
        for leaf in ("weight", "bias"):
            out[f"{new}.{leaf}"] = hub[f"{old}.{leaf}"]
    return out


def write_stored(path: Path, arrays: Arrays) -> Path:
    np.savez(path.with_suffix(".npz"), **arrays)
    return path.with_suffix(".npz")


def write_deflated(path: Path, arrays: Arrays) -> Path:
    np.savez_compressed(path.with_suffix(".npz"), **arrays)
    return path.with_suffix(".npz")


def write_safetensors(path: Path, arrays: Arrays) -> Path:
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    save_file(tensors, path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


WRITERS = [write_stored, write_deflated, write_safetensors]
