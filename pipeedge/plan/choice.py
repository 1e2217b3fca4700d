"""The choice of a schedule by the scheduler, and of what else it is to choose with it.

    -sm -sdt -sd                  the cut and the hosts
    --dtype auto                  and the number type of each stage
    --plan auto                   and the size of microbatches and the bits of each link
                                      └─ sched-pipeline ─> one schedule
                                            └─ tighter limits <─ trial on held-out items

These are one plan with more or less to choose from. ``sched-pipeline`` names the profiles that are missing,
and what was not measured, and plans without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pipeedge.base.errors import InfeasibleError, ScheduleError
from pipeedge.base.schedule import DTYPES, Schedule
from pipeedge.base.wording import count, figure
from pipeedge.plan import scheduler
from pipeedge.plan.costs import PlanCosts
from pipeedge.plan.scheduler import Choice, SchedulerRequest, Solution
from pipeedge.plan.spec_files import find_named
from pipeedge.plan.specs import ModelProfile, SpecFiles, short_dtype
from pipeedge.request.scheduling import AUTO, ENERGY, ScheduleRequest

__all__ = ["ChosenPlan", "Trial", "choose", "choice_of"]

_NOTHING = 1e-9
"""Largest expected loss that counts as none."""
_LESS = 0.1
"""Least part by which the expected loss of the next plan is smaller, so that it is not nearly the same."""
_WIDTHS = (0, 16, 8, 6, 4)
"""Bits of links that the scheduler chooses from by default."""
_ALL_WIDTHS = (0, 16, 8, 7, 6, 5, 4, 3, 2)


@dataclass(frozen=True)
class Trial:
    """A trial of plans on held-out items."""

    items: int
    """Number of the items."""
    agreement: Callable[[Schedule, int], float]
    """Returns the fraction of the items whose class under a schedule, with microbatches of a size, is that of
    float32."""


@dataclass(frozen=True)
class ChosenPlan:
    """A schedule and its costs, with everything that was chosen with it."""

    solution: Solution
    asked: SchedulerRequest
    """Request that it answers. Its limits hold for the plans that follow it, too."""
    notes: tuple[str, ...] = ()
    """Lines about each attempt and the choice."""

    @property
    def microbatch_size(self) -> int:
        """Number of items in a microbatch."""
        return round(self.solution.costs.batch_size)


def choice_of(
    wanted: ScheduleRequest, link_bits: str | None, microbatch_size: int, files: SpecFiles, model: str
) -> Choice | None:
    """Return what a plan chooses besides the cut and the hosts, or None for nothing.

    Args:
        wanted: What the user wants of the schedule.
        link_bits: ``--link-bits``.
        microbatch_size: Largest number of items in a microbatch or, unless it is to be chosen, the number.
        files: Device types and devices.
        model: Name of the model.

    Raises:
        ScheduleError: No profile has such a microbatch size.
    """
    limited = link_bits == AUTO and wanted.objective != "throughput"
    if not (wanted.joint or wanted.automatic_dtype or limited):
        return None
    profiles = list(_profiles(wanted, microbatch_size, files, model))
    sizes = sorted({profile.batch_size for profile in profiles}) if wanted.joint else [microbatch_size]
    decodes = any(profile.steps is not None for profile in profiles)
    if decodes:  # steps have any size
        sizes = [1]
    if not sizes:
        raise ScheduleError(
            f"--plan auto: no host has a profile of {model} for microbatches of at most {microbatch_size} "
            f"({wanted.dev_types_file}); allow larger ones with -u"
        )
    least = wanted.min_agreement
    widths = _widths(link_bits, joint=wanted.joint, limited=limited)
    if least is None and decodes:  # texts have no class to agree in: the number types are those profiled
        least, widths = 0.0, widths or (0,)
    if least is None and not (wanted.joint or limited):
        least = 0.0
    return Choice(tuple(sizes), least, _dtypes(wanted, profiles), widths)


def _dtypes(wanted: ScheduleRequest, profiles: Iterable[ModelProfile]) -> tuple[str, ...] | None:
    """Return the number types to choose from: those given or, if there are none, all that can run."""
    if wanted.dtypes is not None and not wanted.automatic_dtype:
        return wanted.dtypes
    if not (wanted.joint or wanted.automatic_dtype):
        return ("float32",)
    return tuple(sorted({short_dtype(profile.dtype) for profile in profiles} & set(DTYPES))) or None


def _widths(link_bits: str | None, *, joint: bool, limited: bool) -> tuple[int, ...] | None:
    """Return the bits of links to choose from; None for those that the scheduler chooses from by default."""
    if link_bits is None:
        return None if joint else (0,)
    if link_bits != AUTO:
        return (int(link_bits),)
    return None if joint or limited else _ALL_WIDTHS


def _profiles(
    wanted: ScheduleRequest, microbatch_size: int, files: SpecFiles, model: str
) -> Iterable[ModelProfile]:
    """Yield the profiles of the hosts with microbatches of at most the requested size."""
    for kind, listed in files.devices.items():
        if kind in files.device_types and (not wanted.hosts or set(listed) & set(wanted.hosts)):
            for profile in find_named(files.device_types[kind].profiles, model) or ():
                if profile.batch_size <= microbatch_size:
                    yield profile


def choose(
    asked: SchedulerRequest,
    hosts: Sequence[str] | None,
    name: str = "--plan auto",
    *,
    trial: Trial | None = None,
) -> ChosenPlan:
    """Find the best plan that passes its trial.

    Args:
        asked: The files, and what is to be chosen within which limits.
        hosts: The host of each rank; None where the hosts are called by their ranks.
        name: Option that asks for the choice, for notes.
        trial: Tries plans on held-out items; one with less than the wanted agreement gives way to the next
            best one. None takes the best plan untried.

    Raises:
        InfeasibleError: No plan keeps the limits, or passes its trial.
        PipeEdgeError: As ``scheduler.plan``.
    """
    if asked.choice is None:
        return ChosenPlan(scheduler.plan(asked, hosts=hosts), asked)
    if trial is None:
        found = scheduler.plan(asked, hosts=hosts)
        return ChosenPlan(found, asked, (_note(found.costs, name, asked.objective),))
    return _first_that_passes(asked, hosts, name, trial)


def _first_that_passes(
    asked: SchedulerRequest, hosts: Sequence[str] | None, name: str, trial: Trial
) -> ChosenPlan:
    """Return the best plan with the wanted agreement on held-out items.

    Raises:
        InfeasibleError: There is none.
    """
    refused: list[str] = []
    wanted = None
    choice = asked.choice
    while choice is not None:
        asked = replace(asked, choice=choice)
        try:
            found = scheduler.plan(asked, hosts=hosts)
        except InfeasibleError:
            if not refused:
                raise
            break
        costs = found.costs
        if wanted is None:  # any loss is allowed where there is no largest one
            wanted = 0.0 if costs.max_loss is None else 1 - costs.max_loss
        part = trial.agreement(found.schedule, round(costs.batch_size))
        measured = f"{figure(part, 4)} on {count(trial.items, 'held-out item')}"
        chosen = _note(costs, name, asked.objective)
        if part >= wanted - _NOTHING:
            return ChosenPlan(found, asked, (*refused, f"{chosen}, {measured}"))
        what = chosen.removeprefix(f"{name} takes ")
        refused.append(f"--held-out refuses {what}: {measured}, {figure(wanted, 4)} wanted")
        choice = _tighter(choice, costs)
    raise InfeasibleError(f"no plan keeps the agreement on held-out items: {refused[-1]}")


def _tighter(choice: Choice, costs: PlanCosts) -> Choice | None:
    """Return a choice that excludes a plan, or None if the plan is exact.

    The next plan is to have less expected loss. One that is expected to lose nothing loses its fewest bits,
    or a number type.

    Args:
        choice: What the plan was chosen from.
        costs: Costs of the plan.
    """
    if costs.loss > _NOTHING:
        return replace(choice, min_agreement=1 - costs.loss * (1 - _LESS))
    fewest = min((stage.quant_bits for stage in costs.schedule if stage.quant_bits), default=0)
    if fewest:
        widths = _WIDTHS if choice.widths is None else choice.widths
        return replace(choice, widths=tuple(bits for bits in widths if bits == 0 or bits > fewest))
    used = {stage.dtype for stage in costs.schedule} - {"float32"}
    left = tuple(dtype for dtype in choice.dtypes or () if dtype not in used)
    return replace(choice, dtypes=left) if used and left else None


def _note(costs: PlanCosts, name: str, objective: str) -> str:
    """Return the line about what was chosen."""
    rate, text = costs.throughput_items_per_s, costs.text
    if name == "--plan auto" and text is None:
        parts = [f"{name} takes microbatches of {round(costs.batch_size)}"]
    else:
        parts = [f"{name} takes {_per_host({stage.host: stage.dtype for stage in costs.schedule})}"]
    if text is not None:
        parts.append(f"{figure(text.tokens_per_s, 3)} tokens/s of {count(round(text.streams), 'stream')}")
    elif rate is not None:
        parts.append(f"{figure(rate, 3)} items/s")
    if objective == ENERGY and costs.joules_per_item is not None:
        parts.append(f"{figure(costs.joules_per_item, 3)} J an item")
    if costs.losses_known:
        parts.append(f"an agreement of {figure(max(0.0, 1 - costs.loss), 4)} expected")
    if costs.gap > 0:
        parts.append(f"at most {figure(100 * costs.gap, 2)} % from the best plan")
    return ", ".join(parts)


def _per_host(dtypes: dict[str, str]) -> str:
    """Return ``int8``, or ``int8 on a and b, float32 on c``."""
    if len(set(dtypes.values())) == 1:
        return next(iter(dtypes.values()))
    return ", ".join(
        f"{dtype} on {' and '.join(host for host, one in dtypes.items() if one == dtype)}"
        for dtype in dict.fromkeys(dtypes.values())
    )
