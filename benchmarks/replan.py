#!/usr/bin/env python3
"""Change hosts under a run that re-plans by itself, in a test bed of four emulated hosts. Needs root.

    slow     a host loses half of its processor in mid-run: throughput after five windows against the best
             schedule for the hosts as they are now, and the longest time between two results meanwhile
    join     a rank is killed and comes back: throughput with it, without a new start, against a run with the
             best schedule for all hosts, and against that before
    noise    every host's processor varies by 10 %: no change of the plan
    square   a host loses half of its processor every other half minute: changes, and throughput against that
             of the best schedule that stays, of those for equal hosts and for the mean of the slow one

The results of each run must equal those of a run that was left alone, to the byte. Times between results come
from the growth of the output file. Needs two idle cores, and minutes: with the defaults, about 6 for each of
the first two, 24 for the noise and 20 for the square wave.

The speed of a shared machine varies by some per cent from one minute to the next, and a gain by twice that.
So ``--rounds`` repeats the first two, three to four minutes each, and judges the medians.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from beds import Bed, Kind, Pipeline, Workload, make_small_models, raised
from live_runs import SETTLING, UBATCH, LiveRun
from rich.console import Console

from pipeedge.testbed.bed import TestBeds

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
SLOW_GOAL, JOIN_GOAL, SQUARE_GOAL = 0.9, 0.95, 0.95
GAP_GOAL = 1.5
GAIN_GOAL = 5.0
"""Points of per cent."""
_MOST_PER_MINUTE = 500
"""Number of microbatches that are computed in a minute at most: twice of what was seen."""
_TELL_S = 60.0
"""Seconds between two lines about the progress of a long run."""


@dataclass(frozen=True)
class Line:
    """One figure or fact, and whether it is as it should be."""

    what: str
    value: float | str
    good: Callable[[float], bool] | bool = True
    """For a fact whether it is good; for a figure what tells whether it, or the median of several, is."""
    form: str = ".2f"

    def __str__(self) -> str:
        text = self.value if isinstance(self.value, str) else format(self.value, self.form)
        return f"{self.what:<44} {text}{'' if self.is_good else '   missed'}"

    @property
    def is_good(self) -> bool:
        """Whether it is as it should be."""
        if isinstance(self.good, bool):
            return self.good
        return isinstance(self.value, str) or self.good(self.value)


def medians(rounds: Sequence[Sequence[Line]]) -> Iterator[Line]:
    """Yield the median of each figure that all rounds have."""
    first = rounds[0]
    for line in first:
        found = [one.value for lines in rounds for one in lines if one.what == line.what]
        figures = [value for value in found if not isinstance(value, str)]
        if len(figures) == len(found) == len(rounds):
            yield replace(line, value=statistics.median(figures))


@dataclass(frozen=True)
class Waved:
    """A run under a square wave."""

    items_per_s: float
    later_items_per_s: float
    """Items per second in the second half of the periods."""
    changes: int


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


@dataclass(frozen=True)
class Lengths:
    """Lengths of the runs."""

    microbatches: int
    """Number of microbatches of a run that ends."""
    minutes: float
    """Minutes of the run with noise."""
    periods: int
    """Number of minutes of the square wave."""


class Scenarios:
    """The scenarios, on one test bed.

    Args:
        name: Name of the test bed.
        bed: Its hosts.
        load: What is run.
        lengths: Lengths of the runs.
        tell: Called with a line about the progress of a long run.
    """

    def __init__(
        self, name: str, bed: Bed, load: Workload, lengths: Lengths, tell: Callable[[str], None]
    ) -> None:
        self._name = name
        self._bed = bed
        self._load = load
        self._lengths = lengths
        self._tell = tell
        self._number = 0
        self._expected: bytes | None = None

    def _quota(self, host: str, fraction: float) -> None:
        TestBeds().change(self._name, host, cpu_fraction=fraction)

    def _run(self, *options: str) -> LiveRun:
        """Return a run that ends."""
        return LiveRun(self._bed, self._load, self._place(), self._lengths.microbatches, *options)

    def _long_run(self, minutes: float, *options: str) -> LiveRun:
        """Return a run that lasts for some minutes and more."""
        microbatches = round(_MOST_PER_MINUTE * (minutes + 1))
        return LiveRun(self._bed, self._load, self._place(), microbatches, *options)

    def _place(self) -> Path:
        self._number += 1
        return self._bed.directory / f"live-{self._number}"

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
        yield Line("items/s before", before)
        yield Line("items/s after five windows", after)
        yield Line("against the new optimum", after / optimum, lambda part: part >= SLOW_GOAL, ".3f")
        yield from self._changes(run, at)
        yield self._same(run, output)

    def _changes(self, run: LiveRun, since_s: float) -> Iterator[Line]:
        """Yield when the plan changed, how long no result came meanwhile, and what was predicted."""
        yield Line("changes of the plan", str(len(run.changes)), bool(run.changes))
        switched = {one["microbatch"]: one for one in run.report()["replans"] if one["seconds"] is not None}
        for change in run.changes:
            longest, period = run.gap(change)
            yield Line("  seconds after the disturbance", run.came_s[change] - since_s, form=".1f")
            gap = longest / period if period else 0.0
            yield Line("  longest gap, in periods", gap, lambda gap: gap <= GAP_GOAL)
            yield Line("  longest gap, s", longest, form=".3f")
            yield Line("  longest gap among 20 results later, periods", run.usual_gap(change))
            if change in switched:
                yield from self._gain(run, change, switched[change])

    def _gain(self, run: LiveRun, change: int, replan: Mapping[str, Any]) -> Iterator[Line]:
        """Yield the gain of a change, as predicted, as seen from outside and as measured by the run, in %."""
        # Layers are loaded from when the change is asked for, which may slow the plan before.
        asked_s = run.came_s[change] - replan["seconds"]
        before = run.rate(asked_s - 2 * WINDOW_S, asked_s)
        last = run.came_s[min(change + SETTLING, len(run.came_s) - 1)]
        seen = 100 * (run.rate(last, run.came_s[-SETTLING]) / before - 1) if before else 0.0
        predicted, measured = replan["predicted_gain_percent"], replan["measured_gain_percent"]
        yield Line("  predicted gain, %", predicted, form="+.1f")
        yield Line("  gain seen from outside, %", seen, form="+.1f")
        yield Line("  predicted less seen, points", predicted - seen, is_near, "+.1f")
        if measured is not None:
            yield Line("  gain measured by the run, %", measured, form="+.1f")
            yield Line("  predicted less measured, points", predicted - measured, is_near, "+.1f")

    def join(self) -> Iterator[Line]:
        """Kill a rank, and start it again."""
        with self._run(*self._automatic(), "--replan", "auto") as run:
            run.watch_results(80)
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
        optimum = self._fixed("equal", self._bed.schedule(self._load, self._bed.hosts).pipeline)
        yield Line("items/s with four hosts", before)
        yield Line("items/s with three", without)
        yield Line("items/s with four again", after)
        yield Line(
            "against the optimum from the start", after / optimum, lambda part: part >= JOIN_GOAL, ".3f"
        )
        yield Line("against that before", after / before, form=".3f")
        yield from self._changes(run, at)
        yield self._same(run, output)

    def noise(self) -> Iterator[Line]:
        """Vary the processor of every host by 10 %."""
        chance = random.Random(0)
        minutes = self._lengths.minutes
        with self._long_run(minutes, *self._automatic(), "--replan", "auto") as run:
            run.watch_results(SETTLING)
            began = told = time.monotonic()
            while (now := time.monotonic()) < began + 60 * minutes:
                for host in self._bed.hosts:
                    self._quota(host, CPU * chance.uniform(0.9, 1.1))
                run.watch_s(1.0)
                run.check_going()
                if now > told + _TELL_S:
                    self._tell_progress(f"noise, {(now - began) / 60:.0f} of {minutes:g} minutes", run, told)
                    told = now
            changes, rate = len(run.changes), run.rate(began, time.monotonic())
        for host in self._bed.hosts:
            self._quota(host, CPU)
        yield Line("items/s", rate)
        yield Line(f"changes in {minutes:g} minutes", str(changes), changes == 0)

    def _tell_progress(self, what: str, run: LiveRun, since_s: float) -> None:
        rate, changes = run.rate(since_s, time.monotonic()), len(run.changes)
        self._tell(f"{what}: {rate:.2f} items/s, {changes} changes of the plan so far")

    def square(self) -> Iterator[Line]:
        """Take half of its processor from a host every other half minute."""
        with times_longer(self._bed, "other", MEAN_SLOWNESS):
            mean = self._bed.schedule(self._load, self._bed.hosts).pipeline
        equal = self._square("equal hosts", *self._automatic(), "--replan", "off")
        middle = self._square("the mean", "--schedule-file", str(self._schedule_file("mean", mean)))
        followed = self._square("--replan auto", *self._automatic(), "--replan", "auto")
        best = max((equal, middle), key=lambda one: one.items_per_s)
        yield Line("items/s with the plan for equal hosts", equal.items_per_s)
        yield Line("items/s with the plan for the mean", middle.items_per_s)
        yield Line("items/s with --replan auto", followed.items_per_s)
        ratio = followed.items_per_s / best.items_per_s
        yield Line("against the best plan that stays", ratio, lambda part: part >= SQUARE_GOAL, ".3f")
        later = followed.later_items_per_s / best.later_items_per_s
        yield Line("  in the second half", later, form=".3f")
        yield Line("changes of the plan", str(followed.changes))

    def _square(self, plan: str, *options: str) -> Waved:
        """Run during some periods of the square wave."""
        periods = self._lengths.periods
        with self._long_run(periods, *options) as run:
            run.watch_results(SETTLING)
            began = time.monotonic()
            for period in range(periods):
                since = time.monotonic()
                for fraction in (CPU / 2, CPU):
                    self._quota(VICTIM, fraction)
                    run.watch_s(30.0)
                run.check_going()
                self._tell_progress(f"{plan}, {period + 1} of {periods} minutes", run, since)
            ended = time.monotonic()
            # Whole periods, as the phases are not alike.
            half_time = began + 60.0 * (periods // 2)
            return Waved(run.rate(began, ended), run.rate(half_time, ended), len(run.changes))


def show(console: Console, lines: Iterable[Line]) -> Iterator[Line]:
    """Print lines, and pass them on."""
    for line in lines:
        console.print(f"  {line}")
        yield line


def is_near(points: float) -> bool:
    """Return whether a predicted gain was near enough to the one that came."""
    return abs(points) <= GAIN_GOAL


def main() -> None:
    """Run the scenarios, and exit with 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("slow", "join", "noise", "square")
    parser.add_argument("scenarios", nargs="*", help=f"some of {', '.join(names)} (all)")
    parser.add_argument("--microbatches", type=int, default=320, help="of the runs that end (%(default)s)")
    parser.add_argument("--minutes", type=float, default=20.0, help="length of the noise (%(default)s)")
    parser.add_argument("--periods", type=int, default=5, help="of the square wave (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="of slow and of join (%(default)s)")
    parser.add_argument("--directory", type=Path, help="where to keep the files of the runs, or nowhere")
    arguments = parser.parse_args()
    unknown = set(arguments.scenarios) - set(names)
    if unknown:
        parser.error(f"there is no scenario {sorted(unknown)[0]}")
    counts = (arguments.minutes, arguments.periods, arguments.rounds)
    if min(counts) <= 0 or arguments.microbatches < 200:
        parser.error("--minutes, --periods and --rounds must be positive, --microbatches at least 200")
    if arguments.directory is not None and arguments.directory.exists():
        parser.error(f"--directory {arguments.directory}: exists already")
    console, good = Console(), True
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary)
        small = make_small_models(directory / "models")[0]
        load = Workload(small, UBATCH, directory)
        load.weights()
        bed_name = f"rp{os.getpid()}"
        with raised(bed_name, KINDS, directory / "bed") as bed:
            console.print("profiling")
            bed.profile(load, iterations=8)
            lengths = Lengths(arguments.microbatches, arguments.minutes, arguments.periods)
            scenarios = Scenarios(bed_name, bed, load, lengths, lambda line: console.print(f"  {line}"))
            for name in arguments.scenarios or names:
                times = arguments.rounds if name in ("slow", "join") else 1
                rounds = []
                for number in range(times):
                    console.print(name if times == 1 else f"{name}, round {number + 1} of {times}")
                    rounds.append(list(show(console, getattr(scenarios, name)())))
                judged = rounds[0]
                if times > 1:
                    console.print(f"{name}, medians")
                    facts = [line for lines in rounds for line in lines if isinstance(line.good, bool)]
                    judged = [*facts, *show(console, medians(rounds))]
                good &= all(line.is_good for line in judged)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
