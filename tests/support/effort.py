"""How many random cases a comparison with an oracle takes."""

from __future__ import annotations

import os

ALL_VARIABLE = "PIPEEDGE_ALL_CASES"


def cases(full: int) -> int:
    """Return a tenth of ``full``; all of them if the environment variable is set."""
    return full if os.environ.get(ALL_VARIABLE) else max(1, full // 10)
