"""The ends of this rank's links: on the network, or in memory if this rank has the last stage and the data.

The first link has no ends where both would be here: the first stage takes the input itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeedge.base.crew import Crew
from pipeedge.run.activity import Activity
from pipeedge.run.worker import Incoming, SendingEnd
from pipeedge.transport.base import Link, Receiver, Transport
from pipeedge.transport.loopback import LocalLink

__all__ = ["LinkEnds"]


class LinkEnds:
    """Ends of links on one rank: link ``n`` leads to stage n, the last one back to the data rank.

    Args:
        rank: This rank.
        links: All links of the plan, in order.
        transport: Transport of the links that leave this rank.
        activity: Activity of this rank.
        crew: Threads of this rank.
    """

    def __init__(
        self, rank: int, links: Sequence[Link], transport: Transport, activity: Activity, crew: Crew
    ) -> None:
        self._links = links
        self._transport = transport
        self._activity = activity
        self._crew = crew
        self._receipting: list[Receiver] = []
        self._back = LocalLink() if links[-1].source == links[-1].destination == rank else None
        if self._back is not None:
            crew.on_stop(self._back.close)

    def outgoing(self, number: int) -> SendingEnd:
        """Open the sending end of link ``number``."""
        link = self._links[number]
        if self._back is not None and link is self._links[-1]:
            return SendingEnd(self._back)
        return SendingEnd(self._transport.sender(link), link.destination, link.receipts)

    def incoming(self, number: int) -> Incoming:
        """Open the receiving end of link ``number``, where -1 is the last one."""
        link = self._links[number]
        if self._back is not None and link is self._links[-1]:
            return Incoming(self._back, None, self._activity)
        receiver = self._transport.receiver(link)
        if link.receipts:
            self._crew.on_stop(receiver.close)
            self._receipting.append(receiver)
        return Incoming(receiver, link.source, self._activity)

    def start(self) -> None:
        """Begin to send receipts."""
        for receiver in self._receipting:
            self._crew.start("receipts", receiver.run)
