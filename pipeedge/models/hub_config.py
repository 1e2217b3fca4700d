"""Typed access to the values of a Hugging Face ``config.json``.

The file is parsed as plain JSON: importing ``transformers`` to learn a dozen numbers would cost every rank
seconds of start-up and tens of megabytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeedge.base.errors import ModelError
from pipeedge.base.wording import count, excerpt

__all__ = ["HubConfig"]


@dataclass(frozen=True)
class HubConfig:
    """The contents of a ``config.json``. A missing value and ``null`` both stand for the default.

    Every method raises ModelError, with the key and the value, if the value is of another kind.
    """

    values: Mapping[str, Any]

    def integer(self, key: str, default: int) -> int:
        """Return a whole number."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{key} is {excerpt(repr(value))}; a whole number is needed")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a number."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{key} is {excerpt(repr(value))}; a number is needed")
        try:
            return float(value)
        except OverflowError:
            raise ModelError(f"{key} is {excerpt(value)}; a number is needed") from None

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{key} is {excerpt(repr(value))}; true or false is needed")
        return value

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ModelError(f"{key} is {excerpt(repr(value))}; a name is needed")
        return value

    def pair(self, key: str, default: int) -> tuple[int, int]:
        """Return a size that is given as one number for a square, or as ``[height, width]``."""
        value = self.values.get(key)
        if value is None:
            return default, default
        pair = value if isinstance(value, (list, tuple)) else [value, value]
        if len(pair) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) for side in pair):
            raise ModelError(
                f"{key} is {excerpt(repr(value))}; one whole number or [height, width] is needed"
            )
        return pair[0], pair[1]

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
