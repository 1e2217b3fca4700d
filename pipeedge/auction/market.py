"""What the auctioneer asks for and what devices bid. Pure.

A bid is a table of seconds: ``stage_s[first, last]`` for the layers ``[first, last)`` of a microbatch,
infinite for what the device does not take. How a device comes to its figures is its own affair; ours adds
up the times of its profile over what fits into its memory. On the wire a bid is a list for each first
layer, nothing (null) where there is no bid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeedge.base.errors import RequestError, ScheduleError
from pipeedge.base.fields import flag, nonnegative, number, text, whole_number
from pipeedge.base.program import program_name
from pipeedge.base.wording import count, figure
from pipeedge.plan.specs import BYTES_PER_MB, DeviceType, Link, ModelProfile, ModelSpec, short_dtype

__all__ = ["DTYPE_BYTES", "Bid", "Call", "Market", "Seconds", "bid_of", "contradiction"]

Seconds = npt.NDArray[np.float64]

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
"""Of one element on a link."""
_TOLERANCE = 1e-6
"""Between a bid and a profile: figures that went through text."""
_MAX_HOST = 200
_MAX_NAME = 1000
_MAX_CALLED = 1 << 20
"""Layers, items and buffers that a call may ask for lie below this."""


@dataclass(frozen=True)
class Call:
    """What bids are wanted for. Validated on creation.

    Raises:
        RequestError: a number outside its range.
    """

    model_name: str
    layers: int
    ubatch_size: int = 8
    dtype: str = "float32"
    buffers_in: int = 2
    """Microbatches that a stage holds before it computes."""
    buffers_out: int = 2
    """And until they are sent."""
    chunk: int = 1
    """Only stages that begin and end at multiples of so many layers (or at the model's end)."""
    largest: bool = False
    """Of the stages that begin at a layer, only the one that goes furthest."""

    def __post_init__(self) -> None:
        if self.ubatch_size < 1:
            raise RequestError(f"-u/--ubatch-size {self.ubatch_size}: must be at least 1")
        if not 1 <= self.chunk <= self.layers:
            raise RequestError(
                f"--filter-bids-chunk {self.chunk}: must be 1 to {self.layers}, the model's layers"
            )
        if self.dtype not in DTYPE_BYTES:
            raise RequestError(f"--dtype {self.dtype}: choose one of {', '.join(DTYPE_BYTES)}")

    def to_body(self) -> dict[str, Any]:
        """As a message."""
        return dict(vars(self))

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Call:
        """From a message; raises TypeError, KeyError or ValueError where it is none."""
        return cls(
            model_name=text(body["model_name"], _MAX_NAME),
            dtype=text(body["dtype"], _MAX_NAME),
            largest=flag(body["largest"]),
            **{
                name: whole_number(body[name], below=_MAX_CALLED)
                for name in ("layers", "ubatch_size", "buffers_in", "buffers_out", "chunk")
            },
        )


@dataclass(frozen=True)
class Bid:
    """One device's offer."""

    host: str
    type_name: str
    bw_bytes_per_s: float
    """Of its interface, where nothing is known of a link."""
    stage_s: Seconds
    """``[layers + 1, layers + 1]``, infinite where there is no bid."""
    links: Mapping[str, Link] = field(default_factory=dict)
    """To other hosts, where something is known of them."""

    def to_body(self) -> dict[str, Any]:
        """As a message."""
        layers = len(self.stage_s) - 1
        rows = [
            [None if math.isinf(cell) else cell for cell in self.stage_s[first, first + 1 :].tolist()]
            for first in range(layers)
        ]
        for row in rows:
            while row and row[-1] is None:
                row.pop()
        return {
            "host": self.host,
            "type_name": self.type_name,
            "bw_bytes_per_s": self.bw_bytes_per_s,
            "stage_s": rows,
            "links": {name: [link.bw_bytes_per_s, link.latency_s] for name, link in self.links.items()},
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any], call: Call) -> Bid:
        """From a message.

        Raises:
            TypeError, KeyError, ValueError: it is no bid for this call.
        """
        stage_s = np.full((call.layers + 1, call.layers + 1), np.inf)
        rows = body["stage_s"]
        if len(rows) != call.layers:
            raise ValueError(f"bids for {count(len(rows), 'layer')} of a model with {call.layers}")
        for first, row in enumerate(rows):
            if len(row) > call.layers - first:
                raise ValueError(f"bids for layers beyond {call.layers}")
            stage_s[first, first + 1 : first + 1 + len(row)] = [
                np.inf if cell is None else number(cell) for cell in row
            ]
        links = {
            _host(name): Link(nonnegative(bw), nonnegative(latency))
            for name, (bw, latency) in body["links"].items()
        }
        bid = cls(
            _host(body["host"]), _host(body["type_name"]), nonnegative(body["bw_bytes_per_s"]), stage_s, links
        )
        bid.check()
        return bid

    def check(self) -> None:
        """Whether the figures can be times.

        Raises:
            ValueError: they cannot; says which.
        """
        if np.isnan(self.stage_s).any() or (self.stage_s < 0).any():
            raise ValueError("a time is negative or no number")

    def filtered(self, call: Call) -> Bid:
        """Without what ``call`` does not want."""
        kept = self.stage_s.copy()
        ends = np.arange(len(kept))
        wanted = (ends % call.chunk == 0) | (ends == call.layers)
        kept[~wanted, :] = np.inf
        kept[:, ~wanted] = np.inf
        if call.largest:
            for row in kept:
                finite = np.flatnonzero(np.isfinite(row))
                row[finite[:-1]] = np.inf
        return Bid(self.host, self.type_name, self.bw_bytes_per_s, kept, self.links)


def _host(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_HOST or not value.isprintable():
        raise ValueError("a host without a proper name")
    return value


def bid_of(
    host: str, type_name: str, kind: DeviceType, links: Mapping[str, Link], model: ModelSpec, call: Call
) -> Bid:
    """The bid of a device with this profile: the sum of its layers' times, for what fits into its memory.

    Raises:
        RequestError: there is no profile for what is called for, or it is of another model.
    """
    profile = next(
        (
            profile
            for profile in kind.profiles.get(call.model_name, ())
            if profile.batch_size == call.ubatch_size and short_dtype(profile.dtype) == call.dtype
        ),
        None,
    )
    what = f"{call.model_name}, microbatches of {call.ubatch_size} and {call.dtype}"
    if profile is None:
        raise RequestError(
            f"the device type {type_name} has no profile for {what}; "
            f"profile it ({program_name('profiler.py')})"
        )
    if len(profile.time_s) != call.layers or model.layers != call.layers:
        raise RequestError(
            f"{call.model_name} has {count(call.layers, 'layer')} for the auctioneer, {model.layers} in this "
            f"models file and {len(profile.time_s)} in that of {type_name}; use one file everywhere"
        )
    return Bid(host, type_name, kind.bw_bytes_per_s, _stage_seconds(kind, profile, model, call), links)


def _stage_seconds(kind: DeviceType, profile: ModelProfile, model: ModelSpec, call: Call) -> Seconds:
    """As the native scheduler counts: layers, handling of links, weights, buffers, activations."""
    cuts = call.layers + 1
    ends = np.arange(cuts)
    seconds, memory = (np.concatenate(([0.0], np.cumsum(each))) for each in (profile.time_s, model.mem_bytes))
    buffered = np.array([model.elements_in, *model.elements_out]) * call.ubatch_size * DTYPE_BYTES[call.dtype]
    needed = (
        (memory[None, :] - memory[:, None])
        + call.buffers_in * buffered[:, None]
        + call.buffers_out * buffered[None, :]
        + _largest_within(_known(profile, "activations_MB") * BYTES_PER_MB)
    )
    receive = np.concatenate(([0.0], _known(profile, "receive_s")[1:], [0.0]))
    send = np.concatenate(([0.0], _known(profile, "send_s")[:-1], [0.0]))
    layers_s = np.maximum(0.0, seconds[None, :] - seconds[:, None])
    taken = (ends[:, None] < ends[None, :]) & (needed <= kind.mem_bytes * (1 + 1e-9))
    return np.where(taken, receive[:, None] + layers_s + send[None, :], np.inf)


def _known(profile: ModelProfile, key: str) -> Seconds:
    """A figure of each layer; 0 where the profile has none, or something else stands there."""
    values = profile.extra.get(key)
    if not isinstance(values, list) or len(values) != len(profile.time_s):
        return np.zeros(len(profile.time_s))
    return np.array(
        [value if isinstance(value, int | float) and 0 <= value < math.inf else 0.0 for value in values]
    )


def _largest_within(values: Seconds) -> Seconds:
    """``[n + 1, n + 1]``: the largest of ``values[first:last]``."""
    largest = np.zeros((len(values) + 1, len(values) + 1))
    for first in range(len(values)):
        largest[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return largest


def contradiction(bid: Bid, expected: Bid) -> str | None:
    """Where ``bid`` says something else than a profile that is known, in words."""
    there, here = np.isfinite(bid.stage_s), np.isfinite(expected.stage_s)
    for first, last in np.argwhere(there & ~here):
        return f"it bids for layers {first + 1}-{last}, which its memory cannot hold"
    both = there & here
    wrong = np.zeros_like(both)
    wrong[both] = ~np.isclose(bid.stage_s[both], expected.stage_s[both], rtol=_TOLERANCE, atol=1e-9)
    for first, last in np.argwhere(wrong):
        return (
            f"{figure(bid.stage_s[first, last], 6)} s for layers {first + 1}-{last}, "
            f"and the profile says {figure(expected.stage_s[first, last], 6)}"
        )
    return None


@dataclass(frozen=True)
class Market:
    """All bids, in an order of devices, and what crosses the cuts. Nothing else is known of the devices."""

    bids: tuple[Bid, ...]
    cut_bytes: Seconds
    """``[layers + 1]``, of a microbatch; first the input, last the output."""
    ubatch_size: int
    data_host: int | None = None
    """Index of the device that reads the input and collects the output; None: that costs nothing."""

    @classmethod
    def of(cls, bids: Sequence[Bid], model: ModelSpec, call: Call, data_host: str | None) -> Market:
        """From the bids that came.

        Raises:
            RequestError: the data host is not among them.
        """
        hosts = [bid.host for bid in bids]
        if data_host is not None and data_host not in hosts:
            raise ScheduleError(
                f"-D/--data-host {data_host} made no bid; those that did are {', '.join(hosts)}"
            )
        elements = np.array([model.elements_in, *model.elements_out], dtype=np.float64)
        return cls(
            tuple(bids),
            elements * call.ubatch_size * DTYPE_BYTES[call.dtype],
            call.ubatch_size,
            None if data_host is None else hosts.index(data_host),
        )

    @property
    def layers(self) -> int:
        """Of the model."""
        return len(self.cut_bytes) - 1

    def link(self, source: int, target: int) -> Link:
        """What joins two devices: what one says of the other, else the slower of their interfaces."""
        here, there = self.bids[source], self.bids[target]
        known = here.links.get(there.host) or there.links.get(here.host)
        return known or Link(min(here.bw_bytes_per_s, there.bw_bytes_per_s))

    def link_s(self, source: int, target: int) -> Seconds:
        """``[layers + 1]`` seconds of a microbatch at each cut from one device to another; none to itself."""
        if source == target:
            return np.zeros(len(self.cut_bytes))
        link = self.link(source, target)
        if link.bw_bytes_per_s > 0:
            return self.cut_bytes / link.bw_bytes_per_s + link.latency_s
        return np.where(self.cut_bytes > 0, np.inf, link.latency_s)

    def from_data_s(self, device: int) -> float:
        """Of the input, to the first stage."""
        return 0.0 if self.data_host is None else float(self.link_s(self.data_host, device)[0])

    def to_data_s(self, device: int) -> float:
        """Of the output, from the last stage."""
        return 0.0 if self.data_host is None else float(self.link_s(device, self.data_host)[-1])

    def why_not(self) -> str:
        """What is in the way of any schedule, as far as it shows at once."""
        covered = np.zeros(self.layers, dtype=bool)
        for bid in self.bids:
            for first, last in np.argwhere(np.isfinite(bid.stage_s)):
                covered[first:last] = True
        if not covered.all():
            return f"nobody bids for layer {int(np.argmin(covered)) + 1}"
        return "the bids do not join to a whole model"
