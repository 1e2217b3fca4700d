"""Simulate a run from files, with the same table and report as for a real run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

import pipeedge
from pipeedge.base.errors import PipeEdgeError, RequestError, ScheduleError
from pipeedge.base.files import InputPath, OutputFile, check_outputs, check_writable
from pipeedge.base.schedule import Schedule
from pipeedge.base.wording import count
from pipeedge.models.registry import find_outline
from pipeedge.observe.metrics import Latency, StageStats
from pipeedge.plan.listed_model import ListedModel
from pipeedge.plan.problem import ELEMENT_BYTES
from pipeedge.plan.schedule_choice import CutModel, PlannedSchedule, plan_schedule
from pipeedge.plan.simulation import SimulatedRun, simulate
from pipeedge.plan.spec_files import find_named, read_files, rename_profiles
from pipeedge.plan.specs import BYTES_PER_MB, ModelSpec
from pipeedge.report.run_report import RunReport, print_report, save_body
from pipeedge.request.config import MAX_WORLD
from pipeedge.simulate.cluster import SimulatedCluster, StageMemory, Workload, host_of
from pipeedge.simulate.options import SimulationRequest

__all__ = ["FinishedSimulation", "run", "simulate_request"]

_SERIES, _POINTS = 16, 100
"""Number of stages whose throughput is reported over time, and number of points for each."""


@dataclass(frozen=True)
class FinishedSimulation:
    """A finished simulation."""

    cluster: SimulatedCluster
    load: Workload
    planned: PlannedSchedule
    """Schedule, and what the scheduler promised of it if it made it."""
    data_rank: int
    """Rank that reads the input and collects the results."""
    outcome: SimulatedRun
    notes: tuple[str, ...]
    """Warnings for the user, one line each."""

    @property
    def schedule(self) -> Schedule:
        """Schedule of the run."""
        return self.planned.schedule

    @property
    def memory(self) -> list[StageMemory]:
        """Memory that each stage needs."""
        return [self.cluster.memory(stage, self.load) for stage in self.schedule.stages]

    def report(self) -> RunReport:
        """Return the report in the form of a real run's."""
        run, load = self.outcome, self.load
        return RunReport(
            model=load.model_name,
            schedule=self.schedule,
            items=load.items,
            microbatches=load.microbatches,
            microbatch_size=load.microbatch_size,
            startup_s=0.0,
            elapsed_s=run.length_s,
            latency=Latency.of(run.latencies_s.tolist()),
            accuracy=None,
            stages=[self._stats(stage) for stage in range(len(self.schedule.stages))],
            skipped=(),
            prediction=self.planned.prediction,
            simulated=True,
            steady_items_per_s=_steady(run, load),
        )

    def _stats(self, stage: int) -> StageStats:
        run, plan = self.outcome, self.schedule.stages[stage]
        costs, link = run.model.stages[stage], run.model.links[stage + 1]
        number, share = run.model.microbatches, run.passes / run.model.microbatches
        working = (costs.decode_s + costs.compute_s + costs.encode_s) * run.passes
        until = run.length_s - float(run.drain_s[stage])
        memory = self.cluster.memory(plan, self.load)
        bytes_out = 0 if link.in_memory else self.load.sent_bytes(plan)
        return StageStats(
            stage=stage,
            rank=plan.rank,
            microbatches=number,
            compute_s_mean=costs.compute_s * share,
            send_s_mean=float(run.occupied_s[stage + 1]) / number,
            send_s_best=(link.wire_s + link.latency_s) * share,
            recv_wait_s_mean=float(run.fill_s[stage] + run.wait_input_s[stage]) / number,
            bytes_out_mean=bytes_out * share,
            busy_fraction=min(1.0, working / until) if until else 0.0,
            rss_peak_mb=memory.peak / BYTES_PER_MB,
            parameters=round(memory.weights / ELEMENT_BYTES["float32"]),  # as models.yml counts them
            compute_cpu_s_mean=costs.compute_s * share,
            threads=self.cluster.threads(plan, self.load),
            encode_s_mean=costs.encode_s * share,
            decode_s_mean=costs.decode_s * share,
        )

    def to_body(self, command: Sequence[str]) -> dict[str, Any]:
        """Return the report as it is saved, with the fields that only a simulation has."""
        run, ranks = self.outcome, self.schedule.ranks
        body = self.report().to_body()
        for stage, (entry, memory) in enumerate(zip(body["stages"], self.memory, strict=True)):
            entry["seconds"] = {activity.value: seconds for activity, seconds in run.seconds(stage).items()}
            entry["memory_mb"] = {
                "weights": memory.weights / BYTES_PER_MB,
                "buffers": memory.buffers / BYTES_PER_MB,
                "working": memory.working / BYTES_PER_MB,
                "available": memory.available / BYTES_PER_MB,
            }
        return body | {
            "data_rank": self.data_rank,
            "timeline": run.timeline(ranks).to_body(),
            "series": [self._series(stage) for stage in run.drawn[:_SERIES]],
            "latencies_s": run.latencies_s.tolist(),
            "command": list(command),
            "versions": {"pipeedge": pipeedge.__version__},
            "notes": list(self.notes),
        }

    def _series(self, stage: int) -> dict[str, Any]:
        """Return the throughput of one stage over time, in the form of a real run's."""
        plan, link = self.schedule.stages[stage], self.outcome.model.links[stage + 1]
        size = 0 if link.in_memory else self.load.sent_bytes(plan)
        busy_s = link.wire_s + link.latency_s
        columns: dict[str, list[float | None]] = {
            name: [] for name in ("t_s", "items_per_s", "bytes_per_s", "link_bytes_per_s", "bits")
        }
        for since, until, passed in self.outcome.windows(stage, _POINTS):
            columns["t_s"].append(until)
            columns["items_per_s"].append(passed * self.load.microbatch_size / (until - since))
            columns["bytes_per_s"].append(passed * size / (until - since))
            columns["link_bytes_per_s"].append(size / busy_s if busy_s else None)
            columns["bits"].append(plan.quant_bits or 8 * ELEMENT_BYTES[plan.dtype])
        return {"stage": stage, "rank": plan.rank, **columns}


def _steady(run: SimulatedRun, load: Workload) -> float | None:
    """Return the items per second from the first result to the last, or None for a single microbatch."""
    seconds = float(run.result_at[-1] - run.result_at[0])
    return (load.items - load.microbatch_size) / seconds if seconds > 0 else None


def simulate_request(request: SimulationRequest) -> FinishedSimulation:
    """Read the files, plan as a run with these options would, and simulate it.

    Raises:
        SpecError: a file cannot be read, or lacks something.
        ScheduleError: the schedule does not fit these hosts.
        InfeasibleError: no schedule is feasible.
    """
    files = read_files(
        models=request.models_file,
        device_types=request.dev_types_file,
        devices=request.dev_file,
        neighbors=request.dev_neighbors_file,
    )
    cluster = SimulatedCluster(
        rename_profiles(files.device_types, request.model_name), files.devices, files.neighbors
    )
    spec = find_named(files.models, request.model_name)
    if spec is None:
        raise RequestError(
            f"{request.models_file} does not list the model {request.model_name}; it lists "
            f"{', '.join(files.models)}"
        )
    model = _model(request.model_name, spec)
    named, names = _rank_names(request, cluster)
    data_rank = _data_rank(request, names, cluster)
    as_run = request.of_run(len(names), names if named else None, data_rank)
    planned = plan_schedule(as_run, model, request.tokens)
    load = _workload(request, planned, model, spec)
    data_host = names[data_rank]
    if not as_run.schedule.automatic:  # otherwise the plan does without it, and says so
        cluster.type_of(data_host)
    run = simulate(cluster.pipeline(planned.schedule, data_host if cluster.knows(data_host) else None, load))
    found = FinishedSimulation(cluster, load, planned, data_rank, run, notes=())
    return replace(found, notes=(*planned.notes, *_notes(found, request)))


def _model(name: str, spec: ModelSpec) -> CutModel:
    """Return the model as a run would find it, or as the files list it if it cannot run here."""
    try:
        return find_outline(name, fetch=False)
    except PipeEdgeError:
        return ListedModel(name, spec)


def _rank_names(request: SimulationRequest, cluster: SimulatedCluster) -> tuple[bool, tuple[str, ...]]:
    """Return whether hosts have names, and the host of each rank: those of ``-H``, else all of the file.

    Hosts without names are called by their ranks.
    """
    known = cluster.hosts
    if request.hosts is not None:
        named, names = True, request.hosts
    elif all(host.isascii() and host.isdecimal() for host in known):
        named, names = False, tuple(map(str, range(1 + max(map(int, known), default=0))))
    else:
        named, names = True, known
    if len(names) > MAX_WORLD:
        raise RequestError(
            f"the hosts of {request.dev_file} make {count(len(names), 'rank')}, and a run has at most "
            f"{MAX_WORLD}; choose some with -H/--hosts"
        )
    return named, names


def _data_rank(request: SimulationRequest, names: Sequence[str], cluster: SimulatedCluster) -> int:
    """Return the rank that reads the input and collects the results."""
    host = request.data_host
    if host is None:
        return 0
    cluster.type_of(host)
    if host not in names:
        raise ScheduleError(f"--data-host {host} has no rank; choose one of {', '.join(names)}")
    return names.index(host)


def _workload(
    request: SimulationRequest, planned: PlannedSchedule, model: CutModel, spec: ModelSpec
) -> Workload:
    size = planned.microbatch_size or request.microbatch_size
    request.microbatches(size)
    return Workload(
        model_name=request.model_name,
        model=spec if request.tokens is None else spec.at_tokens(request.tokens),
        transport=request.transport,
        tokens=request.tokens,
        input_bytes=model.input_bytes(request.tokens, planned.schedule.stages[0].dtype),
        microbatch_size=size,
        items=request.items,
        codec_bytes_per_s=request.codec_bytes_per_s,
        read_s=request.read_s,
        write_s=request.write_s,
    )


def _notes(found: FinishedSimulation, request: SimulationRequest) -> Iterator[str]:
    for stage, memory in enumerate(found.memory):
        if memory.missing:
            yield (
                f"stage {stage} needs {(memory.weights + memory.buffers) / BYTES_PER_MB:.0f} MB for weights "
                f"and buffers, but {host_of(found.schedule.stages[stage])} has only "
                f"{memory.available / BYTES_PER_MB:.0f} MB: it would not run there"
            )
    if request.tokens is not None and found.planned.prediction is None:  # else the scheduler says it
        for stage, plan in enumerate(found.schedule.stages):
            profile = found.cluster.profile(plan, found.load)
            if not profile.fits_tokens(request.tokens):
                known = profile.tokens or "an unknown number of"
                yield (
                    f"stage {stage}: {host_of(plan)} was profiled only with {known} tokens, so its times are "
                    f"not scaled to {request.tokens}"
                )
    compressed = any(stage.quant_bits for stage in found.schedule.stages)
    if compressed and request.codec_bytes_per_s is None:
        yield "encoding and decoding are assumed to take no time; give their speed with --codec-MBps"
    drawn = len(found.outcome.drawn)
    stages = len(found.schedule.stages)
    if drawn < stages:
        yield f"the Gantt chart shows {drawn} of {stages} stages; the figures cover all stages"


def _inputs(request: SimulationRequest) -> Iterator[InputPath]:
    for option, path in (
        ("-sm/--sched-models-file", request.models_file),
        ("-sdt/--sched-dev-types-file", request.dev_types_file),
        ("-sd/--sched-dev-file", request.dev_file),
        ("-sdn/--sched-dev-neighbors-file", request.dev_neighbors_file),
        ("--schedule-file", request.schedule_file),
    ):
        if path is not None:
            yield InputPath(option, path)


def run(
    request: SimulationRequest, command: Sequence[str], console: Console, warn: Callable[[str], None]
) -> None:
    """Simulate ``request``, print the table, and write the report.

    Args:
        request: simulation to run.
        command: command line, for the report.
        console: console to print the table on.
        warn: called with each warning for the user.

    Raises:
        PipeEdgeError: the simulation failed as in ``simulate_request``, or the report cannot be written.
    """
    replaced: frozenset[Path] = frozenset()
    if request.report is not None:
        check_writable(request.report, "--report")
        replaced = check_outputs([OutputFile("--report", request.report)], _inputs(request))
    found = simulate_request(request)
    for note in found.notes:
        warn(note)
    if request.report is not None:
        save_body(found.to_body(command), request.report)
    console.print("simulated, not run:", highlight=False)
    print_report(found.report(), console, results=None, saved=request.report, replaced=replaced)
