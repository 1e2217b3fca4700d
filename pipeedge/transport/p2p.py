"""Links among the ranks of a gloo group (``-c p2p``, the default); ``p2p_links`` has their ends.

    sending rank                                      receiving rank
    P2PSender ──frame, isend──> kernel ──TCP──> kernel ──posted receive──> P2PReceiver

One timed-out wait closes every connection of a gloo group, so gloo's timeouts are not used: the hub of
``pipeedge.control`` monitors all ranks, and ends a run in which one falls silent.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from pipeedge.base.errors import PeerFailedError
from pipeedge.transport.base import Link, Receiver, Rendezvous
from pipeedge.transport.lifecycle import Lifecycle
from pipeedge.transport.p2p_links import P2PReceiver, P2PSender, ReceiptingReceiver, brief
from pipeedge.transport.rendezvous import connect_store, gloo_group

__all__ = ["P2PTransport"]

_ABORT_TAG = 2
"""Tag of gloo's messages under which nothing is ever sent; ``p2p_links`` has the others."""
_AT_ONCE = datetime.timedelta(milliseconds=1)
"""Shortest timeout of gloo's; 0 would mean none."""


class P2PTransport:
    """Links among the ranks of one gloo group: ``members[i]`` has number i in it.

    A process can have several. No call of gloo's wakes a thread that waits in it, but the fault that forbids
    its timeouts does: ``abort`` lets one wait time out on purpose, upon which gloo closes all connections of
    the group, and every wait in it fails.

    Args:
        rank: This rank.
        end_store: Called when all members are connected and need the store no longer.
    """

    closes_together = False

    def __init__(self, rank: int, end_store: Callable[[], None] = lambda: None) -> None:
        self._rank = rank
        self._end_store = end_store
        self._lifecycle = Lifecycle()
        self._index: Mapping[int, int] = {}
        self._group: Any = None
        self._receivers: list[Receiver] = []

    def exposure(self, addresses: Sequence[str]) -> None:
        """Return None: gloo reads numbers, and runs nothing that a peer sends."""

    def open(self, rendezvous: Rendezvous) -> None:
        """Connect to all members, and wait until they need the store no longer."""
        with self._lifecycle.opening():
            store = connect_store(rendezvous.addr, rendezvous.store_port, timeout_s=rendezvous.timeout_s)
            members = rendezvous.members
            self._index = {member: index for index, member in enumerate(members)}
            try:
                self._group = gloo_group(store, index=self._index[self._rank], size=len(members))
                self._group.barrier().wait()
                self._end_store()
            except (RuntimeError, ValueError) as error:
                self._group = None
                peers = ", ".join(str(member) for member in members if member != self._rank)
                raise PeerFailedError(
                    f"the links of rank {self._rank} to {peers} could not be opened: {brief(error)}"
                ) from error

    def sender(self, link: Link) -> P2PSender:
        """Open the sending end of ``link``."""
        self._lifecycle.check_open()
        return P2PSender(self._group, self._index[link.destination], link)

    def receiver(self, link: Link) -> Receiver:
        """Open the receiving end of ``link``, with its receives already posted."""
        self._lifecycle.check_open()
        kind = ReceiptingReceiver if link.receipts else P2PReceiver
        receiver = kind(self._group, self._index[link.source], link)
        self._receivers.append(receiver)
        return receiver

    def abort(self) -> None:
        """Close all connections of the group, which fails the waits on them."""
        if not self._lifecycle.abort():
            return
        for receiver in list(self._receivers):
            receiver.close()
        peers = [index for member, index in self._index.items() if member != self._rank]
        group = self._group
        if group is not None and peers:
            with suppress(RuntimeError):  # timed out, as intended, or the connections are lost already
                group.recv([torch.empty(1, dtype=torch.uint8)], peers[0], _ABORT_TAG).wait(_AT_ONCE)

    def close(self) -> None:
        """Leave the group; its connections close with the last end of a link that refers to it."""
        self._lifecycle.close()
        self._group = None
        self._receivers = []
