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
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec

from pipeedge.base.errors import PeerFailedError, RequestError, one_line
from pipeedge.base.wording import printable

__all__ = [
    "MALFORMED",
    "Amount",
    "Count",
    "ExitCode",
    "Line",
    "LongLine",
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
    "reader",
]

MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError)
"""Exceptions that reading a malformed value may raise."""

_MOST = 1e18
"""Largest absolute value of a number, so that sums and products of a few remain finite."""
_LAST = (1 << 63) - 1
_MAX_LINE = 2000
_MAX_TEXT = 8000
_MAX_NAME = 255

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
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=_MAX_TEXT)]
"""A text that is compared or parsed, and never shown."""

_Option: TypeAlias = Annotated[int, msgspec.Meta(ge=-_LAST, le=_LAST)] | Number | str | bool | None

# For type checkers these are plain types, so that code that creates a message can pass plain values.
if TYPE_CHECKING:
    Line: TypeAlias = str
    LongLine: TypeAlias = str
    Name: TypeAlias = str
    Options: TypeAlias = dict[str, Any]
else:

    class Line(str):
        """A text that can be shown: cut to 2000 characters, with control characters escaped."""

        __slots__ = ()

    class LongLine(str):
        """A text that can be shown, like ``Line``, but cut to 8000 characters."""

        __slots__ = ()

    class Name(str):
        """A text that can be shown, cut to 255 characters."""

        __slots__ = ()

    class Options(dict):
        """A flat object of texts, numbers, booleans and null, which can be compared and shown."""


_MOST_SHOWN = {Line: _MAX_LINE, LongLine: _MAX_TEXT, Name: _MAX_NAME}
"""Number of characters to which texts of each type are cut."""


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
    """Read parsed JSON as ``kind``. Raises one of ``MALFORMED`` if it is malformed."""
    return msgspec.convert(value, kind, dec_hook=_read, str_keys=True)


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
    if kind in _MOST_SHOWN:
        return kind(_shown(value, _MOST_SHOWN[kind]))
    raise NotImplementedError(kind)


def _shown(value: object, most: int) -> str:
    if not isinstance(value, str):
        raise TypeError(f"Expected `str`, got `{type(value).__name__}`")
    cut = value[:most]
    return cut if cut.isprintable() else printable(cut)[:most]


def _shown_option(option: str | float | None) -> str | float | None:
    return _shown(option, _MAX_TEXT) if isinstance(option, str) else option


def _plain(value: object) -> object:
    """Return an instance of a subclass of a plain type as that type."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, dict):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")
