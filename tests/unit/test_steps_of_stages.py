"""Steps as they travel between stages: what describes their rows, its checks, and the size of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import effort
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.errors import InfeasibleError, PeerFailedError, ScheduleError
from pipeedge.base.schedule import LayerRange, Schedule
from pipeedge.compress import LinkEncoder
from pipeedge.models.decoder import find_decoder
from pipeedge.models.dtypes import INT4
from pipeedge.models.layers.decoder import PAGE, StepRows
from pipeedge.models.step_rows import StepBounds, computing_layers, pack_rows, packed_length, unpack_rows
from pipeedge.plan.cache_size import bounds_after_loss, choose_bounds, least_cache_bytes, stage_cache_bytes
from pipeedge.request.generation import CacheRequest
from pipeedge.run.copying import CopySender
from pipeedge.run.stage import StepStage
from pipeedge.transport.base import Packet

BOUNDS = StepBounds(context=200, rows=40, sequences=4, pages=30, window_pages=9)
PUZZLES = find_decoder("llama-puzzles")


@st.composite
def steps(draw: st.DrawFn) -> list[StepRows]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        position, rows = draw(st.integers(0, 150)), draw(st.integers(1, 10))
        wanted = -(-(position + rows) // PAGE)
        lists = [
            np.array(draw(st.lists(st.integers(0, size - 1), min_size=wanted, max_size=wanted)), np.int32)
            for size in (BOUNDS.pages, BOUNDS.window_pages)
        ]
        found.append(StepRows(position, rows, *lists))
    return found


def packed(rows: list[StepRows]) -> torch.Tensor:
    pages = sum(len(one.pages) + len(one.window_pages) for one in rows)
    tensor = torch.empty(packed_length(len(rows), pages), dtype=torch.int32)
    pack_rows(rows, tensor)
    return tensor


@settings(max_examples=effort.cases(1000))
@given(steps())
def test_rows_come_out_as_they_were_packed(rows: list[StepRows]) -> None:
    tensor = packed(rows)
    assert len(tensor) <= BOUNDS.longest
    for one, found in zip(rows, unpack_rows(tensor, BOUNDS), strict=True):
        assert (found.position, found.rows) == (one.position, one.rows)
        np.testing.assert_array_equal(found.pages, one.pages)
        np.testing.assert_array_equal(found.window_pages, one.window_pages)


@settings(max_examples=effort.cases(3000))
@given(steps(), st.data())
def test_a_damaged_description_is_refused_or_within_the_bounds(rows: list[StepRows], data: Any) -> None:
    tensor = packed(rows)
    place = data.draw(st.integers(0, len(tensor) - 1))
    tensor[place] = data.draw(st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 40))
    length = data.draw(st.integers(0, len(tensor)))
    try:
        found = unpack_rows(tensor[:length], BOUNDS)
    except PeerFailedError:
        return
    assert len(computing_layers(tensor)) > 0
    assert len(found) <= BOUNDS.sequences
    assert sum(one.rows for one in found) <= BOUNDS.rows
    for one in found:
        assert one.position >= 0 < one.rows
        assert one.position + one.rows <= BOUNDS.context
        for pages, size in ((one.pages, BOUNDS.pages), (one.window_pages, BOUNDS.window_pages)):
            assert len(pages) * PAGE >= one.position + one.rows
            assert all(0 <= page < size for page in pages)


@pytest.mark.parametrize(("first", "last"), [(1, 0), (1, -1), (1, -(2**31)), (0, 4), (-3, 4), (5, 4)])
def test_a_step_is_for_some_layers(first: int, last: int) -> None:
    """Otherwise every stage would pass on zeros."""
    tensor = packed([StepRows(0, 2, np.zeros(1, np.int32), np.zeros(1, np.int32))])
    tensor[1], tensor[2] = first, last
    with pytest.raises(PeerFailedError, match=f"a step is for the layers {first} to {last}"):
        unpack_rows(tensor, BOUNDS)


@pytest.mark.parametrize(
    "payload",
    [
        (),
        (torch.zeros(2, 96),),
        (torch.zeros(2, 96), torch.zeros(3)),
        (torch.zeros(2, 95), packed([StepRows(0, 2, np.zeros(1, np.int32), np.zeros(0, np.int32))])),
        (torch.zeros(3, 96), packed([StepRows(0, 2, np.zeros(1, np.int32), np.zeros(0, np.int32))])),
        (
            torch.zeros(2, 96, dtype=torch.int32),
            packed([StepRows(0, 2, np.zeros(1, np.int32), np.zeros(0, np.int32))]),
        ),
        (
            torch.zeros(2, 96),
            torch.zeros(2, 96),
            packed([StepRows(0, 2, np.zeros(1, np.int32), np.zeros(0, np.int32))]),
        ),
    ],
)
def test_a_malformed_step_is_the_peers_failure(payload: tuple[torch.Tensor, ...]) -> None:
    bounds = StepBounds(context=64, rows=8, sequences=2, pages=4, window_pages=0)
    stage = PUZZLES.stage(LayerRange(0, 4), pages=4, context=64)
    with pytest.raises(PeerFailedError, match=r"^step 5 from rank 3: "):
        StepStage(stage, bounds, 3, is_last=False)(Packet(5, 2, payload))


class Noted(CopySender):
    """Notes the numbers of the steps whose pages are to be copied."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def executed(self, rows: Sequence[StepRows], step: int) -> None:
        self.numbers.append(step)


def test_pages_that_a_trial_writes_are_not_copied() -> None:
    """They are nobody's, and many: those in front of rows far from the beginning."""
    bounds = StepBounds(context=64, rows=8, sequences=2, pages=4, window_pages=0)
    compute = StepStage(PUZZLES.stage(LayerRange(0, 4), pages=4, context=64), bounds, 3, is_last=False)
    compute.copies, rows = [noted := Noted()], [StepRows(33, 2, np.arange(2), np.zeros(0, np.int32))]
    for number in (None, 0, 7, None, 2**40):
        table = packed(rows)
        pack_rows(rows, table, number=number)
        compute(Packet(5, 2, (torch.zeros(2, 96), table)))
    assert noted.numbers == [0, 7, 2**40]


@pytest.mark.parametrize(("start", "stop"), [(4, 8), (5, 7), (4, 16)])
def test_a_stage_that_knows_the_rows_of_a_step_passes_it_on(start: int, stop: int) -> None:
    bounds = StepBounds(context=64, rows=8, sequences=2, pages=4, window_pages=0)
    rows = [StepRows(0, 3, np.zeros(1, np.int32), np.zeros(0, np.int32))]
    before = PUZZLES.stage(LayerRange(0, start), pages=4, context=64)
    stage = PUZZLES.stage(LayerRange(start, stop), pages=4, context=64)
    compute = StepStage(stage, bounds, 3, is_last=False)
    found = []
    for last in (stop, start, None):
        table = packed(rows)
        pack_rows(rows, table, last and LayerRange(0, last))
        state = before.step(rows, [torch.full((3, 96), 0.5)])
        found.append(compute(Packet(5, 3, (*state, table))).payload)
        assert found[-1][-1] is table
    assert [one.shape for one in found[1]] == [one.shape for one in found[0]]
    assert not any(one.any() for one in found[1][:-1])
    for left, right in zip(found[0][:-1], found[2][:-1], strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, INT4])
@pytest.mark.parametrize(("stop", "end"), [(4, 16), (5, 12), (6, 7), (7, 16), (11, 11)])
def test_layers_behind_kept_outputs_compute_the_same_again(dtype: torch.dtype, stop: int, end: int) -> None:
    """A stage keeps its outputs; one with more layers begins from them, with garbage as its input."""
    bounds = StepBounds(context=96, rows=40, sequences=2, pages=6, window_pages=0)
    stage = PUZZLES.stage(LayerRange(1, stop), dtype, pages=6, context=96)
    kept = stage.outputs_after(stop)
    first = StepStage(stage, bounds, 0, is_last=False, outputs={stop: kept})
    before = PUZZLES.stage(LayerRange(0, 1), dtype, pages=6, context=96)
    hidden = torch.randn(51, PUZZLES.config.hidden, generator=torch.Generator().manual_seed(3))
    lists = [np.array([4, 1], np.int32), np.array([0], np.int32)]
    none = np.zeros(0, np.int32)
    steps = [
        [StepRows(0, 30, lists[0], none), StepRows(0, 9, lists[1], none)],
        [StepRows(30, 10, lists[0], none), StepRows(9, 1, lists[1], none)],
        [StepRows(40, 1, lists[0], none)],
    ]
    wanted, done = list[tuple[torch.Tensor, ...]](), 0
    whole = PUZZLES.stage(LayerRange(stop, end), dtype, pages=6, context=96) if end > stop else None
    for rows in steps:
        count = sum(one.rows for one in rows)
        inputs = [hidden[done : done + count].to(before.stream_dtype)]
        done += count
        *state, _ = first(Packet(0, 1, (*before.step(rows, inputs), packed(rows)))).payload
        state = [tensor.clone() for tensor in state]
        wanted.append(tuple(state) if whole is None else whole.step(rows, state))
    again = PUZZLES.stage(LayerRange(1, end), dtype, pages=6, context=96, adopts=[(stage, range(1, stop))])
    second = StepStage(again, bounds, 0, is_last=False, outputs={stop: kept})
    for rows, outputs in zip(steps, wanted, strict=True):
        table = packed(rows)
        pack_rows(rows, table, LayerRange(stop, 99))
        garbage = before.unknown_outputs(sum(one.rows for one in rows))
        *found, _ = second(Packet(0, 1, (*garbage, table))).payload
        for left, right in zip(found, outputs, strict=True):
            assert torch.equal(left, right)


def test_a_step_that_begins_where_nothing_is_kept_is_the_peers_failure() -> None:
    bounds = StepBounds(context=64, rows=8, sequences=2, pages=4, window_pages=0)
    rows = [StepRows(0, 3, np.zeros(1, np.int32), np.zeros(0, np.int32))]
    stage = PUZZLES.stage(LayerRange(0, 8), pages=4, context=64)
    table = packed(rows)
    pack_rows(rows, table, LayerRange(5, 8))
    with pytest.raises(PeerFailedError, match="begins after layer 5, whose outputs are not kept here"):
        StepStage(stage, bounds, 3, is_last=False)(Packet(5, 2, (torch.zeros(3, 96), table)))


@pytest.mark.parametrize("first", [17, 2**31 - 1])
def test_a_step_for_layers_beyond_the_model_is_the_peers_failure(first: int) -> None:
    """All stages would pass on zeros."""
    bounds = StepBounds(context=64, rows=8, sequences=2, pages=4, window_pages=0)
    table = packed([StepRows(0, 3, np.zeros(1, np.int32), np.zeros(0, np.int32))])
    table[1], table[2] = first, 2**31 - 1
    stage = PUZZLES.stage(LayerRange(0, 8), pages=4, context=64)
    with pytest.raises(PeerFailedError, match=f"layers beyond the model, from {first} on"):
        StepStage(stage, bounds, 3, is_last=False)(Packet(5, 2, (torch.zeros(3, 96), table)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("start", "stop"), [(0, 16), (2, 11), (1, 4), (4, 5)])
def test_the_cache_of_a_stage_has_the_planned_size(start: int, stop: int, dtype: torch.dtype) -> None:
    stage = PUZZLES.stage(LayerRange(start, stop), dtype, pages=7)
    full, windowed = PUZZLES.page_bytes(stage.layers, dtype)
    assert stage.cache_bytes == 7 * full
    assert windowed == 0


def test_the_rank_with_the_least_room_decides_the_pages() -> None:
    schedule = Schedule.from_partition([1, 4, 5, 16])
    page = [PUZZLES.page_bytes(stage.layers, torch.float32)[0] for stage in schedule.stages]

    def choose(wanted: CacheRequest, memory: dict[int, int | None], answers: int | None = None) -> StepBounds:
        return choose_bounds(
            PUZZLES, schedule, wanted, sequences=3, answers=answers, data_rank=0, memory=memory
        )

    free = choose(CacheRequest(), {0: None, 1: None})
    assert (free.context, free.pages, free.sequences) == (256, 24, 24)
    assert choose(CacheRequest(), {}, answers=7).sequences == 7
    assert stage_cache_bytes(PUZZLES, schedule, free) == [24 * one for one in page]
    weights = PUZZLES.weight_bytes(schedule.stages[1].layers, torch.float32)
    tight = choose(CacheRequest(), {0: 1 << 40, 1: weights + 2 * 5 * page[1]})
    assert (tight.context, tight.pages) == (5 * PAGE, 5)
    short = choose(CacheRequest(context=40), {0: 1 << 40, 1: weights + 2 * 5 * page[1]})
    assert (short.context, short.pages) == (40, 5)
    given = choose(CacheRequest(cache_mb=4 * page[1] / (1 << 20)), {0: 0, 1: 0})
    assert given.pages == 4
    with pytest.raises(ScheduleError, match=r"^--context 300: llama-puzzles has 256 positions$"):
        choose(CacheRequest(context=300), {})
    with pytest.raises(InfeasibleError, match=r"^the cache of rank 1 needs .* for --context 256"):
        choose(CacheRequest(context=256), {0: None, 1: weights + 2 * 5 * page[1]})


@settings(max_examples=effort.cases(500))
@given(
    rooms=st.lists(st.one_of(st.none(), st.integers(0, 60)), min_size=2, max_size=2),
    before=st.integers(8, 30),
    limit=st.one_of(st.none(), st.integers(1, 20)),
)
def test_pages_after_a_loss_fit_and_suffice_for_one_sequence(
    rooms: list[int | None], before: int, limit: int | None
) -> None:
    """By default half of the rest of the memory has pages, and all of it those of one sequence."""
    schedule, context = Schedule.from_partition([1, 6, 7, 16]), 8 * PAGE
    weights = [PUZZLES.weight_bytes(stage.layers, torch.float32) for stage in schedule.stages]
    weights[0] += PUZZLES.end_bytes(torch.float32)
    page = [PUZZLES.page_bytes(stage.layers, torch.float32)[0] for stage in schedule.stages]
    memory = {
        rank: None if room is None else weights[rank] + room * page[rank] for rank, room in enumerate(rooms)
    }
    bounds = StepBounds(context, 40, 3, before, 0)
    wanted = CacheRequest(cache_mb=None if limit is None else limit * page[1] / (1 << 20))
    known = [1000 if room is None else room for room in rooms]
    most = known if limit is None else [limit * page[1] // one for one in page]

    def after() -> StepBounds:
        return bounds_after_loss(PUZZLES, schedule, wanted, bounds, data_rank=0, memory=memory)

    if min(most) < 8:
        with pytest.raises(InfeasibleError, match=r"needs .* for 256 tokens, and .* there for it$"):
            after()
        return
    usual = [room // 2 for room in known] if limit is None else most
    assert after() == replace(bounds, pages=max(8, min(before, *usual)))


def test_least_cache_is_that_of_one_sequence() -> None:
    for layer in range(16):
        layers = LayerRange(layer, layer + 1)
        size = least_cache_bytes(PUZZLES, layers, "float32", replace(BOUNDS, window_pages=0))
        assert size == 7 * PUZZLES.page_bytes(layers, torch.float32)[0]


def test_prompts_and_answers_have_levels_of_their_own() -> None:
    chance = torch.Generator().manual_seed(0)
    prompts, answers = torch.randn(40, 64, generator=chance) * 100, torch.randn(1, 64, generator=chance)
    encoder, alone = LinkEncoder("mse", window=10), LinkEncoder("mse", window=10)
    encoder.encode((prompts,), 4, kind=1)
    mixed, own = encoder.encode((answers,), 4, kind=0), alone.encode((answers,), 4)
    assert all(torch.equal(one, other) for one, other in zip(mixed, own, strict=True))
