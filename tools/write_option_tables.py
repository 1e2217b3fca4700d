#!/usr/bin/env python3
"""Write the tables of options in docs/ from the declarations of the options.

    python tools/write_option_tables.py

A table stands between ``<!-- options: NAME -->`` and ``<!-- end -->``; everything else on a page stays.
``tests/unit/test_declared.py`` checks that the pages are up to date.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from pipeedge.request.declared import ObeyedBy, Option
from pipeedge.request.options import SECTIONS

DOCS = Path(__file__).resolve().parents[1] / "docs"
_BLOCK = re.compile(r"(<!-- options: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_ON_ANOTHER_RANK = {
    ObeyedBy.ALL: "the same value",
    ObeyedBy.RANK_0: "the same value as there, or none",
    ObeyedBy.DATA_RANK: "the same value as there, or none",
    ObeyedBy.EACH: "any value",
}


def group_table() -> Iterator[str]:
    """Yield the lines of the table of all options of the runtime, by group."""
    yield "| group | options | chapter |"
    yield "|---|---|---|"
    for section in SECTIONS:
        topic = section.topic or section.title.partition(" (")[0]
        yield f"| {topic} | {_names(section.options)} | {section.chapter} |"


def rank_table() -> Iterator[str]:
    """Yield the lines of the table of who obeys an option of the runtime."""
    yield "| obeyed by | options | on another rank |"
    yield "|---|---|---|"
    for who, elsewhere in _ON_ANOTHER_RANK.items():
        options = (one for section in SECTIONS for one in section.options if one.obeyed_by is who)
        yield f"| {who.value} | {_names(options)} | {elsewhere} |"


TABLES: Mapping[str, Callable[[], Iterator[str]]] = {"by group": group_table, "by rank": rank_table}


def with_tables(page: str) -> str:
    """Return the text of a page with its tables of options written anew."""

    def write(match: re.Match[str]) -> str:
        return match[1] + "".join(f"{line}\n" for line in TABLES[match[2]]()) + match[3]

    return _BLOCK.sub(write, page)


def _names(options: Iterable[Option]) -> str:
    return " ".join(f"`{'/'.join(one.flags)}`" for one in options)


def main() -> None:
    """Write the tables of every page."""
    for path in DOCS.glob("*.md"):
        page = path.read_text("utf-8")
        if (written := with_tables(page)) != page:
            path.write_text(written, "utf-8")
            print(path)


if __name__ == "__main__":
    main()
