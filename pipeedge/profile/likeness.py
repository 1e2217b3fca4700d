"""Take the times of a model's layers from a profile of another model with the same blocks. Pure.

    measured, 3 blocks    first | middle | last
    wanted, 6 blocks      first | middle | middle | middle | middle | last

Blocks of the same sizes take the same time, so a deeper or shallower model of a family need not be measured
again. The first block has the embeddings besides, and the last one the head. The data rank holds those of a
decoder, so that its blocks differ in their window alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeedge.base.errors import SpecError
from pipeedge.models.architecture import LAYERS_PER_BLOCK
from pipeedge.plan.specs import EndCosts
from pipeedge.profile.results import LayerResult, LayerSteps, Measurement, ProfileResults

__all__ = ["with_times_of"]

_SAME = 0.01
"""Largest difference of the sizes of two layers that count as the same, as a fraction."""


def with_times_of(expected: ProfileResults, measured: ProfileResults, source: str) -> ProfileResults:
    """Return the results of a model with the times of another one.

    Args:
        expected: Results of the model without times.
        measured: Results of all layers of another model.
        source: Where they come from, for messages.

    Raises:
        SpecError: Its blocks are others, an encoder has fewer than three, or it was measured under other
            conditions.
    """
    if (expected.ends is None) != (measured.ends is None):
        raise SpecError(f"{source}: a decoder and an encoder have no blocks alike")
    same_depth = replace(
        measured, model_name=expected.model_name, layers=expected.layers, profile_data=expected.profile_data
    )
    expected.check_conditions(same_depth, source)
    blocks, wanted = measured.layers // LAYERS_PER_BLOCK, expected.layers // LAYERS_PER_BLOCK
    by_layer = {result.layer: result for result in measured.profile_data}
    is_decoder = expected.ends is not None
    if len(by_layer) < measured.layers or (blocks < 3 and not is_decoder):
        raise SpecError(f"{source}: needs all layers of a model with three blocks or more")
    if is_decoder:
        like = _with_windows(_windows(expected), _windows(measured), source)
    else:
        like = [_like(block, wanted, blocks) for block in range(wanted)]
    found = []
    for result in expected.profile_data:
        block, part = divmod(result.layer - 1, LAYERS_PER_BLOCK)
        other = by_layer[like[block] * LAYERS_PER_BLOCK + part + 1]
        found.append(_timed(result, other, expected.layers, source))
    return replace(
        measured,
        model_name=expected.model_name,
        layers=expected.layers,
        profile_data=tuple(found),
        ends=_ends(expected.ends, measured.ends, source),
        context=expected.context,
        agreement=None,
        extra={},
    )


def _like(block: int, wanted: int, blocks: int) -> int:
    """Return the measured block that is like one of the ``wanted`` ones; all from 0."""
    if block == 0:
        return 0
    if block == wanted - 1:
        return blocks - 1
    return 1 + (block - 1) % (blocks - 2)


def _windows(results: ProfileResults) -> list[int]:
    """Return the window of each block of a decoder."""
    firsts = [one for one in results.profile_data if one.layer % LAYERS_PER_BLOCK == 1]
    return [one.steps.window for one in firsts if one.steps is not None]


def _with_windows(wanted: Sequence[int], measured: Sequence[int], source: str) -> list[int]:
    """Return the measured block that has the window of each wanted one.

    Raises:
        SpecError: None has.
    """
    missing = sorted(set(wanted) - set(measured))
    if missing:
        window = missing[0]
        which = f"with a window of {window} positions" if window else "that attends to all positions"
        raise SpecError(f"{source}: has no block {which}")
    return [measured.index(window) for window in wanted]


def _ends(mine: EndCosts | None, its: EndCosts | None, source: str) -> EndCosts | None:
    """Return the costs of the ends of a decoder, which are as large as the measured ones.

    Raises:
        SpecError: They are not.
    """
    if mine is None or its is None:
        return None
    if abs(mine.memory_bytes - its.memory_bytes) > _SAME * mine.memory_bytes:
        raise SpecError(f"{source}: its embedding and head have another size")
    return replace(its, memory_bytes=mine.memory_bytes)


def _timed(result: LayerResult, other: LayerResult, last: int, source: str) -> LayerResult:
    """Return a layer with the times of another one.

    Args:
        result: The layer.
        other: The measured layer.
        last: Number of the last layer.
        source: Where the measured one comes from.

    Raises:
        SpecError: It has another size, or other payloads.
    """
    mine, its, layer = result.measured, other.measured, result.layer
    is_inner = LAYERS_PER_BLOCK < layer <= last - LAYERS_PER_BLOCK or result.steps is not None
    if (
        (layer > 1 and mine.shape_in != its.shape_in)
        or (layer < last and mine.shape_out != its.shape_out)
        or (is_inner and abs(result.memory_bytes - other.memory_bytes) > _SAME * result.memory_bytes)
    ):
        raise SpecError(
            f"{source}: layer {other.layer} is not like layer {layer} of this model: the blocks differ"
        )
    return replace(
        result,
        measured=_with_times(mine, its),
        steps=_with_costs(result.steps, other.steps),
        lengths=tuple(
            replace(one, measured=_with_times(one.measured, like.measured))
            for one, like in zip(result.lengths, other.lengths, strict=True)
        ),
    )


def _with_times(mine: Measurement, its: Measurement) -> Measurement:
    return replace(
        mine,
        time_s=its.time_s,
        time_spread_s=its.time_spread_s,
        activations_bytes=its.activations_bytes,
        receive_s=its.receive_s,
        send_s=its.send_s,
    )


def _with_costs(mine: LayerSteps | None, its: LayerSteps | None) -> LayerSteps | None:
    if mine is None or its is None:
        return None
    return replace(its, cache_bytes=mine.cache_bytes, window=mine.window)
