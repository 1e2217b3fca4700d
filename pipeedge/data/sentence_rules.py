"""Rules of a sentence-transformers directory for sentences before they are tokenised."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pipeedge.base.errors import InputError
from pipeedge.base.json_file import find_json
from pipeedge.base.wording import excerpt

__all__ = ["SentenceRules", "read_rules"]

_LENGTH_FILE = "sentence_bert_config.json"
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
    """Return the rules in ``directory``; a plain model directory has none.

    Raises:
        InputError: A file is malformed.
    """
    files = (directory / name for name in (_LENGTH_FILE, _PROMPT_FILE))
    length, prompts = (find_json(file, dict, InputError) or {} for file in files)
    most = length.get("max_seq_length")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        shown = excerpt(json.dumps(most))
        raise InputError(f"{directory / _LENGTH_FILE}: max_seq_length is {shown}, not a number of tokens")
    name, known = prompts.get("default_prompt_name"), prompts.get("prompts") or {}
    prompt = known.get(name, "") if isinstance(known, dict) and isinstance(name, str) else ""
    return SentenceRules(most, length.get("do_lower_case") is True, str(prompt))
