"""A run whose rank 0 re-plans by itself, in a test bed, and what is seen of it from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from beds import ROOT, Bed, Workload
from disturbing import Progress
from PIL import Image

from pipeedge.data.defaults import PHOTO_FILE, asset

__all__ = ["SETTLING", "UBATCH", "LiveRun"]

UBATCH = 3
SETTLING = 12
"""Results that fill the pipeline."""
_LOOK_S = 0.005
_CHANGED = re.compile(r"the plan has changed at microbatch (\d+)")
_PICTURES = 100
"""Number of different pictures, which are read over and over."""


def write_pictures(directory: Path, items: int) -> Path:
    """Return a directory of pictures of the size of the shipped photo, created on first use.

    They are decoded like those with which the work of the data rank is profiled, and need no memory.
    """
    place = directory / f"pictures-{items}"
    if not place.exists():
        place.mkdir()
        photo = np.asarray(Image.open(asset(PHOTO_FILE)).convert("RGB"))
        for number in range(items):
            path = place / f"{number:06d}.jpg"
            if number < _PICTURES:
                shifted = np.roll(photo, number * photo.shape[1] // _PICTURES, axis=1)
                Image.fromarray(shifted).save(path, quality=90)
            else:
                path.hardlink_to(place / f"{number % _PICTURES:06d}.jpg")
    return place


class LiveRun:
    """A run whose rank 0 re-plans by itself, and what is seen of it from outside. A context manager.

    Args:
        bed: The hosts, one for each rank.
        load: What is run.
        place: Directory for its files.
        microbatches: Number of microbatches.
        options: Further options.
    """

    def __init__(self, bed: Bed, load: Workload, place: Path, microbatches: int, *options: str) -> None:
        place.mkdir()
        self._bed = bed
        self._place = place
        self.output = place / "out.npz"
        self.progress = Progress(self.output)
        items = microbatches * UBATCH
        common = ["-m", load.model, "-M", str(load.weights()), "-u", str(UBATCH), "--timeout", "20"]
        common += ["-c", "tcp", "--addr", bed.hosts[0], "-H", ",".join(bed.hosts), "--quiet", *options]
        self._common = common
        self._data = ["--input", str(write_pictures(load.directory, items))]
        self._data += ["--output", str(self.output), "--report", str(place / "report.json")]
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> LiveRun:
        for rank in range(len(self._bed.hosts)):
            self.start(rank)
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._ranks.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def start(self, rank: int) -> None:
        """Start a rank, or start it again."""
        host = self._bed.hosts[rank]
        words = [sys.executable, str(ROOT / "runtime.py"), str(rank), str(len(self._bed.hosts))]
        words += [*self._common, *(self._data if rank == 0 else [])]
        with (self._place / f"rank{rank}.err").open("ab") as errors:
            self._ranks[rank] = subprocess.Popen(
                self._bed.bed.command(host, words),
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def kill(self, rank: int) -> None:
        """Kill a rank."""
        os.killpg(self._ranks[rank].pid, signal.SIGKILL)
        self._ranks[rank].wait()

    @property
    def is_going(self) -> bool:
        """Whether rank 0 has not ended."""
        return self._ranks[0].poll() is None

    @property
    def said(self) -> str:
        """What rank 0 has told the user."""
        return (self._place / "rank0.err").read_text(errors="replace")

    @property
    def changes(self) -> list[int]:
        """First microbatch of each new plan."""
        return [int(number) for number in _CHANGED.findall(self.said)]

    @property
    def came_s(self) -> list[float]:
        """Times at which results came."""
        return self.progress.grew_s

    def watch(self, until: Callable[[], bool]) -> None:
        """Watch the results until something is so, or the run has ended."""
        while self.is_going and not until():
            self.progress.look()
            time.sleep(_LOOK_S)

    def watch_s(self, seconds: float) -> None:
        """Watch the results for some time."""
        end = time.monotonic() + seconds
        self.watch(lambda: time.monotonic() > end)

    def watch_results(self, more: int) -> None:
        """Watch until some more results have come."""
        wanted = len(self.came_s) + more
        self.watch(lambda: len(self.came_s) >= wanted)
        if len(self.came_s) < wanted:
            raise SystemExit(f"rank 0 ended too early: {self.said[-2000:]}")

    def check_going(self) -> None:
        """Exit if rank 0 has ended, which was to go on."""
        if not self.is_going:
            raise SystemExit(f"rank 0 ended too early: {self.said[-2000:]}")

    def finish(self) -> bytes:
        """Watch until the end, and return the output."""
        self.watch(lambda: False)
        if self._ranks[0].wait():
            raise SystemExit(f"rank 0 failed: {self.said[-2000:]}")
        return self.output.read_bytes()

    def report(self) -> dict[str, Any]:
        """Return the report."""
        return dict(json.loads((self._place / "report.json").read_text()))

    def rate(self, since_s: float, until_s: float) -> float:
        """Return the items per second between two times."""
        came = [at for at in self.came_s if since_s <= at <= until_s]
        return UBATCH * (len(came) - 1) / (came[-1] - came[0]) if len(came) > 1 else 0.0

    def gap(self, change: int) -> tuple[float, float]:
        """Return the longest time between two results of a change, and the period before, in seconds."""
        came = self.came_s
        before = [after - at for at, after in pairwise(came[max(0, change - 40) : max(1, change - 10)])]
        during = [after - at for at, after in pairwise(came[max(0, change - 10) : change + 10])]
        return max(during, default=0.0), statistics.median(before) if before else 0.0

    def usual_gap(self, since: int) -> float:
        """Return the longest time among 20 results, in periods, where nothing happens: a median."""
        came = self.came_s[since + SETTLING : -SETTLING]
        blocks = [came[start : start + 20] for start in range(0, len(came) - 20, 20)]
        times = [[after - at for at, after in pairwise(block)] for block in blocks]
        return statistics.median(max(each) / statistics.median(each) for each in times) if times else 0.0
