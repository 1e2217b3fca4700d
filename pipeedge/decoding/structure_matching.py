"""Which tokens may come next in an answer that follows a structure.

llguidance, of the extra ``serve``, does the work. JSON comes without line breaks: a small model that may
write blanks writes nothing else.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import numpy as np

from pipeedge.base.errors import InputError, RequestError
from pipeedge.base.wording import excerpt
from pipeedge.decoding.structure import Mask, Structure

__all__ = ["StructureCompiler", "StructureMatcher"]

INSTALL = "pip install 'pipeedge[serve]'"
_MOST_COMPILED = 32
_SHOWN = 200
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LIBRARY_DETAILS = re.compile(r"\n|<state>")


class StructureMatcher:
    """Follows one answer through a structure.

    Args:
        matcher: A matcher of llguidance, at the beginning.
        tokens: Number of tokens of the model.
        end_tokens: Tokens that end an answer.
        library_end: Token that the library takes for the end.
    """

    def __init__(self, matcher: Any, tokens: int, end_tokens: Collection[int], library_end: int) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._ends = np.array(sorted(end_tokens), np.int64)
        self._library_end = library_end
        self._bits = np.zeros(-(-tokens // 32), np.int32)

    @property
    def is_complete(self) -> bool:
        """Whether the answer is complete, and nothing can follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> Mask:
        """Return which tokens may come next, bool [V].

        Raises:
            RequestError: The structure needs too much work.
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        mask = np.unpackbits(self._bits.view(np.uint8), count=self._tokens, bitorder="little").view(np.bool_)
        mask[self._library_end] = False
        if self._matcher.is_accepting():
            mask[self._ends] = True
        return mask

    def take(self, token: int) -> None:
        """Go on with the token that was chosen, which is none that ends the answer.

        Raises:
            RequestError: The structure needs too much work.
        """
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(
                f"the structure of the answer cannot be followed: {_reason(self._matcher.get_error())}"
            )


class StructureCompiler:
    """Makes matchers for the tokens of one model. Several threads may use it.

    Args:
        tokenizer: The tokenizer as the JSON of the tokenizers library.
        tokens: Number of tokens of the model.
        end: Token that ends a text for the tokenizer.

    Raises:
        InputError: llguidance is not installed, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: str, tokens: int, end: int) -> None:
        try:
            import llguidance
        except ImportError:
            raise InputError(f"structured answers need the package llguidance: {INSTALL}") from None
        self._matchers = llguidance.LLMatcher
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._tokens = tokens
        self._end = end
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer, n_vocab=tokens, eos_token=end)
        except Exception as error:  # the library has no exceptions of its own
            raise InputError(f"llguidance cannot read the tokenizer: {_reason(str(error))}") from error
        self._compiled: OrderedDict[Structure, Any] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, structure: Structure, end_tokens: Collection[int] = ()) -> StructureMatcher:
        """Return a matcher at the beginning of an answer.

        Args:
            structure: What the answer has to look like.
            end_tokens: Tokens that may end it when it is complete.

        Raises:
            InputError: The structure is malformed, or has parts that are not supported.
        """
        with self._lock:
            found = self._compiled.pop(structure, None)
        if found is None:
            found = self._compile(structure)  # seconds, for some
        with self._lock:
            self._compiled[structure] = found
            if len(self._compiled) > _MOST_COMPILED:
                self._compiled.popitem(last=False)
            return StructureMatcher(found.deep_copy(), self._tokens, end_tokens, self._end)

    def _compile(self, structure: Structure) -> Any:
        try:
            if structure.kind == "json_schema":
                grammar = self._matchers.grammar_from_json_schema(structure.text, overrides=_COMPACT)
            elif structure.kind == "regex":
                grammar = self._matchers.grammar_from_regex(structure.text)
            else:
                grammar = self._matchers.grammar_from_lark(structure.text)
        except ValueError as error:
            raise InputError(f"the {structure.kind} cannot be used: {_reason(str(error))}") from None
        matcher = self._matchers(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            # Most of the work is done for the first token: here it holds up one request, not all answers.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise InputError(f"the {structure.kind} cannot be used: {_reason(matcher.get_error())}")
        return matcher


def _reason(text: str) -> str:
    return excerpt(_LIBRARY_DETAILS.split(text.strip())[0], _SHOWN)
