"""Prompts from files, and what a model's directory says of its answers.

    .txt     a prompt in each line
    .jsonl   {"prompt": "..."}, {"prompt_token_ids": [...]} or {"messages": [...]}, with options of its own

A blank line is no row. Every other row keeps its number, even if it cannot be used and is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeedge.base.errors import InputError, ModelError
from pipeedge.base.json_file import find_json
from pipeedge.data.source import SkippedItem, none_readable
from pipeedge.data.tables import LINES_SUFFIX
from pipeedge.data.text import find_tokenizer_file
from pipeedge.data.text_files import input_name, read_text
from pipeedge.data.tokenizer_files import read_backend
from pipeedge.decoding.prompt import Prompt, PromptMaker
from pipeedge.decoding.sampling import GenerationDefaults, read_generation_config
from pipeedge.decoding.vocabulary import Vocabulary
from pipeedge.models.gguf_config import end_tokens
from pipeedge.models.outline import Outline
from pipeedge.models.weights.gguf_header import read_gguf_header
from pipeedge.request.files import STANDARD_INPUT

__all__ = [
    "PromptRows",
    "open_vocabulary",
    "prompts_fingerprint",
    "read_generation_defaults",
    "read_prompts",
]

_SUFFIXES = (".txt", LINES_SUFFIX)
_GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class PromptRows:
    """The prompts of an input."""

    prompts: tuple[Prompt, ...]
    """Prompts that can run, in input order; each knows its number in the input."""
    skipped: tuple[SkippedItem, ...] = ()
    """Rows that were left out, and why."""
    total: int = 0
    """Number of rows, with those that were left out."""


def open_vocabulary(model: Outline, directories: Iterable[Path]) -> Vocabulary:
    """Return the model's tokenizer from this machine, else from the hub.

    Args:
        model: A decoder.
        directories: Directories to search, as ``companions.companion_directories`` gives them.

    Raises:
        InputError: There is none, or it is damaged.
    """
    path = find_tokenizer_file(model, directories)
    return Vocabulary(read_backend(path), path, model.name, model.config.vocab)


def read_generation_defaults(model: Outline) -> GenerationDefaults:
    """Return what the files in the model's directory say of its answers.

    Raises:
        ModelError: They are nonsense.
    """
    if model.directory is None:
        return GenerationDefaults()
    if model.is_file:
        ends = end_tokens(read_gguf_header(model.default_weights))
        config = {"eos_token_id": list(ends)} if ends else {}
        return read_generation_config({}, config, str(model.default_weights), model.config.vocab)
    path = model.directory / _GENERATION_CONFIG
    document = find_json(path, dict, ModelError) or {}
    config = find_json(model.directory / "config.json", dict, ModelError) or {}
    return read_generation_config(document, config, str(path), model.config.vocab)


def read_prompts(
    paths: Sequence[Path], maker: PromptMaker, *, limit: int | None = None, skip_bad: bool = False
) -> PromptRows:
    """Return the prompts of files, one file after the other.

    Args:
        paths: Files, or ``STANDARD_INPUT``, which has a prompt in each line.
        maker: Makes prompts of texts and objects.
        limit: Most rows to read; None for all.
        skip_bad: Whether rows that cannot run are left out.

    Raises:
        InputError: A file cannot be read or has no prompt, no row can run, or one cannot and ``skip_bad`` is
            false.
    """
    prompts, skipped, total = list[Prompt](), list[SkippedItem](), 0
    first_error: InputError | None = None
    for path in paths:
        for source, row in _rows(path):
            if total == limit:
                break
            try:
                prompts.append(_prompt(path, row, maker, total, source))
            except InputError as error:
                if not skip_bad:
                    raise InputError(f"{error}; --skip-bad-input leaves such rows out") from None
                first_error = first_error or error
                skipped.append(SkippedItem(source, str(error)))
            total += 1
    if first_error is not None and not prompts:
        raise none_readable(total, first_error)
    return PromptRows(tuple(prompts), tuple(skipped), total)


def _rows(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the source and the text of each row of a file.

    Raises:
        InputError: It cannot be read, is of another kind, or has no row.
    """
    name = input_name(path)
    if path != STANDARD_INPUT and path.suffix.lower() not in _SUFFIXES:
        raise InputError(f"{name}: unknown kind of prompts; known are {' and '.join(_SUFFIXES)}")
    lines = read_text(path).split("\n")
    if not any(line.strip() for line in lines):
        raise InputError(f"{name}: no prompt in this file (expected one a line)")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"{name}:{number}", line.removesuffix("\r")


def _prompt(path: Path, row: str, maker: PromptMaker, item: int, source: str) -> Prompt:
    if path.suffix.lower() != LINES_SUFFIX:
        return maker.from_text(row, item, source)
    try:
        document = json.loads(row)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: is not JSON ({error})") from None
    return maker.from_document(document, item, source)


def prompts_fingerprint(prompts: Iterable[Prompt], seed: int) -> str:
    """Return a digest of everything that the answers to ``prompts`` depend on besides the model."""
    digest = hashlib.sha256(f"{seed}".encode())
    for prompt in prompts:
        digest.update(f"{prompt.item} {prompt.tokens} {prompt.sampling} {prompt.tools}\n".encode())
    return digest.hexdigest()[:16]
