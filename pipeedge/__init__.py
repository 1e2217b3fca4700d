"""PipeEdge: one transformer, cut into shards, streamed through several unequal machines.

``Pipeline`` asks a model from Python; the programs are in the packages below.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeedge.api.pipeline import Pipeline as Pipeline

__all__ = ["Pipeline", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Return ``Pipeline``, which is imported when it is first used: torch takes seconds."""
    if name == "Pipeline":
        return import_module("pipeedge.api.pipeline").Pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names that the package offers, ``Pipeline`` before it is imported, too."""
    return sorted({*globals(), *__all__})
