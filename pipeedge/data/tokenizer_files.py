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
from pipeedge.models.weights.gguf_header import GGUF_SUFFIX, Texts, read_gguf_header

__all__ = [
    "DECODER_TOKENIZER_FILES",
    "TOKENIZER_FILE",
    "TOKENIZER_FILES",
    "check_tokenizer",
    "has_gguf_tokenizer",
    "read_backend",
]

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER_FILE, "vocab.txt")
DECODER_TOKENIZER_FILES = (TOKENIZER_FILE, "vocab.json")
_CONFIGURATION = "tokenizer_config.json"
_GGUF_PREFIX = "tokenizer.ggml."
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that need ``tokenizer.json`` alone, for which transformers need not look for its models."""


def read_backend(path: Path) -> Any:
    """Return the tokenizer of transformers in the directory of ``path``, a file as above, or in a GGUF file.

    Raises:
        InputError: The files are damaged.
    """
    from transformers import PreTrainedTokenizerFast  # needs no more of torch than is there

    directory = path.parent
    if path.suffix == GGUF_SUFFIX:
        return _read_gguf(path)
    check_tokenizer(directory)
    try:
        if path.name == TOKENIZER_FILE and _tokenizer_class(directory) in _PLAIN_CLASSES:
            return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        if path.name == TOKENIZER_FILE and not (directory / _CONFIGURATION).is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(path))
        import_postponed()
        from transformers import AutoTokenizer, BertTokenizer  # a second more, and another one when it reads

        if (directory / _CONFIGURATION).is_file() or path.name == "vocab.json":
            return AutoTokenizer.from_pretrained(directory, local_files_only=True)
        return BertTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # a damaged file may raise anything inside transformers
        raise InputError(f"{path}: not a tokenizer that transformers can read ({error})") from error


def has_gguf_tokenizer(path: Path) -> bool:
    """Return whether a GGUF file has a vocabulary.

    Raises:
        WeightsError: The file is damaged.
    """
    return bool(read_gguf_header(path).settings.get(f"{_GGUF_PREFIX}tokens"))


def _read_gguf(path: Path) -> Any:
    """Return the tokenizer in a GGUF file, which transformers makes of its vocabulary."""
    settings = read_gguf_header(path).settings
    try:
        _check_gguf(settings)
        import_postponed()
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True, clean_up_tokenization_spaces=False
        )
    except Exception as error:  # a damaged vocabulary may raise anything inside transformers
        raise InputError(f"{path}: not a tokenizer that transformers can read ({error})") from error


def _check_gguf(settings: Mapping[str, object]) -> None:
    """Check what transformers takes for granted.

    Raises:
        ValueError: A list has another length than the vocabulary, or a token is beyond it.
    """
    tokens = settings.get(f"{_GGUF_PREFIX}tokens")
    if not isinstance(tokens, Texts) or not len(tokens):
        raise ValueError("it has no vocabulary")
    for name in ("scores", "token_type"):
        values = settings.get(f"{_GGUF_PREFIX}{name}")
        if values is not None and (not isinstance(values, tuple) or len(values) != len(tokens)):
            raise ValueError(f"{_GGUF_PREFIX}{name} does not have {len(tokens)} values")
    for name in ("bos", "eos", "unknown", "padding"):
        number = settings.get(f"{_GGUF_PREFIX}{name}_token_id")
        if number is not None and not (isinstance(number, int) and 0 <= number < len(tokens)):
            raise ValueError(f"{_GGUF_PREFIX}{name}_token_id {number!r} is not one of {len(tokens)} tokens")
    merges = settings.get(f"{_GGUF_PREFIX}merges")
    if merges is not None and not isinstance(merges, Texts):
        raise ValueError(f"{_GGUF_PREFIX}merges is not a list of texts")


def _tokenizer_class(directory: Path) -> object:
    """Return the class that the configuration of a tokenizer names, or None."""
    try:
        document = find_json(directory / _CONFIGURATION, dict, InputError)
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
