"""Typed access to the values of a Hugging Face ``config.json``.

The file is parsed as plain JSON: importing ``transformers`` to learn a dozen numbers would cost every rank
seconds of start-up and tens of megabytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeedge.base.errors import ModelError
from pipeedge.base.json_types import KindRules, ValueKind, check_types, is_kind, mismatch
from pipeedge.base.wording import count, excerpt

__all__ = ["HubConfig"]

_RULES: KindRules = (
    (re.compile(r"mscale|mscale_all_dim"), ValueKind.NUMBER),
    (re.compile(r"image_size|patch_size"), ValueKind.SIDES),
    (re.compile(r"\w+_size|(num|n)_\w+|\w+_groups|\w+_group_num|\w+_every_n_layers"), ValueKind.WHOLE),
    (re.compile(r"dim|\w+_dim|max_position_embeddings|local_attention|encoder_stride"), ValueKind.WHOLE),
    (re.compile(r"(pad|cls|sep|mask|unk)_token_id|intermediate_size"), ValueKind.WHOLE),
    (
        re.compile(r"\w+_eps|\w+_theta|\w*dropout(_prob)?|\w+_rate|\w+_ratio|layerscale_value"),
        ValueKind.NUMBER,
    ),
    (re.compile(r"initializer_\w+|logit_scale_init_value"), ValueKind.NUMBER),
    (re.compile(r"\w+_bias|(use|tie|apply)_\w+"), ValueKind.FLAG),
)
"""Kinds of the values that encoders have, by their keys."""
_SECTIONS = re.compile(r"\w+_config(_dict)?|rope_parameters|full_attention|sliding_attention")


@dataclass(frozen=True)
class HubConfig:
    """The contents of a ``config.json``. A missing value and ``null`` both stand for the default.

    Every method raises ModelError, with the key and the value, if the value is of another kind.
    """

    values: Mapping[str, Any]

    def check_types(self) -> None:
        """Check all values whose kind follows from their key, whether the family reads them or not."""
        try:
            check_types(self.values, _RULES, _SECTIONS)
        except ValueError as error:
            raise ModelError(str(error)) from None

    def _value(self, key: str, kind: ValueKind) -> Any:
        value = self.values.get(key)
        if value is not None and not is_kind(value, kind):
            raise ModelError(mismatch(key, value, kind))
        return value

    def integer(self, key: str, default: int) -> int:
        """Return a whole number."""
        value = self._value(key, ValueKind.WHOLE)
        return default if value is None else int(value)

    def number(self, key: str, default: float) -> float:
        """Return a number."""
        value = self._value(key, ValueKind.NUMBER)
        try:
            return default if value is None else float(value)
        except OverflowError:
            raise ModelError(mismatch(key, value, ValueKind.NUMBER)) from None

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._value(key, ValueKind.FLAG)
        return default if value is None else bool(value)

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        value = self._value(key, ValueKind.TEXT)
        return default if value is None else str(value)

    def pair(self, key: str, default: int) -> tuple[int, int]:
        """Return a size that is given as one number for a square, or as ``[height, width]``."""
        value = self._value(key, ValueKind.SIDES)
        if value is None:
            return default, default
        return (value, value) if isinstance(value, int) else (value[0], value[1])

    def square(self, key: str, default: int) -> tuple[int, int]:
        """Return a size whose height and width must be equal."""
        pair = self.pair(key, default)
        if pair[0] != pair[1]:
            raise ModelError(f"{key} is {list(pair)}; only squares are supported")
        return pair

    def block_sizes(
        self, *, hidden: int = 768, heads: int = 12, intermediate: int = 3072, activation: str = "gelu"
    ) -> dict[str, Any]:
        """Return the sizes of blocks by their names in ``Architecture``, read from the usual keys.

        Args:
            hidden: Width of the hidden state if the file does not say; the others alike.
            heads: Number of attention heads.
            intermediate: Width of the inner layer.
            activation: Activation of the inner layer.
        """
        return {
            "hidden": self.integer("hidden_size", hidden),
            "blocks": self.integer("num_hidden_layers", 12),
            "heads": self.integer("num_attention_heads", heads),
            "intermediate": self.integer("intermediate_size", intermediate),
            "eps": self.number("layer_norm_eps", 1e-12),
            "activation": self.text("hidden_act", activation),
        }

    def section(self, key: str) -> HubConfig:
        """Return a part of the file that is an object of its own, such as ``vision_config``."""
        value = self.values.get(key)
        if value is None:
            return HubConfig({})
        if not isinstance(value, Mapping):
            raise ModelError(f"{key} is {excerpt(repr(value))}; an object is needed")
        return HubConfig(value)

    def labels(self) -> tuple[str, ...] | None:
        """Return the names of the classes in order, or None if the file has none."""
        id2label = self.values.get("id2label")
        if id2label is None:
            return None
        try:
            by_index = {int(index): str(label) for index, label in id2label.items()}
        except (AttributeError, ValueError, RecursionError):
            raise ModelError("id2label does not map class numbers to names") from None
        if sorted(by_index) != list(range(len(by_index))):
            raise ModelError(f"id2label must number its {count(len(by_index), 'class')} from 0 without gaps")
        return tuple(by_index[index] for index in range(len(by_index)))

    def class_names(self) -> tuple[str, ...]:
        """Return the classes of transformers that the model was saved from; usually one, or none."""
        names = self.values.get("architectures") or []
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ModelError("architectures must be a list of class names")
        return tuple(names)

    def refuse(self, key: str, reason: str) -> None:
        """Raise ModelError if ``key`` is set, saying why it is not supported."""
        if self.values.get(key):
            raise ModelError(f"{key} is set: {reason}")
