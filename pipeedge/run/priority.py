"""Which thread of the data rank of a decoder lets the others go first.

There, computing a step and scoring the rows of another may want the same cores. If both shared them equally,
what came first would take twice as long, and all stages wait for it. So what comes first is done first:

    last stage here    compute a ──> score a ──> link 0       b comes while a is scored:   [compute] gives way
    first stage here   score a ──> next row ──> compute a     b comes while a is computed: [collect] gives way
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Literal, TypeAlias

from pipeedge.base.schedule import Schedule

__all__ = ["DataThread", "give_way", "thread_that_gives_way"]

DataThread: TypeAlias = Literal["compute", "collect"]
"""Name of a thread that computes on the data rank."""

_ADDED_NICENESS = 10
"""With it, a thread gets a tenth of a core that another one wants as well."""


def thread_that_gives_way(schedule: Schedule, data_rank: int) -> DataThread | None:
    """Return the name of the thread of a decoder's data rank that gives way, or None if none does."""
    if schedule.stages[-1].rank == data_rank:
        return "compute"
    return "collect" if schedule.stages[0].rank == data_rank else None


def give_way() -> None:
    """Let other threads take precedence over the calling one and those that it starts, on Linux.

    It starts those that compute with it. On other systems, niceness belongs to the whole process, so nothing
    changes; nor does it where a change is forbidden.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) + _ADDED_NICENESS)
