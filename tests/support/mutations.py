"""Damage files and documents at random, to test their readers: bounded, and the same in every run."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

from pipeedge.base.errors import RequestError, one_line

ROUNDS_VARIABLE = "PIPEEDGE_FUZZ_ROUNDS"
LONGEST_LINE = 1000
"""Largest number of characters in a readable message."""
_NESTING = 3000

HOSTILE_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**63, 10**400, -(10**400)),
    *(0.5, -0.0, 1e308, float("inf"), float("nan"), "", "7", "\x1b[2J\n", "x" * 10_000),
    *([], {}, [None], [1, 2, 3], {"a": 1}, [[]]),
)
"""Values that may replace any other."""

TEXT_SCRAPS = (
    *":-#,[]{}&*!|>'\"%@`?~=.\t\n\r \\09ex\x00\x7f\x85\xa0\u2028\ufeff",
    ": ",
    "- ",
    "null",
    "~",
    "---\n",
    "...",
)
"""Text that may be inserted anywhere in YAML."""


def rounds(default: int) -> int:
    """Return how many mutations a test tries; the variable asks for more."""
    return int(os.environ.get(ROUNDS_VARIABLE, default))


def refused(read: Callable[[], object]) -> bool:
    """Return whether ``read`` refuses what it reads, in one line of plain text; it may not fail otherwise."""
    try:
        read()
    except RequestError as error:
        line = one_line(error)
        if "\n" in line or not line.isprintable() or len(line) > LONGEST_LINE:
            raise AssertionError(f"not one readable line: {line!r}") from error
        return True
    return False


def mutate_bytes(data: bytes, chance: random.Random, head: int | None = None) -> bytes:
    """Return ``data`` with one to four small damages, within its first ``head`` bytes."""
    damaged = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        size = len(damaged) if head is None else min(head, len(damaged))
        at = chance.randrange(size) if size else 0
        kind = chance.randrange(5)
        if kind == 0 and damaged:
            damaged[at] ^= 1 << chance.randrange(8)
        elif kind == 1 and damaged:
            damaged[at] = chance.choice((0, 0x7F, 0x80, 0xFF, *b'"{}[],:-019'))
        elif kind == 2:
            del damaged[at : at + chance.randint(1, 16)]
        elif kind == 3:
            damaged[at:at] = damaged[at : at + chance.randint(1, 32)]
        else:
            del damaged[at:]
    return bytes(damaged)


def mutate_document(document: Any, chance: random.Random) -> Any:
    """Return a copy of a JSON document with a value replaced, removed or repeated somewhere."""
    copied = json.loads(json.dumps(document))
    for _ in range(chance.randint(1, 2)):
        places = list(_places(copied))
        if not places:
            return copy.deepcopy(chance.choice(HOSTILE_VALUES))
        holder, key = chance.choice(places)
        kind = chance.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, list):
            holder.insert(key, holder[key])
        elif kind == 2 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] *= chance.choice((-1, 2, 10, 10**6))
        else:
            holder[key] = copy.deepcopy(chance.choice(HOSTILE_VALUES))
    return copied


def mutate_message(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return a copy of a message's body with a value replaced, removed or repeated somewhere."""
    damaged = mutate_document(body, chance)
    return damaged if isinstance(damaged, dict) else {"x": damaged}


def document_bytes(document: Any, chance: random.Random) -> bytes:
    """Return ``document`` as JSON; now and then with a value nested too deeply to be read."""
    text = json.dumps(document)
    if chance.randrange(40) == 0:
        text = text.replace(": ", ": " + "[" * _NESTING + "]" * _NESTING + ', "again": ', 1)
    return text.encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container and key in a document."""
    if isinstance(value, dict):
        entries = list(value.items())
    else:
        entries = list(enumerate(value)) if isinstance(value, list) else []
    for key, entry in entries:
        yield value, key
        yield from _places(entry)


def mutate_text(text: str, chance: random.Random) -> str:
    """Return ``text`` with one to three damages that an editor or a broken copy makes."""
    for _ in range(chance.randint(1, 3)):
        lines = text.splitlines(keepends=True) or [""]
        row = chance.randrange(len(lines))
        at = chance.randrange(len(text) + 1)
        kind = chance.randrange(7)
        if kind == 0:
            text = text[:at]
            continue
        if kind == 1:
            text = text[:at] + chance.choice(TEXT_SCRAPS) + text[at + chance.randrange(2) :]
            continue
        if kind == 2:
            text = text[:at] + text[at + chance.randint(1, 3) :]
            continue
        if kind == 3:
            del lines[row]
        elif kind == 4:
            lines.insert(chance.randrange(len(lines) + 1), lines[row])
        elif kind == 5:
            lines[row] = " " * chance.randint(1, 3) + lines[row]
        else:
            lines[row] = lines[row][chance.randint(1, 2) :]
        text = "".join(lines)
    return text
