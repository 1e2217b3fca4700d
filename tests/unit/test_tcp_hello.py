"""Test the introductions of TCP links against arbitrary and damaged bytes."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import mutate_bytes, rounds

from pipeedge.transport.place import TOKEN_BYTES
from pipeedge.transport.tcp_hello import (
    ANSWER_BYTES,
    LINK_HELLO_BYTES,
    Answer,
    HelloError,
    LinkHello,
    Purpose,
    pack_answer,
    read_answer,
)

FUZZ_ROUNDS = rounds(500)
WORDS = st.integers(0, (1 << 32) - 1)
LONG = st.integers(0, (1 << 64) - 1)
TOKENS = st.binary(min_size=TOKEN_BYTES, max_size=TOKEN_BYTES)
HELLOS = st.builds(LinkHello, TOKENS, LONG, st.sampled_from(Purpose), WORDS, WORDS, WORDS, LONG)


@given(HELLOS)
def test_hello_is_read_as_it_was_written(hello: LinkHello) -> None:
    message = hello.pack()
    assert len(message) == LINK_HELLO_BYTES
    assert LinkHello.unpack(message) == hello


@pytest.mark.parametrize("answer", Answer)
def test_answer_is_read_as_it_was_written(answer: Answer) -> None:
    message = pack_answer(answer)
    assert len(message) == ANSWER_BYTES
    assert read_answer(message) is answer


READERS: dict[bytes, Callable[[bytes], object]] = {
    LinkHello(bytes(16), 7, Purpose.REPLIES, 3, 5, 1, 640).pack(): LinkHello.unpack,
    pack_answer(Answer.ACCEPTED): read_answer,
}


@pytest.mark.parametrize(
    ("message", "read"), READERS.items(), ids=[read.__qualname__ for read in READERS.values()]
)
def test_damaged_introduction_is_refused_or_read_as_something_else(message: bytes, read: object) -> None:
    """A checksum of 32 bits lets no small damage pass; nothing but ``HelloError`` may be raised."""
    assert callable(read)
    chance = random.Random(7)
    for _ in range(FUZZ_ROUNDS):
        damaged = mutate_bytes(message, chance)
        if damaged == message:
            continue
        with pytest.raises(HelloError):
            read(damaged)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_introduction(data: bytes) -> None:
    for read in (LinkHello.unpack, read_answer):
        with pytest.raises(HelloError):
            read(data)


def test_another_version_is_named() -> None:
    message = bytearray(pack_answer(Answer.ACCEPTED))
    message[4] = 9
    sealed = bytes(message[:-4]) + zlib.crc32(message[:-4]).to_bytes(4, "little")
    with pytest.raises(HelloError, match="the other rank uses protocol version 9, but this program 1"):
        read_answer(sealed)
