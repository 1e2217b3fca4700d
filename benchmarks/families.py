#!/usr/bin/env python3
"""Compare public models at full width with transformers, and the speed of families with their relatives.

    python benchmarks/families.py                      # all models, two cuts each
    python benchmarks/families.py --only MiniLM,clip   # those whose names contain one of these
    python benchmarks/families.py --speed              # a block of each family against that of its relative

The sizes of public models are below; their weights are random, so nothing is fetched. Each is computed by
transformers, then by stages that end at two cuts; the largest difference is printed, and the processor time
of both for a microbatch of two, after a pass that warms up. With
``--speed``, blocks of equal sizes are timed alternately in processor time, so that other programs disturb
little, and the ratio of the medians is printed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from pipeedge.base.schedule import LayerRange
from pipeedge.models import Model, find_model
from pipeedge.models.dtypes import find_dtype

TOLERANCE = 1e-5
"""Largest difference from transformers, as a share of the largest output if that is above 1."""
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
SMALL = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 1536}
XLM = {"vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
ROBERTA = {**XLM, "vocab_size": 50265}


@dataclass(frozen=True)
class PublicModel:
    """A public model: class of transformers, and the sizes that its configuration gives."""

    cls: str
    sizes: Mapping[str, Any]
    tower: str = ""
    tokens: int = 48
    """Length of a sentence in tokens, if the model has as many positions."""

    def config(self) -> transformers.PretrainedConfig:
        """Return its configuration."""
        return getattr(transformers, self.cls).config_class(**self.sizes)


def _image(sizes: Mapping[str, Any], side: int, patch: int) -> dict[str, Any]:
    return {**sizes, "image_size": side, "patch_size": patch}


def _without_inner(sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sizes.items() if name != "intermediate_size"}


VISION_SMALL = {**SMALL, "num_attention_heads": 6}
MODELS: Mapping[str, PublicModel] = {
    "sentence-transformers/all-MiniLM-L6-v2": PublicModel(
        "BertModel", {**SMALL, "num_hidden_layers": 6, "vocab_size": 30522}
    ),
    "cross-encoder/ms-marco-MiniLM-L6-v2": PublicModel(
        "BertForSequenceClassification",
        {**SMALL, "num_hidden_layers": 6, "vocab_size": 30522, "num_labels": 1},
    ),
    "BAAI/bge-small-en-v1.5": PublicModel("BertModel", {**SMALL, "vocab_size": 30522}),
    "BAAI/bge-base-en-v1.5, intfloat/e5-base-v2, thenlper/gte-base": PublicModel(
        "BertModel", {**BASE, "vocab_size": 30522}
    ),
    "intfloat/e5-large-v2": PublicModel("BertModel", {**LARGE, "vocab_size": 30522}),
    "FacebookAI/roberta-base": PublicModel("RobertaModel", {**BASE, **ROBERTA}),
    "FacebookAI/roberta-large": PublicModel("RobertaModel", {**LARGE, **ROBERTA}),
    "FacebookAI/xlm-roberta-base, intfloat/multilingual-e5-base": PublicModel(
        "XLMRobertaModel", {**BASE, **XLM}
    ),
    "BAAI/bge-reranker-base": PublicModel(
        "XLMRobertaForSequenceClassification", {**BASE, **XLM, "num_labels": 1}
    ),
    "almanach/camembert-base": PublicModel(
        "CamembertModel", {**BASE, **XLM, "vocab_size": 32005, "pad_token_id": 1}
    ),
    "distilbert/distilbert-base-uncased": PublicModel("DistilBertModel", {}),
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": PublicModel(
        "DistilBertForSequenceClassification", {"num_labels": 2}
    ),
    "sentence-transformers/all-mpnet-base-v2": PublicModel(
        "MPNetModel", {**BASE, "vocab_size": 30527, "max_position_embeddings": 514, "layer_norm_eps": 1e-5}
    ),
    "albert/albert-base-v2": PublicModel("AlbertModel", {**BASE, "hidden_act": "gelu_new"}),
    "google/electra-base-discriminator": PublicModel("ElectraModel", {**BASE, "embedding_size": 768}),
    "answerdotai/ModernBERT-base": PublicModel("ModernBertModel", {}, tokens=300),
    "openai/clip-vit-base-patch32": PublicModel("CLIPModel", {"projection_dim": 512}),
    "openai/clip-vit-base-patch32 (text)": PublicModel("CLIPModel", {"projection_dim": 512}, "#text"),
    "google/siglip-base-patch16-224": PublicModel("SiglipVisionModel", _image(BASE, 224, 16)),
    "google/siglip-base-patch16-224 (text)": PublicModel("SiglipTextModel", {**BASE, "vocab_size": 32000}),
    "facebook/dinov2-small": PublicModel("Dinov2Model", _image(_without_inner(VISION_SMALL), 518, 14)),
    "facebook/dinov2-base": PublicModel("Dinov2Model", _image(_without_inner(BASE), 518, 14)),
    "facebook/dinov2-with-registers-base": PublicModel(
        "Dinov2WithRegistersModel", _image(_without_inner(BASE), 518, 14)
    ),
    "facebook/dinov2-giant (4 of 40 blocks)": PublicModel(
        "Dinov2Model",
        {
            **_image({"hidden_size": 1536, "num_attention_heads": 24, "num_hidden_layers": 4}, 518, 14),
            "use_swiglu_ffn": True,
        },
    ),
    "facebook/dinov3-vits16-pretrain-lvd1689m": PublicModel(
        "DINOv3ViTModel", {**_image(VISION_SMALL, 224, 16), "num_register_tokens": 4}
    ),
}
"""Public models by name. Sizes that are not given are those that transformers takes by default."""
Result = TypeVar("Result")
PROCESSED = 224
"""Height and width that the image processors of DINOv2 give images, in pixels."""


def inputs_of(model: Model, public: PublicModel) -> dict[str, torch.Tensor]:
    """Return a microbatch of two items: noise, or token ids with padding in the second sentence."""
    generator = torch.Generator().manual_seed(0)
    if not model.takes_text:
        return {"pixel_values": torch.randn(2, 3, *model.config.image_size, generator=generator)}
    tokens = min(public.tokens, model.max_tokens)
    ids = torch.randint(5, model.config.vocab - 1, (2, tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, tokens // 2 :] = 0
    named = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    return {name: named[name] for name in model.input_names}


def expected(reference: Any, public: PublicModel, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the output that transformers computes."""
    if public.cls == "CLIPModel":
        features = reference.get_text_features if public.tower else reference.get_image_features
        result: torch.Tensor = features(**inputs).pooler_output
        return result
    output = reference(**inputs)
    for name in ("logits", "pooler_output"):
        if output.get(name) is not None:
            return output[name]
    return output.last_hidden_state[:, 0]


def randomise(reference: torch.nn.Module) -> None:
    """Set factors of channels near 1; transformers leaves some so small that blocks would hardly count."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("lambda1"):
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))


@dataclass(frozen=True)
class Comparison:
    """Results of one model."""

    model: Model
    largest: float
    """Largest difference from transformers."""
    scale: float
    """Largest output, or 1 if all are smaller."""
    seconds: float
    """Processor time of all layers for a microbatch."""
    reference_s: float
    """Processor time of transformers."""


def compared(public: PublicModel, directory: Path) -> Comparison:
    """Compare stages that end at two cuts with transformers."""
    torch.manual_seed(0)
    reference = getattr(transformers, public.cls)(public.config()).eval()
    randomise(reference)
    reference.save_pretrained(directory)
    if "Dinov2" in public.cls:
        size = {"height": PROCESSED, "width": PROCESSED}
        text = f'{{"do_center_crop": true, "crop_size": {size}}}'.replace("'", '"')
        (directory / "preprocessor_config.json").write_text(text)
    model = find_model(f"{directory}{public.tower}")
    inputs = inputs_of(model, public)
    with torch.inference_mode():
        wanted, reference_s = timed(partial(expected, reference, public, inputs))
        del reference
        gc.collect()
        worst, seconds = 0.0, []
        for cut in (model.n_layers // 3, 2 * model.n_layers // 3 + 1):
            payload: tuple[torch.Tensor, ...] = tuple(inputs.values())
            total = 0.0
            for start, stop in pairwise((0, cut, model.n_layers)):
                stage = partial(model.load(LayerRange(start, stop)), payload)
                payload, stage_s = timed(stage)
                total += stage_s
            worst = max(worst, float((payload[0] - wanted).abs().max()))
            seconds.append(total)
    return Comparison(model, worst, max(1.0, float(wanted.abs().max())), min(seconds), reference_s)


def timed(compute: Callable[[], Result]) -> tuple[Result, float]:
    """Return a result and the processor time of computing it again."""
    compute()
    began = time.process_time()
    result = compute()
    return result, time.process_time() - began


def chosen(name: str, only: tuple[str, ...]) -> bool:
    """Return whether ``name`` contains one of ``only``, or there are none."""
    return not only or any(part.casefold() in name.casefold() for part in only)


def compare_all(only: tuple[str, ...]) -> bool:
    """Print a line for each model; return whether all are within the tolerance."""
    print("| model | family | weights, million | largest difference | ms | transformers, ms |")
    print("|---|---|---|---|---|---|")
    good = True
    for name, public in MODELS.items():
        if not chosen(name, only):
            continue
        with tempfile.TemporaryDirectory() as directory:
            found = compared(public, Path(directory))
        good &= found.largest <= TOLERANCE * found.scale
        family, count = found.model.config.family, found.model.parameter_count() / 1e6
        times = f"{1e3 * found.seconds:.0f} | {1e3 * found.reference_s:.0f}"
        print(f"| {name} | {family} | {count:.1f} | {found.largest:.1e} | {times} |", flush=True)
    return good


# Speed of a block ------------------------------------------------------------------------------------

_BLOCK = {**BASE, "num_hidden_layers": 2}
_TEXT_BLOCK = {**_BLOCK, "vocab_size": 1000}
RELATIVES: Mapping[str, tuple[PublicModel, PublicModel]] = {
    "RoBERTa / BERT": (PublicModel("RobertaModel", _TEXT_BLOCK), PublicModel("BertModel", _TEXT_BLOCK)),
    "MPNet / BERT": (PublicModel("MPNetModel", _TEXT_BLOCK), PublicModel("BertModel", _TEXT_BLOCK)),
    "ALBERT / BERT": (PublicModel("AlbertModel", _TEXT_BLOCK), PublicModel("BertModel", _TEXT_BLOCK)),
    "CLIP / ViT": (
        PublicModel("CLIPVisionModel", {**_image(_BLOCK, 224, 16), "hidden_act": "gelu"}),
        PublicModel("ViTModel", _image(_BLOCK, 224, 16)),
    ),
    "SigLIP / ViT": (
        PublicModel("SiglipVisionModel", {**_image(_BLOCK, 224, 16), "hidden_act": "gelu"}),
        PublicModel("ViTModel", _image(_BLOCK, 224, 16)),
    ),
    "DINOv2 / ViT": (
        PublicModel("Dinov2Model", _image(_without_inner(_BLOCK), 224, 16)),
        PublicModel("ViTModel", _image(_BLOCK, 224, 16)),
    ),
    "DINOv3 / ViT": (
        PublicModel("DINOv3ViTModel", _image(_BLOCK, 224, 16)),
        PublicModel("ViTModel", _image(_BLOCK, 224, 16)),
    ),
    "ModernBERT / BERT": (
        PublicModel("ModernBertModel", {**_TEXT_BLOCK, "intermediate_size": 2048, "pad_token_id": 0}),
        PublicModel("BertModel", _TEXT_BLOCK),
    ),
}
"""Families with blocks of equal sizes; a gated MLP of two thirds the width does the same work."""
ITEMS, LENGTH, ROUNDS = 8, 128, 15
SPEED_DTYPES = ("float32", "bfloat16", "int8")


def block_of(public: PublicModel, dtype: torch.dtype) -> Callable[[], object]:
    """Return a function that computes as much as one block, without embeddings and head."""
    ids = {f"{name}_token_id": 0 for name in ("eos", "bos", "cls", "sep")}
    config = public.config()
    for name, value in ids.items() if "ModernBert" in public.cls else ():
        setattr(config, name, value)
    with tempfile.TemporaryDirectory() as directory:
        getattr(transformers, public.cls)(config).save_pretrained(directory)
        model = find_model(directory)
        shard = model.random(LayerRange(3, 7), dtype=dtype)
    specs = model.payload_specs(3, ITEMS, min(LENGTH, model.max_tokens), dtype)
    generator = torch.Generator().manual_seed(0)
    payload = tuple(
        torch.randn(spec.shape, generator=generator).to(spec.dtype)
        if spec.dtype.is_floating_point
        else torch.ones(spec.shape, dtype=spec.dtype)
        for spec in specs
    )
    return lambda: shard(payload)


def speed(public: PublicModel, relative: PublicModel, dtype: torch.dtype) -> float:
    """Return how many times as fast as that of ``relative`` the block is, measured alternately."""
    blocks = [block_of(each, dtype) for each in (public, relative)]
    seconds: tuple[list[float], list[float]] = ([], [])
    with torch.inference_mode():
        for round_number in range(ROUNDS + 2):
            for compute, times in zip(blocks, seconds, strict=True):
                began = time.process_time()
                compute()
                if round_number >= 2:  # the first ones warm up
                    times.append(time.process_time() - began)
    mine, theirs = map(statistics.median, seconds)
    return theirs / mine


def compare_speed(only: tuple[str, ...]) -> None:
    """Print a line for each pair of families."""
    print(f"| block | {' | '.join(SPEED_DTYPES)} |\n|---|{'---|' * len(SPEED_DTYPES)}")
    for name, (public, relative) in RELATIVES.items():
        if not chosen(name, only):
            continue
        found = [f"{speed(public, relative, find_dtype(dtype)):.2f}" for dtype in SPEED_DTYPES]
        print(f"| {name} | {' | '.join(found)} |", flush=True)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    parser.add_argument("--speed", action="store_true", help="time blocks instead")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (%(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    only = tuple(filter(None, args.only.split(",")))
    if args.speed:
        compare_speed(only)
        return 0
    return 0 if compare_all(only) else 1


if __name__ == "__main__":
    sys.exit(main())
