"""Decide which bids count: check each as it comes, and say who is left out. Pure.

A rank that has not bid by the deadline, or is gone, is named and left out. An invalid bid is a mistake, not
a missing bid: it ends the auction for all with one line, because nobody would find the mistake otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeedge.auction.market import Bid, Call, contradiction
from pipeedge.base.errors import RequestError, one_line
from pipeedge.base.fields import MALFORMED, text, whole_number
from pipeedge.base.wording import figure
from pipeedge.control.failures import Failure, FailureKind

__all__ = ["Sale", "Sold", "absence_line", "no_bid"]

_MAX_LINE = 2000


def no_bid(host: str, error: RequestError) -> dict[str, Any]:
    """Return the offer of a device that cannot bid, for the reason in ``error``."""
    return {"host": host, "refusal": one_line(error)}


class Sale:
    """The bids that have come.

    Args:
        call: the call for bids.
        expected: returns the bid that our profiles predict for a device's type, or None if unknown.
    """

    def __init__(self, call: Call, expected: Callable[[Bid], Bid | None]) -> None:
        self._call = call
        self._expected = expected
        self._bids: dict[int, Bid] = {}

    def take(self, rank: int, offer: Mapping[str, Any]) -> None:
        """Take the offer of a rank: the body of its bid, or what ``no_bid`` returns.

        Raises:
            RequestError: the auction cannot go on: the rank made a mistake, or cannot bid.
        """
        who = f"rank {rank}"
        try:
            who = f"rank {rank} (on {_line(offer['host'])})"
            refusal = _line(offer["refusal"]) if "refusal" in offer else None
            bid = Bid.from_body(offer, self._call) if refusal is None else None
        except (*MALFORMED, MemoryError) as error:
            raise RequestError(f"the bid of {who} is invalid: {error}") from error
        if bid is None:
            raise RequestError(f"{who} cannot bid: {refusal}")
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


def _line(value: object) -> str:
    """Check text from a peer that will be shown: short and on one line."""
    line = text(value, _MAX_LINE)
    if not line:
        raise ValueError("a text is empty")
    return line


@dataclass(frozen=True)
class Sold:
    """The result that the auctioneer announces."""

    hosts: tuple[str, ...]
    """Hosts that made a bid, in the order of their ranks in the run that follows."""
    ranks: tuple[int, ...]
    """Rank of each host in the auction."""
    partition: tuple[int, ...]
    """First and last layer of each stage, from 1."""
    order: tuple[int, ...]
    """Index in ``hosts`` of each stage's device."""
    data_rank: int
    """Index in ``hosts`` of the data host."""

    def to_body(self) -> dict[str, Any]:
        """Return the body of a message."""
        return dict(vars(self))

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Sold:
        """Parse the body of a message. Raises KeyError, TypeError or ValueError if it is malformed."""
        numbers = {
            name: tuple(whole_number(number) for number in body[name])
            for name in ("ranks", "partition", "order")
        }
        hosts = tuple(_line(host) for host in body["hosts"])
        if len(numbers["ranks"]) != len(hosts) or len(numbers["partition"]) != 2 * len(numbers["order"]):
            raise ValueError("the parts of a result do not match")
        for device in numbers["order"]:
            whole_number(device, below=len(hosts))
        return cls(hosts=hosts, data_rank=whole_number(body["data_rank"], below=len(hosts)), **numbers)

    def runtime_arguments(self, rank: int) -> list[str]:
        """Return the arguments of ``runtime.py`` for the process that had ``rank`` in the auction."""
        return [
            *(str(self.ranks.index(rank)), str(len(self.ranks))),
            *("-pt", ",".join(map(str, self.partition))),
            *("-r", ",".join(map(str, self.order))),
            *("-H", ",".join(self.hosts)),
            *("-D", str(self.data_rank)),
        ]
