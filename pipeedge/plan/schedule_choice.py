"""Choose the schedule of a run as its options ask for it; this may ask the scheduler.

-pt                 ──> the given stages
a schedule file     ──> its stages
the YAML files      ──> what sched-pipeline answers, with its prediction
nothing             ──> an even split over the ranks

A dry run is to answer at once, so what only some of these need is imported where it is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pipeedge.base.errors import InfeasibleError, ScheduleError
from pipeedge.base.schedule import Schedule, StagePlan
from pipeedge.base.shapes import shapes_bytes
from pipeedge.base.wording import count
from pipeedge.compress.sizes import wire_shapes
from pipeedge.models.outline import Outline
from pipeedge.plan.after_loss import Survivor, keep_layers, smallest_change
from pipeedge.plan.prediction import Prediction, StagePrediction
from pipeedge.request.config import RunRequest
from pipeedge.request.scheduling import CompressionRequest, ScheduleRequest

if TYPE_CHECKING:
    from pipeedge.plan.joint_choice import JointPlan, Trial
    from pipeedge.plan.listed_model import ListedModel
    from pipeedge.plan.problem import Problem
    from pipeedge.plan.scheduler import HostLoss, SchedulerRequest, Solution

__all__ = [
    "CutModel",
    "PlannedSchedule",
    "check_schedule",
    "plan_after_loss",
    "plan_schedule",
    "scheduler_request",
]

CutModel: TypeAlias = "Outline | ListedModel"
"""A model, as far as planning needs it: one that can run here, or one that only ``models.yml`` knows."""


@dataclass(frozen=True)
class PlannedSchedule:
    """A schedule and what the scheduler promised of it."""

    schedule: Schedule
    prediction: Prediction | None = None
    notes: tuple[str, ...] = ()
    losses: tuple[HostLoss, ...] = ()
    """Costs of losing each host, if they were asked for and the scheduler made the schedule."""
    microbatch_size: int | None = None
    """Number of items in a microbatch, if it was chosen with the schedule; None for that of the request."""


def check_schedule(request: RunRequest, model: CutModel) -> None:
    """Check all that this rank can know of the schedule before it hears of the others.

    Every rank may be given ``-pt``. The rest is rank 0's: a schedule file is read, and so are the files of
    the scheduler, whose answer may depend on the input.

    Raises:
        RequestError: A file cannot be read, or something does not fit the model or the world.
    """
    wanted = request.schedule
    if wanted.partition is None and request.world.rank != 0:
        return
    if not wanted.automatic or wanted.partition is not None:
        plan_schedule(request, model)
        return
    from pipeedge.plan.spec_files import read_files

    read_files(
        models=wanted.models_file,
        device_types=wanted.dev_types_file,
        devices=wanted.dev_file,
        neighbors=wanted.dev_neighbors_file,
    )
    asked, _ = scheduler_request(request, model, None, eight_bit=True)
    if not wanted.joint and not wanted.automatic_dtype:
        _read_problem(asked, wanted)


def plan_schedule(
    request: RunRequest,
    model: CutModel,
    tokens: int | None = None,
    *,
    eight_bit: bool = True,
    ranks: Collection[int] | None = None,
    losses: bool = False,
    trial: Trial | None = None,
) -> PlannedSchedule:
    """Return the schedule that ``request`` asks for, in a run or its simulation.

    Args:
        request: Request of rank 0.
        model: The model to cut.
        tokens: Tokens of the longest sentence of the input; None for images, and if it is not known.
        eight_bit: Whether pictures are sent as bytes.
        ranks: Ranks whose hosts the scheduler may use, when others are lost; None for all.
        losses: Whether to ask the scheduler what the loss of each host would cost.
        trial: Tries joint plans on held-out items; None if they are taken untried.

    Raises:
        ScheduleError: It does not fit the model or the world.
        InfeasibleError: The scheduler finds that none exists.
    """
    planned = _requested_schedule(
        request, model, tokens, eight_bit=eight_bit, ranks=ranks, losses=losses, trial=trial
    )
    if planned is None:
        order = request.schedule.rank_order
        stages = request.world.size if order is None else len(order)
        planned = _partitioned(request, model, _even_partition(model.n_layers, min(stages, model.n_layers)))
    planned.schedule.check(n_layers=model.n_layers, world_size=request.world.size)
    if request.schedule.dtypes is not None and not request.schedule.automatic:
        schedule = planned.schedule.with_dtypes(request.schedule.dtypes)
        planned = dataclasses.replace(planned, schedule=schedule)
    if request.links.quant_bits is not None:
        planned = _compressed(planned, request, model, request.links.quant_bits)
    return _adaptable(planned, request.links.compression)


def plan_after_loss(
    request: RunRequest,
    model: CutModel,
    before: Schedule,
    survivors: Sequence[Survivor],
    layer_bytes: Callable[[Schedule], Sequence[float]],
    *,
    tokens: int | None = None,
    eight_bit: bool = True,
) -> PlannedSchedule | str:
    """Return the schedule for the ranks that are left, or the reason why there is none.

    Args:
        request: Request of rank 0, with the microbatch size that the run has.
        model: The model.
        before: The schedule before the loss.
        survivors: Ranks that are left.
        layer_bytes: Returns the bytes of the weights of each layer, in the number types of a schedule.
        tokens: Tokens of the longest sentence; None for images.
        eight_bit: Whether pictures are sent as bytes.

    Raises:
        PipeEdgeError: The scheduler finds none.
    """
    if not request.schedule.automatic:
        found = smallest_change(before, survivors, layer_bytes(before))
        return found if isinstance(found, str) else PlannedSchedule(found)
    ranks = frozenset(one.rank for one in survivors)
    planned = plan_schedule(request, model, tokens, eight_bit=eight_bit, ranks=ranks)
    groups = _interchangeable(request, survivors)
    kept = keep_layers(planned.schedule, groups, layer_bytes(planned.schedule))
    return PlannedSchedule(kept, planned.prediction)


def _interchangeable(request: RunRequest, survivors: Sequence[Survivor]) -> list[list[Survivor]]:
    """Return the ranks of each kind of host, without the data rank, whose own work counts."""
    wanted = request.schedule
    if wanted.dev_file is None or wanted.dev_neighbors_file is not None:
        return []  # the links of each host are its own
    from pipeedge.plan.spec_files import read_files

    devices = read_files(devices=wanted.dev_file).devices
    names = wanted.hosts or tuple(map(str, range(request.world.size)))
    kinds: dict[str, list[Survivor]] = {}
    for one in survivors:
        for kind, hosts in devices.items():
            if names[one.rank] in hosts and one.rank != wanted.data_rank:
                kinds.setdefault(kind, []).append(one)
    return list(kinds.values())


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
    planned: PlannedSchedule, request: RunRequest, model: CutModel, quant_bits: Sequence[int]
) -> PlannedSchedule:
    """Return the schedule with the bit widths of ``-q`` and the prediction scaled to its smaller frames."""
    schedule = planned.schedule.with_quant_bits(quant_bits)
    if any(quant_bits) and schedule.ranks == (request.schedule.data_rank,):
        note = "-q changes nothing: with one stage, on the data rank, nothing crosses a link"
        planned = dataclasses.replace(planned, notes=(*planned.notes, note))
    if planned.prediction is None:
        return dataclasses.replace(planned, schedule=schedule)

    def shrink(stage: StagePlan, before: StagePlan) -> float:
        clear = model.payload_shapes(stage.layers.stop, request.microbatch_size, dtype=stage.dtype)
        now, then = (
            shapes_bytes(wire_shapes(clear, plan.quant_bits) if plan.quant_bits else clear)
            for plan in (stage, before)
        )
        return now / then

    prediction = dataclasses.replace(
        planned.prediction,
        joules_per_item=None,  # those of other links
        stages=tuple(
            dataclasses.replace(promise, link_s=promise.link_s * shrink(stage, before))
            for promise, stage, before in zip(
                planned.prediction.stages, schedule.stages, planned.schedule.stages, strict=True
            )
        ),
    )
    return dataclasses.replace(planned, schedule=schedule, prediction=prediction)


def _requested_schedule(
    request: RunRequest,
    model: CutModel,
    tokens: int | None,
    *,
    eight_bit: bool,
    ranks: Collection[int] | None,
    losses: bool,
    trial: Trial | None,
) -> PlannedSchedule | None:
    wanted = request.schedule
    if wanted.partition is not None:
        return _partitioned(request, model, wanted.partition)
    if wanted.schedule_file is not None:
        from pipeedge.plan.schedule_files import load_schedule

        return PlannedSchedule(load_schedule(wanted.schedule_file, hosts=wanted.hosts))
    if wanted.models_file is None:
        return None
    asked, unlisted = scheduler_request(request, model, tokens, eight_bit=eight_bit, ranks=ranks)
    asked = dataclasses.replace(asked, survive_loss=wanted.survive_loss and ranks is None, losses=losses)
    chosen_size = None
    if wanted.joint:
        plan = _planned_together(asked, wanted, after_loss=ranks is not None, trial=trial)
        found, notes, chosen_size = plan.solution, plan.notes, plan.microbatch_size
    else:
        found, notes = _solved(asked, wanted)
    prediction = _prediction(found, chosen_size or request.microbatch_size, tokens)
    notes = (*unlisted, *notes, *found.warnings, *_scaling_notes(found, prediction, tokens))
    return PlannedSchedule(found.schedule, prediction, notes, found.losses, chosen_size)


def _planned_together(
    asked: SchedulerRequest, wanted: ScheduleRequest, *, after_loss: bool, trial: Trial | None
) -> JointPlan:
    """Choose stages, number types, bits and the size of microbatches together.

    Args:
        asked: The files, and the largest size of a microbatch.
        wanted: What the user wants of the schedule.
        after_loss: Whether the run goes on without a host; then its microbatches have a size already, which
            stays.
        trial: Tries plans on held-out items; None if they are taken untried.
    """
    from pipeedge.plan.joint_choice import choose_together

    choose = partial(
        choose_together,
        min_agreement=wanted.min_agreement,
        hosts=wanted.hosts,
        exactly=after_loss,
        trial=trial,
    )
    asked = dataclasses.replace(asked, objective=wanted.objective, min_throughput=wanted.min_throughput)
    try:
        return choose(asked)
    except InfeasibleError:
        if not after_loss or wanted.min_throughput is None:
            raise
        # The hosts that are left may all be too slow; then they are to be as fast as they can.
        return choose(dataclasses.replace(asked, objective="throughput", min_throughput=None))


def _solved(asked: SchedulerRequest, wanted: ScheduleRequest) -> tuple[Solution, tuple[str, ...]]:
    """Choose the stages, and the number type if it is to be chosen; return notes for the user as well."""
    from pipeedge.plan import scheduler
    from pipeedge.plan.dtype_choice import choose_dtype

    if wanted.automatic_dtype:
        found, note = choose_dtype(asked, wanted.min_agreement, wanted.hosts)
        return found, (note,)
    return scheduler.solve(_read_problem(asked, wanted), hosts=wanted.hosts), ()


def _read_problem(asked: SchedulerRequest, wanted: ScheduleRequest) -> Problem:
    """Return what the scheduler's files ask for, with stages of one number type."""
    from pipeedge.plan import scheduler

    dtype = (wanted.dtypes or ("float32",))[0]
    return scheduler.read_problem(dataclasses.replace(asked, dtype=f"torch.{dtype}"))


def _scaling_notes(found: Solution, prediction: Prediction, tokens: int | None) -> tuple[str, ...]:
    """Return a note if profiles of other lengths were scaled to that of the input."""
    profiled = sorted({length for stage in found.stages for length in stage.tokens})
    if tokens is None or not prediction.scaled or profiled == [tokens]:
        return ()
    return (
        f"scheduled for sentences of {count(tokens, 'token')}, the longest of the input (profiled with "
        f"{', '.join(map(str, profiled))})",
    )


def _transport(request: RunRequest) -> str:
    """Return the transport of the links as profiles name it."""
    return f"{request.transport.comm}-tls" if request.world.keys.given else request.transport.comm


def scheduler_request(
    request: RunRequest,
    model: CutModel,
    tokens: int | None,
    *,
    eight_bit: bool,
    ranks: Collection[int] | None = None,
) -> tuple[SchedulerRequest, tuple[str, ...]]:
    """Return what the scheduler is asked in a run with its files, and notes for the user.

    Args:
        request: Request of rank 0.
        model: The model to cut.
        tokens: Tokens of the longest sentence of the input; None for images, and if it is not known.
        eight_bit: Whether pictures are sent as bytes.
        ranks: Ranks whose hosts the scheduler may use; None for all.

    Raises:
        ScheduleError: There are no such files.
        InfeasibleError: The files have none of the hosts.
    """
    from pipeedge.plan.scheduler import SchedulerRequest

    wanted = request.schedule
    if wanted.models_file is None or wanted.dev_types_file is None or wanted.dev_file is None:
        raise ScheduleError("the run is not scheduled from files")
    hosts, data_host, unlisted = _known_hosts(request, wanted.dev_types_file, wanted.dev_file)
    if ranks is not None:
        names = wanted.hosts or tuple(map(str, range(request.world.size)))
        hosts = tuple(names[rank] for rank in sorted(ranks) if names[rank] in hosts)
        if not hosts:
            raise InfeasibleError(f"no host that is left is in {wanted.dev_file}")
    # Values that are not bytes go out in the type of the first stage; of several types, as the widest.
    first = "float32" if wanted.automatic_dtype else (wanted.dtypes or ("float32",))[0]
    asked = SchedulerRequest(
        models_file=wanted.models_file,
        dev_types_file=wanted.dev_types_file,
        dev_file=wanted.dev_file,
        dev_neighbors_file=wanted.dev_neighbors_file,
        model_name=model.name,
        microbatch_size=request.microbatch_size,
        link_bits=request.links.link_bits or "0",
        tokens=tokens,
        transport=_transport(request),
        data_host=data_host,
        hosts=hosts,
        input_bytes=model.input_bytes(tokens, first, eight_bit=eight_bit),
    )
    return asked, unlisted


def _known_hosts(
    request: RunRequest, dev_types_file: Path, dev_file: Path
) -> tuple[tuple[str, ...], str | None, tuple[str, ...]]:
    """Return the hosts to schedule on, the data rank's host, and a note if the files lack the latter.

    Without ``-H`` hosts are called by their ranks; where the file has none of those, the scheduler says so.
    """
    from pipeedge.plan.spec_files import read_files

    files = read_files(device_types=dev_types_file, devices=dev_file)
    listed = {host: kind for kind, hosts in files.devices.items() for host in hosts}
    ranks = tuple(map(str, range(request.world.size)))
    hosts = request.schedule.hosts or tuple(rank for rank in ranks if rank in listed)
    data_rank = request.schedule.data_rank
    data_host = (request.schedule.hosts or ranks)[data_rank]
    if listed.get(data_host) in files.device_types:
        return hosts, data_host, ()
    where = dev_types_file if data_host in listed else dev_file
    what = f"the type {listed[data_host]} of " if data_host in listed else ""
    note = (
        f"{what}the data rank's host {data_host} is not in {where}, so the links from and to the data rank "
        "are not counted; list it there"
    )
    return hosts, None, (note,)


def _prediction(found: Solution, microbatch_size: int, tokens: int | None) -> Prediction:
    """Return the scheduler's prediction."""
    stages = (
        StagePrediction(
            stage.compute_s, stage.link_out_s, stage.threads, stage.tokens, stage.data_s, stage.kernels
        )
        for stage in found.stages
    )
    return Prediction(
        tuple(stages),
        microbatch_size,
        tokens,
        found.input_link_s,
        found.feed_s,
        found.collect_s,
        found.joules_per_item,
    )


def _partitioned(request: RunRequest, model: CutModel, partition: Sequence[int]) -> PlannedSchedule:
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
