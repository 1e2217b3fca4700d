"""A fingerprint of the input of a run, by which a later run knows that it is the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipeedge.data.items import Item, Items, JoinedItems, RepeatedItems
from pipeedge.data.opening import expanded
from pipeedge.data.protected_files import COMPANIONS
from pipeedge.data.source import InputSource
from pipeedge.request.files import STANDARD_INPUT, InputRequest

__all__ = ["companions_fingerprint", "input_fingerprint"]


def input_fingerprint(request: InputRequest, source: InputSource) -> str:
    """Return a digest of the items that run, in their order.

    Files count by name, size and time of change, because reading them would take as long as running them;
    standard input counts by what came from it.
    """
    digest = hashlib.sha256()
    for part in _parts(request, source):
        text = part.encode(errors="surrogateescape")
        digest.update(f"{len(text)}:".encode())
        digest.update(text)
    return digest.hexdigest()[:16]


def companions_fingerprint(directories: Iterable[Path]) -> str:
    """Return a digest of the tokenizer and image processor in ``directories``, which change what is read."""
    digest = hashlib.sha256()
    for directory in directories:
        for name in sorted(COMPANIONS):
            path = directory / name
            digest.update(path.read_bytes() if path.is_file() else b"\0")
    return digest.hexdigest()[:16]


def _parts(request: InputRequest, source: InputSource) -> Iterator[str]:
    yield f"{len(source)} items, skipped if bad: {request.skip_bad_input}"
    for path in expanded(request.paths) if request.paths else ():
        yield "-" if path == STANDARD_INPUT else _state(path)
    items, order = source.items, source.order
    if order == range(len(items)):
        yield from _items(items)
    else:
        yield from (_item(items, index) for index in order)
    if request.paths == (STANDARD_INPUT,):
        for number in range(len(source)):
            reading = source.attempt(number)
            if isinstance(reading, Item):
                yield from (tensor.numpy().tobytes().hex() for tensor in reading.tensors)


def _items(items: Items) -> Iterator[str]:
    """Yield what identifies all of ``items``, each of those that are repeated once."""
    if isinstance(items, RepeatedItems):
        yield f"{items.count} of"
        yield from _items(items.items)
    elif isinstance(items, JoinedItems):
        for part in items.parts:
            yield from _items(part)
    else:
        yield from (_item(items, index) for index in range(len(items)))


def _item(items: Items, index: int) -> str:
    # The values of decoded items come from the files of the request, or from this package.
    return items.source(index) if items.in_memory else _state(Path(items.source(index)))


def _state(path: Path) -> str:
    """Return name, size and time of change of a file; just the name of what is not one."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return str(path)
    return f"{path} {found.st_size} {found.st_mtime_ns}" if path.is_file() else str(path)
