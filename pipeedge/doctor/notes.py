"""The findings of an examination, printed as they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeedge.base.errors import PipeEdgeError
from pipeedge.doctor.findings import Finding, Level, problem_from

__all__ = ["ExaminationOver", "FindingLog"]


class ExaminationOver(Exception):  # noqa: N818 - no error: the findings say why
    """Nothing more can be found out."""


class FindingLog:
    """Findings of one rank, in the order in which they were made."""

    def __init__(self, rank: int, say: Callable[[str], None]) -> None:
        """Begin without findings.

        Args:
            rank: The rank that is examined.
            say: Called with each line for the user.
        """
        self.rank = rank
        self.say = say
        self.findings: list[Finding] = []

    def add(self, *findings: Finding, quiet: bool = False) -> None:
        """Keep findings and print them; ``quiet``: only those that are not good."""
        for finding in findings:
            self.findings.append(finding)
            if not (quiet and finding.level is Level.OK):
                self.say(finding.line())

    def add_own(self, finding: Finding) -> None:
        """Keep and print a finding about this rank."""
        self.add(finding.of(self.rank))

    @contextmanager
    def recording(self, check: str) -> Iterator[None]:
        """Record an error of the block as a problem that ``check`` found, and go on."""
        try:
            yield
        except PipeEdgeError as error:
            self.add_own(problem_from(check, error))
