"""Names of parameters in weights files: one table for each naming dialect.

    block.3.qkv.weight      ours
    encoder.layer.3.attention.attention.{query,key,value}.weight       Hugging Face, on disk
    layers.3.attention.{q,k,v}_proj.weight                             Hugging Face, in memory
    Transformer/encoderblock_3/MultiHeadDotProductAttention_1/
        {query,key,value}/kernel                                       Google's .npz
    blocks.3.attn.qkv.weight                                           timm

A parameter consists of one or more file tensors, which are equal parts along its first dimension. Google's
arrays are laid out for ``x @ kernel``. A layout turns a parameter of ours into a *view* in the shape of the
file, so that reading is always a plain copy into a view, whose shape is the expected one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import torch

from pipeedge.models.architecture import LAYERS_PER_BLOCK, Architecture, FamilyName, HeadKind

__all__ = [
    "Dialect",
    "FileTensor",
    "Layout",
    "canonical_name",
    "dialects",
    "find_pooler",
    "hub_dialect",
    "prefixes",
    "qkv_bias",
    "stray_block",
]

Layout: TypeAlias = Callable[[torch.Tensor, int], torch.Tensor]
"""Function from a parameter, or a part of it, and the number of heads to a view in the shape of the file."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: its name, with ``{n}`` for the number of the block, and its layout."""

    name: str
    layout: Layout

    def numbered(self, block: str) -> FileTensor:
        """Return the file tensor with ``{n}`` replaced by ``block``."""
        return FileTensor(self.name.replace("{n}", block), self.layout)


Dialect: TypeAlias = Mapping[str, tuple[FileTensor, ...]]
"""Map from a parameter of ours, with ``{n}`` for the block, to the file tensors that make it up."""


# Layouts: views of a parameter ---------------------------------------------------------------------


def _same(tensor: torch.Tensor, _heads: int) -> torch.Tensor:
    return tensor


def _kernel(tensor: torch.Tensor, _heads: int) -> torch.Tensor:
    """View [out, in] as [in, out]."""
    return tensor.t()


def _kernel_to_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """View [out, in] as [in, heads, out / heads]."""
    return tensor.t().view(tensor.shape[1], heads, -1)


def _kernel_from_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """View [out, in] as [heads, in / heads, out]."""
    return tensor.t().view(heads, -1, tensor.shape[0])


def _bias_to_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """View [out] as [heads, out / heads]."""
    return tensor.view(heads, -1)


def _patch_kernel(tensor: torch.Tensor, _heads: int) -> torch.Tensor:
    """View [out, in, height, width] as [height, width, in, out]."""
    return tensor.permute(2, 3, 1, 0)


# Tables ---------------------------------------------------------------------------------------------


def _same_layout(modules: Mapping[str, Sequence[str]], weight: str = "weight", bias: str = "bias") -> Dialect:
    """Return the table of modules with a weight and a bias in PyTorch's layout."""
    table = {}
    for ours, theirs in modules.items():
        table[f"{ours}.weight"] = tuple(FileTensor(f"{name}.{weight}", _same) for name in theirs)
        table[f"{ours}.bias"] = tuple(FileTensor(f"{name}.{bias}", _same) for name in theirs)
    return table


def _tensors(names: Mapping[str, str]) -> Dialect:
    """Return the table of single tensors in PyTorch's layout."""
    return {ours: (FileTensor(theirs, _same),) for ours, theirs in names.items()}


_IMAGE_TOKENS = _tensors(
    {
        "embeddings.cls_token": "embeddings.cls_token",
        "embeddings.distillation_token": "embeddings.distillation_token",
        "embeddings.position": "embeddings.position_embeddings",
    }
)
_IMAGE_ENDS = {
    "embeddings.patch": ("embeddings.patch_embeddings.projection",),
    "head.norm": ("layernorm",),
    "head.pooler": ("pooler.dense",),
    "head.distillation_classifier": ("distillation_classifier",),
}

_IMAGE_HUB: Dialect = {
    **_IMAGE_TOKENS,
    **_same_layout(
        {
            **_IMAGE_ENDS,
            "block.{n}.norm1": ("encoder.layer.{n}.layernorm_before",),
            "block.{n}.qkv": tuple(
                f"encoder.layer.{{n}}.attention.attention.{part}" for part in ("query", "key", "value")
            ),
            "block.{n}.proj": ("encoder.layer.{n}.attention.output.dense",),
            "block.{n}.norm2": ("encoder.layer.{n}.layernorm_after",),
            "block.{n}.up": ("encoder.layer.{n}.intermediate.dense",),
            "block.{n}.down": ("encoder.layer.{n}.output.dense",),
        }
    ),
}
"""ViT and DeiT on the Hugging Face hub, and as transformers saves them."""

_IMAGE_MEMORY: Dialect = {
    **_IMAGE_TOKENS,
    **_same_layout(
        {
            **_IMAGE_ENDS,
            "block.{n}.norm1": ("layers.{n}.layernorm_before",),
            "block.{n}.qkv": tuple(f"layers.{{n}}.attention.{part}_proj" for part in ("q", "k", "v")),
            "block.{n}.proj": ("layers.{n}.attention.o_proj",),
            "block.{n}.norm2": ("layers.{n}.layernorm_after",),
            "block.{n}.up": ("layers.{n}.mlp.fc1",),
            "block.{n}.down": ("layers.{n}.mlp.fc2",),
        }
    ),
}
"""ViT and DeiT in a ``state_dict()`` of transformers 5."""

_TIMM: Dialect = {
    **_tensors(
        {
            "embeddings.cls_token": "cls_token",
            "embeddings.distillation_token": "dist_token",
            "embeddings.position": "pos_embed",
        }
    ),
    **_same_layout(
        {
            "embeddings.patch": ("patch_embed.proj",),
            "block.{n}.norm1": ("blocks.{n}.norm1",),
            "block.{n}.qkv": ("blocks.{n}.attn.qkv",),
            "block.{n}.proj": ("blocks.{n}.attn.proj",),
            "block.{n}.norm2": ("blocks.{n}.norm2",),
            "block.{n}.up": ("blocks.{n}.mlp.fc1",),
            "block.{n}.down": ("blocks.{n}.mlp.fc2",),
            "head.norm": ("norm",),
            "head.pooler": ("pre_logits.fc",),
            "head.classifier": ("head",),
            "head.distillation_classifier": ("head_dist",),
        }
    ),
}
"""timm's files, and Facebook's own DeiT files."""


def _google() -> Dialect:
    block = "Transformer/encoderblock_{n}"
    attention = f"{block}/MultiHeadDotProductAttention_1"
    table: dict[str, tuple[FileTensor, ...]] = {
        "embeddings.cls_token": (FileTensor("cls", _same),),
        "embeddings.position": (FileTensor("Transformer/posembed_input/pos_embedding", _same),),
        "embeddings.patch.weight": (FileTensor("embedding/kernel", _patch_kernel),),
        "embeddings.patch.bias": (FileTensor("embedding/bias", _same),),
        "block.{n}.qkv.weight": tuple(
            FileTensor(f"{attention}/{part}/kernel", _kernel_to_heads) for part in ("query", "key", "value")
        ),
        "block.{n}.qkv.bias": tuple(
            FileTensor(f"{attention}/{part}/bias", _bias_to_heads) for part in ("query", "key", "value")
        ),
        "block.{n}.proj.weight": (FileTensor(f"{attention}/out/kernel", _kernel_from_heads),),
        "block.{n}.proj.bias": (FileTensor(f"{attention}/out/bias", _same),),
    }
    for ours, theirs in {
        "block.{n}.norm1": f"{block}/LayerNorm_0",
        "block.{n}.norm2": f"{block}/LayerNorm_2",
        "head.norm": "Transformer/encoder_norm",
    }.items():
        table[f"{ours}.weight"] = (FileTensor(f"{theirs}/scale", _same),)
        table[f"{ours}.bias"] = (FileTensor(f"{theirs}/bias", _same),)
    for ours, theirs in {
        "block.{n}.up": f"{block}/MlpBlock_3/Dense_0",
        "block.{n}.down": f"{block}/MlpBlock_3/Dense_1",
        "head.pooler": "pre_logits",
        "head.classifier": "head",
    }.items():
        table[f"{ours}.weight"] = (FileTensor(f"{theirs}/kernel", _kernel),)
        table[f"{ours}.bias"] = (FileTensor(f"{theirs}/bias", _same),)
    return table


_GOOGLE = _google()
"""Google's ViT files, https://github.com/google-research/vision_transformer."""

_CLASSIFIER = _same_layout({"head.classifier": ("classifier",)})
_CLS_CLASSIFIER = _same_layout({"head.classifier": ("cls_classifier",)})

_BERT_NORMS = {
    "embeddings.norm": ("embeddings.LayerNorm",),
    "block.{n}.norm1": ("encoder.layer.{n}.attention.output.LayerNorm",),
    "block.{n}.norm2": ("encoder.layer.{n}.output.LayerNorm",),
}
_BERT: Dialect = {
    **_tensors(
        {
            "embeddings.word": "embeddings.word_embeddings.weight",
            "embeddings.position": "embeddings.position_embeddings.weight",
            "embeddings.token_type": "embeddings.token_type_embeddings.weight",
        }
    ),
    **_same_layout(
        {
            **_BERT_NORMS,
            "block.{n}.qkv": tuple(
                f"encoder.layer.{{n}}.attention.self.{part}" for part in ("query", "key", "value")
            ),
            "block.{n}.proj": ("encoder.layer.{n}.attention.output.dense",),
            "block.{n}.up": ("encoder.layer.{n}.intermediate.dense",),
            "block.{n}.down": ("encoder.layer.{n}.output.dense",),
            "head.pooler": ("pooler.dense",),
            "head.classifier": ("classifier",),
        }
    ),
}
_BERT_GAMMA: Dialect = {**_BERT, **_same_layout(_BERT_NORMS, weight="gamma", bias="beta")}
"""BERT checkpoints converted from TensorFlow, which keep its names for the norms."""

_DIALECTS: Mapping[tuple[FamilyName, bool], tuple[Dialect, ...]] = MappingProxyType(
    {
        # Family, and whether it is distilled. The first dialect is the one we write.
        ("vit", False): ({**_IMAGE_HUB, **_CLASSIFIER}, {**_IMAGE_MEMORY, **_CLASSIFIER}, _GOOGLE, _TIMM),
        ("deit", False): ({**_IMAGE_HUB, **_CLASSIFIER}, {**_IMAGE_MEMORY, **_CLASSIFIER}, _TIMM),
        ("deit", True): (
            {**_IMAGE_HUB, **_CLS_CLASSIFIER},
            {**_IMAGE_MEMORY, **_CLS_CLASSIFIER},
            _TIMM,
        ),
        ("bert", False): (_BERT, _BERT_GAMMA),
    }
)


def dialects(architecture: Architecture) -> tuple[Dialect, ...]:
    """Return the naming dialects in which a file of this architecture may be written."""
    return _DIALECTS[architecture.family, architecture.head == "distilled"]


def hub_dialect(architecture: Architecture) -> Dialect:
    """Return the dialect of the Hugging Face hub, which is also the one we write."""
    return dialects(architecture)[0]


def prefixes(family: FamilyName) -> tuple[str, ...]:
    """Return the possible prefixes of tensor names: Hugging Face adds the family to all but the heads."""
    return "", f"{family}."


def canonical_name(parameter: str) -> tuple[str, str]:
    """Return the table key and block number of a shard's parameter, such as ``parts.5.proj.weight``.

    Returns:
        ``("block.{n}.proj.weight", "1")``, or the name itself and an empty number outside blocks.
    """
    if not parameter.startswith("parts."):
        return parameter, ""
    _, layer, rest = parameter.split(".", 2)
    return f"block.{{n}}.{rest}", str(int(layer) // LAYERS_PER_BLOCK)


def find_pooler(names: Collection[str], family: FamilyName, head: HeadKind) -> str | None:
    """Return the name of the pooler's bias in a file, or None if there is none that this head uses.

    The hub's image classifiers use the first token directly, even if their file contains a pooler left over
    from pre-training. In Google's and timm's files, ``pre_logits`` does precede the classifier.
    """
    candidates = ["pre_logits/bias", "pre_logits.fc.bias"] if family != "bert" else []
    if head == "vector" or family == "bert":
        candidates += [f"{prefix}pooler.dense.bias" for prefix in prefixes(family)]
    return next((name for name in candidates if name in names), None)


def stray_block(architecture: Architecture, names: Collection[str]) -> str | None:
    """Return a tensor of a block beyond the last, as in a file of a deeper model, or None."""
    return _first_of(architecture, names, str(architecture.blocks), lambda key: "{n}" in key)


def qkv_bias(architecture: Architecture, names: Collection[str]) -> str | None:
    """Return the name of a bias of queries, keys or values of the first block in a file, or None."""
    return _first_of(architecture, names, "0", lambda key: key == "block.{n}.qkv.bias")


def _first_of(
    architecture: Architecture, names: Collection[str], block: str, wanted: Callable[[str], bool]
) -> str | None:
    """Return the first tensor of ``block`` in a file whose parameter is ``wanted``, or None."""
    for dialect in dialects(architecture):
        for key, tensors in dialect.items():
            if wanted(key):
                for tensor in tensors:
                    for prefix in prefixes(architecture.family):
                        name = prefix + tensor.numbered(block).name
                        if name in names:
                            return name
    return None
