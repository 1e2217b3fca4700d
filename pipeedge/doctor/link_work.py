"""Measure the links of a plan, one after another, through the runtime's own transport."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from pipeedge.base.errors import one_line
from pipeedge.base.fields import Count, Line
from pipeedge.control.hub_client import HubClient
from pipeedge.plan.link_speed import Estimate, estimate_link
from pipeedge.request.config import TransportRequest, WorldRequest

if TYPE_CHECKING:
    from pipeedge.transport.base import Endpoint, Rendezvous, Transport
    from pipeedge.transport.membership import Membership

__all__ = ["LinkRound", "MeasuredLinks", "link_endpoint", "measure_links"]

_CONNECT_S = 4.0
"""Seconds for connecting the links."""
_LINK_S = 1.5
"""Seconds for measuring one link, unless it is so slow that a few frames take longer."""
_LINK_SLACK_S = 5.0
"""Seconds that a few frames may take beyond that."""
_MAX_ERROR = 400
"""Characters of an error that the other ranks are told."""


def link_endpoint(request: TransportRequest, world: WorldRequest, membership: Membership | None) -> Endpoint:
    """Return this rank among those whose links are measured.

    Links are measured over TCP if the run uses that, else over gloo, which has the same wire as RPC.
    """
    from pipeedge.transport.choice import make_endpoint

    measured = request if request.comm == "tcp" else TransportRequest()
    return make_endpoint(measured, world.rank, world.addr, membership)


class LinkRound(Struct, frozen=True):
    """Links to measure."""

    pairs: tuple[tuple[Count, Count], ...]
    """Source and destination rank of each link."""
    members: tuple[Count, ...]
    """Ranks at the ends of the links."""


class MeasuredLinks(Struct, frozen=True):
    """Measurements of one rank."""

    estimates: Mapping[Count, Estimate] = {}
    """Estimates of the links that begin there, by their index in the round."""
    error: Line | None = None
    """Reason why others could not be measured, or None."""


def measure_links(
    links: LinkRound, rank: int, transport: Transport, rendezvous: Rendezvous, member: HubClient
) -> MeasuredLinks:
    """Measure the links that begin here, and answer on those that end here.

    Args:
        links: Links of the plan, of which this rank is a member.
        rank: This rank.
        transport: Transport of the links, still closed.
        rendezvous: How the members find one another.
        member: Ends the measurements with the session.

    Returns:
        Measurements for the hub, which hold an error if there was one.

    Raises:
        PipeEdgeError: The session ended.
    """
    estimates: dict[int, Estimate] = {}
    errors: list[str] = []
    connected, over = threading.Event(), threading.Event()

    def work() -> None:
        try:
            _exchange(links, rank, transport, rendezvous, connected, estimates)
        except Exception as error:  # told to all, by the thread that waits for this one
            errors.append(one_line(error)[:_MAX_ERROR])
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
    return MeasuredLinks(dict(estimates), errors[0] if errors else None)


def _exchange(
    links: LinkRound,
    rank: int,
    transport: Transport,
    rendezvous: Rendezvous,
    connected: threading.Event,
    estimates: dict[int, Estimate],
) -> None:
    """Connect, then measure or answer link by link; figures go to ``estimates`` as they come."""
    from pipeedge.doctor.links import PASSES, LinkMeter, answer_link

    transport.open(rendezvous)
    connected.set()
    meters = {number: LinkMeter(*pair) for number, pair in enumerate(links.pairs)}
    for _ in range(PASSES):
        for number, (source, destination) in enumerate(links.pairs):
            if source == rank:
                meters[number].measure(transport, _LINK_S / PASSES)
                # One assignment: the other thread may take the figures at any moment.
                estimates[number] = estimate_link(meters[number].rounds)
            elif destination == rank:
                answer_link(transport, source, destination)
    transport.close()
