"""Check all ranks together, on rank 0: whether they agree, and whether the plan fits them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pipeedge.base.errors import PipeEdgeError
from pipeedge.base.fields import Options, convert, decoding
from pipeedge.base.payload import specs_bytes
from pipeedge.base.wording import count
from pipeedge.doctor.file_checks import check_files
from pipeedge.doctor.findings import Finding, ok, problem, problem_from, warning
from pipeedge.doctor.rank_checks import Need, check_agreement, check_memory, check_weights
from pipeedge.models import Model
from pipeedge.models.decoder import DecoderModel
from pipeedge.models.dtypes import find_dtype
from pipeedge.models.step_rows import StepBounds
from pipeedge.plan.after_loss import Held
from pipeedge.plan.cache_size import choose_bounds, describe_cache, stage_cache_bytes
from pipeedge.plan.facts import disagreements, unlikeness
from pipeedge.plan.planning import InputFacts, Plan
from pipeedge.plan.schedule_choice import PlannedSchedule, plan_schedule
from pipeedge.plan.scheduler import SchedulerRequest
from pipeedge.plan.spec_files import read_files
from pipeedge.plan.specs import SpecFiles
from pipeedge.plan.standbys import standby_bytes
from pipeedge.request.config import RunRequest
from pipeedge.request.generation import CacheRequest
from pipeedge.request.scheduling import ScheduleRequest
from pipeedge.run.kept_for_loss import keep_for_loss
from pipeedge.run.replanning import goes_on, plan_schedule_again
from pipeedge.transport.frame import frame_capacity

if TYPE_CHECKING:
    from pipeedge.plan.scheduler import Choice

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


def review(
    request: RunRequest, model: Model | DecoderModel, facts: Mapping[int, Mapping[str, Any]]
) -> Review:
    """Compare the ranks, read the scheduler's files, plan the run, and check that the plan fits the ranks.

    Args:
        request: Request of rank 0.
        model: Model of rank 0.
        facts: Facts that each rank reports about itself.
    """
    found = _compare(facts, request.world.size)
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
        drafts = {rank: _draft_bytes(told) for rank, told in facts.items()}
        found += check_memory(facts, planned_needs(plan, model, request.model.weights, drafts))
    return Review(tuple(found), plan, files)


def _read_files(wanted: ScheduleRequest) -> SpecFiles | None:
    if wanted.models_file is None or wanted.dev_types_file is None or wanted.dev_file is None:
        return None
    return read_files(models=wanted.models_file, device_types=wanted.dev_types_file, devices=wanted.dev_file)


def _compare(facts: Mapping[int, Mapping[str, Any]], world_size: int) -> list[Finding]:
    """Compare the ranks: those without the model, which report that, only by their versions."""
    stated = {rank: told for rank, told in facts.items() if _has_model(told)}
    if len(stated) == len(facts):
        return check_agreement(disagreements(facts), unlikeness(facts), world_size)
    versions = {rank: {"version": told.get("version")} for rank, told in facts.items()}
    mismatches = dict.fromkeys((*disagreements(versions), *disagreements(stated)))
    return [problem("agreement", mismatch) for mismatch in mismatches]


def _has_model(told: Mapping[str, Any]) -> bool:
    """Return whether a rank knows the model of the run."""
    return told.get("has_model") is not False


def _plan(
    request: RunRequest,
    model: Model | DecoderModel,
    facts: Mapping[int, Mapping[str, Any]],
    found: list[Finding],
) -> Plan | None:
    told = facts[request.schedule.data_rank]
    data = InputFacts(None, 0, None, None)
    if _has_model(told):
        with decoding("what the data rank says of its input"):
            data = convert(told, InputFacts)
    planned = plan_schedule(request, model, data.sizes)
    found.extend(warning("schedule", note) for note in planned.notes)
    found.extend(ok("schedule", line) for line in planned.schedule.lines())
    if data.items is None:
        return None  # the input cannot be read, which the data rank reports
    # The plan is needed only for who sends what to whom, and keeps what; so it has no prediction.
    plan = Plan(
        planned.schedule,
        request.schedule.data_rank,
        data.items,
        planned.microbatch_size or request.microbatch_size,
        data.max_tokens,
        None,
        compression=request.links.compression,
        pixel_table=data.pixel_table,
        texts=data.text_lengths,
        goes_on=goes_on(request, data.items),
    )
    if not isinstance(model, DecoderModel):
        return plan
    memory = {rank: {**told, "memory_bytes": _free_bytes(told)} for rank, told in facts.items()}
    return _with_cache(request, model, plan, memory, planned.limits, found)


def _with_cache(
    request: RunRequest,
    model: DecoderModel,
    plan: Plan,
    facts: Mapping[int, Options],
    limits: Choice | None,
    found: list[Finding],
) -> Plan | None:
    """Return the plan with the bounds of its steps, and with what is kept for a loss.

    None if the cache does not fit, which is a finding.
    """

    def bounds(wanted: CacheRequest) -> StepBounds:
        return choose_bounds(
            model,
            plan.schedule,
            wanted,
            sequences=plan.most_items,
            answers=plan.items,
            data_rank=plan.data_rank,
            memory={rank: told["memory_bytes"] for rank, told in facts.items()},
        )

    longest = ""
    if request.cache.context is not None:
        try:
            fits = bounds(dataclasses.replace(request.cache, context=None)).context
            longest = f"; a context of up to {count(fits, 'token')} fits"
        except PipeEdgeError:
            pass  # nothing fits, as the error below says
    try:
        steps = bounds(request.cache)
    except PipeEdgeError as error:
        finding = problem_from("cache", error)
        found.append(dataclasses.replace(finding, what=f"{finding.what}{longest}"))
        return None
    found.append(ok("cache", f"{describe_cache(model, plan.schedule, steps)}{longest}"))
    plan, held = dataclasses.replace(plan, steps=steps), Held()

    def plan_again(left: Held, others: Mapping[int, Options]) -> PlannedSchedule | str:
        return plan_schedule_again(request, model, plan, others, left, limits=limits)

    kept = keep_for_loss(request, model, plan, facts, held, plan_again)
    found.extend(warning("losses", note) for note in kept.notes)
    found.extend(
        ok("losses", f"rank {one.rank} stands by for {one.layers.named}") for one in kept.plan.standbys
    )
    return kept.plan


def _free_bytes(facts: Mapping[str, Any]) -> int:
    """Return the bytes that a rank can allocate besides its libraries, which the doctor has loaded, too.

    A draft is loaded before the rest.
    """
    limit = facts.get("limit_free_bytes")
    free = facts["free_bytes"] if limit is None else min(facts["free_bytes"], limit)
    return max(0, int(free) - _draft_bytes(facts))


def _draft_bytes(facts: Mapping[str, Any]) -> int:
    """Return the bytes of the weights and the cache of the draft on a rank."""
    return int(facts.get("draft_bytes", 0))


def planned_needs(
    plan: Plan,
    model: Model | DecoderModel,
    file: Path | None,
    drafts: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, Need]:
    """Return the memory that the plan needs on each rank, beyond that of a process with its libraries.

    Args:
        plan: Plan of the run.
        model: The model.
        file: File of the weights, or None for the model's own. Of some kinds of file, only those words are in
            memory that are looked up.
        drafts: Bytes of the draft on each rank.
    """
    needs = {}
    links = plan.links(model)
    if isinstance(model, DecoderModel):
        links += [plan.copy_link(model, one) for one in plan.standbys]
    caches = (
        stage_cache_bytes(model, plan.schedule, plan.step_bounds) if isinstance(model, DecoderModel) else []
    )
    for rank in plan.participants:
        weights = 0
        buffers = sum(
            _FRAMES_EACH * frame_capacity(link.specs)
            for link in links
            if link.source != link.destination and rank in (link.source, link.destination)
        )
        stage = plan.schedule.stage_of(rank)
        if isinstance(model, DecoderModel):
            weights = int(_LOADING * _decoder_weights(plan, model, rank)) + drafts.get(rank, 0)
            buffers += 0 if stage is None else caches[stage]
            buffers += _output_bytes(plan, model, rank)
            buffers += sum(
                standby_bytes(model, one, plan.step_bounds) for one in plan.standbys if one.rank == rank
            )
        elif stage is not None:
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


def _output_bytes(plan: Plan, model: DecoderModel, rank: int) -> int:
    """Return the bytes of what one rank keeps of its outputs."""
    dtypes = {stage.rank: find_dtype(stage.dtype) for stage in plan.schedule.stages}
    kept = (model.output_bytes(one.cut, dtypes[rank]) for one in plan.outputs if one.rank == rank)
    return plan.step_bounds.pages * sum(kept)


def _decoder_weights(plan: Plan, model: DecoderModel, rank: int) -> int:
    """Return the bytes of the weights of one rank: those of its layers and, on the data rank, of the ends."""
    stages = plan.schedule.stages
    own = sum(
        model.weight_bytes(stage.layers, find_dtype(stage.dtype)) for stage in stages if stage.rank == rank
    )
    ends = model.end_bytes(find_dtype(stages[0].dtype)) if rank == plan.data_rank else 0
    return own + ends
