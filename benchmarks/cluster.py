"""What a cluster is good for: ``sudo python benchmarks/cluster.py``, or ``make bench-cluster``.

On the test bed, with ViT-Base and BERT-Base: eight equal hosts of a quarter of a processor each, as eight
pipelines of one host, four of two, two of four and one of eight, so that the machine always has the same to
do; then clusters of unequal hosts and links, where the best schedule stands beside an equal split, beside
the best schedule for a cluster whose hosts are all of the first type, and beside one with compressed links.
Everything is profiled in the test bed first, and each throughput is put beside what the scheduler and the
simulator had promised.

    bed ──profile──> files ──sched-pipeline──> schedules ──run──> items/s ──> table, JSON ──> picture

Throughput is that of the full pipeline. Wants root and an idle machine with two processors. ``--small``
does the same with models of a ninth of the work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from beds import (
    Bed,
    Kind,
    Pipeline,
    Promise,
    Workload,
    even_split,
    make_small_models,
    raised,
    steady_items_per_s,
)
from rich import box
from rich.console import Console
from rich.table import Table

from pipeedge.models import find_model

MODELS = ("google/vit-base-patch16-224", "bert-base-uncased")
CLUSTERS = {
    "equal": (Kind("host", 8, 0.25, 500),),
    "2x": (
        Kind("fast", 2, 0.3, 500),
        Kind("far", 2, 0.3, 50),
        Kind("slow", 2, 0.15, 500),
        Kind("slowfar", 2, 0.15, 5),
    ),
    "4x": (
        Kind("fast", 2, 0.4, 500),
        Kind("mid", 2, 0.2, 200),
        Kind("midfar", 2, 0.2, 20),
        Kind("slow", 1, 0.1, 500),
        Kind("slowfar", 1, 0.1, 5),
    ),
}
"""The first host has the data."""
SPEEDUP = 7.2
"""Of eight equal hosts."""
OF_OPTIMUM = 0.95
LEAST_MICROBATCHES = 6
FILLINGS = 3
"""Microbatches for each stage, at least, but in no run of so many times the length that was asked:"""
PATIENCE = 2.5


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    model: str
    cluster: str
    what: str
    hosts: int
    items_per_s: float
    alone_items_per_s: float
    """Of the fastest host by itself."""
    scheduled_items_per_s: float | None
    """As the scheduler promised; None where it was not asked."""
    simulated_items_per_s: float
    stages: str

    @property
    def speedup(self) -> float:
        """Over one host."""
        return self.items_per_s / self.alone_items_per_s

    @property
    def of_promise(self) -> float | None:
        """Measured, as a part of what the scheduler promised."""
        return self.items_per_s / self.scheduled_items_per_s if self.scheduled_items_per_s else None


@dataclass(frozen=True)
class Course:
    """How long and how often."""

    seconds: float
    repetitions: int
    iterations: int


def measured(
    bed: Bed, load: Workload, pipelines: Sequence[Pipeline], course: Course, asked: int | None = None
) -> tuple[float, float]:
    """Items a second of pipelines that run side by side, and of the first as simulated.

    Args:
        bed: where.
        load: what they run.
        pipelines: on hosts of their own.
        course: for how long.
        asked: the median is of so many of them, the first; None: of all. They are alike; the others keep
            the machine as busy as it is when all hosts take part in one pipeline.
    """
    simulated = [bed.simulate(load, pipeline, 100) for pipeline in pipelines]
    items = [
        load.ubatch * microbatches(course.seconds * rate / load.ubatch, len(pipeline.stages))
        for pipeline, rate in zip(pipelines, simulated, strict=True)
    ]
    found = []
    for _ in range(course.repetitions):
        reports = bed.run(load, pipelines, items)
        found += [steady_items_per_s(report) for report in reports[:asked]]
    return statistics.median(found), simulated[0]


def microbatches(wanted: float, stages: int) -> int:
    """Of a run: as many as are wanted, and so many that the pipeline is full, if that takes not too long."""
    return max(LEAST_MICROBATCHES, round(wanted), min(FILLINGS * stages, round(PATIENCE * wanted)))


def alone(bed: Bed, load: Workload, course: Course) -> tuple[float, Promise, float]:
    """The fastest hosts, each by itself, while all others run too: measured, scheduled, simulated."""
    promises = [bed.schedule(load, [host]) for host in bed.hosts]
    promises.sort(key=lambda promise: -promise.items_per_s)
    fastest = promises[0]
    alike = sum(promise.items_per_s > 0.99 * fastest.items_per_s for promise in promises)
    found, simulated = measured(bed, load, [promise.pipeline for promise in promises], course, alike)
    return found, fastest, simulated


def equal_hosts(bed: Bed, load: Workload, course: Course) -> Iterator[Figure]:
    """One, two, four and eight hosts, with all of them always at work."""
    layers, one = find_model(load.model).n_layers, 0.0
    for hosts in (1, 2, 4, 8):
        groups = [bed.hosts[first : first + hosts] for first in range(0, len(bed.hosts), hosts)]
        promises = [bed.schedule(load, group) for group in groups]
        pipelines = [promise.pipeline for promise in promises]
        found, simulated = measured(bed, load, pipelines, course)
        one = one or found
        name = load.name, "equal"
        promise = promises[0].items_per_s
        yield Figure(*name, "best", hosts, found, one, promise, simulated, str(pipelines[0]))
        if hosts == len(bed.hosts):
            even = even_split(layers, bed.hosts)
            found, simulated = measured(bed, load, [even], course)
            yield Figure(*name, "equal split", hosts, found, one, None, simulated, str(even))


def unequal_hosts(bed: Bed, load: Workload, course: Course, cluster: str) -> Iterator[Figure]:
    """The best schedules, as soon as the hosts are profiled: a machine that others use too is as fast as it
    was then for a while only. Then one host, and the other schedules."""
    name, hosts = (load.name, cluster), bed.hosts
    promises = {
        "best": bed.schedule(load, hosts),
        "best, links compressed": bed.schedule(load, hosts, "--link-bits", "auto"),
    }
    found = {what: measured(bed, load, [promise.pipeline], course) for what, promise in promises.items()}
    one, promise, simulated = alone(bed, load, course)
    yield Figure(*name, "one host", 1, one, one, promise.items_per_s, simulated, str(promise.pipeline))
    for what, promise in promises.items():
        rate, simulated = found[what]
        count, stages = len(promise.pipeline.stages), str(promise.pipeline)
        yield Figure(*name, what, count, rate, one, promise.items_per_s, simulated, stages)
    rivals = {
        "equal split": even_split(find_model(load.model).n_layers, hosts),
        "as if all were of the first type": bed.schedule(load, hosts, alike=True).pipeline,
    }
    for what, pipeline in rivals.items():
        rate, simulated = measured(bed, load, [pipeline], course)
        yield Figure(*name, what, len(pipeline.stages), rate, one, None, simulated, str(pipeline))


def shown(figures: Sequence[Figure]) -> Table:
    """As a table."""
    table = Table(
        *("model", "cluster", "schedule", "hosts", "items/s", "to one host"),
        *("scheduler", "measured to it", "simulator", "measured to it"),
        box=box.MARKDOWN,
    )
    for figure in figures:
        promised, part = figure.scheduled_items_per_s, figure.of_promise
        table.add_row(
            figure.model,
            figure.cluster,
            figure.what,
            str(figure.hosts),
            f"{figure.items_per_s:.2f}",
            f"{figure.speedup:.2f}x",
            "" if promised is None else f"{promised:.2f}",
            "" if part is None else f"{part - 1:+.1%}",
            f"{figure.simulated_items_per_s:.2f}",
            f"{figure.items_per_s / figure.simulated_items_per_s - 1:+.1%}",
        )
    return table


def misses(figures: Sequence[Figure]) -> Iterator[str]:
    """Each target that is not reached, a line."""
    for figure in figures:
        name = f"{figure.model}, {figure.cluster}"
        if figure.cluster == "equal":
            if figure.what == "best" and figure.hosts == 8 and figure.speedup < SPEEDUP:
                yield f"{name}: {figure.speedup:.2f} times one host, asked {SPEEDUP}"
        elif figure.of_promise is not None and figure.of_promise < OF_OPTIMUM and figure.hosts > 1:
            yield f"{name}, {figure.what}: {figure.of_promise:.3f} of what was promised, asked {OF_OPTIMUM}"
        rivals = [
            other
            for other in figures
            if (other.model, other.cluster, other.what) == (figure.model, figure.cluster, "equal split")
        ]
        if figure.what == "best" and figure.cluster != "equal":
            for rival in rivals:
                if figure.items_per_s < rival.items_per_s:
                    yield f"{name}: the equal split is faster, {rival.items_per_s:.2f} items/s"


def draw(figures: Sequence[Figure], path: Path) -> None:
    """Bars of what was measured, over one host, and marks of what was promised."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "pipeedge", "svg.fonttype": "none"})
    places = list(dict.fromkeys((figure.model, figure.cluster) for figure in figures))
    models = list(dict.fromkeys(model for model, _ in places))
    clusters = list(dict.fromkeys(cluster for _, cluster in places))
    colours = {"best": "#2a6f97", "best, links compressed": "#61a5c2"}
    picture, axes = pyplot.subplots(
        len(models), len(clusters), figsize=(4.2 * len(clusters), 2.9 * len(models)), squeeze=False
    )
    for axis in axes.flat:
        axis.set_axis_off()
    for model, cluster in places:
        axis = axes[models.index(model)][clusters.index(cluster)]
        axis.set_axis_on()
        here = [figure for figure in figures if (figure.model, figure.cluster) == (model, cluster)]
        for place, figure in enumerate(here):
            axis.barh(place, figure.speedup, color=colours.get(figure.what, "#b8b8b8"), height=0.65)
            promised = (figure.scheduled_items_per_s or 0.0) / figure.alone_items_per_s
            if promised:
                axis.plot([promised] * 2, [place - 0.4, place + 0.4], color="#d62828", linewidth=1.6)
            axis.text(
                max(figure.speedup, promised), place, f"  {figure.speedup:.2f}", va="center", fontsize=8
            )
        names = [
            f"{figure.what}, {figure.hosts}" if figure.cluster == "equal" else figure.what for figure in here
        ]
        axis.set_yticks(range(len(here)), [name.replace("as if all were", "as if all") for name in names])
        axis.tick_params(labelsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.set_title(f"{model}, {'equal hosts' if cluster == 'equal' else f'{cluster} spread'}", fontsize=9)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    picture.supxlabel("throughput, in times of the fastest host by itself; red: as scheduled", fontsize=9)
    picture.tight_layout()
    picture.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def measure(arguments: argparse.Namespace, directory: Path, console: Console) -> Iterator[Figure]:
    """All that is asked for."""
    models: Sequence[str] = arguments.model_name or MODELS
    if arguments.small:
        models = make_small_models(directory / "models")
    course = Course(arguments.seconds, arguments.repetitions, arguments.iterations)
    (directory / "load").mkdir()
    for model in models:
        load = Workload(model, arguments.ubatch_size, directory / "load")
        for number, cluster in enumerate(arguments.cluster or CLUSTERS):
            place = directory / f"{load.name}-{number}"
            with raised(f"bench{os.getpid()}", CLUSTERS[cluster], place) as bed:
                console.print(f"{load.name}, {cluster}: profiling", highlight=False)
                bed.profile(load, course.iterations)
                if cluster == "equal":
                    figures = equal_hosts(bed, load, course)
                else:
                    figures = unequal_hosts(bed, load, course, cluster)
                for figure in figures:
                    console.print(
                        f"{load.name}, {cluster}, {figure.what}, {figure.hosts} hosts: "
                        f"{figure.items_per_s:.2f} items/s, {figure.speedup:.2f}x",
                        highlight=False,
                    )
                    yield figure


def main() -> int:
    """Measure, or read what was; print the table; 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model-name", action="append", metavar="NAME", help="(ViT-Base, BERT-Base)")
    parser.add_argument("--small", action="store_true", help="small models of the same kinds")
    parser.add_argument("-u", "--ubatch-size", type=int, default=2, metavar="N", help="(2)")
    parser.add_argument(
        "--cluster", action="append", choices=list(CLUSTERS), help="only this one; may be repeated"
    )
    parser.add_argument("--seconds", type=float, default=40.0, metavar="S", help="of a run (40)")
    parser.add_argument("--repetitions", type=int, default=1, metavar="N", help="of each run (1)")
    parser.add_argument("-i", "--iterations", type=int, default=5, metavar="N", help="of the profiler (5)")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("bench-out/cluster.json"),
        metavar="FILE",
        help="where figures are kept; those of other models and clusters stay (%(default)s)",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw all kept figures: .svg or .png")
    parser.add_argument("--show", action="store_true", help="measure nothing, show what is kept")
    arguments = parser.parse_args()
    console = Console(width=180)
    figures = [Figure(**entry) for entry in _kept(arguments.results)]
    if not arguments.show:
        console.print(f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores", highlight=False)
        with tempfile.TemporaryDirectory() as directory:
            new = list(measure(arguments, Path(directory), console))
        places = {(figure.model, figure.cluster) for figure in new}
        figures = [figure for figure in figures if (figure.model, figure.cluster) not in places] + new
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        arguments.results.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
    console.print(shown(figures))
    if arguments.picture is not None:
        draw(figures, arguments.picture)
    missed = list(misses(figures))
    for line in missed:
        console.print(line, highlight=False)
    return 1 if missed else 0


def _kept(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())) if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
