"""How many random cases, and which cuts, a comparison with an oracle takes."""

from __future__ import annotations

import os
from collections.abc import Collection

ALL_VARIABLE = "PIPEEDGE_ALL_CASES"


def cases(full: int) -> int:
    """Return a tenth of ``full``; all of them if the environment variable is set."""
    return full if os.environ.get(ALL_VARIABLE) else max(1, full // 10)


def cuts_to_try(last: int, drawn: Collection[int]) -> list[list[int]]:
    """Return cuts after layers 1 to ``last``: each layer alone, and single ones.

    The single ones are those of ``drawn`` that exist; all of them if the environment variable is set.
    """
    every = list(range(1, last + 1))
    single = every if os.environ.get(ALL_VARIABLE) else sorted(set(drawn) & set(every))
    return [every, *([cut] for cut in single)]
