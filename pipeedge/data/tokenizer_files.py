"""Read tokenizers, and check the numbers of ``tokenizer.json``, which the library converts without a word.

added_tokens  [{"id": 5, "content": "<mask>", ...}, ...]
model         {"vocab": {"a": 7, ...}} of words and pieces of them, or [["a", -2.5], ...] with their scores
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeedge.base.deferred_imports import import_postponed
from pipeedge.base.errors import InputError
from pipeedge.base.json_file import find_json
from pipeedge.base.json_types import ValueKind, is_kind, mismatch
from pipeedge.base.wording import excerpt

__all__ = ["DECODER_TOKENIZER_FILES", "TOKENIZER_FILE", "TOKENIZER_FILES", "check_tokenizer", "read_backend"]

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER_FILE, "vocab.txt")
DECODER_TOKENIZER_FILES = (TOKENIZER_FILE, "vocab.json")
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that need ``tokenizer.json`` alone, for which transformers need not look for its models."""


def read_backend(path: Path) -> Any:
    """Return the tokenizer of transformers in the directory of ``path``, one of the files above.

    Raises:
        InputError: The files are damaged.
    """
    from transformers import PreTrainedTokenizerFast  # needs no more of torch than is there

    directory = path.parent
    check_tokenizer(directory)
    try:
        if path.name == TOKENIZER_FILE and _tokenizer_class(directory) in _PLAIN_CLASSES:
            return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        import_postponed()
        from transformers import AutoTokenizer, BertTokenizer  # a second more, and another one when it reads

        if (directory / "tokenizer_config.json").is_file() or path.name == "vocab.json":
            return AutoTokenizer.from_pretrained(directory, local_files_only=True)
        if path.name == TOKENIZER_FILE:
            return PreTrainedTokenizerFast(tokenizer_file=str(path))
        return BertTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # a damaged file may raise anything inside transformers
        raise InputError(f"{path}: not a tokenizer that transformers can read ({error})") from error


def _tokenizer_class(directory: Path) -> object:
    """Return the class that the configuration of a tokenizer names, or None."""
    try:
        document = find_json(directory / "tokenizer_config.json", dict, InputError)
    except InputError:  # the library explains what is wrong with it
        return None
    return (document or {}).get("tokenizer_class")


def check_tokenizer(directory: Path) -> None:
    """Check the token ids and scores of the ``tokenizer.json`` in a directory, if there is one.

    Raises:
        InputError: One of them is not a number.
    """
    path = directory / TOKENIZER_FILE
    try:
        document = find_json(path, dict, InputError)
    except InputError:  # the library explains what is wrong with the whole file
        return
    for key, value, kind in _numbers(document or {}):
        if not is_kind(value, kind) or (kind is ValueKind.WHOLE and value < 0):
            raise InputError(f"{path}: {mismatch(key, value, kind)}")


def _numbers(document: Mapping[str, Any]) -> Iterator[tuple[str, Any, ValueKind]]:
    """Yield the place of each number, its value, and its kind; the library refuses other forms itself."""
    added = document.get("added_tokens")
    for number, token in enumerate(added if isinstance(added, list) else ()):
        if isinstance(token, dict):
            yield f"added_tokens[{number}].id", token.get("id"), ValueKind.WHOLE
    model = document.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        for word, token_id in vocabulary.items():
            if type(token_id) is not int or token_id < 0:  # there may be a quarter of a million
                yield f"the id of {excerpt(word, 40)}", token_id, ValueKind.WHOLE
    elif isinstance(vocabulary, list):
        for number, entry in enumerate(vocabulary):
            if isinstance(entry, list) and len(entry) == 2 and type(entry[1]) is not float:
                yield f"model.vocab[{number}][1]", entry[1], ValueKind.NUMBER
