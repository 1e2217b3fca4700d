"""Check all ranks together, on rank 0: whether they agree, and whether the plan fits them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeedge.base.errors import PipeEdgeError
from pipeedge.base.payload import specs_bytes
from pipeedge.doctor.file_checks import check_files
from pipeedge.doctor.findings import Finding, ok, problem_from, warning
from pipeedge.doctor.rank_checks import Need, check_agreement, check_memory, check_weights
from pipeedge.models import Model
from pipeedge.models.dtypes import find_dtype
from pipeedge.plan.facts import disagreements, unlikeness
from pipeedge.plan.planning import Plan
from pipeedge.plan.schedule_choice import plan_schedule
from pipeedge.plan.scheduler import SchedulerRequest
from pipeedge.plan.spec_files import read_files
from pipeedge.plan.specs import SpecFiles
from pipeedge.request.config import RunRequest
from pipeedge.request.scheduling import ScheduleRequest
from pipeedge.transport.frame import frame_capacity

__all__ = ["Review", "planned_needs", "review"]

_FRAMES_EACH = 3
"""Number of frames at each end of a link: two in flight and the one that is read or written."""
_WORKING_COPIES = 3
"""Number of copies of a shard's largest activations while a layer computes."""
_LOADING = 1.03
"""Peak memory of loading weights, as a multiple of their size (docs/models.md)."""


@dataclass(frozen=True)
class Review:
    """Findings about all ranks, and the plan if there is one."""

    findings: tuple[Finding, ...]
    plan: Plan | None
    files: SpecFiles | None
    """The scheduler's files, if the run uses them and they can be read."""


def review(request: RunRequest, model: Model, facts: Mapping[int, Mapping[str, Any]]) -> Review:
    """Compare the ranks, read the scheduler's files, plan the run, and check that the plan fits the ranks.

    Args:
        request: Request of rank 0.
        model: Model of rank 0.
        facts: Facts that each rank reports about itself.
    """
    found = check_agreement(disagreements(facts), unlikeness(facts), request.world.size)
    files = None
    try:
        files = _read_files(request.schedule)
    except PipeEdgeError as error:
        found.append(problem_from("files", error))
    if files is not None:
        found += check_files(
            files,
            model_name=model.name,
            n_layers=model.n_layers,
            microbatch_size=request.microbatch_size,
            dtype=SchedulerRequest.dtype,
            hosts=request.schedule.hosts,
            world_size=request.world.size,
        )
    plan = None
    try:
        plan = _plan(request, model, facts, found)
    except PipeEdgeError as error:
        found.append(problem_from("schedule", error))
    if plan is not None:
        layers = {stage.rank: str(stage.layers) for stage in plan.schedule.stages}
        found += check_weights(facts, layers)
        found += check_memory(facts, planned_needs(plan, model, request.model.weights))
    return Review(tuple(found), plan, files)


def _read_files(wanted: ScheduleRequest) -> SpecFiles | None:
    if wanted.models_file is None or wanted.dev_types_file is None or wanted.dev_file is None:
        return None
    return read_files(models=wanted.models_file, device_types=wanted.dev_types_file, devices=wanted.dev_file)


def _plan(
    request: RunRequest, model: Model, facts: Mapping[int, Mapping[str, Any]], found: list[Finding]
) -> Plan | None:
    data = facts[request.schedule.data_rank]
    eight_bit = data.get("pixel_table") is not None
    planned = plan_schedule(
        request, model, data.get("max_tokens"), lengths=data.get("lengths"), eight_bit=eight_bit
    )
    found.extend(warning("schedule", note) for note in planned.notes)
    found.extend(ok("schedule", line) for line in planned.schedule.lines())
    if data.get("items") is None:
        return None  # the input cannot be read, which the data rank reports
    # The plan is needed only for who sends what to whom, so it has no prediction.
    size, tokens = planned.microbatch_size or request.microbatch_size, data["max_tokens"]
    return Plan(
        planned.schedule,
        request.schedule.data_rank,
        data["items"],
        size,
        tokens,
        None,
        compression=request.links.compression,
        pixel_table=data["pixel_table"],
    )


def planned_needs(plan: Plan, model: Model, file: Path | None) -> dict[int, Need]:
    """Return the memory that the plan needs on each rank, beyond that of a process with its libraries.

    Args:
        plan: Plan of the run.
        model: The model.
        file: File of the weights, or None for the model's own. Of some kinds of file, only those words are in
            memory that are looked up.
    """
    needs = {}
    links = plan.links(model)
    for rank in plan.participants:
        weights = 0
        buffers = sum(
            _FRAMES_EACH * frame_capacity(link.specs)
            for link in links
            if link.source != link.destination and rank in (link.source, link.destination)
        )
        stage = plan.schedule.stage_of(rank)
        if stage is not None:
            layers = plan.schedule.stages[stage].layers
            dtype = find_dtype(plan.schedule.stages[stage].dtype)
            rows = plan.most_items * (plan.max_tokens or 0)
            weights = int(_LOADING * model.held_bytes(layers, dtype, rows, file))
            buffers += _WORKING_COPIES * max(
                specs_bytes(model.payload_specs(cut, plan.most_items, plan.max_tokens, dtype))
                for cut in range(layers.start, layers.stop + 1)
            )
        needs[rank] = Need(weights, buffers)
    return needs
