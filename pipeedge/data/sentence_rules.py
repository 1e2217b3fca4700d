"""Rules of a model directory for its sentences: how long they may be, and what is done to them before.

tokenizer_config.json                 model_max_length      tokens of the longest sentence, in any directory
sentence_bert_config.json             max_seq_length        in its place, in one of sentence-transformers
config_sentence_transformers.json     prompts
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeedge.base.errors import InputError
from pipeedge.base.json_file import find_json
from pipeedge.base.json_types import ValueKind, is_kind
from pipeedge.base.wording import excerpt

__all__ = ["SentenceRules", "read_rules"]

_LENGTH_FILE = "sentence_bert_config.json"
_TOKENIZER_FILE = "tokenizer_config.json"
_PROMPT_FILE = "config_sentence_transformers.json"


@dataclass(frozen=True)
class SentenceRules:
    """Rules for sentences, as one model was trained with them."""

    most_tokens: int | None = None
    """Longest sentence in tokens, if shorter than the model allows."""
    lower: bool = False
    """Whether letters are made small."""
    prompt: str = ""
    """Text in front of every sentence."""

    def apply(self, text: str) -> str:
        """Return a sentence as the tokenizer is to get it."""
        whole = self.prompt + text
        return whole.lower() if self.lower else whole


def read_rules(directory: Path) -> SentenceRules:
    """Return the rules in ``directory``.

    Raises:
        InputError: A file is malformed.
    """
    files = (directory / name for name in (_LENGTH_FILE, _PROMPT_FILE, _TOKENIZER_FILE))
    length, prompts, tokenizer = (find_json(file, dict, InputError) or {} for file in files)
    most = _tokens(length, "max_seq_length", directory / _LENGTH_FILE, ValueKind.WHOLE)
    if most is None:
        most = _tokens(tokenizer, "model_max_length", directory / _TOKENIZER_FILE, ValueKind.NUMBER)
    name, known = prompts.get("default_prompt_name"), prompts.get("prompts") or {}
    prompt = known.get(name, "") if isinstance(known, dict) and isinstance(name, str) else ""
    return SentenceRules(most, length.get("do_lower_case") is True, str(prompt))


def _tokens(document: Mapping[str, Any], key: str, path: Path, kind: ValueKind) -> int | None:
    """Return a number of tokens, or None if it is not given."""
    value = document.get(key)
    if value is None:
        return None
    # transformers writes 1e30 where there is no limit, as a whole number or not.
    if not is_kind(value, kind) or not value >= 1 or (isinstance(value, float) and value % 1):
        raise InputError(f"{path}: {key} is {excerpt(json.dumps(value))}, not a number of tokens")
    return int(min(value, sys.maxsize))
