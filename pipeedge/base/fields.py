r"""Read values that other processes send: each has its type and lies within its limits, or it is refused.

    class Report(Struct, frozen=True):      decode(b'{"rank": 1, "host": "a\u001b[2J"}', Report)
        rank: Count                             -> Report(rank=1, host='a\\x1b[2J')
        host: Name                          decode(b'{"rank": 1e999, "host": "a"}', Report)
                                                -> ValueError: Number out of range

msgspec does the work. The types below carry the limits: a field of a message is one of them, an enumeration,
or made of them. JSON has no NaN or infinity; ``encode`` writes null for them, which no number accepts.

Malformed values raise one of ``MALFORMED``; ``decoding`` turns that into one line which names the sender.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias

import msgspec

from pipeedge.base.errors import PeerFailedError, RequestError, one_line
from pipeedge.base.wording import printable

__all__ = [
    "MALFORMED",
    "Amount",
    "Count",
    "ExitCode",
    "Line",
    "Name",
    "Number",
    "Options",
    "Port",
    "Positive",
    "Text",
    "convert",
    "decode",
    "decoding",
    "encode",
    "flag",
    "nested",
    "nonnegative",
    "number",
    "parse",
    "plain",
    "reader",
    "text",
    "to_plain",
    "whole_number",
]

MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError)
"""Exceptions that reading a malformed value may raise."""

_MOST = 1e18
"""Largest absolute value of a number, so that sums and products of a few remain finite."""
_LAST = (1 << 63) - 1
_MAX_LINE = 8000
_MAX_NAME = 255
_END = 1 << 63
_MAX_TEXT = 2000
_MAX_VALUE = 8000
_MAX_DIGITS = 20

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_LAST)]
"""A whole number from 0 that fits 64 bits."""
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=_LAST)]
"""A whole number from 1 that fits 64 bits."""
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
ExitCode: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 8)]
Number: TypeAlias = Annotated[float, msgspec.Meta(ge=-_MOST, le=_MOST)]
"""A number up to 1e18."""
Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=_MOST)]
"""A nonnegative number up to 1e18, such as a duration."""
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=_MAX_LINE)]
"""A text that is compared or parsed, and never shown."""

_Option: TypeAlias = Annotated[int, msgspec.Meta(ge=-_LAST, le=_LAST)] | Number | str | bool | None

if TYPE_CHECKING:
    Line: TypeAlias = str
    Name: TypeAlias = str
    Options: TypeAlias = dict[str, Any]
else:

    class Line(str):
        """A text that can be shown: cut to 8000 characters, with control characters escaped."""

        __slots__ = ()

    class Name(str):
        """A text that can be shown, cut to 255 characters."""

        __slots__ = ()

    class Options(dict):
        """A flat object of texts, numbers, booleans and null, which can be compared and shown."""


def reader(kind: Any) -> Callable[[bytes | str | msgspec.Raw], Any]:
    """Return a function that reads JSON as ``kind``, and raises one of ``MALFORMED`` for anything else."""
    return msgspec.json.Decoder(kind, dec_hook=_read).decode


def decode(data: bytes | str | msgspec.Raw, kind: Any) -> Any:
    """Read JSON as ``kind``. Raises one of ``MALFORMED`` if it is malformed."""
    return reader(kind)(data)


def encode(value: object) -> bytes:
    """Return ``value`` as JSON. Half of a pair of surrogates, as file names may hold, is escaped."""
    try:
        return msgspec.json.encode(value, enc_hook=_plain)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value, enc_hook=_plain), ensure_ascii=False)
        return re.sub("[\ud800-\udfff]", lambda half: rf"\\u{ord(half[0]):x}", text).encode()


def convert(value: object, kind: Any) -> Any:
    """Read the output of ``to_plain`` as ``kind``. Raises one of ``MALFORMED`` if it is malformed."""
    return msgspec.convert(value, kind, dec_hook=_read, str_keys=True)


def to_plain(value: object) -> Any:
    """Return ``value`` as objects, lists, texts and numbers."""
    return msgspec.to_builtins(value, enc_hook=_plain, str_keys=True)


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


def _read(kind: type, value: Any) -> Any:
    """Read a value of one of the types that msgspec does not know."""
    if kind is Options:
        options = msgspec.convert(value, dict[str, _Option])
        return Options({_shown(name, _MAX_NAME): _shown_option(option) for name, option in options.items()})
    if kind in (Line, Name):
        return kind(_shown(value, _MAX_LINE if kind is Line else _MAX_NAME))
    raise NotImplementedError(kind)


def _shown(value: object, most: int) -> str:
    if not isinstance(value, str):
        raise TypeError(f"Expected `str`, got `{type(value).__name__}`")
    cut = value[:most]
    return cut if cut.isprintable() else printable(cut)[:most]


def _shown_option(option: str | float | None) -> str | float | None:
    return _shown(option, _MAX_LINE) if isinstance(option, str) else option


def _plain(value: object) -> object:
    """Return an instance of a subclass of a plain type as that type."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, dict):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


# -- checks of single values, for messages that have no type yet ------------------------------------------


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
    return {text(key): _plain_entry(entry) for key, entry in value.items()}


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
    return _plain_entry(entry)


def _plain_entry(entry: object) -> str | int | float | None:
    if entry is None or isinstance(entry, bool):
        return entry
    if isinstance(entry, str):
        return text(entry, _MAX_VALUE)
    if isinstance(entry, int):
        return entry if abs(entry) < _END else whole_number(entry)
    return number(entry)


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
