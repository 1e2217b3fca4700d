"""Carry out the profiler's work, in order.

    check everything ─> bandwidth ─> layers ─> results ─> models, device types ─> plot

Nothing is written before everything is measured, and each file is replaced as a whole, so an interruption at
any moment leaves the files as they were. A model that fits into memory is loaded once and run repeatedly; a
larger one is measured block by block.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pipeedge.base.errors import InputError, RequestError, ScheduleError, SpecError, WeightsError
from pipeedge.base.files import InputPath, OutputFile, check_outputs, check_writable, named_output
from pipeedge.base.machine import (
    ControlGroups,
    MemoryBudget,
    available_bytes,
    processors,
    resident_bytes,
)
from pipeedge.base.payload import TensorSpec
from pipeedge.base.program import program_name
from pipeedge.base.schedule import LayerRange
from pipeedge.base.wording import count, figure
from pipeedge.data import InputSource, open_input
from pipeedge.data.protected_files import input_paths, model_paths
from pipeedge.models import Model, Shard, find_model
from pipeedge.models.dtypes import dtype_name, find_dtype, slow_here
from pipeedge.plan.specs import BYTES_PER_MB, ModelProfile, load_device_types
from pipeedge.profile import emitting
from pipeedge.profile.converting import given_figures
from pipeedge.profile.data_work import DataWork, measure_data_work
from pipeedge.profile.handling import Handling, Wire, distinct, measure_handling, measure_wire
from pipeedge.profile.measuring import (
    Pacing,
    activation_peaks,
    made_up_payload,
    shard_bytes,
    summaries,
    time_layers,
)
from pipeedge.profile.network import measure_link, parse_place
from pipeedge.profile.options import (
    DEFAULT_DEVICE_TYPES,
    DEFAULT_MODELS,
    EmitRequest,
    MeasureRequest,
    ProfileCommand,
    SyntheticCommand,
)
from pipeedge.profile.plotting import check_plot, save_plot
from pipeedge.profile.results import LayerResult, LengthResult, ProfileResults, load_results, save_results
from pipeedge.report.agreement import agreement, outputs_by_block
from pipeedge.request.config import InputRequest
from pipeedge.run.stage import resolve_device

__all__ = ["profile", "synthesize", "use_results"]

SEED = 0
UNSTEADY = 0.1
"""Spread of the times, as a fraction of their total, above which to warn."""
FILLED = 0.9
"""Fraction of the free memory that a model may take to be loaded as a whole."""

Tell = Callable[[str], None]


def profile(command: ProfileCommand, tell: Tell, warn: Tell) -> None:
    """Measure layers, and write the results and the files made from them.

    Args:
        command: request with something to measure.
        tell: called with each line for the user.
        warn: called with each warning.

    Raises:
        PipeEdgeError: the request cannot be carried out; nothing was written.
    """
    if command.measure is None:
        raise ValueError("nothing to measure")
    job = _Job.of(command.measure)
    emit = command.emit
    check_writable(command.results, "-o/--results-yml")
    replaced = check_outputs(
        [OutputFile("-o/--results-yml", command.results), *_emitted(emit)],
        [
            *model_paths(job.model, command.measure.model.weights),
            *input_paths(InputRequest(paths=command.measure.input)),
        ],
    )
    if command.measure.agreement_items:
        _compared(command.measure, job.model)  # fails now rather than after minutes of measuring
    old = load_results(command.results) if command.results.exists() else None
    expected = job.expected()
    together = expected if old is None else expected.joined(old, str(command.results))
    _check_emission(emit, together, str(command.results), tell=lambda _line: None)
    figures = _figures(emit, tell)

    slow = slow_here(job.dtype, job.device)
    if slow is not None:
        warn(slow)
    free_bytes = available_bytes() + resident_bytes()
    process_bytes = _process_bytes()
    with _progress() as advance:
        measured = job.measure(advance)
    data_work = job.data_work()
    measured = replace(
        measured,
        process_bytes=process_bytes,
        agreement=_agreement(job, tell),
        feed_s=None if data_work is None else data_work.feed_s,
        collect_s=None if data_work is None else data_work.collect_s,
    )
    results = measured if old is None else measured.joined(old, str(command.results))
    save_results(command.results, results)
    for line in _table(measured):
        tell(line)
    steady = _steadiness(measured)
    if steady is not None:
        warn(steady)
    tell(f"results      {command.results}, layers {job.layers} of {job.model.n_layers}")
    _emit(emit, figures, results, str(command.results), free_bytes, tell, warn, replaced)


def use_results(command: ProfileCommand, tell: Tell, warn: Tell) -> None:
    """Make the requested files from a results file, without measuring layers.

    Raises:
        PipeEdgeError: the request cannot be carried out; nothing was written.
    """
    if not command.results.exists():
        raise SpecError(f"{command.results}: no such file; profile first, without --from-results")
    emit = command.emit
    replaced = check_outputs(_emitted(emit), [InputPath("--from-results", command.results)])
    results = load_results(command.results)
    if emit.plot is None and emit.type_name is None:
        raise RequestError("--from-results has nothing to make: give -dt/--dev-type or --plot")
    _check_emission(emit, results, str(command.results), tell=lambda _line: None)
    figures = _figures(emit, tell)
    free_bytes = available_bytes() + resident_bytes()
    _emit(emit, figures, results, str(command.results), free_bytes, tell, warn, replaced)


def synthesize(command: SyntheticCommand, tell: Tell) -> None:
    """Add a device type whose times are a multiple of another's.

    Raises:
        PipeEdgeError: the request cannot be carried out; nothing was written.
    """
    emit = command.emit
    path, factor = emit.dev_types_file, command.factor
    if command.base is None:
        check_outputs(
            [OutputFile("-sdt/--sched-dev-types-file", path)], [InputPath("--synthetic", command.results)]
        )
    figures = _figures(emit, tell)
    type_name = emit.type_name or ""
    if command.base is None:
        if not command.results.exists():
            raise SpecError(
                f"{command.results}: no such file; name a device type of {path} with --from, or profile first"
            )
        results = load_results(command.results)
        known: dict[str, tuple[ModelProfile, ...]] = {
            results.model_name: (emitting.model_profile(results, str(command.results)),)
        }
        source = str(command.results)
    else:
        types = load_device_types(path)
        if command.base not in types:
            raise SpecError(f"{path}: no device type {command.base}; the file has {', '.join(types)}")
        base = types[command.base]
        known, source = dict(base.profiles), command.base
        if type_name not in types:
            figures = emitting.Figures(
                base.mem_bytes if figures.mem_bytes is None else figures.mem_bytes,
                base.bw_bytes_per_s if figures.bw_bytes_per_s is None else figures.bw_bytes_per_s,
            )
    if command.model_name is not None:
        if command.model_name not in known:
            there = ", ".join(known) or "none"
            raise SpecError(f"{source} has no profile of {command.model_name}; it has {there}")
        known = {command.model_name: known[command.model_name]}
    if not any(known.values()):
        raise SpecError(f"{path}: {source} has no profile to scale")
    profiles = [
        (model, emitting.scaled(profile, factor, source)) for model, each in known.items() for profile in each
    ]
    emitting.add_profiles(path, type_name, profiles, figures, overwrite=emit.overwrite)
    tell(
        f"device type  {path}: {type_name}, {figure(factor, 6)} times as long as {source} "
        f"({', '.join(known)})"
    )


# --- measuring --------------------------------------------------------------------------------------


@dataclass
class _Measured:
    """Measurements of all layers with sentences of one length."""

    times: list[tuple[float, float | None]] = field(default_factory=list)
    """Seconds of each layer, with their spread."""
    peaks: list[int] = field(default_factory=list)
    """Peak activations of each layer in bytes."""
    handling: list[Handling] = field(default_factory=list)
    """Costs of links at the cut before each layer, and at the one after the last."""


@dataclass(frozen=True)
class _Job:
    """A request that has passed its checks."""

    request: MeasureRequest
    model: Model
    device: torch.device
    layers: LayerRange
    tokens: tuple[int | None, ...]
    """Sentence lengths, longest first, or a single None for images."""

    @property
    def dtype(self) -> torch.dtype:
        """Number type of weights and computation."""
        return find_dtype(self.request.dtype)

    @classmethod
    def of(cls, request: MeasureRequest) -> _Job:
        model = find_model(request.model.name)
        device = resolve_device(request.model.device)
        last = model.n_layers if request.last is None else request.last
        if max(request.first, last) > model.n_layers:
            raise ScheduleError(
                f"layers {request.first}-{last} go beyond {model.name}: its layers are 1 to {model.n_layers}"
            )
        layers = LayerRange.inclusive(request.first, last)
        return cls(request, model, device, layers, _tokens(request, model, layers.start))

    def specs(self, after_layer: int, tokens: int | None) -> tuple[TensorSpec, ...]:
        """Return the tensors at the cut after ``after_layer`` layers, with sentences of ``tokens``."""
        return self.model.payload_specs(after_layer, self.request.batch_size, tokens, self.dtype)

    def expected(self) -> ProfileResults:
        """Return the results to expect, without times."""
        nothing = _Measured(times=[(0.0, None)] * len(self.layers))
        return self._results(
            _bytes_of(self.model.build(self.layers, self.dtype)), dict.fromkeys(self.tokens, nothing)
        )

    def measure(self, advance: Callable[[str, float], None]) -> ProfileResults:
        """Measure all layers.

        Args:
            advance: called with a description of the current work and the fraction that is done.
        """
        request = self.request
        found = {tokens: _Measured(handling=self._handling(tokens, advance)) for tokens in self.tokens}
        pacing = Pacing(request.iterations, request.warmup)
        groups = self._groups()
        work_clock = None if self._quota() is None else time.process_time
        start = self.layers.start
        payloads = {
            tokens: made_up_payload(
                self.specs(start, tokens), self.device, torch.Generator().manual_seed(SEED)
            )
            for tokens in self.tokens
        }
        sizes: list[int] = []
        turns = len(groups) * len(self.tokens)
        for number, group in enumerate(groups):
            advance(f"loading layers {group}", number / len(groups))
            shard = self._load(group)
            sizes += _bytes_of(shard)
            for turn, tokens in enumerate(self.tokens, start=number * len(self.tokens)):

                def progress(part: float, before: int = turn) -> None:
                    advance("timing layers", (before + part) / turns)

                measured, payload = found[tokens], payloads[tokens]
                # The pass that measures memory also warms up the shard.
                if pacing.warmup:
                    measured.peaks += activation_peaks(shard, payload)[0]
                timed, output = time_layers(
                    shard, payload, replace(pacing, warmup=False), progress, work_clock=work_clock
                )
                if not pacing.warmup:
                    measured.peaks += activation_peaks(shard, payload)[0]
                measured.times += summaries(timed)
                payloads[tokens] = output
                del output
            del shard  # before the next group is loaded
        return self._results(sizes, found)

    def data_work(self) -> DataWork | None:
        """Measure the work of a data rank on this device; return None if no shipped input fits the model."""
        quota = self._quota()
        measure = functools.partial(
            measure_data_work,
            self.model,
            self.request.batch_size,
            tokens=self.tokens[0],
            dtype=self.dtype,
            wire=self._wire(),
        )
        if quota is not None:
            measure = functools.partial(measure, clock=time.process_time, stretch=max(1.0, 1.0 / quota))
        try:
            return measure()
        except InputError:
            return None

    def _wire(self) -> Wire:
        """Return the processor time that moving a byte to and from the network costs a stage."""
        quota = self._quota()
        # With a processor to spare, moving bytes to and from the network takes no time from a stage.
        spare = self.device.type == "cpu" and quota is None and processors() > torch.get_num_threads()
        return Wire() if spare else measure_wire(1.0 if quota is None else max(1.0, 1.0 / quota))

    def _handling(self, tokens: int | None, advance: Callable[[str, float], None]) -> list[Handling]:
        """Return the costs of links at the cut before each layer, and at the one after the last."""
        advance("measuring the costs of links", 0.0)
        quota = self._quota()
        stretch = 1.0 if quota is None else max(1.0, 1.0 / quota)
        on_cpu = self.device.type == "cpu"
        wire = self._wire()
        cuts = [self.specs(cut, tokens) for cut in range(self.layers.start, self.layers.stop + 1)]
        measure = functools.partial(measure_handling, device=self.device, wire=wire)
        if quota is not None and on_cpu:  # copies to a GPU take waiting time, not processor time
            measure = functools.partial(measure, clock=time.thread_time, stretch=stretch)
        found = {specs: measure(specs) for specs in distinct(cuts)}
        return [found[specs] for specs in cuts]

    @staticmethod
    def _quota() -> float | None:
        """Return the processor seconds per second if the quota makes this process pause, or None."""
        quota = ControlGroups().quota()
        return quota if quota is not None and quota <= torch.get_num_threads() else None

    def _groups(self) -> list[LayerRange]:
        """Return the ranges of layers that are loaded together: all of them, or block by block."""
        needed = self.model.weight_bytes(self.layers, self.dtype)
        if not self.request.by_block and needed <= FILLED * self._free_bytes():
            return [self.layers]
        # Cut where blocks end, whatever the first layer is.
        inner = range(self.layers.start + 1, self.layers.stop)
        bounds = [self.layers.start, *(cut for cut in inner if cut % 4 == 0), self.layers.stop]
        return [LayerRange(*pair) for pair in pairwise(bounds)]

    def _free_bytes(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        return available_bytes()

    def _load(self, layers: LayerRange) -> Shard:
        if self.request.random_weights:
            return self.model.random(layers, SEED, self.device, self.dtype)
        try:
            return self.model.load(layers, self.request.model.weights, self.device, self.dtype)
        except WeightsError as error:
            raise WeightsError(
                f"{error}; times do not depend on real weights: use --random-weights"
            ) from error

    def _results(self, sizes: list[int], found: Mapping[int | None, _Measured]) -> ProfileResults:
        data = []
        reduced = self.dtype is not torch.float32
        full = _bytes_of(self.model.build(self.layers)) if reduced else []
        longest, *shorter = self.tokens
        for index, layer in enumerate(range(self.layers.start, self.layers.stop)):
            data.append(
                LayerResult(
                    layer=layer + 1,
                    memory_bytes=sizes[index],
                    float32_bytes=full[index] if reduced else None,
                    lengths=tuple(
                        LengthResult(tokens=tokens, **self._numbers(index, tokens, found[tokens]))
                        for tokens in shorter
                        if tokens is not None
                    ),
                    **self._numbers(index, longest, found[longest]),
                )
            )
        return ProfileResults(
            model_name=self.model.name,
            dtype=str(self.dtype),
            batch_size=self.request.batch_size,
            layers=self.model.n_layers,
            profile_data=tuple(data),
            device=str(self.device),
            threads=torch.get_num_threads(),
            tokens=longest,
        )

    def _numbers(self, index: int, tokens: int | None, measured: _Measured) -> dict[str, Any]:
        """Return the measurements of a layer with sentences of ``tokens``."""
        layer = self.layers.start + index
        time_s, spread_s = measured.times[index]
        return {
            "shape_in": _shapes(self.specs(layer, tokens)),
            "shape_out": _shapes(self.specs(layer + 1, tokens)),
            "time_s": time_s,
            "time_spread_s": spread_s,
            "activations_bytes": measured.peaks[index] if measured.peaks else None,
            "receive_s": measured.handling[index].receive_s if measured.handling else None,
            "send_s": measured.handling[index + 1].send_s if measured.handling else None,
        }


def _compared(request: MeasureRequest, model: Model) -> InputSource:
    """Open the items that ``--agreement`` compares.

    Raises:
        InputError: they cannot be read, or there are too few different ones.
    """
    source = open_input(
        InputRequest(
            paths=request.input,
            batch_size=request.agreement_items,
            max_image_pixels=request.max_image_pixels,
        ),
        model,
    )
    source.check_distinct(request.agreement_items, "--agreement")
    return source


def _agreement(job: _Job, tell: Tell) -> float | None:
    """Return how often the number type gives the class of float32, or None if not requested."""
    request = job.request
    if not request.agreement_items:
        return None
    weights = request.model.weights
    source = _compared(request, job.model)
    with _progress() as advance:
        ours, exact = (
            outputs_by_block(
                job.model,
                source,
                request.batch_size,
                weights=weights,
                device=job.device,
                dtype=dtype,
                progress=functools.partial(
                    advance, f"computing {count(len(source), 'item')} in {dtype_name(dtype)}"
                ),
            )
            for dtype in (job.dtype, torch.float32)
        )
    found = agreement(ours, exact, classes=job.model.output_kind == "logits")
    tell(f"agreement    {found}")
    return found.part


def _tokens(request: MeasureRequest, model: Model, start: int) -> tuple[int | None, ...]:
    """Return the sentence lengths to measure, longest first, or a single None for images.

    Raises:
        InputError: lengths are beyond the model, or shapes do not match the layer.
    """
    given = request.shapes
    if model.family != "bert" and request.tokens:
        raise InputError(
            f"--tokens is for text models; {model.name} makes {model.max_tokens} tokens of every image"
        )
    if not given:
        if model.family != "bert":
            return (None,)
        longest = model.max_tokens
        lengths = request.tokens or {max(1, longest // part) for part in (1, 4, 16)}
        if max(lengths) > longest:
            raise InputError(f"--tokens {max(lengths)}: {model.name} takes 1 to {longest}")
        return tuple(sorted(lengths, reverse=True))
    tokens = given[0][0] if model.family == "bert" else None
    wanted = _shapes(model.payload_specs(start, 1, tokens))
    enough = [wanted]
    if model.family == "bert":
        # The first layer's three inputs have the same shape, and the mask follows the hidden state.
        enough.append(wanted[:1] if start == 0 else wanted[:-1])
    if given not in enough:
        raise InputError(
            f"-s/--shape-input {_shape_text(given)} does not match layer {start + 1} of {model.name}, which "
            f"takes {_shape_text(wanted)}"
        )
    return (tokens,)


def _shapes(specs: Iterable[TensorSpec]) -> tuple[tuple[int, ...], ...]:
    return tuple(spec.shape[1:] for spec in specs)


def _shape_text(shapes: tuple[tuple[int, ...], ...]) -> str:
    return " and ".join(",".join(map(str, shape)) for shape in shapes)


def _bytes_of(shard: Shard) -> list[int]:
    return [shard_bytes(shard, layer) for layer in range(shard.layers.start, shard.layers.stop)]


def _process_bytes() -> int:
    """Return the memory of a rank without a shard: that of this process with everything a rank imports."""
    importlib.import_module("pipeedge.run.pipeline")
    with torch.inference_mode():
        torch.nn.functional.linear(torch.ones(8, 64), torch.ones(64, 64))  # starts threads and kernels
    return resident_bytes()


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar with the time left on standard error.

    It is drawn only between passes, because a thread that draws while layers are timed would slow them down.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=1.0)

        def advance(what: str, done: float) -> None:
            bar.update(task, description=what, completed=done, refresh=True)

        yield advance


def _table(results: ProfileResults) -> Iterator[str]:
    data = results.profile_data
    total = sum(layer.time_s for layer in data)
    slowest = max(data, key=lambda layer: layer.time_s)
    weights = sum(layer.memory_bytes for layer in data) / BYTES_PER_MB
    peak = max(data, key=lambda layer: layer.activations_bytes or 0.0)
    yield f"{results.model_name}, microbatches of {results.batch_size}, {_threads(results.threads)}"
    yield (
        f"time         {figure(total)} s per microbatch ({figure(results.batch_size / total)} items/s); "
        f"the slowest layer is {slowest.layer}, {figure(1e3 * slowest.time_s)} ms"
    )
    if results.tokens is not None:
        shorter = [
            sum(layer.lengths[number].time_s for layer in data) for number in range(len(results.other_tokens))
        ]
        others = "".join(
            f", {figure(time_s)} s for {tokens}"
            for tokens, time_s in zip(results.other_tokens, shorter, strict=True)
        )
        yield f"length       for sentences of {count(results.tokens, 'token')}{others}"
    yield (
        f"memory       {weights:.1f} MB of weights; activations up to "
        f"{(peak.activations_bytes or 0) / BYTES_PER_MB:.1f} MB (layer {peak.layer}); the process takes "
        f"{(results.process_bytes or 0) / BYTES_PER_MB:.0f} MB besides"
    )
    if results.feed_s is not None and results.collect_s is not None:
        yield (
            f"data rank    feeds a microbatch in {figure(1e3 * results.feed_s)} ms, collects one in "
            f"{figure(1e3 * results.collect_s)} ms"
        )


def _threads(number: int | None) -> str:
    return "an unknown number of threads" if number is None else count(number, "thread")


def _steadiness(results: ProfileResults) -> str | None:
    total = sum(layer.time_s for layer in results.profile_data)
    spread = sum(layer.time_spread_s or 0.0 for layer in results.profile_data)
    if not total or spread / total <= UNSTEADY:
        return None
    return (
        f"layer times vary by {spread / total:.0%} between repetitions (the medians are kept); measure again "
        "while nothing else runs"
    )


# --- writing the scheduler's files ------------------------------------------------------------------


def _figures(emit: EmitRequest, tell: Tell) -> emitting.Figures:
    """Return the given figures, with the bandwidth measured if requested."""
    figures = given_figures(emit)
    if emit.measure_link is None:
        return figures
    link = measure_link(*parse_place(emit.measure_link))
    tell(f"link         {emit.measure_link}: {link}")
    return replace(figures, bw_bytes_per_s=link.bw_bytes_per_s)


def _emitted(emit: EmitRequest) -> Iterator[OutputFile]:
    """Yield the files that are made from results; all but the plot may exist and are then updated."""
    if emit.plot is not None:
        yield OutputFile("--plot", emit.plot)
    if emit.type_name is not None:
        yield OutputFile("-sm/--sched-models-file", emit.models_file)
        yield OutputFile("-sdt/--sched-dev-types-file", emit.dev_types_file)


def _check_emission(emit: EmitRequest, results: ProfileResults, source: str, tell: Tell) -> None:
    """Raise now what would fail after everything has been measured, and tell which entries will be kept."""
    if emit.plot is not None:
        check_plot(emit.plot)
        check_writable(emit.plot, "--plot")
    if emit.type_name is None:
        return
    check_writable(emit.models_file, "-sm/--sched-models-file")
    check_writable(emit.dev_types_file, "-sdt/--sched-dev-types-file")
    spec = emitting.model_spec(results, source)
    name = results.model_name
    kept = emitting.check_model(emit.models_file, name, spec, overwrite=emit.overwrite, lenient=True)
    if kept is not None:
        tell(kept)
    old = emitting.check_profile(
        emit.dev_types_file,
        emit.type_name,
        [(name, emitting.model_profile(results, source))],
        given_figures(emit),
        overwrite=emit.overwrite,
    )
    if old is None and emit.bw_mbps is None and emit.measure_link is None:
        raise RequestError(
            f"{emit.dev_types_file}: device type {emit.type_name} is new; give its bandwidth (--bw-Mbps) or "
            "have it measured (--measure-link)"
        )


def _emit(
    emit: EmitRequest,
    figures: emitting.Figures,
    results: ProfileResults,
    source: str,
    free_bytes: int,
    tell: Tell,
    warn: Tell,
    replaced: frozenset[Path],
) -> None:
    """Write the files, after checking again that they may be written."""
    if emit.type_name is not None:
        _check_emission(emit, results, source, warn)
        path, name = emit.models_file, results.model_name
        spec = emitting.model_spec(results, source)
        written = emitting.add_model(path, name, spec, overwrite=emit.overwrite, lenient=True)
        tell(f"model        {path}: {name} {'added' if written else 'unchanged'}")
        types = load_device_types(emit.dev_types_file) if emit.dev_types_file.exists() else {}
        if figures.mem_bytes is None and emit.type_name not in types:
            budget = MemoryBudget(
                free_bytes=_free_bytes(results.device, free_bytes),
                process_bytes=int(results.process_bytes or 0),
            )
            if not budget.usable_bytes:
                raise RequestError(
                    f"this machine has no memory to spare ({budget}); give the memory with --mem-MB"
                )
            figures = replace(figures, mem_bytes=float(budget.usable_bytes))
            tell(f"mem_MB       {budget}")
        profiles = [(name, emitting.model_profile(results, source))]
        emitting.add_profiles(
            emit.dev_types_file, emit.type_name, profiles, figures, overwrite=emit.overwrite
        )
        tell(f"device type  {emit.dev_types_file}: {emit.type_name}")
        options = [
            f"{option} {path}"
            for option, path, default in (
                ("-sm", emit.models_file, DEFAULT_MODELS),
                ("-sdt", emit.dev_types_file, DEFAULT_DEVICE_TYPES),
            )
            if path != default
        ]
        if options:
            programs = f"{program_name('sched-pipeline')} and {program_name('runtime.py')}"
            tell(f"use          {programs} with {' '.join(options)}")
    if emit.plot is not None:
        save_plot(emit.plot, results)
        tell(f"plot         {named_output(emit.plot, replaced)}")


def _free_bytes(device: str | None, host_bytes: int) -> int:
    """Return the free memory of the device that holds the weights of a stage."""
    if device is not None and device.startswith("cuda") and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info(device)[0])
    return host_bytes
