"""Measure a decoder: what the steps of its layers cost, and the work of the data rank.

    rows 1, 2, 4, 8, 16 of different sequences  x  contexts, short to long ┐
    chunks of prompts of 16, 64, 256            x  the same                ┴─> times of all layers ─> fit
    what a step takes besides                   x  1 and 8 texts           ──> ``text_work``
    ... and what a link takes of both its ends  x  transports              ──> ``rehearsal``

The whole step is timed as a rank executes it, and native code reads the clock where one layer ends and the
next begins. Blocks with the same window and rotation take the same time, so of a large model only as many are
loaded as do not fit into the caches of a processor.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from pipeedge.base.errors import RequestError, WeightsError
from pipeedge.base.machine import available_bytes
from pipeedge.base.quota import Quota
from pipeedge.base.schedule import LayerRange
from pipeedge.base.wording import count
from pipeedge.decoding.pages import pages_of, window_pages_of
from pipeedge.models.architecture import LAYERS_PER_BLOCK
from pipeedge.models.decoder import DecoderModel, check_decoder_dtype
from pipeedge.models.dtypes import find_dtype
from pipeedge.models.layers.decoder import PAGE, DecoderStage, StepRows
from pipeedge.models.step_rows import StepBounds, pack_rows, packed_length
from pipeedge.models.weights.files import WeightsFile
from pipeedge.plan.specs import EndCosts, TransportHandling
from pipeedge.profile.handling import distinct, measure_handling
from pipeedge.profile.job import SEED
from pipeedge.profile.measuring import ENOUGH_S, LEAST_REPETITIONS, MOST_REPETITIONS, without_delays
from pipeedge.profile.power import PowerMeter
from pipeedge.profile.rehearsal import (
    StepLinks,
    StepsAtWork,
    StepsRehearsal,
    rehearse_in_turn,
    rehearse_steps,
    step_handling,
)
from pipeedge.profile.request import MeasureRequest, ProfileConditions
from pipeedge.profile.results import LayerResult, LayerSteps, Measurement, ProfileResults
from pipeedge.profile.step_fit import STEP_NUMBERS, StepPoint, fit_steps, step_seconds
from pipeedge.profile.text_work import TextRank
from pipeedge.run.stage import StepStage
from pipeedge.transport.base import Packet

__all__ = ["DecoderJob", "measure_decoder"]

_ROWS = (1, 2, 4, 8, 16)
"""Rows of the steps to measure, each of another sequence."""
_CHUNKS = (16, 64, 256)
"""Rows of the chunks of prompts to measure."""
_LONG = 1024
"""Longest context to measure in tokens, if the model and the memory have room for it."""
_ENOUGH_BYTES = 256 << 20
"""Weights of the blocks to measure: more than the caches of a processor hold."""
_TEXTS = (1, 8)
"""Numbers of texts with which the data rank is rehearsed."""
_SMALL_PER_ROUND = 3
"""Number of times that steps of one row of each sequence are measured in a round."""
_SETTLING = 16
"""Largest number of equal steps before those that count, in which the caches of a processor settle."""
_SETTLING_S = 0.05
"""Seconds after which no more of them begin."""
_REHEARSED = 24
"""Tokens of each of them."""
_LEAST_CONTEXT = 3
"""Shortest context in tokens: a text of two steps, between which the data rank works."""
_CACHE_PART = 0.25
"""Part of the memory that weights leave free which the cache to measure with may take."""

Advance = Callable[[str, float], None]
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DecoderJob:
    """A profile of a decoder to measure, of a request that has passed its checks."""

    request: MeasureRequest
    conditions: ProfileConditions
    model: DecoderModel
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kernels: None = None

    @property
    def dtype(self) -> torch.dtype:
        """Number type of the weights."""
        return find_dtype(self.conditions.dtype)

    @property
    def batch_size(self) -> int:
        """Number of rows of the step that ``time_s`` is of."""
        return 1

    @property
    def layers(self) -> LayerRange:
        """All layers."""
        return LayerRange(0, self.model.n_layers)

    @classmethod
    def each(cls, request: MeasureRequest, model: DecoderModel) -> tuple[DecoderJob, ...]:
        """Check a request against a decoder, and return a job for each number type.

        Raises:
            RequestError: It has an option that decoders do not have, or the model's contexts are too short.
        """
        standard = MeasureRequest(model=request.model)
        options = {
            "-l/--layer-start": request.first == standard.first,
            "-L/--layer-end": request.last is None,
            "-s/--shape-input": not request.shapes,
            "--tokens": not request.tokens,
            "-b/--batch-size": request.batch_sizes in (standard.batch_sizes, (1,)),
            "--agreement": not request.agreement_items,
            f"-d/--device {request.model.device}": request.model.device == "cpu",
            f"--kernels {request.model.kernels}": request.model.kernels == "auto",
        }
        for option, standard_value in options.items():
            if not standard_value:
                raise RequestError(
                    f"{option}: {model.name} generates text: all of its layers are measured, on a processor, "
                    "in steps of 1 to 256 rows (docs/profiler.md)"
                )
        if model.max_tokens < _LEAST_CONTEXT:
            raise RequestError(
                f"{model.name}: its texts have up to {count(model.max_tokens, 'token')}, but a profile is of "
                f"texts of {_LEAST_CONTEXT} or more"
            )
        for dtype in request.dtypes:
            check_decoder_dtype(find_dtype(dtype))
        return tuple(cls(request, ProfileConditions(1, dtype), model) for dtype in request.dtypes)

    def weights(self) -> WeightsFile | None:
        """Return random weights if the request asks for them; None for the model's own."""
        return self.model.random_weights(SEED) if self.request.random_weights else None

    def measured_layers(self) -> LayerRange:
        """Return the layers to load: some of each kind, and more than fit into caches."""
        kinds = self.model.block_kinds
        enough = 1 + max(kinds.index(kind) for kind in set(kinds))
        if not self.request.by_block:
            size = self.model.weight_bytes(LayerRange(0, LAYERS_PER_BLOCK), self.dtype)
            enough = max(enough, -(-_ENOUGH_BYTES // max(size, 1)))
        return LayerRange(0, LAYERS_PER_BLOCK * min(enough, len(kinds)))

    def expected(self) -> ProfileResults:
        """Return the results to expect, without times."""
        nothing = np.zeros(self.model.n_layers)
        return self.results(
            nothing,
            {kind: np.zeros((LAYERS_PER_BLOCK, len(STEP_NUMBERS))) for kind in self.model.block_kinds},
            _no_ends(self),
        )

    def results(
        self,
        spread_s: Seconds,
        numbers: Mapping[tuple[int, int], Seconds],
        ends: EndCosts,
        handling: Sequence[tuple[float, float]] = (),
    ) -> ProfileResults:
        """Return the results that measurements make.

        Args:
            spread_s: Distance of the quartiles of a step of one row, by layer.
            numbers: What ``step_fit`` finds for the four layers of each kind of block.
            ends: Costs of the ends.
            handling: Seconds to receive and to send a step of one row at each cut, from 0.
        """
        reduced = self.dtype is not torch.float32
        layers = []
        for layer in range(self.model.n_layers):
            block, part = divmod(layer, LAYERS_PER_BLOCK)
            kind = self.model.block_kinds[block]
            found = [float(number) for number in numbers[kind][part]]
            own = LayerRange(layer, layer + 1)
            full, windowed = self.model.page_bytes(own, self.dtype)
            time_s = max(found[0], min(found[1] + found[2], found[3] + found[4]))  # of one row
            layers.append(
                LayerResult(
                    layer=layer + 1,
                    memory_bytes=self.model.weight_bytes(own, self.dtype),
                    measured=Measurement(
                        shape_in=self._shapes(layer),
                        shape_out=self._shapes(layer + 1),
                        time_s=time_s,
                        time_spread_s=float(spread_s[layer]),
                        receive_s=handling[layer][0] if handling else None,
                        send_s=handling[layer + 1][1] if handling else None,
                    ),
                    float32_bytes=self.model.weight_bytes(own, torch.float32) if reduced else None,
                    steps=LayerSteps(
                        **{f"{name}_s": value for name, value in zip(STEP_NUMBERS, found, strict=True)},
                        cache_bytes=(full + windowed) / PAGE,
                        window=kind[0],
                    ),
                )
            )
        return ProfileResults(
            model_name=self.model.name,
            dtype=str(self.dtype)
            if self.dtype.is_floating_point or self.dtype is torch.int8
            else "torch.int4",
            batch_size=self.batch_size,
            layers=self.model.n_layers,
            profile_data=tuple(layers),
            device="cpu",
            threads=torch.get_num_threads(),
            ends=ends,
            context=self.model.max_tokens,
        )

    def _shapes(self, cut: int) -> tuple[tuple[int, ...], ...]:
        specs = self.model.step_specs(cut, 1, 0, self.dtype)
        return tuple(spec.shape[1:] for spec in specs if spec.dtype.is_floating_point)


def _no_ends(job: DecoderJob) -> EndCosts:
    return EndCosts(0.0, 0.0, 0.0, 0.0, 0.0, job.model.end_bytes(job.dtype))


def measure_decoder(
    job: DecoderJob, handling: Mapping[str, TransportHandling], advance: Advance, power: PowerMeter
) -> ProfileResults:
    """Return the measurements of a decoder, with the power of its steps.

    Args:
        job: What to measure.
        handling: What each transport costs by itself.
        advance: Shows the progress.
        power: Measures the power.
    """
    quota = Quota.of_this_process()
    advance("loading", 0.0)
    try:
        weights = job.weights()
        steps = _Steps.load(job, weights)
        loaded = job.model.weight_bytes(steps.stage.layers, job.dtype)
        ends = job.model.ends(job.dtype, weights=weights or job.request.model.weights)
    except WeightsError as error:
        raise WeightsError(f"{error}; times do not depend on real weights: use --random-weights") from error
    rank = TextRank(job.model, ends, job.dtype, steps.bounds)
    with power.computing():
        timed = steps.measure(
            job.request.iterations, lambda part: advance("timing steps", part), power, quota, rank.score
        )
    numbers, residual = steps.fit(timed, quota)
    advance("rehearsing steps", 1.0)
    clock = time.process_time if quota.pauses else time.perf_counter
    local = [StepsRehearsal(texts) for texts in _TEXTS]
    over_links = StepsRehearsal.over(_TEXTS[0], handling)
    at_work = rehearse_in_turn(lambda kind: steps.rehearse(rank, clock, kind), local, over_links)
    own_s = {kind.texts: statistics.median(one.data_s for one in at_work[kind]) for kind in local}
    end_costs = rank.costs(own_s, clock, quota.stretch)
    crossing = [job.model.step_specs(cut, 1, 8, job.dtype) for cut in range(job.model.n_layers + 1)]
    measure = measure_handling
    if quota.pauses:
        measure = functools.partial(measure, clock=time.thread_time, stretch=quota.stretch)
    costs = {specs: measure(specs, job.device) for specs in distinct(crossing)}
    both = [(costs[specs].receive_s, costs[specs].send_s) for specs in crossing]
    handling = step_handling(at_work, costs[crossing[0]], handling, quota.stretch)
    found = job.results(steps.spread(timed, quota), numbers, end_costs, both)
    return replace(
        found,
        residual=residual,
        variation=steps.variation(timed, quota),
        load_s_per_byte=steps.loading_s / loaded if weights is None else None,
        overhead_s=quota.stretch * statistics.median(one.stage_s for one in at_work[local[0]]),
        handling=handling,
        busy_w=power.take_watts(),
    )


@dataclass
class _Timed:
    """Readings of one kind of step."""

    layers: list[Seconds] = field(default_factory=list)
    """Seconds of each layer, in each repetition; of processor time if a quota makes the process pause."""
    processor_s: list[float] = field(default_factory=list)
    """Processor seconds of all threads for the step."""


@dataclass(frozen=True)
class _Steps:
    """A stage of a decoder, and steps to execute on it."""

    job: DecoderJob
    stage: DecoderStage
    points: tuple[StepPoint, ...]
    bounds: StepBounds
    loading_s: float
    """Seconds that loading the weights took."""

    @classmethod
    def load(cls, job: DecoderJob, weights: WeightsFile | None) -> _Steps:
        """Load the layers to measure, with a cache for all steps."""
        model, layers = job.model, job.measured_layers()
        longest = min(_LONG, model.max_tokens)
        page = sum(model.page_bytes(layers, job.dtype))
        weight_bytes = model.weight_bytes(layers, job.dtype) + model.end_bytes(job.dtype)
        room = max(0.0, _CACHE_PART * (available_bytes() - weight_bytes))
        most = max(1, int(room) // max(page, 1) // _ROWS[-1]) * PAGE
        longest = min(longest, most)
        each = pages_of(longest, PAGE)
        window_pages = min(window_pages_of(model.window, PAGE), each) if model.window else 0
        pages = _ROWS[-1] * each if model.attends_to_all else 0
        bounds = StepBounds(
            longest, max(_ROWS[-1], min(_CHUNKS[-1], longest)), _ROWS[-1], pages, _ROWS[-1] * window_pages
        )
        began = time.perf_counter()
        stage = model.stage(
            layers,
            job.dtype,
            pages=bounds.pages,
            window_pages=bounds.window_pages,
            weights=weights or job.request.model.weights,
        )
        loading_s = time.perf_counter() - began
        stage.clear_cache()  # steps are to read what they would in a run, where it was written
        contexts = sorted({0, longest // 4, longest - 1})
        points = [StepPoint(rows, 1, position) for rows in _ROWS for position in contexts]
        chunks = {min(rows, longest) for rows in _CHUNKS}
        points += [
            StepPoint(1, rows, position)
            for rows in sorted(chunks)
            for position in sorted({0, longest - rows})
            if rows > 1
        ]
        return cls(job, stage, tuple(points), bounds, loading_s)

    def measure(
        self,
        repetitions: int | None,
        progress: Callable[[float], None],
        power: PowerMeter,
        quota: Quota,
        score: Callable[[int], object],
    ) -> list[_Timed]:
        """Execute all steps in turn, several times, so that a drift of the machine affects all alike.

        Steps of few rows come several times a round: they are most of a run, and take little time here. In a
        run, many equal ones follow each other, so they do so here before any counts. Where weights fit into a
        cache that other machines share, it loses them within 50 ms of other work, such as a chunk of a
        prompt, and the next steps take up to twice as long. In a run, the data rank scores the rows of a step
        before the next one, or the stage waits, and the caches lose a part of the weights in either case:
        steps of one row took 8 to 18 % less without that. The texts of two groups take turns, as in a run, so
        that the caches of the processor have no more of their keys and values than there.

        Args:
            repetitions: Number of rounds; None for as many as seem enough.
            progress: Shows the part that is done.
            power: Measures the power.
            quota: Limit on the processor time of this process.
            score: Scores so many rows as the data rank does.
        """
        timed = [_Timed() for _ in self.points]
        run = StepStage(self.stage, self.bounds, 0, is_last=True)
        packets = [itertools.cycle(self._packets(point)) for point in self.points]
        seconds = np.zeros(len(self.stage.layers))

        def execute(number: int) -> float:
            """Execute a step; return its processor seconds."""
            packet = next(packets[number])
            payload = tuple(tensor.clone() for tensor in packet.payload)
            started = time.process_time()
            run(Packet(packet.number, packet.items, payload), seconds, processor_time=quota.pauses)
            return time.process_time() - started

        def settle(number: int) -> None:
            began = time.perf_counter()
            for _ in range(_SETTLING):
                execute(number)
                score(self.points[number].all_rows)
                if time.perf_counter() - began >= _SETTLING_S:
                    break

        began, done = time.perf_counter(), 0
        while not _enough(done, time.perf_counter() - began, repetitions):
            for number, point in enumerate(self.points):
                if not point.is_chunk:
                    settle(number)
                for _ in range(1 if point.is_chunk else _SMALL_PER_ROUND):
                    processor_s = execute(number)
                    if not point.is_chunk:
                        score(point.all_rows)
                    if done:  # the first round warms up
                        timed[number].layers.append(seconds.copy())
                        timed[number].processor_s.append(processor_s)
            done += 1
            power.sample()
            progress(min(1.0, done / (repetitions or MOST_REPETITIONS)))
        return timed

    def _packets(self, point: StepPoint) -> list[Packet]:
        """Return equal steps of two groups of sequences, or of one that is alone or has them all."""
        groups = 1 if point.sequences in (1, _ROWS[-1]) else 2
        return [self._packet(point, group * point.sequences) for group in range(groups)]

    def _packet(self, point: StepPoint, first: int) -> Packet:
        """Return a step with random hidden states, of sequences from ``first`` on."""
        generator = torch.Generator().manual_seed(SEED)
        hidden, _ = self.job.model.step_specs(0, point.all_rows, 0, self.job.dtype)
        rows = [self._rows(first + number, point) for number in range(point.sequences)]
        pages = sum(len(one.pages) + len(one.window_pages) for one in rows)
        packed = torch.empty(packed_length(len(rows), pages), dtype=torch.int32)
        pack_rows(rows, packed)
        values = torch.randn(hidden.shape, generator=generator).to(hidden.dtype)
        return Packet(0, point.all_rows, (values, packed))

    def _rows(self, number: int, point: StepPoint) -> StepRows:
        """Return the rows of one sequence, whose pages no other sequence has."""
        needed = pages_of(point.position + point.rows, PAGE)
        each = self.bounds.pages // self.bounds.sequences
        windowed = self.bounds.window_pages // self.bounds.sequences
        own = np.arange(needed, dtype=np.int32)
        return StepRows(
            point.position,
            point.rows,
            number * each + own if each else own[:0],
            number * windowed + own % windowed if windowed else own[:0],
        )

    def _whole(self, one: _Timed, quota: Quota) -> Seconds:
        """Return the time of a step in each repetition, without delays.

        A process that pauses does so in some steps and layers only, so its processor time counts.
        """
        whole = np.array(one.layers).sum(axis=1)
        if quota.pauses:
            whole = quota.stretch * np.array(one.processor_s)
        return without_delays(whole)

    def _typical(self, one: _Timed, quota: Quota) -> Seconds:
        """Return the typical time of each layer of a step; together, they take the mean time of a step."""
        medians = np.median(np.array(one.layers), axis=0)
        return np.asarray(medians * (self._whole(one, quota).mean() / medians.sum()))

    def variation(self, timed: Sequence[_Timed], quota: Quota) -> float:
        """Return the standard deviation of the time of a step of few rows, as a part of the mean."""
        pairs = zip(timed, self.points, strict=True)
        steps = [self._whole(one, quota) for one, point in pairs if not point.is_chunk]
        return float(np.sqrt(np.mean([np.var(whole / whole.mean()) for whole in steps])))

    def fit(self, timed: Sequence[_Timed], quota: Quota) -> tuple[dict[tuple[int, int], Seconds], float]:
        """Return the numbers of the layers of each kind of block, and the largest deviation of a step."""
        kinds = self.job.model.block_kinds[: len(self.stage.layers) // LAYERS_PER_BLOCK]
        typical = np.array([self._typical(one, quota) for one in timed])
        blocks = typical.reshape(len(timed), len(kinds), LAYERS_PER_BLOCK)
        numbers, fitted = {}, np.zeros(len(timed))
        for kind in dict.fromkeys(kinds):
            same = [block for block, one in enumerate(kinds) if one == kind]
            parts = []
            for part in range(LAYERS_PER_BLOCK):
                # Only the first layer of a block attends.
                window = kind[0]
                times = blocks[:, same, part].mean(axis=1)
                found = fit_steps(self.points, times, window if part == 0 else None)
                fitted += len(same) * step_seconds(self.points, found, window)
                parts.append(found)
            numbers[kind] = np.array(parts)
        return numbers, float(np.max(np.abs(fitted / typical.sum(axis=1) - 1)))

    def spread(self, timed: Sequence[_Timed], quota: Quota) -> Seconds:
        """Return the distance of the quartiles of a step of one row, by layer of the whole model."""
        layers = quota.stretch * np.array(timed[0].layers)
        low, high = np.quantile(layers, [0.25, 0.75], axis=0)
        blocks = (high - low).reshape(-1, LAYERS_PER_BLOCK)
        kinds = self.job.model.block_kinds
        first = [blocks[kinds.index(kind)] for kind in kinds]
        return np.concatenate(first)

    def rehearse(self, rank: TextRank, clock: Callable[[], float], kind: StepsRehearsal) -> StepsAtWork:
        """Return what steps cost besides their layers.

        Args:
            rank: The data rank.
            clock: Time of the process in seconds.
            kind: The steps.
        """
        run = StepStage(self.stage, self.bounds, 0, is_last=True)
        seconds = np.zeros(len(self.stage.layers))

        def compute(packet: Packet) -> tuple[Packet, float]:
            began = time.perf_counter()
            found = run(packet, seconds)
            return found, time.perf_counter() - began - float(seconds.sum())

        tokens = min(_REHEARSED, self.bounds.context - 1)
        there, back = (
            self.job.model.most_specs(cut, self.bounds, self.job.dtype)
            for cut in (0, self.job.model.n_layers)
        )
        links = None if kind.transport is None else StepLinks(kind.transport, there, back)
        return rehearse_steps(compute, functools.partial(rank.open, kind.texts, tokens), clock, links)


def _enough(done: int, elapsed_s: float, repetitions: int | None) -> bool:
    """Return whether so many rounds, the first of which warms up, are enough."""
    if repetitions is not None:
        return done > repetitions
    return done > MOST_REPETITIONS or (done > LEAST_REPETITIONS and elapsed_s >= ENOUGH_S)
