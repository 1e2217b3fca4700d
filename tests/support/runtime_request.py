"""Requests of ``runtime.py``, from a command line."""

from __future__ import annotations

from pipeedge.request.config import RunRequest
from pipeedge.request.environment import Environment
from pipeedge.request.options import parse_runtime


def request(line: str) -> RunRequest:
    """Return the request that a command line without variables makes."""
    return parse_runtime(line.split(), Environment()).request
