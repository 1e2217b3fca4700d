"""Arrays in files, read by one thread at a time."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

_reading = threading.Lock()
"""Held to parse: Python 3.11 may fail (SystemError) if threads do so at once while garbage is collected."""


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an ``.npz`` file by name."""
    with _reading, np.load(path) as arrays:
        return dict(arrays)
