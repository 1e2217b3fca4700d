"""Findings: what was looked at, what is the case, what to do. Pure."""

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
"""A finding travels as one value of a message, which is short."""


class Level(IntEnum):
    """How bad it is."""

    OK = 0
    WARNING = 1
    PROBLEM = 2


@dataclass(frozen=True)
class Finding:
    """One line for the user."""

    level: Level
    check: str
    """What was looked at, in a word."""
    what: str
    """What is the case, and for a warning or problem what to do."""
    code: int = EXIT_OK
    """The exit status of the run that would fail of it; 0 for all but problems."""
    rank: int | None = None
    """Whose finding it is; None: of the whole."""

    def line(self) -> str:
        """As it is printed."""
        whose = "" if self.rank is None else f"rank {self.rank}: "
        return f"{self.level.name.lower():<8} {self.check:<9} {whose}{self.what}"

    def of(self, rank: int) -> Finding:
        """The same, as the finding of ``rank``."""
        return replace(self, rank=rank)

    def to_text(self) -> str:
        """As one value of a message."""
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
    """All is well."""
    return Finding(Level.OK, check, what)


def warning(check: str, what: str) -> Finding:
    """The run would work, perhaps not as it is meant."""
    return Finding(Level.WARNING, check, what)


def problem(check: str, what: str, code: int = EXIT_REQUEST) -> Finding:
    """The run would fail."""
    return Finding(Level.PROBLEM, check, what, code)


def problem_from(check: str, error: BaseException) -> Finding:
    """What the run would fail with; the messages of this package say what to do."""
    return problem(check, one_line(error), exit_code(error))


_URGENCY = (EXIT_REQUEST, EXIT_INFEASIBLE, EXIT_PEER, EXIT_FAULT)


def exit_status(findings: Iterable[Finding]) -> int:
    """That of the problem to solve first: a wrong request before no schedule before a missing peer,
    because a rank with a wrong request is missing to the others. 0 without a problem."""
    codes = {finding.code for finding in findings if finding.level is Level.PROBLEM}
    return next((code for code in _URGENCY if code in codes), EXIT_OK)
