"""The schedule that would run (``--dry-run``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pipeedge.base.text_lengths import InputSizes
from pipeedge.base.wording import count, figure
from pipeedge.models.outline import Outline
from pipeedge.models.registry import find_any
from pipeedge.plan.model_limits import fitting_request
from pipeedge.plan.schedule_choice import PlannedSchedule, plan_schedule
from pipeedge.request.config import RunRequest

if TYPE_CHECKING:
    from pipeedge.plan.choice import Trial

__all__ = ["show_schedule"]


def show_schedule(request: RunRequest, show: Callable[[str], None]) -> None:
    """Call ``show`` with each line of the schedule that would run, starting nothing.

    Raises:
        PipeEdgeError: As ``run`` would, as far as this rank can see it alone.
    """
    model = find_any(request.model.name)
    request = fitting_request(request, model)
    model.check_sizes(request.model.weights)
    arrays = any(path.suffix.lower() == ".npz" for path in request.input.paths)
    tokens, lengths = _tokens_here(request, model)
    planned = plan_schedule(
        request,
        model,
        InputSizes(tokens, lengths, eight_bit=not arrays),
        losses=request.transport.goes_on,
        trial=_trial(request) if request.schedule.held_out else None,
    )
    for line in planned.schedule.lines():
        show(line)
    text = None if planned.prediction is None else planned.prediction.text
    predicted = None if planned.prediction is None else planned.prediction.throughput_items_per_s
    if text is not None:
        show(f"predicted throughput: {figure(text.tokens_per_s)} tokens/s of {count(text.streams, 'stream')}")
        show(f"predicted first token: {figure(text.first_token_s)} s after {text.prompt_tokens} tokens")
        show(f"predicted bottleneck: {text.limited_by}")
    elif planned.prediction is not None and predicted is not None:
        show(f"predicted throughput: {figure(predicted)} items/s")
        show(f"predicted bottleneck: {planned.prediction.bottleneck}")
        if planned.prediction.joules_per_item is not None:
            show(f"predicted energy: {figure(planned.prediction.joules_per_item)} J an item")
    for line in _loss_lines(request, planned):
        show(line)
    for note in planned.notes:
        show(note)


def _loss_lines(request: RunRequest, planned: PlannedSchedule) -> Iterator[str]:
    """Yield a line for each host whose loss matters."""
    hub = (request.schedule.hosts or ("0",))[0]
    text = None if planned.prediction is None else planned.prediction.text
    unit = "items/s" if text is None else "tokens/s"
    for loss in planned.losses:
        why = loss.why if loss.host != hub or loss.why is not None else "it is the host of rank 0"
        if why is not None:
            yield f"loss of {loss.host}: ends the run: {why}"
        elif loss.throughput_items_per_s is not None:
            pause_s = loss.pause_with_outputs_s if request.cache.keep_outputs else loss.pause_s
            pause_s = loss.pause_with_copies_s if request.cache.replicate else pause_s
            pause = "" if pause_s is None else f", after a pause of {figure(pause_s)} s"
            yield f"loss of {loss.host}: {figure(loss.throughput_items_per_s)} {unit} on the others{pause}"


def _trial(request: RunRequest) -> Trial:
    """Return what tries plans on the last items of the input."""
    from pipeedge.data import open_run_input  # these import torch, which other dry runs do without
    from pipeedge.models import find_model
    from pipeedge.run.held_out import held_out_trial, open_held_out
    from pipeedge.run.stage import resolve_device

    model = find_model(request.model.name)
    items = open_held_out(request, model, open_run_input(request, model))
    return held_out_trial(request, model, items, resolve_device(request.model.device))


def _tokens_here(request: RunRequest, model: Outline) -> tuple[int | None, str | None]:
    """Tokens of the longest sentence, and all lengths, where this rank has the input and they count."""
    counts = request.schedule.automatic and model.takes_text and not model.family.decodes
    if not counts or request.world.rank != request.schedule.data_rank:
        return None, None
    from pipeedge.data import open_run_input  # imports torch, which other dry runs do without

    source = open_run_input(request, model)
    return source.max_tokens, source.lengths
