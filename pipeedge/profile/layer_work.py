"""Measure the layers of a job, and the work of a data rank on the same device.

    for each group of layers that fits into memory:   load ─> for each sentence length: peaks, times ─> free
                                                                └─> a small model: rehearse

A model that fits into memory is one group, loaded once and run repeatedly; a larger one is measured block by
block, and the output of each group is the input of the next.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from pipeedge.base.errors import InputError
from pipeedge.base.machine import available_bytes, processors
from pipeedge.base.payload import Payload, PixelTable
from pipeedge.base.quota import Quota
from pipeedge.base.schedule import LayerRange
from pipeedge.models.shard import Shard
from pipeedge.plan.specs import TransportHandling
from pipeedge.profile.data_work import DataRankRequest, DataWork, measure_data_work, usual_items
from pipeedge.profile.decoder_job import DecoderJob
from pipeedge.profile.forecast import OnePass
from pipeedge.profile.handling import Handling, distinct, measure_handling
from pipeedge.profile.job import SEED, Job, Readings
from pipeedge.profile.measuring import (
    Pacing,
    activation_peaks,
    look_up,
    made_up_payload,
    summaries,
    time_layers,
)
from pipeedge.profile.power import PowerMeter
from pipeedge.profile.rehearsal import LONGEST_PASS_S, Rehearsal, rehearse_data_rank, rehearse_links
from pipeedge.profile.results import ProfileResults
from pipeedge.profile.transport_costs import measure_transports
from pipeedge.request.config import TRANSPORTS
from pipeedge.run.stage import Stage

__all__ = ["Advance", "measure_links", "measure_model", "time_one_pass"]

FILLED = 0.9
"""Fraction of the free memory that a model may take to be loaded as a whole."""

Advance = Callable[[str, float], None]
"""Called with a description of the current work and the fraction that is done."""


def measure_model(
    job: Job, handling: Mapping[str, TransportHandling], advance: Advance, power: PowerMeter
) -> ProfileResults:
    """Return the measurements of all layers of ``job`` and of its data rank, with the power of its passes.

    Args:
        job: What to measure.
        handling: What each transport costs by itself.
        advance: Shows the progress.
        power: Measures the power.
    """
    quota = Quota.of_this_process()
    readings = {tokens: Readings(handling=_handling(job, quota, tokens, advance)) for tokens in job.tokens}
    payloads = {tokens: _first_payload(job, tokens) for tokens in job.tokens}
    data_work = measure_data_rank(job)
    costs = _RankCosts(data_work, handling)
    groups = _groups(job)
    turns = len(groups) * len(job.tokens)
    sizes: list[int] = []
    for number, group in enumerate(groups):
        advance(f"loading layers {group}", number / len(groups))
        shard = job.load(group)
        sizes += job.bytes_of_layers(shard)
        for turn, tokens in enumerate(job.tokens, start=number * len(job.tokens)):

            def progress(part: float, before: int = turn) -> None:
                power.sample()
                advance("timing layers", (before + part) / turns)

            payloads[tokens] = _read_shard(
                job, shard, payloads[tokens], readings[tokens], quota, progress, power
            )
        if len(groups) == 1:
            costs = _rehearsed(job, shard, readings[job.tokens[0]], costs, advance)
        del shard  # before the next group is loaded
    return replace(
        job.results(sizes, readings),
        busy_w=power.take_watts(),
        feed_s=None if costs.data_work is None else costs.data_work.feed_s,
        collect_s=None if costs.data_work is None else costs.data_work.collect_s,
        overhead_s=costs.overhead_s,
        handling=costs.handling,
    )


@dataclass(frozen=True)
class _RankCosts:
    """Costs of a microbatch besides its layers."""

    data_work: DataWork | None
    handling: Mapping[str, TransportHandling]
    overhead_s: float | None = None


def _rehearsed(job: Job, shard: Shard, readings: Readings, parts: _RankCosts, advance: Advance) -> _RankCosts:
    """Return the costs in a run of a small model; of others, those that were measured by themselves."""
    quota = Quota.of_this_process()
    pass_s = sum(seconds for seconds, _ in readings.times)
    if job.device.type != "cpu" or pass_s > LONGEST_PASS_S * quota.stretch or parts.data_work is None:
        return parts
    advance("rehearsing a stage", 1.0)
    stage = Rehearsal(
        Stage(shard, job.device, _pixels(job)),
        _first_payload(job, job.tokens[0]),
        pass_s,
        whole_process=_shares_processor(job, quota) and torch.get_num_threads() == 1,
        stretch=quota.stretch,
    )
    rank = _data_rank(job)
    outputs = tuple(torch.rand(spec.shape).to(spec.dtype) for spec in rank.output_specs)
    work = rehearse_data_rank(stage, outputs, rank.open, parts.data_work)
    frames = Handling(readings.handling[0].receive_s, readings.handling[-1].send_s)
    handling = rehearse_links(stage, work.overhead_s, frames, parts.handling)
    return _RankCosts(work.data_work, handling, work.overhead_s)


def time_one_pass(job: Job) -> OnePass:
    """Return the time of one microbatch of ``job``, as the first layers that fit into memory have it."""
    group = _groups(job)[0]
    began = time.perf_counter()
    shard = job.load(group)
    loaded = time.perf_counter()
    # The first pass warms up the shard.
    timed, _ = time_layers(shard, _first_payload(job, job.tokens[0]), Pacing(1), pixels=_pixels(job))
    whole = len(job.layers) / len(group)
    return OnePass(whole * (loaded - began), whole * sum(map(sum, timed)), job.batch_size)


def _pixels(job: Job) -> PixelTable | None:
    """Return what turns the bytes of a picture into the input of the first layer, as in a run."""
    if job.model.takes_text or job.layers.start > 0:
        return None
    try:
        return usual_items(job.model, None).pixels
    except InputError:
        return None


def _first_payload(job: Job, tokens: int | None) -> Payload:
    """Return an input of the first layer, with sentences of ``tokens``; pictures are bytes, as in a run."""
    generator = torch.Generator().manual_seed(SEED)
    specs = job.specs(job.layers.start, tokens)
    if _pixels(job) is not None:
        specs = job.model.input_specs(job.batch_size, tokens, job.dtype)
    return made_up_payload(specs, job.device, generator)


def _read_shard(
    job: Job,
    shard: Shard,
    payload: Payload,
    readings: Readings,
    quota: Quota,
    progress: Callable[[float], None],
    power: PowerMeter,
) -> Payload:
    """Add the readings of a shard's layers to ``readings``, and return the shard's output."""
    pacing = Pacing(job.request.iterations, job.request.warmup)
    pixels = _pixels(job) if shard.layers.start == job.layers.start else None
    values = look_up(payload, pixels, shard)
    # The pass that measures memory also warms up the shard.
    if pacing.warmup:
        readings.peaks += activation_peaks(shard, values)[0]
    with power.computing():
        timed, output = time_layers(
            shard,
            payload,
            replace(pacing, warmup=False),
            progress,
            work_clock=time.process_time if quota.pauses else None,
            pixels=pixels,
        )
    if not pacing.warmup:
        readings.peaks += activation_peaks(shard, values)[0]
    readings.times += summaries(timed)
    return output


def measure_data_rank(job: Job) -> DataWork | None:
    """Measure the work of a data rank on this device; return None if no shipped input fits the model."""
    quota = Quota.of_this_process()
    measure = functools.partial(measure_data_work, _data_rank(job))
    if quota.pauses:
        measure = functools.partial(measure, clock=time.process_time, stretch=quota.stretch)
    try:
        return measure()
    except InputError:
        return None


def _data_rank(job: Job) -> DataRankRequest:
    return DataRankRequest(job.model, job.batch_size, job.tokens[0], job.dtype)


def measure_links(job: Job | DecoderJob) -> dict[str, TransportHandling]:
    """Return what each transport costs a stage on this device."""
    quota = Quota.of_this_process()
    return measure_transports(TRANSPORTS, whole_process=_shares_processor(job, quota), stretch=quota.stretch)


def _shares_processor(job: Job | DecoderJob, quota: Quota) -> bool:
    """Return whether all threads of a rank share the processor that computes.

    With one to spare, the threads that move bytes take no time from a stage.
    """
    return job.device.type != "cpu" or quota.pauses or processors() <= torch.get_num_threads()


def _handling(job: Job, quota: Quota, tokens: int | None, advance: Advance) -> list[Handling]:
    """Return the costs of links at the cut before each layer, and at the one after the last."""
    advance("measuring the costs of links", 0.0)
    cuts = [job.specs(cut, tokens) for cut in range(job.layers.start, job.layers.stop + 1)]
    measure = functools.partial(measure_handling, device=job.device)
    if quota.pauses and job.device.type == "cpu":  # copies to a GPU take waiting time, not processor time
        measure = functools.partial(measure, clock=time.thread_time, stretch=quota.stretch)
    found = {specs: measure(specs) for specs in distinct(cuts)}
    return [found[specs] for specs in cuts]


def _groups(job: Job) -> list[LayerRange]:
    """Return the ranges of layers that are loaded together: all of them, or block by block."""
    needed = job.model.weight_bytes(job.layers, job.dtype)
    if not job.request.by_block and needed <= FILLED * _free_bytes(job.device):
        return [job.layers]
    # Cut where blocks end, whatever the first layer is.
    inner = range(job.layers.start + 1, job.layers.stop)
    bounds = [job.layers.start, *(cut for cut in inner if cut % 4 == 0), job.layers.stop]
    return [LayerRange(*pair) for pair in pairwise(bounds)]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()
