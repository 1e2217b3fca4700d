"""Hold an auction as a session: the call is its brief, the bids are its facts, the result is its plan.

Only the auctioneer is required. The session ends with the result, so that every rank may leave with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import Raw

from pipeedge.auction.market import Bid, Call, NoBid, Offer
from pipeedge.auction.sale import Sale, Sold, absence_line
from pipeedge.base.errors import PipeEdgeError, RequestError, one_line
from pipeedge.base.fields import decode, decoding, encode, reader
from pipeedge.control.admission import Terms
from pipeedge.control.announcement import Announcement
from pipeedge.control.forms import Forms, Refusal
from pipeedge.control.hub_client import Callbacks
from pipeedge.control.messages import MAX_BYTES
from pipeedge.control.session import Session
from pipeedge.request.config import WorldRequest
from pipeedge.transport.membership import Membership

__all__ = ["Auctioneer", "attend"]

_Offer: TypeAlias = Raw
"""A bid, or the reason why there is none, as JSON. The sale checks it, and names who made a mistake."""

_FORMS: Forms[_Offer, Sold, None] = Forms(
    facts=Raw, plan=reader(Sold), stats=reader(None), max_message_bytes=MAX_BYTES
)

_SILENCE_AFTER_DEADLINE_S = 10.0
"""Seconds that a rank may be silent beyond the deadline for bids: until then, only its bid is due."""


@dataclass(frozen=True)
class Auctioneer:
    """The auctioneer on rank 0, which bids besides."""

    call: Call
    sale: Sale
    sell: Callable[[Mapping[int, Bid]], Sold]
    """Schedules from the bids, by rank. Raises RequestError if what was asked does not fit them."""
    warn: Callable[[str], None]
    """Shows a line to the user."""


def attend(
    world: WorldRequest,
    *,
    host: str,
    make_bid: Callable[[Call], Bid],
    auctioneer: Auctioneer | None = None,
    membership: Membership | None = None,
    notify: Callable[[str], None] = lambda line: None,
) -> Sold:
    """Take part in an auction: bid, and wait for the result.

    Args:
        world: This rank, all ranks, the address of rank 0, and the seconds to wait for bids.
        host: Name of this device.
        make_bid: Returns the bid of this device.
        auctioneer: On rank 0, what makes it the auctioneer.
        membership: Key of the auction, or None to speak in clear.
        notify: Takes a line for the user that ends nothing.

    Raises:
        RequestError: ``make_bid`` failed, or a rank made a mistake.
        PipeEdgeError: The auction has no result.
    """
    silence_s = world.timeout_s + _SILENCE_AFTER_DEADLINE_S
    terms = Terms(world.timeout_s, silence_s, required=frozenset({0}))
    with Session(
        world,
        _FORMS,
        Callbacks(notify=notify),
        terms=terms,
        host=host,
        membership=membership,
    ) as session:
        session.open(None if auctioneer is None else auctioneer.call)
        with decoding("the call of rank 0"):
            call: Call = decode(session.brief(), Call)
        try:
            bid = make_bid(call)
        except RequestError as error:
            with suppress(PipeEdgeError):  # all hear why there is no auction; this rank says it as it is
                _settle(session, _as_json(NoBid(host, one_line(error))), auctioneer, world.timeout_s)
            raise
        sold = _settle(session, _as_json(bid.offer()), auctioneer, world.timeout_s)
        with decoding("the result of rank 0"):
            sold.ranks.index(world.rank)
        return sold


def _settle(
    session: Session[_Offer, Sold, None], offer: _Offer, auctioneer: Auctioneer | None, deadline_s: float
) -> Sold:
    """Send the offer of this rank and return the result, which the auctioneer finds."""
    session.state(offer)
    if auctioneer is not None:
        _find_result(session, auctioneer, deadline_s)
    return session.plan()


def _find_result(session: Session[_Offer, Sold, None], auctioneer: Auctioneer, deadline_s: float) -> None:
    def review(rank: int, offer: _Offer) -> Refusal | None:
        try:
            auctioneer.sale.take(rank, offer)
        except RequestError as error:
            return Refusal(one_line(error))
        return None

    def decide(offers: Mapping[int, _Offer]) -> Announcement[Sold] | Refusal:
        for failure in session.left_out.values():
            auctioneer.warn(absence_line(failure, deadline_s))
        try:
            sold = auctioneer.sell(auctioneer.sale.bids(offers))
        except RequestError as error:
            return Refusal(one_line(error))
        return Announcement(sold, participants=())

    session.decide(decide, review)


def _as_json(offer: Offer | NoBid) -> _Offer:
    return Raw(encode(offer))
