"""Divide the layers into stages, as ``sched-pipeline`` decides.

The pipeline is as fast as its slowest worker, so the scheduler minimises the bottleneck over as many
identical hosts as there are workers; if workers have neighbouring stages, the layers of each are then divided
again in the same way. A layer needs this much of a worker's memory:

    parameters x (1 + gradient + optimizer's state) + activations x microbatches held
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from pipeedge.base.errors import InfeasibleError, ScheduleError
from pipeedge.base.schedule import LayerRange, Schedule
from pipeedge.base.wording import count
from pipeedge.plan import scheduler
from pipeedge.plan.problem import HostKind, LayerSizes, Problem, SolverOptions
from pipeedge.train.costs import LayerCosts
from pipeedge.train.orders import Order

__all__ = ["STATE_COPIES", "check_partition", "check_stages", "find_partition"]

STATE_COPIES: Mapping[str, int] = MappingProxyType({"sgd": 0, "adamw": 2})
"""Number of values that each optimizer keeps per parameter."""

_MB = 1 << 20
_TIME_LIMIT_S = 10.0


def check_partition(partition: Sequence[int], n_layers: int) -> tuple[LayerRange, ...]:
    """Return the layers of each stage, from the flat 1-based list of ``--partition``.

    Raises:
        ScheduleError: Layers are missing, overlap or go beyond the network.
    """
    schedule = Schedule.from_partition(partition)
    schedule.check(n_layers=n_layers, world_size=len(schedule.stages))
    return tuple(stage.layers for stage in schedule.stages)


def check_stages(stages: int, n_layers: int) -> None:
    """Check that each stage can have a layer.

    Raises:
        ScheduleError: There are more stages than layers.
    """
    if stages > n_layers:
        raise ScheduleError(
            f"{count(stages, 'stage')} need at least {count(stages, 'layer')}, but the model has {n_layers}; "
            "lower --stages"
        )


def find_partition(
    costs: LayerCosts, order: Order, *, optimizer: str, memory_bytes: float
) -> tuple[LayerRange, ...]:
    """Return the partition with the fastest slowest worker.

    Args:
        costs: Costs of each layer.
        order: Placement of the stages, and the microbatches they hold.
        optimizer: Name of the optimizer.
        memory_bytes: Memory that the layers of a worker may use, in bytes.

    Raises:
        ScheduleError: There are more stages than layers.
        InfeasibleError: No partition fits into memory.
    """
    layers = len(costs.seconds)
    check_stages(order.stages, layers)
    held = max(order.held(worker) for worker in range(order.workers))
    copies = 2 + STATE_COPIES[optimizer]
    memory = np.array(costs.parameter_bytes) * copies + np.array(costs.activation_bytes) * held
    core = _Core(np.array(costs.seconds), memory, np.array(costs.crossing_bytes), held)
    everything = LayerRange(0, layers)
    shares = [len(order.stages_of(worker)) for worker in range(order.workers)]
    neighbours = all(
        order.stages_of(w)[-1] - order.stages_of(w)[0] + 1 == shares[w] for w in range(order.workers)
    )
    if neighbours:
        blocks = core.cut(everything, order.workers, memory_bytes)
        if all(len(block) >= share for block, share in zip(blocks, shares, strict=True)):
            inner = (
                core.cut(block, share, memory_bytes) for block, share in zip(blocks, shares, strict=True)
            )
            return tuple(stage for block in inner for stage in block)
    return core.cut(everything, order.stages, memory_bytes / max(shares))


class _Core:
    """Divides layers among identical hosts, as the scheduler decides."""

    def __init__(self, seconds: np.ndarray, memory: np.ndarray, crossing: np.ndarray, held: int) -> None:
        self._seconds = seconds
        self._memory = memory
        self._crossing = crossing
        self._held = held

    def cut(self, layers: LayerRange, parts: int, memory_bytes: float) -> tuple[LayerRange, ...]:
        """Divide ``layers`` into exactly ``parts`` parts."""
        inside = slice(layers.start, layers.stop)
        problem = Problem(
            layers=LayerSizes(
                weight_bytes=tuple(self._memory[inside].tolist()),
                elements_in=0.0,
                elements_out=tuple(self._crossing[inside].tolist()),
                element_bytes=1.0,
            ),
            kinds=(
                HostKind(
                    "worker",
                    memory_bytes,
                    # Links are not counted: gloo sends a cut in a hundredth of the time to compute it.
                    bw_bytes_per_s=1e15,
                    time_s=tuple(self._seconds[inside].tolist()),
                ),
            ),
            hosts={str(worker): "worker" for worker in range(parts)},
            buffers=(0.0, float(self._held)),
            options=SolverOptions(time_limit_s=_TIME_LIMIT_S),
        )
        try:
            found = scheduler.solve(problem).schedule.stages
        except InfeasibleError:
            least = self._memory[inside].sum() / parts / _MB
            raise InfeasibleError(
                f"no partition of {count(len(self._seconds), 'layer')} into {count(parts, 'part')} fits "
                f"into the {memory_bytes / _MB:.0f} MB that a worker has besides the program itself; about "
                f"{least:.0f} MB are needed: use more workers, smaller microbatches or schedule 1f1b, or "
                "allow more with --memory"
            ) from None
        ranges = [
            LayerRange(layers.start + stage.layers.start, layers.start + stage.layers.stop) for stage in found
        ]
        return self._exactly(ranges, parts)

    def _exactly(self, found: list[LayerRange], parts: int) -> tuple[LayerRange, ...]:
        """Split the longest parts until there are ``parts``: the scheduler uses only hosts that help."""
        while len(found) < parts:
            longest = max((part for part in found if len(part) > 1), key=self._length)
            half = min(
                range(longest.start + 1, longest.stop),
                key=lambda cut: max(
                    self._length(LayerRange(longest.start, cut)), self._length(LayerRange(cut, longest.stop))
                ),
            )
            place = found.index(longest)
            found[place : place + 1] = [LayerRange(longest.start, half), LayerRange(half, longest.stop)]
        return tuple(found)

    def _length(self, part: LayerRange) -> float:
        return float(self._seconds[part.start : part.stop].sum())
