"""Test that a signal ends a program at a moment when it can be ended."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


@contextmanager
def reporting_unraisable(report: Callable[[Any], object] = sys.__unraisablehook__) -> Iterator[None]:
    """Report what finalizers raise with ``report`` alone while the body runs."""
    before, sys.unraisablehook = sys.unraisablehook, report
    try:
        yield
    finally:
        sys.unraisablehook = before


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


def test_an_interrupt_in_a_finalizer_is_raised_afterwards(capfd: pytest.CaptureFixture[str]) -> None:
    """Where Python would print it, and go on."""

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with handled(signal.SIGINT, signal.default_int_handler), reporting_unraisable():
        raise_interrupts()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            Finalized()
            threading.Event().wait(LIMIT_S)
            pytest.fail("the interrupt is lost")
    assert capfd.readouterr().err == ""


def test_other_exceptions_of_finalizers_are_reported() -> None:
    told: list[object] = []

    class Failing:
        def __del__(self) -> None:
            raise ValueError("not an interrupt")

    with handled(signal.SIGINT, signal.default_int_handler), reporting_unraisable(told.append):
        raise_interrupts()
        Failing()
    assert len(told) == 1


def test_handlers_of_a_program_stay() -> None:
    """One that ignores Ctrl-C, as after ``nohup``, and one with a way of its own to end."""
    for own in (signal.SIG_IGN, lambda _number, _frame: None):
        with handled(signal.SIGINT, own):
            raise_interrupts()
            assert signal.getsignal(signal.SIGINT) is own
    with handled(signal.SIGINT, signal.default_int_handler):
        raise_interrupts()
        assert signal.getsignal(signal.SIGINT) is interrupt
