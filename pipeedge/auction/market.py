"""Define the call for bids and the bids of devices. Pure.

A bid is a table of seconds: ``stage_s[first, last]`` for the layers ``[first, last)`` of a microbatch,
infinite where the device makes no bid. How a device arrives at its figures is up to the device; ours asks
``sched-pipeline`` what its profile says of whatever fits into its memory (``tables``). On the wire a bid is a
list for each first layer, with null where there is no bid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from pipeedge import _native
from pipeedge.base.errors import RequestError, ScheduleError
from pipeedge.base.fields import Amount, Line, Name
from pipeedge.base.program import program_name
from pipeedge.base.wording import count, figure
from pipeedge.plan.problem import ELEMENT_BYTES
from pipeedge.plan.specs import DeviceType, ModelProfile, ModelSpec, NeighborLink, short_dtype

__all__ = [
    "Bid",
    "Call",
    "Market",
    "NoBid",
    "Offer",
    "Seconds",
    "check_profile",
    "contradiction",
    "length_note",
]

Seconds = npt.NDArray[np.float64]

_TOLERANCE = 1e-6
"""Relative tolerance between a bid and a profile, whose figures are rounded as text."""
_HostName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=200)]
_Called: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 20)]
"""Number in a call."""


@dataclass(frozen=True)
class Call:
    """The auctioneer's call for bids, validated on creation.

    Raises:
        RequestError: A number is out of range.
    """

    model_name: Line
    layers: _Called
    """Number of layers of the model."""
    microbatch_size: _Called = 8
    """Number of items in a microbatch."""
    dtype: Name = "float32"
    """Number type of the run."""
    tokens: _Called | None = None
    """Tokens of the longest sentence, or None for the profiled length."""
    buffers_in: _Called = 2
    """Number of microbatches that a stage buffers before it computes."""
    buffers_out: _Called = 2
    """Number of microbatches that a stage buffers until they are sent."""
    chunk: _Called = 1
    """Number of layers whose multiples stages begin and end at, except at the model's end."""
    transport: Name = "p2p"
    """Transport of the links, as profiles name it."""
    largest: bool = False
    """Whether to ask, for each first layer, only for the stage that extends furthest."""

    def __post_init__(self) -> None:
        if self.microbatch_size < 1:
            raise RequestError(f"-u/--ubatch-size {self.microbatch_size}: must be at least 1")
        if self.tokens is not None and self.tokens < 1:
            raise RequestError(f"--tokens {self.tokens}: a sentence has at least 1 token")
        if not 1 <= self.chunk <= self.layers:
            raise RequestError(
                f"--filter-bids-chunk {self.chunk}: must be 1 to {self.layers}, the model's layers"
            )
        if self.dtype not in ELEMENT_BYTES:
            raise RequestError(f"--dtype {self.dtype}: choose one of {', '.join(ELEMENT_BYTES)}")


class Offer(Struct, frozen=True, tag="bid"):
    """A bid as a message."""

    host: _HostName
    type_name: _HostName
    bw_bytes_per_s: Amount
    stage_s: tuple[tuple[Amount | None, ...], ...]
    """For each first layer, the seconds of the stages that begin with it; None where there is no bid."""
    links: Mapping[_HostName, tuple[Amount, Amount]] = {}
    """Bandwidth in bytes per second and latency in seconds to other hosts."""

    def __post_init__(self) -> None:
        if not all(name.isprintable() for name in (self.host, self.type_name, *self.links)):
            raise ValueError("a host name is not printable")


class NoBid(Struct, frozen=True, tag="refusal"):
    """The reason why a device cannot bid, as a message."""

    host: Name
    reason: Line


@dataclass(frozen=True)
class Bid:
    """One device's bid."""

    host: str
    type_name: str
    """Name of its device type."""
    bw_bytes_per_s: float
    """Bandwidth of its interface in bytes per second, for links that ``links`` does not list."""
    stage_s: Seconds
    """Seconds of each possible stage, ``[layers + 1, layers + 1]``, infinite where there is no bid."""
    links: Mapping[str, NeighborLink] = field(default_factory=dict)
    """Links to other hosts, where they are known."""

    def offer(self) -> Offer:
        """Return the bid as a message."""
        layers = len(self.stage_s) - 1
        rows = [
            [None if math.isinf(cell) else cell for cell in self.stage_s[first, first + 1 :].tolist()]
            for first in range(layers)
        ]
        for row in rows:
            while row and row[-1] is None:
                row.pop()
        links = {name: (link.bw_bytes_per_s, link.latency_s) for name, link in self.links.items()}
        return Offer(self.host, self.type_name, self.bw_bytes_per_s, tuple(map(tuple, rows)), links)

    @classmethod
    def of(cls, offer: Offer, call: Call) -> Bid:
        """Convert a message to a bid.

        Raises:
            ValueError: It is not a bid for this call.
        """
        stage_s = np.full((call.layers + 1, call.layers + 1), np.inf)
        if len(offer.stage_s) != call.layers:
            raise ValueError(f"bids for {count(len(offer.stage_s), 'layer')} of a model with {call.layers}")
        for first, row in enumerate(offer.stage_s):
            if len(row) > call.layers - first:
                raise ValueError(f"bids for layers beyond {call.layers}")
            stage_s[first, first + 1 : first + 1 + len(row)] = [
                np.inf if cell is None else cell for cell in row
            ]
        links = {name: NeighborLink(bw, latency) for name, (bw, latency) in offer.links.items()}
        return cls(offer.host, offer.type_name, offer.bw_bytes_per_s, stage_s, links)

    def filtered(self, call: Call) -> Bid:
        """Return the bid without the stages that ``call`` does not ask for."""
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


def check_profile(type_name: str, kind: DeviceType, model: ModelSpec, call: Call) -> None:
    """Check that a device type can bid.

    Raises:
        RequestError: There is no profile under the conditions of the call, or it is of another model.
    """
    profile = _profile(kind, call)
    if profile is None:
        raise RequestError(
            f"device type {type_name} has no profile of {call.model_name} with microbatches of "
            f"{call.microbatch_size} and dtype {call.dtype}; "
            f"profile it ({program_name('profiler.py')})"
        )
    if len(profile.time_s) != call.layers or model.layers != call.layers:
        raise RequestError(
            f"{call.model_name} has {count(call.layers, 'layer')} in the auctioneer's models file, "
            f"{model.layers} in this device's and {len(profile.time_s)} in the profile of {type_name}; use "
            "the same files everywhere"
        )


def length_note(type_name: str, kind: DeviceType, call: Call) -> str | None:
    """Describe why a device type's times cannot be scaled to the tokens of the call, or return None."""
    profile = _profile(kind, call)
    if profile is None or call.tokens is None or profile.fits_tokens(call.tokens):
        return None
    known = profile.tokens or "an unknown number of"
    return (
        f"{type_name} was profiled only with {known} tokens, so its times are not scaled to {call.tokens}; "
        f"profile it with several lengths ({program_name('profiler.py')} --tokens)"
    )


def _profile(kind: DeviceType, call: Call) -> ModelProfile | None:
    """Return the profile under the conditions of the call, or None."""
    for profile in kind.profiles.get(call.model_name, ()):
        if profile.batch_size == call.microbatch_size and short_dtype(profile.dtype) == call.dtype:
            return profile
    return None


def contradiction(bid: Bid, expected: Bid) -> str | None:
    """Describe where ``bid`` differs from the one that a known profile gives, or return None."""
    there, here = np.isfinite(bid.stage_s), np.isfinite(expected.stage_s)
    for first, last in np.argwhere(there & ~here):
        return f"it bids for layers {first + 1}-{last}, which its memory cannot hold"
    both = there & here
    wrong = np.zeros_like(both)
    wrong[both] = ~np.isclose(bid.stage_s[both], expected.stage_s[both], rtol=_TOLERANCE, atol=1e-9)
    for first, last in np.argwhere(wrong):
        return (
            f"it says {figure(bid.stage_s[first, last], 6)} s for layers {first + 1}-{last}, "
            f"but the profile says {figure(expected.stage_s[first, last], 6)} s"
        )
    return None


@dataclass(frozen=True)
class Market:
    """All bids in the order of the devices, and the bytes at each cut; nothing else is known of devices."""

    bids: tuple[Bid, ...]
    cut_bytes: Seconds
    """Bytes of a microbatch at each cut, ``[layers + 1]``; first the input, last the output."""
    microbatch_size: int
    """Number of items in a microbatch."""
    data_host: int | None = None
    """Index of the device that reads the input and collects the output, or None to ignore both."""

    @classmethod
    def of(cls, bids: Sequence[Bid], cut_bytes: Seconds, call: Call, data_host: str | None) -> Market:
        """Build the market from the bids that arrived.

        Raises:
            ScheduleError: The data host made no bid.
        """
        hosts = [bid.host for bid in bids]
        if data_host is not None and data_host not in hosts:
            raise ScheduleError(
                f"-D/--data-host {data_host} made no bid; choose one that did: {', '.join(hosts)}"
            )
        data = None if data_host is None else hosts.index(data_host)
        return cls(tuple(bids), cut_bytes, call.microbatch_size, data)

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return len(self.cut_bytes) - 1

    def link(self, source: int, target: int) -> NeighborLink:
        """Return the link between two devices as one of them lists it, else their slower interface."""
        here, there = self.bids[source], self.bids[target]
        known = here.links.get(there.host) or there.links.get(here.host)
        return known or NeighborLink(min(here.bw_bytes_per_s, there.bw_bytes_per_s))

    def link_s(self, source: int, target: int) -> Seconds:
        """Return the seconds to send a microbatch at each cut, ``[layers + 1]``; 0 within a device."""
        if source == target:
            return np.zeros(len(self.cut_bytes))
        link = self.link(source, target)
        return np.array(_native.link_seconds(self.cut_bytes.tolist(), link.bw_bytes_per_s, link.latency_s))

    def from_data_s(self, device: int) -> float:
        """Return the seconds to send the input to the first stage on ``device``."""
        return 0.0 if self.data_host is None else float(self.link_s(self.data_host, device)[0])

    def to_data_s(self, device: int) -> float:
        """Return the seconds to send the output from the last stage on ``device``."""
        return 0.0 if self.data_host is None else float(self.link_s(device, self.data_host)[-1])

    def why_not(self) -> str:
        """Describe what rules out every schedule, as far as it is obvious."""
        covered = np.zeros(self.layers, dtype=bool)
        for bid in self.bids:
            for first, last in np.argwhere(np.isfinite(bid.stage_s)):
                covered[first:last] = True
        if not covered.all():
            return f"no device bids for layer {int(np.argmin(covered)) + 1}"
        return "the bids do not add up to the whole model"
