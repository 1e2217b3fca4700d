r"""Checks of type and range for values that other processes send. Pure functions.

parse('{"busy": 1e999}')   ValueError: numbers must be finite, and whole ones fit 64 bits
whole_number(7, below=8)   7           number(1.5)      1.5
text("a\x1b[2J")           a\x1b[2J    safe to show in a terminal

Malformed values raise one of ``MALFORMED``; ``decoding`` turns that into one line which names the sender.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, NoReturn, TypeVar, cast

from pipeedge.base.errors import PeerFailedError, RequestError, one_line
from pipeedge.base.wording import printable

__all__ = [
    "MALFORMED",
    "decoding",
    "flag",
    "nested",
    "nonnegative",
    "number",
    "parse",
    "plain",
    "record",
    "text",
    "whole_number",
]

_Record = TypeVar("_Record")

MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError)
"""Exceptions that reading a malformed value may raise."""

_END = 1 << 63
"""Limit of whole numbers, exclusive: they lie below it and above its negative."""
_MOST = 1e18
"""Largest absolute value of any other number, so that sums and products of a few remain finite."""
_MAX_TEXT = 2000
_MAX_VALUE = 8000
"""Largest number of characters of a text among the values of an object."""
_MAX_DIGITS = 20


def parse(data: bytes | str) -> Any:
    """Parse JSON. Raises ValueError or RecursionError if it is malformed or holds a number out of range."""
    return json.loads(data, parse_int=_whole, parse_float=_finite, parse_constant=_refuse)


def whole_number(value: object, below: int = _END) -> int:
    """Return ``value`` if it is a whole number from 0; else raise TypeError or ValueError."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{type(value).__name__} instead of a whole number")
    if not 0 <= value < below:
        raise ValueError(f"a number outside 0 to {below - 1}")
    return value


def number(value: object) -> float:
    """Return ``value`` as a float if it is a number up to 1e18; else raise TypeError or ValueError."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{type(value).__name__} instead of a number")
    if not abs(value) <= _MOST:
        raise ValueError(f"a number beyond {_MOST:.0e}")
    return float(value)


def nonnegative(value: object) -> float:
    """Return ``value`` as a float if it is a nonnegative number, such as a duration or an amount."""
    found = number(value)
    if found < 0:
        raise ValueError("a negative number")
    return found


def flag(value: object) -> bool:
    """Return ``value`` if it is true or false."""
    if not isinstance(value, bool):
        raise TypeError(f"{type(value).__name__} instead of true or false")
    return value


def text(value: object, most: int = _MAX_TEXT) -> str:
    """Return the first ``most`` characters of a text, with control characters escaped."""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of text")
    return printable(value[:most])[:most]


def plain(value: object) -> dict[str, Any]:
    """Return a map of text and numbers only, which can be compared, shown and sent on."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{type(value).__name__} instead of an object")
    return {text(key): _plain(entry) for key, entry in value.items()}


def nested(value: object) -> dict[str, Any]:
    """Return a map like ``plain``, whose values may also be lists and maps of such values."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{type(value).__name__} instead of an object")
    return {text(key): _nested(entry) for key, entry in value.items()}


def _nested(entry: object) -> Any:
    if isinstance(entry, Mapping):
        return nested(entry)
    if isinstance(entry, list):
        return [_nested(each) for each in entry]
    return _plain(entry)


def _plain(entry: object) -> str | int | float | None:
    if entry is None or isinstance(entry, bool):
        return entry
    if isinstance(entry, str):
        return text(entry, _MAX_VALUE)
    if isinstance(entry, int):
        return entry if abs(entry) < _END else whole_number(entry)
    return number(entry)


_READERS: Mapping[str, Callable[[object], Any]] = {
    "int": whole_number,
    "float": number,
    "str": lambda value: text(value, _MAX_VALUE),
    "bool": flag,
}


def record(kind: type[_Record], body: Mapping[str, Any], **known: Any) -> _Record:
    """Return a dataclass built from ``body``, with each value checked against the type of its field.

    Args:
        kind: A dataclass whose fields are ``int`` (from 0), ``float``, ``str`` or ``bool``, or ``None``.
        body: Values by field name.
        known: Fields that the caller has read already, of any type.
    """
    types = {field.name: str(field.type).partition(" | ") for field in fields(cast(Any, kind))}
    values = {}
    for name in body.keys() - known.keys():
        type_name, _, other = types[name]
        is_none = body[name] is None and other == "None"
        values[name] = None if is_none else _READERS[type_name](body[name])
    return kind(**values, **known)


@contextmanager
def decoding(what: str, peer: int | None = None) -> Iterator[None]:
    """Turn an exception raised while reading a malformed value into an error for the user.

    Args:
        what: Name of what is read; the message begins with it.
        peer: Rank that sent it, if the other ranks are to count it as lost.

    Raises:
        PeerFailedError: The value is malformed.
    """
    try:
        yield
    except (*MALFORMED, RequestError) as error:
        raise PeerFailedError(
            f"{what} is malformed ({one_line(error)}); do all run the same version?", peer=peer
        ) from error


def _whole(digits: str) -> int:
    # The length is checked first: conversion takes time quadratic in the number of digits.
    if len(digits) > _MAX_DIGITS or not -_END < (value := int(digits)) < _END:
        raise ValueError("a whole number of more than 64 bits")
    return value


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number too large for a float")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")
