"""Test that a signal ends a program at a moment when it can be ended."""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeedge.base.interrupt import interrupt, raise_interrupts

LIMIT_S = 20.0


@contextmanager
def handled(number: int, handler: signal._HANDLER) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_an_interrupt_waits_until_nothing_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be lost with a module that its importer can do without."""
    (tmp_path / "outer_one.py").write_text(
        "try:\n    import inner_one\nexcept BaseException:\n    inner_one = None\n"
    )
    (tmp_path / "inner_one.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with handled(signal.SIGINT, interrupt), pytest.raises(KeyboardInterrupt):  # noqa: PT012
        assert importlib.import_module("outer_one").inner_one is not None
        threading.Event().wait(LIMIT_S)
        pytest.fail("the interrupt is lost")


def test_an_interrupt_is_raised_at_once_where_nothing_is_imported() -> None:
    with handled(signal.SIGINT, interrupt), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_handlers_of_a_program_stay() -> None:
    """One that ignores Ctrl-C, as after ``nohup``, and one with a way of its own to end."""
    for own in (signal.SIG_IGN, lambda _number, _frame: None):
        with handled(signal.SIGINT, own):
            raise_interrupts()
            assert signal.getsignal(signal.SIGINT) is own
    with handled(signal.SIGINT, signal.default_int_handler):
        raise_interrupts()
        assert signal.getsignal(signal.SIGINT) is interrupt
