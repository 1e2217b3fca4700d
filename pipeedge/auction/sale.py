"""The rules of the sale, touching neither socket nor clock. Connections are numbers; what to send comes back.

    a bidder    hello {rank, world, host}   bid {host, type_name, ...}   failed {line, exit_code}
    to it       call {model_name, ...}      result {...} or verdict {line, exit_code}

Whoever has not bid by the deadline, or is gone, is left out and named. A bid that cannot be is no silence
but a mistake, which ends the auction for all with one line: nobody would find it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeedge.auction.market import Bid, Call, contradiction
from pipeedge.base.errors import EXIT_REQUEST, PeerFailedError, PipeEdgeError, RequestError
from pipeedge.base.fields import MALFORMED, text, whole_number
from pipeedge.base.wording import count
from pipeedge.control.messages import Message

__all__ = ["Sale", "Sold", "verdict"]

_MAX_LINE = 2000


def verdict(line: str, exit_code: int = EXIT_REQUEST) -> Message:
    """The end of the auction, for one or for all."""
    return Message("verdict", {"line": line, "exit_code": exit_code})


class Sale:
    """What the auctioneer knows.

    Args:
        call: what bids are wanted for.
        world_size: ranks, ours included.
        own: our own bid, rank 0's.
        expected: what a device of a type should bid, by profiles that we have; None: not known.
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
        """Why the auction cannot go on, if it cannot."""

    @property
    def over(self) -> bool:
        """Nothing is left to wait for."""
        return self.error is not None or len(self._bids.keys() | self._gone) == self._world_size

    def bids(self) -> dict[int, Bid]:
        """Those that came, by rank."""
        return dict(sorted(self._bids.items()))

    def silent(self) -> list[str]:
        """Who has not bid, in words."""
        missing = (rank for rank in range(self._world_size) if rank not in self._bids)
        return [
            f"rank {rank} (on {self._hosts[rank]}) {'is gone' if rank in self._gone else 'made no bid'}"
            if rank in self._hosts
            else f"rank {rank} never appeared"
            for rank in missing
        ]

    def bidders(self) -> dict[int, int]:
        """The connections of those that have bid, with their ranks."""
        return {number: rank for number, rank in self._rank_of.items() if rank in self._bids}

    def received(self, connection: int, message: Message) -> list[tuple[int, Message]]:
        """A message came."""
        rank = self._rank_of.get(connection)
        try:
            if rank is None:
                return self._hello(connection, message)
            self._from_bidder(rank, message)
        except (*MALFORMED, MemoryError) as error:
            if rank is None:
                return [(connection, verdict("what you said is no hello; do all run the same version?"))]
            self._end(RequestError(f"the bid of rank {rank} (on {self._hosts[rank]}) cannot be: {error}"))
        return []

    def closed(self, connection: int) -> None:
        """A connection is gone."""
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
        theirs = f"{who} says the world has {count(world, 'rank')}, rank 0 says {self._world_size}"
        if rank in self._hosts:
            # Whoever asks for a seat that is taken, or does not exist, ends nothing but itself.
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
                        f"ranks {other} and {rank} are both called {host}; give each its own -H/--host"
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
            raise ValueError(f"it is for {bid.host}")
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
    """Text of a peer, as it may be shown: short and on one line."""
    line = text(value, _MAX_LINE)
    if not line:
        raise ValueError("nothing where text was due")
    return line


@dataclass(frozen=True)
class Sold:
    """What the auctioneer announces."""

    hosts: tuple[str, ...]
    """Of those that bid, by their ranks; they are the ranks of a run."""
    ranks: tuple[int, ...]
    """That they had in the auction."""
    partition: tuple[int, ...]
    """First and last layer of each stage, from 1."""
    order: tuple[int, ...]
    """For each stage, the index of its device in ``hosts``."""
    data_rank: int
    """Likewise, of the data host."""

    def message(self) -> Message:
        """For the bidders."""
        return Message("result", dict(vars(self)))

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Sold:
        """From a message; raises KeyError, TypeError or ValueError where it is none."""
        numbers = {
            name: tuple(whole_number(number) for number in body[name])
            for name in ("ranks", "partition", "order")
        }
        hosts = tuple(_line(host) for host in body["hosts"])
        if len(numbers["ranks"]) != len(hosts) or len(numbers["partition"]) != 2 * len(numbers["order"]):
            raise ValueError("a result whose parts do not fit each other")
        for device in numbers["order"]:
            whole_number(device, below=len(hosts))
        return cls(hosts=hosts, data_rank=whole_number(body["data_rank"], below=len(hosts)), **numbers)

    def runtime_arguments(self, rank: int) -> list[str]:
        """Of ``runtime.py``, for the one that had ``rank`` in the auction."""
        return [
            *(str(self.ranks.index(rank)), str(len(self.ranks))),
            *("-pt", ",".join(map(str, self.partition))),
            *("-r", ",".join(map(str, self.order))),
            *("-H", ",".join(self.hosts)),
            *("-D", str(self.data_rank)),
        ]
