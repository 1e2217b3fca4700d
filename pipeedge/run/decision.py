"""What the ranks of a run tell one another before it: the facts of each, and rank 0's decision.

facts of all ranks ──disagreement?──> schedule ──> Plan ──(announced)──> every rank
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeedge.base.errors import WeightsError
from pipeedge.base.fields import Options, convert, decoding, reader
from pipeedge.control.session import Announcement, Forms, Refusal, Session
from pipeedge.observe.metrics import StageStats
from pipeedge.plan.facts import disagreement, rank_facts
from pipeedge.plan.planning import InputFacts, Plan
from pipeedge.plan.schedule_choice import plan_schedule
from pipeedge.run.context import RankContext

if TYPE_CHECKING:  # only the data rank needs it
    from pipeedge.data import DataEnds

__all__ = ["FORMS", "RunSession", "decide", "find_facts"]

RunSession: TypeAlias = Session[Options, Plan, StageStats | None]

FORMS: Forms[Options, Plan, StageStats | None] = Forms(
    facts=reader(Options), plan=reader(Plan), stats=reader(StageStats | None)
)
"""The facts of a run are an open list of options to compare, and stay a mapping."""


def find_facts(context: RankContext, data: DataEnds | None) -> dict[str, Any]:
    """Return what this rank was asked to do and, on the data rank, what is known of the input."""
    request, model = context.request, context.model
    try:
        weights = model.fingerprint(request.model.weights)
    except WeightsError:
        # Not every rank needs weights. One that does says what is wrong when it loads them.
        weights = None
    source = data.source if data is not None else None
    return rank_facts(
        request,
        model,
        weights=weights,
        items=source.total if source is not None else None,
        max_tokens=source.max_tokens if source is not None else None,
        pixels=source.pixels if source is not None else None,
    )


def decide(context: RankContext, facts: Mapping[int, Mapping[str, Any]]) -> Announcement[Plan] | Refusal:
    """Compare, on rank 0, the facts of all ranks, decide the schedule, and serve the links' rendezvous."""
    mismatch = disagreement(facts)
    if mismatch is not None:
        return Refusal(mismatch)
    request = context.request
    data_rank = request.schedule.data_rank
    data = facts[data_rank]
    with decoding(f"what rank {data_rank} says of its input"):
        known: InputFacts = convert(data, InputFacts)
    eight_bit = known.pixel_table is not None
    with context.activity.busy("scheduling"):
        planned = plan_schedule(request, context.model, known.max_tokens, eight_bit=eight_bit)
    for note in planned.notes:
        context.warn(note)
    plan = Plan(
        schedule=planned.schedule,
        data_rank=data_rank,
        items=known.items,
        microbatch_size=request.microbatch_size,
        max_tokens=known.max_tokens,
        pixel_table=known.pixel_table,
        store_port=None,
        prediction=planned.prediction,
        compression=request.links.compression,
        record_rows=known.record_rows,
    )
    if len(plan.participants) > 1:
        plan = dataclasses.replace(plan, store_port=context.rendezvous.serve(plan.participants))
    names = {rank: name for rank in plan.participants if (name := plan.name(rank)) is not None}
    return Announcement(plan, plan.participants, names, plan.data_rank)
