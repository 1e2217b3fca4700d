"""Values of a JSON document that is read; each is checked, and a message about one gives its position."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NoReturn

from pipeedge.base.errors import RequestError

__all__ = ["Value", "shown"]


class Value:
    """A value of a document, with its position."""

    def __init__(self, value: Any, file: str, place: str = "") -> None:
        self.value = value
        self._file = file
        self._place = place

    def fail(self, what: str) -> NoReturn:
        """Raise an error that names the file and the position."""
        place = f"{self._place} " if self._place else ""
        raise RequestError(f"{self._file}: {place}{what}; is it a report of this program?")

    def find(self, key: str) -> Value | None:
        """Return the entry ``key``, or None if it is missing or null."""
        if not isinstance(self.value, dict):
            self.fail("is not an object")
        entry = self.value.get(key)
        place = f"{self._place}.{key}" if self._place else key
        return None if entry is None else Value(entry, self._file, place)

    def at(self, key: str) -> Value:
        """Return the entry ``key``, which must exist."""
        found = self.find(key)
        if found is None:
            self.fail(f"has no {key}")
        return found

    def items(self) -> list[Value]:
        """Return the items of a list."""
        if not isinstance(self.value, list):
            self.fail("is not a list")
        return [Value(item, self._file, f"{self._place}[{at}]") for at, item in enumerate(self.value)]

    def entries(self) -> Iterator[tuple[str, Value]]:
        """Yield the entries of an object that are not null."""
        if not isinstance(self.value, dict):
            self.fail("is not an object")
        for key in self.value:
            found = self.find(key)
            if found is not None:
                yield str(key), found

    def number(self) -> float:
        """Return a finite number."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(f"is {shown(value)}, not a number")
        try:
            finite = math.isfinite(value)
        except OverflowError:
            finite = False
        if not finite:
            self.fail(f"is {shown(value)}, not a finite number")
        return float(value)

    def amount(self) -> float:
        """Return a number that is not negative."""
        value = self.number()
        if value < 0:
            self.fail(f"is {value}, which is negative")
        return value

    def whole(self) -> int:
        """Return a whole number that is not negative."""
        value = self.amount()
        if value != int(value):
            self.fail(f"is {value}, not a whole number")
        return int(value)

    def text(self) -> str:
        """Return a text."""
        if not isinstance(self.value, str):
            self.fail(f"is {shown(self.value)}, not text")
        return self.value


def shown(value: Any) -> str:
    """Return ``value`` for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."
