"""Test that a model takes the times of its layers from a profile of one with the same blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.errors import SpecError
from pipeedge.profile.likeness import with_times_of
from pipeedge.profile.results import LayerResult, Measurement, ProfileResults

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
