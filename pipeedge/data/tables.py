"""Sentences from a column of a ``.csv`` or ``.tsv`` file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from pipeedge.base.errors import InputError
from pipeedge.base.wording import hint, printable

__all__ = ["TABLE_SUFFIXES", "column_of"]

TABLE_SUFFIXES = (".csv", ".tsv")
_USUAL = ("text", "sentence")
_DELIMITERS = (",", ";", "\t")


def column_of(text: str, name: str, column: str | None, *, tabs: bool) -> Iterator[tuple[int, str]]:
    """Yield the line number and cell of each row of a table, for one column.

    Args:
        text: The table. Its first row has the names of the columns, unless ``column`` is a number.
        name: Name of the table, for messages.
        column: Name of the column, or its number, from 1, in a table without names; None: the column called
            ``text`` or ``sentence``, or the only one.
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
    place = int(column) - 1 if column is not None and column.isdecimal() else None
    if place is not None and place < 0:
        raise InputError("--text-column 0: columns are counted from 1")
    line = 1
    try:
        if place is None:
            place = _place(next(rows, []), name, column)
            line = rows.line_num + 1
        for row in rows:
            if row:
                if place >= len(row):
                    raise InputError(f"{name}:{line}: this row has no column {place + 1}")
                yield line, row[place]
            line = rows.line_num + 1
    except csv.Error as error:
        raise InputError(f"{name}:{line}: cannot be read as a table ({error})") from error


def _place(header: list[str], name: str, column: str | None) -> int:
    names = [cell.strip() for cell in header]
    if column is not None:
        if column not in names:
            raise InputError(
                f"{name}: has no column {printable(column)}{hint(column, names)}; its columns are "
                f"{', '.join(map(printable, names))} (--text-column)"
            )
        return names.index(column)
    usual = [number for number, cell in enumerate(names) if cell.lower() in _USUAL]
    if len(usual) == 1:
        return usual[0]
    if len(names) == 1:
        return 0
    raise InputError(
        f"{name}: which column has the sentences? --text-column NAME, of "
        f"{', '.join(map(printable, names)) or 'none'}; a number, from 1, if the first row is no header"
    )
