"""The auction's optimal schedule, which the native scheduler finds, against exhaustive search."""

from __future__ import annotations

import itertools

import pytest
from effort import cases
from hypothesis import given, settings
from oracles.auction_brute_force import costs, least, markets

from pipeedge.auction.market import Market
from pipeedge.auction.optimal import optimal
from pipeedge.base.errors import InfeasibleError


@settings(max_examples=cases(40))
@given(markets())
def test_the_optimum_is_the_best_of_all_orders(market: Market) -> None:
    count = len(market.bids)
    choices = (order for size in range(1, count + 1) for order in itertools.permutations(range(count), size))
    best = least(market, choices)
    if best is None:
        with pytest.raises(InfeasibleError):
            optimal(market)
        return
    found = optimal(market)
    assert costs(market, list(found.stages))[0] == pytest.approx(found.bottleneck_s)
    assert found.bottleneck_s == pytest.approx(best[0])
    assert found.gap == 0
