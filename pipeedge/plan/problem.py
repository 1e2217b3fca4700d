"""Describe a scheduling problem as plain data: costs of layers on each kind of host, and links. Pure.

Everything that schedules makes a ``Problem`` or has one made from the user's files, and hands it to
``plan.scheduler``. ``to_body`` is the form that ``sched-pipeline --problem`` reads and
``sched-pipeline --format problem`` prints (the table of keys is in docs/file-formats.md).

Units are bytes, bytes a second and seconds; layers count from 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pipeedge import _native
from pipeedge.base.errors import RequestError

__all__ = [
    "ELEMENT_BYTES",
    "HostKind",
    "HostLink",
    "LayerSizes",
    "Problem",
    "SolverOptions",
]

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType(_native.element_bytes())
"""Bytes of a value that crosses a cut, by the number type of the stage that sends it."""

StageBids = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of the layers, whatever host runs them."""

    weight_bytes: tuple[float, ...]
    """Bytes of each layer's weights, unless a kind of host overrides them."""
    elements_in: float
    """Number of elements per item that enter the first layer."""
    elements_out: tuple[float, ...]
    """Number of elements per item that leave each layer."""
    element_bytes: float
    """Bytes of an element on a link."""
    input_bytes: float | None = None
    """Bytes of one item of input; None if its elements determine them."""
    output_bytes: float | None = None
    """Bytes of one item of output; None if its elements determine them."""
    shared_with: tuple[int, ...] = ()
    """Nearest earlier layer, from 1, with the same weights as each layer, or 0; empty if none are shared."""


@dataclass(frozen=True)
class HostKind:
    """Costs of the layers on one kind of host. Lists have one value for each layer, or none."""

    name: str
    mem_bytes: float
    bw_bytes_per_s: float
    time_s: tuple[float, ...] = ()
    """Seconds that each layer takes for a microbatch; empty if they take no time."""
    weight_bytes: tuple[float, ...] = ()
    """Bytes of each layer's weights in this kind's number type; empty for those of the problem."""
    receive_s: tuple[float, ...] = ()
    """Seconds to take a microbatch from a link if the layer is the first of a stage."""
    send_s: tuple[float, ...] = ()
    """Seconds to pass a microbatch to a link if the layer is the last of a stage."""
    activation_bytes: tuple[float, ...] = ()
    """Bytes in use while each layer computes, in addition to weights and buffers."""
    overhead_s: float = 0.0
    """Seconds of a microbatch in any stage besides its layers and links."""
    feed_s: float = 0.0
    """Seconds to read and feed a microbatch on the data host."""
    collect_s: float = 0.0
    """Seconds to collect the results of a microbatch on the data host."""
    input_send_s: float = 0.0
    """Seconds to pass a microbatch of input to a link on the data host, if the first stage is on another."""
    output_receive_s: float = 0.0
    """Seconds to take the outputs of a microbatch from a link there, if the last stage is on another."""
    stage_s: StageBids = ()
    """Bids in seconds, which replace times and memory; empty if there are none. Row ``first`` has those for
    the stages ``[first, first + 1)`` to ``[first, layers)``, infinite for stages the host cannot take."""
    dtype: str = ""
    """Number type in which the host computes."""
    threads: int | None = None
    """Number of threads it was profiled with, or None if unknown."""
    tokens: tuple[int, ...] = ()
    """Sentence lengths it was profiled with, shortest first; empty if unknown."""
    kernels: str | None = None
    """Kernels it was profiled with, or None if unknown."""

    def to_json(self) -> dict[str, Any]:
        """Return the kind as a JSON object; infinite bids are null."""
        lists = ("time_s", "weight_bytes", "receive_s", "send_s", "activation_bytes", "tokens")
        return {
            "name": self.name,
            "dtype": self.dtype,
            "threads": self.threads,
            "kernels": self.kernels,
            "mem_bytes": self.mem_bytes,
            "bw_bytes_per_s": self.bw_bytes_per_s,
            **{key: list(values) for key in lists if (values := getattr(self, key))},
            "overhead_s": self.overhead_s,
            "feed_s": self.feed_s,
            "collect_s": self.collect_s,
            "input_send_s": self.input_send_s,
            "output_receive_s": self.output_receive_s,
            "stage_s": [[None if math.isinf(bid) else bid for bid in row] for row in self.stage_s] or None,
        }


@dataclass(frozen=True)
class HostLink:
    """A directed link that overrides the bandwidth of its hosts' kinds."""

    source: str
    target: str
    bw_bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class SolverOptions:
    """Objective and limits of the search for a schedule. Validated on creation.

    Raises:
        RequestError: A value is outside its range.
    """

    objective: str = "throughput"
    link_bits: str | None = "0"
    """Bits of a value on links between stages, or ``auto``; None if the problem has them to choose from."""
    time_limit_s: float = 10.0
    survive_loss: bool = False
    """Whether only a schedule that survives the loss of any one host but the data host will do."""
    losses: bool = False
    """Whether to find out what the loss of each host would cost."""
    min_throughput: float | None = None
    """Least items per second where energy is the objective; None for any."""

    def __post_init__(self) -> None:
        if self.objective not in ("throughput", "latency", "energy"):
            raise RequestError(f"the objective {self.objective} is neither throughput, latency nor energy")
        if not 0 < self.time_limit_s < float("inf"):
            raise RequestError(f"the scheduler's time limit is {self.time_limit_s} s; it must be above 0")

    def arguments(self) -> list[str]:
        """Return the command line of these options."""
        return [
            f"--objective={self.objective}",
            *([] if self.link_bits is None else [f"--link-bits={self.link_bits}"]),
            *([] if self.min_throughput is None else [f"--min-throughput={self.min_throughput}"]),
            f"--time-limit={self.time_limit_s}",
            *(["--survive-loss"] if self.survive_loss else []),
            *(["--losses"] if self.losses else []),
        ]

    def evaluating(self) -> list[str]:
        """Return the command line of those options that count where a plan is given."""
        return [f"--objective={self.objective}"]


@dataclass(frozen=True)
class Problem:
    """A model to schedule, and the hosts to schedule it on."""

    layers: LayerSizes
    kinds: tuple[HostKind, ...]
    hosts: Mapping[str, str]
    """Kind of each host, by name; among equal hosts, earlier ones are preferred."""
    links: tuple[HostLink, ...] = ()
    data_host: str | None = None
    """Host that reads the inputs and collects the outputs; None if that costs nothing."""
    batch_size: float = 1.0
    """Number of items in a microbatch."""
    buffers: tuple[float, float] = (2.0, 2.0)
    """Number of microbatches that a stage buffers before and after itself."""
    options: SolverOptions = field(default_factory=SolverOptions)

    def to_body(self) -> dict[str, Any]:
        """Return the problem, without its options, as ``sched-pipeline --problem`` reads it."""
        return {
            "batch_size": self.batch_size,
            "element_bytes": self.layers.element_bytes,
            "elements_in": self.layers.elements_in,
            "elements_out": list(self.layers.elements_out),
            "input_bytes": self.layers.input_bytes,
            "output_bytes": self.layers.output_bytes,
            "weight_bytes": list(self.layers.weight_bytes),
            **({"shared_with": list(self.layers.shared_with)} if self.layers.shared_with else {}),
            "buffers_in": self.buffers[0],
            "buffers_out": self.buffers[1],
            "types": [kind.to_json() for kind in self.kinds],
            "hosts": [{"name": name, "type": kind} for name, kind in self.hosts.items()],
            "links": [
                {
                    "from": link.source,
                    "to": link.target,
                    "bw_bytes_per_s": link.bw_bytes_per_s,
                    "latency_s": link.latency_s,
                }
                for link in self.links
            ],
            "data_host": self.data_host,
        }
