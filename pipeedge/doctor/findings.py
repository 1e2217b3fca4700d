"""Findings: what was checked, what was found, what to do. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

from pipeedge.base.errors import (
    EXIT_FAULT,
    EXIT_INFEASIBLE,
    EXIT_OK,
    EXIT_PEER,
    EXIT_REQUEST,
    exit_code,
    one_line,
)
from pipeedge.base.fields import Count, ExitCode, Line, Name
from pipeedge.base.wording import printable

__all__ = ["Finding", "Level", "exit_status", "ok", "problem", "problem_from", "warning"]

_MAX_TEXT = 800
"""Maximum length of a finding's text in a message, because one message holds all findings of a rank."""


class Level(IntEnum):
    """Severity of a finding."""

    OK = 0
    WARNING = 1
    PROBLEM = 2


@dataclass(frozen=True)
class Finding:
    """One line for the user."""

    level: Level
    check: Name
    """Subject of the check, in one word."""
    what: Line
    """Description of what was found and, for a warning or problem, of what to do."""
    code: ExitCode = EXIT_OK
    """Exit status of the run that would fail because of it; 0 except for problems."""
    rank: Count | None = None
    """Rank that the finding is about, or None if it is about the whole run."""

    def line(self) -> str:
        """Return the finding as it is printed."""
        whose = "" if self.rank is None else f"rank {self.rank}: "
        return f"{self.level.name.lower():<8} {self.check:<9} {whose}{self.what}"

    def of(self, rank: int) -> Finding:
        """Return a copy that is about ``rank``."""
        return replace(self, rank=rank)

    def as_sent(self) -> Finding:
        """Return a copy as it is sent to the other ranks: printable, and cut to a limited length."""
        return replace(self, what=printable(self.what)[:_MAX_TEXT])


def ok(check: str, what: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(Level.OK, check, what)


def warning(check: str, what: str) -> Finding:
    """Return a finding that the run would work, but perhaps not as intended."""
    return Finding(Level.WARNING, check, what)


def problem(check: str, what: str, code: int = EXIT_REQUEST) -> Finding:
    """Return a finding that the run would fail with exit status ``code``."""
    return Finding(Level.PROBLEM, check, what, code)


def problem_from(check: str, error: BaseException) -> Finding:
    """Return the finding that the run would fail with ``error``, whose message says what to do."""
    return problem(check, one_line(error), exit_code(error))


_URGENCY = (EXIT_REQUEST, EXIT_INFEASIBLE, EXIT_PEER, EXIT_FAULT)


def exit_status(findings: Iterable[Finding]) -> int:
    """Return the exit status of the problem to solve first, or 0 without a problem.

    A wrong request comes before a missing schedule, and that before a missing peer, because the other ranks
    see a rank with a wrong request as missing.
    """
    codes = {finding.code for finding in findings if finding.level is Level.PROBLEM}
    return next((code for code in _URGENCY if code in codes), EXIT_OK)
