"""Decide which bids count: check each as it comes, and say who is left out. Pure.

A rank that has not bid by the deadline, or is gone, is named and left out. An invalid bid is a mistake, not
a missing bid: it ends the auction for all with one line, because nobody would find the mistake otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec import Raw, Struct

from pipeedge.auction.market import Bid, Call, NoBid, Offer, contradiction
from pipeedge.base.errors import RequestError
from pipeedge.base.fields import MALFORMED, Count, Name, decode
from pipeedge.base.wording import figure, printable
from pipeedge.control.failures import Failure, FailureKind

__all__ = ["Sale", "Sold", "absence_line"]


class Sale:
    """The bids that have come.

    Args:
        call: The call for bids.
        expected: Returns the bid that our profiles predict for a device's type, or None if unknown.
    """

    def __init__(self, call: Call, expected: Callable[[Bid], Bid | None]) -> None:
        self._call = call
        self._expected = expected
        self._bids: dict[int, Bid] = {}

    def take(self, rank: int, offer: bytes | Raw) -> None:
        """Take the offer of a rank, an ``Offer`` or a ``NoBid`` as JSON.

        Raises:
            RequestError: The auction cannot go on: the rank made a mistake, or cannot bid.
        """
        who = f"rank {rank}"
        try:
            who = f"rank {rank} (on {decode(offer, _Bidder).host})"
            told: Offer | NoBid = decode(offer, Offer | NoBid)
            if isinstance(told, NoBid):
                raise RequestError(f"{who} cannot bid: {told.reason}")
            bid = Bid.of(told, self._call)
        except (*MALFORMED, MemoryError) as error:
            raise RequestError(f"the bid of {who} is invalid: {printable(error)}") from error
        for other, known in self._bids.items():
            if known.host == bid.host and other != rank:
                first, second = sorted((other, rank))
                raise RequestError(
                    f"ranks {first} and {second} are both named {bid.host}; give each its own -H/--host"
                )
        expected = self._expected(bid)
        wrong = contradiction(bid, expected) if expected is not None else None
        if wrong is not None:
            raise RequestError(
                f"the bid of {who} contradicts the profile of {bid.type_name} that rank 0 has: {wrong}; use "
                "the same files everywhere"
            )
        self._bids[rank] = bid.filtered(self._call)

    def bids(self, ranks: Iterable[int]) -> dict[int, Bid]:
        """Return the bids of ``ranks``, in their order."""
        return {rank: self._bids[rank] for rank in sorted(ranks)}


def absence_line(failure: Failure, deadline_s: float) -> str:
    """Describe why a rank is left out."""
    phrases = {FailureKind.ABSENT: "never appeared", FailureKind.LATE: "made no bid"}
    if failure.kind in phrases:
        return f"{failure.name} {phrases[failure.kind]} within {figure(deadline_s)} s, and is left out"
    return f"{failure.line}; it is left out"


class _Bidder(Struct):
    """The field of an offer that names its sender."""

    host: Name


@dataclass(frozen=True)
class Sold:
    """The result that the auctioneer announces."""

    hosts: tuple[Name, ...]
    """Hosts that made a bid, in the order of their ranks in the run that follows."""
    ranks: tuple[Count, ...]
    """Rank of each host in the auction."""
    partition: tuple[Count, ...]
    """First and last layer of each stage, from 1."""
    order: tuple[Count, ...]
    """Index in ``hosts`` of each stage's device."""
    data_rank: Count
    """Index in ``hosts`` of the data host."""

    def __post_init__(self) -> None:
        if len(self.ranks) != len(self.hosts) or len(self.partition) != 2 * len(self.order):
            raise ValueError("the parts of a result do not match")
        if any(device >= len(self.hosts) for device in (*self.order, self.data_rank)):
            raise ValueError(f"a device outside the {len(self.hosts)} that made a bid")
        if not all(self.hosts):
            raise ValueError("a host has no name")

    def runtime_arguments(self, rank: int) -> list[str]:
        """Return the arguments of ``runtime.py`` for the process that had ``rank`` in the auction."""
        return [
            *(str(self.ranks.index(rank)), str(len(self.ranks))),
            *("-pt", ",".join(map(str, self.partition))),
            *("-r", ",".join(map(str, self.order))),
            *("-H", ",".join(self.hosts)),
            *("-D", str(self.data_rank)),
        ]
