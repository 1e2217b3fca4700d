"""How a profile times the steps of a decoder: in which order, and by which clock."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decoder_cases import CASES

from pipeedge.base.machine import resident_bytes
from pipeedge.base.quota import Quota
from pipeedge.base.schedule import LayerRange
from pipeedge.models.decoder import DecoderModel, find_decoder
from pipeedge.models.layers.decoder import DecoderStage, StepRows
from pipeedge.profile import decoder_job
from pipeedge.profile.decoder_job import DecoderJob
from pipeedge.profile.power import PowerMeter
from pipeedge.profile.request import MeasureRequest
from pipeedge.request.config import ModelRequest
from pipeedge.transport.base import Packet

PUZZLES = find_decoder("llama-puzzles")


class Recorder:
    """Records the steps that a profile executes; the time of each is its number, from 1."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, ...]] = []
        self.scored: dict[int, int] = {}
        """Rows that were scored behind each step, by its number."""
        self.clocks: set[bool] = set()

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Return what executes a step, as a class does."""
        return self._execute

    def _execute(self, packet: Packet, seconds: Any, *, processor_time: bool) -> None:
        self.steps.append((packet.items, *packet.payload[1].tolist()))
        self.clocks.add(processor_time)
        seconds[:] = len(self.steps)

    def score(self, rows: int) -> None:
        """Note that so many rows are scored."""
        assert len(self.steps) not in self.scored
        self.scored[len(self.steps)] = rows


def measured(
    monkeypatch: pytest.MonkeyPatch, repetitions: int, quota: Quota
) -> tuple[Recorder, Any, list[Any]]:
    recorder = Recorder()
    monkeypatch.setattr(decoder_job, "StepStage", recorder)
    (job,) = DecoderJob.each(MeasureRequest(model=ModelRequest("llama-puzzles")), PUZZLES)
    steps = decoder_job._Steps.load(job, None)
    power = PowerMeter(None)
    return recorder, steps, steps.measure(repetitions, lambda _part: None, power, quota, recorder.score)


@pytest.mark.parametrize("repetitions", [1, 3])
def test_steps_of_few_rows_count_after_their_equals(
    monkeypatch: pytest.MonkeyPatch, repetitions: int
) -> None:
    recorder, steps, timed = measured(monkeypatch, repetitions, Quota(None))
    counted = set[int]()
    for point, one in zip(steps.points, timed, strict=True):
        assert len(one.layers) == len(one.processor_s) == repetitions * (1 if point.is_chunk else 3)
        for seconds in one.layers:
            (number,) = set(seconds)
            step = recorder.steps[int(number) - 1]
            assert step[0] == point.all_rows
            counted.add(int(number))
        groups = {recorder.steps[int(seconds[0]) - 1] for seconds in one.layers}
        assert len(groups) == (2 if 1 < point.sequences < 16 else 1)
        before = {recorder.steps[int(seconds[0]) - 2] for seconds in one.layers}
        assert point.is_chunk or before == groups
    assert len(counted) == sum(len(one.layers) for one in timed)


def test_rows_are_scored_before_each_step_of_few_rows_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run, where the weights of the head take places in the caches of those of layers."""
    recorder, steps, timed = measured(monkeypatch, 2, Quota(None))
    for point, one in zip(steps.points, timed, strict=True):
        for seconds in one.layers:
            if not point.is_chunk:
                assert recorder.scored[int(seconds[0]) - 1] == point.all_rows
            else:
                assert int(seconds[0]) not in recorder.scored


@pytest.mark.parametrize("quota", [Quota(None), Quota(0.4)])
def test_layers_of_a_process_that_pauses_count_by_processor_time(
    monkeypatch: pytest.MonkeyPatch, quota: Quota
) -> None:
    recorder, *_ = measured(monkeypatch, 1, quota)
    assert recorder.clocks == {quota.pauses}


def test_steps_read_a_cache_that_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nothing was written to may be one page of zeros: attention to it would seem fast."""
    monkeypatch.setattr(decoder_job, "_ROWS", (1, 200))
    (job,) = DecoderJob.each(MeasureRequest(model=ModelRequest("llama-puzzles")), PUZZLES)
    before = resident_bytes()
    stage = decoder_job._Steps.load(job, None).stage
    assert resident_bytes() - before > 0.8 * stage.cache_bytes > 50 << 20


def test_clearing_the_cache_does_not_count_as_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss, layers are loaded with a cache that nobody clears first."""
    seconds, build = [0.0], DecoderModel.stage

    def take(part: float) -> None:
        seconds[0] += part

    def loaded(*arguments: Any, **options: Any) -> DecoderStage:
        take(2.0)
        return build(*arguments, **options)

    monkeypatch.setattr(DecoderModel, "stage", loaded)
    monkeypatch.setattr(DecoderStage, "clear_cache", lambda _: take(5.0))
    monkeypatch.setattr(decoder_job, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    (job,) = DecoderJob.each(MeasureRequest(model=ModelRequest("llama-puzzles")), PUZZLES)
    assert decoder_job._Steps.load(job, None).loading_s == 2.0
    assert seconds == [7.0]


@pytest.mark.parametrize("name", ["llama3", "gemma2"])
@pytest.mark.parametrize("free", [0, 1 << 20, 100 << 20])
def test_the_cache_takes_a_part_of_what_weights_leave(
    name: str, free: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    CASES[name].save(tmp_path)
    model = find_decoder(tmp_path)
    (job,) = DecoderJob.each(MeasureRequest(model=ModelRequest(str(tmp_path))), model)
    whole = LayerRange(0, model.n_layers)
    weights = model.weight_bytes(whole, torch.float32) + model.end_bytes(torch.float32)
    monkeypatch.setattr(decoder_job, "available_bytes", lambda: weights + free)
    steps = decoder_job._Steps.load(job, None)
    least = 16 * sum(model.page_bytes(whole, torch.float32))  # a page of each sequence
    assert least <= steps.stage.cache_bytes <= max(least, free / 4)
    assert max(point.position + point.rows for point in steps.points) == steps.bounds.context


def test_processor_time_of_layers_leaves_out_what_others_compute() -> None:
    """Two threads compute on one processor in turn, so that steps take about twice their processor time."""
    own = [StepRows(0, 60, np.zeros(2, np.int32), np.zeros(0, np.int32))]
    values, stopped = torch.ones(60, PUZZLES.config.hidden), threading.Event()

    def stage() -> DecoderStage:
        return PUZZLES.stage(LayerRange(0, 16), pages=2, context=64)

    def disturb() -> None:
        other = stage()
        while not stopped.is_set():
            other.step(own, [values.clone()], threads=1)

    # Threads have the processors of the one that starts them.
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    other = threading.Thread(target=disturb)
    try:
        other.start()
        measuring, seconds = stage(), np.zeros(16)
        for _ in range(100):
            began = time.thread_time()
            measuring.step(own, [values.clone()], threads=1, seconds=seconds, processor_time=True)
            assert 0 < seconds.sum() <= time.thread_time() - began
    finally:
        stopped.set()
        other.join()
        os.sched_setaffinity(0, processors)
