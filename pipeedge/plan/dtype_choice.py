"""Automatic scheduling in one number type or another.

    a type        models.yml, its weights scaled ─> sched-pipeline -d TYPE
    auto          types that were profiled ─> those that agree with float32 enough ─> one question each
                  ─> the fastest answer

``models.yml`` counts weights in float32; what they take in another type is known exactly, layer by layer.
Where kinds of devices differ in which type is fastest on them, a schedule in which each kind computes in its
own takes part too: its links are counted in the widest type that occurs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pipeedge.base.errors import InfeasibleError, ScheduleError
from pipeedge.base.schedule import DTYPES, LayerRange, Schedule
from pipeedge.base.wording import figure
from pipeedge.models import Model
from pipeedge.models.dtypes import find_dtype
from pipeedge.plan import scheduler
from pipeedge.plan.specs import (
    DeviceType,
    ModelProfile,
    find_named,
    load_device_types,
    load_devices,
    load_models,
    save_device_types,
    save_models,
    short_dtype,
    spelling_in,
)

__all__ = ["Mixture", "choose_dtype", "mixtures", "permitted", "plan_for_dtype"]


@dataclass(frozen=True)
class Mixture:
    """The number type in which each kind of device computes; kinds without one take no part."""

    by_type: Mapping[str, str]

    @property
    def widest(self) -> str:
        """The type of the most bytes, in which links and weights are counted."""
        return max(self.by_type.values(), key=lambda name: (find_dtype(name).itemsize, name == "float32"))

    def __str__(self) -> str:
        names = set(self.by_type.values())
        if len(names) == 1:
            return names.pop()
        return ", ".join(f"{dtype} on {kind}" for kind, dtype in self.by_type.items())


def plan_for_dtype(
    request: scheduler.SchedulerRequest, model: Model, dtype: str, hosts: Sequence[str] | None
) -> scheduler.Plan:
    """The best schedule whose stages all compute in ``dtype``.

    Raises:
        PipeEdgeError: as ``scheduler.plan``.
    """
    asked = replace(request, dtype=f"torch.{dtype}")
    if dtype == "float32":
        return scheduler.plan(asked, hosts=hosts)
    with _scaled_models(asked, model, dtype) as models_file:
        return scheduler.plan(replace(asked, models_file=models_file), hosts=hosts)


def choose_dtype(
    request: scheduler.SchedulerRequest,
    model: Model,
    min_agreement: float | None,
    hosts: Sequence[str] | None,
) -> tuple[scheduler.Plan, str]:
    """The fastest schedule in any number type that was profiled and agrees with float32 enough.

    Returns:
        The schedule, and a line that says what there was to choose from.

    Raises:
        ScheduleError: no type is permitted; the line says what is known of each.
        InfeasibleError: no schedule is feasible in any of them.
        PipeEdgeError: as ``scheduler.plan``.
    """
    kinds, devices = load_device_types(request.dev_types_file), load_devices(request.dev_file)
    profiles = {
        kind: _by_dtype(kinds[kind], model.name, request.batch_size)
        for kind, listed in devices.items()
        if listed and kind in kinds
    }
    allowed = permitted(profiles, min_agreement)
    if not any(allowed.values()):
        known = _known(profiles) or f"no profile of {model.name} for microbatches of {request.batch_size}"
        wanted = "" if min_agreement is None else f" of {figure(min_agreement, 6)}"
        raise ScheduleError(
            f"--dtype auto: no number type has a profile with an agreement{wanted}: {known} "
            f"({request.dev_types_file})"
        )
    plans: dict[str, scheduler.Plan] = {}
    refusal: InfeasibleError | None = None
    for mixture in mixtures(allowed, request.tokens):
        try:
            plans[str(mixture)] = _plan_mixture(request, model, mixture, profiles, kinds, hosts)
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
    """Of the profiles of each kind of device, by number type, those that agree with float32 enough."""
    return {
        kind: {
            dtype: profile
            for dtype, profile in each.items()
            if min_agreement is None or (profile.agreement is not None and profile.agreement >= min_agreement)
        }
        for kind, each in profiles.items()
    }


def mixtures(allowed: Mapping[str, Mapping[str, ModelProfile]], tokens: int | None = None) -> list[Mixture]:
    """Return what is worth asking for: each type on all kinds that know it, and each kind's own fastest.

    Args:
        allowed: profiles of each kind of device, by number type.
        tokens: of the longest sentence, for which types are compared; None: as profiled.
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


def _by_dtype(kind: DeviceType, model: str, batch_size: int) -> dict[str, ModelProfile]:
    return {
        short_dtype(profile.dtype): profile
        for profile in find_named(kind.profiles, model) or ()
        if profile.batch_size == batch_size and short_dtype(profile.dtype) in DTYPES
    }


def _known(profiles: Mapping[str, Mapping[str, ModelProfile]]) -> str:
    return ", ".join(
        f"{kind} has {dtype} "
        + ("with none known" if profile.agreement is None else f"with {figure(profile.agreement, 6)}")
        for kind, each in profiles.items()
        for dtype, profile in each.items()
    )


def _rate(plan: scheduler.Plan) -> str:
    rate = plan.throughput_items_per_s
    return "no time at all" if rate is None else f"{figure(rate, 3)} items/s"


def _plan_mixture(
    request: scheduler.SchedulerRequest,
    model: Model,
    mixture: Mixture,
    profiles: Mapping[str, Mapping[str, ModelProfile]],
    kinds: Mapping[str, DeviceType],
    hosts: Sequence[str] | None,
) -> scheduler.Plan:
    """The best schedule in which each kind of device computes in its type of ``mixture``.

    The scheduler knows one type at a time, so it is shown profiles that all bear the widest one's name.
    """
    widest = mixture.widest
    if set(mixture.by_type.values()) == {widest}:
        return plan_for_dtype(request, model, widest, hosts)
    shown = {
        kind: replace(
            each,
            profiles={
                model.name: (replace(profiles[kind][mixture.by_type[kind]], dtype=f"torch.{widest}"),)
                if kind in mixture.by_type
                else ()
            },
        )
        for kind, each in kinds.items()
        if kind in profiles
    }
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / request.dev_types_file.name
        save_device_types(path, {**{k: v for k, v in kinds.items() if k not in shown}, **shown})
        found = plan_for_dtype(replace(request, dev_types_file=path), model, widest, hosts)
    kind_of = {host: kind for kind, listed in load_devices(request.dev_file).items() for host in listed}
    stages = tuple(
        replace(
            stage, dtype=mixture.by_type[kind_of[stage.host if stage.host is not None else str(stage.rank)]]
        )
        for stage in found.schedule.stages
    )
    return replace(found, schedule=Schedule(stages))


@contextmanager
def _scaled_models(request: scheduler.SchedulerRequest, model: Model, dtype: str) -> Iterator[Path]:
    """A copy of the models file in which the weights of ``model`` take what they do in ``dtype``."""
    models = load_models(request.models_file)
    name = spelling_in(models, model.name)
    known = None if name is None else models[name]
    if name is None or known is None or known.layers != model.n_layers:
        yield request.models_file  # the scheduler says what is wrong with it
        return
    layers = [LayerRange(layer, layer + 1) for layer in range(model.n_layers)]
    scaled = tuple(
        before * model.weight_bytes(layer, find_dtype(dtype)) / model.weight_bytes(layer)
        for before, layer in zip(known.mem_bytes, layers, strict=True)
    )
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / request.models_file.name
        save_models(path, {**models, name: replace(known, mem_bytes=scaled)})
        yield path
