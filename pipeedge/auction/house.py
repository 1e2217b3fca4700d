"""Where auctioneer and bidders meet: sockets, a deadline, and the messages of ``pipeedge.control``."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable

from pipeedge.auction.market import Bid, Call
from pipeedge.auction.sale import Sale, Sold, verdict
from pipeedge.base.errors import (
    EXIT_REQUEST,
    DeadlineError,
    PeerFailedError,
    PipeEdgeError,
    RequestError,
    exit_code,
    one_line,
)
from pipeedge.base.fields import MALFORMED, text
from pipeedge.base.wording import figure
from pipeedge.control.member import Member
from pipeedge.control.messages import Decoder, Message, encode

__all__ = ["House", "attend"]

_SEND_S = 5.0
"""For a bidder to take what we send; it is short."""
_STRANGERS = 16


class House:
    """The auctioneer's end. A context manager: it closes what it opens, and the listener.

    Args:
        listener: bound and listening.
        sale: the rules.
        world_size: ranks, ours included.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        sale: Sale,
        *,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._sale = sale
        self._most = world_size + _STRANGERS
        self._clock = clock
        self._peers: dict[int, tuple[socket.socket, Decoder]] = {}
        self._opened = 0

    def __enter__(self) -> House:
        return self

    def __exit__(self, *exc: object) -> None:
        for sock, _ in self._peers.values():
            sock.close()
        self._listener.close()

    def gather(self, deadline_s: float) -> None:
        """Take bids until all have come, one cannot be, or the time is over."""
        until = self._clock() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, None)
            while not self._sale.over and (left := until - self._clock()) > 0:
                for key, _ in selector.select(left):
                    if key.data is None:
                        self._accept(selector)
                    else:
                        self._read(selector, key.data)

    def announce(self, sold: Sold) -> None:
        """Tell all that have bid; the others hear that they are too late."""
        bidders = self._sale.bidders()
        late = verdict("the auction is over, and your bid was not there by its deadline")
        for number in list(self._peers):
            self._send(number, sold.message() if number in bidders else late)

    def refuse(self, error: Exception) -> None:
        """Tell everybody why there is no result."""
        for number in list(self._peers):
            self._send(number, verdict(one_line(error), exit_code(error)))

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it was gone before we got to it
        if len(self._peers) >= self._most:
            sock.close()
            return
        sock.settimeout(_SEND_S)
        self._peers[self._opened] = (sock, Decoder())
        selector.register(sock, selectors.EVENT_READ, self._opened)
        self._opened += 1

    def _read(self, selector: selectors.BaseSelector, number: int) -> None:
        if number not in self._peers:
            return
        sock, decoder = self._peers[number]
        try:
            data = sock.recv(1 << 18)
            messages = decoder.feed(data) if data else []
        except (OSError, PeerFailedError):
            data, messages = b"", []
        answers = [answer for message in messages for answer in self._sale.received(number, message)]
        for connection, answer in answers:
            self._send(connection, answer)
        if not data and number in self._peers:
            selector.unregister(sock)
            self._drop(number)

    def _send(self, number: int, message: Message) -> None:
        if number not in self._peers:
            return
        try:
            self._peers[number][0].sendall(encode(message))
        except OSError:
            return  # its end shows when we read from it

    def _drop(self, number: int) -> None:
        self._peers.pop(number)[0].close()
        self._sale.closed(number)


def attend(
    addr: str,
    port: int,
    *,
    rank: int,
    world_size: int,
    host: str,
    make_bid: Callable[[Call], Bid],
    timeout_s: float,
    result_within_s: float,
) -> Sold:
    """Take part as a bidder: register, bid and wait for the result.

    Raises:
        DeadlineError: the auctioneer cannot be reached, or does not answer in time.
        PipeEdgeError: ``make_bid`` failed, or the auction has no result.
    """
    with Member.dial(addr, port, timeout_s=timeout_s) as sock:
        heard = _listen(sock, timeout_s)
        sock.sendall(encode(Message("hello", {"rank": rank, "world": world_size, "host": host})))
        try:
            try:
                bid = make_bid(Call.from_body(heard("call", timeout_s)))
            except RequestError as error:
                body = {"line": one_line(error), "exit_code": exit_code(error)}
                sock.sendall(encode(Message("failed", body)))
                raise
            sock.sendall(encode(Message("bid", bid.to_body())))
            sold = Sold.from_body(heard("result", result_within_s))
            sold.ranks.index(rank)
            return sold
        except MALFORMED as error:
            raise PeerFailedError("what rank 0 says is not of this program's version") from error
        except ConnectionError as error:
            raise PeerFailedError("rank 0 is gone: it was killed or lost its network") from error


def _listen(sock: socket.socket, timeout_s: float) -> Callable[[str, float], dict[str, object]]:
    decoder = Decoder()
    waiting: list[Message] = []

    def heard(kind: str, within_s: float) -> dict[str, object]:
        sock.settimeout(within_s)
        while not waiting:
            try:
                data = sock.recv(1 << 16)
            except TimeoutError:
                raise DeadlineError(f"rank 0 has said nothing for {figure(within_s)} s") from None
            if not data:
                raise PeerFailedError("rank 0 is gone: it was killed or lost its network")
            waiting.extend(decoder.feed(data))
        sock.settimeout(timeout_s)
        message = waiting.pop(0)
        if message.kind == "verdict":
            raise _error(message)
        if message.kind != kind:
            raise ValueError(message.kind)
        return dict(message.body)

    return heard


def _error(message: Message) -> PipeEdgeError:
    line = text(message.body["line"])
    return RequestError(line) if message.body["exit_code"] == EXIT_REQUEST else PeerFailedError(line)
