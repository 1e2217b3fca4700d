"""Ranks of one run on this machine, for benchmarks that start them as processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LIMIT_S = 900
"""Seconds within which a run must end."""


def wait_for(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all ranks have ended; exit if one failed or takes too long."""
    try:
        statuses = [process.wait(timeout=LIMIT_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(statuses):
        program = Path(sys.argv[0]).stem
        sys.exit(f"{program}: the ranks ended with {statuses}; the reason is above")
