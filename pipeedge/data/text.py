"""Sentences to token ids, by the model's own tokenizer, from its directory or the hub."""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeedge.base.errors import InputError
from pipeedge.data.companions import companion_file, hub_reachable
from pipeedge.data.model_inputs import ModelInputs
from pipeedge.data.source import Item
from pipeedge.data.tables import TABLE_SUFFIXES, column_of
from pipeedge.request.files import STANDARD_INPUT

__all__ = ["Sentence", "TokenItems", "Tokenizer", "find_tokenizer", "open_tokenizer", "read_sentences"]

TOKENIZER_FILES = ("tokenizer.json", "vocab.txt")
CHUNK = 4096
"""Largest number of sentences tokenised in one call."""
_CHUNK_CHARACTERS = 1 << 18
"""Largest number of characters tokenised in one call, unless one sentence has more: a tokenizer takes nearly
200 bytes for each.
"""
_TOKEN_CHARACTERS = 64
"""Largest number of characters tokenised for each token that the model takes; words are shorter."""
_LONGEST_WORD = 200
_MOST_CHARACTERS = 1 << 20
"""Largest number of characters tokenised of a sentence whose words are longer."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sentence:
    """A sentence, its origin, and its class if known."""

    text: str
    source: str
    label: int | None = None


@dataclass(frozen=True)
class TokenItems:
    """Sentences as token ids."""

    ids: tuple[Sequence[int], ...]
    """Token ids of each sentence, including the special tokens around it."""
    sources: tuple[str, ...]
    labels: tuple[int | None, ...]
    input_names: tuple[str, ...]
    """Inputs of the model, out of those that ``read`` can produce."""
    texts: tuple[str, ...]
    """The sentences as text."""

    in_memory = True
    pixels = None

    @property
    def has_labels(self) -> bool:
        """Whether some sentence has a label."""
        return any(label is not None for label in self.labels)

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the longest sentence."""
        return max(map(len, self.ids), default=0)

    def __len__(self) -> int:
        return len(self.ids)

    def source(self, index: int) -> str:
        """Return where sentence ``index`` comes from."""
        return self.sources[index]

    def read(self, index: int) -> Item:
        """Return sentence ``index`` as int64 tensors [tokens]: its ids, a mask of ones, types of zero."""
        ids = torch.tensor(list(self.ids[index]), dtype=torch.int64)
        tensors = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "token_type_ids": torch.zeros_like(ids),
        }
        payload = tuple(tensors[name] for name in self.input_names)
        return Item(payload, self.labels[index], self.sources[index], self.texts[index])


@dataclass(frozen=True)
class Tokenizer:
    """A transformers tokenizer, and the limits of the model it serves."""

    backend: Any
    """Tokenizer of transformers."""
    path: Path
    """File that it was read from."""
    model: ModelInputs

    def items(self, sentences: Sequence[Sentence]) -> TokenItems:
        """Tokenise ``sentences``. Those beyond the model's longest sequence are truncated, with a warning."""
        limit = self.model.config.max_positions
        texts = [_first_words(sentence.text, limit * _TOKEN_CHARACTERS) for sentence in sentences]
        ids = self._encode(texts)
        for number, sentence in enumerate(sentences):
            characters = limit * _TOKEN_CHARACTERS
            while len(ids[number]) < limit and characters < min(len(sentence.text), _MOST_CHARACTERS):
                characters *= 8
                texts[number] = _first_words(sentence.text, min(characters, _MOST_CHARACTERS))
                (ids[number],) = self._encode([texts[number]])
        too_long = [
            number
            for number, (encoded, sentence) in enumerate(zip(ids, sentences, strict=True))
            if len(encoded) > limit or len(texts[number]) < len(sentence.text)
        ]
        if too_long:
            log.warning(
                "%d of %d sentences are longer than the %d tokens of %s and are truncated; the first: %s",
                len(too_long),
                len(ids),
                limit,
                self.model.name,
                sentences[too_long[0]].source,
            )
            shorter = self._encode([texts[number] for number in too_long], limit)
            replaced = dict(zip(too_long, shorter, strict=True))
            ids = [replaced.get(number, encoded) for number, encoded in enumerate(ids)]
        empty = next((number for number, encoded in enumerate(ids) if not encoded), None)
        if empty is not None:
            raise InputError(f"{sentences[empty].source}: {self.path} gives no token for this sentence")
        highest = max((max(encoded) for encoded in ids), default=0)
        if highest >= self.model.config.vocab:
            raise InputError(
                f"{self.path} has token ids up to {highest}, but {self.model.name} has a vocabulary of "
                f"{self.model.config.vocab}: it is the tokenizer of another model"
            )
        return TokenItems(
            tuple(ids),
            tuple(sentence.source for sentence in sentences),
            tuple(sentence.label for sentence in sentences),
            self.model.input_names,
            tuple(sentence.text for sentence in sentences),
        )

    def _encode(self, texts: list[str], limit: int | None = None) -> list[array[int]]:
        """Return the ids of each text, truncated to ``limit``, as compact arrays: there may be a million."""
        encoded: list[array[int]] = []
        for some in _chunks(texts):
            # verbose=False, because this class gives its own warning about long sentences.
            chunk = self.backend(some, truncation=limit is not None, max_length=limit, verbose=False)
            encoded += [array("i", ids) for ids in chunk["input_ids"]]
        return encoded


def _first_words(text: str, characters: int) -> str:
    """Return the first ``characters`` characters of ``text``, cut at a word boundary."""
    if len(text) <= characters:
        return text
    cut = text[:characters]
    words = cut.rsplit(maxsplit=1)[0]  # the last word may be incomplete, which would change its tokens
    # Chinese has no blanks, and each character is a token; a word of thousands of letters is one unknown
    # token.
    return words if len(words) >= characters - _LONGEST_WORD else cut


def _chunks(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield ``texts`` in parts that a tokenizer can process in one call."""
    part: list[str] = []
    characters = 0
    for text in texts:
        if part and (len(part) == CHUNK or characters + len(text) > _CHUNK_CHARACTERS):
            yield part
            part, characters = [], 0
        part.append(text)
        characters += len(text)
    if part:
        yield part


def find_tokenizer(model: ModelInputs, directories: Iterable[Path]) -> Tokenizer | None:
    """Return the tokenizer in the first of ``directories`` that has one, or in the hub's local cache."""
    path = companion_file(model.name, directories, TOKENIZER_FILES)
    return None if path is None else read_tokenizer(path, model)


def open_tokenizer(model: ModelInputs, directories: Iterable[Path]) -> Tokenizer:
    """Return the model's tokenizer from this machine, else from the hub.

    Raises:
        InputError: There is none. The message says where to put one.
    """
    directories = tuple(directories)
    found = find_tokenizer(model, directories)
    if found is not None:
        return found
    if model.directory is None:
        downloaded = download_tokenizer(model.name)
        if downloaded is not None:
            return read_tokenizer(downloaded, model)
    where = " or ".join(map(str, directories)) or "a model directory and name that with -m"
    raise InputError(
        f"no vocabulary for {model.name}, so sentences cannot become token ids: put its tokenizer.json or "
        f"vocab.txt into {where}, or give token ids as .npz"
    )


def read_tokenizer(path: Path, model: ModelInputs) -> Tokenizer:
    """Read the tokenizer in the directory of ``path``, one of ``TOKENIZER_FILES``."""
    from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast  # seconds to import

    directory = path.parent
    try:
        if (directory / "tokenizer_config.json").is_file():
            backend = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        elif path.name == "tokenizer.json":
            backend = PreTrainedTokenizerFast(tokenizer_file=str(path))
        else:
            backend = BertTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # a damaged file may raise anything inside transformers
        raise InputError(f"{path}: not a tokenizer that transformers can read ({error})") from error
    return Tokenizer(backend, path, model)


def download_tokenizer(model_name: str) -> Path | None:
    """Fetch the tokenizer of ``model_name`` from the hub into its local cache; return None if that fails."""
    if not hub_reachable():
        return None
    from transformers import AutoTokenizer

    log.warning("fetching the tokenizer of %s from the hub", model_name)
    try:
        AutoTokenizer.from_pretrained(model_name)
    except Exception as error:  # network, hub and file each have their own exceptions
        log.warning("the tokenizer of %s cannot be fetched (%s)", model_name, type(error).__name__)
        return None
    return companion_file(model_name, (), TOKENIZER_FILES)


def read_sentences(path: Path, column: str | None = None) -> list[Sentence]:
    """Read the sentences of a file, one per line, or one per row of a table, leaving out blank ones.

    Lines end with LF or CR LF. Other characters that Unicode counts as line ends are part of a sentence.

    Args:
        path: Path of the file, or ``STANDARD_INPUT``, which is a table if ``column`` is given.
        column: Column of a table, as for ``column_of``.

    Raises:
        InputError: The file cannot be read as UTF-8 text, or contains no sentence.
    """
    name = "standard input" if path == STANDARD_INPUT else str(path)
    try:
        content = sys.stdin.buffer.read() if path == STANDARD_INPUT else path.read_bytes()
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name}: cannot be read as UTF-8 text ({error})") from error
    suffix = path.suffix.lower()
    lines: Iterable[tuple[int, str]]
    if suffix in TABLE_SUFFIXES or (path == STANDARD_INPUT and column is not None):
        tabs = suffix == ".tsv" or (not suffix and "\t" in text.partition("\n")[0])
        lines = column_of(text, name, column, tabs=tabs)
    else:
        lines = enumerate(text.split("\n"), start=1)
    sentences = [Sentence(line.strip(), f"{name}:{number}") for number, line in lines if line.strip()]
    if not sentences:
        raise InputError(f"{name}: no sentence in this file (expected one a line)")
    return sentences
