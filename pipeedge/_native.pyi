"""PipeEdge's compiled core (src-native/bindings/module.cpp)."""

from typing import Literal, final

import numpy as np
import numpy.typing as npt

@final
class ScheduleResult:
    """A schedule and what is proven about it."""

    @property
    def status(self) -> Literal["optimal", "bounded", "infeasible", "unknown"]:
        """Whether the objective is proven to be the least, is one within ``gap`` of it, or there is none.

        ``unknown``: the time was up before any schedule was found or ruled out.
        """

    @property
    def stages(self) -> npt.NDArray[np.int64]:
        """``[stages, 3]``: host, first layer, last layer; layers half-open from 0. Empty without one."""

    @property
    def objective_s(self) -> float:
        """Seconds: the bottleneck or the latency, as asked for; infinite without a schedule."""

    @property
    def lower_bound_s(self) -> float:
        """Seconds that no schedule can beat; infinite when none exists."""

    @property
    def gap(self) -> float:
        """``(objective - lower bound) / objective``; 0 when proven, 1 when nothing was found."""

    @property
    def bottleneck_s(self) -> float:
        """Seconds between one microbatch and the next: the slowest stage or link."""

    @property
    def latency_s(self) -> float:
        """Seconds of one microbatch through an idle pipeline, all stages and links."""

    @property
    def elapsed_s(self) -> float:
        """Seconds the solver took."""

def schedule(
    *,
    mem_bytes: npt.ArrayLike,
    elements_out: npt.ArrayLike,
    elements_in: float,
    type_mem_bytes: npt.ArrayLike,
    type_bw_bytes_per_s: npt.ArrayLike,
    type_time_s: npt.ArrayLike,
    host_types: npt.ArrayLike,
    link_hosts: npt.ArrayLike = ...,
    link_bw_bytes_per_s: npt.ArrayLike = ...,
    link_latency_s: npt.ArrayLike = ...,
    data_host: int | None = None,
    batch_size: float = 8.0,
    element_bytes: float = 4.0,
    buffers_in: float = 2.0,
    buffers_out: float = 2.0,
    objective: Literal["throughput", "latency"] = "throughput",
    time_limit_s: float = 10.0,
) -> ScheduleResult:
    """The best schedule of ``L`` layers on ``H`` hosts of ``T`` types. Runs without the interpreter lock.

    Args:
        mem_bytes: ``[L]``, weights of each layer.
        elements_out: ``[L]``, elements of one item that leave each layer.
        elements_in: elements of one item that enter the first layer.
        type_mem_bytes: ``[T]``, memory of a host of each type.
        type_bw_bytes_per_s: ``[T]``, bandwidth of a host's interface, either direction.
        type_time_s: ``[T, L]``, seconds of each layer for a microbatch of ``batch_size`` items.
        host_types: ``[H]``, index of each host's type.
        link_hosts: ``[K, 2]``, from and to, of links that differ from what the types say. The opposite
            direction, unless listed, is the same.
        link_bw_bytes_per_s: ``[K]``; 0 means that nothing passes.
        link_latency_s: ``[K]``, added to each message.
        data_host: the host whose links to the first stage and from the last are counted.
        batch_size: items of a microbatch.
        element_bytes: bytes of an element.
        buffers_in: microbatches held in front of a stage, as memory.
        buffers_out: microbatches held behind it.
        objective: the least bottleneck (then fewest hosts, then least latency), or the least latency
            (then least bottleneck, then fewest hosts).
        time_limit_s: wall clock; when it is up, the best answer so far is returned with its bound.

    Raises:
        ValueError: shapes that disagree, numbers that are negative or not finite, indices out of range.
    """
