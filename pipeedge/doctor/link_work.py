"""Measure the links of a plan, one after another, through the runtime's own transport."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeedge.base.errors import one_line
from pipeedge.base.fields import nonnegative, whole_number
from pipeedge.control.member import Member
from pipeedge.plan.link_speed import Estimate, estimate_link
from pipeedge.plan.specs import NeighborLink
from pipeedge.request.config import WorldRequest
from pipeedge.transport.interfaces import use_interface

__all__ = ["LinkRound", "MeetingPoint", "link_from_stats", "measure_links"]

_CONNECT_S = 4.0
"""Seconds for connecting the links."""
_LINK_S = 1.5
"""Seconds for measuring one link, unless it is so slow that a few frames take longer."""
_LINK_SLACK_S = 5.0
"""Seconds that a few frames may take beyond that."""
_PORTS = 1 << 16
_MAX_ERROR = 400
"""Characters of an error that the other ranks are told."""


class MeetingPoint:
    """The rendezvous store of the links, served on rank 0 until all have met."""

    def __init__(self) -> None:
        """Serve nothing yet."""
        self._store: Any = None

    def serve(self, addr: str) -> int:
        """Serve a store at ``addr``; return its port."""
        from pipeedge.transport.rendezvous import serve_store

        self._store, port = serve_store(addr)
        return port

    def close(self) -> None:
        """Serve the store no longer, if this rank did."""
        self._store = None


@dataclass(frozen=True)
class LinkRound:
    """Links to measure, and where their ranks meet."""

    pairs: Sequence[tuple[int, int]]
    """Source and destination rank of each link."""
    members: Sequence[int]
    """Ranks at the ends of the links."""
    store_port: int
    """Port of the rendezvous store on rank 0."""

    def to_body(self) -> dict[str, Any]:
        """Write the links as part of a message."""
        return dict(vars(self))

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> LinkRound:
        """Parse part of a message. Raises ValueError, TypeError or KeyError if it is malformed."""
        return cls(
            pairs=tuple((whole_number(source), whole_number(end)) for source, end in body["pairs"]),
            members=tuple(whole_number(member) for member in body["members"]),
            store_port=whole_number(body["store_port"], below=_PORTS),
        )


def measure_links(
    links: LinkRound, world: WorldRequest, interface: str | None, meeting: MeetingPoint, member: Member
) -> dict[str, Any]:
    """Measure the links that begin here, and answer on those that end here.

    Args:
        links: links of the plan, of which this rank is a member.
        world: the ranks.
        interface: interface of the links.
        meeting: closed when all ranks have met.
        member: ends the measurements with the session.

    Returns:
        Statistics for the hub, which hold an error if there was one.

    Raises:
        PipeEdgeError: the session ended.
    """
    use_interface(interface or "")
    stats: dict[str, Any] = {}
    connected, over = threading.Event(), threading.Event()

    def work() -> None:
        try:
            _exchange(links, world, meeting, connected, stats)
        except Exception as error:  # told to all, by the thread that waits for this one
            stats["error"] = one_line(error)[:_MAX_ERROR]
        finally:
            end()

    def end() -> None:
        connected.set()
        over.set()

    member.on_end(end)
    # In a thread of its own: gloo cannot be told to stop waiting, so it is left behind instead.
    threading.Thread(target=work, name="links", daemon=True).start()
    if connected.wait(_CONNECT_S):
        over.wait(len(links.pairs) * (_LINK_S + _LINK_SLACK_S))
    error = member.error
    if error is not None:
        raise error
    return dict(stats)


def _exchange(
    links: LinkRound,
    world: WorldRequest,
    meeting: MeetingPoint,
    connected: threading.Event,
    stats: dict[str, Any],
) -> None:
    """Connect, then measure or answer link by link; figures go to ``stats`` as they come."""
    from pipeedge.doctor.links import PASSES, LinkMeter, answer_link
    from pipeedge.transport.base import Rendezvous
    from pipeedge.transport.p2p import P2PTransport

    transport = P2PTransport(world.rank)
    transport.open(Rendezvous(world.addr, links.store_port, tuple(links.members), world.timeout_s))
    meeting.close()  # all have met
    connected.set()
    meters = {number: LinkMeter(*pair) for number, pair in enumerate(links.pairs)}
    for _ in range(PASSES):
        for number, (source, destination) in enumerate(links.pairs):
            if source == world.rank:
                meters[number].measure(transport, _LINK_S / PASSES)
                # One assignment: the other thread may take the figures at any moment.
                stats.update(_link_stats(number, estimate_link(meters[number].rounds)))
            elif destination == world.rank:
                answer_link(transport, source, destination)
    transport.close()


def _link_stats(number: int, estimate: Estimate) -> dict[str, float]:
    """Return the figures of link ``number`` that are sent to the hub."""
    return {
        f"link.{number}.bw_bytes_per_s": estimate.link.bw_bytes_per_s,
        f"link.{number}.latency_s": estimate.link.latency_s,
        f"link.{number}.low_bytes_per_s": estimate.low_bytes_per_s,
        f"link.{number}.high_bytes_per_s": estimate.high_bytes_per_s,
        f"link.{number}.rounds": estimate.rounds,
    }


def link_from_stats(link: int, told: Mapping[str, Any]) -> Estimate:
    """Parse the figures of a link. Raises one of ``fields.MALFORMED`` if they are malformed."""
    bandwidth, latency, low, high, rounds = (
        nonnegative(told[f"link.{link}.{name}"])
        for name in ("bw_bytes_per_s", "latency_s", "low_bytes_per_s", "high_bytes_per_s", "rounds")
    )
    return Estimate(NeighborLink(bandwidth, latency), low, high, int(rounds))
