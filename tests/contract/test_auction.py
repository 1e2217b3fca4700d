"""The auction: schedulers against exhaustive search, the rules of the sale, and real bidders."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import mutate_message, rounds
from places import ROOT
from processes import free_port

from pipeedge.auction.market import Bid, Call, Market, bid_of, contradiction, length_note
from pipeedge.auction.optimal import optimal
from pipeedge.auction.options import parse_auction
from pipeedge.auction.ordered import Order, Outcome, greedy_host_count, latency_ordered, throughput_ordered
from pipeedge.auction.sale import Sale, Sold
from pipeedge.base.errors import InfeasibleError, RequestError
from pipeedge.base.fields import MALFORMED
from pipeedge.control.messages import Message, encode
from pipeedge.plan.specs import DeviceType, LengthProfile, Link, ModelProfile, ModelSpec

# Exhaustive search in plain Python, from the definition. --------------------------------------------------


def every_schedule(devices: Sequence[int], layers: int) -> Iterator[list[tuple[int, int, int]]]:
    """Return all ways to divide the layers among exactly these devices, in this order."""
    for cuts in itertools.combinations(range(1, layers), len(devices) - 1):
        bounds = [0, *cuts, layers]
        yield [(device, bounds[at], bounds[at + 1]) for at, device in enumerate(devices)]


def costs(market: Market, schedule: list[tuple[int, int, int]]) -> tuple[float, float]:
    """Return the bottleneck and latency of one schedule."""

    def message(a: int, b: int, cut: int) -> float:
        if a == b:
            return 0.0
        one, two = market.bids[a], market.bids[b]
        slower = min(one.bw_bytes_per_s, two.bw_bytes_per_s)
        link = one.links.get(two.host, two.links.get(one.host, Link(slower)))
        size = float(market.cut_bytes[cut])
        if size == 0:
            return link.latency_s
        return size / link.bw_bytes_per_s + link.latency_s if link.bw_bytes_per_s else math.inf

    parts = [float(market.bids[device].stage_s[first, last]) for device, first, last in schedule]
    parts += [message(a[0], b[0], b[1]) for a, b in itertools.pairwise(schedule)]
    if market.data_host is not None:
        parts.append(message(market.data_host, schedule[0][0], 0))
        parts.append(message(schedule[-1][0], market.data_host, schedule[-1][2]))
    return max(parts), sum(parts)


def in_order(count: int, order: Order) -> Iterator[tuple[int, ...]]:
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


def least(market: Market, choices: Iterator[tuple[int, ...]]) -> tuple[float, float, float] | None:
    """Return the least bottleneck, the least latency with it, and the least latency of all."""
    found = [
        cost
        for devices in choices
        for schedule in every_schedule(devices, market.layers)
        if math.isfinite((cost := costs(market, schedule))[0])
    ]
    if not found:
        return None
    bottleneck = min(cost[0] for cost in found)
    return (
        bottleneck,
        min(cost[1] for cost in found if cost[0] <= bottleneck * (1 + 1e-9)),
        min(cost[1] for cost in found),
    )


@st.composite
def markets(draw: st.DrawFn) -> Market:
    """Draw bids of all kinds: sums of layers or arbitrary, with holes, filtered; with links or without."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    layers, count = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    additive, holes = draw(st.booleans()), draw(st.sampled_from([0.0, 0.2, 0.5]))
    call = Call("m", layers, chunk=draw(st.integers(1, min(2, layers))), largest=draw(st.booleans()))
    bids: list[Bid] = []
    for device in range(count):
        sums = np.concatenate(([0.0], np.cumsum(rng.uniform(0.1, 1, layers))))
        seconds = sums[None, :] - sums[:, None] if additive else rng.uniform(0.1, 2, (layers + 1, layers + 1))
        ends = np.arange(layers + 1)
        seconds = np.where(ends[:, None] < ends[None, :], seconds, np.inf)
        seconds[rng.random(seconds.shape) < holes] = np.inf
        if device and draw(st.booleans()):
            seconds, bandwidth = bids[0].stage_s, bids[0].bw_bytes_per_s  # identical to the solver
        else:
            bandwidth = float(rng.choice([0, 1, 3, 10]) if rng.random() < 0.3 else rng.uniform(1, 10))
        links = {
            f"h{other}": Link(float(rng.choice([0.0, 2.0, 20.0])), float(rng.choice([0.0, 0.1])))
            for other in range(count)
            if other != device and draw(st.booleans()) and rng.random() < 0.5
        }
        bids.append(Bid(f"h{device}", "t", bandwidth, seconds, links).filtered(call))
    cut_bytes = rng.choice([0.0, 1.0, 2.0, 5.0], layers + 1)
    return Market(tuple(bids), cut_bytes, 8, draw(st.sampled_from([None, 0, count - 1])))


def checked(market: Market, found: Outcome, order: Order) -> tuple[float, float]:
    """Return the schedule's cost by the oracle, after checking that the order allows it."""
    assert tuple(device for device, _, _ in found.stages) in set(in_order(len(market.bids), order))
    bottleneck, latency = costs(market, list(found.stages))
    assert found.bottleneck_s == pytest.approx(bottleneck)
    assert found.latency_s == pytest.approx(latency)
    return bottleneck, latency


@settings(deadline=None, max_examples=150)
@given(markets(), st.booleans(), st.booleans(), st.booleans())
def test_ordered_schedules_are_the_best_of_their_order(
    market: Market, strict: bool, first: bool, last: bool
) -> None:
    order = Order(strict, first, last)
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


@settings(deadline=None, max_examples=40)
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


@settings(deadline=None, max_examples=100)
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
CALL = Call("m", 4, ubatch_size=2)


def fits(first: int, last: int) -> bool:
    """Count by hand: weights, and two microbatches of two items of four bytes before and behind."""
    sizes = [4, 1, 2, 3, 4]
    return sum(MODEL.mem_bytes[first:last]) + 2 * 8 * sizes[first] + 2 * 8 * sizes[last] <= 1000


def test_a_device_bids_the_sum_of_its_layers_for_stages_that_fit() -> None:
    bid = bid_of("pi", "kind", KIND, {}, MODEL, CALL)
    for first in range(5):
        for last in range(5):
            if first < last and fits(first, last):
                assert bid.stage_s[first, last] == pytest.approx(sum((1, 2, 3, 4)[first:last]))
            else:
                assert math.isinf(bid.stage_s[first, last])
    assert math.isinf(bid.stage_s[0, 4]), "the case would show nothing otherwise"


def test_a_bid_is_for_the_tokens_of_the_call() -> None:
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
    call = Call.from_body(replace(CALL, tokens=20).to_body())
    assert bid_of("pi", "kind", kind, {}, model, call).stage_s[0, 4] == pytest.approx(20)
    assert bid_of("pi", "kind", kind, {}, model, CALL).stage_s[0, 4] == pytest.approx(10)
    market = Market.of([bid_of("pi", "kind", kind, {}, model, call)], model, call, None)
    assert market.cut_bytes.tolist() == [8 * elements for elements in (20, 20, 40, 60, 80)]
    # Weights of 1000 bytes and the larger buffers no longer fit.
    small = replace(kind, mem_bytes=1000 + 16 * (10 + 40))
    assert math.isfinite(bid_of("pi", "kind", small, {}, model, CALL).stage_s[0, 4])
    assert math.isinf(bid_of("pi", "kind", small, {}, model, call).stage_s[0, 4])

    assert length_note("kind", kind, call) is None
    only = replace(kind, profiles={"m": (replace(profile, lengths=()),)})
    assert length_note("kind", only, CALL) is None
    note = length_note("kind", only, call)
    assert note is not None
    assert note.startswith("kind was profiled only with 10 tokens, so its times are not scaled to 20")
    with pytest.raises(RequestError, match="--tokens 0: a sentence has at least 1 token"):
        replace(CALL, tokens=0)


def test_a_bid_counts_what_the_scheduler_counts() -> None:
    """Link handling and activations are counted if the profile has them; the original's has not."""
    receive, send = [7.0, 0.1, 0.2, 0.3], [0.4, 0.5, 0.6, 7.0]
    extra = {"receive_s": receive, "send_s": send, "activations_MB": [0, 0, 300 / 2**20, 0]}
    profile = ModelProfile(2, "torch.float32", (1, 2, 3, 4), extra)
    kind = DeviceType(1000.0, 50.0, {"m": (profile,)})
    bid = bid_of("pi", "kind", kind, {}, MODEL, CALL)
    sizes = [4, 1, 2, 3, 4]
    for first, last in itertools.combinations(range(5), 2):
        held = sum(MODEL.mem_bytes[first:last]) + 16 * sizes[first] + 16 * sizes[last]
        held += 300 if first <= 2 < last else 0
        seconds = sum((1, 2, 3, 4)[first:last]) + (receive[first] if first else 0)
        seconds += send[last - 1] if last < 4 else 0
        expected = seconds if held <= 1000 else math.inf
        assert bid.stage_s[first, last] == pytest.approx(expected)


@settings(deadline=None, max_examples=60)
@given(markets())
def test_bids_survive_encoding(market: Market) -> None:
    call = Call("m", market.layers)
    for bid in market.bids:
        again = Bid.from_body(bid.to_body(), call)
        assert np.array_equal(again.stage_s, bid.stage_s)
        assert (again.host, again.bw_bytes_per_s, again.links) == (bid.host, bid.bw_bytes_per_s, bid.links)


def test_filters_keep_the_stages_they_name() -> None:
    bid = bid_of("pi", "kind", KIND, {}, MODEL, CALL)
    chunked = bid.filtered(Call("m", 4, ubatch_size=2, chunk=2)).stage_s
    assert [tuple(cell) for cell in np.argwhere(np.isfinite(chunked))] == [(0, 2), (2, 4)]
    largest = bid.filtered(Call("m", 4, ubatch_size=2, largest=True)).stage_s
    assert [tuple(cell) for cell in np.argwhere(np.isfinite(largest))] == [(0, 3), (1, 4), (2, 4), (3, 4)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stage_s": [[1.0]]}, "bids for 1 layer of a model with 4"),
        ({"stage_s": [[1.0] * 5, [], [], []]}, "beyond 4"),
        ({"stage_s": [[-1.0], [], [], []]}, "negative"),
        ({"host": 7}, "host name is missing"),
        ({"host": ""}, "host name is missing"),
        ({"host": "a\nb"}, "host name is missing"),
        ({"bw_bytes_per_s": -1}, "negative"),
        ({"links": {"x": [-5, 0]}}, "negative"),
    ],
)
def test_an_invalid_bid_is_rejected(change: dict[str, object], said: str) -> None:
    body = bid_of("pi", "kind", KIND, {}, MODEL, CALL).to_body()
    with pytest.raises(ValueError, match=said):
        Bid.from_body({**body, **change}, CALL)


def test_a_bid_is_compared_with_the_profile() -> None:
    bid = bid_of("pi", "kind", KIND, {}, MODEL, CALL)
    assert contradiction(bid, bid) is None
    assert contradiction(bid.filtered(Call("m", 4, ubatch_size=2, largest=True)), bid) is None
    cheaper = Bid("pi", "kind", 50.0, bid.stage_s * 0.5)
    assert contradiction(cheaper, bid) == "it says 0.5 s for layers 1-1, but the profile says 1 s"
    more = bid.stage_s.copy()
    more[0, 4] = 10
    assert (
        contradiction(Bid("pi", "kind", 50.0, more), bid)
        == "it bids for layers 1-4, which its memory cannot hold"
    )


# The sale. --------------------------------------------------------------------------------------------------


def hello(rank: int, host: str, world: int = 3) -> Message:
    return Message("hello", {"rank": rank, "world": world, "host": host})


def offer(host: str, scale: float = 1.0, **change: object) -> Message:
    bid = bid_of(host, "kind", KIND, {}, MODEL, CALL)
    body = Bid(host, "kind", 50.0, bid.stage_s * scale).to_body()
    return Message("bid", {**body, **change})


def new_sale() -> Sale:
    own = bid_of("h0", "kind", KIND, {}, MODEL, CALL)
    return Sale(CALL, world_size=3, own=own, expected=lambda bid: own if bid.type_name == "kind" else None)


def test_a_sale_is_over_when_all_have_bid_or_are_gone() -> None:
    sale = new_sale()
    ((number, call),) = sale.received(7, hello(2, "h2"))
    assert (number, call.kind, Call.from_body(call.body)) == (7, "call", CALL)
    assert not sale.received(7, offer("h2"))
    assert not sale.over
    assert sale.silent() == ["rank 1 never appeared"]
    sale.received(8, hello(1, "h1"))
    assert sale.silent() == ["rank 1 (on h1) made no bid"]
    sale.closed(8)
    assert sale.over
    assert sale.silent() == ["rank 1 (on h1) is gone"]
    assert list(sale.bids()) == [0, 2]
    assert sale.bidders() == {7: 2}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([hello(1, "h0")], "ranks 0 and 1 are both named h0; give each its own"),
        ([hello(1, "h1", world=4)], "rank 1 on h1 was started with WORLD 4, rank 0 with 3"),
        (
            [hello(1, "h1"), offer("h1", scale=0.5)],
            r"contradicts the profile .*: it says 0\.5 s for layers 1-1",
        ),
        ([hello(1, "h1"), offer("h1", stage_s=[])], r"rank 1 \(on h1\) is invalid: bids for 0 layers"),
        ([hello(1, "h1"), offer("h9")], "it is the bid of h9"),
        ([hello(1, "h1"), Message("bid", {})], "is invalid"),
        ([hello(1, "h1"), offer("h1"), offer("h1")], "a second bid"),
        (
            [hello(1, "h1"), Message("failed", {"line": "no profile\nhere", "exit_code": 2})],
            r"rank 1 \(on h1\) cannot bid: no profile\\nhere",
        ),
    ],
)
def test_a_mistake_ends_the_sale_with_one_line(messages: list[Message], said: str) -> None:
    sale = new_sale()
    for message in messages:
        sale.received(7, message)
    assert sale.over
    with pytest.raises(RequestError, match=said):
        raise sale.error  # type: ignore[misc]


def test_strangers_change_nothing() -> None:
    sale = new_sale()
    for body in ({}, {"rank": -1, "world": 3, "host": "x"}, {"rank": "1", "world": 3, "host": "x"}):
        ((_, answer),) = sale.received(5, Message("hello", body))
        assert answer.kind == "verdict"
    ((_, answer),) = sale.received(6, Message("bid", {}))
    assert answer.kind == "verdict"
    ((_, answer),) = sale.received(6, hello(0, "other"))
    assert "rank 0 is already there" in answer.body["line"]
    sale.received(7, hello(1, "h1"))
    for rank, world, said in ((1, 2, "already there, on h1"), (5, 9, "outside the world of 3")):
        ((_, answer),) = sale.received(8, hello(rank, "other", world=world))
        assert said in answer.body["line"]
    assert sale.error is None


def test_mutated_messages_are_rejected_or_parsed() -> None:
    chance = random.Random(3)
    sold = Sold(("h0", "h1"), (0, 1), (1, 2, 3, 4), (0, 1), 0)
    told: list[tuple[dict[str, Any], Callable[[dict[str, Any]], object]]] = [
        (dict(CALL.to_body()), Call.from_body),
        (dict(offer("h1").body), lambda body: Bid.from_body(body, CALL)),
        (json.loads(json.dumps(sold.message().body)), lambda body: Sold.from_body(body).runtime_arguments(0)),
    ]
    for _ in range(rounds(400)):
        body, read = chance.choice(told)
        with contextlib.suppress(RequestError, *MALFORMED):
            read(mutate_message(body, chance))
        sale = new_sale()
        said = (dict(hello(1, "h1").body), dict(offer("h1").body), {"line": "x", "exit_code": 2})
        for kind, body in zip(("hello", "bid", "failed"), said, strict=True):
            sale.received(7, Message(kind, mutate_message(body, chance) if chance.random() < 0.5 else body))
        assert sale.error is None or str(sale.error).isprintable()


# Real bidders. ----------------------------------------------------------------------------------------------


def write_files(directory: Path) -> None:
    times = [0.01, 0.02, 0.01, 0.02] * 4
    kinds = {
        name: {
            "bw_Mbps": 1000,
            "mem_MB": 100,
            "model_profiles": {
                "vit-digits": [
                    {"dtype": "torch.float32", "batch_size": 8, "time_s": [factor * time for time in times]}
                ]
            },
        }
        for name, factor in (("quick", 1), ("slow", 2))
    }
    spec = {"layers": 16, "mem_MB": [1.0] * 16, "parameters_in": 64, "parameters_out": [100] * 16}
    (directory / "models.yml").write_text(yaml.safe_dump({"vit-digits": spec}))
    (directory / "device_types.yml").write_text(yaml.safe_dump(kinds))


def start(directory: Path, port: int, rank: int, world: int, *options: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "revauct.py"), str(rank), str(world), "--port", str(port)]
    return subprocess.Popen(
        [*command, "-m", "vit-digits", *map(str, options)],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def outcomes(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        said = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, out, err) for process, (out, err) in zip(processes, said, strict=True)]


def test_bids_become_a_schedule_that_runs(tmp_path: Path) -> None:
    write_files(tmp_path)
    port = free_port()
    kinds = ("slow", "quick", "quick")
    common = ("--output", "schedule.yml", "-sch", "optimal", "--run", "-b", "24", "--report", "report.json")
    processes = [
        start(tmp_path, port, rank, 3, "-H", f"h{rank}", "-dt", kind, *common)
        for rank, kind in enumerate(kinds)
    ]
    ended = outcomes(processes)
    assert [status for status, _, _ in ended] == [0, 0, 0], ended
    schedule = yaml.safe_load((tmp_path / "schedule.yml").read_text())
    assert ended[0][1].startswith((tmp_path / "schedule.yml").read_text())
    layers = {host: last - first + 1 for stage in schedule for host, (first, last) in stage.items()}
    # 240 ms in total: with 90 on each quick device, 60 are left, which take the slow one 120.
    assert "a microbatch of 8 every 0.1 s" in ended[0][2]
    assert layers["h1"] > layers["h0"] < layers["h2"]
    report = (tmp_path / "report.json").read_text()
    assert '"items": 24' in report


def test_a_silent_bidder_is_left_out_and_named(tmp_path: Path) -> None:
    write_files(tmp_path)
    port = free_port()
    options = ("--deadline", "6", "-dt", "quick")
    processes = [start(tmp_path, port, rank, 4, *options, "-H", f"h{rank}") for rank in range(2)]
    silent = None
    while silent is None:
        try:
            silent = socket.create_connection(("127.0.0.1", port), timeout=1)
        except ConnectionRefusedError:
            assert processes[0].poll() is None
    with silent:
        silent.sendall(encode(hello(2, "h2", world=4)))
        ended = outcomes(processes)
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert "rank 2 (on h2) made no bid within 6 s, and is left out" in ended[0][2]
    assert "rank 3 never appeared within 6 s, and is left out" in ended[0][2]
    assert [*yaml.safe_load(ended[0][1])] == [{"h0": [1, 8]}, {"h1": [9, 16]}]
    assert "h1 gets layers 9-16 (stage 1)" in ended[1][2]


@pytest.mark.parametrize(
    ("own", "status", "said"),
    [
        (("-H", "h0", "-dt", "quick"), 2, "both named h0"),
        (("-H", "h1", "-dt", "none"), 2, "device_types.yml has quick, slow"),
        (("-H", "h1"), 2, "has 2 device types: give this device's with -dt/--dev-type, one of quick, slow"),
    ],
)
def test_a_bidders_mistake_is_reported_on_both_sides(
    tmp_path: Path, own: tuple[str, ...], status: int, said: str
) -> None:
    write_files(tmp_path)
    port = free_port()
    auctioneer = start(tmp_path, port, 0, 2, "-H", "h0", "-dt", "quick", "--output", "schedule.yml")
    ended = outcomes([auctioneer, start(tmp_path, port, 1, 2, *own)])
    for code, out, err in ended:
        assert (code, out) == (status, "")
        assert said in err
        assert len(err.splitlines()) == 1
    assert not (tmp_path / "schedule.yml").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--filter-bids-chunk", "17"), "must be 1 to 16"),
        (("-d", "0"), "-d/--dev-count 0: must be at least 1"),
        (("-d", "2"), "only 1 device made a bid"),
        (("-D", "elsewhere"), "-D/--data-host elsewhere made no bid"),
        (("--deadline", "0"), "--timeout 0"),
        (("-u", "4"), "has no profile of vit-digits with microbatches of 4"),
        (("--output", "no/where.yml"), "the directory no does not exist"),
        (("-sch", "luck"), "invalid choice"),
    ],
)
def test_a_mistake_gets_one_line(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    write_files(tmp_path)
    ((status, out, err),) = outcomes(
        [start(tmp_path, free_port(), 0, 1, "-H", "h0", "-dt", "quick", *options)]
    )
    assert (status, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_the_batch_size_of_a_run_goes_after_run() -> None:
    with pytest.raises(RequestError, match="unknown option -b: -u gives the items of a microbatch; -b, the"):
        parse_auction(["0", "2", "-b", "64"])
    assert parse_auction(["0", "2", "-u", "4", "--run", "-b", "64"]).run == ("-b", "64")
