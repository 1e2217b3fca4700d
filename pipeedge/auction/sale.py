"""Apply the rules of the sale, without sockets or clocks. Connections are numbers; replies are returned.

    a bidder    hello {rank, world, host}   bid {host, type_name, ...}   failed {line, exit_code}
    to it       call {model_name, ...}      result {...} or verdict {line, exit_code}

A rank that has not bid by the deadline, or is gone, is named and left out. An invalid bid is a mistake, not
a missing bid: it ends the auction for all with one line, because nobody would find the mistake otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeedge.auction.market import Bid, Call, contradiction
from pipeedge.base.errors import EXIT_REQUEST, PeerFailedError, PipeEdgeError, RequestError
from pipeedge.base.fields import MALFORMED, text, whole_number
from pipeedge.control.messages import Message

__all__ = ["Sale", "Sold", "verdict"]

_MAX_LINE = 2000


def verdict(line: str, exit_code: int = EXIT_REQUEST) -> Message:
    """Return the message that ends the auction, for one bidder or for all."""
    return Message("verdict", {"line": line, "exit_code": exit_code})


class Sale:
    """State of the auction, as the auctioneer sees it.

    Args:
        call: the call for bids.
        world_size: number of ranks, including ours.
        own: our own bid, as rank 0.
        expected: returns the bid that our profiles predict for a device's type, or None if unknown.
    """

    def __init__(
        self, call: Call, *, world_size: int, own: Bid, expected: Callable[[Bid], Bid | None]
    ) -> None:
        self._call = call
        self._world_size = world_size
        self._expected = expected
        self._bids: dict[int, Bid] = {0: own}
        self._hosts: dict[int, str] = {0: own.host}
        self._rank_of: dict[int, int] = {}
        self._gone: set[int] = set()
        self.error: PipeEdgeError | None = None
        """Reason why the auction cannot continue, or None."""

    @property
    def over(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self.error is not None or len(self._bids.keys() | self._gone) == self._world_size

    def bids(self) -> dict[int, Bid]:
        """Return the bids that arrived, by rank."""
        return dict(sorted(self._bids.items()))

    def silent(self) -> list[str]:
        """Describe the ranks that have not bid, a line each."""
        missing = (rank for rank in range(self._world_size) if rank not in self._bids)
        return [
            f"rank {rank} (on {self._hosts[rank]}) {'is gone' if rank in self._gone else 'made no bid'}"
            if rank in self._hosts
            else f"rank {rank} never appeared"
            for rank in missing
        ]

    def bidders(self) -> dict[int, int]:
        """Return the connections of the ranks that have bid, with their ranks."""
        return {number: rank for number, rank in self._rank_of.items() if rank in self._bids}

    def received(self, connection: int, message: Message) -> list[tuple[int, Message]]:
        """Handle a message, and return the replies with their connections."""
        rank = self._rank_of.get(connection)
        try:
            if rank is None:
                return self._hello(connection, message)
            self._from_bidder(rank, message)
        except (*MALFORMED, MemoryError) as error:
            if rank is None:
                line = "rank 0 cannot read this rank's first message; run the same version on all ranks"
                return [(connection, verdict(line))]
            self._end(RequestError(f"the bid of rank {rank} (on {self._hosts[rank]}) is invalid: {error}"))
        return []

    def closed(self, connection: int) -> None:
        """Handle the loss of a connection."""
        rank = self._rank_of.pop(connection, None)
        if rank is not None and rank not in self._bids:
            self._gone.add(rank)

    def _hello(self, connection: int, message: Message) -> list[tuple[int, Message]]:
        if message.kind != "hello":
            raise ValueError(message.kind)
        world = whole_number(message.body["world"])
        rank = whole_number(message.body["rank"])
        host = _line(message.body["host"])
        who = f"rank {rank} on {host}"
        theirs = f"{who} was started with WORLD {world}, rank 0 with {self._world_size}"
        if rank in self._hosts:
            # A process that asks for a rank that is taken, or does not exist, ends only itself.
            taken = f"rank {rank} is already there, on {self._hosts[rank]}: start each rank once"
            return [(connection, verdict(taken if world == self._world_size else f"{theirs}: {taken}"))]
        if rank >= self._world_size:
            return [(connection, verdict(f"rank {rank} is outside the world of {self._world_size}"))]
        if world != self._world_size:
            self._end(RequestError(theirs))
            return [(connection, verdict(theirs))]
        self._rank_of[connection] = rank
        self._hosts[rank] = host
        for other, known in self._hosts.items():
            if known == host and other != rank:
                self._end(
                    RequestError(
                        f"ranks {other} and {rank} are both named {host}; give each its own -H/--host"
                    )
                )
        return [(connection, Message("call", self._call.to_body()))]

    def _from_bidder(self, rank: int, message: Message) -> None:
        if message.kind == "failed":
            line = f"rank {rank} (on {self._hosts[rank]}) cannot bid: {_line(message.body['line'])}"
            kind = RequestError if message.body["exit_code"] == EXIT_REQUEST else PeerFailedError
            self._end(kind(line))
        elif message.kind == "bid" and rank not in self._bids:
            self._take(rank, Bid.from_body(message.body, self._call))
        else:
            raise ValueError(f"a second bid, or no bid at all ({message.kind})")

    def _take(self, rank: int, bid: Bid) -> None:
        if bid.host != self._hosts[rank]:
            raise ValueError(f"it is the bid of {bid.host}")
        expected = self._expected(bid)
        wrong = contradiction(bid, expected) if expected is not None else None
        if wrong is not None:
            self._end(
                RequestError(
                    f"the bid of rank {rank} (on {bid.host}) contradicts the profile of {bid.type_name} that "
                    f"rank 0 has: {wrong}; use the same files everywhere"
                )
            )
            return
        self._bids[rank] = bid.filtered(self._call)

    def _end(self, error: PipeEdgeError) -> None:
        self.error = self.error or error


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

    def message(self) -> Message:
        """Return the message to the bidders."""
        return Message("result", dict(vars(self)))

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
