"""The auction's optimal schedule, which the native scheduler finds, against exhaustive search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from effort import cases
from hypothesis import given, settings
from oracles.auction_brute_force import costs, least, markets

from pipeedge.auction.market import Call, Market, Seconds
from pipeedge.auction.optimal import optimal
from pipeedge.auction.tables import read_tables
from pipeedge.base.errors import InfeasibleError
from pipeedge.base.fields import decode, encode
from pipeedge.plan.spec_writing import save_device_types, save_models
from pipeedge.plan.specs import DeviceType, LengthProfile, ModelProfile, ModelSpec, TransportHandling


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


# -- bids ----------------------------------------------------------------------------------------------

MODEL = ModelSpec(mem_bytes=(100.0, 200.0, 300.0, 400.0), elements_in=4, elements_out=(1, 2, 3, 4))
PROFILE = ModelProfile(2, "torch.float32", (1, 2, 3, 4))
KIND = DeviceType(mem_bytes=1000.0, bw_bytes_per_s=50.0, profiles={"m": (PROFILE,)})
CALL = Call("m", 4, microbatch_size=2)


@pytest.fixture
def bid(tmp_path: Path) -> Callable[..., Seconds]:
    """Return what a device type bids."""

    def table(kind: DeviceType = KIND, model: ModelSpec = MODEL, call: Call = CALL) -> Seconds:
        save_models(tmp_path / "m.yml", {"m": model})
        save_device_types(tmp_path / "t.yml", {"kind": kind})
        return read_tables(tmp_path / "m.yml", tmp_path / "t.yml", call).stage_s["kind"]

    return table


def fits(first: int, last: int) -> bool:
    """Count by hand: weights, and two microbatches of two items of four bytes before and behind."""
    sizes = [4, 1, 2, 3, 4]
    return sum(MODEL.mem_bytes[first:last]) + 2 * 8 * sizes[first] + 2 * 8 * sizes[last] <= 1000


def test_a_device_bids_the_sum_of_its_layers_for_stages_that_fit(bid: Callable[..., Seconds]) -> None:
    found = bid()
    for first in range(5):
        for last in range(5):
            if first < last and fits(first, last):
                assert found[first, last] == pytest.approx(sum((1, 2, 3, 4)[first:last]))
            else:
                assert math.isinf(found[first, last])
    assert math.isinf(found[0, 4]), "the case would show nothing otherwise"


def test_weights_that_layers_share_are_counted_once(bid: Callable[..., Seconds]) -> None:
    """Layer 3 has the weights of layer 1, and layer 4 those of layer 2 and 200 bytes more."""
    model = replace(MODEL, shared_with=(0, 0, 1, 2))
    held = {(0, 4): 100 + 200 + 200 + 200, (0, 3): 100 + 200 + 200, (1, 4): 200 + 300 + 200, (2, 4): 700}
    sizes = [4, 1, 2, 3, 4]
    for (first, last), weights in held.items():
        needed = weights + 16 * sizes[first] + 16 * sizes[last]
        for memory, taken in ((needed, True), (needed - 1, False)):
            found = bid(replace(KIND, mem_bytes=memory), model)
            assert math.isfinite(found[first, last]) == taken


def test_a_bid_uses_the_requested_sentence_length(bid: Callable[..., Seconds]) -> None:
    """Times follow a + b tokens + c tokens^2 through the two profiled lengths; sizes grow per token."""
    longer = LengthProfile(20, (2.0, 4.0, 6.0, 8.0))
    profile = ModelProfile(2, "torch.float32", (1, 2, 3, 4), tokens=10, lengths=(longer,))
    kind = replace(KIND, mem_bytes=1e9, profiles={"m": (profile,)})
    model = replace(
        MODEL,
        tokens=10,
        elements_in=10,
        elements_out=(10, 20, 30, 40),
        elements_in_per_token=1,
        elements_out_per_token=(1, 2, 3, 4),
    )
    call = decode(encode(replace(CALL, tokens=20)), Call)
    assert bid(kind, model, call)[0, 4] == pytest.approx(20)
    assert bid(kind, model)[0, 4] == pytest.approx(10)
    # Weights of 1000 bytes and the larger buffers no longer fit.
    small = replace(kind, mem_bytes=1000 + 16 * (10 + 40))
    assert math.isfinite(bid(small, model)[0, 4])
    assert math.isinf(bid(small, model, call)[0, 4])


@pytest.mark.parametrize("transport", ["p2p", "tcp-tls"])
def test_a_bid_includes_handling_and_activations(transport: str, bid: Callable[..., Seconds]) -> None:
    """Link handling and activations are counted if the profile has them; the original's has not."""
    receive, send = (7.0, 0.1, 0.2, 0.3), (0.4, 0.5, 0.6, 7.0)
    profile = ModelProfile(
        2,
        "torch.float32",
        (1, 2, 3, 4),
        receive_s=receive,
        send_s=send,
        activation_bytes=(0, 0, 300, 0),
        handling={"tcp-tls": TransportHandling(0.01, 0.02, 0.03, 0.04)},
    )
    kind = DeviceType(1000.0, 50.0, {"m": (profile,)})
    found = bid(kind, call=replace(CALL, transport=transport))
    sizes = [4, 1, 2, 3, 4]
    if transport == "tcp-tls":
        receive = tuple(s + 0.01 + 0.02 * 8 * size for s, size in zip(receive, sizes[:-1], strict=True))
        send = tuple(s + 0.03 + 0.04 * 8 * size for s, size in zip(send, sizes[1:], strict=True))
    for first, last in itertools.combinations(range(5), 2):
        held = sum(MODEL.mem_bytes[first:last]) + 16 * sizes[first] + 16 * sizes[last]
        held += 300 if first <= 2 < last else 0
        seconds = sum((1, 2, 3, 4)[first:last]) + (receive[first] if first else 0)
        seconds += send[last - 1] if last < 4 else 0
        expected = seconds if held <= 1000 else math.inf
        assert found[first, last] == pytest.approx(expected)
