"""Beginnings of long texts, of which a model takes no more. Pure."""

from __future__ import annotations

import re
from itertools import islice

__all__ = ["TOKEN_CHARACTERS", "first_words", "words_for"]

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
