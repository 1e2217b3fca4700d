#!/usr/bin/env python3
"""Disturb real runs, and compare their results with those of a run that was left alone.

    disturbances   kills, suspensions, exceptions in a layer, cut cables (with root), of any rank but 0 and at
                   any moment; a fifth of them with a second one within two seconds
    base           ViT-Base, with its weights in the page cache: from a kill to the next new result
    overhead       throughput with --on-failure continue, against stop, when nothing fails
    rounds         one rank leaves and comes back again and again in one run: memory, threads, sockets

The results of every run must equal those of the undisturbed one to the byte, so none is lost, written twice
or out of order. From a kill to the first result of the new epoch, the time is divided into what passes until
there is a new plan, until its layers are loaded, and until the pipeline is filled.

A run has several disturbances, one after the other; a disturbed rank is started again. ``--seed`` and
``--only`` repeat one run. Needs two idle cores for figures, and minutes: ``--count 1000`` takes hours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil
from disturbing import KINDS, Cables, Disturbance, Progress, Ranks, cables
from recoveries import (
    CONTINUE,
    LIMIT_S,
    OWN,
    SHAPES,
    STOP,
    WORLD,
    Load,
    Recovery,
    base_load,
    digits_load,
    made,
    print_recoveries,
    run_alone,
)
from rich.console import Console

from pipeedge.base.files import write_secret
from pipeedge.transport.new_key import make_key

LAYERS = 16
PAUSE_S = 1.0
"""Longest time in seconds until a disturbed rank is started again."""
SECOND_SHARE = 0.2
SECOND_WITHIN_S = 2.0
MOST_REPEATED = 3
"""Goal for microbatches computed again, as a multiple of the number of stages."""
SETTLED = 20
"""Results after which the next disturbance may come."""
ENDS_WITHIN_S = 20.0
"""Seconds within which the other ranks end after rank 0."""
MOST_FAULTS = 10
"""Number of runs with a fault after which no more are tried."""
BASE_GOAL_S = 1.5
OVERHEAD_ITEMS = 12_000
OVERHEAD_GOAL = 0.99
ROUND_ITEMS = 1_000
"""Items for each round of leaving and coming back."""
GROWTH = 1.05
"""Largest resident memory after many rounds, relative to that in the second third of them."""


@dataclass
class Tally:
    """Outcome of all disturbed runs."""

    runs: int = 0
    disturbances: list[Disturbance] = field(default_factory=list)
    epochs: int = 0
    """Number of new plans."""
    recoveries: list[Recovery] = field(default_factory=list)
    most_repeated: float = 0.0
    """Most microbatches that were computed again, as a multiple of the stages that the failed epoch had."""
    faults: list[str] = field(default_factory=list)


def make_variants(directory: Path) -> list[tuple[str, ...]]:
    """Return options for schedules (partitions, and the scheduler's files), with a key and without."""
    names = {name: directory / f"{name}.yml" for name in ("models", "types", "devices")}
    sizes = {
        "layers": LAYERS,
        "mem_MB": [1.0] * LAYERS,
        "parameters_in": 64,
        "parameters_out": [544] * LAYERS,
    }
    names["models"].write_text(json.dumps({"vit-digits": sizes}))
    kinds = {
        kind: {
            "bw_Mbps": 1000,
            "mem_MB": 100,
            "model_profiles": {
                "vit-digits": [{"batch_size": 8, "dtype": "float32", "time_s": [seconds] * LAYERS}]
            },
        }
        for kind, seconds in (("slow", 0.002), ("fast", 0.001))
    }
    names["types"].write_text(json.dumps(kinds))
    names["devices"].write_text(json.dumps({"slow": ["0", "1"], "fast": ["2", "3"]}))
    files = zip(("-sm", "-sdt", "-sd"), map(str, names.values()), strict=True)
    plans = [*SHAPES, tuple(word for pair in files for word in pair)]
    key = directory / "run.pem"
    write_secret(key, make_key(), "key")
    return [*plans, *((*plan, "--key", str(key)) for plan in plans)]


class DisturbedRun:
    """A run with disturbances, which its seed determines, as far as the speed of the machine allows.

    Args:
        load: What is run, and its results.
        variants: Further options to choose from.
        number: Number of the run.
        seed: Seed of all runs.
        disturbances: Number of disturbances, without those that follow another one at once.
    """

    def __init__(
        self, load: Load, variants: Sequence[tuple[str, ...]], number: int, seed: int, disturbances: int
    ) -> None:
        self._random = random.Random(f"{seed}, {number}")
        self._load = load
        self._directory = made(load.directory / f"run{number}")
        self._progress = Progress(self._directory / "out.npz")
        self._name = f"--seed {seed} --only {number}"
        self._options = (*load.options, *self._random.choice(variants), *CONTINUE)
        self._moments = sorted(self._random.random() for _ in range(disturbances))
        self._kinds = KINDS if load.net is not None else KINDS[:-1]
        self._disturbances: list[Disturbance] = []

    def run(self, tally: Tally) -> None:
        """Run it, and add what came of it to ``tally``."""
        fault = ""
        with Ranks(WORLD, self._options, OWN, self._directory, self._load.net) as ranks:
            try:
                self._disturb_all(ranks)
                ranks.watch(self._progress, sys.maxsize, LIMIT_S)
                fault = self._fault(ranks)
            except TimeoutError as error:
                fault = str(error)
            said = ranks.said()
        tally.runs += 1
        tally.disturbances += self._disturbances
        if fault:
            what = ", ".join(map(str, self._disturbances))
            tally.faults.append(f"{self._name} ({what}): {fault}\n{said}")
        else:
            self._evaluate(tally)

    def _disturb_all(self, ranks: Ranks) -> None:
        settled = 0.0
        for moment in self._moments:
            wanted = max(moment * self._load.size, settled, 1)
            if not ranks.watch(self._progress, int(wanted), LIMIT_S):
                return
            self._disturb(ranks)
            settled = self._progress.look() + SETTLED * self._load.record
            # Some are started again before the others know that they are gone, and some long after.
            if self._random.random() < 0.5 and not ranks.watch(self._progress, int(settled), LIMIT_S):
                return
            self._let_pass(self._random.uniform(0, PAUSE_S))
            if ranks.status(0) is not None:
                return
            for one in self._disturbances:
                if not one.repaired:
                    ranks.repair(one)

    def _disturb(self, ranks: Ranks) -> None:
        """Disturb one rank, or two within seconds."""
        targets, kinds = self._random.sample(range(1, WORLD), 2), self._random.sample(self._kinds, 2)
        first = ranks.disturb(kinds[0], targets[0])
        self._disturbances.append(first)
        if self._random.random() < SECOND_SHARE:
            self._let_pass(self._random.uniform(0, SECOND_WITHIN_S))
            second = ranks.disturb(kinds[1], targets[1])
            first.alone = second.alone = False
            self._disturbances.append(second)

    def _let_pass(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._progress.look()
            time.sleep(0.002)

    def _fault(self, ranks: Ranks) -> str:
        """Return what is wrong with the outcome, if anything is."""
        status = ranks.status(0, LIMIT_S)
        if status != 0:
            return f"rank 0 ended with status {status}"
        left = sorted(path.name for path in self._directory.glob("*.part*"))
        if left:
            return f"{', '.join(left)} stayed behind"
        results = (self._directory / "out.npz").read_bytes()
        if results != self._load.results:
            return f"the results differ from those of the undisturbed run ({len(results)} bytes)"
        disturbed = {one.rank for one in self._disturbances}
        for rank in set(range(1, WORLD)) - disturbed:
            if ranks.status(rank, ENDS_WITHIN_S) != 0:
                return f"rank {rank}, which was not disturbed, ended with status {ranks.status(rank)}"
        return ""

    def _evaluate(self, tally: Tally) -> None:
        """Add the figures of the epochs."""
        body = json.loads((self._directory / "report.json").read_text())
        began_s = self._progress.grew_s[-1] - body["elapsed_s"]
        for failed, epoch in pairwise(body["epochs"]):
            stages = len(failed["schedule"])
            tally.epochs += 1
            tally.most_repeated = max(tally.most_repeated, epoch["repeated"] / stages)
            plan_s = began_s + epoch["started_s"] - epoch["preparing_s"]
            causes = [one for one in self._disturbances if one.at_s < plan_s]
            if not causes or not causes[-1].alone or causes[-1].recovered:
                continue
            causes[-1].recovered = True
            tally.recoveries.append(
                Recovery(
                    causes[-1].kind,
                    plan_s - causes[-1].at_s,
                    epoch["preparing_s"],
                    epoch["filling_s"],
                    epoch["repeated"],
                    stages,
                )
            )


def disturb(load: Load, arguments: argparse.Namespace, console: Console) -> bool:
    """Run with disturbances until there were enough; print the outcome and return whether it is right."""
    tally = Tally()
    variants = make_variants(load.directory)
    number = 0 if arguments.only is None else arguments.only
    while len(tally.disturbances) < arguments.count:
        known = len(tally.faults)
        DisturbedRun(load, variants, number, arguments.seed, arguments.each).run(tally)
        number += 1
        for fault in tally.faults[known:]:
            console.print(fault, highlight=False, markup=False, soft_wrap=True)
        if arguments.only is not None or len(tally.faults) >= MOST_FAULTS:
            break
    kinds = Counter(one.kind for one in tally.disturbances)
    by_kind = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    console.print(
        f"{len(tally.disturbances)} disturbances ({by_kind}) in "
        f"{tally.runs} runs of {load.microbatches} microbatches, {tally.epochs} new plans: "
        f"{len(tally.faults)} runs with a fault; the results of all others are identical",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"microbatches computed again: at most {tally.most_repeated:.1f} x stages (goal {MOST_REPEATED})"
    )
    print_recoveries(console, tally.recoveries)
    return not tally.faults and tally.most_repeated <= MOST_REPEATED


def measure_base(load: Load, runs: int, console: Console) -> bool:
    """Kill a stage of ViT-Base in each of several runs; return whether the median recovery is fast enough."""
    found = []
    for number in range(runs):
        place = made(load.directory / f"base{number}")
        progress = Progress(place / "out.npz")
        with Ranks(WORLD, (*load.options, *CONTINUE), OWN, place, load.net) as ranks:
            ranks.watch(progress, load.size // 2, LIMIT_S)
            killed = ranks.disturb("kill", 1)
            ranks.watch(progress, sys.maxsize, LIMIT_S)
            if ranks.status(0, LIMIT_S) != 0 or (place / "out.npz").read_bytes() != load.results:
                console.print(f"ViT-Base: failed: {ranks.said()}", markup=False, highlight=False)
                return False
        body = json.loads((place / "report.json").read_text())
        epoch = body["epochs"][1]
        plan_s = progress.grew_s[-1] - body["elapsed_s"] + epoch["started_s"] - epoch["preparing_s"]
        parts = (plan_s - killed.at_s, epoch["preparing_s"], epoch["filling_s"])
        found.append(Recovery("kill", *parts, epoch["repeated"], len(epoch["schedule"])))
    console.print(f"ViT-Base, rank 1 of {WORLD} killed, rank 3 a spare (goal {BASE_GOAL_S} s in all)")
    print_recoveries(console, found)
    return statistics.median(one.total_s for one in found) <= BASE_GOAL_S


def measure_overhead(load: Load, pairs: int, console: Console) -> bool:
    """Run with both policies in turn; return whether going on costs no throughput when nothing fails."""
    ratios = []
    for number in range(pairs):
        order = [("stop", STOP), ("continue", CONTINUE)]
        took = {
            name: run_alone(load, f"{name}{number}", *SHAPES[0], *options).elapsed_s
            for name, options in (order if number % 2 == 0 else reversed(order))
        }
        ratios.append(took["stop"] / took["continue"])
    ratio = statistics.median(ratios)
    spread = f"{min(ratios):.3f} to {max(ratios):.3f} of {pairs} pairs"
    console.print(
        f"throughput of continue against stop: {ratio:.3f} ({spread}; goal {OVERHEAD_GOAL})", highlight=False
    )
    return ratio >= OVERHEAD_GOAL


def measure_rounds(load: Load, rounds: int, console: Console) -> bool:
    """Let two ranks leave and come back in turn; return whether the others hold no more in the end.

    Each comes back as a spare, and takes the place of the other one when that leaves.
    """
    place = made(load.directory / "rounds")
    progress = Progress(place / "out.npz")
    holds: list[dict[int, Held]] = []
    with Ranks(WORLD, (*load.options, *SHAPES[1], *CONTINUE), OWN, place, load.net) as ranks:
        for number in range(rounds):
            if not ranks.watch(progress, progress.look() + 1, LIMIT_S):
                break
            holds.append({rank: Held.by(ranks.pid(rank)) for rank in (0, 1)})
            ranks.repair(ranks.disturb("kill", 2 + number % 2))
            if not ranks.watch_words(progress, "has joined", number + 1, LIMIT_S):
                break
        ranks.watch(progress, sys.maxsize, LIMIT_S + 3 * load.elapsed_s)
        right = ranks.status(0, LIMIT_S) == 0 and (place / "out.npz").read_bytes() == load.results
        if not right or len(holds) < rounds:
            console.print(f"rounds: {len(holds)} of {rounds} before the end: {ranks.said()}", markup=False)
            return False
    flat = [_is_flat(rank, [hold[rank] for hold in holds], console) for rank in (0, 1)]
    return all(flat)


def _is_flat(rank: int, holds: Sequence[Held], console: Console) -> bool:
    """Print what a rank held at first and in the end; return whether it is about the same."""
    part = max(1, len(holds) // 3)
    early, late = (Held.median(some) for some in (holds[part : 2 * part] or holds, holds[-part:]))
    console.print(
        f"{len(holds)} rounds, rank {rank}: in the second third {early}, in the last third {late}",
        highlight=False,
        soft_wrap=True,
    )
    return (
        late.memory_mb <= GROWTH * early.memory_mb
        and late.threads <= early.threads
        and late.files <= early.files
    )


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    memory_mb: float
    threads: float
    files: float
    """Number of open files and sockets."""

    @classmethod
    def by(cls, pid: int) -> Held:
        """Return what a process holds now."""
        process = psutil.Process(pid)
        return cls(process.memory_info().rss / 2**20, process.num_threads(), process.num_fds())

    @classmethod
    def median(cls, some: Sequence[Held]) -> Held:
        """Return the median of each figure."""
        figures = zip(*((one.memory_mb, one.threads, one.files) for one in some), strict=True)
        return cls(*(statistics.median(figure) for figure in figures))

    def __str__(self) -> str:
        return f"{self.memory_mb:.0f} MB, {self.threads:.0f} threads, {self.files:.0f} files and sockets"


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    whole = {"type": int, "metavar": "N"}
    parser.add_argument("--count", default=40, **whole, help="disturbances; 0 leaves this part out (40)")
    parser.add_argument("--each", default=4, **whole, help="disturbances of one run (4)")
    parser.add_argument("--items", default=12_000, **whole, help="items of a disturbed run (12000)")
    parser.add_argument("--seed", default=0, **whole, help="seed of the disturbances (0)")
    parser.add_argument("--only", **whole, help="repeat only the disturbed run of this number")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="--timeout of the ranks (5)")
    parser.add_argument("--base", default=5, **whole, help="runs of ViT-Base (5)")
    parser.add_argument("--pairs", default=5, **whole, help="pairs of runs for the overhead (5)")
    parser.add_argument("--rounds", default=50, **whole, help="times that a rank leaves and comes back (50)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="new directory for all files, to keep them")
    parser.add_argument("--loopback", action="store_true", help="use no network namespaces, and cut no cable")
    return parser.parse_args()


@contextlib.contextmanager
def workplace(arguments: argparse.Namespace) -> Iterator[tuple[Path, Cables | None]]:
    """Yield a directory, and network namespaces if there may be any."""
    with contextlib.ExitStack() as stack:
        if arguments.keep is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            directory = made(arguments.keep.absolute())
        yield directory, None if arguments.loopback else stack.enter_context(cables(WORLD))


def main() -> None:
    """Print the tables; the status says whether all goals are met."""
    arguments = parse()
    console = Console()
    console.print(f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores", highlight=False)
    with workplace(arguments) as (directory, net):
        met = []
        if arguments.count:
            load = digits_load(directory, net, arguments.items, "digits", arguments.timeout)
            met.append(disturb(load, arguments, console))
        if arguments.base:
            met.append(measure_base(base_load(directory, net), arguments.base, console))
        if arguments.pairs:
            load = digits_load(directory, net, OVERHEAD_ITEMS, "overhead", arguments.timeout)
            met.append(measure_overhead(load, arguments.pairs, console))
        if arguments.rounds:
            items = ROUND_ITEMS * arguments.rounds
            load = digits_load(directory, net, items, "many", arguments.timeout, "-u", "2")
            met.append(measure_rounds(load, arguments.rounds, console))
    sys.exit(0 if all(met) else 1)


if __name__ == "__main__":
    main()
