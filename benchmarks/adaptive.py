"""Compare adaptive links with links of fixed bits: ``python benchmarks/adaptive.py``.

    host 0  ──stage 0──┐  eth0                eth0  ┌──stage 1── host 1
    (rank 0, namespace)└────── virtual cable ───────┘  (rank 1, namespace)
                     tc htb in both directions, by a trace

The trace is QuantPipe's (Wang et al. 2023): unlimited, 500, 50 and 250 Mbit/s, then unlimited again; here,
its segments last seconds instead of minutes. DeiT-Tiny is cut after the third layer of a block, where most
values cross, so that each bandwidth has a different best width. Every policy runs through the same trace.
Throughput is that of the last stage in a segment, after one window and the frames in flight at the change
(four) have passed. The ranks have priority over other work.

Writes ``adaptive.csv`` (a row for each run and moment), ``segments.csv`` (a row for each run and segment)
and ``adaptive.png`` to ``--output``. Needs root, ``ip`` and ``tc``, and the extra ``plot``. The exit status
is 1 if ``auto`` is below nine tenths of the best fixed width in any segment.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
MODEL = "facebook/deit-tiny-distilled-patch16-224"
PARTITION = "1,23,24,48"
UBATCH = 8
WINDOW = 5
"""Number of microbatches between decisions."""
UNDER_WAY = 4
"""Number of frames that may be in flight when the bandwidth changes."""
TARGET = 0.9
UNLIMITED = 10_000
LIMIT_S = 300
ADDRESS = "10.88.0.{}"


@dataclass(frozen=True)
class Segment:
    """A part of the trace."""

    mbit_per_s: int
    seconds: float


TRACE = (
    Segment(UNLIMITED, 5),
    Segment(500, 7),
    Segment(50, 14),
    Segment(250, 8),
    Segment(UNLIMITED, 6),
)


@dataclass(frozen=True)
class Way:
    """A policy for the bits of a link."""

    name: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """Result of one run."""

    way: Way
    begins: tuple[float, ...]
    """Start of each segment and end of the last one, in seconds of the run."""
    first: dict[str, list[Any]]
    """Series of the first stage, with its link."""
    last: dict[str, list[Any]]
    """Series of the last stage, with the results."""

    def rate(self, number: int) -> float | None:
        """Return the items per second of a segment without its beginning, or None if it is too short."""
        begin, end = self.begins[number], self.begins[number + 1]
        moments = [
            (until, rate)
            for until, rate in zip(self.last["t_s"], self.last["items_per_s"], strict=True)
            if until > begin
        ]
        since, skip = begin, (WINDOW + UNDER_WAY) * UBATCH
        items = seconds = 0.0
        for until, rate in moments:
            if until > end:
                break
            step, since = until - since, until
            if skip > 0:
                skip -= rate * step
                continue
            items += rate * step
            seconds += step
        return items / seconds if seconds else None

    def bits(self, number: int) -> float:
        """Return the mean bits per value at the end of a segment."""
        inside = [
            bits
            for until, bits in zip(self.first["t_s"], self.first["bits"], strict=True)
            if self.begins[number] < until <= self.begins[number + 1]
        ]
        return inside[-1] if inside else float("nan")


def ways(target: float, widths: Sequence[int]) -> list[Way]:
    """Return the policies to compare, fixed ones first."""
    found = [Way(f"{bits} bits" if bits else "none", ("-q", f"{bits},0")) for bits in widths]
    window = ("--window-size", str(WINDOW))
    for policy in ("heuristic", "heuristic2", "controller"):
        found.append(Way(policy, ("--adaptive", policy, "--send-constraint", f"{target:.6g}", *window)))
    return [*found, Way("auto", ("--adaptive", "auto", *window))]


def ip(*arguments: str) -> None:
    """Run ``ip``, which must succeed."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@contextmanager
def hosts() -> Iterator[tuple[str, str]]:
    """Create two network namespaces with a cable between them, for the duration of a block."""
    names = (f"pe{os.getpid()}a", f"pe{os.getpid()}b")
    try:
        for name in names:
            ip("netns", "add", name)
        ends = ("eth0", "netns", names[0], "type", "veth", "peer", "eth0", "netns", names[1])
        ip("link", "add", *ends)
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"{ADDRESS.format(number)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            shape(name, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "default", "1")
            limit(name, UNLIMITED, "add")
        time.sleep(1)  # the kernel takes a moment to see that both ends are up
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=10)


def shape(name: str, *arguments: str) -> None:
    """Run ``tc`` in a namespace, which must succeed."""
    subprocess.run(["tc", "-n", name, *arguments], check=True, capture_output=True, timeout=10)


def limit(name: str, mbit_per_s: int, verb: str = "change") -> None:
    """Limit the rate at which the namespace sends."""
    place = ("dev", "eth0", "parent", "1:", "classid", "1:1")
    shape(name, "class", verb, *place, "htb", "rate", f"{mbit_per_s}mbit", "quantum", "60000")


def inside(name: str) -> list[str]:
    """Return the command prefix that runs a Python script in a namespace, ahead of all other work."""
    # Linux first divides processors between sessions, by the niceness of each, then within each.
    first = ["sh", "-c", 'echo -20 > /proc/self/autogroup; exec nice -n -20 "$@"', "sh"]
    return ["ip", "netns", "exec", name, *first, sys.executable]


def refuse() -> str | None:
    """Return the reason why the benchmark cannot run here, if there is one."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces and to limit what they send"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"needs the program {program} (iproute2)"
    try:
        with hosts():
            return None
    except subprocess.CalledProcessError as error:
        return f"cannot make two hosts here: {error.stderr.decode(errors='replace').strip()}"


def play(
    way: Way, items: int, trace: Sequence[Segment], names: Sequence[str], directory: Path, comm: str
) -> Result:
    """Run one policy through the trace."""
    (weights,) = directory.glob("*.npz")
    report = directory / "report.json"
    report.unlink(missing_ok=True)
    common = ["-m", MODEL, "-M", str(weights), "-b", str(items), "-u", str(UBATCH), "-pt", PARTITION]
    common += ["-c", comm, "--addr", ADDRESS.format(1), "--timeout", "120", *way.options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    own = (("--report", str(report)), ())
    for name in names:
        limit(name, trace[0].mbit_per_s)
    created = time.time()
    running = [
        subprocess.Popen(
            [*inside(name), str(ROOT / "runtime.py"), str(rank), "2", *common, *own[rank]],
            cwd=directory,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for rank, name in enumerate(names)
    ]
    try:
        changes = follow(trace, names, running)
        for process in running:
            _, said = process.communicate(timeout=LIMIT_S)
            if process.returncode:
                raise SystemExit(f"{way.name}: {said.decode(errors='replace').strip()}")
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    body = json.loads(report.read_text())
    began = created + body["startup_s"]
    begins = (0.0, *(at - began for at in changes))
    return Result(way, begins, body["series"][0], body["series"][-1])


def follow(
    trace: Sequence[Segment], names: Sequence[str], running: Sequence[subprocess.Popen[bytes]]
) -> list[float]:
    """Change the bandwidth according to the trace, and return the end of each segment."""
    changes = []
    for number, segment in enumerate(trace):
        # The first segment includes the start of the ranks.
        until = time.time() + segment.seconds + (2.0 if number == 0 else 0.0)
        while time.time() < until and any(process.poll() is None for process in running):
            time.sleep(0.05)
        if number + 1 < len(trace):
            for name in names:
                limit(name, trace[number + 1].mbit_per_s)
        changes.append(time.time())
    return changes


def write(results: Sequence[Result], trace: Sequence[Segment], directory: Path) -> None:
    """Write both tables."""
    with (directory / "adaptive.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["run", "t_s", "mbit_per_s", "bits", "link_mbit_per_s", "items_per_s"])
        for result in results:
            for place, moment in enumerate(result.first["t_s"]):
                carried = result.first["link_bytes_per_s"][place]
                out = next(
                    (
                        rate
                        for until, rate in zip(result.last["t_s"], result.last["items_per_s"], strict=True)
                        if until >= moment
                    ),
                    "",
                )
                rows.writerow(
                    [
                        result.way.name,
                        moment,
                        bandwidth_at(result, trace, moment),
                        result.first["bits"][place],
                        "" if carried is None else round(8e-6 * carried, 3),
                        out,
                    ]
                )
    with (directory / "segments.csv").open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["run", "segment", "mbit_per_s", "items_per_s", "bits"])
        for result in results:
            for number, segment in enumerate(trace):
                rate = result.rate(number)
                shown = "" if rate is None else round(rate, 3)
                rows.writerow([result.way.name, number, segment.mbit_per_s, shown, result.bits(number)])


def bandwidth_at(result: Result, trace: Sequence[Segment], moment: float) -> int:
    """Return the bandwidth of the link in Mbit/s at ``moment`` of the run of ``result``."""
    for number, segment in enumerate(trace):
        if moment <= result.begins[number + 1]:
            return segment.mbit_per_s
    return trace[-1].mbit_per_s


def draw(results: Sequence[Result], trace: Sequence[Segment], path: Path) -> None:
    """Draw bandwidth, bits and throughput over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, middle, bottom) = plt.subplots(3, 1, figsize=(11, 9), sharex=True)
    shown = results[-1]
    edges = [(begin, segment.mbit_per_s) for begin, segment in zip(shown.begins, trace, strict=False)]
    edges.append((shown.begins[-1], trace[-1].mbit_per_s))
    top.step([at for at, _ in edges], [rate for _, rate in edges], where="post", color="black", label="limit")
    for number, result in enumerate(results):
        adapts = "--adaptive" in result.way.options
        style: dict[str, Any] = {
            "color": f"C{number}",
            "linewidth": 1.6 if adapts else 0.8,
            "linestyle": "-" if adapts else ":",
        }
        if adapts:
            measured = [
                (at, 8e-6 * pace)
                for at, pace in zip(result.first["t_s"], result.first["link_bytes_per_s"], strict=True)
                if pace is not None
            ]
            top.plot([at for at, _ in measured], [pace for _, pace in measured], alpha=0.6, **style)
            middle.plot(result.first["t_s"], result.first["bits"], label=result.way.name, **style)
        bottom.plot(result.last["t_s"], result.last["items_per_s"], label=result.way.name, **style)
    top.set_yscale("log")
    top.set_ylabel("link, Mbit/s (black: its limit)")
    middle.set_ylabel("bits per value")
    bottom.set_ylabel("items/s")
    bottom.set_xlabel("seconds")
    middle.legend(fontsize=8)
    bottom.legend(fontsize=8, ncols=2)
    for plot in (top, middle, bottom):
        for begin in shown.begins:
            plot.axvline(begin, color="grey", linewidth=0.4)
    bottom.set_xlim(0, shown.begins[-1])
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def table(results: Sequence[Result], trace: Sequence[Segment], console: Console) -> float:
    """Print a row for each run; return the worst ratio of ``auto`` to the best fixed width."""
    shown = Table(
        "items/s at Mbit/s", *("any" if s.mbit_per_s == UNLIMITED else f"{s.mbit_per_s}" for s in trace)
    )
    for result in results:
        rates = [result.rate(number) for number in range(len(trace))]
        cells = [
            "-" if rate is None else f"{rate:.1f} ({result.bits(number):.3g} bits)"
            for number, rate in enumerate(rates)
        ]
        shown.add_row(result.way.name, *cells)
    console.print(shown)
    auto = results[-1]
    fixed = [result for result in results if "--adaptive" not in result.way.options]
    worst = float("inf")
    for number in range(len(trace)):
        best = max((result.rate(number) or 0.0 for result in fixed), default=0.0)
        if best:
            worst = min(worst, (auto.rate(number) or 0.0) / best)
    return worst


def main() -> int:
    """Run all policies, and write and print the results; return 1 if the target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("bench-out"),
        metavar="DIR",
        help="directory for the results (bench-out)",
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="factor for the length of the trace (1)"
    )
    parser.add_argument(
        "--items-per-s", type=float, default=70, metavar="N", help="highest expected throughput (70)"
    )
    parser.add_argument(
        "--send-constraint",
        type=float,
        default=40,
        metavar="N",
        help="target of the policies that need one (40)",
    )
    parser.add_argument(
        "--fixed", default="0,16,8,6,4,2", metavar="LIST", help="fixed bit widths (0,16,8,6,4,2)"
    )
    parser.add_argument("-c", "--comm", default="p2p", choices=("p2p", "rpc"), help="transport (p2p)")
    arguments = parser.parse_args()
    console = Console()
    why = refuse()
    if why is not None:
        print(f"adaptive.py: {why}", file=sys.stderr)
        return 2
    trace = [Segment(one.mbit_per_s, one.seconds * arguments.scale) for one in TRACE]
    items = round(arguments.items_per_s * sum(one.seconds for one in trace) / UBATCH) * UBATCH
    results = []
    with tempfile.TemporaryDirectory() as text, hosts() as names:
        directory = Path(text)
        save = [sys.executable, str(ROOT / "save_model_weights.py"), "--random", "-m", MODEL, "-o", text]
        subprocess.run(save, check=True, capture_output=True, timeout=LIMIT_S)
        for way in ways(arguments.send_constraint, [int(bits) for bits in arguments.fixed.split(",")]):
            results.append(play(way, items, trace, names, directory, arguments.comm))
            console.print(f"{way.name}: done", highlight=False)
    arguments.output.mkdir(exist_ok=True)
    write(results, trace, arguments.output)
    draw(results, trace, arguments.output / "adaptive.png")
    worst = table(results, trace, console)
    console.print(f"auto: {worst:.2f} of the best fixed width in its worst segment, target >= {TARGET}")
    return 0 if worst >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
