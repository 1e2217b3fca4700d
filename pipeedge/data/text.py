"""Sentences and pairs to token ids, by the model's own tokenizer, from its directory or the hub."""

from __future__ import annotations

import logging
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from pipeedge.base.deferred_imports import import_postponed
from pipeedge.base.errors import InputError
from pipeedge.base.wording import count
from pipeedge.data.beginnings import TOKEN_CHARACTERS, first_words, words_for
from pipeedge.data.companions import companion_file, hub_reachable
from pipeedge.data.items import Item, Items, OthersItems
from pipeedge.data.labels import NO_CLASSES, Classes
from pipeedge.data.sentence_rules import SentenceRules, read_rules
from pipeedge.data.tables import LINES_SUFFIX, TABLE_SUFFIXES, BadRow, TableRow, lines_of, rows_of
from pipeedge.data.text_files import input_name, read_text
from pipeedge.data.tokenizer_files import (
    DECODER_TOKENIZER_FILES,
    TOKENIZER_FILES,
    has_gguf_tokenizer,
    read_backend,
)
from pipeedge.models.outline import Outline
from pipeedge.request.files import STANDARD_INPUT

__all__ = [
    "Sentence",
    "TokenItems",
    "Tokenizer",
    "TooLongError",
    "check_sentence",
    "checked_row",
    "find_tokenizer",
    "find_tokenizer_file",
    "open_tokenizer",
    "read_sentences",
]

CHUNK = 4096
"""Largest number of sentences tokenised in one call."""
_CHUNK_CHARACTERS = 1 << 18
"""Largest number of characters tokenised in one call, unless one sentence has more: a tokenizer takes nearly
200 bytes for each.
"""
_FEW_CHARACTERS = 8
"""Number of characters for each token that the model takes, of a pair that need not be cut early."""
_MOST_CHARACTERS = 1 << 20
"""Largest number of characters tokenised of a sentence whose words are longer."""

log = logging.getLogger(__name__)


class TooLongError(InputError):
    """A sentence has more tokens than the model takes, and was not to be truncated."""


@dataclass(frozen=True)
class Sentence:
    """A sentence or a pair of sentences, its origin, and its class if known."""

    text: str
    source: str
    label: int | None = None
    pair: str | None = None
    """Second sentence of a pair, or None."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The one sentence, or both."""
        return (self.text,) if self.pair is None else (self.text, self.pair)


def check_sentence(sentence: Sentence) -> None:
    """Check the text of a sentence or pair, wherever it comes from.

    Raises:
        InputError: A sentence is empty, or not valid Unicode.
    """
    filled = [bool(one.strip()) for one in sentence.texts]
    if not all(filled):
        what = "the sentence"
        if sentence.pair is not None:
            what = f"the {'second' if filled[0] else 'first'} sentence of this pair"
        raise InputError(f"{sentence.source}: {what} is empty")
    if not all(map(_is_unicode, sentence.texts)):
        raise InputError(f"{sentence.source}: the sentence is not valid Unicode: it has a surrogate")


def checked_row(sentence: Sentence) -> Sentence | BadRow:
    """Return ``sentence``, or why it cannot be used."""
    try:
        check_sentence(sentence)
    except InputError as error:
        return BadRow(sentence.source, error)
    return sentence


def _is_unicode(text: str) -> bool:
    """Return whether ``text`` can be encoded: half of a surrogate pair cannot, and tokenizers fail on it."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class Encoded:
    """A sentence or pair as token ids."""

    ids: array[int]
    """Token ids, including the special tokens around and between the sentences."""
    types: bytes | None
    """Token types, or None if all are zero."""


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
    """The sentences as text; those of a pair with a tab between."""
    types: tuple[bytes | None, ...] = ()
    """Token types of each sentence, None where all are zero; empty if all are for all sentences."""

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

    @property
    def token_counts(self) -> Mapping[int, int]:
        """How many sentences there are of each number of tokens."""
        return Counter(map(len, self.ids))

    def __len__(self) -> int:
        return len(self.ids)

    def source(self, index: int) -> str:
        """Return where sentence ``index`` comes from."""
        return self.sources[index]

    def read(self, index: int) -> Item:
        """Return sentence ``index`` as int64 tensors [tokens]: its ids, a mask of ones, and its types."""
        ids = torch.tensor(list(self.ids[index]), dtype=torch.int64)
        types = self.types[index] if self.types else None
        tensors = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "token_type_ids": torch.zeros_like(ids) if types is None else torch.tensor(list(types)),
        }
        payload = tuple(tensors[name] for name in self.input_names)
        return Item(payload, self.labels[index], self.sources[index], self.texts[index])


@dataclass(frozen=True)
class RowItems(OthersItems):
    """Rows of which some cannot be used; each keeps its number."""

    rows: tuple[int | BadRow, ...]
    """Place of each row among the items, or why it is not there."""

    def __len__(self) -> int:
        return len(self.rows)

    def source(self, index: int) -> str:
        """Return where row ``index`` comes from."""
        row = self.rows[index]
        return row.source if isinstance(row, BadRow) else self.items.source(row)

    def read(self, index: int) -> Item:
        """Return row ``index``. Raises ``InputError`` if it cannot be used."""
        row = self.rows[index]
        if isinstance(row, BadRow):
            raise row.error
        return self.items.read(row)


@dataclass(frozen=True)
class Tokenizer:
    """A transformers tokenizer, and the limits of the model it serves."""

    backend: Any
    """Tokenizer of transformers."""
    path: Path
    """File that it was read from."""
    model: Outline
    rules: SentenceRules = field(default_factory=SentenceRules)
    refused_characters: int | None = None
    """Number of characters of a sentence that must give as many tokens as the model takes, if more follow.
    Otherwise the sentence is refused; None never refuses one, however long it takes.
    """

    @property
    def most_tokens(self) -> int:
        """Number of tokens of the longest sentence or pair, special tokens included."""
        return min(self.model.config.max_positions, self.rules.most_tokens or sys.maxsize)

    def items(self, sentences: Sequence[Sentence], *, truncate: bool = True, warn: bool = True) -> TokenItems:
        """Tokenise sentences, or pairs. Those that are too long for the model are truncated.

        Of such a pair, the longer sentence loses its end first.

        Args:
            sentences: What to tokenise.
            truncate: Whether to truncate; if not, the first one that is too long is an error.
            warn: Whether to log that some were truncated.

        Raises:
            InputError: The tokenizer does not fit the model.
            TooLongError: A sentence is too long and ``truncate`` is false.
        """
        encoded = self._encode_within_limit(sentences, truncate=truncate, warn=warn)
        empty = next((place for place, one in enumerate(encoded) if not one.ids), None)
        if empty is not None:
            raise self._no_tokens(sentences[empty])
        return self._items(sentences, encoded)

    def rows(self, rows: Sequence[Sentence | BadRow]) -> Items:
        """Tokenise the rows of a file as ``items`` does; one that cannot be used keeps its number.

        Raises:
            InputError: The tokenizer does not fit the model.
        """
        encoded = iter(self._encode_within_limit([row for row in rows if isinstance(row, Sentence)]))
        places: list[int | BadRow] = []
        kept: list[tuple[Sentence, Encoded]] = []
        for row in rows:
            if isinstance(row, BadRow):
                places.append(row)
                continue
            one = next(encoded)
            if one.ids:
                places.append(len(kept))
                kept.append((row, one))
            else:
                places.append(BadRow(row.source, self._no_tokens(row)))
        items = self._items([row for row, _ in kept], [one for _, one in kept])
        return items if len(kept) == len(rows) else RowItems(items, tuple(places))

    def _no_tokens(self, sentence: Sentence) -> InputError:
        return InputError(f"{sentence.source}: {self.path} gives no token for this sentence")

    def _encode_within_limit(
        self, sentences: Sequence[Sentence], *, truncate: bool = True, warn: bool = True
    ) -> list[Encoded]:
        """Return the ids of sentences or pairs, as ``items`` truncates them."""
        limit = self.most_tokens
        # Prepare: of a very long sentence, take the beginning only, which certainly is too long as well.
        texts = [self._beginnings(sentence, limit) for sentence in sentences]
        wholes = [some == self._whole(sentence) for some, sentence in zip(texts, sentences, strict=True)]
        # Encode those that may fit.
        encoded = self._encode_at([place for place, is_whole in enumerate(wholes) if is_whole], texts)
        # Truncate the others, and those that do not fit.
        too_long = [
            place for place in range(len(texts)) if not wholes[place] or len(encoded[place].ids) > limit
        ]
        if too_long and not truncate:
            raise TooLongError(
                f"{sentences[too_long[0]].source}: more than the {count(limit, 'token')} that "
                f"{self.model.name} takes; shorten it"
            )
        if too_long and warn:
            log.warning(
                "%d of %d sentences are longer than the %d tokens of %s and are truncated; the first: %s",
                len(too_long),
                len(texts),
                limit,
                self.model.name,
                sentences[too_long[0]].source,
            )
        encoded |= self._encode_at(too_long, texts, limit)
        found = [encoded[place] for place in range(len(texts))]
        if self.model.full_length:
            found = [self._lengthened(one, limit) for one in found]
        self._check(found)
        return found

    def _encode_at(
        self, places: Sequence[int], texts: Sequence[tuple[str, ...]], limit: int | None = None
    ) -> dict[int, Encoded]:
        """Return the ids of those sentences or pairs that have these places, by place."""
        return dict(zip(places, self._encode([texts[place] for place in places], limit), strict=True))

    def _items(self, sentences: Sequence[Sentence], encoded: Sequence[Encoded]) -> TokenItems:
        return TokenItems(
            tuple(one.ids for one in encoded),
            tuple(sentence.source for sentence in sentences),
            tuple(sentence.label for sentence in sentences),
            self.model.input_names,
            tuple("\t".join(sentence.texts) for sentence in sentences),
            tuple(one.types for one in encoded) if any(one.types for one in encoded) else (),
        )

    def _lengthened(self, one: Encoded, limit: int) -> Encoded:
        """Return ``one`` padded to ``limit`` tokens, which count as tokens: the mask is true for them."""
        padding = array("i", [self.backend.pad_token_id or 0]) * (limit - len(one.ids))
        return Encoded(one.ids + padding, one.types)

    def _beginnings(self, sentence: Sentence, limit: int) -> tuple[str, ...]:
        """Return as much of a sentence or pair as decides its first ``limit`` tokens.

        How much of each sentence of a pair is kept depends on which is longer, so less of them is cut off.
        """
        texts = self._whole(sentence)
        if self.backend.truncation_side != "right":  # the end decides
            return texts
        least = limit * TOKEN_CHARACTERS
        if sentence.pair is None:
            texts = (self._words_for(texts[0], limit),)
        else:
            least = max(least, _CHUNK_CHARACTERS // 2)
            texts = self._cut_longer(texts, limit)
        return tuple(self._beginning(text, limit, least, sentence.source) for text in texts)

    def _cut_longer(self, texts: tuple[str, ...], limit: int) -> tuple[str, ...]:
        """Return a pair without the end of the longer sentence, if it has more tokens even so."""
        longer = max(range(len(texts)), key=lambda place: len(texts[place]))
        other = texts[1 - longer]
        if len(texts[longer]) <= limit * _FEW_CHARACTERS or len(other) > limit * _FEW_CHARACTERS:
            return texts
        tokens = max(limit, len(self._encode([(other,)])[0].ids) + 1)
        shorter = self._words_for(texts[longer], tokens)
        return (other, shorter) if longer else (shorter, other)

    def _words_for(self, text: str, tokens: int) -> str:
        """Return so many words of ``text`` that they certainly give ``tokens`` tokens; else all of it."""
        return text if self._has_phrases else words_for(text, tokens)

    @cached_property
    def _has_phrases(self) -> bool:
        """Whether several words may be one token, because one that was added to the vocabulary has blanks."""
        return any(len(token.split()) > 1 for token in self.backend.get_added_vocab())

    def _whole(self, sentence: Sentence) -> tuple[str, ...]:
        return tuple(map(self.rules.apply, sentence.texts))

    def _beginning(self, text: str, limit: int, characters: int, source: str) -> str:
        """Return ``characters`` characters of ``text``, or more if they do not give ``limit`` tokens.

        Raises:
            InputError: More than ``refused_characters`` do not.
        """
        most = self.refused_characters
        beginning = first_words(text, characters)
        while len(beginning) < len(text) and (most is not None or characters < _MOST_CHARACTERS):
            if len(self._encode([(beginning,)])[0].ids) >= limit:
                break
            if most is not None and characters >= most:
                raise InputError(
                    f"{source}: its first {characters:,} characters give fewer than the {limit} tokens that "
                    f"{self.model.name} takes, and more follow: shorten it"
                )
            characters = min(8 * characters, _MOST_CHARACTERS if most is None else most)
            beginning = first_words(text, characters)
        return beginning

    def _encode(self, texts: Sequence[tuple[str, ...]], limit: int | None = None) -> list[Encoded]:
        """Return the ids of each sentence or pair, truncated to ``limit``, compactly: they may be many."""
        typed = "token_type_ids" in self.model.input_names
        encoded: list[Encoded] = []
        for some in _chunks(texts):
            # verbose=False, because this class gives its own warning about long sentences.
            chunk = self.backend(
                *(list(column) for column in zip(*some, strict=True)),
                truncation=limit is not None,
                max_length=limit,
                return_token_type_ids=typed,
                verbose=False,
            )
            ids = [array("i", each) for each in chunk["input_ids"]]
            types = [bytes(each) if any(each) else None for each in chunk["token_type_ids"]] if typed else ()
            encoded += map(Encoded, ids, types or [None] * len(ids))
        return encoded

    def _check(self, encoded: Sequence[Encoded]) -> None:
        """Check that ids and types are in the model's range.

        Raises:
            InputError: They are not.
        """
        config = self.model.config
        highest = max((max(one.ids) for one in encoded if one.ids), default=0)
        if highest >= config.vocab:
            raise InputError(
                f"{self.path} has token ids up to {highest}, but {self.model.name} has a vocabulary of "
                f"{config.vocab}: it is the tokenizer of another model"
            )
        highest = max((max(one.types) for one in encoded if one.types), default=0)
        if highest and highest >= config.type_vocab:
            raise InputError(
                f"{self.path} has token types up to {highest}, but {self.model.name} has "
                f"{count(config.type_vocab, 'type')}: it is the tokenizer of another model"
            )


def _chunks(texts: Sequence[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    """Yield sentences or pairs in parts that a tokenizer can process in one call."""
    part: list[tuple[str, ...]] = []
    characters = 0
    for one in texts:
        more = sum(map(len, one))
        if part and (len(part) == CHUNK or characters + more > _CHUNK_CHARACTERS):
            yield part
            part, characters = [], 0
        part.append(one)
        characters += more
    if part:
        yield part


def find_tokenizer(model: Outline, directories: Iterable[Path]) -> Tokenizer | None:
    """Return the tokenizer in the first of ``directories`` that has one, or in the hub's local cache."""
    path = companion_file(model.name, directories, TOKENIZER_FILES)
    return None if path is None else read_tokenizer(path, model)


def open_tokenizer(model: Outline, directories: Iterable[Path]) -> Tokenizer:
    """Return the model's tokenizer from this machine, else from the hub.

    Raises:
        InputError: There is none. The message says where to put one.
    """
    return read_tokenizer(find_tokenizer_file(model, directories), model)


def find_tokenizer_file(model: Outline, directories: Iterable[Path]) -> Path:
    """Return a file of the model's tokenizer on this machine, or fetch it from the hub.

    Raises:
        InputError: There is none. The message says where to put one.
    """
    directories = tuple(directories)
    if model.is_file and has_gguf_tokenizer(model.default_weights):
        return model.default_weights
    names = DECODER_TOKENIZER_FILES if model.output_kind == "text" else TOKENIZER_FILES
    found = companion_file(model.name, directories, names)
    if found is None and model.directory is None:
        found = download_tokenizer(model.name)
    if found is not None:
        return found
    where = " or ".join(map(str, directories)) or "a model directory and name that with -m"
    if model.output_kind == "text":
        raise InputError(
            f"no vocabulary for {model.name}, so token ids cannot become text: put its tokenizer.json into "
            f"{where}"
        )
    raise InputError(
        f"no vocabulary for {model.name}, so sentences cannot become token ids: put its tokenizer.json or "
        f"vocab.txt into {where}, or give token ids as .npz"
    )


def read_tokenizer(path: Path, model: Outline) -> Tokenizer:
    """Read the tokenizer in the directory of ``path``, one of ``TOKENIZER_FILES``."""
    return Tokenizer(read_backend(path), path, model, read_rules(path.parent))


def download_tokenizer(model_name: str) -> Path | None:
    """Fetch the tokenizer of ``model_name`` from the hub into its local cache; return None if that fails."""
    if not hub_reachable():
        return None
    import_postponed()
    from transformers import AutoTokenizer

    log.warning("fetching the tokenizer of %s from the hub", model_name)
    try:
        AutoTokenizer.from_pretrained(model_name)
    except Exception as error:  # network, hub and file each have their own exceptions
        log.warning("the tokenizer of %s cannot be fetched (%s)", model_name, type(error).__name__)
        return None
    return companion_file(model_name, (), TOKENIZER_FILES)


def read_sentences(
    path: Path, columns: Sequence[str] = (), classes: Classes = NO_CLASSES
) -> list[Sentence | BadRow]:
    """Read the sentences of a file, one per line, or sentences or pairs from a table.

    Lines end with LF or CR LF. Other characters that Unicode counts as line ends are part of a sentence.
    Blank lines are left out; every other row has its place, even if it cannot be used.

    Args:
        path: Path of the file, or ``STANDARD_INPUT``, which is a table if ``columns`` are given.
        columns: Columns of a table or keys of a ``.jsonl``, as for ``rows_of``.
        classes: Classes that labels stand for.

    Raises:
        InputError: The file cannot be read as UTF-8 text, has no such column, or no sentence.
    """
    name, text = input_name(path), read_text(path)
    rows = [
        row if isinstance(row, BadRow) else _sentence(row, classes)
        for row in _rows(path, text, name, columns)
    ]
    if not rows:
        raise InputError(f"{name}: no sentence in this file (expected one a line)")
    sentences = [row for row in rows if isinstance(row, Sentence)]
    other = next((one for one in sentences if len(one.texts) != len(sentences[0].texts)), None)
    if other is not None:
        first = sentences[0]
        single, pair = (first, other) if first.pair is None else (other, first)
        raise InputError(
            f"{single.source}: one sentence, but {pair.source} has a pair; give them in two runs"
        )
    return rows


def _sentence(row: TableRow, classes: Classes) -> Sentence | BadRow:
    try:
        label = classes.read(row.label, is_text=row.label_is_text)
    except ValueError as error:
        return BadRow(row.source, InputError(f"{row.source}: {error}"))
    return checked_row(Sentence(row.texts[0], row.source, label, *row.texts[1:]))


def _rows(path: Path, text: str, name: str, columns: Sequence[str]) -> Iterator[TableRow | BadRow]:
    suffix = path.suffix.lower()
    if suffix == LINES_SUFFIX:
        yield from lines_of(text, name, columns)
    elif suffix in TABLE_SUFFIXES or (path == STANDARD_INPUT and columns):
        tabs = suffix == ".tsv" or (not suffix and "\t" in text.partition("\n")[0])
        yield from rows_of(text, name, columns, tabs=tabs)
    else:
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield TableRow(f"{name}:{number}", (line.strip(),))
