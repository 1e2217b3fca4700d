"""Simulate a run from files, with the same table and report as for a real run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

import pipeedge
from pipeedge.base.errors import PipeEdgeError, RequestError, ScheduleError
from pipeedge.base.files import InputPath, OutputFile, check_outputs, check_writable
from pipeedge.base.schedule import Schedule, StagePlan
from pipeedge.base.text_lengths import InputSizes
from pipeedge.base.wording import count
from pipeedge.models.registry import find_outline
from pipeedge.observe.assembly import assemble
from pipeedge.observe.metrics import Latency, StageStats
from pipeedge.observe.timeline import Span, ThreadState, Timeline
from pipeedge.plan.costs import PlanCosts
from pipeedge.plan.listed_model import ListedModel
from pipeedge.plan.problem import ELEMENT_BYTES
from pipeedge.plan.schedule_choice import (
    CutModel,
    PlannedSchedule,
    evaluate_schedule,
    plan_after_loss,
    plan_schedule,
)
from pipeedge.plan.scheduler import TextRequest
from pipeedge.plan.spec_files import find_named, read_files, rename_profiles
from pipeedge.plan.specs import BYTES_PER_MB, ModelSpec
from pipeedge.report.run_report import RunReport, print_report, save_body
from pipeedge.request.config import MAX_WORLD
from pipeedge.simulate.cluster import SimulatedCluster, StageMemory, Workload, host_of
from pipeedge.simulate.losses import LossyRun, LossyWorld, SimulatedEpoch, simulate_epochs
from pipeedge.simulate.options import SimulationRequest
from pipeedge.simulate.simulation import SimulatedRun, simulate
from pipeedge.simulate.texts import FinishedTexts, TextLoad, simulate_texts

__all__ = ["FinishedSimulation", "run", "simulate_request"]

_SERIES, _POINTS = 16, 100
"""Number of stages whose throughput is reported over time, and number of points for each."""


@dataclass(frozen=True)
class FinishedSimulation:
    """A finished simulation."""

    cluster: SimulatedCluster
    load: Workload
    data_rank: int
    """Rank that reads the input and collects the results."""
    epochs: tuple[SimulatedEpoch, ...]
    """Epochs of the run; one unless ranks are lost."""
    undisturbed_s: float
    """Length of the run without a loss, in seconds."""
    notes: tuple[str, ...]
    """Warnings for the user, one line each."""
    costs_of: Callable[[Schedule], PlanCosts]
    """Returns the costs of a schedule of this run."""

    @property
    def planned(self) -> PlannedSchedule:
        """Last schedule, and what the scheduler promised of it if it made it."""
        return self.epochs[-1].planned

    @property
    def outcome(self) -> SimulatedRun:
        """Simulation of the last epoch."""
        return self.epochs[-1].run

    @property
    def schedule(self) -> Schedule:
        """Last schedule."""
        return self.planned.schedule

    @property
    def length_s(self) -> float:
        """Length of the run in seconds."""
        return self.epochs[-1].since_s + self.epochs[-1].length_s

    @property
    def memory(self) -> list[StageMemory]:
        """Memory that each stage needs."""
        return [
            self.cluster.memory(stage, costs, self.load)
            for stage, costs in zip(self.schedule.stages, self.costs.schedule, strict=True)
        ]

    @property
    def costs(self) -> PlanCosts:
        """Costs of the last schedule, as the scheduler counts them."""
        return self.costs_of(self.schedule)

    def report(self) -> RunReport:
        """Return the report in the form of a real run's."""
        load, lossy = self.load, len(self.epochs) > 1
        return RunReport(
            model=load.model_name,
            schedule=self.schedule,
            items=load.items,
            microbatches=load.microbatches,
            microbatch_size=load.microbatch_size,
            startup_s=0.0,
            elapsed_s=self.length_s,
            latency=Latency.of(self._latencies_s()),
            accuracy=None,
            stages=[self._stats(stage) for stage in range(len(self.schedule.stages))],
            skipped=(),
            prediction=self.planned.prediction,
            simulated=True,
            undisturbed_s=self.undisturbed_s if lossy else None,
            steady_items_per_s=self.epochs[-1].record.steady_items_per_s,
            epochs=[one.record for one in self.epochs] if lossy else (),
        )

    def _latencies_s(self) -> list[float]:
        return [seconds for one in self.epochs for seconds in one.latencies_s]

    def _stats(self, stage: int) -> StageStats:
        run, plan = self.outcome, self.schedule.stages[stage]
        costs, link = run.model.stages[stage], run.model.links[stage + 1]
        number, share = run.model.microbatches, run.passes / run.model.microbatches
        working = (costs.decode_s + costs.compute_s + costs.encode_s) * run.passes
        until = run.length_s - float(run.drain_s[stage])
        memory = self.memory[stage]
        bytes_out = 0 if link.in_memory else self.costs.schedule[stage].sent_bytes
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
            threads=self.costs.schedule[stage].threads or 1,
            encode_s_mean=costs.encode_s * share,
            decode_s_mean=costs.decode_s * share,
        )

    def to_body(self, command: Sequence[str]) -> dict[str, Any]:
        """Return the report as it is saved, with the fields that only a simulation has."""
        report = self.report()
        body = report.to_body()
        last = self.epochs[-1].record
        recovery = {ThreadState.RECOVER.value: last.waiting_s + last.preparing_s} if last.cause else {}
        for stage, (entry, memory) in enumerate(zip(body["stages"], self.memory, strict=True)):
            spent = self.outcome.seconds(stage).items()
            entry["seconds"] = recovery | {activity.value: seconds for activity, seconds in spent}
            entry["memory_mb"] = {
                "weights": memory.weights / BYTES_PER_MB,
                "buffers": memory.buffers / BYTES_PER_MB,
                "working": memory.working / BYTES_PER_MB,
                "available": memory.available / BYTES_PER_MB,
            }
        *earlier, now = [
            one.run.recordings(
                one.planned.schedule.ranks,
                epoch=one.record.number if report.epochs else 0,
                since_s=one.since_s,
                until_s=one.until_s,
            )
            for one in self.epochs
        ]
        timeline = assemble(now, 0.0, self.length_s, [each for one in earlier for each in one], report.epochs)
        lost_s = {rank: at for one in self.epochs for rank, at in (one.lost_s or {}).items()}
        spans = (_cut_off(span, lost_s.get(span.rank, math.inf)) for span in timeline.spans)
        timeline = Timeline(timeline.length_s, tuple(span for span in spans if span is not None))
        return body | {
            "data_rank": self.data_rank,
            "timeline": timeline.to_body(),
            "series": [self._series(one, stage) for one in self.epochs for stage in one.run.drawn[:_SERIES]],
            "latencies_s": self._latencies_s(),
            "command": list(command),
            "versions": {"pipeedge": pipeedge.__version__},
            "notes": list(self.notes),
        }

    def _series(self, epoch: SimulatedEpoch, stage: int) -> dict[str, Any]:
        """Return the throughput of one stage in an epoch over time, in the form of a real run's."""
        plan, link = epoch.planned.schedule.stages[stage], epoch.run.model.links[stage + 1]
        costs = self.costs_of(epoch.planned.schedule).schedule[stage]
        size = 0 if link.in_memory else costs.sent_bytes
        busy_s = link.wire_s + link.latency_s
        columns: dict[str, list[float | None]] = {
            name: [] for name in ("t_s", "items_per_s", "bytes_per_s", "link_bytes_per_s", "bits")
        }
        for since, until, passed in epoch.run.windows(stage, _POINTS):
            if epoch.since_s + until > epoch.until_s(plan.rank):
                break
            columns["t_s"].append(epoch.since_s + until)
            columns["items_per_s"].append(passed * self.load.microbatch_size / (until - since))
            columns["bytes_per_s"].append(passed * size / (until - since))
            columns["link_bytes_per_s"].append(size / busy_s if busy_s else None)
            columns["bits"].append(plan.quant_bits or 8 * ELEMENT_BYTES[plan.dtype])
        number = {"epoch": epoch.record.number} if len(self.epochs) > 1 else {}
        return {"stage": stage, "rank": plan.rank, **number, **columns}


def _cut_off(span: Span, until_s: float) -> Span | None:
    """Return what a rank did in a span before it was lost, or None if that was after its loss."""
    return replace(span, end_s=min(span.end_s, until_s)) if span.start_s < until_s else None


def simulate_request(request: SimulationRequest) -> FinishedSimulation | FinishedTexts:
    """Read the files, plan as a run with these options would, and simulate it.

    Raises:
        SpecError: A file cannot be read, or lacks something.
        RequestError: The model is not listed, or an option is not for it.
        ScheduleError: The schedule does not fit these hosts.
        InfeasibleError: No schedule is feasible.
    """
    files = read_files(
        models=request.models_file,
        device_types=request.dev_types_file,
        devices=request.dev_file,
        neighbors=request.dev_neighbors_file,
    )
    cluster = SimulatedCluster(rename_profiles(files.device_types, request.model_name), files.devices)
    spec = find_named(files.models, request.model_name)
    if spec is None:
        raise RequestError(
            f"{request.models_file} does not list the model {request.model_name}; it lists "
            f"{', '.join(files.models)}"
        )
    lengths = None if spec.context is None else request.text_lengths(spec.context)
    model = _model(request.model_name, spec)
    named, names = _rank_names(request, cluster)
    data_rank = _data_rank(request, names, cluster)
    as_run = request.of_run(len(names), names if named else None, data_rank)
    sizes = InputSizes(request.longest, request.lengths, texts=lengths)
    planned = plan_schedule(as_run, model, sizes)
    load = _workload(request, planned, spec)
    data_host = names[data_rank]
    if not as_run.schedule.automatic:  # otherwise the plan does without it, and says so
        cluster.type_of(data_host)

    known = data_host if cluster.knows(data_host) else None

    @cache
    def costs_of(schedule: Schedule, texts: TextRequest | None = None) -> PlanCosts:
        for stage in schedule.stages:
            cluster.profile(stage, load)  # or say what is missing
        return evaluate_schedule(as_run, model, schedule, sizes, load.microbatch_size, texts)

    def simulated(schedule: Schedule, items: int, drawn: Sequence[int] = ()) -> SimulatedRun:
        return simulate(replace(load, items=items).pipeline(costs_of(schedule), known), drawn=drawn)

    def layer_bytes(schedule: Schedule) -> list[float]:
        return cluster.layer_weights(schedule, load)

    def load_bytes(schedule: Schedule, number: int, held: StagePlan | None) -> float:
        weights, stage = layer_bytes(schedule), schedule.stages[number]
        has = held.layers if held is not None and held.dtype == stage.dtype else None
        return sum(
            weights[layer]
            for layer in range(stage.layers.start, stage.layers.stop)
            if has is None or not has.start <= layer < has.stop
        )

    world = LossyWorld(
        ranks=len(names),
        data_rank=data_rank,
        plan=lambda before, survivors: plan_after_loss(
            as_run if lengths else replace(as_run, microbatch_size=load.microbatch_size),
            model,
            before,
            survivors,
            layer_bytes,
            sizes,
        ),
        room_bytes=lambda rank: cluster.type_of(names[rank])[1].mem_bytes,
        host=lambda rank: names[rank] if named else None,
        load_bytes=load_bytes,
    )
    if lengths is not None:
        texts = TextLoad(request.model_name, request.microbatch_size, lengths)
        return simulate_texts(texts, planned, world, names, costs_of, request)
    if request.recovery.keep_outputs or request.recovery.replicate:
        raise RequestError(
            f"--keep-outputs and --replicate are for decoders, whose ranks have caches; {request.model_name} "
            "is an encoder"
        )
    lossy = LossyRun(
        **vars(world), items=load.items, microbatch_size=load.microbatch_size, simulate=simulated
    )
    epochs = tuple(simulate_epochs(lossy, planned, request.losses, request.recovery))
    undisturbed_s = epochs[0].run.length_s
    found = FinishedSimulation(cluster, load, data_rank, epochs, undisturbed_s, (), costs_of)
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


def _workload(request: SimulationRequest, planned: PlannedSchedule, spec: ModelSpec) -> Workload:
    # The profile of a decoder is that of one row.
    size = 1 if spec.context else planned.microbatch_size or request.microbatch_size
    request.microbatches(size)
    return Workload(
        model_name=request.model_name,
        model=spec if request.longest is None else spec.at_tokens(request.longest),
        microbatch_size=size,
        items=request.items,
        codec_bytes_per_s=request.codec_bytes_per_s,
        read_s=request.read_s,
        write_s=request.write_s,
    )


def _notes(found: FinishedSimulation, request: SimulationRequest) -> Iterator[str]:
    for stage, memory in enumerate(found.memory):
        if memory.is_missing:
            yield (
                f"stage {stage} needs {memory.needed / BYTES_PER_MB:.0f} MB for weights, activations and "
                f"buffers, but {host_of(found.schedule.stages[stage])} has only "
                f"{memory.available / BYTES_PER_MB:.0f} MB: it would not run there"
            )
    if request.longest is not None and found.planned.prediction is None:  # else the scheduler says it
        for stage, plan in enumerate(found.schedule.stages):
            profile = found.cluster.profile(plan, found.load)
            if not profile.fits_tokens(request.longest):
                known = profile.tokens or "an unknown number of"
                yield (
                    f"stage {stage}: {host_of(plan)} was profiled only with {known} tokens, so its times are "
                    f"not scaled to {request.longest}"
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
        request: Simulation to run.
        command: Command line, for the report.
        console: Console to print the table on.
        warn: Called with each warning for the user.

    Raises:
        PipeEdgeError: The simulation failed as in ``simulate_request``, or the report cannot be written.
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
