"""Test how the blocks of a decoder are shared among nodes, against all ways to share them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.errors import InfeasibleError
from pipeedge.base.schedule import LayerRange
from pipeedge.models.decoder import find_decoder
from pipeedge.models.dtypes import find_dtype
from pipeedge.nodes.sharing import TextNode, TextWeights, share_blocks, share_words

NODES = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 60)).map(lambda pair: TextNode("n", pair[0] * 1e3, pair[1])),
    min_size=1,
    max_size=4,
)
WEIGHTS = st.builds(
    TextWeights, st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple), st.integers(0, 9)
)


def cost(weights: TextWeights, nodes: Sequence[TextNode], shares: Sequence[int], objective: str) -> float:
    """Return the cost of shares as the module states it, infinite where they do not fit."""
    seconds, start = [], 0
    for number, (node, share) in enumerate(zip(nodes, shares, strict=True)):
        size = sum(weights.blocks[start : start + share]) + (weights.ends if number == 0 else 0)
        if size > node.room_bytes:
            return math.inf
        seconds.append(size / node.bytes_per_s + (1e-3 if number and share else 0.0))
        start += share
    return max(seconds) if objective == "throughput" else sum(seconds)


@given(WEIGHTS, NODES, st.sampled_from(["throughput", "latency"]))
@settings(max_examples=cases(60))
def test_no_way_to_share_is_better(weights: TextWeights, nodes: list[TextNode], objective: str) -> None:
    blocks = len(weights.blocks)
    ways = [
        shares for shares in itertools.product(range(blocks + 1), repeat=len(nodes)) if sum(shares) == blocks
    ]
    best = min(cost(weights, nodes, shares, objective) for shares in ways)
    if math.isinf(best):
        with pytest.raises(InfeasibleError, match="add nodes, or choose a smaller --dtype"):
            share_blocks(weights, nodes, objective)
    else:
        found = share_blocks(weights, nodes, objective)
        assert sum(found) == blocks
        assert cost(weights, nodes, found, objective) == pytest.approx(best)


def test_shares_are_ranges_of_layers_of_the_ranks_that_have_blocks() -> None:
    assert share_words([2, 0, 1]) == ("--partition", "1,8,9,12", "--rank-order", "0,2")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_sizes_are_those_of_the_model(dtype: str) -> None:
    model = find_decoder("llama-puzzles")
    found = TextWeights.of(model.config, dtype)
    whole = model.weight_bytes(LayerRange(0, model.n_layers), find_dtype(dtype))
    assert sum(found.blocks) == pytest.approx(whole, rel=0.01)
    assert found.ends == pytest.approx(model.end_bytes(find_dtype(dtype)), rel=0.01)
