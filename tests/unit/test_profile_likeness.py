"""Test that a model takes the times of its layers from a profile of one with the same blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.errors import SpecError
from pipeedge.plan.specs import EndCosts
from pipeedge.profile.likeness import with_times_of
from pipeedge.profile.results import LayerResult, LayerSteps, Measurement, ProfileResults

WIDTHS = (2, 1, 5, 1)
"""Widths of the payload after each layer of a block."""


def results(blocks: int, name: str = "m", classes: int = 10, hidden: int = 8) -> ProfileResults:
    """Return results in which each layer's time tells its number, and ends have other sizes."""
    layers, before = [], ((3, 4, 4),)
    for layer in range(1, 4 * blocks + 1):
        after = ((classes,),) if layer == 4 * blocks else ((17, WIDTHS[(layer - 1) % 4] * hidden),)
        size = hidden * hidden + (1000 if layer == 1 else 0) + (classes if layer == 4 * blocks else 0)
        measured = Measurement(before, after, float(layer), 0.1, 5.0 * layer, 0.01 * layer, 0.02 * layer)
        layers.append(LayerResult(layer, float(size), measured))
        before = after
    return ProfileResults(name, "torch.float32", 8, 4 * blocks, tuple(layers), "cpu", 2, "torch")


def untimed(found: ProfileResults) -> ProfileResults:
    blank = [
        replace(one, measured=Measurement(one.measured.shape_in, one.measured.shape_out, 0.0))
        for one in found.profile_data
    ]
    return replace(found, profile_data=tuple(blank))


@given(st.integers(3, 8), st.integers(1, 12))
@settings(max_examples=cases(40))
def test_ends_are_those_of_the_ends_and_the_middle_of_the_middle(measured: int, wanted: int) -> None:
    source = replace(results(measured, "other", classes=5), overhead_s=0.25)
    found = with_times_of(untimed(results(wanted)), source, "other.yml")
    assert (found.model_name, found.layers, found.overhead_s) == ("m", 4 * wanted, 0.25)
    for result in found.profile_data:
        block, part = divmod(result.layer - 1, 4)
        from_block, from_part = divmod(int(result.measured.time_s) - 1, 4)
        assert from_part == part
        if block == 0:
            assert from_block == 0
        elif block == wanted - 1:
            assert from_block == measured - 1
        else:
            assert 0 < from_block < measured - 1
        assert result.memory_bytes == results(wanted).profile_data[result.layer - 1].memory_bytes
        assert result.measured.send_s == pytest.approx(0.02 * result.measured.time_s)


def decoder(windows: list[int], name: str = "m", vocab: int = 100) -> ProfileResults:
    """Return results of a decoder in which each layer's costs tell its number."""
    found = results(len(windows), name)
    layers = []
    for one in found.profile_data:
        window, number = windows[(one.layer - 1) // 4], float(one.layer)
        steps = LayerSteps(*(factor * number for factor in range(1, 8)), 64.0, window)
        shape_in = ((8,),) if one.layer % 4 == 1 else one.measured.shape_in
        shape_out = ((8,),) if one.layer % 4 == 0 else one.measured.shape_out
        measured = replace(one.measured, shape_in=shape_in, shape_out=shape_out)
        layers.append(replace(one, memory_bytes=64.0, measured=measured, steps=steps))
    ends = EndCosts(0.1, 0.2, 0.3, 0.4, 0.5, 8.0 * vocab)
    return replace(found, batch_size=1, profile_data=tuple(layers), ends=ends, context=len(windows))


WINDOWS = st.lists(st.sampled_from([0, 512]), min_size=1, max_size=8)


@given(WINDOWS, WINDOWS)
@settings(max_examples=cases(40))
def test_blocks_of_decoders_are_those_with_the_same_window(wanted: list[int], measured: list[int]) -> None:
    expected, source = decoder(wanted), decoder(measured, "other")
    if not set(wanted) <= set(measured):
        with pytest.raises(
            SpecError, match=r"other.yml: has no block (with a window of 512|that attends to all)"
        ):
            with_times_of(expected, source, "other.yml")
        return
    found = with_times_of(expected, source, "other.yml")
    assert (found.model_name, found.ends, found.context) == ("m", source.ends, len(wanted))
    for result in found.profile_data:
        block, part = divmod(result.layer - 1, 4)
        from_block, from_part = divmod(int(result.steps.fixed_s) - 1, 4)
        assert (from_part, result.steps.window) == (part, wanted[block])
        assert measured[from_block] == wanted[block]
        assert result.steps.row_s == 3 * result.steps.fixed_s == 3 * result.measured.time_s


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (decoder([0, 0], vocab=110), "embedding and head have another size"),
        (results(4), "a decoder and an encoder"),
        (replace(decoder([0]), dtype="torch.int8"), "another dtype"),
    ],
    ids=range(3),
)
def test_decoders_that_are_not_alike_are_refused(source: ProfileResults, line: str) -> None:
    with pytest.raises(SpecError, match=line):
        with_times_of(decoder([0, 0, 0]), source, "other.yml")


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (results(4, hidden=9), "the blocks differ"),
        (results(2), "three blocks or more"),
        (replace(results(4), batch_size=4), "batch size"),
        (replace(results(4), threads=1), "thread count"),
        (replace(results(4), profile_data=results(4).profile_data[:-1]), "needs all layers"),
    ],
    ids=range(5),
)
def test_what_is_not_alike_is_refused(source: ProfileResults, line: str) -> None:
    with pytest.raises(SpecError, match=line):
        with_times_of(untimed(results(6)), source, "other.yml")
