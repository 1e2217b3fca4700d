"""Draw small models of the families of towers with random weights, as transformers computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from hypothesis import strategies as st
from models_oracle import ACTIVATIONS, scramble

Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class TowerCase:
    """A reference model and one microbatch."""

    cls: str
    config: transformers.PretrainedConfig
    seed: int
    inputs: Inputs
    """Inputs of the tower by name, in the order of our payload."""
    tower: str = ""
    """Tower that is named, of a model with two, or empty."""
    valid: torch.Tensor | None = field(default=None, compare=False)
    """Outputs to compare [N, T], if they are of every token and some are of padding."""

    def __repr__(self) -> str:
        shapes = {name: list(tensor.shape) for name, tensor in self.inputs.items()}
        return f"{self.cls}{self.tower} {self.config.to_diff_dict()} seed {self.seed} {shapes}"

    def model(self) -> transformers.PreTrainedModel:
        built = getattr(transformers, self.cls)(self.config)
        scramble(built, self.seed)
        with torch.no_grad():
            for name, parameter in built.named_parameters():
                if name.endswith("lambda1"):  # near 0 the blocks would hardly count
                    parameter.add_(1.0)
        built.set_attn_implementation("eager")
        return built.eval()

    def expected(self, model: transformers.PreTrainedModel) -> torch.Tensor:
        """Return the logits or the vector that transformers computes."""
        with torch.inference_mode():
            if self.cls in ("CLIPModel", "SiglipModel"):
                features = model.get_text_features if self.tower == "#text" else model.get_image_features
                return features(**self.inputs).pooler_output
            if self.cls.endswith("ForMaskedLM"):
                model = model.model
            output = model(**self.inputs)
        for name in ("logits", "image_embeds", "text_embeds", "pooler_output"):
            if name in output:
                return output[name]
        return output.last_hidden_state[:, 0]


def sizes(draw: st.DrawFn, *, even_heads: bool = False) -> dict[str, Any]:
    """Draw the sizes of blocks under the names that most configurations use."""
    heads = draw(st.integers(1, 3))
    widths = [4, 6, 8] if even_heads else [4, 5, 8]
    return {
        "hidden_size": heads * draw(st.sampled_from(widths)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "intermediate_size": draw(st.integers(3, 24)),
        "hidden_act": draw(st.sampled_from(ACTIVATIONS)),
        "layer_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-3])),
    }


def pixels(draw: st.DrawFn, channels: int, height: int, width: int, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed + 1)
    items = draw(st.integers(1, 3))
    return {"pixel_values": torch.randn(items, channels, height, width, generator=generator)}


def sentences(draw: st.DrawFn, vocab: int, tokens: int, seed: int, *, end: int | None = None) -> Inputs:
    """Draw token ids and a mask; some sentences are padded, and have token ``end`` last if it is given."""
    generator = torch.Generator().manual_seed(seed + 1)
    lengths = [draw(st.integers(1, tokens)) for _ in range(draw(st.integers(1, 3)))]
    longest = max(lengths)
    ids = torch.randint(vocab - 1, (len(lengths), longest), generator=generator)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    if end is not None:
        ids = torch.where(mask == 0, end, ids)  # CLIP pads with the token that ends a sentence
        for row, length in enumerate(lengths):
            ids[row, length - 1] = end
    return {"input_ids": ids, "attention_mask": mask}


def vision_config(draw: st.DrawFn) -> dict[str, Any]:
    patch = draw(st.integers(1, 4))
    # A remainder that fills no patch is left out by the convolution, here as there.
    side = patch * draw(st.integers(1, 3)) + draw(st.integers(0, patch - 1))
    return {**sizes(draw), "image_size": side, "patch_size": patch, "num_channels": draw(st.integers(1, 3))}


def text_config(draw: st.DrawFn, end: int) -> dict[str, Any]:
    vocab = draw(st.integers(4, 40))
    return {
        **sizes(draw),
        "vocab_size": vocab,
        "max_position_embeddings": draw(st.integers(1, 12)),
        "eos_token_id": end or vocab - 1,
        "bos_token_id": 0,
        "pad_token_id": 1,
    }


@st.composite
def vision_tower_cases(draw: st.DrawFn, prefix: str) -> TowerCase:
    """Draw vision towers of CLIP or SigLIP, alone or of a model with both."""
    own, seed = vision_config(draw), draw(st.integers(0, 999))
    names = {
        "CLIP": ["Model", "VisionModel", "VisionModelWithProjection", "ForImageClassification"],
        "Siglip": ["Model", "VisionModel", "ForImageClassification"],
    }
    cls = prefix + draw(st.sampled_from(names[prefix]))
    projection = draw(st.sampled_from([5, own["hidden_size"]]))
    if "Vision" in cls:
        config = getattr(transformers, f"{prefix}VisionConfig")(**own, projection_dim=projection)
    else:
        labels = draw(st.integers(1, 5))
        text = {**text_config(draw, 2), "num_hidden_layers": 1}
        config = getattr(transformers, f"{prefix}Config")(
            vision_config=own, text_config=text, projection_dim=projection, num_labels=labels
        )
    inputs = pixels(draw, own["num_channels"], own["image_size"], own["image_size"], seed)
    return TowerCase(cls, config, seed, inputs, draw(st.sampled_from(["", "#vision"])))


@st.composite
def text_tower_cases(draw: st.DrawFn, prefix: str) -> TowerCase:
    """Draw text towers of CLIP or SigLIP, alone or of a model with both."""
    seed, legacy = draw(st.integers(0, 999)), draw(st.booleans())
    own = text_config(draw, 2 if legacy and prefix == "CLIP" else 0)
    names = {"CLIP": ["Model", "TextModel", "TextModelWithProjection"], "Siglip": ["Model", "TextModel"]}
    cls = prefix + draw(st.sampled_from(names[prefix]))
    projection = draw(st.sampled_from([5, own["hidden_size"]]))
    if prefix == "Siglip":
        own["projection_size"] = projection
    if "Text" in cls:
        config = getattr(transformers, f"{prefix}TextConfig")(**own, projection_dim=projection)
    else:
        vision = {**vision_config(draw), "num_hidden_layers": 1}
        config = getattr(transformers, f"{prefix}Config")(
            vision_config=vision, text_config=own, projection_dim=projection
        )
    last = own["vocab_size"] - 1 if prefix == "CLIP" else None
    inputs = sentences(draw, own["vocab_size"], own["max_position_embeddings"], seed, end=last)
    return TowerCase(
        cls, config, seed, inputs, "#text" if cls.endswith("PModel") or cls == "SiglipModel" else ""
    )


@st.composite
def dinov2_cases(draw: st.DrawFn, prefix: str) -> TowerCase:
    """Draw DINOv2 with or without registers, and images of another size than the positions'."""
    seed, own = draw(st.integers(0, 999)), vision_config(draw)
    own.pop("intermediate_size")
    options = {
        **own,
        "mlp_ratio": draw(st.integers(1, 4)),
        "use_swiglu_ffn": draw(st.booleans()),
        "qkv_bias": draw(st.booleans()),
        "num_labels": draw(st.integers(1, 5)),
    }
    if prefix.endswith("Registers"):
        options["num_register_tokens"] = draw(st.integers(0, 4))
    cls = prefix + draw(st.sampled_from(["Model", "ForImageClassification"]))
    patch, side = own["patch_size"], own["image_size"]
    height, width = (draw(st.one_of(st.just(side), st.integers(patch, 4 * patch + 1))) for _ in range(2))
    inputs = pixels(draw, own["num_channels"], height, width, seed)
    return TowerCase(cls, getattr(transformers, f"{prefix}Config")(**options), seed, inputs)


@st.composite
def dinov3_cases(draw: st.DrawFn) -> TowerCase:
    """Draw DINOv3, with heads whose width is a multiple of 4, and images of any size."""
    seed, own = draw(st.integers(0, 999)), vision_config(draw)
    heads = own["num_attention_heads"]
    options = {
        **own,
        "hidden_size": heads * draw(st.sampled_from([4, 8])),
        "use_gated_mlp": draw(st.booleans()),
        "num_register_tokens": draw(st.integers(0, 4)),
        "rope_theta": draw(st.sampled_from([100.0, 10.0])),
    }
    patch = own["patch_size"]
    height, width = (draw(st.integers(patch, 4 * patch + 1)) for _ in range(2))
    inputs = pixels(draw, own["num_channels"], height, width, seed)
    return TowerCase("DINOv3ViTModel", transformers.DINOv3ViTConfig(**options), seed, inputs)


@st.composite
def modernbert_cases(draw: st.DrawFn) -> TowerCase:
    """Draw ModernBERT, with windows shorter than some sentences."""
    seed, own = draw(st.integers(0, 999)), sizes(draw, even_heads=True)
    vocab, blocks = draw(st.integers(4, 40)), own["num_hidden_layers"]
    kinds = st.sampled_from(["full_attention", "sliding_attention"])
    options = {
        **{name: own[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size")},
        "num_hidden_layers": blocks,
        "hidden_activation": own["hidden_act"],
        "norm_eps": own["layer_norm_eps"],
        "vocab_size": vocab,
        "max_position_embeddings": 24,
        "local_attention": draw(st.integers(2, 12)),
        "layer_types": draw(st.one_of(st.none(), st.lists(kinds, min_size=blocks, max_size=blocks))),
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": draw(st.sampled_from([160_000.0, 9.0]))},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        **{
            name: draw(st.booleans())
            for name in ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
        },
        "classifier_pooling": draw(st.sampled_from(["cls", "mean"])),
        "num_labels": draw(st.integers(1, 5)),
        **{f"{name}_token_id": 0 for name in ("pad", "eos", "bos", "cls", "sep")},
    }
    names = ["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"]
    cls = "ModernBert" + draw(st.sampled_from(names))
    inputs = sentences(draw, vocab, 24, seed)
    valid = inputs["attention_mask"].bool() if cls.endswith("TokenClassification") else None
    return TowerCase(cls, transformers.ModernBertConfig(**options), seed, inputs, valid=valid)


CASES: Mapping[str, Callable[[], st.SearchStrategy[TowerCase]]] = {
    "CLIP vision": lambda: vision_tower_cases("CLIP"),
    "CLIP text": lambda: text_tower_cases("CLIP"),
    "SigLIP vision": lambda: vision_tower_cases("Siglip"),
    "SigLIP text": lambda: text_tower_cases("Siglip"),
    "DINOv2": lambda: dinov2_cases("Dinov2"),
    "DINOv2 with registers": lambda: dinov2_cases("Dinov2WithRegisters"),
    "DINOv3": dinov3_cases,
    "ModernBERT": modernbert_cases,
}
