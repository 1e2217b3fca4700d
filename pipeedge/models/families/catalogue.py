"""All families, and how the family of a ``config.json`` is recognised."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pipeedge.base.errors import ModelError
from pipeedge.base.wording import excerpt
from pipeedge.models.architecture import Architecture
from pipeedge.models.families.albert import ALBERT
from pipeedge.models.families.bert import BERT
from pipeedge.models.families.clip import CLIP_TEXT, CLIP_VISION
from pipeedge.models.families.deit import DEIT
from pipeedge.models.families.dinov2 import DINOV2, DINOV2_REGISTERS
from pipeedge.models.families.dinov3 import DINOV3
from pipeedge.models.families.distilbert import DISTILBERT
from pipeedge.models.families.electra import ELECTRA
from pipeedge.models.families.gemma import GEMMA
from pipeedge.models.families.gpt2 import GPT2
from pipeedge.models.families.granite import GRANITE
from pipeedge.models.families.llama import LLAMA
from pipeedge.models.families.modernbert import MODERNBERT
from pipeedge.models.families.mpnet import MPNET
from pipeedge.models.families.olmo2 import OLMO2
from pipeedge.models.families.phi3 import PHI3
from pipeedge.models.families.qwen import QWEN
from pipeedge.models.families.roberta import ROBERTA
from pipeedge.models.families.siglip import SIGLIP_TEXT, SIGLIP_VISION
from pipeedge.models.families.smollm3 import SMOLLM3
from pipeedge.models.families.vit import VIT
from pipeedge.models.family import Family, Head, ModelClass
from pipeedge.models.hub_config import HubConfig

__all__ = ["FAMILIES", "MODEL_TYPES", "TOWERS", "family_of", "hf_config", "parse_hf_config"]

FAMILIES: tuple[Family, ...] = (
    *(VIT, DEIT, DINOV2, DINOV2_REGISTERS, DINOV3, CLIP_VISION, SIGLIP_VISION),
    *(BERT, ROBERTA, DISTILBERT, MPNET, ALBERT, ELECTRA, MODERNBERT, CLIP_TEXT, SIGLIP_TEXT),
    *(LLAMA, QWEN, GEMMA, PHI3, OLMO2, SMOLLM3, GRANITE, GPT2),
)
MODEL_TYPES: tuple[str, ...] = tuple(
    dict.fromkeys(kind for family in FAMILIES for kind in family.model_types)
)
"""Every supported ``model_type``."""
TOWERS: tuple[str, ...] = tuple(dict.fromkeys(family.tower for family in FAMILIES if family.tower))
"""Names of the models that a checkpoint may contain two of."""
_DEFAULT_LABELS = 2
"""Number of classes that Hugging Face implies by a ``config.json`` without ``id2label``."""
_REFUSED: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {
        "a mixture of experts": re.compile(r"moe|mixtral|gpt_oss|dbrx|deepseek_v|llama4|jetmoe|arctic"),
        "a model with recurrent layers": re.compile(
            r"mamba|recurrent|rwkv|jamba|zamba|bamba|falcon_h1|qwen3_next|qwen3_5|lfm2|hybrid|xlstm"
        ),
        "a model with a vision or audio tower": re.compile(
            r"^gemma3n?$|^gemma4|mistral3$|_vl|llava|mllama|idefics|paligemma|pixtral|_omni|multimodal|_audio"
        ),
    }
)
"""Kinds of models that generate text and are not supported, with the ``model_type`` of such."""
_LIKE = 0.6
"""Least similarity, from 0 to 1, at which a supported ``model_type`` is suggested for another."""


def family_of(architecture: Architecture) -> Family:
    """Return the family of an architecture."""
    return next(family for family in FAMILIES if family.name == architecture.family)


def parse_hf_config(
    config: Mapping[str, Any], *, tensor_names: Collection[str] = (), tower: str | None = None
) -> tuple[Architecture, tuple[str, ...] | None]:
    """Return the architecture and the label names defined by a ``config.json``.

    Args:
        config: Contents of the file.
        tensor_names: Names of the tensors stored next to it, which reveal the head if ``architectures`` is
            missing.
        tower: ``vision`` or ``text``, of a checkpoint that contains two models; None: the first of them.

    Raises:
        ModelError: A model type, class or option is not supported, or a value is invalid.
    """
    document = HubConfig(config)
    document.check_types()
    candidates = _families_of_type(config.get("model_type"), tower)
    _refuse_common(document)
    family, found = _recognised(document, candidates, tensor_names)
    labels = document.labels()
    number = len(labels) if labels is not None else document.integer("num_labels", _DEFAULT_LABELS)
    # Hugging Face replaces a head without classes by an identity.
    kind = "vector" if found.head == "classifier" and number == 0 else found.head
    head = Head(kind, found.pooler, number if kind != "vector" else 0)
    named = labels is not None and any(label != f"LABEL_{n}" for n, label in enumerate(labels))
    return family.read(document, head), labels if named and kind != "vector" else None


def hf_config(architecture: Architecture, labels: Sequence[str] | None) -> dict[str, Any]:
    """Return the content of a ``config.json`` for an image classifier; ``parse_hf_config`` reads it back."""
    family = family_of(architecture)
    (cls, *_) = (name for name, kind in family.classes.items() if kind.head == architecture.head)
    names = labels or [f"LABEL_{number}" for number in range(architecture.num_labels)]
    return {
        "architectures": [cls],
        "model_type": family.model_types[0],
        "hidden_size": architecture.hidden,
        "num_hidden_layers": architecture.blocks,
        "num_attention_heads": architecture.heads,
        "intermediate_size": architecture.intermediate,
        "layer_norm_eps": architecture.eps,
        "hidden_act": architecture.activation,
        "qkv_bias": architecture.qkv_bias,
        "image_size": list(architecture.image_size),
        "patch_size": list(architecture.image.patch_size),
        "num_channels": architecture.channels,
        "id2label": {str(number): name for number, name in enumerate(names)},
    }


def _families_of_type(model_type: object, tower: str | None) -> tuple[Family, ...]:
    """Return the families that a ``model_type`` may mean: several where only the class tells them apart.

    Raises:
        ModelError: There is none. The message names the nearest supported type.
    """
    found = tuple(family for family in FAMILIES if model_type in family.model_types)
    of_tower = tuple(family for family in found if tower in (None, family.tower))
    if of_tower:
        return of_tower
    if found:
        raise ModelError(f"model_type {excerpt(repr(model_type))} has no {tower} tower: leave out #{tower}")
    shown, supported = excerpt(repr(model_type)), ", ".join(MODEL_TYPES)
    for kind, pattern in _REFUSED.items():
        if isinstance(model_type, str) and pattern.search(model_type):
            raise ModelError(
                f"model_type {shown} is {kind}, which is not supported; supported are {supported}"
            )
    near = difflib.get_close_matches(shown.strip("'"), MODEL_TYPES, n=1, cutoff=_LIKE)
    hint = f"the nearest supported one is {near[0]!r}; " if near else ""
    raise ModelError(f"model_type {shown} is not supported; {hint}supported are {supported}")


def _refuse_common(config: HubConfig) -> None:
    """Raise ModelError for options, common to many families, that are not implemented here."""
    config.refuse("is_decoder", "only encoders are supported")
    config.refuse("is_encoder_decoder", "only encoders are supported")
    config.refuse("add_cross_attention", "cross-attention is not supported")
    position = config.values.get("position_embedding_type") or "absolute"
    if position != "absolute":
        raise ModelError(f"position_embedding_type {excerpt(repr(position))} is not supported; 'absolute' is")
    config.refuse("pruned_heads", "models with pruned heads are not supported")
    config.refuse("quantization_config", "quantised checkpoints are not supported")


def _recognised(
    config: HubConfig, candidates: Sequence[Family], tensor_names: Collection[str]
) -> tuple[Family, ModelClass]:
    """Return the family and the class, by name, or by the tensors of the file if the class is not named."""
    names = config.class_names()
    for name in names:
        for family in candidates:
            if name in family.classes:
                return family, family.classes[name]
    if names:
        strangers = [name for name in names for family in FAMILIES if name in family.classes]
        if strangers:
            kind = config.values["model_type"]
            raise ModelError(f"the architecture {strangers[0]} does not belong to model_type {kind!r}")
        supported = ", ".join(name for family in candidates for name in family.classes)
        raise ModelError(
            f"the architecture {excerpt(names[0], 80)} is not supported; supported are {supported}"
        )
    classes = [(family, kind) for family in candidates for kind in family.classes.values()]
    for family, kind in classes:
        if kind.sign is not None and kind.sign in tensor_names:
            return family, kind
    return next((family, kind) for family, kind in classes if kind.head == "vector")
