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
from typing import TYPE_CHECKING, TypeAlias

from pipeedge.base.errors import InfeasibleError, ScheduleError
from pipeedge.base.schedule import Schedule
from pipeedge.base.text_lengths import InputSizes, TextLengths
from pipeedge.base.wording import count, figure
from pipeedge.models.outline import Outline
from pipeedge.plan.after_loss import Survivor, loaded_by, smallest_change
from pipeedge.plan.placing import Placing
from pipeedge.plan.prediction import Prediction
from pipeedge.request.config import RunRequest
from pipeedge.request.scheduling import CUT, CompressionRequest, LinkRequest, ScheduleRequest

if TYPE_CHECKING:
    from pipeedge.plan.choice import ChosenPlan, Trial
    from pipeedge.plan.costs import HostLoss, PlanCosts
    from pipeedge.plan.listed_model import ListedModel
    from pipeedge.plan.scheduler import Choice, SchedulerRequest, Solution, TextRequest
    from pipeedge.plan.specs import SpecFiles

__all__ = [
    "CutModel",
    "Following",
    "PlannedSchedule",
    "check_schedule",
    "evaluate_schedule",
    "host_names",
    "plan_after_loss",
    "plan_schedule",
    "scheduler_request",
]

_USUAL_CONTEXT = 2048
"""Context in tokens that a plan is for, where neither texts nor ``--context`` say more."""

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
    limits: Choice | None = None
    """What was chosen with the schedule within which limits, which hold for those that follow it, too."""


@dataclass(frozen=True)
class Following:
    """What is kept of an earlier plan by the one that follows it."""

    ranks: Collection[int]
    """Ranks whose hosts the scheduler may use."""
    limits: Choice | None = None
    """Limits of the earlier plan, which hold for this one, too; None for those of the request."""
    loaded: Placing = ()
    """Layers that hosts have loaded."""


_UNKNOWN = InputSizes()


def host_names(request: RunRequest) -> tuple[str, ...]:
    """Return the host of each rank; hosts are called by their ranks where they have no names."""
    return request.schedule.hosts or tuple(map(str, range(request.world.size)))


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
    asked, _ = scheduler_request(request, model, _UNKNOWN)
    if asked.choice is None:
        from pipeedge.plan.scheduler import read_problem

        read_problem(asked)


def plan_schedule(
    request: RunRequest,
    model: CutModel,
    sizes: InputSizes = _UNKNOWN,
    *,
    following: Following | None = None,
    losses: bool = False,
    trial: Trial | None = None,
) -> PlannedSchedule:
    """Return the schedule that ``request`` asks for, in a run or its simulation.

    Args:
        request: Request of rank 0.
        model: The model to cut.
        sizes: Sizes of the input.
        following: What is to be kept of an earlier plan; None for the first one.
        losses: Whether to ask the scheduler what the loss of each host would cost.
        trial: Tries joint plans on held-out items; None if they are taken untried.

    Raises:
        ScheduleError: It does not fit the model or the world.
        InfeasibleError: The scheduler finds that none exists.
    """
    wanted = request.schedule
    if wanted.automatic:
        planned = _scheduled(request, model, sizes, following, losses=losses, trial=trial)
    else:
        planned = _given_schedule(request, model)
    planned.schedule.check(n_layers=model.n_layers, world_size=request.world.size)
    if request.schedule.dtypes is not None and not request.schedule.automatic:
        schedule = planned.schedule.with_dtypes(request.schedule.dtypes)
        planned = dataclasses.replace(planned, schedule=schedule)
    bits = request.links.quant_bits
    if bits is not None and not wanted.automatic:
        planned = dataclasses.replace(planned, schedule=planned.schedule.with_quant_bits(bits))
    if bits is not None and any(bits) and planned.schedule.ranks == (wanted.data_rank,):
        note = "-q changes nothing: with one stage, on the data rank, nothing crosses a link"
        planned = dataclasses.replace(planned, notes=(*planned.notes, note))
    return _adaptable(planned, request.links.compression)


def evaluate_schedule(
    request: RunRequest,
    model: CutModel,
    schedule: Schedule,
    sizes: InputSizes,
    microbatch_size: int,
    texts: TextRequest | None = None,
) -> PlanCosts:
    """Return what a schedule would cost in a run with the scheduler's files.

    Args:
        request: Request of rank 0.
        model: The model.
        schedule: The schedule.
        sizes: Sizes of the input.
        microbatch_size: Number of items in a microbatch.
        texts: Texts of a decoder; None for an encoder, or for those of the sizes.

    Raises:
        ScheduleError: There are no such files, or a link has no bandwidth.
        PipeEdgeError: As ``scheduler.evaluate``.
    """
    from pipeedge.plan.scheduler import Choice, evaluate

    dtypes = tuple(sorted({stage.dtype for stage in schedule.stages}))
    request = dataclasses.replace(
        request,
        microbatch_size=microbatch_size,
        schedule=dataclasses.replace(
            request.schedule, dtypes=(schedule.stages[0].dtype,), plan=CUT, min_agreement=None, held_out=0
        ),
        links=LinkRequest(),
    )
    asked, _ = scheduler_request(request, model, sizes)
    if texts is not None:
        asked = dataclasses.replace(asked, texts=texts)
    if len(dtypes) > 1:
        size = 1 if _decodes(model) else microbatch_size  # steps of a decoder have any size
        asked = dataclasses.replace(asked, choice=Choice((size,), 0.0, dtypes, (0,)))
    return evaluate(asked, schedule, hosts=request.schedule.hosts).costs


def plan_after_loss(
    request: RunRequest,
    model: CutModel,
    before: Schedule,
    survivors: Sequence[Survivor],
    layer_bytes: Callable[[Schedule], Sequence[float]],
    sizes: InputSizes,
    limits: Choice | None = None,
) -> PlannedSchedule | str:
    """Return the schedule for the ranks that are left, or the reason why there is none.

    Args:
        request: Request of rank 0, with the microbatch size that the run has.
        model: The model.
        before: The schedule before the loss.
        survivors: Ranks that are left.
        layer_bytes: Returns the bytes of the weights of each layer, in the number types of a schedule.
        sizes: Sizes of the input.
        limits: Limits of the plan before the loss; None for those of the request.

    Raises:
        PipeEdgeError: The scheduler finds none.
    """
    if not request.schedule.automatic:
        found = smallest_change(before, survivors, layer_bytes(before))
        return found if isinstance(found, str) else PlannedSchedule(found)
    ranks = frozenset(one.rank for one in survivors)
    following = Following(ranks, limits, loaded_by(survivors, host_names(request)))
    return plan_schedule(request, model, sizes, following=following)


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


def _given_schedule(request: RunRequest, model: CutModel) -> PlannedSchedule:
    """Return the schedule of ``-pt``, of a schedule file, or else an even split."""
    wanted = request.schedule
    if wanted.partition is not None:
        return _partitioned(request, model, wanted.partition)
    if wanted.schedule_file is not None:
        from pipeedge.plan.schedule_files import load_schedule

        return PlannedSchedule(load_schedule(wanted.schedule_file, hosts=wanted.hosts))
    stages = request.world.size if wanted.rank_order is None else len(wanted.rank_order)
    return _partitioned(request, model, _even_partition(model.n_layers, min(stages, model.n_layers)))


def _scheduled(
    request: RunRequest,
    model: CutModel,
    sizes: InputSizes,
    following: Following | None,
    *,
    losses: bool,
    trial: Trial | None,
) -> PlannedSchedule:
    """Return what the scheduler finds, with the bits of ``-q`` if they are given."""
    wanted, after_loss = request.schedule, following is not None
    asked, unlisted = scheduler_request(request, model, sizes, following)
    survive_loss = wanted.survive_loss and not after_loss
    loaded = () if following is None else following.loaded
    asked = dataclasses.replace(asked, survive_loss=survive_loss, losses=losses, loaded=loaded)
    plan = _chosen(asked, wanted, after_loss=after_loss, trial=trial)
    found = plan.solution
    if request.links.quant_bits is not None:
        found = _with_bits(plan, request.links.quant_bits, wanted.hosts)
    prediction = found.costs.prediction(sizes.tokens, mixed=sizes.lengths is not None)
    notes = (*unlisted, *plan.notes, *found.costs.warnings, *_scaling_notes(prediction, sizes))
    return PlannedSchedule(
        found.schedule,
        prediction,
        notes,
        plan.solution.losses,
        # The microbatch size of a decoder is the number of streams, which is not chosen.
        plan.microbatch_size if plan.asked.choice is not None and not _decodes(model) else None,
        plan.asked.choice,
    )


def _with_bits(plan: ChosenPlan, bits: Sequence[int], hosts: Sequence[str] | None) -> Solution:
    """Return a plan with the bits of ``-q`` on its links.

    Raises:
        InfeasibleError: With these bits, it does not keep the agreement that it was chosen for.
    """
    from pipeedge.plan.scheduler import Solution, evaluate

    choice = plan.asked.choice
    if choice is not None:
        widths = tuple(sorted({0, *bits}))
        choice = dataclasses.replace(choice, batch_sizes=(plan.microbatch_size,), widths=widths)
    asked = dataclasses.replace(plan.asked, choice=choice)
    schedule = plan.solution.schedule.with_quant_bits(bits)
    costs = evaluate(asked, schedule, hosts=hosts).costs
    if costs.max_loss is not None and costs.loss > costs.max_loss + 1e-9:
        raise InfeasibleError(
            f"-q: an agreement of {figure(1 - costs.loss, 4)} is expected, {figure(1 - costs.max_loss, 4)} "
            "wanted; give more bits, or lower --min-agreement"
        )
    return Solution(schedule, costs)


def _chosen(
    asked: SchedulerRequest, wanted: ScheduleRequest, *, after_loss: bool, trial: Trial | None
) -> ChosenPlan:
    """Choose the stages, and what else the scheduler is to choose.

    Args:
        asked: The files, and what is to be chosen.
        wanted: What the user wants of the schedule.
        after_loss: Whether the run goes on without a host. If the hosts that are left are all too slow, they
            are to be as fast as they can.
        trial: Tries plans on held-out items; None if they are taken untried.
    """
    from pipeedge.plan.choice import choose

    name = "--plan auto" if wanted.joint else "--dtype auto" if wanted.automatic_dtype else "--link-bits auto"
    try:
        return choose(asked, wanted.hosts, name, trial=trial)
    except InfeasibleError:
        if not after_loss or wanted.min_throughput is None:
            raise
        asked = dataclasses.replace(asked, objective="throughput", min_throughput=None)
        return choose(asked, wanted.hosts, name, trial=trial)


def _scaling_notes(prediction: Prediction, sizes: InputSizes) -> tuple[str, ...]:
    """Return a note if profiles of other lengths were scaled to those of the input."""
    tokens = sizes.tokens
    profiled = sorted({length for stage in prediction.stages for length in stage.tokens})
    if tokens is None or not prediction.scaled or profiled == [tokens]:
        return ()
    which = (
        f"of {count(tokens, 'token')}, the longest of the input"
        if sizes.lengths is None
        else f"as long as those of the input, the longest {count(tokens, 'token')}"
    )
    return (f"scheduled for sentences {which} (profiled with {', '.join(map(str, profiled))})",)


def _transport(request: RunRequest) -> str:
    """Return the transport of the links as profiles name it."""
    return f"{request.transport.comm}-tls" if request.world.keys.given else request.transport.comm


def scheduler_request(
    request: RunRequest,
    model: CutModel,
    sizes: InputSizes,
    following: Following | None = None,
) -> tuple[SchedulerRequest, tuple[str, ...]]:
    """Return what the scheduler is asked in a run with its files, and notes for the user.

    Args:
        request: Request of rank 0.
        model: The model to cut.
        sizes: Sizes of the input.
        following: What is to be kept of the plan that runs or ran, whose microbatches keep their size; None
            if the run has not begun.

    Raises:
        ScheduleError: There are no such files, or no profile has such a microbatch size.
        InfeasibleError: The files have none of the hosts.
    """
    from pipeedge.plan.choice import choice_of
    from pipeedge.plan.scheduler import SchedulerRequest
    from pipeedge.plan.spec_files import read_files

    wanted = request.schedule
    if wanted.models_file is None or wanted.dev_types_file is None or wanted.dev_file is None:
        raise ScheduleError("the run is not scheduled from files")
    files = read_files(
        models=wanted.models_file,
        device_types=wanted.dev_types_file,
        devices=wanted.dev_file,
        neighbors=wanted.dev_neighbors_file,
    )
    hosts, data_host, unlisted = _known_hosts(request, files)
    if following is not None:
        names = host_names(request)
        hosts = tuple(names[rank] for rank in sorted(following.ranks) if names[rank] in hosts)
        if not hosts:
            raise InfeasibleError(f"no host that is left is in {wanted.dev_file}")
    link_bits, size = request.links.link_bits, request.microbatch_size
    if wanted.joint and link_bits is None and request.links.quant_bits is not None:
        link_bits = "0"  # -q says which bits links have
    choice = choice_of(wanted, link_bits, size, files, model.name)
    decodes = _decodes(model)
    if choice is not None and following is not None:
        kept = choice.batch_sizes if decodes else (size,)
        choice = dataclasses.replace(following.limits or choice, batch_sizes=kept)
    # Values that are not bytes go out in the type of the first stage; of several types, as the widest.
    first = "float32" if wanted.automatic_dtype else (wanted.dtypes or ("float32",))[0]
    asked = SchedulerRequest(
        models_file=wanted.models_file,
        dev_types_file=wanted.dev_types_file,
        dev_file=wanted.dev_file,
        dev_neighbors_file=wanted.dev_neighbors_file,
        model_name=model.name,
        microbatch_size=request.microbatch_size,
        dtype=f"torch.{first}",
        choice=choice,
        link_bits=link_bits or "0",
        tokens=sizes.tokens,
        lengths=sizes.lengths,
        transport=_transport(request),
        data_host=data_host,
        hosts=hosts,
        input_bytes=None if decodes else model.input_bytes(sizes.tokens, first, eight_bit=sizes.eight_bit),
        objective=wanted.objective,
        min_throughput=wanted.min_throughput,
        texts=text_request(request, model, sizes.texts) if decodes else None,
    )
    return asked, unlisted


def _decodes(model: CutModel) -> bool:
    """Return whether a model generates text."""
    return model.family.decodes if isinstance(model, Outline) else model.decodes


def text_request(request: RunRequest, model: CutModel, texts: TextLengths | None) -> TextRequest:
    """Return the texts of a decoder that a plan is for.

    Without ``--context``, memory is for the longest prompt and answer together; if they are unknown, for a
    context that most of what is asked fits into.
    """
    from pipeedge.plan.scheduler import TextRequest

    longest = model.max_tokens
    if texts is None:
        return TextRequest(request.microbatch_size, request.cache.context or min(longest, _USUAL_CONTEXT))
    context = min(longest, request.cache.context or texts.longest)
    prompt = min(texts.prompt, context - 1)
    return TextRequest(
        min(request.microbatch_size, texts.texts), context, prompt, min(texts.answer, context - prompt)
    )


def _known_hosts(
    request: RunRequest, files: SpecFiles
) -> tuple[tuple[str, ...], str | None, tuple[str, ...]]:
    """Return the hosts to schedule on, the data rank's host, and a note if the files lack the latter.

    Without ``-H`` hosts are called by their ranks; where the file has none of those, the scheduler says so.
    """
    listed = {host: kind for kind, hosts in files.devices.items() for host in hosts}
    names = host_names(request)
    hosts = request.schedule.hosts or tuple(name for name in names if name in listed)
    data_host = names[request.schedule.data_rank]
    if listed.get(data_host) in files.device_types:
        return hosts, data_host, ()
    wanted = request.schedule
    where = wanted.dev_types_file if data_host in listed else wanted.dev_file
    what = f"the type {listed[data_host]} of " if data_host in listed else ""
    note = (
        f"{what}the data rank's host {data_host} is not in {where}, so the links from and to the data rank "
        "are not counted; list it there"
    )
    return hosts, None, (note,)


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
