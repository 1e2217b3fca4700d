"""Look at what a rank would run: device, model, weights, input, output and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeedge.base.errors import PipeEdgeError, WeightsError, one_line
from pipeedge.base.files import OutputFile
from pipeedge.base.program import program_name
from pipeedge.base.text_lengths import InputSizes, TextLengths
from pipeedge.base.wording import count, figure
from pipeedge.doctor.findings import ok
from pipeedge.doctor.notes import FindingLog
from pipeedge.doctor.probe import Probe
from pipeedge.request.config import RunRequest
from pipeedge.run.main import quiet_links

if TYPE_CHECKING:  # imports torch, which takes seconds: a rank is to be seen before that
    import torch

    from pipeedge.data.source import InputSource
    from pipeedge.models import Model
    from pipeedge.models.decoder import DecoderModel

__all__ = ["RunLook", "look_at_run"]


@dataclass(frozen=True)
class RunLook:
    """A rank's share of a run, as far as it can be seen before the run."""

    model: Model | DecoderModel | None
    """Model of the run, or None if it is unknown."""
    facts: Mapping[str, Any]
    """Facts for comparison with the other ranks."""


def look_at_run(
    request: RunRequest, notes: FindingLog, probe: Probe, outputs: Sequence[OutputFile]
) -> RunLook:
    """Look at device, model, weights, input, output and memory.

    Args:
        request: The run.
        notes: Receives the findings.
        probe: The machine.
        outputs: Files that the examination itself writes.
    """
    quiet_links()  # before torch is imported
    from pipeedge.models.decoder import find_runnable
    from pipeedge.plan.facts import software_facts
    from pipeedge.plan.model_limits import fitting_request
    from pipeedge.run.stage import resolve_device

    _check_metrics(request, notes)
    device = None
    with notes.recording("device"):
        device = resolve_device(request.model.device)
        notes.add_own(ok("device", str(device)))
    model = None
    with notes.recording("model"):
        found = find_runnable(request.model.name)
        request = fitting_request(request, found)
        model = found
    facts = software_facts() if model is None else _model_facts(request, model, notes, outputs)
    machine = probe.machine()
    facts |= {
        "has_model": model is not None,
        "host": machine.host,
        "machine": machine.machine,
        "free_bytes": machine.free_bytes,
        "limit_free_bytes": machine.limit_free_bytes,
        "process_bytes": machine.process_bytes,
        "device": str(device),
        "device_free_bytes": _device_free_bytes(device),
    }
    return RunLook(model, {**facts, **probe.software()})


def _model_facts(
    request: RunRequest, model: Model | DecoderModel, notes: FindingLog, outputs: Sequence[OutputFile]
) -> dict[str, Any]:
    """Return the facts about the model, its weights and its input."""
    from pipeedge.models.decoder import DecoderModel
    from pipeedge.plan.facts import rank_facts

    weights, weights_error = None, None
    try:
        weights = _checked_weights(model, request.model.weights, _likely_dtype(request))
        notes.add_own(ok("weights", f"{request.model.weights or model.weights_path()}"))
    except PipeEdgeError as error:
        weights_error = one_line(error)  # a problem where the rank has a stage: rank 0 will know
    if isinstance(model, DecoderModel):
        end = _look_at_text_end(request, model, notes, outputs)
        sizes = InputSizes(texts=end.lengths)
        facts = rank_facts(request, model, weights=weights, items=end.answers, sizes=sizes)
        return {**facts, "weights_error": weights_error, "draft_bytes": end.draft_bytes}
    source = _look_at_data_end(request, model, notes, outputs)
    facts = rank_facts(
        request,
        model,
        weights=weights,
        items=None if source is None else len(source),
        sizes=None if source is None else InputSizes(source.max_tokens, source.lengths),
        pixels=None if source is None else source.pixels,
    )
    return {**facts, "weights_error": weights_error}


def _checked_weights(model: Model | DecoderModel, file: Path | None, dtype: torch.dtype) -> str:
    """Check weights without fetching them. Return their fingerprint.

    Args:
        model: Their model.
        file: File of the weights, or None for the model's own.
        dtype: Number type that an encoder will load.

    Raises:
        WeightsError: They are missing, damaged, or of another model.
    """
    from pipeedge.models.decoder import DecoderModel

    if file is None and not model.has_weights:
        fetch = program_name("save_model_weights.py")
        raise WeightsError(
            f"the weights of {model.name} are not on this machine; {fetch} fetches them, or a run does"
        )
    fingerprint = model.fingerprint(file)
    if isinstance(model, DecoderModel):
        model.check_sizes(file)
    else:
        model.check_weights(file, dtype)
    return fingerprint


def _check_metrics(request: RunRequest, notes: FindingLog) -> None:
    """Check that the metrics of this rank can be written, without making their directory."""
    from pipeedge.observe.monitoring import KEYS, check_metrics_dir

    metrics = request.metrics
    if metrics.directory is not None:
        with notes.recording("output"):
            check_metrics_dir(metrics.directory, metrics.csv_file_mode, notes.rank, KEYS, make=False)


def _likely_dtype(request: RunRequest) -> torch.dtype:
    """Return the dtype that this rank will load, assuming that it runs the stage of its own number."""
    from pipeedge.models.dtypes import find_dtype

    wanted = request.schedule
    if wanted.dtypes is None or wanted.automatic_dtype:
        return find_dtype("float32")
    return find_dtype(wanted.dtypes[min(request.world.rank, len(wanted.dtypes) - 1)])


def _look_at_data_end(
    request: RunRequest, model: Model, notes: FindingLog, outputs: Sequence[OutputFile]
) -> InputSource | None:
    """On the data rank, look at input and output. Return the input, or None if it cannot be read."""
    if request.world.rank != request.schedule.data_rank:
        return None
    from pipeedge.data import open_run_input

    with notes.recording("output"):
        _check_outputs(request, model, notes, outputs)
    found: InputSource | None = None
    with notes.recording("input"):
        source = open_run_input(request, model)
        if request.output.check_items:
            source.check_distinct(request.output.check_items, "--check")
        found = source
        notes.add_own(ok("input", count(len(source), "item")))
    return found


@dataclass(frozen=True)
class _TextEnd:
    """What a rank knows of the texts to generate."""

    answers: int | None = None
    """Number of answers, or None where there are no prompts."""
    lengths: TextLengths | None = None
    """Their lengths, or None if they are unknown."""
    draft_bytes: int = 0
    """Bytes of the weights and the cache of the draft."""


def _look_at_text_end(
    request: RunRequest, model: DecoderModel, notes: FindingLog, outputs: Sequence[OutputFile]
) -> _TextEnd:
    """On the data rank, look at prompts, draft and output."""
    end = _TextEnd()
    if request.world.rank != request.schedule.data_rank:
        return end
    from pipeedge.decoding.drafting import DraftMemory
    from pipeedge.run.text_ends import TextMaker, open_prompts, prompt_lengths

    with notes.recording("output"):
        _check_outputs(request, model, notes, outputs)
    with notes.recording("input"):
        maker = TextMaker.open(request, model)
        if maker.draft is not None:
            memory = DraftMemory.of(maker.draft, maker.prompts.context)
            _checked_weights(maker.draft, None, memory.dtype)
            end = replace(end, draft_bytes=memory.weights_bytes + memory.cache_bytes)
            notes.add_own(
                ok(
                    "draft",
                    f"{maker.draft.name} needs {figure(memory.weights_bytes / 2**20)} MB on this rank, and "
                    f"up to {figure(memory.cache_bytes / 2**20)} MB of cache",
                )
            )
        prompts = open_prompts(request, model, maker).prompts
        answers = sum(prompt.sampling.n for prompt in prompts)
        end = replace(end, answers=answers, lengths=prompt_lengths(prompts, maker.prompts.context))
        notes.add_own(ok("input", count(len(prompts), "prompt")))
    return end


def _check_outputs(
    request: RunRequest, model: Model | DecoderModel, notes: FindingLog, outputs: Sequence[OutputFile]
) -> None:
    """Check that results, report and trace can be written.

    Raises:
        PipeEdgeError: One cannot.
    """
    from pipeedge.data.protected_files import check_written_outputs
    from pipeedge.observe.monitoring import metrics_files

    output = request.output
    check_written_outputs(
        request, model, [*outputs, *metrics_files(request.metrics.directory, request.world.rank)]
    )
    results = None if request.prints_results else output.results
    named = [str(path) for path in (results, output.report, output.trace) if path is not None]
    if named:
        notes.add_own(ok("output", f"{' and '.join(named)} can be written"))


def _device_free_bytes(device: Any) -> int | None:
    """Free memory of a device that is not the processor."""
    if device is None or device.type != "cuda":
        return None
    import torch

    return int(torch.cuda.mem_get_info(device)[0])
