"""Test that tables fit the terminal: columns are left out, and nothing is wrapped or silently missing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipeedge.base.console import Column, print_table

HOSTS = ["kitchen-raspberry-pi-1", "kitchen-raspberry-pi-2"]
COLUMNS = [
    Column("stage", ["0", "1"]),
    Column("host", HOSTS, left=True, names=True, rank=1),
    Column("layers", ["1-12", "13-48"], left=True),
    Column("compute", ["123.4ms", "1,234.56s"]),
    Column("nothing", ["", ""], rank=9),
    Column("sent", ["4.8MB", "-"], rank=3),
    Column("wait", ["12.3ms", "0.1ms"], rank=2),
]


def printed(width: int, columns: list[Column]) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    print_table(console, columns)
    assert isinstance(console.file, io.StringIO)
    return [line.strip() for line in console.file.getvalue().splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("width", "titles", "left_out"),
    [
        (120, "stage host layers compute sent wait", []),
        (45, "stage host layers compute sent wait", []),
        (40, "stage host layers compute wait", ["no room for: sent"]),
        (32, "stage host layers compute", ["no room for: wait, sent"]),
        (25, "stage layers compute", ["no room for: host, wait, sent"]),
    ],
)
def test_columns_are_left_out_in_order(width: int, titles: str, left_out: list[str]) -> None:
    lines = printed(width, COLUMNS)
    assert lines[0].split() == titles.split()
    assert all(len(line) <= width for line in lines[:4])
    assert lines[3].split()[-1 - ("wait" in titles) - ("sent" in titles)] == "1,234.56s"
    assert lines[4:] == left_out


def test_what_the_table_is_about_stays_in_any_case() -> None:
    lines = printed(10, COLUMNS)
    assert lines[-1] == "no room for: host, wait, sent"


def test_names_use_the_room_that_is_left() -> None:
    assert HOSTS[0] in printed(120, COLUMNS)[2]
    short = [line.split()[1] for line in printed(50, COLUMNS)[2:4]]
    assert len(set(short)) == 2
    assert all(6 <= len(name) < len(HOSTS[0]) for name in short)


def test_names_are_printed_as_they_are() -> None:
    assert "[red]pi[/red]" in printed(80, [Column("host", ["[red]pi[/red]"], left=True, names=True)])[2]
