"""Test joining by a code: two ends in memory."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeedge.base.errors import PeerFailedError, RequestError
from pipeedge.nodes.pairing import Guest, Inviter, WrongCodeError, new_code, read_code
from pipeedge.transport.authority import Authority, make_cluster_key, make_node_key, name_in
from pipeedge.transport.membership import Membership

AUTHORITY = Authority.of(Membership.from_text(make_cluster_key(), "k"))
assert AUTHORITY is not None
PRIVATE, PUBLIC = make_node_key()


def exchange(inviter: Inviter, guest: Guest) -> list[bytes]:
    """Let both ends talk until one of them is done; return all messages."""
    messages = [guest.open()]
    while True:
        reply = inviter.hear(messages[-1])
        messages.append(reply)
        answer = guest.hear(reply)
        if answer is None:
            return messages
        messages.append(answer)


def test_who_knows_the_code_gets_a_certificate_for_its_own_key() -> None:
    inviter, guest = Inviter("code", AUTHORITY), Guest("code", "pi2", PUBLIC)
    messages = exchange(inviter, guest)
    assert inviter.joined == "pi2"
    assert guest.grant is not None
    assert guest.grant.cluster == AUTHORITY.certificate
    assert name_in(guest.grant.certificate)[0] == "pi2"
    member = Membership.from_text(f"{PRIVATE}\n{guest.grant.certificate}\n{guest.grant.cluster}", "joined")
    assert member.trusted == AUTHORITY.certificate.strip()
    sent = b"".join(messages)
    assert PRIVATE.encode() not in sent
    assert b"pi2" not in sent
    assert b"CERTIFICATE" not in sent


def test_who_knows_another_code_gets_nothing_and_learns_nothing() -> None:
    inviter, guest = Inviter("code", AUTHORITY), Guest("cods", "pi2", PUBLIC)
    proof = guest.hear(inviter.hear(guest.open()))
    assert proof is not None
    with pytest.raises(WrongCodeError):
        inviter.hear(proof)
    assert not inviter.joined


def test_a_host_that_does_not_know_the_code_is_not_believed() -> None:
    guest, impostor = Guest("code", "pi2", PUBLIC), Inviter("guess", AUTHORITY)
    guest.hear(impostor.hear(guest.open()))
    with pytest.raises(WrongCodeError):
        guest.hear(bytes(32))
    assert guest.grant is None


def test_a_replayed_join_is_refused() -> None:
    recorded = exchange(Inviter("code", AUTHORITY), Guest("code", "pi2", PUBLIC))
    again = Inviter("code", AUTHORITY)
    again.hear(recorded[0])
    with pytest.raises(WrongCodeError):
        again.hear(recorded[2])
    assert not again.joined


def test_a_name_that_cannot_be_is_not_signed() -> None:
    with pytest.raises(RequestError, match="cannot be the name of a node"):
        exchange(Inviter("code", AUTHORITY), Guest("code", "../pi2", PUBLIC))


@given(st.binary(max_size=80) | st.binary(min_size=32, max_size=32).map(lambda point: b"A" + point))
@example(b"A\x00\x00\x00\x01" + bytes(28))  # is no point of the curve
@example(b"AL\xb6i\xb9M\xa3\x1c")  # a point, if it were filled up with zeros
@example(b"A" + bytes([1]) + bytes(31))  # a point that hides nothing
def test_another_program_is_refused(message: bytes) -> None:
    with pytest.raises(PeerFailedError):
        Inviter("code", AUTHORITY).hear(message)
    inviter = Inviter("code", AUTHORITY)
    try:
        inviter.hear(Guest("code", "x", PUBLIC).open()[:8] + message)
    except PeerFailedError:
        return
    assert len(message) == 33
    with pytest.raises(WrongCodeError):
        inviter.hear(bytes(32))


def test_changed_messages_are_refused() -> None:
    inviter, guest = Inviter("code", AUTHORITY), Guest("code", "pi2", PUBLIC)
    reply = inviter.hear(guest.open())
    for _ in range(1):
        reply = inviter.hear(guest.hear(reply) or b"")
    wish = guest.hear(reply) or b""
    with pytest.raises(PeerFailedError, match="changed on the way"):
        inviter.hear(wish[:-1] + bytes([wish[-1] ^ 1]))
    assert not inviter.joined


def test_a_code_is_read_however_it_is_typed() -> None:
    code = new_code()
    for typed in (code, code.upper(), code.replace("-", ""), f" {code.replace('-', ' ')} "):
        assert read_code(typed) == code


@pytest.mark.parametrize("text", ["", "abcd", "abcd-efgh-jkl", "abcd-efgh-jkl0", "abcd-efgh-jklm-n"])
def test_what_cannot_be_a_code_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="is not a code"):
        read_code(text)
