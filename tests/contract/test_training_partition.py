"""Test partitions: optimal by exhaustive search, within memory, with exactly the requested stages."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import pytest
import torch
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeedge.base.errors import InfeasibleError, ScheduleError
from pipeedge.base.payload import TensorSpec
from pipeedge.base.schedule import LayerRange
from pipeedge.train.costs import LayerCosts, measure_costs
from pipeedge.train.dropout import Position
from pipeedge.train.networks import StageModule, Vgg
from pipeedge.train.orders import Order, make_order
from pipeedge.train.partition import check_partition, find_partition

PLENTY = 1e15


def costs_of(seconds: Sequence[float]) -> LayerCosts:
    nothing = [0] * len(seconds)
    return LayerCosts(list(seconds), nothing, nothing, nothing)


def every_cut(layers: int, parts: int) -> list[tuple[LayerRange, ...]]:
    found = []
    for inner in itertools.combinations(range(1, layers), parts - 1):
        bounds = (0, *inner, layers)
        found.append(tuple(LayerRange(a, b) for a, b in itertools.pairwise(bounds)))
    return found


def slowest(seconds: Sequence[float], order: Order, layers: Sequence[LayerRange]) -> float:
    """Return the time of the slowest worker."""
    of = [0.0] * order.workers
    for stage, part in enumerate(layers):
        of[order.placement[stage]] += sum(seconds[part.start : part.stop])
    return max(of)


def find(costs: LayerCosts, order: Order, **changes: float) -> tuple[LayerRange, ...]:
    options = {"optimizer": "sgd", "memory_bytes": PLENTY, **changes}
    return find_partition(costs, order, **options)


@given(st.lists(st.floats(0.01, 1.0), min_size=4, max_size=9), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=cases(80))
def test_no_cut_has_a_faster_slowest_worker(seconds: list[float], workers: int, more: int) -> None:
    stages = min(workers + more, len(seconds))
    order = make_order("1f1b", stages=stages, workers=workers, microbatches=4)
    found = find(costs_of(seconds), order)
    assert len(found) == stages
    assert found[0].start == 0
    assert found[-1].stop == len(seconds)
    assert all(before.stop == after.start for before, after in itertools.pairwise(found))
    if stages == workers:
        best = min(slowest(seconds, order, cut) for cut in every_cut(len(seconds), stages))
        assert slowest(seconds, order, found) <= best * (1 + 1e-6)


def test_neighbouring_stages_balance_their_worker() -> None:
    order = make_order("gpipe", stages=4, workers=2, microbatches=4)
    found = find(costs_of([4, 1, 1, 1, 1, 2, 2, 2, 1, 1]), order)
    assert found == tuple(LayerRange(a, b) for a, b in ((0, 1), (1, 5), (5, 7), (7, 10)))


def test_memory_moves_the_cut_and_may_not_suffice() -> None:
    """Two layers are fast and large: GPipe holds all their activations, 1F1B those of two microbatches."""
    activations = [100, 100, 1, 1, 1, 1]
    costs = LayerCosts([1, 1, 1, 1, 2, 2], [0] * 6, activations, [0] * 6)

    def cut(schedule: str, memory: float) -> int:
        order = make_order(schedule, stages=2, workers=2, microbatches=8)
        return find(costs, order, memory_bytes=memory)[0].stop

    assert cut("1f1b", 450) == 4
    assert cut("gpipe", 2000) == 4
    assert cut("gpipe", 850) == 1
    with pytest.raises(InfeasibleError, match="no partition of 6 layers into 2 parts"):
        cut("gpipe", 700)


def test_optimizer_state_counts_as_memory() -> None:
    costs = LayerCosts([1, 1], [100, 100], [0, 0], [0, 0])
    order = make_order("1f1b", stages=2, workers=2, microbatches=2)
    assert len(find(costs, order, memory_bytes=200)) == 2
    with pytest.raises(InfeasibleError):
        find(costs, order, memory_bytes=200, optimizer="adamw")


def test_more_stages_than_layers_are_rejected() -> None:
    order = make_order("1f1b", stages=3, workers=2, microbatches=2)
    with pytest.raises(ScheduleError, match="3 stages need at least 3 layers, but the model has 2"):
        find(costs_of([1, 1]), order)
    with pytest.raises(ScheduleError, match="beyond the model"):
        check_partition((1, 2, 3, 4), 3)


def test_measured_bytes_of_activations_and_parameters() -> None:
    network = Vgg(widths=(4, None), side=8, hidden=6, classes=5)
    costs = measure_costs(network, 2, 8)
    assert len(costs.seconds) == network.n_layers == 10
    assert all(seconds > 0 for seconds in costs.seconds)
    image, features = 2 * 3 * 8 * 8 * 4, 2 * 4 * 8 * 8 * 4
    assert costs.parameter_bytes[0] == (4 * 3 * 9 + 4) * 4
    assert costs.activation_bytes[0] == image
    assert costs.activation_bytes[1] == features  # a ReLU keeps its output
    assert costs.crossing_bytes[:3] == [features, features, features // 4]
    assert costs.parameter_bytes[3] == (4 * 4 * 4 * 6 + 6) * 4


def test_measuring_frees_all_memory() -> None:
    """A node that keeps its own result, like that of a ReLU, is freed with the result."""
    results = []

    class Relu(StageModule):
        def forward(self, *payload: torch.Tensor) -> torch.Tensor:
            result = payload[0].relu()
            results.append(weakref.ref(result))
            return result

    class Relus(Vgg):
        n_layers = 2

        def crossing(self, after_layer: int, items: int) -> tuple[TensorSpec, ...]:
            return (TensorSpec((items, 5), torch.float32),)

        def build(self, layers: LayerRange) -> StageModule:
            return Relu(Position())

    measure_costs(Relus(), 2, 8)
    assert len(results) > 4
    assert all(result() is None for result in results)
