"""True classes of items: the labels of a file, as class numbers of the model.

    7, 7.0, "7"              the number of a class
    "NEGATIVE", "LABEL_1"    the name of a class; LABEL_1 stands for class 1 if the model has no names
    -1, "", null             not known, as data sets mark labels that are withheld

Anything else is refused: counted as a wrong answer, it would spoil the accuracy without a word.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeedge.base.wording import excerpt, hint, printable
from pipeedge.models.outline import Outline

__all__ = ["MAX_LABEL", "NO_CLASSES", "Classes"]

MAX_LABEL = 2**31 - 1
"""Largest label of a model without classes."""
_NUMBER = re.compile(r"-?[0-9]{1,12}(\.0*)?")  # a table made by pandas has 1.0 in a column with gaps
_UNNAMED = re.compile(r"LABEL_([0-9]{1,9})")
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class Classes:
    """The classes that a model chooses from, and what labels call them.

    A model that does not choose (it gives a vector, a single number, or a class for each token) has none. Its
    whole labels are kept for the results, and others are not known.
    """

    model: str = ""
    """Name of the model, for messages."""
    count: int = 0
    """Number of classes; 0 if the model does not choose."""
    names: Sequence[str] = field(default=())
    """Names of the classes, if the model defines them."""

    @classmethod
    def of(cls, model: Outline) -> Classes:
        """Return the classes of ``model``."""
        count = model.config.num_labels
        if model.output_kind != "logits" or count < 2:
            return cls(model.name)
        return cls(model.name, count, tuple(model.labels or ())[:count])

    def read(self, label: object, *, is_text: bool = False) -> int | None:
        """Return the class that ``label`` stands for, or None if it is not known.

        Args:
            label: Value of a file: a number, a name, or nothing.
            is_text: Whether a file cannot tell a number from a name that consists of digits.

        Raises:
            ValueError: It stands for no class; the message is a part of a sentence.
        """
        if isinstance(label, str):
            label = label.strip()
        if label is None or label == "" or (isinstance(label, float) and math.isnan(label)):
            return None
        number = self._number(label)
        if not self.count:
            return number if number is not None and 0 <= number <= MAX_LABEL else None
        named = [place for place, name in enumerate(self.names) if name == label]
        if len(named) > 1:
            raise ValueError(f"label is {_shown(label)}, the name of several classes; give the number")
        is_number = number is not None and 0 <= number < self.count
        if named:
            if is_text and is_number and number != named[0]:
                raise ValueError(
                    f"label is {_shown(label)}, the number of one class and the name of another; use a "
                    ".jsonl, where a number is a number"
                )
            return named[0]
        if number is not None and number < 0:
            return None
        if not is_number:
            raise ValueError(
                f"label is {_shown(label)}, not a class of {printable(self.model)}"
                f"{hint(label, self.names) if isinstance(label, str) else ''}; {self.described}"
            )
        return number

    @property
    def described(self) -> str:
        """The numbers of the classes, and their names, for a message."""
        names = excerpt(", ".join(map(printable, self.names)), _SHOWN_CHARACTERS)
        return f"its classes are 0 to {self.count - 1}" + (f" ({names})" if names else "")

    def _number(self, label: object) -> int | None:
        """Return the whole number that ``label`` is, or None if it is none."""
        if isinstance(label, int) and not isinstance(label, bool):
            return label
        if isinstance(label, float):
            return int(label) if label.is_integer() else None
        if not isinstance(label, str):
            return None
        unnamed = _UNNAMED.fullmatch(label)
        if unnamed is not None and not self.names:
            return int(unnamed[1])
        return int(label.partition(".")[0]) if _NUMBER.fullmatch(label) else None


NO_CLASSES = Classes()
"""Classes of a model that does not choose."""


def _shown(label: object) -> str:
    return excerpt(json.dumps(label, ensure_ascii=False))
