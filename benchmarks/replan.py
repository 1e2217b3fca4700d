#!/usr/bin/env python3
"""Change hosts under a run that re-plans by itself, in a test bed of four emulated hosts. Needs root.

    slow     a host loses half of its processor in mid-run: throughput after five windows against the best
             schedule for the hosts as they are now, and the longest time between two results meanwhile
    join     a rank is killed and comes back: throughput with it, against that before, without a new start
    noise    every host's processor varies by 10 %: no change of the plan
    square   a host loses half of its processor every other half minute: changes, and throughput against that
             of the best schedule that stays, of those for equal hosts and for the mean of the slow one

The results of each run must equal those of a run that was left alone, to the byte. Times between results come
from the growth of the output file. Needs two idle cores, and minutes: with the defaults, about 6 for each of
the first two, 24 for the noise and 20 for the square wave.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from beds import ROOT, Bed, Kind, Pipeline, Workload, make_small_models, raised
from disturbing import Progress
from rich.console import Console

from pipeedge.testbed.bed import TestBeds

UBATCH = 3
CPU = 0.2
BW_MBPS = 1000
KINDS = (Kind("host", 3, CPU, BW_MBPS), Kind("other", 1, CPU, BW_MBPS))
"""All alike; the last one, which has no data, is the one that changes."""
VICTIM = "other0"
MEAN_SLOWNESS = 1.5
"""Mean time of a layer on a host that loses half of its processor every other half minute."""
WINDOW_S = 5.0
WINDOWS_S = 5 * WINDOW_S
"""Seconds of the five windows within which the run is to have changed its plan."""
SETTLING = 12
"""Results that fill the pipeline."""
SLOW_GOAL, JOIN_GOAL, SQUARE_GOAL = 0.9, 0.95, 0.95
GAP_GOAL = 1.5
GAIN_GOAL = 5.0
"""Points of per cent."""
_MOST_PER_MINUTE = 150
"""Number of microbatches that are computed in a minute at most."""
_LOOK_S = 0.005
_CHANGED = re.compile(r"the plan has changed at microbatch (\d+)")


@dataclass(frozen=True)
class Line:
    """One figure, and whether it is as it should be."""

    what: str
    value: str
    good: bool


@dataclass(frozen=True)
class Waved:
    """A run under a square wave."""

    items_per_s: float
    later_items_per_s: float
    """Items per second in the second half of the periods."""
    changes: int


class LiveRun:
    """A run whose rank 0 re-plans by itself, and what is seen of it from outside. A context manager.

    Args:
        bed: the hosts, one for each rank.
        load: what is run.
        place: directory for its files.
        microbatches: number of microbatches.
        options: further options.
    """

    def __init__(self, bed: Bed, load: Workload, place: Path, microbatches: int, *options: str) -> None:
        place.mkdir()
        self._bed = bed
        self._place = place
        self.output = place / "out.npz"
        self.progress = Progress(self.output)
        self._starts: list[float] = []
        items = microbatches * UBATCH
        common = ["-m", load.model, "-M", str(load.weights()), "-u", str(UBATCH), "--timeout", "20"]
        common += ["-c", "tcp", "--addr", bed.hosts[0], "-H", ",".join(bed.hosts), "--quiet", *options]
        self._common = common
        self._data = ["--input", str(load.inputs(items)), "-b", str(items)]
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


@contextmanager
def times_longer(bed: Bed, kind: str, factor: float) -> Iterator[None]:
    """Let the scheduler believe, while the block runs, that a kind of host takes ``factor`` times as long."""
    path = bed.files["device_types"]
    kept = path.read_text()
    types = yaml.safe_load(kept)
    for profiles in types[kind]["model_profiles"].values():
        for profile in profiles:
            profile["time_s"] = [factor * seconds for seconds in profile["time_s"]]
    path.write_text(yaml.safe_dump(types, sort_keys=False))
    try:
        yield
    finally:
        path.write_text(kept)


class Scenarios:
    """The scenarios, on one test bed.

    Args:
        name: name of the test bed.
        bed: its hosts.
        load: what is run.
        microbatches: number of microbatches of a run.
        minutes: length of the run with noise.
        periods: number of minutes of the square wave.
    """

    def __init__(
        self, name: str, bed: Bed, load: Workload, microbatches: int, minutes: float, periods: int
    ) -> None:
        self._name = name
        self._bed = bed
        self._load = load
        self._microbatches = microbatches
        self._minutes = minutes
        self._periods = periods
        self._number = 0
        self._fixed_rates: dict[str, float] = {}
        self._expected: bytes | None = None

    def _quota(self, host: str, fraction: float) -> None:
        TestBeds().change(self._name, host, cpu_fraction=fraction)

    def _run(self, *options: str, microbatches: int | None = None) -> LiveRun:
        self._number += 1
        place = self._bed.directory / f"live-{self._number}"
        return LiveRun(self._bed, self._load, place, microbatches or self._microbatches, *options)

    def _automatic(self) -> list[str]:
        files = self._bed.files
        names = {"-sm": "models", "-sdt": "device_types", "-sd": "devices"}
        return [word for option, name in names.items() for word in (option, str(files[name]))]

    def _fixed(self, name: str, pipeline: Pipeline) -> float:
        """Return the items per second of a schedule that stays, once its pipeline is full."""
        with self._run("--schedule-file", str(self._schedule_file(name, pipeline))) as run:
            self._expected = run.finish()
            return run.rate(run.came_s[SETTLING], run.came_s[-SETTLING])

    def _schedule_file(self, name: str, pipeline: Pipeline) -> Path:
        path = self._bed.directory / f"{name}.yml"
        path.write_text(yaml.safe_dump(list(map(dict, pipeline.stages)), sort_keys=False))
        return path

    def _same(self, run: LiveRun, output: bytes) -> Line:
        if self._expected is None:
            raise SystemExit("there is no run to compare with")
        return Line("results", "the same to the byte", output == self._expected)

    def slow(self) -> Iterator[Line]:
        """Take half of its processor from a host."""
        with self._run(*self._automatic(), "--replan", "auto") as run:
            run.watch_results(40)
            before = run.rate(run.came_s[SETTLING], time.monotonic())
            self._quota(VICTIM, CPU / 2)
            at = time.monotonic()
            run.watch_s(WINDOWS_S)
            since = time.monotonic()
            output = run.finish()
            after = run.rate(since, run.came_s[-SETTLING])
        with times_longer(self._bed, "other", 2.0):
            best = self._bed.schedule(self._load, self._bed.hosts)
        optimum = self._fixed("slow", best.pipeline)
        self._quota(VICTIM, CPU)
        yield Line("items/s before", f"{before:.2f}", True)
        yield Line("items/s after five windows", f"{after:.2f}", True)
        yield Line("against the new optimum", f"{after / optimum:.3f}", after >= SLOW_GOAL * optimum)
        yield from self._changes(run, at)
        yield self._same(run, output)

    def _changes(self, run: LiveRun, since_s: float) -> Iterator[Line]:
        """Yield when the plan changed, how long no result came meanwhile, and what was predicted."""
        yield Line("changes of the plan", str(len(run.changes)), bool(run.changes))
        replans = run.report()["replans"]
        took_s = {one["microbatch"]: one["seconds"] for one in replans if one["seconds"] is not None}
        for change in run.changes:
            longest, period = run.gap(change)
            yield Line("  seconds after the disturbance", f"{run.came_s[change] - since_s:.1f}", True)
            gap = longest / period if period else 0.0
            yield Line("  longest gap, in periods", f"{gap:.2f} ({longest:.3f} s)", gap <= GAP_GOAL)
            yield Line("  longest gap among 20 results later", f"{run.usual_gap(change):.2f}", True)
            # Layers are loaded from when the change is asked for, which may slow the plan before.
            asked_s = run.came_s[change] - took_s.get(change, 0.0)
            before = run.rate(asked_s - 2 * WINDOW_S, asked_s)
            last = run.came_s[min(change + SETTLING, len(run.came_s) - 1)]
            gain = run.rate(last, run.came_s[-SETTLING]) / before - 1 if before else 0.0
            yield Line("  measured gain", f"{gain:+.1%}", True)
        for replan in replans:
            predicted, measured = replan["predicted_gain_percent"], replan["measured_gain_percent"]
            known = measured is not None
            figures = f"{predicted:+.1f} %, {measured:+.1f} %" if known else f"{predicted:+.1f} %, unknown"
            yield Line(
                "  gain predicted, measured by the run",
                figures,
                not known or abs(predicted - measured) <= GAIN_GOAL,
            )

    def join(self) -> Iterator[Line]:
        """Kill a rank, and start it again."""
        with self._run(*self._automatic(), "--replan", "auto") as run:
            run.watch_results(40)
            before = run.rate(run.came_s[SETTLING], time.monotonic())
            run.kill(3)
            run.watch(lambda: "the run goes on after" in run.said)
            run.watch_results(SETTLING)
            without = run.rate(run.came_s[-SETTLING], time.monotonic())
            run.start(3)
            at = time.monotonic()
            run.watch(lambda: bool(run.changes))
            run.watch_results(SETTLING)
            since = time.monotonic()
            output = run.finish()
            after = run.rate(since, run.came_s[-SETTLING])
        if self._expected is None:
            self._fixed("equal", self._bed.schedule(self._load, self._bed.hosts).pipeline)
        yield Line("items/s with four hosts, three, four", f"{before:.2f} {without:.2f} {after:.2f}", True)
        yield Line("against the start", f"{after / before:.3f}", after >= JOIN_GOAL * before)
        yield from self._changes(run, at)
        yield self._same(run, output)

    def noise(self) -> Iterator[Line]:
        """Vary the processor of every host by 10 %."""
        chance = random.Random(0)
        end = time.monotonic() + 60 * self._minutes
        changes = 0
        while time.monotonic() < end:
            with self._run(*self._automatic(), "--replan", "auto") as run:
                run.watch_results(SETTLING)
                while run.is_going and time.monotonic() < end:
                    for host in self._bed.hosts:
                        self._quota(host, CPU * chance.uniform(0.9, 1.1))
                    run.watch_s(1.0)
                changes += len(run.changes)
        for host in self._bed.hosts:
            self._quota(host, CPU)
        yield Line(f"changes in {self._minutes:g} minutes", str(changes), changes == 0)

    def square(self) -> Iterator[Line]:
        """Take half of its processor from a host every other half minute."""
        with times_longer(self._bed, "other", MEAN_SLOWNESS):
            mean = self._bed.schedule(self._load, self._bed.hosts).pipeline
        equal = self._square(*self._automatic(), "--replan", "off")
        middle = self._square("--schedule-file", str(self._schedule_file("mean", mean)))
        followed = self._square(*self._automatic(), "--replan", "auto")
        best = max((equal, middle), key=lambda one: one.items_per_s)
        yield Line("items/s with the plan for equal hosts", f"{equal.items_per_s:.2f}", True)
        yield Line("items/s with the plan for the mean", f"{middle.items_per_s:.2f}", True)
        yield Line("items/s with --replan auto", f"{followed.items_per_s:.2f}", True)
        ratio = followed.items_per_s / best.items_per_s
        yield Line("against the best plan that stays", f"{ratio:.3f}", ratio >= SQUARE_GOAL)
        later = followed.later_items_per_s / best.later_items_per_s
        yield Line("  in the second half", f"{later:.3f}", True)
        yield Line("changes of the plan", str(followed.changes), True)

    def _square(self, *options: str) -> Waved:
        """Run during some periods of the square wave."""
        microbatches = max(self._microbatches, _MOST_PER_MINUTE * self._periods)
        with self._run(*options, microbatches=microbatches) as run:
            run.watch_results(SETTLING)
            began = time.monotonic()
            for half in range(2 * self._periods):
                self._quota(VICTIM, CPU if half % 2 else CPU / 2)
                run.watch_s(30.0)
            ended = time.monotonic()
            if not run.is_going:
                raise SystemExit(f"the run ended too early: {run.said[-2000:]}")
            self._quota(VICTIM, CPU)
            # Whole periods, as the phases are not alike.
            half_time = began + 60.0 * (self._periods // 2)
            return Waved(run.rate(began, ended), run.rate(half_time, ended), len(run.changes))


def main() -> None:
    """Run the scenarios, and exit with 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("slow", "join", "noise", "square")
    parser.add_argument("scenarios", nargs="*", help=f"some of {', '.join(names)} (all)")
    parser.add_argument("--microbatches", type=int, default=420, help="of the runs that end (%(default)s)")
    parser.add_argument("--minutes", type=float, default=20.0, help="length of the noise (%(default)s)")
    parser.add_argument("--periods", type=int, default=5, help="of the square wave (%(default)s)")
    arguments = parser.parse_args()
    unknown = set(arguments.scenarios) - set(names)
    if unknown:
        parser.error(f"there is no scenario {sorted(unknown)[0]}")
    console, good = Console(), True
    with tempfile.TemporaryDirectory() as directory:
        small = make_small_models(Path(directory) / "models")[0]
        load = Workload(small, UBATCH, Path(directory))
        load.weights()
        bed_name = f"rp{os.getpid()}"
        with raised(bed_name, KINDS, Path(directory) / "bed") as bed:
            bed.profile(load, iterations=4)
            scenarios = Scenarios(
                bed_name, bed, load, arguments.microbatches, arguments.minutes, arguments.periods
            )
            for name in arguments.scenarios or names:
                console.print(name)
                for line in getattr(scenarios, name)():
                    console.print(f"  {line.what:<40} {line.value}{'' if line.good else '   missed'}")
                    good &= line.good
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
