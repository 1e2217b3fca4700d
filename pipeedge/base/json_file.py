"""Read JSON files that somebody else has written, such as those of a model directory."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from pipeedge.base.errors import PipeEdgeError

__all__ = ["find_json", "read_json"]


def find_json(path: Path, kind: type, error: type[PipeEdgeError]) -> Any:
    """Return the document in a JSON file, or None if there is no such file.

    Args:
        path: The file.
        kind: ``dict`` or ``list``, whichever the document must be.
        error: Exception to raise if it cannot be read or is something else.
    """
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is not valid JSON: {problem}") from None
    if not isinstance(document, kind):
        raise error(f"{path} is not a JSON {'list' if kind is list else 'object'}")
    return document


def read_json(path: Path, kind: type, error: type[PipeEdgeError]) -> Any:
    """Return the document in a JSON file, which must be there; see ``find_json``."""
    document = find_json(path, kind, error)
    if document is None:
        raise error(f"{path} cannot be read: {os.strerror(errno.ENOENT)}")
    return document
