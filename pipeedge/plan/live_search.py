"""Search for the best schedule under measured conditions, on rank 0 of a run that is scheduled from files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from pipeedge.base.errors import InfeasibleError
from pipeedge.base.schedule import LayerRange, Schedule, StagePlan
from pipeedge.models.outline import Outline
from pipeedge.plan import scheduler
from pipeedge.plan.after_loss import Survivor, keep_layers
from pipeedge.plan.conditions import (
    Conditions,
    collecting_seconds,
    data_seconds,
    feeding_seconds,
    input_seconds,
    link_seconds,
    stage_seconds,
    with_conditions,
)
from pipeedge.plan.host_order import in_present_order
from pipeedge.plan.live_choice import Placing
from pipeedge.plan.planning import Plan
from pipeedge.plan.prediction import Prediction, StagePrediction
from pipeedge.plan.problem import ELEMENT_BYTES, Problem
from pipeedge.plan.schedule_choice import PlannedSchedule, scheduler_request
from pipeedge.plan.switch_memory import best_beside, fits_beside, placed
from pipeedge.request.config import RunRequest

__all__ = ["LiveSearch", "host_names", "profiled_problem"]

_TIME_LIMIT_S = 3.0
"""Seconds after which the best schedule found so far will do; the run goes on meanwhile."""


def host_names(request: RunRequest) -> tuple[str, ...]:
    """Return the host of each rank; hosts are called by their ranks where they have no names."""
    return request.schedule.hosts or tuple(map(str, range(request.world.size)))


def profiled_problem(request: RunRequest, model: Outline, plan: Plan) -> Problem:
    """Return the profiles of all hosts for a run, with the number types and microbatches that it has.

    Raises:
        PipeEdgeError: The files are wrong, or are not those of the run any longer.
    """
    from pipeedge.plan.spec_files import read_files

    asked, _ = scheduler_request(request, model, plan.max_tokens, eight_bit=plan.pixel_table is not None)
    dtypes = {stage.dtype for stage in plan.schedule.stages}
    widest = max(dtypes, key=lambda name: (ELEMENT_BYTES[name], name))
    by_type: Mapping[str, str] = {}
    if len(dtypes) > 1:
        names, devices = host_names(request), read_files(devices=request.schedule.dev_file).devices
        kinds = {host: kind for kind, hosts in devices.items() for host in hosts}
        by_type = {kinds[names[stage.rank]]: stage.dtype for stage in plan.schedule.stages}
    return scheduler.read_problem(
        dataclasses.replace(
            asked,
            dtype=f"torch.{widest}",
            dtype_of=by_type,
            microbatch_size=plan.microbatch_size,
            time_limit_s=_TIME_LIMIT_S,
        )
    )


class LiveSearch:
    """Finds schedules that can take over from the present one, without loss of memory.

    Args:
        problem: The profiles of all hosts.
        names: Host of each rank.
        quant_bits: Bits per value on each link if the user has chosen them, or None.
        solve: The scheduler.
    """

    def __init__(
        self,
        problem: Problem,
        names: Sequence[str],
        quant_bits: Sequence[int] | None = None,
        solve: Callable[..., scheduler.Solution] = scheduler.solve,
    ) -> None:
        self._problem = problem
        self._names = tuple(names)
        self._quant_bits = quant_bits
        self._solve = solve

    def __call__(self, conditions: Conditions, hosts: frozenset[str], present: Placing) -> Placing | None:
        """Return the best stages on ``hosts``, or None if they can have none but the present ones."""
        problem = with_conditions(self._on(hosts), conditions)
        try:
            found = best_beside(problem, present, self._solved)
        except InfeasibleError:
            return None
        holds = {stage.host: stage.layers for stage in present}
        kept = self._with_kept_layers(problem, found, holds)
        found = kept if fits_beside(problem, present, kept) else found
        found = in_present_order(problem, present, found)
        return None if found == present else found

    def after_loss(
        self, conditions: Conditions, held: Mapping[str, LayerRange | None], tokens: int | None
    ) -> PlannedSchedule | None:
        """Return the best schedule when no other one runs, or None if there is none.

        Args:
            conditions: Measured conditions.
            held: Hosts that are left, with the layers that they have loaded.
            tokens: Tokens of the longest sentence of the input; None for images.
        """
        problem = with_conditions(self._on(frozenset(held)), conditions)
        try:
            found = self._solved(problem)
        except InfeasibleError:
            return None
        return self.planned(self._with_kept_layers(problem, found, held), conditions, tokens)

    def planned(self, stages: Placing, conditions: Conditions, tokens: int | None) -> PlannedSchedule:
        """Return stages as a schedule, and what it promises under some conditions.

        Args:
            stages: Stages that the search has returned.
            conditions: Conditions to predict for.
            tokens: Tokens of the longest sentence of the input; None for images.
        """
        problem = with_conditions(self._on(frozenset(self._names)), conditions)
        return PlannedSchedule(self._schedule(stages), _predicted(problem, stages, tokens))

    def _on(self, hosts: frozenset[str]) -> Problem:
        """Return the problem with some of the hosts."""
        problem = self._problem
        return dataclasses.replace(
            problem,
            hosts={host: kind for host, kind in problem.hosts.items() if host in hosts},
            links=tuple(link for link in problem.links if {link.source, link.target} <= hosts),
        )

    def _solved(self, problem: Problem) -> Placing:
        schedule = self._solve(problem, hosts=self._names).schedule
        if self._quant_bits is not None:
            if len(self._quant_bits) != len(schedule.stages):
                raise InfeasibleError("-q has bits for another number of links")
            schedule = schedule.with_quant_bits(self._quant_bits)
        return placed(schedule, self._names)

    def _schedule(self, stages: Placing) -> Schedule:
        return Schedule(
            tuple(
                StagePlan(
                    stage.layers,
                    self._names.index(stage.host),
                    stage.host,
                    stage.bits,
                    self._problem.kind_of(stage.host).dtype or "float32",
                )
                for stage in stages
            )
        )

    def _with_kept_layers(
        self, problem: Problem, found: Placing, holds: Mapping[str, LayerRange | None]
    ) -> Placing:
        """Return the stages with equal hosts exchanged, so that these load the fewest bytes."""
        groups: dict[str, list[Survivor]] = {}
        if not problem.links:  # otherwise the links of each host are its own
            for host, kind in problem.hosts.items():
                if host != problem.data_host and host in self._names:
                    survivor = Survivor(self._names.index(host), 0.0, host, holds.get(host))
                    groups.setdefault(kind, []).append(survivor)
        kept = keep_layers(self._schedule(found), list(groups.values()), problem.layers.weight_bytes)
        return placed(kept, self._names)


def _predicted(problem: Problem, stages: Placing, tokens: int | None) -> Prediction:
    """Return what the schedule promises."""

    def promises() -> Iterator[StagePrediction]:
        for number, stage in enumerate(stages):
            kind, own_s = problem.kind_of(stage.host), data_seconds(problem, stage)
            after = stages[number + 1].host if number + 1 < len(stages) else problem.data_host
            link_s = 0.0 if after is None else link_seconds(problem, stage, after)
            busy_s = stage_seconds(problem, stage) + own_s
            yield StagePrediction(busy_s, link_s, kind.threads, kind.tokens, own_s, kind.kernels)

    return Prediction(
        tuple(promises()),
        round(problem.batch_size),
        tokens,
        input_link_s=input_seconds(problem, stages[0].host),
        feed_s=feeding_seconds(problem, stages[0].host),
        collect_s=collecting_seconds(problem, stages[-1].host),
    )
