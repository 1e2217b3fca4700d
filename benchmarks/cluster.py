"""Measure pipelines on clusters: ``sudo python benchmarks/cluster.py``, or ``make bench-cluster``.

Runs ViT-Base and BERT-Base on the test bed. First, eight equal hosts with a quarter of a processor each form
eight pipelines of one host, four of two, two of four and one of eight, so that the machine always has the
same work. Then, on clusters of unequal hosts and links, the best schedule is compared with an equal split,
with the best schedule for a cluster whose hosts are all of the first type, and with one with compressed
links. Each throughput is compared with the predictions of the scheduler and the simulator, from a profile
taken minutes before. Everything is repeated three times, each with its own test bed and profile, and the
median repetition of each line is reported.

    bed ──profile──> files ──sched-pipeline──> schedules ──run──> items/s ──middle──> table, JSON ──> picture

Throughput is that of the full pipeline. Needs root and an idle machine with two processors. ``--small``
uses models with a ninth of the work.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

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

from pipeedge.base.errors import RequestError
from pipeedge.base.files import check_writable, write_whole
from pipeedge.models import find_model

Tell = Callable[[str], None]

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
"""Kinds of hosts of each cluster; the first host has the data."""
SPEEDUP = 7.2
"""Target for the speedup of eight equal hosts."""
OF_OPTIMUM = 0.95
LEAST_MICROBATCHES = 6
FILLINGS = 3
"""Microbatches for each stage, at least, but in no run of so many times the length that was asked:"""
PATIENCE = 2.5


@dataclass(frozen=True)
class Figure:
    """A line of the table."""

    model: str
    cluster: str
    what: str
    hosts: int
    items_per_s: float
    alone_items_per_s: float
    """Items per second of the fastest host alone."""
    scheduled_items_per_s: float | None
    """Items per second that the scheduler predicted, or None without a prediction."""
    simulated_items_per_s: float
    stages: str
    slowness: float | None = None
    """Processor time of the layers in the runs, in times of what was profiled: so much slower was the
    machine. None in results of before it was asked."""

    @property
    def speedup(self) -> float:
        """Throughput relative to one host."""
        return self.items_per_s / self.alone_items_per_s

    @property
    def of_promise(self) -> float | None:
        """Measured throughput relative to the scheduler's prediction."""
        return self.items_per_s / self.scheduled_items_per_s if self.scheduled_items_per_s else None


@dataclass(frozen=True)
class Competitor:
    """Pipelines that run at the same time, each on its own hosts."""

    pipelines: Sequence[Pipeline]
    asked: int | None = None
    """Throughput is that of so many of them, the first, which are alike; None: of all. The others keep the
    machine as busy as it is when all hosts take part in one pipeline."""


@dataclass(frozen=True)
class Measured:
    """Median measurements of a competitor."""

    items_per_s: float
    simulated_items_per_s: float
    slowness: float


def measured(
    bed: Bed, load: Workload, competitors: Mapping[str, Competitor], seconds: float, tell: Tell
) -> dict[str, Measured]:
    """Measure the pipelines of each competitor in turn, in runs of about ``seconds``."""
    simulated: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    slowness: dict[str, list[float]] = {}
    for what, competitor in competitors.items():
        simulated[what] = [bed.simulate(load, pipeline, 100) for pipeline in competitor.pipelines]
        items = [
            load.ubatch * microbatches(seconds * rate / load.ubatch, len(pipeline.stages))
            for pipeline, rate in zip(competitor.pipelines, simulated[what], strict=True)
        ]
        reports = bed.run(load, competitor.pipelines, items)[: competitor.asked]
        rates[what] = [steady_items_per_s(report) for report in reports]
        slowness[what] = [
            bed.slowness(load, pipeline, report)
            for pipeline, report in zip(competitor.pipelines, reports, strict=False)
        ]
        tell(
            f"{what}, {statistics.median(rates[what]):.2f} items/s, simulated {simulated[what][0]:.2f}, "
            f"layers {statistics.median(slowness[what]) - 1:+.1%} processor time"
        )
    # Equal competitors share runs, for example if the best schedule of equal hosts is the equal split.
    same = {
        what: [other for other in competitors if competitors[other] == competitors[what]]
        for what in competitors
    }
    return {
        what: Measured(
            statistics.median(rate for other in same[what] for rate in rates[other]),
            simulated[what][0],
            statistics.median(slow for other in same[what] for slow in slowness[other]),
        )
        for what in competitors
    }


def microbatches(wanted: float, stages: int) -> int:
    """Return the number of microbatches of a run: enough to fill the pipeline, unless that takes too long."""
    return max(LEAST_MICROBATCHES, round(wanted), min(FILLINGS * stages, round(PATIENCE * wanted)))


def alone(bed: Bed, load: Workload) -> tuple[Competitor, Promise]:
    """Return the hosts as pipelines of one stage, all running at once, and the promise of the fastest one."""
    promises = [bed.schedule(load, [host]) for host in bed.hosts]
    promises.sort(key=lambda promise: -promise.items_per_s)
    fastest = promises[0]
    alike = sum(promise.items_per_s > 0.99 * fastest.items_per_s for promise in promises)
    return Competitor([promise.pipeline for promise in promises], alike), fastest


def equal_hosts(bed: Bed, load: Workload, seconds: float, tell: Tell) -> Iterator[Figure]:
    """Measure one, two, four and eight hosts, with all of them always at work."""
    hosts, counts = bed.hosts, (1, 2, 4, 8)
    promises = {
        count: [bed.schedule(load, hosts[first : first + count]) for first in range(0, len(hosts), count)]
        for count in counts
    }
    even = even_split(find_model(load.model).n_layers, hosts)
    competitors = {
        f"pipelines of {count}": Competitor([promise.pipeline for promise in promises[count]])
        for count in counts
    }
    found = measured(bed, load, competitors | {"equal split": Competitor([even])}, seconds, tell)
    figure = functools.partial(_figure, (load.name, "equal"), found["pipelines of 1"].items_per_s)
    for count in counts:
        promise = promises[count][0]
        yield figure("best", promise.pipeline, promise.items_per_s, found[f"pipelines of {count}"])
    yield figure("equal split", even, None, found["equal split"])


def unequal_hosts(bed: Bed, load: Workload, seconds: float, cluster: str, tell: Tell) -> Iterator[Figure]:
    """Measure one host, then schedules for all of them."""
    hosts = bed.hosts
    best, narrow = bed.schedule(load, hosts), bed.schedule(load, hosts, "--link-bits", "auto")
    single, promise = alone(bed, load)
    schedules: dict[str, tuple[Pipeline, float | None]] = {
        "best": (best.pipeline, best.items_per_s),
        "best, links compressed": (narrow.pipeline, narrow.items_per_s),
        "equal split": (even_split(find_model(load.model).n_layers, hosts), None),
        "as if all were of the first type": (bed.schedule(load, hosts, alike=True).pipeline, None),
    }
    competitors = {what: Competitor([pipeline]) for what, (pipeline, _) in schedules.items()}
    found = measured(bed, load, competitors | {"one host": single}, seconds, tell)
    one = found["one host"]
    figure = functools.partial(_figure, (load.name, cluster), one.items_per_s)
    yield figure("one host", promise.pipeline, promise.items_per_s, one)
    for what, (pipeline, promised) in schedules.items():
        yield figure(what, pipeline, promised, found[what])


def _figure(
    where: tuple[str, str], one: float, what: str, pipeline: Pipeline, promised: float | None, found: Measured
) -> Figure:
    return Figure(
        *where,
        what,
        len(pipeline.stages),
        found.items_per_s,
        one,
        promised,
        found.simulated_items_per_s,
        str(pipeline),
        found.slowness,
    )


def middle(repetitions: Sequence[Sequence[Figure]]) -> list[Figure]:
    """Return the median repetition of each line.

    Repetitions are ordered by the figure that has a target: the speedup for equal hosts, and for any other
    schedule the share of its promise, if it has one.
    """

    def asked(figure: Figure) -> float:
        return figure.speedup if figure.cluster == "equal" else figure.of_promise or figure.speedup

    lines = (sorted(line, key=asked) for line in zip(*repetitions, strict=True))
    return [line[(len(line) - 1) // 2] for line in lines]


def shown(figures: Sequence[Figure]) -> Table:
    """Return the figures as a table."""
    table = Table(
        *("model", "cluster", "schedule", "hosts", "items/s", "to one host"),
        *("scheduler", "measured to it", "simulator", "measured to it", "processor time to profile"),
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
            "" if figure.slowness is None else f"{figure.slowness - 1:+.1%}",
        )
    return table


def misses(figures: Sequence[Figure]) -> Iterator[str]:
    """Yield a line for each target that is missed."""
    for figure in figures:
        name = f"{figure.model}, {figure.cluster}"
        if figure.cluster == "equal":
            if figure.what == "best" and figure.hosts == 8 and figure.speedup < SPEEDUP:
                yield f"{name}: {figure.speedup:.2f} times one host, target {SPEEDUP}"
        elif figure.of_promise is not None and figure.of_promise < OF_OPTIMUM and figure.hosts > 1:
            yield f"{name}, {figure.what}: {figure.of_promise:.3f} of the prediction, target {OF_OPTIMUM}"
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
    """Draw bars of the measured speedups, with marks for the predictions."""
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
    picture.supxlabel(
        "throughput relative to the fastest host alone; red: predicted by the scheduler", fontsize=9
    )
    picture.tight_layout()
    picture.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def measure(arguments: argparse.Namespace, directory: Path, tell: Tell) -> Iterator[list[Figure]]:
    """All that is asked for, cluster by cluster."""
    models: Sequence[str] = arguments.model_name or MODELS
    if arguments.small:
        models = make_small_models(directory / "models")
    (directory / "load").mkdir()
    for model in models:
        load = Workload(model, arguments.ubatch_size, directory / "load")
        for cluster in arguments.cluster or CLUSTERS:
            tell(f"{load.name}, {cluster}")
            repetitions = []
            for number in range(1, arguments.repetitions + 1):
                say = functools.partial(_tell_of, tell, f"  {number} of {arguments.repetitions}: ")
                place = directory / f"{load.name}-{cluster}-{number}"
                with raised(f"bench{os.getpid()}", CLUSTERS[cluster], place) as bed:
                    # Profile again each time, so that predictions are for the present state of the machine.
                    bed.profile(load, arguments.iterations)
                    if cluster == "equal":
                        figures = equal_hosts(bed, load, arguments.seconds, say)
                    else:
                        figures = unequal_hosts(bed, load, arguments.seconds, cluster, say)
                    repetitions.append(list(figures))
            yield middle(repetitions)


def _tell_of(tell: Tell, where: str, line: str) -> None:
    tell(where + line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-m", "--model-name", action="append", metavar="NAME", help="model to run (ViT-Base, BERT-Base)"
    )
    parser.add_argument("--small", action="store_true", help="use small models of the same kinds")
    parser.add_argument(
        "-u", "--ubatch-size", type=int, default=2, metavar="N", help="items in a microbatch (2)"
    )
    parser.add_argument(
        "--cluster",
        action="append",
        choices=list(CLUSTERS),
        help="measure only this cluster; may be repeated",
    )
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="length of a run (20)")
    parser.add_argument(
        "--repetitions", type=int, default=3, metavar="N", help="repetitions of everything (3)"
    )
    parser.add_argument(
        "-i",
        "--iterations",
        type=int,
        default=5,
        metavar="N",
        help="iterations of the profiler on the slowest kind of host (5)",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("bench-out/cluster.json"),
        metavar="FILE",
        help="file of results; those of other models and clusters are kept (%(default)s)",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw all results: .svg or .png")
    parser.add_argument("--show", action="store_true", help="show earlier results without measuring")
    return parser


def main() -> int:
    """Measure, or read earlier results, and print the table; return 1 if a target is missed."""
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.repetitions < 1:
        parser.error("--repetitions: at least 1")
    console = Console(width=200)
    try:
        figures = _kept(arguments.results)
        if not arguments.show:
            arguments.results.parent.mkdir(parents=True, exist_ok=True)
            check_writable(arguments.results, "--results")
        if arguments.picture is not None:
            check_writable(arguments.picture, "--picture")
    except (OSError, RequestError) as error:
        parser.error(str(error))
    if not arguments.show:
        tell = functools.partial(console.print, highlight=False)
        tell(f"load before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
        with tempfile.TemporaryDirectory() as directory:
            for new in measure(arguments, Path(directory), tell):
                place = (new[0].model, new[0].cluster)
                figures = [figure for figure in figures if (figure.model, figure.cluster) != place] + new
                body = json.dumps([asdict(figure) for figure in figures], indent=1)
                write_whole(arguments.results, body + "\n", "--results")
    models = list(dict.fromkeys(figure.model for figure in figures))
    figures.sort(key=lambda figure: (models.index(figure.model), list(CLUSTERS).index(figure.cluster)))
    console.print(shown(figures))
    if arguments.picture is not None:
        draw(figures, arguments.picture)
    missed = list(misses(figures))
    for line in missed:
        console.print(line, highlight=False)
    return 1 if missed else 0


def _kept(path: Path) -> list[Figure]:
    if not path.exists():
        return []
    try:
        return [Figure(**entry) for entry in json.loads(path.read_text())]
    except (ValueError, TypeError) as error:
        raise RequestError(f"--results {path}: not results of this benchmark; delete it ({error})") from error


if __name__ == "__main__":
    sys.exit(main())
