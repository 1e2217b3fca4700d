"""Messages of the control connection: formats, limits, and what arrives in pieces."""

from __future__ import annotations

import contextlib
import random
import struct

import pytest
from effort import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw
from wire_messages import framed

from pipeedge.base import fields
from pipeedge.base.errors import (
    PeerFailedError,
)
from pipeedge.control.failures import Failure, FailureKind
from pipeedge.control.liveness import RankStatus
from pipeedge.control.messages import (
    FROM_HUB,
    MAX_BYTES,
    TO_HUB,
    Abort,
    Beat,
    Brief,
    Clock,
    ClockAnswer,
    Complete,
    Declined,
    Decoder,
    Done,
    Facts,
    Failed,
    Hello,
    LinkLost,
    Malformed,
    Message,
    Notice,
    Pace,
    Passed,
    Planned,
    Prepare,
    RankRecord,
    Ready,
    Record,
    Retire,
    Run,
    Stopped,
    Summary,
    Verdict,
    Waiting,
    WorkByRank,
    frame,
)
from pipeedge.observe.metrics import StageWork

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(1 - 2**63, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
words = st.text("abcdefgh é", max_size=20)
numbers = st.integers(0, 2**63 - 1)
messages = (
    st.builds(Hello, numbers, numbers, words)
    | st.builds(Failed, words)
    | st.builds(Record, st.text())
    | st.builds(Clock, st.floats(-1e18, 1e18))
    | st.builds(Facts, json_values.map(lambda value: Raw(fields.encode(value))))
    | st.builds(Ready, st.integers(1, 2**40))
)


@settings(max_examples=cases(100, 3))
@given(st.lists(messages, max_size=3), st.randoms())
def test_messages_come_out_whole_however_their_bytes_arrive(
    said: list[Message], chance: random.Random
) -> None:
    data = b"".join(map(frame, said))
    decoder, heard, place = Decoder(TO_HUB), [], 0
    while place < len(data):
        step = chance.randint(1, 9)
        heard += decoder.feed(data[place : place + step])
        place += step
    assert heard == said


def test_a_message_split_at_any_byte_is_whole_in_the_end() -> None:
    message = Beat(RankStatus(("computing", 1.5), {1: 2}, work=StageWork(1.0, 2.0, 3.0, 8)))
    data = frame(message)
    for cut in range(len(data) + 1):
        decoder = Decoder(TO_HUB)
        first = decoder.feed(data[:cut])
        assert first + decoder.feed(data[cut:]) == [message]
        assert bool(first) == (cut == len(data))


@pytest.mark.parametrize(
    "message",
    [
        Beat(RankStatus(("x", 1.0), {0: 3}, {7: 0}, frozenset({7, 2}), 0.5, StageWork(1.0, 2.0, 3.0, 8), 4)),
        Beat(RankStatus()),
        Clock(1.5),
        Complete(),
        Done(Raw(b"null")),
        LinkLost(2, 1, "x"),
        Ready(2),
        Declined(2, "x"),
        Passed(2, 7),
        Stopped(2, 7),
        Brief(Raw(b"{}")),
        Planned(Raw(b"{}")),
        Prepare(2, Raw(b"{}")),
        Run(2),
        Retire(2),
        Abort(2, "x"),
        Pace(0.5),
        ClockAnswer(1.5, 2.5),
        Notice("x"),
        Waiting("x"),
        RankRecord(1, "x"),
        WorkByRank({1: StageWork()}),
        Summary({1: Raw(b"{}")}),
        Verdict(Failure(FailureKind.FAILED, "x", 1, "rank 1", 3)),
    ],
    ids=lambda message: message.kind,
)
def test_every_message_survives_the_wire(message: Message) -> None:
    (received,) = Decoder(TO_HUB | FROM_HUB).feed(frame(message))
    assert received == message


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        struct.pack(">I", MAX_BYTES + 1),
        framed(b""),
        framed(b"{"),
        framed(b"null"),
        framed(b"[]"),
        framed(b'"kind"'),
        framed(b"7"),
        framed(b"{}"),
        framed(b'{"kind": null}'),
        framed(b'{"kind": ["beat"]}'),
        framed(b'{"kind": "beat", "x": NaN}'),
        framed(b'{"kind": "beat", "x": Infinity}'),
        framed(b'{"kind": "beat", "x": -Infinity}'),
        framed(b'{"kind": "\xff"}'),
        framed(b"[" * 50000 + b"]" * 50000),
        framed(b'{"kind": "x", "y": ' + b'{"a":' * 50000 + b"1" + b"}" * 50000 + b"}"),
    ],
    ids=lambda data: repr(data[:24]),
)
def test_anything_but_a_message_is_refused(data: bytes) -> None:
    with pytest.raises(PeerFailedError, match="not a message of this program"):
        Decoder(TO_HUB).feed(data)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (b'{"kind": "beat"}', "beat"),
        (b'{"kind": "start"}', "start"),
        (b'{"kind": "clock", "sent": 1e999}', "clock"),
        (b'{"kind": "clock", "sent": ' + b"9" * 400 + b"}", "clock"),
        (b'{"kind": "clock", "sent": ' + b"9" * 60000 + b"e1}", "clock"),
        (b'{"kind": "lost", "rank": 9223372036854775808, "line": ""}', "lost"),
        (b'{"kind": "beat", "status": {"received": {"-1": 0}}}', "beat"),
        (b'{"kind": "beat", "status": {"work": [1, 1, 1, 65]}}', "beat"),
        (b'{"kind": "\\u001b[2J"}', r"\x1b[2J"),
    ],
    ids=lambda value: repr(value[:24]),
)
def test_malformed_message_keeps_the_name_of_its_kind(text: bytes, kind: str) -> None:
    assert Decoder(TO_HUB).feed(framed(text)) == [Malformed(kind)]


def test_a_length_beyond_the_limit_is_refused_before_anything_is_kept_for_it() -> None:
    with pytest.raises(PeerFailedError):
        Decoder(TO_HUB, max_bytes=100).feed(struct.pack(">I", 101))
    assert Decoder(TO_HUB, max_bytes=100).feed(struct.pack(">I", 100)) == []


def test_messages_beyond_the_limit_are_not_written() -> None:
    with pytest.raises(ValueError, match="allows"):
        frame(Record("a" * MAX_BYTES))


@settings(max_examples=200)
@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_decoded_or_refused(data: bytes) -> None:
    for stream in (data, framed(data)):
        with contextlib.suppress(PeerFailedError):
            for message in Decoder(TO_HUB).feed(stream):
                assert isinstance(message.kind, str)
