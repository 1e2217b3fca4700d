"""Test the auction: schedulers against exhaustive search, the rules of the sale, and real bidders."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import mutate_message, rounds
from oracles.auction_brute_force import costs, least, markets

from pipeedge.auction.market import Bid, Call, Market, NoBid, Offer, contradiction, length_note
from pipeedge.auction.options import parse_auction
from pipeedge.auction.ordered import (
    DeviceOrder,
    Outcome,
    greedy_host_count,
    latency_ordered,
    throughput_ordered,
)
from pipeedge.auction.sale import Sale, Sold, absence_line
from pipeedge.base.errors import InfeasibleError, RequestError
from pipeedge.base.fields import decode, encode
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.plan.specs import DeviceType, LengthProfile, ModelProfile, ModelSpec
from pipeedge.request.environment import Environment

# Exhaustive search in plain Python, from the definition. --------------------------------------------------


def in_order(count: int, order: DeviceOrder) -> Iterator[tuple[int, ...]]:
    """Return the subsets of devices that an order allows."""
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            if order.strict and size < count:
                continue
            if order.strict_first and chosen[0] != 0:
                continue
            if order.strict_last and chosen[-1] != count - 1:
                continue
            yield chosen


def checked(market: Market, found: Outcome, order: DeviceOrder) -> tuple[float, float]:
    """Return the schedule's cost by the oracle, after checking that the order allows it."""
    assert tuple(device for device, _, _ in found.stages) in set(in_order(len(market.bids), order))
    bottleneck, latency = costs(market, list(found.stages))
    assert found.bottleneck_s == pytest.approx(bottleneck)
    assert found.latency_s == pytest.approx(latency)
    return bottleneck, latency


@settings(max_examples=cases(150))
@given(markets(), st.booleans(), st.booleans(), st.booleans())
def test_ordered_schedules_are_the_best_of_their_order(
    market: Market, strict: bool, first: bool, last: bool
) -> None:
    order = DeviceOrder(strict, first, last)
    best = least(market, in_order(len(market.bids), order))
    if best is None:
        for schedule in (latency_ordered, throughput_ordered):
            with pytest.raises(InfeasibleError):
                schedule(market, order)
        return
    bottleneck, latency = checked(market, throughput_ordered(market, order), order)
    assert bottleneck == pytest.approx(best[0])
    assert latency == pytest.approx(best[1])
    assert checked(market, latency_ordered(market, order), order)[1] == pytest.approx(best[2])


@settings(max_examples=cases(100))
@given(markets())
def test_the_greedy_schedule_extends_furthest_at_each_cut(market: Market) -> None:
    try:
        found = greedy_host_count(market)
    except InfeasibleError:
        return
    left = set(range(len(market.bids)))
    before: int | None = market.data_host
    for device, first, last in found.stages:
        for other in left:
            row = market.bids[other].stage_s[first]
            for further in range(last + 1, market.layers + 1):
                beyond = further == market.layers and not math.isfinite(market.to_data_s(other))
                blocked = before is not None and not math.isfinite(market.link_s(before, other)[first])
                assert beyond or blocked or math.isinf(row[further])
        left.remove(device)
        before = device
    assert costs(market, list(found.stages)) == pytest.approx((found.bottleneck_s, found.latency_s))


# Bids. ------------------------------------------------------------------------------------------------------

MODEL = ModelSpec(mem_bytes=(100.0, 200.0, 300.0, 400.0), elements_in=4, elements_out=(1, 2, 3, 4))
KIND = DeviceType(
    mem_bytes=1000.0, bw_bytes_per_s=50.0, profiles={"m": (ModelProfile(2, "torch.float32", (1, 2, 3, 4)),)}
)
CALL = Call("m", 4, microbatch_size=2)


def fits(first: int, last: int) -> bool:
    """Count by hand: weights, and two microbatches of two items of four bytes before and behind."""
    sizes = [4, 1, 2, 3, 4]
    return sum(MODEL.mem_bytes[first:last]) + 2 * 8 * sizes[first] + 2 * 8 * sizes[last] <= 1000


def bid_of(host: str = "pi") -> Bid:
    """Return a bid of the sum of the layers for stages that fit."""
    table = np.full((5, 5), np.inf)
    for first, last in itertools.combinations(range(5), 2):
        if fits(first, last):
            table[first, last] = sum((1, 2, 3, 4)[first:last])
    return Bid(host, "kind", 50.0, table)


def test_profiles_of_one_length_are_noted() -> None:
    profile = ModelProfile(
        2, "torch.float32", (1, 2, 3, 4), tokens=10, lengths=(LengthProfile(20, (2.0, 4.0, 6.0, 8.0)),)
    )
    kind = replace(KIND, profiles={"m": (profile,)})
    call = replace(CALL, tokens=20)
    assert length_note("kind", kind, call) is None
    only = replace(kind, profiles={"m": (replace(profile, lengths=()),)})
    assert length_note("kind", only, CALL) is None
    note = length_note("kind", only, call)
    assert note is not None
    assert note.startswith("kind was profiled only with 10 tokens, so its times are not scaled to 20")
    with pytest.raises(RequestError, match="--tokens 0: a sentence has at least 1 token"):
        replace(CALL, tokens=0)


@settings(max_examples=cases(60))
@given(markets())
def test_bids_survive_encoding(market: Market) -> None:
    call = Call("m", market.layers)
    for bid in market.bids:
        again = Bid.of(decode(encode(bid.offer()), Offer), call)
        assert np.array_equal(again.stage_s, bid.stage_s)
        assert (again.host, again.bw_bytes_per_s, again.links) == (bid.host, bid.bw_bytes_per_s, bid.links)


def test_filters_keep_the_stages_they_name() -> None:
    bid = bid_of()
    chunked = bid.filtered(Call("m", 4, microbatch_size=2, chunk=2)).stage_s
    assert [tuple(cell) for cell in np.argwhere(np.isfinite(chunked))] == [(0, 2), (2, 4)]
    largest = bid.filtered(Call("m", 4, microbatch_size=2, largest=True)).stage_s
    assert [tuple(cell) for cell in np.argwhere(np.isfinite(largest))] == [(0, 3), (1, 4), (2, 4), (3, 4)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stage_s": [[1.0]]}, "bids for 1 layer of a model with 4"),
        ({"stage_s": [[1.0] * 5, [], [], []]}, "beyond 4"),
        ({"stage_s": [[-1.0], [], [], []]}, r">= 0.0 - at `\$.stage_s"),
        ({"stage_s": [["1"], [], [], []]}, "Expected `float"),
        ({"host": 7}, "Expected `str`"),
        ({"host": ""}, "length >= 1"),
        ({"host": "a" * 201}, "length <= 200"),
        ({"host": "a\nb"}, "host name is not printable"),
        ({"bw_bytes_per_s": -1}, r">= 0.0 - at `\$.bw_bytes_per_s`"),
        ({"links": {"x": [-5, 0]}}, r">= 0.0 - at `\$.links"),
        ({"links": {"\x1b": [5, 0]}}, "host name is not printable"),
    ],
)
def test_an_invalid_bid_is_rejected(change: dict[str, object], said: str) -> None:
    body = json.loads(encode(bid_of().offer()))
    with pytest.raises(ValueError, match=said):
        Bid.of(decode(json.dumps({**body, **change}), Offer), CALL)


def test_a_bid_is_compared_with_the_profile() -> None:
    bid = bid_of()
    assert contradiction(bid, bid) is None
    assert contradiction(bid.filtered(Call("m", 4, microbatch_size=2, largest=True)), bid) is None
    cheaper = Bid("pi", "kind", 50.0, bid.stage_s * 0.5)
    assert contradiction(cheaper, bid) == "it says 0.5 s for layers 1-1, but the profile says 1 s"
    more = bid.stage_s.copy()
    more[0, 4] = 10
    assert (
        contradiction(Bid("pi", "kind", 50.0, more), bid)
        == "it bids for layers 1-4, which its memory cannot hold"
    )


# The sale. --------------------------------------------------------------------------------------------------


def offer(host: str, scale: float = 1.0, **change: object) -> bytes:
    bid = bid_of(host)
    body = json.loads(encode(Bid(host, "kind", 50.0, bid.stage_s * scale).offer()))
    return json.dumps({**body, **change}).encode()


def new_sale() -> Sale:
    own = bid_of("h0")
    sale = Sale(CALL, expected=lambda bid: own if bid.type_name == "kind" else None)
    sale.take(0, encode(own.offer()))
    return sale


def test_bids_of_remaining_devices_count() -> None:
    sale = new_sale()
    sale.take(2, offer("h2"))
    sale.take(1, offer("h1"))
    sale.take(1, offer("h1", scale=1 + 1e-9))  # it was lost, and has come again
    assert [(rank, bid.host) for rank, bid in sale.bids([2, 0, 1]).items()] == [
        (0, "h0"),
        (1, "h1"),
        (2, "h2"),
    ]
    assert list(sale.bids({2, 0})) == [0, 2]


@pytest.mark.parametrize(
    ("offers", "said"),
    [
        ([(1, offer("h0"))], "^ranks 0 and 1 are both named h0; give each its own"),
        ([(2, offer("h2")), (1, offer("h2"))], "^ranks 1 and 2 are both named h2; give each its own"),
        (
            [(1, offer("h1", scale=0.5))],
            r"^the bid of rank 1 \(on h1\) contradicts the profile .*: it says 0\.5 s for layers 1-1",
        ),
        ([(1, offer("h1", stage_s=[]))], r"^the bid of rank 1 \(on h1\) is invalid: bids for 0 layers"),
        ([(1, b"{}")], "^the bid of rank 1 is invalid"),
        (
            [(1, encode(NoBid("h1", "no profile")))],
            r"^rank 1 \(on h1\) cannot bid: no profile$",
        ),
        ([(1, encode(NoBid("h1", "a\nb")))], r"^rank 1 \(on h1\) cannot bid: a\\nb$"),
    ],
)
def test_a_mistake_ends_the_sale_with_one_line(offers: list[tuple[int, bytes]], said: str) -> None:
    sale = new_sale()
    for rank, body in offers[:-1]:
        sale.take(rank, body)
    with pytest.raises(RequestError, match=said):
        sale.take(*offers[-1])


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (
            Failure(FailureKind.ABSENT, "never", 3, "rank 3"),
            "rank 3 never appeared within 60 s, and is left out",
        ),
        (
            Failure(FailureKind.LATE, "late", 2, "rank 2 (on h2)"),
            "rank 2 (on h2) made no bid within 60 s, and is",
        ),
        (Failure(FailureKind.GONE, "x", 2, "rank 2 (on h2)"), "rank 2 (on h2) is gone: x; it is left out"),
    ],
)
def test_excluded_device_is_named_with_the_reason(failure: Failure, said: str) -> None:
    assert absence_line(failure, 60.0).startswith(said)


def test_mutated_messages_are_rejected_or_parsed() -> None:
    chance = random.Random(3)
    sold = Sold(("h0", "h1"), (0, 1), (1, 2, 3, 4), (0, 1), 0)
    told: list[tuple[object, Callable[[str], object]]] = [
        (CALL, lambda text: decode(text, Call)),
        (sold, lambda text: decode(text, Sold).runtime_arguments(0)),
    ]
    for _ in range(rounds(400)):
        message, read = chance.choice(told)
        with contextlib.suppress(RequestError, ValueError):
            read(json.dumps(mutate_message(json.loads(encode(message)), chance)))
        body = json.loads(chance.choice([offer("h1"), encode(NoBid("h1", "x"))]))
        refused = ""
        try:
            new_sale().take(1, json.dumps(mutate_message(body, chance)).encode())
        except RequestError as error:
            refused = str(error)
        assert refused.isprintable()


# Options. --------------------------------------------------------------------------------------------------


def test_the_batch_size_of_a_run_goes_after_run() -> None:
    with pytest.raises(RequestError, match="unknown option -b: -u gives the items of a microbatch; -b, the"):
        parse_auction(["0", "2", "-b", "64"], Environment())
    assert parse_auction(["0", "2", "-u", "4", "--run", "-b", "64"], Environment()).run == ("-b", "64")
