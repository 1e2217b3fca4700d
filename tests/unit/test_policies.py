"""Test policies on a simulated link, from a bandwidth over time to bits and rates."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.payload import TensorSpec, specs_bytes
from pipeedge.base.schedule import BIT_WIDTHS
from pipeedge.compress import wire_specs
from pipeedge.compress.policies import Decision, Policy, Sizes, State, Window, make_policy
from pipeedge.request.scheduling import ADAPTIVE

MBIT = 2**20 / 8
ITEMS = 8
PAYLOAD = (TensorSpec((ITEMS, 197, 768), torch.float32),)
SIZES = Sizes(
    {bits: specs_bytes(wire_specs(PAYLOAD, bits)) for bits in BIT_WIDTHS} | {0: specs_bytes(PAYLOAD)}
)
LENGTH = 10
"""Number of microbatches in a window."""
BANDWIDTHS = st.floats(1 * MBIT, 100_000 * MBIT)


def window(bytes_per_s: float | None, number: int = 0, compute_s: float = 0.5) -> Window:
    return Window(number, LENGTH, ITEMS, bytes_per_s, compute_s, LENGTH)


def link_rate(decision: Decision, bytes_per_s: float) -> float:
    """Return the items per second that the link carries in a window."""
    seconds = sum(SIZES.seconds(decision.bits(index), bytes_per_s) for index in range(LENGTH))
    return LENGTH * ITEMS / seconds


def settle(policy: Policy, state: State, bytes_per_s: float, windows: int, compute_s: float = 0.5) -> State:
    for number in range(windows):
        state = policy.decide(state, window(bytes_per_s, number, compute_s))
    return state


def narrowest() -> int:
    return SIZES.widths[0]


# --- with a target --------------------------------------------------------------------------------------


@given(bandwidth=BANDWIDTHS, target=st.floats(0.1, 500))
def test_heuristic_takes_widest_codes_that_reach_the_target(bandwidth: float, target: float) -> None:
    policy = make_policy("heuristic", SIZES, target)
    bits = policy.decide(policy.start(), window(bandwidth)).decision.bits(0)
    reaching = [b for b in SIZES.widths if ITEMS / SIZES.seconds(b, bandwidth) >= target]
    assert bits == (reaching[-1] if reaching else narrowest())


@given(bandwidth=BANDWIDTHS, target=st.floats(0.1, 500))
def test_heuristic2_converges_one_width_at_a_time(bandwidth: float, target: float) -> None:
    policy = make_policy("heuristic2", SIZES, target)
    state, seen = policy.start(), []
    for number in range(2 * len(SIZES.widths)):
        seen.append(SIZES.widths.index(state.decision.bits(0)))
        state = policy.decide(state, window(bandwidth, number))
    assert all(abs(after - before) <= 1 for before, after in itertools.pairwise(seen))
    assert seen[-1] == seen[-2] == seen[-3]
    reached = link_rate(state.decision, bandwidth) >= target
    assert reached or state.decision.bits(0) == narrowest()
    # Once there, more bandwidth gives bits back, with a margin.
    state = settle(policy, state, 100 * bandwidth, len(SIZES.widths))
    wider = [b for b in SIZES.widths if ITEMS / SIZES.seconds(b, 100 * bandwidth) >= 1.1 * target]
    assert not wider or SIZES.widths.index(state.decision.bits(0)) >= SIZES.widths.index(wider[-1])


@given(bandwidth=BANDWIDTHS, target=st.floats(0.1, 500))
def test_the_controller_meets_the_target_where_it_can_be_met(bandwidth: float, target: float) -> None:
    policy = make_policy("controller", SIZES, target)
    state = settle(policy, policy.start(), bandwidth, 8)
    rate = link_rate(state.decision, bandwidth)
    slowest = ITEMS / SIZES.seconds(0, bandwidth)
    fastest = ITEMS / SIZES.seconds(narrowest(), bandwidth)
    if target <= slowest:
        assert state.decision.bits(0) == state.decision.bits(LENGTH - 1) == 0
    elif target >= fastest:
        assert state.decision.bits(0) == narrowest()
    else:
        # Never below, and above by no more than one microbatch of ten in the narrower of two widths.
        assert target * 0.999 <= rate
        one_more = Decision(
            state.decision.first_bits, state.decision.first_count + 1, state.decision.then_bits, ""
        )
        assert link_rate(one_more, bandwidth) <= target * 1.001 or state.decision.first_count == 0


def test_the_controller_splits_a_window_between_two_neighbours() -> None:
    bandwidth = 50 * MBIT
    between = 0.5 * sum(ITEMS / SIZES.seconds(bits, bandwidth) for bits in (4, 5))
    policy = make_policy("controller", SIZES, between)
    decision = settle(policy, policy.start(), bandwidth, 6).decision
    assert (decision.first_bits, decision.then_bits) == (5, 4)
    assert 0 < decision.first_count < LENGTH
    bits = [decision.bits(index) for index in range(LENGTH)]
    assert bits == sorted(bits, reverse=True)


def test_the_controller_is_steadier_than_what_it_measures() -> None:
    """In every other window the measurement is off by a fifth; the estimate moves by less."""
    policy = make_policy("controller", SIZES, 10.0)
    state, found = policy.start(), []
    for number in range(40):
        pace = 50 * MBIT * (1.2 if number % 2 else 0.8)
        state = policy.decide(state, window(pace, number))
        found.append(state.base_rate)
    late = [rate for rate in found[20:] if rate is not None]
    assert max(late) / min(late) < 1.25  # of 1.5


# --- without ----------------------------------------------------------------------------------------------

COMPUTE_S = 0.45


def throughput(bits: int, bandwidth: float) -> float:
    return ITEMS / max(COMPUTE_S, SIZES.seconds(bits, bandwidth))


@settings(max_examples=200)
@given(trace=st.lists(BANDWIDTHS, min_size=1, max_size=6))
def test_auto_is_within_a_tenth_of_the_best_fixed_width_in_every_segment(trace: list[float]) -> None:
    """This holds from the second window of a segment on."""
    policy = make_policy("auto", SIZES, 0.0)
    state = policy.start()
    for bandwidth in trace:
        state = policy.decide(state, window(bandwidth, compute_s=COMPUTE_S))
        best = max(throughput(bits, bandwidth) for bits in SIZES.widths)
        for _ in range(3):
            assert throughput(state.decision.bits(0), bandwidth) >= 0.9 * best
            state = policy.decide(state, window(bandwidth, compute_s=COMPUTE_S))


def test_auto_widens_again_without_wasting_bits() -> None:
    """QuantPipe's trace: unlimited, 500, 50, 250 Mbit/s, unlimited."""
    policy = make_policy("auto", SIZES, 0.0)
    state, found = policy.start(), []
    for mbps in (100_000, 500, 50, 250, 100_000):
        state = settle(policy, state, mbps * MBIT, 2, COMPUTE_S)
        found.append(state.decision.bits(0))
    assert found == [0, 0, 16, 0, 0]
    assert SIZES.seconds(found[2], 50 * MBIT) <= COMPUTE_S
    wider = SIZES.widths[SIZES.widths.index(found[2]) + 1]
    assert SIZES.seconds(wider, 50 * MBIT) > 0.85 * COMPUTE_S


def test_auto_does_not_oscillate_with_noise() -> None:
    """The measurement is off by 4 % either way, at the point where a width stops fitting."""
    policy = make_policy("auto", SIZES, 0.0)
    edge = SIZES.bytes_at[6] / (0.95 * COMPUTE_S)
    state = policy.start()
    bits = []
    for number in range(20):
        state = policy.decide(state, window(edge * (1.04 if number % 2 else 0.96), compute_s=COMPUTE_S))
        bits.append(state.decision.bits(0))
    assert len(set(bits[1:])) == 1


# --- all --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_missing_measurement_changes_nothing(name: str) -> None:
    policy = make_policy(name, SIZES, 10.0)
    state = policy.start()
    assert policy.decide(state, window(None)) == state
    assert state.decision.bits(0) == 0


@pytest.mark.parametrize("name", ADAPTIVE)
def test_every_decision_has_a_reason_of_one_line(name: str) -> None:
    policy = make_policy(name, SIZES, 10.0)
    state = settle(policy, policy.start(), 20 * MBIT, 3)
    assert state.decision.reason
    assert "\n" not in state.decision.reason


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("pid", 1.0),
        ("controller", -2.0),
        ("heuristic2", 0.0),
        ("heuristic", math.nan),
        ("heuristic", math.inf),
    ],
)
def test_invalid_policies_are_refused(name: str, target: float) -> None:
    with pytest.raises(ValueError, match=r"policy|target"):
        make_policy(name, SIZES, target)


def test_the_controller_splits_the_next_window_however_long_the_last_one_was() -> None:
    bandwidth = 50 * MBIT
    policy = make_policy("controller", SIZES, 0.5 * sum(ITEMS / SIZES.seconds(b, bandwidth) for b in (4, 5)))
    state = settle(policy, policy.start(), bandwidth, 6)
    short = Window(6, 2, ITEMS, bandwidth, 0.5, LENGTH)
    decision = policy.decide(state, short).decision
    assert 2 < decision.first_count < LENGTH
    assert decision == policy.decide(state, window(bandwidth, 6)).decision
