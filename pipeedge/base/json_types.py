"""Types of the values in JSON files that somebody else has written: numbers that are texts are mistakes.

Python takes ``true`` for 1 and programs convert ``"3"``, so a mistake would change a result without a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypeAlias

from pipeedge.base.wording import excerpt

__all__ = ["ValueKind", "KindRules", "check_types", "is_kind", "mismatch"]


class ValueKind(Enum):
    """ValueKind of a value."""

    WHOLE = "a whole number"
    NUMBER = "a number"
    FLAG = "true or false"
    TEXT = "a name"
    SIDES = "one whole number or [height, width]"


KindRules: TypeAlias = Sequence[tuple[re.Pattern[str], ValueKind]]
"""Kinds of values by their keys; the first pattern that matches all of a key counts."""


def is_kind(value: object, kind: ValueKind) -> bool:
    """Return whether a value is of a kind, without any conversion."""
    if kind is ValueKind.FLAG:
        return isinstance(value, bool)
    if kind is ValueKind.TEXT:
        return isinstance(value, str)
    if kind is ValueKind.SIDES and isinstance(value, list | tuple):
        return len(value) == 2 and all(is_kind(side, ValueKind.WHOLE) for side in value)
    accepted = (int, float) if kind is ValueKind.NUMBER else int
    return isinstance(value, accepted) and not isinstance(value, bool)


def mismatch(key: str, value: object, kind: ValueKind) -> str:
    """Return the line about a value of another kind."""
    return f"{key} is {excerpt(repr(value))}; {kind.value} is needed"


def check_types(document: Mapping[str, Any], rules: KindRules, sections: re.Pattern[str]) -> None:
    """Check all values of a document whose kind follows from their key; ``null`` stands for a default.

    Args:
        document: Contents of the file.
        rules: Kinds by key.
        sections: Pattern of the keys of objects that are checked too.

    Raises:
        ValueError: A value is of another kind. The message names it.
    """
    for key, value in document.items():
        if isinstance(value, Mapping) and sections.fullmatch(key):
            check_types(value, rules, sections)
            continue
        kind = next((kind for pattern, kind in rules if pattern.fullmatch(key)), None)
        if kind is not None and value is not None and not is_kind(value, kind):
            raise ValueError(mismatch(key, value, kind))
