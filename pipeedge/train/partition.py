"""Which layers make which stage, as ``sched-pipeline`` decides.

The pipeline is as fast as its slowest worker, so the core is asked for the least bottleneck over as many
hosts, all alike, as there are workers; where workers have neighbouring stages, each one's layers are then
cut again in the same way. What a layer takes of a worker's memory:

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
"""Values that an optimizer keeps for each parameter."""

_MB = 1 << 20
_TIME_LIMIT_S = 10.0


def check_partition(partition: Sequence[int], n_layers: int) -> tuple[LayerRange, ...]:
    """The layers of each stage, from the flat 1-based list of ``--partition``.

    Raises:
        ScheduleError: layers uncovered, overlapping or beyond the network.
    """
    schedule = Schedule.from_partition(partition)
    schedule.check(n_layers=n_layers, world_size=len(schedule.stages))
    return tuple(stage.layers for stage in schedule.stages)


def check_stages(stages: int, n_layers: int) -> None:
    """Whether each stage can have a layer.

    Raises:
        ScheduleError: more stages than layers.
    """
    if stages > n_layers:
        raise ScheduleError(
            f"{count(stages, 'stage')} for {count(n_layers, 'layer')} go beyond the model: a stage "
            "needs at least one; "
            "lower --stages"
        )


def find_partition(
    costs: LayerCosts, order: Order, *, optimizer: str, memory_bytes: float
) -> tuple[LayerRange, ...]:
    """The partition whose slowest worker is the fastest.

    Args:
        costs: of each layer.
        order: where the stages are, and how many microbatches they hold.
        optimizer: by name.
        memory_bytes: that the layers of a worker may use.

    Raises:
        ScheduleError: more stages than layers.
        InfeasibleError: it does not fit in memory.
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
    """Cuts layers by asking the scheduler about hosts of one kind."""

    def __init__(self, seconds: np.ndarray, memory: np.ndarray, crossing: np.ndarray, held: int) -> None:
        self._seconds = seconds
        self._memory = memory
        self._crossing = crossing
        self._held = held

    def cut(self, layers: LayerRange, parts: int, memory_bytes: float) -> tuple[LayerRange, ...]:
        """``layers`` in exactly ``parts`` parts."""
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
                    # Links are not counted: gloo carries a cut in a hundredth of what computing it takes.
                    bw_bytes_per_s=1e15,
                    time_s=tuple(self._seconds[inside].tolist()),
                ),
            ),
            hosts={str(worker): "worker" for worker in range(parts)},
            buffers=(0.0, float(self._held)),
            options=SolverOptions(time_limit_s=_TIME_LIMIT_S),
        )
        try:
            found = scheduler.plan(problem).schedule.stages
        except InfeasibleError:
            least = self._memory[inside].sum() / parts / _MB
            raise InfeasibleError(
                f"no partition of {count(len(self._seconds), 'layer')} into {count(parts, 'part')} fits "
                "into the "
                f"{memory_bytes / _MB:.0f} MB that a worker has beside the program itself; about "
                f"{least:.0f} MB are needed: take more workers, smaller microbatches, the schedule 1f1b, or "
                "allow more with --memory"
            ) from None
        ranges = [
            LayerRange(layers.start + stage.layers.start, layers.start + stage.layers.stop) for stage in found
        ]
        return self._exactly(ranges, parts)

    def _exactly(self, found: list[LayerRange], parts: int) -> tuple[LayerRange, ...]:
        """The core takes no more hosts than help; the rest split the longest parts that can be."""
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
