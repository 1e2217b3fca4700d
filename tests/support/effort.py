"""How many random cases, and which cuts, a comparison with an oracle takes."""

from __future__ import annotations

import os
from collections.abc import Collection

ALL_VARIABLE = "PIPEEDGE_ALL_CASES"


def all_cases() -> bool:
    """Return whether all cases are wanted, because the environment variable is set."""
    return bool(os.environ.get(ALL_VARIABLE))


def cases(full: int, part: int = 10) -> int:
    """Return a ``part``-th of ``full``; all of them if all are wanted."""
    return full if all_cases() else max(1, full // part)


def cuts_to_try(last: int, drawn: Collection[int]) -> list[list[int]]:
    """Return cuts after layers 1 to ``last``: each layer alone, and single ones.

    The single ones are those of ``drawn`` that exist; all of them if all cases are wanted.
    """
    every = list(range(1, last + 1))
    single = every if all_cases() else sorted(set(drawn) & set(every))
    return [every, *([cut] for cut in single)]
