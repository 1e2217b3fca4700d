"""Findings: what was checked, what was found, what to do. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from enum import IntEnum

from pipeedge.base import fields
from pipeedge.base.errors import (
    EXIT_FAULT,
    EXIT_INFEASIBLE,
    EXIT_OK,
    EXIT_PEER,
    EXIT_REQUEST,
    exit_code,
    one_line,
)

__all__ = ["Finding", "Level", "exit_status", "ok", "problem", "problem_from", "warning"]

_EXIT_CODES = 256
_MAX_TEXT = 800
"""Maximum length of a finding's text, because a finding travels as one value of a message."""


class Level(IntEnum):
    """Severity of a finding."""

    OK = 0
    WARNING = 1
    PROBLEM = 2


@dataclass(frozen=True)
class Finding:
    """One line for the user."""

    level: Level
    check: str
    """Subject of the check, in one word."""
    what: str
    """Description of what was found and, for a warning or problem, of what to do."""
    code: int = EXIT_OK
    """Exit status of the run that would fail because of it; 0 except for problems."""
    rank: int | None = None
    """Rank that the finding is about, or None if it is about the whole run."""

    def line(self) -> str:
        """Return the finding as it is printed."""
        whose = "" if self.rank is None else f"rank {self.rank}: "
        return f"{self.level.name.lower():<8} {self.check:<9} {whose}{self.what}"

    def of(self, rank: int) -> Finding:
        """Return a copy that is about ``rank``."""
        return replace(self, rank=rank)

    def to_text(self) -> str:
        """Return the finding as one value of a message."""
        return json.dumps(asdict(replace(self, what=self.what[:_MAX_TEXT])))

    @classmethod
    def from_text(cls, text: str) -> Finding:
        """Parse ``to_text``. Raises one of ``fields.MALFORMED`` if it is malformed."""
        body = fields.parse(text)
        return cls(
            Level(body["level"]),
            fields.text(body["check"]),
            fields.text(body["what"]),
            fields.whole_number(body["code"], below=_EXIT_CODES),
            None if body["rank"] is None else fields.whole_number(body["rank"]),
        )


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
