"""Sentences, and pairs of them, from columns of a ``.csv`` or ``.tsv``, or from lines of a ``.jsonl``.

    .csv .tsv   a sentence or pair in each row; the first row has the names of the columns
    .jsonl      {"text": "..."}, {"text": "...", "text_pair": "..."} or ["...", "..."] in each line

Columns and keys are found by name: those the user gives, else usual ones. A column or key ``label`` has the
true class. A blank line is no row. A row that cannot be used is passed on as a value, so that the others keep
their numbers.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeedge.base.errors import InputError
from pipeedge.base.wording import count, excerpt, hint, printable

__all__ = ["LINES_SUFFIX", "TABLE_SUFFIXES", "BadRow", "TableRow", "lines_of", "rows_of"]

TABLE_SUFFIXES = (".csv", ".tsv")
LINES_SUFFIX = ".jsonl"
_USUAL = ("text", "sentence")
_USUAL_PAIRS = (
    ("text", "text_pair"),
    ("sentence1", "sentence2"),
    ("query", "passage"),
    ("query", "document"),
    ("question", "answer"),
    ("premise", "hypothesis"),
)
_LABEL = "label"
_DELIMITERS = (",", ";", "\t")


@dataclass(frozen=True)
class TableRow:
    """A sentence or a pair of sentences, as a file has it."""

    source: str
    """Name of the file, and number of the row's first line in it, from 1."""
    texts: tuple[str, ...]
    """One sentence, or two, without blanks around them."""
    label: object = None
    """Value of its label: any of JSON's, or the text of a cell."""
    label_is_text: bool = False
    """Whether the label is the text of a cell, which may be a number or a name."""


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, and why."""

    source: str
    """Name of the file, and number of the row's first line in it, from 1."""
    error: InputError


def rows_of(text: str, name: str, columns: Sequence[str], *, tabs: bool) -> Iterator[TableRow | BadRow]:
    """Yield the rows of a table.

    Args:
        text: The table. Its first row has the names of the columns, unless ``columns`` are numbers.
        name: Name of the table, for messages.
        columns: Column of the sentences, and that of the second sentences if they are pairs: names, or
            numbers from 1 in a table without names. Empty: usual ones, or the only one.
        tabs: Whether tabs separate the columns, and quotes are ordinary characters; otherwise commas or
            semicolons separate them.

    Raises:
        InputError: There is no such column, or the table cannot be read.
    """
    header = text.partition("\n")[0]
    delimiter = "\t" if tabs else max(_DELIMITERS, key=header.count)
    # Rows end as lines do, but quoted cells may contain line breaks.
    stream = io.StringIO(text, newline="")
    if tabs:
        rows = csv.reader(stream, delimiter=delimiter, quoting=csv.QUOTE_NONE)
    else:
        rows = csv.reader(stream, delimiter=delimiter)
    numbered = all(column.isdecimal() for column in columns) and bool(columns)
    places = [int(column) - 1 for column in columns] if numbered else []
    if -1 in places:
        option = "--text-column" if places[0] < 0 else "--text-pair-column"
        raise InputError(f"{option} 0: columns are counted from 1")
    line = 1
    label_place: int | None = None
    try:
        if not numbered:
            names = next(rows, [])
            places, label_place = _places(names, name, columns), _label_place(names, name)
            if label_place in places:
                label_place = None
            line = rows.line_num + 1
        for row in rows:
            source = f"{name}:{line}"
            short = next((place for place in places if place >= len(row)), None)
            if row and short is not None:
                yield BadRow(source, InputError(f"{source}: this row has no column {short + 1}"))
            elif row:
                label = row[label_place] if label_place is not None and label_place < len(row) else None
                yield TableRow(source, tuple(row[place].strip() for place in places), label, True)
            line = rows.line_num + 1
    except csv.Error as error:
        raise InputError(f"{name}:{line}: cannot be read as a table ({error})") from error


def lines_of(text: str, name: str, columns: Sequence[str]) -> Iterator[TableRow | BadRow]:
    """Yield the sentences or pairs of a ``.jsonl`` file.

    Args:
        text: The file.
        name: Name of the file, for messages.
        columns: Key of the sentence, and that of the second if they are pairs. Empty: usual ones.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            source = f"{name}:{number}"
            try:
                yield _line(line, source, columns)
            except InputError as error:
                yield BadRow(source, error)


def _line(line: str, source: str, columns: Sequence[str]) -> TableRow:
    """Return the row that a line of a ``.jsonl`` file is.

    Raises:
        InputError: It is not JSON, or neither an object with these keys nor two sentences in a list.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source}: is not JSON ({error})") from None
    label = None
    if isinstance(value, list) and not columns:
        cells = value
        if len(cells) != 2:
            raise InputError(f"{source}: a list of {count(len(cells), 'value')}, not a pair of sentences")
    elif isinstance(value, dict):
        keys = columns or _usual_keys(value, source)
        missing = next((key for key in keys if key not in value), None)
        if missing is not None:
            raise InputError(
                f"{source}: has no {printable(missing)}{hint(missing, list(value))}; {_has(value)}"
            )
        cells = [value[key] for key in keys]
        label = None if _LABEL in keys else value.get(_LABEL)
    else:
        raise InputError(f"{source}: is neither an object nor a pair of sentences")
    for cell in cells:
        if not isinstance(cell, str):
            raise InputError(f"{source}: {excerpt(json.dumps(cell))} is not a sentence")
    return TableRow(source, tuple(cell.strip() for cell in cells), label)


def _places(header: Sequence[str], name: str, columns: Sequence[str]) -> list[int]:
    names = [cell.strip() for cell in header]
    for column, option in zip(columns, ("--text-column", "--text-pair-column"), strict=False):
        if column not in names:
            raise InputError(
                f"{name}: has no column {printable(column)}{hint(column, names)}; its columns are "
                f"{', '.join(map(printable, names))} ({option})"
            )
    if columns:
        return [names.index(column) for column in columns]
    lower = [cell.lower() for cell in names]
    for pair in _USUAL_PAIRS:
        if all(lower.count(one) == 1 for one in pair):
            return [lower.index(one) for one in pair]
    usual = [number for number, cell in enumerate(lower) if cell in _USUAL]
    if len(usual) == 1:
        return usual
    others = [number for number, cell in enumerate(lower) if cell != _LABEL]
    if len(others) == 1:
        return others
    if len(names) == 1:
        return [0]
    raise InputError(
        f"{name}: which column has the sentences? --text-column NAME, of "
        f"{', '.join(map(printable, names)) or 'none'}; a number, from 1, if the first row is no header; "
        "--text-pair-column for the second sentences of pairs"
    )


def _usual_keys(value: Mapping[str, Any], where: str) -> tuple[str, ...]:
    for keys in (*_USUAL_PAIRS, *((key,) for key in _USUAL)):
        if all(key in value for key in keys):
            return keys
    raise InputError(f"{where}: which key has the sentence? --text-column NAME; {_has(value)}")


def _has(value: Collection[str]) -> str:
    return f"its keys are {excerpt(', '.join(map(printable, value)), 200) or 'none'}"


def _label_place(header: Sequence[str], name: str) -> int | None:
    """Return the place of the column of labels, or None without one.

    Raises:
        InputError: There are several.
    """
    names = [cell.strip().lower() for cell in header]
    if names.count(_LABEL) > 1:
        raise InputError(f"{name}: has {names.count(_LABEL)} columns {_LABEL}; rename all but one")
    return names.index(_LABEL) if _LABEL in names else None
