"""What rank 0 decides before anything starts. Pure, but for asking the scheduler.

options ──plan_schedule──> schedule ─┐
what each rank says ──disagreement───┴──> Plan ──(announced)──> links of every rank
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import pipeedge
from pipeedge.base.errors import ScheduleError
from pipeedge.base.fields import Count, Port, Positive, Text
from pipeedge.base.payload import PixelTable, TensorSpec, specs_bytes
from pipeedge.base.schedule import BIT_WIDTHS, Schedule, StagePlan
from pipeedge.base.wording import count
from pipeedge.compress import wire_specs
from pipeedge.compress.policies import Sizes
from pipeedge.models import Model
from pipeedge.models.dtypes import find_dtype
from pipeedge.observe.lanes import DEFAULT_ROWS
from pipeedge.plan import scheduler
from pipeedge.plan.dtype_choice import choose_dtype
from pipeedge.plan.prediction import Prediction, StagePrediction
from pipeedge.plan.specs import load_device_types, load_devices
from pipeedge.request.config import CompressionRequest, RunRequest
from pipeedge.transport.base import Link
from pipeedge.transport.frame import frame_capacity

__all__ = [
    "Plan",
    "PlannedSchedule",
    "InputFacts",
    "disagreement",
    "disagreements",
    "plan_schedule",
    "rank_facts",
]


MEASURED_LINK_S = 1e-3
"""Links that are promised to take less are not measured: a receipt for each microbatch would be felt."""


@dataclass(frozen=True)
class PlannedSchedule:
    """A schedule and what the scheduler promised of it."""

    schedule: Schedule
    prediction: Prediction | None = None
    notes: tuple[str, ...] = ()


def plan_schedule(
    request: RunRequest, model: Model, tokens: int | None = None, *, eight_bit: bool = True
) -> PlannedSchedule:
    """Return the schedule that ``request`` asks for.

    Args:
        request: of rank 0.
        model: the model to cut.
        tokens: of the longest sentence of the input; None for images, and where it is not known.
        eight_bit: whether pictures are sent as bytes.

    Raises:
        ScheduleError: it does not fit the model or the world.
        InfeasibleError: the scheduler finds that none exists.
    """
    planned = _requested_schedule(request, model, tokens, eight_bit=eight_bit)
    if planned is None:
        order = request.schedule.rank_order
        ranks = request.world.size if order is None else len(order)
        planned = _partitioned(request, model, _even_partition(model.n_layers, min(ranks, model.n_layers)))
    planned.schedule.check(n_layers=model.n_layers, world_size=request.world.size)
    if request.schedule.dtypes is not None and not request.schedule.automatic:
        schedule = planned.schedule.with_dtypes(request.schedule.dtypes)
        planned = dataclasses.replace(planned, schedule=schedule)
    if request.schedule.quant_bits is not None:
        planned = _compressed(planned, request, model, request.schedule.quant_bits)
    return _adaptable(planned, request.compression)


def _adaptable(planned: PlannedSchedule, compression: CompressionRequest) -> PlannedSchedule:
    """Check that adaptive links start at allowed bit widths; add a note if no link can adapt."""
    if compression.adaptive is None:
        return planned
    inner = planned.schedule.stages[:-1]
    if not inner:
        note = f"--adaptive {compression.adaptive} changes nothing: with one stage there is no link to adapt"
        return dataclasses.replace(planned, notes=(*planned.notes, note))
    least = compression.min_bits or 0
    for stage, plan in enumerate(inner):
        if 0 < plan.quant_bits < least:
            raise ScheduleError(
                f"the link from stage {stage} begins with {plan.quant_bits} bits, --min-bits is {least}"
            )
    return planned


def _compressed(
    planned: PlannedSchedule, request: RunRequest, model: Model, quant_bits: Sequence[int]
) -> PlannedSchedule:
    """Return the schedule with the bit widths of ``-q`` and the prediction scaled to its smaller frames."""
    schedule = planned.schedule.with_quant_bits(quant_bits)
    if any(quant_bits) and schedule.ranks == (request.schedule.data_rank,):
        note = "-q changes nothing: with one stage, on the data rank, nothing crosses a link"
        planned = dataclasses.replace(planned, notes=(*planned.notes, note))
    if planned.prediction is None:
        return dataclasses.replace(planned, schedule=schedule)

    def shrink(stage: StagePlan, before: StagePlan) -> float:
        specs = model.payload_specs(stage.layers.stop, request.ubatch_size, dtype=find_dtype(stage.dtype))
        now, then = (_on_link(specs, plan.quant_bits) for plan in (stage, before))
        return specs_bytes(now) / specs_bytes(then)

    prediction = dataclasses.replace(
        planned.prediction,
        stages=tuple(
            dataclasses.replace(promise, link_s=promise.link_s * shrink(stage, before))
            for promise, stage, before in zip(
                planned.prediction.stages, schedule.stages, planned.schedule.stages, strict=True
            )
        ),
    )
    return dataclasses.replace(planned, schedule=schedule, prediction=prediction)


def _on_link(specs: tuple[TensorSpec, ...], bits: int) -> tuple[TensorSpec, ...]:
    return wire_specs(specs, bits) if bits else specs


def _requested_schedule(
    request: RunRequest, model: Model, tokens: int | None, *, eight_bit: bool
) -> PlannedSchedule | None:
    wanted = request.schedule
    if wanted.partition is not None:
        return _partitioned(request, model, wanted.partition)
    if wanted.schedule_file is not None:
        return PlannedSchedule(scheduler.load_schedule(wanted.schedule_file, hosts=wanted.hosts))
    if wanted.models_file is None or wanted.dev_types_file is None or wanted.dev_file is None:
        return None
    hosts, data_host, unlisted = _known_hosts(request, wanted.dev_types_file, wanted.dev_file)
    # Values that are not bytes go out in the type of the first stage; of several types, as the widest.
    first = find_dtype("float32" if wanted.automatic_dtype else (wanted.dtypes or ("float32",))[0])
    asked = scheduler.SchedulerRequest(
        models_file=wanted.models_file,
        dev_types_file=wanted.dev_types_file,
        dev_file=wanted.dev_file,
        dev_neighbors_file=wanted.dev_neighbors_file,
        model_name=model.name,
        batch_size=request.ubatch_size,
        link_bits=wanted.link_bits or "0",
        tokens=tokens,
        data_host=data_host,
        hosts=hosts,
        input_bytes=model.input_bytes(tokens, first, eight_bit=eight_bit),
    )
    if wanted.automatic_dtype:
        found, note = choose_dtype(asked, wanted.min_agreement, wanted.hosts)
        notes = (*unlisted, note, *found.warnings)
    else:
        dtype = (wanted.dtypes or ("float32",))[0]
        problem = scheduler.read_problem(dataclasses.replace(asked, dtype=f"torch.{dtype}"))
        found = scheduler.plan(problem, hosts=wanted.hosts)
        notes = (*unlisted, *found.warnings)
    prediction = _prediction(found, request, tokens)
    scaled = sorted({length for stage in found.stages for length in stage.tokens})
    if tokens is not None and prediction.scaled and scaled != [tokens]:
        profiled = ", ".join(map(str, scaled))
        notes += (
            f"scheduled for sentences of {count(tokens, 'token')}, the longest of the input (profiled with "
            f"{profiled})",
        )
    return PlannedSchedule(found.schedule, prediction, notes)


def _known_hosts(
    request: RunRequest, dev_types_file: Path, dev_file: Path
) -> tuple[tuple[str, ...], str | None, tuple[str, ...]]:
    """Return the hosts to schedule on, the data rank's host, and a note if the files lack the latter.

    Without ``-H`` hosts are called by their ranks; where the file has none of those, the scheduler says so.
    """
    devices = load_devices(dev_file)
    listed = {host: kind for kind, hosts in devices.items() for host in hosts}
    ranks = tuple(map(str, range(request.world.size)))
    hosts = request.schedule.hosts or tuple(rank for rank in ranks if rank in listed)
    data_rank = request.schedule.data_rank
    data_host = (request.schedule.hosts or ranks)[data_rank]
    if listed.get(data_host) in load_device_types(dev_types_file):
        return hosts, data_host, ()
    where = dev_types_file if data_host in listed else dev_file
    what = f"the type {listed[data_host]} of " if data_host in listed else ""
    note = (
        f"{what}the data rank's host {data_host} is not in {where}, so the links from and to the data rank "
        "are not counted; list it there"
    )
    return hosts, None, (note,)


def _prediction(found: scheduler.Plan, request: RunRequest, tokens: int | None) -> Prediction:
    """Return the scheduler's prediction."""
    stages = (
        StagePrediction(stage.compute_s, stage.link_out_s, stage.threads, stage.tokens, stage.data_s)
        for stage in found.stages
    )
    return Prediction(
        tuple(stages), request.ubatch_size, tokens, found.input_link_s, found.feed_s, found.collect_s
    )


def _partitioned(request: RunRequest, model: Model, partition: Sequence[int]) -> PlannedSchedule:
    """Return a schedule with the stages of ``partition`` on the requested ranks and hosts."""
    wanted = request.schedule
    try:
        schedule = Schedule.from_partition(partition)
    except ScheduleError as error:
        raise ScheduleError(f"-pt: {error} (the layers of {model.name} are 1 to {model.n_layers})") from None
    if wanted.rank_order is not None:
        schedule = schedule.with_rank_order(wanted.rank_order, world_size=request.world.size)
    if wanted.hosts is not None:
        schedule.check(n_layers=model.n_layers, world_size=request.world.size)
        schedule = schedule.with_hosts(wanted.hosts)
    return PlannedSchedule(schedule)


def _even_partition(n_layers: int, stages: int) -> list[int]:
    """Layers split evenly, on whole blocks (four layers) where there are enough: those cuts are cheapest."""
    unit = 4 if n_layers // 4 >= stages else 1
    bounds = [round(stage * (n_layers // unit) / stages) * unit for stage in range(stages + 1)]
    return [bound for stage in range(stages) for bound in (bounds[stage] + 1, bounds[stage + 1])]


_SCHEDULE_OPTION = "schedule option "
_DATA_OPTION = "data option "
"""How the names of facts begin that are options of one rank."""


def rank_facts(
    request: RunRequest,
    model: Model,
    *,
    weights: str | None,
    items: int | None,
    max_tokens: int | None,
    pixels: PixelTable | None = None,
) -> dict[str, Any]:
    """Return what one rank was asked to do, for comparison with the other ranks.

    Args:
        request: of the rank.
        model: its model.
        weights: their fingerprint; None where there are none.
        items: of the input, on the data rank.
        max_tokens: of its longest sentence, on the data rank.
        pixels: what the bytes of its pictures stand for, on the data rank; None where none are sent.
    """
    config = model.config
    digest = hashlib.sha256(json.dumps(config.as_dict(), sort_keys=True).encode()).hexdigest()
    return {
        "version": pipeedge.__version__,
        "torch": str(torch.__version__).split("+")[0],
        "model": model.name if model.directory is None else None,
        "architecture": f"{model.family} of {config.blocks} blocks of {config.hidden} ({digest[:8]})",
        "weights": weights,
        "ubatch_size": request.ubatch_size,
        "data_rank": request.schedule.data_rank,
        "comm": request.transport.comm,
        "items": items,
        "max_tokens": max_tokens,
        "pixel_table": None if pixels is None else pixels.to_text(),
        "record_rows": request.output.record_rows,
        **{f"{_SCHEDULE_OPTION}{name}": value for name, value in request.given.schedule.items()},
        **{f"{_DATA_OPTION}{name}": value for name, value in request.given.data.items()},
    }


def _check_table(text: str | None) -> None:
    """Raise ValueError unless ``text`` is a table of pixels as ``PixelTable.to_text`` writes it, or None."""
    if text is not None:
        PixelTable.from_text(text)


@dataclass(frozen=True)
class InputFacts:
    """The facts of the data rank about its input."""

    items: Count
    record_rows: Count
    max_tokens: Count | None
    """Tokens of the longest sentence, or None for images."""
    pixel_table: Text | None

    def __post_init__(self) -> None:
        _check_table(self.pixel_table)


def disagreement(facts: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Describe the first thing on which two ranks disagree, or return None if they agree."""
    return next(iter(disagreements(facts)), None)


def disagreements(facts: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Everything on which two ranks disagree, a line each."""
    what = {
        "version": ("the version of PipeEdge", "install the same"),
        "torch": ("the version of torch", "install the same"),
        "model": ("the model (-m)", "start all with the same"),
        "architecture": ("the configuration of the model", "give all the same config.json"),
        "weights": ("the weights (-M)", "copy the same file to all"),
        "ubatch_size": ("the microbatch size (-u)", "start all with the same"),
        "data_rank": ("the data rank (-D)", "start all with the same"),
        "comm": ("the transport (-c)", "start all with the same"),
    }
    for key, (name, remedy) in what.items():
        known = {rank: facts[rank].get(key) for rank in sorted(facts) if facts[rank].get(key) is not None}
        for rank, value in known.items():
            first = next(iter(known))
            if value != known[first]:
                yield f"ranks {first} and {rank} disagree on {name}: {known[first]} and {value}; {remedy}"
                break
    yield from _lost_options(facts, _SCHEDULE_OPTION, 0, "decides the schedule")
    data_ranks = {told["data_rank"] for told in facts.values() if "data_rank" in told}
    if len(data_ranks) == 1:
        yield from _lost_options(facts, _DATA_OPTION, data_ranks.pop(), "is the data rank")


def _lost_options(
    facts: Mapping[int, Mapping[str, Any]], prefix: str, obeys: int, role: str
) -> Iterator[str]:
    """Yield a line for each option that a rank was given and that would have no effect.

    Args:
        facts: what each rank was asked to do.
        prefix: of the options' names.
        obeys: the rank that obeys these options; the others may be given the same, or none.
        role: why that rank obeys them.
    """
    if obeys not in facts:
        return
    for rank, told in sorted(facts.items()):
        for key, value in told.items():
            if not key.startswith(prefix) or facts[obeys].get(key) == value:
                continue
            option = key.removeprefix(prefix)
            if key in facts[obeys]:
                first, second = sorted((obeys, rank))
                yield (
                    f"ranks {first} and {second} disagree on {option}: {facts[first][key]} and "
                    f"{facts[second][key]}; rank {obeys} {role}: "
                    f"give rank {rank} the same, or leave it out there"
                )
            else:
                yield (
                    f"rank {rank} was given {f'{option} {value}'.rstrip()}, rank {obeys} was not; "
                    f"rank {obeys} {role}: give it to rank {obeys}"
                )


@dataclass(frozen=True)
class Plan:
    """What rank 0 announces: all that a rank needs to take its place."""

    schedule: Schedule
    data_rank: Count
    items: Count
    ubatch_size: Positive
    max_tokens: Count | None
    store_port: Port | None
    """Where the links' rendezvous is, at ``--addr``; None where everything is on one rank."""
    prediction: Prediction | None
    compression: CompressionRequest = field(default_factory=CompressionRequest)
    pixel_table: Text | None = None
    """What the bytes of pictures stand for, as ``PixelTable.to_text`` has it; None where none are sent."""
    record_rows: Count = DEFAULT_ROWS
    """Number of rows that each thread keeps of its activities."""

    @property
    def participants(self) -> tuple[int, ...]:
        """Ranks that have something to do, in order."""
        return tuple(sorted({*self.schedule.ranks, self.data_rank}))

    def __post_init__(self) -> None:
        _check_table(self.pixel_table)

    def links(self, model: Model) -> list[Link]:
        """All links, in order: from the data rank to stage 0, from stage to stage, and back.

        Values travel in the type of the stage that sends them; the data rank sends pictures as bytes where
        that is exact, and other values in the type of the first stage.
        """
        ranks = (self.data_rank, *self.schedule.ranks, self.data_rank)
        items, first = min(self.ubatch_size, self.items), find_dtype(self.schedule.stages[0].dtype)
        specs = [
            model.input_specs(items, self.max_tokens, first, eight_bit=self.pixel_table is not None),
        ]
        specs += (self._link_specs(model, stage) for stage in range(len(self.schedule.stages)))
        return [
            Link(ranks[number], ranks[number + 1], crossing, number > 0 and self.measures(number - 1))
            for number, crossing in enumerate(specs)
        ]

    def measures(self, stage: int) -> bool:
        """Return whether receipts measure the link that leaves ``stage``.

        They do if its bits adapt to the bandwidth, or if a prediction exists to compare with.
        """
        promised = self.prediction is not None and self.prediction.stages[stage].link_s >= MEASURED_LINK_S
        return self.adapts(stage) or promised

    def adapts(self, stage: int) -> bool:
        """Return whether the link that leaves ``stage`` adapts its bits to the bandwidth."""
        return self.compression.adaptive is not None and stage < len(self.schedule.stages) - 1

    def compresses(self, stage: int) -> bool:
        """Return whether the output of ``stage`` is encoded."""
        return self.adapts(stage) or self.schedule.stages[stage].quant_bits != 0

    def sizes(self, model: Model, stage: int) -> Sizes:
        """Return the size of the largest microbatch at each bit width, on the link that leaves ``stage``."""
        return Sizes({bits: frame_capacity(specs) for bits, specs in self._by_width(model, stage).items()})

    def _link_specs(self, model: Model, stage: int) -> tuple[TensorSpec, ...]:
        if self.adapts(stage):
            return self._by_width(model, stage)[0]
        plan = self.schedule.stages[stage]
        return _on_link(self._payload_specs(model, plan.layers.stop, plan.dtype), plan.quant_bits)

    def _by_width(self, model: Model, stage: int) -> dict[int, tuple[TensorSpec, ...]]:
        """Return the tensors for each bit width of the adaptive link: 0, and every width that is smaller."""
        plan = self.schedule.stages[stage]
        specs = self._payload_specs(model, plan.layers.stop, plan.dtype)
        found = {0: wire_specs(specs, 0)}
        largest, least = frame_capacity(found[0]), self.compression.min_bits or 0
        for bits in BIT_WIDTHS:
            crossing = wire_specs(specs, bits)
            if bits >= least and frame_capacity(crossing) < largest:
                found[bits] = crossing
        return found

    def _payload_specs(self, model: Model, cut: int, dtype: str) -> tuple[TensorSpec, ...]:
        items = min(self.ubatch_size, self.items)
        return model.payload_specs(cut, items, self.max_tokens, find_dtype(dtype))

    def name(self, rank: int) -> str | None:
        """Describe ``rank`` for messages, or return None if it has no role."""
        stage = self.schedule.stage_of(rank)
        if stage is not None:
            return f"stage {stage}, {self.schedule.stages[stage].layers.named}"
        return "data rank" if rank == self.data_rank else None
