"""The text of an answer as it grows, in whole characters, up to a stop string.

    tokens   "na"  <c3>  <af>  "ve"  "<|im"  "_end"  "|>"        stop: "<|im_end|>"
    text     "na"   ""   "ï"   "ve"    ""      ""    finished

A character whose bytes come in several tokens waits for the last one; so does the beginning of a stop string.
All pieces together are the text that the tokenizer gives for all tokens at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["TextStream", "TokenTexts", "overlap"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 32
"""Most tokens that are decoded together."""
_KEPT = 8
"""Last tokens of these that remain, so that a decoder that treats the first token differently sees others."""


class TokenTexts(Protocol):
    """The texts that tokens stand for."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""

    def is_silent(self, token: int) -> bool:
        """Return whether a token has no text: a special one, or one that the tokenizer does not know."""

    def is_byte(self, token: int) -> bool:
        """Return whether a token is a byte whose text depends on the bytes after it, as sentencepiece has."""


class TextStream:
    """Turns the tokens of one answer into pieces of text.

    Args:
        texts: The texts of tokens.
        stop: Texts before which the answer ends, none of them empty.
    """

    def __init__(self, texts: TokenTexts, stop: Sequence[str] = ()) -> None:
        self._texts = texts
        self._stop = tuple(stop)
        self._window: list[int] = []
        self._passed = 0
        """Characters of the text of the window that are not held back for the tokens to come."""
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self.stopped = False
        """Whether a stop string has come."""

    def push(self, token: int) -> str:
        """Return the text that became certain with another token."""
        if self.stopped or self._texts.is_silent(token):
            return ""
        self._window.append(token)
        if self._texts.is_byte(token):
            return ""  # transformers spoils all bytes of a run if one of them is wrong
        text = self._texts.decode(self._window)
        certain = len(text) - text.endswith(_REPLACEMENT)
        piece = text[self._passed : certain]
        self._passed = max(self._passed, certain)
        if certain == len(text) and len(self._window) >= _WINDOW:
            self._shrink()
        return self._until_stop(piece)

    def finish(self) -> str:
        """Return the text that was held back, since no more tokens come."""
        if self.stopped:
            return ""
        rest = self._texts.decode(self._window)[self._passed :] if self._window else ""
        piece = self._until_stop(rest)
        held, self._held = self._held, ""
        return piece + held

    def _shrink(self) -> None:
        """Forget the beginning of the window; its text ends with a whole character."""
        kept = self._window[-_KEPT:]
        length = len(self._texts.decode(kept))
        if length:
            self._window, self._passed = kept, length

    def _until_stop(self, piece: str) -> str:
        """Return what of the held text and ``piece`` cannot belong to a stop string."""
        text = self._held + piece
        found = [(place + len(stop), place) for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        held = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that is a beginning of ``stop``, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
