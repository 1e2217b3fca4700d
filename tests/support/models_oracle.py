"""Create small transformers models with random weights and configurations, as a reference for shards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from hypothesis import strategies as st

ACTIVATIONS = ["gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "relu", "silu", "gelu_10"]
IMAGE_CLASSES = {
    "vit": ["ViTForImageClassification", "ViTModel"],
    "deit": ["DeiTForImageClassificationWithTeacher", "DeiTForImageClassification", "DeiTModel"],
}
TEXT_CLASSES = {
    "bert": (["Bert"], ["ForPreTraining"]),
    "roberta": (["Roberta", "XLMRoberta", "Camembert"], []),
    "distilbert": (["DistilBert"], []),
    "mpnet": (["MPNet"], []),
    "albert": (["Albert"], ["ForPreTraining"]),
    "electra": (["Electra"], ["ForPreTraining"]),
}
"""Beginnings of the names of each family's classes, and ends besides those that all have."""
TEXT_HEADS = ["ForSequenceClassification", "ForTokenClassification", "Model", "ForMaskedLM"]


@dataclass(frozen=True)
class Case:
    """A reference model: class, configuration, seed of the weights, and one microbatch."""

    cls: str
    options: tuple[tuple[str, Any], ...]
    seed: int
    items: int
    lengths: tuple[int, ...] = ()
    """Number of tokens of each sentence without padding; none for images."""
    pads: bool = False
    """Whether masked tokens have the id of padding, rather than any."""

    def model(self) -> transformers.PreTrainedModel:
        cls = getattr(transformers, self.cls)
        built = cls(cls.config_class(**dict(self.options)))
        scramble(built, self.seed)
        built.config._attn_implementation = "eager"
        return built.eval()

    def inputs(self) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        options = dict(self.options)
        if "image_size" in options:
            shape = (self.items, options["num_channels"], *options["image_size"])
            return (torch.randn(shape, generator=generator),)
        tokens = max(1, *self.lengths)
        shape = (self.items, tokens)
        ids = torch.randint(options["vocab_size"], shape, generator=generator)
        kinds = options.get("type_vocab_size", 0)
        mask = (torch.arange(tokens) < torch.tensor(self.lengths)[:, None]).long()
        if self.pads:
            ids = torch.where(mask == 1, ids, options["pad_token_id"])
        if kinds < 2:
            return ids, mask
        return ids, mask, torch.randint(kinds, shape, generator=generator)


def scramble(model: torch.nn.Module, seed: int) -> None:
    """Set weights that keep activations of order one, with no parameter at its neutral value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name.lower():
                parameter.copy_(0.1 * noise + (1.0 if name.endswith("weight") else 0.0))
            elif parameter.dim() < 2:
                parameter.copy_(0.1 * noise)
            elif name.endswith(("mapping_in.weight", "embeddings_project.weight")):
                parameter.copy_(noise / math.sqrt(parameter[0].numel()))
            elif "embedding" in name or "token" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise / math.sqrt(parameter[0].numel()))


def reference_output(model: transformers.PreTrainedModel, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the logits, the pooled vector, or the final first token, as computed by transformers."""
    names = ("pixel_values",) if len(inputs) == 1 else ("input_ids", "attention_mask", "token_type_ids")
    with torch.inference_mode():
        if type(model).__name__.endswith(("ForMaskedLM", "ForPreTraining")):
            model = model.base_model  # the encoder is what is compared
        output = model(**dict(zip(names, inputs, strict=False)))
    if "logits" in output:
        return output.logits
    if output.get("pooler_output") is not None:
        return output.pooler_output
    return output.last_hidden_state[:, 0]


def save(model: transformers.PreTrainedModel, directory: Path) -> Path:
    """Write the model as a Hugging Face directory."""
    model.save_pretrained(directory)
    return directory


@st.composite
def image_cases(draw: st.DrawFn, family: str) -> Case:
    heads = draw(st.integers(1, 3))
    patch = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    # A remainder that fills no patch is left out by the convolution, here as there.
    size = tuple(side * draw(st.integers(1, 3)) + draw(st.integers(0, side - 1)) for side in patch)
    hidden = heads * draw(st.sampled_from([4, 5, 8]))
    cls = draw(st.sampled_from(IMAGE_CLASSES[family]))
    options: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "intermediate_size": draw(st.integers(3, 24)),
        "hidden_act": draw(st.sampled_from(ACTIVATIONS)),
        "layer_norm_eps": draw(st.sampled_from([1e-12, 1e-6, 1e-3])),
        "image_size": list(size),
        "patch_size": list(patch),
        "num_channels": draw(st.integers(1, 3)),
        "qkv_bias": draw(st.booleans()),
        "num_labels": draw(st.integers(1, 5)),
    }
    if cls.endswith("Model"):
        options["pooler_output_size"] = draw(st.sampled_from([hidden, 7]))
        options["pooler_act"] = draw(st.sampled_from(["tanh", "relu"]))
    return Case(cls, tuple(options.items()), draw(st.integers(0, 999)), draw(st.integers(1, 3)))


@st.composite
def text_cases(draw: st.DrawFn, family: str = "bert") -> Case:
    heads = draw(st.integers(1, 3))
    items = draw(st.integers(1, 4))
    positions = draw(st.integers(1, 12))
    padding = {"roberta": draw(st.integers(0, 3)), "mpnet": 1}.get(family)
    blocks = draw(st.integers(1, 3))
    options: dict[str, Any] = {
        "hidden_size": heads * draw(st.sampled_from([4, 5, 8])),
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "intermediate_size": draw(st.integers(3, 24)),
        "hidden_act": draw(st.sampled_from(ACTIVATIONS)),
        "layer_norm_eps": draw(st.sampled_from([1e-12, 1e-6, 1e-3])),
        "vocab_size": draw(st.integers(5, 40)),
        # Rows up to that of padding belong to no position.
        "max_position_embeddings": positions if padding is None else positions + padding + 1,
        "type_vocab_size": draw(st.integers(1, 3)),
        "num_labels": draw(st.integers(1, 5)),
        "pad_token_id": padding or 0,
    }
    if family in ("distilbert", "mpnet"):
        del options["type_vocab_size"]
    if family == "distilbert":
        options["activation"] = options.pop("hidden_act")
        options["hidden_dim"] = options.pop("intermediate_size")
        del options["layer_norm_eps"]
    if family == "electra":
        options["embedding_size"] = draw(st.sampled_from([options["hidden_size"], 3, 10]))
    if family == "albert":
        options["embedding_size"] = draw(st.integers(2, 12))
        options["num_hidden_groups"] = draw(st.integers(1, blocks))
    names, more = TEXT_CLASSES[family]
    # A length of 0 is a row of padding only, which must not turn into NaN.
    lengths = tuple(draw(st.integers(0, positions)) for _ in range(items))
    return Case(
        draw(st.sampled_from(names)) + draw(st.sampled_from(TEXT_HEADS + more)),
        tuple(options.items()),
        draw(st.integers(0, 999)),
        items,
        lengths,
        draw(st.booleans()),
    )
