"""Sentences, and pairs of them, from columns of a ``.csv`` or ``.tsv``, or from lines of a ``.jsonl``.

    .csv .tsv   a sentence or pair in each row; the first row has the names of the columns
    .jsonl      {"text": "..."}, {"text": "...", "text_pair": "..."} or ["...", "..."] in each line; an object
                may have a "label"

Columns and keys are found by name: those the user gives, else usual ones.
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

__all__ = ["LINES_SUFFIX", "TABLE_SUFFIXES", "TableRow", "lines_of", "rows_of"]

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

    line: int
    """Number of its first line in the file, from 1."""
    texts: tuple[str, ...]
    """One sentence, or two, without blanks around them."""
    label: int | None = None


def rows_of(text: str, name: str, columns: Sequence[str], *, tabs: bool) -> Iterator[TableRow]:
    """Yield the rows of a table, without those that are blank in all columns asked for.

    Args:
        text: The table. Its first row has the names of the columns, unless ``columns`` are numbers.
        name: Name of the table, for messages.
        columns: Column of the sentences, and that of the second sentences if they are pairs: names, or
            numbers from 1 in a table without names. Empty: usual ones, or the only one.
        tabs: Whether tabs separate the columns, and quotes are ordinary characters; otherwise commas or
            semicolons separate them.

    Raises:
        InputError: There is no such column, or a row does not have it.
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
    try:
        if not numbered:
            places = _places(next(rows, []), name, columns)
            line = rows.line_num + 1
        for row in rows:
            if row:
                short = next((place for place in places if place >= len(row)), None)
                if short is not None:
                    raise InputError(f"{name}:{line}: this row has no column {short + 1}")
                yield from _filled(name, TableRow(line, tuple(row[place].strip() for place in places)))
            line = rows.line_num + 1
    except csv.Error as error:
        raise InputError(f"{name}:{line}: cannot be read as a table ({error})") from error


def lines_of(text: str, name: str, columns: Sequence[str]) -> Iterator[TableRow]:
    """Yield the sentences or pairs of a ``.jsonl`` file, without blank ones.

    Args:
        text: The file.
        name: Name of the file, for messages.
        columns: Key of the sentence, and that of the second if they are pairs. Empty: usual ones.

    Raises:
        InputError: A line is not JSON, or is not an object with these keys, nor two sentences in a list.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: is not JSON ({error})") from None
        if isinstance(value, list) and not columns:
            cells, label = value, None
            if len(cells) != 2:
                raise InputError(f"{where}: a list of {count(len(cells), 'value')}, not a pair of sentences")
        elif isinstance(value, dict):
            keys = columns or _usual_keys(value, where)
            missing = next((key for key in keys if key not in value), None)
            if missing is not None:
                raise InputError(
                    f"{where}: has no {printable(missing)}{hint(missing, list(value))}; {_has(value)}"
                )
            cells, label = [value[key] for key in keys], _label(value, where)
        else:
            raise InputError(f"{where}: is neither an object nor a pair of sentences")
        for cell in cells:
            if not isinstance(cell, str):
                raise InputError(f"{where}: {excerpt(json.dumps(cell))} is not a sentence")
        yield from _filled(name, TableRow(number, tuple(cell.strip() for cell in cells), label))


def _filled(name: str, row: TableRow) -> Iterator[TableRow]:
    """Yield ``row`` unless it is blank.

    Raises:
        InputError: Only one sentence of a pair is blank.
    """
    if all(row.texts):
        yield row
    elif any(row.texts):
        which = "second" if row.texts[0] else "first"
        raise InputError(f"{name}:{row.line}: the {which} sentence of this pair is empty")


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


def _label(value: Mapping[str, Any], where: str) -> int | None:
    """Return the class of a line, None if it has none or a negative one, as data sets mark withheld ones."""
    label = value.get(_LABEL)
    if label is None:
        return None
    if isinstance(label, bool) or not isinstance(label, int):
        raise InputError(f"{where}: label is {excerpt(json.dumps(label))}, not a class number")
    return label if label >= 0 else None
