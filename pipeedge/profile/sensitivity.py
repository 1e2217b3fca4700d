"""Measure what fewer bits at one cut change in a model's answers (``--sensitivity``).

    items ─> layer 1 ─> layer 2 ─> layer 3 ─> ... ─> answers
                    │          └─ 4 bits ─> layer 3 ─> ... ─> answers with the second cut at 4 bits
                    └─ 4 bits ─> layer 2 ─> layer 3 ─> ... ─> answers with the first cut at 4 bits

Links are compressed as in a run, with its default clamping and transform, and computed in float32. The
fractions of items that keep their class go to ``agreement_at_bits`` of the models file.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from pipeedge.base.errors import SpecError
from pipeedge.base.files import OutputFile, check_outputs, check_writable
from pipeedge.base.payload import Payload
from pipeedge.base.schedule import LayerRange
from pipeedge.base.wording import count
from pipeedge.compress.link import LinkDecoder, LinkEncoder
from pipeedge.data import InputSource, Microbatch, open_input
from pipeedge.data.agreement import Outputs, agreement
from pipeedge.data.protected_files import input_paths, model_paths
from pipeedge.models import Model, find_model
from pipeedge.plan import spec_writing
from pipeedge.plan.spec_files import load_models, spelling_in
from pipeedge.plan.specs import ModelSpec
from pipeedge.profile import emitting
from pipeedge.profile.display import progress_bar
from pipeedge.profile.forecast import duration_text
from pipeedge.profile.job import Job
from pipeedge.profile.request import MeasureRequest, SensitivityCommand
from pipeedge.request.files import InputRequest
from pipeedge.request.scheduling import DEFAULT_CLAMP
from pipeedge.run.stage import resolve_device

__all__ = ["Sensitivity", "add_sensitivity"]

ITEMS_AT_ONCE = 8
"""Number of items that are computed together."""

Tell = Callable[[str], None]


def add_sensitivity(command: SensitivityCommand, tell: Tell) -> None:
    """Measure the sensitivity of a model's cuts, and add it to the models file.

    Raises:
        PipeEdgeError: The request cannot be carried out; nothing was written.
    """
    model = find_model(command.model.name)
    name, spec = _spec(command, model)
    source = _open(command, model)
    measured = Sensitivity(model, command)
    tell(
        f"sensitivity  {count(model.n_layers - 1, 'cut')} at {_listed(command.widths)} bits with "
        f"{count(len(source), 'item')}, {duration_text(measured.expected_seconds(source))}"
    )
    with progress_bar() as advance:
        for part in measured.run(source):
            advance("computing with compressed links", part)
    found = measured.agreement_at_bits
    spec = replace(spec, agreement_at_bits={**spec.agreement_at_bits, **found})
    spec_writing.add_model(command.models_file, name, spec, overwrite=True)
    for bits, parts in found.items():
        worst = min(parts)
        where = f" (after layer {parts.index(worst) + 1})" if worst < 1 else ""
        tell(
            f"{bits:>2} bits      {sum(parts) / len(parts):.4f} of the items keep their class on average, "
            f"{worst:.4f} at least{where}"
        )
    tell(f"model        {command.models_file}: agreement_at_bits of {name} added")


def _listed(widths: Sequence[int]) -> str:
    return ", ".join(map(str, widths))


def _spec(command: SensitivityCommand, model: Model) -> tuple[str, ModelSpec]:
    """Return the name and the entry of the model to add to, without these bits.

    Raises:
        PipeEdgeError: The file cannot be written, or has such bits already.
    """
    path = command.models_file
    check_writable(path, "-sm/--sched-models-file")
    check_outputs(
        [OutputFile("-sm/--sched-models-file", path)],
        [*model_paths(model, command.model.weights), *input_paths(InputRequest(paths=command.input))],
    )
    models = load_models(path) if path.exists() else {}
    name = spelling_in(models, model.name)
    if name is None:
        # Sizes need no measurement.
        (job,) = Job.each(MeasureRequest(command.model))
        return model.name, emitting.model_spec(job.expected(), str(path))
    spec = models[name]
    if spec.layers != model.n_layers:
        raise SpecError(f"{path}: {name} has {spec.layers} layers, but the model {model.n_layers}")
    known = [bits for bits in command.widths if bits in spec.agreement_at_bits]
    if known and not command.overwrite:
        raise SpecError(
            f"{path}: {name} has agreement_at_bits of {_listed(known)} already; replace it with --overwrite"
        )
    return name, spec


def _open(command: SensitivityCommand, model: Model) -> InputSource:
    """Open the items.

    Raises:
        PipeEdgeError: They cannot be read, too few are different, or the weights are missing.
    """
    model.check_weights(command.model.weights)
    wanted = InputRequest(
        paths=command.input, max_items=command.items, max_image_pixels=command.max_image_pixels
    )
    source = open_input(wanted, model)
    source.check_distinct(command.items, "--sensitivity")
    return source


class Sensitivity:
    """Counts of the items that keep their class if one cut is compressed.

    The whole model is in memory, one shard for each layer.
    """

    def __init__(self, model: Model, command: SensitivityCommand) -> None:
        self._classes = model.output_kind != "vector"
        self._widths = command.widths
        self._device = resolve_device(command.model.device)
        self._shards = [
            model.load(
                LayerRange(layer, layer + 1),
                command.model.weights,
                self._device,
                kernels=command.model.kernels,
            )
            for layer in range(model.n_layers)
        ]
        self._encoders = {
            (cut, bits): LinkEncoder(DEFAULT_CLAMP)
            for cut in range(1, model.n_layers)
            for bits in command.widths
        }
        self._same = dict.fromkeys(self._encoders, 0)
        self._items = 0

    @property
    def agreement_at_bits(self) -> dict[int, tuple[float, ...]]:
        """Fraction of the items that keep their class, for each cut between two layers, by bits."""
        cuts = range(1, len(self._shards))
        return {bits: tuple(self._same[cut, bits] / self._items for cut in cuts) for bits in self._widths}

    def expected_seconds(self, source: InputSource) -> float:
        """Return the seconds to expect for ``source``, from the time of its first microbatch."""
        batch = next(source.microbatches(ITEMS_AT_ONCE))
        payload = self._placed(batch.payload)
        with torch.inference_mode():
            self._from(0, payload)  # warms up
            began = time.perf_counter()
            self._from(0, payload)
        each = (time.perf_counter() - began) / len(batch.numbers)
        # Behind the cuts there is half of the model on average.
        return each * len(source) * (2 + len(self._encoders) / 2)

    def run(self, source: InputSource) -> Iterator[float]:
        """Compute all items of ``source``, and yield the fraction that is done after each microbatch."""
        done = 0
        for batch in source.microbatches(ITEMS_AT_ONCE):
            with torch.inference_mode():
                self._compute(batch)
            done += len(batch.numbers)
            yield done / len(source)

    def _placed(self, payload: Payload) -> Payload:
        return tuple(tensor.to(self._device) for tensor in payload)

    def _from(self, cut: int, payload: Payload) -> Payload:
        """Return the answers to a payload at a cut."""
        return functools.reduce(lambda state, shard: shard(state), self._shards[cut:], payload)

    def _compute(self, batch: Microbatch) -> None:
        """Count the items of one microbatch that keep their class."""
        payload = self._placed(batch.payload)
        exact = _outputs(self._from(0, payload), batch)
        self._items += len(exact.numbers)
        for cut in range(1, len(self._shards)):
            payload = self._shards[cut - 1](payload)
            for bits in self._widths:
                sent = self._encoders[cut, bits].encode(tuple(tensor.cpu() for tensor in payload), bits)
                found = self._from(cut, self._placed(LinkDecoder().decode(sent)))
                compared = agreement(_outputs(found, batch), exact, classes=self._classes)
                self._same[cut, bits] += compared.same


def _outputs(payload: Payload, batch: Microbatch) -> Outputs:
    """Return the answers to one microbatch, the last payload."""
    outputs = batch.without_padding(payload[0].cpu())
    return Outputs(tuple(range(len(outputs))), outputs)
