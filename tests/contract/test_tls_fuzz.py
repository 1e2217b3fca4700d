"""Damage TLS between two ends in this thread: handshakes and records, at any byte.

    dialing end ──socket──> [damaged here] ──socket──> accepting end
                <──socket── [damaged here] <──socket──

Nothing waits: sockets do not block, and a turn moves what each end has sent. So a hang would show as turns
without an end, and what an end does depends on the bytes alone.
"""

from __future__ import annotations

import random
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
from mutations import mutate_bytes, rounds

from pipeedge.base.errors import PeerError
from pipeedge.transport import sealed
from pipeedge.transport.dialling import NotAMemberError, refusals
from pipeedge.transport.membership import Membership
from pipeedge.transport.new_key import make_key
from pipeedge.transport.sealed import SealedSocket
from pipeedge.transport.tcp_sending import lost
from pipeedge.transport.wires import Connections

ROUNDS = rounds(60)
FRAME = bytes(range(251)) * 160
"""Data of three records, each of which can be damaged; it fits into the buffers of the sockets."""
TURNS = 40
"""More turns than an exchange takes, damaged or not."""
MOST_PENDING = 2 * sealed._BATCH_RECORDS * sealed._RECORD_BYTES
"""Encrypted bytes that an end may hold: what it has read at once, and a record that is not complete."""


Contexts: TypeAlias = tuple[ssl.SSLContext, ssl.SSLContext]
"""Settings of the end that dials, and of the one that accepts."""


@dataclass
class Way:
    """One direction, with the damage that is done to it."""

    chance: random.Random
    damaged_at: int | None
    """Turn in which its bytes are damaged, or None."""
    turn: int = 0
    whole: bool = True
    """Whether all bytes have passed as they were sent."""
    seen: list[bytes] = field(default_factory=list)

    def move(self, source: socket.socket, target: socket.socket) -> bool:
        """Move what there is; return whether there was anything."""
        try:
            data = source.recv(1 << 20)
        except BlockingIOError:
            return False
        passed = self._damage(data) if data and self.turn == self.damaged_at else data
        self.turn += bool(data)
        self.whole &= passed == data
        self.seen.append(data)
        target.sendall(passed)
        return bool(data)

    def _damage(self, data: bytes) -> bytes:
        kind = self.chance.randrange(4)
        if kind == 0:  # something that was said before, or the same again
            return data + self.chance.choice([*self.seen, data])
        if kind == 1:
            return data[: self.chance.randrange(len(data))]
        return mutate_bytes(data, self.chance)


class End:
    """An end that shakes hands, sends a frame, and then receives one."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, accepts: bool) -> None:
        self.sealed = SealedSocket(sock, context, accepts=accepts)
        self.error: Exception | None = None
        self.complete = False
        self.received = bytearray(len(FRAME))
        self.sent = 0
        self.most_pending = 0
        self._memory = memoryview(self.received)

    def step(self) -> None:
        """Go on as far as the bytes that have arrived allow, but read nothing after an error."""
        try:
            self._go_on()
        finally:
            self.most_pending = max(self.most_pending, self.sealed.sealing.from_network.pending)

    def _go_on(self) -> None:
        if self.error is not None:
            return
        try:
            with refusals(self.sealed):
                while not self.complete:
                    self.complete = self.sealed.shake_hands()
        except BlockingIOError:
            return
        except (OSError, PeerError) as error:
            self.error = error
            return
        try:
            if self.sent < len(FRAME):
                self.sent += self.sealed.send_at_once(memoryview(FRAME)[self.sent :])
            while self._memory:
                part = self.sealed.recv(len(self._memory))
                if not part:
                    raise ConnectionResetError("connection closed by the other end")
                self._memory[: len(part)] = part
                self._memory = self._memory[len(part) :]
        except BlockingIOError:
            return
        except OSError as error:
            self.error = lost(1, "receiving", error, Connections())

    @property
    def arrived(self) -> bytes:
        """What has been received."""
        return bytes(self.received[: len(FRAME) - len(self._memory)])


@contextmanager
def joined(contexts: Contexts) -> Iterator[tuple[End, End, list[socket.socket]]]:
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(2)]
        for sock in (one for pair in pairs for one in pair):
            sock.setblocking(False)
            stack.enter_context(sock)
        yield (
            End(pairs[0][0], contexts[0], accepts=False),
            End(pairs[1][0], contexts[1], accepts=True),
            [pairs[0][1], pairs[1][1]],
        )


def exchange(contexts: Contexts, there: Way, back: Way) -> tuple[End, End]:
    """Let both ends exchange frames until nothing moves any more."""
    with joined(contexts) as (dialing, accepting, (left, right)):
        for _ in range(TURNS):
            dialing.step()
            accepting.step()
            moved = there.move(left, right)
            if not (back.move(right, left) or moved):
                return dialing, accepting
    raise AssertionError(f"{TURNS} turns were not enough")


@pytest.fixture(scope="module")
def contexts() -> Contexts:
    membership = Membership.from_text(make_key(), "a key for tests")
    return membership.client_context(), membership.server_context()


def test_whole_bytes_arrive(contexts: Contexts) -> None:
    ends = exchange(contexts, Way(random.Random(0), None), Way(random.Random(0), None))
    assert [(end.arrived, end.error) for end in ends] == [(FRAME, None)] * 2


def test_a_batch_is_encrypted_as_full_records(contexts: Contexts) -> None:
    """Receivers ask the network for as many bytes as whole records have."""
    end, _ = exchange(contexts, Way(random.Random(0), None), Way(random.Random(0), None))
    end.sealed.sealing.tls.write(bytes(sealed._BATCH_DATA_BYTES))
    assert end.sealed.sealing.to_network.pending == sealed._BATCH_RECORDS * sealed._RECORD_BYTES


def test_damaged_bytes_are_never_read(contexts: Contexts) -> None:
    damaged, refused = 0, 0
    for seed in range(ROUNDS):
        chance = random.Random(seed)
        turns: list[int | None] = [chance.randrange(3), None]
        chance.shuffle(turns)
        there, back = (Way(chance, turn) for turn in turns)
        ends = exchange(contexts, there, back)
        whole = there.whole and back.whole
        for end in ends:
            assert FRAME.startswith(end.arrived), seed
            assert end.most_pending <= MOST_PENDING, seed
            assert not whole or (end.arrived, end.error) == (FRAME, None), seed
            if end.error is not None:
                assert isinstance(end.error, (ConnectionResetError, NotAMemberError, PeerError)), seed
                assert "\n" not in str(end.error), seed
            refused += end.error is not None
        damaged += not whole
    assert damaged > ROUNDS // 4
    assert refused > ROUNDS // 8
