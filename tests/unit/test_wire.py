"""Test the ends of a control connection in memory: any chunking, any stranger, any damage."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from mutations import rounds

from pipeedge.base.errors import EXIT_REQUEST
from pipeedge.control.messages import FROM_HUB, Decoder, Hello, Verdict, frame
from pipeedge.control.wire import ClearEnd, SealedEnd, WireEnd
from pipeedge.transport.membership import Membership
from pipeedge.transport.new_key import make_key
from pipeedge.transport.sealed import Sealing

KEY = Membership.from_text(make_key(), "--key k.pem")
OTHER_KEY = Membership.from_text(make_key(), "--key other.pem")
SERVER, CLIENT = KEY.server_context(), KEY.client_context()


def pass_on(source: WireEnd, target: WireEnd, sizes: list[int]) -> bytes:
    """Bring what ``source`` sends to ``target`` in pieces of ``sizes``, over and over."""
    data, heard, number = source.outgoing(), b"", 0
    while data:
        size = sizes[number % len(sizes)]
        heard += target.receive(data[:size])
        data, number = data[size:], number + 1
    return heard


def joined(sizes: list[int] | None = None) -> tuple[SealedEnd, SealedEnd]:
    """Return two ends after their handshake: the hub's, and a member's."""
    hub, member = SealedEnd(SERVER), SealedEnd(Sealing(CLIENT, accepts=False))
    for _ in range(2):
        pass_on(member, hub, sizes or [1 << 16])
        pass_on(hub, member, sizes or [1 << 16])
    assert hub.established
    assert member.established
    return hub, member


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=8), st.lists(st.binary(max_size=40_000), max_size=4)
)
def test_messages_arrive_whole_in_any_pieces(sizes: list[int], messages: list[bytes]) -> None:
    hub, member = joined(sizes)
    for message in messages:
        hub.put(message)
    assert pass_on(hub, member, sizes) == b"".join(messages)
    member.put(b"back")
    assert pass_on(member, hub, sizes) == b"back"
    assert hub.failure == member.failure == ""


@given(st.binary(min_size=1, max_size=600))
def test_nothing_that_a_stranger_sends_is_heard_or_raises(data: bytes) -> None:
    end = SealedEnd(SERVER)
    assert end.receive(data) == b""
    assert not end.established
    assert bool(end.failure) or data[0] == 0x16
    if data[0] != 0x16:
        assert end._sealing is SERVER  # no memory is used for TLS


def test_a_damaged_handshake_is_never_completed_by_a_stranger() -> None:
    chance = random.Random(7)
    hello = SealedEnd(Sealing(OTHER_KEY.client_context(), accepts=False)).outgoing()
    for _ in range(rounds(200)):
        data = bytearray(hello)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        end = SealedEnd(SERVER)
        assert end.receive(bytes(data)) == b""
        assert end.receive(chance.randbytes(chance.randint(0, 300))) == b""
        assert not end.established


def test_any_damage_to_a_record_is_noticed() -> None:
    chance = random.Random(8)
    for _ in range(rounds(100)):
        hub, member = joined()
        hub.put(b"first")
        assert pass_on(hub, member, [1 << 16]) == b"first"
        hub.put(b"second")
        data = bytearray(hub.outgoing())
        data[chance.randrange(5, len(data))] ^= 1 << chance.randrange(8)
        assert member.receive(bytes(data)) == b""
        assert member.failure.startswith("sent a damaged record (")
        assert member.receive(b"more") == b""


def test_repeated_and_exchanged_records_are_noticed() -> None:
    for order in ((0, 0), (1, 0)):
        hub, member = joined()
        records = []
        for text in (b"one", b"two"):
            hub.put(text)
            records.append(hub.outgoing())
        heard = b"".join(member.receive(records[number]) for number in order)
        assert heard in (b"", b"one")
        assert member.failure


def test_what_arrives_before_the_damage_is_heard() -> None:
    hub, member = joined()
    hub.put(b"the verdict")
    assert member.receive(hub.outgoing() + b"HTTP/1.1 400\r\n\r\n") == b"the verdict"
    assert member.failure


def test_a_member_without_a_key_is_told_so_in_clear() -> None:
    hub, member = SealedEnd(SERVER), ClearEnd(accepts=False)
    member.put(frame(Hello(1, 2, "pi")))
    assert pass_on(member, hub, [1 << 16]) == b""
    assert hub.failure == "has no key"
    (verdict,) = Decoder(FROM_HUB).feed(pass_on(hub, member, [1 << 16]))
    assert isinstance(verdict, Verdict)
    assert verdict.failure.exit_code == EXIT_REQUEST
    assert "this rank has none: give every rank the same --key" in verdict.failure.cause


def test_a_hub_without_a_key_tells_one_that_has() -> None:
    hub, member = ClearEnd(accepts=True), SealedEnd(Sealing(CLIENT, accepts=False))
    assert pass_on(member, hub, [1 << 16]) == b""
    assert hub.failure == "has a key, and rank 0 has none"
    pass_on(hub, member, [1 << 16])
    assert member.failure == "has no key"


def test_ends_in_clear_change_nothing() -> None:
    hub, member = ClearEnd(accepts=True), ClearEnd(accepts=False)
    data = frame(Hello(1, 2, "pi"))
    member.put(data)
    assert pass_on(member, hub, [3]) == data
    assert hub.outgoing() == b""
