"""Test standard output: its width, and what happens if its reader goes away."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from pipeedge.base.console import StandardOutput
from pipeedge.base.errors import PipeEdgeError
from pipeedge.base.streams import print_notice, print_result, say


@pytest.mark.parametrize(("columns", "width"), [(None, 120), ("75", 75), ("200", 200)])
def test_output_to_a_file_is_wide_enough_for_figures(
    monkeypatch: pytest.MonkeyPatch, columns: str | None, width: int
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "__stdout__", None)  # the terminal of whoever runs the tests
    assert StandardOutput().width == width


def test_file_names_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    StandardOutput().print("report  a\x1b[2J.html\nand more", highlight=False, markup=False)
    say("runtime.py", "a\x1b[2J.csv: there already")
    out, err = capsys.readouterr()
    assert out == "report  a\\x1b[2J.html\nand more\n"
    assert err == "runtime.py: a\\x1b[2J.csv: there already\n"


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")


def test_unprintable_notice_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (FullDisk(), closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        say("runtime.py", "a notice")


def test_only_unprinted_results_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", FullDisk())
    print_notice("1 of 2 items")
    StandardOutput().print("1 of 2 items")
    for show in (print_result, StandardOutput(result=True).print):
        with pytest.raises(PipeEdgeError, match="cannot be written: no space left on device"):
            show("a schedule")
