"""The choice of a number type for automatic scheduling (``--dtype auto``).

    number types that were profiled ─> those that agree with float32 enough ─> one problem each
    ─> the fastest schedule

Where kinds of devices differ in which type is fastest on them, a schedule in which each kind computes in its
own takes part too: its links are counted in the widest type that occurs, its weights in each kind's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeedge.base.errors import InfeasibleError, ScheduleError
from pipeedge.base.schedule import DTYPES
from pipeedge.base.wording import figure
from pipeedge.plan import scheduler
from pipeedge.plan.problem import ELEMENT_BYTES
from pipeedge.plan.spec_files import find_named, read_files
from pipeedge.plan.specs import DeviceType, ModelProfile, short_dtype

__all__ = ["Mixture", "choose_dtype", "mixtures", "permitted"]


@dataclass(frozen=True)
class Mixture:
    """The number type in which each kind of device computes; kinds without one take no part."""

    by_type: Mapping[str, str]

    @property
    def widest(self) -> str:
        """Widest of the chosen number types, used to compute what crosses the links."""
        return max(self.by_type.values(), key=lambda name: (ELEMENT_BYTES[name], name != "int8"))

    def __str__(self) -> str:
        names = set(self.by_type.values())
        if len(names) == 1:
            return names.pop()
        return ", ".join(f"{dtype} on {kind}" for kind, dtype in self.by_type.items())


def choose_dtype(
    request: scheduler.SchedulerRequest,
    min_agreement: float | None,
    hosts: Sequence[str] | None,
) -> tuple[scheduler.Solution, str]:
    """Find the fastest schedule in any profiled number type that agrees well enough with float32.

    Returns:
        The schedule, and a line that says what there was to choose from.

    Raises:
        ScheduleError: No type is permitted; the line says what is known of each.
        InfeasibleError: No schedule is feasible in any of them.
        PipeEdgeError: As ``scheduler.solve``.
    """
    files = read_files(device_types=request.dev_types_file, devices=request.dev_file)
    profiles = {
        kind: _by_dtype(files.device_types[kind], request.model_name, request.microbatch_size)
        for kind, listed in files.devices.items()
        if listed and kind in files.device_types
    }
    allowed = permitted(profiles, min_agreement)
    if not any(allowed.values()):
        known = (
            _known(profiles)
            or f"no profile of {request.model_name} for microbatches of {request.microbatch_size}"
        )
        wanted = f" of {figure(min_agreement, 6)}" if min_agreement else ""
        raise ScheduleError(
            f"--dtype auto: no number type has a profile with an agreement{wanted}: {known} "
            f"({request.dev_types_file})"
        )
    plans: dict[str, scheduler.Solution] = {}
    refusal: InfeasibleError | None = None
    for mixture in mixtures(allowed, request.tokens):
        try:
            asked = replace(request, dtype=f"torch.{mixture.widest}", dtype_of=mixture.by_type)
            plans[str(mixture)] = scheduler.solve(scheduler.read_problem(asked), hosts=hosts)
        except InfeasibleError as error:
            refusal = refusal or error
    if not plans:
        raise refusal or ScheduleError("--dtype auto: nothing to choose from")
    best = min(plans, key=lambda name: plans[name].bottleneck_s)
    rates = "; ".join(f"{name}: {_rate(plan)}" for name, plan in plans.items())
    return plans[best], f"--dtype auto takes {best} ({rates})"


def permitted(
    profiles: Mapping[str, Mapping[str, ModelProfile]], min_agreement: float | None
) -> dict[str, dict[str, ModelProfile]]:
    """Return the profiles of each device kind, by number type, that agree well enough with float32.

    Without an agreement, or with one of 0, profiles that have none do, too.
    """
    return {
        kind: {
            dtype: profile
            for dtype, profile in each.items()
            if not min_agreement or _agrees(profile, min_agreement)
        }
        for kind, each in profiles.items()
    }


def _agrees(profile: ModelProfile, least: float) -> bool:
    known = profile.known_agreement
    return known is not None and known >= least


def mixtures(allowed: Mapping[str, Mapping[str, ModelProfile]], tokens: int | None = None) -> list[Mixture]:
    """Return what is worth asking for: each type on all kinds that know it, and each kind's own fastest.

    Args:
        allowed: Profiles of each kind of device, by number type.
        tokens: Number of tokens of the longest sentence, for which types are compared (as profiled).
    """
    uniform = [
        Mixture({kind: dtype for kind, each in allowed.items() if dtype in each})
        for dtype in DTYPES
        if any(dtype in each for each in allowed.values())
    ]
    fastest = Mixture({kind: _fastest(each, tokens) for kind, each in allowed.items() if each})
    return uniform if fastest in uniform else [*uniform, fastest]


def _fastest(each: Mapping[str, ModelProfile], tokens: int | None) -> str:
    def seconds(dtype: str) -> float:
        profile = each[dtype]
        return sum((profile if tokens is None else profile.at_tokens(tokens)).time_s)

    return min(each, key=seconds)


def _by_dtype(kind: DeviceType, model: str, microbatch_size: int) -> dict[str, ModelProfile]:
    return {
        short_dtype(profile.dtype): profile
        for profile in find_named(kind.profiles, model) or ()
        if profile.batch_size == microbatch_size and short_dtype(profile.dtype) in DTYPES
    }


def _known(profiles: Mapping[str, Mapping[str, ModelProfile]]) -> str:
    def shown(value: float | None) -> str:
        return "none known" if value is None else figure(value, 6)

    return ", ".join(
        f"{kind} has {dtype} with {shown(profile.known_agreement)}"
        for kind, each in profiles.items()
        for dtype, profile in each.items()
    )


def _rate(plan: scheduler.Solution) -> str:
    rate = plan.throughput_items_per_s
    return "no time at all" if rate is None else f"{figure(rate, 3)} items/s"
