"""Beginnings of texts: what a model takes of a long one, and the encoding that the first bytes show. Pure."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from itertools import islice
from types import MappingProxyType

__all__ = ["TOKEN_CHARACTERS", "first_words", "wide_encoding", "words_for"]

TOKEN_CHARACTERS = 64
"""Largest number of characters tokenised for each token that the model takes; words are shorter."""
_LONGEST_WORD = 200
_WORD_BEGINS = re.compile(r"(?<=\S)[ \t\n](?=[A-Za-z0-9])")
"""A blank before a word that gives a token of its own. Tokenizers of words (WordPiece, byte-level BPE, and
others that split at blanks) make the same tokens of what comes before it, whatever follows.
"""


def words_for(text: str, tokens: int) -> str:
    """Return so many words of ``text`` that they certainly give ``tokens`` tokens; else all of it."""
    begins = _WORD_BEGINS.finditer(text, 0, tokens * TOKEN_CHARACTERS)
    found = next(islice(begins, tokens, None), None)
    return text if found is None else text[: found.start()]


def first_words(text: str, characters: int) -> str:
    """Return the first ``characters`` characters of ``text``, cut at a word boundary."""
    if len(text) <= characters:
        return text
    cut = text[:characters]
    # The last word may be incomplete, which would change its tokens. There may be nothing but blanks.
    words = next(iter(cut.rsplit(maxsplit=1)), "")
    # Chinese has no blanks, and each character is a token; a word of thousands of letters is one unknown
    # token.
    return words if len(words) >= characters - _LONGEST_WORD else cut


_MARKS: Mapping[bytes, str] = MappingProxyType(
    {
        # UTF-32's mark begins with UTF-16's.
        codecs.BOM_UTF32_LE: "UTF-32",
        codecs.BOM_UTF32_BE: "UTF-32",
        codecs.BOM_UTF16_LE: "UTF-16",
        codecs.BOM_UTF16_BE: "UTF-16",
    }
)
_SEEN = 1024


def wide_encoding(content: bytes) -> str | None:
    """Return UTF-16 or UTF-32 if a text is encoded so, as some editors and shells do, else None.

    Without a mark at its beginning, it shows by the zeros beside Latin letters.
    """
    marked = next((name for mark, name in _MARKS.items() if content.startswith(mark)), None)
    if marked is not None:
        return marked
    beginning = content[:_SEEN]
    zeros = [beginning[place::2].count(0) for place in (0, 1)]
    if max(zeros) < 2 or max(zeros) * 4 <= len(beginning) or min(zeros) > max(zeros) // 8:
        return None
    return "UTF-16LE" if zeros[1] > zeros[0] else "UTF-16BE"
