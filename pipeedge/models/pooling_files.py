"""Pooling of sentences, as the directories of sentence-transformers describe them.

    modules.json        Transformer ──> Pooling ──> Dense, any number ──> Normalize, or not
    1_Pooling/config.json               which tokens make the vector
    2_Dense/config.json                 a linear layer and an activation, its weights beside it

https://arxiv.org/abs/1908.10084 introduced them. Positions of padding take no part.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeedge.base.errors import ModelError
from pipeedge.base.json_file import read_json
from pipeedge.base.json_types import KindRules, ValueKind, check_types
from pipeedge.base.wording import excerpt
from pipeedge.models.architecture import Architecture
from pipeedge.models.pooling import DenseModule, Pooling

__all__ = ["read_pooling", "with_pooling"]

MODULES_FILE = "modules.json"

_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        # In the order in which vectors of several modes are joined.
        "pooling_mode_cls_token": "cls",
        "pooling_mode_max_tokens": "max",
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
        "pooling_mode_weightedmean_tokens": "weightedmean",
        "pooling_mode_lasttoken": "lasttoken",
    }
)
_MODES = tuple(_FLAGS.values())
_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "Identity": "linear",
        "Tanh": "tanh",
        "ReLU": "relu",
        "GELU": "gelu",
        "SiLU": "silu",
        "Sigmoid": "sigmoid",
    }
)
_WIDEST = 1 << 16
_RULES: KindRules = (
    (re.compile(r"\w*embedding_dimension|in_features|out_features"), ValueKind.WHOLE),
    (re.compile(r"pooling_mode_\w+|bias|include_prompt"), ValueKind.FLAG),
)
_NO_SECTIONS = re.compile(r"(?!)")


def with_pooling(architecture: Architecture, directory: Path) -> Architecture:
    """Return an encoder with the pooling that its directory's ``modules.json`` describes, if there is one.

    Raises:
        ModelError: A module is not supported, a file is malformed, or the model does not encode text.
    """
    pooling = read_pooling(directory, architecture.hidden)
    if pooling is None:
        return architecture
    if not architecture.takes_text:
        raise ModelError(f"{directory / MODULES_FILE} pools sentences, but {architecture.family} has none")
    return dataclasses.replace(architecture, pooler=False, pooler_size=0, pooling=pooling)


def read_pooling(directory: Path, hidden: int) -> Pooling | None:
    """Read what ``modules.json`` says of the vectors of a model, or return None if there is none.

    Args:
        directory: Model directory.
        hidden: Width of the model's hidden states.

    Raises:
        ModelError: A module is not supported, or a file is missing or malformed.
    """
    path = directory / MODULES_FILE
    if not path.exists():
        return None
    modules = read_json(path, list, ModelError)
    try:
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        paths = [str(module["path"]) for module in modules]
    except (TypeError, KeyError):
        raise ModelError(f"{path}: each module needs a type and a path") from None
    if any(Path(name).name != name for name in paths):
        raise ModelError(f"{path}: the path of a module must be the name of a directory beside it, or empty")
    unknown = next(
        (kind for kind in kinds if kind not in ("Transformer", "Pooling", "Dense", "Normalize")), None
    )
    if unknown is not None:
        raise ModelError(
            f"{path}: the module {excerpt(unknown)} is not supported; supported are Transformer, Pooling, "
            "Dense and Normalize"
        )
    dense_count = kinds.count("Dense")
    normalize = "Normalize" in kinds
    if kinds != ["Transformer", "Pooling", *["Dense"] * dense_count, *["Normalize"] * normalize]:
        raise ModelError(
            f"{path}: the modules are {', '.join(kinds)}; supported are Transformer, Pooling, then Dense "
            "layers, then Normalize"
        )
    if paths[0]:
        raise ModelError(
            f"{path}: the transformer is in {excerpt(paths[0])}; give that directory's files here"
        )
    modes = _modes(directory / paths[1] / "config.json", hidden)
    width, dense = len(modes) * hidden, []
    for name in paths[2 : 2 + dense_count]:
        dense.append(_dense(directory, name, width))
        width = dense[-1].outputs
    return Pooling(modes, tuple(dense), normalize)


def _modes(path: Path, hidden: int) -> tuple[str, ...]:
    config = _checked(path)
    width = config.get("word_embedding_dimension", config.get("embedding_dimension", hidden))
    if width != hidden:
        raise ModelError(f"{path}: pools vectors of {excerpt(width)} values, the model's have {hidden}")
    if config.get("include_prompt") is False:
        raise ModelError(f"{path}: include_prompt is false: leaving out the prompt is not supported")
    named = config.get("pooling_mode")
    if named is not None:
        modes = tuple(named) if isinstance(named, list) else (named,)
    else:
        wanted = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
        unknown = next((key for key in wanted if key not in _FLAGS), None)
        if unknown is not None:
            raise ModelError(
                f"{path}: {excerpt(unknown)} is not supported; supported are {', '.join(_FLAGS)}"
            )
        modes = tuple(mode for key, mode in _FLAGS.items() if key in wanted)
    wrong = next((mode for mode in modes if mode not in _MODES), None)
    if wrong is not None or not modes:
        shown = "no pooling mode" if wrong is None else f"the pooling mode {excerpt(repr(wrong))}"
        raise ModelError(f"{path}: {shown} is not supported; supported are {', '.join(_MODES)}")
    return modes


def _checked(path: Path) -> Mapping[str, Any]:
    """Read the configuration of a module, whose numbers and flags must be that."""
    config: dict[str, Any] = read_json(path, dict, ModelError)
    try:
        check_types(config, _RULES, _NO_SECTIONS)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None
    return config


def _dense(directory: Path, name: str, width: int) -> DenseModule:
    path = directory / name / "config.json"
    config = _checked(path)
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        raise ModelError(
            f"{path}: the activation {excerpt(activation)} is not supported; supported are {supported}"
        )
    inputs, outputs = config.get("in_features"), config.get("out_features")
    if inputs != width:
        raise ModelError(f"{path}: takes vectors of {excerpt(inputs)} values, but gets {width}")
    if outputs is None or not 1 <= outputs <= _WIDEST:
        raise ModelError(f"{path}: out_features is {excerpt(outputs)}; it must be 1 to {_WIDEST}")
    return DenseModule(name, outputs, config.get("bias", True) is not False, _ACTIVATIONS[activation])
